"""Figures and page of a comparison, from its tables."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from normscope.report.charts import Chart, Drawing, HeatMap, Line
from normscope.report.figures import charts_section, with_findings, write_page
from normscope.report.page import PageTable, Section
from normscope.report.tables import cell, floats, spans_decades, table_of
from normscope.runs import RunFolder, plain_rows


def write_comparison_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Draw the pictures of a comparison and its page."""
    write_page(run, "Side by side", settings, with_findings(run, comparison_sections(run, settings)), formats)


def comparison_sections(run: RunFolder, settings: str) -> list[Section]:
    """The numbers as a table with a column for each subject, and a figure for each quantity."""
    curves, charts = run.table("curves"), dict[str, Drawing | None]()
    for words in plain_rows(run.table("quantities")):
        rows = curves[curves["quantity"] == words["name"]]
        charts[words["name"]] = _map(rows, words, settings) if rows["x"].isna().all() else _chart(rows, words, settings)
    return [*_numbers(run), charts_section(run, "Figures", (), charts)]


def number_cell(value: float) -> str:
    """A number to four digits, a large count in full; – where there is none."""
    return f"{value:,.0f}" if value >= 10_000 and value.is_integer() else cell(value, ".4g")


def _numbers(run: RunFolder) -> list[Section]:
    table = table_of(run, "numbers")
    if table is None:
        return []
    subjects = list(dict.fromkeys(map(str, table["subject"])))
    rows = []
    for number, group in table.groupby("number", sort=False):
        values = dict(zip(map(str, group["subject"]), floats(group["value"]), strict=True))
        unit = str(group["unit"].iloc[0])
        name = f"{number} ({unit})" if unit else str(number)
        rows.append((name, *(number_cell(values.get(subject, math.nan)) for subject in subjects)))
    return [Section("Numbers", (), (PageTable("Side by side", ("", *subjects), tuple(rows)),))]


def _chart(curves: pd.DataFrame, words: Mapping[str, Any], settings: str) -> Chart:
    lines = tuple(
        Line(f"{subject}: {line}" if line else str(subject), floats(rows["x"]), floats(rows["y"]))
        for (subject, line), rows in curves.groupby(["subject", "line"], sort=False)
    )
    log = _wants_log(floats(curves["y"]))
    return Chart(words["title"], words["x"], words["y"], lines, words["caption"], settings, log_y=log)


def _map(values: pd.DataFrame, words: Mapping[str, Any], settings: str) -> HeatMap:
    """Where lines are single values: a row for each line, a column for each subject."""
    cells = {(row["line"], row["subject"]): float(row["y"]) for row in plain_rows(values)}
    lines, subjects = (list(dict.fromkeys(map(str, values[name]))) for name in ("line", "subject"))
    grid = [[cells.get((line, subject), math.nan) for subject in subjects] for line in lines]
    log = _wants_log(cells.values())
    title, caption, x = words["title"], words["caption"], "model or run"
    return HeatMap(title, x, words["x"], words["y"], subjects, lines, grid, caption, settings, log=log, from_top=True)


def _wants_log(values: Iterable[float]) -> bool:
    """Whether a logarithmic scale shows more, and leaves nothing out."""
    shown = [value for value in values if math.isfinite(value)]
    return spans_decades(shown) and min(shown) > 0
