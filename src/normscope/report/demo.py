"""The demo's report page, from the tables of its run folder."""

import pandas as pd

from normscope.report.dynamics import ensemble_section, simulation_section
from normscope.report.figures import save_blocks, write_page
from normscope.report.page import PageTable, Section
from normscope.report.stability import stability_sections
from normscope.report.training import evaluation_section, training_section
from normscope.report.words import words_sections
from normscope.results import RunFolder

_SLOTS = ("input", "heads", "output", "step", "carry", "stream")


def write_demo_report(run: RunFolder, simulation: str, ensemble: str, training: str, evaluation: str, stability: str) -> None:
    """Draw the run's tables and write ``report.html`` into its folder; the texts say with which settings they came about."""
    metrics = {str(name): rows for name, rows in run.table("metrics").groupby("scheme", sort=False)}
    write_page(
        run,
        "normscope: what normalization does to a transformer's geometry",
        "A scheme is a handful of slots: where a block normalises, how large it writes, how much of the residual it keeps. "
        "What each scheme does to tokens follows from them: how fast they turn, grow and cluster.",
        [
            _schemes_section(run.table("schemes"), run.table("blocks"), run),
            simulation_section(run, simulation),
            ensemble_section(run, ensemble),
            training_section(metrics, run, training),
            evaluation_section(run, evaluation),
            *stability_sections(run, stability),
            *words_sections(run, stability),
        ],
        footer="The tables behind this page lie beside it as Parquet files; normscope schemes NAME shows one scheme in full.",
    )


def _schemes_section(schemes: pd.DataFrame, blocks: pd.DataFrame, run: RunFolder) -> Section:
    slots = schemes[["name", *_SLOTS, "users"]].replace({slot: {"none": "–"} for slot in _SLOTS})
    laws = schemes[["name", "update", "flow", "speed", "radial", "attention"]]
    return Section(
        "The schemes side by side",
        (
            "Every residual sublayer f is x ← stream(carry·x + step·output(f(input(x)))), and inside attention "
            "q, k, v ← heads(q, k, v). t is the layer, 0 the first, and T their number.",
            "Write x_j = r_j θ_j. In every scheme the directions obey θ̇_j = (1/s_j) P_θj A_j: the speed factor s_j says how "
            "much a token resists being turned, and the radial rate ṙ_j how fast that resistance grows with depth.",
        ),
        tables=(
            _page_table("Slots of the attention sublayer", slots, {"name": "scheme", "users": "who uses it"}),
            _page_table(
                "What follows from the slots",
                laws,
                {"name": "scheme", "speed": "speed s_j", "radial": "radial ṙ_j", "attention": "A_j taken at"},
            ),
        ),
        pictures=(
            save_blocks(
                run,
                "blocks",
                blocks,
                "Blocks",
                "Where each scheme normalises: a norm on the trunk fixes the radius, a norm at the end of a branch fixes the "
                "size of the write.",
                "Drawn from the slots; attention below, feed-forward layer above.",
            ),
        ),
    )


def _page_table(caption: str, table: pd.DataFrame, names: dict[str, str]) -> PageTable:
    named = table.rename(columns=names)
    return PageTable(caption, tuple(named.columns), tuple(tuple(map(str, row)) for row in named.itertuples(index=False)))
