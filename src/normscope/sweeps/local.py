"""Worker processes on this machine, with its cores and GPUs shared out."""

import os
import signal
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from normscope.machine.interrupts import holding_signals, release_signals
from normscope.sweeps.tasks import LOG, Failure, Task, attempt, redirect_output

_GRACE = 5.0  # seconds that a worker has to clean up


class _Worker:
    """One process with its share of the machine, started when it has something to do.

    It is a pool of one process: a process that dies breaks its whole pool, so in a pool of several a death would take other
    runs with it, and nobody could tell whose task was the cause. The process ends when the other end of ``lifeline`` is closed,
    by us or because we were killed; the processes of a pool do neither.
    """

    def __init__(self, threads: int, gpu: str | None, log: Path) -> None:
        self.prepared = (threads, gpu, log)
        self.pool: ProcessPoolExecutor | None = None
        self.lifeline: tuple[Connection, Connection] | None = None
        self.future: Future[Failure | None] | None = None

    @property
    def free(self) -> bool:
        return self.future is None or self.future.done()

    def submit(self, task: Task) -> "Future[Failure | None]":
        if self.future is not None and (self.future.exception() or self.future.result()):
            self.close()  # what failed may have left a GPU or a library in a state that other runs would suffer from
        if self.pool is None:
            context = get_context("spawn")
            self.lifeline = context.Pipe(duplex=False)
            self.pool = ProcessPoolExecutor(1, context, prepare, (self.lifeline[0], *self.prepared))
        with holding_signals():  # a process has no handler yet while it imports
            self.future = self.pool.submit(attempt, task)
        return self.future

    def close(self) -> None:
        for end in self.lifeline or ():
            end.close()
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
        self.pool = self.lifeline = self.future = None


class LocalExecutor:
    """Up to ``workers`` processes, each with ``threads`` threads and, in turn, one of the GPUs."""

    def __init__(self, sweep: Path, workers: int, threads: int, gpus: tuple[str, ...] = ()) -> None:
        self.workers = [_Worker(threads, gpus[i % len(gpus)] if gpus else None, sweep / LOG) for i in range(workers)]

    @property
    def room(self) -> int:
        """Workers that have nothing to do."""
        return sum(worker.free for worker in self.workers)

    def submit(self, task: Task) -> "Future[Failure | None]":
        """Give a task to a free worker, first to one whose process is running already."""
        free = [worker for worker in self.workers if worker.free]
        return min(free, key=lambda worker: worker.pool is None).submit(task)

    def loss(self, error: BaseException) -> str:
        """A worker that died."""
        if isinstance(error, BrokenProcessPool):
            return f"its process was killed; memory may have run out, or {LOG} has the reason"
        raise error

    def close(self) -> None:
        """End all processes; those that do not clean up in time are killed."""
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def visible_gpus(device: str) -> tuple[str, ...]:
    """The GPUs of this machine as CUDA_VISIBLE_DEVICES names them: all for ``cuda``, one for ``cuda:1``, none for a CPU."""
    import torch

    kind, _, index = device.partition(":")
    if kind != "cuda":
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return (every[int(index)],) if index else tuple(every)


def prepare(lifeline: Connection, threads: int, gpu: str | None, log: Path) -> None:
    """Prepare a process that works for this one: it ends with the lifeline, and what it prints goes to the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the main process decides
    release_signals()
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    redirect_output(log)
    import torch

    torch.set_num_threads(threads)


def _end_with(lifeline: Connection) -> None:
    """End this process when the main process closes the lifeline or is gone: all that counts is on disk."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)  # a run folder that is being written is removed
        time.sleep(_GRACE)
        os._exit(1)
