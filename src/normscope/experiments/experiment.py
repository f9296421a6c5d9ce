"""An experiment: frozen settings and ``run(progress) -> Result``; its function, command and sweep kind follow from them."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from normscope.core.devices import is_elsewhere
from normscope.errors import InputError, did_you_mean, explain, require_64_bits
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.settings import Device, Seed, setting, takes_paths
from normscope.machine.memory import require_memory
from normscope.measures.base import Quantity
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows
from normscope.runs import fingerprint, fresh_path, resumable_path
from normscope.schemes.files import scheme_files, scheme_values
from normscope.schemes.scheme import Scheme

if TYPE_CHECKING:
    from normscope.experiments.result import Result

Shown = PageTable | str | Any  # or a renderable of rich
_SCHEMES = {"scheme", "schemes"}
_NAMED = {*_SCHEMES, "recipe", "preset"}  # settings that take names, and paths that look like paths
_OF_MODELS = ("dtype", "stream", "blocks", "bos", "trust_remote_code")  # how models are opened, whatever is measured
_MOST_LINES = 24  # of a table that the outcome of a run takes numbers from


@dataclass(frozen=True)
class Outcome:
    """What a run came to: plain numbers by name, its curves, and why it cannot be trusted, if so."""

    numbers: dict[str, Any]
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    note: str | None = None


class Message(str):
    """A line of a result for a terminal that names settings, which the command line shows as options."""


def _texts(value: Any) -> Iterator[str]:
    """The texts of a given value that may be paths: of lists and tables, between commas, and of what has a path or a name."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield from dict.fromkeys((value, *(part.strip() for part in value.split(","))))
    elif value is not None:
        named = value if isinstance(value, Path) else getattr(value, "path", None) or getattr(value, "name", None)
        if isinstance(named, str | Path):
            yield str(named)


class Experiment(BaseModel):
    """What is computed, with everything that it depends on.

    Attributes:
        command: its name: of the Python function, the command, the sweep kind, and in ``run.json``.
        usage: commands to try, for ``--help``.
        resumable: whether an interrupted run continues from what it has saved.
        grows: whether its folder holds the work itself and grows with it, as that of a sweep does.
        variadic: the field that takes all positional arguments of the Python function and the command, if one does.
        quantities: the curves and numbers of its tables by which runs are compared.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True)
    command: ClassVar[str]
    title: ClassVar[str]
    usage: ClassVar[tuple[str, ...]] = ()
    resumable: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    variadic: ClassVar[str] = ""
    quantities: ClassVar[tuple[Quantity, ...]] = ()

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise InputError(_explain(type(self), error)) from None
        self._given = given

    @model_validator(mode="after")
    def _countable(self) -> Self:
        require_64_bits(dict(self))
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> "Experiment":
        """Refuse sizes that this machine cannot hold, before anything else is done with them."""
        if not is_elsewhere():
            require_memory(self.memory(), getattr(self, "device", "cpu"))
        return self

    def memory(self) -> dict[str, float]:
        """Bytes that the run needs at most, about, by the settings that they follow from."""
        return {}

    def begin(self, arguments: list[str]) -> str | int | None:
        """What the command does instead of running: a text to print, or the exit status of processes it launched."""
        return None

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> "Result":
        """Compute the result; a resumable experiment saves its unfinished work beside ``folder``."""
        raise NotImplementedError

    @classmethod
    def sections(cls, result: "Result") -> Iterable[Section]:
        """The result in sections: text, findings, tables and figures, from its tables alone."""
        raise NotImplementedError

    @classmethod
    def terminal(cls, result: "Result") -> Iterator[Shown]:
        """What a terminal shows: tables and lines."""
        raise NotImplementedError

    @classmethod
    def exit_code(cls, result: "Result") -> int:
        """The exit status of the command, once the result is printed."""
        return 0

    @classmethod
    def records(cls, result: "Result") -> list[dict[str, Any]]:
        """What ``--json`` prints."""
        return [{"table": name, **row} for name, table in result.tables.items() for row in plain_rows(table)]

    @classmethod
    def facts(cls, result: "Result") -> list[tuple[str, str]]:
        """Key figures for the top of the page: a label and a value each."""
        return []

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """The settings in the order in which they are documented: those that experiments share come last."""
        common = (*Seeded.model_fields, *_OF_MODELS)
        return dict(sorted(cls.model_fields.items(), key=lambda item: item[0] in common))

    @property
    def inputs(self) -> Iterator[Path]:
        """The files and folders that are read: what the settings name, as far as it exists.

        A recipe, a scheme or another word is a path only with a dot or a slash; a model, a corpus or a text without, too.
        """
        for name, about in self.fields().items():
            for text in _texts(self._given.get(name)):
                bare = takes_paths(about) and name not in _NAMED
                if (bare or "/" in text or "." in text) and os.path.exists(path := os.path.expanduser(text)):
                    yield Path(path)
                    yield from scheme_files(path) if name in _SCHEMES else ()

    @property
    def record(self) -> dict[str, Any]:
        """The settings as plain values: two runs with the same record are the same."""
        return {name: _plain(getattr(self, name)) for name in self.fields()}

    @property
    def summary(self) -> str:
        """The settings in one line for people."""
        return ""

    @property
    def saved(self) -> bool:
        """Whether the command saves the result in a run folder."""
        return True

    @property
    def preview(self) -> bool:
        """Whether the command only shows what it would save: a folder may be named, and is left as it is."""
        return False

    def reserve(self, folder: Path) -> AbstractContextManager[None]:
        """Keeps other processes out of the folder from the start until the result is saved."""
        return nullcontext()

    def default_folder(self) -> Path:
        """Where the command puts the run by default: a free name, or where the same run was interrupted."""
        name = f"runs/{self.folder_name}"
        return Path(resumable_path(name, self.record) if self.resumable else fresh_path(name))

    @classmethod
    def from_fields(cls, values: Mapping[str, Any], device: str) -> "Experiment":
        """The experiment of a sweep's fields; an unknown field raises ``InputError``."""
        return cls(**{**({"device": device} if "device" in cls.model_fields else {}), **values})

    @classmethod
    def sweep_fields(cls) -> tuple[str, ...]:
        """The fields that a sweep may set; whether code of a model is run is decided by a user, never by a file."""
        return tuple(name for name in cls.fields() if name not in ("device", "trust_remote_code"))

    @property
    def field_values(self) -> dict[str, Any]:
        """The fields of a sweep with their defaults resolved, schemes by their names."""
        return {name: _named(getattr(self, name)) for name in self.sweep_fields()}

    @property
    def parts(self) -> int:
        """How many independent parts can be computed anywhere before ``run`` merges them."""
        return 0

    def missing(self, folder: Path) -> list[int]:
        """The parts of the run that is to end up in ``folder`` that are not saved yet."""
        return []

    def run_part(self, part: int, folder: Path) -> None:
        """Compute one part and save it beside ``folder``."""
        raise IndexError(f"no part {part}: {self.command} is one piece")

    def fits(self, configuration: Mapping[str, Any]) -> bool:
        """Whether a complete run of this record is still valid: its input files are the same now as they were then."""
        return True

    @property
    def shape(self) -> str:
        """A text that two runs share only if they take the same time."""
        return fingerprint({**self.record, "seed": None})

    @property
    def work(self) -> float:
        """About how many multiplications the run takes, to compare it with others of its kind; 0 where that is not known."""
        return 0.0

    def seconds(self, progress: Progress = SILENT) -> float:
        """How long the run takes on this device: timed as a whole, unless a subclass has steps to extrapolate from."""
        started = time.monotonic()
        self.run(progress)
        return time.monotonic() - started

    @classmethod
    def outcome(cls, result: "Result") -> "Outcome":
        """What the run came to, for the table of a sweep: the last numbers of every table, by the texts in their rows."""
        numbers: dict[str, Any] = {}
        for table in result.tables.values():
            numbers = {**last_numbers(table), **numbers}
        return Outcome(numbers, note="; ".join(result.problems) or None)

    @property
    def folder_name(self) -> str:
        """The name of its run folder under ``runs``."""
        return self.command


class Seeded(Experiment):
    """An experiment on a device, with a seed."""

    seed: Seed = setting(0, "Seed of everything random.")
    device: Device = setting("auto", "cpu, cuda, or auto: a GPU if there is one.")


def last_numbers(table: pd.DataFrame) -> dict[str, float]:
    """The numbers in the last row of every line of a table: ``cosine_pre`` of the last row whose texts are "pre"."""
    columns = {str(name): table[name] for name in table}
    numeric = [name for name, column in columns.items() if is_numeric_dtype(column) and not is_bool_dtype(column)]
    texts = [name for name, column in columns.items() if len(table) and all(isinstance(value, str) for value in column)]
    rows = table.groupby(texts, sort=False).tail(1) if texts else table.tail(1)
    if len(rows) > _MOST_LINES:
        return {}
    return {
        "_".join([name, *(row[text] for text in texts)]): float(row[name])
        for row in plain_rows(rows)
        for name in numeric
        if row[name] is not None
    }


def _named(value: Any) -> Any:
    """A plain value for a table: a scheme is its name, several items a text with commas."""
    if isinstance(value, tuple | list):
        return ",".join(str(_named(item)) for item in value)
    return value.name if isinstance(value, Scheme) else _plain(value)


def _plain(value: Any) -> Any:
    match value:
        case Scheme():
            return scheme_values(value)
        case Path():
            return str(value)
        case tuple() | list():
            return [_plain(item) for item in value]
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value if isinstance(value, str | int | float | bool | None) else getattr(value, "name", str(value))


def _explain(kind: type[Experiment], error: ValidationError) -> str:
    """The first mistake in one line that names the parameter."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{kind.command} has no setting '{name}'{did_you_mean(name, kind.fields())}"
    if first["type"] == "missing":
        return f"{kind.command} needs {name}="
    return explain(error)
