"""The induction circuit in one look: for each scheme and world, whom the prefix-matching head selects."""

from typing import TYPE_CHECKING

import pandas as pd

from normscope.report.blocks import save_figure
from normscope.report.chart_png import INK, MARGIN, SOFT, TEXT, WIDTH, new_sheet
from normscope.report.figures import FIGURES
from normscope.report.lettering import font, printable
from normscope.report.lines import Chart
from normscope.report.page import Picture
from normscope.results import RunFolder

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_RIGHT, _WRONG, _WANTED = "#009E73", "#D55E00", "#e4e7eb"
_LEFT, _HEAD, _FOOT, _GAP = 24.0, 16.0, 22.0, 26.0  # beside and above the panels, below them, between them
_HIGHEST = 128.0
_TITLE = "Normalization and the independence of subspaces, in one look"
_CAPTION = (
    "Each dot is the token that a receiver selects to see what followed its like: green if it is the right one. On orthogonal "
    "spheres every scheme is right; off them, one that normalises its input selects by what it does not attend to."
)


def save_circuit(run: RunFolder, name: str, selections: pd.DataFrame, settings: str) -> Picture:
    """Draw the selections into the run's folder of figures."""
    path = run.path / FIGURES / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(draw_circuit(selections, settings), path)
    return Picture(_TITLE, path, _CAPTION, None, settings)


def draw_circuit(selections: pd.DataFrame, settings: str) -> "matplotlib.figure.Figure":
    """A panel for each world, downwards, and scheme, across.

    Args:
        selections: columns world, scheme, receiver, selected and wanted.
        settings: small print.
    """
    schemes, worlds = (list(selections[column].drop_duplicates()) for column in ("scheme", "world"))
    across = (WIDTH - 2 * MARGIN - _LEFT - _GAP * (len(schemes) - 1)) / len(schemes)
    high = min(across, _HIGHEST)
    sheet = new_sheet(Chart(_TITLE, "", "", (), _CAPTION, settings), len(worlds) * (high + _HEAD) + _FOOT)
    top = sheet.foot + _FOOT + len(worlds) * (high + _HEAD)
    for down, world in enumerate(worlds):
        bottom = top - (down + 1) * (high + _HEAD)
        middle = (bottom + high / 2) / sheet.height
        letters = font(TEXT, bold=True, colour=INK)
        sheet.figure.text(2 * MARGIN / WIDTH, middle, printable(world), rotation=90, ha="center", va="center", **letters)
        for side, scheme in enumerate(schemes):
            left = MARGIN + _LEFT + side * (across + _GAP)
            place = (left / WIDTH, bottom / sheet.height, across / WIDTH, high / sheet.height)
            rows = selections[(selections["world"] == world) & (selections["scheme"] == scheme)]
            _panel(sheet.figure.add_axes(place), rows, str(scheme), last=down == len(worlds) - 1, first=side == 0)
    return sheet.figure


def _panel(axes: "matplotlib.axes.Axes", rows: pd.DataFrame, scheme: str, *, last: bool, first: bool) -> None:
    """Receivers downwards, senders across: grey squares where they should look, dots where they do."""
    right = rows["selected"] == rows["wanted"]
    axes.scatter(rows["wanted"], rows["receiver"], s=26, marker="s", color=_WANTED, linewidths=0)
    axes.scatter(rows["selected"], rows["receiver"], s=11, c=[_RIGHT if one else _WRONG for one in right], linewidths=0)
    axes.set_title(f"{printable(scheme)}: {int(right.sum())} of {len(rows)} right", pad=3, **font(TEXT, colour=INK))
    axes.set_xlim(-1, rows["receiver"].max() + 1)
    axes.invert_yaxis()
    axes.tick_params(color=SOFT, labelcolor=SOFT, labelsize=TEXT - 2, width=0.5, length=2, labelbottom=last)
    for spine in axes.spines.values():
        spine.set(color=SOFT, linewidth=0.5)
    if last:
        axes.set_xlabel("selected token", labelpad=1, **font(TEXT - 1, colour=SOFT))
    if first:
        axes.set_ylabel("receiver", labelpad=1, **font(TEXT - 1, colour=SOFT))
