"""Evidence: correlations are scipy's, intervals cover, fitted weights are those of non-negative least squares."""

import math

import numpy as np
import pytest
from scipy.optimize import nnls
from scipy.stats import kendalltau, rankdata, spearmanr

from normscope.dynamics.evidence import Correlation, average_ranks, correlation, fitted_weights, kendall, spearman, trust

ONCE = np.ones((1, 11))
DRAWN = np.random.default_rng(3)


def with_ties(*shape: int) -> np.ndarray:
    return DRAWN.integers(0, 6, size=shape).astype(float)


def test_correlations_are_scipys_with_ties_infinities_and_gaps() -> None:
    x, y = with_ties(20, 11), with_ties(20, 11)
    y[:, 0], y[3:, 4] = math.inf, math.nan
    for row, (a, b) in enumerate(zip(x, y, strict=True)):
        there = ~np.isnan(b)
        by_rank = rankdata(b[there])  # scipy's own ranks of infinities are right, its differences of them are not
        assert spearman(x, y, ONCE)[row, 0] == pytest.approx(spearmanr(a[there], by_rank).statistic)
        assert kendall(x, y, ONCE)[row, 0] == pytest.approx(kendalltau(a[there], by_rank).statistic)
    np.testing.assert_array_equal(average_ranks(x), rankdata(x, axis=1))
    assert np.isnan(spearman(np.ones((1, 11)), with_ties(1, 11), ONCE)).all()


def test_schemes_that_count_twice_are_two_schemes() -> None:
    x, y, times = with_ties(8), with_ties(8), with_ties(3, 8)
    for row, counts in enumerate(times.astype(int)):
        a, b = np.repeat(x, counts), np.repeat(y, counts)
        assert spearman(x, y, times)[row] == pytest.approx(spearmanr(a, b).statistic)
        assert kendall(x, y, times)[row] == pytest.approx(kendalltau(a, b).statistic)


def test_an_interval_covers_the_correlation_of_all_schemes() -> None:
    """Of many experiments with 16 schemes each, about nine in ten intervals hold the correlation that all schemes have."""
    rho = 0.5
    true = 6 / math.pi * math.asin(rho / 2)  # Spearman's correlation of normal variables
    covered = []
    for seed in range(150):
        generator = np.random.default_rng(seed)
        x = generator.normal(size=(1, 16))
        y = rho * x + math.sqrt(1 - rho**2) * generator.normal(size=(1, 16))
        each = correlation(x, y, seed=seed)
        covered.append(each.low <= true <= each.high)
    assert 0.8 < np.mean(covered) < 0.97


def test_depths_that_agree_are_no_more_schemes() -> None:
    """The same schemes at three depths with the same outcome are not three times the evidence."""
    x, y = DRAWN.normal(size=(2, 1, 16))
    once, three = correlation(x, y), correlation(np.repeat(x, 3, 0), np.repeat(y, 3, 0))
    assert (three.value, three.low, three.high) == pytest.approx((once.value, once.low, once.high))
    assert (three.schemes, three.depths) == (16, 3)


def test_a_single_failure_is_no_evidence() -> None:
    """Many redraws leave the only scheme that failed out, and show no relation."""
    x, y = np.arange(16.0)[None], np.zeros((1, 16))
    y[0, -1] = 1
    assert correlation(x, y).value > 0.3
    assert not correlation(x, y).positive
    y[0, -4:] = 1
    assert correlation(x, y).positive


def test_weights_are_those_of_non_negative_least_squares() -> None:
    for _ in range(20):
        ranks = average_ranks(DRAWN.normal(size=(2, 5, 12))).swapaxes(1, 2)
        outcome = ranks @ np.array([0.5, 0.0, 0.3, 0.0, 0.0]) + DRAWN.normal(scale=3, size=(2, 12))
        centred = (ranks - ranks.mean(1, keepdims=True)).reshape(-1, 5)
        target = average_ranks(outcome)
        expected = nnls(centred, (target - target.mean(1, keepdims=True)).ravel())[0]
        np.testing.assert_allclose(fitted_weights(ranks, outcome), expected / expected.sum(), atol=1e-9)
        ranks[1], ranks[1, 3] = ranks[0], math.nan
        outcome[1] = outcome[0]
        assert np.isfinite(fitted_weights(ranks, outcome)).all()  # a scheme without ranks is left out


def test_a_criterion_that_decides_is_chosen_and_one_that_does_not_is_left_out() -> None:
    generator = np.random.default_rng(0)
    quality = generator.normal(size=(1, 16))
    seen = np.stack([quality + 0.3 * generator.normal(size=(3, 16)), generator.normal(size=(3, 16))], -1)
    ranks = average_ranks(seen.swapaxes(1, 2)).swapaxes(1, 2)
    outcome = quality + 0.1 * generator.normal(size=(3, 16))
    outcome[:, 3], outcome[2, 5] = math.inf, math.nan  # one scheme always diverges, one was not trained at the last depth
    found = trust(ranks, outcome)
    assert found.correlations[0].positive
    assert not found.correlations[1].positive
    assert list(found.weights) == [1, 0]
    assert [each.schemes for each in found.tested] == [16, 16, 15]
    assert all(each.value > 0.6 for each in found.tested)


def test_where_nothing_predicts_nothing_has_weight() -> None:
    ranks = average_ranks(np.random.default_rng(6).normal(size=(3, 4, 16))).swapaxes(1, 2)
    found = trust(ranks, 17 - ranks.mean(-1))  # the opposite of what every criterion says
    assert not found.weights.any()
    assert all(math.isnan(each.value) for each in found.tested)
    assert correlation(ranks[..., 0], np.full((3, 16), math.nan)).schemes == 0
    assert not Correlation(0.3, -0.1, 0.6, 16, 3).positive
