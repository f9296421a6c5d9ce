"""Figures of what a norm does: points moved onto a sphere, gain and bias acting on it, one head's update."""

import numpy as np
import pandas as pd

from normscope.results import Chart, Cloud, Figure, Line, Point, Scene, Section
from normscope.results.tables import Tables, figures_section, floats, table_of

_VIEW = (25.0, -20.0)  # from here the plane of the centred points, orthogonal to (1, 1, 1), looks neither flat nor round
_CIRCLE = "circle"


def norm_section(tables: Tables, settings: str) -> Section | None:
    """The three figures, each if there is a table for it."""
    points, curves, update = (table_of(tables, name) for name in ("norm_points", "norm_curves", "head_update"))
    charts: dict[str, Figure | None] = {
        "norm-points": None if points is None else _points_scene(points, settings),
        "norm-curves": None if curves is None else _curves_chart(curves, settings),
        "head-update": None if update is None else _update_chart(update, settings),
    }
    if not any(charts.values()):
        return None
    text = (
        "LayerNorm subtracts the mean, which moves a token onto the plane orthogonal to (1, 1, …, 1), and then scales it to "
        "the norm √d. RMSNorm only does the second. The gain makes an ellipsoid of the sphere, the bias moves its centre.",
    )
    return figures_section("The geometry of a norm", text, charts, name="geometry")


def _points_scene(table: pd.DataFrame, settings: str) -> Scene:
    """Every stage as a cloud, with a line from where each point was in the stage before."""
    clouds: list[Cloud] = []
    last: dict[int, Point] = {}
    for stage, rows in table.groupby("stage", sort=False):
        here = dict(zip(map(int, rows["point"]), _triples(rows), strict=True))
        origins = [last[point] for point in here] if here.keys() <= last.keys() else []
        clouds.append(Cloud(str(stage), list(here.values()), [f"point {point}: {stage}" for point in here], origins))
        last = here
    reach = float(np.nanmax(np.linalg.norm(np.array(list(last.values())), axis=1)))
    return Scene(
        "A norm on points in three dimensions",
        tuple(clouds),
        (),
        "Follow a line: a point goes first to the plane of zero mean, then onto the sphere.",
        settings,
        radius=reach,
        axes=("x₁", "x₂", "x₃"),
        view=_VIEW,
    )


def _triples(rows: pd.DataFrame) -> list[Point]:
    return list(zip(*(floats(rows[axis]) for axis in ("x", "y", "z")), strict=True))


def _curves_chart(table: pd.DataFrame, settings: str) -> Chart:
    lines = tuple(_closed(str(stage), rows) for stage, rows in table.groupby("stage", sort=False))
    caption = "The gain stretches the circle along the axes; the bias moves it away from the origin."
    return Chart("Gain and bias on the sphere", "x₁", "x₂", lines, caption, settings, equal=True)


def _closed(name: str, rows: pd.DataFrame) -> Line:
    rows = rows.sort_values("order")
    x, y = floats(rows["x"]), floats(rows["y"])
    return Line(name, [*x, x[0]], [*y, y[0]])


def _update_chart(table: pd.DataFrame, settings: str) -> Chart:
    """Arrows on the circle: a part with one point starts at the origin; the update leads from the token to the sum."""
    curves = {str(part): rows.sort_values("order") for part, rows in table.groupby("part", sort=False)}
    points = {part: list(zip(floats(rows["x"]), floats(rows["y"]), strict=True)) for part, rows in curves.items()}
    if {"token", "sum"} <= points.keys() and len(points.get("update", [])) < 2:
        points = {"token": points["token"], "update": [points["token"][-1], points["sum"][-1]], **points}
    lines = [_closed("sphere", curves[_CIRCLE])] if _CIRCLE in curves else []
    for part, way in points.items():
        if part != _CIRCLE:
            x, y = zip(*(way if len(way) > 1 else [(0.0, 0.0), *way]), strict=True)
            lines.append(Line(part, list(x), list(y), arrow=True))
    caption = "The update rotates the token; the norm then scales the sum back onto the sphere."
    return Chart("One head's update", "along the token", "across", tuple(lines), caption, settings, equal=True)
