"""From what runs measured to an order of schemes, and how sure it is.

Runs are drawn again with replacement, the same runs for all schemes, since they went through the same layers. A redraw takes
one run fewer than there are: then its mean varies as much as the mean of the runs themselves does, s²/R.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from normscope.audit.advise_run import RunMeasures
from normscope.audit.advise_setting import LEVELS
from normscope.errors import InputError, did_you_mean

REDRAWS = 2000
BAND = (0.05, 0.95)  # an interval holds 90 % of the redraws
SURE = 0.95  # a scheme stands above another if so many redraws say so
_SAME = 1e-3  # a smaller relative difference is none
_SMALLEST = 1e-6  # nor is a smaller absolute one
_BROKEN = -1e30  # the score of a run that left the finite numbers
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Criterion:
    """What schemes are ranked by.

    Attributes:
        name: how commands call it.
        title: what it is, for people.
        unit: of its values.
        low_is_better: whether small values are good.
        meaning: how it is measured, in a sentence.
    """

    name: str
    title: str
    unit: str
    low_is_better: bool
    meaning: str


CRITERIA = (
    Criterion(
        "early", "early movement", "°/layer", False,
        "angle by which a layer of the first third turns a token, less what all tokens turn together",
    ),
    Criterion("late", "late movement", "°/layer", False, "the same for the last third"),
    Criterion("collapse", "resistance to collapse", "1 − cosine", False, "1 − mean cosine of the tokens after the last layer"),
    Criterion(
        "gradient", "gradient flow", "decades", True,
        "distance from 1, in powers of ten, of the gradient at the first layer over that at the last",
    ),
    Criterion(
        "noise", "robustness to norm noise", "°", True,
        f"angle by which {100 * LEVELS[0]:g} % of noise on the norms of q, k and messages turns the last directions",
    ),
)  # fmt: skip


def chosen_criteria(text: str | None) -> dict[str, float]:
    """Criteria to rank by with their weights: ``early,noise=2``; all of them alike if there is no text."""
    names = [criterion.name for criterion in CRITERIA]
    if text is None:
        return dict.fromkeys(names, 1.0)
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = (piece.strip() for piece in part.partition("="))
        if name not in names:
            raise InputError(f"unknown criterion '{name}'; allowed: {', '.join(names)}{did_you_mean(name, names)}")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            raise InputError(f"the weight of criterion '{name}' is a number, not '{weight}'") from None
        if not 0 < weights[name] < np.inf:
            raise InputError(f"the weight of criterion '{name}' is a positive number, not {weight}; leave it out for none")
    return weights


def criteria_of(measures: Sequence[RunMeasures]) -> Values:
    """The criteria's values, (runs, schemes, criteria)."""
    return np.stack([_of_run(run) for run in measures])


def _of_run(run: RunMeasures) -> Values:
    third = max(1, run.moved.shape[1] // 3)
    return np.stack(
        [
            run.moved[:, :third].mean(1),
            run.moved[:, -third:].mean(1),
            run.gap[:, -1],
            np.abs(run.gradient[:, 0] - run.gradient[:, -1]),
            run.drift[:, 0],
        ],
        axis=1,
    )


def ranks_of(scores: Values) -> Values:
    """Ranks from 1, the largest score, along the axis before the last; equal ones share the mean of their ranks."""
    own, other = scores[..., :, None, :], scores[..., None, :, :]
    apart = other - own
    same = np.abs(apart) <= np.maximum(_SAME * np.maximum(np.abs(own), np.abs(other)), _SMALLEST)
    above = (apart > 0) & ~same
    ranks: Values = above.sum(-2) + 0.5 * same.sum(-2) + 0.5
    return ranks


@dataclass(frozen=True)
class Ranking:
    """The order of schemes and its uncertainty, as tables.

    Attributes:
        criteria: a row for each scheme and criterion: mean, low, high, rank, rank_low, rank_high, runs (finite ones).
        order: a row for each scheme, the best first: place, rank, low, high, level_with, first. A place counts the schemes that
            surely stand above; ``level_with`` names those that surely stand neither above nor below; ``first`` is how often a
            scheme is first when the weights of the criteria are drawn too, every set of weights as likely as any other.
        pairs: how many of the redraws put ``scheme`` above ``other``.
    """

    criteria: pd.DataFrame
    order: pd.DataFrame
    pairs: pd.DataFrame


def rank(names: Sequence[str], values: Values, weights: Mapping[str, float], seed: int = 0) -> Ranking:
    """Rank schemes by the weighted mean of their ranks in the criteria, from values (runs, schemes, criteria)."""
    runs = len(values)
    generator = np.random.default_rng(seed)
    redrawn = generator.integers(runs, size=(REDRAWS, runs - 1))
    signs = np.array([-1.0 if criterion.low_is_better else 1.0 for criterion in CRITERIA])
    scores = np.where(np.isfinite(values), signs * values, _BROKEN)
    share = np.array([weights.get(criterion.name, 0.0) for criterion in CRITERIA])
    share /= share.sum()
    by_criterion, by_redraw = ranks_of(scores.mean(0)), ranks_of(scores[redrawn].mean(1))
    overall = by_redraw @ share
    any_weights = np.where(share > 0, generator.exponential(size=(REDRAWS, 1, len(share))), 0.0)
    firsts = _firsts((by_redraw * any_weights).sum(-1))
    return Ranking(
        _criteria_table(names, values, redrawn, by_criterion, by_redraw),
        *_order(names, overall, firsts),
    )


def _criteria_table(
    names: Sequence[str], values: Values, redrawn: npt.NDArray[np.int64], ranks: Values, by_redraw: Values
) -> pd.DataFrame:
    rows = []
    rank_low, rank_high = np.quantile(by_redraw, BAND, axis=0)
    for i, name in enumerate(names):
        for j, criterion in enumerate(CRITERIA):
            own = values[:, i, j]
            finite = bool(np.isfinite(own).all())
            low, high = np.quantile(own[redrawn].mean(1), BAND) if finite else (np.nan, np.nan)
            rows.append(
                {
                    "scheme": name,
                    "criterion": criterion.name,
                    "mean": own.mean() if finite else np.nan,
                    "low": low,
                    "high": high,
                    "rank": ranks[i, j],
                    "rank_low": rank_low[i, j],
                    "rank_high": rank_high[i, j],
                    "runs": int(np.isfinite(own).sum()),
                }
            )
    return pd.DataFrame(rows)


def _firsts(totals: Values) -> Values:
    """In which share of the redraws each scheme is first; schemes that are level share it."""
    first = totals <= totals.min(-1, keepdims=True) * (1 + _SMALLEST)
    shares: Values = (first / first.sum(-1, keepdims=True)).mean(0)
    return shares


def _order(names: Sequence[str], redrawn: Values, firsts: Values) -> tuple[pd.DataFrame, pd.DataFrame]:
    apart = redrawn[:, None, :] - redrawn[:, :, None]  # positive where the row's scheme stands above the column's
    equal = np.abs(apart) < _SMALLEST
    above = ((apart > 0) & ~equal).mean(0) + 0.5 * equal.mean(0)
    low, high = np.quantile(redrawn, BAND, axis=0)
    rows = []
    for i in range(len(names)):
        level = [names[j] for j in range(len(names)) if j != i and 1 - SURE < above[i, j] < SURE]
        rows.append(
            {
                "scheme": names[i],
                "place": 1 + int((above[:, i] >= SURE).sum()),
                "rank": redrawn[:, i].mean(),
                "low": low[i],
                "high": high[i],
                "level_with": ", ".join(level),
                "first": firsts[i],
            }
        )
    pairs = [
        {"scheme": names[i], "other": names[j], "above": above[i, j]}
        for i in range(len(names))
        for j in range(len(names))
        if i != j
    ]
    order = pd.DataFrame(rows).sort_values(["place", "rank"], kind="stable", ignore_index=True)
    return order, pd.DataFrame(pairs, columns=["scheme", "other", "above"])
