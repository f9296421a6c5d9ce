"""Where snapshots go: a run folder, TensorBoard, Weights & Biases, MLflow, any callable, or several of them."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from normscope.errors import InputError, did_you_mean
from normscope.runs import run_path
from normscope.watch.run_folder import WatchedFolder, last_watched
from normscope.watch.snapshot import Snapshot
from normscope.watch.trackers import MLflow, TensorBoard, WeightsAndBiases

TRACKERS = ("tensorboard", "wandb", "mlflow")
_EVERY = 1.0  # seconds between two times that snapshots are written
_MOST = 1_000  # snapshots that wait for a destination that fails


@runtime_checkable
class Destination(Protocol):
    """Takes the snapshots of a training, on the process of rank 0 alone."""

    def begin(self, about: Mapping[str, Any]) -> None:
        """Begin with plain facts about the model and the watch; what cannot be used is an ``InputError``."""

    def write(self, snapshot: Snapshot) -> None:
        """Take one snapshot."""

    def close(self) -> None:
        """Keep what was taken."""


class Writer(Protocol):
    """Takes several snapshots at once, on a thread of its own."""

    def begin(self, about: Mapping[str, Any]) -> None:
        """Begin, on the thread of the training: what cannot be used is an ``InputError``."""

    def write(self, snapshots: Sequence[Snapshot]) -> None:
        """Take snapshots, oldest first."""

    def close(self) -> None:
        """Keep what was taken."""


@dataclass
class Calls:
    """A callable that takes each snapshot, on the thread of the training."""

    call: Callable[[Snapshot], object]

    def begin(self, about: Mapping[str, Any]) -> None:
        """Nothing to begin."""

    def write(self, snapshot: Snapshot) -> None:
        """Call it."""
        self.call(snapshot)

    def close(self) -> None:
        """Nothing to keep."""


@dataclass
class Several:
    """Several destinations; one that fails does not keep the others from their snapshots."""

    destinations: Sequence[Destination]

    def begin(self, about: Mapping[str, Any]) -> None:
        """Begin all of them, or none."""
        _begin(self.destinations, about)

    def write(self, snapshot: Snapshot) -> None:
        """Hand the snapshot to each; the first error is raised when all have it."""
        _each(lambda destination: destination.write(snapshot), self.destinations)

    def close(self) -> None:
        """Close all of them."""
        _each(lambda destination: destination.close(), self.destinations)


def _begin(items: "Iterable[Destination | Writer]", about: Mapping[str, Any]) -> None:
    with ExitStack() as begun:
        for item in items:
            item.begin(about)
            begun.callback(item.close)
        begun.pop_all()


def _each(call: Callable[[Any], object], items: Iterable[Any]) -> None:
    errors = []
    for item in items:
        try:
            call(item)
        except Exception as error:  # of a disk, a network or a user's code
            errors.append(error)
    if errors:
        raise errors[0]


@dataclass
class Background:
    """A thread that hands snapshots to writers, so that a training does not wait for disks and networks.

    Snapshots are written within about a second, and all of them when the destination is closed or the interpreter exits. A
    writer that fails is tried again with the next snapshots; its error is raised by the next ``write`` or ``close``.
    """

    writers: Sequence[Writer]
    every: float = _EVERY
    _waiting: list[list[Snapshot]] = field(default_factory=list)
    _errors: list[Exception] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _closed: bool = False
    _process: int = 0

    def begin(self, about: Mapping[str, Any]) -> None:
        """Begin all writers, or none, and the thread."""
        _begin(self.writers, about)
        self._waiting = [[] for _ in self.writers]
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._write_on, name="normscope watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, snapshot: Snapshot) -> None:
        """Leave a snapshot to the thread."""
        if os.getpid() != self._process:  # a process that was forked off has no thread, and is not watched
            return
        with self._news:
            for waiting in self._waiting:
                waiting.append(snapshot)
                del waiting[:-_MOST]
            self._news.notify()
        self._raise_error()

    def close(self) -> None:
        """Write what is left, and close the writers."""
        if self._closed or os.getpid() != self._process or self._thread is None:
            return
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()
        atexit.unregister(self.close)
        self._write_all()
        try:
            _each(lambda writer: writer.close(), self.writers)
        finally:
            self._raise_error()

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors.pop(0)

    def _write_on(self) -> None:
        """Write what waits, then rest for a while, until the destination is closed."""
        while not self._closed:
            with self._news:
                self._news.wait_for(lambda: self._closed or any(self._waiting))
            if not self._closed:
                self._write_all()
                deadline = time.monotonic() + self.every
                with self._news:
                    self._news.wait_for(lambda: self._closed, deadline - time.monotonic())

    def _write_all(self) -> None:
        for writer, waiting in zip(self.writers, self._waiting, strict=True):
            with self._news:
                snapshots = list(waiting)
            if not snapshots:
                continue
            try:
                writer.write(snapshots)
            except Exception as error:  # of a disk or a network; a thread has nobody to raise it to
                self._errors[:] = [error]
            else:
                with self._news:
                    del waiting[: len(snapshots)]


def destination_of(to: Any, *, resume: bool = False) -> Destination:
    """The destination of what a user gives.

    Args:
        to: the path of a run folder, ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, a ``SummaryWriter``, a run of W&B, a
            callable that takes a :class:`Snapshot`, a :class:`Destination`, several of those, or None.
        resume: whether to append to a run folder that exists.
    """
    items = list(to) if isinstance(to, list | tuple) else [] if to is None else [to]
    folder = next((run_path(item) for item in items if _is_path(item)), None)  # the loop may change its directory
    writers: list[Writer] = []
    folders: list[Writer] = []
    direct: list[Destination] = []
    for item in items:
        if _is_path(item):
            folders.append(WatchedFolder(item, resume))
        elif item == "tensorboard" or hasattr(item, "add_scalar"):
            writers.append(TensorBoard(None if isinstance(item, str) else item, folder, resume))
        elif item == "wandb" or _is_wandb_run(item):
            direct.append(WeightsAndBiases(None if isinstance(item, str) else item))
        elif item == "mlflow":
            writers.append(MLflow())
        elif isinstance(item, Destination):
            direct.append(item)
        elif callable(item):
            direct.append(Calls(item))
        else:
            raise InputError(f"to= takes a run folder, {', '.join(map(repr, TRACKERS))}, a callable, or a list, not {item!r}")
    writers += folders  # begin last, so that a tracker that cannot begin leaves no folder
    return Several([*direct, *([Background(writers)] if writers else [])])


def last_step(to: Any) -> int:
    """The last step in a run folder among what a user gives; 0 without one."""
    items = to if isinstance(to, list | tuple) else [to]
    return max((last_watched(item) for item in items if _is_path(item)), default=0)


def _is_path(item: Any) -> bool:
    if isinstance(item, Path):
        return True
    if not isinstance(item, str) or item in TRACKERS:
        return False
    hint = "" if os.sep in item or Path(item).exists() else did_you_mean(item, TRACKERS)
    if hint:
        raise InputError(f"to='{item}'{hint} A run folder of that name is './{item}'")
    return True


def _is_wandb_run(item: Any) -> bool:
    return type(item).__module__.partition(".")[0] == "wandb" and hasattr(item, "log")
