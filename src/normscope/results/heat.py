"""A heat map in words and numbers, and what both of its drawings share: empty cells and the range of the colours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from normscope.errors import InputError
from normscope.results.lines import drawable


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

    def __post_init__(self) -> None:
        if not self.x_names or not self.y_names:
            raise InputError(f"heat map '{self.title}' has no cells")
        if len(self.values) != len(self.y_names) or any(len(row) != len(self.x_names) for row in self.values):
            raise InputError(f"heat map '{self.title}' needs {len(self.y_names)} rows of {len(self.x_names)} values")


def cells(heat: HeatMap) -> list[list[float]]:
    """The values, NaN where a cell stays empty."""
    return [drawable(row, log=heat.log) for row in heat.values]


def colour_limits(heat: HeatMap) -> tuple[float, float]:
    """Values of the first and last colour, never the same."""
    if heat.limits:
        return heat.limits
    filled = [value for row in cells(heat) for value in row if not math.isnan(value)]
    if heat.log:
        low, high = min(filled, default=1.0), max(filled, default=1.0)
        return (low, high) if low < high else (low / 2, high * 2)
    low, high = min([0.0, *filled]), max([0.0, *filled])
    return (low, high) if low < high else (low, low + 1)


def label_step(cell: float, label: float) -> int:
    """Every how many cells a label stands, if a cell and a label take that much room."""
    return next((step for step in (1, 2, 5, 10, 20, 50) if step * cell >= label), 100)
