"""Sections of an audit: a model's block, how its hidden states move, and the measures of its attention, from the tables."""

from collections.abc import Sequence

import pandas as pd

from normscope.report.journey import journey_sections
from normscope.report.stability import stability_sections
from normscope.report.subspaces import subspaces_sections
from normscope.report.write import Report, findings_of, tables_of, write_report
from normscope.results import Blocks, Chart, Figure, Line, Section
from normscope.results.tables import Tables, figures_section, floats, spans_decades, table_of
from normscope.runs import RunFolder, plain_rows


def write_audit_report(run: RunFolder, model: str, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page of a model's audit."""
    write_report(run.path, audit_report(tables_of(run), model, settings), formats)


def audit_report(tables: Tables, model: str, settings: str) -> Report:
    """The page: key figures, the findings that matter, and all sections."""
    sections = audit_sections(tables, settings)
    return Report(f"Audit of {model}", settings, sections, audit_facts(tables), findings_of(tables))


def audit_sections(tables: Tables, settings: str) -> list[Section]:
    """Block, motion, clustering, and the sections of attention's measures, each if there is a table for it."""
    first = [
        section for section in (_block(tables, settings), _motion(tables, settings), _clusters(tables, settings)) if section
    ]
    others = (stability_sections, subspaces_sections, journey_sections)
    return [*first, *(section for sections in others for section in sections(tables, settings))]


def audit_facts(tables: Tables) -> list[tuple[str, str]]:
    """Key figures: scheme, layers, heads, growth and rotation, as far as they were measured."""
    blocks, motion, sparsity = (table_of(tables, name) for name in ("blocks", "motion", "sparsity"))
    facts = [] if blocks is None else [("scheme", str(blocks["scheme"].iloc[0]))]
    if motion is not None:
        norms, angles = floats(motion["radius"]), [angle for angle in floats(motion["angle"]) if angle == angle]
        facts += [("layers", f"{len(norms) - 1}"), ("residual stream norm, last / first", f"{norms[-1] / norms[0]:.3g} ×")]
        facts.append(("median rotation per layer", f"{pd.Series(angles).median():.3g}°"))
        facts.append(("mean cosine after the last layer", f"{floats(motion['cosine'])[-1]:.2f}"))
    if sparsity is not None:
        facts.insert(min(2, len(facts)), ("query heads per layer", f"{sparsity['head'].nunique()}"))
    return facts


def _block(tables: Tables, settings: str) -> Section | None:
    table = table_of(tables, "blocks")
    if table is None:
        return None
    name = str(table["scheme"].iloc[0])
    caption = "Where the model normalises: attention below, feed-forward layer above; x enters at the bottom."
    text = ("Where the norms are was observed by running the model; the block is drawn from the slots of its scheme.",)
    blocks = Blocks(f"The block of {name}", plain_rows(table), caption, settings)
    return Section(f"Scheme: {name}", text, figures={"block": blocks}, name="scheme")


def _motion(tables: Tables, settings: str) -> Section | None:
    motion, updates, replay = (table_of(tables, name) for name in ("motion", "writes", "replay"))
    if motion is None:
        return None
    text = (
        "Means over tokens without the first of every sequence, which many models use as an attention sink. Hidden states are "
        "those before each layer; the last one is after the last layer.",
        "Other schemes replay this model's recorded sublayer outputs through other norm placements, without retraining: with "
        "a norm of outputs all updates have the mean norm, with a norm on the residual stream its norm stays what it is at "
        "first. A model trained with such a scheme would have learnt other updates.",
    )
    figures: dict[str, Figure | None] = {
        "motion-radius": _norms(motion, settings),
        "motion-angle": _angle(motion, replay, settings),
        "motion-speed": _speed(updates, replay, settings),
    }
    return figures_section("How hidden states move", text, figures, name="motion")


def _norms(motion: pd.DataFrame, settings: str) -> Chart:
    layers, norms, low, high = (floats(motion[name]) for name in ("layer", "radius", "radius_low", "radius_high"))
    return Chart(
        "Residual stream norm",
        "before layer",
        "|x|",
        (Line("this model, 90 % of tokens", layers, norms, low, high),),
        "A growing norm is what damps late layers: the same update rotates a longer vector less.",
        settings,
        log_y=spans_decades(norms),
    )


def _angle(motion: pd.DataFrame, replay: pd.DataFrame | None, settings: str) -> Chart:
    lines = [Line("this model", floats(motion["layer"]), floats(motion["angle"])), *_replayed(replay, "angle")]
    return Chart(
        "Rotation per layer",
        "layer",
        "degrees",
        tuple(lines),
        "0° is no change, 90° an unrelated direction. Other lines replay this model's sublayer outputs in other schemes.",
        settings,
    )


def _replayed(replay: pd.DataFrame | None, column: str) -> list[Line]:
    groups = () if replay is None else replay.groupby("scheme", sort=False)
    return [Line(f"as {name}", floats(rows["layer"]), floats(rows[column])) for name, rows in groups]


def _speed(updates: pd.DataFrame | None, replay: pd.DataFrame | None, settings: str) -> Chart | None:
    if updates is None or "speed" not in updates:
        return None
    layers = floats(updates["layer"])
    lines = [
        Line("this model, measured", layers, floats(updates["speed"])),
        Line("theory for its scheme", layers, floats(updates["theory"])),
        *_replayed(replay, "speed"),
    ]
    return Chart(
        "Damping of attention: the speed factor s",
        "layer",
        "s",
        tuple(lines),
        "The part of attention's output perpendicular to the residual rotates it by that length divided by s.",
        settings,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )


def _clusters(tables: Tables, settings: str) -> Section | None:
    motion = table_of(tables, "motion")
    if motion is None:
        return None
    quantities = {
        "cosine": (
            "Mean cosine between tokens",
            "cosine",
            "At 1 all hidden states point one way (rank collapse); near 0 they are unrelated.",
        ),
        "rank": ("Participation ratio of the hidden states", "directions", "How many directions the hidden states occupy."),
    }
    figures: dict[str, Figure | None] = {}
    for column, (title, unit, caption) in quantities.items():
        layers, without, everything = (floats(motion[name]) for name in ("layer", column, f"{column}_all"))
        lines = (Line("without the first token", layers, without), Line("with the first token, the sink", layers, everything))
        figures[f"motion-{column}"] = Chart(title, "before layer", unit, lines, caption, settings)
    return figures_section("How tokens align", (), figures, name="clusters")
