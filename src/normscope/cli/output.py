"""How commands speak: tables and text on stdout, JSON alone on stdout when asked for, everything else on stderr."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.errors import InputError, MissingExtraError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from normscope.schemes import Scheme

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, a list of records, on stdout.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the run folder if it exists.")]

SIX_SCHEMES = "post,pre,mix,peri,ngpt,sqrt-scaling"  # those of the published comparison
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="The run folder to write.", show_default="runs/COMMAND, or the next free number"),
]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of everything random.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
FormatOption = Annotated[
    str, typer.Option("--format", help="Comma-separated: html or md for pages; png and csv add the figures as files.")
]

_WIDTH_OF_A_FILE = 160


def examples(*commands: str) -> str:
    """Example commands for the end of a help text, a line each."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def console(*, stderr: bool = False) -> "Console":
    """A console that gives tables room when the output is a file or a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _WIDTH_OF_A_FILE
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """A line for people that must not mix with results: on stderr."""
    sys.stderr.write(text + "\n")


def print_json(records: Iterable[Mapping[Any, Any]]) -> None:
    """A list of records as one JSON document; numbers that are not finite become null."""
    readable = (sys.stdout.encoding or "").lower().startswith("utf")
    json.dump([_plain(record) for record in records], sys.stdout, indent=2, ensure_ascii=not readable)
    sys.stdout.write("\n")


def print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]], title: str | None = None) -> None:
    """A table for people; the last column takes what room is left, the others are shown whole on any terminal."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table

    names, cells = list(columns), [[str(cell) for cell in row] for row in rows]
    lines = [max(map(cell_len, name.split("\n"))) for name in names]  # a heading may have several lines
    whole = [max([head, *(cell_len(row[i]) for row in cells)]) for i, head in enumerate(lines)][:-1]
    last = max([12, *(cell_len(word) for row in cells for word in row[-1].split())])
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, width in zip(names[:-1], whole, strict=True):
        table.add_column(name, no_wrap=True, min_width=width)
    table.add_column(names[-1], min_width=last)
    for row in cells:
        table.add_row(*row)
    out = console()
    out.width = max(out.width, sum(whole) + last + 2 * len(names))  # on a narrow terminal lines run on; rich would cut columns
    out.print(table, no_wrap=True, overflow="ignore", crop=False)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar with the time left, on stderr; call the result with how much is done."""
    from rich import progress as bars

    columns = (
        bars.TextColumn(what),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TextColumn("{task.completed:g}/{task.total:g}"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda completed: bar.update(task, completed=completed)


@contextmanager
def stages(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Work in several stages, on stderr; call the result with the stage, how much of it is done, and how much it is."""
    with console(stderr=True).status(what) as status:
        yield lambda stage, done, total: status.update(f"{what}: {stage} {done:,}/{total:,}")


def with_report(write: Callable[[], None]) -> None:
    """Write a report; where its optional packages are missing, say so and go on: the tables and pictures are there."""
    try:
        write()
    except MissingExtraError as error:
        say(f"no report page: {error}")


def print_folder(folder: Path) -> None:
    """End with the path of a run's page, or of its folder where it has none."""
    pages = (folder / name for name in ("report.html", "report.md"))
    typer.echo(next((page for page in pages if page.is_file()), folder))


def chosen_device(name: str) -> str:
    """``auto`` resolved, and a device that is not available refused; torch is imported only here."""
    from normscope.core.devices import chosen_device

    return chosen_device(name)


def chosen_names(text: str | None, allowed: Sequence[str], what: str) -> list[str]:
    """Names written with commas, each allowed; all that are allowed if there is no text."""
    if text is None:
        return list(allowed)
    wanted = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in wanted:
        if name not in allowed:
            raise InputError(f"unknown {what} '{name}'; allowed: {', '.join(allowed)}{did_you_mean(name, allowed)}")
    return wanted


def numbers(text: str, what: str) -> list[float]:
    """A list of numbers written with commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{what} is a list of numbers such as 1,5,20, not '{text}'") from None


def named_schemes(text: str, norm: str | None = None) -> "list[Scheme]":
    """Schemes written with commas, each a name or a path."""
    from normscope.schemes import find_schemes

    return find_schemes(text, norm)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
