"""Embeddings and the sphere: how far a norm moves them, and which tokens stand out."""

import math
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import NORMS, length
from normscope.models import Model
from normscope.schemes import NormKind

EXTREMES = 5
_PIECE = 8192  # embeddings that are compared together


@dataclass(frozen=True)
class OutputNorm:
    """The norm in front of the unembedding as far as tokens notice it: its kind, gain, bias and eps."""

    kind: NormKind
    gain: Float[Tensor, " dim"]
    bias: Float[Tensor, " dim"]
    eps: float = 0.0

    @classmethod
    def of(cls, view: Model) -> "OutputNorm":
        """The final norm; without one, the last of the stream, or RMSNorm without parameters."""
        norm = view.final_norm or view.read_norm(view.layers)
        if norm is None:
            return cls("rms", torch.ones(view.dim, device=view.device), torch.zeros(view.dim, device=view.device))
        gain = norm.gain.to(view.device)
        bias = torch.zeros_like(gain) if norm.bias is None else norm.bias
        return cls("layer" if norm.kind == "layer" else "rms", gain, bias, norm.eps)


def embedding_distances(embeddings: Float[Tensor, "vocabulary dim"], kind: str, eps: float = 0.0) -> pd.DataFrame:
    """How far Norm(W_E), without gain and bias, is from W_E: as it is, centred, scaled, and both.

    Centred is W_E − mean over tokens, scaled is W_E·√d / mean norm of W_E, both is (W_E − mean)·√d / mean norm of W_E.
    RMSNorm takes the place of LayerNorm for models that use it; beside short embeddings the norm's eps is not small.

    Returns:
        Rows with setting, l2_mean, l2_std, cosine_mean, cosine_std, over the tokens whose embedding is not 0.
    """
    norms = length(embeddings).squeeze(-1).double()
    there = norms > 0
    mean = embeddings.sum(0, dtype=torch.float64) / there.sum()
    scale = math.sqrt(embeddings.shape[-1]) / norms[there].mean()
    distances: dict[str, list[Tensor]] = {}
    for first in range(0, len(embeddings), _PIECE):
        piece = embeddings[first : first + _PIECE][there[first : first + _PIECE]].double()
        normalised, centred = NORMS[kind](piece, eps=eps), piece - mean
        settings = {"original": piece, "centred": centred, "scaled": scale * piece, "centred and scaled": scale * centred}
        for setting, points in settings.items():
            cosine = 1 - torch.cosine_similarity(normalised, points, dim=-1)
            both = torch.stack((length(normalised - points).squeeze(-1), cosine))
            distances.setdefault(setting, []).append(both)
    rows = []
    for setting, parts in distances.items():
        (l2_mean, cosine_mean), (l2_std, cosine_std) = (x.tolist() for x in _moments(torch.cat(parts, -1)))
        numbers = {"l2_mean": l2_mean, "l2_std": l2_std, "cosine_mean": cosine_mean, "cosine_std": cosine_std}
        rows.append({"setting": setting, **numbers})
    return pd.DataFrame(rows)


def _moments(x: Float[Tensor, "kinds tokens"]) -> tuple[Float[Tensor, " kinds"], Float[Tensor, " kinds"]]:
    return x.mean(-1), x.std(-1)


def token_scores(unembedding: Float[Tensor, "vocabulary dim"], norm: OutputNorm) -> dict[str, Float[Tensor, " vocabulary"]]:
    """How much the output favours each token whatever the text: |e|, |γ∘e|, and both with β·e added; β = 0 for RMSNorm."""
    plain, scaled = length(unembedding).squeeze(-1), length(norm.gain * unembedding).squeeze(-1)
    favour = unembedding @ norm.bias
    return {
        "norm": plain,
        "norm with gain": scaled,
        "norm + bias": plain + favour,
        "norm with gain + bias": scaled + favour,
    }


def extreme_tokens(view: Model, count: int = EXTREMES) -> pd.DataFrame:
    """The ``count`` tokens with the largest and the smallest of each of the ``token_scores``.

    Returns:
        Rows with score, end (top or bottom), rank, token, text, value.
    """
    unembedding = view.embeddings if view.unembedding is None else view.unembedding
    rows = []
    for score, values in token_scores(unembedding[: view.vocabulary], OutputNorm.of(view)).items():
        for end, largest in (("top", True), ("bottom", False)):
            found = values.topk(min(count, len(values)), largest=largest)
            for rank, (value, token, text) in enumerate(
                zip(found.values.tolist(), found.indices.tolist(), view.words(found.indices), strict=True), 1
            ):
                rows.append({"score": score, "end": end, "rank": rank, "token": token, "text": text, "value": value})
    return pd.DataFrame(rows)
