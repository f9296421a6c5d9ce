"""A report on disk: one HTML file, and on request Markdown, pictures and numbers of its figures beside it."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.errors import InputError, require_known
from normscope.report.files import save_figure
from normscope.report.markdown import render_markdown
from normscope.report.page import render_page
from normscope.results.findings import Finding
from normscope.results.sections import Section

FIGURES = "figures"
FORMATS = ("html", "md", "png", "csv")
FOOTER = "The tables lie beside this page as Parquet files."


@dataclass(frozen=True)
class Report:
    """What a page shows.

    Attributes:
        title: its heading.
        lead: what the model or the run is.
        sections: its parts.
        facts: key figures, each a name and a value.
        findings: those of the whole result.
        footer: a line at the end.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]] = ()
    findings: Sequence[Finding] = ()
    footer: str = FOOTER


def chosen_formats(text: str) -> tuple[str, ...]:
    """Formats from a text with commas; unknown ones raise ``InputError``."""
    formats = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in formats:
        require_known("format", name, FORMATS)
    return formats


def write_report(folder: Path, report: Report, formats: Sequence[str] = ("html",)) -> list[Path]:
    """Write the report into a folder and return its pages.

    Args:
        folder: where it goes.
        report: what it shows.
        formats: ``html`` is ``report.html``, ``md`` is ``report.md`` with its pictures, ``png`` and ``csv`` add the figures
            and their numbers as files; with neither page the HTML one is written.
    """
    formats = chosen_formats(",".join(formats))
    wanted = {*formats} | ({"png"} if "md" in formats else set()) | ({"html"} if not {"html", "md"} & {*formats} else set())
    suffixes = [name for name in ("png", "csv") if name in wanted]
    texts: dict[str, Any] = {"facts": report.facts, "findings": report.findings, "footer": report.footer}
    pages: dict[str, Callable[[], str]] = {
        "html": lambda: render_page(report.title, report.lead, report.sections, **texts),
        "md": lambda: render_markdown(report.title, report.lead, report.sections, **texts, data="csv" in wanted),
    }
    try:
        _write_figures(folder / FIGURES, report.sections, suffixes)
        return [_write(folder / f"report.{name}", render()) for name, render in pages.items() if name in wanted]
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise InputError(f"cannot write the report into '{folder}': {error.strerror or error}") from error


def _write_figures(folder: Path, sections: Sequence[Section], suffixes: Sequence[str]) -> None:
    figures = {name: figure for section in sections for name, figure in section.figures.items()}
    if not figures or not suffixes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        for suffix in suffixes:
            save_figure(figure, folder / f"{name}.{suffix}")


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
