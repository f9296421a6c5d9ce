"""Growth: the norm of the residual stream before every layer."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch

from normscope.core.norms import length
from normscope.measures.base import LAYER, Measure, PassObserver, Quantity, Subject
from normscope.measures.curves import columns, growth
from normscope.measures.states import Counted, StateRows, Tokens
from normscope.results.figures import Chart, Line
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import by_layer, floats, spans_decades, table_of


def _row(every: Tokens, counted: Counted) -> dict[str, float]:
    radius = length(counted).squeeze(-1)
    low, high = radius.quantile(torch.tensor([0.05, 0.95], dtype=radius.dtype)).tolist()
    return {"width": counted.shape[-1], "radius": float(radius.mean()), "radius_low": low, "radius_high": high}


@dataclass(frozen=True)
class Growth(Measure):
    """Mean residual norm before every layer and after the last, with the middle 90 % of the tokens."""

    name: ClassVar[str] = "growth"
    title: ClassVar[str] = "Residual norm"
    order: ClassVar[int | None] = 10
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "radius", "Residual norm before every layer", LAYER, "|x|",
            "The steeper a line, the less the same update rotates a token in late layers.",
            "motion", columns("layer", "radius"), "residual growth, last over first", growth, "×", fact="residual growth",
            states=True,
        ),
    )  # fmt: skip

    def observer(self, subject: Subject) -> PassObserver:
        """Hidden states before every layer."""
        return StateRows(subject, "motion", _row)

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The mean norm."""
        return {"residual norm before": by_layer(tables, "motion", "radius", "{:.3g}")}

    def totals(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, float]:
        """The norm after the last layer over that before layer 0."""
        return {"growth": growth(columns("layer", "radius")(tables["motion"]))} if "motion" in tables else {}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """How much the norm grows, and how much of that in the first layer."""
        motion = tables["motion"].dropna(subset="radius")
        radius, layers = floats(motion["radius"]), [int(layer) for layer in motion["layer"]]
        first, last = layers[0], layers[-1] - 1
        total = radius[-1] / radius[0]
        later = f"{radius[-1] / radius[1]:.3g} times in layers {first + 1}–{last}"
        parts = f": {radius[1] / radius[0]:.3g} times in layer {first}, {later}" if last > first else ""
        if motion["width"].nunique() > 1:
            wide = [int(motion["width"].iloc[i]) for i in (0, -1)]
            per_channel = [end / math.sqrt(width) for end, width in zip((radius[0], radius[-1]), wide, strict=True)]
            parts = (
                f"; it has {wide[0]:,} channels of RMS {per_channel[0]:.3g} first and {wide[1]:,} of {per_channel[1]:.3g} last"
            )
        yield Finding(
            f"The mean residual norm is {radius[0]:.3g} before layer {first} and {radius[-1]:.3g} after layer {last}, "
            f"{total:.3g} times as much{parts}.",
            "radius", title="Growth of the residual norm", severity="ok", number=total,
        )  # fmt: skip

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """The norm by layer."""
        motion = table_of(tables, "motion")
        if motion is None or "radius" not in motion:
            return None
        layers, radii, low, high = (floats(motion[name]) for name in ("layer", "radius", "radius_low", "radius_high"))
        chart = Chart(
            "Residual norm before every layer",
            "layer",
            "|x|",
            (Line("this model, 90 % of tokens", layers, radii, low, high),),
            "A growing norm slows late layers down: the same update rotates a token with a larger norm less.",
            settings,
            log_y=spans_decades(radii),
        )
        text = (
            "Means over tokens without the first of every row. The last point is the residual stream after the last layer.",
        )
        return self.page(text, {"radius": chart})
