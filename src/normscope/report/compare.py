"""Figures and page of a comparison, from its tables."""

from collections.abc import Sequence

import pandas as pd

from normscope.report.charts import Chart, Drawing, Line
from normscope.report.figures import charts_section, with_findings, write_page
from normscope.report.page import PageTable, Section
from normscope.report.tables import cell, floats, spans_decades, table_of
from normscope.results import RunFolder, plain_rows


def write_comparison_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Draw the pictures of a comparison and its page."""
    write_page(run, "Side by side", settings, with_findings(run, comparison_sections(run, settings)), formats)


def comparison_sections(run: RunFolder, settings: str) -> list[Section]:
    """The numbers as a table with a column for each subject, and a figure for each quantity."""
    curves, quantities = run.table("curves"), plain_rows(run.table("quantities"))
    charts: dict[str, Drawing | None] = {}
    for words in quantities:
        lines = _lines(curves[curves["quantity"] == words["name"]])
        log = spans_decades([value for line in lines for value in line.y])
        title, caption = str(words["title"]), str(words["caption"])
        charts[words["name"]] = Chart(title, words["x"], words["y"], tuple(lines), caption, settings, log_y=log)
    return [*_numbers(run), charts_section(run, "Curves", (), charts)]


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
        rows.append((name, *(cell(values.get(subject, float("nan")), ".4g") for subject in subjects)))
    return [Section("Numbers", (), (PageTable("Side by side", ("", *subjects), tuple(rows)),))]


def _lines(curves: pd.DataFrame) -> list[Line]:
    groups = curves.groupby(["subject", "line"], sort=False)
    return [
        Line(f"{subject}: {line}" if line else str(subject), floats(rows["x"]), floats(rows["y"]))
        for (subject, line), rows in groups
    ]
