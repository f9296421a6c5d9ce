"""The Triton kernels of ``attention.packed`` and their derivative: import it only where Triton is installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from normscope.core.norms import EPSILON

_LETTERS = {"q": 1, "k": 2, "v": 4}


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
def on_sphere(x, epsilon, CENTRED: tl.constexpr, HEAD: tl.constexpr):
    """x/rms(x), of the centred x where the norm is LayerNorm, and 1/rms(x), in float32.

    As in ``core.norms``, x/s is squared, where s is the power of two next to max|x| or √epsilon, so that no square overflows.
    """
    x = x.to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(x), 1), tl.sqrt(epsilon))
    size = tl.minimum((most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 2.0**126)
    x = x / size[:, None]
    if CENTRED:
        x = x - (tl.sum(x, 1) / HEAD)[:, None]
    inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD + epsilon / size / size)
    return x * inverse[:, None], inverse / size


@triton.jit
def normalise(x, gains, epsilon, heads, LETTER: tl.constexpr, FLAGS: tl.constexpr, CENTRED: tl.constexpr, HEAD: tl.constexpr):
    """Gain · Norm(x) for one of q, k and v; FLAGS say which of them have a norm, and whether there are gains at all."""
    result = x
    if FLAGS & 8:
        wide = x.to(tl.float32)
        if FLAGS & (1 << LETTER):
            wide, _ = on_sphere(x, epsilon, CENTRED, HEAD)
        gain = tl.load(gains + (LETTER * heads + tl.program_id(1)) * HEAD + tl.arange(0, HEAD))
        result = (wide * gain[None, :]).to(x.dtype)
    return result


@triton.jit
def store_gradient(
    d,
    x,
    place,
    there,
    gains,
    d_gains,
    epsilon,
    heads,
    LETTER: tl.constexpr,
    FLAGS: tl.constexpr,
    CENTRED: tl.constexpr,
    HEAD: tl.constexpr,
):
    """The gradient of x from d, that of gain · Norm(x); and this tile's share of the gradient of the gain."""
    if FLAGS & 8:
        column = (LETTER * heads + tl.program_id(1)) * HEAD + tl.arange(0, HEAD)
        gain = tl.load(gains + column)
        share = d_gains + tl.program_id(0) * 3 * heads * HEAD + column
        if FLAGS & (1 << LETTER):
            point, inverse = on_sphere(x, epsilon, CENTRED, HEAD)
            tl.store(share, tl.sum(d * point, 0))
            d = d * gain[None, :]
            d = (d - point * (tl.sum(d * point, 1) / HEAD)[:, None]) * inverse[:, None]
            if CENTRED:
                d = d - (tl.sum(d, 1) / HEAD)[:, None]
        else:
            tl.store(share, tl.sum(d * x.to(tl.float32), 0))
            d = d * gain[None, :]
    tl.store(place, d.to(x.dtype), mask=there[:, None])


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
def forward_kernel(
    qkv,
    segments,
    tiles,
    scale,
    gains,
    out,
    epsilon,
    heads,
    FLAGS: tl.constexpr,
    CENTRED: tl.constexpr,
    TILE: tl.constexpr,
    HEAD: tl.constexpr,
):
    """All queries of one tile and head."""
    if tl.load(tiles + tl.program_id(0)) == tl.load(tiles + tl.program_id(0) + 1):
        return
    q, k, v, _, mixed, token, there = read_tile(qkv, tiles, heads, TILE, HEAD)
    q = normalise(q, gains, epsilon, heads, 0, FLAGS, CENTRED, HEAD)
    k = normalise(k, gains, epsilon, heads, 1, FLAGS, CENTRED, HEAD)
    v = normalise(v, gains, epsilon, heads, 2, FLAGS, CENTRED, HEAD)
    weights = weights_of_tile(q, k, segments, tl.load(scale), token, there, TILE)
    tl.store(out + mixed, tl.dot(weights.to(v.dtype), v).to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def backward_kernel(
    qkv,
    segments,
    tiles,
    scale,
    gains,
    d_out,
    d_qkv,
    d_gains,
    epsilon,
    heads,
    FLAGS: tl.constexpr,
    CENTRED: tl.constexpr,
    TILE: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Gradients of q, k and v of one tile and head; norms and weights are computed again."""
    if tl.load(tiles + tl.program_id(0)) == tl.load(tiles + tl.program_id(0) + 1):
        return
    q_raw, k_raw, v_raw, rows, mixed, token, there = read_tile(qkv, tiles, heads, TILE, HEAD)
    q = normalise(q_raw, gains, epsilon, heads, 0, FLAGS, CENTRED, HEAD)
    k = normalise(k_raw, gains, epsilon, heads, 1, FLAGS, CENTRED, HEAD)
    v = normalise(v_raw, gains, epsilon, heads, 2, FLAGS, CENTRED, HEAD)
    factor = tl.load(scale)
    place = d_qkv + rows
    width = heads * HEAD
    d_mixed = tl.load(d_out + mixed, mask=there[:, None], other=0.0)
    weights = weights_of_tile(q, k, segments, factor, token, there, TILE)
    d_v = tl.dot(tl.trans(weights.to(v.dtype)), d_mixed)
    store_gradient(d_v, v_raw, place + 2 * width, there, gains, d_gains, epsilon, heads, 2, FLAGS, CENTRED, HEAD)
    d_weights = tl.dot(d_mixed, tl.trans(v))
    d_scores = (weights * (d_weights - tl.sum(weights * d_weights, 1)[:, None]) * factor).to(q.dtype)
    d_q, d_k = tl.dot(d_scores, k), tl.dot(tl.trans(d_scores), q)
    store_gradient(d_q, q_raw, place, there, gains, d_gains, epsilon, heads, 0, FLAGS, CENTRED, HEAD)
    store_gradient(d_k, k_raw, place + width, there, gains, d_gains, epsilon, heads, 1, FLAGS, CENTRED, HEAD)


# Opaque to the compiler: it cannot see that a kernel with an early return leaves its inputs alone, and would copy them.
@custom_op("normscope::packed_attention", mutates_args=())
def packed_attention(
    qkv: Tensor,
    segments: Tensor,
    tiles: Tensor,
    scale: Tensor,
    gains: Tensor | None,
    letters: str,
    centred: bool,
    tile: int,
) -> Tensor:
    """The forward pass for qkv (tokens, 3, heads, head), with norms and gains (3, heads, head) or without."""
    qkv = qkv.contiguous()
    tokens, _, heads, head = qkv.shape
    out = qkv.new_empty(tokens, heads, head)
    with torch.cuda.device(qkv.device):
        forward_kernel[(len(tiles) - 1, heads)](
            qkv,
            segments,
            tiles,
            scale,
            scale if gains is None else gains.contiguous(),
            out,
            EPSILON,
            heads,
            FLAGS=_flags(gains, letters),
            CENTRED=centred,
            TILE=tile,
            HEAD=head,
            num_warps=_warps(tile),
        )
    return out


@custom_op("normscope::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    d_out: Tensor,
    qkv: Tensor,
    segments: Tensor,
    tiles: Tensor,
    scale: Tensor,
    gains: Tensor | None,
    letters: str,
    centred: bool,
    tile: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of qkv and of the gains; an empty one where there are none."""
    qkv, d_out = qkv.contiguous(), d_out.contiguous()
    heads, head = qkv.shape[2:]
    d_qkv = torch.empty_like(qkv)
    shares = scale if gains is None else gains.new_zeros(len(tiles) - 1, *gains.shape)
    with torch.cuda.device(qkv.device):
        backward_kernel[(len(tiles) - 1, heads)](
            qkv,
            segments,
            tiles,
            scale,
            scale if gains is None else gains.contiguous(),
            d_out,
            d_qkv,
            shares,
            EPSILON,
            heads,
            FLAGS=_flags(gains, letters),
            CENTRED=centred,
            TILE=tile,
            HEAD=head,
            num_warps=_warps(tile),
        )
    return d_qkv, scale.new_empty(0) if gains is None else shares.sum(0)


@packed_attention.register_fake
def _(qkv, segments, tiles, scale, gains, letters, centred, tile):
    tokens, _, heads, head = qkv.shape
    return qkv.new_empty(tokens, heads, head)


@packed_attention_backward.register_fake
def _(d_out, qkv, segments, tiles, scale, gains, letters, centred, tile):
    return qkv.new_empty(qkv.shape), scale.new_empty(0) if gains is None else gains.new_empty(gains.shape)


def _flags(gains: Tensor | None, letters: str) -> int:
    """Bits 0 to 2: q, k, v are normalised; bit 3: there are gains."""
    return 0 if gains is None else 8 + sum(_LETTERS[letter] for letter in letters)


def _warps(tile: int) -> int:
    return 8 if tile > 64 else 4


def _remember(ctx, inputs, output):
    qkv, segments, tiles, scale, gains, *ctx.options = inputs
    ctx.save_for_backward(qkv, segments, tiles, scale, gains)


def _differentiate(ctx, d_out):
    d_qkv, d_gains = packed_attention_backward(d_out, *ctx.saved_tensors, *ctx.options)
    with_gains = ctx.saved_tensors[-1] is not None
    return d_qkv, None, None, None, d_gains if with_gains else None, None, None, None


packed_attention.register_autograd(_differentiate, setup_context=_remember)
