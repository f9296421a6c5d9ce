"""Figures and page sections of stability: spread of norms, noise, circuit collapse and sparsity, from their tables."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from normscope.report.charts import Chart, Drawing, HeatMap, Line
from normscope.report.figures import charts_section, with_findings, write_page
from normscope.report.page import Section
from normscope.report.tables import floats, grid, head_map, spans_decades, table_of, together, token_name
from normscope.runs import RunFolder

_LEVEL = 0.1  # RMS noise at which heads are compared
_DRAWN_HEADS = 12  # of more heads than these single lines could not be told apart
_NAMED_LAYERS = 8  # more layers than these share one name in a legend
_LABELS = {"accuracy": "accuracy in %", "loss": "loss"}


def write_stability_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Draw the pictures of a measurement of stability and its page."""
    sections = with_findings(run, stability_sections(run, settings))
    write_page(run, "Stability of attention", settings, sections, formats)


def stability_sections(run: RunFolder, settings: str) -> list[Section]:
    """Spread, noise, collapse, sparsity and attention maps, each if the run has a table for it."""
    sections = [section(run, settings) for section in (_spread, _noise, _collapse, _sparsity, _maps)]
    return [section for section in sections if section]


def _spread(run: RunFolder, settings: str) -> Section | None:
    table = table_of(run, "spread")
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
        "Spread of embedding norms",
        "layer",
        "norm / median norm",
        tuple(lines),
        "Bands hold 50, 90 and 99% of a layer's attention; where they are narrow, embeddings lie on a sphere.",
        settings,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )
    text = (
        "Heads that read different subspaces through a norm at their input stay independent only if embeddings lie on spheres: "
        "then their norms do not vary. Published for Pre-Norm: 90% within ±20% of the median.",
    )
    return charts_section(run, "Spread of embedding norms", text, {"spread": chart})


def _head_limits(heads: pd.DataFrame) -> list[Line]:
    """The 90% limits of every head; of many heads only the outermost, layer by layer."""
    groups = [rows for _, rows in heads.groupby("head")]
    if not groups:
        return []
    if len(groups) <= _DRAWN_HEADS:
        return [together("single heads, 90%", groups, "layer", column) for column in ("low90", "high90")]
    widest = heads.groupby("layer", as_index=False).agg({"low90": "min", "high90": "max"})
    return [together("outermost heads, 90%", [widest], "layer", column) for column in ("low90", "high90")]


def _noise(run: RunFolder, settings: str) -> Section | None:
    table = table_of(run, "noise")
    if table is None:
        return None
    table = table.assign(accuracy=100 * table["accuracy"], accuracy_stderr=100 * table["accuracy_stderr"])
    clean, noisy = table[table["noise"] == 0], table[table["noise"] > 0].sort_values("noise", kind="stable")
    everywhere = noisy[noisy["layer"].isna()]
    charts: dict[str, Drawing | None] = {
        f"noise-{column}": _noise_chart(everywhere, clean, column, settings) for column in ("accuracy", "loss")
    }
    for (perturbed, where), rows in noisy[noisy["layer"].notna()].groupby(["perturbed", "where"], sort=False):
        name = f"noise-layers-{perturbed}-{where}".replace(",", "")
        charts[name] = _layer_noise_chart(rows, clean, f"{perturbed}, {where}", settings)
    text = (
        "The norms of queries q, keys k and messages m are multiplied by 1 + κ with random κ of the given RMS: at all "
        "distributions, or only at those that are sparse or are not. Published for Pre-Norm: noise of 1% everywhere costs "
        "10 points of accuracy or more. Bands are one standard error.",
    )
    return charts_section(run, "Sensitivity to noise", text, charts)


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
        "A line that leaves the clean value early belongs to norms that have to be exact.",
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


def _collapse(run: RunFolder, settings: str) -> Section | None:
    collapse, margins = table_of(run, "collapse"), table_of(run, "margins")
    if collapse is None and margins is None:
        return None
    text = (
        "A circuit collapses if noise on q and k makes a sparse distribution select another token (loose), and be sparse there "
        "too (strict). Noise is in one layer at a time, on clean inputs. Published for Pre-Norm: 1% collapse at a noise of "
        "11%. Bands are one standard error; a logarithmic axis leaves out points at zero.",
    )
    if all(table is None or not table["sparse"].any() for table in (collapse, margins)):
        return Section("Circuit collapse", (*text, "No attention distribution was sparse, so none could collapse."))
    charts: dict[str, Drawing | None] = {}
    if collapse is not None:
        charts |= {"collapse": _collapse_chart(collapse, settings), "collapse-heads": _collapse_map(collapse, settings)}
    if margins is not None:
        charts["margins"] = head_map(
            margins,
            "margin",
            "Smallest noise that can collapse a head",
            "margin (relative noise)",
            "Dark heads have a distribution that the least noise can move; empty cells have no sparse distribution.",
            settings,
            log=spans_decades(floats(margins["margin"])),
        )
    return charts_section(run, "Circuit collapse", text, charts)


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
        "share of sparse distributions",
        tuple(lines),
        "How many sparse distributions select another token; the further left a line rises, the less noise it takes.",
        settings,
        log_x=True,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )


def _collapse_map(table: pd.DataFrame, settings: str) -> HeatMap | None:
    rows = table[(table["noise"] > 0) & (table["definition"] == "loose")]
    if rows.empty:
        return None
    level = min(rows["noise"], key=lambda noise: abs(noise - _LEVEL))
    return head_map(
        rows[rows["noise"] == level],
        "probability",
        f"Circuit collapse by head at a noise of {level:.3g}",
        "share of sparse distributions",
        "Bright heads are the ones that lose their token; empty cells have no sparse distribution.",
        settings,
    )


def _sparsity(run: RunFolder, settings: str) -> Section | None:
    sparsity, maxima = table_of(run, "sparsity"), table_of(run, "maxima")
    if sparsity is None and maxima is None:
        return None
    text: tuple[str, ...] = ()
    charts: dict[str, Drawing | None] = {}
    if sparsity is not None:
        text = _sparse_shares(sparsity)
        charts["sparsity"] = head_map(
            sparsity,
            "share",
            "Share of sparse attention by head",
            "share of distributions",
            "Bright heads select a single token nearly always; dark ones average over several.",
            settings,
        )
    if maxima is not None:
        charts["maxima"] = _maxima_chart(maxima[maxima["layer"].isna() & maxima["head"].isna()], settings)
    return charts_section(run, "Sparsity of attention", text, charts)


def _sparse_shares(table: pd.DataFrame) -> tuple[str, ...]:
    whole = table[table["layer"].isna() & table["head"].isna()]
    columns = (floats(whole[name]) for name in ("distributions", "share", "non_sparse_share", "mean_max"))
    return tuple(
        f"Of {count:,.0f} distributions {100 * sparse:.1f} % are sparse and {100 * other:.1f} % clearly are not; the largest "
        f"weight is {largest:.3f} on average."
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
        "Largest weight of a distribution",
        "largest attention weight",
        "distributions",
        (Line("whole model", edges, counts, [0.0] * len(counts), counts),),
        "A peak at 1 is sparse attention: heads that select one token, and that noise can make select another.",
        settings,
        log_y=spans_decades(counts),
    )


def _maps(run: RunFolder, settings: str) -> Section | None:
    table, tokens = table_of(run, "maps"), table_of(run, "tokens")
    if table is None:
        return None
    names = {} if tokens is None else dict(zip(tokens["position"], map(token_name, tokens["text"]), strict=True))
    charts: dict[str, Drawing | None] = {}
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
            "Each row is what one token reads from; a row with one bright cell is sparse.",
            settings,
            limits=(0.0, 1.0),
            from_top=True,
        )
    return charts_section(run, "Attention maps", (), charts)


def _banded(name: str, rows: pd.DataFrame, x: str, column: str) -> Line:
    """A line with a band of one standard error."""
    middle, error = np.array(floats(rows[column])), np.array(floats(rows[f"{column}_stderr"]))
    low = np.maximum(middle - error, 0.1 * middle)  # a band that nearly reaches 0 would stretch a logarithmic axis
    return Line(name, floats(rows[x]), middle.tolist(), low.tolist(), (middle + error).tolist())


def _clean_lines(clean: pd.DataFrame, column: str, x: list[float]) -> list[Line]:
    """The value without noise, all along the axis."""
    return [Line("clean", x, [value] * len(x)) for value in floats(clean[column])[:1]]
