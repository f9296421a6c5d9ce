"""Dials: the printed and the corrected claim beside what is measured, from where a statement holds to where it fails."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from normscope.core.threads import one_thread
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Conclusion, Dial, Statement

_HALVINGS = 40
_NOTHING = (math.nan, math.nan, math.nan)


def turn_dial(statement: Statement, dial: Dial) -> pd.DataFrame:
    """The statement's own comparisons at every position of its dial.

    Columns: ``position``, ``value``, ``simulation`` (settings as JSON, empty without one); ``measured``, ``claimed`` and
    ``margin`` of the printed claim; ``corrected_measured``, ``corrected`` and ``corrected_margin`` likewise, NaN where the
    correction claims nothing. A margin is the worst of all numbers compared; of these the pair is the one that is worst at the
    dial's end.
    """
    values = [dial.at(position / (dial.positions - 1)) for position in range(dial.positions)]
    columns: dict[str, Sequence[Any]] = {
        "position": range(dial.positions),
        "value": values,
        "simulation": [json.dumps(dial.simulation(value)) if dial.simulation else "" for value in values],
    }
    printed = _compare(statement.conclusion, dial, values)
    shown = int(printed[-1].margins.argmin())
    columns |= _numbers(printed, shown, ("measured", "claimed", "margin"))
    if statement.correction is not None:
        corrected = _compare(statement.correction.conclusion, dial, values)
        if len(corrected[-1].margins) != len(printed[-1].margins):
            shown = int(corrected[-1].margins.argmin())
        columns |= _numbers(corrected, shown, ("corrected_measured", "corrected", "corrected_margin"))
    return pd.DataFrame(columns)


def _compare(conclusion: Conclusion, dial: Dial, values: Sequence[float]) -> list[Comparison]:
    with one_thread(True):
        return [conclusion(dial.case_at(value)) for value in values]


def _numbers(comparisons: Sequence[Comparison], shown: int, names: tuple[str, str, str]) -> dict[str, list[float]]:
    """Columns with the pair at ``shown`` and the margin of each comparison."""
    rows = [(*one.pair(shown), one.margin) if one.decides else _NOTHING for one in comparisons]
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def boundary(statement: Statement, dial: Dial, margins: Sequence[float]) -> tuple[float, float]:
    """The last value of the dial at which the printed claim holds and the first at which it fails, by halving between them.

    ``margins`` are those of the dial's positions.
    """
    fails = next(position for position, margin in enumerate(margins) if margin < 0)
    low, high = (fails - 1) / (dial.positions - 1), fails / (dial.positions - 1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        (comparison,) = _compare(statement.conclusion, dial, [dial.at(middle)])
        low, high = (middle, high) if comparison.margin >= 0 else (low, middle)
    return dial.at(low), dial.at(high)


def dial_tables(statements: Sequence[Statement]) -> dict[str, pd.DataFrame]:
    """``dials``: a row for each dial with its words and where the printed claim stops holding; ``positions``: its positions."""
    labels, turned = [], []
    for statement in statements:
        if statement.dial is None:
            continue
        dial = statement.dial
        positions = turn_dial(statement, dial)
        holds_to, fails_from = boundary(statement, dial, list(positions["margin"]))
        (end,) = _compare(statement.conclusion, dial, [dial.end])
        labels.append(
            {
                "statement": statement.id,
                "name": dial.name,
                "label": dial.label,
                "quantity": dial.quantity,
                "caption": dial.caption,
                "case": dial.case.text,
                "log": dial.log,
                "relation": end.relation,
                "tolerance": end.tolerance,
                "checks": len(end.margins),
                "holds_to": holds_to,
                "fails_from": fails_from,
            }
        )
        turned.append(positions.assign(statement=statement.id))
    return {"dials": pd.DataFrame(labels), "positions": pd.concat(turned, ignore_index=True)} if labels else {}
