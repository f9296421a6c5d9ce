"""Worker processes on this machine, with its cores and GPUs shared out."""

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from normscope.sweeps.execute import LOG, Event, Task, attempt, has_no_room, into_log

_LEAVE = 5.0  # seconds that a worker has to clean up


@dataclass
class _Worker:
    """A process, the pipe to it, and what it is doing."""

    process: SpawnProcess
    pipe: Connection
    task: Task | None = None


class LocalExecutor:
    """Up to so many processes, each with its share of threads and, in turn, one of the GPUs.

    A process is started when there is something to do. One that dies is a failure of its task; another takes its place.
    """

    def __init__(self, sweep: Path, workers: int, threads: int, gpus: tuple[str, ...] = ()) -> None:
        self.sweep, self.threads = sweep, threads
        self.gpus = [gpus[i % len(gpus)] if gpus else None for i in range(workers)]
        self.workers: dict[int, _Worker] = {}

    def _start(self, gpu: str | None) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self.threads, gpu, self.sweep / LOG)
        process = context.Process(target=_work, args=arguments, daemon=True, name="normscope sweep worker")
        process.start()
        theirs.close()
        return _Worker(process, ours)

    @property
    def room(self) -> int:
        """Places where nothing is done."""
        return len(self.gpus) - sum(worker.task is not None for worker in self.workers.values())

    def submit(self, task: Task) -> None:
        """Give a task to a worker that has none, to a new one if there is no such."""
        free = [i for i in range(len(self.gpus)) if i not in self.workers or self.workers[i].task is None]
        i = next((i for i in free if i in self.workers and self.workers[i].process.is_alive()), free[0])
        if i not in self.workers or not self.workers[i].process.is_alive():
            self.workers[i] = self._start(self.gpus[i])
        self.workers[i].task = task
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: found when its events are asked for
            self.workers[i].pipe.send(task)

    def events(self, timeout: float) -> list[Event]:
        """What workers answered, and whose process died."""
        busy = {worker.pipe: i for i, worker in self.workers.items() if worker.task is not None}
        found = []
        for pipe in connection.wait(list(busy), timeout):
            i = busy[pipe]  # type: ignore[index]
            worker = self.workers[i]
            try:
                event = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                event = self._died(self.workers.pop(i))
            worker.task = None
            found.append(event)
            if event.error is not None and i in self.workers:
                # what failed may have left a GPU or a library in a state that others would suffer from
                _end(self.workers.pop(i))
        return found

    def _died(self, worker: _Worker) -> Event:
        worker.process.join(_LEAVE)
        code = worker.process.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with status {code}"
        hint = "; memory may have run out" if code == -signal.SIGKILL else f"; {LOG} may say why"
        assert worker.task is not None
        return Event(worker.task.key, f"its process {how}{hint}", disk_full=has_no_room(self.sweep))

    def close(self) -> None:
        """End all processes; those that do not clean up in time are killed."""
        for worker in self.workers.values():
            worker.process.terminate()
        for worker in self.workers.values():
            _end(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _end(worker: _Worker) -> None:
    """End a process, and kill it if it does not clean up in time."""
    worker.process.terminate()
    worker.process.join(_LEAVE)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.pipe.close()


def visible_gpus(device: str) -> tuple[str, ...]:
    """The GPUs of this machine as CUDA_VISIBLE_DEVICES names them: all for ``cuda``, one for ``cuda:1``, none for a CPU."""
    import torch

    kind, _, index = device.partition(":")
    if kind != "cuda":
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return (every[int(index)],) if index else tuple(every)


def _work(pipe: Connection, threads: int, gpu: str | None, log: Path) -> None:
    """The life of a worker: task by task, until the pipe closes or the process that began it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    into_log(log)
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(task))


def _end_with_parent() -> None:
    """Leave nothing behind when the driver is killed: what is kept is on disk, the rest would be done twice."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
