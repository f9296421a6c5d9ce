"""What a model is called with: token ids, pixels, a spectrogram, or some of them."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from normscope.models.observe import Sample

_TOKENS, _ROWS = 8, 2
_TOKEN_INPUTS = ("input_ids",)
_DECODER = "decoder_input_ids"


def main_input(model: nn.Module) -> str | None:
    """The name of the model's first input, as the ``transformers`` library states it; None for other modules."""
    return getattr(model, "main_input_name", None) if hasattr(model, "config") else None


def reads_tokens(model: nn.Module) -> bool:
    """Whether the model's first input is token ids."""
    return main_input(model) in (None, *_TOKEN_INPUTS)


def is_encoder_decoder(model: Any) -> bool:
    """Whether a model of the ``transformers`` library has an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def accepted(model: nn.Module) -> set[str]:
    """The names of the arguments that a model's forward pass takes."""
    return set(inspect.signature(model.forward).parameters)


def text_config(model: Any) -> Any:
    """The configuration of the part that reads text."""
    return model.config.get_text_config()


def tokens_known(model: Any) -> int | None:
    """How many token ids there are, by the configuration or the first embedding; None if the model reads none."""
    if hasattr(model, "config") and hasattr(model.config, "get_text_config"):
        known = getattr(text_config(model), "vocab_size", None)
        if known is not None:
            return int(known)
    table = next((part for part in model.modules() if isinstance(part, nn.Embedding)), None)
    return None if table is None else table.num_embeddings


def device_of(model: nn.Module) -> torch.device:
    """Where a model expects its inputs: the first device of its weights that is not ``meta``."""
    devices = [parameter.device for parameter in model.parameters() if not parameter.is_meta]
    return devices[0] if devices else torch.device("cpu")


def probe_sample(model: Any) -> Sample:
    """A small input of two rows: a few tokens, or random pixels or frames of the size that the configuration states."""
    device, count = device_of(model), tokens_known(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS) % max((count or 2) - 1, 1)
    tokens = (1 + tokens).clamp(max=(count or 2) - 1).to(device)
    sample = Sample.of(tokens)
    if reads_tokens(model):
        return sample
    shape = _feature_shape(model.config, main_input(model) or "")
    features = torch.randn(_ROWS, *shape, generator=generator).to(device, _precision(model))
    return Sample(sample.tokens, sample.targets, sample.attention_mask, features=features)


def _precision(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _feature_shape(config: Any, name: str) -> tuple[int, ...]:
    """(channels, height, width) of pixels, or (bins, frames) of a spectrogram, by the configuration."""
    if "pixel" in name:
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or getattr(vision, "input_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return int(getattr(vision, "num_channels", 3) or 3), int(height), int(width)
    if hasattr(config, "num_mel_bins"):
        return int(config.num_mel_bins), 2 * int(getattr(config, "max_source_positions", 1500))
    return (16_000,)


def call(model: Any, sample: Sample, decoded: Tensor | None = None) -> Any:
    """What the model returns for a sample; the decoder of an encoder-decoder reads ``decoded``, by default the same tokens."""
    name = main_input(model)
    if name is None:
        return model(sample.tokens if sample.features is None else sample.features)
    given: dict[str, Any] = {name: sample.tokens if name in _TOKEN_INPUTS else sample.features}
    names = accepted(model)
    if name in _TOKEN_INPUTS and not bool(sample.attention_mask.all()):
        given["attention_mask"] = sample.attention_mask.long()
    if is_encoder_decoder(model) and _DECODER in names:
        given[_DECODER] = sample.tokens if decoded is None else decoded
    if hasattr(text_config(model), "use_cache") and ("use_cache" in names or "kwargs" in names):
        given["use_cache"] = False
    if "pixel" in name and "interpolate_pos_encoding" in names:
        given["interpolate_pos_encoding"] = False
    return model(**given)


def results(given: Any) -> Tensor:
    """The logits among what a model returns, or its last states."""
    if isinstance(given, Tensor):
        return given
    for key in ("logits", "prediction_logits", "last_hidden_state", "reconstruction"):
        value = given.get(key) if isinstance(given, dict) else getattr(given, key, None)
        if isinstance(value, Tensor):
            return value
    values = given.values() if isinstance(given, dict) else given
    result: Tensor = next(value for value in values if isinstance(value, Tensor))
    return result
