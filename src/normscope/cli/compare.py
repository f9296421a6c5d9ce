"""normscope compare: models and runs side by side."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from normscope.cli.reading import ExamplesOption, TextOption
from normscope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from normscope.audit import Comparison, Subject
    from normscope.experiments.audit import Audit
    from normscope.measures.base import Subject as Measured

TokensOption = Annotated[int | None, typer.Option(min=3, help="Number of tokens to read.")]
SentenceOption = Annotated[str | None, typer.Option(help="A sentence whose last token but one is followed through the layers.")]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Take all measures again, also those in the cache.")]

EXAMPLES = examples(
    "normscope compare builtin:addition-small-pre builtin:addition-small-qkv",
    "normscope compare package:smollm2 gpt2 --text notes.txt --tokens 512",
    "normscope compare runs/train-tiny-pre runs/train-tiny-qkv     (their models, and how they learned)",
    "normscope compare runs/audit runs/audit-2",
    "normscope compare runs/advise runs/advise-2 --json",
)


def compare(
    subjects: Annotated[
        list[str],
        typer.Argument(
            help="Two or more: models (as for audit) or run folders of audit, train, evaluate, stability, subspaces, "
            "words (journey), ensemble, simulate or advise."
        ),
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
    from normscope.audit.compare import check_common, check_names
    from normscope.report.compare import write_comparison_report
    from normscope.report.figures import FORMATS
    from normscope.runs import check_writable, fresh_path, new_run, plain_rows, run_path

    formats = chosen_names(format, FORMATS, "format")
    where = chosen_device(device)
    folder = out or fresh_path("runs/compare")
    check_writable(folder, overwrite=overwrite)
    check_names([_place(subject) for subject in subjects])
    started = datetime.now(UTC)
    names = _short(subjects)
    given = {"text": text, "tokens": tokens, "examples": examples, "sentence": sentence}
    ask = partial(_audit, device=where, seed=seed, fresh=fresh, **given)
    sides = [_Side.of(subject, name, ask) for subject, name in zip(subjects, names, strict=True)]
    questions = [side.subject for side in sides if side.subject]
    check_common({side.name: side.measures for side in sides})
    _check_read(questions, text=text, tokens=tokens, examples=examples, sentence=sentence)
    found = put_beside([side.measured() for side in sides])
    configuration = {"subjects": subjects, "text": None if text is None else str(text), "tokens": tokens, "sentence": sentence}
    settings = ", ".join(side.title for side in sides) + (f"; seed {seed}" if questions else "")
    with new_run(folder, "compare", configuration, seed=seed, device=where, overwrite=overwrite, started=started) as run:
        for title, table in found.tables.items():
            run.write_table(title, table)
        with_report(lambda: write_comparison_report(run, settings, formats))
    if json:
        print_json(plain_rows(found.tables["numbers"]))
    else:
        _print(found, names)
        print_folder(run_path(folder))


@dataclass(frozen=True)
class _Side:
    """What a name stands for, before anything is measured: a run's tables, the question to a model, or both for a training."""

    name: str
    tables: "dict[str, pd.DataFrame]"
    audit: "Audit | None"
    subject: "Measured | None"
    tokens: int | None

    @classmethod
    def of(cls, subject: str, name: str, ask: "Callable[[str], Audit]") -> "_Side":
        """Read the run, and open the model if there is one."""
        from normscope.audit.quantities import AUDITED
        from normscope.runs import is_run, open_run

        run = open_run(subject) if is_run(subject) else None
        tables = {table: run.table(table) for table in run.tables} if run else {}
        if run is None or (run.path / "config.json").is_file():
            audit = ask(subject)
            opened = audit.subject()
            return cls(name, tables, audit, opened, opened.about["tokens"])
        reads = any(table in AUDITED for table in tables)  # the tokens of a simulation are not read
        return cls(name, tables, None, None, run.description["configuration"].get("tokens") if reads else None)

    @property
    def measures(self) -> list[str]:
        """The names of the tables that it has, or will have."""
        from normscope.audit.quantities import AUDITED

        return [*self.tables, *(AUDITED if self.audit else ())]

    @property
    def title(self) -> str:
        """The name, and how much was read."""
        return f"{self.name} ({self.tokens:,} tokens)" if self.tokens else self.name

    def measured(self) -> "Subject":
        """The run's tables, and those of an audit of the model."""
        from normscope.audit import Subject

        audit = self.audit.measure(self.subject).tables if self.audit and self.subject else {}
        return Subject(self.name, self.tables | audit, self.tokens)


def _audit(name: str, **settings: Any) -> "Audit":
    from normscope.experiments.audit import Audit

    return Audit(model=name, **settings)


def _check_read(questions: "list[Measured]", **given: Any) -> None:
    """Refuse options that say what to read where no model reads it."""
    for option, value in given.items():
        read = any(question.sentence for question in questions) if option == "sentence" else bool(questions)
        if value is not None and not read:
            raise InputError(f"--{option} does not go here: no model among these reads it, and runs are taken as they are")


def _place(subject: str) -> str:
    """The full path of a file or folder, so that two ways to write it are one; other names as they are."""
    from normscope.runs import run_path

    return str(run_path(subject)) if os.path.exists(os.path.expanduser(subject)) else subject


def _short(subjects: list[str]) -> list[str]:
    """The last part of each name, if that tells them apart."""
    last = [Path(subject).name or subject for subject in subjects]
    return last if len(set(last)) == len(set(subjects)) else subjects


def _print(found: "Comparison", names: list[str]) -> None:
    """The numbers, a column for each subject."""
    from normscope.report.compare import number_cell

    numbers = found.tables["numbers"]
    if len(numbers):
        wide = numbers.pivot_table(index="number", columns="subject", values="value", sort=False)
        rows = [
            (str(number), *(number_cell(float(value)) for value in row))
            for number, row in zip(wide.index, wide.reindex(columns=names).to_numpy(), strict=True)
        ]
        print_table(("", *names), rows, title="side by side")
