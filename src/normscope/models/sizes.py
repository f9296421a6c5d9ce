"""How many weights a model of the ``transformers`` library has: from its files, or about, from its configuration."""

from pathlib import Path
from typing import Any

import torch

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def stored_parameters(folder: Path, dtype: torch.dtype) -> float | None:
    """The number of weights in the safetensors files of a folder; None if there are none here."""
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    return sum(file.stat().st_size for file in files) / dtype.itemsize if files else None


def parameters_of(config: Any) -> float:
    """The number of weights, about, from the sizes that a configuration states."""
    sizes = config.get_text_config()

    def size(*names: str) -> float:
        """The largest number under these names; 0 where there is none."""
        found = [getattr(sizes, own, None) for own in names]
        values = [value for item in found for value in (item if isinstance(item, list | tuple) else [item])]
        return max((float(value) for value in values if isinstance(value, int) and value > 0), default=0.0)

    layers, dim = size("num_hidden_layers"), size("hidden_size")
    wide = (size("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size") or 4 * dim) * max(1.0, size(*_EXPERTS))
    tables = size("vocab_size") + size("max_position_embeddings")
    return layers * (4 * dim**2 + 3 * dim * wide) + tables * dim
