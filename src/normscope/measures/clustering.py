"""Clustering: whether tokens point the same way, by mean cosine and effective rank (rank collapse, anisotropy)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import pandas as pd

from normscope.core.norms import effective_rank, mean_cosine, unit
from normscope.measures.base import LAYER, Measure, PassObserver, Quantity, Subject
from normscope.measures.curves import columns, last
from normscope.measures.states import Counted, StateRows, Tokens
from normscope.results.figures import Chart, Line
from normscope.results.findings import Finding, Severity
from normscope.results.sections import Section
from normscope.results.tables import by_layer, floats, plain_rows, table_of

_ALIGNED, _COLLAPSED = 0.5, 0.9  # mean cosines from which tokens are called aligned, and collapsed
_SAME = 0.05  # mean cosines closer than this are told as one


def token_rank(x: Tokens) -> float:
    """The effective rank (participation ratio) (Σσ²)²/Σσ⁴ of the tokens' directions: 1 if all are one, at most their number."""
    return float(effective_rank(unit(x.double())))


def _row(every: Tokens, counted: Counted) -> dict[str, float]:
    groups = {"": counted, "_all": every}
    cosines = {f"cosine{name}": float(mean_cosine(tokens)) for name, tokens in groups.items()}
    return cosines | {f"rank{name}": token_rank(tokens) for name, tokens in groups.items()}


@dataclass(frozen=True)
class Clustering(Measure):
    """Mean pairwise cosine and effective rank of the tokens before every layer, without and with the first token."""

    name: ClassVar[str] = "clustering"
    title: ClassVar[str] = "Clustering of tokens"
    order: ClassVar[int | None] = 40
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "cosine", "Mean cosine between tokens", LAYER, "cosine",
            "Near 1 all tokens point one way; without the first token.",
            "motion", columns("layer", "cosine"), "mean cosine after the last layer", last, ratio=False,
        ),
        Quantity(
            "rank", "Effective rank of the tokens", LAYER, "directions", "How many directions the tokens occupy.",
            "motion", columns("layer", "rank"), "effective rank after the last layer", last,
        ),
    )  # fmt: skip

    def observer(self, subject: Subject) -> PassObserver:
        """Hidden states before every layer."""
        return StateRows(subject, "motion", _row)

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The mean cosine."""
        return {"mean cosine before": by_layer(tables, "motion", "cosine", "{:.2f}")}

    def totals(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, float]:
        """Mean cosine and effective rank after the last layer."""
        if "motion" not in tables:
            return {}
        return {column: last(columns("layer", column)(tables["motion"])) for column in ("cosine", "rank")}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """Where tokens align, and what that means for their use."""
        motion = plain_rows(tables["motion"].dropna(subset="cosine"))
        peak = max(motion, key=lambda row: float(row["cosine"]))
        before, after = max(pairwise(motion), key=lambda pair: float(pair[1]["cosine"] - pair[0]["cosine"]))
        number, aligned = peak["cosine"], peak["cosine"] > _ALIGNED
        severity: Severity = "warning" if number > _COLLAPSED else "notice" if aligned else "ok"
        title = {"warning": "Tokens collapse to one direction", "notice": "Tokens align", "ok": "Tokens stay apart"}[severity]
        jump = f"; it rises most across layer {before['layer']}, from {before['cosine']:.2f} to {after['cosine']:.2f}"
        sink = f" ({peak['cosine_all']:.2f} with the first token)" if abs(peak["cosine_all"] - number) > _SAME else ""
        yield Finding(
            f"The mean cosine between tokens is largest {place(peak['layer'], about)}: {number:.2f}{sink}"
            f"{jump if after['cosine'] - before['cosine'] > _SAME else ''}.",
            "cosine",
            title,
            severity,
            number,
            f"{motion[0]['cosine']:.2f} {place(motion[0]['layer'], about)}; 0 is unrelated tokens, 1 is collapse.",
            "Subtract the mean hidden state before you use hidden states for similarity." if aligned else "",
            weight=80,
        )
        lowest = min(motion, key=lambda row: float(row["rank"]))
        if lowest["cosine"] <= _ALIGNED:  # at higher cosines the rank restates them: it is at most 1/cosine²
            yield Finding(
                f"The effective rank (participation ratio) of the tokens is {motion[0]['rank']:.3g} "
                f"{place(motion[0]['layer'], about)} and smallest {place(lowest['layer'], about)}: {lowest['rank']:.3g}.",
                "rank", title="Effective rank of the tokens", severity="ok", number=lowest["rank"],
            )  # fmt: skip

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Mean cosine and effective rank by layer."""
        motion = table_of(tables, "motion")
        if motion is None or "cosine" not in motion:
            return None
        words = {
            "cosine": ("Mean cosine between tokens", "cosine", "Near 1 all tokens point one way; near 0 they are unrelated."),
            "rank": ("Effective rank of the tokens", "directions", "How many directions the tokens occupy; low is clustered."),
        }
        figures = {}
        for column, (title, unit_name, caption) in words.items():
            layers, without, every = (floats(motion[name]) for name in ("layer", column, f"{column}_all"))
            lines = (Line("without the first token", layers, without), Line("with the first token", layers, every))
            figures[column] = Chart(title, "layer", unit_name, lines, caption, settings)
        text = (
            "Tokens cluster if they point the same way: their mean pairwise cosine goes to 1 (rank collapse). The effective "
            "rank is the participation ratio (Σσ²)²/Σσ⁴ of the directions; with a mean cosine c it is at most about 1/c².",
        )
        return self.page(text, figures)


def place(layer: int, about: Mapping[str, Any]) -> str:
    """``before layer 3``, or ``after layer 29`` for what leaves the last."""
    return f"after layer {layer - 1}" if layer == about["layers"] else f"before layer {layer}"
