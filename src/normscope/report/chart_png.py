"""A line chart by matplotlib, and the sheet that all charts stand on: title and caption above, small print below.

All lengths are in points (1/72 inch).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normscope.report.lettering import FONT, broken, font, text_width
from normscope.results.drawing import Drawing
from normscope.results.lines import Chart, Trace, traces

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import matplotlib.lines

_DPI, WIDTH = 200, 432.0  # 1200 pixels
_PLOT_HEIGHT, _HIGHEST = 232.0, 330.0
_TICKS = 45.0  # room for an axis' labels
MARGIN = 8.0
TEXT = 8.0
_TITLE, _SMALL = 10.5, 6.5
_LEADING = 1.4
_LEGEND_WIDTH, _LEGEND_ROWS = 110.0, 16  # of what fits at the right of the chart
_LEGEND_LEADING, _HANDLE = 1.5, 3.4  # in letters
INK, SOFT = "#1f2328", "#57606a"
_GRID = "#e4e7eb"
_MARKS = 8  # about as many markers on a line
_DECADE = 10


@dataclass(frozen=True)
class Sheet:
    """A figure with its words written, its whole height, and the height at which the small print below ends."""

    figure: "matplotlib.figure.Figure"
    height: float
    foot: float


def draw_png(chart: Chart) -> "matplotlib.figure.Figure":
    """The chart as a figure 1200 pixels wide and as high as its texts and legend ask for."""
    drawn = traces(chart)
    columns, rows = _legend_shape([trace.name for trace in drawn if trace.first], below=chart.equal)
    legend = rows * TEXT * _LEGEND_LEADING + 1.5 * MARGIN if rows else 0.0
    plot = _equal_height(drawn) if chart.equal else _PLOT_HEIGHT
    sheet = new_sheet(chart, plot + legend)
    figure, height = sheet.figure, sheet.height

    rect = (MARGIN / WIDTH, (sheet.foot + legend) / height, 1 - 2 * MARGIN / WIDTH, plot / height)
    figure.set_layout_engine("constrained", rect=rect, w_pad=0, h_pad=0)
    axes = figure.add_subplot()
    _style_axes(axes, chart)
    handles = {trace.name: _plot(axes, trace) for trace in reversed(drawn)}
    _add_legend(axes, {trace.name: handles[trace.name] for trace in drawn}, columns, (sheet.foot + MARGIN / 2) / height)
    return figure


def _equal_height(drawn: list[Trace]) -> float:
    """How high a plot is that fills its width with one scale on both axes, within limits."""
    across = [x for trace in drawn for x in trace.x if math.isfinite(x)]
    up = [y for trace in drawn for y in trace.y if math.isfinite(y)]
    if not across or not up or max(across) == min(across):
        return _PLOT_HEIGHT
    shape = (max(up) - min(up)) / (max(across) - min(across))
    return min(_HIGHEST, max(_PLOT_HEIGHT / 2, shape * (WIDTH - 2 * MARGIN - _TICKS)) + _TICKS)


def new_sheet(chart: Drawing, inside: float) -> Sheet:
    """A figure with the chart's words at its top and bottom, and ``inside`` points between them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    room = WIDTH - 2 * MARGIN
    above = [
        *((text, font(_TITLE, bold=True, colour=INK)) for text in broken(chart.title, _TITLE, room, bold=True)),
        *((text, font(TEXT, colour=SOFT)) for text in broken(chart.caption, TEXT, room)),
    ]
    below = [(text, font(_SMALL, colour=SOFT)) for text in broken(chart.settings, _SMALL, room)]
    head, foot = 2 * MARGIN + _text_height(above), 1.5 * MARGIN + _text_height(below)
    height = head + inside + foot
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    _write(figure, above, height - MARGIN, height)
    _write(figure, below, foot - 0.75 * MARGIN, height)
    return Sheet(figure, height, foot)


def words_of(chart: Drawing) -> dict[str, str]:
    """What a sheet says, kept in its file: a page that shows the picture reads it there, so as not to say it twice."""
    return {"Title": chart.title, "Description": chart.caption, "Comment": chart.settings}


def _text_height(lines: list[tuple[str, dict[str, Any]]]) -> float:
    return float(sum(_LEADING * letters["fontsize"] for _, letters in lines))


def _write(figure: "matplotlib.figure.Figure", lines: list[tuple[str, dict[str, Any]]], top: float, height: float) -> None:
    for text, letters in lines:
        figure.text(MARGIN / WIDTH, top / height, text, va="top", **letters)
        top -= _LEADING * letters["fontsize"]


def _style_axes(axes: "matplotlib.axes.Axes", chart: Chart) -> None:
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set(color=SOFT, linewidth=0.7)
    axes.grid(True, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", color=SOFT, labelcolor=INK, labelsize=TEXT, labelfontfamily=FONT, width=0.7)
    axes.set_xlabel(chart.x_label, **font(TEXT, colour=INK))
    axes.set_ylabel(chart.y_label, **font(TEXT, colour=INK))
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_offset_text().set(fontsize=TEXT, fontfamily=FONT, color=INK)
    axes.margins(x=0.05 if chart.equal else 0.02)
    if chart.equal:
        axes.set_aspect("equal")
    axes.ticklabel_format(useOffset=False, useMathText=True)
    places = {float(x) for line in chart.lines for x in line.x if math.isfinite(x)}
    if all(x.is_integer() for x in places):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True) if len(places) != 1 else FixedLocator(list(places)))
    if chart.equal:
        axes.xaxis.set_major_locator(MaxNLocator(6))
    if chart.log_x:
        axes.set_xscale("log")
        if max(places, default=1.0) >= _DECADE * min((x for x in places if x > 0), default=1.0):
            axes.xaxis.set_minor_formatter(NullFormatter())  # a power of ten is there to be read; more would overlap
    if chart.log_y:
        axes.set_yscale("log")
    if chart.limits:
        axes.set_ylim(*chart.limits)


def _plot(axes: "matplotlib.axes.Axes", trace: Trace) -> "matplotlib.lines.Line2D":
    look, every = trace.look, max(1, len(trace.x) // _MARKS)
    style: dict[str, Any] = {"linestyle": look.dash[0], "linewidth": 1.5, "marker": look.marker[0], "markersize": 4.4}
    if trace.thin:
        style = {"linestyle": "-", "linewidth": 0.6, "marker": "", "markersize": 2.0, "alpha": 0.6}
    if trace.arrow:
        style |= {"linestyle": "-", "marker": "", "zorder": 2 + 1 / (2 + _extent(trace))}  # a short arrow over a long one
    for band in trace.bands:
        axes.fill_between(band.x, band.low, band.high, color=look.colour, alpha=0.15, linewidth=0)
    (line,) = axes.plot(
        trace.x,
        trace.y,
        color=look.colour,
        markevery=(look.index * 3 % every, every),
        **style,
    )
    if trace.arrow and len(trace.x) > 1:
        head = {"arrowstyle": "-|>", "color": look.colour, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.5, "mutation_scale": 11}
        axes.annotate("", (trace.x[-1], trace.y[-1]), (trace.x[-2], trace.y[-2]), arrowprops=head, zorder=line.get_zorder())
    axes.plot(*trace.lonely, color=look.colour, **{**style, "linestyle": "", "marker": style["marker"] or "o"})
    return line


def _extent(trace: Trace) -> float:
    """From the first to the last point."""
    return math.dist((trace.x[0], trace.y[0]), (trace.x[-1], trace.y[-1]))


def _legend_shape(names: list[str], *, below: bool = False) -> tuple[int, int]:
    """Columns and rows of a legend below the chart; none if it fits at the right and may stand there."""
    widest = max((text_width(name, TEXT) for name in names), default=0.0)
    if not names or (widest <= _LEGEND_WIDTH and len(names) <= _LEGEND_ROWS and not below):
        return 0, 0
    columns = int((WIDTH - 2 * MARGIN) // (widest + (_HANDLE + 3) * TEXT))
    columns = max(1, min(len(names), columns))
    return columns, math.ceil(len(names) / columns)


def _add_legend(axes: "matplotlib.axes.Axes", lines: "dict[str, matplotlib.lines.Line2D]", columns: int, floor: float) -> None:
    """Put the legend at the right of the axes, or in so many columns on the floor, a share of the figure's height."""
    if not lines:
        return
    below = {
        "loc": "lower left",
        "bbox_to_anchor": (MARGIN / WIDTH, floor),
        "bbox_transform": axes.figure.transFigure,
    }
    place = {**below, "ncols": columns} if columns else {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0)}
    legend = axes.legend(
        list(lines.values()),
        list(lines),
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=_HANDLE,
        labelspacing=_LEGEND_LEADING - 1,
        prop={"family": FONT, "size": TEXT},
        labelcolor=INK,
        **place,
    )
    legend.set_in_layout(not columns)
    for text in legend.get_texts():
        text.set_parse_math(False)
