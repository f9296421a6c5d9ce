"""The same sections as Markdown: text, findings, tables, and links to the files of pictures and their numbers."""

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from normscope.results.sections import Finding, Outline, PageTable, Picture, Section, link_to

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~$&#!])")
_LIST = re.compile(r"^(\d*)([-+.)=])")  # would begin a list or underline a heading


def render_markdown(title: str, lead: str, sections: Sequence[Section], footer: str = "", folder: Path = Path()) -> str:
    """The whole page as Markdown; all texts are plain and escaped, all pictures are links relative to ``folder``.

    Args:
        title: the heading of the page.
        lead: a paragraph below it.
        sections: the parts, in order.
        footer: a line at the end.
        folder: where the page will lie.
    """
    outline = Outline(sections)
    blocks = [f"# {_plain(title)}", _plain(lead)]
    for index, section in enumerate(sections):
        blocks += [f'<a id="{outline.section(index)}"></a>', f"## {_plain(section.title)}", *map(_plain, section.text)]
        blocks.append("\n".join(_finding(finding, outline) for finding in section.findings))
        blocks += [block for table in section.tables for block in (f"**{_plain(table.caption)}**", _table(table))]
        for picture, anchor in zip(section.pictures, outline.pictures(index), strict=True):
            blocks += _picture(picture, anchor, folder)
    blocks += ["---", _plain(footer)] if footer else []
    return "\n\n".join(block for block in blocks if block) + "\n"


def _finding(finding: Finding, outline: Outline) -> str:
    target = outline.target(finding)
    link = f" [Figure: {_plain(target[1])}](#{target[0]})" if target else ""
    return f"- {_plain(finding.text)}{link}"


def _table(table: PageTable) -> str:
    rules = ["---:" if numeric else "---" for numeric in table.numeric]
    rows = [[_plain(cell) for cell in row] for row in (table.columns, *table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rules, *rows[1:]))


def _picture(picture: Picture, anchor: str, folder: Path) -> list[str]:
    """An anchor, the picture, its words, and what can be opened beside it."""
    words = _plain(picture.title)
    shown = f"![{words}]({quote(link_to(picture.png, folder))})"
    title = f"**{words}{'' if words[-1] in '.?!' else '.'}** " if words else ""
    links = " · ".join(f"[{text}]({link})" for text, link in picture.links(folder))
    return [
        f'<a id="{anchor}"></a>',
        shown,
        title + _plain(picture.caption),
        f"*{_plain(picture.settings)}*" if picture.settings else "",
        links,
    ]


def _plain(text: str) -> str:
    """Text that Markdown shows as it stands, on one line."""
    return _LIST.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", " ".join(text.split())))
