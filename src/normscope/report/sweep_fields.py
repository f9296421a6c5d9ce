"""A sweep as its figures are drawn: which of the fields that vary is an axis, a line or a panel, and the runs of a panel.

Nothing depends on the values of a field. Runs that differ only in their seed are one point.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from normscope.results.tables import Tables, needed_table, table_of

SEED = "seed"
ACROSS, UP = "dim", "rate"  # the axes of a map where these vary
NONE = "–"
_VALUES = 8  # of one field that the small print lists
_LONGEST = 60  # characters of values in the name of a file


@dataclass(frozen=True)
class Sweep:
    """What the figures of a sweep are drawn from.

    Attributes:
        kind: of its runs: train, ensemble, ...
        runs: a row for each run; varied fields are ordered categories of words.
        curves: the curves of all runs, or none.
        varied: the varied fields.
        axes: the numeric fields that final numbers are drawn over, across and up; one or none if no more vary.
        others: the other fields with more than one value, less the seed.
        settings: small print.
    """

    kind: str
    runs: pd.DataFrame
    curves: pd.DataFrame | None
    varied: tuple[str, ...]
    axes: tuple[str, ...]
    others: tuple[str, ...]
    settings: str

    @property
    def repeated(self) -> bool:
        """Whether seeds vary."""
        return SEED in self.varied and self.runs[SEED].nunique() > 1

    @property
    def results(self) -> list[str]:
        """The columns of results."""
        return [str(name) for name in self.runs if name not in ("name", "state", "error", *self.varied)]

    @property
    def numbers(self) -> list[str]:
        """The columns of results that are numbers."""
        return [name for name in self.results if is_number(self.runs[name])]


@dataclass(frozen=True)
class Panel:
    """The rows that share the values of some fields; ``file`` ends the names of its figures."""

    words: str
    file: str
    rows: pd.DataFrame

    def title(self, text: str) -> str:
        """What a figure of the panel is called."""
        return f"{text}: {self.words}" if self.words else text


def read_sweep(tables: Tables, configuration: Mapping[str, Any]) -> Sweep:
    """The sweep of these tables; its configuration names its kind, the fields that vary in order, and all points."""
    runs = needed_table(tables, "runs")
    varied = tuple(str(field) for field in configuration["varied"] if field in runs)
    shown = runs.assign(**{field: in_words(runs[field]) for field in varied})
    fields = [field for field in varied if field != SEED and shown[field].nunique() > 1]
    axes = _axes([field for field in fields if is_number(runs[field])])
    others = tuple(field for field in fields if field not in axes)
    settings = _settings(configuration, shown[list(varied)])
    return Sweep(str(configuration["kind"]), shown, table_of(tables, "curves"), varied, axes, others, settings)


def panels(rows: pd.DataFrame, fields: Sequence[str]) -> list[Panel]:
    """The rows for each combination of the fields' values, all of them if there is no field."""
    if not fields:
        return [Panel("", "", rows)]
    groups = {tuple(map(str, values)): group for values, group in rows.groupby(list(fields), observed=True)}
    files = [plain("-".join(values))[:_LONGEST].strip("-") for values in groups]
    if len(set(files)) < len(files) or not all(files):
        files = [f"{file}-{number}".lstrip("-") for number, file in enumerate(files, 1)]
    words = [", ".join(f"{field} {value}" for field, value in zip(fields, values, strict=True)) for values in groups]
    return [Panel(text, f"-{file}", group) for text, file, group in zip(words, files, groups.values(), strict=True)]


def plain(text: str) -> str:
    """The text as the name of a file and of an anchor; 1e+08 is 1e08."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=\d)e\+(?=\d)", "e", text.lower())).strip("-")


def in_words(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Values as ordered categories: numbers by size, others as they come."""
    words = column.map(word)
    order = words[column.sort_values(kind="stable").index] if is_number(column) else words
    return pd.Series(pd.Categorical(words, list(dict.fromkeys(order)), ordered=True), column.index)


def words_of(column: "pd.Series[Any]") -> list[str]:
    """The values of a column of categories, in their order."""
    return [str(value) for value in column.cat.categories]


def word(value: Any) -> str:
    """A value as in a sweep's file, with all its digits; – where there is none."""
    if isinstance(value, list | tuple | np.ndarray):
        return ",".join(map(word, value))
    if value is None or value is pd.NA or value != value:
        return NONE
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(float(value))
    return str(value)


def is_number(column: "pd.Series[Any]") -> bool:
    """Whether a column holds numbers."""
    return is_numeric_dtype(column) and not is_bool_dtype(column)


def _axes(fields: list[str]) -> tuple[str, ...]:
    """Of numeric fields the one across and the one up: width and rate if they vary, else the first."""
    across = sorted(fields, key=lambda field: (field != ACROSS, field == UP))[:1]
    up = sorted((field for field in fields if field not in across), key=lambda field: field != UP)[:1]
    return (*across, *up)


def _settings(configuration: Mapping[str, Any], varied: pd.DataFrame) -> str:
    """The kind, what all points have in common, and what varies."""
    points = [point["values"] for point in configuration.get("points", ())]
    shared = points[0].items() if points else ()
    fixed = [(key, value) for key, value in shared if key not in varied and all(point.get(key) == value for point in points)]
    words = [f"{key} {word(value)}" for key, value in fixed]
    return "; ".join([str(configuration["kind"]), *words, *(f"{field} {_listed(words_of(varied[field]))}" for field in varied)])


def _listed(words: list[str]) -> str:
    more = len(words) - _VALUES
    return ", ".join(words[:_VALUES]) + (f" and {more} more" if more > 0 else "")
