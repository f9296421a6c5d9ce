"""Steps through time: explicit Runge-Kutta methods, layers, and adaptive methods from torchdiffeq.

A solver yields (t, x, ẋ) at every time that is asked for; the velocity is the one it needs anyway for its next step.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from jaxtyping import Float
from torch import Tensor

from normscope.dynamics.motion import Motion
from normscope.dynamics.trajectory import NotFiniteError
from normscope.errors import InputError, MissingExtraError, did_you_mean

Tokens = Float[Tensor, "*batch tokens dim"]
Moment = tuple[float, Tensor, Tensor]
Watch = Callable[[float, Tensor], None]

ADAPTIVE = ("dopri5", "dopri8")


@dataclass(frozen=True)
class Tableau:
    """An explicit Runge-Kutta method: k_i = f(t + c_i h, x + h Σ_j a_ij k_j), x ← x + h Σ_i b_i k_i."""

    c: tuple[float, ...]
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]


TABLEAUS = {
    "euler": Tableau((0.0,), ((),), (1.0,)),
    "midpoint": Tableau((0.0, 0.5), ((), (0.5,)), (0.0, 1.0)),
    "rk4": Tableau((0.0, 0.5, 0.5, 1.0), ((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
}
SOLVERS = (*TABLEAUS, *ADAPTIVE, "layers")


def solve(motion: Motion, x: Tokens, times: Sequence[float], solver: str, step: float, watch: Watch) -> Iterator[Moment]:
    """(t, x, ẋ) at every one of ``times``, the first of which is the start; ``watch`` sees every state on the way."""
    check_solver(solver, step)
    if solver in ADAPTIVE:
        yield from _adaptive(motion, x, times, solver, watch)
    elif solver == "layers":
        yield from _layers(motion, x, times, step, watch)
    else:
        yield from _runge_kutta(motion, x, times, TABLEAUS[solver], step, watch)


def check_solver(solver: str, step: float) -> None:
    """Refuse an unknown solver, one whose package is missing, and a step that leads nowhere."""
    if solver not in SOLVERS:
        raise InputError(f"unknown solver '{solver}'; allowed: {', '.join(SOLVERS)}{did_you_mean(solver, SOLVERS)}")
    if solver in ADAPTIVE and find_spec("torchdiffeq") is None:
        raise MissingExtraError(f"solver '{solver}' needs torchdiffeq; pip install 'normscope[flows]'")
    if not (math.isfinite(step) and step > 0):
        raise InputError(f"the step is a positive number, not {step}")


def time_grid(times: Sequence[float], breaks: Sequence[float], step: float) -> Iterator[tuple[float, float, bool]]:
    """Steps (t, h, whether t is one of ``times``) of length at most ``step`` that end at every time and every break."""
    wanted = set(times)
    for left, right in itertools.pairwise(_nodes(times, breaks)):
        count = max(1, math.ceil((right - left) / step - 1e-9))
        h = (right - left) / count
        for i in range(count):
            yield left + i * h, h, i == 0 and left in wanted


def _nodes(times: Sequence[float], breaks: Sequence[float]) -> list[float]:
    """All times at which a step must end; a break that is a time but for rounding is that time."""
    inside = (t for t in breaks if times[0] < t < times[-1])
    return sorted({*times, *(t for t in inside if not any(math.isclose(t, own, rel_tol=1e-9) for own in times))})


def runge_kutta_step(f: Callable[[float, Any], Any], t: float, x: Any, h: float, method: Tableau, first: Any) -> Any:
    """One step of length h of ẋ = f(t, x), for x whose velocity ``first`` is known; x is a tensor or an array."""
    slopes = [first]
    for c, weights in zip(method.c[1:], method.a[1:], strict=True):
        stage = x
        for weight, slope in zip(weights, slopes, strict=True):
            if weight:
                stage = stage + (h * weight) * slope
        slopes.append(f(t + c * h, stage))
    for weight, slope in zip(method.b, slopes, strict=True):
        if weight:
            x = x + (h * weight) * slope
    return x


def _runge_kutta(
    motion: Motion, x: Tokens, times: Sequence[float], method: Tableau, step: float, watch: Watch
) -> Iterator[Moment]:
    x = motion.settle(x, times[0])
    watch(times[0], x)
    stage = motion.stage(times[0])
    for t, h, wanted in time_grid(times, motion.breaks, step):
        within = t + h / 2
        if motion.stage(within) is not stage:
            stage = motion.stage(within)
            x = motion.settle(x, within)  # a stage that normalises the stream begins on the sphere
        slope = motion.velocity(x, t, within)
        if wanted:
            yield t, x, slope
        x = runge_kutta_step(lambda t, y: motion.velocity(y, t, within), t, x, h, method, slope)  # noqa: B023
        x = motion.settle(x, within)
        watch(t + h, x)
    yield times[-1], x, motion.velocity(x, times[-1])


def _layers(motion: Motion, x: Tokens, times: Sequence[float], step: float, watch: Watch) -> Iterator[Moment]:
    """Layers at t = 0, stride, 2·stride, ...: the state after each, with the velocity of the flow at that place."""
    x = motion.settle(x, times[0])
    watch(times[0], x)
    for t, h, wanted in time_grid(times, (), step):
        if not math.isclose(h, step, rel_tol=1e-6):
            raise InputError(f"with layers every time is a multiple of the step {step:g}; {t + h:g} is not")
        if wanted:
            moved, slope = motion.layer_and_velocity(x, t, h)
            yield t, x, slope
        else:
            moved = motion.layer(x, t, h)
        x = moved
        watch(t + h, x)
    yield times[-1], x, motion.velocity(x, times[-1])


def _adaptive(motion: Motion, x: Tokens, times: Sequence[float], solver: str, watch: Watch) -> Iterator[Moment]:
    """Torchdiffeq between the given times, with a tolerance of 1e-9."""
    import torch
    from torchdiffeq import odeint

    x = motion.settle(x, times[0])
    watch(times[0], x)
    yield times[0], x, motion.velocity(x, times[0])
    for left, right in itertools.pairwise(_nodes(times, motion.breaks)):
        within = (left + right) / 2
        x = motion.settle(x, within)
        span = torch.tensor([left, right], dtype=torch.float64, device=x.device)
        try:
            path = odeint(lambda t, y: motion.velocity(y, float(t), within), x, span, method=solver, rtol=1e-9, atol=1e-9)  # noqa: B023
        except AssertionError as error:  # its step has shrunk to nothing
            raise NotFiniteError(f"scheme '{motion.scheme.name}' outran solver {solver} after time {left:g}") from error
        x = motion.settle(path[-1], within)
        watch(right, x)
        if right in times:
            yield right, x, motion.velocity(x, right)
