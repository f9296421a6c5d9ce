"""What the reports of single heads share: sections, heat maps by layer and head, and columns of tables as numbers."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from normscope.report.charts import Chart, HeatMap
from normscope.report.figures import save_picture
from normscope.report.page import Section
from normscope.results import RunFolder


def findings_section(run: RunFolder, settings: str) -> Section | None:
    """The sentences that a measurement came to."""
    table = filled_table(run, "findings")
    return None if table is None else Section("Findings", tuple(map(str, table["text"])))


def filled_table(run: RunFolder, name: str) -> pd.DataFrame | None:
    """The table, if the run has it and it has rows."""
    table = run.table(name) if name in run.tables else pd.DataFrame()
    return None if table.empty else table


def charts_section(run: RunFolder, title: str, text: tuple[str, ...], charts: Mapping[str, Chart | HeatMap | None]) -> Section:
    """The text, and the charts that there are."""
    return Section(title, text, (), tuple(save_picture(run, name, chart) for name, chart in charts.items() if chart))


def head_map(
    table: pd.DataFrame, column: str, title: str, value_label: str, caption: str, settings: str, log: bool = False
) -> HeatMap | None:
    """A column by layer and head."""
    rows = table[table["layer"].notna() & table["head"].notna()]
    if rows.empty:
        return None
    layers, heads, values = grid(rows, "layer", "head", column)
    x_names, y_names = list(map(str, heads)), list(map(str, layers))
    return HeatMap(title, "head", "layer", value_label, x_names, y_names, values, caption, settings, log=log)


def grid(rows: pd.DataFrame, y: str, x: str, column: str) -> tuple[range, range, list[list[float]]]:
    """Rows and columns from the first to the last, and a column's values in them, NaN where there is none."""
    down, across = rows[y].astype(int), rows[x].astype(int)
    values = np.full((down.max() - down.min() + 1, across.max() - across.min() + 1), math.nan)
    values[down - down.min(), across - across.min()] = floats(rows[column])
    return range(down.min(), down.max() + 1), range(across.min(), across.max() + 1), values.tolist()


def floats(column: "pd.Series[float]") -> list[float]:
    """A column as plain numbers, NaN where it has none."""
    return [float(value) for value in column.to_numpy(dtype=float, na_value=math.nan)]


def spans_decades(values: Iterable[float]) -> bool:
    """Whether a linear axis would hide the smaller values."""
    shown = [value for value in values if value > 0 and math.isfinite(value)]
    return bool(shown and max(shown) > 10 * min(shown))
