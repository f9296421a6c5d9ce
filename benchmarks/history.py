"""The history of all figures of the benchmarks, as a page.

    python benchmarks/history.py                                           # write the page and its figure from the data
    python benchmarks/history.py add "make demo" "time after installation" 101 --unit s --machine "two CPU cores"
    python benchmarks/history.py add COMMAND QUANTITY LOW HIGH --goal "≤ 1.25" --note "busy machine"    # a range over runs

A row of ``docs/results/data/benchmarks-history.csv`` is one measurement. ``add`` fills in date, version and commit; unit, goal
and machine are those of the last row of the same quantity unless given.
"""

import argparse
import subprocess
import textwrap
from datetime import UTC, datetime
from pathlib import Path

import altair as alt
import pandas as pd

import normscope as ns

RESULTS = Path(__file__).parent.parent / "docs" / "results"
DATA = RESULTS / "data" / "benchmarks-history.csv"
PAGE = RESULTS / "benchmarks.md"
FIGURE = RESULTS / "figures" / "benchmarks-history.svg"
SERIES = ["command", "quantity"]
DRAWN = 3  # measurements from which a quantity has a figure
COLUMNS = 3
INTRODUCTION = """# Benchmarks

Every figure that was measured of speed, cost and coverage, oldest first. Goals are those of today, and a missed one is reported
as missed. Ranges are over runs. Two CPU cores and one NVIDIA H200 are those of shared machines: compare ratios that were taken
in one run rather than times of different days.

The data are in [data/benchmarks-history.csv](data/benchmarks-history.csv), one row for each measurement, with version and,
where it is known, commit. `python benchmarks/history.py add COMMAND QUANTITY VALUE` appends a row and writes this page."""


def read(path: Path = DATA) -> pd.DataFrame:
    """All measurements, in their order."""
    return pd.read_csv(path, dtype={"version": str, "commit": str}, keep_default_na=False)


def is_met(row: pd.Series) -> bool | None:
    """Whether the whole range of a measurement is on the right side of its goal; None without a goal."""
    if not row["goal"]:
        return None
    relation, limit = row["goal"].split()
    return bool(row["high"] <= float(limit)) if relation == "≤" else bool(row["low"] >= float(limit))


def value_text(row: pd.Series) -> str:
    """``1.03 to 1.1 ×``: the range, or the one number, with its unit."""
    low, high = f"{row['low']:,.10g}", f"{row['high']:,.10g}"
    return f"{low if low == high else f'{low} to {high}'} {row['unit']}".strip()


def goal_text(row: pd.Series) -> str:
    """``≤ 1.25 ×``; empty without a goal."""
    return f"{row['goal']} {row['unit']}".strip() if row["goal"] else ""


def measured_text(row: pd.Series) -> str:
    """The value with when it was measured, and what to know about it."""
    about = ", ".join(part for part in (row["date"], f"`{row['commit']}`" if row["commit"] else "", row["note"]) if part)
    return f"{value_text(row)} ({about})"


def page(data: pd.DataFrame) -> str:
    """The page as Markdown."""
    last = data.groupby(SERIES, sort=False).tail(1)
    goals = last[last["goal"] != ""]
    missed = goals[[is_met(row) is False for _, row in goals.iterrows()]]
    lines = [INTRODUCTION, "", f"{len(goals) - len(missed)} of {len(goals)} goals are met by the last measurement. Missed:", ""]
    lines += ["| quantity | command | goal | last measurement |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['quantity']} | `{row['command']}` | {goal_text(row)} | {measured_text(row)} |" for _, row in missed.iterrows()
    ]
    lines += ["", "## Over time", "", f"Quantities with {DRAWN} measurements or more. The dashed line is the goal.", ""]
    lines += [f"![The history of the benchmarks](figures/{FIGURE.name})", "", "Made by `python benchmarks/history.py`.", ""]
    lines += ["## All figures"]
    for command, rows in data.groupby("command", sort=False):
        lines += ["", f"### `{command}`", "", "| quantity | machine | goal | last measurement | | earlier |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        lines += [_line(series) for _, series in rows.groupby("quantity", sort=False)]
    return "\n".join(lines) + "\n"


def _line(series: pd.DataFrame) -> str:
    """The row of a quantity in the table of its command."""
    last = series.iloc[-1]
    verdict = {None: "", True: "met", False: "**missed**"}[is_met(last)]
    earlier = "; ".join(measured_text(row) for _, row in series.iloc[:-1].iterrows())
    return f"| {last['quantity']} | {last['machine']} | {goal_text(last)} | {measured_text(last)} | {verdict} | {earlier} |"


def figure(data: pd.DataFrame) -> alt.ConcatChart:
    """A small chart for every quantity that was measured often enough."""
    charts = [_chart(series) for _, series in data.groupby(SERIES, sort=False) if len(series) >= DRAWN]
    together: alt.ConcatChart = alt.concat(*charts, columns=COLUMNS).configure(font="DejaVu Sans", background="white")
    return together


def _chart(series: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """Measurements in their order with their ranges, and the goal."""
    last = series.iloc[-1]
    rows = series[["low", "high"]].assign(number=range(1, len(series) + 1), middle=(series["low"] + series["high"]) / 2)
    base = alt.Chart(rows).encode(x=alt.X("number:O", title="measurement", axis=alt.Axis(labelAngle=0)))
    axis = alt.Y("middle:Q", title=last["unit"] or None, scale=alt.Scale(zero=False))
    layers = [base.mark_line(point=True).encode(y=axis), base.mark_rule().encode(y="low:Q", y2="high:Q")]
    if last["goal"]:
        goal = pd.DataFrame({"goal": [float(last["goal"].split()[1])]})
        layers.append(alt.Chart(goal).mark_rule(strokeDash=[5, 4], color="#D55E00").encode(y="goal:Q"))
    title = alt.TitleParams(
        [last["command"], *textwrap.wrap(last["quantity"].replace("`", ""), 38)], fontSize=10, anchor="start"
    )
    return alt.layer(*layers).properties(width=190, height=110, title=title)


def add(data: pd.DataFrame, chosen: argparse.Namespace) -> pd.DataFrame:
    """The data with one more measurement; what is not given is as in the last one of the quantity."""
    same = data[(data["command"] == chosen.command) & (data["quantity"] == chosen.quantity)]
    before = same.iloc[-1] if len(same) else {"unit": "", "goal": "", "machine": ""}
    fixed = {
        name: before[name] if getattr(chosen, name) is None else getattr(chosen, name) for name in ("unit", "goal", "machine")
    }
    if not fixed["machine"]:
        raise SystemExit("--machine: say what a new quantity was measured on, such as 'two CPU cores' or 'one H200'")
    if fixed["goal"] and fixed["goal"].split()[0] not in ("≤", "≥"):
        raise SystemExit("--goal is written '≤ 1.25' or '≥ 5'")
    row = {
        "command": chosen.command,
        "quantity": chosen.quantity,
        **fixed,
        "date": datetime.now(UTC).date().isoformat(),
        "version": ns.__version__,
        "commit": _commit(),
        "low": chosen.low,
        "high": chosen.low if chosen.high is None else chosen.high,
        "note": chosen.note,
    }
    return pd.concat([data, pd.DataFrame([row])], ignore_index=True)


def _commit() -> str:
    command = ["git", "-C", str(DATA.parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    new = parser.add_subparsers(dest="action").add_parser("add", help="append a measurement and write the page")
    new.add_argument("command", help="what measured it, such as 'python benchmarks/audit.py'")
    new.add_argument("quantity")
    new.add_argument("low", type=float, help="the number, or the lower end of its range over runs")
    new.add_argument("high", type=float, nargs="?")
    for name in ("unit", "goal", "machine"):
        new.add_argument(f"--{name}")
    new.add_argument("--note", default="")
    return parser.parse_args()


def main() -> None:
    """Append what is given, and write the page and its figure."""
    data, chosen = read(), _arguments()
    if chosen.action == "add":
        data = add(data, chosen)
        data.to_csv(DATA, index=False, float_format="%.10g")
    PAGE.write_text(page(data), encoding="utf-8")
    figure(data).save(str(FIGURE))


if __name__ == "__main__":
    main()
