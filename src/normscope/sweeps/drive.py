"""Drive a sweep: give out what is not done yet, keep what comes back, go on when a run fails."""

import errno
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from normscope.errors import InputError
from normscope.runs import fingerprint
from normscope.sweeps.execute import Event, Executor, Task, is_disk_full
from normscope.sweeps.plan import Sweep
from normscope.sweeps.state import Progress, SweepFolder

_LOOK = 0.25  # seconds between looks at how far runs are


@dataclass
class Standing:
    """How a sweep stands: the state of every run, and how far those are that are running."""

    states: dict[str, str]
    running: dict[str, Progress] = field(default_factory=dict)

    def count(self, state: str) -> int:
        """The number of runs in a state."""
        return sum(own == state for own in self.states.values())

    @property
    def done(self) -> float:
        """Runs that have ended, and the shares of those that are running."""
        ended = sum(state in ("finished", "diverged", "failed") for state in self.states.values())
        return ended + sum(progress.share for progress in self.running.values())


def check_folder(folder: SweepFolder, sweep: Sweep) -> None:
    """Refuse a folder that holds something else than this sweep."""
    if folder.empty:
        return
    if holds(folder, sweep):
        for point in sweep.points:
            run = folder.complete(point.name)
            if run is not None and not point.job.fits(run):
                raise InputError(
                    f"run '{point.name}' in '{folder.path}' was of another model or text than is there now under that name; "
                    f"choose another --out"
                )
        return
    if folder.begun:
        raise InputError(f"'{folder.path}' holds another sweep (other points, or another device); choose another --out")
    raise InputError(f"'{folder.path}' exists and is no sweep; choose another --out")


def begin(folder: SweepFolder, sweep: Sweep, plan: Mapping[str, Any], retry_failed: bool = False) -> dict[str, Any]:
    """Begin a sweep in its folder, or take it up; the plan as it was when its first run began, with what else was said then."""
    check_folder(folder, sweep)
    if folder.untouched:
        folder.begin({**sweep.record, **plan})
    if retry_failed:
        for point in sweep.points:
            folder.forgive(point.name)
    return folder.plan


def holds(folder: SweepFolder, sweep: Sweep) -> bool:
    """Whether a folder holds that very sweep, begun or finished."""
    if not folder.begun:
        return False
    kept = folder.plan
    return fingerprint({key: kept.get(key) for key in sweep.record}) == fingerprint(sweep.record)


def run_sweep(
    folder: SweepFolder, sweep: Sweep, executor: Executor, watch: Callable[[Standing], None] = lambda standing: None
) -> Standing:
    """Run what is neither finished nor failed; ``watch`` hears how it stands a few times a second."""
    with telling_a_full_disk(folder):
        left, looked = _Left(folder, sweep), 0.0
        watch(left.standing)
        while left.queue or left.busy:
            left.give(executor)
            for event in executor.events(_LOOK):
                left.hear(event)
            if time.monotonic() - looked >= _LOOK or not (left.queue or left.busy):
                _look(folder, left.standing)
                watch(left.standing)
                looked = time.monotonic()
    folder.tidy()
    return left.standing


class _Left:
    """What is left of a sweep: tasks to give out, and the parts of each run that have not come back."""

    def __init__(self, folder: SweepFolder, sweep: Sweep) -> None:
        self.folder, self.jobs = folder, {point.name: point.job for point in sweep.points}
        self.standing = read_standing(folder, list(self.jobs))
        self.queue, self.busy = deque[Task](), 0
        self.parts: dict[str, int] = {}
        for name in [name for name, state in self.standing.states.items() if state in ("waiting", "running")]:
            self.standing.states[name] = "waiting"  # whoever ran it is gone
            folder.settle(name)
            missing = self.jobs[name].missing(folder.run(name))
            self.parts[name] = len(missing)
            self.queue.extend(Task(folder.path, name, self.jobs[name], part) for part in missing or (None,))
        self.totals, self.reporters = dict(self.parts), {name: folder.reporter(name) for name in self.parts}

    def give(self, executor: Executor) -> None:
        """Give out as much as there is room for."""
        while self.queue and executor.room:
            task = self.queue.popleft()
            self.standing.states[task.name] = "running"
            executor.submit(task)
            self.busy += 1

    def hear(self, event: Event) -> None:
        """Keep what a task came to: of the last part follows the run's end, of an error that its other parts are left."""
        self.busy -= 1
        name, part = event.key
        if event.disk_full:
            raise OSError(errno.ENOSPC, event.error)
        if event.error is not None:
            self.folder.fail(name, event.error, event.trace)
            self.queue = deque(task for task in self.queue if task.name != name)
        if event.error is not None or part is None:
            self.folder.settle(name)
            self.standing.states[name] = self.folder.state(name)
        elif self.standing.states[name] == "running":
            self.parts[name] -= 1
            self.reporters[name](self.totals[name] - self.parts[name], self.totals[name], "parts")
            if not self.parts[name]:
                self.queue.appendleft(Task(self.folder.path, name, self.jobs[name]))


def read_standing(folder: SweepFolder, names: list[str]) -> Standing:
    """How a sweep stands by what is in its folder."""
    standing = Standing({name: folder.state(name) for name in names})
    _look(folder, standing)
    return standing


def _look(folder: SweepFolder, standing: Standing) -> None:
    """See how far those are that are running."""
    running = [name for name, state in standing.states.items() if state == "running"]
    standing.running = {name: noted for name in running if (noted := folder.progress(name)) is not None}


@contextmanager
def telling_a_full_disk(folder: SweepFolder) -> Iterator[None]:
    """One clear error when the disk is full, wherever that came out."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        message = "the disk is full; all that is finished is kept: free some space and give the same command again"
        raise OSError(errno.ENOSPC, message, str(folder.path)) from error
