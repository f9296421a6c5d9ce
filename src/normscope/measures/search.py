"""The nearest of many tokens by dot product, in pieces that fit memory."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SCORES = 2**23  # at most this many scores at a time
_BLOCK = 64


class Nearest:
    """The largest few of scores that arrive in pieces."""

    def __init__(self, count: int) -> None:
        self.count, self._first = count, 0
        self._scores: Tensor | None = None
        self._tokens: Tensor | None = None

    def add(self, scores: Float[Tensor, "*rows candidates"]) -> None:
        """The scores of the next candidates."""
        best, places = top_scores(scores, self.count)
        places = places + self._first
        self._first += scores.shape[-1]
        if self._scores is not None and self._tokens is not None:
            best, places = torch.cat((self._scores, best), -1), torch.cat((self._tokens, places), -1)
            best, order = best.topk(min(self.count, best.shape[-1]))
            places = places.gather(-1, order)
        self._scores, self._tokens = best, places

    @property
    def top(self) -> tuple[Float[Tensor, "*rows count"], Int[Tensor, "*rows count"]]:
        """The largest scores in descending order, and their candidates."""
        if self._scores is None or self._tokens is None:
            raise ValueError("there were no candidates")
        return self._scores, self._tokens


def top_scores(
    scores: Float[Tensor, "*rows candidates"], count: int
) -> tuple[Float[Tensor, "*rows count"], Int[Tensor, "*rows count"]]:
    """The largest scores of every row and their places.

    The ``count`` largest are in the ``count`` blocks with the largest maxima: only those are sorted.
    """
    blocks, rest = divmod(scores.shape[-1], _BLOCK)
    if blocks <= 2 * count:
        top = scores.topk(min(count, scores.shape[-1]))
        return top.values, top.indices
    whole = scores[..., : blocks * _BLOCK].reshape(*scores.shape[:-1], blocks, _BLOCK)
    _, chosen = whole.amax(-1).topk(count)
    values = whole.gather(-2, chosen[..., None].expand(*chosen.shape, _BLOCK)).flatten(-2)
    places = (chosen[..., None] * _BLOCK + torch.arange(_BLOCK, device=scores.device)).flatten(-2)
    if rest:
        values = torch.cat((values, scores[..., blocks * _BLOCK :]), -1)
        after = torch.arange(blocks * _BLOCK, scores.shape[-1], device=scores.device)
        places = torch.cat((places, after.expand(*places.shape[:-1], rest)), -1)
    best, order = values.topk(count)
    return best, places.gather(-1, order)


def nearest(
    queries: Float[Tensor, "*batch queries width"], rows: Float[Tensor, "*batch rows width"], count: int
) -> tuple[Float[Tensor, "*batch queries count"], Int[Tensor, "*batch queries count"]]:
    """The ``count`` rows with the largest dot product for every query, and their scores."""
    best, piece = Nearest(count), max(_BLOCK, _SCORES // max(queries.shape[:-1].numel(), 1))
    for first in range(0, rows.shape[-2], piece):
        best.add(queries @ rows[..., first : first + piece, :].mT)
    return best.top


def distinct(tokens: Int[Tensor, "*shape"]) -> Int[Tensor, " distinct"]:
    """Every token once, in ascending order."""
    return torch.tensor(sorted(set(tokens.flatten().tolist())), dtype=tokens.dtype, device=tokens.device)
