"""The symmetric reduction: from an orthogonal start all pairs keep one cosine γ(t), and two numbers say everything.

With identity weights, w = e^{−β(1−γ)} and every quantity divided by e^β,

    Z = (n−1)w + 1,   R = (n−1)wγ + 1,   |A| = N/Z with N² = R² + (n−1)w²(1−γ)(1+(n−1)γ),   ⟨θ_j, A_j⟩ = R/Z,
    γ̇ = (1/s) · 2w(1−γ)((n−1)γ+1)/Z,        ṙ from the scheme's radial rate.

The state is (ln(1−γ), ln r), so that the approach to collapse keeps its digits down to 1−γ = 1e-300.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from normscope.dynamics.integrators import TABLEAUS, runge_kutta_step, time_grid
from normscope.dynamics.schedules import Schedule
from normscope.dynamics.simulate import check_times
from normscope.errors import InputError
from normscope.schemes import Scheme, derive

State = npt.NDArray[np.float64]


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
        law, heads = derive(stage.attention), stage.attention.heads
        n, gap, r = self.tokens, math.exp(state[0]), math.exp(state[1])
        gamma = 1 - gap
        at = stage.place(t, self.depth)
        values = {**at.values, "r": r}
        if self.alpha is not None:
            values["alpha"] = self.alpha(t)
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

    def solve(self, times: Sequence[float], *, cosine: float = 0.0, radius: float = 1.0, step: float = 0.005) -> pd.DataFrame:
        """Measures at ``times`` from γ(0) = ``cosine`` and r(0) = ``radius``; the columns are a trajectory's.

        Fourth-order steps in u = ln(1 + t), of at most ``step``: late times, where everything slows down, cost no more than
        early ones.
        """
        times = check_times(times)
        if not -1 / (self.tokens - 1) < cosine < 1:
            raise InputError(f"n tokens can have one common cosine above −1/(n−1) and below 1, not {cosine}")
        grid = times if times[0] == 0 else [0.0, *times]
        state = np.array([math.log1p(-cosine), math.log(self._start_radius(radius, 0.0))])
        rows = []
        logarithms = [math.log1p(t) for t in grid]
        breaks = [math.log1p(stage.until * self.depth) for stage in self.scheme.stages if stage.then]
        wanted = dict(zip(logarithms, grid, strict=True))
        for u, h, asked in time_grid(logarithms, breaks, step):
            if asked:
                rows.append(self._row(wanted[u], state))
            within = math.expm1(u + h / 2)

            def moving(u: float, y: State, within: float = within) -> State:
                return math.exp(u) * self.derivative(math.expm1(u), y, within)

            state = runge_kutta_step(moving, u, state, h, TABLEAUS["rk4"], moving(u, state))
        rows.append(self._row(grid[-1], state))
        table = pd.DataFrame(rows)
        return table[table["time"].isin(times)].reset_index(drop=True)

    def _start_radius(self, radius: float, t: float) -> float:
        return 1.0 if derive(self.scheme.at(t, self.depth).attention).radius_fixed else radius

    def _row(self, t: float, state: State) -> dict[str, float | str]:
        rates = self.rates(t, state)
        names = ("cosine", "variance", "radius", "speed", "cosine_rate")
        return {"scheme": self.scheme.name, "time": t, **{name: rates[name] for name in names}}
