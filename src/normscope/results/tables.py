"""Figures and cells from tables: columns as numbers, lines, maps of heads, texts of tokens."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from normscope.results.figures import HeatMap, Line

Tables = Mapping[str, pd.DataFrame]

_NAME = 12  # characters of a token that a label shows
_LAYERS = 3  # that have tables of tokens
_BLANKS = str.maketrans({" ": "␣", "\n": "⏎", "\r": "⏎", "\t": "⇥"})


def plain_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries, with None for what is missing."""
    plain = table.astype(object)
    return [{str(key): value for key, value in row.items()} for row in plain.where(plain.notna(), None).to_dict("records")]


def table_of(tables: Tables, name: str) -> pd.DataFrame | None:
    """The table, if it is there and has rows."""
    table = tables.get(name)
    return None if table is None or table.empty else table


def by_layer(tables: Tables, name: str, column: str, form: str) -> dict[int, str]:
    """A column of a table as texts by layer; nothing where there is none."""
    table = table_of(tables, name)
    rows = [] if table is None else plain_rows(table)
    return {row["layer"]: form.format(row[column]) for row in rows if row.get(column) is not None}


def head_map(
    table: pd.DataFrame,
    column: str,
    title: str,
    value_label: str,
    caption: str,
    settings: str,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    chosen: bool = False,
) -> HeatMap | None:
    """A column by layer and head; layers that are not in the table are empty rows, unless it has chosen ones only."""
    rows = table[table["layer"].notna() & table["head"].notna()]
    if rows.empty:
        return None
    names = sorted({int(layer) for layer in rows["layer"]})
    if chosen:
        rows = rows.assign(layer=[names.index(int(layer)) for layer in rows["layer"]])
    layers, heads, values = grid(rows, "layer", "head", column)
    x_names, y_names = list(map(str, heads)), list(map(str, names if chosen else layers))
    return HeatMap(title, "head", "layer", value_label, x_names, y_names, values, caption, settings, limits, log, heads=True)


def grid(rows: pd.DataFrame, y: str, x: str, column: str) -> tuple[range, range, list[list[float]]]:
    """Rows and columns from the first to the last, and a column's values in them, NaN where there is none."""
    down, across = rows[y].astype(int), rows[x].astype(int)
    values = np.full((down.max() - down.min() + 1, across.max() - across.min() + 1), math.nan)
    values[down - down.min(), across - across.min()] = floats(rows[column])
    return range(down.min(), down.max() + 1), range(across.min(), across.max() + 1), values.tolist()


def floats(column: "pd.Series[float]") -> list[float]:
    """The column's values, NaN where there is none."""
    return [float(value) for value in column.to_numpy(dtype=float, na_value=math.nan)]


def together(name: str, groups: Iterable[pd.DataFrame], x: str, y: str) -> Line:
    """Many thin lines as one, with gaps between them."""
    tables = list(groups)
    xs, ys = ([value for table in tables for value in (*floats(table[column]), math.nan)] for column in (x, y))
    return Line(name, xs, ys, thin=True)


def spans_decades(values: Iterable[float]) -> bool:
    """Whether a linear axis would hide the smaller values."""
    shown = [value for value in values if value > 0 and math.isfinite(value)]
    return bool(shown and max(shown) > 10 * min(shown))


def joined_tokens(texts: "pd.Series[str]") -> str:
    """Several tokens in one cell of a table."""
    return " · ".join(token_name(text) for text in texts) or "–"


def a_few(layers: list[int]) -> list[int]:
    """The first, the middle and the last of many layers."""
    return layers if len(layers) <= _LAYERS else [layers[0], layers[len(layers) // 2], layers[-1]]


def cell(value: float, form: str = ".3f") -> str:
    """A number for a table; – where there is none."""
    return format(value, form) if math.isfinite(value) else "–"


def token_name(text: object, longest: int = _NAME) -> str:
    """A token's text with its blanks visible and □ for what cannot be shown, cut to fit a label; – where there is none."""
    if text is None or text is pd.NA or text != text:
        return "–"
    shown = "".join(letter if letter.isprintable() else "□" for letter in str(text).translate(_BLANKS))
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def banded(name: str, rows: pd.DataFrame, x: str, column: str) -> Line:
    """A line with a band of one standard error, the column ``<column>_stderr``."""
    middle, error = np.array(floats(rows[column])), np.array(floats(rows[f"{column}_stderr"]))
    return Line(name, floats(rows[x]), middle.tolist(), (middle - error).tolist(), (middle + error).tolist())
