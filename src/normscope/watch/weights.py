"""What the parameters of a model show between two steps: gradients by depth, gains of norms, learned scales."""

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from normscope.errors import InputError
from normscope.models import BlockNorm, Model
from normscope.models.wrapped import is_flat
from normscope.watch.packed import Packed

GRADIENT = "gradient of"  # a parameter
OUTSIDE = -1  # the layer of what is in no layer


class Weights:
    """Reads gradients, gains and learned scales of a model; of sharded parameters, the part that this process has."""

    def __init__(self, model: Model, ranks: int) -> None:
        self.model, self.ranks = model, ranks
        if any(map(is_flat, model.model.modules())):
            raise InputError(
                "FullyShardedDataParallel (FSDP1) is unsupported, because it flattens parameters: use fully_shard (FSDP2)"
            )
        blocks, layer_of = model.blocks, dict[int, int]()
        for layer, block in reversed(list(enumerate(blocks))):  # a module that runs many times counts to its first layer
            layer_of |= {id(parameter): layer for parameter in block.parameters()}
        named = list(model.model.named_parameters())
        self.parameters = [(name, parameter, layer_of.get(id(parameter), OUTSIDE)) for name, parameter in named]
        scales = {id(parameter) for several in model.learned_scales for parameter in several}
        self.scales = [(name, parameter, layer) for name, parameter, layer in self.parameters if id(parameter) in scales]
        self._squares: Tensor | None = None
        self._trained: list[int] = []
        self._constants: dict[tuple[Any, ...], Tensor] = {}

    def keep_gradients(self) -> bool:
        """Read the gradients as they are now, for ``read``; whether there are any."""
        known = [(i, p.grad) for i, (_, p, _) in enumerate(self.parameters) if p.grad is not None]
        self._squares = None
        if not known:
            return False
        parts = [local(gradient) for _, gradient in known]
        norms = torch._foreach_norm(parts, 2, torch.float64)  # no copies of gradients in half precision
        device = norms[0].device
        shares = self._constant([self._share(gradient) for _, gradient in known], torch.float64, device)
        squares = torch.stack([norm.to(device) for norm in norms]).square() * shares
        places = self._constant([i for i, _ in known], torch.long, device)
        self._squares = squares.new_zeros(len(self.parameters)).index_copy_(0, places, squares)
        self._trained = sorted({self.parameters[i][2] for i, _ in known} - {OUTSIDE})
        return True

    def _constant(self, values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Numbers on the device, sent once: to send them again would wait for it."""
        key = (*values, dtype, device)
        if key not in self._constants:
            self._constants[key] = torch.tensor(values, dtype=dtype, device=device)
        return self._constants[key]

    def _share(self, x: Tensor) -> float:
        """1 over how many processes hold the same part of a tensor."""
        mesh: Any = getattr(x, "device_mesh", None)
        if mesh is None:
            return 1 / self.ranks
        placements: Any = getattr(x, "placements", ())
        return 1 / prod(int(size) for size, place in zip(mesh.shape, placements, strict=True) if place.is_replicate())

    def read(self, packed: Packed, norms: Iterable[BlockNorm]) -> None:
        """Add the kept gradients, the gains of norms and the learned scales."""
        if self._squares is not None:
            squares, self._squares = self._squares, None
            depth = self._constant([layer + 1 for _, _, layer in self.parameters], torch.long, squares.device)
            by_layer = squares.new_zeros(self.model.layers + 1).index_add_(0, depth, squares)
            trained = self._constant([layer + 1 for layer in self._trained], torch.long, squares.device)
            packed.add("layers", "gradient", by_layer[trained], [{"layer": layer} for layer in self._trained], "norm")
            packed.add("steps", "gradient", squares.sum(), {}, "norm")
            tensors = [{"tensor": f"{GRADIENT} {name}", "layer": layer} for name, _, layer in self.parameters]
            packed.add("faults", "count", ~squares.isfinite(), tensors, "sum")
        self._summarise(packed, "norms", ("gain", "gain_min", "gain_max"), [_gain(norm) for norm in norms])
        scales = [({"name": name, "layer": layer}, parameter) for name, parameter, layer in self.scales]
        self._summarise(packed, "scales", ("mean", "min", "max"), scales)

    def _summarise(
        self, packed: Packed, table: str, columns: tuple[str, str, str], values: list[tuple[dict[str, Any], Tensor]]
    ) -> None:
        """Mean, smallest and largest value of tensors, those of one shape together; of shards, over all processes."""
        shapes: dict[tuple[Any, ...], list[tuple[dict[str, Any], Tensor]]] = {}
        for keys, x in values:
            shapes.setdefault((x.shape, local(x).shape), []).append((keys, x))  # in the same order on every process
        for together in shapes.values():
            rows, (mean, low, high) = [keys for keys, _ in together], columns
            parts = torch.stack([local(x).flatten() for _, x in together]).double()
            whole = [self._share(x) / x.numel() for _, x in together]
            packed.add(table, mean, parts.sum(1) * self._constant(whole, parts.dtype, parts.device), rows, "sum")
            bounds = parts if parts.shape[1] else parts.new_full((len(parts), 1), torch.nan)
            packed.add(table, low, bounds.amin(1), rows, "min")
            packed.add(table, high, bounds.amax(1), rows, "max")


def _gain(norm: BlockNorm) -> tuple[dict[str, Any], Tensor]:
    layer = OUTSIDE if norm.layer is None else norm.layer
    name = norm.slot if norm.layer is None else f"layer {norm.layer} {norm.sublayer} {norm.slot}"
    return {"norm": name, "layer": layer}, norm.gain


def local(x: Tensor) -> Tensor:
    """A tensor, or the part of a sharded one that this process has."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part.detach()
