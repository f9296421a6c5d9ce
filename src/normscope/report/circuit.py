"""The induction circuit in one look: whom the prefix-matching head selects, and where it breaks, by scheme."""

from typing import TYPE_CHECKING

import pandas as pd

from normscope.report.blocks import save_figure
from normscope.report.chart_png import INK, MARGIN, SOFT, TEXT, WIDTH, new_sheet, words_of
from normscope.report.charts import Chart
from normscope.report.figures import FIGURES
from normscope.report.lettering import font, printable
from normscope.report.page import Picture
from normscope.results.lines import traces
from normscope.runs import RunFolder

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_RIGHT, _WRONG, _WANTED = "#009E73", "#D55E00", "#dfe3e8"
_LEFT, _HEAD, _FOOT = 44.0, 16.0, 34.0  # room for labels beside, above and below panels
_BETWEEN = 22.0
_HIGHEST, _CURVE = 104.0, 84.0  # heights of a panel of selections and of one of curves
_NAMED = 6  # more lines than these find no room for their names; the charts of their own have it
_TITLE = "Normalization and the independence of subspaces, in one look"
_CAPTION = (
    "Each dot is the token that a receiver selects, to see what followed its like: green if it is the right one. On orthogonal "
    "spheres every scheme is right. Off them, a norm of the input makes a head select by what it does not attend to, from "
    "where Theorem 7 says (dotted)."
)


def save_circuit(run: RunFolder, name: str, selections: pd.DataFrame, charts: list[Chart], settings: str) -> Picture:
    """Draw selections and curves into the run's folder of figures; the curves have charts, and numbers, of their own."""
    path = run.path / FIGURES / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(draw_circuit(selections, charts, settings), path, words_of(_sheet(settings)))
    selections.to_csv(path.with_suffix(".csv"), index=False)
    return Picture(_TITLE, path, _CAPTION, None, settings, f"{FIGURES}/{name}.csv")


def _sheet(settings: str) -> Chart:
    """The words around the panels."""
    return Chart(_TITLE, "", "", (), _CAPTION, settings)


def draw_circuit(selections: pd.DataFrame, charts: list[Chart], settings: str) -> "matplotlib.figure.Figure":
    """A panel for each scheme, downwards, and world, across; below them the curves.

    Args:
        selections: columns world, scheme, receiver, selected and wanted.
        charts: what becomes of the circuit as a knob is turned.
        settings: small print.
    """
    schemes, worlds = (list(selections[column].drop_duplicates()) for column in ("scheme", "world"))
    across, width = _width(len(worlds)), _width(len(charts))
    high, below = min(across, _HIGHEST), _CURVE + _HEAD + _FOOT
    sheet = new_sheet(_sheet(settings), len(schemes) * (high + _HEAD) + _HEAD + _FOOT + below)
    bold = font(TEXT, bold=True, colour=INK)

    def panel(left: float, bottom: float, width: float, height: float) -> "matplotlib.axes.Axes":
        return sheet.figure.add_axes((left / WIDTH, bottom / sheet.height, width / WIDTH, height / sheet.height))

    def write(text: str, x: float, y: float, turn: int = 0) -> None:
        sheet.figure.text(x / WIDTH, y / sheet.height, printable(text), rotation=turn, ha="center", va="center", **bold)

    first = sheet.foot + below + _FOOT - MARGIN / 2
    for up, scheme in enumerate(reversed(schemes)):
        bottom = first + up * (high + _HEAD)
        write(str(scheme), 1.5 * MARGIN, bottom + high / 2, 90)
        for side, world in enumerate(worlds):
            rows = selections[(selections["world"] == world) & (selections["scheme"] == scheme)]
            _selected(panel(_LEFT + side * (across + _BETWEEN), bottom, across, high), rows, lowest=up == 0, first=side == 0)
    for side, world in enumerate(worlds):
        write(str(world), _LEFT + side * (across + _BETWEEN) + across / 2, first + len(schemes) * (high + _HEAD) + _HEAD / 4)
    for side, chart in enumerate(charts):
        _curves(panel(_LEFT + side * (width + _BETWEEN), sheet.foot + _FOOT - MARGIN, width, _CURVE), chart, first=side == 0)
    return sheet.figure


def _width(panels: int) -> float:
    return (WIDTH - MARGIN - _LEFT - _BETWEEN * (panels - 1)) / panels


def _selected(axes: "matplotlib.axes.Axes", rows: pd.DataFrame, *, lowest: bool, first: bool) -> None:
    """Receivers downwards, senders across: grey squares where they should look, dots where they do."""
    right = rows["selected"] == rows["wanted"]
    axes.scatter(rows["wanted"], rows["receiver"], s=22, marker="s", color=_WANTED, linewidths=0)
    axes.scatter(rows["selected"], rows["receiver"], s=11, c=[_RIGHT if one else _WRONG for one in right], linewidths=0)
    _style(axes, f"{int(right.sum())} of {len(rows)} right")
    axes.set_xlim(-1, rows["receiver"].max() + 1)
    axes.invert_yaxis()
    axes.tick_params(labelbottom=lowest, labelleft=first)
    if lowest:
        axes.set_xlabel("selected token", labelpad=1, **font(TEXT - 1, colour=SOFT))
    if first:
        axes.set_ylabel("receiver", labelpad=1, **font(TEXT - 1, colour=SOFT))


def _curves(axes: "matplotlib.axes.Axes", chart: Chart, *, first: bool) -> None:
    """The chart in little: the first lines drawn widest, so that lines which lie on each other are all seen."""
    drawn = traces(chart)
    for place, trace in enumerate(drawn):
        upright = len(set(trace.x)) == 1
        dash = (0, (1.2, 1.6)) if upright else "-"
        wide = 1.0 if upright else 1.2 + 2.4 * (1 - place / len(drawn))
        axes.plot(trace.x, trace.y, color=trace.look.colour, linestyle=dash, linewidth=wide, label=trace.name)
    axes.set_xscale("log" if chart.log_x else "linear")
    _style(axes, chart.title)
    axes.set_xlabel(chart.x_label, labelpad=1, **font(TEXT - 1, colour=SOFT))
    axes.tick_params(labelleft=first)
    if first:
        axes.set_ylabel("right, in %", labelpad=1, **font(TEXT - 1, colour=SOFT))
    if len(drawn) > _NAMED:
        return
    legend = axes.legend(loc="lower left", frameon=False, borderpad=0.1, labelspacing=0.1, handlelength=1.6)
    for text in legend.get_texts():
        text.set(**font(TEXT - 2, colour=INK))


def _style(axes: "matplotlib.axes.Axes", title: str) -> None:
    axes.set_title(title, pad=3, **font(TEXT, colour=INK))
    axes.tick_params(which="both", color=SOFT, labelcolor=SOFT, labelsize=TEXT - 2, width=0.5, length=2)
    for spine in axes.spines.values():
        spine.set(color=SOFT, linewidth=0.5)
