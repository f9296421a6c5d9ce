"""One pass of a prompt: what the model atlas keeps of it to answer later requests."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.measures.base import LayerAttention, PassObserver, Subject, Tables
from normscope.models import Softmax
from normscope.results.conventions import NEAR_ONE_HOT


@dataclass(frozen=True)
class LayerWeights:
    """The attention of one layer for one prompt.

    Attributes:
        raw: q·k (heads, queries, keys), −inf where a query does not attend.
        weights: attention weights, likewise.
        softmax: from the first to the second.
    """

    raw: Float[Tensor, "heads queries keys"]
    weights: Float[Tensor, "heads queries keys"]
    softmax: Softmax


@dataclass
class Reading:
    """One pass of a prompt, with what later requests are answered from.

    Attributes:
        subject: model and sample.
        note: what to know about the prompt.
        tables: of the measures that observed the pass; those that come later are added.
        states: the hidden states before every layer and after the last.
        attention: by layer.
        logits: of every position; None for a stream whose states have none.
        missing: why measures were not taken, by name.
        noisy: the last disturbance, and the attention weights by layer under it.
        whole: whether the measures that need the matrices of heads were taken too.
    """

    subject: Subject
    note: str
    tables: Tables = field(default_factory=dict)
    states: list[Float[Tensor, "tokens dim"]] = field(default_factory=list)
    attention: dict[int, LayerWeights] = field(default_factory=dict)
    logits: Float[Tensor, "tokens vocabulary"] | None = None
    missing: dict[str, str] = field(default_factory=dict)
    noisy: tuple[Any, dict[int, Tensor]] | None = None
    whole: bool = False

    @cached_property
    def tokens(self) -> list[str]:
        """The texts of the positions."""
        return self.subject.model.words(self.subject.viewed.tokens[0])


class Keeper(PassObserver):
    """Keeps states, attention and logits of a pass, and of every head entropy and largest weights, as ``sparsity`` has them."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.entropy: list[dict[str, Any]] = []
        self.largest: list[dict[str, Any]] = []

    def attention(self, attention: LayerAttention) -> None:
        """Attention of a layer, and entropy and largest weights of its heads."""
        weights = attention.weights[0]
        softmax = attention.step.softmax.select(attention.raw_scores.shape, lambda x: x[0])
        self.reading.attention[attention.layer] = LayerWeights(attention.raw_scores[0], weights, softmax)
        chosen = attention.counted[0]
        if bool(chosen.any()):
            entropy = torch.special.entr(weights).sum(-1)[:, chosen].double().mean(-1).tolist()
            self.entropy += [{"layer": attention.layer, "head": head, "entropy": value} for head, value in enumerate(entropy)]
            largest = weights.amax(-1)[:, chosen].double()
            shares, means = (largest >= NEAR_ONE_HOT).double().mean(-1).tolist(), largest.mean(-1).tolist()
            self.largest += [
                {"layer": attention.layer, "head": head, "share": share, "mean_max": mean}
                for head, (share, mean) in enumerate(zip(shares, means, strict=True))
            ]

    def state(self, layer: int, x: Tensor) -> None:
        """Hidden states before a layer, or after the last."""
        self.reading.states.append(x[0].clone())

    def logits(self, logits: Tensor) -> None:
        """Logits of every position, if the stream has any."""
        self.reading.logits = logits[0].float() if self.reading.subject.model.reads_out else None

    def tables(self) -> Tables:
        """Entropy and largest weights by layer and head."""
        tables = {"entropy": self.entropy, "sparsity": self.largest}
        return {name: pd.DataFrame(rows) for name, rows in tables.items() if rows}
