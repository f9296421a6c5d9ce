"""Where a block normalises and what it adds to the stream, identified from one forward pass: whose output is whose input.

A recorded pass of a few tokens has the input and output of every module of a block. The block's output is taken apart from its
end: a norm of a sum that the stream continues with is a stream norm; a sum is carry·(earlier states) + step·(the output of a
sublayer), one sublayer or several in parallel; a norm between a sublayer and the sum is an output norm; a norm between the
states and what the sublayer reads is an input norm. Scales are fitted. Class names decide only which modules are norms, and
attribute names which of them are norms of q, k and v. What was identified is proved: ``Placement.error`` is the error of the
updates with these slots against the block's output.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normscope.core.norms import factor_between, length, same
from normscope.models.blocks import Block
from normscope.models.norm_modules import known_norm
from normscope.models.record import Attended, Call, Record
from normscope.schemes import Slots
from normscope.schemes.update import Update

_HEAD_NORM = re.compile(r"(qk|q|k|v)(uery|ey|alue)?_?(layer_?)?(norm|ln)|norm_?(qk|q|k|v)")
_NEAR = 1e-4
_SMALLEST = 1e-3
_EXPLAINED = 0.02  # of a change of the states that a fitted update may leave unexplained
_SEEN = 512  # numbers of a tensor that are compared first
_MOST_SUBLAYERS = 4
_MOST_ENDS = 24  # results among which pairs of scaled updates are searched
_FEWEST = 6  # states to fit two numbers for each channel
States = Float[Tensor, "rows positions dim"]


@dataclass(frozen=True)
class Site:
    """A call of a module inside a block: the ``nth`` call of it since the block began, the first is 0.

    ``received`` means what it is called with, not what it returns.
    """

    module: nn.Module
    nth: int = 0
    received: bool = False


@dataclass(frozen=True)
class Scales:
    """The fitted branch and residual scale of a sublayer, each a number or one for each channel."""

    step: Tensor
    carry: Tensor


@dataclass(frozen=True)
class Branch:
    """A sublayer in the modules of its block.

    Attributes:
        norms: by slot, ``input``, ``output`` and ``stream``.
        result: where the output of the sublayer is, before any output norm: what a call returns, or what the norm receives.
        scales: of its update and of the residual.
        reader: the first call that reads the states after the sublayer; None if the block returns them, or adds the updates
            of several sublayers at once.
        factor: of what it reads, after the input norm.
        parallel: whether it adds to the same states as the sublayer before it.
    """

    norms: dict[str, Site]
    result: Site
    scales: Scales
    reader: Site | None = None
    factor: float = 1.0
    parallel: bool = False

    def slots(self, heads: str = "none") -> Slots:
        """Which slots are filled."""
        norms = {slot: "norm" if slot in self.norms else "none" for slot in ("input", "output", "stream")}
        if self.factor != 1 and "input" in self.norms:
            norms["input"] = f"norm * {self.factor:.4g}"
        if self.scales.step.ndim or self.scales.carry.ndim:
            lerp = bool(self.scales.carry.ndim) and _same(self.scales.carry, 1 - self.scales.step)
            return Slots(heads=heads, step="alpha", carry="1 - alpha" if lerp else rounded(self.scales.carry.mean()), **norms)
        return Slots(heads=heads, step=rounded(self.scales.step), carry=rounded(self.scales.carry), **norms)


@dataclass(frozen=True)
class Placement:
    """The slots of a block, which module fills which, and what else was observed.

    Attributes:
        branches: the sublayers by name, ``attention``, ``cross``, ``mixer`` and ``feedforward``, as they run; empty if they
            could not be identified.
        head_norms: norms of q, k and v by letter.
        output_projection: the module of W_O.
        changed: whether a norm or gate changes the mixed values of attention before W_O.
        note: what the block does besides.
        unclear: why the branches could not be identified; empty if they were.
        error: of the updates with these slots against the block's output, relative to it; None if there are none.
    """

    branches: dict[str, Branch]
    head_norms: dict[str, nn.Module]
    output_projection: nn.Module | None
    changed: bool = False
    note: str = ""
    unclear: str = ""
    error: float | None = None

    @property
    def parallel(self) -> bool:
        """Whether some sublayers read the same states."""
        return any(branch.parallel for branch in self.branches.values())

    @property
    def sublayers(self) -> list[tuple[str, Branch]]:
        """The sublayers that a block of a scheme has: all but further ones."""
        return [(name, branch) for name, branch in self.branches.items() if name != "further"]

    def shares(self, name: str) -> bool:
        """Whether a sublayer's update is added together with that of another."""
        names = list(self.branches)
        after = names[names.index(name) + 1 :][:1]
        return self.branches[name].parallel or any(self.branches[other].parallel for other in after)

    @property
    def letters(self) -> str:
        """Which of q, k and v are normalised."""
        return "".join(letter for letter in "qkv" if letter in self.head_norms) or "none"

    @property
    def norms(self) -> dict[tuple[str, str], nn.Module]:
        """Norms of the stream by sublayer and slot."""
        return {(name, slot): site.module for name, branch in self.branches.items() for slot, site in branch.norms.items()}


@dataclass(eq=False)
class _Value:
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


_Updates = tuple[tuple[_Value, Tensor], ...]


@dataclass(frozen=True)
class _Sum:
    """before → after = stream(carry·before + Σ step·update), with a norm of the stream or none."""

    before: _Value
    updates: _Updates
    carry: Tensor
    after: _Value
    stream: Call | None = None


class _Anatomy:
    """The tensors of a block, and how its output is a sum of its input and updates."""

    def __init__(self, block: Block, record: Record) -> None:
        self.block, self._layout, self._shape = block, block.site.layout, block.input.shape
        self.calls = sorted(record.inside(block.call), key=lambda call: call.ended)
        self.attended = record.attended_inside(block.call)
        self.values: list[_Value] = []
        self.tolerance = max(_NEAR, torch.finfo(block.input.dtype).eps)
        self._known: dict[int, tuple[Tensor, _Value]] = {}  # tensors are kept, so that none takes the id of another
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

    def _value(self, x: Tensor, first: float) -> _Value:
        states = self._states(x)
        assert states is not None
        value = _Value(states, states.reshape(-1)[self._picked].double(), first)
        self.values.append(value)
        self._known[id(x)] = (x, value)
        return value

    def value_of(self, x: Tensor | None) -> _Value | None:
        """The value that a tensor is equal to, as far as it is known."""
        if x is None or id(x) in self._known:
            return None if x is None else self._known[id(x)][1]
        states = self._states(x)
        if states is None:
            return None
        picked = states.reshape(-1)[self._picked].double()
        near = (v for v in self.values if same(v.picked, picked, self.tolerance))
        value = next((v for v in near if _same(v.states, states)), None)
        if value is not None:
            self._known[id(x)] = (x, value)
        return value

    def sums(self) -> list[_Sum] | None:
        """The sums that lead from the block's input to its output; None if there are none."""
        return self._towards(self.y, _MOST_SUBLAYERS)

    def _towards(self, after: _Value, most: int) -> list[_Sum] | None:
        """The sums from the block's input to some states; fewest assumptions first."""
        if after is self.x:
            return []
        if most <= 0:
            return None
        norm = next((call for call in after.returned if call.is_norm), None)
        total = None if norm is None else self.value_of(norm.inputs[0])
        options = [(None, after), *([(norm, total)] if total is not None else [])]
        for fit in (_exact, _scaled, _parallel, _channels):
            for stream, value in options:
                for before, updates, carry in fit(_Terms(self, value)):
                    rest = self._towards(before, most - len(updates))
                    if rest is not None:
                        return [*rest, _Sum(before, updates, carry, after, stream)]
        return None


class _Terms:
    """A sum, and what it may be made of: values that appeared before it, the latest first, and updates among them."""

    def __init__(self, anatomy: _Anatomy, total: _Value) -> None:
        self.total, self.states, self.tolerance = total, total.states, anatomy.tolerance
        self.t = total.picked
        values = [v for v in anatomy.values if v.first < total.first and bool(v.picked.any())]
        self.starts = sorted(values, key=lambda v: -v.first)
        self.updates = [v for v in self.starts if v.returned]
        self.U = torch.stack([v.picked for v in self.updates]) if self.updates else self.t.new_zeros(0, len(self.t))

    def pairs(self, fewer: bool = False) -> Iterator[tuple[_Value, Tensor]]:
        """Every start, and which updates came after it; or only what norms receive, and the block's input."""
        starts = [v for v in self.starts if v.first < 0 or any(call.is_norm for call in v.received)] if fewer else self.starts
        for start in starts:
            yield start, torch.tensor([v.first > start.first for v in self.updates], dtype=torch.bool, device=self.t.device)

    def hits(self, start: _Value, made: Float[Tensor, "updates picked"], allowed: Tensor) -> list[int]:
        """The updates whose sums are the target, and not only because the states hardly change."""
        left, change = (self.t - made).norm(dim=-1), (self.t - start.picked).norm()
        good = (left <= self.tolerance * self.t.norm()) & (left <= _EXPLAINED * change) & allowed
        return [int(index) for index in good.nonzero()[:, 0]]

    def is_sum(self, made: Tensor) -> bool:
        """Whether all numbers agree."""
        return _same(self.states, made)


_Found = Iterator[tuple[_Value, _Updates, Tensor]]


def _exact(terms: _Terms) -> _Found:
    """Before + update."""
    one = terms.states.new_ones((), dtype=torch.float32)
    for start, later in terms.pairs():
        for index in terms.hits(start, start.picked + terms.U, later):
            update = terms.updates[index]
            if terms.is_sum(start.states + update.states):
                yield start, ((update, one),), one


def _scaled(terms: _Terms) -> _Found:
    """Before + step·update, then carry·before + step·update."""
    for free in (False, True):
        for start, later in terms.pairs():
            step, carry = _fit(terms.t, start.picked, terms.U, free)
            allowed = later & (step.abs() >= _SMALLEST) & (carry.abs() >= _SMALLEST)
            for index in terms.hits(start, carry[:, None] * start.picked + step[:, None] * terms.U, allowed):
                update = terms.updates[index]
                t, x, u = (states.double().flatten() for states in (terms.states, start.states, update.states))
                scale, kept = (_tidy(number[0], terms.states) for number in _fit(t, x, u[None], free))
                if terms.is_sum(kept * start.states + scale * update.states):
                    yield start, ((update, scale),), kept


def _parallel(terms: _Terms) -> _Found:
    """Before + update₁ + update₂, then with a step each."""
    one = terms.states.new_ones((), dtype=torch.float32)
    for start, later in terms.pairs():
        for first, update in enumerate(terms.updates):
            if bool(later[first]):
                for second in terms.hits(start, start.picked + terms.U[first] + terms.U, later):
                    other = terms.updates[second]
                    if other.first > update.first and terms.is_sum(start.states + update.states + other.states):
                        yield start, ((update, one), (other, one)), one
    ends = [index for index, update in enumerate(terms.updates) if update.computed][:_MOST_ENDS]
    for start, later in terms.pairs(fewer=True):
        for pair in combinations(reversed([index for index in ends if bool(later[index])]), 2):
            U = terms.U[list(pair)]
            steps = torch.linalg.lstsq(U.mT, (terms.t - start.picked)[:, None]).solution[:, 0]
            enough = (steps.abs() >= _SMALLEST).all()[None]
            if terms.hits(start, (start.picked + steps @ U)[None], enough):
                chosen = tuple((terms.updates[index], _tidy(steps[n], terms.states)) for n, index in enumerate(pair))
                if terms.is_sum(start.states + sum(step * update.states for update, step in chosen)):
                    yield start, chosen, one


def _channels(terms: _Terms) -> _Found:
    """Carry ⊙ before + step ⊙ update, a number for each channel."""
    rows, positions, _ = terms.states.shape
    if rows * positions < _FEWEST:
        return
    for start, later in terms.pairs(fewer=True):
        allowed = [update for update, after in zip(terms.updates, later, strict=True) if bool(after) and update.computed]
        for update in allowed[:_MOST_ENDS]:
            step, carry = _fit_channels(start.states.double(), update.states.double(), terms.states.double())
            small = min(float(step.abs().mean()), float(carry.abs().mean())) < _SMALLEST
            if not small and terms.is_sum(carry * start.states + step * update.states):
                yield start, ((update, _tidy(step, terms.states)),), _tidy(carry, terms.states)


def placement_of(block: Block, record: Record) -> Placement:
    """The slots of a block."""
    anatomy = _Anatomy(block, record)
    attention = next((a for a in anatomy.attended if not a.crosses), None)
    heads = {} if attention is None else _head_norms(anatomy, attention)
    out = None if attention is None else _output_projection(anatomy, attention)
    changed = out is not None and attention is not None and not _same(out.inputs[0], attention.mixed)
    plain = Placement({}, heads, None if out is None else out.module, changed)
    sums = anatomy.sums()
    if sums is None:
        return replace(plain, unclear="the block's output is not a sum of its input and the updates of its sublayers")
    return _with_branches(plain, anatomy, sums)


def _with_branches(plain: Placement, anatomy: _Anatomy, sums: Sequence[_Sum]) -> Placement:
    """The placement with the sublayers of the sums, proved by reconstruction."""
    branches: list[Branch] = []
    windows: list[tuple[int, int]] = []
    began, error = anatomy.block.call.began, 0.0
    for total in sums:
        outputs = []
        for number, (update, step) in enumerate(total.updates):
            result, norm, scale = _result(anatomy, update, total.before)
            value = _computed(anatomy, result, result is norm)
            window = (began, result.ended)
            reading = _reading(anatomy, total.before, window)
            if isinstance(reading, str):
                return replace(plain, unclear=reading)
            calls = {"input": reading[0], "output": norm, "stream": total.stream}
            sites = {slot: _site(anatomy, call) for slot, call in calls.items() if call is not None}
            last = number == len(total.updates) - 1
            reader = _reader(anatomy, total.after, window[1]) if last else None
            scales = Scales(step * scale, total.carry)
            site = replace(_site(anatomy, result), received=result is norm)
            branches.append(Branch(sites, site, scales, reader, reading[1], parallel=number > 0))
            outputs.append(value)
            windows.append(window)
            began = window[1]
        error = max(error, _error(anatomy, total, branches[-len(outputs) :], outputs))
    names = _names(anatomy, windows)
    if isinstance(names, str):
        return replace(plain, unclear=names)
    if error > anatomy.tolerance:
        unclear = f"updates with the slots that were seen miss the block's output by {error:.1e} of its norm"
        return replace(plain, unclear=unclear, error=error)
    note = "a further sublayer follows the feed-forward layer" if "further" in names else ""
    return replace(plain, branches=dict(zip(names, branches, strict=True)), note=note, error=error)


def _error(anatomy: _Anatomy, total: _Sum, branches: Sequence[Branch], outputs: Sequence[_Value]) -> float:
    """The error of the states after a sum, made from those before it and the sublayers' outputs with our own norms.

    It is infinite where what a sublayer reads is not in the block.
    """
    before, target = total.before.states, total.after.states
    made, stream = total.carry * before, None
    for branch, output in zip(branches, outputs, strict=True):
        known = {slot: known_norm(site.module, before.shape[-1], before.device) for slot, site in branch.norms.items()}
        norms = {slot: norm for slot, norm in known.items() if norm is not None}
        if len(norms) < len(known):
            return float("inf")
        update = Update(norms.get("input"), norms.get("output"), factor=branch.factor, step=branch.scales.step)
        if "input" in norms and anatomy.value_of(update.read(before)) is None:
            return float("inf")
        made, stream = made + update.written(output.states), norms.get("stream")
    made = Update(stream=stream).settle(made)
    return float(length((made - target).double().flatten()) / length(target.double().flatten()))


def _names(anatomy: _Anatomy, windows: Sequence[tuple[int, int]]) -> list[str] | str:
    """The names of sublayers by what runs in their windows of time; or why there are none."""
    names: list[str] = []
    for began, ended in windows:
        inside = [a for a in anatomy.attended if began < a.time < ended]
        names.append("cross" if inside and all(a.crosses for a in inside) else "attention" if inside else "")
    others = [position for position, name in enumerate(names) if not name]
    early = "attention" not in names or (len(others) > 1 and others[0] < names.index("attention"))
    kinds = ["mixer"] * early + ["feedforward", "further"]
    if len(others) > len(kinds) or any(names.count(kind) > 1 for kind in ("attention", "cross")):
        return f"the block has {len(windows)} sublayers, more than attention, a mixer and a feed-forward layer"
    for position, kind in zip(others, kinds, strict=False):
        names[position] = kind
    return names


def _result(anatomy: _Anatomy, update: _Value, before: _Value) -> tuple[Call, Call | None, Tensor]:
    """The call that computed an update, the output norm after it, and the scale of each channel that a module applied.

    Where no call returned what the output norm receives, the call is the norm.
    """
    scale, norm = update.states.new_ones((), dtype=torch.float32), None
    while True:
        call = min(update.returned, key=lambda call: (call.ended, -call.began))
        source = anatomy.value_of(call.inputs[0]) if call.inputs else None
        if source is None or source in (anatomy.x, before, update) or not call.is_leaf or norm is not None:
            return call, norm, scale
        if call.is_norm:
            norm, update = call, source
            if not source.returned:
                return norm, norm, scale
            continue
        factor = _channel_scale(source.states, update.states) if source.returned else None
        if factor is None:
            return call, norm, scale
        scale, update = scale * factor, source


def _computed(anatomy: _Anatomy, call: Call, received: bool) -> _Value:
    """What a sublayer computed: what a call returned, or received."""
    tensors = call.inputs if received else call.outputs
    return next(value for x in tensors if (value := anatomy.value_of(x)) is not None)


def _channel_scale(x: States, y: States) -> Tensor | None:
    """The vector s for which y = s ⊙ x; None if there is none."""
    flat_x, flat_y = x.double().flatten(0, -2), y.double().flatten(0, -2)
    scale = (flat_x * flat_y).sum(0) / flat_x.square().sum(0)
    return _tidy(scale, x) if bool(scale.isfinite().all()) and _same(y, scale * x.double()) else None


def _reading(anatomy: _Anatomy, before: _Value, window: tuple[int, int]) -> tuple[Call | None, float] | str:
    """The input norm of a sublayer and the factor after it, from what its modules read; or why that is unclear."""
    norms = [call for call in before.received if call.is_norm]
    readers = [call for call in anatomy.calls if window[0] < call.began < window[1] and not call.is_norm]
    direct = [call for call in readers if call in before.received and _computes(call)]
    for norm in norms:
        value = anatomy.value_of(norm.outputs[0])
        if value is not None and any(call in value.received for call in readers):
            both = direct and value is not before  # a norm of what is normalised already changes nothing
            return "a sublayer reads both the states and a norm of them" if both else (norm, 1.0)
    if direct:
        return None, 1.0
    for norm, call in product(norms, (call for call in readers if _computes(call))):
        read = anatomy.value_of(call.inputs[0]) if call.inputs else None
        made = anatomy.value_of(norm.outputs[0])
        if read is not None and made is not None:
            factor = factor_between(read.states, made.states)
            if abs(factor) >= _SMALLEST and _same(read.states, factor * made.states.double()):
                return norm, round(factor, 6)
    rearranged = [
        call for call in readers if _computes(call) and call.inputs and call.inputs[0].numel() == before.states.numel()
    ]
    for norm, call in product(norms, rearranged[:1]):  # windows of an image are read one by one
        if _same(call.inputs[0].flatten().sort().values, norm.outputs[0].flatten().sort().values):
            return norm, 1.0
    if not any(_computes(call) for call in readers) and any(call in before.received for call in readers):
        return None, 1.0
    return "a sublayer reads neither the states nor a norm of them"


def _computes(call: Call) -> bool:
    """Whether a module without parts has parameters of two axes or more: a product, a convolution, experts."""
    return call.is_leaf and any(parameter.ndim > 1 for parameter in call.module.parameters())


def _reader(anatomy: _Anatomy, after: _Value, time: int) -> Site | None:
    """The first call after a time that reads some states."""
    call = min((call for call in after.received if call.began >= time), key=lambda call: call.began, default=None)
    return None if call is None else _site(anatomy, call)


def _site(anatomy: _Anatomy, call: Call) -> Site:
    """A call by its module and its number among the calls of that module in the block."""
    return Site(call.module, sum(other.module is call.module and other.began < call.began for other in anatomy.calls))


def _output_projection(anatomy: _Anatomy, attended: Attended) -> Call | None:
    """The product that reads the mixed values, or in the attention module what a norm or gate makes of them."""
    products = [c for c in anatomy.calls if c.is_product and c.began > attended.time and c.inputs and c.outputs]
    plain = [c for c in products if _same(c.inputs[0], attended.mixed)]
    inside = [c for c in products if attended.within.holds(c) and c.inputs[0].numel() == attended.mixed.numel()]
    return next((c for c in plain + inside if c.outputs[0].numel() == anatomy.block.input.numel()), None)


def _head_norms(anatomy: _Anatomy, attended: Attended) -> dict[str, nn.Module]:
    """Norms between the projections and attention, by letter."""
    norms: dict[str, nn.Module] = {}
    for call in anatomy.calls:
        parent, _, name = call.name.rpartition(".")
        match = _HEAD_NORM.fullmatch(name)
        if match and call.is_norm and parent == attended.within.name and call.ended < attended.time:
            norms |= dict.fromkeys(match[1] or match[5], call.module)
    return norms


def _fit(target: Tensor, x: Tensor, U: Float[Tensor, "updates picked"], free: bool) -> tuple[Tensor, Tensor]:
    """Least squares of target = carry·x + step·u for every update u, with carry 1 unless it is free."""
    uu, ut, xu = U.square().sum(-1), U @ target, U @ x
    if free:
        return _solve((x * x).sum(), xu, uu, (x * target).sum(), ut)
    return ((ut - xu) / uu).nan_to_num(0.0), torch.ones_like(uu)


def _fit_channels(x: Tensor, u: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same with two numbers for each channel."""
    x, u, target = (y.flatten(0, -2) for y in (x, u, target))
    return _solve(*((a * b).sum(0) for a, b in ((x, x), (x, u), (u, u), (x, target), (u, target))))


def _solve(xx: Tensor, xu: Tensor, uu: Tensor, xt: Tensor, ut: Tensor) -> tuple[Tensor, Tensor]:
    """The normal equations of two unknowns."""
    determinant = xx * uu - xu.square()
    step, carry = (xx * ut - xu * xt) / determinant, (uu * xt - xu * ut) / determinant
    return step.nan_to_num(0.0), carry.nan_to_num(0.0)


def _tidy(scale: Tensor, states: Tensor) -> Tensor:
    """A scale as precise as its fit: 1 up to rounding is 1, equal channels are one number, half precision has two digits."""
    scale = scale.float() if torch.finfo(states.dtype).bits >= 32 else scale.float().round(decimals=2)
    scale = scale.mean() if scale.ndim and bool((scale - scale.mean()).abs().max() < _SMALLEST * scale.mean().abs()) else scale
    one = bool(((scale - 1).abs() < _SMALLEST).all()) and not scale.ndim
    return (torch.ones_like(scale) if one else scale).to(states.device)


def rounded(scale: Tensor) -> float:
    """A fitted scale with four decimals."""
    return round(float(scale), 4)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to the rounding of their precision."""
    if a.numel() != b.numel():
        return False
    near = max(_NEAR, torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return same(a.flatten().double(), b.flatten().double(), near)
