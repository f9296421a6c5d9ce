"""Tables that grow: segments of rows, each whole or absent, merged from time to time so that a kill loses and repeats nothing.

    segments/0001-000001-000016/     layers.parquet, heads.parquet, ...: what the appends 1 to 16 of session 1 wrote
    segments/0001-000017-000017/     the same of append 17

A segment is written beside its final name and renamed. One that lies within the range of another was merged into it: readers
ignore it, whether or not it is still there. A process that resumes the run writes a new session: from its first step on, its
rows take the place of those of earlier sessions.
"""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_integer_dtype

from normscope.errors import InputError
from normscope.machine.files import regular_file, sync
from normscope.machine.memory import require_memory

Arrow = Any  # a table of pyarrow, which is imported where it is used
FOLDER = "segments"
ORDER = "step"  # the column by which sessions follow each other
_NAME = re.compile(r"(\d{4,})-(\d{6,})-(\d{6,})")
_PARTIAL = ".partial"
_MERGED = 16  # segments of one size become one of the next
_CELL = 24  # bytes of a table's cell in memory, while it is read
_ATTEMPTS = 20  # at reading while another process merges


@dataclass(frozen=True, order=True)
class Segment:
    """The appends ``first`` to ``last`` of a session; ``folder`` is the run folder."""

    folder: Path
    session: int
    first: int
    last: int

    @property
    def path(self) -> Path:
        """Where its tables are."""
        return self.folder / FOLDER / f"{self.session:04d}-{self.first:06d}-{self.last:06d}"

    @property
    def tables(self) -> list[str]:
        """The names of its tables."""
        return sorted(path.stem for path in self.path.glob("*.parquet"))

    def covers(self, other: "Segment") -> bool:
        """Whether another one was merged into it."""
        return self != other and self.session == other.session and self.first <= other.first and other.last <= self.last

    def write(self, tables: Mapping[str, Arrow]) -> None:
        """Write its tables, each as one row group, whole even if the process or the machine dies meanwhile."""
        import pyarrow.parquet as pq

        partial = self.path.with_name(f"{_PARTIAL}-{self.path.name}")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            for name, table in tables.items():
                pq.write_table(table, partial / f"{name}.parquet", row_group_size=max(1, table.num_rows))
                sync(partial / f"{name}.parquet")
            sync(partial)
            partial.rename(self.path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        with suppress(OSError):  # it is there, and must not be written a second time
            sync(self.path.parent)


class Session:
    """The segments that one process writes, in a run folder that nobody else writes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / FOLDER).mkdir(exist_ok=True)
        for left in (folder / FOLDER).glob(f"{_PARTIAL}-*"):
            shutil.rmtree(left, ignore_errors=True)
        _remove_merged(folder)
        self.number = 1 + max((segment.session for segment in segments_of(folder)), default=0)
        self.appended = 0

    def append(self, tables: Mapping[str, pd.DataFrame]) -> None:
        """Add rows; every 16th time the last segments become one, every 256th time larger ones, and so on."""
        import pyarrow as pa

        place = self.appended + 1
        rows = {name: pa.Table.from_pandas(table, preserve_index=False) for name, table in tables.items() if len(table)}
        Segment(self.folder, self.number, place, place).write(rows)
        self.appended = place
        size = 1
        while place % (size * _MERGED) == 0:
            size *= _MERGED
        if size > 1:
            self.merge(place - size + 1)

    def merge(self, first: int = 1) -> None:
        """Make one segment of those from an append on, if the disk has room for it: the rows are safe in any case."""
        with suppress(OSError, InputError):
            self._merge(first)

    def _merge(self, first: int) -> None:
        merged = [segment for segment in segments_of(self.folder) if segment.session == self.number and segment.first >= first]
        if len(merged) > 1:
            Segment(self.folder, self.number, first, self.appended).write(_joined(merged))
            _remove_merged(self.folder)


def segments_of(folder: Path) -> tuple[Segment, ...]:
    """The segments of a run folder in order, without those that were merged into others."""
    every = _all_segments(folder)
    return tuple(segment for segment in every if not any(other.covers(segment) for other in every))


def _all_segments(folder: Path) -> list[Segment]:
    try:
        names = os.listdir(folder / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = (_NAME.fullmatch(name) for name in names)
    return sorted(Segment(folder, *map(int, match.groups())) for match in matches if match)


def _remove_merged(folder: Path) -> None:
    """Remove the segments that were merged into others."""
    for segment in set(_all_segments(folder)) - set(segments_of(folder)):
        shutil.rmtree(segment.path, ignore_errors=True)


def has_segments(folder: Path) -> bool:
    """Whether a run folder grows, or grew."""
    return (folder / FOLDER).is_dir()


def segment_tables(folder: Path) -> list[str]:
    """The names of the tables of a run folder that grows."""
    return sorted({name for segment in segments_of(folder) for name in segment.tables})


def read_segments(folder: Path, names: Iterable[str] | None = None) -> dict[str, pd.DataFrame]:
    """The tables of a run folder that grows, or some of them, as they are at one moment."""
    wanted = None if names is None else set(names)

    def read(listed: tuple[Segment, ...]) -> dict[str, pd.DataFrame]:
        groups = [[segment for segment in listed if segment.session == n] for n in sorted({s.session for s in listed})]
        return _in_sequence([_frames(_joined(group, wanted)) for group in groups])

    return _at_one_moment(folder, read)


def read_appended(folder: Path, session: int, after: int) -> dict[str, pd.DataFrame]:
    """The rows of a session after one of its appends; those of earlier appends may come again, in a segment with later ones."""

    def read(listed: tuple[Segment, ...]) -> dict[str, pd.DataFrame]:
        return _frames(_joined([segment for segment in listed if segment.session == session and segment.last > after]))

    return _at_one_moment(folder, read)


def _at_one_moment(folder: Path, read: Callable[[tuple[Segment, ...]], dict[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """What is read of the segments, all of which are there while they are read."""
    for _ in range(_ATTEMPTS):
        listed = segments_of(folder)
        try:
            tables = read(listed)
        except InputError:
            if set(listed) <= set(segments_of(folder)):
                raise
            continue
        if set(listed) <= set(segments_of(folder)):  # otherwise some were merged, and removed, while they were read
            return tables
    raise InputError(f"the run folder '{folder}' changes too fast to be read; try again")


def _joined(group: Sequence[Segment], wanted: set[str] | None = None) -> dict[str, Arrow]:
    """The rows of all segments by table; a column that some of them lack is empty there."""
    import pyarrow as pa

    pieces: dict[str, list[Arrow]] = {}
    for segment in group:
        for name in segment.tables:
            if wanted is None or name in wanted:
                pieces.setdefault(name, []).append(read_arrow(segment.path / f"{name}.parquet"))
    try:
        return {name: pa.concat_tables(tables, promote_options="permissive") for name, tables in pieces.items()}
    except pa.ArrowException as error:
        raise InputError(f"the tables in '{group[0].path.parent}' do not fit together: {error}") from error


def _frames(tables: Mapping[str, Arrow]) -> dict[str, pd.DataFrame]:
    frames = {name: table.to_pandas() for name, table in tables.items()}
    for name, frame in frames.items():
        if ORDER not in frame or not is_integer_dtype(frame[ORDER]):
            raise InputError(f"the table '{name}' has no column '{ORDER}' of whole numbers: nothing of normscope wrote it")
    return frames


def _in_sequence(sessions: list[dict[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """One table of those of all sessions: each gives way to the next from its first step on."""
    pieces: dict[str, list[pd.DataFrame]] = {}
    end = math.inf
    for tables in reversed(sessions):
        for name, table in tables.items():
            pieces.setdefault(name, []).insert(0, table[table[ORDER] < end])
        end = min([end, *(int(table[ORDER].min()) for table in tables.values() if len(table))])
    return {name: pd.concat(tables, ignore_index=True) for name, tables in sorted(pieces.items())}


def read_arrow(path: Path) -> Arrow:
    """A Parquet table; a damaged one, and one that does not fit into memory, are refused."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    regular_file(path, "table")
    try:
        file = pq.ParquetFile(path)
        require_memory({f"the table '{path}'": _CELL * file.metadata.num_rows * file.metadata.num_columns})
        return file.read()
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the table '{path}' is damaged: {' '.join(str(error).split())[:200]}") from error
