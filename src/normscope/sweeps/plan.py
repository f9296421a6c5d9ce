"""The plan of a sweep: a TOML file with a grid, explicit points or both, as runs with names, all checked before any begins."""

import hashlib
import heapq
import itertools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from normscope.errors import InputError, did_you_mean
from normscope.runs import fingerprint
from normscope.sweeps.job import Job
from normscope.sweeps.kinds import Kind, find_kind

SWEEPS = ("scan",)
_TABLES = ("kind", "fixed", "grid", "points")
_MOST_POINTS = 10_000
_LONGEST_NAME = 150
_NAME = re.compile(r"[A-Za-z0-9_=+][A-Za-z0-9_.,=+-]*")


@dataclass(frozen=True)
class Point:
    """One run: its name, what the sweep says of it, and the job that follows."""

    name: str
    values: dict[str, Any]
    job: Job

    def shown(self, field: str) -> Any:
        """A field's value as a column holds it beside others: lists in words."""
        value = self.job.values.get(field)
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Sweep:
    """The runs in their order, and the fields that vary."""

    kind: str
    varied: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def record(self) -> dict[str, Any]:
        """The plan as plain values, by which a sweep is known again."""
        return {
            "kind": self.kind,
            "varied": list(self.varied),
            "points": [{"name": p.name, "values": p.values, "run": fingerprint(p.job.record)} for p in self.points],
        }

    @property
    def shapes(self) -> list[list[Point]]:
        """The points that take the same time, together."""
        groups: dict[str, list[Point]] = {}
        for point in self.points:
            groups.setdefault(point.job.shape, []).append(point)
        return list(groups.values())

    def lasts(self, seconds: Mapping[str, float], places: int) -> float:
        """How long all runs take by the seconds of each shape, given out in their order to the place that is free first."""
        ends = [0.0] * places
        for job in (point.job for point in self.points):
            parts, whole = max(1, job.parts), seconds[job.shape]
            for _ in range(parts):
                heapq.heapreplace(ends, ends[0] + whole / parts)
        return max(ends)

    def told(self, points: Sequence[Point]) -> str:
        """The varied fields in which some points agree, in words."""
        values = {field: [point.shown(field) for point in points] for field in self.varied}
        return ", ".join(f"{name} {some[0]}" for name, some in values.items() if all(one == some[0] for one in some))


def read_sweep(name_or_path: str, device: str = "cpu", every: float = 60.0) -> Sweep:
    """The sweep of a TOML file, or one of the package's by its name; paths in it are seen from the file."""
    if name_or_path in SWEEPS:
        text, folder = files("normscope.sweeps").joinpath("presets", f"{name_or_path}.toml").read_text("utf-8"), Path()
    else:
        text, folder = _read(name_or_path), Path(name_or_path).expanduser().parent
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"'{name_or_path}' is not valid TOML: {error}") from error
    try:
        return sweep_from(content, device, every, folder)
    except InputError as error:
        raise InputError(f"in '{name_or_path}': {error}") from error


def sweep_from(content: Mapping[str, Any], device: str = "cpu", every: float = 60.0, folder: Path = Path()) -> Sweep:
    """The sweep that a file's content describes."""
    if "kind" not in content:
        raise InputError('a sweep begins with its kind: kind = "train"')
    kind = find_kind(content["kind"])
    fixed = {key: value for key, value in content.items() if key not in _TABLES}
    _check_fields(fixed, (*_TABLES, *kind.fields), "at the top of a sweep")
    also = _table(content, "fixed", kind)
    for name in fixed.keys() & also.keys():
        raise InputError(f"'{name}' is both at the top and in [fixed]")
    fixed |= also
    grid, explicit = _grid(content, fixed, kind), _explicit(content, kind)
    if not grid and not explicit:
        raise InputError("no run: give [grid] with lists of values, [[points]], or both")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    varied = tuple(dict.fromkeys((*grid, *(field for point in explicit for field in point if field != "name"))))
    points = [_point(point, fixed, kind, device, every, folder) for point in (*combinations, *explicit)]
    _check_different(points)
    return Sweep(content["kind"], varied, tuple(points))


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"no sweep file '{path}'; sweeps of the package: {', '.join(SWEEPS)}") from None
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise InputError(f"cannot read the sweep '{path}': {error}") from error


def _check_fields(given: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in allowed:
            raise InputError(f"unknown field '{name}' {where}{did_you_mean(name, allowed)} (allowed: {', '.join(allowed)})")


def _table(content: Mapping[str, Any], name: str, kind: Kind) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise InputError(f"[{name}] is a table of fields, not {table!r}")
    _check_fields(table, kind.fields, f"in [{name}]")
    return table


def _grid(content: Mapping[str, Any], fixed: Mapping[str, Any], kind: Kind) -> dict[str, list[Any]]:
    """The lists of the grid, each with something in it."""
    grid = _table(content, "grid", kind)
    for name, values in grid.items():
        if name in fixed:
            raise InputError(f"'{name}' is both fixed and in the grid")
        if not isinstance(values, list):
            raise InputError(
                f"'{name}' in [grid] is a list of values, not {values!r}; one value for all runs belongs to [fixed]"
            )
        if not values:
            raise InputError(f"'{name}' in [grid] is an empty list: there would be no run")
    count = math.prod(map(len, grid.values()))
    if count > _MOST_POINTS:
        raise InputError(f"the grid has {count:,} points; at most {_MOST_POINTS:,}")
    return grid


def _explicit(content: Mapping[str, Any], kind: Kind) -> list[dict[str, Any]]:
    points = content.get("points", [])
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise InputError("explicit points are written as [[points]], each with its fields")
    for number, point in enumerate(points, 1):
        _check_fields(point, ("name", *kind.fields), f"in point {number}")
        if not set(point) - {"name"}:
            raise InputError(f"point {number} of [[points]] says nothing: give it some fields")
    return points


def _point(given: Mapping[str, Any], fixed: Mapping[str, Any], kind: Kind, device: str, every: float, folder: Path) -> Point:
    """A point with its name and its job; what is wrong with it is told with its name."""
    said = {key: value for key, value in given.items() if key != "name"}
    name = given.get("name", _name(said))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise InputError(
            f"a point's name becomes a folder: letters, digits and _ . , = + - (not . or - first), at most {_LONGEST_NAME}; "
            f"not {name!r}"
        )
    try:
        values = {key: _seen_from(key, value, folder) for key, value in {**fixed, **said}.items()}
        return Point(name, values, kind.make(values, device, every))
    except InputError as error:
        raise InputError(f"point '{name}': {error}") from error


def _seen_from(field: str, value: Any, folder: Path) -> Any:
    """Paths are written as seen from the sweep's file; several are written with commas."""
    if field not in ("scheme", "recipe", "model", "text") or not isinstance(value, str):
        return value

    def resolved(text: str) -> str:
        try:
            path = folder / Path(text.strip()).expanduser()
        except RuntimeError as error:  # ~somebody
            raise InputError(f"cannot read the {field} '{text}': {error}") from error
        is_path = text.strip().endswith(".toml") or "/" in text or field == "text"
        return str(path.resolve()) if is_path and (path.exists() or field != "model") else text  # a/b may be a model elsewhere

    return ",".join(map(resolved, value.split(","))) if field == "scheme" else resolved(value)


def _name(values: Mapping[str, Any]) -> str:
    """``scheme=pre,dim=64,rate=0.001``, safe as a folder's name; a long one ends with a digest of the whole."""
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
        run = fingerprint(point.job.record)
        if run in runs:
            raise InputError(f"points '{runs[run]}' and '{point.name}' are the same run: all their fields agree")
        runs[run] = point.name
