"""A report in Markdown says what the page says: read back by a parser that is not ours."""

from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from PIL import Image

from normscope.errors import InputError
from normscope.report import Finding, PageTable, Picture, Section, render_markdown, render_page
from normscope.report.figures import findings_of, write_page
from normscope.runs import RunFolder
from test_report import Reader

ODD = [
    "<b>bold</b> & &amp; *stars* _lines_ `code`",
    "[link](x) ![picture](y) $x_j$ ~~gone~~ a | b \\ c\\",
    "# no heading",
    "- no list",
    "+ none",
    "1. none",
    "12) none",
    "> no quotation",
    "=====",
    "---",
    "100 % of ␣tokens, x_j = r_j θ_j",
    "-0.5",
    "~~~",
    "http://example.org and <http://example.org>",
]


def parsed(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def shown(token: Token) -> str:
    """What a reader sees of a line: its text without marks, pictures and tags."""
    return "".join(part.content for part in token.children or [] if part.type in {"text", "text_special", "code_inline"})


def texts(tokens: list[Token], inside: str) -> list[str]:
    """The lines directly inside elements of a kind."""
    return [shown(tokens[i + 1]) for i, token in enumerate(tokens) if token.type == f"{inside}_open"]


def attributes(tokens: list[Token], kind: str, name: str) -> list[str]:
    return [str(part.attrs[name]) for token in tokens for part in token.children or [] if part.type == kind]


@pytest.mark.parametrize("text", ODD)
def test_text_is_plain_wherever_it_stands(text: str) -> None:
    table = PageTable(text, (text, "n"), ((text, "1"), ("x", text)))
    section = Section(text, (text,), (table,), findings=(Finding(text),))
    tokens = parsed(render_markdown(text, text, [section], text))
    assert texts(tokens, "heading") == [text, text]
    assert [token.type for token in tokens if token.type.endswith("list_open")] == ["bullet_list_open"]
    assert texts(tokens, "th") == [text, "n"]
    assert texts(tokens, "td") == [text, "1", "x", text]
    lines = [shown(token) for token in tokens if token.type == "inline"]
    assert lines.count(text) == 2 + 2 + 1 + 1 + 3 + 1  # headings, paragraphs, finding, caption, cells, footer
    inside = {part.type for token in tokens for part in token.children or []}
    assert inside <= {"text", "text_special", "strong_open", "strong_close", "html_inline"}


def test_columns_of_numbers_stand_flush_right() -> None:
    table = PageTable("Slots", ("scheme", "cosine"), (("pre", "0.91"), ("post", "−1.2e-3")))
    tokens = parsed(render_markdown("Title", "", [Section("One", (), (table,))]))
    assert [token.attrs.get("style") for token in tokens if token.type == "th_open"] == [None, "text-align:right"]


@pytest.fixture
def page(tmp_path: Path) -> list[Section]:
    """Sections with two pictures, and findings of which one names a picture that is not there."""
    (tmp_path / "figures").mkdir()
    pictures = []
    for name in ("a dot", "line_(2)"):
        Image.new("RGB", (40, 30), "white").save(tmp_path / "figures" / f"{name}.png")
        for suffix in ("csv", "html"):
            (tmp_path / "figures" / f"{name}.{suffix}").write_text("x")
        links = (f"figures/{name}.html", "40 by 30", f"figures/{name}.csv")
        pictures.append(Picture(f"The [{name}]", tmp_path / "figures" / f"{name}.png", "It is white.", *links))
    findings = (Finding("One is a dot.", "a dot"), Finding("Two.", "line_(2)"), Finding("Three.", "absent"), Finding("Four."))
    return [
        Section("Findings", (), findings=findings),
        Section("Figure a dot", ("Text.",), pictures=(pictures[0],)),
        Section("More", (), pictures=(pictures[1],)),
    ]


def test_links_lead_to_files_and_anchors(tmp_path: Path, page: list[Section]) -> None:
    tokens = parsed(render_markdown("Title", "Lead", page, "Footer", tmp_path))
    links = attributes(tokens, "link_open", "href")
    files = [unquote(link) for link in links if not link.startswith("#")]
    assert files == [f"figures/{name}.{suffix}" for name in ("a dot", "line_(2)") for suffix in ("html", "csv", "png")]
    sources = [unquote(source) for source in attributes(tokens, "image", "src")]
    assert sources == ["figures/a dot.png", "figures/line_(2).png"]
    for file in (*files, *sources):
        assert (tmp_path / file).is_file()
    anchors = [part.content for token in tokens for part in token.children or [] if part.type == "html_inline"]
    inside = [link for link in links if link.startswith("#")]
    assert inside == ["#figure-a-dot", "#figure-line-2"]
    assert all(f'<a id="{link[1:]}">' in anchors for link in inside)
    assert len(set(anchors) - {"</a>"}) == 3 + 2


def test_html_and_markdown_have_the_same_links_and_anchors(tmp_path: Path, page: list[Section]) -> None:
    reader = Reader(render_page("Title", "Lead", page, "Footer", tmp_path))
    links = [str(link["href"]) for link in reader.every("a")][len(page) :]  # behind the table of contents
    assert links == attributes(parsed(render_markdown("Title", "Lead", page, "Footer", tmp_path)), "link_open", "href")
    identities = [str(attributes["id"]) for _, attributes in reader.elements if "id" in attributes]
    assert len(set(identities)) == len(identities)
    assert [figure["id"] for figure in reader.every("figure")] == ["figure-a-dot", "figure-line-2"]
    assert [section["id"] for section in reader.every("section")] == ["findings", "figure-a-dot-2", "more"]
    for words in ("One is a dot. Figure: The [a dot]", "Two. Figure: The [line_(2)]", "Three.\n", "Four.\n"):
        assert words in reader.text


@pytest.mark.parametrize("formats", [("html",), ("md",), ("html", "md")])
def test_a_run_has_the_pages_that_were_asked_for(tmp_path: Path, page: list[Section], formats: tuple[str, ...]) -> None:
    paths = write_page(RunFolder(tmp_path), "Title", "Lead", page, formats)
    assert [path.name for path in paths] == [f"report.{name}" for name in formats]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted(f"report.{name}" for name in formats)
    assert all("The tables lie beside this page" in path.read_text(encoding="utf-8") for path in paths)


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown format 'markdown'; allowed: html, md"):
        write_page(RunFolder(tmp_path), "Title", "", [], ("html", "markdown"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("figure", [["spread", None], None])
def test_findings_come_from_their_table(tmp_path: Path, figure: list[str | None] | None) -> None:
    run = RunFolder(tmp_path)
    assert findings_of(run) == ()
    table = pd.DataFrame({"text": ["Wide by 33 %.", "Sparse."]})
    run.write_table("findings", table if figure is None else table.assign(figure=figure))
    assert findings_of(run) == (Finding("Wide by 33 %.", figure and figure[0]), Finding("Sparse."))


def test_markdown_needs_no_optional_library(tmp_path: Path, page: list[Section], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    assert [path.name for path in write_page(RunFolder(tmp_path), "Title", "", page, ("md",))] == ["report.md"]
