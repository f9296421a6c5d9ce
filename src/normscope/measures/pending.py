"""Quantities of measures that do not declare theirs yet."""

import pandas as pd

from normscope.measures.base import LAYER, Quantity
from normscope.measures.curves import columns, statistic


def _interference(table: pd.DataFrame) -> pd.DataFrame:
    rows = table[(table["place"] == "before") & (table["exchanged"] == "both")]
    return columns("layer", "change")(rows.groupby("layer", as_index=False).agg({"change": "median"}))


PENDING = (
    Quantity(
        "interference", "Interference", LAYER, "relative change of attention logits",
        "How much logits change in the median head when content that it cannot read is resampled before the norm.",
        "interference", _interference, "interference in the median layer", statistic("median"),
    ),
)  # fmt: skip
