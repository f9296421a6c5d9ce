"""What plain torch shows of a model's forward pass, without normscope: hidden states, attention, and where norms act.

Forward hooks on the members of module lists give hidden states; a torch function mode sees every
``scaled_dot_product_attention`` with its q, k and v, and every softmax with its weights. A norm is a module without parts whose
output does not change when its input grows: norm(30 x) = norm(10 x).
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normscope.schemes import Scheme, Slots

NEAR = 1e-4
FEWEST_KEYS = 9  # a softmax over fewer is a router's


@dataclass(eq=False)
class Call:
    """One call of a module: the tensors that it received and returned, and its place among the events of the pass."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    began: int
    outputs: list[Tensor] = field(default_factory=list)
    ended: int = 0


@dataclass(frozen=True)
class Softmax:
    """One softmax attention: q, k, v where torch's function computed it, else the weights; and the module it ran in."""

    module: str
    time: int
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class Reference:
    """A forward pass: every call of a module, and every softmax attention."""

    calls: list[Call]
    attentions: list[Softmax]

    def lists(self, model: nn.Module) -> dict[str, list[Call]]:
        """The calls of the members of every list of modules, by the name of the list."""
        names = {name for name, part in model.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)}
        found: dict[str, list[Call]] = {}
        for call in sorted(self.calls, key=lambda call: call.began):
            path = call.name.rpartition(".")[0]
            if path in names and call.name.rpartition(".")[2].isdigit():
                found.setdefault(path, []).append(call)
        return found

    def inside(self, block: Call) -> list[Call]:
        """The calls of modules while a block ran."""
        return [call for call in self.calls if block.began < call.began and call.ended < block.ended]

    def attentions_of(self, block: Call) -> list[Softmax]:
        """The attentions while a block ran."""
        return [attention for attention in self.attentions if block.began < attention.time < block.ended]


def reference(model: nn.Module, run: Callable[[], Any]) -> Reference:
    """Record a forward pass ``run()`` of a model."""
    calls: list[Call] = []
    attentions: list[Softmax] = []
    open_calls: list[Call] = []
    clock = iter(range(10**9))

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            open_calls.append(Call(name, module, _tensors([*args, *kwargs.values()]), next(clock)))

        return hook

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = open_calls.pop()
        call.outputs, call.ended = _tensors([output]), next(clock)
        calls.append(call)

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            where = next((call.name for call in reversed(open_calls) if not isinstance(call.module, nn.Softmax)), "")
            if name == "scaled_dot_product_attention":
                q, k, v = (args[i] if len(args) > i else (kwargs or {})[key] for i, key in enumerate(("query", "key", "value")))
                attentions.append(Softmax(where, next(clock), q.clone(), k.clone(), v.clone()))
            elif name == "softmax" and isinstance(result, Tensor) and result.ndim > 2 and result.shape[-1] >= FEWEST_KEYS:
                attentions.append(Softmax(where, next(clock), weights=result.clone()))
            return result

    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        with torch.no_grad(), Watch():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return Reference(calls, attentions)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The floating-point tensors among arguments and results, also in tuples and dictionaries."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            found.append(value.clone())
        elif isinstance(value, dict):
            found += _tensors(list(value.values()))
        elif isinstance(value, tuple | list):
            found += _tensors(value)
    return found


def error_between(a: Tensor, b: Tensor) -> float:
    """|a − b| relative to |b|; infinite for tensors of other sizes."""
    if a.numel() != b.numel() or a.shape[-1] != b.shape[-1]:
        return float("inf")
    a, b = a.double().flatten(), b.double().flatten()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def states_error(a: Tensor, x: Tensor) -> float:
    """The error of states x (rows, positions, dim) against a tensor of any layout of positions and channels."""
    layouts = [a]
    if a.ndim == 3:
        layouts.append(a.transpose(0, 1))
    if a.ndim >= 4:
        layouts += [a.flatten(2), a.flatten(2).mT, a.flatten(1, -2), a.movedim(0, 2).flatten(2)]
    errors = [error_between(layout, x) for layout in layouts if layout.numel() == x.numel()]
    return min(errors, default=float("inf"))


def contradiction(
    scheme: Scheme,
    found: Reference,
    block: Call,
    layer: int,
    layers: int,
    sublayers: int,
    entry: bool = False,
    shifted: bool = False,
) -> str | None:
    """What a block does that its scheme does not say; empty if they agree, None for states that are no rows of vectors.

    The norms of the block's states are counted and compared with the slots of its sublayers, one, two or more: a norm reads
    the block's input if and only if there is an input norm, the block returns what a norm made if and only if there is a
    stream norm at its end. Norms inside attention, or between two modules, are parts of sublayers. Then the arithmetic: some
    carry·s + step·u with the scheme's numbers, a state s and the output u of a module, a norm for an output norm, is what
    the block returns, or what its last norm reads.

    With ``entry`` the block continues with a norm of its input; ``shifted`` means that the next one does, so that the stream
    norm at the end of this block is there.
    """
    x, y = block.inputs[0], block.outputs[0]
    if x.ndim != 3:
        return None
    inside = [call for call in found.inside(block) if call.inputs and call.outputs]
    names = {a.module for a in found.attentions_of(block)} - {block.name}
    if not names:  # what mixes tokens without a softmax is the first module of the block that has parts
        parts = [call.name for call in inside if call.name.count(".") == block.name.count(".") + 1]
        names = {name for name in parts if any(call.name.startswith(f"{name}.") for call in inside)}
    returned = [call.outputs[0] for call in inside if call.name in names]  # by attention: a norm that made it is no part of it
    norms = [call for call in inside if _is_norm(call, x)]
    norms = [
        norm
        for norm in norms
        if not norm.name.startswith(tuple(f"{name}." for name in names))
        or _near(norm.inputs[0], x)
        or any(_near(norm.outputs[0], y) for y in returned)
    ]
    norms = [norm for norm in norms if not _is_between(norm, [call for call in inside if call not in norms])]
    first = next((norm for norm in norms if _near(norm.inputs[0], x)), None) if entry else None
    if entry and first is None:
        return "no norm reads the block's input"
    if first is not None:
        x, norms = first.outputs[0], [norm for norm in norms if norm is not first]
    attention, feedforward = scheme.attention, scheme.feedforward
    if shifted and feedforward.stream != "norm":
        return "the next block begins with a norm of the stream"
    feedforward = replace(feedforward, stream="none") if shifted else feedforward
    slots = [_norm_slots(attention), *([_norm_slots(feedforward)] if sublayers > 1 else [])]
    shared = sublayers > 1 and attention.reads_norm and feedforward.reads_norm and len(norms) == sum(slots) - 1
    if len(norms) != sum(slots) and not shared and sublayers < 3:
        return f"{len(norms)} norms act on the states, and the scheme has {sum(slots)}"
    reads = any(_near(call.inputs[0], x) for call in norms)
    if reads != attention.reads_norm and not (reads and feedforward.reads_norm):
        return "a norm reads the block's input" if reads else "no norm reads the block's input"
    last = next((call for call in norms if _near(call.outputs[0], y)), None)
    final = feedforward if sublayers > 1 else attention
    if (last is not None) != (final.stream == "norm"):
        return "a norm makes the block's output" if last is not None else "no norm makes the block's output"
    return _sum_contradiction(final, y if last is None else last.inputs[0], x, inside, norms, layer, layers)


def _is_between(norm: Call, others: Sequence[Call]) -> bool:
    """Whether a norm reads what a module with a matrix made, and another reads what it makes: nothing is added."""
    leaves = [call for call in others if any(p.ndim > 1 for p in call.module.parameters(recurse=False))]
    read = any(_near(call.outputs[0], norm.inputs[0]) for call in leaves if call.ended < norm.began)
    return read and any(_near(call.inputs[0], norm.outputs[0]) for call in leaves if call.began > norm.ended)


def _sum_contradiction(
    slots: Slots, total: Tensor, x: Tensor, inside: Sequence[Call], norms: Sequence[Call], layer: int, layers: int
) -> str:
    """Whether the last sum in a block is carry·s + step·u."""
    if slots.learns_alpha:
        return ""
    place = Scheme("slots", slots).place(layer, layers)
    step, carry = slots.number("step", place), slots.number("carry", place)
    flat = total.flatten().double()
    read = [x, *(tensor for call in inside for tensor in call.inputs)]
    states = [s.flatten().double() for s in read if s.numel() == len(flat)]
    made = [call for call in inside if (call in norms) == (slots.output == "norm")]
    updates = [u.flatten().double() for call in made for u in call.outputs if u.numel() == len(flat)]
    both = [u + v for u, v in combinations(updates, 2)]  # parallel sublayers add to the same states
    sums = (carry * s + step * u for s, u in chain(product(states, updates), product(states, both)))
    if any(error_between(one, flat) < NEAR for one in sums):
        return ""
    return "the block's output is no sum with these scales"


def _norm_slots(slots: Slots) -> int:
    return slots.reads_norm + (slots.output == "norm") + (slots.stream == "norm")


def _is_norm(call: Call, x: Tensor) -> bool:
    """Whether a call is of a norm of states like x."""
    read = call.inputs[0]
    if (
        any(True for _ in call.module.children())
        or read.shape[-1] != x.shape[-1]
        or read.numel() != x.numel()
        or not read.any()
    ):
        return False
    required = [p for p in inspect.signature(call.module.forward).parameters.values() if p.default is p.empty and p.kind < 2]
    if len(required) != 1 or len(call.inputs) > 1 or call.outputs[0].shape != read.shape:
        return False
    with torch.no_grad():
        ten, thirty = (call.module(factor * read) for factor in (10.0, 30.0))
    return isinstance(ten, Tensor) and _near(thirty, ten) and not _near(ten, ten.flatten()[0].expand_as(ten))


def _near(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and error_between(a.reshape_as(b), b) < NEAR
