"""Small things that several pages need: derivatives, ranks, blocks, attention of a few queries."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import attention_weights


def jacobian(f: Callable[[Tensor], Tensor], x: Float[Tensor, " inputs"]) -> Float[Tensor, "outputs inputs"]:
    """∂f_i/∂x_j."""
    rows: Tensor = torch.autograd.functional.jacobian(f, x)  # type: ignore[no-untyped-call]
    return rows


def hessian(f: Callable[[Tensor], Tensor], x: Float[Tensor, " inputs"]) -> Float[Tensor, "inputs inputs"]:
    """∂²f/∂x_i∂x_j of a number f."""
    rows: Tensor = torch.autograd.functional.hessian(f, x)  # type: ignore[no-untyped-call]
    return rows


def in_blocks(blocks: Sequence[Float[Tensor, "_ _"]]) -> Float[Tensor, "rows columns"]:
    """Matrices along the diagonal, zeros beside them."""
    joined: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return joined


def attention_of(
    q: Float[Tensor, "queries head"], k: Float[Tensor, "keys head"], scale: float = 1.0
) -> Float[Tensor, "queries keys"]:
    """The library's attention weights of any number of queries, each among as many copies of itself as there are keys."""
    return torch.cat([attention_weights(row.expand(len(k), -1), k, scale)[:1] for row in q])


def rank(matrix: Float[Tensor, "rows columns"], threshold: float = 1e-9) -> int:
    """How many singular values are above ``threshold`` times the largest, and not all 0."""
    spectrum = torch.linalg.svdvals(matrix)
    return int((spectrum > threshold * spectrum[0].clamp(min=1e-3)).sum())
