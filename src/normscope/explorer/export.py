"""The explorer as one file that works from disk."""

import os
from collections.abc import Sequence
from pathlib import Path

from normscope.errors import InputError
from normscope.explorer.folders import Folders, first_view, split_sources
from normscope.explorer.page import GENERATOR, explorer_data, render_explorer
from normscope.machine.files import replace_text, user_path

_HEAD = 300  # bytes at the beginning of a page, with the name of what wrote it


def export_explorer(export: Path | str, sources: Sequence[str] = (), *, overwrite: bool = False) -> Path:
    """Write the explorer's page with run folders inside; it needs no server, no network and nothing beside it.

    Args:
        export: the file, which ends in .html.
        sources: run folders.
        overwrite: replace the file if it is a page of the explorer.
    """
    target = check_export(export, overwrite=overwrite)
    folders, models = split_sources(sources)
    others = [model for model in models if model not in folders]  # a training that was watched is both
    if others:
        raise InputError(
            f"'{others[0]}' has no audit, and export= takes run folders alone; audit the model and give the folder of the audit"
        )
    given = Folders(folders)
    runs, ledger = given.exported(), given.ledger()
    damaged = next((run for run in runs if "problem" in run), None)
    if damaged is not None or "problem" in ledger:
        raise InputError(str((damaged or ledger)["problem"]))
    page = render_explorer(explorer_data(runs=runs, ledger=ledger, view=first_view(runs, ())))
    try:
        replace_text(target, page)
    except OSError as error:
        raise InputError(f"export={export} cannot be written: {error.strerror or error}") from error
    return target


def check_export(export: Path | str, *, overwrite: bool) -> Path:
    """The path of a page to write, or the reason why nothing is written there."""
    target = user_path(export, "file")
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"export={export}: the page's name has to end in .html")
    if not target.parent.is_dir():
        raise InputError(f"export={export} cannot be written: there is no folder '{target.parent}'")
    if not os.path.lexists(target):
        return target
    if not target.is_file() or not _is_page(target):
        raise InputError(f"'{export}' exists and is no page of the explorer; choose another export=")
    if not overwrite:
        raise InputError(f"'{export}' exists already; choose another export=, or overwrite=True to replace it")
    return target


def _is_page(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return GENERATOR.encode() in file.read(_HEAD)
    except OSError as error:
        raise InputError(f"export={path} cannot be written: {error.strerror or error}") from error
