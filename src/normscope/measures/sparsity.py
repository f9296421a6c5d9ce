"""Sparsity: how often attention reads a single token, by head, with maps of the heads that matter most."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.measures.base import LAYER, LayerAttention, Measure, PassObserver, Quantity, Subject, Tables
from normscope.measures.collapse import sparse_scores
from normscope.measures.collapse_probability import collapse_probability
from normscope.measures.curves import columns, percent, statistic
from normscope.measures.head_rows import with_totals
from normscope.results.conventions import DIFFUSE, NEAR_ONE_HOT
from normscope.results.figures import Chart, Figure, HeatMap, Line
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import floats, grid, head_map, plain_rows, spans_decades, table_of, token_name

Row = dict[str, Any]
_BINS = 20
_MAP = 64  # tokens of an attention map
_MAPS = 6
_RISK = 0.3  # RMS noise by whose damage heads are chosen for maps
_NAMED = 5


class _Observer(PassObserver):
    """Rows of the tables, a layer at a time; maps of the heads that stand out so far."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.size = min(_MAP, int(subject.viewed.attention_mask[0].sum()))
        self.sparsity: list[Row] = []
        self.maxima: list[Row] = []
        self.total = torch.zeros(_BINS, dtype=torch.long)
        self.maps: dict[tuple[float, float, int, int], Tensor] = {}

    def attention(self, attention: LayerAttention) -> None:
        largest = attention.largest.transpose(0, 1)[:, attention.counted]
        losses = self._losses(attention)
        self._add(attention.layer, largest)
        for head, loss in enumerate(losses):
            share = float((largest[head] >= NEAR_ONE_HOT).double().mean())
            weights = attention.weights[0, head, : self.size, : self.size]
            self.maps[-loss, -share, attention.layer, head] = weights.clone()
        self.maps = {key: self.maps[key] for key in sorted(self.maps)[:_MAPS]}

    def _losses(self, attention: LayerAttention) -> list[float]:
        """How many near-one-hot rows of each head are expected to switch key under noise on the norms of keys."""
        if "k" in self.subject.model.normalised_heads:
            return [0.0] * len(attention.largest[0])
        scores, softmax, sparse = sparse_scores(attention)
        probability = scores.new_zeros(0).double()
        if len(scores):
            probability = collapse_probability(scores, [_RISK], shift=softmax.shift)[0].double()
        lost = torch.zeros(len(sparse), dtype=torch.float64, device=scores.device)
        return list(lost.index_add_(0, sparse.nonzero()[:, 0], probability).tolist())

    def _add(self, layer: int, largest: Float[Tensor, "heads distributions"]) -> None:
        bins = (largest * _BINS).long().clamp(max=_BINS - 1)
        counts = torch.stack([torch.bincount(row, minlength=_BINS) for row in bins]).cpu()
        self.total += counts.sum(0)
        for head in (None, *range(len(largest))):
            weights = largest if head is None else largest[head]
            sparse = int((weights >= NEAR_ONE_HOT).sum())
            row = {
                "layer": layer,
                "head": head,
                "distributions": weights.numel(),
                "sparse": sparse,
                "share": sparse / max(weights.numel(), 1),
                "non_sparse_share": float((weights < DIFFUSE).double().mean()),
                "mean_max": float(weights.double().mean()),
            }
            self.sparsity.append(row)
            self.maxima += _histogram(layer, head, counts.sum(0) if head is None else counts[head])

    def tables(self) -> Tables:
        """With the rows of the whole model."""
        if not self.sparsity:
            return {}
        texts = self.subject.model.words(self.subject.viewed.tokens[0, : self.size])
        tables = {
            "sparsity": [*self.sparsity, self._whole_model()],
            "maxima": self.maxima + _histogram(None, None, self.total),
            "maps": self._maps(),
        }
        return {**with_totals(tables), "tokens": pd.DataFrame({"position": range(len(texts)), "text": texts})}

    def _whole_model(self) -> Row:
        heads = [row for row in self.sparsity if row["head"] is not None]
        count = sum(int(row["distributions"]) for row in heads)

        def mean(column: str) -> float:
            return sum(float(row[column]) * int(row["distributions"]) for row in heads) / max(count, 1)

        shares = {column: mean(column) for column in ("share", "non_sparse_share", "mean_max")}
        return {"layer": None, "head": None, "distributions": count, "sparse": sum(row["sparse"] for row in heads), **shares}

    def _maps(self) -> list[Row]:
        chosen = {(layer, head): weights for (_, _, layer, head), weights in self.maps.items()}
        return [
            {"layer": layer, "head": head, "query": query, "key": key, "weight": weight}
            for (layer, head), weights in sorted(chosen.items(), key=lambda item: item[0])
            for query, row in enumerate(weights.tolist())
            for key, weight in enumerate(row)
        ]


def _histogram(layer: int | None, head: int | None, counts: Tensor) -> list[Row]:
    return [
        {"layer": layer, "head": head, "low": i / _BINS, "high": (i + 1) / _BINS, "count": count}
        for i, count in enumerate(counts.tolist())
    ]


def _by_layer(table: pd.DataFrame) -> pd.DataFrame:
    return columns("layer", "share")(table[table["head"].isna() & table["layer"].notna()])


@dataclass(frozen=True)
class Sparsity(Measure):
    """Share of near-one-hot attention rows by layer and head, the histogram of their largest weights, and attention maps."""

    name: ClassVar[str] = "sparsity"
    title: ClassVar[str] = "Sparsity of attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    order: ClassVar[int | None] = 70
    large: ClassVar[frozenset[str]] = frozenset({"maxima", "maps", "tokens"})
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "sparsity", "Share of near-one-hot attention", LAYER, "share of attention rows",
            "High where heads read a single token.",
            "sparsity", _by_layer, "near-one-hot rows in the sparsest layer", statistic("max"), ratio=False,
        ),
    )  # fmt: skip

    def observer(self, subject: Subject) -> PassObserver:
        """Attention weights of every layer."""
        return _Observer(subject)

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The share of near-one-hot rows."""
        table = table_of(tables, "sparsity")
        rows = [] if table is None else plain_rows(table)
        whole = [row for row in rows if row["head"] is None and row["layer"] is not None]
        return {"near-one-hot rows": {row["layer"]: f"{100 * row['share']:.1f} %" for row in whole}}

    def totals(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, float]:
        """The share of all rows that is near-one-hot."""
        table = table_of(tables, "sparsity")
        return {} if table is None else {"sparse": float(table[table["layer"].isna()]["share"].iloc[0])}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """How much of attention is near-one-hot, and in which heads."""
        if "sparsity" not in tables:
            return
        rows = plain_rows(tables["sparsity"])
        whole = next(row for row in rows if row["layer"] is None)
        sparsest = sorted((row for row in rows if row["head"] is not None), key=lambda row: -float(row["share"]))[:_NAMED]
        listed = ", ".join(
            f"layer {row['layer']} head {row['head']} ({percent(row['share'])})" for row in sparsest if row["share"]
        )
        most = f", most in {listed}" if listed else ""
        yield Finding(
            f"{percent(whole['share'])} of {whole['distributions']:,} attention rows are near-one-hot (largest weight at least "
            f"{NEAR_ONE_HOT}){most}.",
            "sparsity", title="Near-one-hot attention", severity="ok", number=whole["share"],
        )  # fmt: skip

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """A map of heads, a histogram, and attention maps."""
        sparsity, maxima = table_of(tables, "sparsity"), table_of(tables, "maxima")
        figures: dict[str, Figure | None] = {}
        if sparsity is not None:
            figures["sparsity"] = head_map(
                sparsity,
                "share",
                "Share of near-one-hot attention by head",
                "share of attention rows",
                "Bright heads nearly always read a single token; dark ones average over several.",
                settings,
            )
        if maxima is not None:
            figures["maxima"] = _maxima_chart(maxima[maxima["layer"].isna() & maxima["head"].isna()], settings)
        figures |= _map_figures(table_of(tables, "maps"), table_of(tables, "tokens"), settings)
        return self.page(() if sparsity is None else _shares(sparsity), figures)


def _shares(table: pd.DataFrame) -> tuple[str, ...]:
    whole = table[table["layer"].isna() & table["head"].isna()]
    values = (floats(whole[name]) for name in ("distributions", "share", "non_sparse_share", "mean_max"))
    return tuple(
        f"Of {count:,.0f} attention rows {100 * sparse:.1f} % are near-one-hot (largest weight at least {NEAR_ONE_HOT}) and "
        f"{100 * other:.1f} % are diffuse (below {DIFFUSE}); the largest weight is {largest:.3f} on average."
        for count, sparse, other, largest in zip(*values, strict=True)
    )


def _maxima_chart(table: pd.DataFrame, settings: str) -> Chart | None:
    """The histogram as an outline with its area filled."""
    if table.empty:
        return None
    bins = table.sort_values("low")
    edges = [edge for pair in zip(floats(bins["low"]), floats(bins["high"]), strict=True) for edge in pair]
    counts = [count for count in floats(bins["count"]) for _ in ("low", "high")]
    return Chart(
        "Largest weight of an attention row",
        "largest attention weight",
        "attention rows",
        (Line("whole model", edges, counts, [0.0] * len(counts), counts),),
        "A peak at 1 is near-one-hot attention: heads that read one token, and that noise can make read another.",
        settings,
        log_y=spans_decades(counts),
    )


def _map_figures(table: pd.DataFrame | None, tokens: pd.DataFrame | None, settings: str) -> dict[str, HeatMap]:
    if table is None:
        return {}
    names = {} if tokens is None else dict(zip(tokens["position"], map(token_name, tokens["text"]), strict=True))
    maps = {}
    for (layer, head), rows in table.astype({"layer": int, "head": int}).groupby(["layer", "head"], sort=False):
        queries, keys, weights = grid(rows, "query", "key", "weight")
        maps[f"map-{layer}-{head}"] = HeatMap(
            f"Attention of layer {layer} head {head}",
            "key",
            "query",
            "weight",
            [names.get(key, str(key)) for key in keys],
            [names.get(query, str(query)) for query in queries],
            weights,
            "Each row is what one token reads from; a row with one bright cell is near-one-hot.",
            settings,
            limits=(0.0, 1.0),
            from_top=True,
            of_head=(int(str(layer)), int(str(head))),
        )
    return maps
