"""Spread: how much residual norms differ between the tokens that attention reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import length
from normscope.measures.base import LAYER, LayerAttention, Measure, PassObserver, Quantity, Subject, Tables
from normscope.measures.curves import statistic
from normscope.measures.head_rows import with_totals
from normscope.models.describe import layers_named
from normscope.results.conventions import DRAWN_HEADS, NORM_BAND
from normscope.results.figures import Chart, Line
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import floats, plain_rows, spans_decades, table_of, together

_INTERVALS = {"50": (0.25, 0.75), "90": (0.05, 0.95), "99": (0.005, 0.995)}
_POINTS = [0.5, *(point for ends in _INTERVALS.values() for point in ends)]
_WIDE = 2.0  # ratio between the ends of the 90 % band from which norms are called outliers


def weighted_quantiles(
    values: Float[Tensor, " values"], weights: Float[Tensor, "groups values"], points: Sequence[float]
) -> Float[Tensor, "groups points"]:
    """The smallest value at which a group's share of the weight reaches each point; NaN for a group without weight."""
    order = values.argsort()
    share = weights[:, order].double().cumsum(1)
    total = share[:, -1:]
    wanted = total * torch.tensor(points, dtype=torch.float64, device=values.device)
    at = torch.searchsorted(share.contiguous(), wanted.contiguous()).clamp(max=len(values) - 1)
    return torch.where(total > 0, values[order][at].double(), torch.nan)


def spread_rows(layer: int, norms: Float[Tensor, " tokens"], received: Float[Tensor, "heads tokens"]) -> list[dict[str, Any]]:
    """Intervals of norm over median norm for the layer and each of its heads.

    Args:
        layer: their number.
        norms: |x_t| of every hidden state that attention may read.
        received: the attention that each token receives from all queries, by head.
    """
    groups = torch.cat((received.sum(0, keepdim=True), received))
    found = weighted_quantiles(norms, groups, _POINTS)
    ratios = (found[:, 1:] / found[:, :1]).tolist()
    names = [f"{end}{name}" for name in _INTERVALS for end in ("low", "high")]
    return [
        {"layer": layer, "head": None if group == 0 else group - 1, **dict(zip(names, row, strict=True))}
        for group, row in enumerate(ratios)
    ]


class _Observer(PassObserver):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def attention(self, attention: LayerAttention) -> None:
        weights, counted = attention.weights, attention.counted
        received = (counted.to(weights)[:, None, None] @ weights).squeeze(2).transpose(0, 1)[:, counted]
        self.rows += spread_rows(attention.layer, length(attention.step.stream).squeeze(-1)[counted], received)

    def tables(self) -> Tables:
        return with_totals({"spread": self.rows})


def _width(table: pd.DataFrame) -> pd.DataFrame:
    rows = _whole_layers(table)
    return pd.DataFrame({"x": rows["layer"], "y": rows["high90"] - rows["low90"]})


def _whole_layers(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["head"].isna()].sort_values("layer")


@dataclass(frozen=True)
class Spread(Measure):
    """Residual norms over their median before every layer, each token weighted by the attention that it receives."""

    name: ClassVar[str] = "spread"
    title: ClassVar[str] = "Spread of residual norms"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    order: ClassVar[int | None] = 50
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "spread", "Spread of residual norms", LAYER, "norm / median, width of the 90 % band",
            "Heads disturb each other less where residual norms are alike.",
            "spread", _width, "widest spread of norms", statistic("max"),
        ),
    )  # fmt: skip

    def observer(self, subject: Subject) -> PassObserver:
        """Attention weights and residual norms of every layer."""
        return _Observer()

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The 90 % band."""
        table = table_of(tables, "spread")
        rows = [] if table is None else plain_rows(_whole_layers(table))
        return {"norms / median, 90 % band": {row["layer"]: f"{row['low90']:.2f} … {row['high90']:.2f}" for row in rows}}

    def totals(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, float]:
        """The widest band of a layer."""
        table = table_of(tables, "spread")
        return {} if table is None else {"widest_spread": float(_width(table)["y"].max())}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """Which layers have norm outliers, and how far they are out."""
        if "spread" not in tables:
            return
        layers = plain_rows(_whole_layers(tables["spread"]))
        outside = [row for row in layers if row["high90"] > 1 + NORM_BAND or row["low90"] < 1 - NORM_BAND]
        band = f"±{100 * NORM_BAND:g} % of the median"
        published = f"published for Pre-LN: {band}"
        if not outside:
            yield Finding(
                f"Before every layer, 90 % of the attention goes to tokens whose residual norm is within {band}.",
                "spread", "Residual norms are alike", "ok", comparison=f"{published[0].upper()}{published[1:]}.", weight=100,
            )  # fmt: skip
            return
        widest = max(outside, key=lambda row: float(row["high90"] / row["low90"]))
        ratio, failing = widest["high90"] / widest["low90"], [row["layer"] for row in outside]
        inside = [row["layer"] for row in layers if row["layer"] not in failing]
        some = "" if len(layers) == about["layers"] else " with attention"
        within = f"{layers_named(inside)} {'is' if len(inside) == 1 else 'are'} within {band}; " if inside else ""
        comparison = f"{within}{published}."
        yield Finding(
            f"In {len(failing)} of {len(layers)} layers{some} the residual norms of the tokens that receive 90 % of the "
            f"attention are not within {band}. Before layer {widest['layer']} the upper end of that band is {ratio:.3g} times "
            "the lower.",
            "spread",
            f"{'Norm outliers' if ratio > _WIDE else 'Residual norms differ'} before {layers_named(failing)}",
            "warning" if ratio > _WIDE else "notice",
            ratio,
            f"{comparison[0].upper()}{comparison[1:]}",
            "Look at the massive activations before you quantise activations." if ratio > _WIDE else "",
            weight=100,
        )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Bands of the norms by layer."""
        table = table_of(tables, "spread")
        if table is None:
            return None
        text = (
            "Before its gain, RMSNorm keeps a token's direction and fixes its norm: normalised tokens are points on a sphere. "
            "All heads of a layer share one divisor, the residual norm of the token; they are independent only if it does not "
            "depend on what other heads read. Norms are divided by their median; each token counts by the attention that it "
            "receives, without the first token of a row. Published for Pre-LN: 90 % within ±20 % of the median.",
        )
        return self.page(text, {"spread": _chart(table, settings)})


def _chart(table: pd.DataFrame, settings: str) -> Chart:
    whole = _whole_layers(table)
    layers = floats(whole["layer"])
    lines = [Line("whole layer", layers, [1.0] * len(layers))]
    for share in _INTERVALS:
        low, high = floats(whole[f"low{share}"]), floats(whole[f"high{share}"])
        lines += [Line("whole layer", layers, low, low, high, thin=True), Line("whole layer", layers, high, thin=True)]
    lines += [Line("±20 %", layers, [limit] * len(layers)) for limit in (1 - NORM_BAND, 1 + NORM_BAND)]
    lines += _head_limits(table[table["head"].notna()].sort_values("layer"))
    return Chart(
        "Residual norms before every layer",
        "layer",
        "norm / median norm",
        tuple(lines),
        "Bands hold 50, 90 and 99 % of a layer's attention; where they are narrow, tokens have nearly the same norm.",
        settings,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )


def _head_limits(heads: pd.DataFrame) -> list[Line]:
    """The 90 % limits of every head; of many heads only the outermost, layer by layer."""
    groups = [rows for _, rows in heads.groupby("head")]
    if not groups:
        return []
    if len(groups) <= DRAWN_HEADS:
        return [together("single heads, 90 %", groups, "layer", column) for column in ("low90", "high90")]
    widest = heads.groupby("layer", as_index=False).agg({"low90": "min", "high90": "max"})
    return [together("outermost heads, 90 %", [widest], "layer", column) for column in ("low90", "high90")]
