"""A statement is a page: what is printed, over which cases, and what is compared in each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from normscope.theorems.cases import Case, Space
from normscope.theorems.comparison import Comparison, mistaken

Conclusion = Callable[[Case], Comparison]


@dataclass(frozen=True)
class Correction:
    """What holds instead of a printed statement that fails.

    Attributes:
        claim: the corrected statement.
        why: the algebra, in a few sentences.
        conclusion: what is compared, in the same cases.
    """

    claim: str
    why: str
    conclusion: Conclusion


@dataclass(frozen=True)
class Curves:
    """A picture of a statement: lines of a table with columns ``line``, ``x``, ``y``, and the words around them."""

    table: pd.DataFrame
    x_label: str
    y_label: str
    caption: str
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Dial:
    """A family of cases along one value, from where a printed statement holds to where it fails.

    Attributes:
        name: the value of a case that the dial moves.
        label: what that is, in words and as a symbol.
        start: its first value, where the statement holds.
        end: its last value, where it fails.
        case: all other values, and the random tensors.
        quantity: what is compared, in words.
        caption: what to see.
        log: whether positions are spread evenly in the logarithm.
        positions: how many values are tried.
        simulation: settings of a simulation of the case at a value, for statements about one.
    """

    name: str
    label: str
    start: float
    end: float
    case: Case
    quantity: str
    caption: str
    log: bool = False
    positions: int = 41
    simulation: Callable[[float], Mapping[str, Any]] | None = None

    def at(self, share: float) -> float:
        """The value at a share of the way from start to end."""
        if share in (0.0, 1.0):
            return self.end if share else self.start
        if self.log:
            return float(self.start * (self.end / self.start) ** share)
        return self.start + share * (self.end - self.start)

    def case_at(self, value: float) -> Case:
        """The case with the dial at this value."""
        return replace(self.case, values={**self.case.values, self.name: value}, origin="dial")


@dataclass(frozen=True)
class Statement:
    """A published statement as an executable check.

    Attributes:
        id: paper and number, such as ``2:4.3i``.
        title: a few words.
        claim: what is printed.
        tested: what is compared in each case, in words.
        space: the hypotheses as a space of cases.
        conclusion: the comparison for a case.
        limit: what a limit, Θ(·), a probability or "almost every" comes to in a finite test; empty if each case decides.
        correction: what holds instead, where the printed statement fails.
        remark: what a reader should know beside.
        curves: a picture.
        dial: cases from where the printed statement holds to where it fails.
        simulation: settings of a simulation that shows what the statement is about.
        by: the name of a choice whose options are distinguished in the evidence.
        cases: how many are drawn in the quick form.
        notices: which mistakes in the claim the test would notice.
    """

    id: str
    title: str
    claim: str
    tested: str
    space: Space
    conclusion: Conclusion
    limit: str = ""
    correction: Correction | None = None
    remark: str = ""
    curves: Callable[[], Curves] | None = None
    dial: Dial | None = None
    simulation: Mapping[str, Any] | None = None
    by: str = ""
    cases: int = 150
    notices: tuple[str, ...] = field(default=("sign", "constant"))

    @property
    def paper(self) -> int:
        """1, 2 or 3."""
        return int(self.id.split(":")[0])

    @property
    def number(self) -> str:
        """The number within its paper."""
        return self.id.split(":")[1]

    def with_mistake(self, mistake: str) -> "Statement":
        """The same statement with a mistake in its claim, for a test of the test."""
        return replace(
            self,
            id=f"{self.id}~{mistake}",
            conclusion=lambda case: mistaken(self.conclusion(case), mistake),
            correction=None,
        )


def lines_table(lines: Mapping[str, tuple[list[float], list[float]]]) -> pd.DataFrame:
    """Lines given as name → (x, y), as a tidy table."""
    rows = [{"line": name, "x": x, "y": y} for name, (xs, ys) in lines.items() for x, y in zip(xs, ys, strict=True)]
    return pd.DataFrame(rows, columns=["line", "x", "y"])
