"""The parameters of a norm, from what its module computes."""

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normscope.core.norms import NORMS
from normscope.models.model import BlockNorm

_known: "WeakKeyDictionary[nn.Module, tuple[list[Tensor], BlockNorm]]" = WeakKeyDictionary()


def norm_of(
    module: nn.Module, width: int, device: torch.device, slot: str = "", layer: int | None = None, sublayer: str = ""
) -> BlockNorm:
    """Kind, gain and bias of a norm, in float32 at least; computed once for the same parameters, since measures ask often."""
    parameters, (copies, known) = list(module.parameters()), _known.get(module, ([], None))
    same = len(copies) == len(parameters) and all(map(_equal, copies, parameters))
    if known is None or not same or known.gain.device != device or len(known.gain) != width:
        known = _measured(module, width, device)
        _known[module] = [parameter.detach().clone() for parameter in parameters], known
    return replace(known, slot=slot, layer=layer, sublayer=sublayer)


def _equal(one: Tensor, other: Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(one, other)


def _measured(module: nn.Module, width: int, device: torch.device) -> BlockNorm:
    """Kind, gain and bias of a norm from its values at a vector, the opposite vector, and a shifted one.

    Norm(x) = g·x̂ + b and Norm(−x) = −g·x̂ + b; LayerNorm ignores a constant that is added to all components. This holds for
    all families, however they store their gains (Gemma's is 1 + weight). The kind is that of the norm with other parameters: a
    gain of zero hides it.
    """
    parameter = next(module.parameters(), torch.empty(0))
    wide = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
    x = torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e3
    given = torch.stack((x, -x, x + 1e3)).to(parameter.device, wide)
    stored = {name: value.detach().to(wide) for name, value in module.named_parameters()}
    plus, minus, _ = _values(module, stored, given)
    unscaled, _, shifted = _values(module, {name: torch.ones_like(value) for name, value in stored.items()}, given)
    kind = "layer" if torch.allclose(unscaled, shifted, rtol=1e-3, atol=1e-3) else "rms"
    gain, bias = (plus - minus) / 2 / NORMS[kind](given[0].double().cpu()), (plus + minus) / 2
    eps = next((getattr(module, name) for name in ("eps", "variance_epsilon", "epsilon") if hasattr(module, name)), 0.0)
    has_bias = getattr(module, "bias", None) is not None
    gain, bias = gain.to(device, wide), bias.to(device, wide)
    return BlockNorm("", None, "", kind, gain, bias if has_bias else None, float(eps))


def _values(module: nn.Module, parameters: dict[str, Tensor], given: Float[Tensor, "three dim"]) -> Float[Tensor, "three dim"]:
    """The norm of the given vectors with other parameters. A copy of the module would copy what its hooks refer to."""
    with torch.no_grad():
        values: Tensor = torch.func.functional_call(module, parameters, (given[:, None],))
    return values.double().cpu().squeeze(1)


def width_of(module: nn.Module) -> int | None:
    """The number of components that a norm reads; None if it has no weight."""
    weight = getattr(module, "weight", None)
    return None if weight is None else int(weight.numel())
