"""Hooks on modules: the states that go in, and what comes out."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from normscope.errors import InputError

OnState = Callable[[int, Tensor], Tensor | None]


def states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The states that a module is called with; None if its first argument is something else."""
    states = args[0] if args else kwargs.get("hidden_states")
    return states if isinstance(states, Tensor) and states.is_floating_point() else None


def given_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The states that a layer is called with."""
    states = states_of(args, kwargs)
    if states is None:
        raise InputError("unsupported architecture: a layer is called without hidden states")
    return states


def rotation_of(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The cosines and sines that attention is called with; None if there are none."""
    rotation = kwargs.get("position_embeddings")
    return rotation if isinstance(rotation, tuple) and len(rotation) == 2 else None


def first_output(output: Any) -> Any:
    """The states among what a module returns."""
    return output[0] if isinstance(output, tuple) else output


def before(stack: ExitStack, module: nn.Module, hook: Callable[..., Any]) -> None:
    """Until the stack unwinds: call the hook before every call of the module."""
    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def after(stack: ExitStack, module: nn.Module, hook: Callable[..., Any]) -> None:
    """Until the stack unwinds: call the hook after every call of the module."""
    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)


def on_entering(stack: ExitStack, blocks: list[nn.Module], state: OnState) -> None:
    """Until the stack unwinds: pass the states before every block to ``state``; what it returns replaces them."""

    def entering(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        others = state(layer, given_states(args, kwargs))
        if others is None:
            return None
        return ((others, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": others})

    for layer, block in enumerate(blocks):
        before(stack, block, partial(entering, layer))


def on_leaving(stack: ExitStack, blocks: list[nn.Module], state: OnState) -> None:
    """Until the stack unwinds: pass the states after the last block to ``state``; what it returns replaces them."""

    def leaving(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        others = state(len(blocks), first_output(output))
        return (others, *output[1:]) if isinstance(output, tuple) and others is not None else others

    after(stack, blocks[-1], leaving)
