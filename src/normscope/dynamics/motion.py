"""The motion of tokens under a scheme: velocity and layer at any time, from the slots, attention and feed-forward layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import Attention
from normscope.core.heads import PLAIN, Mixing, norm_inside
from normscope.core.norms import SphereNorm, theory_norm
from normscope.dynamics.schedules import Schedule
from normscope.dynamics.trajectory import NotFiniteError
from normscope.errors import InputError
from normscope.schemes import Scheme, Slots
from normscope.schemes.update import Norm, Update

Tokens = Float[Tensor, "*batch tokens dim"]


@dataclass(frozen=True)
class FeedForward:
    """F(x) = inner(relu(x W_in)) W_out, for one model or for many (``runs``); most schemes have no norm ``inner``."""

    W_in: Float[Tensor, "*runs dim hidden"]
    W_out: Float[Tensor, "*runs hidden dim"]

    def __post_init__(self) -> None:
        for name in ("W_in", "W_out"):
            if not torch.isfinite(getattr(self, name)).all():
                raise InputError(f"{name} has an entry that is not a finite number")

    def __call__(self, x: Tokens, mixing: Mixing = PLAIN) -> Tokens:
        """F of every token, with the slot ``inner`` of ``mixing``."""
        runs, dim = self.W_in.shape[:-2], x.shape[-1]
        hidden = torch.relu(x.reshape(*runs, -1, dim) @ self.W_in.to(x.dtype))
        if mixing.inner is not None:
            hidden = norm_inside(mixing.inner, hidden, dim)
        return (hidden @ self.W_out.to(x.dtype)).reshape(x.shape)

    @classmethod
    def random(
        cls,
        dim: int,
        hidden: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float64,
        scale: float | None = None,
    ) -> "FeedForward":
        """Kaiming weights: N(0, 2/fan_in) in, N(0, 1/fan_in) out; with a ``scale`` both are N(0, scale²)."""
        W_in = torch.randn(dim, hidden, generator=generator, dtype=dtype)
        W_out = torch.randn(hidden, dim, generator=generator, dtype=dtype)
        return cls(W_in * math.sqrt(2 / dim), W_out / math.sqrt(hidden)) if scale is None else cls(W_in * scale, W_out * scale)


@dataclass(frozen=True)
class Motion:
    """How tokens move under a scheme.

    Attributes:
        scheme: what the slots say.
        attention: A(X).
        depth: the number of layers T, or the length of time, that the scheme's rule for depth refers to.
        feedforward: F(X), or None for attention alone.
        alpha: the schedule α_t, in place of the scheme's own.
    """

    scheme: Scheme
    attention: Attention
    depth: float
    feedforward: FeedForward | None = None
    alpha: Schedule | None = None

    @property
    def breaks(self) -> list[float]:
        """The times at which the scheme changes its slots; an integrator's steps end there."""
        return [stage.end(self.depth) for stage in self.scheme.stages if stage.then]

    def stage(self, t: float) -> Scheme:
        """The stage of the scheme that holds at time t."""
        return self.scheme.at(t, self.depth)

    def slots(self, t: float, within: float) -> tuple[tuple[Update, ...], tuple[Mixing, ...]]:
        """The sublayers' updates at t, and what happens inside them, by the slots that hold at the time ``within``."""
        stage = self.stage(within)
        sublayers = (stage.attention,) if self.feedforward is None else (stage.attention, stage.feedforward)
        norm = theory_norm(stage.norm)
        try:
            at = stage.place(t, self.depth, self.alpha)
            updates = tuple(Update.of(slots, at, norm) for slots in sublayers)
        except InputError as error:
            raise NotFiniteError(f"scheme '{self.scheme.name}' stopped: {error}") from error
        return updates, tuple(mixing_of(stage, slots, norm) for slots in sublayers)

    def outputs(self, reads: tuple[Tensor, ...], inside: tuple[Mixing, ...]) -> tuple[Tensor, ...]:
        """What attention, and the feed-forward layer if there is one, compute of what they read."""
        mixed = self.attention(reads[0], inside[0])
        return (mixed,) if self.feedforward is None else (mixed, self.feedforward(reads[1], inside[1]))

    def layer(self, x: Tokens, t: float, stride: float = 1.0) -> Tokens:
        """One layer (or an Euler step of length ``stride``): attention, then the feed-forward layer if there is one."""
        x = self.begun(x, t, stride)
        updates, inside = self.slots(t, t)
        x = updates[0].state(x, self.attention(updates[0].read(x), inside[0]), stride)
        if self.feedforward is not None:
            x = updates[1].state(x, self.feedforward(updates[1].read(x), inside[1]), stride)
        return x

    def layer_and_velocity(self, x: Tokens, t: float, stride: float = 1.0) -> tuple[Tokens, Tokens]:
        """``layer`` and ``velocity`` at a settled x, for one call of attention instead of two."""
        updates, inside = self.slots(t, t)
        outputs = self.outputs(tuple(update.read(x) for update in updates), inside)
        moved = updates[0].state(x, outputs[0], stride)
        if self.feedforward is not None:
            moved = updates[1].state(moved, self.feedforward(updates[1].read(moved), inside[1]), stride)
        return moved, total_velocity(updates, x, outputs) if has_flow(self.stage(t)) else moved - x

    def velocity(self, x: Tokens, t: float, within: float | None = None) -> Tokens:
        """ẋ at time t; attention and feed-forward layer add. ``within`` is a time of the stage that holds (default t).

        Of a stage without a flow, what a whole layer changes.
        """
        if not has_flow(self.stage(t if within is None else within)):
            return self.layer(x, t) - x
        updates, inside = self.slots(t, t if within is None else within)
        x = settled(updates, x)
        return total_velocity(updates, x, self.outputs(tuple(update.read(x) for update in updates), inside))

    def settle(self, x: Tokens, t: float) -> Tokens:
        """Tokens where the scheme keeps them: on the unit sphere if any sublayer normalises the stream."""
        stage = self.stage(t)
        return theory_norm(stage.norm)(x) if stage.on_sphere(feedforward=self.feedforward is not None) else x

    def begun(self, x: Tokens, t: float, stride: float) -> Tokens:
        """Tokens as the layer at t reads them: a stage that normalises the stream begins on the sphere."""
        return x if self.stage(t) is self.stage(t - stride) else self.settle(x, t)


def mixing_of(stage: Scheme, slots: Slots, norm: Norm) -> Mixing:
    """What the slots of a sublayer of a stage say of its inside; ``norm`` is the norm of the stage."""
    inner = norm if slots.inner == "norm" else None
    kind = "rms" if slots.heads == "none" else stage.head_kind
    return Mixing(slots.heads, kind, slots.score_rule, inner, slots.gate != "none")


def settled(updates: Sequence[Update], x: Tokens) -> Tokens:
    """Tokens where the stream keeps them: on the sphere if any sublayer normalises it."""
    return next((update.settle(x) for update in updates if update.stream is not None), x)


def total_velocity(updates: Sequence[Update], x: Tokens, outputs: Sequence[Tensor]) -> Tokens:
    """The sublayers' velocities together, for what each computed at x."""
    first, *rest = (update.velocity(x, y) for update, y in zip(updates, outputs, strict=True))
    if not rest:
        return first
    # Where one sublayer's norm brings the stream back to the sphere, what the other adds outwards is undone too.
    sphere = next((update.stream for update in updates if isinstance(update.stream, SphereNorm)), None)
    return first + rest[0] if sphere is None else sphere.tangent(x, first + rest[0])


def check_schemes(
    schemes: Sequence[Scheme],
    depth: float,
    times: Sequence[float] = (),
    alpha: Schedule | None = None,
    flow: bool = False,
) -> None:
    """Refuse an empty list, two schemes of one name, and a scheme that cannot run at the depth (``Scheme.check``).

    With ``flow`` also one that has layers and no flow.
    """
    names = [scheme.name for scheme in schemes]
    if not names:
        raise InputError("name at least one scheme")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"scheme '{name}' is named twice")
    for scheme in schemes:
        scheme.check(depth, times, alpha)
        if flow:
            require_flow(scheme)


def has_flow(stage: Scheme) -> bool:
    """Whether short layers of a stage are near the identity: a pointwise map of the stream changes x without any update."""
    return not (stage.pointwise and "norm" in (stage.attention.stream, stage.feedforward.stream))


def require_flow(scheme: Scheme) -> None:
    """Refuse a scheme that has layers but no flow."""
    for stage in scheme.stages:
        if not has_flow(stage):
            raise InputError(
                f"scheme '{scheme.name}' has no flow: {stage.norm} of the stream changes x without any update; simulate with "
                "layers=True applies whole layers"
            )
