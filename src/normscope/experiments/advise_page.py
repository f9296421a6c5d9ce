"""The page of advice: the order of schemes, criteria with their intervals, curves by layer, theory, and what was trained."""

from typing import Any

import pandas as pd

from normscope.experiments.criteria import CRITERIA, KEYS
from normscope.results.figures import Chart, HeatMap, Line
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import cell, floats, plain_rows, spans_decades


def order_table(ranks: pd.DataFrame, criteria: pd.DataFrame, ranked: bool) -> PageTable:
    """Schemes with their ranks, if they have any, criteria, and which others cannot be distinguished."""
    means = _cells(criteria, "mean")
    rows = tuple(
        (
            row["scheme"],
            *((str(row["place"]), f"{row['rank']:.1f} ({row['low']:.1f} to {row['high']:.1f})") if ranked else ("–", "–")),
            *(cell(means[row["scheme"], key], ".3g") for key in KEYS),
            *((f"{100 * row['first']:.0f} %", row["level_with"] or "–") if ranked else ("–", "–")),
        )
        for row in plain_rows(ranks)
    )
    titles = (f"{criterion.title} ({criterion.unit})" for criterion in CRITERIA)
    columns = ("scheme", "place", "mean rank", *titles, "first over all weights", "not distinguishable from")
    return PageTable("Schemes, best first" if ranked else "Schemes by what training came to", columns, rows)


def _cells(criteria: pd.DataFrame, column: str) -> dict[tuple[str, str], float]:
    """A column by scheme and criterion."""
    places = zip(map(str, criteria["scheme"]), map(str, criteria["criterion"]), strict=True)
    return dict(zip(places, floats(criteria[column]), strict=True))


def rank_map(ranks: pd.DataFrame, criteria: pd.DataFrame, settings: str) -> HeatMap:
    """Rank by scheme and criterion."""
    names = [str(name) for name in ranks["scheme"]]
    values = _cells(criteria, "rank")
    return HeatMap(
        "Rank in every criterion", "criterion", "scheme, in overall order", "rank, 1 is best",
        [criterion.title for criterion in CRITERIA], names, [[values[name, key] for key in KEYS] for name in names],
        "A row that is dark throughout is good at everything; most rows are not.", settings,
        limits=(1.0, max(2.0, float(len(names)))), from_top=True,
    )  # fmt: skip


def criteria_section(ranks: pd.DataFrame, criteria: pd.DataFrame, settings: str) -> Section:
    """Every criterion of every scheme, with its interval."""
    order = [str(name) for name in ranks["scheme"]]
    figures = {}
    for criterion in CRITERIA:
        rows = criteria[criteria["criterion"] == criterion.key].set_index("scheme").loc[order]
        lines = tuple(
            Line(f"{place} {scheme}", [place], [row["mean"]], [row["low"]], [row["high"]], dots=True)
            for place, (scheme, row) in enumerate(rows.iterrows(), 1)
        )
        means = floats(rows["mean"].dropna())
        log = spans_decades(means) and min(means) > 0  # a zero is the best there is, and must be visible
        figures[f"criterion-{criterion.key}"] = Chart(
            criterion.title.capitalize(), "scheme, in overall order", criterion.unit, lines,
            f"{'Lower' if criterion.low_is_better else 'Higher'} is better: {criterion.meaning}.", settings, log_y=log,
        )  # fmt: skip
    text = (
        "Dots are means over runs, bars 90 % intervals of the mean: runs redrawn with replacement, the same for all "
        "schemes. All schemes had the same starts, weights and noise.",
    )
    return Section("Criteria", text, figures=figures)


_CURVES = {
    "moved": (
        "Movement by layer", "degrees", True,
        "A good scheme moves tokens far early and still moves them late; the rotation common to all tokens is removed.",
    ),
    "turned": (
        "Rotation by layer", "degrees", False,
        "The whole rotation: high here and low in the figure above is a cluster that rotates as one.",
    ),
    "gap": ("Diversity by layer", "1 − mean cosine", True, "A line that falls to 0 is rank collapse."),
    "radius": ("Residual norm by layer", "mean |x|", True, "A growing norm is what slows Pre-LN down."),
    "gradient": (
        "Gradient by layer", "relative to the last layer", True,
        "A line far from 1 on the left is a gradient that explodes or vanishes on its way back.",
    ),
}  # fmt: skip


def layers_section(ranks: pd.DataFrame, layers: pd.DataFrame, settings: str) -> Section:
    """Movement, rotation, diversity, norm and gradient by layer."""
    groups = {str(name): rows for name, rows in layers.groupby("scheme", sort=False)}
    figures = {}
    for column, (title, unit, log, caption) in _CURVES.items():
        lines = []
        for name in map(str, ranks["scheme"]):
            drawn = groups[name][groups[name][column].notna()]
            x, y, low, high = (floats(drawn[key]) for key in ("layer", column, f"{column}_low", f"{column}_high"))
            lines.append(Line(name, x, y, low, high))
        figures[f"layers-{column}"] = Chart(title, "layer", unit, tuple(lines), caption, settings, log_y=log)
    text = (
        "Lines are means over runs, bands hold 90 % of the runs. Layers count from 0; the last point is the state after the "
        "last layer.",
    )
    return Section("Layer by layer", text, figures=figures)


def theory_section(theory: pd.DataFrame, findings: tuple[Finding, ...]) -> Section:
    """Laws and the numbers of the reduced flow."""
    rows = tuple(
        (
            *(row["scheme"], f"{row['tokens']:,}", row["speed"], row["radial"]),
            *("–" if row[name] is None else f"{row[name]:.3g}" for name in ("first_rate", "early", "late", "gap")),
        )
        for row in plain_rows(theory)
    )
    text = (
        "The law of every scheme follows from its slots: directions obey θ̇ = (1/s) P A, norms ṙ. The numbers belong to the "
        "flow with identity weights from an orthogonal start, where all pairs of tokens have the same cosine γ: γ̇ at the "
        "start as in Theorem 4.1, rotation per layer in the first and last third in degrees, and 1 − γ at the end.",
    )
    columns = ("scheme", "tokens", "speed factor s", "radial rate ṙ", "γ̇ at 0", "early", "late", "1 − γ at the end")
    return Section("Theory", text, (PageTable("Theory beside the simulation", columns, rows),), findings=findings)


def trained_section(trained: pd.DataFrame, findings: tuple[Finding, ...]) -> Section:
    """What models that add integers came to."""
    rows = tuple((row["scheme"], row["what"], row["value"] or "–", row["source"] or "–") for row in plain_rows(trained))
    text = ("Only what this project trained itself is listed here.",)
    columns = ("scheme", "what", "measured", "source")
    return Section(
        "Models that add integers",
        text,
        (PageTable("Models that add integers", columns, rows),),
        findings=findings,
        folded=True,
    )


def evidence_tables(verdicts: pd.DataFrame, predicted: pd.DataFrame, runs: pd.DataFrame) -> tuple[PageTable, ...]:
    """What trained models came to at this depth, how well criteria had predicted it, and every run."""
    at = tuple(
        (
            row["scheme"], row["verdict"], shown(row["depth"], ".0f"), shown(row["loss"], ".3f"),
            "yes" if row["fast"] else "", _rate(row),
            "–" if row["runs"] is None else f"{row['failed']:.0f} of {row['runs']:.0f}",
            shown(row["first_block_cost"], ".2f"), shown(row["late_share"], ".2f"),
        )
        for row in plain_rows(verdicts)
    )  # fmt: skip
    judged = tuple(
        (row["criterion"], _interval(row), shown(row["weight"], ".2f"), "yes" if row["ranks"] else "no")
        for row in plain_rows(predicted)
    )
    columns = ("scheme", "depth", "rate", "seed", "tokens", "loss", "bits_per_byte", "diverged_step", "late_block_cost")
    every = tuple(tuple(shown(row[name]) for name in columns) for row in plain_rows(runs))
    return (
        PageTable(
            "Trained language models at this depth, or the nearest",
            (
                "scheme", "verdict", "layers", "held-out loss", "lowest loss", "best learning rate", "failed runs",
                "cost of the first block", "relative cost of late blocks",
            ),
            at,
        ),
        PageTable("How well criteria predicted their loss", ("criterion", "rank correlation", "weight", "ranks"), judged),
        PageTable("Every run of these schemes", columns, every),
    )  # fmt: skip


def _rate(row: dict[str, Any]) -> str:
    return "–" if row["rate"] is None else f"{row['rate']:g}{' (at the edge)' * bool(row['at_edge'])}"


def _interval(row: dict[str, Any]) -> str:
    return "–" if row["correlation"] is None else f"{row['correlation']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"


def shown(value: Any, form: str = ".4g") -> str:
    """A value of a plain row for a table; None is what is not known, or no number."""
    return "–" if value is None else format(value, form) if isinstance(value, float) else str(value)
