"""The ledger: all statements, by family, and the tables that a check of them gives."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from normscope.errors import InputError, did_you_mean
from normscope.results.conventions import FAILS
from normscope.theorems import (
    blocks,
    clustering,
    collapse,
    cone,
    first_step,
    heads,
    law,
    propagation,
    separability,
    softmax,
    speeds,
    sphere,
    structure,
    symmetric,
)
from normscope.theorems.check import Evidence
from normscope.theorems.dials import dial_tables
from normscope.theorems.statement import Statement

FAMILIES: dict[str, tuple[Statement, ...]] = {
    "subspaces": separability.STATEMENTS,
    "propagation": propagation.STATEMENTS,
    "collapse": collapse.STATEMENTS,
    "softmax": softmax.STATEMENTS,
    "structure": structure.STATEMENTS,
    "blocks": blocks.STATEMENTS,
    "law": law.STATEMENTS,
    "clustering": clustering.STATEMENTS,
    "symmetric": symmetric.STATEMENTS,
    "speeds": speeds.STATEMENTS,
    "first step": first_step.STATEMENTS,
    "cone": cone.STATEMENTS,
    "sphere": sphere.STATEMENTS,
    "heads": heads.STATEMENTS,
}


def _place(statement: Statement) -> tuple[int, int]:
    """Where a statement stands: theorems of paper 1 by their numbers, other pages in the order of their families."""
    number = re.match(r"\d+", statement.number) if statement.paper == 1 else None
    return statement.paper, int(number[0]) if number else 100


LEDGER: dict[str, Statement] = {
    statement.id: statement for statement in sorted((one for family in FAMILIES.values() for one in family), key=_place)
}


def find_statements(names: Sequence[str]) -> list[Statement]:
    """The statements with these ids, or whose ids begin so: ``2`` a paper, ``2:4.3`` a theorem, ``2:4.3ii`` a part of it.

    All of them, if none is named.
    """
    if not names:
        return list(LEDGER.values())
    found: dict[str, Statement] = {}
    for name in names:
        # A number goes on until its digits end: 1:1 is not 1:10, and 1:7i is not 1:7iv.
        end = r"(?!\d)" if name[-1:].isdigit() else r"(?![iv])" if name[-1:] in ("i", "v") else ""
        own = {id: statement for id, statement in LEDGER.items() if name and re.match(re.escape(name) + end, id)}
        if not own:
            raise InputError(
                f"no statement '{name}'{did_you_mean(name, LEDGER)}; there are {len(LEDGER)}, such as 2:4.3ii "
                "(normscope.theorems.LEDGER has all)"
            )
        found |= own
    return [statement for statement in LEDGER.values() if statement.id in found]


def record(evidence: Evidence) -> dict[str, Any]:
    """A statement with the outcome of its check, as plain values."""
    statement, correction, fails = evidence.statement, evidence.statement.correction, evidence.verdict == FAILS
    return {
        "paper": statement.paper,
        "statement": statement.number,
        "id": statement.id,
        "family": next((name for name, family in FAMILIES.items() if statement in family), ""),
        "title": statement.title,
        "verdict": evidence.verdict,
        "cases": len(evidence.tried),
        "checks": sum(one.checks for one in evidence.tried),
        "margin": evidence.margin,
        "deviation": evidence.hardest.deviation,
        "claim": statement.claim,
        "tested": statement.tested,
        "limit": statement.limit,
        "remark": statement.remark,
        "worst_case": evidence.worst.case.text,
        "worst_case_margin": evidence.worst.margin,
        "worst_case_seeds": " + ".join(f"{weight!r}·{seed}" for seed, weight in evidence.worst.case.seeds),
        "corrected": correction.claim if correction and fails else None,
        "why": correction.why if correction and fails else None,
        "corrected_margin": evidence.corrected_margin if correction and fails else None,
        "simulation": json.dumps(statement.simulation) if statement.simulation else "",
    }


def tables(evidence: Sequence[Evidence], pictures: bool = True) -> dict[str, pd.DataFrame]:
    """The ledger and its evidence as tidy tables.

    ``ledger``: a row for each statement. ``margins``: a row for each case and form, in rising order of the margin, with the
    share of cases up to it. ``groups``: number of cases and worst margin of each option of a choice. ``curves`` and
    ``pictures``: the lines of figures and their titles, labels and captions. ``dials`` and ``positions``: as ``dial_tables``.
    """
    margins = pd.concat([one.table for one in evidence], ignore_index=True)
    rising = ["statement", "form", "margin"]  # printed before corrected
    margins = margins.sort_values(rising, ascending=[True, False, True], kind="stable", ignore_index=True)
    ranked = margins.groupby(["statement", "form"])["margin"]
    margins["share"] = (ranked.cumcount() + 1) / ranked.transform("size")
    groups = margins.groupby(["statement", "form", "group"], as_index=False, sort=False).agg(
        cases=("margin", "size"), margin=("margin", "min")
    )
    made = {"ledger": pd.DataFrame([record(one) for one in evidence]), "margins": margins, "groups": groups}
    return made | (_pictures(evidence) | dial_tables([one.statement for one in evidence]) if pictures else {})


def _pictures(evidence: Sequence[Evidence]) -> dict[str, pd.DataFrame]:
    lines, labels = [], []
    for statement in (one.statement for one in evidence):
        if statement.curves is None:
            continue
        curves = statement.curves()
        lines.append(curves.table.assign(statement=statement.id))
        labels.append(
            {
                "statement": statement.id,
                "title": f"{statement.id} {statement.title}",
                "x_label": curves.x_label,
                "y_label": curves.y_label,
                "caption": curves.caption,
                "log_x": curves.log_x,
                "log_y": curves.log_y,
            }
        )
    return {"curves": pd.concat(lines, ignore_index=True), "pictures": pd.DataFrame(labels)} if lines else {}
