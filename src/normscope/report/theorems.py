"""Figures and page sections of the ledger of statements, from its tables."""

import re
from collections.abc import Sequence

import pandas as pd

from normscope.report.charts import Chart, Line
from normscope.report.figures import save_picture, write_page
from normscope.report.page import PageTable, Picture, Section
from normscope.runs import RunFolder

_FEW = 8  # so many statements are shown with all their evidence
_FAILS = "fails as printed"


def write_theorems_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Draw the pictures of the ledger and its page."""
    write_page(run, "The ledger of statements", settings, theorem_sections(run, settings), formats)


def theorem_sections(run: RunFolder, settings: str) -> list[Section]:
    """The ledger as a table, then a section for each statement: of many, for those that fail as printed or have a picture."""
    ledger = run.table("ledger")
    rows = ledger.to_dict("records")
    few, pictured = len(rows) <= _FEW, set(run.table("pictures")["statement"]) if "pictures" in run.tables else set()
    shown = [row for row in rows if few or row["verdict"] == _FAILS or row["id"] in pictured]
    return [_ledger(ledger), *(_statement(run, {str(k): v for k, v in row.items()}, few, settings) for row in shown)]


def _ledger(ledger: pd.DataFrame) -> Section:
    counts = ledger["verdict"].value_counts()
    text = (
        "Each statement was tried at the edges of its hypotheses, at random, and by a search for a case in which it fails. The "
        "margin says how far the worst case is from failing: at most 1, below 0 if it fails. "
        + "; ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + ".",
    )
    columns = ("statement", "title", "cases", "worst margin", "verdict", "what was tested")
    cells = tuple(
        (str(row.id), str(row.title), f"{row.cases:,}", f"{row.margin:.2g}", str(row.verdict), str(row.tested))
        for row in ledger.itertuples(index=False)
    )
    return Section("The ledger", text, (PageTable("All statements that were checked", columns, cells),))


def _statement(run: RunFolder, row: dict[str, object], evidence: bool, settings: str) -> Section:
    """What is printed, what came out, and what holds instead if it fails."""
    text = [f"Printed: {row['claim']}", f"Tested: {row['tested']}"]
    text += [f"{name}: {row[key]}" for name, key in (("In a finite test", "limit"), ("Remark", "remark")) if row[key]]
    worst = f"{row['worst_case']} (margin {row['worst_case_margin']:.2g})"
    if row["verdict"] != _FAILS:
        text.append(f"It {row['verdict']}: {row['cases']} cases, worst margin {row['margin']:.2g}, at {worst}.")
    else:
        text.append(f"It fails as printed, for instance at {worst}.")
        if row["corrected"]:
            margin = f"worst margin {row['corrected_margin']:.2g} on the same {row['cases']} cases"
            text += [f"Why: {row['why']}", f"Corrected: {row['corrected']} ({margin})"]
    name = str(row["id"])
    pictures = _curves(run, name, settings) + (_margins(run, name, settings) if evidence else ())
    return Section(f"{name} {row['title']}", tuple(text), _groups(run, name), pictures)


def _groups(run: RunFolder, name: str) -> tuple[PageTable, ...]:
    table = run.table("groups")
    rows = table[(table["statement"] == name) & (table["group"] != "")]
    cells = tuple((str(row.group), str(row.form), str(row.cases), f"{row.margin:.2g}") for row in rows.itertuples(index=False))
    return (PageTable("Worst margin by choice", ("choice", "form", "cases", "worst margin"), cells),) if cells else ()


def _curves(run: RunFolder, name: str, settings: str) -> tuple[Picture, ...]:
    if "curves" not in run.tables:
        return ()
    curves, words = run.table("curves"), run.table("pictures").set_index("statement")
    if name not in words.index:
        return ()
    own = words.loc[name]
    lines = tuple(
        Line(str(line), list(rows["x"]), list(rows["y"]))
        for line, rows in curves[curves["statement"] == name].groupby("line", sort=False)
    )
    chart = Chart(
        str(own["title"]),
        str(own["x_label"]),
        str(own["y_label"]),
        lines,
        str(own["caption"]),
        settings,
        log_x=bool(own["log_x"]),
        log_y=bool(own["log_y"]),
    )
    return (save_picture(run, f"curves-{_plain(name)}", chart),)


def _margins(run: RunFolder, name: str, settings: str) -> tuple[Picture, ...]:
    """The margins of all cases in rising order; below 0 a case fails."""
    table = run.table("margins")
    own = table[table["statement"] == name]
    lines = [
        Line(f"{form} statement", list(rows["share"]), list(rows["margin"])) for form, rows in own.groupby("form", sort=False)
    ]
    lines.append(Line("fails below", [0.0, 1.0], [0.0, 0.0]))
    chart = Chart(
        f"{name}: margins of all cases",
        "share of cases",
        "margin",
        tuple(lines),
        "From the worst case on the left to the easiest on the right; a line that begins below 0 has counterexamples.",
        settings,
    )
    return (save_picture(run, f"margins-{_plain(name)}", chart),)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())
