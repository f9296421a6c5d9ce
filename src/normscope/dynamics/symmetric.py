"""The symmetric reduction: from an orthogonal start all pairs keep one cosine γ(t), and two numbers say everything.

With identity weights, w = e^{−β(1−γ)} and every quantity divided by e^β,

    Z = (n−1)w + 1,   R = (n−1)wγ + 1,   |A| = N/Z with N² = R² + (n−1)w²(1−γ)(1+(n−1)γ),   ⟨θ_j, A_j⟩ = R/Z,
    γ̇ = (1/s) · 2w(1−γ)((n−1)γ+1)/Z,        ṙ from the scheme's radial rate.

Softcap and temperature change the logits in w, a sink with logit b has the mass e^{b−β}/(Z + e^{b−β}), and a gate is 1/2. A
pointwise norm depends on the coordinates, not on γ and r alone: there is no such reduction.

The state is (ln(1−γ), ln r), so that the approach to collapse keeps its digits down to 1−γ = 1e-300.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from normscope.core import Scores
from normscope.dynamics.integrators import (
    ADAPTIVE,
    METHODS,
    Between,
    adaptive_steps,
    longest_step,
    nodes,
    runge_kutta_step,
    time_grid,
)
from normscope.dynamics.measures import MEASURES
from normscope.dynamics.schedules import Schedule
from normscope.dynamics.trajectory import Trajectory, check_times
from normscope.errors import InputError
from normscope.schemes import Scheme

State = npt.NDArray[np.float64]
Moving = Callable[[float, State], State]
_Moment = tuple[float, State, Callable[[float], float] | None]


def no_reduction(scheme: Scheme) -> str:
    """Why a scheme has no symmetric reduction; empty if it has one."""
    for stage in scheme.stages:
        slots = stage.attention
        if stage.pointwise and (slots.reads_norm or "norm" in (slots.inner, slots.output, slots.stream)):
            return f"{stage.norm} acts on every component alone, and two numbers do not determine the flow"
    return ""


@dataclass(frozen=True)
class SymmetricFlow:
    """The reduced flow of n tokens under a scheme.

    Attributes:
        scheme: what the slots say.
        tokens: n, at least 2.
        beta: the inverse temperature.
        depth: the T that the scheme's rule for depth refers to.
        alpha: α_t in place of the scheme's own.
    """

    scheme: Scheme
    tokens: int
    beta: float
    depth: float
    alpha: Schedule | None = None

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise InputError(f"the symmetric reduction needs at least 2 tokens, not {self.tokens}")
        if not math.isfinite(self.beta):
            raise InputError(f"beta is a finite number, not {self.beta}")
        if reason := no_reduction(self.scheme):
            raise InputError(f"scheme '{self.scheme.name}' has no symmetric reduction: {reason}")

    def rates(self, t: float, state: State, within: float | None = None) -> dict[str, float]:
        """γ, r and their time derivatives, and the speed |θ̇_j|, at a state (ln(1−γ), ln r)."""
        stage = self.scheme.at(t if within is None else within, self.depth)
        law, heads, rule = stage.law_of(stage.attention), stage.attention.heads, stage.attention.score_rule
        n, gap, r = self.tokens, math.exp(state[0]), math.exp(state[1])
        gamma = 1 - gap
        values = {**stage.place(t, self.depth, self.alpha).values, "r": r}
        # Where A is taken at X, every unnormalised one of q, k, v carries the common radius.
        seen = {letter: r if law.sees_radius and letter not in heads else 1.0 for letter in "qkv"}
        own, fall = self._logits(rule, self.beta * law.temperature(values) * seen["q"] * seen["k"], gap)
        gate = 0.5 if stage.attention.gate != "none" else 1.0  # identity weights: those of a gate are zero
        size = gate * seen["v"]
        w = math.exp(-fall)
        Z = (n - 1) * w + 1
        R = (n - 1) * w * gamma + 1
        sideways = w * math.sqrt(max((n - 1) * gap * (1 + (n - 1) * gamma), 0.0))
        values["A"] = size * math.hypot(R, sideways) / Z
        values["M"] = values["A"] / gate
        sink = 0.0 if rule.sink is None else math.exp(rule.sink - own)
        values["m"] = sink / (Z + sink)
        speed_factor = float(law.speed(values))
        closing = size * 2 * w * ((n - 1) * gamma + 1) / (Z * speed_factor)
        return {
            "cosine": gamma,
            "variance": (n - 1) / n * gap,
            "radius": r,
            "speed": size * sideways / (Z * speed_factor),
            "cosine_rate": closing * gap,
            "radial_rate": law.radial(size * R / Z, values),
            "closing": closing,
        }

    def _logits(self, rule: Scores, own: float, gap: float) -> tuple[float, float]:
        """The logit of a token with itself, and how much smaller those with the others are."""
        if rule.cap is None and rule.temperature is None:
            return own, own * gap
        scores = torch.tensor([[own, own * (1 - gap)]], dtype=torch.float64)
        first, second = rule.logits(scores, torch.tensor([self.tokens], dtype=torch.float64))[0].tolist()
        return first, first - second

    def derivative(self, t: float, state: State, within: float | None = None) -> State:
        """d/dt of (ln(1−γ), ln r)."""
        rates = self.rates(t, state, within)
        return np.array([-rates["closing"], rates["radial_rate"] / rates["radius"]])

    def solve(
        self,
        times: Sequence[float],
        *,
        cosine: float = 0.0,
        radius: float = 1.0,
        step: float = 0.005,
        solver: str = "rk4",
        time_step: float | None = None,
    ) -> Trajectory:
        """Measures at ``times`` from γ(0) = ``cosine`` and r(0) = ``radius``, by any ``solver`` of a flow.

        Steps are taken in u = ln(1 + t), of at most ``step``: late times, where everything slows down, cost no more than early
        ones. With a ``time_step`` they are taken in t, of at most that.
        """
        times = check_times(times)
        longest_step(solver, time_step)
        if solver == "layers":
            raise InputError("the symmetric reduction is that of the flow; solver='layers' is not one of its solvers")
        if not -1 / (self.tokens - 1) < cosine < 1:
            raise InputError(f"n tokens can have one common cosine above −1/(n−1) and below 1, not {cosine}")
        if not (math.isfinite(radius) and radius > 0):
            raise InputError(f"the radius of a start is a positive number, not {radius}")
        path, wanted = Trajectory(self.scheme.name), set(times)
        start = np.array([math.log1p(-cosine), math.log(radius)])
        clock = _LOGARITHMIC if time_step is None else _PLAIN
        walk = self._adaptive if solver in ADAPTIVE else self._fixed
        try:
            grid = times if times[0] == 0 else [0.0, *times]
            for t, state, between in walk(start, grid, clock, solver, step if time_step is None else time_step):
                rates = self.rates(t, state)
                path.milestones.see(t, rates["cosine"], between)
                if t in wanted:
                    path.times.append(t)
                    path.measures.append({name: rates[name] for name in MEASURES})
        except (ArithmeticError, InputError):  # the state, or a formula between the times that were checked
            path.stopped = (
                f"scheme '{self.scheme.name}' became non-finite (NaN/Inf) after time {path.times[-1] if path.times else 0:g}"
            )
        return path

    def _fixed(self, state: State, grid: list[float], clock: "_Clock", solver: str, step: float) -> "Iterator[_Moment]":
        """Every step, and every time of the grid."""
        exact = {clock.reading(t): t for t in grid}
        for u, h, _ in time_grid(list(exact), self._breaks(clock), step):
            state, moving = self._begun(state, clock.time(u + h / 2), clock)
            yield exact.get(u, clock.time(u)), state, None
            state = runge_kutta_step(moving, u, state, h, METHODS[solver])
            _require_finite(state)
        yield grid[-1], state, None

    def _adaptive(self, state: State, grid: list[float], clock: "_Clock", solver: str, step: float) -> "Iterator[_Moment]":
        """Every time of the grid and some between them."""
        exact, between = {clock.reading(t): t for t in grid}, None
        for left, right in itertools.pairwise(nodes(list(exact), self._breaks(clock))):
            state, moving = self._begun(state, clock.time((left + right) / 2), clock)
            yield exact.get(left, clock.time(left)), state, between

            def velocity(u: float, y: Tensor, moving: Moving = moving) -> Tensor:
                return torch.from_numpy(moving(u, y.numpy()))

            longest = step if clock is _PLAIN else math.inf
            try:
                for u, y, at in adaptive_steps(velocity, torch.from_numpy(state), left, right, solver, longest):
                    state = y.numpy()
                    _require_finite(state)
                    between = _cosine_at(at, clock)
                    if u < right:
                        yield clock.time(u), state, between
            except AssertionError as error:  # its step has shrunk to nothing
                raise FloatingPointError from error
        yield grid[-1], state, between

    def _breaks(self, clock: "_Clock") -> list[float]:
        return [clock.reading(stage.end(self.depth)) for stage in self.scheme.stages if stage.then]

    def _begun(self, state: State, within: float, clock: "_Clock") -> "tuple[State, Moving]":
        """The state as the stage that holds ``within`` a step takes it, and its derivative by the clock's time."""
        stage = self.scheme.at(within, self.depth)
        if stage.law_of(stage.attention).radius_fixed:
            state = np.array([state[0], 0.0])
        return state, lambda u, y: clock.pace(u) * self.derivative(clock.time(u), y, within)


@dataclass(frozen=True)
class _Clock:
    """A variable u in which steps are taken: u of t, t of u, and dt/du."""

    reading: Callable[[float], float]
    time: Callable[[float], float]
    pace: Callable[[float], float]


_LOGARITHMIC = _Clock(math.log1p, math.expm1, math.exp)
_PLAIN = _Clock(float, float, lambda u: 1.0)


def _cosine_at(at: Between, clock: _Clock) -> Callable[[float], float]:
    return lambda t: 1 - math.exp(at(clock.reading(t))[0])


def _require_finite(state: State) -> None:
    if not np.isfinite(state).all():
        raise FloatingPointError
