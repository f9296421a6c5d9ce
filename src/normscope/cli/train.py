"""normscope train: a transformer of any scheme on the addition task."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.evaluate import print_accuracy
from normscope.cli.output import (
    DeviceOption,
    JsonOption,
    OverwriteOption,
    chosen_device,
    console,
    examples,
    print_folder,
    print_json,
    progress,
    say,
    with_report,
)
from normscope.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from normscope.training import Checkpoints, Evaluation, Recipe, Training, TrainingRun
    from normscope.training.log import TensorBoardLog
    from normscope.training.loop import Metrics
    from normscope.training.parallel import Team

EXAMPLES = examples(
    "normscope train --preset tiny --scheme pre                  (minutes on two CPU cores)",
    "normscope train --preset tiny --scheme peri+qk --set norm=layer --set rate=2e-3",
    "normscope train --preset baseline --scheme qkv --out runs/baseline-qkv     (a GPU; interrupted, it goes on)",
    "normscope train --preset small --processes 2                (one model on two processes, the same global batch)",
    "torchrun --nproc-per-node 2 -m normscope train --preset small",
    "normscope train --preset small --show > mine.toml && normscope train mine.toml --scheme ./mine-scheme.toml",
)


def train(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="A recipe file (TOML).", show_default=False)] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A recipe of the package: tiny, small, baseline, alternative or large.", show_default=False),
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="A scheme's name, or the path of its TOML file.", show_default="the recipe's, pre")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value in place of the recipe's; again for more.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of weights and data.", show_default="the recipe's, 100")
    ] = None,
    device: DeviceOption = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="The run folder to write.", show_default="runs/train-PRESET-SCHEME, or the next free number"),
    ] = None,
    overwrite: OverwriteOption = False,
    checkpoint_every: Annotated[float, typer.Option(min=0.0, help="Seconds between checkpoints.")] = 60.0,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that share every batch, on this machine; a GPU each where there are GPUs.")
    ] = 1,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe as TOML and stop.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a transformer to add integers, and test it within and beyond what it saw.

    The run folder holds the model (model.safetensors, config.json), metrics (Parquet and TensorBoard), accuracies and a page
    with the curves. Stopped at any moment, the same command goes on from the last checkpoint and ends with the same weights.
    """
    from normscope.runs import resumable_path
    from normscope.training import TrainingRun
    from normscope.training.parallel import check_devices, check_shares, joined, launch, launched
    from normscope.training.recipe import parse_change, read_recipe
    from normscope.training.run import training_record

    if (recipe is None) == (preset is None):
        raise InputError("give either a recipe file or --preset: normscope train --preset tiny")
    given = dict(parse_change(change) for change in changes or [])
    given |= {key: value for key, value in (("scheme", scheme), ("seed", seed)) if value is not None}
    wanted = read_recipe(preset or str(recipe), given)
    if show:
        typer.echo(wanted.toml, nl=False)
        return
    where = chosen_device(device)
    if processes > 1 and not launched():
        check_shares(wanted.batch, processes)
        check_devices(where, processes)
        raise typer.Exit(launch(processes, context.obj))
    name = f"runs/train-{preset or Path(str(recipe)).stem}-{wanted.found_scheme.name}"
    with joined(where) as team:
        if team is None or team.first:
            folder = out or resumable_path(name, training_record(wanted, where))
            _run(TrainingRun(wanted, where, folder), overwrite, checkpoint_every, json, team)
        else:
            _help(wanted, where, team)


def _help(recipe: "Recipe", device: str, team: "Team") -> None:
    """Do this process's share of a training that the first process writes and speaks of."""
    from normscope.training import DivergedError, Training

    with suppress(DivergedError):  # the first process says so; a failure here would end it before it has
        for _ in Training(recipe, device, team).run():
            pass


def _run(job: "TrainingRun", overwrite: bool, every: float, json: bool, team: "Team | None") -> None:
    from normscope.report.training import write_training_report
    from normscope.runs import check_writable, run_path, unfinished_runs
    from normscope.training import Training

    recipe, folder, checkpoints = job.recipe, job.folder, job.checkpoints
    check_writable(folder, overwrite=overwrite)
    for other in unfinished_runs(folder):
        if other != checkpoints.folder:
            say(f"not continued, because its recipe, scheme or device is another: the unfinished run in {other}")
    started = datetime.now(UTC)
    training = Training(recipe, job.device, team)
    with checkpoints.alone():
        for line in (*job.take_up(training), recipe.summary):
            say(line)
        try:
            _train(training, checkpoints, every)
        except KeyboardInterrupt:
            kept = checkpoints.paths
            say(f"interrupted; the same command goes on from {kept[-1]}" if kept else "interrupted before the first checkpoint")
            raise
        evaluation = _evaluated(training)
        job.write(
            training,
            evaluation,
            started,
            overwrite=overwrite,
            report=lambda run: with_report(lambda: write_training_report(run, recipe.summary, recipe.found_scheme.name)),
        )
        checkpoints.discard()
    if json:
        print_json(evaluation.accuracy.to_dict("records"))
    else:
        print_accuracy(evaluation)
        print_folder(run_path(folder))


def _train(training: "Training", checkpoints: "Checkpoints", every: float) -> None:
    from normscope.training import DivergedError

    log = _log(checkpoints.folder, training.step)
    if training.device.type == "cuda" and training.team is None and training.step < training.recipe.steps:
        say("compiling the model for this GPU, half a minute or so")
    try:
        with _training_progress(training) as advance:
            for metrics in training.run(checkpoints, every):
                advance(metrics)
                if log is not None:
                    log.add(metrics)
    except DivergedError as error:
        kept = checkpoints.paths
        last = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint before it"
        recipe = training.recipe
        help_with = ["a lower rate", *["warmup=1000"] * (not recipe.warmup), *["clip=1.0"] * (not recipe.clip)]
        say(f"stopped: {error} of {recipe.steps:,}; {last}. What may help (--set): {', '.join(help_with)}")
        raise typer.Exit(1) from None
    finally:
        if log is not None:
            log.close()


def _log(folder: Path, step: int) -> "TensorBoardLog | None":
    from normscope.training.log import TensorBoardLog

    try:
        return TensorBoardLog(folder, step)
    except MissingExtraError as error:
        say(f"no TensorBoard log: {error}")
        return None


def _evaluated(training: "Training") -> "Evaluation":
    from normscope.training.run import final_evaluation

    recipe = training.recipe
    with progress("testing", total=len(recipe.task.splits) * recipe.test_examples) as advance:
        return final_evaluation(training, advance)


@contextmanager
def _training_progress(training: "Training") -> "Iterator[Callable[[Metrics], None]]":
    """A bar with loss, accuracy, examples a second and the time left, on stderr."""
    from rich import progress as bars

    columns: tuple[Any, ...] = (
        bars.TextColumn("training"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TextColumn("loss {task.fields[loss]} accuracy {task.fields[accuracy]} {task.fields[speed]} examples/s"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    )
    before = training.metrics[-1] if training.metrics else None
    with bars.Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task("", total=training.recipe.steps, completed=training.step, loss="–", accuracy="–", speed="–")

        def advance(now: "Metrics") -> None:
            nonlocal before
            examples, seconds = (now.examples, now.seconds) if before is None else (
                now.examples - before.examples, now.seconds - before.seconds
            )  # fmt: skip
            before = now
            bar.update(
                task,
                completed=now.step,
                loss=f"{now.loss:.3f}",
                accuracy=f"{100 * now.accuracy:.1f}%",
                speed=f"{examples / seconds:,.0f}" if seconds > 0 else "–",
            )

        yield advance
