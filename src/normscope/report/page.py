"""A self-contained HTML page from sections: text, findings, tables and pictures in one file that needs no network."""

import base64
from collections.abc import Sequence
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

from normscope.errors import InputError, MissingExtraError
from normscope.results.sections import Finding, Outline, PageTable, Picture, Section

__all__ = ["Finding", "PageTable", "Picture", "Section", "render_page"]

_TEMPLATE = "page.html.j2"
_WIDE = 1600  # pixels; on a phone a wider picture scrolls instead of shrinking beyond reading
_TALL = 0.8  # of its width; on paper a higher picture gets more than half a page


def render_page(title: str, lead: str, sections: Sequence[Section], footer: str = "", folder: Path | None = None) -> str:
    """The whole page as HTML; all texts are plain and escaped, all pictures are inside.

    Args:
        title: the heading of the page.
        lead: a paragraph below it.
        sections: the parts, in order; their headings make the table of contents.
        footer: a line at the end.
        folder: where the page will lie; if given, it links to the files of its pictures.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise MissingExtraError("a page needs jinja2; pip install 'normscope[report]'") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("normscope.report").joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    outline = Outline(sections)
    parts = [_part(section, index, outline, folder) for index, section in enumerate(sections)]
    return template.render(title=title, lead=lead, sections=parts, footer=footer)


def _part(section: Section, index: int, outline: Outline, folder: Path | None) -> dict[str, Any]:
    """What the template shows of a section."""
    pictures = zip(section.pictures, outline.pictures(index), strict=True)
    return {
        "title": section.title,
        "anchor": outline.section(index),
        "text": section.text,
        "findings": [{"text": finding.text, "target": outline.target(finding)} for finding in section.findings],
        "tables": section.tables,
        "pictures": [_picture(picture, anchor, folder) for picture, anchor in pictures],
    }


def _picture(picture: Picture, anchor: str, folder: Path | None) -> dict[str, Any]:
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
        "anchor": anchor,
        "said": {key: text in written for key, text in words.items()},
        "links": picture.links(folder),
        "alt": ". ".join(text.rstrip(".") for text in (picture.title, picture.caption) if text),
        "source": "data:image/png;base64," + base64.b64encode(content).decode("ascii"),
        "width": width,
        "height": height,
        "shape": "wide" if width > _WIDE else "tall" if height > _TALL * width else "",
    }
