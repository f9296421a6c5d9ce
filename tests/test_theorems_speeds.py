"""Claims on speeds and energies, by other means: SciPy, finite steps, and pages of a paper written out."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.optimize import brentq

from normscope.core import Attention
from normscope.core.norms import unit
from normscope.dynamics import Motion, interaction_energy
from normscope.schemes import NAMED
from normscope.theorems import Case, clustering
from normscope.theorems.flows import SIX, follow, in_cone, variance
from normscope.theorems.law import plain_attention


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_energy_of_a_flow_that_scipy_follows_never_rises() -> None:
    n, d, beta = 6, 3, 1.0

    def rates(t: float, flat: np.ndarray) -> np.ndarray:
        theta = flat.reshape(n, d)
        weights = np.exp(beta * theta @ theta.T)
        A = weights @ theta / weights.sum(-1, keepdims=True)
        moved: np.ndarray = A - (A * theta).sum(-1, keepdims=True) * theta
        return moved.ravel()

    start = unit(random(n, d)).numpy()
    path = solve_ivp(rates, (0, 20), start.ravel(), t_eval=np.linspace(0, 20, 200), rtol=1e-10, atol=1e-12)
    energies = np.array([-np.exp(beta * x @ x.T).sum() / (2 * beta) for x in path.y.T.reshape(-1, n, d)])
    assert (np.diff(energies) < 1e-9 * np.abs(energies[:-1])).all()
    assert energies[-1] == pytest.approx(-(n**2) * math.exp(beta) / (2 * beta), rel=1e-3)


@pytest.mark.parametrize("scheme", SIX)
def test_small_steps_lower_the_energy(scheme: str) -> None:
    motion, x = Motion(NAMED[scheme], Attention(2.0), 8.0), 1.5 * random(7, 4)
    for t in (0.0, 1.0, 3.0):
        settled = motion.settle(x, t)
        moved = settled + 1e-6 * motion.velocity(settled, t)
        assert float(interaction_energy(moved, 2.0)) < float(interaction_energy(settled, 2.0))


@pytest.mark.parametrize(("many", "few"), [(2, 1), (7, 1), (5, 2), (12, 11)])
def test_opposite_tokens_are_still_at_one_beta(many: int, few: int) -> None:
    """Their A_j along −e is (few·e^β − many·e^{−β})/Z, which SciPy has 0 at β = ½ ln(many/few)."""
    root = brentq(lambda beta: few * math.exp(beta) - many * math.exp(-beta), 0, 5)
    assert root == pytest.approx(math.log(many / few) / 2)
    signs = torch.tensor([1.0] * many + [-1.0] * few, dtype=torch.float64)[:, None]
    theta = signs * unit(random(1, 3))
    assert clustering._still_beta("pre", theta) == pytest.approx(root, abs=1e-9)
    for beta, sign in ((root - 0.1, -1), (root + 0.1, 1)):
        assert float(clustering._free_speeds("pre", beta, theta)[1][-1]) * sign > 0


def test_two_tokens_and_an_opposite_one_are_the_smallest_still_start() -> None:
    theta, few = clustering._opposite(Case({"tokens": 3, "dim": 2, "share": 1.0}, ((1, 1.0),)))
    assert few == 1
    assert torch.allclose(theta[0], theta[1])
    assert torch.allclose(theta[0], -theta[2])
    velocity = Motion(NAMED["pre"], Attention(math.log(2) / 2), 1.0).velocity(theta, 0.0)
    assert float(velocity[2].norm()) < 1e-15
    assert float((velocity[:2] @ theta[0]).min()) > 0.3


def test_at_most_half_of_the_tokens_are_still() -> None:
    for n in (3, 4, 5, 24):
        counts = [clustering._opposite(Case({"tokens": n, "dim": 2, "share": s}, ((1, 1.0),)))[1] for s in (0.0, 0.5, 1.0)]
        assert counts[0] == 1
        assert counts == sorted(counts)
        assert counts[-1] == (n - 1) // 2


def test_layernorm_scaling_divides_what_attention_reads() -> None:
    """A layer of Sun et al. written out: x + h·A(x/|x|/√ℓ), at ℓ = t + 1."""
    x, t, beta, h = random(5, 3), 3.0, 2.0, 1e-6
    read = unit(x) / math.sqrt(t + 1)
    written = (beta * read @ read.T).softmax(-1) @ read
    velocity = Motion(NAMED["ln-scaling"], Attention(beta), 8.0).velocity(x, t)
    assert torch.allclose(velocity, ((x + h * written) - x) / h, atol=1e-8)
    assert torch.allclose(written, plain_attention(unit(x), beta / (t + 1)) / math.sqrt(t + 1))
    assert not torch.allclose(written, plain_attention(unit(x), beta) / math.sqrt(t + 1), atol=1e-3)


@pytest.mark.parametrize(("scheme", "exponent"), [("ln-scaling", 1.0), ("pre", 2.0)])
def test_variance_in_a_cone_falls_as_a_power_of_time(scheme: str, exponent: float) -> None:
    start = in_cone(Case({"tokens": 5, "dim": 4, "place": "rim"}, ((1, 1.0),)), 1e-3, 1)
    (_, early), (_, late) = follow(Motion(NAMED[scheme], Attention(1.0), 4.0), start, [1e4, 1e6])
    fallen = math.log(float(variance(early)) / float(variance(late))) / math.log(100)
    assert fallen == pytest.approx(exponent, rel=0.02)


def test_a_large_radius_slows_both_schemes_with_free_radii() -> None:
    """Peri-LN moves r_0 times less than nGPT with α = 1, whatever the tokens."""
    theta = unit(random(6, 4))
    moved = {}
    for scheme, r in (("ngpt", 1.0), ("peri", 1.0), ("peri", 20.0), ("pre", 20.0), ("post", 1.0)):
        x = r * theta
        velocity = Motion(NAMED[scheme], Attention(1.0), 1.0).velocity(x, 0.0)
        moved[scheme, r] = (velocity - (velocity * theta).sum(-1, keepdim=True) * theta).norm(dim=-1) / r
    assert torch.allclose(moved["peri", 1.0], moved["ngpt", 1.0])
    assert torch.allclose(moved["peri", 20.0], moved["ngpt", 1.0] / 20)
    assert bool((moved["peri", 20.0] > moved["pre", 20.0]).all())
    assert bool((moved["peri", 20.0] < moved["post", 1.0]).all())
