"""Models in half precision: what measures read of them is float32, and their structure is read off a pass in float32."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from normscope.models.observe import AttentionStep, Observer, OnAttention, SublayerStep
from normscope.models.wrapped import is_sharded, other_weights, sharding_modules

HALF = (torch.bfloat16, torch.float16)
T = TypeVar("T")


def wide(value: T, device: torch.device | None = None) -> T:
    """A tensor of half precision in float32, and so those of a tuple or dataclass, on a device; everything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32 if value.dtype in HALF else None)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(wide(item, device) for item in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: wide(getattr(value, field.name), device) for field in fields(value)}
        changed = {name: new for name, new in changed.items() if new is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value


@contextmanager
def casts_forgotten() -> Iterator[None]:
    """Until the block ends, autocast keeps no casts of weights: those without gradients must not serve a training around it."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def widened(observer: Observer, device: torch.device) -> Observer:
    """An observer that receives float32 of a model in half precision, on one device whatever devices the layers are on.

    What it returns is rounded and moved back.
    """
    on_sublayer, on_state, on_left = observer.sublayer, observer.state, observer.left

    def sublayer(step: SublayerStep) -> None:
        if on_sublayer is not None:
            with exactly(device):
                on_sublayer(wide(step, device))

    def state(layer: int, x: Tensor) -> Tensor | None:
        with exactly(device):
            changed = on_state(layer, wide(x, device)) if on_state is not None else None
        return None if changed is None else changed.to(x)

    def left(layer: int, x: Tensor) -> None:
        if on_left is not None:
            with exactly(device):
                on_left(layer, wide(x, device))

    return Observer(
        _widened(observer.attention, device),
        None if on_sublayer is None else sublayer,
        None if on_state is None else state,
        _widened(observer.cross, device),
        None if on_left is None else left,
    )


def exactly(device: torch.device) -> AbstractContextManager[object]:
    """Until the block ends, autocast does not round what observers compute."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _widened(observe: OnAttention | None, device: torch.device) -> OnAttention | None:
    """The same for the attention of a layer."""
    if observe is None:
        return None

    def attention(step: AttentionStep) -> Tensor | None:
        with exactly(device):
            changed = observe(wide(step, device))
        return None if changed is None else changed.to(step.v)

    return attention


@contextmanager
def all_in_float32(model: nn.Module) -> Iterator[None]:
    """Until the block ends, the whole model is in float32: for modules that use the weights of others without calling them."""
    with other_weights(model, lambda module, name, x: x.float() if x.dtype in HALF else None):
        yield


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Until the block ends, every module of half precision runs in float32, with a copy of its weights while it runs.

    Rounding to 8 bits hides what a block does: its input, update and output agree to 1e-2 at best.
    """
    stored: dict[tuple[nn.Module, str], Tensor] = {}

    def widen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name, tensor in _own(module):
            if tensor.dtype in HALF:
                stored[module, name] = tensor.data
                tensor.data = tensor.data.float()  # of a weight that is read from disk this says in which precision
        return wide(args), {name: wide(value) for name, value in kwargs.items()}

    def restore(module: nn.Module, *_: Any) -> None:
        for name, tensor in _own(module):
            if (module, name) in stored:
                tensor.data = stored.pop((module, name))

    try:
        with ExitStack() as stack:
            sharding = sharding_modules(model)  # which may round what they gather and read, and release it after use
            for module in model.modules():
                if module in sharding or any(x.dtype in HALF or is_sharded(x) for _, x in _own(module)):
                    stack.callback(module.register_forward_pre_hook(widen, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(restore, always_call=True, prepend=bool(sharding)).remove)
            yield
    finally:  # an interrupt in a module leaves its weights widened
        for module, _ in list(stored):
            restore(module)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
