"""Singular vectors of a layer's heads, and the tokens nearest to them."""

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.errors import InputError, did_you_mean
from normscope.models import Model
from normscope.models.factors import Singular, singular_factors
from normscope.words.probes import reader, rotations
from normscope.words.search import nearest

MATRICES = ("vo", "qk")


def head_factors(
    view: Model, layer: int, matrix: str, distance: int = 0
) -> tuple[Float[Tensor, "heads dim rank"], Float[Tensor, "heads rank dim"]]:
    """The two thin factors of W_VO = W_V W_O or of W_QK = W_Q W_Kᵀ, the latter for keys ``distance`` places before q."""
    if matrix not in MATRICES:
        raise InputError(f"unknown matrix '{matrix}'; allowed: {', '.join(MATRICES)}{did_you_mean(matrix, MATRICES)}")
    weights = view.projections(layer)
    if matrix == "vo":
        return weights.W_V, weights.W_O
    if distance == 0:
        return weights.W_Q, weights.W_K.mT
    if any(norm.slot in ("q", "k") for norm in view.norms):
        raise InputError(
            f"--distance: '{view.name}' normalises q and k, and W_QK at a distance is then no matrix; leave it out"
        )
    of_query, of_key = rotations(view, layer, distance)
    axes = torch.eye(view.dim, device=weights.W_Q.device)
    none = torch.zeros_like(axes)
    q, k = (
        view.heads_of(layer, axes[None], turn, letter)[0][0] - view.heads_of(layer, none[None], turn, letter)[0][0]
        for letter, turn in (("q", of_query), ("k", of_key))
    )
    return q, k.mT


def oriented(
    singular: Singular, rows: Float[Tensor, "vocabulary dim"], count: int
) -> tuple[Singular, Float[Tensor, "heads rank count"], Int[Tensor, "heads rank count"]]:
    """Signs chosen so that v, not −v, is nearest to some row: max_e v·e ≥ max_e (−v)·e; with the rows nearest to v.

    Returns:
        The vectors, and scores and numbers of the ``count`` rows with the largest v·e.
    """
    right = singular.right.mT
    scores, places = nearest(torch.cat((right, -right), -2).flatten(0, 1), rows, count)
    both = (len(right), 2, right.shape[1], scores.shape[-1])
    scores, places = scores.view(both), places.view(both)
    flipped = scores[:, 1, :, 0] > scores[:, 0, :, 0]
    sign = torch.where(flipped, -1.0, 1.0)[:, None].to(right)
    kept = flipped[..., None].expand(-1, -1, scores.shape[-1])
    found = Singular(sign * singular.left, singular.values, sign * singular.right)
    return found, torch.where(kept, scores[:, 1], scores[:, 0]), torch.where(kept, places[:, 1], places[:, 0])


@torch.no_grad()
def singular_tables(
    view: Model, layer: int, matrix: str, vectors: int, count: int, distance: int = 0
) -> dict[str, pd.DataFrame]:
    """The singular values of every head, and the ``count`` tokens nearest to the first few left and right vectors.

    σu is compared with the embeddings as the layer reads them; v with the unembedding for W_VO, for what is written is read
    there, and with what the layer reads for W_QK.

    Returns:
        ``spectrum``: layer, head, matrix, index, value, share (of Σσ²).
        ``singular``: layer, head, matrix, index, value, side, rank, nearest_token, nearest_text, score.
    """
    whole = singular_factors(*head_factors(view, layer, matrix, distance))
    first = Singular(whole.left[..., :vectors], whole.values[..., :vectors], whole.right[..., :vectors])
    read = reader(view, layer)(view.embeddings[: view.vocabulary])[1]
    written = view.embeddings if view.unembedding is None else view.unembedding
    first, right_scores, right_tokens = oriented(first, read if matrix == "qk" else written[: view.vocabulary], count)
    left = (first.values[:, None] * first.left).mT
    left_scores, left_tokens = (x.view(*left.shape[:2], -1) for x in nearest(left.flatten(0, 1), read, count))
    shares = whole.values.square() / whole.values.square().sum(-1, keepdim=True)
    spectrum = [
        {"layer": layer, "head": head, "matrix": matrix, "index": index, "value": value, "share": share}
        for head, (values, parts) in enumerate(zip(whole.values.tolist(), shares.tolist(), strict=True))
        for index, (value, share) in enumerate(zip(values, parts, strict=True))
    ]
    sides = {"left": (left_scores, left_tokens), "right": (right_scores, right_tokens)}
    rows = []
    for head in range(len(first.values)):
        for index, value in enumerate(first.values[head].tolist()):
            place = {"layer": layer, "head": head, "matrix": matrix, "index": index, "value": value}
            for side, (scores, tokens) in sides.items():
                texts = view.words(tokens[head, index])
                found = zip(tokens[head, index].tolist(), texts, scores[head, index].tolist(), strict=True)
                for rank, (token, text, score) in enumerate(found, 1):
                    said = {"side": side, "rank": rank, "nearest_token": token, "nearest_text": text, "score": score}
                    rows.append(place | said)
    return {"spectrum": pd.DataFrame(spectrum), "singular": pd.DataFrame(rows)}
