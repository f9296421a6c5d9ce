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

from normscope.dynamics.advice import BAND

Numbers = npt.NDArray[np.float64]
_REDRAWS = 20_000  # so that the ends of an interval vary by 0.004 between seeds
Statistic = Callable[[Numbers, Numbers, Numbers], Numbers]


def average_ranks(values: Numbers) -> Numbers:
    """Ranks from 1, the smallest value, along the last axis; equal ones share the mean of their ranks, NaN has none."""
    ranks: Numbers = _above(values).sum(-1) + 0.5
    return np.where(np.isnan(values), np.nan, ranks)


def spearman(x: Numbers, y: Numbers, times: Numbers) -> Numbers:
    """Spearman's rank correlation of schemes that count several times each.

    Args:
        x: (*batch, schemes); NaN where there is no value.
        y: likewise.
        times: how often each scheme counts, (redraws, schemes).

    Returns:
        Of the schemes with both values, (*batch, redraws); NaN where one of the two is constant.
    """
    counts = _counts(x, y, times)
    a, b = (_centred(counts @ _above(values).swapaxes(-1, -2), counts) for values in (x, y))
    return _ratio((counts * a * b).sum(-1), (counts * a * a).sum(-1) * (counts * b * b).sum(-1))


def kendall(x: Numbers, y: Numbers, times: Numbers) -> Numbers:
    """Kendall's τ-b: pairs in the same order minus pairs in the opposite order, corrected for ties; shapes as above."""
    counts = _counts(x, y, times)
    a, b = (_above(values) - _above(values).swapaxes(-1, -2) for values in (x, y))
    same, of_x, of_y = ((counts @ pairs * counts).sum(-1) for pairs in (a * b, a * a, b * b))
    return _ratio(same, of_x * of_y)


def _above(values: Numbers) -> Numbers:
    """1 where the value of the row is above that of the column, ½ where they are equal, 0 below; (*batch, n, n)."""
    each, other = values[..., :, None], values[..., None, :]
    above: Numbers = (each > other) + 0.5 * (each == other)
    return above


def _counts(x: Numbers, y: Numbers, times: Numbers) -> Numbers:
    counts: Numbers = times * ~(np.isnan(x) | np.isnan(y))[..., None, :]
    return counts


def _centred(ranks: Numbers, counts: Numbers) -> Numbers:
    mean: Numbers = (counts * ranks).sum(-1, keepdims=True) / np.maximum(counts.sum(-1, keepdims=True), 1)
    return ranks - mean


def _mean(ranks: Numbers) -> Numbers:
    """Along the last axis, of what is not NaN; NaN of nothing."""
    count = (~np.isnan(ranks)).sum(-1)
    return np.where(count, np.nansum(ranks, -1) / np.maximum(count, 1), np.nan)


def _ratio(product: Numbers, squares: Numbers) -> Numbers:
    ratio: Numbers = np.divide(product, np.sqrt(squares), out=np.full(np.shape(product), np.nan), where=squares > 1e-9)
    return ratio


@dataclass(frozen=True)
class Correlation:
    """A rank correlation with its interval over schemes.

    Attributes:
        value: the mean over depths, more of those with more schemes.
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
    """The correlation of two quantities over schemes, a mean over depths, each with the weight of its schemes less one.

    Redraws in which one of the two is constant show no relation, and count as 0.

    Args:
        x: (depths, schemes); NaN where there is no value.
        y: likewise.
        statistic: ``spearman`` or ``kendall``.
        seed: of the redraws.
    """
    schemes = x.shape[-1]
    redrawn = np.random.default_rng(seed).multinomial(schemes, np.full(schemes, 1 / schemes), size=_REDRAWS)
    values = statistic(x, y, np.ones((1, schemes)))[..., 0]
    there, defined = ~(np.isnan(x) | np.isnan(y)), np.isfinite(values)
    if not defined.any():
        return Correlation(np.nan, np.nan, np.nan, int(there.any(0).sum()), 0)
    shares = np.where(defined, there.sum(1) - 1.0, 0.0)
    shares /= shares.sum()
    again = np.nan_to_num(statistic(x, y, redrawn.astype(float)))
    low, high = np.quantile(shares @ again, BAND)
    mean = float(shares @ np.nan_to_num(values))
    return Correlation(mean, float(low), float(high), int(there.any(0).sum()), int(defined.sum()))


def fitted_weights(ranks: Numbers, outcome: Numbers) -> Numbers:
    """Weights w ≥ 0 with sum 1 of criteria whose Σ_c w_c·rank_c comes closest to the ranks of an outcome.

    Non-negative least squares on ranks without their mean at each depth, solved exactly: the best of the solutions on subsets
    of the criteria that have no negative weight. All weights are 0 where no criterion helps.

    Args:
        ranks: (depths, schemes, criteria); NaN where there is none, and the scheme does not count.
        outcome: (depths, schemes), small is good; NaN likewise.
    """
    known = ~(np.isnan(outcome) | np.isnan(ranks).any(-1))
    target, columns = average_ranks(np.where(known, outcome, np.nan)), np.where(known[..., None], ranks, np.nan)
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
        used = weights > 0
        tested.append(correlation(ranks[[depth]][..., used] @ weights[used], outcome[[depth]], seed=seed))
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
