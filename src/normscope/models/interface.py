"""One attention function for every model of the ``transformers`` library, registered under our name.

While a forward pass is looked at, it hands q, k and v to whoever looks; otherwise it attends and nothing more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.errors import InputError

IMPLEMENTATION = "normscope"
_NOT_UNDERSTOOD = ("s_aux", "position_bias", "alibi")  # they change scores in ways that a softmax of q·k does not know


@runtime_checkable
class Onlooker(Protocol):
    """Somebody who looks at a forward pass."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """The mixed values of an attention module, (rows, heads, tokens, value)."""


_onlooker: ContextVar[Onlooker | None] = ContextVar("onlooker", default=None)


@contextmanager
def looked_at_by(onlooker: Onlooker) -> Iterator[None]:
    """For as long as this holds, all attention goes through the onlooker."""
    token = _onlooker.set(onlooker)
    try:
        yield
    finally:
        _onlooker.reset(token)


def register() -> None:
    """Make our attention known to the library."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Softmax(scale·q·k) v, with the scores capped where the model caps them."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    scores = softcap * torch.tanh(scale * (q @ k.mT) / softcap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As the library calls it: q, k, v (rows, heads, tokens, head), and back (rows, tokens, heads, head)."""
    strange = [name for name in _NOT_UNDERSTOOD if others.get(name) is not None]
    if strange:
        raise InputError(f"this model's attention adds '{strange[0]}' to its scores, which is not understood here")
    shared = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (key, value))
    seen = _seen(attention_mask, query, k, getattr(module, "is_causal", False))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    onlooker = _onlooker.get()
    attend = attend_plainly if onlooker is None else lambda *args: onlooker.attend(module, *args)
    return attend(query, k, v, seen, scale, softcap).transpose(1, 2).contiguous(), None


def _seen(mask: Tensor | None, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Which keys each query sees, (rows or 1, 1, tokens, keys)."""
    if mask is None:
        every = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        return every.tril() if causal else every
    mask = mask[..., : k.shape[2]]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
