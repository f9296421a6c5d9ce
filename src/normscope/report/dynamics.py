"""Figures and page sections of simulations and ensembles, from their tables."""

from collections.abc import Sequence

import pandas as pd

from normscope.report.charts import Chart, Line
from normscope.report.figures import save_picture, write_page
from normscope.report.page import PageTable, Section
from normscope.runs import RunFolder


def write_simulation_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Draw the pictures of a simulation and its page."""
    write_page(run, "Tokens as particles", settings, [simulation_section(run, settings)], formats)


def write_ensemble_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Draw the picture of an ensemble and its page."""
    write_page(run, "Ensemble with random weights", settings, [ensemble_section(run, settings)], formats)


def simulation_section(run: RunFolder, settings: str) -> Section:
    """Mean cosine, its rate, the phase plot, and radius and gradients where the run has them."""
    table = run.table("trajectories")
    charts = {
        "cosine": _chart(
            table,
            "time",
            "cosine",
            "Clustering over time",
            "mean cosine γ",
            "1 is collapse: all tokens point one way.",
            settings,
        ),
        "rate": _chart(
            table,
            "time",
            "cosine_rate",
            "Speed of clustering over time",
            "γ̇",
            "Straight lines here are exponential decay; curves that flatten keep moving late.",
            settings,
            log_y=True,
        ),
        "phase": _chart(
            table,
            "cosine",
            "cosine_rate",
            "Phase plot",
            "γ̇",
            "How fast tokens cluster when they are this clustered already.",
            settings,
        ),
        "radius": _chart(
            table,
            "time",
            "radius",
            "Radius over time",
            "mean |x|",
            "A growing radius is what slows a free stream down.",
            settings,
        ),
    }
    if "gradients" in run.tables:
        charts["gradient"] = _chart(
            run.table("gradients"),
            "layer",
            "relative",
            "Gradient by depth",
            "effect of turning an early token",
            "What the last token's final direction still owes to an early token's direction at each layer.",
            settings,
            log_y=True,
        )
    pictures = tuple(save_picture(run, name, chart) for name, chart in charts.items())
    text = (
        "Tokens are particles on a sphere: attention pulls them together, and the scheme regulates how fast. A good scheme "
        "moves them far in early layers and still moves them in late ones.",
    )
    return Section("Tokens as particles", text, (_milestones(run.table("milestones")),), pictures)


def ensemble_section(run: RunFolder, settings: str) -> Section:
    """Mean cosine with its 90% band for each scheme."""
    table = run.table("cosines")
    lines = tuple(
        Line(str(name), list(rows["time"]), list(rows["mean"]), list(rows["low"]), list(rows["high"]))
        for name, rows in table.groupby("scheme", sort=False)
    )
    chart = Chart(
        "Clustering with random weights",
        "time t",
        "mean cosine",
        lines,
        "Lines are means over runs, bands hold 90% of them; all schemes saw the same starts and weights.",
        settings,
    )
    return Section("Random weights", (), (), (save_picture(run, "ensemble", chart),))


def _chart(
    table: pd.DataFrame, x: str, y: str, title: str, y_label: str, caption: str, settings: str, log_y: bool = False
) -> Chart:
    lines = tuple(Line(str(name), list(rows[x]), list(rows[y])) for name, rows in table.groupby("scheme", sort=False))
    x_label = {"time": "time t", "cosine": "mean cosine γ", "layer": "layer"}[x]
    return Chart(title, x_label, y_label, lines, caption, settings, log_y=log_y)


def _milestones(table: pd.DataFrame) -> PageTable:
    rows = tuple((str(row.scheme), _number(row.half), _number(row.ninety)) for row in table.itertuples(index=False))
    return PageTable("Time to collapse", ("scheme", "half way", "90% of the way"), rows)


def _number(value: object) -> str:
    number = float(str(value))
    return "not reached" if number != number else f"{number:.3g}"
