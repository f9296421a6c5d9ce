"""A task of a sweep: one part of a run, or the run itself; a plain value that any process can execute, any number of times."""

import faulthandler
import os
import sys
import tempfile
import traceback
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from normscope.errors import InputError
from normscope.experiments import timed
from normscope.experiments.experiment import Experiment
from normscope.machine.files import is_disk_full
from normscope.sweeps.folder import SweepFolder

LOG = "workers.log"
_PROBE = 1 << 16  # bytes


@dataclass(frozen=True)
class Task:
    """A part of a run of a sweep, or the whole run (``part`` None), which uses the parts that are saved."""

    sweep: Path
    name: str
    experiment: Experiment
    part: int | None = None


@dataclass(frozen=True)
class Failure:
    """Why a task failed: one line, the traceback, and whether the disk is full, which stops the whole sweep."""

    line: str
    traceback: str = ""
    disk_full: bool = False


class Executor(Protocol):
    """Executes tasks in other processes; all of them see the sweep's folder.

    The future of a task has a ``Failure`` or None as its result. Its exception means that the task was not executed to its end.
    """

    @property
    def room(self) -> int:
        """How many more tasks it can start now."""

    def submit(self, task: Task) -> "Future[Failure | None]":
        """Start a task."""

    def loss(self, error: BaseException) -> str:
        """How a process or node was lost, in one line; any other error is raised."""

    def close(self) -> None:
        """End all processes."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def attempt(task: Task) -> Failure | None:
    """Execute a task in this process. An error is returned as text: not every exception survives the way to another process."""
    try:
        execute(task)
    except Exception as error:
        line = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return Failure(line, traceback.format_exc(), is_disk_full(error) or has_no_space(task.sweep))
    return None


def execute(task: Task) -> None:
    """Do what is left of a task: a complete run is not computed again, and an interrupted one resumes."""
    folder, experiment = SweepFolder(task.sweep), task.experiment
    target = folder.run(task.name)
    if task.part is not None:
        experiment.run_part(task.part, target)
        return
    with folder.claim(task.name):
        if folder.complete(task.name) is None:
            progress = folder.reporter(task.name)
            progress("starting", 0, 1)
            timed(experiment, progress, target).save(target, formats=())


def has_no_space(folder: Path) -> bool:
    """Whether not even a small file can be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return is_disk_full(error)
    return False


def redirect_output(log: Path) -> None:
    """Append all that this process and its libraries print to a file: the terminal belongs to the main process."""
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    faulthandler.enable()
