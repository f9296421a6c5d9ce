"""normscope evaluate: the accuracy of a trained model, within and beyond what it saw."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.output import (
    DeviceOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    SeedOption,
    chosen_device,
    chosen_names,
    console,
    examples,
    print_folder,
    print_json,
    print_table,
    progress,
    with_report,
)

if TYPE_CHECKING:
    from normscope.training import Evaluation

EXAMPLES = examples(
    "normscope evaluate builtin:addition-small-pre",
    "normscope evaluate runs/train-tiny-pre --split ood-extrapolation --examples 128000",
    "normscope evaluate builtin:addition-small-qkv --json",
)


def evaluate(
    run: Annotated[str, typer.Argument(help="A folder that normscope train wrote, or builtin:addition-small-pre.")],
    split: Annotated[
        str | None,
        typer.Option(help="in-distribution, ood-interpolation or ood-extrapolation; several with commas.", show_default="all"),
    ] = None,
    examples: Annotated[int, typer.Option(min=2, help="Examples of each split.")] = 128_000,
    show: Annotated[int, typer.Option(min=0, max=1000, help="Worked examples of each split to print.")] = 4,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Accuracy per character with its standard error, by place in the answer, and the rate of exact answers."""
    from normscope.report.training import write_evaluation_report
    from normscope.runs import check_writable, fresh_path, new_run, run_path
    from normscope.training import evaluate as evaluate_model
    from normscope.training.recipe import task_of
    from normscope.transformer import load_model

    where = chosen_device(device)
    saved = load_model(run, where)
    task, offsets = task_of(saved.about.get("recipe", {}))
    splits = chosen_names(split, list(task.splits), "split")
    folder = out or fresh_path("runs/evaluate")
    check_writable(folder, overwrite=overwrite)
    started = datetime.now(UTC)
    with progress("testing", total=len(splits) * examples) as advance:
        result = evaluate_model(saved.model, task, splits, examples, seed=seed, offsets=offsets, worked=show, progress=advance)
    configuration = {"model": run, "splits": splits, "examples": examples}
    with new_run(folder, "evaluate", configuration, seed=seed, device=where, overwrite=overwrite, started=started) as written:
        written.write_table("accuracy", result.accuracy)
        written.write_table("positions", result.positions)
        with_report(lambda: write_evaluation_report(written, f"{run}; {examples:,} examples a split; seed {seed}"))
    if json:
        print_json(result.accuracy.to_dict("records"))
    else:
        print_accuracy(result)
        print_folder(run_path(folder))


def print_accuracy(result: "Evaluation") -> None:
    """The tables of an evaluation, and worked examples with right and wrong characters coloured."""
    from normscope.report.training import percent

    rows = [
        [
            row["split"],
            percent(row["accuracy"], row["stderr"]),
            percent(row["exact"], row["exact_stderr"]),
            f"{row['examples']:,}",
        ]
        for row in result.accuracy.to_dict("records")
    ]
    print_table(("split", "accuracy per character", "exact answers", "examples"), rows)
    places = sorted(set(result.positions["position"]))
    by_place = result.positions.set_index(["split", "position"])["accuracy"]
    rows = [
        [split, *(f"{100 * by_place[split, p]:.2f}" if (split, p) in by_place.index else "–" for p in places)]
        for split in result.accuracy["split"]
    ]
    print_table(("accuracy in % at place", *map(str, places)), rows)
    _print_worked(result)


def _print_worked(result: "Evaluation") -> None:
    from rich.text import Text

    out = console()
    for one in result.worked:
        line = Text(f"{one.split:18} {one.asked}")
        for right, given in zip(one.answer, one.given, strict=True):
            line.append(given, style="green" if given == right else "bold red")
        if one.given != one.answer:
            line.append(f"   right: {one.answer}")
        out.print(line, soft_wrap=True)
