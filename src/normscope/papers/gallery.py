"""The gallery: entries that were made, as sections with figures, from their tables alone."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from normscope.papers.entry import NOT_REPRODUCED, THIS_RUN
from normscope.results.figures import Chart, Figure, Line, Panels
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows

Tables = dict[str, pd.DataFrame]
Row = dict[str, Any]
_CAPTION = "Dots are readings of the published figure, lines are measured, in the same colour for the same curve."
_BANDS, _EDGES = "Bands hold 90 % of the runs.", "Dots beside a line are readings of their edges."


def overview(rows: list[Row]) -> PageTable:
    """Every entry in a line: verdict, worst residual or what else decided, cost."""
    cells = tuple((row["entry"], row["title"], row["verdict"], row["worst"], _cost(row)) for row in rows)
    return PageTable("Figures and tables", ("entry", "what it shows", "verdict", "decisive residual (rms)", "cost"), cells)


def gallery_sections(tables: Tables) -> Iterator[Section]:
    """An overview, then a section for each entry."""
    rows = with_worst(tables)
    text = (
        "Each figure and table of the three papers and some of others, published beside measured. A residual is the root "
        "mean square (rms) of measured minus published, over the points where the published curve could be read. The decisive "
        "residual of an entry is the largest relative to its limit.",
        "Limits: for paper 2, 0.003 in the mean cosine and in the edges of all bands together, and 1 % of the largest speed; "
        "twice the expected error of sampling is allowed besides. An edge of a band counts if it could be read at five times "
        "or more. Paper 1 gives no spread over seeds: "
        "half a point of accuracy in tests, one point under noise, 20 % of a width and 10 % of a noise level, each plus twice "
        "the errors. Stored values of paper 1 are of models trained on a third of the published examples.",
        "Reproduced: everything that is compared is within its limit. The remark says which settings were inferred from the "
        "curves, or what differs. The right order of schemes alone does not count as reproduced. Not run here: the published "
        "model or scale was not measured, and what is shown is of another. Nothing to compare with: no published number was "
        "read. Some published numbers count more than once: 2:fig4 is the image of 2:fig5a, and 1:fig17 and 1:fig19 share "
        "curves with 1:fig2.",
        *left_out(tables),
    )
    yield Section("The papers", text, (overview(rows),), name="papers")
    for row in rows:
        yield entry_section(row, tables)


def left_out(tables: Tables) -> list[str]:
    """A line for every entry that was to be made of a model and could not."""
    rows = plain_rows(tables["left_out"]) if "left_out" in tables else []
    return [f"Left out: {row['entry']}: {row['reason']}" for row in rows]


def with_worst(tables: Tables) -> list[Row]:
    """The entries, each with its decisive residual, the largest relative to its limit, and whether that is outside it."""
    rows = plain_rows(tables["entries"])
    for row in rows:
        found = tables["residuals"]
        found = found[(found["entry"] == row["entry"]) & found["agrees"].notna()]
        if len(found):
            found = found[found["source"] == found["source"].iloc[-1]]  # the run that decides comes last
            share = found["rms"] / np.hypot(found["allowed"], 2 * found["noise"])  # as ``Residual.agrees`` has it
            worst = plain_rows(found.assign(share=share).sort_values("share").tail(1))[0]
            row["worst"] = f"{worst['rms']:.2g} ({worst['curve']}, {worst['quantity']}; limit {worst['allowed']:.2g})"
            row["outside"] = not worst["agrees"]
        else:
            row["worst"], row["outside"] = "–", False
    return rows


def entry_section(row: Row, tables: Tables) -> Section:
    """An entry: settings, verdict, command and cost; values, residuals and figures; what is not reproduced is a finding."""
    own = {name: table[table["entry"] == row["entry"]] for name, table in tables.items() if name != "entries"}
    commands = [row["command"], *filter(None, row["commands"].split("\n"))]
    text = (
        f"Verdict: {row['verdict']}. {row['remark']}".strip(),
        f"Published setting: {row['published']}.",
        f"Measured: {row['settings']}.",
        f"Command: {'; '.join(commands)}.",
        f"Cost: {_cost(row)}.",
    )
    figure = _figure(row, own)
    name = row["entry"].replace(":", "-").lower()
    shown = tuple(filter(None, (_values(own["values"]), _residuals(own["residuals"]))))
    findings = (_finding(row, tables["values"]),) if row["verdict"] == NOT_REPRODUCED else ()
    return Section(f"{row['entry']} {row['title']}", text, shown, {name: figure} if figure else {}, findings, name=name)


def _cost(row: Row) -> str:
    took = f"{row['seconds']:.0f} s on {row['device']}" if row.get("seconds") is not None else row["needs"]
    return f"{took}; full scale: {row['full']}" if row["full"] else took


def _finding(row: Row, values: pd.DataFrame) -> Finding:
    """What is outside its limit: the decisive residual, and the values that disagree."""
    wrong = plain_rows(values[(values["entry"] == row["entry"]) & (values["agrees"] == False)])  # noqa: E712  # not NA
    reasons = [f"decisive residual {row['worst']}"] if row["outside"] else []
    reasons += [f"{value['quantity']} {value['measured']} (published {value['published']})" for value in wrong[:2]]
    reasons += [f"and {len(wrong) - 2} more"] if len(wrong) > 2 else []
    return Finding(f"{row['entry']} {row['title']}: {row['verdict']}: {'; '.join(reasons)}.", severity="warning")


def _values(table: pd.DataFrame) -> PageTable | None:
    """Published and measured; where stored values decide, those of this run stand beside them, a row for each quantity."""
    rows = plain_rows(table)
    own = {row["quantity"]: row for row in rows if row["source"].startswith(THIS_RUN)}
    stored = [row for row in rows if not row["source"].startswith(THIS_RUN)]
    if not rows:
        return None
    if not own or len(own) + len(stored) < len(rows) or not stored or any(row["agrees"] is not None for row in own.values()):
        columns = ("quantity", "published", "measured", "limit", "agrees", "source")
        return PageTable("Values", columns, tuple((*_cells(row), row["source"]) for row in rows))
    beside = [(*_cells(row), _measured(own.pop(row["quantity"], None))) for row in stored]
    alone = [(*_cells({**row, "measured": ""}), _measured(row)) for row in own.values()]
    columns = ("quantity", "published", "stored", "limit", "agrees", THIS_RUN)
    return PageTable(f"Values; {stored[0]['source']}", columns, (*beside, *alone))


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    limit = _limit(row["allowed"]) if row["agrees"] is not None else "–"
    return row["quantity"], _number(row, "published"), _measured(row), limit, _agrees(row["agrees"])


def _measured(row: Row | None) -> str:
    return "–" if row is None else _number(row, "measured")


def _residuals(table: pd.DataFrame) -> PageTable | None:
    if not len(table):
        return None
    cells = tuple(
        (
            row["curve"],
            row["quantity"],
            f"{row['rms']:.2g}",
            f"{row['largest']:.2g}",
            str(row["points"]),
            _limit(row["allowed"]),
            f"{row['noise']:.2g}" if row["noise"] else "–",
            _agrees(row["agrees"]),
            row["source"],
        )
        for row in plain_rows(table)
    )
    columns = ("curve", "quantity", "rms", "largest", "readings", "limit of the rms", "sampling error", "agrees", "source")
    return PageTable("Residuals against the published curves", columns, cells)


def _figure(row: Row, own: Tables) -> Figure | None:
    charts = [
        _chart(row, panel, own["curves"][own["curves"]["panel"] == panel["panel"]]) for panel in plain_rows(own["panels"])
    ]
    if len(charts) < 2:
        return charts[0] if charts else None
    caption = _caption(own["curves"])
    return Panels(f"{row['entry']} {row['title']}", charts, caption, row["settings"], columns=min(3, len(charts)))


def _caption(curves: pd.DataFrame) -> str:
    """What dots, lines and bands are, of those that are drawn."""
    read, banded = bool(curves["published"].any()), bool(curves["low"].notna().any())
    drawn = {_CAPTION: read, _BANDS: banded, _EDGES: read and banded}
    return " ".join(text for text, shown in drawn.items() if shown)


def _chart(row: Row, panel: Row, curves: pd.DataFrame) -> Chart:
    strokes = curves.groupby(["curve", "published"], sort=False)
    lines = tuple(_line(str(name), bool(published), rows) for (name, published), rows in strokes)
    return Chart(
        panel["panel"], panel["x_label"], panel["y_label"], lines, _caption(curves), row["settings"],
        log_x=bool(panel["log_x"]), log_y=bool(panel["log_y"]),
    )  # fmt: skip


def _line(name: str, published: bool, rows: pd.DataFrame) -> Line:
    banded = bool(rows["low"].notna().all() and len(rows))
    low, high = (list(rows[edge]) if banded else None for edge in ("low", "high"))
    return Line(name, list(rows["x"]), list(rows["y"]), low, high, dots=published)


def _number(row: Row, name: str) -> str:
    """A number to the second digit of its error, with no more digits than it has; words as they are."""
    value, error = row[name], row[f"{name}_error"]
    if not value or not error:
        return value or "–"
    try:
        decimals = 1 - math.floor(math.log10(error))
        return f"{round(float(value), decimals):.6g} ± {error:.2g}"
    except ValueError:
        return f"{value} ± {error:.2g}"


def _limit(allowed: float | None) -> str:
    """How far apart both may be, besides their errors; texts have to be the same."""
    return "–" if not allowed else f"{allowed:.2g}"


def _agrees(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"
