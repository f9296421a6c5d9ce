"""Constructed worlds: embeddings that are sums of parts in given subspaces, and heads that read one part each.

Subspace α has an orthonormal basis E_α, a token the coordinates a_α in it, and its embedding is x = Σ_α x_α with x_α = E_α a_α.
The dual bases D_α, with D_αᵀE_β = 1 for α = β and 0 otherwise, read one part exactly if the subspaces are linearly
independent. Everything is orthogonal to 1, so LayerNorm and RMSNorm act alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core import HeadWeights, normalise_heads, project
from normscope.core.norms import hyperplane_basis, theory_norm, unit
from normscope.errors import InputError
from normscope.schemes import Scheme
from normscope.schemes.update import Update


@dataclass(frozen=True)
class Subspaces:
    """Linearly independent subspaces by their orthonormal bases E_α, each of shape (dim, its width)."""

    bases: tuple[Tensor, ...]

    @classmethod
    def at_angle(cls, widths: Sequence[int], angle: float = 90.0, dim: int | None = None, seed: int = 0) -> "Subspaces":
        """Subspaces with all principal angles between any two equal to ``angle``, in a random frame.

        With an orthonormal frame B and the matrix G of products, E_αᵀE_β = cos(angle)·1, the bases are B·√G. At 90
        degrees they are mutually orthogonal, and down to 0 they stay linearly independent.

        Args:
            widths: the dimension of each.
            angle: in degrees, above 0 and at most 90.
            dim: of the whole space; the smallest possible if None.
            seed: of the frame.
        """
        total = sum(widths)
        dim = total + 1 if dim is None else dim
        if not widths or min(widths) < 1:
            raise InputError(f"widths={list(widths)}: every subspace needs at least 1 dimension")
        if dim <= total:
            raise InputError(f"dim={dim}: subspaces of widths {list(widths)} need {total + 1} dimensions or more")
        if not 0 < angle <= 90:
            raise InputError(f"angle={angle:g}: the angle between subspaces is above 0 and at most 90 degrees")
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(dim - 1, total, generator=generator, dtype=torch.float64)
        frame = hyperplane_basis(dim) @ torch.linalg.qr(drawn).Q
        squares, turns = torch.linalg.eigh(gram(widths, math.cos(math.radians(angle))))
        root = turns * squares.clamp(min=0).sqrt() @ turns.T
        return cls(tuple((frame @ root).split(list(widths), 1)))

    @property
    def widths(self) -> list[int]:
        """The dimension of each."""
        return [basis.shape[1] for basis in self.bases]

    @property
    def products(self) -> Float[Tensor, "total total"]:
        """G = EᵀE of all bases side by side."""
        bases = torch.cat(self.bases, 1)
        return bases.T @ bases

    @cached_property
    def duals(self) -> tuple[Tensor, ...]:
        """D_α, each (dim, width): the pseudo-inverse of all bases side by side, part by part."""
        return tuple(torch.linalg.pinv(torch.cat(self.bases, 1)).T.split(self.widths, 1))


@dataclass(frozen=True)
class World:
    """Tokens that are sums of parts, by their coordinates a_α in each subspace, of shape (tokens, its width)."""

    subspaces: Subspaces
    coordinates: tuple[Tensor, ...]

    @classmethod
    def make(
        cls,
        tokens: int,
        widths: Sequence[int],
        *,
        angle: float = 90.0,
        spread: float = 0.0,
        radius: float = 1.0,
        dim: int | None = None,
        seed: int = 0,
    ) -> "World":
        """Parts in random directions, of norm radius·(1 + spread·u) with u uniform in −1..1.

        An ``angle`` of 90 degrees and a ``spread`` of 0 give mutually orthogonal spheres, which Pre-LN needs.
        """
        if not 0 <= spread < 1:
            raise InputError(f"spread={spread:g}: the spread of norms is at least 0 and below 1")
        generator = torch.Generator().manual_seed(seed)
        coordinates = []
        for width in widths:
            directions = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
            u = 2 * torch.rand(tokens, 1, generator=generator, dtype=torch.float64) - 1
            coordinates.append(radius * (1 + spread * u) * unit(directions))
        return cls(Subspaces.at_angle(widths, angle, dim, seed), tuple(coordinates))

    @property
    def parts(self) -> Float[Tensor, "parts tokens dim"]:
        """x_α of every token."""
        pairs = zip(self.coordinates, self.subspaces.bases, strict=True)
        return torch.stack([part @ basis.T for part, basis in pairs])

    @property
    def embeddings(self) -> Float[Tensor, "tokens dim"]:
        """The sums Σ_α x_α."""
        return self.parts.sum(0)

    @property
    def interference_factors(self) -> Float[Tensor, " tokens"]:
        """1/|Σ_β x_β| from coordinates and products of bases alone: the factor of every part after a norm at the input."""
        everything = torch.cat(self.coordinates, 1)
        return ((everything @ self.subspaces.products) * everything).sum(1).rsqrt()

    @property
    def weights(self) -> HeadWeights:
        """A head for each part, which reads it and writes it: W_Q = W_K = W_V = D_α and W_O = E_αᵀ, padded with zeros."""
        widest = max(self.subspaces.widths)

        def stacked(matrices: tuple[Tensor, ...]) -> Float[Tensor, "parts dim widest"]:
            return torch.stack([torch.nn.functional.pad(matrix, (0, widest - matrix.shape[1])) for matrix in matrices])

        duals = stacked(self.subspaces.duals)
        return HeadWeights(duals, duals, duals, stacked(self.subspaces.bases).mT)


def gram(widths: Sequence[int], cosine: float) -> Float[Tensor, "total total"]:
    """E_αᵀE_β of all pairs: 1 within a subspace; between two, the i-th vectors at the given cosine and others orthogonal."""
    place = torch.cat([torch.arange(width) for width in widths])
    matrix = cosine * (place[:, None] == place).double()
    return matrix.fill_diagonal_(1.0)


@lru_cache(maxsize=256)
def update_at(scheme: Scheme, layer: int, depth: int) -> Update:
    """The update of a scheme's attention in one layer of several; norms have radius 1 and no parameters, as in theory."""
    stage = scheme.at(layer, depth)
    scheme.require_plain("a world", "output=tangent", "learned=scalar")
    return Update.of(stage.attention, stage.place(layer, depth), theory_norm(stage.norm))


def project_heads(
    scheme: Scheme, weights: HeadWeights, x: Float[Tensor, "tokens dim"], layer: int = 0, depth: int = 1
) -> tuple[Float[Tensor, "heads tokens head"], Float[Tensor, "heads tokens head"], Float[Tensor, "heads tokens value"]]:
    """Q, k and v of every head for states x, by the scheme's slots; norms have radius 1 and no parameters, as in theory.

    Heads have RMSNorm whatever the scheme's norm is: their coordinates are made for it, and the mean of them means nothing.
    """
    update = update_at(scheme, layer, depth)
    states = update.read(update.settle(x))
    q, k, v = (project(states, W) for W in (weights.W_Q, weights.W_K, weights.W_V))
    return normalise_heads(q, k, v, scheme.at(layer, depth).attention.heads)


def head_scores(scheme: Scheme, weights: HeadWeights, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "heads tokens tokens"]:
    """The attention logits q_t·k_s of every head, query t and key s."""
    q, k, _ = project_heads(scheme, weights, x)
    return q @ k.mT


def predicted_change(
    world: World, scheme: Scheme, part: int, partner: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, "tokens tokens"], Float[Tensor, "tokens tokens"]]:
    """Logits of the head of a part, and the factors by which a resample ablation of what it cannot read changes them.

    In closed form. The head reads x by D_αᵀ, so the projection onto its input subspace has |P x|² = aᵀ(D_αᵀD_α)⁻¹a, and D_αᵀD_α
    is a block of the inverse of G = EᵀE. The ablation gives |x'_t|² = |P x_t|² + |x_s|² − |P x_s|², and a norm at the input or
    of the stream turns that into the factor |x_t|/|x'_t| on queries and on keys, unless these are normalised themselves.
    """
    update, heads = update_at(scheme, 0, 1), scheme.at(0, 1).attention.heads
    own, norm2 = world.coordinates[part], world.interference_factors.pow(-2)
    start = sum(world.subspaces.widths[:part])
    block = slice(start, start + own.shape[1])
    read2 = ((own @ torch.linalg.inv(torch.linalg.inv(world.subspaces.products)[block, block])) * own).sum(1)
    if update.stream is not None:
        own, read2, norm2 = own / norm2.sqrt()[:, None], read2 / norm2, torch.ones_like(norm2)
    ablated2 = read2 + (norm2 - read2)[partner]
    normed = update.input is not None or update.stream is not None
    factors = (norm2 / ablated2).sqrt() if normed else torch.ones_like(norm2)
    states = own * (update.factor / norm2.sqrt())[:, None] if update.input is not None else own
    q, k = (unit(states) if letter in heads else states for letter in "qk")
    factor_q, factor_k = (torch.ones_like(factors) if letter in heads else factors for letter in "qk")
    return q @ k.T, factor_q[:, None] * factor_k
