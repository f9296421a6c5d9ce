"""A run folder that grows with the work: readable at any moment, appended to by one process at a time."""

import os
import time
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from normscope.errors import InputError
from normscope.machine.files import replace_text, sync
from normscope.runs.folders import (
    DESCRIPTION,
    check_can_grow,
    description_text,
    is_run,
    read_description,
    run_path,
)
from normscope.runs.locks import NO_LOCKS, is_locked, lock_file
from normscope.runs.segments import FOLDER, Session, has_segments, segments_of

LOCK = "lock"
_PATIENCE, _RETRY = 1.0, 0.05  # seconds: a process that only reads whether the run is running holds its lock for a moment
RUNNING, FINISHED, INTERRUPTED = "running", "finished", "interrupted"
_OPEN: "weakref.WeakSet[GrowingRun]" = weakref.WeakSet()


class GrowingRun:
    """The process that appends to a run folder; another one is refused as long as this one lives."""

    def __init__(self, session: Session, lock: TextIO | None, about: Mapping[str, Any]) -> None:
        self.folder, self._session, self._lock, self._about = session.folder, session, lock, about
        _OPEN.add(self)

    @classmethod
    def begin(
        cls,
        path: Path | str,
        command: str,
        configuration: Mapping[str, Any],
        *,
        device: str = "cpu",
        summary: str = "",
        resume: bool = False,
        same: tuple[str, ...] = (),
    ) -> "GrowingRun":
        """Make the folder, or resume one that the same command wrote, where ``same`` names what must not have changed."""
        final = run_path(path)
        about: dict[str, Any] = {
            "command": command, "configuration": configuration, "seed": None, "device": device,
            "started": datetime.now(UTC), "summary": summary,
        }  # fmt: skip
        check_free(final, command, resume)
        lock = _locked(final)
        try:
            check_free(final, command, resume)  # again: another process may have been faster
            if is_run(final):
                _check_same(final, configuration, same)
            session = Session(final)  # first, so that whoever finds the description finds a run that grows
            replace_text(final / DESCRIPTION, description_text({}, **about))
            return cls(session, lock, about)
        except BaseException:
            if lock is not None:
                lock.close()
            raise

    def append(self, tables: Mapping[str, pd.DataFrame]) -> None:
        """Add rows; they are on the disk when this returns."""
        self._session.append(tables)

    def close(self) -> None:
        """End the run: its segments become one, and ``run.json`` has the time that it took."""
        if self._lock is not None and self._lock.closed:
            return
        try:
            self._session.merge()
            replace_text(self.folder / DESCRIPTION, description_text({}, **self._about, ended=True))
            sync(self.folder)
        finally:
            self.release()

    def release(self) -> None:
        """Let other processes append."""
        _OPEN.discard(self)
        if self._lock is not None:
            self._lock.close()


def growth(folder: Path) -> str:
    """Whether the run in a folder that grows is running, finished, or interrupted."""
    if is_locked(folder / LOCK):
        return RUNNING
    return FINISHED if read_description(folder).get("ended") else INTERRUPTED


def _locked(folder: Path) -> TextIO | None:
    """The lock of a folder, which is made; None on a disk without locks."""
    deadline = time.monotonic() + _PATIENCE
    try:
        while (lock := lock_file(folder / LOCK)) is None and time.monotonic() < deadline:
            time.sleep(_RETRY)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise InputError(f"cannot write to '{folder}': {error.strerror}; choose another out=") from error
    if lock is None and any(run.folder == folder for run in _OPEN):
        raise InputError(f"this process writes to '{folder}' already: close that run first, or choose another out=")
    if lock is None:
        raise InputError(f"another process writes to '{folder}'; choose another out=")
    return lock


def check_free(path: Path | str, command: str, resume: bool) -> None:
    """Refuse a place that cannot be written, that holds something else, or a run that is not to be resumed."""
    folder = run_path(path)
    check_can_grow(folder)
    if not is_run(folder):
        ours = {LOCK} if segments_of(folder) else {LOCK, FOLDER}  # of a process that was killed at its beginning
        if folder.is_dir() and any(child.name not in ours and DESCRIPTION not in child.name for child in folder.iterdir()):
            raise InputError(f"'{folder}' exists and is not a run folder; choose another out=")
        return
    about = read_description(folder)
    if about["command"] != command or not has_segments(folder):
        raise InputError(f"'{folder}' holds a run of {about['command']}; choose another out=")
    if not resume and segments_of(folder):
        raise InputError(f"'{folder}' holds a run already; choose another out=, or resume=True to append to it")


def _check_same(folder: Path, configuration: Mapping[str, Any], same: tuple[str, ...]) -> None:
    """Refuse a run of another configuration."""
    saved = read_description(folder)["configuration"]
    for name in same:
        if saved.get(name) != configuration.get(name):
            before, now = saved.get(name), configuration.get(name)
            raise InputError(f"'{folder}' holds a run with {name} {before}, not {now}; choose another out=")


def _release_in_child() -> None:
    """A process that is forked off, such as one that loads data, must not hold the lock when this one has ended."""
    for run in list(_OPEN):
        run.release()


os.register_at_fork(after_in_child=_release_in_child)
