"""Sections of simulations and ensembles, from their tables."""

from collections.abc import Sequence

import pandas as pd

from normscope.report.write import Report, tables_of, write_report
from normscope.results import Chart, Figure, Line, PageTable, Section
from normscope.results.tables import Tables, figures_section, needed_table
from normscope.runs import RunFolder

_LABELS = {"time": "time t", "cosine": "mean cosine γ", "layer": "layer"}
# Figure → columns across and up, title, label, caption, whether the axis up is logarithmic.
_CURVES = {
    "cosine": ("time", "cosine", "Clustering over time", "mean cosine γ", "1 is collapse: all tokens point one way.", False),
    "rate": (
        "time",
        "cosine_rate",
        "Speed of clustering over time",
        "γ̇",
        "Straight lines are exponential decay; curves that flatten keep moving late.",
        True,
    ),
    "phase": (
        "cosine",
        "cosine_rate",
        "Phase plot",
        "γ̇",
        "How fast tokens cluster when they are this clustered already.",
        False,
    ),
    "radius": ("time", "radius", "Norm over time", "mean |x|", "A growing norm is what damps the motion.", False),
}


def write_simulation_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page of a simulation."""
    write_report(run.path, Report("Tokens as particles", settings, [simulation_section(tables_of(run), settings)]), formats)


def write_ensemble_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page of an ensemble."""
    sections = [ensemble_section(tables_of(run), settings)]
    write_report(run.path, Report("Ensemble with random weights", settings, sections), formats)


def simulation_section(tables: Tables, settings: str) -> Section:
    """Mean cosine, its rate, the phase plot, norms, and gradients where there are any."""
    table = needed_table(tables, "trajectories")
    figures: dict[str, Figure | None] = {name: _chart(table, settings, *curve) for name, curve in _CURVES.items()}
    if "gradients" in tables:
        figures["gradient"] = _chart(
            tables["gradients"],
            settings,
            "layer",
            "relative",
            "Gradient by depth",
            "effect of rotating an early token",
            "How much the last token's final direction depends on an early token's direction before each layer.",
            True,
        )
    text = (
        "Tokens are particles on a sphere: attention pulls them together, and the scheme regulates how fast. A good scheme "
        "moves them far in early layers and still moves them in late ones.",
    )
    return figures_section("Tokens as particles", text, figures, [_milestones(needed_table(tables, "milestones"))])


def ensemble_section(tables: Tables, settings: str) -> Section:
    """Mean cosine with its 90 % band for each scheme."""
    lines = tuple(
        Line(str(name), list(rows["time"]), list(rows["mean"]), list(rows["low"]), list(rows["high"]))
        for name, rows in needed_table(tables, "cosines").groupby("scheme", sort=False)
    )
    chart = Chart(
        "Clustering with random weights",
        "time t",
        "mean cosine",
        lines,
        "Lines are means over runs, bands hold 90 % of them; all schemes had the same starts and weights.",
        settings,
    )
    return Section("Random weights", figures={"ensemble": chart})


def _chart(table: pd.DataFrame, settings: str, x: str, y: str, title: str, label: str, caption: str, log: bool) -> Chart:
    lines = tuple(Line(str(name), list(rows[x]), list(rows[y])) for name, rows in table.groupby("scheme", sort=False))
    return Chart(title, _LABELS[x], label, lines, caption, settings, log_y=log)


def _milestones(table: pd.DataFrame) -> PageTable:
    rows = tuple((str(row.scheme), _number(row.half), _number(row.ninety)) for row in table.itertuples(index=False))
    return PageTable("Time to collapse", ("scheme", "half way", "90% of the way"), rows)


def _number(value: object) -> str:
    number = float(str(value))
    return "not reached" if number != number else f"{number:.3g}"
