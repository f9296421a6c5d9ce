"""Final numbers of a sweep over the fields that vary: maps over two numeric fields, lines over one, dots over none."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from normscope.report.sweep_fields import NONE, Panel, Sweep, panels, plain, words_of
from normscope.results import Chart, Figure, HeatMap, Line, PageTable
from normscope.results.tables import floats, spans_decades


@dataclass(frozen=True)
class Measure:
    """A number of every run, NaN where it has none, and the texts of its figures; a share of runs has no spread."""

    file: str
    title: str
    label: str
    caption: str
    values: "pd.Series[float]"
    percent: bool = False
    spread: bool = True


def measures_of(sweep: Sweep) -> list[Measure]:
    """Of trainings the final accuracy and divergence; of other runs all numbers, and divergence if there was one."""
    columns = [name for name in sweep.numbers if name == "accuracy"] if sweep.kind == "train" else sweep.numbers
    measures = [_accuracy(sweep) if sweep.kind == "train" else _result(sweep, column) for column in columns]
    if sweep.kind == "train" or (sweep.runs["state"] == "diverged").any():
        measures.append(_divergence(sweep.runs["state"]))
    return measures


def final_charts(sweep: Sweep, measure: Measure) -> dict[str, Figure | None]:
    """The measure over the fields that vary, by the names of the figures; nothing without a number or for a single point."""
    rows = sweep.runs.assign(value=measure.values)
    if rows["value"].isna().all():
        return {}
    if len(sweep.axes) > 1:
        return {**_maps(sweep, measure, rows)}
    drawn = panels(rows[rows["value"].notna()], sweep.others)
    if not sweep.axes and len(drawn) < 2:
        return {}
    spread = sweep.repeated and measure.spread
    lines = _profiles(sweep.axes[0], drawn, banded=spread) if sweep.axes else _dots(drawn, barred=spread)
    chart = Chart(
        measure.title,
        sweep.axes[0] if sweep.axes else f"points of {', '.join(sweep.others)}",
        measure.label,
        tuple(lines),
        measure.caption,
        sweep.settings + "; mean over seeds" * sweep.repeated + ", from the lowest to the highest" * spread,
        log_x=bool(sweep.axes) and spans_decades(x for line in lines for x in line.x),
        limits=(-2.0, 102.0) if measure.percent else None,  # lines at 0 and 100 are whole
    )
    return {measure.file: chart}


def points_table(sweep: Sweep, measures: list[Measure]) -> PageTable:
    """Every point with the number of its runs, and of each measure the mean, lowest and highest over seeds."""
    fields = (*sweep.others, *sweep.axes)
    rows = []
    for values, group in sweep.runs.groupby(list(fields), observed=True):
        rows.append((*map(str, values), f"{len(group)}", *(_over_seeds(measure, group) for measure in measures)))
    columns = (*fields, "runs", *(measure.label for measure in measures))
    return PageTable("Points: mean over seeds (lowest to highest)", columns, tuple(rows))


def _accuracy(sweep: Sweep) -> Measure:
    caption = "Points far below the others did not learn the task, or not yet."
    values = 100 * _finite(sweep.runs["accuracy"])
    return Measure("accuracy", "Final training accuracy", "accuracy in %", caption, values, percent=True)


def _divergence(states: "pd.Series[str]") -> Measure:
    """100 for a run that diverged, 0 for one that finished, NaN for one that failed."""
    values = states.map({"diverged": 100.0, "finished": 0.0}).astype(float)
    caption = "Above 0 is where runs diverge: their loss or weights became non-finite. Failed runs do not count."
    return Measure("diverged", "Share of runs that diverged", "runs diverged in %", caption, values, percent=True, spread=False)


def _result(sweep: Sweep, column: str) -> Measure:
    name = column.replace("_", " ")
    caption = f"Whether, and where, {name} depends on the fields that vary."
    return Measure(f"final-{plain(column)}", f"Final numbers: {name}", name, caption, _finite(sweep.runs[column]))


def _finite(column: "pd.Series[float]") -> "pd.Series[float]":
    values = np.array(floats(column))
    return pd.Series(np.where(np.isfinite(values), values, math.nan), column.index)


def _maps(sweep: Sweep, measure: Measure, rows: pd.DataFrame) -> dict[str, HeatMap]:
    """A map for each panel, all with the same colours."""
    across, up = sweep.axes
    log = not measure.percent and not (measure.values <= 0).any() and spans_decades(measure.values)
    maps: dict[str, HeatMap] = {}
    for panel in panels(rows, sweep.others):
        means = panel.rows.groupby([up, across], observed=False)["value"].mean().unstack(across)
        maps[measure.file + panel.file] = HeatMap(
            panel.title(measure.title),
            across,
            up,
            measure.label,
            words_of(rows[across]),
            words_of(rows[up]),
            means.to_numpy(dtype=float).tolist(),
            measure.caption,
            sweep.settings + "; mean over seeds" * sweep.repeated,
            log=log,
        )
    ranges = [heat.colour_limits for heat in maps.values() if np.isfinite(heat.values).any()]
    limits = (0.0, 100.0) if measure.percent else (min(low for low, _ in ranges), max(high for _, high in ranges))
    return {name: replace(heat, limits=limits) for name, heat in maps.items()}


def _profiles(field: str, drawn: list[Panel], *, banded: bool) -> list[Line]:
    """A line for each panel, through its means over seeds."""
    lines = []
    for panel in drawn:
        rows = panel.rows[panel.rows[field] != NONE]
        numbers = rows.groupby(field, observed=True)["value"].agg(["mean", "min", "max"])
        x, (y, low, high) = [float(value) for value in numbers.index], (floats(numbers[name]) for name in numbers)
        lines.append(Line(panel.words or "all runs", x, y, *((low, high) if banded else ())))
    return lines


def _dots(drawn: list[Panel], *, barred: bool) -> list[Line]:
    """A dot for each panel at its mean over seeds, with a bar from the lowest to the highest."""
    lines: list[Line] = []
    for place, panel in enumerate(drawn, 1):
        values = panel.rows["value"]
        low, high = ([values.min()], [values.max()]) if barred else (None, None)
        lines.append(Line(f"{place} {panel.words}", [float(place)], [values.mean()], low, high, dots=True))
    return lines


def _over_seeds(measure: Measure, runs: pd.DataFrame) -> str:
    values = measure.values[runs.index].dropna()
    if values.empty:
        return NONE
    low, high = values.min(), values.max()
    return f"{values.mean():.4g}" + (f" ({low:.4g} to {high:.4g})" if measure.spread and low < high else "")
