"""normscope verify: the ledger of published statements, each checked."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.output import (
    JsonOption,
    OutOption,
    OverwriteOption,
    SeedOption,
    console,
    examples,
    print_folder,
    print_json,
    print_table,
    progress,
    with_report,
)

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = examples(
    "normscope verify",
    "normscope verify 2:4.3",
    "normscope verify 1:7 2:gradient --thorough",
    "normscope verify --json",
)
_WIDE = 140  # columns, from which on there is room for what was tested


def verify(
    statements: Annotated[
        list[str] | None,
        typer.Argument(
            help="Statements to check: 2 for a paper, 2:4.3 for a theorem, 2:4.3ii for a part of it. Without any: all.",
            show_default=False,
        ),
    ] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="Try ten times as many cases: minutes, not seconds.")] = False,
    seed: SeedOption = 0,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Check every statement of the papers: at its edges, at random, and by a search for a case in which it fails."""
    from normscope.report.theorems import write_theorems_report
    from normscope.runs import check_writable, fresh_path, new_run, run_path
    from normscope.theorems import THOROUGH, check_all, find_statements, record, tables

    chosen = find_statements(statements or [])
    folder = out or fresh_path("runs/verify")
    check_writable(folder, overwrite=overwrite)
    started = datetime.now(UTC)
    with progress("checking statements", total=len(chosen)) as advance:
        found = check_all(chosen, seed, THOROUGH if thorough else 1, advance)
    with console(stderr=True).status("drawing pictures"):
        evidence = tables(found)
    configuration = {"statements": [statement.id for statement in chosen], "thorough": thorough}
    settings = f"{len(chosen)} statements; {'thorough' if thorough else 'quick'}; seed {seed}"
    with new_run(folder, "verify", configuration, seed=seed, overwrite=overwrite, started=started) as run:
        for name, table in evidence.items():
            run.write_table(name, table)
        with_report(lambda: write_theorems_report(run, settings))
    records = [record(finding) for finding in found]
    if json:
        print_json(records)
    else:
        _print(records, evidence["groups"], in_full=bool(statements))
        print_folder(run_path(folder))


def _print(records: list[dict[str, Any]], groups: "pd.DataFrame", in_full: bool) -> None:
    """The table; then, of statements that were asked for or that fail, what there is to say."""
    columns = ["statement", "title", "cases", "margin", "verdict"]
    rows = [[r["id"], r["title"], r["cases"], f"{r['margin']:.2g}", r["verdict"]] for r in records]
    if not in_full and console().width >= _WIDE:
        columns, rows = [*columns, "what was tested"], [[*row, r["tested"]] for row, r in zip(rows, records, strict=True)]
    print_table(columns, rows)
    for r in records:
        if in_full:
            _print_page(r, groups[groups["statement"] == r["id"]])
        elif r["verdict"].startswith("fails"):
            _print_failure(r)
    counts = {
        verdict: sum(r["verdict"] == verdict for r in records) for verdict in dict.fromkeys(r["verdict"] for r in records)
    }
    console().print("; ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def _print_failure(r: dict[str, Any]) -> None:
    _print_lines(r, {"printed": r["claim"], "fails at": r["worst_case"], "corrected": r["corrected"] or ""})


def _print_page(r: dict[str, Any], groups: "pd.DataFrame") -> None:
    lines = {
        "printed": r["claim"],
        "tested": r["tested"],
        "finite test": r["limit"],
        "remark": r["remark"],
        "verdict": f"{r['verdict']}: {r['cases']} cases, {r['checks']:,} numbers compared, worst margin {r['margin']:.3g}",
        "worst case": f"{r['worst_case']} (margin {r['worst_case_margin']:.3g})",
        "why": r["why"] or "",
        "corrected": r["corrected"] or "",
        "": "" if r["corrected_margin"] is None else _on_the_same_cases(r["corrected_margin"]),
    }
    _print_lines(r, lines)
    named = groups[groups["group"] != ""]
    if len(named):
        rows = [[row.group, row.form, row.cases, f"{row.margin:.2g}"] for row in named.itertuples(index=False)]
        print_table(("choice", "form", "cases", "worst margin"), rows)


def _on_the_same_cases(margin: float) -> str:
    return f"{'holds' if margin >= 0 else 'fails too'} on the same cases, worst margin {margin:.3g}"


def _print_lines(r: dict[str, Any], lines: dict[str, str]) -> None:
    from rich.padding import Padding
    from rich.table import Table

    out = console()
    out.print(f"{r['id']}  {r['title']}", style="bold")
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    for label, text in lines.items():
        if text:
            table.add_row(label, text)
    out.print(Padding(table, (0, 0, 1, 2)))
