"""RMSNorm and LayerNorm, as functions and as geometry; and pointwise maps that stand in their place.

Without parameters both put a vector on a sphere of radius √d: RMSNorm the whole space, LayerNorm first projects on
the hyperplane orthogonal to 1 = (1, ..., 1). A gain turns the sphere into an ellipsoid and a bias moves its centre.

Norms, directions and cosines are right for every vector that the precision can represent, whether or not its squares can be:
where they cannot, x/2ᵏ with 2ᵏ ≤ max|x| < 2ᵏ⁺¹ is squared in its place. A factor of two rounds nothing, so both ways give the
same bits where both can be taken. The zero vector has norm 0 and no direction: its ``unit`` is NaN. Compiled ``rms_norm`` and
``layer_norm``, which train models, square x as it is, as PyTorch's do: a state whose squares overflow is NaN, and stops a run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.errors import InputError

EPSILON = 1e-12  # for norms that are trained: against 0/0 alone, they do not otherwise notice it

# Norms from 1/b to b: their squares, which half precision sums in float32, and the cubes that gradients need are representable.
_ORDINARY = {torch.float16: 2.0**14, torch.bfloat16: 2.0**40, torch.float32: 2.0**40, torch.float64: 2.0**330}
_EXPONENT_BITS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


def rms_norm(
    x: Float[Tensor, "*batch dim"],
    gain: Float[Tensor, " dim"] | None = None,
    bias: Float[Tensor, " dim"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "*batch dim"]:
    """Gain · x / √(mean(x²) + eps) + bias: onto the sphere of radius √d, then scaled and moved."""
    return _affine(_on_sphere(x, "rms", eps), gain, bias)


def layer_norm(
    x: Float[Tensor, "*batch dim"],
    gain: Float[Tensor, " dim"] | None = None,
    bias: Float[Tensor, " dim"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "*batch dim"]:
    """RMSNorm of the centred vector: rms_norm(x − mean(x)·1)."""
    return _affine(_on_sphere(x, "layer", eps), gain, bias)


NORMS: dict[str, Callable[..., Tensor]] = {"rms": rms_norm, "layer": layer_norm}
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "erf": torch.erf}
SLOPE = 0.5  # where the learned slope of a pointwise map starts, in DyT and in Derf


def pointwise(
    x: Float[Tensor, "*batch dim"],
    kind: str,
    slope: float | Float[Tensor, ""] = SLOPE,
    shift: float | Float[Tensor, ""] = 0.0,
    gain: Float[Tensor, " dim"] | None = None,
    bias: Float[Tensor, " dim"] | None = None,
) -> Float[Tensor, "*batch dim"]:
    """Gain · φ(slope · x + shift) + bias with φ = tanh (DyT, without a shift) or erf (Derf)."""
    return _affine(POINTWISE[kind](slope * x + shift), gain, bias)


def centre(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Project on the hyperplane orthogonal to 1: x − mean(x)·1."""
    return x - x.mean(-1, keepdim=True)


def unit(x: Float[Tensor, "*batch dim"], dim: int = -1, kind: str = "rms", quick: bool = False) -> Float[Tensor, "*batch dim"]:
    """The norm with radius 1 that theory uses: x/|x| along a dimension, of the centred x for ``layer``; NaN where that is 0.

    ``quick`` spares a GPU the check whether squares are representable: the result is NaN where they are not.
    """
    seen = visible_part(x, kind)
    norm = _plain_length(seen, dim)
    if quick:
        bound = _ORDINARY[x.dtype]
        norm = norm.where((norm >= 1 / bound) & (norm <= bound), torch.nan)
    elif not _ordinary(norm, _ORDINARY[x.dtype]):
        seen = visible_part(_scaled(x, dim)[0], kind)
        norm = _plain_length(seen, dim)
    return seen / norm


def length(x: Float[Tensor, "*shape"], dim: int = -1, quick: bool = False) -> Float[Tensor, "..."]:
    """|x| along a dimension, which is kept so that it divides x.

    ``quick`` spares a GPU the check whether squares are representable: for numbers of which that is known.
    """
    norm = _plain_length(x, dim)
    if not quick and not _ordinary(norm, _ORDINARY[x.dtype]):
        x, size = _scaled(x, dim)
        norm = _plain_length(x, dim) * size
    return norm


def root_mean_square(x: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """√mean(x²) of all numbers: by how much a scale of each channel changes the length of an unrelated vector."""
    size: Tensor = length(x.flatten()).squeeze(-1) / math.sqrt(x.numel())
    return size


def cosine(a: Float[Tensor, "*batch dim"], b: Float[Tensor, "*batch dim"]) -> Float[Tensor, " *batch"]:
    """⟨a, b⟩/(|a||b|); 0 where a or b is zero."""
    zero = (a == 0).all(-1) | (b == 0).all(-1)
    return (unit(a) * unit(b)).sum(-1).masked_fill(zero, 0.0)


def factor_between(target: Float[Tensor, "..."], x: Float[Tensor, "..."]) -> float:
    """The factor c for which c·x is nearest to a target of as many numbers, ⟨target, x⟩/|x|²; NaN if x = 0."""
    (a, size), (b, own) = (_scaled(y.flatten().double(), -1) for y in (target, x))
    return float((a * b).sum() / b.square().sum() * (size / own))


def same(a: Float[Tensor, "..."], b: Float[Tensor, "..."], tolerance: float) -> bool:
    """Whether |a − b| ≤ tolerance · |b| for all their numbers together."""
    return bool(length((a - b).flatten()) <= tolerance * length(b.flatten()))


def participation_ratio(values: Float[Tensor, "*batch values"]) -> Float[Tensor, " *batch"]:
    """(Σσ²)²/Σσ⁴: the number of values that matter, if some are much larger than others; NaN if all are 0."""
    return unit(values).pow(4).sum(-1).reciprocal()


def effective_rank(theta: Float[Tensor, "*batch tokens dim"]) -> Float[Tensor, " *batch"]:
    """(Σσ²)²/Σσ⁴ of the singular values of tokens × dim, without computing them: 1 if all tokens have one direction."""
    tokens, dim = theta.shape[-2:]
    gram = theta @ theta.mT if tokens < dim else theta.mT @ theta
    return theta.square().sum((-2, -1)).square() / gram.square().sum((-2, -1))


def degrees_between(
    one: Float[Tensor, "*batch dim"], other: Float[Tensor, "*batch dim"], quick: bool = False
) -> Float[Tensor, " *batch"]:
    """The angle between vectors, exact also where it is small: 2 atan2(|a − b|, |a + b|) of their directions.

    ``quick`` is that of ``unit``.
    """
    a, b = unit(one, quick=quick), unit(other, quick=quick)
    return torch.atan2(length(a - b, quick=True), length(a + b, quick=True)).squeeze(-1).mul(2).rad2deg()


def tangent(theta: Float[Tensor, "*batch dim"], velocity: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Derivative of ``unit(θ + h·v)`` at h = 0 for a unit θ: P_θ v = v − ⟨v, θ⟩θ."""
    return velocity - (velocity * theta).sum(-1, keepdim=True) * theta


def orthogonal_part(u: Float[Tensor, "*batch dim"], x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """The part of u that is orthogonal to x, u − ⟨u, x⟩x/|x|²; u itself where x is zero."""
    zero = (x == 0).all(-1, keepdim=True)
    return torch.where(zero, u, tangent(unit(x.masked_fill(zero, 1.0)), u))


def visible_part(x: Float[Tensor, "*batch dim"], kind: str) -> Float[Tensor, "*batch dim"]:
    """The part of x that a norm of that kind depends on: all of it, or with LayerNorm the part orthogonal to 1."""
    return centre(x) if kind == "layer" else x


@dataclass(frozen=True)
class SphereNorm:
    """The norm without parameters, x ↦ radius · x/|x| (LayerNorm: of the centred x); theory has radius 1, models have √d.

    Attributes:
        kind: ``rms`` or ``layer``.
        radius: a number, or one for each token, (*batch, 1).
        quick: that of ``unit``.
    """

    kind: str = "rms"
    radius: Any = 1.0
    quick: bool = False

    def __post_init__(self) -> None:
        if self.kind not in NORMS:
            raise InputError(f"norm = '{self.kind}' puts nothing on a sphere; {' and '.join(NORMS)} do")

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """X on the sphere."""
        direction = unit(x, kind=self.kind, quick=self.quick)
        return direction if self._unit else self.radius * direction

    def tangent(self, x: Float[Tensor, "*batch dim"], u: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Derivative of ``self(x + h·u)`` at h = 0 for an x on the sphere: the part of u along the sphere."""
        return tangent(x if self._unit else x / self.radius, visible_part(u, self.kind))

    @property
    def _unit(self) -> bool:
        return isinstance(self.radius, float) and self.radius == 1.0


@dataclass(frozen=True)
class PointwiseNorm:
    """A pointwise map in place of a norm, in theory's units: x ↦ φ(a·√d·x + s)/√d, where a model has φ(a·x + s).

    Attributes:
        kind: ``tanh`` or ``erf``.
        slope: a.
        shift: s.
    """

    kind: str
    slope: float = SLOPE
    shift: float = 0.0

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Every component through the map."""
        width = math.sqrt(x.shape[-1])
        return pointwise(width * x, self.kind, self.slope, self.shift) / width


def theory_norm(kind: str, quick: bool = False) -> SphereNorm | PointwiseNorm:
    """The norm of a kind as theory has it: without parameters, and for states of norm 1 where a model has √d."""
    return PointwiseNorm(kind) if kind in POINTWISE else SphereNorm(kind, quick=quick)


@dataclass(frozen=True)
class Ellipsoid:
    """The set of all values a norm can take: centre + Σ_i c_i · length_i · axis_i with |c| = 1.

    Attributes:
        centre: the bias, shape (dim,).
        axes: orthonormal columns, shape (dim, rank); rank is dim for RMSNorm and dim − 1 for LayerNorm, less one for
            every direction that a zero gain removes.
        lengths: the semi-axes in falling order, shape (rank,); all √d without a gain.
    """

    centre: Float[Tensor, " dim"]
    axes: Float[Tensor, "dim rank"]
    lengths: Float[Tensor, " rank"]

    def level(self, points: Float[Tensor, "*batch dim"]) -> Float[Tensor, " *batch"]:
        """Σ_i (⟨p − centre, axis_i⟩/length_i)²: 1 for points on the ellipsoid, less inside."""
        return ((points - self.centre) @ self.axes / self.lengths).square().sum(-1)

    def off_plane(self, points: Float[Tensor, "*batch dim"]) -> Float[Tensor, " *batch"]:
        """Distance of the points from the plane that holds the ellipsoid; 0 for every value of the norm."""
        offset = points - self.centre
        return length(offset - (offset @ self.axes) @ self.axes.T).squeeze(-1)


def rms_ellipsoid(gain: Float[Tensor, " dim"], bias: Float[Tensor, " dim"]) -> Ellipsoid:
    """The ellipsoid on which ``rms_norm`` (eps = 0) puts every vector: semi-axes √d·|gain| along the coordinates.

    A gain of zero flattens it, and the values then fill what is left (``level`` ≤ 1).
    """
    order = gain.abs().argsort(descending=True)
    order = order[gain[order] != 0]
    axes = torch.eye(len(gain), dtype=gain.dtype, device=gain.device)[:, order]
    return Ellipsoid(bias, axes, math.sqrt(len(gain)) * gain[order].abs())


def layer_ellipsoid(gain: Float[Tensor, " dim"], bias: Float[Tensor, " dim"]) -> Ellipsoid:
    """The ellipsoid on which ``layer_norm`` (eps = 0) puts every vector: one dimension less, axes tilted.

    The sphere of radius √d in the hyperplane with basis B becomes √d · diag(g) B, whose SVD gives axes and lengths. Two gains
    of zero flatten it, and the values then fill what is left (``level`` ≤ 1).
    """
    dim = len(gain)
    stretched = gain[:, None] * hyperplane_basis(dim, gain.dtype, gain.device)
    axes, lengths, _ = torch.linalg.svd(stretched, full_matrices=False)
    kept = lengths > lengths[0] * dim * torch.finfo(gain.dtype).eps
    return Ellipsoid(bias, axes[:, kept], math.sqrt(dim) * lengths[kept])


def hyperplane_basis(
    dim: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> Float[Tensor, "dim rank"]:
    """An orthonormal basis of the hyperplane orthogonal to 1, as columns, shape (dim, dim − 1).

    The Householder reflection that sends 1/√d to the first unit vector; its other columns are the basis.
    """
    if dim < 2:
        raise InputError(f"the hyperplane orthogonal to 1 needs at least 2 dimensions, not {dim}")
    mirror = torch.full((dim,), 1 / math.sqrt(dim), dtype=dtype, device=device)
    mirror[0] += 1.0
    reflection = torch.eye(dim, dtype=dtype, device=device) - torch.outer(mirror, mirror) * (2 / mirror.square().sum())
    return reflection[:, 1:]


def _on_sphere(x: Tensor, kind: str, eps: float) -> Tensor:
    """X / √(mean(x²) + eps), of the centred x for ``layer``."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # a half-precision square overflows at 256
    seen = visible_part(wide, kind)
    square = seen.square().mean(-1, keepdim=True) + eps
    if not torch.compiler.is_compiling() and not _ordinary(square, _ORDINARY[wide.dtype] ** 2):
        wide, size = _scaled(wide, -1, math.sqrt(eps))
        seen = visible_part(wide, kind)
        square = seen.square().mean(-1, keepdim=True) + eps / size / size
    return (seen * torch.rsqrt(square)).to(x.dtype)


def _plain_length(x: Tensor, dim: int) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    return result


def _ordinary(sizes: Tensor, bound: float) -> bool:
    """Whether all sizes lie between 1/bound and bound; not checked in a graph, which must hold for all values."""
    if torch.compiler.is_compiling() or (sizes.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    if sizes.numel() == 0:
        return True
    smallest, largest = sizes.detach().aminmax()
    return 1 / bound <= float(smallest) and float(largest) <= bound


def _scaled(x: Tensor, dim: int, least: float = 0.0) -> tuple[Tensor, Tensor]:
    """x/s and s = 2ᵏ, the power of two with 1 ≤ max|x|/s < 2 along a dimension, but at least that of ``least``.

    Where s would leave the normal numbers, for denormal x and at the upper end, it stays among them. No gradient flows through
    s: everything that is computed from x/s and s depends on x alone.
    """
    if not x.shape[dim]:  # a vector without components has no largest one
        return x, torch.ones_like(x.sum(dim, keepdim=True))
    integer, exponent = _EXPONENT_BITS[x.dtype]
    info = torch.finfo(x.dtype)
    most = x.detach().abs().amax(dim, keepdim=True).clamp(min=least)
    size = (most.view(integer) & exponent).view(x.dtype).clamp(info.tiny, 0.25 / info.tiny)
    return x * size.reciprocal(), size


def _affine(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if gain is None else x * gain
    return x if bias is None else x + bias


def mean_cosine(x: Float[Tensor, "*batch tokens dim"], quick: bool = False) -> Float[Tensor, " *batch"]:
    """Mean of ⟨θ_j, θ_k⟩ over pairs j ≠ k, without any n×n tensor; summed in the tokens' own precision.

    ``quick`` is that of ``unit``.
    """
    n = x.shape[-2]
    total = unit(x, quick=quick).sum(-2)
    return (total.square().sum(-1) - n) / (n * (n - 1))
