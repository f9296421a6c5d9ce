"""The motion of tokens under a scheme: velocity and layer at any time, from the slots, attention and feed-forward layer."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import Attention
from normscope.core.norms import tangent
from normscope.dynamics.schedules import Schedule
from normscope.dynamics.trajectory import NotFiniteError
from normscope.errors import InputError
from normscope.schemes import Scheme, Slots
from normscope.schemes.update import (
    Coefficients,
    coefficients,
    kept_part,
    layer,
    normalise,
    read,
    velocity,
    written,
)

Tokens = Float[Tensor, "*batch tokens dim"]
Map = Callable[[Tensor, str], Tensor]


@dataclass(frozen=True)
class FeedForward:
    """F(x) = relu(x W_in) W_out, for one model or for many (``runs``)."""

    W_in: Float[Tensor, "*runs dim hidden"]
    W_out: Float[Tensor, "*runs hidden dim"]

    def __post_init__(self) -> None:
        for name in ("W_in", "W_out"):
            if not torch.isfinite(getattr(self, name)).all():
                raise InputError(f"{name} has an entry that is not a finite number")

    def __call__(self, x: Tokens, heads: str = "none") -> Tokens:
        """F of every token; ``heads`` has no meaning here."""
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

    @property
    def breaks(self) -> list[float]:
        """The times at which the scheme changes its slots; an integrator's steps end there."""
        return [stage.until * self.depth for stage in self.scheme.stages if stage.then]

    def stage(self, t: float) -> Scheme:
        """The stage of the scheme that holds at time t."""
        return self.scheme.at(t, self.depth)

    def check(self, times: Sequence[float]) -> None:
        """Refuse slots that have no finite value, or a normalised stream that keeps nothing of x, at one of the times."""
        for t in times:
            for slots, _ in self._sublayers(t):
                c = self._coefficients(slots, t, t)
                if c.stream_norm and not c.carry > 0:
                    raise InputError(
                        f"with a normalised stream carry must be positive; '{self.scheme.name}' has {c.carry:g} at t = {t:g}"
                    )

    def layer(self, x: Tokens, t: float, stride: float = 1.0) -> Tokens:
        """One layer (or an Euler step of length ``stride``): attention, then the feed-forward layer if there is one."""
        for slots, f in self._sublayers(t):
            x = layer(*self._write(slots, f, x, t, t), stride)
        return x

    def layer_and_velocity(self, x: Tokens, t: float, stride: float = 1.0) -> tuple[Tokens, Tokens]:
        """``layer`` and ``velocity`` at a settled x, for one call of attention instead of two."""
        (slots, attention), *rest = self._sublayers(t)
        c, x, u = self._write(slots, attention, x, t, t)
        moved, parts = layer(c, x, u, stride), [velocity(c, x, u)]
        for own, f in rest:
            parts.append(velocity(*self._write(own, f, x, t, t)))
            moved = layer(*self._write(own, f, moved, t, t), stride)
        return moved, self._total(x, parts, t)

    def velocity(self, x: Tokens, t: float, within: float | None = None) -> Tokens:
        """ẋ at time t; attention and feed-forward layer add. ``within`` is a time of the stage that holds (default t)."""
        within = t if within is None else within
        x = self.settle(x, within)
        parts = [velocity(*self._write(slots, f, x, t, within)) for slots, f in self._sublayers(within)]
        return self._total(x, parts, within)

    def settle(self, x: Tokens, t: float) -> Tokens:
        """Tokens where the scheme keeps them: on the unit sphere if its stream is normalised."""
        return normalise(x, self.stage(t).norm) if self._on_sphere(t) else x

    def _sublayers(self, t: float) -> Iterator[tuple[Slots, Map]]:
        stage = self.stage(t)
        yield stage.attention, self.attention
        if self.feedforward is not None:
            yield stage.feedforward, self.feedforward

    def _write(self, slots: Slots, f: Map, x: Tokens, t: float, within: float) -> tuple[Coefficients, Tokens, Tokens]:
        """The slots' coefficients at t, x, and what the sublayer writes at x."""
        c = self._coefficients(slots, t, within)
        return c, x, written(c, f(read(c, x), slots.heads))

    def _coefficients(self, slots: Slots, t: float, within: float) -> Coefficients:
        stage = self.stage(within)
        try:
            at = stage.place(t, self.depth)
            return coefficients(slots, stage.norm, at if self.alpha is None else replace(at, alpha=self.alpha(t)))
        except (ArithmeticError, ValueError) as error:
            raise NotFiniteError(f"a slot of scheme '{self.scheme.name}' has no finite value at time {t:g}") from error

    def _total(self, x: Tokens, parts: list[Tensor], t: float) -> Tokens:
        """The sublayers' velocities together."""
        if len(parts) == 1:
            return parts[0]
        total = parts[0] + parts[1]
        # Where one sublayer's norm brings the stream back to the sphere, what the other writes outwards is undone too.
        return tangent(x, kept_part(total, self.stage(t).norm)) if self._on_sphere(t) else total

    def _on_sphere(self, t: float) -> bool:
        return any(slots.stream == "norm" for slots, _ in self._sublayers(t))


def check_schemes(schemes: Sequence[Scheme]) -> None:
    """Refuse an empty list and two schemes of one name."""
    names = [scheme.name for scheme in schemes]
    if not names:
        raise InputError("name at least one scheme")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"scheme '{name}' is named twice")
