"""Faults of a forward pass: states, attention and updates that are 0 or non-finite, which no measure is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from normscope.core.norms import visible_part
from normscope.errors import InputError
from normscope.measures.states import norm_kind
from normscope.models.describe import layers_named, ranges

if TYPE_CHECKING:
    from normscope.measures.base import LayerAttention, Subject
    from normscope.models import SublayerStep

_FEWEST = 2  # tokens that means are taken over
_UNDERFLOW = 1e-19  # the square of less is no normal number in float32


@dataclass(frozen=True)
class Fault:
    """What is 0 or non-finite in a layer.

    Attributes:
        layer: its number; that of hidden states is the layer that they enter. None for the whole model.
        where: ``states``, ``weights``, ``tokens``, or a sublayer such as ``attention``.
        reason: what is wrong, for people.
        measured: whether measures are given it all the same.
    """

    layer: int | None
    where: str
    reason: str
    measured: bool


class Gate:
    """Decides what of a forward pass measures are given, and reports the rest.

    States of which a token is non-finite or 0 (with LayerNorm, but for its mean) are left out, with the attention and the
    updates of the layer that they enter; so is attention whose input is 0, or whose queries, keys, values or logits are
    non-finite. Costs a few passes over the states, and nothing of n × n unless a logit may overflow.
    """

    def __init__(self, subject: "Subject", report: Callable[[Fault], None]) -> None:
        self.name, self.layers, self._present_in = subject.model.name, subject.model.layers, subject.present_in
        if int(subject.counted.sum()) < _FEWEST and subject.without_embedding:
            raise InputError(
                f"'{self.name}' has an embedding of zeros for {subject.without_embedding:,} of the "
                f"{int(subject.viewed.attention_mask.sum()):,} tokens of the sample: too few are left to be measured"
            )
        self._kind = norm_kind(subject.model)
        self._report, self._faults = report, list[Fault]()
        self._passed = set[int]()

    def state(self, layer: int, x: Float[Tensor, "rows tokens dim"]) -> bool:
        """Whether the hidden states before a layer can be measured."""
        where = "after the last layer" if layer == self.layers else "before the layer"
        present = self._present_in(x)
        broken = _first_non_finite(x, present)
        if broken:
            return self._fault(layer, "states", f"hidden states {where} became non-finite (NaN/Inf) at {broken}")
        zero = int((~visible_part(x, self._kind)[present].any(-1)).sum())
        if zero:
            whose = "" if zero == int(present.sum()) else f" for {zero:,} token{'s' * (zero > 1)}"
            return self._fault(layer, "states", f"hidden states {where} are 0{whose}")
        self._passed.add(layer)
        return True

    def attention(self, attention: "LayerAttention") -> bool:
        """Whether the attention of a layer can be measured."""
        step, layer = attention.step, attention.layer
        if layer not in self._passed:
            return False
        if not float(step.input[self._present_in(step.input)].abs().max()) > _UNDERFLOW:
            return self._fault(layer, "attention", "the input of attention is 0 or underflows")
        by_head = {name: x.transpose(1, 2) for name, x in (("q", step.q), ("k", step.k), ("v", step.v))}
        parts = {name: x[self._present_in(x)] for name, x in by_head.items()}
        broken = [name for name, x in parts.items() if not bool(x.isfinite().all())]
        if broken:
            return self._fault(layer, "attention", f"{' and '.join(broken)} became non-finite (NaN/Inf)")
        for name, x in parts.items():
            zero = (~x.any(-1).any(0)).nonzero().flatten().tolist()
            if zero:
                heads = f"head{'s' * (len(zero) > 1)} {ranges(zero)}" if len(zero) < x.shape[1] else "all heads"
                self._fault(layer, "attention", f"{name} is 0 in {heads}", measured=True)
        scale = max(float(torch.as_tensor(step.scale).max()), 1.0)
        largest = float(parts["q"].abs().max()) * float(parts["k"].abs().max()) * step.q.shape[-1] * scale
        if largest > torch.finfo(step.q.dtype).max and bool((step.scale * attention.raw_scores == torch.inf).any()):
            return self._fault(layer, "attention", "attention logits overflow")
        return True

    def sublayer(self, step: "SublayerStep") -> bool:
        """Whether a sublayer can be measured."""
        if step.layer not in self._passed:
            return False
        for x in (step.output, step.update, step.after):
            broken = x is not None and _first_non_finite(x, self._present_in(x))
            if broken:
                return self._fault(step.layer, step.sublayer, f"the update became non-finite (NaN/Inf) at {broken}")
        if not bool(step.update[self._present_in(step.update)].any()):
            self._fault(step.layer, step.sublayer, "the update is 0", measured=True)
        return True

    def close(self) -> None:
        """Refuse a model without a layer whose states before and after it can be measured."""
        if not any(layer + 1 in self._passed for layer in self._passed):
            fault = next(fault for fault in self._faults if not fault.measured)
            raise InputError(f"no layer of '{self.name}' can be measured: {layers_named([fault.layer or 0])}: {fault.reason}")

    def _fault(self, layer: int, where: str, reason: str, *, measured: bool = False) -> bool:
        fault = Fault(layer, where, reason, measured)
        self._faults.append(fault)
        self._report(fault)
        return measured


def _first_non_finite(x: Float[Tensor, "rows tokens dim"], present: Bool[Tensor, "rows tokens"]) -> str:
    """The first token with a value that is not finite, in words; empty if there is none."""
    if bool(x.isfinite().all()):
        return ""
    broken = (~x.isfinite().all(-1) & present).nonzero()
    if not len(broken):
        return ""
    row, token = broken[0].tolist()
    return f"token {token}" if len(x) == 1 else f"row {row}, token {token}"
