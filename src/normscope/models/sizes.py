"""How much memory a model of the ``transformers`` library needs, from its configuration alone: about, to a factor of two."""

from typing import Any

_MODULES = 100e3  # bytes of a layer's modules and small tensors
_COPIES = 1.3  # of the weights, while they are read
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def model_memory(name: str, config: Any) -> dict[str, float]:
    """Bytes of the weights in float32, by the sizes that they follow from."""
    sizes = config.get_text_config()

    def size(*names: str) -> float:
        """The largest number under these names; 0 where there is none."""
        found = [getattr(sizes, own, None) for own in names]
        values = [value for item in found for value in (item if isinstance(item, list | tuple) else [item])]
        return max((float(value) for value in values if isinstance(value, int) and value > 0), default=0.0)

    layers, dim = size("num_hidden_layers"), size("hidden_size")
    wide = (size("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size") or 4 * dim) * max(1.0, size(*_EXPERTS))
    tables = size("vocab_size") + size("max_position_embeddings")
    weights = layers * (4 * dim**2 + 3 * dim * wide) + tables * dim
    return {f"'{name}' ({layers:.6g} layers of width {dim:.6g})": _COPIES * 4 * weights + _MODULES * layers}
