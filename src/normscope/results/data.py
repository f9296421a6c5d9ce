"""The numbers behind a drawing as a tidy table: one row for each point, columns named as the drawing names its axes.

The table holds what the drawing was given, with all digits, also where a logarithmic axis leaves something out.
"""

import math
from collections import Counter
from collections.abc import Sequence

import pandas as pd

from normscope.results.drawing import Drawing
from normscope.results.heat import HeatMap
from normscope.results.lines import Chart
from normscope.results.scene import Cloud, Scene, Trail

_WHOLE = 2**53  # up to here a float that looks like a whole number is one


def figure_data(drawing: Drawing) -> pd.DataFrame:
    """The points of a drawing; a cell is empty where there is no number."""
    if isinstance(drawing, Chart):
        return _chart_data(drawing)
    return _heat_data(drawing) if isinstance(drawing, HeatMap) else _scene_data(drawing)


def _chart_data(chart: Chart) -> pd.DataFrame:
    """Columns line, x, y, and low and high where a line has a band; ``part`` tells the strokes of one name apart."""
    strokes: Counter[str] = Counter()
    rows: list[tuple[object, ...]] = []
    for line in chart.lines:
        missing = [math.nan] * len(line.x)
        low, high = (missing if edge is None else edge for edge in (line.low, line.high))
        new = True
        for x, *values in zip(line.x, line.y, low, high, strict=True):
            strokes[line.name] += new and math.isfinite(x)
            new = not math.isfinite(x)
            if not new:
                rows.append((line.name, strokes[line.name], x, *values))
    columns = list(zip(*rows, strict=True)) or [()] * 6
    names = ("line", "part", chart.x_label, chart.y_label, "low", "high")
    several, banded = max(strokes.values(), default=1) > 1, any(line.low is not None for line in chart.lines)
    kept = (True, several, True, True, banded, banded)
    return _table([(name, list(values)) for name, values, keep in zip(names, columns, kept, strict=True) if keep])


def _heat_data(heat: HeatMap) -> pd.DataFrame:
    """Columns y, x and value; where a name occurs twice, numbers stand before the names."""
    places = [(y, x) for y in range(len(heat.y_names)) for x in range(len(heat.x_names))]
    columns: list[tuple[str, list[object]]] = []
    for label, names, numbers in (
        (heat.y_label, heat.y_names, [y for y, _ in places]),
        (heat.x_label, heat.x_names, [x for _, x in places]),
    ):
        if len(set(names)) < len(names):
            columns.append((f"{label} number", list(numbers)))
        columns.append((label, [names[number] for number in numbers]))
    columns.append((heat.value_label, [heat.values[y][x] for y, x in places]))
    return _table(columns)


def _scene_data(scene: Scene) -> pd.DataFrame:
    """Columns name, step (of trails), label, the three axes, and where a point came from if the scene says so."""
    rows = [(part, i) for part in scene.parts for i in range(len(part.points))]
    columns: list[tuple[str, list[object]]] = [("name", [part.name for part, _ in rows])]
    if scene.trails:
        columns.append((scene.order, [part.numbers[i] if isinstance(part, Trail) else pd.NA for part, i in rows]))
    if any(part.labels for part in scene.parts):
        columns.append(("label", [part.labels[i] if part.labels else pd.NA for part, i in rows]))
    columns += [(axis, [part.points[i][k] for part, i in rows]) for k, axis in enumerate(scene.axes)]
    if any(cloud.origins for cloud in scene.clouds):
        for k, axis in enumerate(scene.axes):
            columns.append((f"{axis} of origin", [_origin(part, i, k) for part, i in rows]))
    return _table(columns)


def _origin(part: Cloud | Trail, point: int, axis: int) -> float:
    return part.origins[point][axis] if isinstance(part, Cloud) and part.origins else math.nan


def _table(columns: Sequence[tuple[str, list[object]]]) -> pd.DataFrame:
    """The columns under their names, one that is there already with a number behind it."""
    found: dict[str, list[object]] = {}
    for name, values in columns:
        free = next(one for one in (name, *(f"{name} ({i})" for i in range(2, len(columns) + 1))) if one not in found)
        found[free] = _whole(values)
    return pd.DataFrame(found)


def _whole(values: list[object]) -> list[object]:
    """Layers and other whole numbers without a decimal point."""
    numbers = [value for value in values if isinstance(value, int | float) and abs(value) < _WHOLE]
    whole = len(numbers) == len(values) and all(float(value).is_integer() for value in numbers)
    return [int(value) for value in numbers] if whole else values
