"""Evidence: how well criteria that are known before training predicted what training came to, and weights fitted to it.

Numbers are compared by ranks: losses of diverged runs are infinite, and criteria have different units. Intervals are over
schemes: those of an experiment are redrawn with replacement, the same ones at all depths, because a scheme's fortunes at two
depths are not independent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from normscope.dynamics.advice import BAND, REDRAWS

Numbers = npt.NDArray[np.float64]
Statistic = Callable[[Numbers, Numbers], Numbers]


def average_ranks(values: Numbers) -> Numbers:
    """Ranks from 1, the smallest value, along the last axis; equal ones share the mean of their ranks, NaN has none."""
    each, other = values[..., :, None], values[..., None, :]
    ranks: Numbers = (each > other).sum(-1) + 0.5 * (each == other).sum(-1) + 0.5
    return np.where(np.isnan(values), np.nan, ranks)


def spearman(x: Numbers, y: Numbers) -> Numbers:
    """Spearman's rank correlation along the last axis, of the places where both have a value; NaN where one is constant."""
    x, y = _both(x, y)
    a, b = average_ranks(x), average_ranks(y)
    a, b = (ranks - _mean(ranks)[..., None] for ranks in (a, b))
    return _ratio(np.nansum(a * b, -1), np.nansum(a * a, -1) * np.nansum(b * b, -1))


def kendall(x: Numbers, y: Numbers) -> Numbers:
    """Kendall's τ-b along the last axis: pairs in the same order minus pairs in the opposite order, corrected for ties."""
    a, b = (_signs(values) for values in _both(x, y))
    axes = (-2, -1)
    return _ratio((a * b).sum(axes), (a * a).sum(axes) * (b * b).sum(axes))


def _both(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    missing = np.isnan(x) | np.isnan(y)
    return np.where(missing, np.nan, x), np.where(missing, np.nan, y)


def _signs(values: Numbers) -> Numbers:
    each, other = values[..., :, None], values[..., None, :]
    signs: Numbers = (each > other).astype(float) - (each < other)
    return signs


def _mean(ranks: Numbers) -> Numbers:
    count = (~np.isnan(ranks)).sum(-1)
    mean: Numbers = np.nansum(ranks, -1) / np.maximum(count, 1)
    return mean


def _ratio(product: Numbers, squares: Numbers) -> Numbers:
    ratio: Numbers = np.divide(product, np.sqrt(squares), out=np.full(np.shape(product), np.nan), where=squares > 0)
    return ratio


@dataclass(frozen=True)
class Correlation:
    """A rank correlation with its interval over schemes.

    Attributes:
        value: the mean over depths.
        low, high: hold 90 % of the redraws.
        schemes: how many have a value at some depth.
        depths: how many have a correlation.
    """

    value: float
    low: float
    high: float
    schemes: int
    depths: int

    @property
    def positive(self) -> bool:
        """Whether the interval lies above 0: the prediction was better than none."""
        return self.low > 0


def correlation(x: Numbers, y: Numbers, statistic: Statistic = spearman, seed: int = 0) -> Correlation:
    """The correlation of two quantities over schemes, a mean over depths.

    Args:
        x, y: (depths, schemes); NaN where there is no value.
        statistic: ``spearman`` or ``kendall``.
        seed: of the redraws.
    """
    values = statistic(x, y)
    redrawn = np.random.default_rng(seed).integers(x.shape[-1], size=(REDRAWS, x.shape[-1]))
    with_values = np.isfinite(values)
    again = _mean(statistic(x[:, redrawn], y[:, redrawn]).T)
    low, high = np.nanquantile(again, BAND) if with_values.any() else (np.nan, np.nan)
    there = (~(np.isnan(x) | np.isnan(y))).any(0)
    value = float(values[with_values].mean()) if with_values.any() else np.nan
    return Correlation(value, float(low), float(high), int(there.sum()), int(with_values.sum()))


def fitted_weights(ranks: Numbers, outcome: Numbers) -> Numbers:
    """Weights w ≥ 0 with sum 1 of criteria whose Σ_c w_c·rank_c comes closest to the ranks of an outcome.

    Non-negative least squares on ranks without their mean at each depth, solved exactly: the best of the solutions on subsets
    of the criteria that have no negative weight. All weights are 0 where no criterion helps.

    Args:
        ranks: (depths, schemes, criteria).
        outcome: (depths, schemes), small is good; NaN where there is none.
    """
    known = ~np.isnan(outcome)
    target, columns = np.where(known, average_ranks(outcome), np.nan), np.where(known[..., None], ranks, np.nan)
    y = (target - _mean(target)[:, None])[known]
    a = (columns - _mean(columns.swapaxes(1, 2))[:, None, :])[known]
    best, least = np.zeros(ranks.shape[-1]), float(y @ y) * (1 - 1e-9)
    for size in range(1, ranks.shape[-1] + 1):
        for subset in map(list, combinations(range(ranks.shape[-1]), size)):
            solution = np.linalg.lstsq(a[:, subset], y)[0]
            error = float(((a[:, subset] @ solution - y) ** 2).sum())
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(ranks.shape[-1]), error
                best[subset] = solution
    return best / best.sum() if best.any() else best


@dataclass(frozen=True)
class Trust:
    """What trained models say about criteria.

    Attributes:
        correlations: of each criterion's ranks with the outcome, over all depths.
        weights: fitted to the criteria whose interval lies above 0, with sum 1; 0 for all others.
        tested: for each depth the correlation of the weighted ranks, when criteria were chosen and weights fitted on the other
            depths alone; NaN where no criterion was chosen.
    """

    correlations: tuple[Correlation, ...]
    weights: Numbers
    tested: tuple[Correlation, ...]


def trust(ranks: Numbers, outcome: Numbers, seed: int = 0) -> Trust:
    """How far criteria can be trusted, by an outcome of training that is small where it is good.

    Args:
        ranks: (depths, schemes, criteria), 1 the best.
        outcome: (depths, schemes); NaN where nothing was trained, infinite where training failed.
        seed: of the redraws.
    """
    correlations = _by_criterion(ranks, outcome, seed)
    tested = []
    for depth in range(len(outcome)):
        others = [other for other in range(len(outcome)) if other != depth]
        weights = _chosen(ranks[others], outcome[others], _by_criterion(ranks[others], outcome[others], seed))
        tested.append(correlation((ranks[[depth]] @ weights), outcome[[depth]], seed=seed))
    return Trust(correlations, _chosen(ranks, outcome, correlations), tuple(tested))


def _by_criterion(ranks: Numbers, outcome: Numbers, seed: int) -> tuple[Correlation, ...]:
    return tuple(correlation(ranks[..., i], outcome, seed=seed) for i in range(ranks.shape[-1]))


def _chosen(ranks: Numbers, outcome: Numbers, correlations: Sequence[Correlation]) -> Numbers:
    """Weights fitted to the criteria that predicted something; those alone count."""
    predicted = [i for i, each in enumerate(correlations) if each.positive]
    weights = np.zeros(ranks.shape[-1])
    if predicted:
        weights[predicted] = fitted_weights(ranks[..., predicted], outcome)
    return weights
