"""What words mean to a model apart from the layer that is probed: states of another layer, and what may follow them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core.norms import unit
from normscope.models import AttentionStep, Model, Observer, Sample
from normscope.words.search import distinct

_OPENING = "the"
_LOGITS = 2**25  # at most so many logits at a time


@dataclass(frozen=True)
class Reference:
    """Tokens as the model, without the attention of one layer, reads each of them in a shortest text: “the” and the token.

    Attributes:
        tokens: whose they are, in rising order.
        states: directions of their states in front of the reference layer, less the mean over random tokens.
        expected: log-probabilities of what follows each token, of the ``columns``; None for a model that cannot tell.
        columns: tokens that are asked for.
    """

    tokens: Int[Tensor, " tokens"]
    states: Float[Tensor, "tokens dim"]
    expected: Float[Tensor, "tokens columns"] | None
    columns: Int[Tensor, " columns"]

    def rows(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Where tokens stand among ``tokens``."""
        return torch.searchsorted(self.tokens, tokens.contiguous())

    def places(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Where tokens stand among ``columns``."""
        return torch.searchsorted(self.columns, tokens.contiguous())


def reference_layer(layers: int, probed: int) -> int:
    """The middle of the model, far from both spellings and predictions; the next layer if that one is probed."""
    middle = layers // 2
    return middle + 1 if middle == probed else middle


@torch.no_grad()
def read_alone(
    view: Model,
    tokens: Int[Tensor, " tokens"],
    columns: Int[Tensor, " columns"],
    random: Int[Tensor, " random"],
    probed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Reference:
    """Read every token behind “the”: its state in the middle of the model, and log-probabilities of the ``columns`` after it.

    Attention of the ``probed`` layer writes nothing meanwhile: what its heads do is not measured by what they did. ``random``
    tokens, which are among ``tokens``, have the mean that is taken from all states.
    """
    tokens, columns = distinct(tokens), distinct(columns)
    layer, (front, behind) = reference_layer(view.layers, probed), view.frame(_OPENING)
    place = len(front)

    def silent(step: AttentionStep) -> Tensor | None:
        return torch.zeros_like(step.v) if step.layer == probed else None

    states: list[Tensor] = []
    expected: list[Tensor] = []
    together = max(1, _LOGITS // ((len(front) + 1 + len(behind)) * view.vocabulary))
    for first in range(0, len(tokens), together):
        piece = tokens[first : first + together]
        around = [piece.new_tensor(part).expand(len(piece), -1) for part in (front, behind)]
        row = torch.cat((around[0], piece[:, None], around[1]), -1)
        sample = Sample(row, row, torch.ones_like(row, dtype=torch.bool))
        keep = Observer(silent, state=lambda at, x: states.append(x[:, place].clone()) if at == layer else None)
        said = view.forward(sample, keep)
        if view.predicts and view.causal:
            expected.append(said[:, place].log_softmax(-1)[:, columns])
        progress(first + len(piece))
    found = torch.cat(states)
    found = unit(found - found[torch.searchsorted(tokens, random)].mean(0))
    return Reference(tokens, found, torch.cat(expected) if expected else None, columns)
