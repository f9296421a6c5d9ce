"""The layer and the flow of a sublayer, computed from its slots.

Norms here have radius 1 and no parameters, as in theory. A sublayer reads (``read``), some map f follows (attention, a
feed-forward layer), and from what it gives the written update, the layer and the flow follow:

    u = written(f(read(x))),        layer(x, u) = stream(carry·x + step·u),        velocity(x, u) = ẋ.

The slots enter as ``Coefficients``: plain numbers for one scheme, or tensors of shape (schemes, 1, 1) for several at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import centre, tangent, unit
from normscope.errors import InputError
from normscope.schemes.scheme import At, NormKind, Slots

Tokens = Float[Tensor, "*batch tokens dim"]


@dataclass(frozen=True)
class Coefficients:
    """The slots of a sublayer at one place in depth: flags for the norms, numbers for the factors."""

    kind: NormKind
    reads_norm: bool | Tensor
    input_factor: Any
    output_norm: bool | Tensor
    step: Any
    carry: Any
    stream_norm: bool | Tensor


def coefficients(slots: Slots, kind: NormKind, at: At) -> Coefficients:
    """The slots of one scheme at a place in depth."""
    step, carry = slots.formulas
    return Coefficients(
        kind=kind,
        reads_norm=slots.reads_norm,
        input_factor=slots.input_factor(at.values),
        output_norm=slots.output == "norm",
        step=step(at.values),
        carry=carry(at.values),
        stream_norm=slots.stream == "norm",
    )


def stack(several: Sequence[Coefficients], device: torch.device | str, dtype: torch.dtype) -> Coefficients:
    """Several schemes as one, for tokens of shape (..., schemes, tokens, dim)."""
    kinds = {one.kind for one in several}
    if len(kinds) != 1:
        raise InputError("schemes that are simulated together need the same norm, rms or layer")

    def column(name: str, kind_of_number: torch.dtype) -> Tensor:
        values = [getattr(one, name) for one in several]
        return torch.tensor(values, dtype=kind_of_number, device=device)[:, None, None]

    flags = {name: column(name, torch.bool) for name in ("reads_norm", "output_norm", "stream_norm")}
    numbers = {name: column(name, dtype) for name in ("input_factor", "step", "carry")}
    return Coefficients(kind=kinds.pop(), **flags, **numbers)


def normalise(x: Tokens, kind: NormKind) -> Tokens:
    """The norm that a slot stands for: x/|x|, with LayerNorm of the centred x."""
    return unit(kept_part(x, kind))


def kept_part(x: Tokens, kind: NormKind) -> Tokens:
    """What a norm of that kind can see of x: all of it, or with LayerNorm the part orthogonal to 1."""
    return centre(x) if kind == "layer" else x


def read(c: Coefficients, x: Tokens) -> Tokens:
    """What the sublayer reads: c(t)·Norm(x), or x itself."""
    seen: Tensor = choose(c.reads_norm, lambda: normalise(x, c.kind) * c.input_factor, lambda: x)
    return seen


def written(c: Coefficients, y: Tokens) -> Tokens:
    """What the sublayer writes before its step: Norm(y) or y, for y = f(read(x))."""
    u: Tensor = choose(c.output_norm, lambda: normalise(y, c.kind), lambda: y)
    return u


def settle(c: Coefficients, x: Tokens) -> Tokens:
    """Where a token comes to rest: on the unit sphere with a normalised stream, where it is otherwise."""
    settled: Tensor = choose(c.stream_norm, lambda: normalise(x, c.kind), lambda: x)
    return settled


def layer(c: Coefficients, x: Tokens, u: Tokens, stride: float = 1.0) -> Tokens:
    """One layer: stream(carry·x + step·u); with a ``stride`` h < 1, the Euler step of length h of its flow.

    A normalised stream cancels common factors, so there h scales (step/carry)·u against x; a free stream moves by
    h·((carry − 1)·x + step·u). At h = 1 both are the layer itself.
    """
    kept = choose(c.stream_norm, lambda: c.carry, lambda: 1 + stride * (c.carry - 1))
    return settle(c, kept * x + (stride * c.step) * u)


def velocity(c: Coefficients, x: Tokens, u: Tokens) -> Tokens:
    """The flow ẋ whose unit Euler step is the layer; with a normalised stream x must be of unit length."""
    moving: Tensor = choose(
        c.stream_norm,
        lambda: (c.step / c.carry) * tangent(x, kept_part(u, c.kind)),
        lambda: (c.carry - 1) * x + c.step * u,
    )
    return moving


def choose(flag: bool | Tensor, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """``yes()`` or ``no()`` for one scheme; for several, each where its flag says."""
    if isinstance(flag, Tensor):
        return torch.where(flag, yes(), no())
    return yes() if flag else no()
