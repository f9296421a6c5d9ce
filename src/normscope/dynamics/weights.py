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
    require_known("weights", kind, WEIGHTS)
    check_heads(dim, heads)

    def draw(own_gain: float, *shape: int) -> Tensor:
        std = own_gain / math.sqrt(dim) if kind == "kaiming" else scale
        return torch.randn(*runs, *shape, generator=generator, dtype=dtype, device=generator.device).mul_(std)

    W_Q, W_K, W_V = (draw(gain, dim, heads, dim // heads).movedim(-2, -3) for _ in range(3))
    return HeadWeights(W_Q, W_K, W_V, draw(output_gain, heads, dim // heads, dim))
