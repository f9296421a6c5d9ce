"""The residual update of a sublayer: the one place where slots become arithmetic.

A sublayer computes y = f(read(x)) for hidden states x, with f attention or a feed-forward layer. An ``Update`` gives the rest:

    read(x)        = factor · input(x)
    written(x, y)  = step · output(y), or step · the part of y that is orthogonal to x
    state(x, y)    = stream(carry · x + written(x, y))
    velocity(x, y) = ẋ of the flow whose unit Euler step is ``state``

``input``, ``output`` and ``stream`` are norms, or None where the slot is empty. Which norms decides the convention:

- theory: ``theory_norm(kind)``, radius 1 and no parameters;
- models: their own norms, gain · √d · x/|x| with their eps: any callable, such as an ``nn.Module``;
- replay: ``SphereNorm(kind, radius)`` with the radius that the recorded states have.

``Update.of(slots, at, norms)`` evaluates the formulas of the slots at a place in depth. Learned values replace them: a learned
alpha in ``at``, a learned step or carry as arguments. A model that knows its learned values hands out the ``Update`` of every
sublayer; whoever needs what a sublayer reads, adds or leaves behind asks that object:

    y = attention(update.read(x));  x = update.state(x, y)

``step``, ``carry`` and ``factor`` are numbers, vectors over the components, or tensors (schemes, 1, 1) for several schemes at
once (``Update.stacked``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core.norms import PointwiseNorm, SphereNorm, orthogonal_part
from normscope.errors import InputError
from normscope.schemes.scheme import At, Slots

Tokens = Float[Tensor, "*batch tokens dim"]
Norm = Callable[[Tensor], Tensor]
_NORM_SLOTS = ("input", "output", "stream")
_NUMBERS = ("factor", "step", "carry")


@dataclass(frozen=True)
class SomeNorm:
    """The norms of several schemes: ``norms[i]`` where ``which`` is i, none where it is −1."""

    norms: tuple[SphereNorm | PointwiseNorm, ...]
    which: Int[Tensor, "schemes 1 1"]

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised or not, scheme by scheme."""
        return self._chosen(x, [(i, norm(x)) for i, norm in enumerate(self.norms)])

    def tangent(self, x: Tensor, u: Tensor) -> Tensor:
        """The part of u along the sphere of each scheme."""
        return self._chosen(u, [(i, norm.tangent(x, u)) for i, norm in enumerate(self.norms) if isinstance(norm, SphereNorm)])

    def _chosen(self, otherwise: Tensor, values: list[tuple[int, Tensor]]) -> Tensor:
        for i, value in values:
            otherwise = torch.where(self.which == i, value, otherwise)
        return otherwise


@dataclass(frozen=True)
class Update:
    """x ← stream(carry · x + step · output(f(factor · input(x)))) at one place in depth.

    With ``tangent`` the part of the output that is orthogonal to x is added, and no other.
    """

    input: Norm | None = None
    output: Norm | None = None
    stream: Norm | None = None
    factor: Any = 1.0
    step: Any = 1.0
    carry: Any = 1.0
    tangent: bool | Tensor = False

    @classmethod
    def of(cls, slots: Slots, at: At, norms: Norm | Mapping[str, Norm], *, step: Any = None, carry: Any = None) -> "Update":
        """The update that slots make at a place in depth.

        Args:
            slots: of the sublayer.
            at: time, depth and alpha, which may be learned.
            norms: the norm of every slot that has one, or one for all of them.
            step: a learned step in place of the formula.
            carry: a learned carry in place of the formula.
        """
        filled = {"input": slots.reads_norm, "output": slots.output == "norm", "stream": slots.stream == "norm"}
        chosen = {slot: norms[slot] if isinstance(norms, Mapping) else norms for slot in _NORM_SLOTS if filled[slot]}
        return cls(
            **chosen,
            factor=slots.number("input", at),
            step=slots.number("step", at) if step is None else step,
            carry=slots.number("carry", at) if carry is None else carry,
            tangent=slots.output == "tangent",
        )

    @classmethod
    def stacked(
        cls,
        updates: Sequence["Update"],
        norms: tuple[SphereNorm | PointwiseNorm, ...],
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> "Update":
        """Several updates as one, for tokens of shape (..., schemes, tokens, dim); ``norms`` are those that any of them has."""

        def column(values: list[Any], kind: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=kind, device=device)[:, None, None]

        places: dict[Norm | None, int] = {None: -1, **{norm: i for i, norm in enumerate(norms)}}
        chosen = {slot: column([places[getattr(update, slot)] for update in updates], torch.int64) for slot in _NORM_SLOTS}
        made: dict[str, Any] = {slot: SomeNorm(norms, which) for slot, which in chosen.items()}
        made |= {name: column([getattr(update, name) for update in updates], dtype) for name in _NUMBERS}
        if any(update.tangent for update in updates):
            made["tangent"] = column([update.tangent for update in updates], torch.bool)
        return cls(**made)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a stacked update by name, as ``with_tensors`` takes them; ``tangent`` only if any scheme has it."""
        norms = {slot: norm.which for slot in _NORM_SLOTS if isinstance(norm := getattr(self, slot), SomeNorm)}
        some = {"tangent": self.tangent} if isinstance(self.tangent, Tensor) else {}
        return {**norms, **some, **{name: getattr(self, name) for name in _NUMBERS}}

    def with_tensors(self, tensors: Mapping[str, Any]) -> "Update":
        """The same norms for other schemes or on another device: choices and numbers of shape (schemes, 1, 1) by name."""
        norms = {slot: replace(norm, which=tensors[slot]) for slot in _NORM_SLOTS if (norm := getattr(self, slot)) is not None}
        return replace(self, **{**tensors, **norms})

    def read(self, x: Tokens) -> Tokens:
        """What the sublayer reads: factor · input(x), or x itself."""
        return x if self.input is None else self.input(x) * self.factor

    def written(self, x: Tokens, y: Tokens) -> Tokens:
        """What the sublayer adds to the residual stream, for y = f(read(x))."""
        added: Tensor = self.step * self._added(x, y)
        return added

    def settle(self, x: Tokens) -> Tokens:
        """Where the stream keeps a token: on the sphere of its norm, or where it is."""
        return x if self.stream is None else self.stream(x)

    def state(self, x: Tokens, y: Tokens, stride: float | Tensor = 1.0) -> Tokens:
        """The hidden states after the sublayer; with a ``stride`` h < 1, those after an Euler step of length h of its flow.

        A normalised stream cancels common factors, so there h scales (step/carry)·u against x; a free stream moves by
        h·((carry − 1)·x + step·u), u = output(y). At h = 1 both are the sublayer itself.
        """
        if not isinstance(stride, Tensor) and stride == 1:
            return self.settle(self.carry * x + self.step * self._added(x, y))
        kept = _choose(self._on_sphere, lambda: self.carry, lambda: 1 + stride * (self.carry - 1))
        return self.settle(kept * x + (stride * self.step) * self._added(x, y))

    def velocity(self, x: Tokens, y: Tokens) -> Tokens:
        """ẋ: (carry − 1)·x + step·u for a free stream, (step/carry)·P_x u for x on the sphere of a normalised one.

        The stream's norm is a ``SphereNorm``: with a gain a layer does not tend to the identity, and there is no flow.
        """
        u = self._added(x, y)
        sphere = self.stream
        if isinstance(sphere, PointwiseNorm):
            raise InputError(f"a stream through {sphere.kind} has no flow: without any update it still changes x; use layers")
        if sphere is not None and not isinstance(sphere, SphereNorm | SomeNorm):
            raise TypeError(f"a stream with {sphere!r} has no flow; only SphereNorm does")
        moving: Tensor = _choose(
            self._on_sphere,
            lambda: (self.step / self.carry) * sphere.tangent(x, u),  # type: ignore[union-attr]
            lambda: (self.carry - 1) * x + self.step * u,
        )
        return moving

    def _added(self, x: Tensor, y: Tensor) -> Tensor:
        """The output's norm of y, or its part that is orthogonal to x."""
        u = y if self.output is None else self.output(y)
        return u if self.tangent is False else _choose(self.tangent, lambda: orthogonal_part(u, x), lambda: u)

    @property
    def _on_sphere(self) -> bool | Tensor:
        return self.stream.which >= 0 if isinstance(self.stream, SomeNorm) else self.stream is not None


def _choose(flag: bool | Tensor, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """``yes()`` or ``no()`` for one scheme; for several, each where its flag is true or false."""
    if isinstance(flag, Tensor):
        return torch.where(flag, yes(), no())
    return yes() if flag else no()
