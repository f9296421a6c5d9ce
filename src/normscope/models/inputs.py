"""What a model is called with: token ids, pixels, a spectrogram, sound, or some of them."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normscope.errors import InputError
from normscope.models.foreign import library_errors
from normscope.models.observe import Sample
from normscope.transformer import Transformer

_TOKENS, _ROWS = 8, 2
TOKEN_INPUT = "input_ids"
_INPUTS = (TOKEN_INPUT, "pixel_values", "input_features", "input_values")
_DECODER = "decoder_input_ids"
_PIXELS, _MASK = "pixel_values", "attention_mask"
_PATCHES = "spatial_shapes"  # the argument of models that read rows of patches
_SIDE = 4  # of a small square of patches
_FRAMES = 64  # of a small spectrogram
_SOUND = 16_000  # numbers of a second of sound
_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feat_in")  # of a spectrogram, by name


def main_input(model: nn.Module) -> str | None:
    """The name of the input that a model of the ``transformers`` library reads; None for other modules."""
    if not is_of_library(model):
        return None
    stated, names = getattr(model, "main_input_name", "input_ids"), accepted(model)
    return stated if stated in _INPUTS else next((name for name in _INPUTS if name in names), stated)


def is_of_library(model: Any) -> bool:
    """Whether a module has a configuration of the ``transformers`` library."""
    return hasattr(getattr(model, "config", None), "get_text_config")


def states_its_input(model: Any) -> bool:
    """Whether a module says what it reads: a model of the ``transformers`` library, or of normscope."""
    return is_of_library(model) or isinstance(model, Transformer)


def is_encoder_decoder(model: Any) -> bool:
    """Whether a model of the ``transformers`` library has an encoder and a decoder."""
    return is_of_library(model) and bool(getattr(model.config, "is_encoder_decoder", False))


def accepted(model: nn.Module) -> set[str]:
    """The names of the arguments that a model's forward pass takes."""
    return set(inspect.signature(model.forward).parameters)


def text_config(model: Any) -> Any:
    """The configuration of the part that reads text."""
    return model.config.get_text_config()


def tokens_known(model: Any) -> int | None:
    """How many token ids there are, by the configuration or the largest embedding; None if the model reads none."""
    if is_of_library(model):
        known = getattr(text_config(model), "vocab_size", None)
        if known is not None:
            return int(known)
    return max((part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)), default=None)


def device_of(model: nn.Module) -> torch.device:
    """Where a model expects its inputs: the first device of its weights that is not ``meta``."""
    return next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))


def precision_of(model: nn.Module) -> torch.dtype:
    """The precision of what a model reads besides token ids."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def probe_sample(model: Any, refused: str = "the model does not run on a small input: ") -> Sample:
    """A small input of two rows that the model runs on: a few tokens, or random pixels, frames or sound, or both.

    Raises:
        InputError: ``refused`` and the reason, if it runs on none of those that its configuration suggests.
    """
    errors = []
    for sample in _small_samples(model):
        try:
            with library_errors(refused), torch.no_grad():
                call(model, sample)
        except InputError as error:
            errors.append(error)
        else:
            return sample
    raise errors[0]


def _small_samples(model: Any) -> Iterator[Sample]:
    """Inputs that a model may take, the likeliest first."""
    device, count, name = device_of(model), tokens_known(model), main_input(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS) % max((count or 2) - 1, 1)
    sample = Sample.of((1 + tokens).clamp(max=(count or 2) - 1).to(device))
    reads_tokens = name in (None, TOKEN_INPUT)
    if reads_tokens:
        yield sample
    if not reads_tokens or _PIXELS in accepted(model):
        for shape in _feature_shapes(model, _PIXELS if reads_tokens else name or ""):
            features = torch.randn(_ROWS, *shape, generator=generator)
            yield replace(sample, features=features.to(device, precision_of(model)))


def _feature_shapes(model: Any, name: str) -> Iterator[tuple[int, ...]]:
    """Shapes that the features may have, by the configuration.

    Pixels are (channels, height, width), with frames before them for a video, or rows of patches; a spectrogram is
    (bins, frames) or (frames, bins); all else is sound.
    """
    configs = _configs(model.config)
    if "pixel" in name:
        size = _stated(configs, "image_size") or _stated(configs, "input_size") or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels, patch = int(_stated(configs, "num_channels") or 3), _stated(configs, "patch_size") or 16
        if _PATCHES in accepted(model):
            yield _SIDE * _SIDE, channels * int(patch) ** 2
        yield channels, int(height), int(width)
        yield int(_stated(configs, "num_frames") or 2), channels, int(height), int(width)
    elif "features" in name:
        bins = int(next((size for size in (_stated(configs, each) for each in _BINS) if size), 80))
        yield bins, 2 * int(_stated(configs, "max_source_positions") or _FRAMES)
        yield _FRAMES, bins
    else:
        yield (_SOUND,)


def _configs(config: Any) -> list[Any]:
    """A configuration and those inside it, the parts that see or hear first."""
    parts = [part for name in getattr(config, "sub_configs", {}) if (part := getattr(config, name, None)) is not None]
    inner = [each for part in parts for each in _configs(part)]
    return [*inner, config] if inner else [config]


def _stated(configs: list[Any], name: str) -> Any:
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def call(model: Any, sample: Sample, decoded: Tensor | None = None) -> Any:
    """What the model returns for a sample; the decoder of an encoder-decoder reads ``decoded``, by default the same tokens."""
    name, features = main_input(model), sample.features
    names, padded = accepted(model), sample.padded
    if name is None:
        if padded and _MASK not in names:
            raise InputError(f"a {type(model).__name__} takes no {_MASK}, and some rows are padded: give rows of one length")
        masks = {_MASK: sample.attention_mask} if padded else {}
        return model(sample.tokens if features is None else features, **masks)
    given: dict[str, Any] = {name: sample.tokens if name == TOKEN_INPUT or features is None else features}
    if name == TOKEN_INPUT and features is not None:
        given[_PIXELS] = features
    if name == TOKEN_INPUT and padded:
        given[_MASK] = sample.attention_mask.long()
    if sample.positions is not None and "position_ids" in names:
        given["position_ids"] = sample.positions
    if is_encoder_decoder(model) and _DECODER in names:
        given[_DECODER] = sample.tokens if decoded is None else decoded
    if hasattr(text_config(model), "use_cache") and ("use_cache" in names or "kwargs" in names):
        given["use_cache"] = False
    if "pixel" in name and "interpolate_pos_encoding" in names:
        given["interpolate_pos_encoding"] = False
    if features is not None and _PATCHES in names and features.ndim == 3:
        given |= _patch_arguments(features)
    return model(**given)


def _patch_arguments(patches: Float[Tensor, "rows patches numbers"]) -> dict[str, Tensor]:
    """The mask and the sides of squares of patches."""
    rows, count, _ = patches.shape
    ones = torch.ones(rows, count, dtype=torch.long, device=patches.device)
    return {"pixel_attention_mask": ones, _PATCHES: torch.full((rows, 2), isqrt(count), device=patches.device)}


def results(given: Any) -> Tensor:
    """The logits among what a model returns, or its last states."""
    if isinstance(given, Tensor):
        return given
    for key in ("logits", "prediction_logits", "last_hidden_state", "reconstruction"):
        value = given.get(key) if isinstance(given, dict) else getattr(given, key, None)
        if isinstance(value, Tensor):
            return value
    values = given.values() if isinstance(given, dict) else given if isinstance(given, tuple | list) else vars_of(given)
    result = next((value for value in values if isinstance(value, Tensor)), None)
    if result is None:
        raise InputError(f"unsupported architecture: the model returns no tensor but {type(given).__name__}")
    return result


def vars_of(given: Any) -> list[Any]:
    """The fields of an object, such as a dataclass."""
    return list(vars(given).values()) if hasattr(given, "__dict__") else []
