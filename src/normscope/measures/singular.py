"""Singular vectors of a layer's heads, and the tokens nearest to them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core.norms import unit
from normscope.errors import InputError, require_known
from normscope.measures.base import Advance, Subject, Tables
from normscope.measures.probes import position_rotations, reader
from normscope.measures.readout import output_rows
from normscope.measures.search import nearest
from normscope.measures.tokens import TokenMeasure, head_notes, position_notes
from normscope.models import Model
from normscope.models.factors import Singular, singular_factors
from normscope.results.conventions import DRAWN_HEADS
from normscope.results.figures import Chart, Figure, Line
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import a_few, cell, floats, joined_tokens, plain_rows, spans_decades, table_of, together

MATRICES = {"vo": "W_VO", "qk": "W_QK"}
_VECTORS = 5  # of each head in a table
_SINGULAR = ["layer", "head", "matrix", "index", "value", "side", "rank", "nearest_token", "nearest_text", "score"]


@dataclass(frozen=True)
class SingularVectors(TokenMeasure):
    """Singular values of heads, and the tokens nearest to their first left and right singular vectors.

    Attributes:
        layer: the layers, counted from 0 or, if negative, from the end; None for all.
        head: the heads that tables have; None for all.
        nearest: how many nearest tokens.
        matrix: ``vo`` for W_V W_O, ``qk`` for W_Q W_Kᵀ.
        vectors: how many vectors of each head.
        distance: for ``qk``, the number of positions between key and query.
    """

    name: ClassVar[str] = "singular"
    title: ClassVar[str] = "Singular vectors"
    needs: ClassVar[frozenset[str]] = frozenset({"vocabulary", "attention", "matrices"})
    passes: ClassVar[str] = "0"

    layer: tuple[int, ...] | None = (-1,)
    head: tuple[int, ...] | None = None
    nearest: int = 5
    matrix: str = "vo"
    vectors: int = 5
    distance: int = 0

    def measure(self, subject: Subject, advance: Advance = lambda done: None) -> Tables:
        """Tables ``spectrum`` and ``singular``."""
        chosen, parts = self.resolved(subject.model), []
        for done, layer in enumerate(chosen.layer or (), 1):
            tables = singular_tables(subject.model, layer, self.matrix, self.vectors, self.nearest, self.distance)
            parts.append({name: table[table["head"].isin(chosen.head or ())] for name, table in tables.items()})
            advance(done)
        return {name: pd.concat([part[name] for part in parts], ignore_index=True) for name in parts[0]}

    def notes(self, model: Model) -> list[str]:
        """On head norms and positions."""
        positions = position_notes(model, self.distance) if self.matrix == "qk" else []
        return [*super().notes(model), *head_notes(model), *positions]

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """How much the first singular vector holds."""
        spectrum = plain_rows(tables["spectrum"])
        first = [row for row in spectrum if row["index"] == 0 and row["share"] is not None]
        dimensions = 1 + max(row["index"] for row in spectrum)
        if not first:
            yield Finding("The matrices of these heads are 0 or overflow: they have no singular vectors.", severity="warning")
            return
        top, share = max(first, key=lambda row: float(row["share"])), median(row["share"] for row in first)
        yield Finding(
            f"The first singular vector holds {100 * share:.0f} % of Σσ² in the median head and {100 * top['share']:.0f} % in "
            f"head {top['head']} of layer {top['layer']}.",
            number=share,
            comparison=f"{100 / dimensions:.1f} % if all {dimensions} singular values were equal",
        )
        empty = {(row["layer"], row["head"]) for row in spectrum if row["share"] is None}
        if empty:
            listed = ", ".join(f"L{layer}H{head}" for layer, head in sorted(empty)[:_VECTORS])
            yield Finding(
                f"The matrix is 0 or overflows in {len(empty)} of {len(empty) + len(first)} heads, which have no singular "
                f"vectors: {listed}{', …' * (len(empty) > _VECTORS)}.",
                severity="warning",
            )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Singular values of a few layers, and the tokens nearest to their first vectors."""
        spectrum, singular = table_of(tables, "spectrum"), table_of(tables, "singular")
        figures: dict[str, Figure | None] = {}
        if spectrum is not None:
            for (layer, matrix), rows in _by_matrix(spectrum).items():
                figures[f"spectrum-{layer}-{matrix}"] = _spectrum_chart(rows, layer, matrix, settings)
        of_vectors = {} if singular is None else _by_matrix(singular)
        shown = tuple(_singular_table(rows, layer, matrix) for (layer, matrix), rows in of_vectors.items())
        text = (
            "A head's matrix W = Σ σ u vᵀ stores pairs: tokens near the left vector σu are what it reads, tokens near the "
            "right vector v are what it then writes (for W_QK: the queries, and the keys that they attend to).",
        )
        return self.page(text, figures, shown)


def head_factors(
    model: Model, layer: int, matrix: str, distance: int = 0
) -> tuple[Float[Tensor, "heads dim rank"], Float[Tensor, "heads rank dim"]]:
    """The two thin factors of W_VO = W_V W_O or W_QK = W_Q W_Kᵀ, the latter for keys ``distance`` positions before q."""
    require_known("matrix", matrix, MATRICES)
    weights = model.projections(layer)
    if matrix == "vo":
        return weights.W_V, weights.W_O
    if distance == 0:
        return weights.W_Q, weights.W_K.mT
    if any(norm.slot in ("q", "k") for norm in model.norms):
        raise InputError(
            f"distance={distance}: '{model.name}' normalises q and k, and W_QK at a distance is then no matrix; "
            "leave distance= out"
        )
    of_query, of_key = position_rotations(model, layer, distance)
    axes = torch.eye(model.dim, device=weights.W_Q.device)
    none = torch.zeros_like(axes)
    q, k = (
        model.heads_of(layer, axes[None], rotation, letter)[0][0] - model.heads_of(layer, none[None], rotation, letter)[0][0]
        for letter, rotation in (("q", of_query), ("k", of_key))
    )
    return q, k.mT


def oriented(
    singular: Singular, rows: Float[Tensor, "vocabulary dim"], count: int
) -> tuple[Singular, Float[Tensor, "heads rank count"], Int[Tensor, "heads rank count"]]:
    """Signs such that v, not −v, is nearest to some row: max_e v·e ≥ max_e (−v)·e; with the rows nearest to v.

    Returns:
        The vectors, and scores and numbers of the ``count`` rows with the largest v·e.
    """
    right = singular.right.mT
    scores, places = nearest(torch.cat((right, -right), -2).flatten(0, 1), rows, count)
    both = (len(right), 2, right.shape[1], scores.shape[-1])
    scores, places = scores.view(both), places.view(both)
    flipped = scores[:, 1, :, 0] > scores[:, 0, :, 0]
    sign = torch.where(flipped, -1.0, 1.0)[:, None].to(right)
    chosen = flipped[..., None].expand(-1, -1, scores.shape[-1])
    vectors = Singular(sign * singular.left, singular.values, sign * singular.right)
    return vectors, torch.where(chosen, scores[:, 1], scores[:, 0]), torch.where(chosen, places[:, 1], places[:, 0])


@torch.no_grad()
def singular_tables(model: Model, layer: int, matrix: str, vectors: int, count: int, distance: int = 0) -> Tables:
    """The singular values of every head, and the ``count`` tokens nearest to the first few left and right vectors.

    σu is compared with the embeddings as inputs of the layer's attention; v with the unembedding for W_VO, since updates are
    read there, and with the inputs of attention for W_QK.

    Returns:
        ``spectrum``: layer, head, matrix, index, value, share (of Σσ²).
        ``singular``: layer, head, matrix, index, value, side, rank, nearest_token, nearest_text, score.
    """
    whole = singular_factors(*head_factors(model, layer, matrix, distance))
    first = Singular(whole.left[..., :vectors], whole.values[..., :vectors], whole.right[..., :vectors])
    read = reader(model, layer)(model.embeddings[: model.vocabulary])[1]
    first, right_scores, right_tokens = oriented(first, read if matrix == "qk" else output_rows(model), count)
    left = (first.values[:, None] * first.left).mT
    left_scores, left_tokens = (x.view(*left.shape[:2], -1) for x in nearest(left.flatten(0, 1), read, count))
    shares = unit(whole.values).square()
    spectrum = [
        {"layer": layer, "head": head, "matrix": matrix, "index": index, "value": value, "share": share}
        for head, (values, parts) in enumerate(zip(whole.values.tolist(), shares.tolist(), strict=True))
        for index, (value, share) in enumerate(zip(values, parts, strict=True))
    ]
    sides = {"left": (left_scores, left_tokens), "right": (right_scores, right_tokens)}
    rows = []
    for head in range(len(first.values)):
        for index, value in enumerate(first.values[head].tolist()):
            if not 0 < value < torch.inf:
                continue  # any vector is a singular vector of 0
            place = {"layer": layer, "head": head, "matrix": matrix, "index": index, "value": value}
            for side, (scores, tokens) in sides.items():
                texts = model.words(tokens[head, index])
                listed = zip(tokens[head, index].tolist(), texts, scores[head, index].tolist(), strict=True)
                for rank, (token, text, score) in enumerate(listed, 1):
                    of_token = {"side": side, "rank": rank, "nearest_token": token, "nearest_text": text, "score": score}
                    rows.append(place | of_token)
    return {"spectrum": pd.DataFrame(spectrum), "singular": pd.DataFrame(rows, columns=_SINGULAR)}


def _by_matrix(table: pd.DataFrame) -> dict[tuple[int, str], pd.DataFrame]:
    """The rows of a few layers and of each matrix."""
    shown = set(a_few(sorted({int(layer) for layer in table["layer"]})))
    groups = {(int(str(layer)), str(matrix)): rows for (layer, matrix), rows in table.groupby(["layer", "matrix"], sort=False)}
    return {key: rows for key, rows in groups.items() if key[0] in shown}


def _spectrum_chart(rows: pd.DataFrame, layer: int, matrix: str, settings: str) -> Chart:
    groups = {int(str(head)): group.sort_values("index") for head, group in rows.groupby("head")}
    if len(groups) > DRAWN_HEADS:
        lines = [together(f"{len(groups)} heads", groups.values(), "index", "value")]
    else:
        lines = [Line(f"head {head}", floats(group["index"]), floats(group["value"])) for head, group in groups.items()]
    return Chart(
        f"Singular values of {MATRICES[matrix]} in layer {layer}",
        "index",
        "σ",
        tuple(lines),
        "A steep line is a head with a few strong directions; a flat one treats all its directions alike.",
        settings,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )


def _singular_table(rows: pd.DataFrame, layer: int, matrix: str) -> PageTable:
    cells = []
    for (head, index), group in rows[rows["index"] < rows["index"].min() + _VECTORS].groupby(["head", "index"]):
        sides = (group[group["side"] == side].sort_values("rank")["nearest_text"] for side in ("left", "right"))
        value = floats(group["value"])[0]
        cells.append((f"head {head}, {index}", cell(value, ".3g"), *map(joined_tokens, sides)))
    caption = f"Tokens nearest to singular vectors of {MATRICES[matrix]} in layer {layer}"
    return PageTable(caption, ("head and index", "σ", "left (σu)", "right (v)"), tuple(cells))
