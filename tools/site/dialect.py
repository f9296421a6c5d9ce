"""Markdown as GitHub reads it, rewritten for Python-Markdown, which MkDocs uses: lists, links out of docs/, captions."""

import os
import re
from collections.abc import Callable
from pathlib import PurePosixPath

_FENCE = re.compile(r"^ *(```|~~~)")
_ITEM = re.compile(r"^( *)([-*+]|\d+[.)])( +)(?=\S)")
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\])\(([^)\s]+)\)")
_COMMENT = re.compile(r"^ *<!--.*?-->\n?", re.DOTALL | re.MULTILINE)
_MADE_BY = re.compile(r"\n+(Made by `[^\n]*)")


def slug(title: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with everything changed but fenced code."""
    parts: list[tuple[bool, list[str]]] = [(False, [])]
    fence = ""
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if not fence and found:
            parts.append((True, []))
            fence = found[1]
            parts[-1][1].append(line)
        elif fence and line.strip() == fence:
            parts[-1][1].append(line)
            parts.append((False, []))
            fence = ""
        else:
            parts[-1][1].append(line)
    return "".join("".join(lines) if code else change("".join(lines)) for code, lines in parts)


def without_comments(text: str) -> str:
    """The text without HTML comments, which hold what tests need."""
    return outside_code(text, lambda part: _COMMENT.sub("", part))


def with_captions(text: str) -> str:
    """The command under a figure as a caption of its own."""
    return outside_code(text, lambda part: _MADE_BY.sub(r"\n\n\1\n{ .made-by }", part))


def with_lists(text: str) -> str:
    """Lists that need no empty line before them and nest by the width of their marker, indented by four as here."""
    lines: list[str] = []
    inside: list[int] = []  # the columns at which the text of the open items begins
    fence, empty = "", True
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        found, item = _FENCE.match(line), None if fence else _ITEM.match(line)
        if not line.strip():
            lines.append(line)
            empty = True
            continue
        begins = not inside
        if not fence and (item or empty):  # any other line goes on with its paragraph
            while inside and indent < inside[-1]:
                inside.pop()
        if item and begins and indent > 3:
            item = None  # indented code
        if item and begins and not empty:
            lines.append("")
        outer = inside[-1] if inside else 0
        kept = 0 if item else max(indent - outer, 0)
        lines.append(" " * (4 * len(inside) + kept) + line.lstrip(" "))
        if item:
            inside.append(item.end())
        if found and fence in ("", found[1]):
            fence = "" if fence else found[1]
        empty = False
    return "\n".join(lines)


def with_links(text: str, source: str, page: str, place: Callable[[str], str | None]) -> str:
    """The text of a file of the repository whose relative links lead to pages of the site.

    Args:
        text: Markdown.
        source: the path of the file in the repository.
        page: the path of the page in the site's sources.
        place: where a file of the repository is in the site's sources; None for what is not there: its link becomes plain text.
    """

    def link(found: re.Match[str]) -> str:
        label, target = found.groups()
        if "://" in target or target.startswith(("#", "mailto:", "/")):
            return found[0]
        name, mark, anchor = target.partition("#")
        there = place(os.path.normpath(PurePosixPath(source).parent / name))
        if there is None:
            return label[1:-1]
        return f"{label}({os.path.relpath(there, PurePosixPath(page).parent)}{mark}{anchor})"

    return outside_code(text, lambda part: _LINK.sub(link, part))
