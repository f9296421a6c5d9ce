"""Measures of a model's tokens: what they have in common, and notes on what does not apply to a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import pandas as pd

from normscope.errors import InputError
from normscope.measures.base import Measure, Subject
from normscope.measures.readout import output_bias, tied
from normscope.measures.vocabulary import probe_words
from normscope.models import Model
from normscope.models.check import named
from normscope.models.describe import layers_named

Kind = TypeVar("Kind", bound="TokenMeasure")
_POSITIONS = {
    "learned": "Learned position embeddings are added to the token embeddings; probes use the token embeddings alone.",
    "rotary": "Positions are rotations of q and k. W_QK is probed at relative position 0, where they cancel; the setting "
    "distance chooses another.",
    "cyclic": "Positions are added to the token embeddings; probes use the token embeddings alone.",
    "none": "The model has no positional encoding.",
    "unknown": "How positions enter this model is unknown; probes leave them out.",
}


@dataclass(frozen=True)
class TokenMeasure(Measure):
    """A measure of token embeddings and of what single layers do to them; it needs no sample."""

    needs: ClassVar[frozenset[str]] = frozenset({"vocabulary"})
    asks: ClassVar[tuple[str, ...]] = ()

    def resolved(self: Kind, model: Model) -> Kind:
        """The measure with all settings decided for a model: layers and heads counted from 0 (None: all), words by name."""
        settings = self.settings
        decided: dict[str, tuple[Any, ...]] = {}
        if "layer" in settings:
            decided["layer"] = _with_attention(model, _counted("layer", settings["layer"], model.layers), settings["layer"])
        if "head" in settings:
            decided["head"] = _counted("head", settings["head"], model.heads)
        if "word" in settings:
            decided["word"] = tuple(word.name for word in probe_words(model, settings["word"]))
        return replace(self, **decided)

    def facts(self, subject: Subject, tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
        """What a run records besides the settings of the resolved measure."""
        return {"words": list(self.settings["word"])} if "word" in self.settings else {}

    def notes(self, model: Model) -> list[str]:
        """What a reader of the tables needs to know about the model: what does not apply to it, or differs from GPT-2."""
        zeros = [f"Warning: all values are 0 in {named(model.zero_weights)}."] if model.zero_weights else []
        tables = "The unembedding is not tied to the embeddings: tokens enter by one table and are read by the other."
        if model.unembedding is None:
            tables = "There is no unembedding: hidden states are compared with the input embeddings."
        return zeros if tied(model) else [*zeros, tables]


def _counted(name: str, numbers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Numbers from 0 on, of those that may count from the end; all of them for None."""
    for number in numbers or ():
        if not -count <= number < count:
            raise InputError(f"{name}={number}: there are {count}, 0 to {count - 1}")
    return tuple(range(count)) if numbers is None else tuple(dict.fromkeys(number % count for number in numbers))


def _with_attention(model: Model, layers: tuple[int, ...], given: Sequence[int] | None) -> tuple[int, ...]:
    """The layers that have heads, of those that were given or, for None, of all."""
    without = [layer for layer in layers if layer not in model.attention_layers]
    if without and given is not None:
        raise InputError(f"layer={without[0]}: it has no softmax attention; {layers_named(model.attention_layers)} have")
    return tuple(layer for layer in layers if layer not in without)


def head_notes(model: Model) -> list[str]:
    """On norms of q, k and v."""
    letters = ", ".join(letter for letter in "qkv" if any(norm.slot == letter for norm in model.norms))
    return (
        [f"Heads normalise {letters}: so do probes of tokens; singular vectors are of the matrices alone."] if letters else []
    )


def position_notes(model: Model, distance: int) -> list[str]:
    """On positions, where queries and keys are at the same one."""
    return [] if distance else [_POSITIONS[model.position_kind]]


def precedence_notes(model: Model) -> list[str]:
    """On models that do not predict what follows a token."""
    predicts_next = model.reads_out and model.causal
    return [] if predicts_next else ["The model does not predict the next token: precedence is not measured."]


def logit_notes(model: Model) -> list[str]:
    """On output layers that are more than a norm and a matrix."""
    if model.reads_out and output_bias(model) is None:
        return [
            "Logits are more than one product after the final norm: hidden states are read by the model's own output layers."
        ]
    return []
