"""A sweep on a Ray cluster: every run asks for its cores and its share of a GPU, and Ray finds a node for it.

Ray is spoken to by a process of its own (``ray_process``): what Ray prints goes to the sweep's log, and a cluster that does not
answer, or that takes its driver with it, is one error here.
"""

import os
import socket
import time
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from normscope.errors import InputError, MissingExtraError
from normscope.sweeps.execute import LOG, Event, Task
from normscope.sweeps.ray_process import Needs, Places, Stopped, drive

LOCAL = "local"
_REACH = 5.0  # seconds for a connection to an address
_CONNECT = 10.0  # and for the cluster to take us in
_START = 120.0  # for processes to start
_LEAVE = 15.0  # to end all tasks
_PATIENCE = 60.0  # without any node that a run fits on


class RayExecutor:
    """Tasks on the cluster at ``address`` (HOST:PORT, ``auto``), or on one of this machine for ``local``, ended with it.

    As many tasks as fit on the nodes that are there are given out at a time, or ``workers`` if that is said: tasks that wait
    are what makes a cluster grow. A task whose node or process is lost is given out again.
    """

    def __init__(self, sweep: Path, address: str, needs: Needs, workers: int | None = None, gpus: tuple[str, ...] = ()) -> None:
        check_cluster(address)
        self.log = sweep / LOG if sweep.is_dir() else Path(os.devnull)
        self.address, self.needs, self.workers = address, needs, workers
        self.places, self.busy, self.fitted_at = 0, 0, time.monotonic()
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, None if address == LOCAL else address, needs, gpus, self.log)
        self.process = context.Process(target=drive, args=arguments, daemon=True, name="normscope sweep on Ray")
        self.process.start()
        theirs.close()
        try:
            self._connect()
        except BaseException:
            if address != LOCAL:  # it may wait for an answer for minutes, and has nothing to clean up
                self.process.kill()
            self.close()
            raise

    def _connect(self) -> None:
        """Wait for the process, then for the cluster, and see whether a run fits on it."""
        self._first(_START, "its process did not start")
        limit = _START if self.address == LOCAL else _CONNECT
        self._first(
            limit, f"it did not answer within {limit:.0f} s; is it a cluster's HOST:PORT, and this machine a node of it?"
        )
        if not self.places and self.workers is None:
            raise InputError(
                f"no node of {self._cluster} has {self.needs} for a run; --cpus and --per-gpu say what a run asks for"
            )

    def _first(self, seconds: float, otherwise: str) -> None:
        if not self.pipe.poll(seconds):
            raise InputError(f"cannot use {self._cluster}: {otherwise}")
        self._receive()

    @property
    def _cluster(self) -> str:
        return "a Ray cluster of this machine" if self.address == LOCAL else f"the Ray cluster at '{self.address}'"

    def _receive(self) -> Event | None:
        """The next message: an event is returned, a number of places is kept, an end is an error."""
        try:
            message: Any = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            lost = f"the connection to {self._cluster} was lost ({self.log} says more); the same command goes on"
            raise ConnectionError(lost) from None
        match message:
            case Stopped(why):
                raise InputError(f"cannot use {self._cluster}: {why}")
            case Places(count):
                self.places = count
            case Event():
                self.busy -= 1
                return message
        return None

    @property
    def room(self) -> int:
        """How many more fit on the nodes that are there, or ``workers`` less those that were given out."""
        return max(0, (self.workers or self.places) - self.busy)

    def submit(self, task: Task) -> None:
        """Give a task to Ray."""
        self.busy += 1
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: found when events are asked for
            self.pipe.send(task)

    def events(self, timeout: float) -> list[Event]:
        """Tasks that ended; an error if there is no node left for them."""
        found: list[Event] = []
        while self.pipe.poll(0.0 if found else timeout):
            event = self._receive()
            if event is not None:
                found.append(event)
        if self.places or self.workers:
            self.fitted_at = time.monotonic()
        elif time.monotonic() - self.fitted_at > _PATIENCE:
            raise ConnectionError(f"no node of {self._cluster} has {self.needs} any more; the same command goes on")
        return found

    def close(self) -> None:
        """End all tasks, and the cluster if it is ours."""
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(_LEAVE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_cluster(address: str) -> None:
    """Refuse what is no address, and one where nothing listens: Ray would try for minutes."""
    if find_spec("ray") is None:
        raise MissingExtraError("a sweep on a cluster needs ray; pip install 'normscope[sweeps]'")
    if address in (LOCAL, "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise InputError(f"--ray is local, auto or the HOST:PORT of a cluster's head (as ray start prints it), not '{address}'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"no Ray cluster answers at '{address}' ({reason}); ray start prints the address of one") from None
