"""Attention masks: causal, padding, or packed examples in one row; each computes attention over the keys that it allows."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.core.fused_scores import attend_causal
from normscope.core.head_norm import HeadNorm
from normscope.core.packed import attend_packed, in_tiles
from normscope.core.scores import Scores
from normscope.errors import InputError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Heads = Float[Tensor, "rows heads tokens head"]
ByToken = Float[Tensor, "rows tokens 3 heads head"]
Scale = Float[Tensor, ""]


@runtime_checkable
class AttentionMask(Protocol):
    """softmax(scale · q kᵀ) v over the keys that the mask allows, for trained attention: differentiable, on any device."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        """The mixed values, for q (rows, heads, tokens, head) and k, v (rows, heads, keys, head)."""

    def stacked(self, qkv: Tensor, scale: Tensor, norm: HeadNorm | None = None) -> Tensor:
        """The same for q, k, v of the same tokens in one tensor, (rows, tokens, 3, heads, head), normalised first."""

    def scored(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, scores: Scores, sink: Tensor | None = None) -> Tensor:
        """The mixed values with other scores than a plain softmax; ``sink`` are the logits of sinks, if they have one."""

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Q kᵀ for pairs that include all that the mask allows, and which of them those are."""


class _Rectangle:
    """What attention over whole rows has in common."""

    def stacked(self, qkv: ByToken, scale: Scale, norm: HeadNorm | None = None) -> Heads:
        """The mixed values of q, k, v in one tensor."""
        qkv = qkv if norm is None else norm(qkv)
        mixed: Tensor = self(*(x.transpose(1, 2) for x in qkv.unbind(2)), scale)  # type: ignore[operator]
        return mixed


@dataclass(frozen=True)
class CausalMask(_Rectangle):
    """Every query attends to itself and to what is before it in its row; later tokens, such as padding, change nothing.

    Attributes:
        blocks: those of the mask, which a GPU needs to attend with a softcap (``causal_blocks``).
    """

    blocks: "BlockMask | None" = field(default=None, compare=False)

    def __call__(self, q: Heads, k: Heads, v: Heads, scale: Scale) -> Heads:
        """The mixed values."""
        return F.scaled_dot_product_attention(_scaled(q, scale), k, v, is_causal=True, scale=1.0)

    def scored(
        self, q: Heads, k: Heads, v: Heads, scale: Scale, scores: Scores, sink: Float[Tensor, " heads"] | None = None
    ) -> Heads:
        """The mixed values with other scores than a plain softmax; ``sink`` are the logits of sinks, if they have one."""
        return attend_causal(q, k, v, scale, scores, sink, self.blocks)

    def scores(self, q: Heads, k: Heads) -> tuple[Float[Tensor, "rows heads tokens tokens"], Bool[Tensor, "1 1 tokens tokens"]]:
        """All scores, and which are not of later keys."""
        return q @ k.mT, self.seen(q, k)

    def seen(self, q: Heads, k: Heads) -> Bool[Tensor, "1 1 tokens tokens"]:
        """Which keys every query attends to."""
        return torch.ones(1, 1, q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


@dataclass(frozen=True)
class PaddingMask(_Rectangle):
    """Every query attends to all keys that are not padding: in an encoder, or from a decoder to an encoder's tokens."""

    keys: Bool[Tensor, "rows keys"]

    def scored(self, q: Tensor, k: Tensor, v: Tensor, scale: Scale, scores: Scores, sink: Tensor | None = None) -> Tensor:
        """Refuse: only causal attention has other scores."""
        raise InputError("scores other than softmax are for causal attention, not for an encoder")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: Scale) -> Tensor:
        """The mixed values, for q (rows, heads, tokens, head) and k, v (rows, heads, keys, head)."""
        return F.scaled_dot_product_attention(_scaled(q, scale), k, v, attn_mask=self._mask, scale=1.0)

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Bool[Tensor, "rows 1 tokens keys"]]:
        """All scores, and which are of keys that are not padding."""
        return q @ k.mT, self.seen(q, k)

    def seen(self, q: Tensor, k: Tensor) -> Bool[Tensor, "rows 1 tokens keys"]:
        """Which keys every query attends to."""
        return self._mask.expand(-1, -1, q.shape[-2], -1)

    @property
    def _mask(self) -> Tensor:
        return self.keys[:, None, None, :]


@dataclass(frozen=True)
class PackedMask:
    """Examples one after another in one row, no padding between: a query attends to its own example up to its own position.

    Attributes:
        segments: the number of each token's example.
        tiles: where each tile begins, and at the end the number of tokens; a tile holds whole examples (``pack_tiles``).
        tile: the most tokens of a tile.
    """

    segments: Int[Tensor, " tokens"]
    tiles: Int[Tensor, " tiles_and_one"]
    tile: int

    def __call__(self, q: Heads, k: Heads, v: Heads, scale: Scale) -> Heads:
        """The mixed values, for one row."""
        return self.stacked(torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2), scale)

    def scored(self, q: Heads, k: Heads, v: Heads, scale: Scale, scores: Scores, sink: Tensor | None = None) -> Heads:
        """Refuse: examples with other scores than a softmax have rows of their own."""
        raise InputError("scores other than softmax need examples in rows of their own, not packed ones")

    def stacked(self, qkv: ByToken, scale: Scale, norm: HeadNorm | None = None) -> Heads:
        """The mixed values of q, k, v in one tensor, for one row."""
        return attend_packed(qkv.squeeze(0), self.segments, self.tiles, scale, self.tile, norm).transpose(0, 1)[None]

    def scores(self, q: Heads, k: Heads) -> tuple[Float[Tensor, "tiles heads tile tile"], Bool[Tensor, "tiles 1 tile tile"]]:
        """The scores within each tile, and which the mask allows."""
        by_token = torch.stack((q[0].transpose(0, 1), k[0].transpose(0, 1)), 1)
        (queries, keys), seen, _, there = in_tiles(by_token, self.segments, self.tiles, self.tile)
        return queries @ keys.mT, (seen & there[:, :, None])[:, None]


def _scaled(q: Tensor, scale: Tensor) -> Tensor:
    return (q * scale).to(q.dtype)
