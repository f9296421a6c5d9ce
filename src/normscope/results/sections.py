"""A section: text, findings, tables and figures that belong together, declared once and rendered by every front end."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

import pandas as pd

from normscope.errors import InputError
from normscope.results.figures import Figure
from normscope.results.findings import Finding, card_html

_NUMBER = re.compile(r"[-−+±~≈<>≤≥]? ?\d[\d.,]*([eE][-+]?\d+)?( ?(%|±.*|\(.*\)))?")
_EMPTY = {"", "-", "–", "—", "nan", "inf"}


@dataclass(frozen=True)
class PageTable:
    """A table of texts for people; the first column names its rows."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise InputError(f"table '{self.caption}' has {len(self.columns)} columns and a row of {len(row)}")

    @property
    def numeric(self) -> list[bool]:
        """For each column whether it holds numbers, to be aligned right."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        return [_is_numeric(cells) for cells in columns]

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f"<table><caption>{escape(self.caption)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


@dataclass(frozen=True, repr=False)
class Section:
    """A part of a result.

    Attributes:
        title: its heading.
        text: paragraphs of plain text.
        tables: tables that the page shows.
        figures: figures by name; a finding refers to its figure by this name.
        findings: what the section comes to.
        name: its name in a result, ``result["collapse"]``; made of the title unless given.
        data: the numbers behind it, by table name.
        folded: whether the page shows it closed.
    """

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[PageTable, ...] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    name: str = ""
    data: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    folded: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") or "section")

    def __repr__(self) -> str:
        named = [f"figures: {', '.join(self.figures)}"] if self.figures else []
        return "\n".join([self.title, *self.text, *map(str, self.findings), *named])

    def _repr_html_(self) -> str:
        text = [f"<p style='max-width:60em'>{escape(paragraph)}</p>" for paragraph in self.text]
        tables = [table._repr_html_() for table in self.tables]
        names = ", ".join(f"<code>{escape(name)}</code>" for name in self.figures)
        named = [f"<p><b>figures</b> {names}</p>"] if self.figures else []
        return "".join([f"<h4>{escape(self.title)}</h4>", *text, *map(card_html, self.findings), *tables, *named])


def _is_numeric(cells: tuple[str, ...]) -> bool:
    filled = [cell.strip() for cell in cells if cell.strip().lower() not in _EMPTY]
    return bool(filled) and all(_NUMBER.fullmatch(cell) for cell in filled)
