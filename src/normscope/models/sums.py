"""The tensors of a recorded block, and how its output is a sum of its input and of updates.

The block's output is taken apart from its end: a sum is carry·(earlier states) + step·(the output of a sublayer), one sublayer
or several in parallel; an update may be the part of a result that is orthogonal to the states.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import factor_between, length, orthogonal_part, same
from normscope.models.blocks import Block
from normscope.models.fits import FEWEST, NEAR, SMALLEST, States, agree, fit, fit_channels, tidy
from normscope.models.record import Call, Record

_ROUNDING = 8  # of one tensor to another that is called equal, in units of the precision
_EXPLAINED = 0.02  # of a change of the states that a fitted update may leave unexplained
_SEEN = 512  # numbers of a tensor that are compared first
_MOST_SUBLAYERS = 4
_MOST_VALUES = 60  # of a block among which sums are searched
_MOST_ENDS = 24  # results among which pairs of scaled updates are searched
_FITTED = 64  # states that numbers for each channel are fitted to first


@dataclass(eq=False)
class Value:
    """Equal tensors in a block: their numbers, some of them, the calls that returned and received them, and when they began."""

    states: States
    picked: Float[Tensor, " picked"]
    first: float
    returned: list[Call] = field(default_factory=list)
    received: list[Call] = field(default_factory=list)

    @property
    def computed(self) -> bool:
        """Whether a product or a module with parts returned it."""
        return any(call.is_product or not call.is_leaf for call in self.returned)

    @property
    def is_state(self) -> bool:
        """Whether a norm received or returned it."""
        return any(call.is_norm for call in (*self.received, *self.returned))

    @property
    def is_result(self) -> bool:
        """Whether it may be what a sublayer adds, up to scales: what was computed, or a norm of it."""
        return self.computed or any(call.is_norm for call in self.returned)


_Updates = tuple[tuple[Value, Tensor], ...]


@dataclass(frozen=True)
class Sum:
    """before → after = stream(carry·before + Σ step·update), with a norm of the stream or none.

    Without updates it is the norm of the block's input that the sums begin with. ``tangent`` updates are orthogonal to before.
    """

    before: Value
    updates: _Updates
    carry: Tensor
    after: Value
    stream: Call | None = None
    tangent: bool = False


class Anatomy:
    """The tensors of a block, and how its output is a sum of its input and updates."""

    def __init__(self, block: Block, record: Record) -> None:
        self.block, self._layout, self._shape = block, block.site.layout, block.input.shape
        self.calls = sorted(record.inside(block.call), key=lambda call: call.ended)
        self.attended = record.attended_inside(block.call)
        self.values: list[Value] = []
        self.tolerance = max(NEAR, torch.finfo(block.input.dtype).eps)
        self._equal = _ROUNDING * torch.finfo(block.input.dtype).eps
        self._known: dict[int, tuple[Tensor, Value]] = {}  # tensors are kept, so that none takes the id of another
        self.x = self._value(block.input, -1.0)
        events = [(call.began, call, x) for call in self.calls for x in call.inputs]
        events += [(call.ended, call, x) for call in self.calls for x in call.outputs]
        for time, call, x in sorted(events, key=lambda event: event[0]):
            value = self.value_of(x) or (self._value(x, time) if self._states(x) is not None else None)
            if value is not None:
                (value.received if time == call.began else value.returned).append(call)
        self.y = self.value_of(block.output) or self._value(block.output, block.call.ended)

    @cached_property
    def _picked(self) -> Tensor:
        count = self.block.input.numel()
        picked = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:_SEEN]
        return picked.to(self.block.input.device)

    def _states(self, x: Tensor) -> States | None:
        return self._layout.seen(x, self._shape)

    def _value(self, x: Tensor, first: float) -> Value:
        states = self._states(x)
        assert states is not None
        value = Value(states, states.reshape(-1)[self._picked].double(), first)
        self.values.append(value)
        self._known[id(x)] = (x, value)
        return value

    def value_of(self, x: Tensor | None) -> Value | None:
        """The value that a tensor is equal to, as far as it is known."""
        if x is None or id(x) in self._known:
            return None if x is None else self._known[id(x)][1]
        states = self._states(x)
        if states is None:
            return None
        picked = states.reshape(-1)[self._picked].double()
        near = (v for v in self.values if same(v.picked, picked, self._equal))
        value = next((v for v in near if same(v.states.flatten().double(), states.flatten().double(), self._equal)), None)
        if value is not None:
            self._known[id(x)] = (x, value)
        return value

    @property
    def has_second_stream(self) -> bool:
        """Whether the block returns other states, of the same shape, that it did not receive."""
        call, y = self.block.call, self.y
        others = (
            value
            for x in call.outputs
            if x.shape == call.outputs[self.block.site.returned].shape
            for value in [self.value_of(x)]
        )
        received = [self.value_of(x) for x in call.inputs]
        return any(value is not y and value not in received for value in others)

    @property
    def before_attention(self) -> list[Call]:
        """The calls that ended before the last attention."""
        last = max((attended.time for attended in self.attended), default=0)
        return [call for call in self.calls if call.ended < last]

    def is_read(self, norm: Call) -> bool:
        """Whether a product receives what a norm returned."""
        made = norm.outputs[0].flatten()
        inputs = (x for call in self.calls if computes(call) for x in call.inputs if x.numel() == made.numel())
        return any(torch.equal(x.flatten(), made) for x in inputs)

    def sums(self) -> list[Sum] | None:
        """The sums that lead from the block's input to its output; None if there are none."""
        return self._towards(self.y, _MOST_SUBLAYERS)

    def _towards(self, after: Value, most: int) -> list[Sum] | None:
        """The sums from the block's input to some states; fewest assumptions first."""
        if after is self.x:
            return []
        if most <= 0 or not bool(after.picked.isfinite().all()):
            return None
        norm = next((call for call in after.returned if call.is_norm), None)
        total = None if norm is None else self.value_of(norm.inputs[0])
        options = [(None, after), *([(norm, total)] if total is not None else [])]
        for find in (_tangent, _exact, _scaled, _parallel, _channels):
            for stream, value in options:
                for before, updates, carry in find(_Terms(self, value)):
                    rest = self._towards(before, most - len(updates))
                    if rest is not None:
                        return [*rest, Sum(before, updates, carry, after, stream, tangent=find is _tangent)]
        one = after.states.new_ones((), dtype=torch.float32)
        return [Sum(self.x, (), one, after, norm)] if total is self.x and after is not self.y else None


class _Terms:
    """A sum, and what it may be made of: values that appeared before it, the latest first, and updates among them."""

    def __init__(self, anatomy: Anatomy, total: Value) -> None:
        self.total, self.states, self.tolerance = total, total.states, anatomy.tolerance
        self.t = total.picked
        values = [v for v in anatomy.values if v.first < total.first and bool(v.picked.any() & v.picked.isfinite().all())]
        latest = sorted(values, key=lambda v: -v.first)
        self.starts = [*latest[:_MOST_VALUES], *(v for v in latest[_MOST_VALUES:] if v.first < 0)]
        self.updates = [v for v in latest if v.returned][:_MOST_VALUES]
        self.U = torch.stack([v.picked for v in self.updates]) if self.updates else self.t.new_zeros(0, len(self.t))

    def pairs(self, fewer: bool = False) -> Iterator[tuple[Value, Tensor]]:
        """Every start, and which updates came after it; or only what norms receive, and the block's input."""
        starts = [v for v in self.starts if v.first < 0 or v.is_state] if fewer else self.starts
        for start in starts:
            yield start, torch.tensor([v.first > start.first for v in self.updates], dtype=torch.bool, device=self.t.device)

    def hits(self, start: Value, made: Float[Tensor, "updates picked"], allowed: Tensor) -> list[int]:
        """The updates whose sums are the target, and not only because the states hardly change."""
        left, change = (self.t - made).norm(dim=-1), (self.t - start.picked).norm()
        rounding = _ROUNDING * torch.finfo(self.states.dtype).eps * self.t.norm()
        good = (left <= self.tolerance * self.t.norm()) & (left <= (_EXPLAINED * change).clamp(min=rounding)) & allowed
        return [int(index) for index in good.nonzero()[:, 0]]

    def is_sum(self, start: Value, made: Tensor, exact: bool = False) -> bool:
        """Whether all numbers agree, and not only because the states hardly change; ``exact`` is up to rounding."""
        target, x = self.states.double(), start.states.double()
        left, change, size = (float(length(y.flatten())) for y in (target - made, target - x, target))
        rounding = _ROUNDING * torch.finfo(self.states.dtype).eps * size
        return left <= (rounding if exact else self.tolerance * size) and left <= max(_EXPLAINED * change, rounding)


_Found = Iterator[tuple[Value, _Updates, Tensor]]


def _tangent(terms: _Terms) -> _Found:
    """Before + step·(the part of an update that is orthogonal to before), where the change is orthogonal and the update not."""
    one = terms.states.new_ones((), dtype=torch.float32)
    for start, later in terms.pairs(fewer=True):
        x = start.states.double()
        change = terms.states.double() - x
        if not bool(change.any()) or not agree(orthogonal_part(change, x), change):
            continue
        for update, after in zip(terms.updates, later, strict=True):
            u = update.states.double()
            across = orthogonal_part(u, x)
            if bool(after) and update.is_result and not agree(across, u):
                step = tidy(torch.tensor(factor_between(change, across)), terms.states)
                if float(step.abs()) >= SMALLEST and terms.is_sum(start, x + step * across):
                    yield start, ((update, step),), one


def _exact(terms: _Terms) -> _Found:
    """Before + update."""
    one = terms.states.new_ones((), dtype=torch.float32)
    for start, later in terms.pairs():
        for index in terms.hits(start, start.picked + terms.U, later):
            update = terms.updates[index]
            if terms.is_sum(start, start.states + update.states, exact=True):
                yield start, ((update, one),), one


def _scaled(terms: _Terms) -> _Found:
    """Before + step·update, then carry·before + step·update."""
    for exact, free in product((True, False), (False, True)):
        for start, later in terms.pairs():
            step, carry = fit(terms.t, start.picked, terms.U, free)
            allowed = later & (step.abs() >= SMALLEST) & (carry.abs() >= SMALLEST)
            for index in terms.hits(start, carry[:, None] * start.picked + step[:, None] * terms.U, allowed):
                update = terms.updates[index]
                t, x, u = (states.double().flatten() for states in (terms.states, start.states, update.states))
                scale, kept = (tidy(number[0], terms.states) for number in fit(t, x, u[None], free))
                if terms.is_sum(start, kept * start.states + scale * update.states, exact):
                    yield start, ((update, scale),), kept


def _parallel(terms: _Terms) -> _Found:
    """Before + update₁ + update₂, then with a step each."""
    one = terms.states.new_ones((), dtype=torch.float32)
    for start, later in terms.pairs():
        for first, update in enumerate(terms.updates):
            if bool(later[first]):
                for second in terms.hits(start, start.picked + terms.U[first] + terms.U, later):
                    other = terms.updates[second]
                    if other.first > update.first and terms.is_sum(
                        start, start.states + update.states + other.states, exact=True
                    ):
                        yield start, ((update, one), (other, one)), one
    ends = [index for index, update in enumerate(terms.updates) if update.is_result][:_MOST_ENDS]
    for start, later in terms.pairs(fewer=True):
        for pair in combinations(reversed([index for index in ends if bool(later[index])]), 2):
            U = terms.U[list(pair)]
            steps = torch.linalg.lstsq(U.mT, (terms.t - start.picked)[:, None]).solution[:, 0]
            enough = (steps.abs() >= SMALLEST).all()[None]
            if terms.hits(start, (start.picked + steps @ U)[None], enough):
                chosen = tuple((terms.updates[index], tidy(steps[n], terms.states)) for n, index in enumerate(pair))
                if terms.is_sum(start, start.states + sum(step * update.states for update, step in chosen)):
                    yield start, chosen, one


def _channels(terms: _Terms) -> _Found:
    """Carry ⊙ before + step ⊙ update, a number for each channel; fitted to some of the states first."""
    count = terms.states.shape[0] * terms.states.shape[1]
    if count < FEWEST:
        return
    some = slice(None, None, max(count // _FITTED, 1))
    target = terms.states.flatten(0, 1)[some].double()
    for start, later in terms.pairs(fewer=True):
        allowed = [update for update, after in zip(terms.updates, later, strict=True) if bool(after) and update.is_result]
        x = start.states.flatten(0, 1)[some].double()
        for update in allowed[:_MOST_ENDS]:
            u = update.states.flatten(0, 1)[some].double()
            step, carry = fit_channels(x, u, target)
            small = min(float(step.abs().mean()), float(carry.abs().mean())) < SMALLEST
            if small or not agree(target, carry * x + step * u):
                continue
            step, carry = fit_channels(start.states.double(), update.states.double(), terms.states.double())
            if terms.is_sum(start, carry * start.states + step * update.states):
                yield start, ((update, tidy(step, terms.states)),), tidy(carry, terms.states)


def computes(call: Call) -> bool:
    """Whether a module without parts has parameters of two axes or more: a product, a convolution, experts."""
    return call.is_leaf and any(parameter.ndim > 1 for parameter in call.module.parameters())
