"""Massive activations: values of the residual stream that are far larger than all others, in a few channels and tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
from torch import Tensor

from normscope.measures.base import LAYER, Measure, PassObserver, Quantity, Subject, Tables
from normscope.measures.clustering import place
from normscope.measures.curves import columns, statistic
from normscope.models.describe import ranges
from normscope.results.conventions import TOKEN_LENGTH
from normscope.results.figures import Chart, Line
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import by_layer, floats, plain_rows, spans_decades, table_of, token_name

_MOST = 64  # massive activations of a state that are listed, the largest
_ROWS = 20  # channels that the page lists
_NAMED = 3


class _Observer(PassObserver):
    def __init__(self, measure: "Massive", subject: Subject) -> None:
        self.multiple, self.subject = measure.multiple, subject
        self.layers: list[dict[str, Any]] = []
        self.massive: list[dict[str, Any]] = []
        self.reads_tokens, self.texts = "vocabulary" not in subject.lacking, dict[int, str]()

    def state(self, layer: int, x: Tensor) -> None:
        """The median magnitude of the state, the largest value, and those above the multiple of the median."""
        places = self.subject.present_in(x).nonzero()
        values = x[places[:, 0], places[:, 1]].float()
        size = values.abs()
        median = float(size.median())
        top = size.flatten().topk(min(_MOST, size.numel()))
        chosen = [0, *range(1, int((top.values >= self.multiple * median).sum()))]  # the largest is always reported
        found = []
        for index in top.indices[chosen].tolist():
            token, channel = divmod(index, size.shape[1])
            row, position = places[token].tolist()
            value = float(values[token, channel])
            ratio = abs(value) / median if median else None
            where = {"layer": layer, "channel": channel, "row": row, "position": position, "text": self._text(x, row, position)}
            found.append({**where, "value": value, "ratio": ratio})
        count = int((size >= self.multiple * median).sum()) if median else 0
        self.layers.append({"layer": layer, "median": median, "massive": count, **found[0]})
        self.massive += found if count else []

    def tables(self) -> Tables:
        tables = {"activations": pd.DataFrame(self.layers).astype({"ratio": float})}
        return tables | ({"massive": pd.DataFrame(self.massive)} if self.massive else {})

    def _text(self, x: Tensor, row: int, position: int) -> str | None:
        """The token at a position; None where positions are not those of a text."""
        tokens = self.subject.viewed.tokens
        if not self.reads_tokens or tokens.shape != x.shape[:2]:
            return None
        token = int(tokens[row, position])
        if token not in self.texts:
            self.texts[token] = self.subject.model.words(tokens[row, position][None])[0]
        return self.texts[token]


@dataclass(frozen=True)
class Massive(Measure):
    """Activations x_ti with |x_ti| ≥ ``multiple`` · median |x|, over the tokens and channels of the states before a layer.

    Attributes:
        multiple: of the median magnitude. Sun et al. (2024) call activations massive from about 1000 times the median on.
    """

    multiple: float = 1000.0

    name: ClassVar[str] = "massive"
    title: ClassVar[str] = "Massive activations"
    order: ClassVar[int | None] = 45
    overview: ClassVar[int] = 0
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "massive", "Largest activation over the median magnitude", LAYER, "max |x| / median |x|",
            "From about 1000 on activations are called massive.",
            "activations", columns("layer", "ratio"), "largest activation over the median", statistic("max"), "×",
            states=True,
        ),
    )  # fmt: skip

    def observer(self, subject: Subject) -> PassObserver:
        """Hidden states before every layer, all tokens included."""
        return _Observer(self, subject)

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The largest activation over the median."""
        return {"largest activation / median": by_layer(tables, "activations", "ratio", "{:,.0f}")}

    def totals(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, float]:
        """The largest of all layers."""
        table = table_of(tables, "activations")
        return {} if table is None else {"largest_activation": float(table["ratio"].max())}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """The channels and tokens of massive activations with the layers that have them; without any, the largest value."""
        table, massive = table_of(tables, "activations"), table_of(tables, "massive")
        rows = [] if table is None else [row for row in plain_rows(table) if row["ratio"] is not None]
        if not rows:
            return
        top = max(rows, key=lambda row: float(row["ratio"]))
        largest = f"{top['value']:.3g}, {top['ratio']:,.0f} times the median magnitude"
        published = f"Called massive from about {self.multiple:,.0f} times the median on (Sun et al., 2024)"
        if massive is None:
            yield Finding(
                f"The largest activation of the residual stream is {largest}, in channel {top['channel']} at {_token(top)} "
                f"{place(top['layer'], about)}.",
                "massive", "No massive activations", "ok", top["ratio"], f"{published}.",
            )  # fmt: skip
            return
        channels = _channels(massive)
        listed = "; ".join(f"channel {row['channel']} {row['states']}" for row in channels[:_NAMED])
        more = f"; and {len(channels) - _NAMED} more channels" if len(channels) > _NAMED else ""
        yield Finding(
            f"The largest activation of the residual stream is {largest}. Massive are {listed}{more}.",
            "massive",
            f"Massive activations in {len(channels)} channel{'s' * (len(channels) > 1)}",
            "notice",
            top["ratio"],
            f"{published}; common in pretrained models, and mostly of the first token, where they act as attention sinks.",
            "Keep these channels in high precision when you quantise activations, and leave their tokens out of means.",
            weight=65,
        )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """The largest activation by layer beside the median, and the channels of massive ones."""
        table, massive = table_of(tables, "activations"), table_of(tables, "massive")
        if table is None:
            return None
        layers, median = floats(table["layer"]), floats(table["median"])
        lines = (
            Line("largest |x|", layers, [abs(value) for value in floats(table["value"])]),
            Line("median |x|", layers, median),
            Line(f"{self.multiple:,.0f} × median", layers, [self.multiple * value for value in median]),
        )
        chart = Chart(
            "Largest and median activation before every layer",
            "layer",
            "|x|",
            lines,
            "Where the largest value is above the upper line, the stream has massive activations.",
            settings,
            log_y=spans_decades([value for line in lines for value in line.y]),
        )
        text = (
            "An activation is one channel of the residual stream at one token. Some models have a few that are thousands of "
            "times larger than the others, in the same channels, at the first token or at delimiters (Sun et al., 2024). "
            "All tokens count here, the first included, and no mean is subtracted.",
        )
        rows = (
            ()
            if massive is None
            else tuple(
                (str(row["channel"]), f"{row['value']:.4g}", f"{row['ratio']:,.0f}", row["states"])
                for row in _channels(massive)[:_ROWS]
            )
        )
        listed = [PageTable("Massive activations", ("channel", "largest", "over the median", "where"), rows)] if rows else []
        return self.page(text, {"massive": chart}, listed)


def _channels(massive: pd.DataFrame) -> list[dict[str, Any]]:
    """Every channel with its largest value, and where it is massive in words; the largest first."""
    rows = []
    for channel, group in massive.groupby("channel"):
        top = plain_rows(group[group["ratio"] == group["ratio"].max()])[0]
        tokens = list(dict.fromkeys(_token(row) for row in plain_rows(group.sort_values("ratio", ascending=False))))
        others = f" and {len(tokens) - 1} other token{'s' * (len(tokens) > 2)}" if len(tokens) > 1 else ""
        layers = sorted(set(map(int, group["layer"])))
        before = f"before layer{'s' * (len(layers) > 1)} {ranges(layers)}"
        rows.append({**top, "channel": channel, "states": f"at {tokens[0]}{others} {before}"})
    return sorted(rows, key=lambda row: -float(row["ratio"]))


def _token(row: Mapping[str, Any]) -> str:
    text = f" ({token_name(row['text'], TOKEN_LENGTH)})" if row.get("text") is not None else ""
    return f"position {row['position']}{text}"
