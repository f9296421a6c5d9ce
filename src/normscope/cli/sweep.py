"""normscope sweep: many runs of one kind, with one table of them all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.output import (
    DeviceOption,
    FormatOption,
    JsonOption,
    chosen_device,
    chosen_names,
    console,
    examples,
    print_folder,
    print_json,
    print_table,
    progress,
    say,
    with_report,
)
from normscope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from normscope.sweeps import Shares, Standing, Sweep, SweepFolder

EXAMPLES = examples(
    "normscope sweep mine.toml --dry-run                (the plan, and how long it takes)",
    "normscope sweep mine.toml --out runs/scan          (interrupted? the same command goes on)",
    "normscope sweep status runs/scan                   (from another terminal)",
    "normscope sweep mine.toml --out runs/scan --retry-failed",
    "normscope sweep mine.toml --out /shared/scan --ray 10.0.0.1:6379 --per-gpu 4",
)
_SHOWN_RUNS = 8  # lines of runs below the bar of the sweep


def sweep(
    plan: Annotated[str, typer.Argument(help="A sweep's TOML file, scan for the one of the package, or: status DIR.")],
    folder: Annotated[Path | None, typer.Argument(help="With status: the sweep's folder.", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option(help="The sweep's folder.", show_default="runs/sweep-NAME, or the next free number")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="as many as there are cores, or GPUs, for")
    ] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Runs that share a GPU.")] = 1,
    cpus: Annotated[int | None, typer.Option(min=1, help="Cores of each run.", show_default="a fair share")] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS|local",
            help="Run on a Ray cluster: HOST:PORT, auto, or local for one of its own.",
            show_default="no",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, time a step of each shape, and stop.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run those again that failed.")] = False,
    checkpoint_every: Annotated[float, typer.Option(min=0.0, help="Seconds between checkpoints of a training.")] = 60.0,
    device: DeviceOption = "auto",
    format: FormatOption = "html",
    json: JsonOption = False,
) -> None:
    """Run a grid and lists of points over the fields of a recipe, and put all runs into one table.

    The folder holds a run folder for each point, the tables runs and curves, and a page. Stopped at any moment, the same
    command goes on: what is finished is kept, what was in the middle goes on from its checkpoint. A run that fails is recorded;
    the others go on. normscope sweep status DIR tells how a sweep stands, from any terminal.
    """
    if plan == "status":
        if folder is None:
            raise InputError("whose status? normscope sweep status DIR")
        _status(folder, json)
        return
    if folder is not None:
        raise InputError(f"one sweep at a time; '{folder}' is too much (the folder to write is --out {folder})")
    from normscope.report import FORMATS
    from normscope.sweeps import Shares, SweepFolder, check_cluster, read_sweep

    formats = chosen_names(format, FORMATS, "format")
    where = _device(device, ray, dry_run)
    wanted = read_sweep(plan, where.partition(":")[0], checkpoint_every)
    if ray is not None:
        check_cluster(ray)
    say(_summary(wanted))
    shared = Shares.of(wanted, where, workers, per_gpu, cpus, ray)
    if dry_run:
        _print_estimates(wanted, shared, json)
        return
    target = SweepFolder.of(out or _folder(wanted, f"runs/sweep-{Path(plan).stem}"))
    _run(wanted, target, shared, retry_failed, formats, json)


def _device(name: str, ray: str | None, here: bool) -> str:
    """The device of the runs; on a cluster it need not be on this machine, unless something is timed here."""
    if ray is None or ray == "local" or here or name in ("auto", "cpu"):
        return chosen_device(name)
    if name != "cuda":
        raise InputError(f"on a cluster, --device is auto, cpu or cuda, not '{name}': Ray chooses the GPU")
    return name


def _summary(wanted: "Sweep") -> str:
    """One line on what is varied."""
    values = {name: list(dict.fromkeys(str(point.shown(name)) for point in wanted.points)) for name in wanted.varied}
    told = "; ".join(f"{name} {' | '.join(some[:6])}{' | …' * (len(some) > 6)}" for name, some in values.items())
    return f"{len(wanted.points)} run{'s' * (len(wanted.points) > 1)} of {wanted.kind}; {told}"


def _folder(wanted: "Sweep", name: str) -> Path:
    """The first of ``name``, ``name-2``, ... that holds this sweep or nothing."""
    from normscope.runs import numbered
    from normscope.sweeps import SweepFolder, holds

    folders = ((path, SweepFolder.of(path)) for path in numbered(name))
    return next(path for path, folder in folders if folder.empty or holds(folder, wanted))


def _print_estimates(wanted: "Sweep", shared: "Shares", json: bool) -> None:
    """The plan with the time of each shape, from one timed step."""
    records: list[dict[str, Any]] = []
    timed: dict[str, float] = {}
    groups = wanted.shapes
    with progress("timing a step of each shape", total=len(groups)) as advance:
        for done, points in enumerate(groups, 1):
            timed[points[0].job.shape] = seconds = points[0].job.seconds()
            records.append({"shape": wanted.told(points) or "all", "runs": len(points), "seconds": seconds})
            advance(done)
    with shared.executor(Path(os.devnull)) as executor:
        places = min(executor.room, sum(max(1, point.job.parts) for point in wanted.points))
    if json:
        print_json(records)
        return
    rows = [[r["runs"], _duration(r["seconds"]), _duration(r["runs"] * r["seconds"]), r["shape"]] for r in records]
    print_table(("runs", "each", "together", "shape"), rows)
    where, total = " on Ray" * (shared.ray is not None), _duration(wanted.lasts(timed, places))
    typer.echo(f"{len(wanted.points)} run{'s' * (len(wanted.points) > 1)}, about {total} with {places} at a time{where}")


def _run(wanted: "Sweep", target: "SweepFolder", shared: "Shares", retry_failed: bool, formats: list[str], json: bool) -> None:
    from normscope.report.sweep import write_sweep_report
    from normscope.runs import grown_run, open_run, plain_rows
    from normscope.sweeps import begin, check_folder, run_sweep, sweep_tables, telling_a_full_disk

    started = datetime.now(UTC)
    check_folder(target, wanted)
    with telling_a_full_disk(target), target.alone():
        plan = begin(target, wanted, {"device": shared.device, "threads": shared.threads}, retry_failed)
        if shared.cpus not in (None, plan["threads"]):
            raise InputError(f"this sweep was begun with --cpus {plan['threads']}; its other runs must have as many")
        shared.threads = plan["threads"]
        try:
            with shared.executor(target.path) as executor, _live(len(wanted.points)) as watch:
                run_sweep(target, wanted, executor, watch)
        except KeyboardInterrupt:
            say(f"interrupted; the same command goes on with what is in {target.path}")
            raise
        tables = sweep_tables(target, wanted)
        configuration = {"kind": wanted.kind, "varied": list(wanted.varied), "points": plan["points"]}
        with grown_run(target.path, "sweep", configuration, device=shared.device, started=started) as run:
            for name, table in tables.items():
                run.write_table(name, table)
        with console(stderr=True).status("drawing"):
            with_report(lambda: write_sweep_report(open_run(target.path), f"Sweep {target.path.name}", formats))
    runs = tables["runs"]
    failed = int((runs["state"] == "failed").sum())
    if json:
        print_json(plain_rows(runs))
    else:
        _print_runs(runs)
        print_folder(target.path)
    unended = int((~runs["state"].isin(["finished", "diverged", "failed"])).sum())
    if unended:
        say(f"{unended} of {len(runs)} runs have not ended; the same command goes on with them")
    if failed:
        say(f"{failed} of {len(runs)} runs failed; errors are in {target.path / 'errors'}; --retry-failed runs them again")
    if failed or unended:
        raise typer.Exit(1)


@contextmanager
def _live(total: int) -> "Iterator[Callable[[Standing], None]]":
    """A bar for the sweep and a line for each run that is running, on stderr."""
    from rich import progress as bars

    from normscope.sweeps import STATES

    columns: tuple[Any, ...] = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TextColumn("{task.fields[note]}"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console(stderr=True)) as bar:
        whole = bar.add_task("sweep", total=total, note="")
        lines: dict[str, bars.TaskID] = {}

        def watch(standing: "Standing") -> None:
            counts = {state: standing.count(state) for state in STATES}
            note = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
            bar.update(whole, completed=standing.done, note=note)
            shown = dict(list(standing.running.items())[:_SHOWN_RUNS])
            for name in [name for name in lines if name not in shown]:
                bar.remove_task(lines.pop(name))
            for name, run in shown.items():
                if name not in lines:
                    lines[name] = bar.add_task(name, total=1.0, note="")
                bar.update(lines[name], completed=run.share, note=run.note)

        yield watch


def _status(path: Path, json: bool) -> None:
    """How a sweep stands, by what is in its folder."""
    import time

    from normscope.sweeps.drive import read_standing
    from normscope.sweeps.state import SweepFolder

    folder = SweepFolder.of(path)
    names = [point["name"] for point in folder.plan["points"]]
    standing = read_standing(folder, names)
    records: list[dict[str, Any]] = []
    for name, state in standing.states.items():
        run = standing.running.get(name)
        told = {"done": None, "note": folder.error(name)} if run is None else {"done": run.share, "note": run.note}
        records.append(
            {"name": name, "state": state, **told, "noted_seconds_ago": None if run is None else time.time() - run.at}
        )
    if json:
        print_json(records)
        return
    rows = [
        [
            r["name"],
            r["state"],
            "–" if r["done"] is None else f"{100 * r['done']:.0f}%",
            _ago(r["noted_seconds_ago"]),
            r["note"] or "",
        ]
        for r in records
    ]
    print_table(("run", "state", "done", "noted", ""), rows)
    counts = ", ".join(f"{standing.count(state)} {state}" for state in dict.fromkeys(standing.states.values()))
    typer.echo(f"{counts}; {'running' if folder.driven else 'no process runs it'}")


def _print_runs(runs: "pd.DataFrame") -> None:
    from normscope.runs import plain_rows

    def cell(value: Any) -> str:
        return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    columns = [name for name in runs.columns if name not in ("name", "error")]
    rows = [[*(cell(row[name]) for name in columns), row["error"] or ""] for row in plain_rows(runs)]
    print_table((*columns, "error"), rows)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _ago(seconds: float | None) -> str:
    return "–" if seconds is None else f"{_duration(max(0.0, seconds))} ago"
