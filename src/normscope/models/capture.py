"""Values of a forward pass by the names of TransformerLens: ``with model.capture("resid_mid", "pattern") as c:``."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from normscope.errors import InputError, did_you_mean
from normscope.models.observe import AttentionStep, Observer, SublayerStep

_ATTENTION: dict[str, Callable[[AttentionStep], Tensor]] = {
    "q": lambda step: step.q.clone(),
    "k": lambda step: step.k.clone(),
    "v": lambda step: step.v.clone(),
    "scores": lambda step: step.logits(step.raw_scores()),
    "pattern": lambda step: step.weights(),
}
_UPDATES = {"attention": "attn_out", "cross": "cross_out", "mixer": "mixer_out", "feedforward": "mlp_out"}
_CROSS = {f"cross_{name}": value for name, value in _ATTENTION.items()}
NAMES = ("resid_pre", "resid_mid", "resid_post", *_UPDATES.values(), *_ATTENTION, *_CROSS)


class Captured:
    """The captured values of the last forward pass: ``c["resid_mid", 3]`` of a layer, ``c["resid_mid"]`` a list of all.

    resid_pre, resid_mid, resid_post: hidden states (rows, tokens, dim) before a block, after its attention, after it.
    attn_out, cross_out, mixer_out, mlp_out: what attention, cross-attention, a mixer without a softmax and the feed-forward
    layer add to them, output norms and multipliers included.
    q, k, v: (rows, heads, tokens, head_dim) after norms and rotations; scores, pattern: (rows, heads, queries, keys) before and
    after the softmax; with ``cross_`` before their names, those of a decoder's attention to its encoder.
    """

    def __init__(self, names: tuple[str, ...], layers: int, missing: Callable[[str, int], str]) -> None:
        for name in names:
            _check(name)
        self.names, self.layers, self._missing = names or NAMES, layers, missing
        self._values: dict[tuple[str, int], Tensor] = {}
        self._ran = False

    def __getitem__(self, key: "str | tuple[str, int]") -> Any:
        """The tensor of a layer, or the tensors of all layers."""
        name, layer = (key, None) if isinstance(key, str) else key
        if name not in self.names:
            _check(name)
            raise InputError(f"'{name}' is not captured; captured are {', '.join(self.names)}")
        if layer is None:
            return [self._value(name, each) for each in range(self.layers)]
        if layer not in range(-self.layers, self.layers):
            raise InputError(f"layer={layer}: the model has layers 0 to {self.layers - 1}")
        return self._value(name, layer % self.layers)

    def _value(self, name: str, layer: int) -> Tensor:
        if (name, layer) in self._values:
            return self._values[name, layer]
        if not self._ran:
            raise InputError("nothing is captured yet: run the model inside the with block")
        raise InputError(f"'{name}' does not exist in layer {layer}: {self._missing(name, layer)}")

    @property
    def observer(self) -> Observer:
        """What fills it; hooks are installed only for what is captured."""
        names = set(self.names)
        return Observer(
            attention=partial(self._attention, _ATTENTION) if names & set(_ATTENTION) else None,
            cross=partial(self._attention, _CROSS) if names & set(_CROSS) else None,
            sublayer=self._sublayer if names & {"resid_mid", *_UPDATES.values()} else None,
            state=self._state,
            left=self._left if "resid_post" in names else None,
        )

    def _keep(self, name: str, layer: int, value: Tensor) -> None:
        if name in self.names:
            self._values[name, layer] = value

    def _state(self, layer: int, x: Tensor) -> None:
        if layer == 0:
            self._values, self._ran = {}, True
        if layer < self.layers and "resid_pre" in self.names:
            self._keep("resid_pre", layer, x.clone())

    def _left(self, layer: int, x: Tensor) -> None:
        self._keep("resid_post", layer, x.clone())

    def _attention(self, values: dict[str, Callable[[AttentionStep], Tensor]], step: AttentionStep) -> None:
        for name in self.names:
            if name in values:
                self._keep(name, step.layer, values[name](step))

    def _sublayer(self, step: SublayerStep) -> None:
        self._keep(_UPDATES[step.sublayer], step.layer, step.update)
        if step.sublayer == "attention" and step.after is not None:
            self._keep("resid_mid", step.layer, step.after)


def _check(name: str) -> None:
    if name not in NAMES:
        raise InputError(f"'{name}' cannot be captured; allowed are {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
