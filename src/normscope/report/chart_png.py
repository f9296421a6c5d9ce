"""A line chart by matplotlib: title and caption above, small print below, the legend at the right or below.

All lengths are in points (1/72 inch).
"""

import math
from typing import TYPE_CHECKING, Any

from normscope.report.lettering import FONT, broken, font, text_width
from normscope.report.lines import Chart, Trace, traces

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import matplotlib.lines

_DPI, _WIDTH = 200, 432.0  # 1200 pixels
_PLOT_HEIGHT = 232.0
_MARGIN = 8.0
_TITLE, _TEXT, _SMALL = 10.5, 8.0, 6.5
_LEADING = 1.4
_LEGEND_WIDTH, _LEGEND_ROWS = 110.0, 16  # of what fits at the right of the chart
_LEGEND_LEADING, _HANDLE = 1.5, 3.4  # in letters
_INK, _SOFT, _GRID = "#1f2328", "#57606a", "#e4e7eb"
_MARKS = 8  # about as many markers on a line


def draw_png(chart: Chart) -> "matplotlib.figure.Figure":
    """The chart as a figure 1200 pixels wide and as high as its texts and legend ask for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    room = _WIDTH - 2 * _MARGIN
    above = [
        *((text, font(_TITLE, bold=True, colour=_INK)) for text in broken(chart.title, _TITLE, room, bold=True)),
        *((text, font(_TEXT, colour=_SOFT)) for text in broken(chart.caption, _TEXT, room)),
    ]
    below = [(text, font(_SMALL, colour=_SOFT)) for text in broken(chart.settings, _SMALL, room)]
    drawn = traces(chart)
    columns, rows = _legend_shape([trace.name for trace in drawn if trace.first])
    head, foot = 2 * _MARGIN + _text_height(above), 1.5 * _MARGIN + _text_height(below)
    bottom = foot + (rows * _TEXT * _LEGEND_LEADING + 1.5 * _MARGIN if rows else 0)
    height = head + _PLOT_HEIGHT + bottom

    figure = Figure(figsize=(_WIDTH / 72, height / 72), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    _write(figure, above, height - _MARGIN, height)
    _write(figure, below, foot - 0.75 * _MARGIN, height)
    rect = (_MARGIN / _WIDTH, bottom / height, 1 - 2 * _MARGIN / _WIDTH, _PLOT_HEIGHT / height)
    figure.set_layout_engine("constrained", rect=rect, w_pad=0, h_pad=0)
    axes = figure.add_subplot()
    _style_axes(axes, chart)
    handles = {trace.name: _plot(axes, trace) for trace in reversed(drawn)}
    _add_legend(axes, {trace.name: handles[trace.name] for trace in drawn}, columns, (foot + _MARGIN / 2) / height)
    return figure


def _text_height(lines: list[tuple[str, dict[str, Any]]]) -> float:
    return float(sum(_LEADING * letters["fontsize"] for _, letters in lines))


def _write(figure: "matplotlib.figure.Figure", lines: list[tuple[str, dict[str, Any]]], top: float, height: float) -> None:
    for text, letters in lines:
        figure.text(_MARGIN / _WIDTH, top / height, text, va="top", **letters)
        top -= _LEADING * letters["fontsize"]


def _style_axes(axes: "matplotlib.axes.Axes", chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set(color=_SOFT, linewidth=0.7)
    axes.grid(True, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", color=_SOFT, labelcolor=_INK, labelsize=_TEXT, labelfontfamily=FONT, width=0.7)
    axes.set_xlabel(chart.x_label, **font(_TEXT, colour=_INK))
    axes.set_ylabel(chart.y_label, **font(_TEXT, colour=_INK))
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_offset_text().set(fontsize=_TEXT, fontfamily=FONT, color=_INK)
    axes.margins(x=0.02)
    axes.ticklabel_format(useOffset=False, useMathText=True)
    if all(float(x).is_integer() for line in chart.lines for x in line.x if math.isfinite(x)):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")


def _plot(axes: "matplotlib.axes.Axes", trace: Trace) -> "matplotlib.lines.Line2D":
    look, every = trace.look, max(1, len(trace.x) // _MARKS)
    for band in trace.bands:
        axes.fill_between(band.x, band.low, band.high, color=look.colour, alpha=0.15, linewidth=0)
    (line,) = axes.plot(
        trace.x,
        trace.y,
        color=look.colour,
        linestyle=look.dash[0],
        linewidth=1.5,
        marker=look.marker[0],
        markersize=4.4,
        markevery=(look.index * 3 % every, every),
    )
    axes.plot(*trace.lonely, color=look.colour, linestyle="", marker=look.marker[0] or "o", markersize=4.4)
    return line


def _legend_shape(names: list[str]) -> tuple[int, int]:
    """Columns and rows of a legend below the chart; none if it fits at the right."""
    widest = max((text_width(name, _TEXT) for name in names), default=0.0)
    if widest <= _LEGEND_WIDTH and len(names) <= _LEGEND_ROWS:
        return 0, 0
    columns = int((_WIDTH - 2 * _MARGIN) // (widest + (_HANDLE + 3) * _TEXT))
    columns = max(1, min(len(names), columns))
    return columns, math.ceil(len(names) / columns)


def _add_legend(axes: "matplotlib.axes.Axes", lines: "dict[str, matplotlib.lines.Line2D]", columns: int, floor: float) -> None:
    """Put the legend at the right of the axes, or in so many columns on the floor, a share of the figure's height."""
    if not lines:
        return
    below = {
        "loc": "lower left",
        "bbox_to_anchor": (_MARGIN / _WIDTH, floor),
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
        prop={"family": FONT, "size": _TEXT},
        labelcolor=_INK,
        **place,
    )
    legend.set_in_layout(not columns)
    for text in legend.get_texts():
        text.set_parse_math(False)
