"""verify: Check every published claim, and search for counterexamples.

Schemes and theory: normscope verify 2:4.3
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pandas as pd
from pydantic import AfterValidator

from normscope.experiments.experiment import Experiment, Shown
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Names, Seed, setting
from normscope.results.conventions import FAILS, HOLDS, IN_RANGE
from normscope.results.figures import Chart, Line
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

    from normscope.theorems import Statement

Row = dict[str, Any]
_FEW = 8  # up to here every statement has its own section with all evidence
_SUMMARIES = {
    HOLDS: "confirmed",
    IN_RANGE: "confirmed within the tested range",
    FAILS: "wrong as printed",
}  # verdict → in a summary
_SLACK = (
    "The slack (margin in tables and JSON) is the distance of the worst case from failing: at most 1, negative for a "
    "counterexample, near 0 for a bound that is tight."
)


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    from normscope.theorems import find_statements

    find_statements(names)
    return names


class Verify(Experiment):
    """Check every published claim, and search for counterexamples.

    Every claim of the papers is checked at its edges, at random, and by a search for a counterexample.

    Example:
        >>> import normscope as ns
        >>> result = ns.check("3:eq3", progress=False)
        >>> list(result.tables["ledger"]["verdict"])
        ['holds']
    """

    command: ClassVar[str] = "verify"
    title: ClassVar[str] = "Published claims, checked"
    usage: ClassVar[tuple[str, ...]] = (
        "normscope verify",
        "normscope verify 2:4.3",
        "normscope verify 1:7 2:gradient --thorough",
        "normscope verify --json",
    )
    variadic: ClassVar[str] = "statements"

    statements: Annotated[Names, AfterValidator(_known)] = setting(
        (), "Claims to check: 2 for a paper, 2:4.3 for a theorem, 2:4.3ii for a part of it. Without any: all.",
        shown="", argument=True,
    )  # fmt: skip
    thorough: bool = setting(False, "Try ten times as many cases: minutes, not seconds.")
    seed: Seed = setting(0, "Seed of everything random.")

    @cached_property
    def chosen(self) -> "list[Statement]":
        """The statements that the names select."""
        from normscope.theorems import find_statements

        return find_statements(self.statements)

    @property
    def summary(self) -> str:
        """One line for people."""
        return f"{len(self.chosen)} claims; {'thorough' if self.thorough else 'quick'}; seed {self.seed}"

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """Check the statements and collect the evidence."""
        from normscope.theorems import THOROUGH, check_all, tables

        advance = progress.stage("checking claims", len(self.chosen))
        evidence = check_all(self.chosen, self.seed, THOROUGH if self.thorough else 1, advance)
        configuration = {**self.record, "statements": [statement.id for statement in self.chosen]}
        return Result(type(self), configuration, tables(evidence), self.summary, self.seed)

    @classmethod
    def records(cls, result: Result) -> list[Row]:
        """A record for every statement."""
        return plain_rows(result.tables["ledger"])

    @classmethod
    def facts(cls, result: Result) -> list[tuple[str, str]]:
        """How many claims are confirmed."""
        verdicts = list(result.tables["ledger"]["verdict"])
        return [(phrase, str(verdicts.count(verdict))) for verdict, phrase in _SUMMARIES.items()]

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The table and the counts; then, of claims that were named or are wrong as printed, all there is to know."""
        from normscope.theorems import LEDGER

        rows, groups = cls.records(result), result.tables["groups"]
        in_full = len(rows) < len(LEDGER)
        cells = [(r["id"], r["title"], f"{r['cases']:,}", f"{r['margin']:.2g}", r["verdict"]) for r in rows]
        columns = ("claim", "title", "cases", "slack", "verdict")
        yield PageTable("", columns, tuple(cells))
        yield f"{count_claims([r['verdict'] for r in rows])}. {_SLACK}\n"
        for r in rows:
            if in_full or r["verdict"] == FAILS:
                yield _page(r, in_full)
            if in_full:
                yield from _choices(groups, r["id"])

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The table of claims, then a section for each: of many, for those that are wrong as printed or have a figure."""
        rows, tables = cls.records(result), result.tables
        few, drawn = len(rows) <= _FEW, set(tables["pictures"]["statement"]) if "pictures" in tables else set()
        yield _ledger_section(rows, drawn)
        for row in rows:
            if few or row["verdict"] == FAILS or row["id"] in drawn:
                yield _statement_section(row, tables, few, result.summary)


def count_claims(verdicts: list[str]) -> str:
    """``69 published claims: 43 confirmed, 18 confirmed within the tested range, 8 wrong as printed (corrections below)``."""
    counts = {phrase: verdicts.count(verdict) for verdict, phrase in _SUMMARIES.items()}
    listed = ", ".join(f"{count} {phrase}" for phrase, count in counts.items() if count)
    below = " (corrections below)" if FAILS in verdicts else ""
    return f"{len(verdicts)} published claim{'s' * (len(verdicts) > 1)}: {listed}{below}"


def _lines(row: Row) -> dict[str, str]:
    """Everything known of a claim, by its label."""
    same = "" if row["corrected_margin"] is None else (
        f"{'holds' if row['corrected_margin'] >= 0 else 'fails too'} on the same {row['cases']} cases, slack "
        f"{row['corrected_margin']:.3g}"
    )  # fmt: skip
    lines = {
        "printed": row["claim"],
        "tested": row["tested"],
        "finite test": row["limit"],
        "remark": row["remark"],
        "verdict": f"{row['verdict']}: {row['cases']} cases, {row['checks']:,} numbers compared, slack {row['margin']:.3g}",
        "worst case": f"{row['worst_case']} (slack {row['worst_case_margin']:.3g})",
        "why": row["why"],
        "corrected": row["corrected"],
        "correction": same,
    }
    return {label: text for label, text in lines.items() if text}


def _page(row: Row, in_full: bool) -> "RenderableType":
    """A claim for a terminal, wrapped to its width."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    shown = _lines(row)
    labels = shown if in_full else ("printed", "worst case", "corrected")
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    for label in labels:
        if label in shown:
            table.add_row(Text(label), Text(shown[label]))
    return Group(Text(f"{row['id']}  {row['title']}", style="bold"), Padding(table, (0, 0, 1, 2)))


def _choices(groups: pd.DataFrame, name: str) -> Iterator[PageTable]:
    """The slack by option, where the options of a choice are distinguished."""
    rows = groups[(groups["statement"] == name) & (groups["group"] != "")]
    cells = tuple((str(row.group), str(row.form), str(row.cases), f"{row.margin:.2g}") for row in rows.itertuples(index=False))
    if cells:
        yield PageTable("Slack by choice", ("choice", "form", "cases", "slack"), cells)


def _ledger_section(rows: list[Row], drawn: set[str]) -> Section:
    verdicts = [row["verdict"] for row in rows]
    failing = [row for row in rows if row["verdict"] == FAILS]
    findings = [
        Finding(
            f"{count_claims(verdicts)}.",
            title=f"{len(rows) - len(failing)} of {len(rows)} claims confirmed",
            severity="notice" if failing else "ok",
            number=len(failing),
            weight=1,
        ),
        *(
            Finding(
                f"{row['id']} {row['title']}: wrong as printed, for instance at {row['worst_case']}.",
                _curves_name(row["id"]) if row["id"] in drawn else None,
                severity="warning",
                number=row["margin"],
                comparison=f"Printed: {row['claim']}",
                advice=f"Corrected: {row['corrected']}" if row["corrected"] else "",
            )
            for row in failing
        ),
    ]
    text = (
        "Each claim was checked at the edges of its hypotheses, at random, and by a search for a counterexample.",
        _SLACK,
    )
    columns = ("claim", "title", "cases", "slack", "verdict", "what was tested")
    cells = tuple(
        (row["id"], row["title"], f"{row['cases']:,}", f"{row['margin']:.2g}", row["verdict"], row["tested"]) for row in rows
    )
    return Section("The claims", text, (PageTable("All claims checked", columns, cells),), {}, tuple(findings), "ledger")


def _statement_section(row: Row, tables: dict[str, pd.DataFrame], few: bool, settings: str) -> Section:
    """What is printed, the outcome, and what holds instead if it is wrong."""
    name = row["id"]
    text = tuple(f"{label.capitalize()}: {line}" for label, line in _lines(row).items())
    figures = {}
    if "curves" in tables and name in set(tables["pictures"]["statement"]):
        figures[_curves_name(name)] = _curves(tables["curves"], tables["pictures"], name, settings)
    if "dials" in tables and name in set(tables["dials"]["statement"]):
        figures[f"dial-{_plain(name)}"] = _dial_chart(tables["dials"], tables["positions"], row, settings)
    if few:
        figures[f"margins-{_plain(name)}"] = _slack_chart(tables["margins"], name, settings)
    return Section(f"{name} {row['title']}", text, tuple(_choices(tables["groups"], name)), figures, name=name, folded=not few)


def _curves(curves: pd.DataFrame, pictures: pd.DataFrame, name: str, settings: str) -> Chart:
    words = plain_rows(pictures[pictures["statement"] == name])[0]
    rows = curves[curves["statement"] == name]
    lines = tuple(Line(str(line), list(some["x"]), list(some["y"])) for line, some in rows.groupby("line", sort=False))
    return Chart(
        words["title"], words["x_label"], words["y_label"], lines, words["caption"], settings,
        log_x=bool(words["log_x"]), log_y=bool(words["log_y"]),
    )  # fmt: skip


def _dial_chart(dials: pd.DataFrame, positions: pd.DataFrame, row: Row, settings: str) -> Chart:
    """What is measured and claimed as a case moves from where the printed claim holds to where it fails."""
    words = plain_rows(dials[dials["statement"] == row["id"]])[0]
    rows = positions[positions["statement"] == row["id"]]
    value = list(rows["value"])
    lines = [Line("measured", value, list(rows["measured"])), Line("printed claim", value, list(rows["claimed"]))]
    if not rows["corrected_measured"].dropna().isin(rows["measured"]).all():
        lines.append(Line("measured for the correction", value, list(rows["corrected_measured"])))
    lines.append(Line("corrected claim", value, list(rows["corrected"])))
    text = f"{words['caption']} Holds up to {words['holds_to']:.3g}. Elsewhere: {words['case']}."
    title = f"{row['id']}: from where it holds to where it fails"
    return Chart(title, words["label"], words["quantity"], tuple(lines), text, settings, log_x=bool(words["log"]))


def _slack_chart(margins: pd.DataFrame, name: str, settings: str) -> Chart:
    """The slack of all cases in rising order; below 0 a case fails."""
    rows = margins[margins["statement"] == name]
    lines = tuple(
        Line(f"{form} claim", list(some["share"]), list(some["margin"])) for form, some in rows.groupby("form", sort=False)
    )
    return Chart(
        f"{name}: slack of all cases", "share of cases", "slack", (*lines, Line("fails below", [0.0, 1.0], [0.0, 0.0])),
        "From the worst case on the left to the easiest on the right; a line that begins below 0 has counterexamples.",
        settings,
    )  # fmt: skip


def _curves_name(name: str) -> str:
    return f"curves-{_plain(name)}"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())
