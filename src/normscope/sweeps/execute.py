"""Tasks of a sweep, and who executes them: the protocol that worker processes here and a cluster share."""

import errno
import faulthandler
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from normscope.errors import InputError
from normscope.sweeps.job import Job
from normscope.sweeps.state import SweepFolder

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_IN_WORDS = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")
_PROBE = 1 << 16
LOG = "workers.log"


@dataclass(frozen=True)
class Task:
    """A part of a run, or its end (``part`` None), in the sweep's folder; a plain value that travels."""

    sweep: Path
    name: str
    job: Job
    part: int | None = None

    @property
    def key(self) -> tuple[str, int | None]:
        """What an event calls it."""
        return self.name, self.part


@dataclass(frozen=True)
class Event:
    """A task has ended: well if there is no error, else with its line, where it came from, and whether the disk is full."""

    key: tuple[str, int | None]
    error: str | None = None
    trace: str = ""
    disk_full: bool = False


class Executor(Protocol):
    """Something that executes tasks elsewhere. How far they are is noted in the sweep's folder, which all places share.

    A task may be executed again, after its place was lost: what it did before is found and not done twice (``perform``).
    """

    @property
    def room(self) -> int:
        """How many more tasks it takes now."""

    def submit(self, task: Task) -> None:
        """Take a task."""

    def events(self, timeout: float) -> list[Event]:
        """Tasks that ended since; waits that many seconds for the first."""

    def close(self) -> None:
        """Stop everything, at once."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def attempt(task: Task) -> Event:
    """Execute a task in this process; an error becomes part of the event."""
    try:
        perform(task)
    except Exception as error:
        line = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return Event(task.key, line, traceback.format_exc(), is_disk_full(error) or has_no_room(task.sweep))
    return Event(task.key)


def perform(task: Task) -> None:
    """Do what a task asks, if it is not done yet; its run is known by the folder in which it ends."""
    folder = SweepFolder(task.sweep)
    target = folder.run(task.name)
    if task.part is not None:
        task.job.run_part(task.part, target)
        return
    with folder.claimed(task.name):
        if folder.complete(task.name) is None:
            folder.note(task.name, 0, 1, "starting")
            task.job.finish(target, folder.reporter(task.name))


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, says that a disk is full; libraries say it in their own ways."""
    while error is not None:
        if getattr(error, "errno", None) in _FULL or any(words in str(error) for words in _FULL_IN_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def has_no_room(folder: Path) -> bool:
    """Whether not even a small file can be written there."""
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            file.write(os.urandom(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return is_disk_full(error)
    return False


def into_log(log: Path) -> None:
    """Send all that this process and its libraries print to the end of a file: the terminal belongs to the driver."""
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    faulthandler.enable()
