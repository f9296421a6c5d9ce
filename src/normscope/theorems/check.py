"""Check a statement: edges, random cases, then a search that tries to make it fail."""

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from normscope.core.threads import one_thread
from normscope.results.conventions import FAILS, HOLDS, IN_RANGE
from normscope.theorems.cases import Case, Choice, draw, edges, near, simpler
from normscope.theorems.statement import Conclusion, Statement

VERDICTS = (HOLDS, IN_RANGE, FAILS)
THOROUGH = 10  # times as many cases
_POOL = 3  # worst cases that are moved on
_RESTARTS = 0.25  # share of the search that begins anew
_SIZES = (0.5, 0.2, 0.05, 0.01)
_SIMPLER_TRIES = 100
_CLEARLY = 0.25  # of the worst margin, below which a simpler case counts as failing too


@dataclass(frozen=True)
class Tried:
    """A case, its worst margin and what that means, and how many numbers were compared in it."""

    case: Case
    margin: float
    checks: int
    deviation: str


@dataclass(frozen=True)
class Evidence:
    """The outcome of checking a statement.

    Attributes:
        statement: the statement.
        tried: all cases in the order in which they were tried.
        corrected: the same cases under the corrected statement; empty without a correction.
        worst: the worst case; where the statement fails, the simplest one that still does.
    """

    statement: Statement
    tried: tuple[Tried, ...]
    corrected: tuple[Tried, ...]
    worst: Tried

    @property
    def margin(self) -> float:
        """The worst margin of all cases."""
        return self.hardest.margin

    @property
    def hardest(self) -> Tried:
        """The case with the worst margin of all."""
        return min(self.tried, key=lambda one: one.margin)

    @property
    def corrected_margin(self) -> float:
        """The worst margin of the corrected statement; NaN without one."""
        return min((one.margin for one in self.corrected), default=math.nan)

    @property
    def verdict(self) -> str:
        """Holds, holds in the tested range, or fails as printed."""
        if self.margin < 0:
            return FAILS
        return IN_RANGE if self.statement.limit else HOLDS

    @property
    def table(self) -> pd.DataFrame:
        """A row for each case and form: statement, form, origin, group, margin, case."""
        rows = []
        for form, found in (("printed", self.tried), ("corrected", self.corrected)):
            for one in found:
                group = str(one.case[self.statement.by]) if self.statement.by else ""
                rows.append((self.statement.id, form, one.case.origin, group, one.margin, one.case.text))
        return pd.DataFrame(rows, columns=["statement", "form", "origin", "group", "margin", "case"])


def check(statement: Statement, seed: int = 0, factor: float = 1.0) -> Evidence:
    """Try ``factor`` times the statement's number of cases: edges if there are so many, random and searched ones."""
    random = np.random.default_rng([seed, zlib.crc32(statement.id.split("~")[0].encode())])
    count = max(3, math.ceil(statement.cases * factor / 3))
    with one_thread(True):
        first = edges(statement.space, count, random, statement.by)
        first += _in_turn(statement, [draw(statement.space, random) for _ in range(count)])
        tried = [_try(statement.conclusion, case) for case in first]
        tried += _searched(statement, tried, count, random)
        worst = min(tried, key=lambda one: one.margin)
        if worst.margin < 0:
            worst = _simplest(statement, worst)
            tried.append(worst)
        correction = statement.correction
        corrected = [_try(correction.conclusion, one.case) for one in tried] if correction else []
    return Evidence(statement, tuple(tried), tuple(corrected), worst)


def check_all(
    statements: Sequence[Statement], seed: int = 0, factor: float = 1.0, advance: Callable[[float], None] = lambda done: None
) -> list[Evidence]:
    """The evidence for each statement; ``advance`` takes how many are done."""
    evidence = []
    for done, statement in enumerate(statements, 1):
        evidence.append(check(statement, seed, factor))
        advance(done)
    return evidence


def _in_turn(statement: Statement, cases: Sequence[Case]) -> list[Case]:
    """The cases with the options of the choice ``by`` in turn, so that each gets its share."""
    choice = statement.space.get(statement.by)
    if not isinstance(choice, Choice):
        return list(cases)
    turns = itertools.cycle(choice.options)
    return [replace(case, values={**case.values, statement.by: next(turns)}) for case in cases]


def _try(conclusion: Conclusion, case: Case) -> Tried:
    comparison = conclusion(case)
    margins = comparison.margins
    margin = float(margins.min())
    return Tried(case, margin, len(margins), comparison.deviation(margin))


def _searched(statement: Statement, tried: list[Tried], count: int, random: np.random.Generator) -> list[Tried]:
    """Cases near the worst so far, ever nearer; what is worse takes its place. Now and then a fresh start."""
    pool = sorted(tried, key=lambda one: one.margin)[:_POOL]
    found = []
    for step in range(count):
        place = step % len(pool)
        if random.random() < _RESTARTS:
            moved = _try(statement.conclusion, draw(statement.space, random))
            place = max(range(len(pool)), key=lambda i: pool[i].margin)
        else:
            size = _SIZES[min(step * len(_SIZES) // count, len(_SIZES) - 1)]
            moved = _try(statement.conclusion, near(statement.space, pool[place].case, size, random))
        found.append(moved)
        if moved.margin < pool[place].margin:
            pool[place] = moved
    return found


def _simplest(statement: Statement, failing: Tried) -> Tried:
    """A failing case whose values are as easy to read as they can be made one at a time, and that still clearly fails."""
    tries, most, clearly = 0, min(_SIMPLER_TRIES, statement.cases), _CLEARLY * failing.margin
    while tries < most:
        for candidate in simpler(statement.space, failing.case):
            tries += 1
            one = _try(statement.conclusion, candidate)
            if one.margin <= clearly:
                failing = one
                break
            if tries >= most:
                break
        else:
            break
    return failing
