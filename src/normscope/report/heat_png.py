"""A heat map by matplotlib: cells as square as they fit, empty ones hatched, the colours explained at the right.

All lengths are in points (1/72 inch).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from normscope.report.chart_png import INK, MARGIN, SOFT, TEXT, WIDTH, new_sheet
from normscope.report.lettering import FONT, font, printable, text_width
from normscope.results.heat import HeatMap, cells, colour_limits, label_step

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import matplotlib.image

_CELL, _SMALLEST_SIDE, _HEIGHT = 24.0, 60.0, 360.0
_FEW, _LARGE_CELL = 8, 48.0  # so few rows and columns get large cells, with their values in them
_LIGHT = 0.45  # from this luminance on letters are dark
_SMALLEST_LETTERS = 5.0
_TICK = 6.0  # from the cells to the labels
_LABEL = 1.8 * TEXT  # room for the name of an axis
_BAR, _BAR_GAP, _BAR_LABELS = 10.0, 12.0, 46.0
_EMPTY, _HATCH = "#f6f8fa", "#b6bec7"


def draw_heat_png(heat: HeatMap) -> "matplotlib.figure.Figure":
    """The heat map as a figure 1200 pixels wide and as high as its rows ask for."""
    columns, rows = [printable(name) for name in heat.x_names], [printable(name) for name in heat.y_names]
    left = MARGIN + _LABEL + _TICK + _widest(rows, TEXT)
    room = WIDTH - left - MARGIN - _BAR_GAP - _BAR - _BAR_LABELS
    few = max(len(columns), len(rows)) <= _FEW
    cell = min(_LARGE_CELL if few else _CELL, room / len(columns), _HEIGHT / len(rows))
    width = max(cell * len(columns), _SMALLEST_SIDE)
    height = max(cell * len(rows), _SMALLEST_SIDE, text_width(heat.value_label, TEXT))
    letters = max(_SMALLEST_LETTERS, min(TEXT, 0.85 * cell))
    upright = not all(name.isdigit() for name in columns)
    below = _LABEL + _TICK + (_widest(columns, letters) if upright else letters)

    sheet = new_sheet(heat, height + below)
    bottom = sheet.foot + below
    axes = sheet.figure.add_axes((left / WIDTH, bottom / sheet.height, width / WIDTH, height / sheet.height))
    image = _paint(axes, heat)
    if few:
        _write_values(axes, heat, image)
    label = letters if upright else _widest(columns, letters)
    across = _every(columns, label_step(width / len(columns), 1.2 * label))
    up = _every(rows, label_step(height / len(rows), 1.2 * letters))
    axes.set_xticks(list(across), list(across.values()), rotation=90 if upright else 0, **font(letters, colour=INK))
    axes.set_yticks(list(up), list(up.values()), **font(letters, colour=INK))
    axes.set_xlabel(heat.x_label, **font(TEXT, colour=INK))
    axes.set_ylabel(heat.y_label, **font(TEXT, colour=INK))
    _style(axes)

    beside = (left + width + _BAR_GAP) / WIDTH
    bar = sheet.figure.add_axes((beside, bottom / sheet.height, _BAR / WIDTH, height / sheet.height))
    sheet.figure.colorbar(image, cax=bar)
    bar.set_ylabel(heat.value_label, **font(TEXT, colour=INK))
    bar.tick_params(which="both", labelsize=TEXT, labelfontfamily=FONT, labelcolor=INK)
    _style(bar)
    return sheet.figure


def _paint(axes: "matplotlib.axes.Axes", heat: HeatMap) -> "matplotlib.image.AxesImage":
    from matplotlib.colors import LogNorm, Normalize

    low, high = colour_limits(heat)
    axes.patch.set(facecolor=_EMPTY, edgecolor=_HATCH, hatch="//////", linewidth=0)
    return axes.imshow(
        cells(heat),
        cmap="viridis",
        norm=LogNorm(low, high) if heat.log else Normalize(low, high),
        aspect="auto",
        interpolation="nearest",
        origin="upper" if heat.from_top else "lower",
    )


def _write_values(axes: "matplotlib.axes.Axes", heat: HeatMap, image: "matplotlib.image.AxesImage") -> None:
    for row, values in enumerate(heat.values):
        for column, value in enumerate(values):
            if math.isfinite(value):
                red, green, blue, _ = image.to_rgba(np.asarray(value))
                light = 0.2126 * red + 0.7152 * green + 0.0722 * blue > _LIGHT
                style = font(TEXT, colour=INK if light else "white")
                axes.text(column, row, f"{value:.3g}", ha="center", va="center", **style)


def _style(axes: "matplotlib.axes.Axes") -> None:
    for spine in axes.spines.values():
        spine.set(color=SOFT, linewidth=0.7)
    axes.tick_params(which="both", color=SOFT, width=0.7, length=2.5, pad=2)


def _widest(names: Sequence[str], letters: float) -> float:
    return max(text_width(name, letters) for name in names)


def _every(names: Sequence[str], step: int) -> dict[int, str]:
    return dict(list(enumerate(names))[::step])
