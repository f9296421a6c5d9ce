"""Tables with rows for every layer and head, from one forward pass."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from normscope.core.threads import one_thread
from normscope.measures.base import LayerAttention, PassObserver, Tables
from normscope.measures.head_spaces import SIDES

Row = Mapping[str, Any]
_SMALL = 1 << 20  # numbers in the input of a layer's attention


class HeadRows(PassObserver):
    """Collects the rows that a function makes of every layer's attention into one table."""

    def __init__(self, table: str, rows: Callable[[LayerAttention], Iterable[Row]]) -> None:
        self.table, self._rows_of = table, rows
        self._rows: list[Row] = []

    def attention(self, attention: LayerAttention) -> None:
        """Add the rows of a layer."""
        with one_thread(small=attention.step.input.numel() < _SMALL):
            self._rows.extend(list(self._rows_of(attention)))

    def tables(self) -> Tables:
        """The table under its name, if there are rows."""
        return {self.table: pd.DataFrame(self._rows)} if self._rows else {}


def with_totals(tables: Mapping[str, Sequence[Row]]) -> Tables:
    """Tables of rows whose head, and layer, is None for a whole layer, and the whole model; those without rows are left out."""
    typed = {"layer": "Int64", "head": "Int64"}
    return {name: pd.DataFrame(rows).astype(typed) for name, rows in tables.items() if rows}


def head_name(row: Any) -> str:
    """A head as people write it: L3H4."""
    return f"L{int(row['layer'])}H{int(row['head'])}"


def distinct_heads(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with every KV head once: of ``shared`` query heads with the same keys only the first."""
    first: pd.DataFrame = rows[rows["head"] % rows["shared"] == 0].copy()
    first["head"] //= first["shared"]
    return first


def needless(side: str, about: Mapping[str, Any]) -> str:
    """Why heads are independent on a side whatever their inputs are, as a sentence; empty if they are not."""
    if side[0] not in about["normalised_heads"]:
        return ""
    return f"This model normalises {side} per head, so its heads do not need it. "


def layer_means(rows: pd.DataFrame, column: str, form: str) -> dict[int, str]:
    """The mean of a column over the heads of every layer, as a text; nothing where it is not defined."""
    means = rows.groupby("layer")[column].mean().dropna()
    return {int(layer): form.format(mean) for layer, mean in means.items()}  # type: ignore[call-overload]


def side_means(rows: pd.DataFrame, column: str) -> dict[int, str]:
    """The means of a column over the heads of every layer, for queries / keys."""
    sides = {side: layer_means(own, column, "{:.3f}") for side, own in rows.groupby("side")}
    pairs = [sides[side] for side in SIDES if side in sides]
    return {layer: " / ".join(cells.get(layer, "–") for cells in pairs) for layer in sorted(set().union(*pairs))}
