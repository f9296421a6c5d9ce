"""What tokens mean to a model apart from the probed layer: hidden states of another layer, and what may follow them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core.norms import unit
from normscope.measures.search import distinct
from normscope.models import AttentionStep, Model, Observer, Sample

_OPENING = "the"
_LOGITS = 2**25  # at most this many logits at a time


@dataclass(frozen=True)
class Reference:
    """Tokens as the model, without the attention of one layer, reads each of them in a shortest text: “the” and the token.

    Attributes:
        tokens: their ids, in ascending order.
        states: directions of their hidden states before the reference layer, minus the mean over random tokens.
        expected: log-probabilities of ``columns`` after each token; None for a model that does not predict the next token.
        columns: ids of the tokens whose probabilities are needed.
    """

    tokens: Int[Tensor, " tokens"]
    states: Float[Tensor, "tokens dim"]
    expected: Float[Tensor, "tokens columns"] | None
    columns: Int[Tensor, " columns"]

    def rows(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The places of tokens among ``tokens``."""
        return torch.searchsorted(self.tokens, tokens.contiguous())

    def places(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The places of tokens among ``columns``."""
        return torch.searchsorted(self.columns, tokens.contiguous())


def reference_layer(layers: int, probed: int) -> int:
    """The middle of the model, far from both spellings and predictions; the next layer if that one is probed."""
    middle = layers // 2
    return middle + 1 if middle == probed else middle


@torch.no_grad()
def read_alone(
    model: Model,
    tokens: Int[Tensor, " tokens"],
    columns: Int[Tensor, " columns"],
    random: Int[Tensor, " random"],
    probed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> Reference:
    """Read every token after “the”: its hidden state in the middle of the model, and log-probabilities of the next token.

    The attention of the ``probed`` layer is ablated: what its heads do is not measured by what they did. The mean over
    ``random`` tokens, which are among ``tokens``, is subtracted from all states.
    """
    tokens, columns = distinct(tokens), distinct(columns)
    layer, (front, back) = reference_layer(model.layers, probed), model.frame(_OPENING)
    place = len(front)
    states: list[Tensor] = []
    expected: list[Tensor] = []

    def ablated(step: AttentionStep) -> Tensor | None:
        return torch.zeros_like(step.v) if step.layer == probed else None

    def keep(at: int, x: Tensor) -> None:
        if at == layer:
            states.append(x[:, place].clone())

    together = max(1, _LOGITS // ((len(front) + 1 + len(back)) * model.vocabulary))
    for first in range(0, len(tokens), together):
        piece = tokens[first : first + together]
        around = [piece.new_tensor(part).expand(len(piece), -1) for part in (front, back)]
        row = torch.cat((around[0], piece[:, None], around[1]), -1)
        logits = model.forward(Sample.of(row), Observer(attention=ablated, state=keep))
        if model.reads_out and model.causal:
            expected.append(logits[:, place].log_softmax(-1)[:, columns])
        progress((first + len(piece)) / len(tokens))
    read = torch.cat(states)
    read = unit(read - read[torch.searchsorted(tokens, random)].mean(0))
    return Reference(tokens, read, torch.cat(expected) if expected else None, columns)
