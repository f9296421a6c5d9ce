"""The plan of a sweep: a TOML file with a grid, explicit points or both, as named experiments that are all validated first."""

import hashlib
import heapq
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from normscope.core.devices import devices_elsewhere
from normscope.errors import InputError, did_you_mean, require_keys
from normscope.experiments import kind_of, summaries
from normscope.experiments.experiment import Experiment
from normscope.machine.files import parse_toml, read_toml, user_path
from normscope.runs import fingerprint

PRESETS = ("scan", "paper-scan")
_TABLES = ("kind", "fixed", "grid", "points")
_MOST_POINTS = 10_000
_LONGEST_NAME = 150
_NAME = re.compile(r"[A-Za-z0-9_=+][A-Za-z0-9_.,=+-]*")
_FILES = ("scheme", "recipe", "text")  # fields whose paths must exist; a/b as a model may be the name of one on a hub


@dataclass(frozen=True)
class Point:
    """One run: its name, the fields that the plan gives it, and its experiment."""

    name: str
    values: dict[str, Any]
    experiment: Experiment

    def value(self, field: str) -> Any:
        """A field as a table shows it: its default resolved, a list as a text with commas."""
        value = self.experiment.field_values.get(field)
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Plan:
    """The runs in their order, and the fields that vary."""

    kind: str
    varied: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def record(self) -> dict[str, Any]:
        """The plan as plain values: two plans with the same record are the same sweep."""
        return {
            "kind": self.kind,
            "varied": list(self.varied),
            "points": [{"name": p.name, "values": p.values, "run": fingerprint(p.experiment.record)} for p in self.points],
        }

    @property
    def summary(self) -> str:
        """The fields that vary, with their values, in one line."""
        values = {name: list(dict.fromkeys(str(point.value(name)) for point in self.points)) for name in self.varied}
        fields = "; ".join(f"{name} {' | '.join(some[:6])}{' | …' * (len(some) > 6)}" for name, some in values.items())
        return f"{len(self.points)} run{'s' * (len(self.points) > 1)} of {self.kind}; {fields}"

    @property
    def shapes(self) -> list[list[Point]]:
        """The points that take the same time, together."""
        groups: dict[str, list[Point]] = {}
        for point in self.points:
            groups.setdefault(point.experiment.shape, []).append(point)
        return list(groups.values())

    def shared(self, points: Sequence[Point]) -> str:
        """The varied fields in which some points agree, with their values."""
        values = {field: [point.value(field) for point in points] for field in self.varied}
        return ", ".join(f"{name} {some[0]}" for name, some in values.items() if all(value == some[0] for value in some))

    def duration(self, seconds: Mapping[str, float], workers: int) -> float:
        """Seconds for all runs from those of each shape, each started in its order by the worker that is free first."""
        ends = [0.0] * workers
        for experiment in (point.experiment for point in self.points):
            parts, whole = max(1, experiment.parts), seconds[experiment.shape]
            for _ in range(parts):
                heapq.heapreplace(ends, ends[0] + whole / parts)
        return max(ends)


@dataclass(frozen=True)
class _Context:
    """What the points of a plan share."""

    kind: type[Experiment]
    device: str
    checkpoint_every: float
    folder: Path
    elsewhere: bool

    @property
    def fields(self) -> tuple[str, ...]:
        return self.kind.sweep_fields()


def packaged_plan(name: str) -> dict[str, Any]:
    """The content of a plan of the package, one of ``PRESETS``."""
    return parse_toml(files("normscope.sweeps").joinpath("presets", f"{name}.toml").read_text("utf-8"), name)


def read_plan(
    source: str | Path | Mapping[str, Any], device: str = "cpu", checkpoint_every: float = 60.0, *, elsewhere: bool = False
) -> Plan:
    """The plan of a TOML file, of the package by its name, or of a file's content as a mapping.

    Args:
        source: paths in a file are relative to it; those in a mapping to the current folder.
        device: of all runs.
        checkpoint_every: seconds between checkpoints of runs that have them.
        elsewhere: whether the runs are executed on other machines, whose devices are not known here.
    """
    if isinstance(source, Mapping):
        return _plan(source, device, checkpoint_every, Path(), elsewhere)
    if str(source) in PRESETS:
        content, folder = packaged_plan(str(source)), Path()
    else:
        content = read_toml(source, "plan", f"; plans of the package: {', '.join(PRESETS)}")
        folder = user_path(source).parent
    try:
        return _plan(content, device, checkpoint_every, folder, elsewhere)
    except InputError as error:
        raise InputError(f"in '{source}': {error}") from error


def _plan(content: Mapping[str, Any], device: str, checkpoint_every: float, folder: Path, elsewhere: bool) -> Plan:
    kind = _kind(content.get("kind"))
    context = _Context(kind, device, checkpoint_every, folder, elsewhere)
    fixed = {key: value for key, value in content.items() if key not in _TABLES}
    require_keys(fixed, (*_TABLES, *context.fields), "a plan", "field")
    also = _table(content, "fixed", context.fields)
    for name in fixed.keys() & also.keys():
        raise InputError(f"'{name}' is both at the top and in [fixed]")
    fixed |= also
    grid, explicit = _grid(content, fixed, context.fields), _explicit(content, context.fields)
    if not grid and not explicit:
        raise InputError("no run: give [grid] with lists of values, [[points]], or both")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    varied = tuple(dict.fromkeys((*grid, *(field for point in explicit for field in point if field != "name"))))
    points = [_point(point, fixed, context) for point in (*combinations, *explicit)]
    _check_different(points)
    return Plan(kind.command, varied, tuple(points))


def _kind(name: Any) -> type[Experiment]:
    kinds = [kind for kind in summaries() if kind != "sweep"]
    if name is None:
        raise InputError('a plan begins with its kind: kind = "train"')
    if name not in kinds:
        close = did_you_mean(name, kinds) if isinstance(name, str) else ""
        raise InputError(f"the kind of a sweep is one of {', '.join(kinds)}, not {name!r}{close}")
    return kind_of(name)


def _table(content: Mapping[str, Any], name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, Mapping):
        raise InputError(f"[{name}] is a table of fields, not {table!r}")
    require_keys(table, fields, f"[{name}]", "field")
    return dict(table)


def _grid(content: Mapping[str, Any], fixed: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, list[Any]]:
    """The lists of the grid, none of them empty."""
    grid = _table(content, "grid", fields)
    for name, values in grid.items():
        if name in fixed:
            raise InputError(f"'{name}' is both fixed and in the grid")
        if not isinstance(values, list):
            raise InputError(f"'{name}' in [grid] is a list of values, not {values!r}; a single value belongs to [fixed]")
        if not values:
            raise InputError(f"'{name}' in [grid] is an empty list: there would be no run")
    count = math.prod(map(len, grid.values()))
    if count > _MOST_POINTS:
        raise InputError(f"the grid has {count:,} points; at most {_MOST_POINTS:,}")
    return grid


def _explicit(content: Mapping[str, Any], fields: tuple[str, ...]) -> list[dict[str, Any]]:
    points = content.get("points", [])
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise InputError("explicit points are written as [[points]], each with its fields")
    for number, point in enumerate(points, 1):
        require_keys(point, ("name", *fields), f"point {number}", "field")
        if not set(point) - {"name"}:
            raise InputError(f"point {number} of [[points]] is empty: give it some fields")
    return points


def _point(given: Mapping[str, Any], fixed: Mapping[str, Any], context: _Context) -> Point:
    """A point with its name and its experiment; an error in its fields is raised with its name."""
    fields = {key: value for key, value in given.items() if key != "name"}
    name = given.get("name", _name(fields))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise InputError(
            f"a point's name becomes a folder: letters, digits and _ . , = + - (not . or - first), at most {_LONGEST_NAME}; "
            f"not {name!r}"
        )
    try:
        values = {key: _resolved(key, value, context.folder) for key, value in {**fixed, **fields}.items()}
        every = {"checkpoint_every": context.checkpoint_every} if "checkpoint_every" in context.kind.model_fields else {}
        with devices_elsewhere() if context.elsewhere else nullcontext():
            return Point(name, values, context.kind.from_fields({**values, **every}, context.device))
    except InputError as error:
        raise InputError(f"point '{name}': {error}") from error


def _resolved(field: str, value: Any, folder: Path) -> Any:
    """Paths are relative to the file of the plan; a text may hold several with commas."""
    if isinstance(value, list):
        return [_resolved(field, item, folder) for item in value]
    if not isinstance(value, str):
        return value

    def absolute(text: str) -> str:
        if not (text.endswith(".toml") or "/" in text or field == "text"):
            return text
        path = user_path(folder / user_path(text, field), field)
        return str(path.resolve()) if field in _FILES or path.exists() else text

    return ",".join(absolute(text.strip()) for text in value.split(",")) if field == "scheme" else absolute(value)


def _name(values: Mapping[str, Any]) -> str:
    """``scheme=pre,dim=64,rate=0.001``, safe as the name of a folder; a long one ends with a digest of the whole."""
    whole = ",".join(f"{key}={_in_name(value)}" for key, value in values.items())
    if len(whole) <= _LONGEST_NAME:
        return whole
    return f"{whole[: _LONGEST_NAME - 9]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _in_name(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_in_name, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        short = "+".join(
            Path(part.strip()).name.removesuffix(".toml") if "/" in part or part.endswith(".toml") else part
            for part in value.split(",")
        )
        return re.sub(r"[^A-Za-z0-9_.+-]+", "-", short)
    if not isinstance(value, int | float):
        raise InputError(f"a value is a text, a number, true, false or a list of these, not {value!r}")
    return repr(value)


def _check_different(points: list[Point]) -> None:
    """Two points with one name, or two names for one run, are a mistake."""
    names: set[str] = set()
    runs: dict[str, str] = {}
    for point in points:
        if point.name in names:
            raise InputError(f"two points have the name '{point.name}'; write them as [[points]], each with a name")
        names.add(point.name)
        run = fingerprint(point.experiment.record)
        if run in runs:
            raise InputError(f"points '{runs[run]}' and '{point.name}' are the same run: all their fields agree")
        runs[run] = point.name
