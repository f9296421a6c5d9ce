"""sweep: Run an experiment over a grid of settings, as one table.

Many runs: normscope sweep mine.toml --dry-run
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pandas as pd
from pydantic import model_validator

from normscope.core.devices import chosen_device
from normscope.errors import InputError
from normscope.experiments.experiment import Experiment, Shown
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Accepts, setting
from normscope.machine.memory import require_memory
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows
from normscope.runs import numbered
from normscope.sweeps.folder import STATES, SweepFolder
from normscope.sweeps.plan import Plan, read_plan

if TYPE_CHECKING:
    from normscope.sweeps.resources import Resources

_STATUS = "status"


class Sweep(Experiment):
    """Run an experiment over a grid of settings, as one table.

    A plan has a grid and lists of points over the fields of an experiment.
    The folder holds a run folder for each point, the tables runs and curves, and a page. Interrupted at any moment, the same
    command resumes: finished runs are not executed again, interrupted ones continue from their checkpoints. A run that fails is
    recorded, and the others continue. normscope sweep status FOLDER shows the status of a sweep, from any terminal.

    Example:
        >>> import normscope as ns
        >>> plan = {"kind": "ensemble", "runs": 2, "tokens": 4, "time": 1, "samples": 3, "grid": {"dim": [4, 8]}}
        >>> ns.sweep(plan, dry_run=True, device="cpu", progress=False).tables["shapes"]["shape"].tolist()
        ['dim 4', 'dim 8']
    """

    command: ClassVar[str] = "sweep"
    title: ClassVar[str] = "Sweep"
    resumable: ClassVar[bool] = True
    grows: ClassVar[bool] = True
    usage: ClassVar[tuple[str, ...]] = (
        "normscope sweep mine.toml --dry-run                (the plan, and how long it takes)",
        "normscope sweep mine.toml --out runs/scan          (interrupted? the same command resumes)",
        "normscope sweep status runs/scan                   (from another terminal)",
        "normscope sweep mine.toml --out runs/scan --retry-failed",
        "normscope sweep mine.toml --out /shared/scan --ray 10.0.0.1:6379 --per-gpu 4",
    )

    plan: str | Path | dict[str, Any] = setting(
        ..., "A plan: a TOML file, or scan or paper-scan, which come with the package. Or: status FOLDER.", argument=True
    )
    folder: Annotated[Path | None, Accepts(complete="runs")] = setting(
        None, "With status: the sweep's folder.", shown="", argument=True
    )
    workers: int | None = setting(None, "Runs at a time.", shown="one for each core, or for each GPU", ge=1)
    per_gpu: int = setting(1, "Runs that share a GPU.", ge=1)
    cpus: int | None = setting(None, "Cores of each run.", shown="a fair share", ge=1)
    ray: str | None = setting(
        None, "Run on a Ray cluster: HOST:PORT, auto, or local for a new one on this machine.", shown="no"
    )
    dry_run: bool = setting(False, "Print the plan with an estimate of its time, from a few timed steps, and stop.")
    retry_failed: bool = setting(False, "Run failed runs again.")
    checkpoint_every: float = setting(60.0, "Seconds between checkpoints of a training.", ge=0.0)
    device: str = setting("auto", "cpu, cuda, or auto: a GPU if there is one.")

    @model_validator(mode="after")
    def _consistent(self) -> "Sweep":
        if self.plan == _STATUS:
            if self.folder is None:
                raise InputError("status needs the sweep's folder: normscope sweep status FOLDER")
        elif self.folder is not None:
            raise InputError(f"'{self.folder}' is one argument too many; the folder to write is out={self.folder}")
        else:
            self.runs  # noqa: B018  # raises InputError for a plan that cannot run
            self._check_workers()
        return self

    def _check_workers(self) -> None:
        """Refuse more runs at a time than fit into this machine's memory."""
        if self.ray is None and not self.dry_run and not self.where.startswith("cuda"):
            workers = self.resources.workers or 1
            largest = max(sum(point.experiment.memory().values()) for point in self.runs.points)
            require_memory({f"workers={workers}": workers * largest})

    @property
    def _elsewhere(self) -> bool:
        """Whether runs are executed on other machines; a dry run times them here."""
        return self.ray not in (None, "local") and not self.dry_run

    @cached_property
    def where(self) -> str:
        """The device of the runs; on a cluster it need not be on this machine."""
        if not self._elsewhere or self.device in ("auto", "cpu"):
            return chosen_device(self.device)
        if self.device != "cuda":
            raise InputError(f"on a cluster, device= is auto, cpu or cuda, not '{self.device}': Ray chooses the GPU")
        return self.device

    @cached_property
    def runs(self) -> Plan:
        """The plan with all its runs."""
        return read_plan(self.plan, self.where.partition(":")[0], self.checkpoint_every, elsewhere=self._elsewhere)

    @cached_property
    def resources(self) -> "Resources":
        """What every run gets of this machine or the cluster."""
        from normscope.sweeps.resources import Resources

        return Resources.of(self.runs, self.where, self.workers, self.per_gpu, self.cpus, self.ray)

    @property
    def record(self) -> dict[str, Any]:
        """The plan."""
        return self.runs.record

    @property
    def summary(self) -> str:
        """The fields that vary."""
        return self.runs.summary

    @property
    def saved(self) -> bool:
        """Not for the status of a sweep, and not for a dry run."""
        return self.plan != _STATUS and not self.dry_run

    @property
    def preview(self) -> bool:
        """A dry run."""
        return self.dry_run

    @classmethod
    def sweep_fields(cls) -> tuple[str, ...]:
        """None: a sweep is not a run of another sweep."""
        return ()

    def default_folder(self) -> Path:
        """The first of ``runs/sweep-NAME``, ``-2``, ... that holds this sweep or nothing."""
        from normscope.sweeps.scheduler import holds

        name = "plan" if isinstance(self.plan, dict) else Path(self.plan).stem
        folders = ((path, SweepFolder.of(path)) for path in numbered(f"runs/sweep-{name}"))
        return next(path for path, folder in folders if folder.empty or holds(folder, self.runs))

    @contextmanager
    def reserve(self, folder: Path) -> Iterator[None]:
        """Keep other processes out of the folder, and everybody out of one that holds something else."""
        from normscope.sweeps.on_ray import check_cluster
        from normscope.sweeps.scheduler import check_folder

        if self.ray is not None:
            check_cluster(self.ray)
        target = SweepFolder.of(folder)
        check_folder(target, self.runs)
        with target.exclusive():
            yield

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """Execute the runs that are missing in ``folder``, or all of them in a temporary one."""
        if self.plan == _STATUS:
            return self._status()
        if self.dry_run:
            return self._estimate(progress)
        if folder is not None:
            return self._execute(progress, SweepFolder.of(folder))
        with TemporaryDirectory(prefix="normscope-sweep-") as temporary, self.reserve(Path(temporary)):
            return self._execute(progress, SweepFolder.of(temporary))

    def _execute(self, progress: Progress, target: SweepFolder) -> Result:
        from normscope.sweeps.scheduler import begin, run_plan
        from normscope.sweeps.tables import sweep_tables

        plan = self.runs
        progress.message(plan.summary)
        device = self.where.partition(":")[0]
        saved = begin(target, plan, {"device": device, "threads": self.resources.threads}, self.retry_failed)
        if self.cpus not in (None, saved["threads"]):
            raise InputError(f"this sweep began with cpus={saved['threads']}; its other runs must have as many")
        with replace(self.resources, threads=saved["threads"]).executor(target.path) as executor:
            run_plan(target, plan, executor, progress)
        tables = sweep_tables(target, plan)
        configuration = {"kind": plan.kind, "varied": list(plan.varied), "points": saved["points"]}
        problems = _problems(tables["runs"]["state"], target)
        lead = _lead(configuration, tables["runs"])
        return Result(type(self), configuration, tables, lead, device=device, problems=problems)

    def _estimate(self, progress: Progress) -> Result:
        """The plan with the time of each shape, as far as some seconds of timing show it."""
        from normscope.sweeps.estimate import AT_LEAST, TIMED, estimate

        plan, shapes = self.runs, self.runs.shapes
        progress.message(plan.summary)
        experiments = [points[0].experiment for points in shapes]
        gpu = self.resources.gpus[0] if self.resources.gpus else None
        estimates = estimate(experiments, self.where, self.resources.threads, gpu, progress)
        rows = [
            {"shape": plan.shared(points) or "all", "runs": len(points), "seconds": expected.seconds, "basis": expected.basis}
            for points, expected in zip(shapes, estimates, strict=True)
        ]
        with self.resources.executor(Path(os.devnull)) as executor:
            workers = min(executor.room, sum(max(1, point.experiment.parts) for point in plan.points))
        by_shape = {experiment.shape: expected for experiment, expected in zip(experiments, estimates, strict=True)}
        low, middle, high = (
            plan.duration({shape: getattr(expected, bound) for shape, expected in by_shape.items()}, workers)
            for bound in ("low", "seconds", "high")
        )
        known = all(expected.basis != AT_LEAST for expected in estimates)
        total = f"about {_duration(middle)}" if known else f"at least {_duration(low)}"
        bounds = f" ({_duration(low)} to {_duration(high)})" if known else ""
        timed = sum(expected.basis == TIMED for expected in estimates)
        summary = (
            f"{len(plan.points)} run{'s' * (len(plan.points) > 1)}, {total}{bounds} with {workers} at a time"
            f"{' on Ray' * (self.ray is not None)}; {timed} of {len(shapes)} shapes timed"
        )
        return Result(type(self), plan.record, {"shapes": pd.DataFrame(rows)}, summary)

    def _status(self) -> Result:
        """The status of a sweep by what is in its folder."""
        from normscope.sweeps.scheduler import Status

        target = SweepFolder.of(self.folder or "")
        plan = target.plan
        status = Status.of(target, [point["name"] for point in plan["points"]])
        rows: list[dict[str, Any]] = []
        for name, state in status.states.items():
            run = status.running.get(name)
            done, note = (None, target.error(name)) if run is None else (run.share, run.note)
            ago = None if run is None else max(0.0, time.time() - run.at)
            rows.append({"name": name, "state": state, "done": done, "note": note, "noted_seconds_ago": ago})
        summary = f"{status.summary}; {'running' if target.active else 'no process is running'}"
        return Result(type(self), plan, {"status": pd.DataFrame(rows)}, summary)

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """The table of runs, of shapes or of the status."""
        return plain_rows(next(result.tables[name] for name in ("runs", "shapes", "status") if name in result.tables))

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The same for people."""
        yield _shown(result)
        if "runs" not in result.tables:
            yield result.summary

    @classmethod
    def facts(cls, result: Result) -> list[tuple[str, str]]:
        """How many runs there are in each state."""
        counts = Counter(row["state"] for row in cls.records(result)) if "runs" in result.tables else Counter[str]()
        return [("runs", f"{counts.total():,}"), *((state, f"{counts[state]:,}") for state in STATES if counts[state])]

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """Final numbers over the fields that vary, curves by panel, and the table of all runs."""
        from normscope.sweeps.page import sweep_sections

        if "runs" in result.tables:
            yield from sweep_sections(result.tables, result.configuration)
        else:
            yield Section("Sweep", (result.summary,), (_shown(result),))


def _problems(states: "pd.Series[str]", target: SweepFolder) -> tuple[str, ...]:
    """Runs that failed, and runs that have not ended."""
    failed, left = int((states == "failed").sum()), int((states == "waiting").sum())
    errors = f"{failed} of {len(states)} runs failed; errors are in {target.path / 'errors'}; retry_failed=True runs them again"
    waiting = f"{left} of {len(states)} runs have not ended; the same command resumes them"
    return (*[errors] * bool(failed), *[waiting] * bool(left))


def _lead(configuration: dict[str, Any], runs: pd.DataFrame) -> str:
    """How many runs there are over which fields, and how they ended."""
    counts = runs["state"].value_counts()
    states = ", ".join(f"{counts[state]:,} {state}" for state in STATES if state in counts)
    over = f" over {', '.join(configuration['varied'])}" if configuration["varied"] else ""
    return f"{len(runs):,} run{'s' * (len(runs) != 1)} of {configuration['kind']}{over}: {states}."


def _shown(result: Result) -> PageTable:
    """The table of a result as texts."""
    rows, cells = Sweep.records(result), list[tuple[str, ...]]()
    if "status" in result.tables:
        columns: tuple[str, ...] = ("run", "state", "done", "last report", "")
        cells = [(r["name"], r["state"], _percent(r["done"]), _ago(r["noted_seconds_ago"]), r["note"] or "") for r in rows]
    elif "shapes" in result.tables:
        columns = ("runs", "each", "together", "basis", "shape")
        cells = [
            (str(r["runs"]), _duration(r["seconds"]), _duration(r["runs"] * r["seconds"]), r["basis"], r["shape"]) for r in rows
        ]
    else:
        names = [str(name) for name in result.tables["runs"] if name not in ("name", "error")]
        columns = (*names, "error")
        cells = [(*(_cell(row[name]) for name in names), row["error"] or "") for row in rows]
    return PageTable("", columns, tuple(cells))


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _ago(seconds: float | None) -> str:
    return "–" if seconds is None else f"{_duration(seconds)} ago"
