"""A report in Markdown says what the page says: read back by a parser that is not ours."""

import math
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from helpers.pages import Reader
from normscope.experiments.result import Result
from normscope.experiments.simulate import Simulate
from normscope.report import render_markdown, render_page, write_report
from normscope.report.write import Report
from normscope.results import Chart, Finding, Line, PageTable, Section

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
    tokens = parsed(render_markdown(text, text, [section], footer=text))
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
def page() -> list[Section]:
    """Sections with two figures, and findings of which one names a figure that is not there."""
    figures = {
        name: Chart(f"The [{name}]", "x", "y", (Line("a", [0, 1], [1, 2]),), "It rises.", "40 by 30")
        for name in ("a dot", "line_(2)")
    }
    findings = (Finding("One is a dot.", "a dot"), Finding("Two.", "line_(2)"), Finding("Three.", "absent"), Finding("Four."))
    return [
        Section("Findings", (), findings=findings),
        Section("Figure a dot", ("Text.",), figures={"a dot": figures["a dot"]}),
        Section("More", (), figures={"line_(2)": figures["line_(2)"]}),
    ]


def test_links_lead_to_files_and_anchors(tmp_path: Path, page: list[Section]) -> None:
    (written,) = write_report(tmp_path, Report("Title", "Lead", page), ("md", "csv"))
    tokens = parsed(written.read_text(encoding="utf-8"))
    links = attributes(tokens, "link_open", "href")
    files = [unquote(link) for link in links if not link.startswith("#")]
    assert files == ["figures/a dot.csv", "figures/line_(2).csv"]
    sources = [unquote(source) for source in attributes(tokens, "image", "src")]
    assert sources == ["figures/a dot.png", "figures/line_(2).png"]
    for file in (*files, *sources):
        assert (tmp_path / file).is_file()
    anchors = [part.content for token in tokens for part in token.children or [] if part.type == "html_inline"]
    inside = [link for link in links if link.startswith("#")]
    assert inside == ["#figure-a-dot", "#figure-line-2"]
    assert all(f'<a id="{link[1:]}">' in anchors for link in inside)
    assert len(set(anchors) - {"</a>"}) == 3 + 2


def test_html_and_markdown_have_the_same_links_and_anchors(page: list[Section]) -> None:
    reader = Reader(render_page("Title", "Lead", page, footer="Footer"))
    links = [str(link["href"]) for link in reader.every("a")][len(page) :]  # after the contents
    assert links == attributes(parsed(render_markdown("Title", "Lead", page, footer="Footer")), "link_open", "href")
    identities = [str(attributes["id"]) for _, attributes in reader.elements if "id" in attributes]
    assert len(set(identities)) == len(identities)
    assert [figure["id"] for figure in reader.every("figure")] == ["figure-a-dot", "figure-line-2"]
    assert [section["id"] for section in reader.every("section")] == ["findings", "figure-a-dot-2", "more"]
    for words in ("One is a dot. Figure: The [a dot]", "Two. Figure: The [line_(2)]", "Three.\n", "Four.\n"):
        assert words in reader.text


def test_cards_come_first_with_severity_comparison_and_advice() -> None:
    card = Finding("It is 5.", title="Large", severity="warning", comparison="Others have 1.", advice="Look.", weight=1.0)
    tokens = parsed(render_markdown("Title", "Lead", [], facts=[("layers", "30")], findings=[Finding("Plain."), card]))
    lines = [shown(token) for token in tokens if token.type == "inline"]
    assert lines[2:] == ["layers: 30", "WARNING: Large. It is 5. Compare: Others have 1. Advice: Look.", "Plain."]


@pytest.mark.parametrize("figure", [["spread", None], None])
def test_findings_come_from_their_table(figure: list[str | None] | None) -> None:
    table = pd.DataFrame({"text": ["Wide by 33 %.", "Sparse."]})
    tables = {"findings": table if figure is None else table.assign(figure=figure, weight=[1.0, math.nan])}
    first = Finding("Wide by 33 %.") if figure is None else Finding("Wide by 33 %.", "spread", weight=1.0)
    assert Result(Simulate, {}, tables).findings == (first, Finding("Sparse."))
