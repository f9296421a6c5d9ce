"""What heads can see: rank and row spaces of W_QK from thin factors, and the angles between them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.models.factors import singular_factors


@dataclass(frozen=True)
class Factors:
    """Singular values of W_QK = W_Q W_Kᵀ by head, and orthonormal bases of its row spaces on either side.

    Attributes:
        singular: in falling order.
        rank: how many are not rounding.
        queries: of everything in a receiver that the scores depend on, as columns; those beyond the rank are 0.
        keys: the same of senders.
    """

    singular: Float[Tensor, "heads head"]
    rank: Int[Tensor, " heads"]
    queries: Float[Tensor, "heads dim head"]
    keys: Float[Tensor, "heads dim head"]


def factors(W_Q: Float[Tensor, "heads dim head"], W_K: Float[Tensor, "heads dim head"]) -> Factors:
    """Rank and row spaces of W_Q W_Kᵀ by its singular value decomposition, without the matrix.

    Values up to dim · eps of the largest are rounding, with eps that of the numbers the weights are kept in.
    """
    found = singular_factors(W_Q.double(), W_K.double().mT)
    kept = found.values > _rounding(W_Q) * found.values[:, :1]
    return Factors(found.values, kept.sum(1), found.left * kept[:, None], found.right * kept[:, None])


def span(W: Float[Tensor, "heads dim head"]) -> Float[Tensor, "heads dim head"]:
    """Orthonormal bases of what the columns of W span, with columns of 0 beyond the rank."""
    Q, R = torch.linalg.qr(W.double())
    U, singular, _ = torch.linalg.svd(R)
    kept = singular > _rounding(W) * singular[:, :1]
    basis: Tensor = Q @ U * kept[:, None]
    return basis


def effective_rank(singular: Float[Tensor, "heads head"]) -> Float[Tensor, " heads"]:
    """(Σσ²)²/Σσ⁴: how many directions carry W_QK, if some carry much more than others."""
    squares = singular.square()
    return squares.sum(1).square() / squares.square().sum(1)


@dataclass(frozen=True)
class Visible:
    """Orthonormal bases of all that scores depend on in receivers and in senders; ``shared`` heads each share their keys."""

    queries: Float[Tensor, "heads dim head"]
    keys: Float[Tensor, "heads dim head"]
    shared: int = 1


def visible(W_Q: Float[Tensor, "heads dim head"], W_K: Float[Tensor, "heads dim head"], bare: bool, shared: int = 1) -> Visible:
    """What heads can see.

    Scores that are nothing but x W_QK y (``bare``: no rotation, no biases, no norms of q and k) see the row spaces of W_QK.
    Otherwise rotations, biases and norms stand between W_Q and W_K, and all that the columns of each span may be seen.
    """
    if bare and shared == 1:
        found = factors(W_Q, W_K)
        return Visible(found.queries, found.keys)
    return Visible(span(W_Q), span(W_K[::shared]).repeat_interleave(shared, 0), shared)


def principal_cosines(products: Float[Tensor, "*pairs width width"]) -> Float[Tensor, "*pairs width"]:
    """Cosines of the principal angles between subspaces, the largest first, from products VᵀV' of their orthonormal bases."""
    cosines: Tensor = torch.linalg.svdvals(products).clamp(max=1)
    return cosines


def data_roots(x: Float[Tensor, "tokens dim"], bases: Float[Tensor, "heads dim width"]) -> Float[Tensor, "heads few width"]:
    """R with RᵀR = Σ_t (Vᵀx_t)(Vᵀx_t)ᵀ for every basis V: where the data lie in a subspace, as a small matrix."""
    root: Tensor = torch.linalg.qr(x @ bases, mode="r").R
    return root


def weighted_cosine(
    products: Float[Tensor, "*pairs width width"],
    root: Float[Tensor, "*pairs few width"],
    other_root: Float[Tensor, "*pairs few width"],
) -> Float[Tensor, " *pairs"]:
    """‖S^½ P P' S^½‖_* / √(tr PS · tr P'S), S = E[x xᵀ]: the mean cosine of principal angles, weighted by where the data lie.

    What Theorem 2 asks for is x_α·x_β = 0 for the parts x_α = P x and x_β = P'x of tokens, not for all directions of two
    subspaces: an angle between directions in which no token has a part is nobody's matter. Now E[x_α·x_β] = tr(S^½ P P' S^½),
    and the sum of singular values bounds it whatever the signs are. The value is 0 exactly if x_α(t)·x_β(u) = 0 for all pairs
    of tokens t and u, which is more than that every token's own parts are orthogonal, and 1 for the same subspace. For data
    that lie alike in all directions the singular values are cos θ_m themselves, and the value is their mean for subspaces of
    one width.

    Args:
        products: VᵀV' of orthonormal bases.
        root: R with RᵀR = VᵀSV, of ``data_roots``; any factor cancels.
        other_root: the same for V'.
    """
    shared = torch.linalg.svdvals(root @ products @ other_root.mT).sum(-1)
    sizes = (root.square().sum((-2, -1)) * other_root.square().sum((-2, -1))).sqrt()
    return torch.where(sizes > 0, shared / sizes, 0.0).clamp(max=1)


def _rounding(W: Tensor) -> float:
    return float(torch.finfo(W.dtype).eps * W.shape[-2])
