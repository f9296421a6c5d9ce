"""One attention function for every model of the ``transformers`` library, registered under our name.

While a forward pass is observed, it passes q, k and v to the observer; otherwise it computes attention and nothing more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.errors import InputError

IMPLEMENTATION = "normscope"
_UNSUPPORTED = ("s_aux", "position_bias", "alibi")  # terms of the scores beside q·k


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function: q, k, v (rows, heads, tokens, head), and True in ``mask`` where a query attends.

    Key and value heads are repeated for the queries that share them; ``kv_heads`` is their number before.
    """

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    scale: float
    softcap: float | None
    kv_heads: int

    def mixed(self) -> Tensor:
        """Softmax(scale·q·k) v, with the scores capped where the model caps them."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(self.q, self.k, self.v, attn_mask=self.mask, scale=self.scale)
        scores = self.softcap * torch.tanh(self.scale * (self.q @ self.k.mT) / self.softcap)
        return scores.masked_fill(~self.mask, -torch.inf).softmax(-1) @ self.v


AttentionObserver = Callable[[AttentionCall], Tensor]  # gives the mixed values, (rows, heads, tokens, value)
_observer: ContextVar[AttentionObserver | None] = ContextVar("observer", default=None)


@contextmanager
def observing(observer: AttentionObserver) -> Iterator[None]:
    """Until the block ends, the observer computes all attention."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@contextmanager
def observable(model: Any) -> Iterator[None]:
    """Until the block ends: the model is in evaluation mode and calls our attention function; then it is as before."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
    configs = [(config, config._attn_implementation_internal) for config in _configs(model)]
    training = [module for module in model.modules() if module.training]
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        model.eval()
        yield
    finally:
        for config, implementation in configs:
            config._attn_implementation_internal = implementation
        for module in training:
            module.training = True


def _configs(model: Any) -> list[Any]:
    """The configurations of a model and of its parts, each once."""
    configs, waiting = {}, [model.config]
    waiting += [module.config for module in model.modules() if hasattr(getattr(module, "config", None), "sub_configs")]
    while waiting:
        config = waiting.pop()
        if id(config) not in configs:
            configs[id(config)] = config
            waiting += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    return list(configs.values())


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
    unsupported = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if unsupported:
        raise InputError(f"unsupported architecture: attention adds '{unsupported[0]}' to its scores")
    shared = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (key, value))
    mask = _mask(attention_mask, query, k, getattr(module, "is_causal", False))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(module, query, k, v, mask, scale, softcap, key.shape[1])
    observer = _observer.get()
    mixed = call.mixed() if observer is None else observer(call)
    return mixed.transpose(1, 2).contiguous(), None


def _mask(mask: Tensor | None, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """True where a query attends to a key, (rows or 1, 1, tokens, keys)."""
    if mask is None:
        every = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        return every.tril() if causal else every
    mask = mask[..., : k.shape[2]]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
