"""What a simulation gives back: measures over time, states if they were kept, and when collapse came near."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import length
from normscope.errors import InputError


class NotFiniteError(ArithmeticError):
    """A token, or a slot, became non-finite (NaN/Inf)."""


@dataclass
class Milestones:
    """When the mean cosine has gone half and 90 % of the way from its start to 1; read off at every step of the solver."""

    half: float = math.nan
    ninety: float = math.nan
    _start: float = math.nan
    _last: tuple[float, float] = (0.0, math.nan)

    def see(self, t: float, cosine: float) -> None:
        """Take note of the mean cosine at the next time; between two of them it is taken as a straight line."""
        if math.isnan(self._start):
            self._start, self._last = cosine, (t, cosine)
            return
        for name, share in (("half", 0.5), ("ninety", 0.9)):
            level = self._start + share * (1 - self._start)
            if math.isnan(getattr(self, name)) and cosine >= level:
                before, low = self._last
                part = (level - low) / (cosine - low) if cosine > low else 1.0
                setattr(self, name, before + max(0.0, part) * (t - before))
        self._last = (t, cosine)


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
        return pd.DataFrame(rows)

    @property
    def directions(self) -> Float[Tensor, "times tokens dim"]:
        """θ_j at each kept time."""
        x = self._kept_states()
        return x / length(x)

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
