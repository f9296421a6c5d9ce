"""The parts of a page in words: findings, tables and pictures in sections, and the names by which links find them."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote, urlsplit

from normscope.errors import InputError

_NUMBER = re.compile(r"[-−+±~≈<>≤≥]? ?\d[\d.,]*([eE][-+]?\d+)?( ?(%|±.*|\(.*\)))?")
_EMPTY = {"", "-", "–", "—", "nan", "inf"}


@dataclass(frozen=True)
class PageTable:
    """A table; the first column names its rows."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise InputError(f"table '{self.caption}' has {len(self.columns)} columns and a row of {len(row)}")

    @property
    def numeric(self) -> list[bool]:
        """For each column whether it holds numbers, to be set flush right."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        return [_is_numeric(cells) for cells in columns]


@dataclass(frozen=True)
class Picture:
    """A PNG file, embedded in the page.

    Words that the file itself carries and shows, as charts do, are repeated only on a phone, where they are too small.

    Attributes:
        title: what it shows; with the caption, also the text for readers who do not see it.
        png: the file; its name without the suffix is the name by which findings mean the picture.
        caption: one line that says what to see in it.
        interactive: a link, relative to the page, to the interactive version.
        settings: small print.
        data: a link, relative to the page, to its numbers as CSV.
    """

    title: str
    png: Path
    caption: str
    interactive: str | None = None
    settings: str = ""
    data: str | None = None

    @property
    def name(self) -> str:
        """The name by which findings mean the picture."""
        return self.png.stem

    def links(self, folder: Path | None) -> list[tuple[str, str]]:
        """What can be opened beside the picture: words and links relative to the page, which lies in ``folder`` if given."""
        png = None if folder is None else link_to(self.png, folder)
        links = (("Interactive version", self.interactive), ("Data as CSV", self.data), ("Picture as PNG", png))
        return [(words, _relative(link)) for words, link in links if link]


@dataclass(frozen=True)
class Finding:
    """A sentence in plain words with its number, and the name of the picture that shows it."""

    text: str
    figure: str | None = None


@dataclass(frozen=True)
class Section:
    """A part of the page: a heading, paragraphs of plain text, findings as a list, then tables and pictures."""

    title: str
    text: tuple[str, ...]
    tables: tuple[PageTable, ...] = ()
    pictures: tuple[Picture, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Outline:
    """The anchors of a page: a name for every section and picture, no two the same."""

    sections: Sequence[Section]

    def section(self, index: int) -> str:
        """The anchor of the section at that place."""
        return self._anchors[len(self._pictures) + index]

    def pictures(self, index: int) -> list[str]:
        """The anchors of the pictures in the section at that place."""
        before = sum(len(section.pictures) for section in self.sections[:index])
        return self._anchors[before : before + len(self.sections[index].pictures)]

    def target(self, finding: Finding) -> tuple[str, str] | None:
        """Anchor and title of the picture that a finding names; none if it names none or it is not on the page."""
        return next(
            (
                (anchor, picture.title)
                for anchor, picture in zip(self._anchors, self._pictures, strict=False)
                if picture.name == finding.figure
            ),
            None,
        )

    @cached_property
    def _pictures(self) -> list[Picture]:
        return [picture for section in self.sections for picture in section.pictures]

    @cached_property
    def _anchors(self) -> list[str]:
        """Those of all pictures, which links from elsewhere know by their file's name, then those of the sections."""
        wanted = [f"figure-{picture.name}" for picture in self._pictures] + [section.title for section in self.sections]
        anchors = ["contents"]
        for words in wanted:
            plain = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "section"
            anchor, number = plain, 2
            while anchor in anchors:
                anchor, number = f"{plain}-{number}", number + 1
            anchors.append(anchor)
        return anchors[1:]


def link_to(path: Path, folder: Path) -> str:
    """The way from a page in the folder to a file."""
    return Path(os.path.relpath(path, folder)).as_posix()


def _is_numeric(cells: tuple[str, ...]) -> bool:
    filled = [cell.strip() for cell in cells if cell.strip().lower() not in _EMPTY]
    return bool(filled) and all(_NUMBER.fullmatch(cell) for cell in filled)


def _relative(link: str) -> str:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or link.startswith("/"):
        raise InputError(f"the link '{link}' of a picture has to be relative to the page, such as 'charts/spread.html'")
    return quote(link)
