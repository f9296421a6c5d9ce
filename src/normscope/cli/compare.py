"""normscope compare: models and runs side by side."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.audit import FreshOption, SentenceOption, TokensOption, asked, audited
from normscope.cli.output import (
    DeviceOption,
    FormatOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    SeedOption,
    chosen_device,
    chosen_names,
    examples,
    print_folder,
    print_json,
    print_table,
    with_report,
)
from normscope.cli.reading import ExamplesOption, TextOption, read_text

if TYPE_CHECKING:
    import pandas as pd

    from normscope.audit import Comparison, Subject

EXAMPLES = examples(
    "normscope compare builtin:addition-small-pre builtin:addition-small-qkv",
    "normscope compare package:smollm2 gpt2 --text notes.txt --tokens 512",
    "normscope compare runs/train-tiny-pre runs/train-tiny-qkv     (their models, and how they learned)",
    "normscope compare runs/audit runs/audit-2",
)


def compare(
    subjects: Annotated[
        list[str],
        typer.Argument(help="Two or more: models (as for audit), run folders of trainings, audits, ensembles, stability, ..."),
    ],
    text: TextOption = None,
    tokens: TokensOption = None,
    examples: ExamplesOption = None,
    sentence: SentenceOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    fresh: FreshOption = False,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    format: FormatOption = "html",
    json: JsonOption = False,
) -> None:
    """Put models or runs side by side: all that two of them were measured by, in one table and one figure each.

    Models are audited first, unless they were before; runs are read as they are, and the model of a training is audited too.
    """
    from normscope.audit import compare as put_beside
    from normscope.audit.compare import check_names
    from normscope.report.compare import write_comparison_report
    from normscope.report.figures import FORMATS
    from normscope.results import check_writable, fresh_path, new_run, plain_rows, run_path

    formats = chosen_names(format, FORMATS, "format")
    where = chosen_device(device)
    folder = out or fresh_path("runs/compare")
    check_writable(folder, overwrite=overwrite)
    check_names(subjects)
    started = datetime.now(UTC)
    content = read_text(text)
    names = _short(subjects)
    found = put_beside(
        [
            _subject(subject, name, where, content, tokens, examples, sentence, seed, fresh)
            for subject, name in zip(subjects, names, strict=True)
        ]
    )
    configuration = {"subjects": subjects, "text": None if text is None else str(text), "tokens": tokens, "sentence": sentence}
    settings = f"{', '.join(names)}; seed {seed}"
    with new_run(folder, "compare", configuration, seed=seed, device=where, overwrite=overwrite, started=started) as run:
        for title, table in found.tables.items():
            run.write_table(title, table)
        with_report(lambda: write_comparison_report(run, settings, formats))
    if json:
        print_json(plain_rows(found.tables["numbers"]))
    else:
        _print(found, names)
        print_folder(run_path(folder))


def _subject(
    subject: str,
    name: str,
    device: str,
    content: str | None,
    tokens: int | None,
    examples: int | None,
    sentence: str | None,
    seed: int,
    fresh: bool,
) -> "Subject":
    """A run's own tables, an audit of a model, or both for the run of a training."""
    from normscope.audit import Subject
    from normscope.results import is_run, open_run

    run = open_run(subject) if is_run(subject) else None
    tables = {} if run is None else {table: run.table(table) for table in run.tables}
    if run is not None and not (run.path / "config.json").is_file():
        layers = run.description["configuration"].get("layers")
        return Subject(name, tables, layers or _layers(tables))
    question = asked(subject, device, content, tokens, examples, sentence, seed)
    return Subject(name, tables | audited(question, fresh).tables, question.view.layers)


def _layers(tables: "dict[str, pd.DataFrame]") -> int | None:
    """How many layers the tables of a run speak of."""
    layers = (int(table["layer"].max()) + 1 for name, table in tables.items() if name == "spread" and "layer" in table)
    return next(layers, None)


def _short(subjects: list[str]) -> list[str]:
    """The last part of each name, if that tells them apart."""
    last = [Path(subject).name or subject for subject in subjects]
    return last if len(set(last)) == len(set(subjects)) else subjects


def _print(found: "Comparison", names: list[str]) -> None:
    """The numbers, a column for each subject."""
    numbers = found.tables["numbers"]
    if len(numbers):
        wide = numbers.pivot_table(index="number", columns="subject", values="value", sort=False)
        rows = [
            (str(number), *("–" if value != value else f"{value:.4g}" for value in row))
            for number, row in zip(wide.index, wide.reindex(columns=names).to_numpy(), strict=True)
        ]
        print_table(("", *names), rows, title="side by side")
