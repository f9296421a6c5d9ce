"""Models in half precision: what measures read of them is float32, and their structure is read off a pass in float32."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from normscope.models.observe import AttentionStep, Observer, SublayerStep

HALF = (torch.bfloat16, torch.float16)
T = TypeVar("T")


def wide(value: T) -> T:
    """A tensor of half precision in float32, and so those of a tuple or dataclass; everything else as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(map(wide, value))  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: wide(getattr(value, field.name)) for field in fields(value)}
        changed = {name: new for name, new in changed.items() if new is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value


def widened(observer: Observer) -> Observer:
    """An observer that receives float32 of a model in half precision; what it returns is rounded again."""
    on_attention, on_sublayer, on_state = observer.attention, observer.sublayer, observer.state

    def attention(step: AttentionStep) -> Tensor | None:
        changed = on_attention(wide(step)) if on_attention is not None else None
        return None if changed is None else changed.to(step.v.dtype)

    def sublayer(step: SublayerStep) -> None:
        if on_sublayer is not None:
            on_sublayer(wide(step))

    def state(layer: int, x: Tensor) -> Tensor | None:
        changed = on_state(layer, wide(x)) if on_state is not None else None
        return None if changed is None else changed.to(x.dtype)

    return Observer(
        None if on_attention is None else attention,
        None if on_sublayer is None else sublayer,
        None if on_state is None else state,
    )


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Until the block ends, every module of half precision runs in float32, with a copy of its weights while it runs.

    Rounding to 8 bits hides what a block does: its input, update and output agree to 1e-2 at best.
    """
    stored: dict[Tensor, Tensor] = {}

    def widen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for tensor in _own(module):
            if tensor.dtype in HALF:
                stored[tensor] = tensor.data
                tensor.data = tensor.data.float()
        return wide(args), {name: wide(value) for name, value in kwargs.items()}

    def restore(module: nn.Module, *_: Any) -> None:
        for tensor in _own(module):
            if tensor in stored:
                tensor.data = stored.pop(tensor)

    with ExitStack() as stack:
        for module in model.modules():
            if any(tensor.dtype in HALF for tensor in _own(module)):
                stack.callback(module.register_forward_pre_hook(widen, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
