"""The folder of a sweep: its plan, its runs and their progress, readable from any process at any moment.

The state of a run follows from what is there: a complete run folder, the text of an error, a note on its progress. Nothing has
to be kept consistent with anything else, so a process may be killed at any point.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normscope.errors import InputError, make
from normscope.experiments.progress import Progress
from normscope.experiments.result import PROBLEMS
from normscope.machine.files import read_json, read_text, replace_text
from normscope.runs import RunFolder, is_locked, locked, open_run, remove_abandoned, run_path

PLAN = "sweep.json"
STATES = ("finished", "diverged", "failed", "running", "waiting")
_NOTED_EVERY = 0.5  # seconds
_PATIENCE = 2.0  # seconds: a process that only reads whether the sweep is running holds its lock for a moment


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run: done of total, a note, and when it was noted (seconds since 1970)."""

    done: float
    total: float
    note: str
    at: float

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.done / self.total if self.total else 0.0


class FolderProgress(Progress):
    """Notes the progress of a run in the sweep's folder, not more often than people can read."""

    def __init__(self, folder: "SweepFolder", name: str) -> None:
        self.folder, self.name = folder, name
        self.last, self.share = 0.0, (0.0, 1.0)

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        """``done`` of ``total`` units of a stage are complete."""
        self.share = done, total
        if time.monotonic() - self.last >= _NOTED_EVERY:
            self.last = time.monotonic()
            self.folder.note(self.name, done, total, note or stage)

    def message(self, text: str) -> None:
        """A line for people, shown at once."""
        self.last = 0.0
        self(text, *self.share)


@dataclass(frozen=True)
class SweepFolder:
    """A sweep's folder: ``sweep.json``, ``runs/NAME/``, ``errors/NAME.txt`` and ``progress/NAME.json``."""

    path: Path

    @classmethod
    def of(cls, path: Path | str) -> "SweepFolder":
        """The folder given as ``path``, absolute."""
        return cls(run_path(path))

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self.path / "runs" / name

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it, or no such folder; a lock or an unfinished plan is nothing."""
        if not self.path.exists():
            return True
        return self.path.is_dir() and all(child.name == "lock" or _is_partial(child, PLAN) for child in self.path.iterdir())

    @property
    def begun(self) -> bool:
        """Whether there is a plan."""
        return (self.path / PLAN).is_file()

    @property
    def untouched(self) -> bool:
        """Whether no run has left anything, so that the sweep may still begin with other resources."""
        runs = self.path / "runs"
        return not runs.is_dir() or not any(runs.iterdir())

    @property
    def plan(self) -> dict[str, Any]:
        """The content of ``sweep.json``."""
        if not self.begun:
            what = f"holds no sweep (no {PLAN} of one in it)" if self.path.exists() else "does not exist"
            raise InputError(f"'{self.path}' {what}")
        content: dict[str, Any] = read_json(self.path / PLAN, "sweep")
        points = content.get("points") if isinstance(content, dict) else None
        if not isinstance(points, list) or not all(isinstance(point, dict) and _is_name(point.get("name")) for point in points):
            raise InputError(f"'{self.path}' holds no sweep ({PLAN} describes something else)")
        return content

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write the plan, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        for left in filter(lambda child: _is_partial(child, PLAN), self.path.iterdir()):
            left.unlink()
        replace_text(self.path / PLAN, json.dumps(plan, indent=2, ensure_ascii=False, default=str) + "\n")

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep a second scheduler out, for as long as this process lives."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / "lock", _PATIENCE))
            except BlockingIOError:
                raise InputError(f"another process runs the sweep in '{self.path}'; normscope sweep status shows it") from None
            try:
                yield
            finally:
                if self.empty:
                    for left in self.path.iterdir():
                        left.unlink()

    @property
    def active(self) -> bool:
        """Whether a process runs the sweep now."""
        return is_locked(self.path / "lock")

    @contextmanager
    def claim(self, name: str) -> Iterator[None]:
        """One process at a time in a run: another one waits until the first has ended or was killed."""
        with locked(self._noted(name, ".lock"), math.inf):
            yield

    def complete(self, name: str) -> RunFolder | None:
        """The run's folder, if it is complete."""
        try:
            return open_run(self.run(name))
        except InputError:
            return None

    def state(self, name: str) -> str:
        """One of ``STATES``; a run that was interrupted is waiting."""
        run = self.complete(name)
        if run is not None:
            return "diverged" if (run.path / PROBLEMS).is_file() else "finished"
        if self.error(name) is not None:
            return "failed"
        return "running" if self.progress(name) is not None and self.active else "waiting"

    def fail(self, name: str, error: str, trace: str = "") -> None:
        """Record the error of a run: its line and its traceback."""
        self._error(name).parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._error(name), f"{' '.join(error.split())}\n\n{trace}")

    def error(self, name: str) -> str | None:
        """The first line of a failed run's error."""
        if not self._error(name).exists():
            return None
        return read_text(self._error(name), "error of a run").partition("\n")[0]

    def clear_error(self, name: str) -> None:
        """Remove an error, so that the run is executed again."""
        self._error(name).unlink(missing_ok=True)

    def note(self, name: str, done: float, total: float, note: str = "") -> None:
        """Note the progress of a run; a note that cannot be written is no reason to stop."""
        with suppress(OSError):
            self._notes.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(RunProgress(done, total, note, time.time())))
            replace_text(self._noted(name, ".json"), text, sync=False)

    def reporter(self, name: str) -> FolderProgress:
        """Receives the progress of a run."""
        return FolderProgress(self, name)

    def progress(self, name: str) -> RunProgress | None:
        """The progress of a run, as noted last."""
        try:
            return make(RunProgress, read_json(self._noted(name, ".json"), "note on a run"), "a note on a run")
        except (InputError, AttributeError, TypeError):  # none, or one that something else wrote
            return None

    def clear_progress(self, name: str) -> None:
        """Remove the note of a run that has ended."""
        self._noted(name, ".json").unlink(missing_ok=True)

    def _error(self, name: str) -> Path:
        return self.path / "errors" / f"{name}.txt"

    def tidy(self) -> None:
        """Remove all notes, and what complete runs left of their unfinished work, once no run is running."""
        shutil.rmtree(self._notes, ignore_errors=True)
        remove_abandoned(self.path / "runs")
        for left in (self.path / "errors").glob(".*.partial"):
            left.unlink()
        for left in (self.path / "runs").glob(".*.unfinished-*"):
            if self.complete(left.name[1:].rpartition(".unfinished-")[0]) is not None:
                shutil.rmtree(left, ignore_errors=True)

    @property
    def _notes(self) -> Path:
        return self.path / "progress"

    def _noted(self, name: str, suffix: str) -> Path:
        return self._notes / f"{name}{suffix}"


def _is_name(name: Any) -> bool:
    """Whether a value can be the name of a run's folder."""
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name and "\0" not in name


def _is_partial(path: Path, name: str) -> bool:
    """Whether a file was left by a process that died while it wrote ``name``."""
    return path.name.startswith(f".{name}.") and path.suffix == ".partial"
