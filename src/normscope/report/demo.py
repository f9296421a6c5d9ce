"""The demo's report page, from the tables of its parts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from normscope.report.audit import audit_facts, audit_sections
from normscope.report.dynamics import ensemble_section, simulation_section
from normscope.report.theorems import theorem_sections
from normscope.report.training import training_section
from normscope.report.write import Report, findings_of, tables_of, write_report
from normscope.results import Blocks, PageTable, Section
from normscope.results.tables import Tables, needed_table
from normscope.runs import RunFolder, plain_rows

_SLOTS = ("input", "heads", "output", "step", "carry", "stream")
_PARTS = ("audit", "schemes", "training", "ledger")


def write_demo_report(run: RunFolder, settings: Mapping[str, str], formats: Sequence[str] = ("html",)) -> None:
    """Write the page of the parts ``audit``, ``schemes``, ``training`` and ``ledger``."""
    write_report(run.path, demo_report({name: tables_of(run.part(name)) for name in _PARTS}, settings), formats)


def demo_report(parts: Mapping[str, Tables], settings: Mapping[str, str]) -> Report:
    """The page; ``settings`` describes each part by its name, with ``simulation`` and ``ensemble`` in place of ``schemes``."""
    audit, schemes, training = parts["audit"], parts["schemes"], parts["training"]
    metrics = {str(name): rows for name, rows in needed_table(training, "metrics").groupby("scheme", sort=False)}
    sections = [
        *audit_sections(audit, settings["audit"]),
        _schemes_section(schemes),
        simulation_section(schemes, settings["simulation"]),
        ensemble_section(schemes, settings["ensemble"]),
        replace(training_section(metrics, settings["training"]), title="Training, scheme by scheme"),
        *theorem_sections(parts["ledger"], settings["ledger"]),
    ]
    return Report(
        "normscope: what normalization does to a transformer's geometry",
        f"First an audit of {settings['audit']}; then six schemes in theory and in simulation; then a tiny training; then the "
        "published claims about them, each verified numerically.",
        sections,
        audit_facts(audit),
        findings_of(audit),
        "The tables of this page lie in folders beside it as Parquet files; normscope audit MODEL measures yours.",
    )


def _schemes_section(tables: Tables) -> Section:
    schemes, blocks = needed_table(tables, "schemes"), needed_table(tables, "blocks")
    slots = schemes[["name", *_SLOTS, "users"]].replace({slot: {"none": "–"} for slot in _SLOTS})
    laws = schemes[["name", "update", "flow", "speed", "radial", "attention"]]
    return Section(
        "The schemes side by side",
        (
            "Every residual sublayer f is x ← stream(carry·x + step·output(f(input(x)))), and inside attention "
            "q, k, v ← heads(q, k, v). t is the layer, 0 the first, and T their number.",
            "Write x_j = r_j θ_j. In every scheme the directions obey θ̇_j = (1/s_j) P_θj A_j: the speed factor s_j is the "
            "divisor between an update and the rotation it causes, and the radial rate ṙ_j is how fast the residual stream "
            "norm grows.",
        ),
        (
            _page_table("Slots of the attention sublayer", slots, {"name": "scheme", "users": "who uses it"}),
            _page_table(
                "What follows from the slots",
                laws,
                {"name": "scheme", "speed": "speed s_j", "radial": "radial ṙ_j", "attention": "A_j taken at"},
            ),
        ),
        {
            "blocks": Blocks(
                "Blocks",
                plain_rows(blocks),
                "Where each scheme normalises: a norm on the residual stream fixes its norm, a norm at the end of a branch "
                "fixes the size of the update.",
                "Drawn from the slots; attention below, feed-forward layer above.",
            )
        },
        name="schemes",
    )


def _page_table(caption: str, table: pd.DataFrame, names: dict[str, str]) -> PageTable:
    named = table.rename(columns=names)
    return PageTable(caption, tuple(named.columns), tuple(tuple(map(str, row)) for row in named.itertuples(index=False)))
