"""Steps through time: explicit Runge-Kutta methods for one scheme or many, layers, and adaptive methods from torchdiffeq.

A Runge-Kutta run is a list of stages, each one evaluation of f(read(x)). ``advance`` does everything between two evaluations:
single simulations call it as it is, ensembles call it for all schemes at once and may compile it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor

from normscope.core import Mixing
from normscope.dynamics.motion import Motion, settled, total_velocity
from normscope.dynamics.trajectory import NotFiniteError
from normscope.errors import InputError, MissingExtraError, require_known
from normscope.schemes.update import Update

Tokens = Float[Tensor, "*batch tokens dim"]
Moment = tuple[float, Tensor, Tensor]
Between = Callable[[float], Tensor]
Watch = Callable[[float, Tensor, Between | None], None]
Method = tuple[tuple[float, float, float], ...]

ADAPTIVE = ("dopri5", "dopri8")

# Explicit methods whose every stage uses the latest velocity only, a row (c, a, b) for each stage:
# k_i = f(t + c_i h, x_i),  x_{i+1} = x + h a_i k_i,  and after the last stage x ← x + h Σ_i b_i k_i.
METHODS: dict[str, Method] = {
    "euler": ((0.0, 0.0, 1.0),),
    "midpoint": ((0.0, 0.5, 0.0), (0.5, 0.0, 1.0)),
    "rk4": ((0.0, 0.5, 1 / 6), (0.5, 0.5, 1 / 3), (0.5, 1.0, 1 / 3), (1.0, 0.0, 1 / 6)),
    "layers": ((0.0, 0.0, 1.0),),  # evaluated where an Euler step is; what is added differs, see ``advance_layer``
}
SOLVERS = (*METHODS, *ADAPTIVE)
TOLERANCE = 1e-9  # of adaptive methods
_DENSE = 16  # states between two times at which an adaptive method is observed


@dataclass(frozen=True)
class Stage:
    """One evaluation of the velocity on the way through time.

    Attributes:
        t: where it is evaluated.
        updates: the updates of the sublayers there.
        inside: what happens inside the sublayers: for each of them, or inside attention for each of several schemes.
        to_next: h·a, the weight of this velocity in the next stage's state.
        to_end: h·b, its weight in the step's end; None for 0.
        first: whether a step begins here.
        last: whether the step ends after it.
        wanted: whether the state here is one of the requested.
    """

    t: float
    updates: tuple[Update, ...]
    inside: tuple[Mixing, ...]
    to_next: Any
    to_end: Any
    first: bool
    last: bool
    wanted: bool


AnyStage = TypeVar("AnyStage", bound=Stage)
Outputs = tuple[Tensor, ...]
Advance = Callable[[Tensor, Tensor, Tensor, Outputs, Stage, Stage], tuple[Tensor, Tensor, Outputs, Tensor | None]]


def stages(
    times: Sequence[float],
    breaks: Sequence[float],
    step: float,
    method: Method,
    slots: Callable[[float, float], tuple[tuple[Update, ...], tuple[Mixing, ...]]],
) -> Iterator[Stage]:
    """All stages from the first of ``times`` to the last, where a stage without weights ends the run.

    ``slots(t, within)`` gives updates and what happens inside sublayers at t, by the slots that hold at the time ``within``.
    """
    for t, h, wanted in time_grid(times, breaks, step):
        for i, (c, a, b) in enumerate(method):
            first, last = i == 0, i == len(method) - 1
            yield Stage(t + c * h, *slots(t + c * h, t + h / 2), h * a, h * b if b else None, first, last, wanted and first)
    end = times[-1]
    yield Stage(end, *slots(end, end), 0.0, None, True, True, True)


def integrate(
    x: Tokens, plan: Iterable[AnyStage], evaluate: Callable[[AnyStage, Outputs], Outputs], advance: Advance
) -> Iterator[tuple[AnyStage, Tokens, Tokens | None]]:
    """(stage, x, ẋ) for every stage; ``evaluate`` computes f of what each sublayer reads. ẋ is None at the end."""
    plan = iter(plan)
    now = next(plan)
    x = settled(now.updates, x)
    first, total, reads = x, x, tuple(update.read(x) for update in now.updates)
    for following in plan:
        moved, total, reads, velocity = advance(first, total, x, evaluate(now, reads), now, following)
        yield now, x, velocity
        x = moved
        first = x if now.last else first
        now = following
    yield now, x, None


def advance(
    first: Tensor, total: Tensor, x: Tensor, outputs: Outputs, now: Stage, following: Stage
) -> tuple[Tensor, Tensor, Outputs, Tensor]:
    """The state after a stage, the sum of the step so far, what the next stage reads of the state, and ẋ before it."""
    velocity = total_velocity(now.updates, x, tuple(y.to(x.dtype) for y in outputs))
    moved, total = runge_kutta(first, total, velocity, now.to_next, now.to_end, now.last)
    moved = settled(following.updates, settled(now.updates, moved))  # a stage that normalises the stream begins on the sphere
    reads = tuple(update.read(moved).to(outputs[0].dtype) for update in following.updates)
    return moved, moved if now.last else total, reads, velocity


def advance_layer(
    first: Tensor, total: Tensor, x: Tensor, outputs: Outputs, now: Stage, following: Stage
) -> tuple[Tensor, Tensor, Outputs, None]:
    """``advance`` by a layer of attention of length h instead of the flow: stream(carry · x + h · step · output(y))."""
    moved = settled(following.updates, now.updates[0].state(x, outputs[0].to(x.dtype), now.to_end))
    return moved, moved, tuple(update.read(moved).to(outputs[0].dtype) for update in following.updates), None


def runge_kutta(first: Any, total: Any, slope: Any, to_next: Any, to_end: Any, last: bool) -> tuple[Any, Any]:
    """The next state of a step, and what the step amounts to so far."""
    total = total if to_end is None else total + to_end * slope
    return (total if last else first + to_next * slope), total


def runge_kutta_step(f: Callable[[float, Any], Any], t: float, x: Any, h: float, method: Method) -> Any:
    """One step of length h of ẋ = f(t, x); x is a tensor or an array."""
    first = total = x
    for i, (c, a, b) in enumerate(method):
        x, total = runge_kutta(first, total, f(t + c * h, x), h * a, h * b if b else None, i == len(method) - 1)
    return x


def solve(motion: Motion, x: Tokens, times: Sequence[float], solver: str, step: float | None, watch: Watch) -> Iterator[Moment]:
    """(t, x, ẋ) at every one of ``times``, the first of which is the start; ``watch`` is called with every state on the way.

    ``watch`` takes a time, its state, and, of an adaptive solver, the state at any time since the call before.
    """
    step = longest_step(solver, step)
    if solver in ADAPTIVE:
        yield from _adaptive(motion, x, times, solver, step, watch)
    elif solver == "layers":
        yield from _layers(motion, x, times, step, watch)
    else:
        plan = stages(times, motion.breaks, step, METHODS[solver], motion.slots)
        for stage, state, velocity in integrate(x, plan, lambda stage, reads: motion.outputs(reads, stage.inside), advance):
            if stage.first:
                watch(stage.t, state, None)
            if stage.wanted:
                yield stage.t, state, motion.velocity(state, stage.t) if velocity is None else velocity


def longest_step(solver: str, step: float | None) -> float:
    """The given step, or the usual one of the solver; an unknown solver, and a step that leads nowhere, are refused."""
    require_known("solver", solver, SOLVERS)
    if solver in ADAPTIVE and find_spec("torchdiffeq") is None:
        raise MissingExtraError(f"solver '{solver}' needs torchdiffeq; pip install 'normscope[flows]'")
    if step is None:
        return math.inf if solver in ADAPTIVE else 1.0 if solver == "layers" else 0.025
    if not (math.isfinite(step) and step > 0):
        raise InputError(f"the step is a positive number, not {step}")
    return step


def time_grid(times: Sequence[float], breaks: Sequence[float], step: float) -> Iterator[tuple[float, float, bool]]:
    """Steps (t, h, whether t is one of ``times``) of length at most ``step`` that end at every time and every break."""
    wanted = set(times)
    for left, right in itertools.pairwise(nodes(times, breaks)):
        count = max(1, math.ceil((right - left) / step - 1e-9))
        h = (right - left) / count
        for i in range(count):
            yield left + i * h, h, i == 0 and left in wanted


def nodes(times: Sequence[float], breaks: Sequence[float]) -> list[float]:
    """All times at which a step must end; a break that is a time but for rounding is that time."""
    inside = (t for t in breaks if times[0] < t < times[-1])
    return sorted({*times, *(t for t in inside if not any(math.isclose(t, own, rel_tol=1e-9) for own in times))})


def _layers(motion: Motion, x: Tokens, times: Sequence[float], step: float, watch: Watch) -> Iterator[Moment]:
    """Layers at t = 0, stride, 2·stride, ...: the state after each, with the velocity of the flow at that place."""
    x = motion.settle(x, times[0])
    for t, h, wanted in time_grid(times, (), step):
        if not math.isclose(h, step, rel_tol=1e-6):
            raise InputError(f"with layers every time is a multiple of the step {step:g}; {t + h:g} is not")
        x = motion.begun(x, t, h)
        watch(t, x, None)
        if wanted:
            moved, velocity = motion.layer_and_velocity(x, t, h)
            yield t, x, velocity
        else:
            moved = motion.layer(x, t, h)
        x = moved
    x = motion.begun(x, times[-1], step)
    watch(times[-1], x, None)
    yield times[-1], x, motion.velocity(x, times[-1])


def _adaptive(motion: Motion, x: Tokens, times: Sequence[float], solver: str, step: float, watch: Watch) -> Iterator[Moment]:
    x = motion.settle(x, times[0])
    watch(times[0], x, None)
    yield times[0], x, motion.velocity(x, times[0])
    for left, right in itertools.pairwise(nodes(times, motion.breaks)):
        within = (left + right) / 2
        x = motion.settle(x, within)

        def velocity(t: float, y: Tensor, within: float = within) -> Tensor:
            return motion.velocity(y, t, within)

        try:
            for t, state, between in adaptive_steps(velocity, x, left, right, solver, step):
                x = motion.settle(state, within)
                x = motion.settle(x, right) if t == right else x
                watch(t, x, between)
        except AssertionError as error:  # its step has shrunk to nothing
            raise NotFiniteError(f"scheme '{motion.scheme.name}' outran solver {solver} after time {left:g}") from error
        if right in times:
            yield right, x, motion.velocity(x, right)


def adaptive_steps(
    f: Callable[[float, Tensor], Tensor], x: Tensor, left: float, right: float, solver: str, step: float = math.inf
) -> Iterator[tuple[float, Tensor, Between]]:
    """The solution of ẋ = f(t, x) from x at ``left`` to ``right`` in steps of at most ``step``, by torchdiffeq.

    Yields:
        Several times, the last of which is ``right``, with their states, and the state at any time since the one before.
    """
    import torch
    from torchdiffeq import odeint

    def solved(x: Tensor, times: Sequence[float]) -> Tensor:
        span = torch.tensor(times, dtype=torch.float64, device=x.device)
        path: Tensor = odeint(
            lambda t, y: f(float(t), y), x, span, method=solver, rtol=TOLERANCE, atol=TOLERANCE, options={"max_step": step}
        )
        return path

    times = [left + (right - left) * i / _DENSE for i in range(_DENSE)] + [right]
    path = solved(x, times)
    for i, t in enumerate(times[1:]):

        def between(s: float, before: float = times[i], first: Tensor = path[i]) -> Tensor:
            return solved(first, [before, s])[-1] if s > before else first

        yield t, path[i + 1], between
