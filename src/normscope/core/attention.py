"""One attention call for everyone: the fast path, the path that returns scores, norms on q, k and v.

The fast path never holds a tokens × tokens tensor: it is PyTorch's fused attention, a kernel of our own for few tokens, or
blocks of queries where neither takes the shape.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.core.norms import unit
from normscope.core.tile import attend_in_tiles, tile_takes

Heads = Float[Tensor, "*batch tokens head"]

Backend = SDPBackend | Literal["blocks", "tile"]
_FUSED = {
    SDPBackend.CUDNN_ATTENTION: can_use_cudnn_attention,
    SDPBackend.FLASH_ATTENTION: can_use_flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: can_use_efficient_attention,
}
BLOCK_ENTRIES = {"cpu": 1 << 22, "cuda": 1 << 26}  # scores held at a time
_MANY_QUERIES = 4096


def attend(q: Heads, k: Heads, v: Heads, scale: float, causal: bool = False, backend: Backend | None = None) -> Heads:
    """softmax(scale · q kᵀ) v over the last two dimensions, without a tokens × tokens tensor.

    Without a ``backend``, ``chosen_backend`` names the one for the shape.
    """
    q4, k4, v4 = (x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v))
    if backend is None:
        backend = chosen_backend(q4, k4, v4, causal)
    if isinstance(backend, SDPBackend) and not _logits_fit(q4, k4, scale):
        backend = "blocks"
    return _attend_on(backend, q4, k4, v4, scale, causal).reshape(*q.shape[:-1], v.shape[-1])


def attention_weights(q: Heads, k: Heads, scale: float, causal: bool = False) -> Float[Tensor, "*batch tokens keys"]:
    """softmax(scale · q kᵀ) itself: a tokens × tokens tensor, for those who ask for it."""
    scores = scale * (q @ k.mT)
    if causal:
        scores = scores.masked_fill(later_keys(q.shape[-2], k.shape[-2], 0, q.device), -math.inf)
    return scores.softmax(-1)


def normalise_heads(q: Tensor, k: Tensor, v: Tensor, heads: str, kind: str = "rms") -> tuple[Tensor, Tensor, Tensor]:
    """Norms of q, k, v after their projections, where the slot ``heads`` (``none``, ``qk``, ``qkv``) names them.

    ``kind`` is ``rms`` or ``layer``.
    """
    if heads == "none":
        return q, k, v
    q, k, v = (unit(x, kind=kind) if letter in heads else x for letter, x in zip("qkv", (q, k, v), strict=True))
    return q, k, v


def chosen_backend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Backend:
    """The backend for (batch, 1, tokens, head), by a rule that shapes, precision and device decide: runs can be repeated.

    On a CPU there is one fused kernel. On a GPU: whole rows in one tile where they fit; fused kernels for half precision, and
    for float32 where there is enough to do; blocks for everything else and for gradients, which fused kernels add up in any
    order.
    """
    width = q.shape[-1]
    if q.device.type != "cuda":
        # PyTorch's fused kernel for CPUs needs values as wide as the keys; other shapes would build the matrix of scores.
        return SDPBackend.FLASH_ATTENTION if width == v.shape[-1] else "blocks"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "blocks"
    if tile_takes(q, k, v):
        return "tile"
    half = q.dtype in (torch.bfloat16, torch.float16)
    if width <= 256 if half else width <= 128 and q[..., 0].numel() > _MANY_QUERIES:
        params = SDPAParams(q, k, v, None, 0.0, causal, False)
        return next((backend for backend, takes in _FUSED.items() if takes(params)), "blocks")
    return "blocks"


def _logits_fit(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether no logit can overflow: fused kernels take a row of which all are −∞ for one without keys, and return 0."""
    (q_low, q_high), (k_low, k_high) = (x.detach().aminmax() for x in (q, k))
    most = abs(scale) * max(-float(q_low), float(q_high)) * max(-float(k_low), float(k_high)) * q.shape[-1]
    return most < torch.finfo(q.dtype).max / 1024


def _attend_on(backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    if backend == "blocks":
        return _attend_in_blocks(q, k, v, scale, causal)
    if backend == "tile":
        return attend_in_tiles(q, k, v, scale, causal)
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Plain attention on as many queries at a time as keep the block of scores small."""
    tokens = q.shape[-2]
    rows = max(1, BLOCK_ENTRIES[q.device.type] // (k.shape[-2] * math.prod(q.shape[:-2])))
    out = v.new_empty(*q.shape[:-1], v.shape[-1])  # filled in place: small pieces kept between large ones fragment the heap
    for first in range(0, tokens, rows):
        scores = scale * (q[..., first : first + rows, :] @ k.mT)
        if causal:
            scores = scores.masked_fill(later_keys(scores.shape[-2], k.shape[-2], first, q.device), -math.inf)
        out[..., first : first + rows, :] = scores.softmax(-1) @ v
    return out


def later_keys(queries: int, keys: int, first: int, device: torch.device) -> Tensor:
    """True where key t comes after query first + s."""
    return torch.arange(keys, device=device) > torch.arange(first, first + queries, device=device)[:, None]
