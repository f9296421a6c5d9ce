"""The same sections as Markdown: text, findings, tables, and links to the files of figures and their numbers."""

import re
from collections.abc import Sequence
from urllib.parse import quote

from normscope.errors import visible
from normscope.report.outline import Outline, Target
from normscope.results.findings import Finding, most_important
from normscope.results.sections import PageTable, Section

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~$&#!])")
_LIST = re.compile(r"^(\d*)([-+.)=])")  # would begin a list or underline a heading


def render_markdown(
    title: str,
    lead: str,
    sections: Sequence[Section],
    *,
    facts: Sequence[tuple[str, str]] = (),
    findings: Sequence[Finding] = (),
    footer: str = "",
    folder: str = "figures",
    data: bool = False,
) -> str:
    """The whole report as Markdown; all texts are plain and escaped.

    Args:
        title: the heading.
        lead: a paragraph below it.
        sections: the parts, in order.
        facts: key figures, each a name and a value.
        findings: those of the whole result, the most important first.
        footer: a line at the end.
        folder: where the figures' PNG files lie, relative to the report.
        data: whether their numbers lie there too, as CSV.
    """
    outline = Outline(sections)
    blocks = [f"# {_plain(title)}", _plain(lead), "\n".join(f"- {_plain(name)}: {_plain(value)}" for name, value in facts)]
    cards = most_important(findings)
    ordered = [*cards, *(finding for finding in findings if finding not in cards)]
    blocks.append("\n".join(_finding(finding, outline) for finding in ordered))
    for index, section in enumerate(sections):
        blocks += [f'<a id="{outline.section(index)}"></a>', f"## {_plain(section.title)}", *map(_plain, section.text)]
        blocks.append("\n".join(_finding(finding, outline) for finding in section.findings))
        blocks += [block for table in section.tables for block in (f"**{_plain(table.caption)}**", _table(table))]
        for target in outline.figures(index):
            blocks += _figure(target, folder, data)
    blocks += ["---", _plain(footer)] if footer else []
    return "\n\n".join(block for block in blocks if block) + "\n"


def _finding(finding: Finding, outline: Outline) -> str:
    target = outline.target(finding)
    link = f" [Figure: {_plain(target.title)}](#{target.anchor})" if target else ""
    head = f"**{_plain(finding.severity.upper())}: {_plain(finding.title)}.** " if finding.title else ""
    more = [f"Compare: {finding.comparison}"] * bool(finding.comparison) + [f"Advice: {finding.advice}"] * bool(finding.advice)
    return f"- {head}{' '.join(_plain(text) for text in (finding.text, *more))}{link}"


def _table(table: PageTable) -> str:
    rules = ["---:" if numeric else "---" for numeric in table.numeric]
    rows = [[_plain(cell) for cell in row] for row in (table.columns, *table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rules, *rows[1:]))


def _figure(target: Target, folder: str, data: bool) -> list[str]:
    """An anchor, the picture, its texts, and a link to its numbers."""
    figure, path = target.figure, quote(f"{folder}/{target.name}")
    title = _plain(figure.title)
    return [
        f'<a id="{target.anchor}"></a>',
        f"![{title}]({path}.png)",
        f"**{title}{'' if title[-1:] in '.?!' else '.'}** {_plain(figure.caption)}",
        f"*{_plain(figure.settings)}*" if figure.settings else "",
        f"[Data as CSV]({path}.csv)" if data else "",
    ]


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _LIST.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", visible(" ".join(text.split()))))
