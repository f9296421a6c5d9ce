"""Singular values and vectors of many small or thin matrices at once, as far as possible by products alone.

GPUs multiply a batch of matrices at once, but torch decomposes those wider than 32 one by one there. What measures need of most
matrices, orthonormal bases, Σσ and the largest σ, follows from products and Cholesky factors.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_SQUARINGS = 30  # which leave a relative error of 1e-9 at most: eigenvalues that near are not separated
_LEAST = 1e-8  # of the largest singular value: smaller ones count less than they are in a sum
_MARGIN = 1 + 1e-6  # a singular value above 1 would change its sign in the first step
_CONDITION = 1e7  # up to which two Cholesky factors orthonormalise in float64


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


def thin_singular_values(A: Float[Tensor, "heads dim rank"], B: Float[Tensor, "heads rank out"]) -> Float[Tensor, "heads rank"]:
    """The singular values of A B alone: (AᵀA)^½(BBᵀ)^½ has the same, with any roots."""
    (A, of_A), (B, of_B) = scaled_heads(A), scaled_heads(B)
    return singular_values(gram_root(A) @ gram_root(B.mT).mT) * of_A[:, 0] * of_B[:, 0]


def gram_root(A: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch few columns"]:
    """Some R with RᵀR = AᵀA and no more rows than columns."""
    root: Tensor = polar(A).mT @ A if A.is_cuda else torch.linalg.qr(A, mode="r").R
    return root


def scaled_heads(W: Float[Tensor, "heads rows out"]) -> tuple[Float[Tensor, "heads rows out"], Float[Tensor, "heads 1 1"]]:
    """W = factor · scaled with the largest entry of every head in [1, 2), so that no product of two overflows.

    The factor is a power of two, which rounds nothing; 1 for a head of zeros. A head that is not finite is 0, its factor NaN.
    """
    largest = W.abs().amax((-2, -1), keepdim=True)
    factor = torch.where(largest > 0, 2.0 ** largest.log2().floor(), 1.0)
    finite = largest.isfinite()
    return torch.where(finite, W / factor, 0.0), factor.masked_fill(~finite, torch.nan)


def singular_values(A: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch few"]:
    """All singular values in falling order, computed on the CPU: LAPACK takes less for a small matrix than a GPU's launches."""
    values: Tensor = torch.linalg.svdvals(A.cpu()).to(A.device)
    return values


def largest_singular(A: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, " *batch"]:
    """The largest singular value of every matrix; on a GPU from tr(G Gᵖ)/tr(Gᵖ), G = AᵀA, with p = 2³⁰ by squaring."""
    if not A.is_cuda:
        return singular_values(A)[..., 0]
    return largest_by_squaring(A)


def largest_by_squaring(A: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, " *batch"]:
    """The largest singular value by products alone; too small by ln(columns)/2³⁰ of it at most."""
    G = A.mT @ A
    power = G
    for _ in range(_SQUARINGS):
        trace = power.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        power = power / torch.where(trace > 0, trace, 1.0)
        power = power @ power
    weight = power.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(weight > 0, (G * power).sum((-2, -1)) / weight, 0.0).sqrt()


def polar(A: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rows columns"]:
    """U of A = U H with orthonormal columns and H = (AᵀA)^½, by products alone, in float64.

    Newton–Schulz steps X ← ρX(3 − ρ²XᵀX)/2 raise singular values in [l, 1] to [l', 1], with ρ² = 3/(1 + l + l²) the fastest
    such step. Those below 1e-8 of the largest do not reach 1, so that tr UᵀA is below Σσ by less than their sum.
    """
    size = _MARGIN * largest_singular(A)[..., None, None]
    X, least = A / torch.where(size > 0, size, 1.0), _LEAST
    while 1 - least > torch.finfo(A.dtype).eps:
        factor = (3 / (1 + least + least**2)) ** 0.5
        X = X * factor
        X = 1.5 * X - 0.5 * X @ (X.mT @ X)
        least = min(1.0, factor * least * (3 - factor**2 * least**2) / 2)
    return X


def singular_sum(A: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, " *batch"]:
    """Σσ of every matrix; on a GPU by ``polar``."""
    return (polar(A) * A).sum((-2, -1)) if A.is_cuda else singular_values(A).sum(-1)


def orthonormal(
    W: Float[Tensor, "heads dim width"], smallest: float
) -> tuple[Float[Tensor, "heads dim width"], Bool[Tensor, " heads"]]:
    """Orthonormal bases of the column spaces of W by Cholesky factors of WᵀW, taken twice; and where they can be trusted.

    They can where every singular value is above ``smallest`` of the largest, and above 1e-7 of it: elsewhere the basis means
    nothing.
    """
    R, failed = torch.linalg.cholesky_ex(W.mT @ W, upper=True)
    R = torch.where((failed == 0)[:, None, None], R, torch.eye(W.shape[-1], dtype=W.dtype, device=W.device))
    inverse = _inverse(R)
    condition = largest_singular(R) * largest_singular(inverse)
    trusted = (failed == 0) & (condition * max(smallest, 1 / _CONDITION) < 1)
    basis = W @ inverse
    return basis @ _inverse(torch.linalg.cholesky_ex(basis.mT @ basis, upper=True).L), trusted


def _inverse(R: Float[Tensor, "heads width width"]) -> Float[Tensor, "heads width width"]:
    """Of upper triangular matrices."""
    identity = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    inverse: Tensor = torch.linalg.solve_triangular(R, identity.expand_as(R), upper=True)
    return inverse
