"""Simulate tokens under a scheme: tokens, scheme and attention in; a trajectory with measures out."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.attention import Attention
from normscope.dynamics.integrators import solve
from normscope.dynamics.measures import Measures, measure
from normscope.dynamics.motion import FeedForward, Motion
from normscope.dynamics.schedules import Schedule
from normscope.dynamics.starts import check_start
from normscope.errors import InputError
from normscope.norms import length
from normscope.schemes import Scheme


@dataclass
class Trajectory:
    """The path of one set of tokens under one scheme.

    Attributes:
        scheme: the scheme's name.
        times: the times that were reached.
        measures: a ``Measures`` of plain numbers for each time.
        states: the tokens x at each time, if they were kept.
        stopped: empty, or why the run ended early; what came before is kept.
    """

    scheme: str
    times: list[float] = field(default_factory=list)
    measures: list[dict[str, float]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    stopped: str = ""

    @property
    def table(self) -> pd.DataFrame:
        """A row for each time: scheme, time, cosine, variance, radius, speed, cosine_rate."""
        rows = [{"scheme": self.scheme, "time": t, **m} for t, m in zip(self.times, self.measures, strict=True)]
        return pd.DataFrame(rows)

    @property
    def directions(self) -> Float[Tensor, "times tokens dim"]:
        """θ_j at each time."""
        x = torch.stack(self.states)
        return x / length(x)

    @property
    def radii(self) -> Float[Tensor, "times tokens"]:
        """r_j at each time."""
        return length(torch.stack(self.states)).squeeze(-1)


class NotFiniteError(ArithmeticError):
    """A token left the finite numbers."""


def simulate(
    start: Float[Tensor, "tokens dim"],
    scheme: Scheme,
    attention: Attention,
    times: Sequence[float],
    *,
    solver: str = "rk4",
    step: float = 0.05,
    depth: float | None = None,
    feedforward: FeedForward | None = None,
    alpha: Schedule | None = None,
    keep_states: bool = True,
    on_measures: Callable[[float, dict[str, float]], Any] | None = None,
) -> Trajectory:
    """Follow tokens from ``start`` (at time 0) and measure them at ``times``.

    Args:
        start: the tokens x_j at time 0.
        scheme: what the slots say.
        attention: A(X): β, weights, causal mask, precision.
        times: when to measure; they rise and are not negative.
        solver: ``rk4``, ``midpoint``, ``euler``, ``dopri5``, ``dopri8`` for the flow; ``layers`` for one layer per ``step``.
        step: the longest step in time; with ``layers`` 1 is the layer itself.
        depth: the T that the scheme's rule for depth refers to; the last time if None.
        feedforward: F(X), if a block has a feed-forward layer too.
        alpha: α_t as a function of time, in place of the scheme's own.
        keep_states: whether the trajectory keeps the tokens at every time.
        on_measures: called with every time and its measures as they come.
    """
    times = check_times(times)
    check_start(start)
    motion = Motion(scheme, attention, depth or times[-1] or 1.0, feedforward, alpha)
    path = Trajectory(scheme.name)
    grid = times if times[0] == 0 else [0.0, *times]
    try:
        for t, x, velocity in solve(motion, start, grid, solver, step, lambda t, x: _require_finite(scheme, t, x)):
            if t not in times:
                continue
            numbers = _numbers(measure(x, velocity))
            path.times.append(t)
            path.measures.append(numbers)
            if keep_states:
                path.states.append(x)
            if on_measures is not None:
                on_measures(t, numbers)
    except NotFiniteError as error:
        path.stopped = str(error)
    return path


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


def crossing_time(table: pd.DataFrame, share: float) -> float:
    """When the mean cosine has gone ``share`` of the way from its start to 1; NaN if it has not by the last time."""
    cosine, time = table["cosine"].to_numpy(), table["time"].to_numpy()
    level = cosine[0] + share * (1 - cosine[0])
    above = (cosine >= level).nonzero()[0]
    if len(above) == 0:
        return math.nan
    i = int(above[0])
    if i == 0:
        return float(time[0])
    part = (level - cosine[i - 1]) / (cosine[i] - cosine[i - 1])
    return float(time[i - 1] + part * (time[i] - time[i - 1]))


def _numbers(measures: Measures) -> dict[str, float]:
    return {name: float(value) for name, value in asdict(measures).items()}


def _require_finite(scheme: Scheme, t: float, x: Tensor) -> None:
    if bool(torch.isfinite(x.sum())):
        return
    broken = (~torch.isfinite(x).all(-1)).nonzero()
    if len(broken):
        raise NotFiniteError(f"scheme '{scheme.name}' left the finite numbers at time {t:g}, token {int(broken[0, -1])}")
