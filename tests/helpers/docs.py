"""The pages of the documentation: their code, commands and pictures, and how tests are told what to do with them.

In the source of a page, on the line before a block of code:

- ``<!-- not run: REASON -->``: the block is compiled, or its commands are checked, but it is not run.
- ``<!-- in tests: LONG → SHORT -->``: the block is run with ``SHORT`` in place of ``LONG``; several lines hold several of them.
- ``<!-- file: NAME -->``: the block is written to that file, which later blocks may use.
- ``<!-- setup`` and Python up to ``-->``: run before what follows; readers do not see it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent.parent
SHELLS = ("bash", "console", "sh", "shell")


def pages() -> list[Path]:
    """All pages in Markdown: those of the site, README.md, and others beside docs/."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        kind: ``python``, ``shell``, ``setup``, ``file``, ``indented``, or the name of another language.
        text: the code as printed.
        line: where it begins.
        reason: why it is not run; empty where it is.
        shorter: what is replaced when it is run.
        file: what it is written to.
    """

    kind: str
    text: str
    line: int
    reason: str = ""
    shorter: tuple[tuple[str, str], ...] = ()
    file: str = ""

    @property
    def run(self) -> str:
        """The code as tests run it."""
        text = self.text
        for long, short in self.shorter:
            assert long in text, f"line {self.line}: 'in tests' replaces {long!r}, which is not in the block"
            text = text.replace(long, short)
        return text


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """The blocks of code of a page, in order."""
    return tuple(_blocks(page.read_text(encoding="utf-8")))


def _blocks(text: str) -> Iterator[Block]:
    comments: list[str] = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            found = re.findall(r"<!--\s*(.*?)\s*-->", token.content, re.DOTALL)
            comments = [comment for comment in found if not comment.startswith("setup\n")]
            yield from (Block("setup", one.removeprefix("setup\n"), line) for one in found if one.startswith("setup\n"))
        elif token.type == "code_block":
            yield Block("indented", token.content, line)
        elif token.type == "fence":
            said = dict(comment.partition(":")[::2] for comment in comments)
            pairs = (pair.partition("→")[::2] for pair in said.get("in tests", "").splitlines() if pair.strip())
            kind = (token.info.split() or [""])[0]
            yield Block(
                "shell" if kind in SHELLS else kind,
                token.content,
                line,
                said.get("not run", "").strip(),
                tuple((long.strip(), short.strip()) for long, short in pairs),
                said.get("file", "").strip(),
            )
            comments = []
        elif token.type not in ("list_item_open", "list_item_close"):
            comments = []


def inline_code(page: Path) -> Iterator[str]:
    """The code in the lines of a page."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content
