"""Hidden states as measures take them: the part that the model's norm keeps, token by token."""

from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import visible_part
from normscope.measures.base import Subject
from normscope.models import BlockNorm, Model
from normscope.schemes import NormKind

Tokens = Float[Tensor, "tokens dim"]


def norm_kind(model: Model) -> NormKind:
    """The kind of the norm that reads the last hidden states: directions are those that it keeps."""
    norm = model.final_norm or model.read_norm(model.layers)
    return "layer" if norm is not None and norm.kind == "layer" else "rms"


def output_norm(model: Model, layer: int) -> BlockNorm | None:
    """The norm of what a layer's attention computes, if it has one."""
    return _norm(model, layer, "output")


def stream_norm(model: Model, layer: int) -> BlockNorm | None:
    """The norm of the residual stream after a layer's attention, if it has one."""
    return _norm(model, layer, "stream")


def _norm(model: Model, layer: int, slot: str) -> BlockNorm | None:
    return next((n for n in model.norms if (n.layer, n.sublayer, n.slot) == (layer, "attention", slot)), None)


class TokenStates:
    """Hidden states (rows, tokens, dim) of a forward pass as float64 tokens × dim on the CPU, without padding.

    With LayerNorm they are centred: their mean over channels is invisible to the model. ``counted`` marks the tokens that means
    are taken over, which leave out the first of every row.
    """

    def __init__(self, subject: Subject) -> None:
        self.kind = norm_kind(subject.model)
        self._mask = subject.sample.attention_mask
        self.counted = subject.counted[self._mask].cpu()

    def __call__(self, x: Float[Tensor, "rows positions dim"]) -> Tokens:
        """All tokens; index with ``counted`` to leave out the first of every row."""
        return visible_part(x, self.kind)[self._mask].double().cpu()
