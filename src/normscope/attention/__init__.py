"""One attention call for everyone: the fast path, the path that returns scores, weights by head, norms on q, k and v."""

from normscope.attention.core import attend, attention_weights, fastest_backend, normalise_heads, steady_backend
from normscope.attention.head_norm import HeadNorm
from normscope.attention.heads import Attention, HeadWeights, project, unproject
from normscope.attention.packed import has_kernel, pack_tiles, tile_for
from normscope.attention.reach import Causal, Packed, Present, Reach

__all__ = [
    "Attention",
    "Causal",
    "HeadNorm",
    "HeadWeights",
    "Packed",
    "Present",
    "Reach",
    "attend",
    "attention_weights",
    "fastest_backend",
    "has_kernel",
    "normalise_heads",
    "pack_tiles",
    "project",
    "steady_backend",
    "tile_for",
    "unproject",
]
