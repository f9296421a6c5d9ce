"""The demo's report page, from the tables of its parts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from normscope.report.audit import audit_sections
from normscope.report.dynamics import ensemble_section, simulation_section
from normscope.report.figures import save_blocks, with_findings, write_page
from normscope.report.page import PageTable, Section
from normscope.report.theorems import theorem_sections
from normscope.report.training import training_section
from normscope.runs import RunFolder

_SLOTS = ("input", "heads", "output", "step", "carry", "stream")


def write_demo_report(run: RunFolder, settings: Mapping[str, str], formats: Sequence[str] = ("html",)) -> None:
    """Draw the tables of the parts ``audit``, ``schemes``, ``training`` and ``ledger``, and write the page.

    ``settings`` says with which settings they came about, by the name of the part; in place of ``schemes`` it has those of
    ``simulation`` and ``ensemble``.
    """
    audit, schemes, training, ledger = (run.part(name) for name in ("audit", "schemes", "training", "ledger"))
    metrics = {str(name): rows for name, rows in training.table("metrics").groupby("scheme", sort=False)}
    compared = [
        _schemes_section(schemes.table("schemes"), schemes.table("blocks"), schemes),
        simulation_section(schemes, settings["simulation"]),
        ensemble_section(schemes, settings["ensemble"]),
    ]
    learned = replace(training_section(metrics, training, settings["training"]), title="Training, scheme by scheme")
    write_page(
        run,
        "normscope: what normalization does to a transformer's geometry",
        "A model as it is, the schemes that it might have had, how two of them learn, and what is proved about them. First the "
        f"audit of {settings['audit']}; then six schemes in theory and in motion; then a tiny training; then the ledger.",
        [
            *_within("audit", with_findings(audit, audit_sections(audit, settings["audit"]))),
            *_within("schemes", compared),
            *_within("training", [learned]),
            *_within("ledger", theorem_sections(ledger, settings["ledger"])),
        ],
        formats,
        footer="The tables behind this page lie in folders beside it as Parquet files; normscope audit MODEL looks at yours.",
    )


def _within(part: str, sections: Sequence[Section]) -> list[Section]:
    """Sections whose figures lie in a folder of the run."""
    return [
        replace(
            section,
            pictures=tuple(
                replace(
                    picture,
                    interactive=f"{part}/{picture.interactive}" if picture.interactive else None,
                    data=f"{part}/{picture.data}" if picture.data else None,
                )
                for picture in section.pictures
            ),
        )
        for section in sections
    ]


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
