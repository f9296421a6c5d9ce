"""How commands speak: tables and text on stdout, JSON alone on stdout with ``--json``, everything else on stderr."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.errors import visible

if TYPE_CHECKING:
    from rich.console import Console


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, a list of records, on stdout.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the run folder if it exists.")]

OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="The run folder to write.", show_default="runs/COMMAND, or the next free number"),
]
GalleryOption = Annotated[
    Path | None, typer.Option("--out", help="The folder to add to.", show_default="the command's own, the same every time")
]
FormatOption = Annotated[
    str, typer.Option("--format", help="Comma-separated: html or md for pages; png and csv add the figures as files.")
]

_LONGEST_WORD, _LONGEST_LINE = 300, 1500  # characters of a message: what a user gave may be of any length


def examples(*commands: str) -> str:
    """Example commands for the end of a help text, a line each."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def console() -> "Console":
    """The console on stdout."""
    from normscope.experiments.terminal import Terminal

    return Terminal(sys.stdout)


def echo(text: str) -> None:
    """Text for people on stdout."""
    sys.stdout.write(visible(text))


def one_line(text: str) -> str:
    """A message in one visible line of readable length: long words are cut in their middle."""
    words = (word if len(word) <= _LONGEST_WORD else f"{word[:80]}…{word[-20:]}" for word in text.split())
    line = visible(" ".join(words))
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"


def say(text: str) -> None:
    """A line for people that must not mix with results: on stderr."""
    sys.stderr.write(one_line(text) + "\n")


def print_json(records: Iterable[Mapping[Any, Any]]) -> None:
    """A list of records as one JSON document; numbers that are not finite become null."""
    readable = (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps([_plain(record) for record in records], indent=2, ensure_ascii=not readable)
    for line in text.split("\n"):
        escaped = line if line.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
        sys.stdout.write(f"{escaped}\n")


def print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]], title: str | None = None) -> None:
    """A table for people; the last column takes what room is left, the others are shown whole on any terminal."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table

    names, *cells = [[visible(str(cell)) for cell in row] for row in (columns, *rows)]
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


def print_folder(folder: Path) -> None:
    """End with the path of a run's page, or of its folder where it has none."""
    pages = (folder / name for name in ("report.html", "report.md"))
    echo(f"{next((page for page in pages if page.is_file()), folder)}\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
