"""The two-variable reduction: the printed equations through SciPy, and terminal rates that are measured, not assumed."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy.integrate import solve_ivp

from normscope.dynamics import SymmetricFlow
from normscope.schemes import NAMED

N, BETA = 256, 5.0
Rates = Callable[[float, npt.NDArray[np.float64]], list[float]]


def printed(name: str, n: int, beta: float) -> Rates:
    """γ̇ and ṙ as printed in paper 2, with E, Z, N, G, R."""

    def rates(t: float, state: npt.NDArray[np.float64]) -> list[float]:
        gamma, r = state
        E, e = math.exp(beta * gamma), math.exp(beta)
        Z = (n - 1) * E + e
        length = math.sqrt(e**2 + 2 * (n - 1) * math.exp(beta * (1 + gamma)) * gamma + (n - 1) * E**2 * (1 + (n - 2) * gamma))
        G, R = 2 * E * (1 - gamma) * ((n - 1) * gamma + 1), (n - 1) * E * gamma + e
        return {
            "post": [G / Z, 0.0],
            "pre": [G / (r * Z), R / Z],
            "peri": [G / (r * length), R / length],
            "ngpt": [G / length, 0.0],
            "sqrt-scaling": [G / (math.sqrt(t + 1) * Z), 0.0],
        }[name]

    return rates


@pytest.mark.parametrize("name", ["post", "pre", "peri", "ngpt", "sqrt-scaling"])
def test_the_reduction_is_the_printed_one(name: str) -> None:
    times = np.linspace(0, 20, 41)
    expected = solve_ivp(printed(name, N, BETA), (0, 20), [0.0, 1.0], t_eval=times, rtol=1e-11, atol=1e-13).y
    table = SymmetricFlow(NAMED[name], N, BETA, depth=20.0).solve(times.tolist()).table
    assert np.abs(table["cosine"] - expected[0]).max() < 1e-8
    assert np.abs(table["radius"] - expected[1]).max() < 1e-7


def test_mix_is_post_and_then_pre() -> None:
    first = solve_ivp(printed("post", N, BETA), (0, 5), [0.0, 1.0], rtol=1e-11, atol=1e-13).y[:, -1]
    then = solve_ivp(printed("pre", N, BETA), (5, 20), first, rtol=1e-11, atol=1e-13).y[:, -1]
    table = SymmetricFlow(NAMED["mix"], N, BETA, depth=20.0).solve([20.0]).table
    assert table["cosine"][0] == pytest.approx(then[0], abs=1e-8)
    assert table["radius"][0] == pytest.approx(then[1], rel=1e-8)


def slope(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float:
    return float(np.polyfit(x, y, 1)[0])


@pytest.mark.parametrize("beta", [1.0, 5.0])
@pytest.mark.parametrize("name", ["pre", "mix", "peri"])
def test_free_streams_end_as_the_third_power_of_time(name: str, beta: float) -> None:
    """γ̇ ~ C/t³, read off between t = 10³ and t = 10⁵."""
    late = np.geomspace(1e3, 1e5, 21)
    table = SymmetricFlow(NAMED[name], N, beta, depth=20.0).solve(late.tolist(), step=0.02).table
    assert slope(np.log(late), np.log(table["cosine_rate"].to_numpy())) == pytest.approx(-3.0, abs=0.02)


def test_post_ends_exponentially() -> None:
    late = np.linspace(20, 60, 21)
    table = SymmetricFlow(NAMED["post"], N, BETA, depth=60.0).solve(late.tolist()).table
    assert slope(late, np.log(table["cosine_rate"].to_numpy())) == pytest.approx(-2.0, abs=0.01)


@pytest.mark.parametrize(
    ("alpha", "integral", "window"),
    [
        (lambda t: 1.0, lambda t: t, (20, 60)),
        (lambda t: t, lambda t: t**2 / 2, (10, 20)),
        (lambda t: (t + 1) ** -0.5, lambda t: 2 * np.sqrt(t + 1), (200, 800)),
    ],
    ids=["constant", "rising", "root"],
)
def test_ngpt_ends_with_the_integral_of_its_schedule(
    alpha: Callable[[float], float], integral: Callable[..., object], window: tuple[float, float]
) -> None:
    """γ̇ ~ C α_t exp(−2∫α): ln(γ̇/α) falls by 2 for each unit of ∫α."""
    late = np.linspace(*window, 21)
    table = SymmetricFlow(NAMED["ngpt"], N, BETA, depth=100.0, alpha=alpha).solve(late.tolist()).table
    rates = np.log(table["cosine_rate"].to_numpy() / np.array([alpha(t) for t in late]))
    assert slope(np.asarray(integral(late)), rates) == pytest.approx(-2.0, abs=0.01)


def test_sqrt_scaling_ends_with_the_root_of_time() -> None:
    """γ̇ ~ C exp(−4√t)/√t."""
    late = np.linspace(400, 2000, 21)
    table = SymmetricFlow(NAMED["sqrt-scaling"], N, BETA, depth=2000.0).solve(late.tolist()).table
    rates = np.log(table["cosine_rate"].to_numpy() * np.sqrt(late))
    assert slope(np.sqrt(late), rates) == pytest.approx(-4.0, abs=0.02)


@pytest.mark.parametrize("name", ["pre", "peri"])
def test_the_radius_grows_like_time(name: str) -> None:
    table = SymmetricFlow(NAMED[name], N, BETA, depth=20.0).solve([1e6], step=0.02).table
    assert table["radius"][0] / 1e6 == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("rk4", 4)])
def test_solver_and_step_of_the_reduction_are_used(solver: str, order: int) -> None:
    flow = SymmetricFlow(NAMED["pre"], 16, 2.0, depth=8.0)
    exact = flow.solve([8.0], step=0.002).measures[0]["cosine"]
    rough, fine = (abs(flow.solve([8.0], solver=solver, time_step=h).measures[0]["cosine"] - exact) for h in (0.5, 0.25))
    assert math.log2(rough / fine) == pytest.approx(order, abs=0.7)


def test_adaptive_solvers_of_the_reduction_agree_with_fine_steps() -> None:
    flow = SymmetricFlow(NAMED["mix"], N, BETA, depth=20.0)
    fine = flow.solve([20.0, 40.0], step=0.001)
    for solver in ("dopri5", "dopri8"):
        path = flow.solve([20.0, 40.0], solver=solver)
        assert [row["cosine"] for row in path.measures] == pytest.approx([row["cosine"] for row in fine.measures], abs=1e-7)
        assert path.milestones.half == pytest.approx(fine.milestones.half, rel=1e-5)
        assert path.milestones.ninety == pytest.approx(fine.milestones.ninety, rel=1e-5)
