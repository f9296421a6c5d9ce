"""A watched training for the page: layers × time in blocks of probes, read as the run grows and sent as far as it is new.

Blocks hold 1, 2, 4, ... probes: once there are too many, two neighbours become one. Memory and answers stay small however long
a run is, and every number is the exact mean, or the largest, of its block.
"""

import base64
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.types import is_numeric_dtype

from normscope.results.tables import plain_rows
from normscope.runs import FINISHED, fingerprint, growth, has_segments, open_run, read_appended, segments_of
from normscope.watch.sections import HEADS, MAPS, ROWS_OF, LayerMap, check_columns, curve_names, curve_words

Name = tuple[Any, ...]  # of a row: a layer, a layer and a head, a norm
Floats = npt.NDArray[np.float64]
BLOCKS = 512  # of a run that is served; half as many at least, once there are so many probes
EXPORTED = 128  # of a run in an exported page
_EXPORTED_HEADS = 200_000  # numbers of all heads of a run in an exported page
_ROWS = 200  # of a map: norms and learned scales may be many
_STATISTICS = ("mean", "least", "largest")
_ALARMS = 500  # that are sent, the last of them


class Blocks:
    """Columns of a table over time: for every block of probes and every row name the sum, count and extremes of what is finite.

    Attributes:
        columns: the names of the columns.
        names: the rows, in the order in which they appeared.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns, self.names = tuple(columns), list[Name]()
        self._places: dict[Name, int] = {}
        self._numbers = _empty(0, 0, len(columns))

    def add(self, blocks: npt.NDArray[np.int64], rows: pd.DataFrame, values: Floats) -> None:
        """Add rows: the block of each, its name as the columns of a table, and its values (rows × columns)."""
        codes: Any = np.zeros(len(values), int)
        names: list[Name] = [()]
        if len(rows.columns):
            codes = rows.groupby([*rows.columns], sort=False, dropna=False).ngroup().to_numpy()
            names = list(rows.drop_duplicates().itertuples(index=False, name=None))
        for name in names:
            if name not in self._places:
                self._places[name] = len(self.names)
                self.names.append(name)
        self._grow(int(blocks.max(initial=-1)) + 1)
        at = blocks, np.array([self._places[name] for name in names])[codes]
        finite = np.isfinite(values)
        total, count, least, largest = self._numbers
        np.add.at(total, at, np.where(finite, values, 0.0))
        np.add.at(count, at, finite)
        np.minimum.at(least, at, np.where(finite, values, math.inf))
        np.maximum.at(largest, at, np.where(finite, values, -math.inf))

    def halve(self) -> None:
        """Make one block of every two."""
        odd = self._numbers.shape[1] % 2
        self._grow(self._numbers.shape[1] + odd)
        total, count, least, largest = (np.stack([each[::2], each[1::2]]) for each in self._numbers)
        self._numbers = np.stack([total.sum(0), count.sum(0), least.min(0), largest.max(0)])

    def values(self, column: str, what: str = "mean", first: int = 0, groups: Sequence[Sequence[int]] | None = None) -> Floats:
        """``mean``, ``least`` or ``largest`` of a column by block and row, NaN where there is none; rows can be taken together.

        Returns:
            blocks × rows, or blocks × groups of rows
        """
        total, count, least, largest = self._numbers[:, first:, :, self.columns.index(column)]
        chosen = [[place] for place in range(len(self.names))] if groups is None else groups
        order = [place for rows in chosen for place in rows]
        starts = np.cumsum([0, *map(len, chosen[:-1])])
        counts = np.add.reduceat(count[:, order], starts, axis=1)
        if what == "mean":
            sums = np.add.reduceat(total[:, order], starts, axis=1)
            means: Floats = np.divide(sums, counts, out=np.full_like(sums, math.nan), where=counts > 0)
            return means
        extreme = (
            np.minimum.reduceat(least[:, order], starts, 1)
            if what == "least"
            else np.maximum.reduceat(largest[:, order], starts, 1)
        )
        return np.where(counts > 0, extreme, math.nan)

    def measured(self, column: str) -> list[bool]:
        """Whether a column has numbers, for every row."""
        return [bool(row.any()) for row in self._numbers[1, :, :, self.columns.index(column)].T]

    def _grow(self, blocks: int) -> None:
        _, had, rows, columns = self._numbers.shape
        if blocks > had or len(self.names) > rows:
            grown = _empty(max(blocks, had), max(len(self.names), rows), columns)
            grown[:, :had, :rows] = self._numbers
            self._numbers = grown


def _empty(blocks: int, rows: int, columns: int) -> Floats:
    """Sums, counts, least and largest of nothing: 4 × blocks × rows × columns."""
    numbers = np.zeros((4, blocks, rows, columns))
    numbers[2], numbers[3] = math.inf, -math.inf
    return numbers


class WatchedTraining:
    """The numbers of a watched run, which are read as it grows; ``most`` is how many blocks of time it has at most."""

    def __init__(self, folder: Path, most: int = BLOCKS) -> None:
        self.folder, self.most = folder, most
        self._lock = threading.Lock()
        self._read: tuple[int, int] | None = None  # session and append up to which rows were read
        self._session: tuple[int, ...] = ()
        self._clear()

    def _clear(self) -> None:
        self.block, self.probes, self.steps = 1, 0, list[int]()
        self.tables: dict[str, Blocks] = {}
        self.alarms: list[dict[str, Any]] = []

    def refresh(self) -> None:
        """Read what is new: rows of the last session after those that were read, or all if that or the run is another one."""
        if not has_segments(self.folder):
            if self._read is None:
                self._add(open_run(self.folder).all_tables())
                self._read = (0, 0)
            return
        listed = segments_of(self.folder)
        sessions = ((self.folder / "segments").stat().st_ino, *sorted({segment.session for segment in listed}))
        last = max(((segment.session, segment.last) for segment in listed), default=(0, 0))
        if self._read is None or sessions != self._session or last < self._read:
            tables = open_run(self.folder).all_tables()
            self._clear()
            self._add(tables)
        elif last > self._read:
            session, after = self._read
            self._add(read_appended(self.folder, session, after))
        self._read, self._session = last, sessions

    def _add(self, tables: Mapping[str, pd.DataFrame]) -> None:
        """Add the rows of later steps than the last."""
        check_columns(tables)
        newer = {name: table[table["step"] > self.steps[-1]] if self.steps else table for name, table in tables.items()}
        if "steps" not in newer or newer["steps"].empty:
            return
        steps = np.unique(newer["steps"]["step"].to_numpy(dtype=np.int64))
        first = self.probes
        self.probes += len(steps)
        while self.probes > self.most * self.block:
            self._halve()
        places = (first + np.arange(len(steps))) // self.block
        for place, step in zip(places.tolist(), steps.tolist(), strict=True):
            self.steps[place:] = [step]
        for name in ("steps", *ROWS_OF):
            if name in newer and not newer[name].empty:
                table = newer[name]
                at = places[np.searchsorted(steps, table["step"].to_numpy()).clip(0, len(steps) - 1)]
                self._add_table(name, table, at)
        self.alarms += _alarms(newer["alarms"]) if "alarms" in newer else []

    def _add_table(self, name: str, table: pd.DataFrame, blocks: npt.NDArray[np.int64]) -> None:
        if name not in self.tables:
            columns = curve_names(table) if name == "steps" else [each.column for each in MAPS if each.table == name]
            self.tables[name] = Blocks([column for column in columns if column in table and is_numeric_dtype(table[column])])
        keys = {"steps": (), "heads": ("layer", "head")}.get(name, ROWS_OF.get(name, ()))
        kept = self.tables[name]
        values = np.full((len(table), len(kept.columns)), math.nan)
        for place, column in enumerate(kept.columns):
            if column in table:
                values[:, place] = table[column].to_numpy(dtype=float, na_value=math.nan)
        kept.add(blocks, table[[*keys]], values)

    def _halve(self) -> None:
        self.block *= 2
        self.steps = [self.steps[min(place + 1, len(self.steps) - 1)] for place in range(0, len(self.steps), 2)]
        for table in self.tables.values():
            table.halve()

    @property
    def epoch(self) -> str:
        """The same as long as later blocks, or later rows of the last one, are all that is added."""
        rows = [(each.name, *self._rows(each)) for each in MAPS]
        return fingerprint({"session": self._session, "block": self.block, "rows": rows, "curves": self._curve_names()})

    def data(self, known: str = "", after: int = 0, alarms: int = 0) -> dict[str, Any]:
        """What the page shows, from a block and an alarm on where the page knows what was before.

        Args:
            known: the epoch of what the page has; of another one everything is sent.
            after: the first block that is sent; the last that the page has may have grown.
            alarms: how many alarms the page has.
        """
        with self._lock:
            self.refresh()
            epoch = self.epoch
            same = known == epoch
            first, told = (min(after, len(self.steps)), min(alarms, len(self.alarms))) if same else (0, 0)
            told = max(told, len(self.alarms) - _ALARMS)
            return {
                "state": growth(self.folder) if has_segments(self.folder) else FINISHED,
                "epoch": epoch,
                "block": self.block,
                "probes": self.probes,
                "first": first,
                "steps": self.steps[first:],
                "curves": self._curves(first),
                "maps": [data for each in MAPS if (data := self._map(each, first)) is not None],
                "alarms": self.alarms[told:],
                "alarmsBefore": told,
            }

    def heads(self, layer: int) -> dict[str, Any]:
        """The heads of a layer over time, every quantity of them."""
        with self._lock:
            self.refresh()
            return {"epoch": self.epoch, "steps": list(self.steps), **self._heads(layer)}

    def exported(self) -> dict[str, Any]:
        """Everything, with all heads, for a page without a server; heads are thinned further where they are many."""
        data = self.data()
        with self._lock:
            table = self.tables.get("heads")
            together, steps = 1, list(self.steps)
            while table is not None and len(steps) * len(table.names) * len(table.columns) > _EXPORTED_HEADS and len(steps) > 2:
                table.halve()
                steps = [steps[min(place + 1, len(steps) - 1)] for place in range(0, len(steps), 2)]
                together *= 2
            layers = {str(layer): {"steps": steps, **self._heads(layer)} for layer in self._layers_with_heads()}
        return {**data, "layers": layers, "headBlock": self.block * together}

    def _curve_names(self) -> list[str]:
        table = self.tables.get("steps")
        return [] if table is None else [name for name in table.columns if any(table.measured(name))]

    def _curves(self, first: int) -> list[dict[str, Any]]:
        curves = []
        for name in self._curve_names():
            title, label, _ = curve_words(name)
            numbers = {what: _plain(self.tables["steps"].values(name, what, first)[:, 0]) for what in _STATISTICS}
            curves.append({"name": name, "title": title, "label": label, **numbers})
        return curves

    def _rows(self, each: LayerMap) -> dict[Name, list[int]]:
        """The rows of a map that have numbers, by name: which rows of the table they take together."""
        table = self.tables.get(each.table)
        if table is None or each.column not in table.columns:
            return {}
        filled = table.measured(each.column)
        rows = _grouped(table.names, len(ROWS_OF[each.table]))
        return dict([(name, places) for name, places in rows.items() if any(filled[place] for place in places)][:_ROWS])

    def _map(self, each: LayerMap, first: int) -> dict[str, Any] | None:
        """A map with its words; None without a number. Values are blocks × rows."""
        rows = self._rows(each)
        if not rows:
            return None
        texts = [" ".join(map(str, name)) for name in rows]
        ending = max(name[0] for name in self.tables["layers"].names) if each.table == "layers" else None
        if [*rows][-1] == (ending,):
            texts[-1] = f"{texts[-1]} (end)"  # the states after the last layer
        values = self.tables[each.table].values(each.column, "largest" if each.largest else "mean", first, [*rows.values()])
        return {
            "name": each.name, "table": each.table, "column": each.column, "title": each.title, "label": each.label,
            "caption": each.caption, "largest": each.largest, "limits": each.limits, "rows": texts,
            "layers": [int(name[0]) if isinstance(name[0], int | np.integer) else None for name in rows],
            "values": _encoded(values),
        }  # fmt: skip

    def _layers_with_heads(self) -> list[int]:
        table = self.tables.get("heads")
        return [] if table is None else sorted({int(name[0]) for name in table.names})

    def _heads(self, layer: int) -> dict[str, Any]:
        """The heads of a layer; values of a quantity are blocks × heads."""
        table = self.tables.get("heads")
        names = [] if table is None else sorted(name for name in table.names if name[0] == layer)
        if table is None or not names:
            return {"heads": [], "values": {}}
        rows = [[table.names.index(name)] for name in names]
        values = {
            each.column: _encoded(table.values(each.column, "largest" if each.largest else "mean", 0, rows))
            for each in HEADS
            if each.column in table.columns
        }
        return {"heads": [int(name[1]) for name in names], "values": values}


def _grouped(names: Sequence[Name], keys: int) -> dict[Name, list[int]]:
    """The places of all rows by the first keys of their names; numbers in order, texts as they came."""
    rows: dict[Name, list[int]] = {}
    for place, name in enumerate(names):
        rows.setdefault(name[:keys], []).append(place)
    ordered = sorted(rows) if all(isinstance(name[0], int | np.integer) for name in rows) else list(rows)
    return {name: rows[name] for name in ordered}


def _alarms(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Alarms as plain values; a number that is not finite is none."""
    return [{**row, "number": _plain([row["number"]])[0]} for row in plain_rows(table)]


def _plain(values: Any) -> list[float | None]:
    """For JSON, which has no NaN."""
    return [float(value) if value is not None and math.isfinite(value) else None for value in values]


def _encoded(values: Floats) -> str:
    """Little-endian float32 as base64, which keeps NaN and is shorter than digits."""
    with np.errstate(over="ignore"):
        return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")
