"""The fixed batch that a model is probed with: what a training loop has, as a sample that the model reads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normscope.errors import InputError
from normscope.models import NOTHING, Model, Sample

_TOKENS = "input_ids"
_FEATURES = ("pixel_values", "input_features", "input_values")


def sample_of(model: Model, probe: Any, rows: int | None, tokens: int | None) -> Sample:
    """The first ``rows`` rows and ``tokens`` tokens of a batch, on the model's device.

    Args:
        model: the model that reads it.
        probe: a Sample, token ids or features, a mapping with them as the ``transformers`` library names them, or a tuple or
            list whose first element is one of those.
        rows: None for all.
        tokens: of every row; None for all. Features are not cut.

    Raises:
        InputError: if the batch is none of these, is empty, or is on another device than the model.
    """
    sample = probe if isinstance(probe, Sample) else _read(model, probe)
    device = sample.tokens.device if sample.features is None else sample.features.device
    if device != model.device:
        raise InputError(f"probe= is on {device} and the model on {model.device}: move it there, probe.to('{model.device}')")
    length = tokens if sample.features is None else None

    def cut(x: Tensor) -> Tensor:
        return x[:rows, :length].clone()  # loops may reuse the memory of their batches

    positions, features = sample.positions, sample.features
    return replace(
        sample,
        tokens=cut(sample.tokens),
        targets=cut(sample.targets),
        attention_mask=cut(sample.attention_mask),
        positions=None if positions is None else cut(positions),
        features=None if features is None else features[:rows].clone(),
    )


def _read(model: Model, probe: Any) -> Sample:
    if isinstance(probe, Mapping) or hasattr(probe, "keys"):
        return _of_mapping(model, probe)
    if isinstance(probe, tuple | list) and len(probe) and isinstance(probe[0], Tensor | Mapping):
        return _read(model, probe[0])
    if not isinstance(probe, Tensor):
        raise InputError(
            f"probe= is a {type(probe).__name__}: give a batch of the training: token ids (rows, tokens), pixels, a mapping "
            f"with '{_TOKENS}' or '{_FEATURES[0]}', or a tuple that begins with one of them"
        )
    if probe.numel() == 0:
        raise InputError("probe= is empty: give a batch of the training")
    if probe.device != model.device:
        raise InputError(f"probe= is on {probe.device} and the model on {model.device}: probe.to('{model.device}')")
    return model.batch(probe)


def _of_mapping(model: Model, probe: Any) -> Sample:
    features = next((probe[name] for name in _FEATURES if probe.get(name) is not None), None)
    if probe.get(_TOKENS) is None:
        if features is None:
            raise InputError(f"probe= has neither '{_TOKENS}' nor one of {', '.join(_FEATURES)}: it has {', '.join(probe)}")
        return _read(model, features)
    sample = _read(model, probe[_TOKENS]) if features is None else Sample.of(probe[_TOKENS])
    mask, labels = probe.get("attention_mask"), probe.get("labels")
    if mask is not None and mask.shape == sample.tokens.shape:
        sample = replace(sample, attention_mask=mask.bool())
    if labels is not None and labels.shape == sample.tokens.shape:
        sample = replace(sample, targets=torch.where(labels < 0, NOTHING, labels))
    return sample if features is None else replace(sample, features=features)
