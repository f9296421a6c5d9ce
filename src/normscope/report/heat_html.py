"""A heat map by plotly, on the same page as line charts; every cell says its place and value."""

import math
from collections.abc import Sequence
from typing import Any

from normscope.report.chart_html import EMPTY, axis, bar_style, markup, new_figure, page
from normscope.results.heat import HeatMap, cells, colour_limits, label_step

_ROOM_ACROSS, _ROOM_UP = 64, 32  # so many labels find room on the page
_BAR_LABELS = 5


def draw_heat_html(heat: HeatMap) -> str:
    """The page; it looks for plotly's script beside itself."""
    figure = new_figure()
    values = cells(heat)
    low, high = (_level(heat, limit) for limit in colour_limits(heat))
    figure.add_heatmap(
        z=[[None if math.isnan(value) else _level(heat, value) for value in row] for row in values],
        zmin=low,
        zmax=high,
        colorscale="Viridis",
        colorbar={
            "title": {"text": markup(heat.value_label), "side": "right"},
            **_bar_labels(heat, low, high),
            **bar_style(),
        },
        text=[[_words(heat, x, y, value) for x, value in enumerate(row)] for y, row in enumerate(values)],
        hoverinfo="text",
        hoverongaps=False,
    )
    up = {"autorange": "reversed" if heat.from_top else True}
    figure.update_layout(
        xaxis={**axis(heat.x_label), **_labels(heat.x_names, _ROOM_ACROSS), "showgrid": False},
        yaxis={**axis(heat.y_label), **_labels(heat.y_names, _ROOM_UP), "showgrid": False, **up},
        plot_bgcolor=EMPTY,
    )
    return page(figure, heat)


def _level(heat: HeatMap, value: float) -> float:
    """Where a value stands among the colours; plotly has no logarithmic ones."""
    return math.log10(value) if heat.log else value


def _bar_labels(heat: HeatMap, low: float, high: float) -> dict[str, Any]:
    if not heat.log:
        return {}
    levels = [low + (high - low) * i / (_BAR_LABELS - 1) for i in range(_BAR_LABELS)]
    return {"tickvals": levels, "ticktext": [f"{10**level:.2g}" for level in levels]}


def _words(heat: HeatMap, x: int, y: int, value: float) -> str:
    place = f"{heat.y_label} {heat.y_names[y]}, {heat.x_label} {heat.x_names[x]}"
    return markup(f"{place}: {value:.4g}")


def _labels(names: Sequence[str], room: int) -> dict[str, Any]:
    step = label_step(room, len(names))
    return {"tickvals": list(range(0, len(names), step)), "ticktext": [markup(name) for name in names[::step]]}
