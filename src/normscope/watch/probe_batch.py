"""The fixed batch that a model is probed with: what a training loop has, as a sample that the model reads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from normscope.errors import InputError
from normscope.models import NOTHING, Model, Sample
from normscope.models.inputs import device_of, main_input

_TOKENS = "input_ids"
_FEATURES = ("pixel_values", "input_features", "input_values")


def example_of(module: nn.Module, probe: Any) -> Tensor | None:
    """Two rows of a batch of pixels or other features, on which a user's module runs where it does not on token ids."""
    if isinstance(probe, tuple | list) and len(probe):
        return example_of(module, probe[0])
    if isinstance(probe, Mapping) and probe.get(_TOKENS) is None:
        return next((example_of(module, probe[name]) for name in _FEATURES if probe.get(name) is not None), None)
    if not isinstance(probe, Tensor) or not probe.is_floating_point() or not probe.numel():
        return None
    _check_device(probe, device_of(module))
    return probe[:2]


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
    _check_device(sample.tokens if sample.features is None else sample.features, model.device)
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
    _check_device(probe, model.device)
    return model.batch(probe)


def _check_device(probe: Tensor, device: torch.device) -> None:
    if probe.device != device:
        raise InputError(f"probe= is on {probe.device} and the model on {device}: move it there, probe.to('{device}')")


def _of_mapping(model: Model, probe: Any) -> Sample:
    names = dict.fromkeys((*_FEATURES, main_input(model.model) or _TOKENS))
    features = next((probe[name] for name in names if name != _TOKENS and probe.get(name) is not None), None)
    if probe.get(_TOKENS) is None:
        if features is None:
            raise InputError(f"probe= has neither '{_TOKENS}' nor one of {', '.join(_FEATURES)}: it has {', '.join(probe)}")
        return _read(model, features)
    sample = _read(model, probe[_TOKENS]) if features is None else Sample.of(probe[_TOKENS])

    def given(name: str) -> Tensor | None:
        x = probe.get(name)
        return x if isinstance(x, Tensor) and x.shape == sample.tokens.shape else None

    mask, labels = given("attention_mask"), given("labels")
    sample = replace(sample, positions=given("position_ids"), features=features)
    if labels is not None:
        sample = replace(sample, targets=torch.where(labels < 0, NOTHING, labels))
    return sample if mask is None else _padded(sample, mask.bool())


def _padded(sample: Sample, mask: Bool[Tensor, "rows tokens"]) -> Sample:
    """The sample with a mask; padding at the beginning of a row moves to its end, where a Sample has it."""
    order = (~mask).long().argsort(dim=1, stable=True)
    positions = None if sample.positions is None else sample.positions.gather(1, order)
    tokens, targets, mask = (x.gather(1, order) for x in (sample.tokens, sample.targets, mask))
    return replace(sample, tokens=tokens, targets=targets, attention_mask=mask, positions=positions)
