"""Run folders for the page: which there are among those given, and what a view shows of each, as JSON-able data.

The page names runs by ids, never by paths, and nothing outside the folders given is read, also not through links.
"""

import hashlib
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normscope.errors import InputError
from normscope.explorer.ledger import COMMAND as LEDGER
from normscope.explorer.ledger import ledger_data
from normscope.explorer.watched import EXPORTED, WatchedTraining
from normscope.machine.files import user_path
from normscope.runs import UNFINISHED, is_locked, open_run, run_path, unfinished_runs
from normscope.watch.run_folder import COMMAND as WATCH
from normscope.watch.run_folder import WATCHED, watched_run

RUN = "run.json"
_FRESH = 5.0  # seconds for which the list of runs holds
_RECENT = 0.5  # seconds for which a look at their versions holds
_MOST_RUNS = 200  # that a folder of runs offers


class UnknownRunError(InputError):
    """An id that no run has, or has any more."""


@dataclass(frozen=True)
class Run:
    """A run folder that may be read.

    Attributes:
        id: by which the page names it: the same as long as its folder has the same path.
        name: its folder's name.
        path: as it was given, or found in a folder that was given.
        root: the folder given, links resolved: everything that is read lies in it.
    """

    id: str
    name: str
    path: Path
    root: Path

    @property
    def full_name(self) -> str:
        """Its name with that of the folder that it is in."""
        return f"{self.path.parent.name}/{self.name}"

    @property
    def version(self) -> str:
        """A text that changes whenever there may be something new to read."""
        begun = self.path.exists()
        places = [self.path, self.path / WATCHED] if begun else [each / WATCHED for each in unfinished_runs(self.path)]
        times = [_changed(place / name) for place in places for name in ("", RUN, "segments")]
        return f"{times} {[is_locked(place / 'lock') for place in places]}"

    def about(self) -> dict[str, Any]:
        """Its kind and what it is; of a damaged one, the problem in one sentence."""
        try:
            place = self.place()
            description = open_run(place).description
            kind, summary = str(description["command"]), str(description.get("summary", ""))
            about = {"id": self.id, "name": self.name, "kind": kind, "summary": summary}
            if kind not in KINDS:
                return {**about, "problem": f"a run of {kind}: the explorer shows {', '.join(KINDS.values())}"}
            return {**about, "configuration": description["configuration"]}
        except InputError as error:
            return {"id": self.id, "name": self.name, "kind": "damaged", "summary": "", "problem": str(error)}

    def listed(self) -> dict[str, Any]:
        """``about`` as JSON can hold it, whatever stands in the files."""
        listed: dict[str, Any] = _writable(self.about())
        return listed

    def place(self) -> Path:
        """Its folder now, of a watched training the one inside; a link that leads out of the root is refused."""
        try:
            place = watched_run(self.path)
        except InputError:
            place = self.path
        moving = [folder.resolve() for folder in unfinished_runs(self.path) if not folder.is_symlink()]
        if place != self.path and UNFINISHED in place.parent.name:
            inside = any(place.resolve().is_relative_to(folder) for folder in moving)
        else:
            inside = place.resolve().is_relative_to(self.root)
        if not inside or any(not link.resolve().is_relative_to(place.resolve()) for link in _links(place)):
            raise InputError(f"'{self.name}' has a link to a place outside the folder that was given, which is not read")
        return place


# The commands whose runs have a view, and what the page calls them.
AUDIT = "audit"
KINDS: Mapping[str, str] = {WATCH: "watched trainings", AUDIT: "audits", "simulate": "simulations", LEDGER: "ledgers"}


def _changed(path: Path) -> int:
    """When a file or folder was changed; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _links(folder: Path) -> Iterator[Path]:
    """The links in a run folder, its segments included."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files) if Path(parent, name).is_symlink())
        if Path(parent) != folder and Path(parent).parent != folder:
            folders.clear()


@dataclass
class Folders:
    """The run folders among those given, and what was read of them."""

    paths: Sequence[Path | str]
    _trainings: dict[Path, WatchedTraining] = field(default_factory=dict)
    _others: dict[Path, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _listed: tuple[float, list[Run] | None] = (0.0, None)
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _versions: tuple[float, dict[str, str]] = (-math.inf, {})

    def runs(self) -> list[Run]:
        """All runs, in the order given; those in a folder of runs by name. Folders are looked through every few seconds."""
        listed, runs = self._listed
        if runs is None or time.monotonic() - listed > _FRESH:
            offered = {run.id: run for path in self.paths for run in _offered(path)}.values()
            names = [run.name for run in offered]
            runs = [replace(run, name=run.full_name) if names.count(run.name) > 1 else run for run in offered]
            self._listed = time.monotonic(), runs
        return runs

    def find(self, id: str) -> Run:
        """The run of an id."""
        for run in self.runs():
            if run.id == id:
                return run
        raise UnknownRunError("there is no such run, or no longer: open the list of runs again")

    def about(self) -> list[dict[str, Any]]:
        """What the page lists."""
        return [run.listed() for run in self.runs()]

    def training(self, id: str) -> WatchedTraining:
        """The numbers of a watched run, which are read on as it grows."""
        place = self.find(id).place()
        if open_run(place).description["command"] != WATCH:
            raise InputError("this run is not of a watched training")
        with self._lock:
            return self._trainings.setdefault(place, WatchedTraining(place))

    def data(self, id: str) -> dict[str, Any]:
        """What the view of a run shows, but for those of watched trainings; read again once the run was replaced."""
        place = self.find(id).place()
        changed = (place / RUN).stat().st_mtime
        known = self._others.get(place)
        if known is None or known[0] != changed:
            known = (changed, _view_data(place))
            self._others[place] = known
        return known[1]

    def versions(self) -> dict[str, str]:
        """By id, a text for each run that changes as it grows, ends or is replaced; all pages share a look of some moment."""
        with self._looking:
            looked, versions = self._versions
            if time.monotonic() - looked > _RECENT:
                versions = {run.id: run.version for run in self.runs()}
                self._versions = time.monotonic(), versions
        return versions

    def ledger(self) -> dict[str, Any]:
        """The statements and verdicts of the last run of verify, or of the packaged one with why that takes its place."""
        runs = [run for run in self.runs() if run.about()["kind"] == LEDGER]
        try:
            return ledger_data(runs[-1].place() if runs else None)
        except InputError as error:
            return {**ledger_data(), "problem": str(error)}

    def exported(self) -> list[dict[str, Any]]:
        """All runs with their data, for a page without a server; a problem takes the place of what cannot be read."""
        return [_exported(run) for run in self.runs()]


def split_sources(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Which of the sources are run folders, or hold some, and which are models; a training that was watched is both."""
    runs = [source for source in sources if list(_offered(source))]
    models = [source for source in sources if source not in runs or _has_model(source)]
    for source in models:
        path = user_path(source)
        if (source.startswith((".", "/", "~")) and not path.exists()) or (
            path.is_dir() and not (path / "config.json").exists()
        ):
            raise InputError(f"'{source}' {'holds neither a run nor a model' if path.exists() else 'does not exist'}")
    return runs, models


def first_view(runs: Sequence[Mapping[str, Any]], models: Sequence[str]) -> str:
    """The view in which the page opens: where there is something of the user's to see."""
    kinds = {run["kind"] for run in runs}
    if WATCH in kinds and not models:
        return "training"
    return "atlas" if models or AUDIT in kinds else "ledger" if kinds == {LEDGER} else "lab"


def _writable(value: Any) -> Any:
    """Numbers that are not finite become None, and what is no text in UTF-8 a question mark."""
    if isinstance(value, Mapping):
        return {_writable(str(key)): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _has_model(folder: Path | str) -> bool:
    return (user_path(folder) / "config.json").is_file() and any(user_path(folder).glob("*.safetensors"))


def _exported(run: Run) -> dict[str, Any]:
    about = run.listed()
    if "problem" in about or about["kind"] == LEDGER:  # which the whole page has once
        return about
    try:
        place = run.place()
        data = WatchedTraining(place, EXPORTED).exported() if about["kind"] == WATCH else _view_data(place)
    except InputError as error:
        return {**about, "kind": "damaged", "problem": str(error)}
    return {**about, "data": data}


def _view_data(place: Path) -> dict[str, Any]:
    """An audit for the atlas; of a simulation the page needs its settings alone, which the list of runs has."""
    from normscope.experiments.result import load
    from normscope.explorer.audits import audit_data

    result = load(place)
    return audit_data(result.tables, result.configuration) if result.kind.command == AUDIT else {}


def _offered(path: Path | str) -> Iterator[Run]:
    """The run that a path is, or the runs in it."""
    given = user_path(path, "run folder")
    root = run_path(path)
    if _is_run(given):
        run = _run(given, root)
        if run.about()["kind"] in (*KINDS, "damaged") or not _has_model(given):
            yield run
        return
    try:
        names = {child.name for child in given.iterdir() if not child.name.startswith(".") and child.is_dir()}
    except OSError:  # no folder, or none that may be read
        return
    names |= {child.name[1:].rpartition(UNFINISHED)[0] for child in given.glob(f".*{UNFINISHED}*")}
    children = [given / name for name in sorted(names) if name]
    inside = [_run(child, root) for child in children if _is_run(child)]
    yield from [run for run in inside if run.about()["kind"] in (*KINDS, "damaged")][:_MOST_RUNS]


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run, damaged or not, or will be one whose training is watched."""
    begun = any((unfinished / WATCHED / RUN).exists() for unfinished in unfinished_runs(folder))
    return (folder / RUN).exists() or (folder / "segments").is_dir() or begun


def _run(path: Path, root: Path) -> Run:
    place = path.parent.resolve() / path.name
    return Run(hashlib.sha256(os.fsencode(place)).hexdigest()[:12], path.resolve().name, path, root)
