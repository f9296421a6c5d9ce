"""Attention with other scores than a plain softmax: a softcap, a temperature of length, a sink.

For query i, which sees n_i keys, with s_ij = scale · ⟨q_i, k_j⟩:

    l_ij = cap · tanh(τ(n_i) s_ij / cap),      w_ij = e^{l_ij} / (e^b + Σ_j e^{l_ij}),      out_i = Σ_j w_ij v_j.

A sink is one more logit b for each head, whose value is the zero vector: of the plain softmax, which has no e^b, it leaves the
share 1 − m_i, where m_i = e^b / (e^b + Σ_j e^{l_ij}) is the sink's mass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.attention import BLOCK_ENTRIES, later_keys

Queries = Float[Tensor, "*batch tokens head"]
Keys = Float[Tensor, "*batch keys head"]


@dataclass(frozen=True)
class Scores:
    """How products of queries and keys become attention weights; ``Scores()`` is the plain softmax.

    Attributes:
        cap: c in c · tanh(s/c).
        sink: where the sink's logit starts, which training may learn for each head.
        temperature: the factor on a query's logits, of the numbers of keys that queries see, (tokens,) → (tokens,).
    """

    cap: float | None = None
    sink: float | None = None
    temperature: Callable[[Tensor], Tensor] | None = None

    @property
    def plain(self) -> bool:
        """Whether this is the softmax of the logits as they are."""
        return self == Scores()

    def logits(self, scores: Float[Tensor, "*batch tokens keys"], seen: Float[Tensor, " tokens"]) -> Tensor:
        """The logits l of scaled scores, for queries that see so many keys each."""
        if self.temperature is not None:
            scores = scores * self.temperature(seen).to(scores.dtype)[:, None]
        return scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)


def attend_scored(
    q: Queries,
    k: Keys,
    v: Float[Tensor, "*batch keys value"],
    scale: float | Tensor,
    scores: Scores,
    causal: bool = False,
    sink_logits: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "*batch tokens value"]:
    """Σ_j w_ij v_j in blocks of queries, so that no tokens × tokens tensor is held; differentiable.

    Args:
        q: queries (…, heads, tokens, head); k and v likewise, of any number of keys.
        k: keys.
        v: values.
        scale: the factor on ⟨q, k⟩.
        scores: how logits become weights.
        causal: whether query i sees keys 0 to i alone.
        sink_logits: the learned logits of the sinks, one for each head; ``scores.sink`` for all of them if None.
    """
    rows = max(1, BLOCK_ENTRIES[q.device.type] // (k.shape[-2] * math.prod(q.shape[:-2])))
    blocks = [
        scored_weights(q[..., first : first + rows, :], k, scale, scores, causal, sink_logits, first) @ v
        for first in range(0, q.shape[-2], rows)
    ]
    return torch.cat(blocks, -2)


def scored_weights(
    q: Queries,
    k: Keys,
    scale: float | Tensor,
    scores: Scores,
    causal: bool = False,
    sink_logits: Float[Tensor, " heads"] | None = None,
    first: int = 0,
) -> Float[Tensor, "*batch tokens keys"]:
    """The weights w_ij themselves, of queries ``first``, ``first`` + 1, …; they sum to 1 less the sink's mass."""
    queries, keys = q.shape[-2], k.shape[-2]
    here = torch.arange(first, first + queries, device=q.device, dtype=torch.float64)
    logits = scores.logits(scale * (q @ k.mT), here + 1 if causal else torch.full_like(here, keys))
    if causal:
        logits = logits.masked_fill(later_keys(queries, keys, first, q.device), -math.inf)
    if scores.sink is None:
        return logits.softmax(-1)
    sink = logits.new_tensor(scores.sink) if sink_logits is None else sink_logits.to(logits.dtype)[:, None, None]
    return torch.cat((logits, sink.expand(*logits.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
