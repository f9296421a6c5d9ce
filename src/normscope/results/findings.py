"""A finding: one plain sentence with the number that matters, its severity, a comparison that gives it scale, and advice."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import Any, Literal, SupportsIndex, get_args, overload

Severity = Literal["ok", "notice", "warning"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
_COLOURS = {"ok": "#1a7f37", "notice": "#0969da", "warning": "#bc4c00"}  # they suit light and dark notebooks


@dataclass(frozen=True)
class Finding:
    """What a reader should know, and what to do about it.

    Example:
        >>> print(card_text(Finding("The residual norm grows 20 times.", title="Growth", comparison="Llama: 30 times.")))
        NOTICE  Growth
          The residual norm grows 20 times.
          Compare: Llama: 30 times.
        <BLANKLINE>

    Attributes:
        text: one sentence with the number that matters.
        figure: the name of the figure that shows it, or None.
        title: a few words that head it.
        severity: ``ok``, ``notice`` or ``warning``.
        number: the number in the sentence, if there is one.
        comparison: what gives the number scale: typical models, theory, a published value.
        advice: what to do, if anything.
        weight: how much it matters; those with a weight, and warnings, are shown as cards if they have a title, the
            heaviest five first, and the others are only listed.
    """

    text: str
    figure: str | None = None
    title: str = ""
    severity: Severity = "notice"
    number: float | None = None
    comparison: str = ""
    advice: str = ""
    weight: float = 0.0

    @property
    def record(self) -> dict[str, Any]:
        """The finding as a row of the table ``findings``."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Finding":
        """The finding of a row of the table ``findings``."""
        given = {field.name: record[field.name] for field in fields(cls) if record.get(field.name) is not None}
        return cls(**given)

    def __str__(self) -> str:
        return card_text(self).rstrip()

    def _repr_html_(self) -> str:
        return card_html(self)


class Findings(tuple[Finding, ...]):
    """Findings in order; a terminal shows them as paragraphs, a notebook as cards."""

    @overload
    def __getitem__(self, key: SupportsIndex) -> Finding: ...
    @overload
    def __getitem__(self, key: slice) -> "Findings": ...
    def __getitem__(self, key: SupportsIndex | slice) -> "Finding | Findings":
        """One of them, or some of them in the same form."""
        return Findings(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self)) or "()"

    def _repr_html_(self) -> str:
        return "".join(map(card_html, self)) or "<p>no findings</p>"


def most_important(findings: Iterable[Finding], count: int = 5) -> list[Finding]:
    """The cards of a page: warnings first, then by weight."""
    cards = [finding for finding in findings if finding.title and (finding.weight or finding.severity == "warning")]
    return sorted(cards, key=lambda finding: (-SEVERITIES.index(finding.severity), -finding.weight))[:count]


def card_text(finding: Finding, width: int = 100) -> str:
    """A finding as a short paragraph for a terminal: severity and title, the sentence, what it compares to, advice."""
    parts = (("", finding.text), ("Compare: ", finding.comparison), ("Advice: ", finding.advice))
    wrapped = [
        textwrap.fill(f"{label}{text}", width, initial_indent="  ", subsequent_indent="  ") for label, text in parts if text
    ]
    return "\n".join([f"{finding.severity.upper()}  {finding.title}".rstrip(), *wrapped, ""])


def cards_text(findings: Sequence[Finding]) -> Iterator[str]:
    """The most important findings as paragraphs for a terminal, and how many more the report has."""
    shown = most_important(findings)
    yield from map(card_text, shown)
    if len(findings) > len(shown):
        others = len(findings) - len(shown)
        yield f"{others} more finding{'s' * (others > 1)} in the report."


def card_html(finding: Finding) -> str:
    """A finding as a card for a notebook, in HTML without scripts."""
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
    return f"<div style='border-left:3px solid {colour};padding:.2em .8em;margin:.5em 0;max-width:60em'>{body}</div>"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
