"""Sections of subspaces: what heads read, how it overlaps, interference, and the induction circuit."""

import math
from collections.abc import Sequence

import pandas as pd

from normscope.report.write import Report, findings_of, tables_of, write_report
from normscope.results import Chart, Figure, Line, PageTable, Panels, Section
from normscope.results.tables import Tables, figures_section, floats, head_map, spans_decades, table_of
from normscope.runs import RunFolder

_ROUNDING = 1e-4  # a relative change of logits below this is rounding
_KNOBS = {
    "angle": ("Without orthogonality", "degrees away from orthogonal", 90.0, -1.0),
    "spread": ("Without constant norm", "spread of norms", 0.0, 1.0),
}  # title, label, the value that Pre-Norm needs, and the direction in which it is left


def write_subspaces_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page of a measurement of subspaces."""
    tables = tables_of(run)
    sections = subspaces_sections(tables, settings)
    write_report(run.path, Report("Input subspaces of heads", settings, sections, findings=findings_of(tables)), formats)


def subspaces_sections(tables: Tables, settings: str) -> list[Section]:
    """The circuit and constructed worlds, interference, norms, overlaps and ranks, as far as there are tables for them."""
    makers = (_circuit, _worlds, _interference, _spheres, _angles, _rank)
    sections = [section(tables, settings) for section in makers]
    return [section for section in sections if section]


def _circuit(tables: Tables, settings: str) -> Section | None:
    points, curves, selections = (table_of(tables, name) for name in ("points", "curves", "selections"))
    if points is None or curves is None or selections is None:
        return None
    text = (
        "A previous-token head adds each token's previous type, and a prefix-matching head attends to where a type occurred "
        "before. Each head reads one of four subspaces: position, type, previous type, prediction. While these are orthogonal "
        "and each part has constant norm, every scheme solves the task. Without orthogonality or constant norm the circuit "
        "breaks only if there is a norm between the residual stream and the heads, which divides every part by the norm of the "
        "whole.",
    )
    charts = {knob: _knob_chart(knob, points, curves, settings) for knob in _KNOBS}
    figures: dict[str, Figure | None] = {
        "circuit": _circuit_panels(selections, settings),
        **{f"circuit-{knob}": chart for knob, chart in charts.items()},
    }
    rows = tuple(
        (str(row.knob), str(row.scheme), str(row.part), _point(row.knob, row.predicted), _point(row.knob, row.observed))
        for row in points.itertuples(index=False)
    )
    columns = ("knob", "scheme", "part", "by Theorem 7", "observed")
    return figures_section(
        "The induction circuit", text, figures, [PageTable("Where it breaks", columns, rows)], name="circuit"
    )


def _circuit_panels(selections: pd.DataFrame, settings: str) -> Panels:
    """A panel for each scheme, downwards, and world, across: the key that each query attends to, and whether it is right.

    Args:
        selections: columns world, scheme, receiver, selected and wanted.
        settings: small print.
    """
    schemes, worlds = (list(selections[column].drop_duplicates()) for column in ("scheme", "world"))
    panels = [
        _circuit_panel(f"{scheme}, {world}", selections[(selections["scheme"] == scheme) & (selections["world"] == world)])
        for scheme in schemes
        for world in worlds
    ]
    return Panels(
        "Normalization and the independence of subspaces",
        panels,
        "Each dot is the key that a query attends to. With orthogonal parts of constant norm every scheme is right; otherwise "
        "a norm of the input makes the top key depend on what W_QK does not read.",
        settings,
        columns=len(worlds),
    )


def _circuit_panel(title: str, rows: pd.DataFrame) -> Chart:
    right = rows["selected"] == rows["wanted"]
    groups = {
        "right key attended": (rows[right], "selected"),
        "wrong key attended": (rows[~right], "selected"),
        "right key, not attended": (rows[~right], "wanted"),
    }
    lines = tuple(
        Line(name, floats(points[column]), floats(points["receiver"]), dots=True) for name, (points, column) in groups.items()
    )
    return Chart(f"{title}: {int(right.sum())} of {len(rows)} right", "key position", "query position", lines, "")


def _knob_chart(knob: str, points: pd.DataFrame, curves: pd.DataFrame, settings: str) -> Chart:
    """The share that is solved against how far the knob is turned, with a vertical line where Theorem 7 predicts the break."""
    title, label, needed, direction = _KNOBS[knob]
    rows = curves[curves["knob"] == knob]
    lines = [
        Line(str(scheme), floats(group["turned"]), floats(100 * group["solved"]))
        for scheme, group in rows.groupby("scheme", sort=False)
    ]
    predicted = points[(points["knob"] == knob) & (points["part"] == "circuit") & points["predicted"].notna()]
    for row in predicted.itertuples(index=False):
        place = direction * (float(str(row.predicted)) - needed)
        lines.append(Line(f"{row.scheme}: Theorem 7", [place, place], [0.0, 100.0]))
    return Chart(
        title,
        label,
        "right predictions in %",
        tuple(lines),
        "A vertical line is where Theorem 7 lets the first head collapse; lines that stay at 100 % lie on each other.",
        settings,
        log_x=True,
    )


def _point(knob: object, value: object) -> str:
    number = float(str(value))
    if math.isnan(number):
        return "never"
    return f"{number:.6g}°" if knob == "angle" else f"±{100 * number:.6g} %"


def _worlds(tables: Tables, settings: str) -> Section | None:
    table = table_of(tables, "worlds")
    if table is None:
        return None
    text = (
        "Hidden states are sums of parts in three subspaces, with a head that reads each. The part that a head does not read "
        "is resampled from another token: the change of its attention logits, measured as in any model, and in closed form.",
    )
    rows = tuple(
        (str(row.world), str(row.scheme), str(row.head), f"{row.before:.6g}", f"{row.predicted:.6g}", f"{row.after:.2g}")
        for row in table.itertuples(index=False)
    )
    columns = ("world", "scheme", "head", "before the norm", "by theory", "after the norm")
    return Section("Constructed worlds", text, (PageTable("Change of attention logits", columns, rows),))


def _interference(tables: Tables, settings: str) -> Section | None:
    table = table_of(tables, "interference")
    if table is None:
        return None
    text = (
        "Resample ablation: the part of a hidden state outside a head's input subspace is replaced by that of another token. "
        "After the norm it lies in a null space of W_QK. Before the norm it changes the divisor of the norm, a common factor "
        "on everything that the head reads. Without a norm between, or with queries and keys normalised per head after their "
        "projections (QK-Norm), logits do not change. Normalised over all heads together, heads share a divisor, and logits "
        "change either way.",
    )
    before = table[table["place"] == "before"]
    both, keys = before[before["exchanged"] == "both"], before[before["exchanged"] == "keys"]
    if both["change"].max() < _ROUNDING:
        return Section(
            "Interference",
            (*text, "No head's attention logits change by more than rounding: there is nothing to draw."),
            name="interference",
        )
    maps: dict[str, Figure | None] = {
        "interference": head_map(
            both,
            "change",
            "Interference by head",
            "relative change of attention logits",
            "How much logits change when everything that W_QK does not read is resampled before the norm.",
            settings,
            log=spans_decades(floats(both["change"])),
        ),
        "interference-keys": head_map(
            keys,
            "kappa",
            "Interference as noise on the norms of keys",
            "RMS of κ",
            "Resampling multiplies keys by 1 + κ: compare the noise at which circuits collapse.",
            settings,
            log=spans_decades(floats(keys["kappa"])),
        ),
        "interference-moved": head_map(
            keys,
            "moved",
            "Queries whose top key changes",
            "share of queries",
            "The top key changed although nothing W_QK reads was changed. Diffuse rows switch more easily.",
            settings,
        ),
    }
    return figures_section("Interference", text, maps, name="interference")


def _spheres(tables: Tables, settings: str) -> Section | None:
    table = table_of(tables, "spheres")
    if table is None:
        return None
    maps = {
        f"spheres-{side}": head_map(
            rows,
            "spread",
            f"Spread of the norm that heads read, {side}",
            "width of the 90% interval / median",
            "Dark heads read inputs of constant norm: projected onto their input subspace, token norms hardly vary.",
            settings,
        )
        for side, rows in table[table["place"] == "before"].groupby("side", sort=False)
    }
    text = (
        "A norm of the input keeps the parts of a hidden state independent if each has constant norm before it. Norms after "
        "it, where every part is divided by the norm of the whole, are in the table spheres.",
    )
    return figures_section("Do heads read inputs of constant norm?", text, maps, name="spheres")


def _angles(tables: Tables, settings: str) -> Section | None:
    table = table_of(tables, "overlaps")
    if table is None:
        return None
    maps: dict[str, Figure | None] = {}
    for side, rows in table.groupby("side", sort=False):
        chart = head_map(
            rows,
            "weighted_cosine",
            f"Overlap with the other heads of the layer, {side}",
            "mean cosine, weighted",
            "Dark heads read subspaces orthogonal to those of the others; bright ones share theirs.",
            settings,
        )
        maps[f"angles-{side}"] = chart
    text = ("Cosines of principal angles between the input subspaces of two heads, weighted by where the data lie.",)
    return figures_section("Are input subspaces orthogonal?", text, maps, name="overlap")


def _rank(tables: Tables, settings: str) -> Section | None:
    table = table_of(tables, "rank")
    if table is None:
        return None
    chart = head_map(
        table,
        "effective_rank",
        "Participation ratio of W_QK",
        "(Σσ²)²/Σσ⁴",
        "How many directions carry a head's attention logits; all others are its null space, or nearly so.",
        settings,
    )
    return figures_section("Rank of W_QK", (), {"rank": chart}, name="rank")
