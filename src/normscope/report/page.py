"""A self-contained HTML page from sections: text, tables and pictures in one file that needs no network."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from normscope.errors import InputError, MissingExtraError

_TEMPLATE = "page.html.j2"
_WIDE = 1600  # pixels; on a phone a wider picture scrolls instead of shrinking beyond reading
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


@dataclass(frozen=True)
class Picture:
    """A PNG file, embedded in the page.

    Words that the file itself carries and shows, as charts do, are repeated only on a phone, where they are too small.

    Attributes:
        title: what it shows; with the caption, also the text for readers who do not see it.
        png: the file.
        caption: one line that says what to see in it.
        interactive: a link, relative to the page, to the interactive version.
        settings: small print.
    """

    title: str
    png: Path
    caption: str
    interactive: str | None = None
    settings: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page: a heading, paragraphs of plain text, then tables and pictures."""

    title: str
    text: tuple[str, ...]
    tables: tuple[PageTable, ...] = ()
    pictures: tuple[Picture, ...] = ()


def render_page(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """The whole page as HTML; all texts are plain and escaped, all pictures are inside.

    Args:
        title: the heading of the page.
        lead: a paragraph below it.
        sections: the parts, in order; their headings make the table of contents.
        footer: a line at the end.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise MissingExtraError("a page needs jinja2; pip install 'normscope[report]'") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("normscope.report").joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    names = _anchors([section.title for section in sections])
    parts = [_part(section, name) for section, name in zip(sections, names, strict=True)]
    return template.render(title=title, lead=lead, sections=parts, footer=footer)


def _anchors(titles: list[str]) -> list[str]:
    """A name for each section's link, from its title, no two the same."""
    anchors: list[str] = []
    for title in titles:
        plain = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        anchor, number = plain, 2
        while anchor in anchors:
            anchor, number = f"{plain}-{number}", number + 1
        anchors.append(anchor)
    return anchors


def _part(section: Section, anchor: str) -> dict[str, Any]:
    """What the template shows of a section."""
    return {
        "title": section.title,
        "anchor": anchor,
        "text": section.text,
        "tables": [_table(table) for table in section.tables],
        "pictures": [_picture(picture) for picture in section.pictures],
    }


def _table(table: PageTable) -> dict[str, Any]:
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    return {
        "caption": table.caption,
        "columns": table.columns,
        "rows": table.rows,
        "numeric": [_is_numeric(cells) for cells in columns],
    }


def _is_numeric(cells: tuple[str, ...]) -> bool:
    """Whether a column holds numbers, to be set flush right."""
    filled = [cell.strip() for cell in cells if cell.strip().lower() not in _EMPTY]
    return bool(filled) and all(_NUMBER.fullmatch(cell) for cell in filled)


def _picture(picture: Picture) -> dict[str, Any]:
    from PIL import Image, UnidentifiedImageError

    try:
        content = picture.png.read_bytes()
        with Image.open(BytesIO(content), formats=["PNG"]) as image:
            width, height = image.size
            written = {text for text in image.info.values() if isinstance(text, str)}
    except UnidentifiedImageError as error:
        raise InputError(f"the picture '{picture.png}' is not a PNG file") from error
    except OSError as error:
        raise InputError(f"cannot read the picture '{picture.png}': {error.strerror or error}") from error
    words = {"title": picture.title, "caption": picture.caption, "settings": picture.settings}
    return {
        **words,
        "said": {key: text in written for key, text in words.items()},
        "link": _relative(picture.interactive) if picture.interactive else "",
        "alt": ". ".join(text.rstrip(".") for text in (picture.title, picture.caption) if text),
        "source": "data:image/png;base64," + base64.b64encode(content).decode("ascii"),
        "width": width,
        "height": height,
        "wide": width > _WIDE,
    }


def _relative(link: str) -> str:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or link.startswith("/"):
        raise InputError(f"the link '{link}' of a picture has to be relative to the page, such as 'charts/spread.html'")
    return quote(link)
