"""Embeddings and the sphere: how far a norm moves them, and which tokens the output favours."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import NORMS, cosine, length
from normscope.errors import InputError
from normscope.measures.base import Advance, Subject, Tables
from normscope.measures.readout import OutputNorm, output_rows, scaled
from normscope.measures.tokens import TokenMeasure
from normscope.models import Model
from normscope.results.conventions import TOKEN_LENGTH
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import cell, floats, table_of, token_name

EXTREMES = 5
_PIECE = 8192  # embeddings that are compared together
_CENTRED_GPT2 = 0.150  # published cosine distance of GPT-2's embeddings to the centred ones
_SMALL = 0.0005  # would read as zero


@dataclass(frozen=True)
class Embeddings(TokenMeasure):
    """Distances of the embeddings to the sphere, and the tokens that the output favours."""

    name: ClassVar[str] = "embeddings"
    title: ClassVar[str] = "Embeddings and the sphere"
    passes: ClassVar[str] = "0"

    def measure(self, subject: Subject, advance: Advance = lambda done: None) -> Tables:
        """Tables ``distances`` and ``extremes``."""
        model = subject.model
        norm = OutputNorm.of(model)
        distances = embedding_distances(model.embeddings[: model.vocabulary], norm.kind, norm.eps)
        favoured = model.reads_out or not model.predicts  # what predicts nothing is read with its embeddings
        return {"distances": distances, **({"extremes": extreme_tokens(model)} if favoured else {})}

    def notes(self, model: Model) -> list[str]:
        """On norms without a hyperplane or a bias, and on scaled embeddings."""
        norm, notes = OutputNorm.of(model), super().notes(model)
        if norm.pointwise:
            notes.append(f"The final norm is {norm.pointwise}, which has no sphere: Norm in the distances is RMSNorm.")
        elif norm.kind == "rms":
            notes.append("The norm is RMSNorm: there is no projection onto a hyperplane, and Norm in the distances is RMSNorm.")
        if model.predicts and not model.reads_out:
            notes.append(f"The {model.stream} has no output layer: no token is favoured by it.")
        elif not bool(norm.bias.any()):
            notes.append("The final norm has no bias: scores with and without it are equal.")
        if scaled(model):
            notes.append("The model scales its embeddings before the first layer: distances are of the scaled embeddings.")
        return notes

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """How large the part is that all embeddings share."""
        distance = float(tables["distances"].set_index("setting")["cosine_mean"]["centred"])
        yield Finding(
            f"Subtracting the mean embedding, which no norm does, moves directions by a cosine distance of {distance:.3f} on "
            "average.",
            number=distance,
            comparison=f"GPT-2, published: {_CENTRED_GPT2:.3f}",
        )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Both tables."""
        distances, extremes = table_of(tables, "distances"), table_of(tables, "extremes")
        text, shown = [], []
        if distances is not None:
            text.append(
                "A norm without parameters moves every embedding onto one sphere. A small cosine distance means that it only "
                "changes norms; a small ℓ2 distance means that the norms fit already."
            )
            shown.append(distance_table(distances))
        if extremes is not None:
            text.append(
                "The output favours some tokens in any context: those with a long embedding, and those that gain and bias "
                "single out."
            )
            shown.append(_extreme_table(extremes))
        return self.page(text, {}, shown)


def embedding_distances(embeddings: Float[Tensor, "vocabulary dim"], kind: str, eps: float = 0.0) -> pd.DataFrame:
    """Distance between Norm(W_E), without gain and bias, and W_E: as it is, centred, scaled, and both.

    Centred is W_E − mean over tokens, scaled is W_E·√d / mean norm of W_E, both is (W_E − mean)·√d / mean norm of W_E.
    RMSNorm takes the place of LayerNorm for models that use it; beside short embeddings the norm's eps is not small.

    Returns:
        Rows with setting, l2_mean, l2_std, cosine_mean, cosine_std, over the tokens whose embedding is not 0.
    """
    norms = length(embeddings).squeeze(-1).double()
    nonzero = (norms > 0) & norms.isfinite()
    if not bool(nonzero.any()):
        raise InputError("all embeddings are 0 or overflow: they have no directions")
    mean = embeddings.sum(0, dtype=torch.float64) / nonzero.sum()
    scale = math.sqrt(embeddings.shape[-1]) / norms[nonzero].mean()
    distances: dict[str, list[Tensor]] = {}
    for first in range(0, len(embeddings), _PIECE):
        piece = embeddings[first : first + _PIECE][nonzero[first : first + _PIECE]].double()
        normalised, centred = NORMS[kind](piece, eps=eps), piece - mean
        settings = {"original": piece, "centred": centred, "scaled": scale * piece, "centred and scaled": scale * centred}
        for setting, points in settings.items():
            both = torch.stack((length(normalised - points).squeeze(-1), 1 - cosine(normalised, points)))
            distances.setdefault(setting, []).append(both)
    rows = []
    for setting, parts in distances.items():
        values = torch.cat(parts, -1)
        (l2_mean, cosine_mean), (l2_std, cosine_std) = values.mean(-1).tolist(), values.std(-1).tolist()
        numbers = {"l2_mean": l2_mean, "l2_std": l2_std, "cosine_mean": cosine_mean, "cosine_std": cosine_std}
        rows.append({"setting": setting, **numbers})
    return pd.DataFrame(rows)


def token_scores(unembedding: Float[Tensor, "vocabulary dim"], norm: OutputNorm) -> dict[str, Float[Tensor, " vocabulary"]]:
    """How much the output favours each token in any context: |e|, |γ∘e|, and both with β·e added; β = 0 for RMSNorm."""
    gain, bias, parts = norm.gain.double(), norm.bias.double(), []
    for piece in torch.split(unembedding, _PIECE):
        rows = piece.double()
        plain, scaled_norm, favour = length(rows).squeeze(-1), length(gain * rows).squeeze(-1), rows @ bias
        parts.append(torch.stack((plain, scaled_norm, plain + favour, scaled_norm + favour)))
    names = ("norm", "norm with gain", "norm + bias", "norm with gain + bias")
    return dict(zip(names, torch.cat(parts, -1), strict=True))


def extreme_tokens(model: Model, count: int = EXTREMES) -> pd.DataFrame:
    """The ``count`` tokens with the largest and the smallest of each of the ``token_scores``.

    Returns:
        Rows with score, end (top or bottom), rank, token, text, value.
    """
    rows = []
    for score, values in token_scores(output_rows(model), OutputNorm.of(model)).items():
        for end, largest in (("top", True), ("bottom", False)):
            chosen = values.topk(min(count, len(values)), largest=largest)
            for rank, (value, token, text) in enumerate(
                zip(chosen.values.tolist(), chosen.indices.tolist(), model.words(chosen.indices), strict=True), 1
            ):
                rows.append({"score": score, "end": end, "rank": rank, "token": token, "text": text, "value": value})
    return pd.DataFrame(rows)


def distance_table(table: pd.DataFrame) -> PageTable:
    """The distances for people."""
    columns = [floats(table[name]) for name in ("l2_mean", "l2_std", "cosine_mean", "cosine_std")]
    rows = tuple(
        (str(setting), f"{_small(l2)} ± {_small(l2_std)}", f"{_small(cosine)} ± {_small(cosine_std)}")
        for setting, l2, l2_std, cosine, cosine_std in zip(table["setting"], *columns, strict=True)
    )
    caption = "Distance between Norm(W_E) and W_E, mean ± standard deviation over tokens"
    return PageTable(caption, ("W_E", "ℓ2 distance", "cosine distance"), rows)


def _small(value: float) -> str:
    return "< 0.001" if 0 < abs(value) < _SMALL else cell(value)


def _extreme_table(table: pd.DataFrame) -> PageTable:
    scores = list(dict.fromkeys(map(str, table["score"])))
    cells = {
        (str(score), str(end), int(rank)): f"{token_name(text, TOKEN_LENGTH)} ({cell(value, '.3g')})"
        for score, end, rank, text, value in zip(
            table["score"], table["end"], table["rank"], table["text"], floats(table["value"]), strict=True
        )
    }
    places = list(dict.fromkeys((end, rank) for _, end, rank in cells))
    rows = tuple((f"{end} {rank}", *(cells.get((score, end, rank), "–") for score in scores)) for end, rank in places)
    return PageTable("The most extreme tokens under each score, with its value", ("place", *scores), rows)
