"""The symmetric reduction: from an orthogonal start all pairs keep one cosine γ(t), and two numbers say everything.

With identity weights, w = e^{−β(1−γ)} and every quantity divided by e^β,

    Z = (n−1)w + 1,   R = (n−1)wγ + 1,   |A| = N/Z with N² = R² + (n−1)w²(1−γ)(1+(n−1)γ),   ⟨θ_j, A_j⟩ = R/Z,
    γ̇ = (1/s) · 2w(1−γ)((n−1)γ+1)/Z,        ṙ from the scheme's radial rate.

The state is (ln(1−γ), ln r), so that the approach to collapse keeps its digits down to 1−γ = 1e-300.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from normscope.dynamics.integrators import METHODS, runge_kutta_step, time_grid
from normscope.dynamics.schedules import Schedule
from normscope.dynamics.trajectory import Trajectory, check_times
from normscope.errors import InputError
from normscope.schemes import Scheme

State = npt.NDArray[np.float64]
MEASURES = ("cosine", "variance", "radius", "speed", "cosine_rate")


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

    def rates(self, t: float, state: State, within: float | None = None) -> dict[str, float]:
        """γ, r and their time derivatives, and the speed |θ̇_j|, at a state (ln(1−γ), ln r)."""
        stage = self.scheme.at(t if within is None else within, self.depth)
        law, heads = stage.attention.law, stage.attention.heads
        n, gap, r = self.tokens, math.exp(state[0]), math.exp(state[1])
        gamma = 1 - gap
        values = {**stage.place(t, self.depth, self.alpha).values, "r": r}
        # Where A is taken at X, every unnormalised one of q, k, v carries the common radius.
        seen = {letter: r if law.sees_radius and letter not in heads else 1.0 for letter in "qkv"}
        w = math.exp(-self.beta * law.temperature(values) * seen["q"] * seen["k"] * gap)
        Z = (n - 1) * w + 1
        R = (n - 1) * w * gamma + 1
        sideways = (n - 1) * w**2 * gap * (1 + (n - 1) * gamma)
        values["A"] = seen["v"] * math.sqrt(R**2 + sideways) / Z
        speed_factor = float(law.speed(values))
        closing = seen["v"] * 2 * w * ((n - 1) * gamma + 1) / (Z * speed_factor)
        return {
            "cosine": gamma,
            "variance": (n - 1) / n * gap,
            "radius": r,
            "speed": seen["v"] * math.sqrt(max(sideways, 0.0)) / (Z * speed_factor),
            "cosine_rate": closing * gap,
            "radial_rate": law.radial(seen["v"] * R / Z, values),
            "closing": closing,
        }

    def derivative(self, t: float, state: State, within: float | None = None) -> State:
        """d/dt of (ln(1−γ), ln r)."""
        rates = self.rates(t, state, within)
        return np.array([-rates["closing"], rates["radial_rate"] / rates["radius"]])

    def solve(self, times: Sequence[float], *, cosine: float = 0.0, radius: float = 1.0, step: float = 0.005) -> Trajectory:
        """Measures at ``times`` from γ(0) = ``cosine`` and r(0) = ``radius``.

        Fourth-order steps in u = ln(1 + t), of at most ``step``: late times, where everything slows down, cost no more than
        early ones.
        """
        times = check_times(times)
        if not -1 / (self.tokens - 1) < cosine < 1:
            raise InputError(f"n tokens can have one common cosine above −1/(n−1) and below 1, not {cosine}")
        if not (math.isfinite(radius) and radius > 0):
            raise InputError(f"the radius of a start is a positive number, not {radius}")
        path, wanted = Trajectory(self.scheme.name), set(times)
        try:
            for t, state in self._states(times if times[0] == 0 else [0.0, *times], cosine, radius, step):
                rates = self.rates(t, state)
                path.milestones.see(t, rates["cosine"])
                if t in wanted:
                    path.times.append(t)
                    path.measures.append({name: rates[name] for name in MEASURES})
        except (ArithmeticError, InputError):  # the state, or a formula between the times that were checked
            path.stopped = (
                f"scheme '{self.scheme.name}' became non-finite (NaN/Inf) after time {path.times[-1] if path.times else 0:g}"
            )
        return path

    def _states(self, grid: list[float], cosine: float, radius: float, step: float) -> Iterator[tuple[float, State]]:
        """(t, (ln(1−γ), ln r)) at every step and at every time of the grid."""
        state = np.array([math.log1p(-cosine), math.log(radius)])
        breaks = [math.log1p(stage.end(self.depth)) for stage in self.scheme.stages if stage.then]
        exact = {math.log1p(t): t for t in grid}
        for u, h, _ in time_grid(list(exact), breaks, step):
            within = math.expm1(u + h / 2)
            if self.scheme.at(within, self.depth).attention.law.radius_fixed:
                state = np.array([state[0], 0.0])
            yield exact.get(u, math.expm1(u)), state

            def moving(u: float, y: State, within: float = within) -> State:
                return math.exp(u) * self.derivative(math.expm1(u), y, within)

            state = runge_kutta_step(moving, u, state, h, METHODS["rk4"])
            if not np.isfinite(state).all():
                raise FloatingPointError
        yield grid[-1], state
