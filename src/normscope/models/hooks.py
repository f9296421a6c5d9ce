"""Hooks on modules: the states that go in, and what comes out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import InputError
from normscope.models.observe import Rotation
from normscope.models.states import ROWS_FIRST, Layout, floats

_PLAIN = Layout(ROWS_FIRST, 1)
OnState = Callable[[int, Tensor], Tensor | None]
OnSite = Callable[[Tensor], Tensor | None]


def given_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first states that a module is called with."""
    states = next(floats((args, kwargs)), None)
    if states is None:
        raise InputError("unsupported architecture: a layer is called without hidden states")
    return states


def rotation_of(kwargs: dict[str, Any], positions: bool = False) -> Rotation | None:
    """The cosines and sines that attention is called with, or the complex numbers e^iφ; None if there are none.

    The numbers of positions instead, if ``positions``: some modules compute cosines and sines themselves.
    """
    rotation = kwargs.get("position_embeddings")
    if isinstance(rotation, tuple | list) and len(rotation) == 2:
        return tuple(rotation)
    given = kwargs.get("position_ids") if positions else rotation
    return (given,) if isinstance(given, Tensor) and (positions or given.is_complex()) else None


_depth: ContextVar[int] = ContextVar("depth", default=0)


@contextmanager
def suspended() -> Iterator[None]:
    """Until the block ends, hooks that were installed before it are not called: an observer may run modules again."""
    token = _depth.set(_depth.get() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


def unless_suspended() -> Callable[[], bool]:
    """Whether a hook that is installed now is to be called, as a function of the time of the call."""
    depth = _depth.get()
    return lambda: _depth.get() == depth


def before(stack: ExitStack, module: nn.Module, hook: Callable[..., Any]) -> None:
    """Until the stack unwinds: call the hook before every call of the module."""
    handle = module.register_forward_pre_hook(_Unseen(hook), with_kwargs=True)
    stack.callback(handle.remove)


def after(stack: ExitStack, module: nn.Module, hook: Callable[..., Any], always: bool = False) -> None:
    """Until the stack unwinds: call the hook after every call of the module; ``always``, also after one that failed."""
    handle = module.register_forward_hook(_Unseen(hook), with_kwargs=True, always_call=always)
    stack.callback(handle.remove)


class _Unseen:
    """A hook while it is not suspended; what it computes is no operation of the model that a trace would follow."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook, self.active = hook, unless_suspended()

    def __call__(self, *given: Any) -> Any:
        if not self.active():
            return None
        with torch._C.DisableTorchFunction():
            return self.hook(*given)


def replaced(values: Any, old: Tensor, new: Tensor) -> Any:
    """Arguments or results with one tensor in place of another; nested tuples, lists and dictionaries are searched."""
    if values is old:
        return new
    if isinstance(values, tuple | list):
        return type(values)([replaced(value, old, new) for value in values])
    if isinstance(values, dict):
        for key, value in values.items():
            if value is old:
                values[key] = new
    return values


@dataclass(frozen=True)
class BlockSite:
    """A layer in the modules of a model: its module, the layout of its states, and which of its arguments and results they are.

    ``received`` and ``returned`` count the tensors of real numbers.
    """

    module: nn.Module
    layout: Layout = _PLAIN
    received: int = 0
    returned: int = 0


@dataclass(frozen=True)
class Site:
    """A call of a module inside a block: the ``nth`` call of it since the block began, the first is 0.

    ``received`` means what it is called with, not what it returns; ``place`` is which of those tensors of real numbers.
    """

    module: nn.Module
    nth: int = 0
    received: bool = False
    place: int = 0


class Running:
    """Which layer runs, while a stream's blocks run in the order in which they were recorded."""

    def __init__(self, blocks: Sequence[BlockSite], rows: int) -> None:
        self.blocks = blocks
        self.layouts = [replace(block.layout, rows=rows) for block in blocks]
        self.layer: int | None = None
        self._next = 0
        self._entering: list[OnState] = []
        self._leaving: list[OnState] = []

    def observe(self, state: OnState | None, left: Callable[[int, Tensor], None] | None) -> None:
        """Pass the states before every layer and after the last one to a function, whose result replaces them.

        ``left`` receives what every layer returns.
        """
        last = len(self.blocks) - 1
        if state is not None:
            self.entering(state)
            self.leaving(lambda layer, x: state(last + 1, x) if layer == last else None)
        if left is not None:
            self.leaving(left)

    def entering(self, call: OnState) -> None:
        """Call a function with every layer and the states that enter it; what it returns replaces them."""
        self._entering.append(call)

    def leaving(self, call: OnState) -> None:
        """Call a function with every layer and the states that leave it; what it returns replaces them."""
        self._leaving.append(call)

    def install(self, stack: ExitStack) -> None:
        """Until the stack unwinds: follow the layers."""
        for module in {id(block.module): block.module for block in self.blocks}.values():
            before(stack, module, self._on_entering)
            after(stack, module, self._on_leaving)

    def _on_entering(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._next >= len(self.blocks) or self.blocks[self._next].module is not module:
            raise InputError(
                "the layers do not run in the order in which they ran when the model was opened; where blocks were replaced "
                "since then, open or watch the model again"
            )
        self.layer, self._next = self._next, self._next + 1
        block = self.blocks[self.layer]
        given = list(floats((args, kwargs)))[block.received]
        states = self._passed(self._entering, self.layer, given)
        return None if states is None else (replaced(args, given, states), replaced(dict(kwargs), given, states))

    def _on_leaving(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        assert self.layer is not None
        block = self.blocks[self.layer]
        returned = list(floats(output))[block.returned]
        states = self._passed(self._leaving[::-1], self.layer, returned)
        self.layer = None
        return None if states is None else replaced(output, returned, states)

    def _passed(self, calls: Sequence[OnState], layer: int, x: Tensor) -> Tensor | None:
        """What functions make of states, in their layout; None if they leave them."""
        layout, changed = self.layouts[layer], None
        for call in calls:
            others = call(layer, layout.states(x if changed is None else changed))
            changed = changed if others is None else layout.restored(others, x)
        return changed


class SiteHooks:
    """Functions that are called with the states at sites inside the layers of a stream; what they return replaces them."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self._wanted: dict[tuple[int, int, int, bool], list[tuple[int, OnSite]]] = {}
        self._modules: dict[int, nn.Module] = {}
        self._calls: dict[int, int] = {}
        self._shape: Sequence[int] = ()

    def at(self, layer: int, site: Site, call: OnSite) -> None:
        """Call a function with the states (rows, positions, dim) at a site of a layer."""
        self._modules[id(site.module)] = site.module
        self._wanted.setdefault((layer, id(site.module), site.nth, site.received), []).append((site.place, call))

    def install(self, stack: ExitStack) -> None:
        """Until the stack unwinds: follow the sites."""
        self.running.entering(self._on_block)
        for module in self._modules.values():
            before(stack, module, self._on_input)
            after(stack, module, self._on_output)

    def _on_block(self, layer: int, x: Tensor) -> None:
        self._shape, self._calls = x.shape, {}

    def _on_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._calls[id(module)] = self._calls.get(id(module), -1) + 1
        return self._passed(module, True, (args, dict(kwargs)))

    def _on_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return self._passed(module, False, output)

    def _passed(self, module: nn.Module, received: bool, values: Any) -> Any:
        """The values with the states that functions made of theirs; None if they leave them."""
        layer = self.running.layer
        key = (-1 if layer is None else layer, id(module), self._calls.get(id(module), 0), received)
        changed = None
        for place, call in self._wanted.get(key, ()):
            given = values if changed is None else changed
            x = list(floats(given))[place]
            layout = self.running.layouts[key[0]]
            states = layout.seen(x, self._shape)
            assert states is not None
            others = call(states)
            changed = changed if others is None else replaced(given, x, layout.unseen(others, x).to(x))
        return changed
