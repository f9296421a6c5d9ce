"""Models on disk: ``model.safetensors`` with ``config.json`` beside it, in any folder, and those that come with the package."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.errors import InputError, did_you_mean
from normscope.machine.files import read_json, regular_file, user_path
from normscope.machine.memory import require_memory
from normscope.transformer.config import TransformerConfig
from normscope.transformer.model import Transformer

BUILTIN = ("addition-small-pre", "addition-small-qkv")
_PREFIX = "builtin:"
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True)
class SavedModel:
    """A model with what was written down about it.

    Attributes:
        model: in evaluation mode, on the CPU unless ``device`` names another.
        about: what is known besides its shape: the recipe that trained it, and what it was worth.
    """

    model: Transformer
    about: dict[str, Any]


def save_model(folder: Path, model: Transformer, about: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    """Write the weights as safetensors, in ``dtype``, and the configuration as JSON."""
    from safetensors.torch import save_file

    weights = {name: value.detach().cpu().to(dtype).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / _WEIGHTS)
    content = {"format": model.config.format, "model": model.config.values, **about}
    (folder / _CONFIG).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_model(name_or_path: str | Path, device: torch.device | str = "cpu") -> SavedModel:
    """The model in a folder, or one of the package's own (``builtin:addition-small-pre``)."""
    folder = model_folder(name_or_path)
    about = read_config(folder)
    config = TransformerConfig.of(about.pop("model"))
    require_memory(config.memory(8))  # the model, and its weights as they are read
    model = Transformer(config)
    weights = {name: value.float() for name, value in _read_weights(folder).items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        said = " ".join(str(error).split())[:300]
        raise InputError(f"the weights in '{folder}' do not fit its {_CONFIG}: {said}") from error
    return SavedModel(model.to(device).eval().requires_grad_(False), about)


def model_folder(name_or_path: str | Path) -> Path:
    """Where a model lies; a name of the package's own begins with ``builtin:``."""
    text = str(name_or_path)
    if text.startswith(_PREFIX):
        name = text.removeprefix(_PREFIX)
        if name not in BUILTIN:
            named = [_PREFIX + own for own in BUILTIN]
            raise InputError(f"no model '{text}' in the package; it has {', '.join(named)}{did_you_mean(text, named)}")
        return Path(str(files("normscope.transformer").joinpath("builtin", name)))
    folder = user_path(text, "model")
    if not (folder / _CONFIG).is_file() or not (folder / _WEIGHTS).is_file():
        what = f"holds no trained model ({_CONFIG} and {_WEIGHTS})" if folder.is_dir() else "is no folder"
        raise InputError(f"'{folder}' {what}; give a folder that normscope train wrote, or {_PREFIX}{BUILTIN[0]}")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """What is written down of the model in a folder: its shape under ``model``, and its recipe."""
    content = read_json(folder / _CONFIG, "configuration")
    written = content.pop("format", None) if isinstance(content, dict) else None
    if written not in (1, 2) or not isinstance(content.get("model"), dict):
        raise InputError(f"'{folder / _CONFIG}' does not describe a model of normscope")
    config = TransformerConfig.of(content["model"])
    if written < config.format:
        raise InputError(
            f"'{folder}' was trained by normscope 0.2.0 or an earlier version, in which {config.made_differently}; train it "
            "again"
        )
    return dict(content)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(regular_file(folder / _WEIGHTS, "weights file"))
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read the weights '{folder / _WEIGHTS}': {error}") from error
