"""Values: the tokens nearest to a word after a head's update of it, and the norms of these updates."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch

from normscope.core.norms import length
from normscope.measures.base import Advance, Subject, Tables
from normscope.measures.head_probes import HeadProbe, dots, of_heads
from normscope.measures.probes import Returned, Rotations, Updates, nearest_values, updates_of
from normscope.measures.scores import Share
from normscope.measures.tokens import head_notes, logit_notes, precedence_notes
from normscope.measures.vocabulary import Word, probe_words, tokens_of
from normscope.models import Model
from normscope.results.figures import Chart, Figure, Line
from normscope.results.findings import Finding
from normscope.results.sections import PageTable
from normscope.results.tables import cell, floats, head_map, plain_rows, spans_decades, table_of

_NORMS = {"norm": ".3g", "relative_norm": ".2f"}


@dataclass(frozen=True)
class Values(HeadProbe):
    """What heads add to a word that attends to itself, and the tokens with the largest logits after that."""

    name: ClassVar[str] = "values"
    title: ClassVar[str] = "Keys and their values"
    lead: ClassVar[str] = (
        "The word attends to itself: a head's update is added to it, and these are the tokens with the largest logits."
    )
    word_first: ClassVar[bool] = True

    def measure(self, subject: Subject, advance: Advance = lambda done: None) -> Tables:
        """Tables ``nearest``, ``updates`` and, with scores, ``heads``."""
        tables = super().measure(subject, advance)
        model, chosen = subject.model, self.resolved(subject.model)
        words = probe_words(model, chosen.word)
        parts = [update_table(layer, words, updates_of(model, layer, tokens_of(model, words))) for layer in chosen.layer or ()]
        updates = of_heads(pd.concat(parts, ignore_index=True), chosen.head).reset_index(drop=True)
        return {"nearest": tables["nearest"], "updates": updates, **tables}

    def returned(
        self, model: Model, layer: int, words: list[Word], count: int, rotated: Rotations | None, progress: Share
    ) -> dict[str, Returned]:
        """The tokens with the largest logits after the update of each head, and of their sum."""
        by_head, of_sum = nearest_values(model, layer, updates_of(model, layer, tokens_of(model, words), rotated), count)
        progress(1.0)
        return {"heads": by_head, "sum": of_sum}

    def notes(self, model: Model) -> list[str]:
        """On norms of the stream, output layers, head norms and precedence."""
        notes = super().notes(model)
        if any(norm.slot == "stream" for norm in model.norms):
            notes.append(
                "The residual stream is normalised: logits are read after the norm that follows the layer's attention."
            )
        return [*notes, *logit_notes(model), *head_notes(model), *precedence_notes(model)]

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """Scores, and how large the update of all heads together is."""
        yield from super().findings(tables, about)
        whole = tables["updates"][tables["updates"]["head"].isna()]["relative_norm"]
        size = float(whole.median())
        if len(whole) and not math.isfinite(size):
            text = "The updates are not defined: they overflow, or the tokens that they are added to have norm 0."
            yield Finding(text, "updates", severity="warning")
        elif len(whole):
            yield Finding(
                f"The update of all heads together has {size:.2f} times the norm of the token that it is added to (median).",
                "updates",
                number=size,
                comparison="Below 1 the token outweighs what is added to it.",
            )

    def further_tables(self, tables: Mapping[str, pd.DataFrame]) -> list[PageTable]:
        """The median norm of every head's updates."""
        updates = table_of(tables, "updates")
        if updates is None:
            return []
        medians = updates.groupby(["layer", "head"], dropna=False, sort=False)[["norm", "relative_norm"]].median().reset_index()
        rows = tuple(
            (
                str(row["layer"]),
                "all" if row["head"] is None else str(row["head"]),
                *(cell(math.nan if row[name] is None else row[name], form) for name, form in _NORMS.items()),
            )
            for row in plain_rows(medians)
        )
        return [PageTable("Norm of updates, median over words", ("layer", "head", "|update|", "|update| / |token|"), rows)]

    def figures(self, tables: Mapping[str, pd.DataFrame], settings: str) -> dict[str, Figure | None]:
        """The norms of updates."""
        updates = table_of(tables, "updates")
        return {"updates": None if updates is None else _update_figure(updates, settings)}


def update_table(layer: int, words: list[Word], updates: Updates) -> pd.DataFrame:
    """The norm of every head's update and of the whole update, also relative to that of the residual that is kept.

    Returns:
        Rows with layer, head (empty for the sum), word, norm, relative_norm.
    """
    norms = length(torch.cat((updates.by_head, updates.whole[None]))).squeeze(-1)
    relative = norms / length(updates.states).squeeze(-1)
    heads: list[int | None] = [*range(len(updates.by_head)), None]
    rows = [
        {"layer": layer, "head": head, "word": word.name, "norm": float(norm), "relative_norm": float(share)}
        for head, of_head, shares in zip(heads, norms, relative, strict=True)
        for word, norm, share in zip(words, of_head, shares, strict=True)
    ]
    return pd.DataFrame(rows).astype({"head": "Int64"})


def _update_figure(table: pd.DataFrame, settings: str) -> Figure | None:
    """Norms of updates by layer and head; with one layer, the spread over words as well."""
    heads, whole = table[table["head"].notna()], table[table["head"].isna()]["relative_norm"]
    sizes = heads.groupby(["layer", "head"])["relative_norm"].agg(["mean", "min", "max"]).reset_index()
    title, label = "Norm of updates", "|update| / |token|"
    if sizes["layer"].nunique() > 1:
        caption, log = "Bright heads change a token most; means over words.", spans_decades(floats(sizes["mean"]))
        return head_map(sizes, "mean", title, label, caption, settings, log=log, chosen=True)
    if sizes.empty:
        return None
    places = floats(sizes["head"])
    lines = [dots("one head", places, sizes, ("mean", "min", "max"))]
    if whole.notna().any():
        lines.append(Line("sum of all heads", [places[0], places[-1]], [float(whole.mean())] * 2))
    return Chart(
        f"{title} in layer {int(sizes['layer'].iloc[0])}",
        "head",
        label,
        tuple(lines),
        "Dots are means over words, bars range from the smallest to the largest; below 1 the token outweighs its update.",
        settings,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )
