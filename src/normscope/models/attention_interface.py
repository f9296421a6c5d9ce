"""One attention function for every model of the ``transformers`` library, registered under our name.

While a forward pass is observed, it passes q, k and v to the observer; otherwise it computes attention and nothing more.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.models.hooks import suspended
from normscope.models.observe import Softmax
from normscope.models.precision import casts_forgotten
from normscope.models.wrapped import sharded_as_before

IMPLEMENTATION = "normscope"


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function: q, k, v (rows, heads, tokens, head), and True in ``mask`` where a query attends.

    Key and value heads are repeated for the queries that share them; ``kv_heads`` is their number before. ``bias`` (rows or 1,
    heads or 1, queries, keys) is added to the capped scores, ``sink`` (heads) is a logit that belongs to no key.
    """

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    scale: float | Tensor
    softcap: float | None
    kv_heads: int
    bias: Tensor | None = None
    sink: Tensor | None = None
    result: Tensor | None = None

    def mixed(self) -> Tensor:
        """The mixed values softmax(cap(scale·q·k) + bias) v; ``result``, where the model has computed them."""
        if self.result is not None:
            return self.result
        if self.softcap is None and self.sink is None and not isinstance(self.scale, Tensor):
            mask = self.mask if self.bias is None else self.bias.masked_fill(~self.mask, -torch.inf).to(self.q)
            return F.scaled_dot_product_attention(self.q, self.k, self.v, attn_mask=mask, scale=self.scale)
        sink = None if self.sink is None else self.sink[None, :, None, None]
        scores = (self.q @ self.k.mT).masked_fill_(~self.mask, -torch.inf)
        return Softmax(self.scale, self.softcap, self.bias, sink).weights(scores).to(self.v) @ self.v


AttentionObserver = Callable[[AttentionCall], Tensor]  # gives the mixed values, (rows, heads, tokens, value)
_observer: ContextVar[AttentionObserver | None] = ContextVar("observer", default=None)
_observable: ContextVar[tuple[nn.Module, ...]] = ContextVar("observable", default=())
_thorough: ContextVar[bool] = ContextVar("thorough", default=True)
_masked: "WeakKeyDictionary[nn.Module, tuple[bool, bool]]" = WeakKeyDictionary()  # whether a mask held numbers, hid all keys
_OF_LIBRARY = "_normscope_of_library"  # an attribute of the masks that the library makes


@contextmanager
def observing(observer: AttentionObserver, thorough: bool = True) -> Iterator[None]:
    """Until the block ends, the observer computes all attention.

    ``thorough=False``: what earlier passes of the same modules have shown is not read from the device again.
    """
    tokens = _observer.set(observer), _thorough.set(thorough)
    try:
        yield
    finally:
        _observer.reset(tokens[0])
        _thorough.reset(tokens[1])


@contextmanager
def observable(model: nn.Module) -> Iterator[None]:
    """Until the block ends: the model is in evaluation mode, runs eagerly and calls our attention function.

    Then it is as before: the attributes and buffers of its modules, which weights are sharded, and all random generators.
    Models that do not use the attention interface of ``transformers`` are left with what they call.
    """
    if model in _observable.get():
        yield
        return
    modules = list(model.modules())  # once: walking through a large model takes a millisecond
    replaced = [(config, config._attn_implementation_internal) for config in _configs(modules)]
    attributes = [(at, dict(at)) for module in modules for at in (vars(module), module._buffers)]
    buffers = [(x, x.clone()) for part in modules for x in part._buffers.values() if x is not None]
    token = _observable.set((*_observable.get(), model))
    try:
        if replaced:
            _register()
        for config, _ in replaced:
            config._attn_implementation_internal = IMPLEMENTATION
        for module in modules:
            module.training = False
        with ExitStack() as stack:
            for kept in (same_random_numbers(modules), sharded_as_before(model), casts_forgotten()):
                stack.enter_context(kept)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        _observable.reset(token)
        for config, implementation in replaced:
            config._attn_implementation_internal = implementation
        for current, before in attributes:
            for name in [name for name in current if name not in before]:
                del current[name]
            current.update((name, value) for name, value in before.items() if current.get(name, current) is not value)
        for x, content in buffers:
            if not x.is_inference() and (x.is_contiguous() or not torch.equal(x, content)):
                x.data.copy_(content)  # without a comparison, which would wait for the device


@contextmanager
def same_random_numbers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Until the block ends, random numbers may be drawn; then all generators are where they were."""
    devices = {x.device for part in modules for x in part._parameters.values() if x is not None and x.is_cuda}
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _library_mask)


def _library_mask(*given: Any, **options: Any) -> Tensor | None:
    """The mask that the library makes, marked, since a model may also make one itself."""
    from transformers.masking_utils import eager_mask

    mask: Tensor | None = eager_mask(*given, **options)
    if mask is not None:
        setattr(mask, _OF_LIBRARY, True)
    return mask


def _configs(modules: Sequence[nn.Module]) -> list[Any]:
    """The configurations of a model's parts that choose an attention function, each once."""
    configs: dict[int, Any] = {}
    for module in modules:
        if getattr(module, "_can_set_attn_implementation", lambda: False)():
            waiting = [module.config]
            while waiting:
                config: Any = waiting.pop()
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
    scaling: float | Tensor | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As the library calls it: q, k, v (rows, heads, tokens, head), and back (rows, tokens, heads, head)."""
    shared = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (key, value))
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    biased, flattened = (None, None) if _thorough.get() else _masked.get(module, (None, None))
    mask, bias = _mask_and_bias(attention_mask, position_bias, query, k, causal, biased)
    mask, flat = (mask, None) if s_aux is not None else _with_flat(mask, attention_mask, flattened)  # a sink takes all weight
    _masked[module] = bias is not None, flat is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(scale, Tensor) and scale.numel() == 1:
        scale = float(scale)
    if flat is not None:
        scale = scale * (~flat).to(torch.promote_types(query.dtype, torch.float32))
    call = AttentionCall(module, query, k, v, mask, scale, softcap, key.shape[1], bias, s_aux)
    observer = _observer.get()
    with suspended():
        mixed = call.mixed() if observer is None else observer(call)
    return mixed.transpose(1, 2).contiguous(), None


def _mask_and_bias(
    mask: Tensor | None, position_bias: Tensor | None, q: Tensor, k: Tensor, causal: bool, biased: bool | None
) -> tuple[Tensor, Tensor | None]:
    """True where a query attends to a key, (rows or 1, heads or 1, queries, keys), and what is added to the scores there.

    ``biased``: whether anything is added, if that is known.
    """
    queries, keys = q.shape[2], k.shape[2]
    attends = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=q.device)
    if mask is None and causal:
        attends = attends.tril()
    added = None if position_bias is None else position_bias[..., :keys]
    if mask is not None and mask.dtype == torch.bool:
        attends = mask[..., :keys]
    elif mask is not None:
        added = mask[..., :keys] if added is None else added + mask[..., :keys]
    if added is None:
        return attends, None
    attends = attends & (added > torch.finfo(added.dtype).min / 2)  # where a mask is a number, the least one stands for -inf
    bias = added.masked_fill(~attends, 0.0)
    if biased is None:
        biased = position_bias is not None or bool(bias.any())
    return attends, bias if biased else None


def _with_flat(attends: Tensor, mask: Tensor | None, known: bool | None) -> tuple[Tensor, Tensor | None]:
    """The keys that queries attend to and, if there are any, the queries of flat attention (rows or 1, heads or 1, queries, 1).

    A mask that a model makes itself may add the least number to all scores of a query: they vanish beside it, and all keys have
    the same weight. In a mask of the library such a query sees no key. ``known``: whether there are such queries, or None.
    """
    if mask is None or mask.dtype == torch.bool or hasattr(mask, _OF_LIBRARY) or known is False:
        return attends, None
    flat = ~attends.any(-1, keepdim=True)
    if known is None and not bool(flat.any()):
        return attends, None
    added = mask[..., : attends.shape[-1]]
    highest = added.amax(-1, keepdim=True)
    return attends | (flat & (added == highest) & highest.isfinite()), flat
