"""What a notebook shows of a result: its summary, the findings that matter, and the names of its tables and figures."""

from collections.abc import Sequence
from html import escape

from normscope.results.findings import Finding, most_important

_COLOURS = {"ok": "#1a7f37", "notice": "#0969da", "warning": "#bc4c00"}


def render_summary(title: str, summary: str, findings: Sequence[Finding], tables: Sequence[str], figures: Sequence[str]) -> str:
    """HTML without scripts; colours suit light and dark notebooks."""
    shown = most_important(findings) or list(findings)[:5]
    left = len(findings) - len(shown)
    names = {"tables": tables, "figures": figures}
    parts = [
        f"<h4 style='margin:0 0 .3em'>{escape(title)}</h4>",
        f"<p style='margin:0 0 .6em;opacity:.75'>{escape(summary)}</p>",
        *map(_card, shown),
        f"<p style='opacity:.75'>{left} more findings in <code>.findings</code>.</p>" if left > 0 else "",
        *(
            f"<p style='margin:.2em 0'><b>{what}</b> {', '.join(f'<code>{escape(name)}</code>' for name in listed)}</p>"
            for what, listed in names.items()
            if listed
        ),
    ]
    return f"<div style='max-width:60em'>{''.join(parts)}</div>"


def _card(finding: Finding) -> str:
    colour = _COLOURS[finding.severity]
    lines = [
        f"<b style='color:{colour}'>{escape(finding.severity.upper())}</b> <b>{escape(finding.title)}</b>"
        if finding.title
        else "",
        escape(finding.text),
        f"<span style='opacity:.75'>Compare: {escape(finding.comparison)}</span>" if finding.comparison else "",
        f"<span style='opacity:.75'>Advice: {escape(finding.advice)}</span>" if finding.advice else "",
    ]
    body = "<br>".join(filter(None, lines))
    return f"<div style='border-left:3px solid {colour};padding:.2em .8em;margin:.5em 0'>{body}</div>"
