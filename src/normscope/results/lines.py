"""A line chart in words and numbers, and what both of its drawings share: looks, gaps and bands.

A line has its look from the place of its name among the chart's names, so charts whose lines come in the same order
give the same name the same colour, dash and marker.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from normscope.errors import InputError

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito less its yellow
# Four dashes times four markers tell sixteen lines apart without colour; each is named as matplotlib and plotly do.
_DASHES = (("-", "solid"), ((0, (5, 2)), "dash"), ((0, (5, 1.6, 1.2, 1.6)), "dashdot"), ((0, (1.2, 1.6)), "dot"))
_MARKERS = (("", ""), ("o", "circle"), ("s", "square"), ("^", "triangle-up"))


@dataclass(frozen=True)
class Line:
    """A named line, with a band from ``low`` to ``high`` around it if both are given; gaps where not finite.

    A thin line is solid and light whatever its look: one of many that belong together. An arrow is solid too, with a
    head at its end.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    thin: bool = False
    arrow: bool = False

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
        log_y: a logarithmic vertical axis, likewise.
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
class Look:
    """What tells one line from the others; dash and marker are given for matplotlib and for plotly."""

    index: int

    @property
    def colour(self) -> str:
        """The colour, as ``#rrggbb``."""
        return _COLOURS[self.index % len(_COLOURS)]

    @property
    def dash(self) -> tuple[Any, str]:
        """The dashes."""
        return _DASHES[self.index % len(_DASHES)]

    @property
    def marker(self) -> tuple[str, str]:
        """The marker; an empty text means none."""
        return _MARKERS[self.index // len(_DASHES) % len(_MARKERS)]


@dataclass(frozen=True)
class Band:
    """A piece of a band without gaps."""

    x: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Trace:
    """A line as it is drawn: NaN where nothing can be drawn, and of several lines with one name the first is named."""

    name: str
    look: Look
    first: bool
    x: list[float]
    y: list[float]
    bands: list[Band]
    thin: bool
    arrow: bool

    @property
    def lonely(self) -> tuple[list[float], list[float]]:
        """The points between two gaps, which no line would show."""
        drawn = [False, *(math.isfinite(x + y) for x, y in zip(self.x, self.y, strict=True)), False]
        alone = [i for i in range(len(self.x)) if drawn[i : i + 3] == [False, True, False]]
        return [self.x[i] for i in alone], [self.y[i] for i in alone]


def traces(chart: Chart) -> list[Trace]:
    """The chart's lines, ready to be drawn."""
    names = list(dict.fromkeys(line.name for line in chart.lines))
    floor = _lowest_positive(chart.lines) if chart.log_y else -math.inf
    drawn: list[Trace] = []
    for line in chart.lines:
        x, y = drawable(line.x, log=chart.log_x), drawable(line.y, log=chart.log_y)
        first = all(trace.name != line.name for trace in drawn)
        drawn.append(Trace(line.name, Look(names.index(line.name)), first, x, y, _bands(x, line, floor), line.thin, line.arrow))
    return drawn


def drawable(values: Sequence[float], *, log: bool) -> list[float]:
    """The values, NaN for those that cannot be drawn."""
    return [float(v) if math.isfinite(v) and not (log and v <= 0) else math.nan for v in values]


def _lowest_positive(lines: tuple[Line, ...]) -> float:
    values = (v for line in lines for column in (line.y, line.low, line.high) for v in column or ())
    return min((float(v) for v in values if v > 0 and math.isfinite(v)), default=1.0)


def _bands(x: list[float], line: Line, floor: float) -> list[Band]:
    """The band in pieces; on a logarithmic axis one that reaches to zero or below ends at the lowest value shown."""
    if line.low is None or line.high is None:
        return []
    lows = (low if math.isnan(low) else max(low, floor) for low in line.low)
    points = zip(x, lows, line.high, strict=True)
    pieces = groupby(points, lambda point: all(map(math.isfinite, point)) and point[2] >= floor)
    return [Band(*zip(*piece, strict=True)) for whole, piece in pieces if whole]
