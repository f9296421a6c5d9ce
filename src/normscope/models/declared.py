"""What is declared of a model's scheme, and what its forward pass does: the slots of every sublayer as plain facts."""

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.core.norms import NORMS, length
from normscope.errors import InputError
from normscope.machine.memory import require_memory
from normscope.models.foreign import library_errors
from normscope.models.model import BlockNorm, Model
from normscope.models.normscope_model import NormscopeModel
from normscope.models.observe import AttentionStep, Observer, Sample, SublayerStep
from normscope.schemes import NORM_TITLES, Scheme, Slots

NONE, NORM, LEARNED = "none", "norm", "learned"  # no norm; RMSNorm or LayerNorm; a scale that training changes
TANGENT = "tangent"
_SPHERES = tuple(title for kind, title in NORM_TITLES.items() if kind in NORMS)
_START = re.compile(r"sink\(.*\)")
_NEAR = 1e-3  # relative, of fitted scales
_PROVED = 1e-4
_BYTES = 4  # of a parameter of a model that is built afresh
_TOKENS = 16
_SLOTS = {
    "input": "input norm",
    "heads": "norms of q, k, v",
    "scores": "softmax",
    "inner": "inner norm",
    "gate": "gate",
    "output": "output norm",
    "stream": "stream norm",
}
_NORM_SLOTS = ("input", "inner", "output", "stream")
_NUMBERS = {"factor": "factor on the input", "step": "branch scale", "carry": "residual scale"}
_SUBLAYERS = {"feedforward": "the feed-forward layer", "cross": "cross-attention", "mixer": "the mixer"}
Value = str | float


@dataclass(frozen=True, order=True)
class Place:
    """A slot of a sublayer; layer −1 and no sublayer for what is outside the layers."""

    layer: int
    sublayer: str
    slot: str


@dataclass(frozen=True)
class Difference:
    """A slot that is not as declared, with a sentence for people."""

    place: Place
    declared: Value
    observed: Value
    text: str


def observed_facts(model: Model) -> dict[Place, Value]:
    """What the forward pass does in every slot: the kind of its norm or ``none``, or the number of a scale.

    A layer whose sublayers are unclear has the one fact ``unclear``: the reason.
    """
    facts: dict[Place, Value] = {}
    kinds = {(norm.layer, norm.sublayer, norm.slot): NORM_TITLES[norm.kind] for norm in model.norms}  # type: ignore[index]
    for layer in range(model.layers):
        if (reason := model.unclear(layer)) != "":
            facts[Place(layer, "", "unclear")] = reason
            continue
        for sublayer in model.sublayers(layer):
            for slot in _NORM_SLOTS:
                facts[Place(layer, sublayer, slot)] = kinds.get((layer, sublayer, slot), NONE)
            if model.adds_tangent(layer, sublayer):
                facts[Place(layer, sublayer, "output")] = TANGENT
            scheme = model.schemes[layer]
            if sublayer == "attention":
                facts[Place(layer, sublayer, "heads")] = "".join(x for x in "qkv" if (layer, sublayer, x) in kinds) or NONE
            if sublayer == "attention" and scheme is not None:
                facts |= _attention_facts(layer, scheme.attention)
            facts[Place(layer, sublayer, "factor")] = _number(model.depth_factor(layer, sublayer))
            facts[Place(layer, sublayer, "step")] = _number(model.step(layer, sublayer))
            facts[Place(layer, sublayer, "carry")] = _number(model.carry(layer, sublayer))
    facts[Place(-1, "", "final")] = NONE if model.final_norm is None else NORM_TITLES[model.final_norm.kind]  # type: ignore[index]
    entries = {layer: kind for (layer, _, slot), kind in kinds.items() if slot == "entry" and layer}
    for layer, kind in entries.items():
        facts[Place(layer - 1, "feedforward", "stream")] = kind
    if entries:
        facts[Place(model.layers - 1, "feedforward", "stream")] = facts[Place(-1, "", "final")]
    return facts


def _attention_facts(layer: int, slots: Slots) -> dict[Place, Value]:
    """The slots that attention alone has; where the logit of a sink starts is no fact of a trained model."""
    scores = "+".join(_START.sub("sink", part) for part in slots.scores.split("+"))
    return {Place(layer, "attention", "scores"): scores, Place(layer, "attention", "gate"): slots.gate}


def scheme_facts(scheme: Scheme, model: Model) -> dict[Place, Value]:
    """What a scheme declares for the sublayers of a model; a stream that is not normalised at its end needs a final norm.

    Encoders of normscope have none.
    """
    facts: dict[Place, Value] = {}
    scheme.check(model.layers)
    for layer in range(model.layers):
        stage = scheme.at(layer, model.layers)
        place = stage.place(layer, model.layers)
        for sublayer in model.sublayers(layer) or ("attention", "feedforward"):
            slots = stage.feedforward if sublayer == "feedforward" else stage.attention
            for slot in _NORM_SLOTS:
                filled = getattr(slots, slot)
                norm = NORM_TITLES[stage.norm] if stage.pointwise else NORM
                facts[Place(layer, sublayer, slot)] = filled if filled in (NONE, TANGENT) else norm
            if sublayer == "attention":
                facts[Place(layer, sublayer, "heads")] = slots.heads
                facts |= _attention_facts(layer, slots)
            for name, slot in (("factor", "input"), ("step", "step"), ("carry", "carry")):
                learned = "alpha" in slots.named_formulas[slot].names
                facts[Place(layer, sublayer, name)] = LEARNED if learned else float(slots.number(slot, place))
    last = scheme.at(model.layers - 1, model.layers).feedforward
    ends = not isinstance(model, NormscopeModel) or model.reads_out
    facts[Place(-1, "", "final")] = NORM if ends and last.stream == "none" else LEARNED
    return facts


def code_facts(model: Model) -> dict[Place, Value]:
    """What the code of the model's class does: the observed facts of a model that is built from the same configuration.

    For a model of normscope: the scheme in its configuration.
    """
    if isinstance(model, NormscopeModel):
        return scheme_facts(model.model.config.scheme, model)
    from normscope.models.open import open_model
    from normscope.models.probe import typical_weights

    module = model.model
    if not hasattr(module, "config"):
        raise InputError(f"no configuration states the scheme of '{model.name}': declare it, scheme=NAME")
    require_memory({f"a second '{model.name}' with random weights": _BYTES * model.parameters})
    with torch.random.fork_rng(devices=[]), library_errors(f"cannot build '{model.name}' from its configuration: "):
        torch.manual_seed(0)
        fresh: Any = type(module)(deepcopy(module.config)).eval()
    with typical_weights(fresh):
        return observed_facts(open_model(fresh, stream=model.stream))


def differences(declared: dict[Place, Value], observed: dict[Place, Value]) -> Iterator[Difference]:
    """Where a forward pass does something else than declared, layer by layer."""
    unclear = {place.layer: str(value) for place, value in observed.items() if place.slot == "unclear"}
    for layer in sorted({place.layer for place in (*declared, *observed)} - {-1}):
        if layer in unclear:
            place, reason = Place(layer, "", "unclear"), unclear[layer]
            yield Difference(place, "a scheme", reason, f"layer {layer} is no block of the declared scheme: {reason}")
            continue
        yield from _slot_differences(layer, declared, observed)
    place = Place(-1, "", "final")
    want, have = declared[place], observed[place]
    if not _agrees(want, have) and (want != NORM or have == NONE):  # any kind of norm will do
        text = f"there is no final norm ({_declared(want)})" if have == NONE else f"the final norm is {have}, {_declared(want)}"
        yield Difference(place, want, have, text)


def _slot_differences(layer: int, declared: dict[Place, Value], observed: dict[Place, Value]) -> Iterator[Difference]:
    for place in (place for place in (*declared, *(p for p in observed if p not in declared)) if place.layer == layer):
        want, have = declared.get(place, NONE), observed.get(place, NONE)
        if place.slot == "unclear" or _agrees(want, have):
            continue
        where = f"{_SUBLAYERS.get(place.sublayer, place.sublayer)} of layer {layer}"
        if place.slot in _NUMBERS:
            text = f"the {_NUMBERS[place.slot]} of {where} is {_shown(have)}, {_declared(want)}"
        elif have == NONE:
            text = f"{where} has no {_SLOTS[place.slot]} ({_declared(want)})"
        else:
            text = f"the {_SLOTS[place.slot]} of {where}: {have}, {_declared(want)}"
        yield Difference(place, want, have, text)


def idle_norms(model: Model) -> Iterator[Difference]:
    """Norms whose gain is 0, and those whose eps exceeds what they read: they act, but not as norms."""
    for norm in model.norms:
        if not bool(norm.gain.any()):
            text = f"the gain of {_named(norm)} is 0: what follows does not depend on the hidden states"
            yield Difference(_place(norm), "a gain", 0.0, text)
    read: dict[tuple[int, str], float] = {}

    def keep(step: SublayerStep) -> None:
        read[step.layer, step.sublayer] = float(step.before.double().square().mean())

    if "sublayers" in model.offers:
        model.forward(_small_sample(model), Observer(sublayer=keep))
    for norm in model.norms:
        square = read.get((-1 if norm.layer is None else norm.layer, norm.sublayer))
        if norm.slot == "input" and square is not None and norm.eps > square > 0:
            text = (
                f"{_named(norm)} has no effect: its eps = {norm.eps:.3g} exceeds the mean square {square:.3g} of what it reads"
            )
            yield Difference(_place(norm), f"eps below {square:.3g}", norm.eps, text)


def unproved(model: Model) -> Iterator[Difference]:
    """Sublayers whose states are not those of the update with the slots that the model states, to 1e-4."""
    errors: dict[Place, float] = {}

    def settled(step: SublayerStep) -> None:
        if step.after is not None:
            made = model.update(step.layer, step.sublayer).settle(step.carry * step.before + step.update)
            errors[Place(step.layer, step.sublayer, "sum")] = _error(made, step.after)

    def reads(step: AttentionStep) -> None:
        errors[Place(step.layer, "attention", "input")] = _error(
            model.update(step.layer, "attention").read(step.stream), step.input
        )

    if isinstance(model, NormscopeModel):  # others are proved when they are opened
        model.forward(_small_sample(model), Observer(sublayer=settled, attention=reads))
    for place, error in sorted(errors.items()):
        if not error < _PROVED:
            what = "reads" if place.slot == "input" else "leaves in the stream"
            where = f"{_SUBLAYERS.get(place.sublayer, place.sublayer)} of layer {place.layer}"
            text = f"what {where} {what} is not what its slots make: relative error {error:.1e}"
            yield Difference(place, 0.0, error, text)


def _small_sample(model: Model) -> Sample:
    """Some tokens, or random features."""
    if model.modality == "text":
        tokens = torch.arange(min(_TOKENS, model.context or _TOKENS), device=model.device)
        return Sample.of(1 + tokens[None] % max(model.vocabulary - 1, 1))
    return model.batch(torch.randn(2, *model.feature_shape, generator=torch.Generator().manual_seed(0)))


def _error(made: Tensor, target: Tensor) -> float:
    return float(length((made - target).double().flatten()) / length(target.double().flatten()))


def _number(scale: Tensor | float | None) -> Value:
    """A scale that is one number; ``learned`` if there is one for each channel."""
    scale = torch.as_tensor(1.0 if scale is None else scale)
    return float(scale) if scale.ndim == 0 else LEARNED


def _agrees(declared: Value, observed: Value) -> bool:
    if declared in (LEARNED, observed):
        return True
    if declared == NORM:
        return observed in _SPHERES
    if isinstance(declared, float) and isinstance(observed, float):
        return abs(declared - observed) <= _NEAR * max(abs(declared), abs(observed))
    return False


def _declared(value: Value) -> str:
    return f"declared {_shown(value)}"


def _shown(value: Value) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else {NORM: "a norm", NONE: "none", LEARNED: "one for each channel"}.get(value, value)
    )


def _place(norm: BlockNorm) -> Place:
    return Place(-1 if norm.layer is None else norm.layer, norm.sublayer, norm.slot)


def _named(norm: BlockNorm) -> str:
    if norm.layer is None:
        return f"the {norm.slot} norm"
    slot = f"{norm.slot} norm" if norm.slot in _SLOTS else f"norm of {norm.slot}"
    return f"the {slot} of {_SUBLAYERS.get(norm.sublayer, norm.sublayer)} of layer {norm.layer}"
