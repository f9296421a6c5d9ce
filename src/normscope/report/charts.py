"""Charts, heat maps and panels of them as Altair charts; the numbers travel as CSV text with five significant digits.

A static chart is one for a file. An interactive one is for a page, whose script sets two parameters: ``only``, the name of the
line to show alone, and ``chosen``, the place ``x,y`` of the cell to frame.
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from normscope.report.theme import DASHES, text_width, wrapped
from normscope.results.figures import Chart, Figure, HeatMap, Panels, drawable

if TYPE_CHECKING:
    import altair as alt

WIDTH = 600.0  # of a chart in a file, in pixels before it is scaled
_HEIGHT, _HIGHEST = 300.0, 480.0
_CELL, _LARGE_CELL, _SMALLEST = 16.0, 48.0, 90.0  # of heat maps
_FEW = 8  # so few rows and columns have their values written in their cells
_LINE, _THIN, _ARROW, _DOT = range(4)
_COLUMNS = ("i", "g", "k", "x", "y", "l", "h")  # of a chart's data: name, stroke, kind, x, y, low, high

# How numbers at axes read: 200,000 and 0.25, but 1e-7.
_NUMBER = (
    "datum.value != 0 && (abs(datum.value) >= 1e6 || abs(datum.value) < 1e-3) "
    "? format(datum.value, '.3~e') : format(datum.value, ',.5~r')"
)

Row = tuple[int, int, int, float, float, float, float]


def draw_chart(chart: Chart, *, interactive: bool = False, width: float = WIDTH) -> "alt.LayerChart":
    """Lines with bands and gaps, dots with bars, and arrows; the interactive one shows the nearest point and can be panned."""
    import altair as alt

    names = list(dict.fromkeys(line.name for line in chart.lines))
    rows = list(_rows(chart, names))
    height = min(_HIGHEST, width * _ratio(rows)) if chart.equal else width * _HEIGHT / WIDTH
    width = height / _ratio(rows) if chart.equal else width
    look = _Look(names, {row[0] for row in rows if row[2] == _LINE}, dots=all(row[2] == _DOT for row in rows), width=width)
    base = alt.Chart().encode(x=_axis(chart, "x", rows), y=_axis(chart, "y", rows), color=look.colour, detail=alt.Detail("g:N"))
    layers = _marks(base, look, rows, interactive, _edge(chart, rows))
    if interactive:
        layers.append(_hover(base, chart, rows))
    meta = {"names": names, "dashes": look.dashes, "dots": look.dots, "ratio": height / width if chart.equal else 0}
    return alt.LayerChart(
        layer=layers,
        data=_csv(_COLUMNS, rows),
        width=width,
        height=height,
        transform=[_calculated("n", f"{json.dumps(names)}[datum.i]"), {"window": [{"op": "row_number", "as": "o"}]}],
        params=[alt.VariableParameter(name="only", value=None)] if interactive else alt.Undefined,
        usermeta=meta if interactive else alt.Undefined,
    )


def draw_heat_map(heat: HeatMap, *, interactive: bool = False, width: float = WIDTH) -> "alt.LayerChart":
    """Cells as colours; few cells have their values written in them, and the interactive map frames a chosen one."""
    import altair as alt

    columns, rows = len(heat.x_names), len(heat.y_names)
    few = max(columns, rows) <= _FEW
    cells = [(x, y, value) for y, row in enumerate(heat.cells) for x, value in enumerate(row) if not math.isnan(value)]
    across = min(_LARGE_CELL if few else max(_CELL, 0.6 * width / columns), width / columns)
    up = min(_LARGE_CELL if few else _CELL, _HIGHEST / rows)
    return alt.LayerChart(
        layer=_heat_layers(heat, few, interactive),
        data=_csv(("x", "y", "v"), cells),
        width=max(_SMALLEST, min(across, 2 * up) * columns),
        height=max(_SMALLEST, up * rows),
        view=alt.ViewBackground(fill="#8c959f", fillOpacity=0.2),
        transform=[
            _calculated(f"{way}n", f"{json.dumps(list(names))}[datum.{way}]")
            for way, names in (("x", heat.x_names), ("y", heat.y_names))
        ],
        params=[alt.VariableParameter(name="chosen", value="")] if interactive else alt.Undefined,
        usermeta=_meta(heat) if interactive else alt.Undefined,
    )


def _calculated(name: str, expression: str) -> dict[str, str]:
    return {"calculate": expression, "as": name}


def _heat_layers(heat: HeatMap, few: bool, interactive: bool) -> "list[alt.Chart]":
    """The cells, their values if there are few, and the frame of a chosen one."""
    import altair as alt

    low, high = heat.colour_limits
    base = alt.Chart().encode(
        x=_band_axis(alt.X, "x", heat.x_label, heat.x_names),
        y=_band_axis(alt.Y, "y", heat.y_label, heat.y_names, backwards=not heat.from_top),
        tooltip=[
            alt.Tooltip("yn:N", title=heat.y_label),
            alt.Tooltip("xn:N", title=heat.x_label),
            alt.Tooltip("v:Q", title=heat.value_label, format=".4~g"),
        ],
    )
    scale = alt.Scale(type="log" if heat.log else "linear", domain=[low, high], scheme="viridis", clamp=True, nice=False)
    legend = alt.Legend(title=wrapped(heat.value_label, 12, 150), gradientLength=180, format=".3~g", tickCount=5)
    layers: list[Any] = [base.mark_rect().encode(color=alt.Color("v:Q", scale=scale, legend=legend))]
    if few:
        middle = math.sqrt(low * high) if heat.log else (low + high) / 2
        ink = alt.ColorValue("#ffffff", condition={"test": f"datum.v > {middle!r}", "value": "#1f2328"})
        layers.append(base.mark_text(fontSize=12).encode(text=alt.Text("v:Q", format=".3~g"), color=ink))
    if interactive:
        frame: Any = base.mark_rect(filled=False, stroke="#e2007a", strokeWidth=3, tooltip=False)
        layers.append(frame.transform_filter("datum.x + ',' + datum.y === chosen"))
    return layers


def draw_panels(panels: Panels) -> "alt.ConcatChart":
    """The figures in rows, each with its title and its own axes; charts of the same lines share one legend."""
    import altair as alt

    width = 1.4 * WIDTH / panels.columns - 60
    charts = [draw(figure, width=width).properties(title=_panel_title(figure, width)) for figure in panels.figures]
    drawn: Any = alt.concat(*charts, columns=panels.columns)
    alike = {tuple(line.name for line in figure.lines) if isinstance(figure, Chart) else None for figure in panels.figures}
    scales = "shared" if len(alike) == 1 and None not in alike else "independent"
    return cast("alt.ConcatChart", drawn.resolve_scale(color=scales, strokeDash=scales))


def _panel_title(figure: Chart | HeatMap, width: float) -> "alt.TitleParams":
    import altair as alt

    return alt.TitleParams(text=wrapped(figure.title, 12, width, bold=True), fontSize=12)


def draw(figure: Chart | HeatMap, *, interactive: bool = False, width: float = WIDTH) -> "alt.LayerChart":
    """The Altair chart of a figure."""
    if isinstance(figure, Chart):
        return draw_chart(figure, interactive=interactive, width=width)
    return draw_heat_map(figure, interactive=interactive, width=width)


def chart_of(figure: Figure) -> Any:
    """The Altair chart of a figure; None for blocks and scenes, which are drawn as SVG."""
    if isinstance(figure, Panels):
        return draw_panels(figure)
    return draw(figure, interactive=True) if isinstance(figure, Chart | HeatMap) else None


def short(value: float) -> str:
    """A number with five significant digits; empty where there is none."""
    return f"{value:.5g}" if math.isfinite(value) else ""


def _rows(chart: Chart, names: list[str]) -> Iterator[Row]:
    """Every point that can be drawn; a gap begins a new stroke, and a point between two gaps is a dot."""
    strokes = 0
    for line in chart.lines:
        index, missing = names.index(line.name), [math.nan] * len(line.x)
        kind = _THIN if line.thin else _ARROW if line.arrow else _DOT if line.dots else _LINE
        low, high = (missing if edge is None else edge for edge in (line.low, line.high))
        points = zip(drawable(line.x, log=chart.log_x), drawable(line.y, log=chart.log_y), low, high, strict=True)
        for whole, stroke in groupby(points, lambda point: math.isfinite(point[0] + point[1])):
            shown = list(stroke) if whole else []
            strokes += whole
            for x, y, bottom, top in shown:
                edges = (bottom, top) if math.isfinite(bottom + top) else (math.nan, math.nan)
                yield index, strokes, _DOT if len(shown) == 1 else kind, x, y, *edges


def _lowest(rows: Sequence[Row]) -> float:
    """The lowest value of a logarithmic axis: that of the points, or of their bands and bars as far as a decade below it."""
    base = min((row[4] for row in rows), default=1.0)
    return max(min((row[5] for row in rows if math.isfinite(row[5])), default=base), 0.1 * base)


def _csv(columns: Sequence[str], rows: Sequence[Sequence[float]]) -> "alt.Data":
    import altair as alt

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([short(value) for value in row] for row in rows)
    made: Any = alt.Data
    return cast(
        "alt.Data", made(values=text.getvalue(), format=alt.CsvDataFormat(type="csv", parse=dict.fromkeys(columns, "number")))
    )


def _axis(chart: Chart, way: str, rows: Sequence[Row]) -> Any:
    """The encoding of x or y: its values span the axis, whole numbers of x have whole ticks."""
    import altair as alt

    across = way == "x"
    log, label = (chart.log_x, chart.x_label) if across else (chart.log_y, chart.y_label)
    shown = [value for row in rows for value in (row[3:4] if across else row[4:]) if math.isfinite(value)]
    if log and not across:
        lowest = min(_lowest(rows), *(row[4] for row in rows), math.inf)
        shown = [max(value, lowest) for value in shown]
    limits = chart.limits if chart.limits and not across else _limits(shown, log=log)
    exact = across or bool(chart.limits) or chart.equal
    room = 8 if exact or any(row[2] == _DOT for row in rows) else 0  # so that dots at an edge are whole
    kind: dict[str, Any] = {"type": "log"} if log else {"type": "linear", "zero": False}
    scale = alt.Scale(**kind, domain=list(limits), nice=not exact, padding=room)
    whole = across and bool(shown) and all(value.is_integer() for value in shown)
    ticks: dict[str, Any] = {"format": ",d", "tickMinStep": 1} if whole else {"labelExpr": _NUMBER}
    if log:
        ticks = {"labelExpr": _NUMBER, **_decades(*limits)}
    axis = alt.Axis(**ticks)
    return (alt.X if across else alt.Y)(f"{way}:Q", title=label, scale=scale, axis=axis)


def _decades(low: float, high: float) -> dict[str, Any]:
    """Ticks of a logarithmic axis: powers of ten, with twos and fives between few of them; the axis' own within a decade."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if high / low < 10:
        return {}
    step = math.ceil((last - first) / 12)
    digits = (1, 2, 5) if last - first <= 2 else (1,)
    return {"values": [float(f"{digit}e{power}") for power in range(first, last + 1, step) for digit in digits]}


def _limits(shown: list[float], *, log: bool) -> tuple[float, float]:
    low, high = (min(shown), max(shown)) if shown else (1.0, 1.0)
    if low < high:
        return low, high
    room = min(0.5, abs(low) / 2) or 0.5
    return (low / 2, high * 2) if log else (low - room, high + room)


def _ratio(rows: Sequence[Row]) -> float:
    """Height over width of the values, so that one scale holds for both axes."""
    (left, right), (bottom, top) = (_limits([row[k] for row in rows], log=False) for k in (3, 4))
    return max(0.2, min(5.0, (top - bottom) / (right - left)))


@dataclass(frozen=True)
class _Look:
    """Colours and dashes by name, with a legend below the chart; only names of whole lines are dashed."""

    names: list[str]
    dashed: set[int]
    dots: bool
    width: float

    @property
    def colour(self) -> "alt.Color":
        """The encoding of colours."""
        import altair as alt

        return alt.Color("n:N", scale=alt.Scale(domain=self.names), legend=self._legend)

    @property
    def dashes(self) -> list[list[int]]:
        """The dashes of each name."""
        return [list(DASHES[i % len(DASHES) if i in self.dashed else 0]) for i in range(len(self.names))]

    @property
    def dash(self) -> "alt.StrokeDash":
        """The encoding of dashes."""
        import altair as alt

        return alt.StrokeDash("n:N", scale=alt.Scale(domain=self.names, range=self.dashes), legend=self._legend)

    @property
    def _legend(self) -> "alt.Legend | None":
        import altair as alt

        columns = max(1, int(self.width // (max((text_width(name, 11) for name in self.names), default=0.0) + 45)))
        symbol: dict[str, Any] = {"symbolType": "circle" if self.dots else "stroke", "symbolSize": 70 if self.dots else 260}
        style = {"symbolStrokeWidth": 2.2, "symbolOpacity": 1.0, **symbol}
        return alt.Legend(title=None, orient="bottom", columns=columns, **style) if self.names else None


def _edge(chart: Chart, rows: Sequence[Row]) -> float | None:
    """Where bands and bars that leave a logarithmic axis are cut off, far below its edge; None for a linear one."""
    return max(1e-30 * _lowest(rows), 1e-307) if chart.log_y else None


def _marks(base: "alt.Chart", look: _Look, rows: Sequence[Row], interactive: bool, edge: float | None) -> "list[alt.Chart]":
    """Bands, bars, lines, arrows and dots, as far as there are any; ``edge`` is the end of what is drawn of bands and bars."""
    import altair as alt

    def shown(test: str, opacity: float) -> alt.Chart:
        faint = alt.OpacityValue(0.15 * opacity, condition={"test": "only === null || datum.n === only", "value": opacity})
        return base.transform_filter(test).encode(opacity=faint if interactive else alt.OpacityValue(opacity))

    kinds = {row[2] for row in rows}
    edged = {row[2] == _DOT for row in rows if math.isfinite(row[5])}
    edges = {"y": base.encoding.y.copy(), "y2": alt.Y2("h:Q")} if edged else {}
    if edged:
        edges["y"].shorthand = "l:Q" if edge is None else "e:Q"

    def between(kind: str, opacity: float) -> alt.Chart:
        if edge is None:
            return shown(f"isValid(datum.l) && {kind}", opacity)
        chart: alt.Chart = shown(f"isValid(datum.l) && datum.h > {edge!r} && {kind}", opacity)
        return chart.transform_calculate(e=f"max(datum.l, {edge!r})")

    layers = []
    if False in edged:
        layers.append(between(f"datum.k < {_DOT}", 0.16).mark_area(clip=True, aria=edge is None).encode(**edges))
    if True in edged:
        layers.append(between(f"datum.k == {_DOT}", 0.6).mark_rule(strokeWidth=1, clip=True, aria=edge is None).encode(**edges))
    if _THIN in kinds:
        layers.append(shown(f"datum.k == {_THIN}", 0.6).mark_line(strokeWidth=0.8).encode(order=alt.Order("o:Q")))
    if _LINE in kinds:
        layers.append(
            shown(f"datum.k == {_LINE}", 1.0).mark_line(strokeWidth=2).encode(strokeDash=look.dash, order=alt.Order("o:Q"))
        )
    if _ARROW in kinds:
        layers.append(shown(f"datum.k == {_ARROW}", 1.0).mark_line(strokeWidth=2).encode(order=alt.Order("o:Q")))
        layers.append(_arrow_heads(shown(f"datum.k == {_ARROW}", 1.0)))
    if _DOT in kinds:
        layers.append(shown(f"datum.k == {_DOT}", 1.0).mark_circle(size=45))
    return layers or [base.mark_line()]


def _arrow_heads(base: Any) -> Any:
    """A triangle at the end of each stroke, turned the way its last piece goes; axes have one scale."""
    import altair as alt

    window = base.transform_window(
        px="lag(x)", py="lag(y)", place="row_number()", frame=[None, 0], groupby=["g"]
    ).transform_joinaggregate(last="max(place)", groupby=["g"])
    ends = window.transform_filter("datum.place == datum.last && datum.place > 1").transform_calculate(
        angle="atan2(datum.x - datum.px, datum.y - datum.py) * 180 / PI"
    )
    return ends.mark_point(shape="triangle", size=150, filled=True).encode(angle=alt.Angle("angle:Q", scale=None))


def _hover(base: Any, chart: Chart, rows: Sequence[Row]) -> Any:
    """Points that are seen while the pointer is near, with their numbers; shift and wheel zoom, dragging pans."""
    import altair as alt

    near = alt.selection_point(name="near", nearest=True, on="pointermove", clear="pointerout", fields=["g", "x", "y"])
    zoom = alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.shiftKey]")
    edges = (("l", "low"), ("h", "high")) if any(math.isfinite(row[5]) for row in rows) else ()
    numbers = [("x", chart.x_label), ("y", chart.y_label), *edges]
    tooltip = [alt.Tooltip("n:N", title="line"), *(alt.Tooltip(f"{key}:Q", title=text, format=".5~g") for key, text in numbers)]
    seen = alt.OpacityValue(0.0, condition={"param": "near", "empty": False, "value": 1.0})
    return base.mark_point(size=60, filled=True).encode(opacity=seen, tooltip=tooltip).add_params(near, zoom)


def _band_axis(channel: Any, field: str, label: str, names: Sequence[str], backwards: bool = False) -> Any:
    import altair as alt

    places = list(range(len(names)))
    numbered = list(names) == [str(place) for place in places]
    axis: dict[str, Any] = {} if numbered else {"labelExpr": f"{json.dumps(list(names))}[datum.value]"}
    if field == "x":
        axis["labelSeparation"] = 4
        axis["labelAngle"] = 0 if all(len(name) <= 3 for name in names) else -90
    scale = alt.Scale(domain=places[::-1] if backwards else places, paddingInner=0, paddingOuter=0, round=True)
    return channel(f"{field}:O", title=label, scale=scale, axis=alt.Axis(grid=False, ticks=False, **axis))


def _meta(heat: HeatMap) -> dict[str, Any]:
    """What a page needs to link heads: names of layers and heads, or the head that a map belongs to."""
    names = {"layers": list(heat.y_names), "heads": list(heat.x_names), "label": heat.value_label} if heat.heads else {}
    return {
        **names,
        "columns": len(heat.x_names),
        "rows": len(heat.y_names),
        "head": list(heat.of_head) if heat.of_head else None,
    }
