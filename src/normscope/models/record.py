"""Every call of every module in one forward pass, with what it received and what it returned."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from normscope.core.norms import same
from normscope.models.attention_interface import AttentionCall
from normscope.models.attention_trace import observing_attention
from normscope.models.hooks import after, before, rotation_of
from normscope.models.inputs import is_encoder_decoder
from normscope.models.norm_modules import known_norm
from normscope.models.states import floats


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by the name of its class; one with parts is not, whatever it is called."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        name, module: the module.
        nth: how many calls of the module came before.
        began, ended: on a clock that counts the beginnings and ends of all calls.
        inputs, outputs: copies of the tensors of real numbers that it received and returned.
        positioned: whether it received the numbers of positions, and no rotation.
    """

    name: str
    module: nn.Module
    nth: int
    began: int
    inputs: tuple[Tensor, ...]
    positioned: bool = False
    ended: int = 0
    outputs: tuple[Tensor, ...] = ()

    @cached_property
    def is_norm(self) -> bool:
        """Whether it is a norm of one tensor, whose shape it keeps: by its name, or by what it computed."""
        if not (len(self.inputs) == len(self.outputs) == 1 and self.inputs[0].shape == self.outputs[0].shape):
            return False
        (x,), (y,) = self.inputs, self.outputs
        if is_norm(self.module) or not self.is_leaf or torch.equal(x, y):
            return is_norm(self.module)
        if any(parameter.ndim > 1 for parameter in self.module.parameters()):
            return False
        known = known_norm(self.module, x.shape[-1], x.device)
        return known is not None and same(known(x).flatten().double(), y.flatten().double(), _NEAR)

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product."""
        weight = getattr(self.module, "weight", None)
        return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(self.module, nn.Embedding)

    @property
    def is_leaf(self) -> bool:
        """Whether its module has no parts."""
        return not any(True for _ in self.module.children())

    @property
    def kept(self) -> tuple[Tensor, Tensor] | None:
        """What it received and what it returned, if both have one shape."""
        return next(((x, y) for x in self.inputs for y in self.outputs if x.shape == y.shape), None)

    def holds(self, other: "Call") -> bool:
        """Whether another call ran inside this one."""
        return self.began < other.began and other.ended < self.ended


@dataclass(frozen=True, eq=False)
class Attended:
    """One softmax attention: the call that it ran in, when, its q, k and v with the mixed values, and whether they cross.

    Keys that cross come from the encoder's stream, which has another number of positions in the recorded pass.
    """

    within: Call
    time: int
    attention: AttentionCall
    mixed: Tensor
    crosses: bool


@dataclass
class Record:
    """A forward pass: ``calls`` in the order in which they began, ``attended`` in the order in which they ran."""

    calls: list[Call] = field(default_factory=list)
    attended: list[Attended] = field(default_factory=list)
    rotary: bool = False
    unclear: dict[nn.Module, str] = field(default_factory=dict)
    output: Any = None

    def inside(self, call: Call) -> list[Call]:
        """The calls that ran inside a call."""
        return [other for other in self.calls if call.holds(other)]

    def attended_inside(self, call: Call) -> list[Attended]:
        """The attentions that ran inside a call."""
        return [attended for attended in self.attended if call.began < attended.time < call.ended]

    @property
    def degenerate(self) -> bool:
        """Whether some module returned zeros alone or a non-finite value: whose output is whose input is then unclear."""
        outputs = {id(x): x for call in self.calls for x in call.outputs if x.numel()}
        return any(not _SMALLEST < float(x.abs().max()) < torch.inf for x in outputs.values())


_NEAR = 1e-4
_SMALLEST = 1e-19  # the square of less is no normal number in float32


class Recorder:
    """Hooks on all modules of a model that fill a ``Record``."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.record = model, Record()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._encodes = is_encoder_decoder(model)
        self._running: list[Call] = []
        self._counts: dict[int, int] = {}
        self._clock = 0
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    def install(self, stack: ExitStack) -> None:
        """Until the stack unwinds: record every call and all attention."""
        for module in self.model.modules():
            before(stack, module, self._before)
            after(stack, module, self._after)
        self.record.unclear = stack.enter_context(observing_attention(self.model, self._attend))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nth = self._counts[id(module)] = self._counts.get(id(module), -1) + 1
        positioned = rotation_of(kwargs) is None and rotation_of(kwargs, positions=True) is not None
        call = Call(self._names[id(module)], module, nth, self._tick(), self._copied((args, kwargs)), positioned)
        self._running.append(call)
        self.record.calls.append(call)
        self.record.rotary |= rotation_of(kwargs) is not None

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = self._running.pop()
        call.ended, call.outputs = self._tick(), self._copied(output)

    def _attend(self, call: AttentionCall) -> Tensor:
        mixed = call.mixed()
        flat = mixed.transpose(1, 2).flatten(2).clone()
        crosses = self._encodes and call.q.shape[-2] != call.k.shape[-2]
        self.record.attended.append(Attended(self._running[-1], self._tick(), call, flat, crosses))
        return mixed

    def _copied(self, values: Any) -> tuple[Tensor, ...]:
        """Copies, since a model may change its states in place; of one unchanged tensor a single copy."""
        return tuple(self._copy(x) for x in floats(values))

    def _copy(self, x: Tensor) -> Tensor:
        known = self._copies.get(id(x))
        if known is None or known[0] is not x or known[1] != x._version:
            known = self._copies[id(x)] = (x, x._version, x.clone())
        return known[2]


def members(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that stand in a list or sequence, by name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            yield from ((f"{name}.{key}" if name else key, part) for key, part in module.named_children())
