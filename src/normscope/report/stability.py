"""Sections of stability: spread of norms, noise, circuit collapse and near-one-hot attention, from their tables."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from normscope.report.write import Report, findings_of, tables_of, write_report
from normscope.results import Chart, Figure, HeatMap, Line, Section
from normscope.results.conventions import DRAWN_HEADS, NOISE
from normscope.results.tables import (
    Tables,
    figures_section,
    floats,
    grid,
    head_map,
    spans_decades,
    table_of,
    together,
    token_name,
)
from normscope.runs import RunFolder

_NAMED_LAYERS = 8  # more layers than these share one name in a legend
_LABELS = {"accuracy": "accuracy in %", "loss": "loss"}


def write_stability_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page of a measurement of stability."""
    tables = tables_of(run)
    sections = stability_sections(tables, settings)
    write_report(run.path, Report("Stability of attention", settings, sections, findings=findings_of(tables)), formats)


def stability_sections(tables: Tables, settings: str) -> list[Section]:
    """Spread, noise, collapse, sparsity and attention maps, each if there is a table for it."""
    sections = [section(tables, settings) for section in (_spread, _noise, _collapse, _sparsity, _maps)]
    return [section for section in sections if section]


def _spread(tables: Tables, settings: str) -> Section | None:
    table = table_of(tables, "spread")
    if table is None:
        return None
    whole = table[table["head"].isna()].sort_values("layer")
    layers = floats(whole["layer"])
    lines = [Line("whole layer", layers, [1.0] * len(layers))]
    for share in (50, 90, 99):
        low, high = floats(whole[f"low{share}"]), floats(whole[f"high{share}"])
        lines += [Line("whole layer", layers, low, low, high, thin=True), Line("whole layer", layers, high, thin=True)]
    lines += [Line("±20%", layers, [limit] * len(layers)) for limit in (0.8, 1.2)]
    lines += _head_limits(table[table["head"].notna()].sort_values("layer"))
    chart = Chart(
        "Spread of hidden state norms",
        "layer",
        "norm / median norm",
        tuple(lines),
        "Bands hold 50, 90 and 99% of a layer's attention; where they are narrow, the states that it reads lie on a sphere.",
        settings,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )
    text = (
        "All heads share one divisor, the residual norm; they are independent only if it does not depend on what other heads "
        "read. Hidden states before each layer, weighted by the attention they receive. Published value for Pre-Norm: 90% "
        "within ±20% of the median.",
    )
    return figures_section("Spread of hidden state norms", text, {"spread": chart}, name="spread")


def _head_limits(heads: pd.DataFrame) -> list[Line]:
    """The 90% limits of every head; of many heads only the outermost, layer by layer."""
    groups = [rows for _, rows in heads.groupby("head")]
    if not groups:
        return []
    if len(groups) <= DRAWN_HEADS:
        return [together("single heads, 90%", groups, "layer", column) for column in ("low90", "high90")]
    widest = heads.groupby("layer", as_index=False).agg({"low90": "min", "high90": "max"})
    return [together("outermost heads, 90%", [widest], "layer", column) for column in ("low90", "high90")]


def _noise(tables: Tables, settings: str) -> Section | None:
    table = table_of(tables, "noise")
    if table is None:
        return None
    table = table.assign(accuracy=100 * table["accuracy"], accuracy_stderr=100 * table["accuracy_stderr"])
    clean, noisy = table[table["noise"] == 0], table[table["noise"] > 0].sort_values("noise", kind="stable")
    everywhere = noisy[noisy["layer"].isna()]
    charts: dict[str, Figure | None] = {
        f"noise-{column}": _noise_chart(everywhere, clean, column, settings) for column in ("accuracy", "loss")
    }
    for (perturbed, where), rows in noisy[noisy["layer"].notna()].groupby(["perturbed", "where"], sort=False):
        name = f"noise-layers-{perturbed}-{where}".replace(",", "")
        charts[name] = _layer_noise_chart(rows, clean, f"{perturbed}, {where}", settings)
    text = (
        "The norms of queries q, keys k and value outputs m are multiplied by 1 + κ with random κ of the given RMS: in all "
        "attention rows, or only in those that are near-one-hot (sparse) or are not. Published value for Pre-Norm: noise of 1% "
        "everywhere costs 10 points of accuracy or more. Bands are one standard error.",
    )
    return figures_section("Sensitivity to noise", text, charts, name="noise")


def _noise_chart(rows: pd.DataFrame, clean: pd.DataFrame, column: str, settings: str) -> Chart | None:
    """Accuracy or loss against noise in all layers, a line for what is perturbed and where."""
    if rows[column].isna().all():
        return None
    groups = rows.groupby(["perturbed", "where"], sort=False)
    lines = [_banded(f"{perturbed}, {where}", group, "noise", column) for (perturbed, where), group in groups]
    lines += _clean_lines(clean, column, floats(rows["noise"].drop_duplicates()))
    return Chart(
        f"{column.capitalize()} under noise in all layers",
        "RMS of the relative noise",
        _LABELS[column],
        tuple(lines),
        "A line that leaves the clean value early belongs to norms that have to be precise.",
        settings,
        log_x=True,
        log_y=column == "loss" and spans_decades([value for line in lines for value in line.y]),
    )


def _layer_noise_chart(rows: pd.DataFrame, clean: pd.DataFrame, perturbed: str, settings: str) -> Chart:
    """Accuracy against the layer that has the noise, a line for each level; loss if accuracy was not measured."""
    column = "loss" if rows["accuracy"].isna().all() else "accuracy"
    rows = rows.sort_values("layer")
    lines = [_banded(f"noise {level:g}", group, "layer", column) for level, group in rows.groupby("noise")]
    lines += _clean_lines(clean, column, floats(rows["layer"].drop_duplicates()))
    return Chart(
        f"{column.capitalize()} with noise in one layer at a time ({perturbed})",
        "layer with noise",
        _LABELS[column],
        tuple(lines),
        "Layers where a line is far from the clean value depend on their norms the most.",
        settings,
    )


def _collapse(tables: Tables, settings: str) -> Section | None:
    collapse, margins = table_of(tables, "collapse"), table_of(tables, "margins")
    if collapse is None and margins is None:
        return None
    text = (
        "A near-one-hot attention row has its largest weight at 0.95 or more. Its circuit collapses if noise on q and k "
        "changes its top key (loose), to one where the row is near-one-hot again (strict). Noise is in one layer at a time, "
        "on clean inputs. Published value for Pre-Norm: 1% collapse at a noise of 11%. Bands are one standard error; a "
        "logarithmic axis leaves out points at zero.",
    )
    if all(table is None or not table["sparse"].any() for table in (collapse, margins)):
        return Section(
            "Circuit collapse", (*text, "No attention row was near-one-hot, so none could collapse."), name="collapse"
        )
    charts: dict[str, Figure | None] = {}
    if collapse is not None:
        charts |= {"collapse": _collapse_chart(collapse, settings), "collapse-heads": _collapse_map(collapse, settings)}
    if margins is not None:
        charts["margins"] = head_map(
            margins,
            "margin",
            "Smallest noise that can collapse a head",
            "margin (bound on relative noise)",
            "Dark heads have a row whose top key the least noise can change; empty cells have no near-one-hot row.",
            settings,
            log=spans_decades(floats(margins["margin"])),
        )
    return figures_section("Circuit collapse", text, charts, name="collapse")


def _collapse_chart(table: pd.DataFrame, settings: str) -> Chart:
    """Probability against noise: the whole model by both definitions, and every layer by the loose one."""
    rows = table[(table["noise"] > 0) & table["head"].isna()].sort_values("noise", kind="stable")
    rows = rows.rename(columns={"stderr": "probability_stderr"})
    whole, layers = rows[rows["layer"].isna()], rows[rows["layer"].notna() & (rows["definition"] == "loose")]
    lines = [
        _banded(f"whole model, {name}", group, "noise", "probability")
        for name, group in whole.groupby("definition", sort=False)
    ]
    groups = {int(str(layer)): group for layer, group in layers.groupby("layer")}
    if len(groups) > _NAMED_LAYERS:
        lines.append(together("single layers, loose", groups.values(), "noise", "probability"))
    else:
        lines += [_banded(f"layer {layer}, loose", group, "noise", "probability") for layer, group in groups.items()]
    return Chart(
        "Circuit collapse under noise",
        "RMS of the relative noise",
        "share of near-one-hot rows",
        tuple(lines),
        "How many near-one-hot rows change their top key; the further left a line rises, the less noise it takes.",
        settings,
        log_x=True,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )


def _collapse_map(table: pd.DataFrame, settings: str) -> HeatMap | None:
    rows = table[(table["noise"] > 0) & (table["definition"] == "loose")]
    if rows.empty:
        return None
    level = min(rows["noise"], key=lambda noise: abs(noise - NOISE))
    return head_map(
        rows[rows["noise"] == level],
        "probability",
        f"Circuit collapse by head at a noise of {level:.3g}",
        "share of near-one-hot rows",
        "Bright heads change their top key; empty cells have no near-one-hot row.",
        settings,
    )


def _sparsity(tables: Tables, settings: str) -> Section | None:
    sparsity, maxima = table_of(tables, "sparsity"), table_of(tables, "maxima")
    if sparsity is None and maxima is None:
        return None
    text: tuple[str, ...] = ()
    charts: dict[str, Figure | None] = {}
    if sparsity is not None:
        text = _sparse_shares(sparsity)
        charts["sparsity"] = head_map(
            sparsity,
            "share",
            "Share of near-one-hot attention by head",
            "share of attention rows",
            "Bright heads nearly always attend to a single key; dark ones average over several.",
            settings,
        )
    if maxima is not None:
        charts["maxima"] = _maxima_chart(maxima[maxima["layer"].isna() & maxima["head"].isna()], settings)
    return figures_section("Near-one-hot attention", text, charts, name="sparsity")


def _sparse_shares(table: pd.DataFrame) -> tuple[str, ...]:
    whole = table[table["layer"].isna() & table["head"].isna()]
    columns = (floats(whole[name]) for name in ("distributions", "share", "non_sparse_share", "mean_max"))
    return tuple(
        f"Of {count:,.0f} attention rows {100 * sparse:.1f} % are near-one-hot and {100 * other:.1f} % clearly are not; the "
        f"largest weight is {largest:.3f} on average."
        for count, sparse, other, largest in zip(*columns, strict=True)
    )


def _maxima_chart(table: pd.DataFrame, settings: str) -> Chart | None:
    """The histogram as an outline with its area filled."""
    if table.empty:
        return None
    bins = table.sort_values("low")
    edges = [edge for pair in zip(floats(bins["low"]), floats(bins["high"]), strict=True) for edge in pair]
    counts = [count for count in floats(bins["count"]) for _ in ("low", "high")]
    return Chart(
        "Largest weight of an attention row",
        "largest attention weight",
        "attention rows",
        (Line("whole model", edges, counts, [0.0] * len(counts), counts),),
        "A peak at 1 is near-one-hot attention: rows whose top key noise can change.",
        settings,
        log_y=spans_decades(counts),
    )


def _maps(tables: Tables, settings: str) -> Section | None:
    table, tokens = table_of(tables, "maps"), table_of(tables, "tokens")
    if table is None:
        return None
    names = {} if tokens is None else dict(zip(tokens["position"], map(token_name, tokens["text"]), strict=True))
    charts: dict[str, Figure | None] = {}
    for (layer, head), rows in table.groupby(["layer", "head"], sort=False):
        queries, keys, weights = grid(rows, "query", "key", "weight")
        charts[f"map-{layer}-{head}"] = HeatMap(
            f"Attention of head {head} in layer {layer}",
            "key",
            "query",
            "weight",
            [names.get(key, str(key)) for key in keys],
            [names.get(query, str(query)) for query in queries],
            weights,
            "Each row is one query position; a row with one bright cell is near-one-hot.",
            settings,
            limits=(0.0, 1.0),
            from_top=True,
            of_head=(int(str(layer)), int(str(head))),
        )
    return figures_section("Attention maps", (), charts, name="maps")


def _banded(name: str, rows: pd.DataFrame, x: str, column: str) -> Line:
    """A line with a band of one standard error."""
    middle, error = np.array(floats(rows[column])), np.array(floats(rows[f"{column}_stderr"]))
    low = np.maximum(middle - error, 0.1 * middle)  # a band that nearly reaches 0 would stretch a logarithmic axis
    return Line(name, floats(rows[x]), middle.tolist(), low.tolist(), (middle + error).tolist())


def _clean_lines(clean: pd.DataFrame, column: str, x: list[float]) -> list[Line]:
    """The value without noise, all along the axis."""
    return [Line("clean", x, [value] * len(x)) for value in floats(clean[column])[:1]]
