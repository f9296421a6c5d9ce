"""The parameters of a norm, or of a pointwise map in its place, from what its module computes."""

from collections import OrderedDict
from copy import copy
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normscope.core.norms import NORMS, POINTWISE
from normscope.models.model import BlockNorm
from normscope.models.offload import weights_of

_MOST_EPS = 10.0
_SHORT = 1e-3  # the root mean square of a vector that shows eps
_NEAR = 1e-3  # of a gain read from values in half precision
_LARGE = 1e6  # where tanh and erf are ±1
_LADDER = tuple(sign * 2.0**power for power in range(-8, 9) for sign in (1, -1))  # where a pointwise map shows its slope
_STEEP = (0.02, 0.9)  # values of φ between which its slope is measured
_INVERSE = {"tanh": torch.atanh, "erf": torch.erfinv}
_OFFSETS = (0.0, 1.0)  # gain − weight, where they differ by a number (Gemma's gain is 1 + weight)


@dataclass(frozen=True)
class _Known:
    """What was measured of a norm: its parameters at that time, the norm, and gain − weight if that is the same for all."""

    parameters: list[Tensor]
    norm: BlockNorm
    offset: float | None


_known: "WeakKeyDictionary[nn.Module, _Known]" = WeakKeyDictionary()


def norm_of(
    module: nn.Module, width: int, device: torch.device, slot: str = "", layer: int | None = None, sublayer: str = ""
) -> BlockNorm:
    """Kind, gain and bias of a norm, in float32 at least, as its parameters are now.

    Measures ask often: where gain − weight is one number whatever the weight, the norm is measured once; else once for the same
    parameters.
    """
    weights, known = weights_of(module), _known.get(module)
    parameters = list(weights.values())
    if known is not None and known.norm.gain.device == device and len(known.norm.gain) == width:
        now = _read(weights, known) if known.offset is not None else known.norm
        if known.offset is not None or all(map(_equal, known.parameters, parameters)):
            return replace(now, slot=slot, layer=layer, sublayer=sublayer)
    norm, offset = _measured(module, width, device)
    _known[module] = _Known([parameter.detach().clone() for parameter in parameters], norm, offset)
    return replace(norm, slot=slot, layer=layer, sublayer=sublayer)


def _read(weights: dict[str, Tensor], known: _Known) -> BlockNorm:
    """The norm with the gain and bias that its parameters hold now."""
    gain, bias = (
        None if x is None else x.detach().flatten().to(known.norm.gain) for x in (weights["weight"], weights.get("bias"))
    )
    assert gain is not None
    return replace(known.norm, gain=gain + known.offset if known.offset else gain, bias=bias)


def _equal(one: Tensor, other: Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(one, other)


def _measured(module: nn.Module, width: int, device: torch.device) -> tuple[BlockNorm, float | None]:
    """Kind, gain and bias of a norm from its values at a vector, the opposite vector, and a shifted one; gain − weight.

    Norm(x) = g·x̂ + b and Norm(−x) = −g·x̂ + b; LayerNorm ignores a constant that is added to all components. This holds for
    all families, however they store their gains (Gemma's is 1 + weight). The kind is that of the norm with other parameters: a
    gain of zero hides it.
    """
    weights = weights_of(module)
    parameter = next(iter(weights.values()), torch.empty(0))
    wide = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
    x = torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e3
    given = torch.stack((x, -x, x + 1e3)).to(parameter.device, wide)
    stored, module = {name: value.detach().to(wide) for name, value in weights.items()}, bare(module)
    if _is_pointwise(module, stored, given):
        return _measured_map(module, stored, given, device), None
    plus, minus, _ = _values(module, stored, given)
    unscaled, _, shifted = _values(module, {name: torch.ones_like(value) for name, value in stored.items()}, given)
    kind = "layer" if torch.allclose(unscaled, shifted, rtol=1e-3, atol=1e-3) else "rms"
    gain, bias = (plus - minus) / 2 / NORMS[kind](given[0].double().cpu()), (plus + minus) / 2
    eps = next((getattr(module, name) for name in ("eps", "variance_epsilon", "epsilon") if hasattr(module, name)), None)
    if not isinstance(eps, float):
        eps = _measured_eps(module, stored, given[0], kind)
        if eps > _MOST_EPS:
            raise ValueError("a map that keeps the norms of its vectors is no norm")
    has_bias = getattr(module, "bias", None) is not None
    gain, bias = gain.to(device, wide), bias.to(device, wide)
    norm = BlockNorm("", None, "", kind, gain, bias if has_bias else None, float(eps))
    return norm, _offset(module, stored, given, kind, has_bias)


def _is_pointwise(module: nn.Module, stored: dict[str, Tensor], given: Float[Tensor, "three dim"]) -> bool:
    """Whether a module with parameters maps every component alone: others do not change what becomes of it."""
    half = given.shape[1] // 2
    if not stored or not half:
        return False
    x = given[:1] / _LARGE * 100
    plain, other = _values(module, stored, torch.cat((x, torch.cat((x[:, :half], 3 * x[:, half:]), 1))))
    return torch.equal(plain[:half], other[:half]) and not torch.equal(plain[half:], other[half:])


def _measured_map(
    module: nn.Module, stored: dict[str, Tensor], given: Float[Tensor, "three dim"], device: torch.device
) -> BlockNorm:
    """Gain · φ(slope·x + shift) + bias from its values at vectors of equal components, φ = tanh or erf.

    Far away φ = ±1, which gives gain and bias; the inverse of φ is a line in between, for the right φ alone.
    """
    ladder = torch.tensor((_LARGE, -_LARGE, *_LADDER), dtype=given.dtype, device=given.device)
    most, least, *values = _values(module, stored, ladder[:, None].expand(-1, given.shape[1])).unbind()
    gain, bias = (most - least) / 2, (most + least) / 2
    there = gain.abs() > _NEAR * gain.abs().amax()
    phi = ((torch.stack(values) - bias) / gain)[:, there]
    steep = ((phi.abs() > _STEEP[0]) & (phi.abs() < _STEEP[1])).all(1)
    points, phi = torch.tensor(_LADDER, dtype=torch.float64)[steep], phi[steep]
    if len(points) > 2 and bool((phi - phi.mean(1, keepdim=True)).abs().amax() < _NEAR):
        for kind in POINTWISE:
            z = _INVERSE[kind](phi.mean(1))
            line = torch.linalg.lstsq(torch.stack((points, torch.ones_like(points)), 1), z[:, None]).solution[:, 0]
            if torch.allclose(line[0] * points + line[1], z, rtol=_NEAR, atol=_NEAR):
                slope, shift = float(line[0]), float(line[1])
                moved = bias.to(device, given.dtype) if bool(bias.any()) else None
                shift = shift if abs(shift) > _NEAR * abs(slope) else 0.0
                return BlockNorm("", None, "", kind, gain.to(device, given.dtype), moved, 0.0, slope, shift)
    raise ValueError("a pointwise map that is neither tanh nor erf stands in no norm's place")


def _offset(
    module: nn.Module, stored: dict[str, Tensor], given: Float[Tensor, "three dim"], kind: str, has_bias: bool
) -> float | None:
    """Gain − weight, if it is 0 or 1 with the stored and with random parameters, and the bias is the parameter of that name."""
    if set(stored) != {"weight", "bias"} & {"weight", *["bias"] * has_bias} or stored["weight"].numel() != given.shape[1]:
        return None
    generator, sphere = torch.Generator().manual_seed(1), NORMS[kind](given[0].double().cpu())
    drawn = {name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for name, x in stored.items()}
    offsets = set[float | None]()
    for parameters in (stored, drawn):
        plus, minus, _ = _values(module, parameters, given)
        weight, bias = (parameters.get(name, plus.new_zeros(())).to(plus).flatten() for name in ("weight", "bias"))
        near = torch.allclose((plus + minus) / 2, bias.expand_as(plus), rtol=_NEAR, atol=_NEAR)
        gain = (plus - minus) / 2 / sphere
        same = (offset for offset in _OFFSETS if near and torch.allclose(gain, weight + offset, rtol=_NEAR, atol=_NEAR))
        offsets.add(next(same, None))
    return offsets.pop() if len(offsets) == 1 else None


def bare(module: nn.Module) -> nn.Module:
    """A module that computes the same without hooks, with the same parameters; what its hooks refer to is not copied."""
    plain = copy(module)
    for name in ("_hf_hook", "_old_forward", "forward"):  # of accelerate, which puts other parameters in place of given ones
        plain.__dict__.pop(name, None)
    plain._forward_hooks, plain._forward_pre_hooks = OrderedDict(), OrderedDict()
    plain._parameters = dict(module._parameters)
    return plain


def known_norm(module: nn.Module, width: int, device: torch.device, slot: str = "") -> BlockNorm | None:
    """The norm of a module; None if it cannot read single vectors, as a norm over rows or places does not."""
    try:
        return norm_of(module, width, device, slot)
    except (RuntimeError, ValueError, TypeError):  # of the module
        return None


def _measured_eps(module: nn.Module, parameters: dict[str, Tensor], x: Float[Tensor, " dim"], kind: str) -> float:
    """Eps of a norm that does not state it, from how much shorter it makes the norm of a short vector.

    Where the norm makes a vector of mean square s² r times as long as it makes a long one, eps = s²(1/r² − 1).
    """
    ones = {name: torch.ones_like(value) if name == "weight" else torch.zeros_like(value) for name, value in parameters.items()}
    short = x * (_SHORT / float(x.double().square().mean().sqrt()))
    made, longest = _values(module, ones, torch.stack((short, x)))
    ratio = float(made.norm() / longest.norm()) if bool(longest.any()) else 1.0
    size = float((short.double() - (short.double().mean() if kind == "layer" else 0.0)).square().mean())
    eps = size * (1 / ratio**2 - 1) if ratio else 0.0
    return float(f"{eps:.3g}") if eps > _SHORT**2 * 1e-4 else 0.0


def _values(module: nn.Module, parameters: dict[str, Tensor], given: Float[Tensor, "three dim"]) -> Float[Tensor, "three dim"]:
    """The norm of the given vectors with other parameters. A copy of the module would copy what its hooks refer to."""
    with torch.no_grad():
        values = torch.func.functional_call(module, parameters, (given[:, None],))
    if not isinstance(values, Tensor):
        raise TypeError("a norm returns a tensor")
    return values.double().cpu().squeeze(1)


def width_of(module: nn.Module) -> int | None:
    """The number of components that a norm reads; None if it has no weight."""
    weight = getattr(module, "weight", None)
    return None if weight is None else int(weight.numel())
