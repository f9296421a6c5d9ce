"""A sweep on a Ray cluster: every task asks for its cores and its share of a GPU, and Ray finds a node for it."""

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from normscope.core.threads import usable_cores
from normscope.errors import InputError, MissingExtraError
from normscope.machine.interrupts import keeping_handlers
from normscope.sweeps.folder import PLAN
from normscope.sweeps.tasks import Failure, Task, attempt

LOCAL = "local"
_REACH = 5.0  # seconds for an answer from an address
_COUNT = 1.0  # between two counts of the nodes
_PATIENCE = 60.0  # without any node that a run fits on
_STORE = 80 << 20  # bytes: nothing but plain values is sent
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # how a client begins, with empty settings


@dataclass(frozen=True)
class Needs:
    """What a run asks of a node: cores, one for each thread, and a GPU that it shares with ``per_gpu`` − 1 others."""

    cpus: int
    per_gpu: int | None = None

    def places(self, node: dict[str, Any]) -> int:
        """How many runs fit on a node, as Ray describes it."""
        resources = node["Resources"] if node["Alive"] else {}
        cores = int(resources.get("CPU", 0)) // self.cpus
        return cores if self.per_gpu is None else min(cores, int(resources.get("GPU", 0)) * self.per_gpu)

    @property
    def options(self) -> dict[str, float]:
        """The options of a remote function."""
        return {"num_cpus": self.cpus, "num_gpus": 1 / self.per_gpu if self.per_gpu else 0}

    def __str__(self) -> str:
        share = "" if self.per_gpu is None else " and a GPU" if self.per_gpu == 1 else f" and 1/{self.per_gpu} of a GPU"
        return f"{self.cpus} core{'s' * (self.cpus > 1)}{share}"


class RayExecutor:
    """Tasks on the cluster at ``address`` (HOST:PORT, ``auto``), or for ``local`` on one that is started and ended here.

    As many tasks as fit on the nodes are started at a time, or ``workers`` if that is given: tasks that wait make an
    autoscaling cluster grow.
    """

    def __init__(self, address: str, needs: Needs, workers: int | None = None, gpus: tuple[str, ...] = ()) -> None:
        check_cluster(address)
        import ray

        self.needs, self.workers, self.tasks = needs, workers, set[Any]()
        self.cluster = "a Ray cluster on this machine" if address == LOCAL else f"the Ray cluster at '{address}'"
        self.places, self.counted, self.fitted = 0, 0.0, time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(sys.stderr))  # Ray prints on stdout that a node was lost; --json is alone there
            options = stack.enter_context(_new_cluster(gpus)) if address == LOCAL else {"address": address}
            try:
                with keeping_handlers():
                    ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise InputError(f"cannot use {self.cluster}: {_last_line(error)}") from error
            stack.callback(ray.shutdown)
            self.remote = ray.remote(max_retries=0, **needs.options)(attempt_on_node)
            self.room  # noqa: B018  # counts the nodes
            if not self.places and workers is None:
                raise InputError(f"no node of {self.cluster} has {needs} for a run; cpus= and per_gpu= set what a run asks for")
            self.stack = stack.pop_all()

    @property
    def room(self) -> int:
        """How many more tasks fit on the nodes that are there, or ``workers`` less those that are running."""
        import ray

        if time.monotonic() - self.counted >= _COUNT:
            self.counted = time.monotonic()
            self.places = sum(self.needs.places(node) for node in ray.nodes())
        if self.places or self.workers:
            self.fitted = time.monotonic()
        elif time.monotonic() - self.fitted > _PATIENCE:
            raise ConnectionError(f"no node of {self.cluster} has {self.needs} any more; the same command resumes")
        return max(0, (self.workers or self.places) - len(self.tasks))

    def submit(self, task: Task) -> "Future[Failure | None]":
        """Give a task to Ray."""
        future: Future[Failure | None] = self.remote.remote(task, self.needs.cpus, _versions()).future()
        self.tasks.add(future)
        future.add_done_callback(self.tasks.discard)
        return future

    def loss(self, error: BaseException) -> str:
        """A process or node that was lost; a node that cannot execute any run stops the sweep."""
        from ray.exceptions import RayError, RayTaskError

        if isinstance(error, RayTaskError):
            cause = getattr(error, "cause", None)
            install = f"a node cannot execute a run; is normscope installed on all nodes? ({_last_line(error)})"
            raise InputError(f"cannot use {self.cluster}: {cause if isinstance(cause, InputError) else install}") from error
        if isinstance(error, RayError):
            return f"its node or process was lost: {_last_line(error)}"
        raise error

    def close(self) -> None:
        """Disconnect, which ends all tasks, and end the cluster if it was started here."""
        self.stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def attempt_on_node(task: Task, threads: int, versions: dict[str, str]) -> Failure | None:
    """Execute a task on a node, if it gives the same result there as anywhere else."""
    import ray
    import torch

    node = ray.util.get_node_ip_address()
    if not (task.sweep / PLAN).is_file():
        raise InputError(f"node {node} does not see '{task.sweep}'; out= must be on a file system that all nodes share")
    if versions != _versions():
        there, here = (" and ".join(map(" ".join, some.items())) for some in (_versions(), versions))
        raise InputError(f"node {node} has {there}, this machine {here}; install the same on all nodes")
    torch.set_num_threads(threads)
    return attempt(task)


def check_cluster(address: str) -> None:
    """Raise ``InputError`` for what is not an address, and where no cluster answers: Ray would end this process instead."""
    if find_spec("ray") is None:
        raise MissingExtraError("a sweep on a cluster needs ray; pip install 'normscope[sweeps]'")
    if address in (LOCAL, "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise InputError(f"ray= is local, auto or the HOST:PORT of a cluster's head (as ray start prints it), not '{address}'")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _REACH) as connection:
            connection.sendall(_HTTP2)
            if not connection.recv(1):
                raise ConnectionResetError("the connection was closed")
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"no Ray cluster answers at '{address}' ({reason}); ray start prints the address of one") from None


@contextmanager
def _new_cluster(gpus: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """What Ray needs to know to start a cluster of this machine's cores and of these GPUs; its files are removed at the end."""
    resources = {"num_cpus": usable_cores(), "num_gpus": len(gpus), "object_store_memory": _STORE}
    variables = {"RAY_USAGE_STATS_ENABLED": "0"} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    with _environment(variables), TemporaryDirectory(prefix="normscope-ray-", ignore_cleanup_errors=True) as folder:
        yield {"address": "local", **resources, "include_dashboard": False, "_temp_dir": folder}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _versions() -> dict[str, str]:
    import torch

    from normscope import __version__

    return {"normscope": __version__, "torch": str(torch.__version__)}


def _last_line(error: BaseException) -> str:
    """The last line of an error, where Ray names what was wrong, or its class."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
