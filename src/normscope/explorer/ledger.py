"""The ledger as the page shows it: statements, verdicts, evidence, pictures and dials, of a run of ``normscope verify``.

A page without such a run shows ``ledger.json``, which ``make ledger`` makes of one::

    normscope verify --out runs/ledger
    python -m normscope.explorer.ledger runs/ledger
"""

import json
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pandas as pd

from normscope.errors import InputError
from normscope.report.page import compact
from normscope.results.tables import Tables, plain_rows
from normscope.runs import open_run

COMMAND = "verify"
PACKAGED = files("normscope.explorer") / "ledger.json"
_TEXTS = (
    "id", "paper", "family", "title", "claim", "tested", "limit", "remark", "verdict", "cases", "checks", "margin", "deviation",
    "worst_case", "worst_case_margin", "corrected", "why", "corrected_margin",
)  # fmt: skip
_DIGITS = 6  # of numbers that are drawn


def ledger_data(path: Path | str | None = None) -> dict[str, Any]:
    """What the page shows of a run folder of ``normscope verify``; of the packaged run without one.

    ``source`` says which run it was; ``statements`` has a dictionary for each, with ``groups`` (the worst margin of each option
    of a choice), ``origins`` (how many cases were edges, random or searched), and, where there is one, ``curves``, ``dial`` and
    ``simulation``.
    """
    if path is None:
        packaged: dict[str, Any] = json.loads(PACKAGED.read_text(encoding="utf-8"))
        return packaged
    run = open_run(path)
    about = run.description
    if about["command"] != COMMAND:
        raise InputError(f"'{run.path}' is a run of {about['command']}; the ledger is a run of {COMMAND}")
    tables = run.all_tables()
    missing = {"ledger", "margins", "groups"} - tables.keys()
    if missing or not {*_TEXTS, "simulation"} <= {*tables["ledger"].columns}:
        raise InputError(f"'{run.path}' was saved by an earlier version of normscope; run {COMMAND} again")
    source = {"summary": about.get("summary", ""), "seed": about["seed"], "version": about["versions"].get("normscope", "")}
    return {"source": source, "statements": [_statement(row, tables) for row in plain_rows(tables["ledger"])]}


def _statement(row: dict[str, Any], tables: Tables) -> dict[str, Any]:
    margins = _rows(tables, "margins", row["id"])
    groups = _rows(tables, "groups", row["id"])
    return {name: _short(row[name]) for name in _TEXTS} | {
        "origins": margins.loc[margins["form"] == "printed", "origin"].value_counts().to_dict(),
        "groups": [
            {name: _short(group[name]) for name in ("group", "form", "cases", "margin")}
            for group in plain_rows(groups[groups["group"] != ""])
        ],
        "curves": _curves(tables, row["id"]),
        "dial": _dial(tables, row["id"]),
        "simulation": json.loads(row["simulation"]) if row["simulation"] else None,
    }


def _rows(tables: Tables, name: str, statement: str) -> pd.DataFrame:
    table = tables.get(name)
    return pd.DataFrame() if table is None else table[table["statement"] == statement]


def _curves(tables: Tables, statement: str) -> dict[str, Any] | None:
    words = plain_rows(_rows(tables, "pictures", statement))
    if not words:
        return None
    lines = _rows(tables, "curves", statement).groupby("line", sort=False)
    named = ("x_label", "y_label", "caption", "log_x", "log_y")
    return {name: words[0][name] for name in named} | {
        "lines": [{"name": str(name), "x": _numbers(some["x"]), "y": _numbers(some["y"])} for name, some in lines]
    }


def _dial(tables: Tables, statement: str) -> dict[str, Any] | None:
    words = plain_rows(_rows(tables, "dials", statement))
    if not words:
        return None
    rows = _rows(tables, "positions", statement).sort_values("position")
    numbers = {name: _numbers(rows[name]) for name in rows.columns if name not in ("position", "statement", "simulation")}
    simulations = [json.loads(text) for text in rows["simulation"] if text]
    described = {name: value for name, value in words[0].items() if name != "statement"}
    return described | {"positions": numbers, "simulations": simulations or None}


def _numbers(values: "pd.Series[float]") -> list[float | None]:
    return [_short(value) for value in values]


def _short(value: Any) -> Any:
    """The value with six digits if it is a number, None if it is not one."""
    if isinstance(value, float):
        return None if value != value else float(f"{value:.{_DIGITS}g}")
    return value


def package_ledger(path: Path | str) -> Path:
    """Write what the page shows of a run folder to the package, for pages without one."""
    with as_file(PACKAGED) as target:
        target.write_text(compact(ledger_data(path)).replace('{"id"', '\n{"id"') + "\n", encoding="utf-8")
    return target


if __name__ == "__main__":
    package_ledger(sys.argv[1])
