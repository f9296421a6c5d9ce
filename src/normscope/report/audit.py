"""Figures and page of an audit: a model's block, how its tokens move, and what the labs say of it, from the tables."""

from collections.abc import Sequence

import pandas as pd

from normscope.report.charts import Chart, Drawing, Line
from normscope.report.figures import charts_section, save_blocks, with_findings, write_page
from normscope.report.journey import journey_sections
from normscope.report.page import Section
from normscope.report.stability import stability_sections
from normscope.report.subspaces import subspaces_sections
from normscope.report.tables import floats, spans_decades, table_of
from normscope.runs import RunFolder


def write_audit_report(run: RunFolder, model: str, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Draw the pictures of a model's audit and its page."""
    write_page(run, f"Audit of {model}", settings, with_findings(run, audit_sections(run, settings)), formats)


def audit_sections(run: RunFolder, settings: str) -> list[Section]:
    """Block, motion, and the sections of the labs, each if the run has a table for it."""
    own = [section for section in (_block(run, settings), _motion(run, settings), _clusters(run, settings)) if section]
    labs = (stability_sections, subspaces_sections, journey_sections)
    return [*own, *(section for sections in labs for section in sections(run, settings))]


def _block(run: RunFolder, settings: str) -> Section | None:
    table = table_of(run, "blocks")
    if table is None:
        return None
    name = str(table["scheme"].iloc[0])
    caption = "Where the model normalises: attention below, feed-forward layer above; x enters at the bottom."
    text = ("The model's norms, found by running it, as slots of a scheme; the block is drawn from the slots.",)
    return Section(
        f"Its scheme: {name}", text, (), (save_blocks(run, "block", table, f"The block of {name}", caption, settings),)
    )


def _motion(run: RunFolder, settings: str) -> Section | None:
    motion, writes, replay = (table_of(run, name) for name in ("motion", "writes", "replay"))
    if motion is None:
        return None
    text = (
        "Means over tokens without the first of every row, which many models use as a sink for attention. Other schemes get "
        "the lengths and directions of this model's own writes, layer by layer: with a norm of outputs all writes have the "
        "mean length, with a norm of the stream the radius stays what it is at first. They would learn other writes; this is "
        "what their slots alone make of these.",
    )
    charts: dict[str, Drawing | None] = {
        "motion-radius": _radius(motion, settings),
        "motion-angle": _angle(motion, replay, settings),
        "motion-speed": _speed(writes, replay, settings),
    }
    return charts_section(run, "How tokens move", text, charts)


def _radius(motion: pd.DataFrame, settings: str) -> Chart:
    layers, radii, low, high = (floats(motion[name]) for name in ("layer", "radius", "radius_low", "radius_high"))
    return Chart(
        "Length of the residual stream",
        "layer",
        "|x|",
        (Line("this model, 90 % of tokens", layers, radii, low, high),),
        "A stream that grows is what slows late layers down: the same write turns a longer token less.",
        settings,
        log_y=spans_decades(radii),
    )


def _angle(motion: pd.DataFrame, replay: pd.DataFrame | None, settings: str) -> Chart:
    lines = [Line("this model", floats(motion["layer"]), floats(motion["angle"])), *_replayed(replay, "angle")]
    return Chart(
        "Angle turned by each layer",
        "layer",
        "degrees",
        tuple(lines),
        "A line that stays up keeps moving tokens late; the distance to this model's is what another scheme would change.",
        settings,
    )


def _replayed(replay: pd.DataFrame | None, column: str) -> list[Line]:
    groups = () if replay is None else replay.groupby("scheme", sort=False)
    return [Line(f"as {name}", floats(rows["layer"]), floats(rows[column])) for name, rows in groups]


def _speed(writes: pd.DataFrame | None, replay: pd.DataFrame | None, settings: str) -> Chart | None:
    if writes is None or "speed" not in writes:
        return None
    layers = floats(writes["layer"])
    lines = [
        Line("this model, measured", layers, floats(writes["speed"])),
        Line("theory for its scheme", layers, floats(writes["theory"])),
        *_replayed(replay, "speed"),
    ]
    return Chart(
        "Effective speed factor of attention",
        "layer",
        "s",
        tuple(lines),
        "The larger s, the more a token resists being turned, θ̇ = (1/s) P A; measured beside what slots give.",
        settings,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )


def _clusters(run: RunFolder, settings: str) -> Section | None:
    motion = table_of(run, "motion")
    if motion is None:
        return None
    figures = {
        "cosine": ("Mean cosine between tokens", "cosine", "Near 1 all tokens point one way; near 0 they are unrelated."),
        "rank": ("Effective rank of the tokens", "directions", "How many directions the tokens take up; low is clustered."),
    }
    charts: dict[str, Drawing | None] = {}
    for column, (title, unit, caption) in figures.items():
        layers, without, everything = (floats(motion[name]) for name in ("layer", column, f"{column}_all"))
        lines = (Line("without the first token", layers, without), Line("with the first token, the sink", layers, everything))
        charts[f"motion-{column}"] = Chart(title, "layer", unit, lines, caption, settings)
    return charts_section(run, "How tokens cluster", (), charts)
