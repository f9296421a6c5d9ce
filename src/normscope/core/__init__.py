"""One attention call for everyone: the fast path, the path that returns scores, weights by head, norms on q, k and v."""

from normscope.core.attention import attend, attention_weights, normalise_heads
from normscope.core.head_norm import HeadNorm
from normscope.core.heads import Attention, HeadWeights, Mixing, project, unproject
from normscope.core.masks import AttentionMask, CausalMask, PackedMask, PaddingMask
from normscope.core.packed import has_kernel, pack_tiles, tile_for
from normscope.core.scores import Scores, attend_scored, scored_weights

__all__ = [
    "Attention",
    "AttentionMask",
    "CausalMask",
    "HeadNorm",
    "HeadWeights",
    "Mixing",
    "PackedMask",
    "PaddingMask",
    "Scores",
    "attend",
    "attend_scored",
    "attention_weights",
    "has_kernel",
    "normalise_heads",
    "pack_tiles",
    "project",
    "scored_weights",
    "tile_for",
    "unproject",
]
