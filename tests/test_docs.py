"""The documentation is true: relative links lead somewhere, and code that runs quickly runs as it is printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("dynamics", "norms", "report", "tasks", "transformer")  # pages whose code needs neither downloads nor minutes


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_python(page: Path) -> None:
    for number, block in enumerate(python_blocks(page)):
        compile(block, f"{page.name}, block {number}", "exec")


@pytest.mark.parametrize("name", RUN)
def test_code_runs_as_printed(name: str, here: Path) -> None:
    names: dict[str, object] = {}
    for block in python_blocks(ROOT / "docs" / f"{name}.md"):
        exec(block, names)


def python_blocks(page: Path) -> list[str]:
    """All Python code of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
