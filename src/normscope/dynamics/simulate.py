"""Simulate tokens under a scheme: tokens, scheme and attention in; a trajectory with measures out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from jaxtyping import Float
from torch import Tensor

from normscope.core import Attention
from normscope.core.norms import length, mean_cosine
from normscope.dynamics.integrators import solve
from normscope.dynamics.measures import Measures, measure
from normscope.dynamics.motion import FeedForward, Motion, require_flow
from normscope.dynamics.schedules import Schedule
from normscope.dynamics.starts import check_start
from normscope.dynamics.trajectory import NotFiniteError, Trajectory, check_times
from normscope.errors import InputError
from normscope.schemes import Scheme


def simulate(
    start: Float[Tensor, "tokens dim"],
    scheme: Scheme,
    attention: Attention,
    times: Sequence[float],
    *,
    solver: str = "rk4",
    step: float | None = None,
    depth: float | None = None,
    feedforward: FeedForward | None = None,
    alpha: Schedule | None = None,
    keep_states: bool | Sequence[float] = True,
    on_measures: Callable[[float, dict[str, float]], Any] | None = None,
) -> Trajectory:
    """Follow tokens from ``start`` (at time 0) and measure them at ``times``.

    Args:
        start: the tokens x_j at time 0.
        scheme: what the slots say.
        attention: A(X): β, weights, causal mask, precision.
        times: when to measure; they rise and are not negative.
        solver: ``rk4``, ``midpoint``, ``euler``, ``dopri5``, ``dopri8`` for the flow; ``layers`` for one layer per ``step``.
        step: the longest step in time: 0.025 if None, for ``layers`` 1, the layer itself; adaptive solvers then choose alone.
        depth: the T that the scheme's rule for depth refers to; the last time if None.
        feedforward: F(X), if a block has a feed-forward layer too.
        alpha: α_t as a function of time, in place of the scheme's own.
        keep_states: whether the trajectory keeps the tokens at every time, or the times at which it does.
        on_measures: called with every time and its measures as they come.
    """
    times = check_times(times)
    if start.ndim != 2:
        raise InputError(f"a simulation starts from tokens × dim, not from an array of shape {tuple(start.shape)}")
    check_start(start)
    if solver != "layers" or step not in (None, 1):
        require_flow(scheme)
    motion = Motion(scheme, attention, depth if depth is not None else (times[-1] or 1.0), feedforward, alpha)
    path, wanted = Trajectory(scheme.name), set(times)
    keep = wanted if keep_states is True else set(keep_states or ())

    def cosine(x: Tensor) -> float:
        return float(mean_cosine(x)) if len(x) > 1 else 1.0

    def watch(t: float, x: Tensor, between: Callable[[float], Tensor] | None) -> None:
        _require_finite(scheme, t, x)
        path.milestones.see(t, cosine(x), None if between is None else lambda s: cosine(between(s)))

    try:
        for t, x, velocity in solve(motion, start, times if times[0] == 0 else [0.0, *times], solver, step, watch):
            if t not in wanted:
                continue
            _require_speed(scheme, t, x, velocity)
            numbers = _numbers(measure(x, velocity))
            path.times.append(t)
            path.measures.append(numbers)
            if t in keep:
                path.kept.append(t)
                path.states.append(x)
            if on_measures is not None:
                on_measures(t, numbers)
    except NotFiniteError as error:
        path.stopped = str(error)
    return path


def _numbers(measures: Measures) -> dict[str, float]:
    return {name: float(value) for name, value in asdict(measures).items()}


def _require_finite(scheme: Scheme, t: float, x: Tensor) -> None:
    """Stop at a token that has no norm or no direction in its precision."""
    norms = length(x).squeeze(-1)
    smallest, largest = norms.aminmax()
    if float(smallest) > 0 and math.isfinite(largest):
        return
    broken = int((~(norms.isfinite() & (norms > 0))).nonzero()[0, -1])
    what = "underflowed to zero" if norms[broken] == 0 else "became non-finite (NaN/Inf)"
    raise NotFiniteError(f"scheme '{scheme.name}' {what} at time {t:g}, token {broken}")


def _require_speed(scheme: Scheme, t: float, x: Tensor, velocity: Tensor) -> None:
    """Stop at a token whose speed |ẋ|/|x| has no value in its precision."""
    broken = (~(length(velocity) / length(x)).squeeze(-1).isfinite()).nonzero()
    if len(broken):
        where = f"at time {t:g}, token {int(broken[0, -1])}: its speed |ẋ|/|x| has no value"
        raise NotFiniteError(f"scheme '{scheme.name}' became non-finite (NaN/Inf) {where}")
