"""Embeddings and the sphere: how far a norm moves them, and which tokens stand out."""

import math
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.models import ModelView
from normscope.norms import NORMS, length
from normscope.schemes import NormKind

EXTREMES = 5


@dataclass(frozen=True)
class OutputNorm:
    """The norm in front of the unembedding as far as tokens notice it: its kind, gain and bias."""

    kind: NormKind
    gain: Float[Tensor, " dim"]
    bias: Float[Tensor, " dim"]

    @classmethod
    def of(cls, view: ModelView) -> "OutputNorm":
        """The final norm; without one, the last of the stream, or RMSNorm without parameters."""
        norm = view.final_norm or view.read_norm(view.layers)
        if norm is None:
            return cls("rms", torch.ones(view.dim, device=view.device), torch.zeros(view.dim, device=view.device))
        gain = norm.gain.to(view.device)
        return cls("layer" if norm.kind == "layer" else "rms", gain, torch.zeros_like(gain) if norm.bias is None else norm.bias)


def embedding_distances(embeddings: Float[Tensor, "vocabulary dim"], kind: str) -> pd.DataFrame:
    """How far Norm(W_E), without gain and bias, is from W_E: as it is, centred, scaled, and both.

    Centred is W_E − mean over tokens, scaled is W_E·√d / mean norm of W_E, both is (W_E − mean)·√d / mean norm of W_E.
    RMSNorm takes the place of LayerNorm for models that use it.

    Returns:
        Rows with setting, l2_mean, l2_std, cosine_mean, cosine_std, over the tokens whose embedding is not 0.
    """
    embeddings = embeddings[length(embeddings).squeeze(-1) > 0].double()
    normalised = NORMS[kind](embeddings)
    centred = embeddings - embeddings.mean(0)
    scale = math.sqrt(embeddings.shape[-1]) / length(embeddings).mean()
    settings = {
        "original": embeddings,
        "centred": centred,
        "scaled": scale * embeddings,
        "centred and scaled": scale * centred,
    }
    rows = []
    for setting, points in settings.items():
        l2 = length(normalised - points).squeeze(-1)
        cosine = 1 - torch.cosine_similarity(normalised, points, dim=-1)
        means = {
            f"{name}_{what}": float(getattr(x, what)()) for name, x in (("l2", l2), ("cosine", cosine)) for what in _MOMENTS
        }
        rows.append({"setting": setting, **means})
    return pd.DataFrame(rows)


_MOMENTS = ("mean", "std")


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


def extreme_tokens(view: ModelView, count: int = EXTREMES) -> pd.DataFrame:
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
