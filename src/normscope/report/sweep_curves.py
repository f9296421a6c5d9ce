"""Curves of a sweep by panel: accuracy and loss of trainings over steps, mean cosines of ensembles over time.

A name that has no curve in a panel keeps its place there, so that colours mean the same in all panels.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from normscope.report.sweep_fields import SEED, Sweep, panels, words_of
from normscope.report.training import POINTS, block_means
from normscope.results import Chart, Line
from normscope.results.tables import floats, spans_decades

_THICK = 4  # more lines than these of one name are thin
_PERCENT = (-2.0, 102.0)  # lines at 0 and 100 are whole


def training_charts(sweep: Sweep, curves: pd.DataFrame) -> dict[str, dict[str, Chart]]:
    """For accuracy and for loss the charts of all panels, by the names of the figures.

    A panel has one value of every field that varies but one, whose values are its lines.
    """
    groups = {str(name): rows for name, rows in curves.groupby("name", sort=False)}
    block = max(math.ceil(len(rows) / POINTS) for rows in groups.values())
    settings = f"{sweep.settings}; every point is a mean over {block} rows of the table" if block > 1 else sweep.settings
    drawn = {name: block_means(rows[["step", "loss", "accuracy"]], block) for name, rows in groups.items()}
    drawn = {name: rows.assign(accuracy=100 * rows["accuracy"]) for name, rows in drawn.items()}
    accuracy = Chart(
        "Training accuracy",
        "step",
        "accuracy in %",
        (),
        "A line that stays low, or falls again, did not train stably; a dot ends a run that diverged.",
        settings,
        limits=_PERCENT,
    )
    loss = Chart("Training loss", "step", "loss", (), "Spikes are instability; a dot ends a run that diverged.", settings)
    return {column: _by_panel(sweep, drawn, column, chart) for column, chart in (("accuracy", accuracy), ("loss", loss))}


def cosine_charts(sweep: Sweep, curves: pd.DataFrame) -> dict[str, Chart]:
    """Mean cosines with their bands, a line for each scheme, by the names of the figures."""
    fields = [field for field in (*sweep.others, *sweep.axes, *[SEED] * sweep.repeated) if field != "scheme"]
    groups = {(str(name), str(scheme)): rows for (name, scheme), rows in curves.groupby(["name", "scheme"], sort=False)}
    schemes = list(dict.fromkeys(scheme for _, scheme in groups))
    chart = Chart(
        "Clustering with random weights",
        "time t",
        "mean cosine",
        (),
        "1 is collapse: all tokens point one way. Lines are means over runs, bands hold 90 % of them.",
        sweep.settings,
        limits=(min([-0.02, *(low for low in floats(curves["low"]) if math.isfinite(low))]), 1.02),
    )
    charts: dict[str, Chart] = {}
    for panel in panels(sweep.runs, fields):
        lines: list[Line] = []
        for scheme in schemes:
            drawn = [groups[run, scheme] for run in panel.rows["name"] if (run, scheme) in groups]
            lines += [_banded(scheme, rows) for rows in drawn] or [_absent(scheme)]
        charts[f"curve-cosine{panel.file}"] = replace(chart, title=panel.title(chart.title), lines=tuple(lines))
    return charts


def _banded(name: str, rows: pd.DataFrame) -> Line:
    x, y, low, high = (floats(rows[key]) for key in ("time", "mean", "low", "high"))
    return Line(name, x, y, low, high)


def _by_panel(sweep: Sweep, curves: Mapping[str, pd.DataFrame], column: str, chart: Chart) -> dict[str, Chart]:
    by = next(iter((*sweep.axes, *sweep.others)), SEED if sweep.repeated else None)
    fields = [field for field in (*sweep.others, *sweep.axes) if field != by]
    charts: dict[str, Chart] = {}
    for panel in panels(sweep.runs, fields):
        lines = _training_lines(panel.rows, by, curves, column)
        log = chart.limits is None and spans_decades(value for line in lines for value in line.y)
        charts[f"curve-{column}{panel.file}"] = replace(chart, title=panel.title(chart.title), lines=lines, log_y=log)
    return charts


def _training_lines(runs: pd.DataFrame, by: str | None, curves: Mapping[str, pd.DataFrame], column: str) -> tuple[Line, ...]:
    """A line for each run, named by its value of a field, and a dot at the last point of each that diverged."""
    groups = {"all runs": runs} if by is None else {f"{by} {value}": runs[runs[by] == value] for value in words_of(runs[by])}
    lines: list[Line] = []
    for name, rows in groups.items():
        drawn = [curves[run] for run in rows["name"] if run in curves]
        lines += [Line(name, floats(one["step"]), floats(one[column]), thin=len(drawn) > _THICK) for one in drawn]
        lines += [] if drawn else [_absent(name)]
    ended = [curves[run] for run in runs.loc[runs["state"] == "diverged", "name"] if run in curves]
    last = [rows[np.isfinite(rows[column])].tail(1) for rows in ended]
    x, y = ([value for rows in last for value in floats(rows[key])] for key in ("step", column))
    return (*lines, Line("diverged", x, y, dots=True)) if x else tuple(lines)


def _absent(name: str) -> Line:
    """A line without a point."""
    return Line(name, [math.nan], [math.nan])
