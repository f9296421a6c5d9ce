"""RMSNorm and LayerNorm, as functions and as geometry.

Without parameters both put a vector on a sphere of radius √d: RMSNorm the whole space, LayerNorm first projects on
the hyperplane orthogonal to 1 = (1, ..., 1). A gain turns the sphere into an ellipsoid and a bias moves its centre.
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


def rms_norm(
    x: Float[Tensor, "*batch dim"],
    gain: Float[Tensor, " dim"] | None = None,
    bias: Float[Tensor, " dim"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "*batch dim"]:
    """Gain · x / √(mean(x²) + eps) + bias: onto the sphere of radius √d, then scaled and moved."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # a half-precision square overflows at 256
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _affine(normalised.to(x.dtype), gain, bias)


def layer_norm(
    x: Float[Tensor, "*batch dim"],
    gain: Float[Tensor, " dim"] | None = None,
    bias: Float[Tensor, " dim"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "*batch dim"]:
    """RMSNorm of the centred vector: rms_norm(x − mean(x)·1)."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return _affine(rms_norm(centre(wide), eps=eps).to(x.dtype), gain, bias)


NORMS: dict[str, Callable[..., Tensor]] = {"rms": rms_norm, "layer": layer_norm}


def centre(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Project on the hyperplane orthogonal to 1: x − mean(x)·1."""
    return x - x.mean(-1, keepdim=True)


def unit(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """The norm with radius 1 that theory uses: x/|x|."""
    return x / length(x)


def length(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch 1"]:
    """|x|, with the dimension kept so that it divides x."""
    result: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return result


def degrees_between(one: Float[Tensor, "*batch dim"], other: Float[Tensor, "*batch dim"]) -> Float[Tensor, " *batch"]:
    """The angle between vectors, exact also where it is small: 2 atan2(|a − b|, |a + b|) of their directions."""
    a, b = unit(one), unit(other)
    return torch.atan2(length(a - b), length(a + b)).squeeze(-1).mul(2).rad2deg()


def tangent(theta: Float[Tensor, "*batch dim"], velocity: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Derivative of ``unit(θ + h·v)`` at h = 0 for a unit θ: P_θ v = v − ⟨v, θ⟩θ."""
    return velocity - (velocity * theta).sum(-1, keepdim=True) * theta


def visible_part(x: Float[Tensor, "*batch dim"], kind: str) -> Float[Tensor, "*batch dim"]:
    """The part of x that a norm of that kind depends on: all of it, or with LayerNorm the part orthogonal to 1."""
    return centre(x) if kind == "layer" else x


@dataclass(frozen=True)
class SphereNorm:
    """The norm without parameters, x ↦ radius · x/|x| (LayerNorm: of the centred x); theory has radius 1, models have √d.

    Attributes:
        kind: ``rms`` or ``layer``.
        radius: a number, or one for each token, (*batch, 1).
    """

    kind: str = "rms"
    radius: Any = 1.0

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """X on the sphere."""
        direction = unit(visible_part(x, self.kind))
        return direction if self._unit else self.radius * direction

    def tangent(self, x: Float[Tensor, "*batch dim"], u: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Derivative of ``self(x + h·u)`` at h = 0 for an x on the sphere: the part of u along the sphere."""
        return tangent(x if self._unit else x / self.radius, visible_part(u, self.kind))

    @property
    def _unit(self) -> bool:
        return isinstance(self.radius, float) and self.radius == 1.0


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


def _affine(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if gain is None else x * gain
    return x if bias is None else x + bias


def mean_cosine(x: Float[Tensor, "*batch tokens dim"]) -> Float[Tensor, " *batch"]:
    """Mean of ⟨θ_j, θ_k⟩ over pairs j ≠ k, without any n×n tensor; summed in the tokens' own precision."""
    n = x.shape[-2]
    total = (x / length(x)).sum(-2)
    return (total.square().sum(-1) - n) / (n * (n - 1))
