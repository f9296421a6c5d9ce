"""Circuit collapse against SciPy's quadrature, closed forms and draws; first-order propagation against the derivative."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import ndtr
from torch import Tensor
from torch.func import jvp

from normscope.errors import InputError
from normscope.measures import collapse_probability as collapse
from normscope.measures.collapse import _Contested, level_at, rising_root
from normscope.measures.collapse_probability import collapse_margin, collapse_probability, sampled_collapse
from normscope.measures.propagation import first_order_change
from normscope.models import Softmax

LEVELS = [0.01, 0.05, 0.12, 0.3, 0.5]
NONE = -math.inf


def by_quadrature(row: list[float], level: float, noise: str) -> float:
    """E[1 − Π_t F_t(X_{t*})] over the density of X_{t*}, split wherever some F_t has a kink or is steep."""
    seen = np.array([w for w in row if w != NONE])
    best, others = seen.max(), np.delete(seen, seen.argmax())
    if best == 0 and noise == "uniform":
        return 0.0
    size = level * (math.sqrt(3) if noise == "uniform" else 1)

    def below(x: float) -> float:
        z = np.where(others == 0, np.copysign(np.inf, x), (x - others) / (size * np.where(others == 0, 1, np.abs(others))))
        return float(np.prod(np.clip((1 + z) / 2, 0, 1) if noise == "uniform" else ndtr(z)))

    def density(z: float) -> float:
        return 0.5 if noise == "uniform" else math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    end = 1.0 if noise == "uniform" else 8.0
    kinks = [(w + s * size * abs(w) - best) / (size * abs(best)) for w in others for s in (-1, 0, 1)] if best else []
    ends = sorted({-end, end, *np.linspace(-end, end, 9), *(k for k in kinks if -end < k < end)})
    pieces = (
        quad(lambda z: density(z) * (1 - below(best + size * abs(best) * z)), a, b, epsabs=1e-11)[0] for a, b in pairwise(ends)
    )
    return float(sum(pieces))


def tensor(rows: list[list[float]], dtype: torch.dtype = torch.float64) -> Tensor:
    """The rows, filled up with keys that are not seen."""
    longest = max(map(len, rows))
    return torch.tensor([row + [NONE] * (longest - len(row)) for row in rows], dtype=dtype)


def random_rows(seed: int) -> list[list[float]]:
    """Rows of several kinds: spread out, close together, many kinks, negative, equal."""
    draw = np.random.default_rng(seed)
    return [
        draw.normal(0, 8, 12).tolist(),
        [20.0, *(20 * (1 - draw.exponential(0.05, 40))).tolist()],
        [40.0, *(40 * draw.uniform(0.5, 0.8, 100)).tolist()],
        (-draw.uniform(3, 9, 15)).tolist(),
        [9.0, *np.repeat(draw.uniform(5, 9, 3), 20).tolist()],
        (30 * (1 - np.geomspace(1e-3, 0.9, 20))).tolist(),
    ]


EXTREME = [
    [5.0],
    [5.0, 5.0],
    [3.0] * 90,
    [0.0, -1.0, -2.0],
    [0.0, 0.0, -1.0],
    [5.0, 0.0, -1.0],
    [5.0, 1e-5, -5.0, -9.0],
    [-1.0, -1.2, -30.0],
    [-2.0, -2.0, -2.0],
    [1e-4, 0.9e-4, -50.0],
    [3e4, 2.9e4, 2.5e4],
]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_the_probability_is_the_integral(noise: str, dtype: torch.dtype, error: float) -> None:
    rows = random_rows(0) + EXTREME
    found = collapse_probability(tensor(rows, dtype), LEVELS, noise)
    expected = torch.tensor([[by_quadrature(row, level, noise) for row in rows] for level in LEVELS], dtype=torch.float64)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=error)


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_two_keys_have_a_closed_form(noise: str) -> None:
    first, second = 10.0, torch.linspace(1, 10, 37, dtype=torch.float64)
    found = collapse_probability(torch.stack((torch.full_like(second, first), second), 1), LEVELS, noise)
    for level, p in zip(LEVELS, found, strict=True):
        if noise == "uniform":
            c = first / second
            expected = c / 8 * ((1 - (c - 1) / (math.sqrt(3) * level)) / c + 1).clamp(min=0) ** 2
        else:
            expected = torch.special.ndtr((second - first) / (level * (first**2 + second**2).sqrt()))
        torch.testing.assert_close(p, expected, rtol=0, atol=2e-8)


@given(
    rows=st.lists(st.lists(st.floats(-20, 30), min_size=1, max_size=12), min_size=1, max_size=5),
    level=st.floats(0.01, 0.55),
    noise=st.sampled_from(["uniform", "gaussian"]),
)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_draws_agree_with_the_probability(rows: list[list[float]], level: float, noise: str) -> None:
    draws = 4000
    exact = collapse_probability(tensor(rows), [level], noise)
    generator = torch.Generator().manual_seed(1)
    sampled = sampled_collapse(tensor(rows), Softmax(), [level], draws, generator, noise, noisy="k").loose
    # 4 standard errors, as 40 examples of up to five rows are compared, and one draw for very rare collapses
    assert ((sampled - exact).abs() <= 4 * (exact * (1 - exact) / draws).sqrt() + 1 / draws).all()


def test_draws_with_query_noise_agree_within_three_standard_errors() -> None:
    scores, draws = tensor(random_rows(1)), 20_000
    exact = collapse_probability(scores, [0.05, 0.2])
    found = sampled_collapse(scores, Softmax(0.7), [0.05, 0.2], draws, torch.Generator().manual_seed(0))
    assert ((found.loose - exact).abs() <= 3 * (exact * (1 - exact) / draws).sqrt() + 1 / draws).all()
    assert (found.strict <= found.loose).all()
    assert (found.strict < found.loose).any()


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_a_bias_of_positions_gets_no_noise(noise: str) -> None:
    """Draws of w_t(1 + κ_t) + b_t, made here, against the integral; the margin is where uniform noise begins to matter."""
    generator, draws, level = torch.Generator().manual_seed(3), 100_000, 0.2
    scores = torch.randn(40, 12, generator=generator, dtype=torch.float64)
    bias = 2 * torch.randn(40, 12, generator=generator, dtype=torch.float64)
    scores[:5, 8:] = NONE
    exact = collapse_probability(scores, [level], noise, bias)[0]
    drawn = torch.rand(draws, 12, generator=generator, dtype=torch.float64).mul(2).sub(1).mul(math.sqrt(3))
    if noise == "gaussian":
        drawn = torch.randn(draws, 12, generator=generator, dtype=torch.float64)
    rows = zip(scores, bias, strict=True)
    moved = [(row * (1 + level * drawn) + b).argmax(1) != (row + b).argmax() for row, b in rows]
    sampled = torch.stack(moved).double().mean(1)
    assert 0.05 < exact.max() < 1
    assert ((sampled - exact).abs() <= 4 * (exact * (1 - exact) / draws).sqrt() + 1e-4).all()
    estimated = sampled_collapse(scores, Softmax(0.5, bias=bias / 2), [level], 4000, generator, noise, noisy="k").loose[0]
    assert ((estimated - exact).abs() <= 4 * (exact * (1 - exact) / 4000).sqrt() + 1 / 4000).all()
    none = collapse_probability(scores, LEVELS, noise, 0 * bias)
    torch.testing.assert_close(none, collapse_probability(scores, LEVELS, noise), rtol=0, atol=1e-3)
    margin = collapse_margin(scores, bias)
    reached = collapse_probability(scores, [level], "uniform", bias)[0] > 0
    assert (reached <= (margin < math.sqrt(3) * level)).all()


def test_a_low_threshold_makes_strict_loose() -> None:
    found = sampled_collapse(tensor(random_rows(2)), Softmax(), [0.2], 500, torch.Generator().manual_seed(0), threshold=0.0)
    assert found.loose.max() > 0
    assert found.strict.equal(found.loose)


def test_strict_is_the_softmax_of_the_new_maximum() -> None:
    """Of two keys, the new one is always sparse at a very large scale, and never at a very small one."""
    scores = torch.tensor([[10.0, 9.9]])
    sharp, flat = (
        sampled_collapse(scores, Softmax(scale), [0.2], 4000, torch.Generator().manual_seed(0)) for scale in (1e6, 1e-6)
    )
    assert sharp.strict.equal(sharp.loose)
    assert flat.loose.equal(sharp.loose)
    assert flat.strict.max() == 0


def test_query_noise_alone_never_collapses() -> None:
    found = sampled_collapse(
        tensor(random_rows(3) + EXTREME), Softmax(), LEVELS, 500, torch.Generator().manual_seed(0), noisy="q"
    )
    assert found.loose.max() == 0


def test_draws_repeat_with_their_seed_and_do_not_depend_on_keys_that_are_not_seen() -> None:
    scores = tensor([[4.0, 3.9, 3.0], [2.0]])
    first, again = (sampled_collapse(scores, Softmax(), [0.1], 300, torch.Generator().manual_seed(5)).loose for _ in range(2))
    assert first.equal(again)
    assert first[0, 0] > 0
    assert first[0, 1] == 0


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_more_noise_never_collapses_less(noise: str) -> None:
    """For fixed z the row collapses iff w_{t*} − w_t < size · (|w_t| z_t − |w_{t*}| z_{t*}) for some t: once, then always."""
    levels = np.geomspace(0.003, 0.55, 40).tolist()
    found = collapse_probability(tensor(random_rows(4) + EXTREME), levels, noise)
    assert found.diff(dim=0).min() > -1e-6
    assert found.min() >= 0
    assert found.max() <= 1


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_order_of_keys_temperature_and_keys_not_seen_change_nothing(noise: str) -> None:
    scores = tensor(random_rows(5) + EXTREME)
    found = collapse_probability(scores, LEVELS, noise)
    order = torch.randperm(scores.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(collapse_probability(scores[:, order], LEVELS, noise), found, rtol=0, atol=1e-12)
    torch.testing.assert_close(collapse_probability(0.1 * scores, LEVELS, noise), found, rtol=0, atol=1e-9)
    more = torch.nn.functional.pad(scores, (0, 30), value=NONE)
    torch.testing.assert_close(collapse_probability(more, LEVELS, noise), found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_blocks_and_threads_change_nothing(noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = 8 * torch.randn(50, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, threads = collapse_probability(scores, LEVELS, noise), torch.get_num_threads()
    monkeypatch.setattr(collapse, "_BLOCK_ROWS", 7)
    monkeypatch.setattr(collapse, "_CHUNK", 12)
    torch.set_num_threads(2)
    try:
        torch.testing.assert_close(collapse_probability(scores, LEVELS, noise), whole, rtol=0, atol=1e-7)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_collapse_begins_at_the_margin() -> None:
    scores = tensor([*random_rows(6), [5.0, 4.0], [-1.0, -1.5]])
    for row, margin in zip(scores, collapse_margin(scores).tolist(), strict=True):
        if margin:
            below, above = collapse_probability(row[None], [x * margin / math.sqrt(3) for x in (1 - 1e-6, 1 + 1e-3)])
            assert below == 0
            assert above > 0


def test_margins() -> None:
    rows = [[3.0, 1.0, NONE], [5.0], [4.0, 4.0, 1.0], [0.0, 0.0], [0.0, -2.0], [2.0, -1.0], [-1.0, -3.0], [1.0, 0.0]]
    expected = torch.tensor([0.5, 1, 0, 0, 1, 1, 0.5, 1], dtype=torch.float64)
    assert collapse_margin(tensor(rows)).equal(expected)
    assert collapse_margin(torch.ones(2, 1)).tolist() == [1, 1]


def test_no_noise_and_single_keys_never_collapse() -> None:
    assert collapse_probability(tensor([[3.0, 3.0, 2.0]]), [0.0]).item() == 0
    assert collapse_probability(torch.ones(4, 1), [0.1]).max() == 0
    assert collapse_probability(torch.full((2, 3), NONE), [0.1]).max() == 0
    assert collapse_probability(torch.ones(2, 3), []).shape == (0, 2)
    assert collapse_probability(torch.ones(0, 3), [0.1]).shape == (1, 0)
    assert collapse_probability(torch.ones(1, 3).bfloat16(), [0.1]).item() == pytest.approx(2 / 3, abs=1e-5)


def test_what_is_refused() -> None:
    scores, generator = torch.ones(1, 2), torch.Generator()
    with pytest.raises(InputError, match="did you mean 'uniform'"):
        collapse_probability(scores, [0.1], "unifrom")
    with pytest.raises(InputError, match="stay positive"):
        collapse_probability(scores, [0.58])
    for level in (-0.1, math.nan, math.inf):
        with pytest.raises(InputError, match="0 or more"):
            collapse_probability(scores, [level], "gaussian")
    for bad in (math.nan, math.inf):
        for call in (collapse_margin, lambda rows: collapse_probability(rows, [0.1])):
            with pytest.raises(InputError, match="finite"):
                call(torch.tensor([[1.0, bad]]))
    for scale, draws in ((0.0, 5), (1.0, 0)):
        with pytest.raises(InputError, match="positive"):
            sampled_collapse(scores, Softmax(scale), [0.1], draws, generator)
    with pytest.raises(InputError, match="q, k or qk"):
        sampled_collapse(scores, Softmax(), [0.1], 5, generator, noisy="v")


def random_head(seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """q, k, m and their changes, for a batch of 2 × 3."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, 8), (2, 3, 10, 8), (2, 3, 10, 5)] * 2
    q, k, m, d_q, d_k, d_m = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return (q, k, m), (d_q, d_k, d_m)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_theorem_4_is_the_derivative(scale: float) -> None:
    inputs, changes = random_head(0)

    def head(q: Tensor, k: Tensor, m: Tensor) -> Tensor:
        return (torch.einsum("...td,...d->...t", k, q).mul(scale).softmax(-1).unsqueeze(-2) @ m).squeeze(-2)

    found = first_order_change(*inputs, *changes, scale)
    for part, change in enumerate((found.from_q, found.from_k, found.from_m)):
        tangents = tuple(d if i == part else torch.zeros_like(d) for i, d in enumerate(changes))
        torch.testing.assert_close(change, jvp(head, inputs, tangents)[1], rtol=0, atol=1e-8)


def test_theorem_5_in_sparse_attention_only_the_selected_message_counts() -> None:
    (q, k, m), (d_q, d_k, d_m) = random_head(1)
    found = first_order_change(q, k, m, d_q, d_k, d_m, scale=1e4)
    selected = torch.einsum("...td,...d->...t", k, q).argmax(-1)
    torch.testing.assert_close(found.from_q, torch.zeros_like(found.from_q), rtol=0, atol=1e-8)
    torch.testing.assert_close(found.from_k, torch.zeros_like(found.from_k), rtol=0, atol=1e-8)
    expected = d_m.take_along_dim(selected[..., None, None], -2).squeeze(-2)
    torch.testing.assert_close(found.from_m, expected, rtol=0, atol=1e-8)


def test_theorem_6_in_isotropic_attention_means_are_plain() -> None:
    (q, k, m), (d_q, d_k, d_m) = random_head(2)
    k = k - k @ q[..., None] * q[..., None, :] / q.square().sum(-1)[..., None, None]  # every score is 0
    found = first_order_change(q, k, m, d_q, d_k, d_m)
    centred_k, centred_m = k - k.mean(-2, keepdim=True), m - m.mean(-2, keepdim=True)
    torch.testing.assert_close(found.from_q, torch.einsum("...ti,...tj,...j->...i", m, centred_k, d_q) / 10)
    torch.testing.assert_close(found.from_k, torch.einsum("...ti,...tj,...j->...i", centred_m, d_k, q) / 10)
    torch.testing.assert_close(found.from_m, d_m.mean(-2))
    constant = k.mean(-2, keepdim=True).expand_as(k)
    assert first_order_change(q, constant, m, d_q, d_k, d_m).from_q.abs().max() < 1e-12
    assert first_order_change(torch.zeros_like(q), k, m, d_q, d_k, d_m).from_k.abs().max() == 0


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_the_level_of_a_share_is_solved_on_the_exact_curve(noise: str) -> None:
    """Against SciPy's root of the mean of its own quadratures, from rows most of which no noise of interest can move."""
    moved = [[20.0, 14.0, 13.0, -3.0], [8.0, 6.5, 1.0, 0.0], [30.0, 21.0, 20.0, 19.0]]
    safe = [[20.0, 1.0, 0.5, -3.0], [9.0, 0.5, NONE, NONE], [6.0, NONE, NONE, NONE]]
    scores, of_head = tensor(moved + safe), torch.tensor([0, 0, 1, 1, 2, 2])
    reach = math.sqrt(3) * 0.3 if noise == "uniform" else math.inf
    layers = [
        _Contested.of(scores, None, of_head, 4, reach),
        _Contested.of(tensor(safe), None, torch.zeros(3).long(), 4, reach),
    ]
    assert noise == "gaussian" or len(layers[0].scores) == 3
    solved = level_at(layers, 0.01, noise)

    def share(level: float) -> float:
        return sum(by_quadrature(row, level, noise) for row in moved + 2 * safe) / 9

    assert solved["noise"] == pytest.approx(brentq(lambda level: share(level) - 0.01, 0.02, 0.3), rel=2e-5)
    assert solved["sparse"] == 9
    heads = [share_of - 0.01 * len(rows) for rows in (moved[:2], [moved[2], safe[0]], safe[1:], safe)
             for share_of in [sum(by_quadrature(row, solved["noise"], noise) for row in rows)]]  # fmt: skip
    slope = (share(1.001 * solved["noise"]) - share(0.999 * solved["noise"])) / (0.002 * solved["noise"])
    assert solved["stderr"] == pytest.approx(math.hypot(*heads) / 9 / slope, rel=1e-2)
    alone = level_at([_Contested.of(tensor(moved), None, torch.zeros(3).long(), 2, reach)], 0.01, noise)
    assert alone["noise"] > 0
    assert math.isnan(alone["stderr"])  # between heads, of which one alone has rows


def test_a_share_that_no_noise_reaches_has_no_level() -> None:
    rows = _Contested.of(tensor([[20.0, 1.0]]), None, torch.tensor([0]), 1, math.sqrt(3) * 0.3)
    assert math.isnan(level_at([rows], 0.01, "uniform")["noise"])
    assert level_at([], 0.01, "uniform")["sparse"] == 0


@given(st.floats(0.01, 0.99), st.integers(1, 9))
def test_roots_of_rising_functions(root: float, power: int) -> None:
    """Flat at first, then steep: what a share of rows looks like."""
    found = rising_root(lambda x: max(x - root / 2, 0.0) ** power - (root / 2) ** power, 0.0, 1.0, -((root / 2) ** power))
    assert found == pytest.approx(root, rel=1e-4)
