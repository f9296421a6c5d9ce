"""Sections of a comparison, from its tables."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from normscope.report.write import Report, findings_of, tables_of, write_report
from normscope.results import Chart, Figure, HeatMap, Line, PageTable, Section
from normscope.results.tables import Tables, cell, figures_section, floats, needed_table, spans_decades, table_of
from normscope.runs import RunFolder, plain_rows


def write_comparison_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page of a comparison."""
    tables = tables_of(run)
    sections = comparison_sections(tables, settings)
    write_report(run.path, Report("Side by side", settings, sections, findings=findings_of(tables)), formats)


def comparison_sections(tables: Tables, settings: str) -> list[Section]:
    """The numbers as a table with a column for each subject, and a figure for each quantity."""
    curves, figures = needed_table(tables, "curves"), dict[str, Figure | None]()
    for words in plain_rows(needed_table(tables, "quantities")):
        rows = curves[curves["quantity"] == words["name"]]
        figures[words["name"]] = _map(rows, words, settings) if rows["x"].isna().all() else _chart(rows, words, settings)
    return [*_numbers(tables), figures_section("Figures", (), figures)]


def number_cell(value: float) -> str:
    """A number to four digits, a large count in full; – where there is none."""
    return f"{value:,.0f}" if value >= 10_000 and value.is_integer() else cell(value, ".4g")


def _numbers(tables: Tables) -> list[Section]:
    table = table_of(tables, "numbers")
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
