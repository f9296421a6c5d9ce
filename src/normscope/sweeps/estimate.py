"""How long the runs of a sweep take: some are timed for a few seconds, the others follow from their arithmetic."""

import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from normscope.errors import InputError
from normscope.experiments.experiment import Experiment
from normscope.experiments.progress import SILENT, Progress
from normscope.machine.interrupts import holding_signals
from normscope.sweeps.local import prepare

TIMED, SCALED, AT_LEAST = "timed", "scaled", "at least"
_FACTORS = {TIMED: 1.5, SCALED: 4.0, AT_LEAST: float("inf")}
_BUDGET = {"cpu": 10.0, "cuda": 45.0}  # seconds; a GPU compiles first
_START = 120.0  # seconds for a process to start
_TICK = 0.25
_SIZE, _SHARE_OF_PEAK = 512, 0.25  # a product of matrices is faster than a model by such a factor


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run, and where they come from.

    ``timed``: from steps of this very run; ``scaled``: from another run, by the ratio of multiplications; ``at least``: the run
    was not over when time was up, and its arithmetic is not known.
    """

    seconds: float
    basis: str

    @property
    def low(self) -> float:
        """A run that was timed takes 2/3 of the estimate at least, a scaled one a quarter."""
        return self.seconds if self.basis == AT_LEAST else self.seconds / _FACTORS[self.basis]

    @property
    def high(self) -> float:
        """A run that was timed takes 3/2 of the estimate at most, a scaled one four times as much."""
        return self.seconds * _FACTORS[self.basis]


@dataclass
class _Timings:
    """What is known when time is up: seconds of complete timings, the last share of the one that was running, and the speed."""

    seconds: dict[int, float] = field(default_factory=dict)
    shares: dict[int, tuple[float, float]] = field(default_factory=dict)
    speed: float = 0.0  # multiplications in a second

    def estimates(self, works: Sequence[float]) -> list[Estimate]:
        """An estimate for each run, from its multiplications (0 where they are not known)."""
        reference = max((i for i in self.seconds if works[i]), key=lambda i: works[i], default=None)
        speed = self.speed if reference is None else works[reference] / self.seconds[reference]
        return [self._estimate(index, work, speed) for index, work in enumerate(works)]

    def _estimate(self, index: int, work: float, speed: float) -> Estimate:
        if index in self.seconds:
            return Estimate(self.seconds[index], TIMED)
        if work and speed:
            return Estimate(work / speed, SCALED)
        elapsed, share = self.shares.get(index, (0.0, 0.0))
        return Estimate(max(elapsed / share if share else elapsed, *self.seconds.values(), 0.0), AT_LEAST)


def estimate(
    experiments: Sequence[Experiment],
    device: str = "cpu",
    threads: int = 1,
    gpu: str | None = None,
    progress: Progress = SILENT,
) -> list[Estimate]:
    """How long each run takes on this machine, alone; an answer after some seconds, whatever the runs are.

    A process times one run after the other, those with the least arithmetic first, and is ended when time is up.
    """
    works = [experiment.work for experiment in experiments]
    order = sorted(range(len(works)), key=lambda index: works[index])
    context = get_context("spawn")
    (receiver, sender), lifeline = context.Pipe(duplex=False), context.Pipe(duplex=False)
    queue = [(index, experiments[index]) for index in order]
    process = context.Process(target=_time, args=(sender, lifeline[0], threads, gpu, device, queue), daemon=True)
    with holding_signals():
        process.start()
    sender.close()
    try:
        return _collect(receiver, len(works), _BUDGET[device.partition(":")[0]], progress).estimates(works)
    finally:
        process.kill()
        process.join()
        for end in (receiver, *lifeline):
            end.close()


def _collect(receiver: Connection, count: int, budget: float, progress: Progress) -> _Timings:
    timings, began, deadline = _Timings(), None, time.monotonic() + _START
    while len(timings.seconds) < count and (left := deadline - time.monotonic()) > 0:
        used = 0.0 if began is None else min(budget, time.monotonic() - began)
        progress("timing", round(used, 1), budget, f"{len(timings.seconds)} of {count} shapes")
        if not receiver.poll(min(left, _TICK)):
            continue
        try:
            kind, *values = receiver.recv()
        except EOFError:  # killed, perhaps for its memory: the others are scaled
            break
        if kind == "speed":
            (timings.speed,), began = values, time.monotonic()
            deadline = began + budget
        elif kind == "seconds":
            timings.seconds[values[0]] = values[1]
        elif kind == "share":
            timings.shares[values[0]] = values[1:]
        else:
            raise values[0]
    return timings


class _Shares(Progress):
    """Sends how much of a run is done."""

    def __init__(self, sender: Connection, index: int) -> None:
        self.sender, self.index, self.started, self.last = sender, index, time.monotonic(), 0.0

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        """``done`` of ``total`` units of a stage are complete."""
        now = time.monotonic()
        if now - self.last >= _TICK:
            self.last = now
            self.sender.send(("share", self.index, now - self.started, done / total if total else 0.0))


def _time(
    sender: Connection, lifeline: Connection, threads: int, gpu: str | None, device: str, queue: list[tuple[int, Experiment]]
) -> None:
    """Time runs in this process until it is ended."""
    prepare(lifeline, threads, gpu, Path(os.devnull))
    try:
        sender.send(("speed", _SHARE_OF_PEAK * _multiplications(device)))
        for index, experiment in queue:
            sender.send(("seconds", index, experiment.seconds(_Shares(sender, index))))
    except InputError as error:
        sender.send(("error", error))
    except Exception:  # a mistake of ours has to be seen where the output of this process is not
        sender.send(("error", RuntimeError(traceback.format_exc())))


def _multiplications(device: str) -> float:
    """How many multiplications of matrix elements this device does in a second."""
    import torch

    precision = torch.bfloat16 if device.startswith("cuda") else torch.float32
    matrix = torch.ones(_SIZE, _SIZE, dtype=precision, device=device.partition(":")[0])
    times: list[Any] = []
    for _ in range(4):
        started = time.monotonic()
        (matrix @ matrix).sum().item()
        times.append(time.monotonic() - started)
    return float(_SIZE**3 / max(min(times), 1e-6))
