"""What the model atlas shows, from tables: measures by layer and head, curves by layer beside theory, a token's journey."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from normscope.measures.journey import journey_scene
from normscope.report.sphere import scene_data
from normscope.results.conventions import NEAR_ONE_HOT, NOISE
from normscope.results.tables import Tables, floats, plain_rows, spans_decades, table_of

Rows = Callable[[pd.DataFrame], "pd.DataFrame | None"]


def _column(name: str, **where: Any) -> Rows:
    """The rows with layer, head and a column as ``value``, of those whose other columns are as given; None without them."""

    def of(table: pd.DataFrame) -> pd.DataFrame | None:
        if not {name, *where} <= set(table):
            return None
        for column, wanted in where.items():
            table = table[table[column] == wanted]
        return table[["layer", "head"]].assign(value=table[name])

    return of


def _width(table: pd.DataFrame) -> pd.DataFrame:
    return table[["layer", "head"]].assign(value=table["high90"] - table["low90"])


@dataclass(frozen=True)
class HeadMeasure:
    """A number of every head, from a table that a measure made.

    Attributes:
        name: how a link names it.
        title: what people choose it by.
        label: what the number is, beside the legend.
        text: how to read it, in one sentence.
        table: the table that it comes from.
        rows: layer, head and value, from that table.
        scale: of the colours, ``linear`` or ``log``.
        limits: of the colours, where the number has bounds of its own.
    """

    name: str
    title: str
    label: str
    text: str
    table: str
    rows: Rows
    scale: str = "linear"
    limits: tuple[float, float] | None = None


_SHARE = (0.0, 1.0)
HEAD_MEASURES = (
    HeadMeasure("top-weight", "Top weight", "mean largest weight",
                "The mean over queries of the largest attention weight: 1 is attention to a single key.",
                "sparsity", _column("mean_max"), limits=_SHARE),
    HeadMeasure("sparsity", "Near-one-hot rows", "share of attention rows",
                f"The share of queries whose largest weight is at least {NEAR_ONE_HOT}: rows that circuits are made of.",
                "sparsity", _column("share"), limits=_SHARE),
    HeadMeasure("entropy", "Attention entropy", "nats, mean over queries", "0 is attention to a single key.",
                "entropy", _column("entropy")),
    HeadMeasure("first-token", "Attention to the first token", "mean weight",
                "Heads with much weight there use the first token as an attention sink.",
                "first_token", _column("first"), limits=_SHARE),
    HeadMeasure("spread", "Norm spread", "norm / median, width of the 90 % band",
                "How much the residual norms of the tokens differ that the head attends to; all heads share this divisor.",
                "spread", _width, "log"),
    HeadMeasure("margin", "Smallest margin", "relative noise",
                "The smallest relative noise on key norms that makes a near-one-hot row of the head switch to another key.",
                "margins", _column("margin"), "log"),
    HeadMeasure("median-margin", "Median margin", "relative noise",
                "As the smallest margin, for the median near-one-hot row of the head.",
                "margins", _column("median_margin"), "log"),
    HeadMeasure("collapse", "Circuit collapse", f"probability of a switch at {100 * NOISE:g} % noise",
                f"By theory: how likely a near-one-hot row switches its key at {100 * NOISE:g} % RMS noise on key norms.",
                "collapse", _column("probability", noise=NOISE, definition="loose")),
    HeadMeasure("interference", "Interference", "relative change of logits",
                "How much attention logits change when content that the head cannot read is resampled before the norm.",
                "interference", _column("change", place="before", resampled="both"), "log"),
    HeadMeasure("interference-moved", "Interference: top key changes", "share of queries",
                "How often the top key changes when what keys hold outside the head's input subspace is resampled.",
                "interference", _column("moved", place="before", resampled="keys")),
    HeadMeasure("spheres-queries", "Norms that W_Q reads", "width of the 90 % interval / median",
                "The spread of token norms in the input subspace of W_Q, before the norm; 0 is a constant norm.",
                "spheres", _column("spread", place="before", side="queries"), "log"),
    HeadMeasure("spheres-keys", "Norms that W_K reads", "width of the 90 % interval / median",
                "The spread of token norms in the input subspace of W_K, before the norm; KV heads that are shared count once.",
                "spheres", _column("spread", place="before", side="keys"), "log"),
    HeadMeasure("overlap-queries", "Overlap of W_Q with other heads", "mean cosine",
                "How much the input subspace of W_Q shares with those of the other heads; 0 is independent heads.",
                "overlaps", _column("mean_cosine", side="queries")),
    HeadMeasure("effective-rank", "Effective rank of W_QK", "participation ratio",
                "How many directions of W_QK matter; a small number is a head that compares little.",
                "rank", _column("effective_rank")),
)  # fmt: skip


def head_grids(tables: Tables, layers: int) -> list[dict[str, Any]]:
    """Every measure that the tables hold as a grid (layers, heads), None where a head was not measured."""
    grids = []
    for measure in HEAD_MEASURES:
        table = table_of(tables, measure.table)
        rows = None if table is None else measure.rows(table)
        if rows is None:
            continue
        rows = rows[rows["layer"].notna() & rows["head"].notna()]
        if rows["value"].notna().any():
            values = head_grid(layers, zip(rows["layer"], rows["head"], floats(rows["value"]), strict=True))
            words = {name: getattr(measure, name) for name in ("name", "title", "label", "text", "scale", "limits")}
            grids.append({**words, "values": values})
    return grids


def head_grid(layers: int, cells: Iterable[tuple[int, int, float]]) -> list[list[float | None]]:
    """Values (layer, head, value) as a grid, None for what is missing or not finite."""
    known = [(int(layer), int(head), value) for layer, head, value in cells]
    heads = 1 + max((head for _, head, _ in known), default=-1)
    grid: list[list[float | None]] = [[None] * heads for _ in range(layers)]
    for layer, head, value in known:
        grid[layer][head] = finite(value)
    return grid


def finite(value: float | None) -> float | None:
    """A number as JSON has it: None for NaN and infinities."""
    return None if value is None or not math.isfinite(value) else float(value)


def curves(tables: Tables) -> list[dict[str, Any]]:
    """Curves by layer: what was measured, theory for the model's scheme, and what other schemes would make of its updates."""
    motion, writes, replay = (table_of(tables, name) for name in ("motion", "writes", "replay"))
    of_schemes = [] if replay is None else [(str(name), rows) for name, rows in replay.groupby("scheme", sort=False)]

    def curve(
        name: str, title: str, label: str, text: str, table: pd.DataFrame | None, measured: str, theory: str = ""
    ) -> None:
        lines = (
            [] if table is None else [_line("measured", "measured", table, measured), _line("theory", "theory", table, theory)]
        )
        lines += [_line("scheme", f"as {scheme}", rows, measured) for scheme, rows in of_schemes]
        known = [line for line in lines if line is not None]
        if known and known[0]["kind"] == "measured":
            values = [value for line in known for value in line["y"] if value is not None]
            made.append(
                {"name": name, "title": title, "label": label, "text": text, "log": spans_decades(values), "lines": known}
            )

    made: list[dict[str, Any]] = []
    curve("angle", "Rotation per layer", "degrees",
          "The mean angle between the residual stream before and after a layer. "
          "Other schemes replay the model's recorded updates, without retraining.",
          motion, "angle")  # fmt: skip
    curve("speed", "Damping of attention", "s",
          "An update perpendicular to a token rotates it by its length divided by s; theory follows from the norm placement.",
          writes, "speed", "theory")  # fmt: skip
    curve("radius", "Residual norm", "|x|", "The mean norm before every layer; the larger, the less an update rotates.",
          motion, "radius")  # fmt: skip
    curve("cosine", "Mean cosine", "cosine", "The mean cosine between tokens before every layer; 1 is full collapse.",
          motion, "cosine")  # fmt: skip
    curve("rank", "Effective rank", "participation ratio", "How many directions the tokens before a layer fill.",
          motion, "rank")  # fmt: skip
    return made


def _line(kind: str, name: str, table: pd.DataFrame, column: str) -> dict[str, Any] | None:
    if column not in table or table[column].isna().all():
        return None
    rows = table.sort_values("layer")
    return {"kind": kind, "name": name, "x": [int(x) for x in rows["layer"]], "y": [finite(y) for y in floats(rows[column])]}


def journey_data(table: pd.DataFrame, places: pd.DataFrame | None) -> dict[str, Any]:
    """A token's journey: a row for every hidden state, and the scene for ``sphere.js`` (None where there is none)."""
    scene = None if places is None else journey_scene(places, "")
    rows = [{name: _plain(value) for name, value in row.items()} for row in plain_rows(table)]
    return {
        "rows": rows,
        "scene": None if scene is None else scene_data(scene),
        "caption": "" if scene is None else f"{scene.caption} {scene.settings[:1].upper()}{scene.settings[1:]}.",
    }


def _plain(value: Any) -> Any:
    return finite(value) if isinstance(value, float) else value


def grid_of(rows: Sequence[Mapping[str, Any]], size: int) -> list[list[float | None]]:
    """An attention map (queries, keys) from rows with query, key and weight."""
    grid: list[list[float | None]] = [[None] * size for _ in range(size)]
    for row in rows:
        grid[int(row["query"])][int(row["key"])] = finite(row["weight"])
    return grid
