"""Random weights of an attention layer."""

import math

import torch
from torch import Tensor

from normscope.core import HeadWeights
from normscope.errors import InputError, require_known

WEIGHTS = ("kaiming", "gaussian")


def check_heads(dim: int, heads: int) -> None:
    """Refuse heads that cannot share the dimensions."""
    if heads < 1 or dim % heads:
        raise InputError(f"{dim} dimensions cannot be shared among {heads} heads")


def random_weights(
    kind: str,
    dim: int,
    heads: int,
    generator: torch.Generator,
    *,
    gain: float = math.sqrt(2),
    output_gain: float = 1.0,
    scale: float = 0.02,
    dtype: torch.dtype = torch.float64,
    runs: tuple[int, ...] = (),
) -> HeadWeights:
    """W_Q, W_K, W_V, W_O for each run; heads lie side by side in memory, so that all of them are one product.

    ``kaiming`` is N(0, gain²/fan_in), with ``output_gain`` for W_O; ``gaussian`` is N(0, scale²).
    """
    check_heads(dim, heads)
    std, output_std = (_std(kind, dim, own, scale) for own in (gain, output_gain))
    head = dim // heads
    W_Q, W_K, W_V = (_draw(std, (*runs, dim, heads, head), generator, dtype).movedim(-2, -3) for _ in range(3))
    return HeadWeights(W_Q, W_K, W_V, _draw(output_std, (*runs, heads, head, dim), generator, dtype))


def random_gate(
    kind: str,
    dim: int,
    heads: int,
    generator: torch.Generator,
    *,
    gain: float = math.sqrt(2),
    scale: float = 0.02,
    dtype: torch.dtype = torch.float64,
    runs: tuple[int, ...] = (),
) -> Tensor:
    """W_G for schemes with a gate, of the kind of ``random_weights``: its generator is another, which leaves theirs alone."""
    std = _std(kind, dim, gain, scale)
    return _draw(std, (*runs, dim, heads, dim // heads), generator, dtype).movedim(-2, -3)


def _std(kind: str, dim: int, gain: float, scale: float) -> float:
    require_known("weights", kind, WEIGHTS)
    return gain / math.sqrt(dim) if kind == "kaiming" else scale


def _draw(std: float, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device).mul_(std)
