"""The site: it builds without a warning, shows what the code says, loads nothing from elsewhere, can be searched from disk."""

import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from markdown_it import MarkdownIt

import normscope as ns
from helpers.browser import Tab, open_tab
from helpers.docs import ROOT, name_of, pages
from normscope.cli.overview import commands
from normscope.experiments import kind_of, summaries

pytest.importorskip("mkdocs", reason="the site needs normscope[docs]")
sys.path.insert(0, str(ROOT / "tools" / "site"))

from dialect import slug, with_links, with_lists
from notebooks import notebook_page


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built once for all tests and their processes; a warning of the build is an error."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            build(folder)
    return folder


def build(folder: Path, **changes: Any) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True, **changes)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)


class Page(HTMLParser):
    """What a page of the site holds: links, and how often its text has each element."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.elements: list[str] = []
        self._inside = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "preconnect", "icon"):
            self.loaded.append(values["href"])
        self._inside += tag == "article" or (self._inside > 0 and tag == "aside")
        if self._inside:
            self.elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._inside -= tag == "article" or (self._inside > 0 and tag == "aside")


def built(page: Path) -> Path:
    """Where a page of docs/ is in the site."""
    path = page.relative_to(ROOT / "docs")
    return path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html")


def test_every_page_and_every_command_is_there(site: Path) -> None:
    docs = [page for page in pages() if page.is_relative_to(ROOT / "docs")]
    expected = {str(built(page)) for page in docs}
    expected |= {f"reference/commands/{name}.html" for name in commands()}
    expected |= {f"reference/functions/{name}.html" for name in ("simulate", "audit", "check", "follow", "check_scheme")}
    expected |= {f"tutorials/{notebook.stem}.html" for notebook in ROOT.glob("docs/tutorials/*.ipynb")}
    there = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert not expected - there


@pytest.mark.parametrize("name", list(summaries()))
def test_reference_pages_have_every_setting(site: Path, name: str) -> None:
    command = (site / "reference" / "commands" / f"{name}.html").read_text(encoding="utf-8")
    function = site / "reference" / "functions" / f"{ {'watch': 'follow'}.get(name, name.replace('-', '_')) }.html"
    text = function.read_text(encoding="utf-8")
    for setting, about in kind_of(name).fields().items():
        assert f"<code>{setting}</code>" in text
        extra = about.json_schema_extra if isinstance(about.json_schema_extra, dict) else {}
        option = setting if extra.get("argument") else str(extra.get("option") or f"--{setting.replace('_', '-')}")
        assert option.partition("/")[0] in command, option


def test_reference_pages_have_every_public_name(site: Path) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    for name in {*ns.__all__, "find_scheme"} - {"__version__", "watch"}:
        assert re.search(rf'id="normscope\.(\w+\.)*{name}"', text), name


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        if path.name != "explorer.html":
            assert not [url for url in Page(path).loaded if re.match(r"(https?:)?//", url)], path


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_pages_look_as_on_github(site: Path, page: Path) -> None:
    """As many lists, tables, blocks of code and pictures as where CommonMark is read."""
    path = site / built(page) if page.is_relative_to(ROOT / "docs") else None
    text = page.read_text(encoding="utf-8")
    if path is None or ":::" in text or "<!-- generated" in text:
        pytest.skip("not a page of the site, or not from this text alone")
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    kinds = [token.type for token in tokens] + [child.type for token in tokens for child in token.children or ()]
    elements = Page(path).elements
    for token, tag in {"list_item_open": "li", "table_open": "table", "image": "img"}.items():
        assert elements.count(tag) == kinds.count(token), tag
    assert elements.count("pre") == kinds.count("fence") + kinds.count("code_block")


@pytest.mark.parametrize(("text", "problem"), [
    ("[gone](nowhere.md)", "nowhere.md"), ("[gone](schemes.md#no-such-heading)", "no-such-heading"),
    ("[gone][nowhere.Thing]", "nowhere.Thing"), ("![gone](figures/none.png)", "none.png"), ("[x](/schemes.md)", "absolute"),
    ("", "not included in the \"nav\""),
])  # fmt: skip
def test_what_leads_nowhere_ends_the_build(tmp_path: Path, text: str, problem: str, caplog: pytest.LogCaptureFixture) -> None:
    from mkdocs.exceptions import Abort

    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# One\n\n{text}\n", encoding="utf-8")
    (docs / "schemes.md").write_text("# Schemes\n", encoding="utf-8")
    nav = ["index.md", "schemes.md"] if text else ["index.md"]
    plain = {"hooks": [], "theme": {"name": "mkdocs"}, "extra_css": [], "plugins": ["autorefs"]}
    with pytest.raises(Abort):
        build(tmp_path / "site", docs_dir=str(docs), nav=nav, **plain)
    assert problem in caplog.text


@pytest.fixture(scope="module")
def tab() -> Any:
    with open_tab() as tab:
        yield tab


def test_search_works_from_disk(site: Path, tab: Tab) -> None:
    tab.open(site / "index.html")
    tab.page.fill("input.md-search__input", "interference")
    tab.wait("document.querySelectorAll('.md-search-result__item').length > 3")
    found = tab.run("[...document.querySelectorAll('.md-search-result__item a')].map(link => link.href)")
    assert any("subspaces" in link for link in found)
    assert all(link.startswith("file://") for link in found)
    assert not tab.errors
    assert not [url for url in tab.loaded if not url.startswith(("file:", "blob:", "data:"))]


def test_the_explorer_is_embedded(site: Path, tab: Tab) -> None:
    tab.open(site / "playground.html")
    frame = tab.page.frame_locator("iframe.explorer")
    frame.get_by_role("button", name="Guided tour").click()
    frame.get_by_text("1 of 6: Initial velocity").wait_for()
    assert not tab.errors


@pytest.mark.parametrize("name", ["index", "reference/index", "reference/commands/audit", "reference/functions/simulate",
                                  "reference/models", "results/dynamics"])  # fmt: skip
def test_pages_fit_a_phone(site: Path, tab: Tab, name: str) -> None:
    tab.open(site / f"{name}.html", width=375)
    assert tab.run("document.documentElement.scrollWidth") <= 375
    assert not tab.errors


def test_links_lead_to_where_files_are_in_the_site() -> None:
    places = {"docs/a.md": "a.md", "docs/t/n.ipynb": "t/n.md", "src/x.py": "repository/src/x.py"}
    text = "[a](docs/a.md#b), [n](docs/t/n.ipynb), [x](src/x.py), [all](src), [w](https://a.b), [c](#c)\n```\n[a](a.md)\n```\n"
    assert with_links(text, "CONTRIBUTING.md", "project/contributing.md", places.get) == (
        "[a](../a.md#b), [n](../t/n.md), [x](../repository/src/x.py), all, [w](https://a.b), [c](#c)\n```\n[a](a.md)\n```\n"
    )


def test_lists_are_those_of_github() -> None:
    text = "Text\n- one\n  - two\n\n    more\n- three\n\nText\n1. four\n   - five\n\n    code\n"
    assert with_lists(text) == "Text\n\n- one\n    - two\n\n        more\n- three\n\nText\n\n1. four\n    - five\n\n     code\n"


def test_slugs_are_those_of_github() -> None:
    assert slug("What `normscope watch` does: α, β & more") == "what-normscope-watch-does-α-β--more"


def test_a_notebook_becomes_a_page(tmp_path: Path) -> None:
    path = tmp_path / "1-one.ipynb"
    path.write_text(NOTEBOOK, encoding="utf-8")
    text, pictures = notebook_page(path)
    assert text.startswith("# One\n\n[Download this notebook](1-one.ipynb)")
    assert "```python\nx = 1\nx\n```\n\n```text\n1\n```" in text
    assert "![Output of the cell above](1-one-1.png)" in text
    assert pictures == {"1-one-1.png": b"picture"}
    assert '<div class="output"><table>\n<tr></tr></table></div>' in text
    assert "noise" not in text
    assert re.search(r"Text with <math.*<msub>.*</math>, and 5\$", text)


NOTEBOOK = """{"cells": [
 {"cell_type": "markdown", "source": ["# One\\n", "\\n", "Text with $x_1$, and 5$."]},
 {"cell_type": "code", "source": "x = 1\\nx", "outputs": [
  {"output_type": "stream", "name": "stderr", "text": "noise"},
  {"output_type": "execute_result", "data": {"text/plain": ["1"]}},
  {"output_type": "display_data", "data": {"image/png": "cGljdHVyZQ==", "text/plain": "<Figure>"}},
  {"output_type": "execute_result", "data": {"text/html": "<table>\\n\\n<tr></tr></table>", "text/plain": "table"}}]}
]}"""
