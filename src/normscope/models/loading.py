"""How weights of the ``transformers`` library are loaded: in which precision, on which devices, and what stays on disk."""

import tempfile
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from normscope.errors import MissingExtraError
from normscope.machine.files import size_text
from normscope.machine.memory import available, require_memory
from normscope.models.sizes import parameters_of, stored_parameters

DTYPES = ("auto", "bfloat16", "float16", "float32")
DISK = "disk"
_MODULES = 1 << 26  # bytes besides the weights
_ABSURD = 16  # times more weights than its files have: the estimate from a configuration is no further off
_NEEDS = "needs the package 'accelerate': pip install 'normscope[gguf]'"


@dataclass(frozen=True)
class Plan:
    """How a model is loaded.

    Attributes:
        options: for ``from_pretrained``.
        placed: whether its weights are then where they belong.
        folder: for weights that the library converts and cannot read from the model's files again; removed with the plan.
    """

    options: dict[str, Any]
    placed: bool = False
    folder: "tempfile.TemporaryDirectory[str] | None" = field(default=None, compare=False)


def planned(name: str, where: str | Path, config: Any, device: str, dtype: str, gguf: bool) -> Plan:
    """The plan for a model: in memory if it fits, else in the precision that it is stored in, else on all devices and on disk.

    Raises:
        InputError: if it does not fit, and its weights cannot stay on disk.
    """
    stored = torch.float32 if gguf else stored_dtype(config)
    wide = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    chosen = stored if dtype == "auto" and (device.startswith("cuda") or device == DISK) else wide
    count, stated = None if gguf else stored_parameters(Path(where), stored), parameters_of(config)
    if count is not None and stated > _ABSURD * count:  # the library would build what the configuration states
        require_memory({f"the configuration of '{name}'": stated * chosen.itemsize})
    count = stated if count is None else count
    needs = {each: count * each.itemsize + _MODULES for each in (stored, chosen)}
    if device == DISK:
        return _from_disk(chosen, {"": DISK})
    free = available(device)
    if needs[chosen] > free >= needs[stored] and dtype == "auto":
        _explain(name, needs[chosen], free, chosen, f"it is opened in {_text(stored)}, as stored")
        chosen = stored
    if needs[chosen] <= free:
        direct = device != "cpu" and find_spec("accelerate") is not None
        if not direct and device != "cpu":
            require_memory({f"'{name}'": needs[chosen]})
        return Plan({"dtype": chosen, **({"device_map": {"": device}} if direct else {})}, direct)
    chosen = stored if dtype == "auto" else chosen
    if gguf or find_spec("accelerate") is None:
        require_memory({f"'{name}' in {_text(chosen)}": needs[chosen]}, device)
    if device == "cpu":
        _explain(name, needs[chosen], free, chosen, "its layers are read from disk whenever they run")
        return _from_disk(chosen, {"": DISK})
    _explain(name, needs[chosen], free, chosen, "its layers are spread over all GPUs, the CPU's memory and the disk")
    return _from_disk(chosen, "auto")


def stored_dtype(config: Any) -> torch.dtype:
    """The precision of a model's files, as its configuration states it; float32 where it does not."""
    given = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    dtype: torch.dtype = getattr(torch, given) if isinstance(given, str) else given
    return dtype


def _from_disk(dtype: torch.dtype, device_map: Any) -> Plan:
    if find_spec("accelerate") is None:
        raise MissingExtraError(f"a model whose weights stay on disk {_NEEDS}")
    folder = tempfile.TemporaryDirectory(prefix="normscope-")
    return Plan({"dtype": dtype, "device_map": device_map, "offload_folder": folder.name}, True, folder)


def _explain(name: str, needs: float, free: float, dtype: torch.dtype, instead: str) -> None:
    warnings.warn(
        f"'{name}' needs about {size_text(needs)} of memory in {_text(dtype)}, {size_text(free)} are free: {instead}",
        stacklevel=2,
    )


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
