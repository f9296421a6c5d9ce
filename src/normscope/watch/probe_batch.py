"""The fixed batch that a model is probed with: what a training loop has, as a sample that the model reads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from normscope.errors import InputError
from normscope.models import NOTHING, Model, Sample, open_awake
from normscope.models.foreign import library_errors
from normscope.models.inputs import device_of, is_encoder_decoder, is_of_library, main_input, states_its_input, tokens_known
from normscope.models.wrapped import unwrapped
from normscope.training.tasks import MASK as PADDING

_TOKENS, _MASK = "input_ids", "attention_mask"
_FEATURES = ("pixel_values", "input_features", "input_values")
_DECODER, _SHIFT = "decoder_input_ids", "prepare_decoder_input_ids_from_labels"
_FEWEST = 2  # tokens that have a mean cosine
_SMALL = 8  # tokens that show how a model works


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
    sample = probe if isinstance(probe, Sample) else _sample(model, probe)
    device = sample.tokens.device if sample.features is None else sample.features.device
    _check_device(device, model.device)
    length = tokens if sample.features is None else None

    def cut(name: str, x: Tensor) -> Tensor:
        return x[:rows].clone() if name == "features" else x[:rows, :length].clone()  # loops may reuse the memory of batches

    sample = sample.mapped(cut)
    seen = model.viewed(sample)
    if seen.features is None and int(seen.attention_mask[:, 1:].sum()) < _FEWEST:  # a stream of frames may have other rows
        stream = f" for the {model.stream}" if len(model.streams) > 1 else ""
        raise InputError(f"probe= is too short{stream}: give rows of several tokens, the first of which is left out of means")
    return sample


def open_with(model: nn.Module, probe: Any, example: Tensor | None, **view: Any) -> Model:
    """The model, opened with an example; else a module whose configuration does not say what it reads, with the probe."""
    inner = unwrapped(model) if isinstance(model, nn.Module) else model
    if example is not None or states_its_input(inner) or isinstance(probe, Sample) or not isinstance(inner, nn.Module):
        return open_awake(model, example=example, **view)
    needed = [each.name for each in signature(inner.forward).parameters.values() if each.default is Parameter.empty]
    needed = [name for name in needed if name not in ("args", "kwargs")]
    if len(needed) > 1:
        raise InputError(
            f"{type(inner).__name__}.forward needs {', '.join(needed)}, and a probe is one input: watch a module around it "
            "whose forward takes one input and adds the others"
        )
    read = _read(probe, needed)
    _check_device(read.device, device_of(inner))
    size = None if read.is_floating_point() else tokens_known(inner)
    if size is not None and not 0 <= int(read.min()) <= int(read.max()) < size:
        return open_awake(model, **view)  # which then says that such a token does not exist
    small = read[:2] if read.is_floating_point() else read[:2, :_SMALL]
    with library_errors("the model cannot read the probe: "):
        try:
            return open_awake(model, example=small, **view)
        except (InputError, RuntimeError):
            if small.shape == read[:2].shape:
                raise
            return open_awake(model, example=read[:2], **view)  # some modules read rows of one length only


def _check_device(probe: torch.device, model: torch.device) -> None:
    if probe != model:
        raise InputError(f"probe= is on {probe} and the model on {model}: move it there, probe.to('{model}')")


def _read(probe: Any, first: Sequence[str] = ()) -> Tensor:
    """What the model reads of a batch: token ids or features, or what its forward pass calls its first argument."""
    if isinstance(probe, Mapping) or hasattr(probe, "keys"):
        names = (*first, _TOKENS, *_FEATURES)
        read = next((probe[name] for name in names if probe.get(name) is not None), None)
        if read is None:
            raise InputError(f"probe= has none of {', '.join(names)}: it has {', '.join(map(str, probe)) or 'nothing'}")
        return _read(read)
    if isinstance(probe, tuple | list) and len(probe) and isinstance(probe[0], Tensor | Mapping):
        return _read(probe[0], first)
    if not isinstance(probe, Tensor):
        raise InputError(
            f"probe= is a {type(probe).__name__}: give a batch of the training: token ids (rows, tokens), pixels, a mapping "
            f"with '{_TOKENS}' or '{_FEATURES[0]}', or a tuple that begins with one of them"
        )
    if probe.numel() == 0:
        raise InputError("probe= is empty: give a batch of the training")
    return probe


def _sample(model: Model, probe: Any) -> Sample:
    if isinstance(probe, tuple | list) and len(probe) and isinstance(probe[0], Mapping):
        probe = probe[0]
    named = probe if isinstance(probe, Mapping) or hasattr(probe, "keys") else {}
    main, stated = main_input(model.model) or _TOKENS, getattr(model.model, "main_input_name", None)
    if stated in named and main not in named:  # Perceiver takes its input by several names
        probe = named = {**named, main: named[stated]}
    names = dict.fromkeys((*_FEATURES, main))
    features = next((named[name] for name in names if name != _TOKENS and named.get(name) is not None), None)
    both = named.get(_TOKENS) is not None and features is not None
    first = [] if is_of_library(model.model) else list(signature(model.model.forward).parameters)[:1]
    read = _read(probe if features is None or both else features, first)
    _check_device(read.device, model.device)
    mask, in_halves = _mask(named, read), model.reads_examples and len(model.streams) > 1
    if in_halves and mask is not None:
        read = _padding_last(read.where(mask, PADDING), mask)
    try:
        sample = Sample.of(read) if both else model.batch(read)
    except InputError as error:
        raise InputError(f"probe= cannot be read: {error}") from error
    if in_halves:  # each with tokens, padding and positions of its own
        return sample

    def given(name: str) -> Tensor | None:
        x = named.get(name)
        return x if isinstance(x, Tensor) and x.shape == sample.tokens.shape else None

    labels, positions = (given(name) for name in ("labels", "position_ids"))
    if named.get(_TOKENS) is not None:
        sample = replace(sample, positions=positions, features=features)
    if labels is not None:
        sample = replace(sample, targets=torch.where(labels < 0, NOTHING, labels))
    if is_encoder_decoder(model.model):
        sample = replace(sample, decoded=_decoded(model.model, named))
    return sample if mask is None else _padded(sample, mask)


def _mask(named: Mapping[str, Any], read: Tensor) -> Bool[Tensor, "rows tokens"] | None:
    """The attention mask of a batch of token ids; None where there is none, and for one of pairs of tokens."""
    mask, ids = named.get(_MASK), named.get(_TOKENS) is not None and not read.is_floating_point()
    if not ids or not isinstance(mask, Tensor):
        return None
    read, mask = (x[None] if x.ndim == 1 else x for x in (read, mask))  # one row
    if not read.ndim == mask.ndim == 2:
        return None
    if mask.shape != read.shape:
        raise InputError(f"probe= has a mask of {list(mask.shape)} and tokens of {list(read.shape)}")
    return mask.bool()


def _decoded(module: Any, named: Mapping[str, Any]) -> Sample | None:
    """What the decoder reads of a batch: ``decoder_input_ids``, or the labels, shifted as the library shifts them."""
    tokens, labels, mask = (named.get(name) for name in (_DECODER, "labels", "decoder_attention_mask"))
    if tokens is None and labels is not None and hasattr(module, _SHIFT):
        tokens = getattr(module, _SHIFT)(labels=labels)
        mask = labels >= 0 if mask is None else mask
    if tokens is None:
        return None
    sample = Sample.of(tokens)
    return sample if mask is None else replace(sample, attention_mask=mask.bool())


def _padded(sample: Sample, mask: Bool[Tensor, "rows tokens"]) -> Sample:
    """The sample with a mask; padding at the beginning of a row moves to its end, where a Sample has it."""
    positions = None if sample.positions is None else _padding_last(sample.positions, mask)
    tokens, targets, moved = (_padding_last(x, mask) for x in (sample.tokens, sample.targets, mask))
    return replace(sample, tokens=tokens, targets=targets, attention_mask=moved, positions=positions)


def _padding_last(x: Tensor, mask: Bool[Tensor, "rows tokens"]) -> Tensor:
    """Values of tokens with those of padding moved to the end of every row."""
    return x.gather(1, (~mask).long().argsort(dim=1, stable=True))
