"""The Triton kernels of ``swiglu`` and its derivative: import it only where Triton is installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

_ROWS, _COLUMNS, _WARPS = 8, 256, 4


@triton.jit
def read_halves(hidden, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Both halves of a tile in float32, where they lie, where their product lies, and which of its places exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < width)[None, :]
    product = row[:, None] * width + column[None, :]
    place = product + row[:, None] * width
    u = tl.load(hidden + place, mask=there).to(tl.float32)
    v = tl.load(hidden + place + width, mask=there).to(tl.float32)
    return u, v, place, product, there


@triton.jit
def forward_kernel(hidden, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The product u · silu(v) of a tile."""
    u, v, _, product, there = read_halves(hidden, rows, width, ROWS, COLUMNS)
    tl.store(out + product, (u * (v * tl.sigmoid(v))).to(out.dtype.element_ty), mask=there)


@triton.jit
def backward_kernel(hidden, d_out, d_hidden, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradients of u and v of a tile; silu′(v) = σ(v)(1 + v(1 − σ(v)))."""
    u, v, place, product, there = read_halves(hidden, rows, width, ROWS, COLUMNS)
    d = tl.load(d_out + product, mask=there).to(tl.float32)
    gate = tl.sigmoid(v)
    tl.store(d_hidden + place, (d * v * gate).to(d_hidden.dtype.element_ty), mask=there)
    d_v = d * u * gate * (1 + v * (1 - gate))
    tl.store(d_hidden + place + width, d_v.to(d_hidden.dtype.element_ty), mask=there)


def _run(kernel, tensors: tuple[Tensor, ...]) -> None:
    """A kernel on tiles of all rows; the first tensor is (..., 2 · width)."""
    hidden = tensors[0]
    width = hidden.shape[-1] // 2
    rows = hidden.numel() // (2 * width)
    if rows:
        with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
            grid = (triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS))
            kernel[grid](*tensors, rows, width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS)


@custom_op("normscope::swiglu", mutates_args=())
def fused_swiglu(hidden: Tensor) -> Tensor:
    """The forward pass for hidden units (..., 2 · width)."""
    hidden = hidden.contiguous()
    out = hidden.new_empty(*hidden.shape[:-1], hidden.shape[-1] // 2)
    _run(forward_kernel, (hidden, out))
    return out


@custom_op("normscope::swiglu_backward", mutates_args=())
def fused_swiglu_backward(d_out: Tensor, hidden: Tensor) -> Tensor:
    """The gradient of the hidden units."""
    hidden = hidden.contiguous()
    d_hidden = torch.empty_like(hidden)
    _run(backward_kernel, (hidden, d_out.contiguous(), d_hidden))
    return d_hidden


@fused_swiglu.register_fake
def _(hidden):
    return hidden.new_empty(*hidden.shape[:-1], hidden.shape[-1] // 2)


@fused_swiglu_backward.register_fake
def _(d_out, hidden):
    return hidden.new_empty(hidden.shape)


def _remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, d_out):
    return fused_swiglu_backward(d_out, *ctx.saved_tensors)


fused_swiglu.register_autograd(_differentiate, setup_context=_remember)
