"""Rank of W_QK: how many directions of a token a head reads, and how many of them carry its attention logits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd

from normscope.core.norms import participation_ratio
from normscope.measures.base import LayerAttention, Measure, PassObserver, Subject
from normscope.measures.head_rows import HeadRows, head_name, layer_means
from normscope.measures.head_spaces import projections_of_layer, spectrum
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import head_map, table_of

_NAMED = 5  # heads that a finding lists


@dataclass(frozen=True)
class Rank(Measure):
    """Rank of W_QK = W_Q W_Kᵀ by head, and its participation ratio (Σσ²)²/Σσ⁴."""

    name: ClassVar[str] = "rank"
    title: ClassVar[str] = "How many directions do heads read?"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "matrices"})
    asks: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int | None] = 63
    overview: ClassVar[int] = 0

    def observer(self, subject: Subject) -> PassObserver:
        """Collects a row for every head."""
        return HeadRows("rank", lambda attention: _rows(subject, attention))

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The participation ratio, the mean over the heads of a layer."""
        table = table_of(tables, "rank")
        return {} if table is None else {"participation ratio of W_QK": layer_means(table, "effective_rank", "{:.3g}")}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """Heads whose W_QK lacks rank; without any, that it has full rank."""
        table = table_of(tables, "rank")
        if table is None:
            return
        width, typical = " or ".join(str(width) for width in sorted(set(table["width"]))), table["effective_rank"].median()
        lacking = table[table["rank"] < table["width"]].sort_values("rank")
        half = (
            f"Half of the heads use the equivalent of {typical:.3g} equally strong directions or fewer (participation ratio)."
            if pd.notna(typical)
            else "W_QK is 0, and its participation ratio is not defined."
        )
        if lacking.empty:
            text = f"W_QK has full rank, {width}, in all {len(table)} heads."
            title = "All heads use their query and key dimensions"
            yield Finding(text, "qk-rank", title=title, severity="ok", number=float(table["width"].max()), comparison=half)
            return
        listed = ", ".join(f"{head_name(row)} ({row['rank']})" for row in lacking.head(_NAMED).to_dict("records"))
        yield Finding(
            f"W_QK has a rank below {width}, the width of a head, in {len(lacking)} of {len(table)} heads: {listed}"
            f"{', …' * (len(lacking) > _NAMED)}.",
            "qk-rank",
            title="Heads with unused query and key dimensions",
            number=float(len(lacking)),
            comparison=half,
            advice="These heads can be stored with fewer query and key dimensions without any change.",
            weight=1,
        )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """A map of the participation ratio."""
        table = table_of(tables, "rank")
        if table is None:
            return None
        text = (
            "The attention logits of a head depend on a token only through its projection onto the input subspaces of W_QK, "
            "whose dimension is the rank. The participation ratio (Σσ²)²/Σσ⁴ of the singular values counts the directions "
            "that matter.",
        )
        chart = head_map(
            table, "effective_rank", "Participation ratio of W_QK", "(Σσ²)²/Σσ⁴",
            "How many directions carry a head's attention logits.", settings,
        )  # fmt: skip
        return self.page(text, {"qk-rank": chart})


def _rows(subject: Subject, attention: LayerAttention) -> Iterator[dict[str, Any]]:
    weights = projections_of_layer(subject.model, attention)
    singular, ranks = spectrum(weights.W_Q, weights.W_K)
    effective = participation_ratio(singular).tolist()
    for head, (rank, values) in enumerate(zip(ranks.tolist(), singular.tolist(), strict=True)):
        yield {
            "layer": attention.layer,
            "head": head,
            "rank": rank,
            "width": min(weights.W_Q.shape[1:]),
            "null": weights.W_Q.shape[1] - rank,
            "effective_rank": effective[head],
            "largest": values[0],
            "smallest": values[max(rank - 1, 0)],
        }
