"""Attention among few tokens with wide heads, in one kernel: a whole row of scores fits a tile, so it never leaves the chip.

PyTorch's fused kernels stop at heads 256 wide; ensembles have 128 tokens and heads 512 wide.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from normscope.core.kernels import has_kernels

_MOST_TOKENS = 256
_ROWS = 64
_COLUMNS = 64


def tile_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel can serve this shape: half precision, few tokens, heads that are a multiple of 64 wide."""
    small = q.shape[-2] == k.shape[-2] <= _MOST_TOKENS
    return has_kernels(q.device, q.dtype) and small and q.shape[-1] % _COLUMNS == v.shape[-1] % _COLUMNS == 0


def attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """softmax(scale · q kᵀ) v for (batch, 1, tokens, head) in half precision; without a gradient."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    batch, _, tokens, width = q.shape
    out = torch.empty_like(v)
    padded = max(16, 1 << (tokens - 1).bit_length())
    grid = (-(-tokens // _ROWS), batch)
    with torch.cuda.device(q.device):  # a kernel starts on the current GPU, which need not be that of its tensors
        _kernel()[grid](
            q, k, v, out, scale * 1.4426950408889634, tokens, width, v.shape[-1],
            PADDED=padded, ROWS=_ROWS, COLUMNS=_COLUMNS, CAUSAL=causal, num_warps=4,
        )  # fmt: skip
    return out


@cache
def _kernel() -> Any:
    """The compiled kernel; triton is imported only where there is a GPU for it."""
    from normscope.core.tile_kernel import tile_kernel

    return tile_kernel
