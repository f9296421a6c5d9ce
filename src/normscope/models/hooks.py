"""Hooks that tell what goes into a module and what comes out of it."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from normscope.errors import InputError
from normscope.models.view import Watcher


def states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The states that a module is called with; None if it is called with something else."""
    states = args[0] if args else kwargs.get("hidden_states")
    return states if isinstance(states, Tensor) and states.is_floating_point() else None


def given_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The states that a layer is called with."""
    states = states_of(args, kwargs)
    if states is None:
        raise InputError("a layer was called without states: this model's make is not understood")
    return states


def watch_states(stack: ExitStack, blocks: list[nn.Module], watch: Watcher) -> None:
    """Until the stack unwinds: tell the states that enter every block, and those that leave the last; take others for them."""

    def entering(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        others = watch(layer, given_states(args, kwargs))
        if others is None:
            return None
        return ((others, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": others})

    def leaving(module: nn.Module, args: tuple[Any, ...], wrote: Any) -> Any:
        others = watch(len(blocks), wrote[0] if isinstance(wrote, tuple) else wrote)
        return (others, *wrote[1:]) if isinstance(wrote, tuple) and others is not None else others

    for layer, block in enumerate(blocks):
        before(stack, block, partial(entering, layer))
    stack.callback(blocks[-1].register_forward_hook(leaving).remove)


def before(stack: ExitStack, module: nn.Module, hook: Callable[..., Any]) -> None:
    """Until the stack unwinds: call the hook before every call of the module."""
    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
