"""Figures and page of advice on a scheme, from its tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from normscope.report.charts import Chart, Drawing, HeatMap, Line
from normscope.report.figures import charts_section, write_page
from normscope.report.page import PageTable, Section
from normscope.report.tables import cell, dots, floats, spans_decades
from normscope.runs import RunFolder


@dataclass(frozen=True)
class _Figure:
    """What a picture of one column says."""

    title: str
    unit: str
    caption: str
    log: bool = True


_CRITERIA = {
    "early": _Figure(
        "Early movement",
        "degrees a layer",
        "Higher is better: how far a layer of the first third moves tokens, less what they turn together.",
    ),
    "late": _Figure("Late movement", "degrees a layer", "Higher is better: what the last third of the layers still does."),
    "collapse": _Figure(
        "Resistance to collapse", "1 − mean cosine", "Higher is better: at 0 all tokens point one way after the last layer."
    ),
    "gradient": _Figure(
        "Gradient flow", "powers of ten", "Lower is better: how far the gradient at the first layer is from that at the last."
    ),
    "noise": _Figure(
        "Robustness to norm noise", "degrees", "Lower is better: how far 1 % of noise on norms turns the last directions."
    ),
}
_CURVES = {
    "moved": _Figure(
        "Movement by layer",
        "degrees",
        "A good scheme moves tokens far early and still moves them late; the turn that all share is left out.",
    ),
    "turned": _Figure(
        "Angle turned by layer",
        "degrees",
        "The whole angle: high here and low in the picture above is a cluster that turns as one.",
        log=False,
    ),
    "gap": _Figure("Clustering by layer", "1 − mean cosine", "A line that falls to 0 is collapse: all tokens point one way."),
    "radius": _Figure("Length of states by layer", "mean |x|", "A growing length is what slows a free stream down."),
    "gradient": _Figure(
        "Gradient by layer",
        "over that at the last layer",
        "A line far from 1 at the left is a gradient that grows or vanishes on its way back.",
    ),
}


def write_advice_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Draw the pictures of advice and its page."""
    write_page(run, "Advice on a scheme", settings, advice_sections(run, settings), formats)


def advice_sections(run: RunFolder, settings: str) -> list[Section]:
    """The order and its findings, criteria with their intervals, curves by layer, theory, and what training measured."""
    return [
        _order(run, settings),
        _criteria(run, settings),
        _layers(run, settings),
        _theory(run),
        _trained(run),
    ]


def _order(run: RunFolder, settings: str) -> Section:
    ranks, criteria = run.table("ranks"), run.table("criteria")
    means = {(row.scheme, row.criterion): float(str(row.mean)) for row in criteria.itertuples(index=False)}
    rows = tuple(
        (
            str(row.scheme),
            str(row.place),
            f"{row.rank:.1f} ({row.low:.1f} to {row.high:.1f})",
            *(cell(means[row.scheme, name], ".3g") for name in _CRITERIA),
            cell(100 * float(str(row.first)), ".0f") + " %",
            str(row.level_with) or "–",
        )
        for row in ranks.itertuples(index=False)
    )
    titles = (figure.title.lower() for figure in _CRITERIA.values())
    columns = ("scheme", "place", "mean rank", *titles, "first with any weights", "not told apart from")
    findings = run.table("findings")
    text = tuple(f"{basis.capitalize()}: {said}" for basis, said in zip(findings["basis"], findings["text"], strict=True))
    charts: dict[str, Drawing | None] = {"ranks": _rank_map(ranks, criteria, settings)}
    return charts_section(
        run, "The order, and what it rests on", text, charts, (PageTable("Schemes, best first", columns, rows),)
    )


def _rank_map(ranks: pd.DataFrame, criteria: pd.DataFrame, settings: str) -> HeatMap:
    names = [str(name) for name in ranks["scheme"]]
    found = {(row.scheme, row.criterion): float(str(row.rank)) for row in criteria.itertuples(index=False)}
    return HeatMap(
        "Rank in every criterion",
        "criterion",
        "scheme, best overall at the top",
        "rank, 1 is best",
        [figure.title for figure in _CRITERIA.values()],
        names,
        [[found[name, criterion] for criterion in _CRITERIA] for name in names],
        "A row that is dark throughout is good at everything; most rows are not.",
        settings,
        limits=(1.0, max(2.0, float(len(names)))),
        from_top=True,
    )


def _criteria(run: RunFolder, settings: str) -> Section:
    table, order = run.table("criteria"), [str(name) for name in run.table("ranks")["scheme"]]
    charts: dict[str, Drawing | None] = {}
    for name, figure in _CRITERIA.items():
        rows = table[table["criterion"] == name].set_index("scheme").loc[order]
        lines = [
            line
            for place, (scheme, *numbers) in enumerate(rows[["mean", "low", "high"]].itertuples(), 1)
            for line in dots(f"{place} {scheme}", [float(place)], *([number] for number in numbers))
        ]
        log = spans_decades(floats(rows["mean"])) and rows["mean"].min() > 0  # a zero is the best there is, and must be seen
        charts[f"criterion-{name}"] = Chart(
            figure.title, "scheme, in overall order", figure.unit, tuple(lines), figure.caption, settings, log_y=log
        )
    text = (
        "Dots are means over runs, bars 90 % intervals of the mean: runs drawn again with replacement, the same for all "
        "schemes. All schemes went through the same starts, weights and noise.",
    )
    return charts_section(run, "Criteria", text, charts)


def _layers(run: RunFolder, settings: str) -> Section:
    table, order = run.table("layers"), run.table("ranks")["scheme"]
    groups = {str(name): rows for name, rows in table.groupby("scheme", sort=False)}
    charts: dict[str, Drawing | None] = {}
    for column, figure in _CURVES.items():
        lines = tuple(_curve(str(name), groups[str(name)], column) for name in order)
        charts[f"layers-{column}"] = Chart(
            figure.title, "layer", figure.unit, lines, figure.caption, settings, log_y=figure.log
        )
    text = (
        "Lines are means over runs, bands hold 90 % of the runs; layers count from 0, and the state after the last layer ends "
        "a line.",
    )
    return charts_section(run, "Layer by layer", text, charts)


def _curve(name: str, rows: pd.DataFrame, column: str) -> Line:
    drawn = rows[rows[column].notna()]
    x, y, low, high = (floats(drawn[key]) for key in ("layer", column, f"{column}_low", f"{column}_high"))
    return Line(name, x, y, low, high)


def _theory(run: RunFolder) -> Section:
    rows = tuple(
        (
            str(row.scheme),
            f"{row.tokens:,}",
            str(row.speed),
            str(row.radial),
            *(cell(float(str(value)), ".3g") for value in (row.first_rate, row.early, row.late, row.gap)),
        )
        for row in run.table("theory").itertuples(index=False)
    )
    text = (
        "The law of every scheme follows from its slots: directions obey θ̇ = (1/s) P A, lengths ṙ. The numbers are of the flow "
        "with identity weights from an orthogonal start, where all pairs keep one cosine γ: γ̇ at the start as in Theorem 4.1, "
        "degrees a layer in the first and last third, and 1 − γ at the end.",
    )
    columns = ("scheme", "tokens", "speed factor s", "radial rate ṙ", "γ̇ at 0", "early", "late", "1 − γ at the end")
    return Section("Theory", text, (PageTable("Theory beside the simulation", columns, rows),))


def _trained(run: RunFolder) -> Section:
    rows = tuple(
        (str(row.scheme), str(row.what), str(row.value) or "–", str(row.source) or "–")
        for row in run.table("trained").itertuples(index=False)
    )
    text = (
        "Only what this project trained itself stands here. A simulation with random weights says how a model starts, not what "
        "it learns.",
    )
    columns = ("scheme", "what", "measured", "where it is reported")
    return Section("Measured in training", text, (PageTable("Measured in training", columns, rows),))
