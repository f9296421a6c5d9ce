"""How what a layer reads follows from the states before its norm."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import centre
from normscope.errors import InputError
from normscope.models import AttentionStep, BlockNorm, Model

_FITS = 1e-3


@dataclass(frozen=True)
class Reading:
    """Read = factor · norm(states), or factor · states where no norm stands before.

    Attributes:
        states: those before the nearest norm. Where that is the norm of the stream itself (Post-LN), lengths before it are not
            known, and are taken as equal.
        norm: the norm between; None if there is none.
        factor: of the layer.
    """

    states: Float[Tensor, "rows tokens dim"]
    norm: BlockNorm | None
    factor: float

    def __call__(self, states: Float[Tensor, "rows tokens dim"]) -> Float[Tensor, "rows tokens dim"]:
        """What would be read if the states were these."""
        return self.factor * (states if self.norm is None else self.norm(states))

    def before(self, W: Float[Tensor, "heads dim head"]) -> Float[Tensor, "heads dim head"]:
        """W as it acts on the states: norm(x)ᵀW = xᵀ(before W)·√d/|x| + a constant, with gain and centring moved into W."""
        if self.norm is None:
            return W
        scaled = self.norm.gain.to(W)[:, None] * W
        return centre(scaled.mT).mT if self.norm.kind == "layer" else scaled


def reading_of(view: Model, step: AttentionStep, norms: Sequence[BlockNorm]) -> Reading:
    """How a layer reads: the norm of its input, else that of the stream, else none, whichever gives what was read.

    Args:
        view: the model.
        step: a layer of it while it runs.
        norms: those of the model.
    """
    own = [_beside(step.stream, norm) for norm in norms]
    for states, norm in _candidates(view, step, own):
        made = states if norm is None else norm(states)
        factor = float((made * step.input).sum() / made.square().sum())
        if float((factor * made - step.input).norm()) <= _FITS * float(step.input.norm()):
            return Reading(states, norm, factor)
    raise InputError(f"what layer {step.layer} of '{view.name}' reads is neither its stream nor a norm of it")


def _candidates(view: Model, step: AttentionStep, norms: Sequence[BlockNorm]) -> Iterator[tuple[Tensor, BlockNorm | None]]:
    """States and a norm that may stand between them and what is read."""
    for norm in norms:
        if norm.slot == "input" and norm.sublayer == "attention" and norm.layer == step.layer:
            yield step.stream, norm
    behind = ("stream", step.layer - 1) if step.layer else ("embedding", None)
    for norm in reversed(norms):
        if (norm.slot, norm.layer) == behind:
            moved = step.stream if norm.bias is None else step.stream - norm.bias
            yield torch.where(norm.gain != 0, moved / norm.gain, 0.0), norm
    stage = None if view.scheme is None else view.scheme.at(step.layer, view.layers)
    if stage is not None and stage.attention.stream == "norm":
        gain = torch.ones_like(step.stream[0, 0])
        yield step.stream, BlockNorm("stream", step.layer, "attention", stage.norm, gain, None, 0.0)
    yield step.stream, None


def _beside(states: Tensor, norm: BlockNorm) -> BlockNorm:
    """The norm on the device and in the numbers of the states."""
    return replace(norm, gain=norm.gain.to(states), bias=None if norm.bias is None else norm.bias.to(states))
