"""Figures as declarations: what is drawn, in words and numbers. The report renders them to HTML, SVG and PNG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from normscope.errors import InputError

Point = tuple[float, float, float]


@dataclass(frozen=True)
class Line:
    """A named line with gaps where it is not finite, or dots.

    Attributes:
        name: what it is, for the legend; lines of one name share their colour and dashes.
        x: horizontal positions.
        y: vertical positions.
        low: lower edge of a band around the line; of dots, the lower end of a bar through each.
        high: upper edge likewise.
        thin: solid and light: one of many that belong together.
        arrow: solid, with a head at its end.
        dots: points that no line joins.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    thin: bool = False
    arrow: bool = False
    dots: bool = False

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise InputError(f"the band of line '{self.name}' needs both low and high")
        for name, values in (("y", self.y), ("low", self.low), ("high", self.high)):
            if values is not None and len(values) != len(self.x):
                raise InputError(f"line '{self.name}' has {len(self.x)} values of x and {len(values)} of {name}")


@dataclass(frozen=True)
class Chart:
    """A line chart in words and numbers.

    Attributes:
        title: what is drawn.
        x_label: name of the horizontal axis.
        y_label: name of the vertical axis.
        lines: the lines, in the order of the legend.
        caption: one line that says what to see in it.
        settings: small print under the chart, such as sizes and seed.
        log_x: a logarithmic horizontal axis; values that are not positive are left out.
        log_y: a logarithmic vertical axis, likewise; a band or bar that reaches 0 or below is drawn to the edge of the axis.
        equal: one scale on both axes, so that a circle is round.
        limits: lowest and highest value of the vertical axis, if not those of the lines.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    caption: str
    settings: str = ""
    log_x: bool = False
    log_y: bool = False
    equal: bool = False
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class HeatMap:
    """A table of values as colours; cells that are not finite stay empty.

    Attributes:
        title: what is drawn.
        x_label: name of the horizontal axis.
        y_label: name of the vertical axis.
        value_label: what the colours stand for.
        x_names: names of the columns, from the left.
        y_names: names of the rows, from the bottom.
        values: for each row its values.
        caption: one line that says what to see in it.
        settings: small print under the chart, such as sizes and seed.
        limits: values of the first and last colour; from 0 to the largest value unless given.
        log: logarithmic colours; cells that are not positive stay empty.
        from_top: rows from the top instead.
        heads: rows are layers and columns are heads: a page links all such maps, and choosing a cell selects that head.
        of_head: layer and head that the whole map belongs to, so that a page leads there from the chosen head.
    """

    title: str
    x_label: str
    y_label: str
    value_label: str
    x_names: Sequence[str]
    y_names: Sequence[str]
    values: Sequence[Sequence[float]]
    caption: str
    settings: str = ""
    limits: tuple[float, float] | None = None
    log: bool = False
    from_top: bool = False
    heads: bool = False
    of_head: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.x_names or not self.y_names:
            raise InputError(f"heat map '{self.title}' has no cells")
        if len(self.values) != len(self.y_names) or any(len(row) != len(self.x_names) for row in self.values):
            raise InputError(f"heat map '{self.title}' needs {len(self.y_names)} rows of {len(self.x_names)} values")

    @property
    def cells(self) -> list[list[float]]:
        """The values, NaN where a cell stays empty."""
        return [drawable(row, log=self.log) for row in self.values]

    @property
    def colour_limits(self) -> tuple[float, float]:
        """Values of the first and last colour, never the same."""
        if self.limits:
            return self.limits
        filled = [value for row in self.cells for value in row if not math.isnan(value)]
        if self.log:
            low, high = min(filled, default=1.0), max(filled, default=1.0)
            return (low, high) if low < high else (low / 2, high * 2)
        low, high = min([0.0, *filled]), max([0.0, *filled])
        return (low, high) if low < high else (low, low + 1)


@dataclass(frozen=True)
class Cloud:
    """Many small points; points that are not finite are left out.

    Attributes:
        name: what they are, for the legend.
        points: where they are.
        labels: a text for each, shown on hover.
        origins: where each came from; a thin line leads from there.
        marked: few points, drawn large with their labels beside them.
    """

    name: str
    points: Sequence[Point]
    labels: Sequence[str] = ()
    origins: Sequence[Point] = ()
    marked: bool = False

    def __post_init__(self) -> None:
        _check_lengths("cloud", self.name, len(self.points), {"labels": self.labels, "origins": self.origins})

    @property
    def shown(self) -> list[int]:
        """The points that can be drawn."""
        return _finite(self.points)


@dataclass(frozen=True)
class Trail:
    """An ordered line of points, coloured and growing along its way; points that are not finite are left out.

    Attributes:
        name: what it is, for the legend.
        points: where it leads, in order.
        labels: a text for each point; beside the trail it stands where it changes.
        steps: the number of each point, such as its layer; 0, 1, 2, ... unless given.
        thin: one of many that belong together: a thin line that ends in a point.
    """

    name: str
    points: Sequence[Point]
    labels: Sequence[str] = ()
    steps: Sequence[float] = ()
    thin: bool = False

    def __post_init__(self) -> None:
        _check_lengths("trail", self.name, len(self.points), {"labels": self.labels, "steps": self.steps})

    @property
    def shown(self) -> list[int]:
        """The points that can be drawn."""
        return _finite(self.points)

    @property
    def numbers(self) -> list[float]:
        """The number of each point."""
        return list(self.steps or range(len(self.points)))

    def captions(self) -> dict[int, str]:
        """For each drawn point that begins a new label: the label, with the steps that it holds for."""
        shown = self.shown if self.labels else []
        starts = [k for k, i in enumerate(shown) if k == 0 or self.labels[i] != self.labels[shown[k - 1]]]
        texts: dict[int, str] = {}
        for start, end in pairwise([*starts, len(shown)]):
            first, last = self.numbers[shown[start]], self.numbers[shown[end - 1]]
            texts[shown[start]] = f"{self.labels[shown[start]]} ({first if first == last else f'{first}–{last}'})"
        return texts


@dataclass(frozen=True)
class Scene:
    """Points and trails in three dimensions.

    Attributes:
        title: what is drawn.
        clouds: points without an order, drawn below the trails.
        trails: points with an order.
        caption: one line that says what to see in it.
        settings: small print under the picture, such as sizes and seed.
        radius: radius of a faint wire sphere around the origin.
        axes: names of the three axes.
        order: what the steps of a trail count.
        view: elevation and azimuth of the camera in degrees; unless given, the trails lie in front.
    """

    title: str
    clouds: tuple[Cloud, ...]
    trails: tuple[Trail, ...]
    caption: str
    settings: str = ""
    radius: float | None = None
    axes: tuple[str, str, str] = ("x", "y", "z")
    order: str = "step"
    view: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not any(part.shown for part in self.parts):
            raise InputError(f"scene '{self.title}' has no points")

    @property
    def parts(self) -> list[Cloud | Trail]:
        """All clouds and trails."""
        return [*self.clouds, *self.trails]


@dataclass(frozen=True)
class Scenes:
    """Several scenes side by side under one title, turned together.

    Attributes:
        title: what they show together.
        scenes: the scenes, row by row, with one ``view`` and one ``order``.
        caption: one line that says what to see in them.
        settings: small print.
    """

    title: str
    scenes: Sequence[Scene]
    caption: str
    settings: str = ""

    def __post_init__(self) -> None:
        if not self.scenes:
            raise InputError(f"scenes '{self.title}' are empty")


@dataclass(frozen=True)
class Blocks:
    """The blocks of schemes as diagrams, x entering at the bottom.

    Attributes:
        title: what is drawn.
        records: for each sublayer of each stage: scheme, stage, sublayer, branch, carry, after (``schemes.block_records``).
        caption: one line that says what to see in it.
        settings: small print.
    """

    title: str
    records: Sequence[dict[str, Any]]
    caption: str
    settings: str = ""


@dataclass(frozen=True)
class Panels:
    """Several figures side by side under one title, each with its own.

    Attributes:
        title: what they show together.
        figures: the figures, row by row.
        caption: one line that says what to see in them.
        settings: small print.
        columns: how many stand in a row where there is room.
    """

    title: str
    figures: Sequence[Chart | HeatMap]
    caption: str
    settings: str = ""
    columns: int = 3

    def __post_init__(self) -> None:
        if not self.figures:
            raise InputError(f"panels '{self.title}' have no figure")


Figure = Chart | HeatMap | Scene | Scenes | Blocks | Panels


def drawable(values: Sequence[float], *, log: bool) -> list[float]:
    """The values, NaN for those that cannot be drawn on the axis."""
    return [float(v) if math.isfinite(v) and not (log and v <= 0) else math.nan for v in values]


def _finite(points: Sequence[Point]) -> list[int]:
    return [i for i, point in enumerate(points) if all(map(math.isfinite, point))]


def _check_lengths(kind: str, name: str, count: int, parts: dict[str, Sequence[object]]) -> None:
    for part, values in parts.items():
        if values and len(values) != count:
            raise InputError(f"{kind} '{name}' has {count} points and {len(values)} {part}")
