"""The report of a watched training: curves, layer × time maps and alarms, from its tables alone.

Time is thinned out for figures, never in the tables: a column of a map stands for several probes where there are many.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from normscope.errors import InputError
from normscope.results.figures import Chart, Figure, HeatMap, Line
from normscope.results.findings import SEVERITIES, Finding, Severity
from normscope.results.sections import PageTable, Section
from normscope.results.tables import Tables, cell, floats, head_map, plain_rows, spans_decades, table_of

_CELLS = 80_000  # of all maps of a page together
_COLUMNS = 24, 240  # least and most of a map
_POINTS = 400  # of a curve
_ROWS = 200  # of a map: norms and learned scales may be many
_LISTED = 50  # alarms in the table
_COLUMNS_OF = {
    "steps": (), "layers": ("layer",), "sublayers": ("layer", "sublayer"), "heads": ("layer", "head"),
    "norms": ("norm", "gain"), "scales": ("name", "mean"), "faults": ("tensor", "layer", "count"),
    "alarms": ("rule", "layer", "head", "number", "text"),
}  # fmt: skip
_NO_CURVES = ("step", "seconds", "probe_seconds")
_CURVES = {
    "loss": ("Loss", "loss", "Dots are alarms."),
    "gradient": ("Gradient norm", "norm of all gradients", "Spikes come before divergence."),
}


@dataclass(frozen=True)
class LayerMap:
    """A quantity over layers and time.

    Attributes:
        table, column: where its numbers are.
        title, label, caption: the words of its figure.
        largest: whether a cell is the largest of its probes and heads, so that no spike is lost; otherwise their mean.
        limits: values of the first and last colour, where they are known.
    """

    table: str
    column: str
    title: str
    label: str
    caption: str
    largest: bool = False
    limits: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """The name of its figure."""
        return f"{self.table}-{self.column}"


LAYERS = (
    LayerMap("layers", "norm", "Residual stream norm", "mean |x|", "Rows that brighten are layers whose input grows."),
    LayerMap("layers", "update", "Update of the stream", "mean |x′ − x| / |x|", "Dark rows are layers that add little."),
    LayerMap("layers", "rotation", "Rotation per layer", "degrees", "Rows near 0 are layers that stopped moving tokens."),
    LayerMap("layers", "cosine", "Token cosine", "mean cosine of two tokens", "Near 1 all tokens look alike.", limits=(0, 1)),
    LayerMap("layers", "rank", "Effective rank", "participation ratio", "Dark cells are states in few directions."),
    LayerMap("layers", "speed", "Effective speed", "measured", "How fast tokens move on the sphere."),
    LayerMap("layers", "theory", "Effective speed in theory", "in theory", "What the scheme gives for the same states."),
    LayerMap(
        "layers", "massive", "Massive activations", "max |x| / median |x|", "Bright cells have single huge activations.",
        largest=True,
    ),
    LayerMap("layers", "gradient", "Gradient norm by depth", "norm", "Rows far apart learn at different speeds."),
)  # fmt: skip
HEADS = (
    LayerMap("heads", "logit", "Largest attention logit", "max over heads", "Rows that keep brightening end in one-hot rows.",
             largest=True),
    LayerMap("heads", "entropy", "Attention entropy", "nats, mean over heads", "0 is attention to a single key."),
    LayerMap("heads", "sink", "Attention sink", "mean weight on the first key", "Near 1 most attention goes nowhere.",
             limits=(0, 1)),
    LayerMap("heads", "sparse", "Near-one-hot attention rows", "share, mean over heads", "Rows that depend on one key.",
             limits=(0, 1)),
    LayerMap("heads", "collapse", "Collapse probability", "max over heads", "Share of near-one-hot rows that noise switches.",
             largest=True, limits=(0, 1)),
)  # fmt: skip
SUBLAYERS = (
    LayerMap("sublayers", "update", "Update of each sublayer", "mean |u| / |x|", "Which sublayers change the stream."),
    LayerMap("sublayers", "scale", "Branch scale in effect", "realised step", "Learned or fixed scale of each update."),
    LayerMap("sublayers", "carry", "Residual scale in effect", "carry", "1 keeps the residual as it is."),
)

SCALES = (
    LayerMap("norms", "gain", "Gains of norms", "mean gain", "Gains that grow or vanish rescale what a sublayer reads."),
    LayerMap("scales", "mean", "Learned scales", "mean", "Learned steps and other scales that are no norm's."),
)
MAPS = (*LAYERS, *HEADS, *SUBLAYERS, *SCALES)
ROWS_OF = {
    "layers": ("layer",),
    "heads": ("layer",),
    "sublayers": ("layer", "sublayer"),
    "norms": ("norm",),
    "scales": ("name",),
}


def watch_sections(tables: Tables, settings: str = "") -> Iterator[Section]:
    """Alarms, curves, and maps of layers, heads, sublayers, gains and learned scales."""
    check_columns(tables)
    time = Timeline.of(tables)
    if time is None:
        yield Section("No probe yet", ("The first numbers appear with the first probe.",), name="waiting")
        return
    yield _alarm_section(tables, time, settings)
    yield Section("Training", figures=_curves(tables, time, settings), name="training")
    for title, maps, name in (
        ("Layers", LAYERS, "layers"),
        ("Attention heads", HEADS, "heads"),
        ("Sublayers", SUBLAYERS, "sublayers"),
    ):
        figures = {each.name: figure for each in maps if (figure := _map(each, tables, time, settings)) is not None}
        if figures:
            yield Section(title, figures=figures, name=name)
    yield from _head_section(tables, settings)
    yield from _named_section(tables, time, settings)


def check_columns(tables: Tables) -> None:
    """Refuse tables that no watch wrote."""
    for name, columns in _COLUMNS_OF.items():
        table = tables.get(name)
        missing = None if table is None else next((column for column in ("step", *columns) if column not in table), None)
        if missing is not None:
            raise InputError(f"the table '{name}' of the watched run has no column '{missing}': nothing of normscope wrote it")


@dataclass(frozen=True)
class Timeline:
    """The probed steps, and how many of them a figure takes together.

    Attributes:
        steps: all probed steps, rising.
        columns: how many columns a map has at most.
    """

    steps: tuple[int, ...]
    columns: int

    @classmethod
    def of(cls, tables: Tables) -> "Timeline | None":
        """That of some tables; None before the first probe."""
        steps = table_of(tables, "steps")
        if steps is None:
            return None
        named = {name: tables[name].drop_duplicates([*keys]) for name, keys in ROWS_OF.items() if name in tables}
        rows = sum(len(named.get(each.table, ())) for each in MAPS)
        least, most = _COLUMNS
        return cls(tuple(sorted(set(steps["step"]))), max(least, min(most, _CELLS // max(1, rows))))

    def block(self, most: int) -> int:
        """How many probes are taken together where at most so many can be shown."""
        return math.ceil(len(self.steps) / most)

    def last_steps(self, most: int) -> list[int]:
        """The last step of every block."""
        block = self.block(most)
        return [self.steps[min(first + block, len(self.steps)) - 1] for first in range(0, len(self.steps), block)]

    def places(self, steps: "pd.Series[int]", most: int) -> Any:
        """The block of each row, by its step."""
        return np.searchsorted(np.array(self.steps), steps.to_numpy()).clip(0, len(self.steps) - 1) // self.block(most)


def _map(each: LayerMap, tables: Tables, time: Timeline, settings: str) -> HeatMap | None:
    """Rows are layers (and sublayers), columns blocks of probes; None without a number."""
    table = table_of(tables, each.table)
    if table is None or each.column not in table or not is_numeric_dtype(table[each.column]):
        return None
    keys = ["layer", "sublayer"] if "sublayer" in table else ["layer"]
    names = sorted({tuple(row) for row in table[keys].drop_duplicates().itertuples(index=False)})
    texts = [" ".join(map(str, name)) for name in names]
    if each.table == "layers":
        texts[-1] = f"{texts[-1]} (end)"  # the states after the last layer
    return _heat(each, table, keys, names, texts, "layer", time, settings)


def _heat(
    each: LayerMap, table: pd.DataFrame, keys: list[str], names: Sequence[Any], texts: list[str], label: str, time: Timeline,
    settings: str,
) -> HeatMap | None:  # fmt: skip
    rows = {name: place for place, name in enumerate(names)}
    columns = [str(step) for step in time.last_steps(time.columns)]
    finite = table[np.isfinite(table[each.column].to_numpy(dtype=float, na_value=math.nan))]
    places = finite.assign(_block=time.places(finite["step"], time.columns))
    groups = places.groupby(["_block", *keys], sort=False)[each.column]
    values = np.full((len(names), len(columns)), math.nan)
    for (block, *key), value in (groups.max() if each.largest else groups.mean()).items():
        if tuple(key) in rows:
            values[rows[tuple(key)], block] = value
    filled = np.isfinite(values).any(axis=1)
    if not filled.any():
        return None
    values, texts = values[filled], [text for text, shown in zip(texts, filled, strict=True) if shown]
    block = time.block(time.columns)
    joined = f"; a column is the {'largest' if each.largest else 'mean'} of {block} probes" if block > 1 else ""
    numbers = values[np.isfinite(values)]
    log = each.limits is None and numbers.min() > 0 and spans_decades(numbers)
    return HeatMap(
        each.title, "step", label, each.label, columns, texts, values.tolist(), each.caption, settings + joined,
        limits=each.limits, log=log, from_top=label != "layer",
    )  # fmt: skip


def _head_section(tables: Tables, settings: str) -> Iterator[Section]:
    """Every head as the last probe that has heads saw it; choosing one shows all its numbers."""
    heads = table_of(tables, "heads")
    if heads is None:
        return
    last = heads[heads["step"] == heads["step"].max()]
    maps = {
        f"last-{each.column}": head_map(
            last, each.column, f"{each.title} by head", each.column, "Choose a cell to see all numbers of that head.", settings,
            limits=each.limits,
        )
        for each in HEADS
        if each.column in last and is_numeric_dtype(last[each.column]) and last[each.column].notna().any()
    }  # fmt: skip
    figures = {name: figure for name, figure in maps.items() if figure is not None}
    if figures:
        yield Section(f"Heads at step {last['step'].max():,}", figures=figures, name="last-heads")


def _named_section(tables: Tables, time: Timeline, settings: str) -> Iterator[Section]:
    """Gains of norms and learned scales, a row each."""
    figures: dict[str, Figure] = {}
    for each in SCALES:
        (key,) = ROWS_OF[each.table]
        table = table_of(tables, each.table)
        if table is None:
            continue
        names = [str(name) for name in table[key].drop_duplicates()][:_ROWS]
        figure = _heat(each, table, [key], [(name,) for name in names], names, key, time, settings)
        if figure is not None:
            figures[each.name] = figure
    if figures:
        yield Section("Gains and learned scales", figures=figures, name="scales")


def curve_names(steps: pd.DataFrame) -> list[str]:
    """The columns of steps that have curves: loss, gradient norm, and what else the loop gave."""
    return [name for name in dict.fromkeys([*_CURVES, *map(str, steps)]) if name not in _NO_CURVES and _is_numeric(steps, name)]


def _is_numeric(table: pd.DataFrame, name: str) -> bool:
    return name in table and is_numeric_dtype(table[name])


def curve_words(name: str) -> tuple[str, str, str]:
    """Title, label and caption of a curve over steps."""
    return _CURVES.get(name, (name.capitalize(), name, f"{name} as the loop reported it."))


def _curves(tables: Tables, time: Timeline, settings: str) -> dict[str, Figure]:
    """Loss with the alarms on it, the norm of all gradients, and what else the loop gave."""
    steps = tables["steps"]
    figures: dict[str, Figure] = {}
    for name in curve_names(steps):
        if not np.isfinite(floats(steps[name])).any():
            continue
        title, label, caption = curve_words(name)
        line = _curve(steps, name, time)
        marks = tuple(_marks(tables, line)) if name == "loss" else ()
        numbers = [y for y in line.y if math.isfinite(y)]
        log = min(numbers) > 0 and spans_decades(numbers)
        figures[f"steps-{name}"] = Chart(
            title,
            "step",
            label,
            (line, *marks),
            caption if name != "loss" or marks else "Lower is better.",
            settings,
            log_y=log,
        )
    return figures


def _curve(steps: pd.DataFrame, name: str, time: Timeline) -> Line:
    """The mean of every block, within a band from its smallest to its largest."""
    numbers = steps[["step", name]].dropna()
    blocks = numbers.groupby(time.places(numbers["step"], _POINTS))
    x, y = floats(blocks["step"].max()), floats(blocks[name].mean())
    if time.block(_POINTS) == 1:
        return Line(name, x, y)
    return Line(name, x, y, floats(blocks[name].min()), floats(blocks[name].max()))


def _marks(tables: Tables, line: Line) -> Iterator[Line]:
    """A dot on a curve for every step with an alarm, by rule."""
    alarms = table_of(tables, "alarms")
    if alarms is None or not line.x:
        return
    for rule, rows in alarms.groupby("rule", sort=False):
        places = sorted({int(place) for place in np.searchsorted(np.array(line.x), rows["step"]).clip(0, len(line.x) - 1)})
        yield Line(f"alarm: {rule}", [line.x[place] for place in places], [line.y[place] for place in places], dots=True)


def _alarm_section(tables: Tables, time: Timeline, settings: str) -> Section:
    """Every rule that raised an alarm as a finding; all alarms as dots and as a table; non-finite values."""
    probes, alarms, faults = (
        f"{len(time.steps):,} probes up to step {time.steps[-1]:,}",
        table_of(tables, "alarms"),
        table_of(tables, "faults"),
    )
    listed = (_fault_table(faults),) if faults is not None else ()
    if alarms is None:
        calm = Finding(f"No alarm in {probes}.", severity="ok", title="No alarm")
        return Section("Alarms", tables=listed, findings=(calm,), name="alarms")
    findings = tuple(_rule_finding(str(rule), rows) for rule, rows in alarms.groupby("rule", sort=False))
    dots = tuple(
        Line(str(rule), floats(rows["step"]), floats(rows["layer"]), dots=True)
        for rule, rows in alarms.groupby("rule", sort=False)
    )
    figure = Chart(
        "Alarms over time", "step", "layer (−1: the whole model)", dots, "When and where each rule raised an alarm.", settings
    )
    rows = tuple(
        (f"{row['step']:,}", str(row["rule"]), _place(row), cell(float(row["number"]), ".4g"), str(row["text"]))
        for row in plain_rows(alarms.tail(_LISTED).iloc[::-1])
    )
    more = f", the last {_LISTED} of {len(alarms):,}" if len(alarms) > _LISTED else ""
    table = PageTable(f"Alarms{more}", ("step", "rule", "where", "number", "what"), rows)
    return Section("Alarms", tables=(table, *listed), figures={"alarms": figure}, findings=findings, name="alarms")


def _rule_finding(rule: str, rows: pd.DataFrame) -> Finding:
    """The first alarm of a rule, and how many followed."""
    first, others = plain_rows(rows.head(1))[0], len(rows) - 1
    later = f" {others:,} more until step {int(rows['step'].max()):,}." if others else ""
    number = None if first["number"] is None else float(first["number"])
    text = f"Step {first['step']:,}: {first['text']}{later}"
    severity: Severity = next((known for known in SEVERITIES if known == first.get("severity")), "warning")
    return Finding(text, "alarms", title=rule.capitalize(), severity=severity, number=number, weight=1.0 + math.log1p(others))


def _place(row: Mapping[str, Any]) -> str:
    layer, head = int(row["layer"]), int(row["head"])
    return "model" if layer < 0 else f"layer {layer}" + (f", head {head}" if head >= 0 else "")


def _fault_table(faults: pd.DataFrame) -> PageTable:
    """The first non-finite values of every tensor."""
    first = faults.sort_values("step", kind="stable").drop_duplicates(["tensor", "layer"]).head(_LISTED)
    rows = tuple(
        (str(row["tensor"]), "–" if row["layer"] < 0 else str(row["layer"]), f"{row['step']:,}", f"{row['count']:,.0f}")
        for row in plain_rows(first)
    )
    return PageTable("Non-finite values (NaN/Inf)", ("tensor", "layer", "first at step", "values"), rows)
