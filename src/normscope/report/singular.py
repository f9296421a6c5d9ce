"""The section on singular vectors of heads: their values as lines, and the tokens nearest to the first of them."""

import pandas as pd

from normscope.results import Chart, Figure, Line, PageTable, Section
from normscope.results.conventions import DRAWN_HEADS
from normscope.results.tables import (
    Tables,
    a_few,
    cell,
    figures_section,
    floats,
    joined_tokens,
    spans_decades,
    table_of,
    together,
)

_VECTORS = 3  # of each head in a table
_MATRICES = {"vo": "W_VO", "qk": "W_QK"}


def singular_section(tables: Tables, settings: str) -> Section | None:
    """Singular values of heads, and the tokens nearest to their first vectors."""
    spectrum, singular = table_of(tables, "spectrum"), table_of(tables, "singular")
    if spectrum is None and singular is None:
        return None
    charts: dict[str, Figure | None] = {}
    if spectrum is not None:
        for (layer, matrix), rows in _by_matrix(spectrum).items():
            charts[f"spectrum-{layer}{'-' if matrix else ''}{matrix}"] = _spectrum_chart(rows, layer, matrix, settings)
    shown = []
    for (layer, matrix), rows in (_by_matrix(singular) if singular is not None else {}).items():
        shown.append(_singular_table(rows, layer, matrix))
    text = (
        "A head's matrix maps inputs to outputs: tokens near the left vector σu are the inputs that it responds to, tokens "
        "near the right vector v are what it then outputs (for W_QK: the queries, and the keys that they match).",
    )
    return figures_section("Singular vectors", text, charts, shown, name="singular")


def _by_matrix(table: pd.DataFrame) -> dict[tuple[int, str], pd.DataFrame]:
    """The rows of a few layers and of each matrix."""
    named = table if "matrix" in table else table.assign(matrix="")
    chosen = set(a_few(sorted({int(layer) for layer in named["layer"]})))
    groups = {(int(str(layer)), str(matrix)): rows for (layer, matrix), rows in named.groupby(["layer", "matrix"], sort=False)}
    return {key: rows for key, rows in groups.items() if key[0] in chosen}


def _of_matrix(layer: int, matrix: str) -> str:
    name = _MATRICES.get(matrix, matrix)
    return f"of {name} in layer {layer}" if name else f"in layer {layer}"


def _spectrum_chart(rows: pd.DataFrame, layer: int, matrix: str, settings: str) -> Chart:
    groups = {int(str(head)): group.sort_values("index") for head, group in rows.groupby("head")}
    if len(groups) > DRAWN_HEADS:
        lines = [together(f"{len(groups)} heads", groups.values(), "index", "value")]
    else:
        lines = [Line(f"head {head}", floats(group["index"]), floats(group["value"])) for head, group in groups.items()]
    return Chart(
        f"Singular values {_of_matrix(layer, matrix)}",
        "index",
        "σ",
        tuple(lines),
        "A line that falls steeply is a head that stores a few things strongly; a flat one treats all its directions alike.",
        settings,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )


def _singular_table(rows: pd.DataFrame, layer: int, matrix: str) -> PageTable:
    cells = []
    for (head, index), group in rows[rows["index"] < rows["index"].min() + _VECTORS].groupby(["head", "index"]):
        sides = (group[group["side"] == side].sort_values("rank")["nearest_text"] for side in ("left", "right"))
        value = floats(group["value"])[0]
        cells.append((f"head {head}, {index}", cell(value, ".3g"), *map(joined_tokens, sides)))
    caption = f"Tokens nearest to singular vectors {_of_matrix(layer, matrix)}"
    return PageTable(caption, ("head and index", "σ", "left (σu)", "right (v)"), tuple(cells))
