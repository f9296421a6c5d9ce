"""The Triton kernel of ``attention.tile``: import it only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def tile_kernel(
    q, k, v, out, scale, tokens, width, value_width,
    PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """ROWS queries of one batch entry against all its keys; ``scale`` includes log₂ e."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.arange(0, PADDED)
    column = tl.arange(0, COLUMNS)
    entry = tl.program_id(1).to(tl.int64) * tokens
    scores = tl.zeros((ROWS, PADDED), tl.float32)
    for first in range(0, width, COLUMNS):
        here = first + column[None, :]
        q_tile = tl.load(q + (entry + row[:, None]) * width + here, mask=row[:, None] < tokens, other=0.0)
        k_tile = tl.load(k + (entry + key[:, None]) * width + here, mask=key[:, None] < tokens, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), scores)
    allowed = key[None, :] < tokens
    if CAUSAL:
        allowed = allowed & (key[None, :] <= row[:, None])
    scores = tl.where(allowed, scores * scale, -float("inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    weights = (weights / tl.sum(weights, 1)[:, None]).to(v.dtype.element_ty)
    for first in range(0, value_width, COLUMNS):
        here = first + column[None, :]
        v_tile = tl.load(v + (entry + key[:, None]) * value_width + here, mask=key[:, None] < tokens, other=0.0)
        mixed = tl.dot(weights, v_tile)
        tl.store(out + (entry + row[:, None]) * value_width + here, mixed.to(out.dtype.element_ty), mask=row[:, None] < tokens)
