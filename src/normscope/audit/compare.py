"""Models and runs side by side: the measures that they have in common, as curves and as one number each."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from normscope.audit.quantities import LAYER, LAYERED, QUANTITIES, Frame, Quantity
from normscope.errors import InputError
from normscope.results.findings import Finding

Row = dict[str, Any]
COMPARABLE = (
    "models; runs of one command, which may be audit, train, evaluate, stability, subspaces, words (journey), ensemble, "
    "simulate or advise; and whatever else has a table in common"
)
_NOTHING = 1e-6  # smaller values are rounding, and a ratio to them has no meaning
_OF_STATES = ("motion", "journey")  # tables with a row for what every layer reads, and one for what leaves the last


@dataclass(frozen=True)
class Subject:
    """One side of a comparison: its name, its tables, and how many tokens were read for them, if that is known."""

    name: str
    tables: Mapping[str, Frame]
    tokens: int | None = None

    @property
    def depth(self) -> int | None:
        """How many layers its tables speak of, if they speak of layers."""
        last = {name: self.tables[name]["layer"].max() for name in LAYERED if name in self.tables}
        return max((int(layer) + (name not in _OF_STATES) for name, layer in last.items() if pd.notna(layer)), default=None)


@dataclass(frozen=True)
class Comparison:
    """What subjects have in common.

    Attributes:
        tables: ``curves`` (subject, quantity, line, x, y), ``numbers`` (quantity, line, number, unit, subject, value),
            ``quantities`` (name, title, x, y, caption: of the figures), ``findings`` (text, figure).
    """

    tables: dict[str, Frame]


def compare(subjects: Sequence[Subject]) -> Comparison:
    """All quantities that two subjects or more were measured by; layers as shares of the depth where depths differ.

    Raises:
        InputError: if there are fewer than two subjects, two of one name, or none that have something in common.
    """
    check_names([subject.name for subject in subjects])
    depths = {subject.depth for subject in subjects} - {None}
    numbers, curves, quantities = _token_rows(subjects), [], []
    findings: list[Finding] = []
    for quantity in QUANTITIES:
        share = quantity.x == LAYER and len(depths) > 1
        found = {one.name: _curve(quantity, one, share) for one in subjects if quantity.table in one.tables}
        drawn = {name: curve for name, curve in found.items() if not curve.empty}
        if len(drawn) < 2:
            continue
        x = "share of the depth" if share else quantity.x
        words = {"name": quantity.name, "title": quantity.title, "x": x, "y": quantity.y, "caption": quantity.caption}
        quantities.append(words)
        curves += [curve.assign(subject=name, quantity=quantity.name) for name, curve in drawn.items()]
        rows = [row for name, curve in drawn.items() for row in _number_rows(quantity, name, curve)]
        numbers += rows
        findings += _findings(quantity, rows)
    if not quantities:
        raise _nothing_in_common({one.name: one.tables for one in subjects})
    findings = [*_token_findings(subjects, [words["name"] for words in quantities]), *findings]
    return Comparison(
        {
            "findings": Frame([vars(one) for one in findings], columns=["text", "figure"]),
            "numbers": Frame(numbers, columns=["quantity", "line", "number", "unit", "subject", "value"]),
            "quantities": Frame(quantities),
            "curves": pd.concat(curves, ignore_index=True)[["subject", "quantity", "line", "x", "y"]],
        }
    )


def check_names(names: Sequence[str]) -> None:
    """Refuse a comparison of fewer than two, or of one with itself."""
    if len(names) < 2:
        raise InputError("a comparison needs two models or runs at least: normscope compare A B")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"'{twice}' is named twice: there is nothing to compare it with")


def check_common(tables: Mapping[str, Collection[str]]) -> None:
    """Refuse subjects no two of which have a table in common, by the names of the tables that they have or will have."""
    if not any(sum(quantity.table in names for names in tables.values()) > 1 for quantity in QUANTITIES):
        raise _nothing_in_common(tables)


def _nothing_in_common(tables: Mapping[str, Collection[str]]) -> InputError:
    have = "; ".join(f"{name}: {', '.join(names) or 'nothing'}" for name, names in tables.items())
    return InputError(f"these have no measure in common ({have}); what can be compared: {COMPARABLE}")


def _curve(quantity: Quantity, subject: Subject, share: bool) -> Frame:
    curve = quantity.curve(subject.tables[quantity.table])
    curve = curve.assign(line=curve.get("line", ""), x=curve["x"].astype(float), y=curve["y"].astype(float))
    return curve.assign(x=curve["x"] / subject.depth) if share and subject.depth else curve


def _number_rows(quantity: Quantity, subject: str, curve: Frame) -> Iterator[Row]:
    """The number of every line, if it has one."""
    for line in dict.fromkeys(map(str, curve["line"])):
        number = f"{quantity.number}, {line}" if line else quantity.number
        value = quantity.value(curve[curve["line"] == line])
        if math.isfinite(value):
            told = {"quantity": quantity.name, "line": line, "number": number, "unit": quantity.unit}
            yield {**told, "subject": subject, "value": value}


def _findings(quantity: Quantity, numbers: list[Row]) -> Iterator[Finding]:
    """A number's values, the largest first, and how far apart they are; of several lines the one where that is most."""
    lines = [[row for row in numbers if row["line"] == line] for line in dict.fromkeys(row["line"] for row in numbers)]
    shared = [sorted(rows, key=lambda row: -float(row["value"])) for rows in lines if len(rows) > 1]
    if not shared:
        return
    rows = max(shared, key=lambda rows: _apart(quantity, rows))
    listed, far = ", ".join(f"{row['subject']} {row['value']:.3g}{row['unit']}" for row in rows), _how_far(quantity, rows)
    if len(shared) == 1:
        said = f"{rows[0]['number']}: {listed}; {far or 'hardly a difference'}"
    elif far:
        said = f"{quantity.number} differs most for {rows[0]['line']}: {listed}; {far}"
    else:
        said = f"{quantity.number}: hardly a difference in any of {len(shared)} lines"
    yield Finding(f"{said[0].upper()}{said[1:]}.", quantity.name)


def _apart(quantity: Quantity, falling: list[Row]) -> float:
    """The largest over the smallest, infinite if that is nothing; or the largest less the smallest."""
    largest, smallest = falling[0]["value"], falling[-1]["value"]
    if not quantity.ratio:
        return float(largest - smallest)
    if largest <= _NOTHING:
        return 1.0
    return float(largest / smallest) if smallest > _NOTHING else math.inf


def _how_far(quantity: Quantity, falling: list[Row]) -> str:
    """How much more the largest is than the smallest, in words; nothing where three digits show no difference."""
    first, last = falling[0], falling[-1]
    apart, more = f"{_apart(quantity, falling):.3g}", f"{first['value'] - last['value']:.3g}"
    if more == "0" or (quantity.ratio and apart == "1"):
        return ""
    if quantity.ratio and apart != "inf":
        return f"{apart} times as much in {first['subject']} as in {last['subject']}"
    return f"{more}{first['unit']} more in {first['subject']} than in {last['subject']}"


def _token_rows(subjects: Sequence[Subject]) -> list[Row]:
    told = {"quantity": "tokens", "line": "", "number": "tokens read", "unit": ""}
    return [{**told, "subject": one.name, "value": float(one.tokens)} for one in subjects if one.tokens]


def _token_findings(subjects: Sequence[Subject], figures: Sequence[str]) -> Iterator[Finding]:
    """A warning where not all read as much, with the figure of the effective rank, which that bounds, if it is drawn."""
    if len({one.tokens for one in subjects if one.tokens}) > 1:
        listed = ", ".join(f"{one.name} {one.tokens:,}" for one in subjects if one.tokens)
        yield Finding(
            f"Tokens read are not as many everywhere: {listed}. An effective rank is at most their number, and cosines and "
            "margins move with what is read: some of the differences may come from that.",
            "rank" if "rank" in figures else figures[0],
        )
