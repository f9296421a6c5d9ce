"""The scheduler of a sweep: starts the tasks that are not done yet, records failures, and starts tasks again that were lost."""

import errno
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from normscope.errors import InputError
from normscope.experiments.progress import SILENT, Progress
from normscope.runs import fingerprint
from normscope.sweeps.folder import STATES, RunProgress, SweepFolder
from normscope.sweeps.plan import Plan
from normscope.sweeps.tasks import Executor, Failure, Task, has_no_space

_TICK = 0.25  # seconds between two looks at the progress of runs
ATTEMPTS = 5  # at a task whose process or node is lost


@dataclass
class Status:
    """The state of every run of a sweep, and the progress of those that are running."""

    states: dict[str, str]
    running: dict[str, RunProgress] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: SweepFolder, names: list[str]) -> "Status":
        """The status by what is in the folder."""
        status = cls({name: folder.state(name) for name in names})
        status.refresh(folder)
        return status

    def refresh(self, folder: SweepFolder) -> None:
        """Read the progress of the runs that are running."""
        running = [name for name, state in self.states.items() if state == "running"]
        self.running = {name: noted for name in running if (noted := folder.progress(name)) is not None}

    @property
    def summary(self) -> str:
        """How many runs are in each state."""
        counts = Counter(self.states.values())
        return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])

    def report(self, progress: Progress) -> None:
        """Report the runs that have ended, with the shares of those that are running."""
        ended = sum(state in ("finished", "diverged", "failed") for state in self.states.values())
        done = ended + sum(run.share for run in self.running.values())
        progress("sweep", round(done, 2), len(self.states), self.summary)
        progress.parallel({name: (run.share, run.note) for name, run in self.running.items()})


def check_folder(folder: SweepFolder, plan: Plan) -> None:
    """Raise ``InputError`` for a folder that holds something else than this sweep."""
    if folder.empty:
        return
    if not folder.begun:
        raise InputError(f"'{folder.path}' exists and is not a sweep; choose another out=")
    if not holds(folder, plan):
        raise InputError(f"'{folder.path}' holds another sweep (other points, or another device); choose another out=")
    for point in plan.points:
        run = folder.complete(point.name)
        if run is not None and not point.experiment.fits(run.description["configuration"]):
            raise InputError(
                f"run '{point.name}' in '{folder.path}' was of another model or text than the one under that name now; "
                f"choose another out="
            )


def holds(folder: SweepFolder, plan: Plan) -> bool:
    """Whether a folder holds exactly this sweep, begun or finished."""
    if not folder.begun:
        return False
    saved = folder.plan
    return fingerprint({key: saved.get(key) for key in plan.record}) == fingerprint(plan.record)


def begin(folder: SweepFolder, plan: Plan, about: Mapping[str, Any], retry_failed: bool = False) -> dict[str, Any]:
    """Begin a sweep in its folder, or resume it; returns the plan and ``about`` as they were when its first run began."""
    check_folder(folder, plan)
    if folder.untouched:
        folder.write_plan({**plan.record, **about})
    if retry_failed:
        for point in plan.points:
            folder.clear_error(point.name)
    return folder.plan


def run_plan(folder: SweepFolder, plan: Plan, executor: Executor, progress: Progress = SILENT) -> Status:
    """Execute all runs that are neither finished nor failed."""
    scheduler = _Scheduler(folder, plan, executor)
    status = scheduler.status
    status.report(progress)
    while scheduler.queue or scheduler.busy:
        scheduler.step()
        status.refresh(folder)
        status.report(progress)
    folder.tidy()
    return status


class _Scheduler:
    """Tasks that wait, tasks that are executed, and how many parts of each run are left."""

    def __init__(self, folder: SweepFolder, plan: Plan, executor: Executor) -> None:
        self.folder, self.executor = folder, executor
        self.experiments = {point.name: point.experiment for point in plan.points}
        self.status = Status.of(folder, list(self.experiments))
        self.queue, self.busy = deque[Task](), dict[Future[Failure | None], Task]()
        self.lost = Counter[tuple[str, int | None]]()
        self.parts: dict[str, int] = {}
        for name in [name for name, state in self.status.states.items() if state in ("waiting", "running")]:
            self.status.states[name] = "waiting"  # whoever ran it is gone
            folder.clear_progress(name)
            missing = self.experiments[name].missing(folder.run(name))
            self.parts[name] = len(missing)
            self.queue.extend(self._task(name, part) for part in missing or (None,))
        self.totals, self.reporters = dict(self.parts), {name: folder.reporter(name) for name in self.parts}

    def _task(self, name: str, part: int | None = None) -> Task:
        return Task(self.folder.path, name, self.experiments[name], part)

    def step(self) -> None:
        """Start as many tasks as there is room for, and wait a moment for tasks to end."""
        while self.queue and self.executor.room:
            task = self.queue.popleft()
            self.status.states[task.name] = "running"
            self.busy[self.executor.submit(task)] = task
        if not self.busy:
            time.sleep(_TICK)
        for future in wait(self.busy, _TICK, FIRST_COMPLETED).done:
            self._end(self.busy.pop(future), future)

    def _end(self, task: Task, future: "Future[Failure | None]") -> None:
        error = future.exception()
        failure = future.result() if error is None else self._loss(task, error)
        if failure is not None and failure.disk_full:
            raise OSError(errno.ENOSPC, failure.line)
        if failure is not None:
            self.folder.fail(task.name, failure.line, failure.traceback)
            self.queue = deque(other for other in self.queue if other.name != task.name)
        if failure is not None or (task.part is None and error is None):
            self.folder.clear_progress(task.name)
            self.status.states[task.name] = self.folder.state(task.name)
        elif error is None and self.status.states[task.name] == "running":
            self._part_done(task.name)

    def _loss(self, task: Task, error: BaseException) -> Failure | None:
        """Queue a task again whose process or node was lost; it resumes from what it saved."""
        line = self.executor.loss(error)
        if has_no_space(task.sweep):
            return Failure(line, disk_full=True)
        self.lost[task.name, task.part] += 1
        if self.lost[task.name, task.part] >= ATTEMPTS:
            return Failure(f"{line} ({ATTEMPTS} times)")
        if self.status.states[task.name] == "running":  # otherwise another part has failed meanwhile
            self.queue.appendleft(task)
        return None

    def _part_done(self, name: str) -> None:
        self.parts[name] -= 1
        self.reporters[name]("parts", self.totals[name] - self.parts[name], self.totals[name])
        if not self.parts[name]:
            self.queue.appendleft(self._task(name))
