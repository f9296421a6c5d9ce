"""One attention call for everyone: the fast path, the path that returns scores, weights by head, norms on q, k and v."""

from normscope.attention.core import attend, attention_weights, fastest_backend, normalise_heads, steady_backend
from normscope.attention.heads import Attention, HeadWeights

__all__ = ["Attention", "HeadWeights", "attend", "attention_weights", "fastest_backend", "normalise_heads", "steady_backend"]
