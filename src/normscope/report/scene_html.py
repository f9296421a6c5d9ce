"""A scene by plotly, on the same page as other charts: turned by hand, with a text at every point."""

import math
from typing import Any

import numpy as np

from normscope.report.chart_html import GRID, INK, SOFT, WIRE, bar_style, markup, new_figure, page
from normscope.results.scene import (
    MANY,
    ORDER_COLOURS,
    SYMBOLS,
    Cloud,
    Point,
    Scene,
    Trail,
    camera,
    clear_words,
    cloud_colour,
    order_limits,
    wire_sphere,
)

_LINK = "#8c959f"  # seen on light and dark
_SMALLEST, _LARGEST = 5.0, 12.0
_WIDE, _HIGH = 0.35, 0.08  # a word, in halves of the picture
_EYE, _BELOW = 1.85, -0.1  # distance of the camera and the height that it looks at, in sides of the cube


def draw_scene_html(scene: Scene) -> str:
    """The page; it looks for plotly's script beside itself."""
    figure = new_figure()
    if scene.radius:
        wires = [point for line in wire_sphere(scene.radius) for point in (*line, None)]
        figure.add_scatter3d(**_columns(wires), mode="lines", line={"color": WIRE, "width": 1.5}, opacity=0.8, **_SILENT)
    for index, cloud in enumerate(scene.clouds):
        _add_cloud(figure, cloud, index)
    for index, trail in enumerate(scene.trails):
        _add_trail(figure, scene, trail, index)
    axes = {
        f"{axis}axis": {
            "title": {"text": _plain(name)},
            "showticklabels": False,
            "showbackground": False,
            "showspikes": False,
            "color": INK,
            "gridcolor": GRID,
            "zerolinecolor": WIRE,
        }
        for axis, name in zip("xyz", scene.axes, strict=True)
    }
    figure.update_layout(
        scene={**axes, "aspectmode": "data", "camera": {"eye": _eye(scene), "center": {"x": 0, "y": 0, "z": _BELOW}}},
        margin={"l": 0, "r": 0, "t": 0, "b": 0},
        legend={"x": 0, "y": 1, "itemsizing": "constant"},
        showlegend=True,
    )
    return page(figure, scene)


_SILENT: dict[str, Any] = {"hoverinfo": "skip", "showlegend": False}


def _columns(points: list[Point | None]) -> dict[str, list[float | None]]:
    """The coordinates in columns, with as many digits as a picture shows; None keeps lines apart."""
    return {axis: [None if p is None else float(f"{p[k]:.5g}") for p in points] for k, axis in enumerate("xyz")}


def _eye(scene: Scene) -> dict[str, float]:
    elevation, azimuth = (math.radians(angle) for angle in camera(scene))
    return {
        "x": _EYE * math.cos(elevation) * math.cos(azimuth),
        "y": _EYE * math.cos(elevation) * math.sin(azimuth),
        "z": _EYE * math.sin(elevation),
    }


def _add_cloud(figure: Any, cloud: Cloud, index: int) -> None:
    if cloud.origins:
        links = [p for i in cloud.shown for p in (cloud.origins[i], cloud.points[i], None)]
        line = {"color": _LINK, "width": 1}
        figure.add_scatter3d(**_columns(links), mode="lines", line=line, opacity=0.5, legendgroup=markup(cloud.name), **_SILENT)
    few = cloud.marked or len(cloud.shown) < MANY
    marker = {
        "color": cloud_colour(cloud, index),
        "size": 7 if cloud.marked else 4 if few else 2,
        "opacity": 1.0 if few else 0.5,
    }
    figure.add_scatter3d(
        **_columns([cloud.points[i] for i in cloud.shown]),
        name=markup(cloud.name),
        legendgroup=markup(cloud.name),
        showlegend=True,
        mode="markers+text" if cloud.marked and cloud.labels else "markers",
        marker={**marker, "symbol": "diamond" if cloud.marked else "circle", "line": {"width": 0}},
        text=[_plain(cloud.labels[i]) for i in cloud.shown] if cloud.marked and cloud.labels else None,
        textposition="bottom center",
        hovertext=[markup(cloud.labels[i]) for i in cloud.shown] if cloud.labels else None,
        hoverinfo="text" if cloud.labels else "name",
    )


def _add_trail(figure: Any, scene: Scene, trail: Trail, index: int) -> None:
    if not trail.shown:
        return
    steps = [trail.numbers[i] for i in trail.shown]
    labels = [trail.labels[i] if trail.labels else trail.name for i in trail.shown]
    words = clear_words(scene, trail, _WIDE, _HIGH)
    low, high = order_limits(scene)
    bar = {"title": {"text": markup(scene.order)}, "len": 0.6, "thickness": 14, **bar_style()}
    figure.add_scatter3d(
        **_columns([trail.points[i] for i in trail.shown]),
        name=markup(trail.name),
        showlegend=True,
        mode="lines+markers+text",
        line={"width": 4, "color": SOFT},
        marker={
            "size": np.linspace(_SMALLEST, _LARGEST, len(steps)).tolist(),
            "symbol": SYMBOLS[index % len(SYMBOLS)][1],
            "color": steps,
            "colorscale": list(ORDER_COLOURS),
            "cmin": low,
            "cmax": high,
            "showscale": index == 0,
            "colorbar": bar,
        },
        text=[_plain(words.get(i, "")) for i in trail.shown],
        textposition="top right",
        textfont={"size": 12},
        hovertext=[markup(f"{scene.order} {step}: {label}") for step, label in zip(steps, labels, strict=True)],
        hoverinfo="text",
    )


def _plain(text: str) -> str:
    """Text for plotly's space, which reads tags and knows no way to escape them."""
    return text.replace("<", "‹").replace(">", "›")
