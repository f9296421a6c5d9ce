"""Weights that are not in memory: read from the files that ``accelerate`` loads them from, or gathered from other processes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import InputError
from normscope.models.wrapped import whole


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters by name, without those of its parts; those that stay on disk are read, sharded ones gathered.

    Raises:
        InputError: if a parameter is nowhere.
    """
    return {name: _loaded(module, name, parameter) for name, parameter in module.named_parameters(recurse=False)}


def weight_of(module: nn.Module, name: str = "weight") -> Tensor | None:
    """One tensor of a module, without gradients; None if it has none of that name."""
    tensor = getattr(module, name, None)
    return _loaded(module, name, tensor).detach() if isinstance(tensor, Tensor) else None


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by name, each once; one that stays on disk is read when it is due."""
    seen: set[int] = set()
    for kind in ("named_parameters", "named_buffers"):
        for prefix, part in module.named_modules():
            for name, tensor in getattr(part, kind)(recurse=False):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{prefix}.{name}" if prefix else name, _loaded(part, name, tensor)


def _loaded(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return whole(module, name, tensor)
    for hook in _hooks(module):
        weights: Mapping[str, Tensor] | None = getattr(hook, "weights_map", None)
        if weights is not None and name in weights:
            return weights[name].to(torch.device(hook.execution_device), tensor.dtype)
    raise InputError(f"a weight of {type(module).__name__} ({name}) is not in memory (device 'meta') and in no file")


def _hooks(module: nn.Module) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))
