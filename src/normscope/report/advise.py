"""Sections of advice on a scheme, from its tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from normscope.report.write import Report, tables_of, write_report
from normscope.results import Chart, Figure, Finding, HeatMap, Line, PageTable, Section
from normscope.results.tables import Tables, cell, figures_section, floats, needed_table, spans_decades
from normscope.runs import RunFolder


@dataclass(frozen=True)
class _Column:
    """The texts of the figure of one column."""

    title: str
    unit: str
    caption: str
    log: bool = True


_CRITERIA = {
    "early": _Column(
        "Early movement",
        "degrees per layer",
        "Higher is better: rotation per layer in the first third, after removing the rotation common to all tokens.",
    ),
    "late": _Column("Late movement", "degrees per layer", "Higher is better: the same in the last third of the layers."),
    "collapse": _Column(
        "Resistance to collapse", "1 − mean cosine", "Higher is better: at 0 all tokens point one way after the last layer."
    ),
    "gradient": _Column(
        "Gradient flow", "powers of ten", "Lower is better: how far the gradient at the first layer is from that at the last."
    ),
    "noise": _Column(
        "Robustness to norm noise", "degrees", "Lower is better: how far 1 % of noise on norms rotates the final hidden states."
    ),
}
_CURVES = {
    "moved": _Column(
        "Movement by layer",
        "degrees",
        "A good scheme moves tokens far early and still moves them late; the common rotation is removed.",
    ),
    "turned": _Column(
        "Rotation by layer",
        "degrees",
        "The whole angle: high here and low in the chart of movement is a cluster that rotates as one.",
        log=False,
    ),
    "gap": _Column("Alignment by layer", "1 − mean cosine", "A line that falls to 0 is collapse: all tokens point one way."),
    "radius": _Column("Residual stream norm by layer", "mean |x|", "A growing norm is what damps late layers."),
    "gradient": _Column(
        "Gradient by layer",
        "relative to the last layer",
        "A line far from 1 at the left is a gradient that explodes or vanishes on its way back.",
    ),
}


def write_advice_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page of advice."""
    write_report(run.path, Report("Advice on a scheme", settings, advice_sections(tables_of(run), settings)), formats)


def advice_sections(tables: Tables, settings: str) -> list[Section]:
    """The order and its findings, criteria with their intervals, curves by layer, theory, and what training measured."""
    sections = (_order(tables, settings), _criteria(tables, settings), _layers(tables, settings))
    return [*sections, _theory(tables), _trained(tables)]


def _order(tables: Tables, settings: str) -> Section:
    ranks, criteria, findings = (needed_table(tables, name) for name in ("ranks", "criteria", "findings"))
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
    titles = (column.title.lower() for column in _CRITERIA.values())
    columns = ("scheme", "place", "mean rank", *titles, "first with any weights", "not distinguishable from")
    texts = zip(findings["basis"], findings["text"], strict=True)
    return Section(
        "The order, and what it rests on",
        (),
        (PageTable("Schemes, best first", columns, rows),),
        {"ranks": _rank_map(ranks, criteria, settings)},
        tuple(Finding(f"{str(basis).capitalize()}: {text}") for basis, text in texts),
        name="order",
    )


def _rank_map(ranks: pd.DataFrame, criteria: pd.DataFrame, settings: str) -> HeatMap:
    names = [str(name) for name in ranks["scheme"]]
    places = {(row.scheme, row.criterion): float(str(row.rank)) for row in criteria.itertuples(index=False)}
    return HeatMap(
        "Rank in every criterion",
        "criterion",
        "scheme, best overall at the top",
        "rank, 1 is best",
        [column.title for column in _CRITERIA.values()],
        names,
        [[places[name, criterion] for criterion in _CRITERIA] for name in names],
        "A row that is dark throughout is good at everything; most rows are not.",
        settings,
        limits=(1.0, max(2.0, float(len(names)))),
        from_top=True,
    )


def _criteria(tables: Tables, settings: str) -> Section:
    table, order = needed_table(tables, "criteria"), [str(name) for name in needed_table(tables, "ranks")["scheme"]]
    figures: dict[str, Figure | None] = {}
    for name, column in _CRITERIA.items():
        rows = table[table["criterion"] == name].set_index("scheme").loc[order]
        lines = tuple(
            Line(f"{place} {scheme}", [float(place)], [mean], [low], [high], dots=True)
            for place, (scheme, mean, low, high) in enumerate(rows[["mean", "low", "high"]].itertuples(), 1)
        )
        log = spans_decades(floats(rows["mean"])) and rows["mean"].min() > 0  # a zero is the best there is, and must be seen
        figures[f"criterion-{name}"] = Chart(
            column.title, "scheme, in overall order", column.unit, lines, column.caption, settings, log_y=log
        )
    text = (
        "Dots are means over runs, bars 90 % intervals of the mean from a bootstrap over runs, the same for all schemes. All "
        "schemes had the same starts, weights and noise.",
    )
    return figures_section("Criteria", text, figures)


def _layers(tables: Tables, settings: str) -> Section:
    table, order = needed_table(tables, "layers"), needed_table(tables, "ranks")["scheme"]
    groups = {str(name): rows for name, rows in table.groupby("scheme", sort=False)}
    figures: dict[str, Figure | None] = {}
    for name, column in _CURVES.items():
        lines = tuple(_curve(str(scheme), groups[str(scheme)], name) for scheme in order)
        figures[f"layers-{name}"] = Chart(column.title, "layer", column.unit, lines, column.caption, settings, log_y=column.log)
    text = (
        "Lines are means over runs, bands hold 90 % of the runs; layers count from 0, and the state after the last ends a "
        "line.",
    )
    return figures_section("Layer by layer", text, figures, name="layers")


def _curve(name: str, rows: pd.DataFrame, column: str) -> Line:
    drawn = rows[rows[column].notna()]
    x, y, low, high = (floats(drawn[key]) for key in ("layer", column, f"{column}_low", f"{column}_high"))
    return Line(name, x, y, low, high)


def _theory(tables: Tables) -> Section:
    rows = tuple(
        (
            str(row.scheme),
            f"{row.tokens:,}",
            str(row.speed),
            str(row.radial),
            *(cell(float(str(value)), ".3g") for value in (row.first_rate, row.early, row.late, row.gap)),
        )
        for row in needed_table(tables, "theory").itertuples(index=False)
    )
    text = (
        "The law of every scheme follows from its slots: directions obey θ̇ = (1/s) P A, norms ṙ. The numbers are of the flow "
        "with identity weights from an orthogonal start, where all pairs keep one cosine γ: γ̇ at the start as in Theorem 4.1, "
        "degrees per layer in the first and last third, and 1 − γ at the end.",
    )
    columns = ("scheme", "tokens", "speed factor s", "radial rate ṙ", "γ̇ at 0", "early", "late", "1 − γ at the end")
    return Section("Theory", text, (PageTable("Theory beside the simulation", columns, rows),))


def _trained(tables: Tables) -> Section:
    rows = tuple(
        (str(row.scheme), str(row.what), str(row.value) or "–", str(row.source) or "–")
        for row in needed_table(tables, "trained").itertuples(index=False)
    )
    text = (
        "Only models that this project trained itself are listed. A simulation with random weights shows how a model starts, "
        "not what it learns.",
    )
    columns = ("scheme", "what", "measured", "where it is reported")
    return Section("Measured in training", text, (PageTable("Measured in training", columns, rows),), name="trained")
