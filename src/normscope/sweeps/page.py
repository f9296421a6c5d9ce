"""The page of a sweep: final numbers and divergence over the fields that vary, curves by panel, and the table of all runs.

Nothing depends on the values of a field. Runs that differ in nothing but their seed are one point.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from normscope.experiments.train import block_means
from normscope.results.figures import Chart, Figure, HeatMap, Line, Panels
from normscope.results.sections import PageTable, Section
from normscope.results.tables import Tables, cell, floats, plain_rows, spans_decades, table_of

SEED = "seed"
ACROSS, UP = "dim", "rate"  # the axes of a map where these vary
NONE = "–"
_PERCENT = (-2.0, 102.0)  # lines at 0 and 100 are whole
_POINTS = 400  # of a curve; more would not show
_THICK = 4  # more lines than these of one name are thin
_PANELS = 24  # of one figure
_VALUES = 8  # of one field that the small print lists
_ERROR = 300  # characters of an error that the page shows


@dataclass(frozen=True)
class View:
    """What the figures of a sweep are drawn from.

    Attributes:
        kind: the experiment.
        runs: a row for each run; varied fields are ordered categories of texts.
        curves: the curves of all runs, or None.
        varied: the varied fields.
        axes: the numeric fields that final numbers are drawn over, across and up; one or none if no more vary.
        others: the other fields with more than one value, without the seed.
        settings: small print.
    """

    kind: str
    runs: pd.DataFrame
    curves: pd.DataFrame | None
    varied: tuple[str, ...]
    axes: tuple[str, ...]
    others: tuple[str, ...]
    settings: str

    @classmethod
    def of(cls, tables: Tables, configuration: Mapping[str, Any]) -> "View":
        """The view of a sweep's tables; its configuration has its kind, the fields that vary in order, and all points."""
        runs = tables["runs"]
        varied = tuple(str(field) for field in configuration["varied"] if field in runs)
        shown = runs.assign(**{field: _categories(runs[field]) for field in varied})
        fields = [field for field in varied if field != SEED and shown[field].nunique() > 1]
        axes = _axes([field for field in fields if _is_number(runs[field])])
        others = tuple(field for field in fields if field not in axes)
        settings = _settings(configuration, shown[list(varied)])
        return cls(str(configuration["kind"]), shown, table_of(tables, "curves"), varied, axes, others, settings)

    @property
    def repeated(self) -> bool:
        """Whether seeds vary."""
        return SEED in self.varied and self.runs[SEED].nunique() > 1

    @property
    def results(self) -> list[str]:
        """The columns of results."""
        return [str(name) for name in self.runs if name not in ("name", "state", "error", *self.varied)]

    @property
    def numbers(self) -> list[str]:
        """The columns of results that are numbers."""
        return [name for name in self.results if _is_number(self.runs[name])]

    def panels(self, rows: pd.DataFrame, fields: Sequence[str]) -> dict[str, pd.DataFrame]:
        """The rows for each combination of the fields' values, by these in words; all of them if there is no field."""
        if not fields:
            return {"": rows}
        return {
            ", ".join(f"{field} {value}" for field, value in zip(fields, values, strict=True)): group
            for values, group in rows.groupby(list(fields), observed=True)
        }


@dataclass(frozen=True)
class FinalNumber:
    """A number of every run, NaN where it has none, with the words of its figure; a share of runs has no spread."""

    name: str
    title: str
    label: str
    caption: str
    values: "pd.Series[float]"
    percent: bool = False
    spread: bool = True

    def over_seeds(self, runs: pd.DataFrame) -> str:
        """Its mean over some runs, with the lowest and the highest."""
        values = self.values[runs.index].dropna()
        if values.empty:
            return NONE
        low, high = values.min(), values.max()
        return f"{values.mean():.4g}" + (f" ({low:.4g} to {high:.4g})" if self.spread and low < high else "")


def sweep_sections(tables: Tables, configuration: Mapping[str, Any]) -> Iterator[Section]:
    """Final numbers, curves, and all runs, from the tables ``runs`` and ``curves``."""
    view = View.of(tables, configuration)
    final = final_section(view)
    if final is not None:
        yield final
    yield from _curve_sections(view)
    yield _runs_section(view)


def final_section(view: View) -> Section | None:
    """Every final number over the fields that vary, and a table of points where seeds vary."""
    numbers = final_numbers(view)
    figures = {number.name: figure for number in numbers if (figure := final_figure(view, number)) is not None}
    tables = (_points_table(view, numbers),) if view.repeated and (view.axes or view.others) else ()
    if not figures and not tables:
        return None
    text: tuple[str, ...] = ()
    if view.repeated:
        text = ("Runs that differ only in their seed are one point; its numbers are means over seeds.",)
    if view.kind == "train" and (view.runs["state"] == "diverged").any():
        text += ("A run that diverged counts with its last accuracy, if it had one.",)
    if view.kind == "train" and view.axes == (ACROSS, UP):
        text += (
            "Published for the addition task: at large width and a learning rate of 1e-3 Pre-LN is unstable, QKV-Norm not.",
        )
    return Section("Final numbers", text, tables, figures, name="final")


def final_numbers(view: View) -> list[FinalNumber]:
    """Of trainings the final accuracy and divergence; of other runs all numbers, and divergence if there was one."""
    if view.kind == "train":
        columns = [_accuracy(view.runs["accuracy"])] if "accuracy" in view.numbers else []
    else:
        columns = [_result(view.runs[column], column) for column in view.numbers]
    diverged = view.kind == "train" or (view.runs["state"] == "diverged").any()
    return [*columns, *([_divergence(view.runs["state"])] if diverged else [])]


def _accuracy(column: "pd.Series[float]") -> FinalNumber:
    caption = "Points far below the others did not learn the task, or not yet."
    return FinalNumber("accuracy", "Final training accuracy", "accuracy in %", caption, 100 * _finite(column), percent=True)


def _divergence(states: "pd.Series[str]") -> FinalNumber:
    """100 for a run that diverged, 0 for one that finished; one that failed counts as neither."""
    values = states.map({"diverged": 100.0, "finished": 0.0}).astype(float)
    caption = (
        "Above 0 is where runs diverge: a loss, weight or state became non-finite, or the loss was above stop_above. "
        "Failed runs do not count."
    )
    return FinalNumber("diverged", "Runs that diverged", "runs diverged in %", caption, values, percent=True, spread=False)


def _result(column: "pd.Series[float]", name: str) -> FinalNumber:
    words, plain = name.replace("_", " "), re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    caption = f"Whether, and where, {words} depends on the fields that vary."
    return FinalNumber(f"final-{plain}", f"Final {words}", words, caption, _finite(column))


def _finite(column: "pd.Series[float]") -> "pd.Series[float]":
    values = np.array(floats(column))
    return pd.Series(np.where(np.isfinite(values), values, math.nan), column.index)


def final_figure(view: View, number: FinalNumber) -> Figure | None:
    """Maps over two numeric fields, lines over one, dots over none; None without a number or for a single point."""
    rows = view.runs.assign(value=number.values)
    if rows["value"].isna().all():
        return None
    if len(view.axes) > 1:
        return _maps(view, number, rows)
    panels = view.panels(rows[rows["value"].notna()], view.others)
    if not view.axes and len(panels) < 2:
        return None
    spread = view.repeated and number.spread
    lines = _profiles(view.axes[0], panels, spread) if view.axes else _dots(panels, spread)
    return Chart(
        number.title,
        view.axes[0] if view.axes else f"points of {', '.join(view.others)}",
        number.label,
        lines,
        number.caption,
        view.settings + "; mean over seeds" * view.repeated + ", from the lowest to the highest" * spread,
        log_x=bool(view.axes) and spans_decades(x for line in lines for x in line.x),
        limits=_PERCENT if number.percent else None,
    )


def _maps(view: View, number: FinalNumber, rows: pd.DataFrame) -> Figure:
    """A map for each panel, all with the same colours."""
    across, up = view.axes
    log = not number.percent and not (number.values <= 0).any() and spans_decades(number.values)
    settings = view.settings + "; mean over seeds" * view.repeated
    maps: list[HeatMap] = []
    for words, group in view.panels(rows, view.others).items():
        means = group.groupby([up, across], observed=False)["value"].mean().unstack(across)
        names, values = (_words_of(rows[across]), _words_of(rows[up])), means.to_numpy(dtype=float).tolist()
        maps.append(HeatMap(words, across, up, number.label, *names, values, number.caption, settings, log=log))
    ranges = [heat.colour_limits for heat in maps if np.isfinite(heat.values).any()]
    limits = (0.0, 100.0) if number.percent else (min(low for low, _ in ranges), max(high for _, high in ranges))
    return _panelled(number.title, [replace(heat, limits=limits) for heat in maps])


def _profiles(field: str, panels: Mapping[str, pd.DataFrame], spread: bool) -> tuple[Line, ...]:
    """A line for each panel, through its means over seeds."""
    lines = []
    for words, rows in panels.items():
        numbers = rows[rows[field] != NONE].groupby(field, observed=True)["value"].agg(["mean", "min", "max"])
        x, (y, low, high) = [float(value) for value in numbers.index], (floats(numbers[name]) for name in numbers)
        lines.append(Line(words or "all runs", x, y, *((low, high) if spread else ())))
    return tuple(lines)


def _dots(panels: Mapping[str, pd.DataFrame], spread: bool) -> tuple[Line, ...]:
    """A dot for each panel at its mean over seeds, with a bar from the lowest to the highest."""
    lines = []
    for place, (words, rows) in enumerate(panels.items(), 1):
        values = rows["value"]
        low, high = ([values.min()], [values.max()]) if spread else (None, None)
        lines.append(Line(f"{place} {words}", [float(place)], [values.mean()], low, high, dots=True))
    return tuple(lines)


def _points_table(view: View, numbers: list[FinalNumber]) -> PageTable:
    """Every point with the number of its runs, and of each number the mean, lowest and highest over seeds."""
    fields = (*view.others, *view.axes)
    rows = tuple(
        (*map(str, values), f"{len(group)}", *(number.over_seeds(group) for number in numbers))
        for values, group in view.runs.groupby(list(fields), observed=True)
    )
    columns = (*fields, "runs", *(number.label for number in numbers))
    return PageTable("Points: mean over seeds (lowest to highest)", columns, rows)


def _curve_sections(view: View) -> Iterator[Section]:
    """Curves with a band of ensembles; otherwise a figure of each number over the first column."""
    if view.curves is None:
        return
    if "mean" in view.curves:
        yield _curve_section("Mean cosine over time", "", {"curve-cosine": cosine_charts(view)})
    else:
        text = "Lines of one look differ only in their seed." if view.repeated else ""
        for name, charts in training_charts(view).items():
            yield _curve_section(f"{name.capitalize()} over training", text, {f"curve-{name}": charts})


def _curve_section(title: str, text: str, figures: Mapping[str, Sequence[Chart]]) -> Section:
    """The panels that have a curve; those without are listed."""
    ((name, charts),) = figures.items()
    drawn = [chart for chart in charts if any(math.isfinite(x) for line in chart.lines for x in line.x)]
    empty = "; ".join(chart.title for chart in charts if chart not in drawn)
    texts = (text, f"No run has a curve at {empty}." if empty else "")
    figure = {name: _panelled(title, drawn)} if drawn else {}
    return Section(title, tuple(filter(None, texts)), figures=figure, name=name)


def training_charts(view: View) -> dict[str, list[Chart]]:
    """For accuracy and for loss the charts of all panels.

    A panel has one value of every field that varies but one, whose values are its lines. A value without a curve keeps its
    place there, so that colours mean the same in all panels.
    """
    assert view.curves is not None
    groups = {str(name): rows for name, rows in view.curves.groupby("name", sort=False)}
    block = max(math.ceil(len(rows) / _POINTS) for rows in groups.values())
    settings = f"{view.settings}; every point is a mean over {block} rows of the table" if block > 1 else view.settings
    drawn = {name: block_means(rows[["step", "loss", "accuracy"]], block) for name, rows in groups.items()}
    drawn = {name: rows.assign(accuracy=100 * rows["accuracy"]) for name, rows in drawn.items()}
    accuracy = "A line that stays low, or falls again, did not train stably; a dot ends a run that diverged."
    loss = "Spikes are instability; a dot ends a run that diverged."
    charts = {
        "accuracy": Chart("", "step", "accuracy in %", (), accuracy, settings, limits=_PERCENT),
        "loss": Chart("", "step", "loss", (), loss, settings),
    }
    by = next(iter((*view.axes, *view.others)), SEED if view.repeated else None)
    fields = [field for field in (*view.others, *view.axes) if field != by]
    found: dict[str, list[Chart]] = {name: [] for name in charts}
    for words, runs in view.panels(view.runs, fields).items():
        for name, chart in charts.items():
            lines = _training_lines(runs, by, drawn, name)
            log = chart.limits is None and spans_decades(value for line in lines for value in line.y)
            found[name].append(replace(chart, title=words, lines=lines, log_y=log))
    return found


def _training_lines(runs: pd.DataFrame, by: str | None, curves: Mapping[str, pd.DataFrame], column: str) -> tuple[Line, ...]:
    """A line for each run, named by its value of a field, and a dot at the last point of each that diverged."""
    groups = {"all runs": runs} if by is None else {f"{by} {value}": runs[runs[by] == value] for value in _words_of(runs[by])}
    lines: list[Line] = []
    for name, rows in groups.items():
        found = [curves[run] for run in rows["name"] if run in curves]
        lines += [Line(name, floats(curve["step"]), floats(curve[column]), thin=len(found) > _THICK) for curve in found]
        lines += [] if found else [_absent(name)]
    ended = [curves[run] for run in runs.loc[runs["state"] == "diverged", "name"] if run in curves]
    last = [rows[np.isfinite(rows[column])].tail(1) for rows in ended]
    x, y = ([value for rows in last for value in floats(rows[key])] for key in ("step", column))
    return (*lines, Line("diverged", x, y, dots=True)) if x else tuple(lines)


def cosine_charts(view: View) -> list[Chart]:
    """Mean cosines with their bands, a line for each scheme, a chart for each panel."""
    assert view.curves is not None
    fields = [field for field in (*view.others, *view.axes, *[SEED] * view.repeated) if field != "scheme"]
    groups = {(str(name), str(scheme)): rows for (name, scheme), rows in view.curves.groupby(["name", "scheme"], sort=False)}
    schemes = list(dict.fromkeys(scheme for _, scheme in groups))
    caption = "1 is collapse: all tokens point one way. Lines are means over runs, bands hold 90 % of them."
    limits = (min([-0.02, *(low for low in floats(view.curves["low"]) if math.isfinite(low))]), 1.02)
    charts = []
    for words, runs in view.panels(view.runs, fields).items():
        lines: list[Line] = []
        for scheme in schemes:
            found = [groups[run, scheme] for run in runs["name"] if (run, scheme) in groups]
            lines += [_banded(scheme, rows) for rows in found] or [_absent(scheme)]
        charts.append(Chart(words, "time t", "mean cosine", tuple(lines), caption, view.settings, limits=limits))
    return charts


def _banded(name: str, rows: pd.DataFrame) -> Line:
    x, y, low, high = (floats(rows[key]) for key in ("time", "mean", "low", "high"))
    return Line(name, x, y, low, high)


def _absent(name: str) -> Line:
    """A line without a point."""
    return Line(name, [math.nan], [math.nan])


def _panelled(title: str, figures: Sequence[Any]) -> Figure:
    """The figures of all panels under one title; a single one takes the title."""
    if len(figures) == 1:
        panel = figures[0].title
        return replace(figures[0], title=f"{title}: {panel}" if panel else title)  # type: ignore[no-any-return]
    first, settings = figures[0], figures[0].settings
    if len(figures) > _PANELS:
        settings += f"; {_PANELS} of {len(figures)} panels are shown, the tables have all of them"
    shown = [replace(figure, caption="", settings="") for figure in figures[:_PANELS]]
    return Panels(title, shown, first.caption, settings)


def _runs_section(view: View) -> Section:
    troubled = view.runs[view.runs["state"].isin(["diverged", "failed"])]
    rows = tuple(
        (_breakable(row["name"]), str(row["state"]), _last_line(row["error"]))
        for row in plain_rows(troubled[["name", "state", "error"]])
    )
    failures = PageTable("Runs that diverged or failed, and why", ("name", "state", "error"), rows)
    return Section("Runs", (), (*([failures] if rows else []), _all_runs(view)), name="runs")


def _all_runs(view: View) -> PageTable:
    """A row for each run; its name, which is long and repeats the fields, is last."""
    columns = (*view.varied, "state", *view.results, "name")
    heads = (f"{name} in %" if _is_accuracy(view, name) else name for name in columns)
    return PageTable("All runs", tuple(heads), tuple(zip(*(_cells(view, name) for name in columns), strict=True)))


def _cells(view: View, column: str) -> list[str]:
    if column == "name":
        return [_breakable(str(name)) for name in view.runs[column]]
    if column not in view.numbers:
        return [_word(value) for value in view.runs[column]]
    values = floats(view.runs[column])
    if _is_accuracy(view, column):
        return [cell(100 * value, ".2f") for value in values]
    whole = all(value.is_integer() for value in values if math.isfinite(value))
    return [cell(value, ",.0f" if whole else ".4g") for value in values]


def _is_accuracy(view: View, column: str) -> bool:
    """Whether a column holds shares of right answers, which pages show in percent."""
    return view.kind == "train" and column.startswith("accuracy") and column in view.numbers


def _breakable(name: str) -> str:
    """A run's name with room for a line break after its commas."""
    return name.replace(",", ", ")


def _last_line(error: str | None) -> str:
    lines = [line.strip() for line in (error or "").splitlines() if line.strip()] or [NONE]
    return lines[-1] if len(lines[-1]) <= _ERROR else lines[-1][: _ERROR - 1] + "…"


def _categories(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Values as ordered categories of texts: numbers by size, others as they come."""
    words = column.map(_word)
    order = words[column.sort_values(kind="stable").index] if _is_number(column) else words
    return pd.Series(pd.Categorical(words, list(dict.fromkeys(order)), ordered=True), column.index)


def _words_of(column: "pd.Series[Any]") -> list[str]:
    """The values of a column of categories, in their order."""
    return [str(value) for value in column.cat.categories]


def _word(value: Any) -> str:
    """A value as a plan would write it, with all its digits; – where there is none."""
    if isinstance(value, list | tuple | np.ndarray):
        return ",".join(map(_word, value))
    if value is None or value is pd.NA or value != value:
        return NONE
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(float(value))
    return str(value)


def _is_number(column: "pd.Series[Any]") -> bool:
    return is_numeric_dtype(column) and not is_bool_dtype(column)


def _axes(fields: list[str]) -> tuple[str, ...]:
    """Of numeric fields the one across and the one up: width and rate if they vary, otherwise the first."""
    across = sorted(fields, key=lambda field: (field != ACROSS, field == UP))[:1]
    up = sorted((field for field in fields if field not in across), key=lambda field: field != UP)[:1]
    return (*across, *up)


def _settings(configuration: Mapping[str, Any], varied: pd.DataFrame) -> str:
    """The kind, what all points have in common, and what varies."""
    points = [point["values"] for point in configuration.get("points", ())]
    shared = points[0].items() if points else ()
    fixed = [(key, value) for key, value in shared if key not in varied and all(point.get(key) == value for point in points)]
    words = [f"{key} {_word(value)}" for key, value in fixed]
    fields = (f"{field} {_listed(_words_of(varied[field]))}" for field in varied)
    return "; ".join([str(configuration["kind"]), *words, *fields])


def _listed(words: list[str]) -> str:
    more = len(words) - _VALUES
    return ", ".join(words[:_VALUES]) + (f" and {more} more" if more > 0 else "")
