"""The motion of tokens under a scheme: velocity and layer at any time, from the slots, attention and feed-forward layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import Attention
from normscope.core.norms import SphereNorm, theory_norm
from normscope.dynamics.schedules import Schedule
from normscope.dynamics.trajectory import NotFiniteError
from normscope.errors import InputError
from normscope.schemes import Scheme
from normscope.schemes.update import Update

Tokens = Float[Tensor, "*batch tokens dim"]
TREATED = ("output=tangent", "learned=scalar", "norm=tanh", "norm=erf")


@dataclass(frozen=True)
class FeedForward:
    """F(x) = relu(x W_in) W_out, for one model or for many (``runs``)."""

    W_in: Float[Tensor, "*runs dim hidden"]
    W_out: Float[Tensor, "*runs hidden dim"]

    def __post_init__(self) -> None:
        for name in ("W_in", "W_out"):
            if not torch.isfinite(getattr(self, name)).all():
                raise InputError(f"{name} has an entry that is not a finite number")

    def __call__(self, x: Tokens) -> Tokens:
        """F of every token."""
        runs = self.W_in.shape[:-2]
        rows = x.reshape(*runs, -1, x.shape[-1])
        return (torch.relu(rows @ self.W_in.to(x.dtype)) @ self.W_out.to(x.dtype)).reshape(x.shape)

    @classmethod
    def random(cls, dim: int, hidden: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> "FeedForward":
        """Kaiming weights: N(0, 2/fan_in) in, N(0, 1/fan_in) out."""
        W_in = torch.randn(dim, hidden, generator=generator, dtype=dtype) * math.sqrt(2 / dim)
        W_out = torch.randn(hidden, dim, generator=generator, dtype=dtype) / math.sqrt(hidden)
        return cls(W_in, W_out)


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

    def __post_init__(self) -> None:
        self.scheme.require_plain("the simulator", *TREATED)

    @property
    def breaks(self) -> list[float]:
        """The times at which the scheme changes its slots; an integrator's steps end there."""
        return [stage.end(self.depth) for stage in self.scheme.stages if stage.then]

    def stage(self, t: float) -> Scheme:
        """The stage of the scheme that holds at time t."""
        return self.scheme.at(t, self.depth)

    def slots(self, t: float, within: float) -> tuple[tuple[Update, ...], tuple[str, ...]]:
        """The sublayers' updates at t, and the slot ``heads``, by the slots that hold at the time ``within``."""
        stage = self.stage(within)
        sublayers = (stage.attention,) if self.feedforward is None else (stage.attention, stage.feedforward)
        try:
            at = stage.place(t, self.depth, self.alpha)
            updates = tuple(Update.of(slots, at, theory_norm(stage.norm)) for slots in sublayers)
        except InputError as error:
            raise NotFiniteError(f"scheme '{self.scheme.name}' stopped: {error}") from error
        return updates, (stage.attention.heads,)

    def outputs(self, reads: tuple[Tensor, ...], heads: str) -> tuple[Tensor, ...]:
        """What attention, and the feed-forward layer if there is one, compute of what they read."""
        first, *rest = reads
        return (self.attention(first, heads), *(self.feedforward(read) for read in rest if self.feedforward is not None))

    def layer(self, x: Tokens, t: float, stride: float = 1.0) -> Tokens:
        """One layer (or an Euler step of length ``stride``): attention, then the feed-forward layer if there is one."""
        x = self.begun(x, t, stride)
        updates, (heads,) = self.slots(t, t)
        x = updates[0].state(x, self.attention(updates[0].read(x), heads), stride)
        if self.feedforward is not None:
            x = updates[1].state(x, self.feedforward(updates[1].read(x)), stride)
        return x

    def layer_and_velocity(self, x: Tokens, t: float, stride: float = 1.0) -> tuple[Tokens, Tokens]:
        """``layer`` and ``velocity`` at a settled x, for one call of attention instead of two."""
        updates, (heads,) = self.slots(t, t)
        outputs = self.outputs(tuple(update.read(x) for update in updates), heads)
        moved = updates[0].state(x, outputs[0], stride)
        if self.feedforward is not None:
            moved = updates[1].state(moved, self.feedforward(updates[1].read(moved)), stride)
        return moved, total_velocity(updates, x, outputs)

    def velocity(self, x: Tokens, t: float, within: float | None = None) -> Tokens:
        """ẋ at time t; attention and feed-forward layer add. ``within`` is a time of the stage that holds (default t)."""
        updates, (heads,) = self.slots(t, t if within is None else within)
        x = settled(updates, x)
        return total_velocity(updates, x, self.outputs(tuple(update.read(x) for update in updates), heads))

    def settle(self, x: Tokens, t: float) -> Tokens:
        """Tokens where the scheme keeps them: on the unit sphere if any sublayer normalises the stream."""
        stage = self.stage(t)
        return SphereNorm(stage.norm)(x) if stage.on_sphere(feedforward=self.feedforward is not None) else x

    def begun(self, x: Tokens, t: float, stride: float) -> Tokens:
        """Tokens as the layer at t reads them: a stage that normalises the stream begins on the sphere."""
        return x if self.stage(t) is self.stage(t - stride) else self.settle(x, t)


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


def check_schemes(schemes: Sequence[Scheme], depth: float, times: Sequence[float] = (), alpha: Schedule | None = None) -> None:
    """Refuse an empty list, two schemes of one name, and a scheme that cannot run at the depth (``Scheme.check``)."""
    names = [scheme.name for scheme in schemes]
    if not names:
        raise InputError("name at least one scheme")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"scheme '{name}' is named twice")
    for scheme in schemes:
        scheme.require_plain("the simulator", *TREATED)
        scheme.check(depth, times, alpha)
