"""What probes found, as tidy tables."""

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from normscope.core.norms import length
from normscope.models import Model
from normscope.words.probes import Found, Updates
from normscope.words.search import distinct
from normscope.words.vocabulary import Word


def nearest_table(probe: str, view: Model, layer: int, words: list[Word], found: Found, summed: bool = False) -> pd.DataFrame:
    """A row for every head, word and nearest token; the head is empty for the sum of all heads.

    Returns:
        Rows with probe, layer, head, word, token, rank, nearest_token, nearest_text, score.
    """
    heads, _, count = found.tokens.shape
    texts = texts_of(view, found.tokens)
    table = pd.MultiIndex.from_product(
        [range(heads), range(len(words)), range(1, count + 1)], names=["head", "number", "rank"]
    ).to_frame(index=False)
    tokens = found.tokens.flatten().tolist()
    table = table.assign(
        probe=probe,
        layer=layer,
        word=[words[number].name for number in table["number"]],
        token=[words[number].token for number in table["number"]],
        nearest_token=tokens,
        nearest_text=[texts[token] for token in tokens],
        score=found.scores.flatten().tolist(),
    )
    table["head"] = table["head"].astype("Int64").mask(table["head"] >= (0 if summed else heads))
    return table[["probe", "layer", "head", "word", "token", "rank", "nearest_token", "nearest_text", "score"]]


def update_table(layer: int, words: list[Word], updates: Updates) -> pd.DataFrame:
    """The length of every head's update, of their sum with what the layer adds besides, and of both to that of the word.

    Returns:
        Rows with layer, head (empty for the sum), word, norm, relative_norm.
    """
    whole = updates.by_head.sum(0) + updates.rest
    norms = length(torch.cat((updates.by_head, whole[None]))).squeeze(-1)
    relative = norms / length(updates.states).squeeze(-1)
    heads: list[int | None] = [*range(len(updates.by_head)), None]
    rows = [
        {"layer": layer, "head": head, "word": word.name, "norm": float(norm), "relative_norm": float(share)}
        for head, each, shares in zip(heads, norms, relative, strict=True)
        for word, norm, share in zip(words, each, shares, strict=True)
    ]
    return pd.DataFrame(rows).astype({"head": "Int64"})


def texts_of(view: Model, tokens: Int[Tensor, "*shape"]) -> dict[int, str]:
    """The text of every token among these."""
    some = distinct(tokens)
    return dict(zip(some.tolist(), view.words(some), strict=True))
