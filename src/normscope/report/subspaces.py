"""Figures and page sections of subspaces: what heads see, how it overlaps, interference, and the induction circuit."""

import math
from collections.abc import Sequence

import pandas as pd

from normscope.report.charts import Chart, Drawing, Line
from normscope.report.circuit import save_circuit
from normscope.report.figures import charts_section, save_picture, with_findings, write_page
from normscope.report.page import PageTable, Section
from normscope.report.tables import floats, head_map, spans_decades, table_of
from normscope.runs import RunFolder

_ROUNDING = 1e-4  # a change of scores below this is rounding
_KNOBS = {
    "angle": ("Orthogonality taken away", "degrees away from orthogonal", 90.0, -1.0),
    "spread": ("Constant norm taken away", "spread of lengths", 0.0, 1.0),
}  # title, label, the value that Pre-Norm needs, and the direction in which it is left


def write_subspaces_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Draw the pictures of a measurement of subspaces and its page."""
    write_page(run, "Semantic subspaces", settings, with_findings(run, subspaces_sections(run, settings)), formats)


def subspaces_sections(run: RunFolder, settings: str) -> list[Section]:
    """The circuit and constructed worlds, interference, spheres, angles and ranks, as far as the run has them."""
    makers = (_circuit, _worlds, _interference, _spheres, _angles, _rank)
    sections = [section(run, settings) for section in makers]
    return [section for section in sections if section]


def _circuit(run: RunFolder, settings: str) -> Section | None:
    points, curves, selections = (table_of(run, name) for name in ("points", "curves", "selections"))
    if points is None or curves is None or selections is None:
        return None
    text = (
        "A previous-token head writes each token's previous type, and a prefix-matching head finds where a type came before. "
        "Each head reads one of four subspaces: position, type, previous type, prediction. While these are orthogonal spheres, "
        "every scheme solves the task. Taking away orthogonality or constant norm breaks the circuit only where a norm stands "
        "between the stream and the heads, for then every part is divided by the length of the whole.",
    )
    charts = {knob: _knob_chart(knob, points, curves, settings) for knob in _KNOBS}
    pictures = [save_circuit(run, "circuit", selections, list(charts.values()), settings)]
    pictures += [save_picture(run, f"circuit-{knob}", chart) for knob, chart in charts.items()]
    rows = tuple(
        (str(row.knob), str(row.scheme), str(row.part), _point(row.knob, row.predicted), _point(row.knob, row.observed))
        for row in points.itertuples(index=False)
    )
    columns = ("knob", "scheme", "part", "by Theorem 7", "as seen")
    return Section("The induction circuit", text, (PageTable("Where it breaks", columns, rows),), tuple(pictures))


def _knob_chart(knob: str, points: pd.DataFrame, curves: pd.DataFrame, settings: str) -> Chart:
    """The share that is solved against how far the knob is turned, with an upright line where Theorem 7 says it breaks."""
    title, label, needed, direction = _KNOBS[knob]
    rows = curves[curves["knob"] == knob]
    lines = [
        Line(str(scheme), floats(own["turned"]), floats(100 * own["solved"]))
        for scheme, own in rows.groupby("scheme", sort=False)
    ]
    predicted = points[(points["knob"] == knob) & (points["part"] == "circuit") & points["predicted"].notna()]
    for row in predicted.itertuples(index=False):
        place = direction * (float(str(row.predicted)) - needed)
        lines.append(Line(f"{row.scheme}: Theorem 7", [place, place], [0.0, 100.0]))
    return Chart(
        title,
        label,
        "tokens that predict right, in %",
        tuple(lines),
        "An upright line is where Theorem 7 lets the first head collapse; lines that stay at 100 % lie on each other.",
        settings,
        log_x=True,
    )


def _point(knob: object, value: object) -> str:
    number = float(str(value))
    if math.isnan(number):
        return "never"
    return f"{number:.6g}°" if knob == "angle" else f"±{100 * number:.6g} %"


def _worlds(run: RunFolder, settings: str) -> Section | None:
    table = table_of(run, "worlds")
    if table is None:
        return None
    text = (
        "Embeddings are sums of parts in three subspaces, with a head that reads each. The part that a head does not see is "
        "exchanged for another token's: the change of its scores, measured as in any model, and computed in closed form.",
    )
    rows = tuple(
        (str(row.world), str(row.scheme), str(row.head), f"{row.before:.6g}", f"{row.predicted:.6g}", f"{row.after:.2g}")
        for row in table.itertuples(index=False)
    )
    columns = ("world", "scheme", "head", "before the norm", "by theory", "after the norm")
    return Section("Constructed worlds", text, (PageTable("Change of scores", columns, rows),))


def _interference(run: RunFolder, settings: str) -> Section | None:
    table = table_of(run, "interference")
    if table is None:
        return None
    text = (
        "The part of a token that a head does not see is exchanged for that of another token. After the norm, it lies in a "
        "null space. Before the norm, it changes the length by which the norm divides: a common factor on all that a head "
        "reads. Without a norm between, or with queries and keys normalised per head after their projections, there is none. "
        "Normalised over all heads together, heads share a length, and scores change wherever the exchange is made.",
    )
    before = table[table["place"] == "before"]
    both, keys = before[before["exchanged"] == "both"], before[before["exchanged"] == "keys"]
    if both["change"].max() < _ROUNDING:
        return Section("Interference", (*text, "No head's scores change by more than rounding: there is nothing to draw."))
    maps: dict[str, Drawing | None] = {
        "interference": head_map(
            both,
            "change",
            "Interference by head",
            "relative change of scores",
            "How much scores change when all that a head does not attend to is exchanged before the norm.",
            settings,
            log=spans_decades(floats(both["change"])),
        ),
        "interference-keys": head_map(
            keys,
            "kappa",
            "Interference as noise on the lengths of keys",
            "RMS of κ",
            "The exchange multiplies keys by 1 + κ: to be read against the noise at which circuits collapse.",
            settings,
            log=spans_decades(floats(keys["kappa"])),
        ),
        "interference-moved": head_map(
            keys,
            "moved",
            "Receivers that prefer another token",
            "share of receivers",
            "Where the largest score is another token's after the exchange, the head selects by what it does not attend to.",
            settings,
        ),
    }
    return charts_section(run, "Interference", text, maps)


def _spheres(run: RunFolder, settings: str) -> Section | None:
    table = table_of(run, "spheres")
    if table is None:
        return None
    maps = {
        f"spheres-{side}": head_map(
            rows,
            "spread",
            f"Spread of the part that a head sees, {side}",
            "width of the 90% interval / median",
            "Dark heads see a sphere: before the norm, the part that they see has one length for all tokens.",
            settings,
        )
        for side, rows in table[table["place"] == "before"].groupby("side", sort=False)
    }
    text = (
        "A norm of the input keeps parts apart if each has one length before the norm. Lengths after it, where every part is "
        "divided by the length of the whole, are in the table beside them.",
    )
    return charts_section(run, "Are they spheres?", text, maps)


def _angles(run: RunFolder, settings: str) -> Section | None:
    table = table_of(run, "overlaps")
    if table is None:
        return None
    maps: dict[str, Drawing | None] = {}
    for side, rows in table.groupby("side", sort=False):
        chart = head_map(
            rows,
            "weighted_cosine",
            f"Overlap with the other heads of the layer, {side}",
            "mean cosine, weighted",
            "Dark heads see parts that are orthogonal to what the others see; bright ones share theirs.",
            settings,
        )
        maps[f"angles-{side}"] = chart
    text = ("Cosines of principal angles between what two heads see, weighted by where the data lie.",)
    return charts_section(run, "Are they orthogonal?", text, maps)


def _rank(run: RunFolder, settings: str) -> Section | None:
    table = table_of(run, "rank")
    if table is None:
        return None
    chart = head_map(
        table,
        "effective_rank",
        "Effective rank of W_QK",
        "(Σσ²)²/Σσ⁴",
        "How many directions carry a head's scores; all others are its null space, or nearly so.",
        settings,
    )
    return charts_section(run, "Rank", (), {"rank": chart})
