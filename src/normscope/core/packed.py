"""Attention within examples that lie packed in one row, several to a tile, so that no padding is ever computed.

A tile holds whole examples, so a tile's queries need only its own keys: one program a tile and head does the forward pass, and
one the whole backward pass, without a second look at memory and without atomic additions: results are the same every time.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.core.head_norm import HeadNorm
from normscope.core.kernels import has_kernels

TILES = (32, 64, 128)
_FUSED_HEADS = (16, 32, 64, 128)


def tile_for(longest: int) -> int | None:
    """The smallest tile that holds an example of that many tokens; None if none does."""
    return next((tile for tile in TILES if longest <= tile), None)


def pack_tiles(lengths: Int[Tensor, "rows examples"], tokens: int, tile: int) -> Int[Tensor, "rows tiles_and_one"]:
    """Where tiles begin: each takes as many whole examples, in order, as fit; unused tiles begin at the end.

    The lengths of every row add up to ``tokens``, and none is longer than a tile.

    Next-fit, without going through the examples one by one: every example knows who would begin the tile after its own, and
    whoever is reached from the first by following that is a beginning; doubling the jumps reaches all in log₂ steps.
    """
    examples = lengths.shape[1]
    ends = lengths.cumsum(1)
    starts = torch.cat((torch.zeros_like(ends[:, :1]), ends), 1)
    following = torch.searchsorted(ends, starts + tile, right=True)
    following[:, -1] = examples
    begins = torch.zeros_like(following)
    begins[:, 0] = 1
    for _ in range(examples.bit_length()):
        begins = (begins + torch.zeros_like(begins).scatter_add_(1, following, begins)).clamp_(max=1)
        following = following.gather(1, following)
    found = torch.where(begins.bool(), starts, tokens).sort(1).values
    most = min(examples, 2 * tokens // tile + 2)  # two neighbouring tiles always hold more than one tile's tokens
    return found[:, : most + 1].int()


def has_kernel(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    """Whether there is a fused kernel for heads of that width and precision."""
    return has_kernels(device, dtype) and head in _FUSED_HEADS


def attend_packed(
    qkv: Float[Tensor, "tokens 3 heads head"],
    segments: Int[Tensor, " tokens"],
    tiles: Int[Tensor, " tiles_and_one"],
    scale: Float[Tensor, ""],
    tile: int,
    norm: HeadNorm | None = None,
) -> Float[Tensor, "tokens heads head"]:
    """Causal softmax(scale · q kᵀ) v of the normalised q, k, v among the tokens of each segment; a fused kernel on a GPU."""
    if has_kernel(qkv.device, qkv.dtype, qkv.shape[-1]):
        gains, letters, centred = (None, "", False) if norm is None else (norm.gains, norm.letters, norm.kind == "layer")
        mixed: Tensor = _fused()(qkv, segments, tiles, scale, gains, letters, centred, tile)
        return mixed
    return _attend_plainly(qkv if norm is None else norm(qkv), segments, tiles, scale, tile)


def in_tiles(
    parts: Float[Tensor, "tokens parts heads head"],
    segments: Int[Tensor, " tokens"],
    tiles: Int[Tensor, " tiles_and_one"],
    tile: int,
) -> tuple[
    Float[Tensor, "parts tiles heads tile head"],
    Bool[Tensor, "tiles tile tile"],
    Int[Tensor, "tiles tile"],
    Bool[Tensor, "tiles tile"],
]:
    """q, k (and v) gathered tile by tile; who sees whom there; which token each place holds, and whether it holds one.

    A place that holds none sees itself, so that its softmax exists.
    """
    place = tiles[:-1, None].long() + torch.arange(tile, device=parts.device)
    there = place < tiles[1:, None]
    place = torch.where(there, place, len(segments) - 1)
    segment = torch.where(there, segments[place], -1)
    earlier = torch.ones(tile, tile, dtype=torch.bool, device=parts.device).tril()
    seen = (segment[:, :, None] == segment[:, None, :]) & earlier
    return parts[place].permute(2, 0, 3, 1, 4), seen, place, there


def _attend_plainly(qkv: Tensor, segments: Tensor, tiles: Tensor, scale: Tensor, tile: int) -> Tensor:
    """The same with PyTorch's own operations: gather the tiles, attend, put back."""
    (q, k, v), seen, place, there = in_tiles(qkv, segments, tiles, tile)
    scores = (scale * (q @ k.mT)).masked_fill(~seen[:, None], -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2)
    return torch.zeros_like(qkv[:, 0]).index_put((place[there],), mixed[there])


def _fused() -> Any:
    """The fused operator; Triton is imported only where there is a GPU for it."""
    from normscope.core.packed_kernel import packed_attention

    return packed_attention
