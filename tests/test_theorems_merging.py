"""Tokens that have met move as one: the flows of the library, of an implicit solver, and of two tokens by quadrature."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad, solve_ivp

from normscope.core import Attention
from normscope.core.norms import unit
from normscope.dynamics import Motion
from normscope.schemes import NAMED
from normscope.theorems import Case, clustering
from normscope.theorems.flows import SIX, ends_free, follow, smallest_cosine, started
from normscope.theorems.merging import MergingFlow

TOGETHER = 1e-4
STARTS = ("uniform", "antipodal", "clusters")


def own_time(scheme: str, t: float) -> float:
    """Own time as the clustering page counts it, from the inverse of what it uses."""
    if ends_free(scheme):
        return math.log(t)
    return 2 * math.sqrt(1 + t) - 2 if scheme == "sqrt-scaling" else t


def time_of(scheme: str, own: float) -> float:
    if ends_free(scheme):
        return math.exp(own)
    return (1 + own / 2) ** 2 - 1 if scheme == "sqrt-scaling" else own


@pytest.mark.parametrize("scheme", SIX)
@pytest.mark.parametrize(("start", "beta"), [("uniform", 0.1), ("uniform", 2.0), ("antipodal", 1.5), ("clusters", 2.0)])
def test_tokens_that_move_as_one_are_where_the_library_has_them_at_the_same_time(scheme: str, start: str, beta: float) -> None:
    """From t = 1.5, after Mix-LN has changed over, to one cluster: the same directions, and as many tokens in each place."""
    case = Case({"tokens": 6, "dim": 3, "start": start}, ((5, 1.0),))
    motion, x = Motion(NAMED[scheme], Attention(beta), 4.0), started(case, 1)
    ((t, early),) = follow(motion, x, [1.5], step=0.1)
    flow = MergingFlow(scheme, beta)
    end, apart, _ = flow.follow(flow.begin(early.numpy(), t), TOGETHER)
    own = own_time(scheme, t) + float(end.time[0])
    ((_, late),) = follow(motion, x, [time_of(scheme, own)], step=0.1)
    # The last two clusters approach as e^{−τ}: the logarithm of the ratio is twice the difference of times.
    assert abs(math.log(float(apart[0]) / float(1 - smallest_cosine(late)[0]))) / 2 < 2e-3 * own + 0.01
    expected, alive = unit(late)[0].numpy(), np.flatnonzero(end.mass[0])
    assert np.abs(expected[alive] - end.theta[0, alive]).max() < 1e-3
    assert end.mass[0].sum() == 6
    if len(alive) == 2:
        gap = math.sqrt(2 * float(apart[0])) / 2
        for j in alive:
            assert (np.linalg.norm(expected - expected[j], axis=1) < gap).sum() == end.mass[0, j]


@pytest.mark.parametrize(("scheme", "start"), [(scheme, start) for scheme in ("post", "pre") for start in STARTS])
def test_a_step_of_separate_tokens_is_one_of_the_library(scheme: str, start: str) -> None:
    """Speeds of directions and radii beside those of the library, before any two tokens have met."""
    beta, t = 1.3, 2.0
    x = 1.7 * started(Case({"tokens": 5, "dim": 4, "start": start}, ((2, 1.0),)), 2)
    motion = Motion(NAMED[scheme], Attention(beta), 4.0)
    x = motion.settle(x, t)
    flow = MergingFlow(scheme, beta)
    now = flow.begin(x.numpy(), t)
    moved = flow.step(now, flow.pull(now.theta, now.mass), np.full(2, 1e-6))
    h = 1e-6 * (t if ends_free(scheme) else 1.0)
    expected = x + h * motion.velocity(x, t)
    assert torch.allclose(torch.from_numpy((moved.theta - now.theta) / 1e-6), (unit(expected) - unit(x)) / 1e-6, atol=1e-5)
    if ends_free(scheme):
        q = torch.from_numpy(moved.q)
        assert torch.allclose(q, expected.norm(dim=-1) / (t * math.exp(1e-6)), rtol=1e-11)


@pytest.mark.parametrize("beta", [0.5, 5.0, 20.0, 50.0])
@pytest.mark.parametrize("scheme", ["post", "ngpt"])
def test_two_tokens_take_the_time_of_their_integral(scheme: str, beta: float) -> None:
    """ċ = 2w(1 − c²)/s with w = 1/(1 + e^{β(1−c)}), s = 1 or |A|: times up to 10⁴¹ beside quadrature in the cosine."""

    def slowness(c: float) -> float:
        w = 1 / (1 + math.exp(beta * (1 - c)))
        size = math.sqrt(1 - 2 * w * (1 - w) * (1 - c))
        return (size if scheme == "ngpt" else 1.0) / (2 * w * (1 - c * c))

    first = -0.9
    theta = np.array([[[1.0, 0.0], [first, math.sqrt(1 - first**2)]]])
    flow = MergingFlow(scheme, beta)
    end, apart, _ = flow.follow(flow.begin(theta, 1.0), 1e-3)
    last = 1 - float(apart[0])
    expected = quad(slowness, first, last, epsabs=0.0, epsrel=1e-10, limit=500)[0]
    assert float(end.time[0]) == pytest.approx(expected, rel=4e-3)


@pytest.mark.parametrize(("scheme", "beta"), [("pre", 20.0), ("peri", 20.0), ("pre", 50.0)])
def test_two_slow_tokens_with_free_radii_take_the_time_of_theirs(scheme: str, beta: float) -> None:
    """While directions crawl q is at its target: du = q dc / (2w(1 − c²)), with q = ⟨θ, A⟩; up to where they hurry."""

    def slowness(c: float) -> float:
        w = 1 / (1 + math.exp(beta * (1 - c)))
        return (1 - w * (1 - c)) / (2 * w * (1 - c * c))  # Peri-LN has |A| in q and in s

    theta = np.array([[[1.0, 0.0], [-0.9, math.sqrt(1 - 0.81)]]])
    flow = MergingFlow(scheme, beta)
    end, apart, radial = flow.follow(flow.begin(3 * theta, 1.0), 0.9)
    expected = quad(slowness, -0.9, 1 - float(apart[0]), epsabs=0.0, epsrel=1e-10, limit=500)[0]
    assert float(end.time[0]) == pytest.approx(expected, rel=4e-3)
    assert np.allclose(end.q, radial, rtol=1e-3)


def test_three_clusters_are_where_an_implicit_solver_has_them() -> None:
    """Post-LN at β = 5, thousands of units of time, beside Radau's method on the plain equations."""
    beta = 5.0
    theta = started(Case({"tokens": 4, "dim": 3, "start": "uniform"}, ((11, 1.0),)), 1)[0].numpy()

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        x = flat.reshape(4, 3) / np.linalg.norm(flat.reshape(4, 3), axis=1, keepdims=True)
        weights = np.exp(beta * (x @ x.T - 1))
        A = weights @ x / weights.sum(1, keepdims=True)
        speed: np.ndarray = A - (A * x).sum(1, keepdims=True) * x
        return speed.ravel()

    flow = MergingFlow("post", beta)
    end, apart, _ = flow.follow(flow.begin(theta[None], 1.0), TOGETHER)
    assert end.time[0] > 100
    solved = solve_ivp(velocity, (0.0, float(end.time[0])), theta.ravel(), method="Radau", rtol=1e-9, atol=1e-12)
    expected = solved.y[:, -1].reshape(4, 3)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    alive = np.flatnonzero(end.mass[0])
    assert np.abs(expected[alive] - end.theta[0, alive]).max() < 1e-2
    assert 1 - (expected @ expected.T).min() < 10 * float(apart[0])


def test_tokens_meet_once_and_keep_their_number() -> None:
    case = Case({"tokens": 9, "dim": 3, "start": "clusters"}, ((4, 1.0),))
    flow = MergingFlow("pre", 30.0)
    end, apart, radial = flow.follow(flow.begin(started(case, 4).numpy(), 1.0), TOGETHER)
    assert end.count == [2, 2, 2, 2]
    assert np.all(end.mass.sum(-1) == 9)
    assert np.all(apart < TOGETHER)
    assert np.all(radial > 0.999)
    assert np.all(end.time > math.exp(2 * 25))


def test_antipodal_tokens_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """An equilibrium that is no cluster is not taken for one."""
    monkeypatch.setattr("normscope.theorems.merging._STEPS", 500)
    theta = np.array([[[1.0, 0.0], [-1.0, 0.0]]])
    for scheme in SIX:
        flow = MergingFlow(scheme, 1.0)
        _, apart, _ = flow.follow(flow.begin(theta, 1.0), TOGETHER)
        assert apart[0] == pytest.approx(2)


@pytest.mark.parametrize("scheme", SIX)
def test_own_times_of_the_page_are_those_of_its_schemes(scheme: str) -> None:
    when = clustering._when(scheme, 3.0)
    assert own_time(scheme, when + 1 if ends_free(scheme) else when) == pytest.approx(3.0)
