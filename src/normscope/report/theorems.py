"""Sections of the claim verification, from its tables."""

import re
from collections.abc import Hashable, Sequence

import pandas as pd

from normscope.report.write import Report, tables_of, write_report
from normscope.results import Chart, Figure, Line, PageTable, Section
from normscope.results.conventions import FAILS
from normscope.results.tables import Tables, figures_section, needed_table
from normscope.runs import RunFolder

_FEW = 8  # so many statements are shown with all their evidence
# Verdict → how the count of claims reads.
_COUNTED = {"holds": "confirmed", "holds in the tested range": "confirmed within the tested range", FAILS: "wrong as printed"}


def write_theorems_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page of the claim verification."""
    write_report(run.path, Report("Published claims, verified", settings, theorem_sections(tables_of(run), settings)), formats)


def theorem_sections(tables: Tables, settings: str) -> list[Section]:
    """All claims as a table, then a section for each: of many, for those that fail as printed or have a figure."""
    ledger = needed_table(tables, "ledger")
    rows = ledger.to_dict("records")
    few, drawn = len(rows) <= _FEW, set(tables["pictures"]["statement"]) if "pictures" in tables else set()
    shown = [row for row in rows if few or row["verdict"] == FAILS or row["id"] in drawn]
    return [_ledger(ledger), *(_statement(tables, {str(k): v for k, v in row.items()}, few, settings) for row in shown)]


def _ledger(ledger: pd.DataFrame) -> Section:
    counts = ledger["verdict"].value_counts()
    text = (
        f"{len(ledger)} published claims: {_listed(counts.to_dict())}.",
        "Each claim was tested at the edges of its hypotheses, at random, and by a search for a case in which it fails. The "
        "slack is how far the worst case is from failing: at most 1, below 0 if it fails.",
    )
    columns = ("claim", "title", "cases", "least slack", "verdict", "what was tested")
    cells = tuple(
        (str(row.id), str(row.title), f"{row.cases:,}", f"{row.margin:.2g}", str(row.verdict), str(row.tested))
        for row in ledger.itertuples(index=False)
    )
    return Section("All claims", text, (PageTable("All claims that were checked", columns, cells),), name="ledger")


def _listed(counts: dict[Hashable, int]) -> str:
    corrections = " (corrections below)" if counts.get(FAILS) else ""
    return ", ".join(f"{count} {_COUNTED.get(str(verdict), verdict)}" for verdict, count in counts.items()) + corrections


def _statement(tables: Tables, row: dict[str, object], evidence: bool, settings: str) -> Section:
    """What is printed, what came out, and what holds instead if it fails."""
    text = [f"Printed: {row['claim']}", f"Tested: {row['tested']}"]
    text += [f"{name}: {row[key]}" for name, key in (("In a finite test", "limit"), ("Remark", "remark")) if row[key]]
    worst = f"{row['worst_case']} (slack {row['worst_case_margin']:.2g})"
    if row["verdict"] != FAILS:
        text.append(f"It {row['verdict']}: {row['cases']} cases, least slack {row['margin']:.2g}, at {worst}.")
    else:
        text.append(f"It fails as printed, for instance at {worst}.")
        if row["corrected"]:
            margin = f"least slack {row['corrected_margin']:.2g} on the same {row['cases']} cases"
            text += [f"Why: {row['why']}", f"Corrected: {row['corrected']} ({margin})"]
    name = str(row["id"])
    key = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    figures: dict[str, Figure | None] = {f"curves-{key}": _curves(tables, name, settings)}
    if evidence:
        figures[f"margins-{key}"] = _margins(tables, name, settings)
    return figures_section(f"{name} {row['title']}", tuple(text), figures, _groups(tables, name))


def _groups(tables: Tables, name: str) -> tuple[PageTable, ...]:
    table = needed_table(tables, "groups")
    rows = table[(table["statement"] == name) & (table["group"] != "")]
    cells = tuple((str(row.group), str(row.form), str(row.cases), f"{row.margin:.2g}") for row in rows.itertuples(index=False))
    return (PageTable("Least slack by choice", ("choice", "form", "cases", "least slack"), cells),) if cells else ()


def _curves(tables: Tables, name: str, settings: str) -> Chart | None:
    if "curves" not in tables:
        return None
    curves, words = tables["curves"], needed_table(tables, "pictures").set_index("statement")
    if name not in words.index:
        return None
    texts = words.loc[name]
    lines = tuple(
        Line(str(line), list(rows["x"]), list(rows["y"]))
        for line, rows in curves[curves["statement"] == name].groupby("line", sort=False)
    )
    return Chart(
        str(texts["title"]),
        str(texts["x_label"]),
        str(texts["y_label"]),
        lines,
        str(texts["caption"]),
        settings,
        log_x=bool(texts["log_x"]),
        log_y=bool(texts["log_y"]),
    )


def _margins(tables: Tables, name: str, settings: str) -> Chart:
    """The slack of all cases in rising order; below 0 a case fails."""
    table = needed_table(tables, "margins")
    cases = table[table["statement"] == name]
    lines = [
        Line(f"{form} claim", list(rows["share"]), list(rows["margin"])) for form, rows in cases.groupby("form", sort=False)
    ]
    lines.append(Line("fails below", [0.0, 1.0], [0.0, 0.0]))
    return Chart(
        f"{name}: slack of all cases",
        "share of cases",
        "slack",
        tuple(lines),
        "From the worst case on the left to the easiest on the right; a line that begins below 0 has counterexamples.",
        settings,
    )
