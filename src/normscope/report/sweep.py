"""Page of a sweep: final numbers and divergence over the fields that vary, curves by panel, and the table of all runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pandas as pd

from normscope.report.charts import Chart, Drawing
from normscope.report.figures import charts_section, with_findings, write_page
from normscope.report.sweep_curves import cosine_charts, training_charts
from normscope.report.sweep_fields import ACROSS, NONE, UP, Sweep, read_sweep, word
from normscope.report.sweep_final import final_charts, measures_of, points_table
from normscope.report.tables import cell, floats
from normscope.results.sections import PageTable, Section
from normscope.runs import RunFolder, plain_rows

_STATES = ("finished", "diverged", "failed")
_FIGURES = 24  # of one section; more would hide each other
_ERROR = 300  # characters of an error that the page shows


def write_sweep_report(
    run: RunFolder, title: str, formats: Sequence[str] = ("html",), configuration: Mapping[str, Any] | None = None
) -> None:
    """Draw the figures of a sweep and its page from its tables ``runs``, ``curves`` and, if it has it, ``findings``.

    Args:
        run: the folder.
        title: the heading of the page.
        formats: html, md or both.
        configuration: has ``kind``, in ``varied`` the fields that vary in their order, and in ``points``, if there, the
            ``values`` of every point, for the small print. The run's own unless given, as it has to be while the folder is
            being written and has no ``run.json`` yet.
    """
    sweep = read_sweep(run, run.description["configuration"] if configuration is None else configuration)
    sections = [section for section in (_final(run, sweep), *_curves(run, sweep), _runs(sweep)) if section]
    write_page(run, title, _lead(sweep), with_findings(run, sections), formats)


def _lead(sweep: Sweep) -> str:
    counts = sweep.runs["state"].value_counts()
    states = dict.fromkeys(state for state in (*_STATES, *counts.index) if state in counts)
    said = ", ".join(f"{counts[state]:,} {state}" for state in states) or "none"
    over = f" over {', '.join(sweep.varied)}" if sweep.varied else ""
    return f"{len(sweep.runs):,} run{'s' * (len(sweep.runs) != 1)} of kind {sweep.kind}{over}: {said}."


def _final(run: RunFolder, sweep: Sweep) -> Section | None:
    measures = measures_of(sweep)
    charts = {name: chart for measure in measures for name, chart in final_charts(sweep, measure).items()}
    tables = (points_table(sweep, measures),) if sweep.repeated and (sweep.axes or sweep.others) else ()
    if not charts and not tables:
        return None
    text: tuple[str, ...] = ()
    if sweep.repeated:
        text = ("Runs that differ in nothing but their seed are one point; its numbers are means over those that have one.",)
    if sweep.kind == "train" and (sweep.runs["state"] == "diverged").any():
        text += ("A run that diverged counts with the accuracy that it last had, if it had one.",)
    if sweep.kind == "train" and sweep.axes == (ACROSS, UP):
        text += ("Published for the addition task: at large width and a rate of 1e-3 Pre-Norm is unstable, QKV-Norm is not.",)
    return replace(_section(run, "Final numbers", text, charts), tables=tables)


def _curves(run: RunFolder, sweep: Sweep) -> list[Section]:
    if sweep.curves is None:
        return []
    if "mean" in sweep.curves:
        return [_curve_section(run, "Mean cosine over time", "", cosine_charts(sweep, sweep.curves))]
    charts = training_charts(sweep, sweep.curves)
    text = "Lines of one look differ in nothing but their seed." if sweep.repeated else ""
    return [_curve_section(run, f"{name.capitalize()} over training", text, found) for name, found in charts.items()]


def _curve_section(run: RunFolder, title: str, text: str, charts: Mapping[str, Chart]) -> Section:
    """The panels that have a curve; those without are named."""
    drawn = {name: chart for name, chart in charts.items() if any(math.isfinite(x) for line in chart.lines for x in line.x)}
    empty = [chart.title.partition(": ")[2] for name, chart in charts.items() if name not in drawn]
    said = (text, f"No run has a curve at {'; '.join(empty)}." if empty else "")
    return _section(run, title, tuple(filter(None, said)), drawn)


def _section(run: RunFolder, title: str, text: tuple[str, ...], charts: Mapping[str, Drawing | None]) -> Section:
    if len(charts) > _FIGURES:
        text = (*text, f"Of {len(charts)} figures the first {_FIGURES} are drawn; the tables beside this page hold the others.")
    return charts_section(run, title, text, dict(islice(charts.items(), _FIGURES)))


def _runs(sweep: Sweep) -> Section:
    troubled = _troubled(sweep.runs)
    return Section("Runs", (), (*([troubled] if troubled.rows else []), _all_runs(sweep)))


def _troubled(runs: pd.DataFrame) -> PageTable:
    """Runs that diverged or failed, with the last line of what was said."""
    rows = plain_rows(runs[runs["state"].isin(["diverged", "failed"])][["name", "state", "error"]])
    said = tuple((_breakable(row["name"]), str(row["state"]), _last_line(row["error"])) for row in rows)
    return PageTable("Runs that diverged or failed, and why", ("name", "state", "error"), said)


def _breakable(name: str) -> str:
    """A run's name with room for a new line after its commas."""
    return name.replace(",", ", ")


def _last_line(error: str | None) -> str:
    lines = [line.strip() for line in (error or "").splitlines() if line.strip()] or [NONE]
    return lines[-1] if len(lines[-1]) <= _ERROR else lines[-1][: _ERROR - 1] + "…"


def _all_runs(sweep: Sweep) -> PageTable:
    """A row for each run; its name, which is long and says the fields again, stands last."""
    columns = (*sweep.varied, "state", *sweep.results, "name")
    cells = [_cells(sweep, name) for name in columns]
    heads = (f"{name} in %" if _is_accuracy(sweep, name) else name for name in columns)
    return PageTable("All runs", tuple(heads), tuple(zip(*cells, strict=True)))


def _cells(sweep: Sweep, column: str) -> list[str]:
    if column == "name":
        return [_breakable(str(name)) for name in sweep.runs[column]]
    if column not in sweep.numbers:
        return [word(value) for value in sweep.runs[column]]
    values = floats(sweep.runs[column])
    if _is_accuracy(sweep, column):
        return [cell(100 * value, ".2f") for value in values]
    whole = all(value.is_integer() for value in values if math.isfinite(value))
    return [cell(value, ",.0f" if whole else ".4g") for value in values]


def _is_accuracy(sweep: Sweep, column: str) -> bool:
    """Whether a column holds shares of right answers, which pages show in percent."""
    return sweep.kind == "train" and column.startswith("accuracy") and column in sweep.numbers
