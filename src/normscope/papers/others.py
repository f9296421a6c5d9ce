"""Tables of other papers: published perplexities beside each other, and beside language models that were trained here."""

import math
from typing import Any

import pandas as pd

from normscope.experiments.trained import STUCK, packaged, perplexities
from normscope.papers.entry import NO_NUMBERS, Entry, Reproduction, Request, Value
from normscope.results.tables import plain_rows

_SAME = 0.01  # relative difference of two perplexities that are called equal
_STORED = "stored: language models of this project (docs/results/language-models.md)"


def two_tables(request: Request) -> Reproduction:
    """Where two papers that trained the same schemes differ, and which schemes fail to train in each and here."""
    table = perplexities()
    both = table.pivot(index=["scheme", "model"], columns="paper", values="perplexity").dropna()
    apart = both.max(axis=1) / both.min(axis=1) - 1
    values = [
        Value(f"perplexity of {scheme} at {model}", _each(both.loc[(scheme, model)]), None, allowed=None, source="")
        for scheme, model in apart[apart > _SAME].index
    ]
    for scheme, theirs in table.groupby("scheme", sort=False):
        failures = {paper: ", ".join(rows[rows["failed"]]["model"]) or "none" for paper, rows in theirs.groupby("paper")}
        what = f"{scheme}: sizes that fail to train; held-out loss here"
        values.append(Value(what, _each(pd.Series(failures)), _own(str(scheme)), allowed=None, source=_STORED))
    scheme, model = apart.sort_values().index[-1]
    remark = (
        f"The papers contradict each other: {scheme} at {model} has perplexity {_each(both.loc[(scheme, model)])}. "
        f"The tables share {len(both)} cells (only LN-Scaling's has 350M); {int((apart <= _SAME).sum())} of them agree within "
        f"{_SAME:.0%}. At 1B Mix-LN's paper trained on 5 billion tokens and LN-Scaling's on 8.9. A perplexity above "
        f"{STUCK:,.0f} is no better than predicting token frequencies: the model failed to train. Neither table explains why "
        "Mix-LN fails in one paper and trains in the other. The models of this project are smaller and were trained on other "
        "text, so their losses are shown for orientation and not compared. For each depth the loss is that of the best "
        "learning rate that is compared there (docs/advise.md)."
    )
    runs = packaged().runs
    runs = runs[runs["scheme"].isin(table["scheme"])]
    settings = (
        f"{len(runs)} stored runs of these schemes, rates {_listed(runs['rate'])}, width {_listed(runs['width'])}, "
        f"{_listed(runs['depth'])} layers"
    )
    return Reproduction(NO_NUMBERS, remark, settings, tuple(values))


def _each(numbers: pd.Series) -> str:
    return "; ".join(f"{value if isinstance(value, str) else f'{value:g}'} ({paper})" for paper, value in numbers.items())


def _own(scheme: str) -> str:
    """The held-out loss of a scheme's own models by depth, or that they fail."""
    outcomes = packaged().outcomes
    rows = plain_rows(outcomes[outcomes["scheme"] == scheme].sort_values("depth"))
    return "; ".join(f"{row['depth']} layers {_loss(row['loss'])}{_failures(row)}" for row in rows)


def _loss(loss: float | None) -> str:
    """A loss in words; None where a learning rate is missing that might have been better."""
    return "not tuned" if loss is None else "fails" if math.isinf(loss) else f"loss {loss:.2f}"


def _failures(row: dict[str, Any]) -> str:
    """How many runs of a scheme that learned failed at other learning rates."""
    learned = row["loss"] is not None and math.isfinite(row["loss"])
    return f" ({row['failed']} of {row['runs']} runs failed)" * bool(learned and row["failed"])


def _listed(numbers: pd.Series) -> str:
    return ", ".join(str(number) for number in sorted(numbers.unique()))


ENTRIES = (
    Entry(
        "others:mix-ln", "Perplexity on C4 under five schemes, in two papers that contradict each other",
        "LLaMA shapes of 71M to 1B parameters on C4: Table 1 of Mix-LN (arXiv 2412.13795) and of LN-Scaling (arXiv 2502.05795)",
        "CPU, 1 s", two_tables, commands=("python benchmarks/language_models_compare.py",),
    ),
)  # fmt: skip
