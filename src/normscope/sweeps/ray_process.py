"""The process that speaks with Ray for a sweep: tasks come through a pipe, and what they came to goes back."""

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from normscope.sweeps.execute import Event, Task, attempt, has_no_room, into_log
from normscope.sweeps.state import PLAN

_LOOK = 0.1  # seconds between looks at tasks and pipe
_COUNT = 1.0  # and between counts of the nodes
_ATTEMPTS = 5  # of a task whose nodes or processes are lost
_END = 5.0  # seconds that cancelled tasks have
_STORE = 80 << 20  # bytes: nothing but plain values travels


@dataclass(frozen=True)
class Needs:
    """What a run asks of a node: cores, one for each thread, and a GPU that it shares with ``per_gpu`` − 1 others."""

    cpus: int
    per_gpu: int | None = None

    def places(self, node: dict[str, Any]) -> int:
        """How many runs fit on a node, as Ray describes it."""
        have = node["Resources"] if node["Alive"] else {}
        cores = int(have.get("CPU", 0)) // self.cpus
        return cores if self.per_gpu is None else min(cores, int(have.get("GPU", 0)) * self.per_gpu)

    @property
    def options(self) -> dict[str, float]:
        """The same in Ray's words."""
        return {"num_cpus": self.cpus, "num_gpus": 1 / self.per_gpu if self.per_gpu else 0}

    def __str__(self) -> str:
        share = "" if self.per_gpu is None else " and a GPU" if self.per_gpu == 1 else f" and 1/{self.per_gpu} of a GPU"
        return f"{self.cpus} core{'s' * (self.cpus > 1)}{share}"


@dataclass(frozen=True)
class Ready:
    """The process is there; what follows is up to the cluster."""


@dataclass(frozen=True)
class Places:
    """So many runs fit on the nodes that are there."""

    count: int


@dataclass(frozen=True)
class Stopped:
    """The cluster cannot be used, for a reason that is the same for all runs."""

    why: str


def drive(pipe: Connection, address: str | None, needs: Needs, gpus: tuple[str, ...], log: Path) -> None:
    """The life of the process: until the pipe is closed, or None comes through it. Without an address it starts a cluster."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver decides
    into_log(log)
    import ray

    pipe.send(Ready())
    with _own_cluster(gpus) if address is None else nullcontext({"address": address}) as where:
        try:
            ray.init(**where, logging_level=logging.ERROR, log_to_driver=True)
        except Exception as error:
            pipe.send(Stopped(_line(error)))
            return
        tasks = _Tasks(pipe, needs)
        try:
            tasks.run()
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the driver is gone
            pass
        finally:
            tasks.cancel()
            ray.shutdown()


@contextmanager
def _own_cluster(gpus: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """What Ray has to know for a cluster of this machine's cores and of these GPUs; its files are gone afterwards."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    has = {"num_cpus": len(os.sched_getaffinity(0)), "num_gpus": len(gpus), "object_store_memory": _STORE}
    with TemporaryDirectory(prefix="normscope-ray-", ignore_cleanup_errors=True) as folder:
        yield {"address": "local", **has, "include_dashboard": False, "_temp_dir": folder}


class _Tasks:
    """What Ray has been given, by the promise of its end."""

    def __init__(self, pipe: Connection, needs: Needs) -> None:
        import ray

        self.pipe, self.needs = pipe, needs
        self.remotes = {calls: ray.remote(max_retries=0, max_calls=calls, **needs.options)(attempt_there) for calls in (0, 1)}
        self.running: dict[Any, Task] = {}
        self.lost = Counter[tuple[str, int | None]]()
        self.places: int | None = None
        self.most_gpus = 0.0
        self.counted = -_COUNT

    def run(self) -> None:
        """Take tasks and tell what they came to, until None comes."""
        import ray

        while True:
            self._count()
            while self.pipe.poll(0.0 if self.running else _LOOK):
                task = self.pipe.recv()
                if task is None:
                    return
                self._submit(task)
            if self.running:
                ray.wait(list(self.running), num_returns=1, timeout=_LOOK)
                ended, _ = ray.wait(list(self.running), num_returns=len(self.running), timeout=0)
                for promise in ended:
                    self._answer(promise)

    def _submit(self, task: Task) -> None:
        """Give a task to Ray, in a process of its own where a node has several GPUs: a process keeps the GPU it began with."""
        remote = self.remotes[1 if self.needs.per_gpu and self.most_gpus > 1 else 0]
        self.running[remote.remote(task, self.needs.cpus, _versions())] = task

    def _count(self) -> None:
        """Tell how many runs fit, when that has changed."""
        import ray

        if time.monotonic() - self.counted < _COUNT:
            return
        self.counted = time.monotonic()
        nodes = ray.nodes()
        self.most_gpus = max(node["Resources"].get("GPU", 0) for node in nodes)
        places = sum(self.needs.places(node) for node in nodes)
        if places != self.places:
            self.places = places
            self.pipe.send(Places(places))

    def _answer(self, promise: Any) -> None:
        """Pass on how a task ended; one that was lost is given out again, and goes on from its checkpoint."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        task = self.running.pop(promise)
        try:
            self.pipe.send(ray.get(promise))
        except RayTaskError as error:  # not the run's own, which is in its event
            self.pipe.send(Stopped(f"a node cannot execute a run, is normscope installed on all? ({_line(error)})"))
        except RayError as error:
            self.lost[task.key] += 1
            if self.lost[task.key] < _ATTEMPTS:
                self._submit(task)
                return
            line = f"its node or process was lost {_ATTEMPTS} times: {_line(error)}"
            self.pipe.send(Event(task.key, line, disk_full=has_no_room(task.sweep)))

    def cancel(self) -> None:
        """End every task."""
        import ray

        for promise in self.running:
            ray.cancel(promise, force=True)
        if self.running:
            ray.wait(list(self.running), num_returns=len(self.running), timeout=_END)


def attempt_there(task: Task, threads: int, versions: dict[str, str]) -> Event | Stopped:
    """Execute a task on a node, if the node is one where it comes out as anywhere else."""
    import ray
    import torch

    node = ray.util.get_node_ip_address()
    if not (task.sweep / PLAN).is_file():
        return Stopped(f"node {node} does not see '{task.sweep}'; --out must be on a file system that all nodes share")
    if versions != _versions():
        there, here = (" and ".join(map(" ".join, some.items())) for some in (_versions(), versions))
        return Stopped(f"node {node} has {there}, this machine {here}; install the same on all nodes")
    torch.set_num_threads(threads)
    return attempt(task)


def _versions() -> dict[str, str]:
    import torch

    from normscope import __version__

    return {"normscope": __version__, "torch": str(torch.__version__)}


def _line(error: BaseException) -> str:
    """The end of an error's text, where Ray names what was wrong, or its class."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
