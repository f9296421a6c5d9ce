"""One attention call for everyone: the fast path, the path that returns scores, norms on q, k and v.

The fast path never holds a tokens × tokens tensor: it is PyTorch's fused attention on the backend that is fastest for the
shape at hand, or blocks of queries where no fused backend takes the shape.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.core.norms import unit
from normscope.core.tile import attend_in_tiles, tile_serves, tile_takes

Heads = Float[Tensor, "*batch tokens head"]

Backend = SDPBackend | Literal["blocks", "tile"]
_FUSED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
_BLOCK_ENTRIES = {"cpu": 1 << 22, "cuda": 1 << 26}  # scores held at a time
_TRIAL_TOKENS = 1 << 14
_TRIALS = 4
_fastest: dict[tuple[Any, ...], Backend] = {}


def attend(q: Heads, k: Heads, v: Heads, scale: float, causal: bool = False, backend: Backend | None = None) -> Heads:
    """softmax(scale · q kᵀ) v over the last two dimensions, without a tokens × tokens tensor.

    Without a ``backend`` the fastest one for the shape is found by a trial, once.
    """
    q4, k4, v4 = (x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v))
    if backend is None:
        backend = fastest_backend(q4, k4, v4, scale, causal)
    return _attend_on(backend, q4, k4, v4, scale, causal).reshape(*q.shape[:-1], v.shape[-1])


def attention_weights(q: Heads, k: Heads, scale: float, causal: bool = False) -> Float[Tensor, "*batch tokens keys"]:
    """softmax(scale · q kᵀ) itself: a tokens × tokens tensor, for those who ask for it."""
    scores = scale * (q @ k.mT)
    if causal:
        scores = scores.masked_fill(_later(q.shape[-2], k.shape[-2], 0, q.device), -math.inf)
    return scores.softmax(-1)


def normalise_heads(q: Tensor, k: Tensor, v: Tensor, heads: str) -> tuple[Tensor, Tensor, Tensor]:
    """Norms of q, k, v after their projections, where the slot ``heads`` (``none``, ``qk``, ``qkv``) names them."""
    if heads == "none":
        return q, k, v
    q, k, v = (unit(x) if letter in heads else x for letter, x in zip("qkv", (q, k, v), strict=True))
    return q, k, v


def fastest_backend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Backend:
    """The backend that a trial on some of the tokens finds fastest on this card; on a CPU there is one fused kernel."""
    if q.device.type != "cuda":
        # PyTorch's fused kernel for CPUs needs values as wide as the keys; other shapes would build the matrix of scores.
        return SDPBackend.FLASH_ATTENTION if q.shape[-1] == v.shape[-1] else "blocks"
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    tokens = round(math.log2(k.shape[-2]))
    key = (q.device, q.dtype, q.shape[-1], v.shape[-1], tokens, min(len(q), 64), causal, differentiated)
    if key not in _fastest:
        few = [x[:, :, :_TRIAL_TOKENS].detach() for x in (q, k, v)]
        candidates: list[Backend] = [*_FUSED, "blocks"]
        if tile_takes(q, k, v) and not differentiated:
            candidates.append("tile")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backend that refuses a shape says at length why
            times = {backend: _trial(backend, few, scale, causal) for backend in candidates}
        _fastest[key] = min(times, key=lambda backend: times[backend])
    return _fastest[key]


def steady_backend(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> Backend | None:
    """A backend by rule rather than by trial, where the same numbers must come out of every process; None on a CPU."""
    if device.type != "cuda":
        return None
    return "tile" if tile_serves(tokens, width, dtype) else "blocks"


def _trial(backend: Backend, qkv: Sequence[Tensor], scale: float, causal: bool) -> float:
    """Milliseconds of the fastest of some calls after the first; infinite if the backend refuses."""
    q, k, v = qkv
    times = []
    try:
        with torch.no_grad():
            for _ in range(_TRIALS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                _attend_on(backend, q, k, v, scale, causal)
                end.record()
                end.synchronize()
                times.append(float(start.elapsed_time(end)))
    except RuntimeError:
        return math.inf
    return min(times[1:])


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
    rows = max(1, _BLOCK_ENTRIES[q.device.type] // (k.shape[-2] * math.prod(q.shape[:-2])))
    out = v.new_empty(*q.shape[:-1], v.shape[-1])  # filled in place: small pieces kept between large ones fragment the heap
    for first in range(0, tokens, rows):
        scores = scale * (q[..., first : first + rows, :] @ k.mT)
        if causal:
            scores = scores.masked_fill(_later(scores.shape[-2], k.shape[-2], first, q.device), -math.inf)
        out[..., first : first + rows, :] = scores.softmax(-1) @ v
    return out


def _later(queries: int, keys: int, first: int, device: torch.device) -> Tensor:
    """True where key t comes after query first + s."""
    return torch.arange(keys, device=device) > torch.arange(first, first + queries, device=device)[:, None]
