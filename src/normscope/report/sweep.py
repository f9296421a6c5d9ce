"""Sections of a sweep: final numbers and divergence over the fields that vary, curves by panel, and the table of all runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pandas as pd

from normscope.report.sweep_curves import cosine_charts, training_charts
from normscope.report.sweep_fields import ACROSS, NONE, UP, Sweep, read_sweep, word
from normscope.report.sweep_final import final_charts, measures_of, points_table
from normscope.report.write import Report, findings_of, tables_of, write_report
from normscope.results import Chart, Figure, PageTable, Section
from normscope.results.tables import cell, figures_section, floats
from normscope.runs import RunFolder, plain_rows

_STATES = ("finished", "diverged", "failed")
_FIGURES = 24  # of one section; more would hide each other
_ERROR = 300  # characters of an error that the page shows


def write_sweep_report(
    run: RunFolder, title: str, formats: Sequence[str] = ("html",), configuration: Mapping[str, Any] | None = None
) -> None:
    """Write the page of a sweep from its tables ``runs``, ``curves`` and, if it has it, ``findings``.

    Args:
        run: the folder.
        title: the heading of the page.
        formats: of the report.
        configuration: has ``kind``, in ``varied`` the fields that vary in their order, and in ``points``, if there, the
            ``values`` of every point, for the small print. That of the run unless given; needed while the folder is
            being written and has no ``run.json`` yet.
    """
    tables = tables_of(run)
    sweep = read_sweep(tables, run.description["configuration"] if configuration is None else configuration)
    write_report(run.path, Report(title, _lead(sweep), sweep_sections(sweep), findings=findings_of(tables)), formats)


def sweep_sections(sweep: Sweep) -> list[Section]:
    """Final numbers, curves, and all runs."""
    return [section for section in (_final(sweep), *_curves(sweep), _runs(sweep)) if section]


def _lead(sweep: Sweep) -> str:
    counts = sweep.runs["state"].value_counts()
    states = dict.fromkeys(state for state in (*_STATES, *counts.index) if state in counts)
    listed = ", ".join(f"{counts[state]:,} {state}" for state in states) or "none"
    over = f" over {', '.join(sweep.varied)}" if sweep.varied else ""
    return f"{len(sweep.runs):,} run{'s' * (len(sweep.runs) != 1)} of kind {sweep.kind}{over}: {listed}."


def _final(sweep: Sweep) -> Section | None:
    measures = measures_of(sweep)
    charts = {name: chart for measure in measures for name, chart in final_charts(sweep, measure).items()}
    tables = (points_table(sweep, measures),) if sweep.repeated and (sweep.axes or sweep.others) else ()
    if not charts and not tables:
        return None
    text: tuple[str, ...] = ()
    if sweep.repeated:
        text = ("Runs that differ only in their seed are one point; its numbers are means over seeds.",)
    if sweep.kind == "train" and (sweep.runs["state"] == "diverged").any():
        text += ("A run that diverged counts with its last accuracy, if it had one.",)
    if sweep.kind == "train" and sweep.axes == (ACROSS, UP):
        text += (
            "Published for the addition task: at large width and a learning rate of 1e-3 Pre-Norm is unstable, QKV-Norm is "
            "not.",
        )
    return replace(_section("Final numbers", text, charts), tables=tables)


def _curves(sweep: Sweep) -> list[Section]:
    if sweep.curves is None:
        return []
    if "mean" in sweep.curves:
        return [_curve_section("Mean cosine over time", "", cosine_charts(sweep, sweep.curves))]
    charts = training_charts(sweep, sweep.curves)
    text = "Lines of one look differ only in their seed." if sweep.repeated else ""
    return [_curve_section(f"{name.capitalize()} over training", text, panels) for name, panels in charts.items()]


def _curve_section(title: str, text: str, charts: Mapping[str, Chart]) -> Section:
    """The panels that have a curve; those without are named."""
    drawn = {name: chart for name, chart in charts.items() if any(math.isfinite(x) for line in chart.lines for x in line.x)}
    empty = [chart.title.partition(": ")[2] for name, chart in charts.items() if name not in drawn]
    texts = (text, f"No run has a curve at {'; '.join(empty)}." if empty else "")
    return _section(title, tuple(filter(None, texts)), drawn)


def _section(title: str, text: tuple[str, ...], charts: Mapping[str, Figure | None]) -> Section:
    if len(charts) > _FIGURES:
        text = (*text, f"Of {len(charts)} figures the first {_FIGURES} are drawn; the tables beside this page hold the others.")
    return figures_section(title, text, dict(islice(charts.items(), _FIGURES)))


def _runs(sweep: Sweep) -> Section:
    troubled = _troubled(sweep.runs)
    return Section("Runs", (), (*([troubled] if troubled.rows else []), _all_runs(sweep)))


def _troubled(runs: pd.DataFrame) -> PageTable:
    """Runs that diverged or failed, with the last line of the error."""
    rows = plain_rows(runs[runs["state"].isin(["diverged", "failed"])][["name", "state", "error"]])
    cells = tuple((_breakable(row["name"]), str(row["state"]), _last_line(row["error"])) for row in rows)
    return PageTable("Runs that diverged or failed, and why", ("name", "state", "error"), cells)


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
