"""The numbers behind a figure as a tidy table: one row for each point, columns named as the figure names its axes.

The table holds what the figure was given, with all digits, also where a logarithmic axis leaves something out.
"""

import math
from collections import Counter
from collections.abc import Sequence

import pandas as pd

from normscope.results.figures import Blocks, Chart, Cloud, Figure, HeatMap, Panels, Scene, Scenes, Trail

_WHOLE = 2**53  # up to here a float that looks like a whole number is one


def figure_data(figure: Figure) -> pd.DataFrame:
    """The points of a figure; a cell is empty where there is no number."""
    if isinstance(figure, Chart):
        return _chart_data(figure)
    if isinstance(figure, HeatMap):
        return _heat_data(figure)
    if isinstance(figure, Scene):
        return _scene_data(figure)
    if isinstance(figure, Panels | Scenes):
        return _panels_data(figure.figures if isinstance(figure, Panels) else figure.scenes)
    return _blocks_data(figure)


def _chart_data(chart: Chart) -> pd.DataFrame:
    """Columns line, x, y, and low and high where a line has a band; ``part`` separates the strokes of one name."""
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
    shown = (True, several, True, True, banded, banded)
    return _table([(name, list(values)) for name, values, there in zip(names, columns, shown, strict=True) if there])


def _heat_data(heat: HeatMap) -> pd.DataFrame:
    """Columns y, x and value; where a name occurs twice, a column of numbers precedes the names."""
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
    """Columns name, step (of trails), label, the three axes, and where a point came from if the scene has origins."""
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


def _panels_data(panels: Sequence[Figure]) -> pd.DataFrame:
    """The tables of all panels, each under its title."""
    tables = []
    for panel in panels:
        table = figure_data(panel)
        table.insert(0, "panel", panel.title, allow_duplicates=True)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _blocks_data(blocks: Blocks) -> pd.DataFrame:
    return pd.DataFrame(
        [{key: "; ".join(value) if key == "branch" else value for key, value in record.items()} for record in blocks.records]
    )


def _table(columns: Sequence[tuple[str, list[object]]]) -> pd.DataFrame:
    """The columns under their names; a name that is taken gets a number."""
    table: dict[str, list[object]] = {}
    for name, values in columns:
        free = next(text for text in (name, *(f"{name} ({i})" for i in range(2, len(columns) + 1))) if text not in table)
        table[free] = _whole(values)
    return pd.DataFrame(table)


def _whole(values: list[object]) -> list[object]:
    """Layers and other whole numbers without a decimal point."""
    numbers = [value for value in values if isinstance(value, int | float) and abs(value) < _WHOLE]
    whole = len(numbers) == len(values) and all(float(value).is_integer() for value in numbers)
    return [int(value) for value in numbers] if whole else values
