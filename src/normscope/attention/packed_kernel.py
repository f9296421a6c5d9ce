"""The Triton kernels of ``attention.packed`` and their derivative: import it only where Triton is installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton


@triton.jit
def read_tile(qkv, tiles, heads, TILE: tl.constexpr, HEAD: tl.constexpr):
    """q, k, v of one tile and head, where they lie, where their mixed values lie, and which of its places hold a token."""
    start = tl.load(tiles + tl.program_id(0))
    end = tl.load(tiles + tl.program_id(0) + 1)
    token = start + tl.arange(0, TILE)
    there = token < end
    column = tl.program_id(1) * HEAD + tl.arange(0, HEAD)
    width = heads * HEAD
    mixed = token.to(tl.int64)[:, None] * width + column[None, :]
    rows = token.to(tl.int64)[:, None] * (3 * width) + column[None, :]
    q = tl.load(qkv + rows, mask=there[:, None], other=0.0)
    k = tl.load(qkv + rows + width, mask=there[:, None], other=0.0)
    v = tl.load(qkv + rows + 2 * width, mask=there[:, None], other=0.0)
    return q, k, v, rows, mixed, token, there


@triton.jit
def weights_of_tile(q, k, segments, scale, token, there, TILE: tl.constexpr):
    """Attention weights of a tile's queries over its keys, (TILE, TILE), in float32."""
    segment = tl.load(segments + token, mask=there, other=-1)
    place = tl.arange(0, TILE)
    scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
    seen = (segment[:, None] == segment[None, :]) & (place[:, None] >= place[None, :])
    scores = tl.where(seen, scores, -float("inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def forward_kernel(qkv, segments, tiles, scale, out, heads, TILE: tl.constexpr, HEAD: tl.constexpr):
    """All queries of one tile and head."""
    if tl.load(tiles + tl.program_id(0)) == tl.load(tiles + tl.program_id(0) + 1):
        return
    q, k, v, _, mixed, token, there = read_tile(qkv, tiles, heads, TILE, HEAD)
    weights = weights_of_tile(q, k, segments, tl.load(scale), token, there, TILE)
    tl.store(out + mixed, tl.dot(weights.to(v.dtype), v).to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def backward_kernel(qkv, segments, tiles, scale, d_out, d_qkv, heads, TILE: tl.constexpr, HEAD: tl.constexpr):
    """Gradients of q, k and v of one tile and head; the weights are computed again."""
    if tl.load(tiles + tl.program_id(0)) == tl.load(tiles + tl.program_id(0) + 1):
        return
    q, k, v, rows, mixed, token, there = read_tile(qkv, tiles, heads, TILE, HEAD)
    factor = tl.load(scale)
    width = heads * HEAD
    d_mixed = tl.load(d_out + mixed, mask=there[:, None], other=0.0)
    weights = weights_of_tile(q, k, segments, factor, token, there, TILE)
    d_v = tl.dot(tl.trans(weights.to(v.dtype)), d_mixed)
    tl.store(d_qkv + rows + 2 * width, d_v.to(d_qkv.dtype.element_ty), mask=there[:, None])
    d_weights = tl.dot(d_mixed, tl.trans(v))
    d_scores = (weights * (d_weights - tl.sum(weights * d_weights, 1)[:, None]) * factor).to(q.dtype)
    tl.store(d_qkv + rows, tl.dot(d_scores, k).to(d_qkv.dtype.element_ty), mask=there[:, None])
    tl.store(d_qkv + rows + width, tl.dot(tl.trans(d_scores), q).to(d_qkv.dtype.element_ty), mask=there[:, None])


@triton_op("normscope::packed_attention", mutates_args={})
def packed_attention(qkv: Tensor, segments: Tensor, tiles: Tensor, scale: Tensor, tile: int) -> Tensor:
    """The forward pass for qkv (tokens, 3, heads, head)."""
    qkv = qkv.contiguous()
    tokens, _, heads, head = qkv.shape
    out = torch.empty((tokens, heads, head), dtype=qkv.dtype, device=qkv.device)
    grid = (tiles.shape[0] - 1, heads)
    wrap_triton(forward_kernel)[grid](qkv, segments, tiles, scale, out, heads, TILE=tile, HEAD=head, num_warps=_warps(tile))
    return out


@triton_op("normscope::packed_attention_backward", mutates_args={})
def packed_attention_backward(d_out: Tensor, qkv: Tensor, segments: Tensor, tiles: Tensor, scale: Tensor, tile: int) -> Tensor:
    """The gradient of qkv."""
    qkv, d_out = qkv.contiguous(), d_out.contiguous()
    heads, head = qkv.shape[2:]
    d_qkv = torch.empty_like(qkv)
    grid = (tiles.shape[0] - 1, heads)
    wrap_triton(backward_kernel)[grid](
        qkv, segments, tiles, scale, d_out, d_qkv, heads, TILE=tile, HEAD=head, num_warps=_warps(tile)
    )
    return d_qkv


def _warps(tile: int) -> int:
    return 8 if tile > 64 else 4


def _remember(ctx, inputs, output):
    *tensors, ctx.tile = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, d_out):
    return packed_attention_backward(d_out, *ctx.saved_tensors, ctx.tile), None, None, None, None


packed_attention.register_autograd(_differentiate, setup_context=_remember)
