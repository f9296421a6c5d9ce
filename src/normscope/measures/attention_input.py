"""How the input of a layer's attention follows from the residual stream: through a norm, or without one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import centre, factor_between, same
from normscope.errors import InputError
from normscope.models import AttentionStep, BlockNorm, Model

_FITS = 1e-3
_ROUNDINGS = 4  # of a norm in half precision, which rounds before its gain and after it


@dataclass(frozen=True)
class AttentionInput:
    """Input = factor · norm(states), or factor · states where there is no norm.

    Attributes:
        states: the hidden states before the nearest norm. If that norm is the stream's (Post-LN), the norms of tokens before it
            are unknown and taken as equal.
        norm: the norm between states and input; None if there is none.
        factor: of the layer.
    """

    states: Float[Tensor, "rows tokens dim"]
    norm: BlockNorm | None
    factor: float

    def __call__(self, states: Float[Tensor, "rows tokens dim"]) -> Float[Tensor, "rows tokens dim"]:
        """The input of attention for other states."""
        return self.factor * (states if self.norm is None else self.norm(states))

    def before(self, W: Float[Tensor, "heads dim head"]) -> Float[Tensor, "heads dim head"]:
        """W as it acts on the states: norm(x)ᵀW = xᵀ(before W)·√d/|x| + a constant, with gain and centring moved into W."""
        if self.norm is None:
            return W
        if self.norm.pointwise:
            raise InputError(f"the input norm is {self.norm.kind}, which is not linear up to the norm of the states")
        scaled = self.norm.gain.to(W)[:, None] * W
        return centre(scaled.mT).mT if self.norm.kind == "layer" else scaled


def attention_input(model: Model, step: AttentionStep) -> AttentionInput:
    """The norm at the layer's input, else that of the stream, else none: whichever gives the observed input."""
    tolerance = max(_FITS, _ROUNDINGS * torch.finfo(model.dtype).eps)
    norms = [_beside(step.stream, norm) for norm in model.norms]
    for states, norm in _candidates(model, step, norms):
        normed = states if norm is None else norm(states)
        factor = factor_between(step.input, normed)
        if same(factor * normed, step.input, tolerance):
            return AttentionInput(states, norm, factor)
    raise InputError("unsupported architecture: the input of attention is neither the residual stream nor a norm of it")


def _candidates(model: Model, step: AttentionStep, norms: Sequence[BlockNorm]) -> Iterator[tuple[Tensor, BlockNorm | None]]:
    """Hidden states and a norm that may give the input of attention."""
    for norm in norms:
        if norm.slot in ("input", "entry") and norm.sublayer == "attention" and norm.layer == step.layer:
            yield step.stream, norm
    previous = ("stream", step.layer - 1) if step.layer else ("embedding", None)
    for norm in reversed(norms):
        if (norm.slot, norm.layer) == previous:
            moved = step.stream if norm.bias is None else step.stream - norm.bias
            yield torch.where(norm.gain != 0, moved / norm.gain, 0.0), norm
    scheme = model.schemes[step.layer]
    stage = None if scheme is None else scheme.at(step.layer, model.layers)
    if stage is not None and stage.attention.stream == "norm":
        gain = torch.ones_like(step.stream[0, 0])
        yield step.stream, BlockNorm("stream", step.layer, "attention", stage.norm, gain, None, 0.0)
    yield step.stream, None


def _beside(states: Tensor, norm: BlockNorm) -> BlockNorm:
    """The norm with its parameters on the states' device and in their dtype."""
    return replace(norm, gain=norm.gain.to(states), bias=None if norm.bias is None else norm.bias.to(states))
