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

    With A = Q₁R₁ and Bᵀ = Q₂R₂ the product is Q₁(R₁R₂ᵀ)Q₂ᵀ: only the small matrix in the middle is decomposed. Values are NaN
    for a head whose matrices are not finite; its vectors mean nothing.
    """
    (A, of_A), (B, of_B) = scaled_heads(A), scaled_heads(B)
    Q_left, R_left = torch.linalg.qr(A)
    Q_right, R_right = torch.linalg.qr(B.mT)
    U, values, Vh = torch.linalg.svd(R_left @ R_right.mT)
    rank = values.shape[-1]
    return Singular(Q_left @ U[..., :rank], values * of_A[:, 0] * of_B[:, 0], Q_right @ Vh.mT[..., :rank])


def scaled_heads(W: Float[Tensor, "heads rows out"]) -> tuple[Float[Tensor, "heads rows out"], Float[Tensor, "heads 1 1"]]:
    """W = factor · scaled with the largest entry of every head in [1, 2), so that no product of two overflows.

    The factor is a power of two, which rounds nothing; 1 for a head of zeros. A head that is not finite is 0, its factor NaN.
    """
    largest = W.abs().amax((-2, -1), keepdim=True)
    factor = torch.where(largest > 0, 2.0 ** largest.log2().floor(), 1.0)
    finite = largest.isfinite()
    return torch.where(finite, W / factor, 0.0), factor.masked_fill(~finite, torch.nan)
