"""What a simulation gives back: measures over time, states if they were kept, and when collapse came near."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import length, unit
from normscope.dynamics.measures import MEASURES
from normscope.errors import InputError

_CLOSE = 1e-9  # of a time: as near as a crossing is located
_ITERATIONS = 50


class NotFiniteError(ArithmeticError):
    """A token, or a slot, became non-finite (NaN/Inf)."""


@dataclass
class Milestones:
    """When the mean cosine has first gone half and 90 % of the way from its start to 1."""

    half: float = math.nan
    ninety: float = math.nan
    _start: float = math.nan
    _last: tuple[float, float] = (0.0, math.nan)

    def see(self, t: float, cosine: float, between: Callable[[float], float] | None = None) -> None:
        """Take note of the mean cosine at the next time.

        ``between`` gives it at any time since the last one; without it, a straight line does.
        """
        if math.isnan(self._start):
            self._start, self._last = cosine, (t, cosine)
            return
        for name, share in (("half", 0.5), ("ninety", 0.9)):
            level = self._start + share * (1 - self._start)
            if math.isnan(getattr(self, name)) and cosine >= level:
                setattr(self, name, _crossing(self._last, (t, cosine), level, between))
        self._last = (t, cosine)


def _crossing(
    left: tuple[float, float], right: tuple[float, float], level: float, between: Callable[[float], float] | None
) -> float:
    """When a curve that ends at or above the level reaches it: on a straight line, or by the Illinois rule with more points."""
    (a, low), (b, high) = (left[0], left[1] - level), (right[0], right[1] - level)
    t = b if low >= high else a + max(0.0, low / (low - high)) * (b - a)
    if between is None or low >= 0:
        return t
    for _ in range(_ITERATIONS):
        value = between(t) - level
        if value < 0:
            a, low, high = t, value, high / 2
        else:
            b, high, low = t, value, low / 2
        moved = a + low / (low - high) * (b - a)
        if abs(moved - t) <= _CLOSE * abs(t):
            return moved
        t = moved
    return t


@dataclass
class Trajectory:
    """The path of one set of tokens under one scheme.

    Attributes:
        scheme: the scheme's name.
        times: the times that were reached.
        measures: the measures as plain numbers for each time.
        milestones: when half and 90 % of the way to collapse were gone.
        kept: the times whose tokens were kept, and
        states: the tokens x at those times.
        stopped: empty, or why the run ended early; what came before is kept.
    """

    scheme: str
    times: list[float] = field(default_factory=list)
    measures: list[dict[str, float]] = field(default_factory=list)
    milestones: Milestones = field(default_factory=Milestones)
    kept: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    stopped: str = ""

    @property
    def table(self) -> pd.DataFrame:
        """A row for each time: scheme, time, cosine, variance, radius, speed, cosine_rate."""
        rows = [{"scheme": self.scheme, "time": t, **m} for t, m in zip(self.times, self.measures, strict=True)]
        return pd.DataFrame(rows, columns=["scheme", "time", *MEASURES])

    @property
    def directions(self) -> Float[Tensor, "times tokens dim"]:
        """θ_j at each kept time."""
        return unit(self._kept_states())

    @property
    def radii(self) -> Float[Tensor, "times tokens"]:
        """r_j at each kept time."""
        return length(self._kept_states()).squeeze(-1)

    def _kept_states(self) -> Tensor:
        if not self.states:
            raise InputError("this trajectory kept no states; simulate with keep_states=True")
        return torch.stack(self.states)


def check_times(times: Sequence[float]) -> list[float]:
    """Times as a list that rises from 0 or later, or a clear error."""
    given = [float(t) for t in times]
    if not given:
        raise InputError("name at least one time")
    if not all(math.isfinite(t) and t >= 0 for t in given):
        raise InputError(f"times are finite and not negative, not {', '.join(f'{t:g}' for t in given)}")
    if any(right <= left for left, right in itertools.pairwise(given)):
        raise InputError(f"times go forwards; {', '.join(f'{t:g}' for t in given)} do not")
    return given
