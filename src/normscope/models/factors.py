"""Singular vectors of a product of two thin matrices, without the product."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Singular:
    """W = U diag(σ) Vᵀ of every head, σ in falling order.

    Attributes:
        left: the columns of U.
        values: σ.
        right: the columns of V.
    """

    left: Float[Tensor, "heads dim rank"]
    values: Float[Tensor, "heads rank"]
    right: Float[Tensor, "heads out rank"]


def singular_factors(A: Float[Tensor, "heads dim rank"], B: Float[Tensor, "heads rank out"]) -> Singular:
    """The thin singular value decomposition of A B.

    With A = Q₁R₁ and Bᵀ = Q₂R₂ the product is Q₁(R₁R₂ᵀ)Q₂ᵀ: only the small matrix in the middle is decomposed.
    """
    Q_left, R_left = torch.linalg.qr(A)
    Q_right, R_right = torch.linalg.qr(B.mT)
    U, values, Vh = torch.linalg.svd(R_left @ R_right.mT)
    rank = values.shape[-1]
    return Singular(Q_left @ U[..., :rank], values, Q_right @ Vh.mT[..., :rank])
