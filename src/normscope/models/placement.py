"""Where a block normalises and what it adds to the stream, identified from one forward pass: whose output is whose input.

A recorded pass of a few tokens has the input and output of every module of a block. The block's output is taken apart from its
end: a norm of a sum that the stream continues with is a stream norm; a sum is carry·(earlier states) + step·(the output of a
sublayer), one sublayer or several in parallel; a norm between a sublayer and the sum is an output norm; a norm between the
states and what the sublayer reads is an input norm; a norm of the block's input that the sums begin with is an entry norm. An
update that is the part of a result orthogonal to the states is a tangent one. Scales are fitted. A module is a norm by the name
of its class or by what it computes. ``Placement.error`` is the error of the updates with these slots against the block's
output; ``proof`` repeats that with other states.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normscope.core.norms import factor_between, length, orthogonal_part, same
from normscope.models.attention_interface import AttentionCall
from normscope.models.blocks import Block
from normscope.models.hooks import Site
from normscope.models.inside import Inside, before_output, norm_before, score_slot
from normscope.models.norm_modules import known_norm
from normscope.models.offload import weight_of
from normscope.models.record import Attended, Call, Record
from normscope.schemes import Slots
from normscope.schemes.update import Update

_HEAD_NORM = re.compile(r"(qk|q|k|v)(uery|ey|alue)?_?(layer_?)?(norm|ln)|norm_?(qk|q|k|v)")
_NEAR = 1e-4
_SMALLEST = 1e-6  # a step or carry
_ALIKE = 1e-3  # channels that differ by less have one number
_ONE = 1e-5  # a fitted number this near to 1 is 1
_ROUNDING = 8  # of one tensor to another that is called equal, in units of the precision
_EXPLAINED = 0.02  # of a change of the states that a fitted update may leave unexplained
_SEEN = 512  # numbers of a tensor that are compared first
_MOST_SUBLAYERS = 4
_MOST_VALUES = 60  # of a block among which sums are searched
_MOST_ENDS = 24  # results among which pairs of scaled updates are searched
_AFFINE = 1e-3  # of a product whose own arithmetic may be half precision
_FITTED = 64  # states that numbers for each channel are fitted to first
_FEWEST = 6  # states to fit two numbers for each channel
_NEITHER = "a norm is neither LayerNorm nor RMSNorm"
States = Float[Tensor, "rows positions dim"]


@dataclass(frozen=True)
class Scales:
    """The fitted branch and residual scale of a sublayer, each a number or one for each channel."""

    step: Tensor
    carry: Tensor


@dataclass(frozen=True)
class Branch:
    """A sublayer in the modules of its block.

    Attributes:
        norms: by slot, ``input``, ``inner``, ``output`` and ``stream``.
        result: where the output of the sublayer is, before any output norm: what a call returns, or what the norm receives.
        scales: of its update and of the residual.
        reader: the first call that reads the states after the sublayer; None if the block returns them, or adds the updates
            of several sublayers at once.
        factor: of what it reads, after the input norm.
        parallel: whether it adds to the same states as the sublayer before it.
        tangent: whether it adds only the part of its output that is orthogonal to the states.
        learned: the shape of the parameter that its step is, ``vector`` or ``scalar``; empty if the step is a constant.
    """

    norms: dict[str, Site]
    result: Site
    scales: Scales
    reader: Site | None = None
    factor: float = 1.0
    parallel: bool = False
    tangent: bool = False
    learned: str = ""

    @property
    def has_slots(self) -> bool:
        """Whether slots can express it.

        They cannot a carry with a number for each channel beside a step with others, unless it is 1 − step, nor the tangent
        part of a normalised output.
        """
        both = self.scales.carry.ndim and (self.scales.step.ndim or self.learned) and not self._lerps
        return not both and not (self.tangent and "output" in self.norms)

    @property
    def alpha(self) -> Tensor | None:
        """The learned step, or a carry with a number for each channel; None if both are constants."""
        step, carry = self.scales.step, self.scales.carry
        return step if step.ndim or self.learned else carry if carry.ndim else None

    @property
    def _lerps(self) -> bool:
        """Whether carry = 1 − step."""
        carry, rest = self.scales.carry, 1 - self.scales.step
        carry = carry + torch.zeros_like(rest)
        return bool(self.scales.step.any()) and not bool((carry == 1).all()) and _same(carry, rest + torch.zeros_like(carry))

    def grown(self, factor: float) -> "Branch":
        """The same with a larger step."""
        step = factor * self.scales.step
        return replace(self, scales=Scales(step, 1 - step if self._lerps else self.scales.carry))

    def slots(self) -> Slots:
        """Which slots are filled, apart from those of attention alone."""
        filled = {slot: "norm" if slot in self.norms else "none" for slot in ("input", "inner", "output", "stream")}
        if self.tangent:
            filled["output"] = "tangent"
        if self.factor != 1 and "input" in self.norms:
            filled["input"] = f"norm * {self.factor:.5g}"
        step, carry = self.scales.step, self.scales.carry
        if step.ndim or self.learned:
            return Slots(step="alpha", carry="1 - alpha" if self._lerps else rounded(carry), **filled)
        return Slots(step=rounded(step), carry="alpha" if carry.ndim else rounded(carry), **filled)


@dataclass(frozen=True)
class Placement:
    """The slots of a block, which module fills which, and what else was observed.

    Attributes:
        branches: the sublayers by name, ``attention``, ``cross``, ``mixer`` and ``feedforward``, as they run; empty if they
            could not be identified.
        head_norms: norms of q, k and v by letter.
        unnamed_heads: those of q, k and v that are normalised by operations that are no module.
        output_projection: the module of W_O.
        changed: whether a norm, a gate or something else changes the mixed values of attention before W_O.
        gate: ``sigmoid`` if that is a gate, after a norm or without one.
        scores: the slot of the softmax, ``softmax``, ``softcap(50)``, ``sink``, ...
        entry: a norm of the block's input, in whose place the sums begin.
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
    unnamed_heads: str = ""
    gate: str = "none"
    scores: str = "softmax"
    entry: Site | None = None

    @property
    def parallel(self) -> bool:
        """Whether some sublayers read the same states."""
        return any(branch.parallel for branch in self.branches.values())

    @property
    def sublayers(self) -> list[tuple[str, Branch]]:
        """The sublayers that a block of a scheme has: all but further ones."""
        return [(name, branch) for name, branch in self.branches.items() if name != "further"]

    def shares(self, name: str, later: bool = False) -> bool:
        """Whether a sublayer's update is added together with that of another, or of a later one."""
        names = list(self.branches)
        after = names[names.index(name) + 1 :][:1]
        return (self.branches[name].parallel and not later) or any(self.branches[other].parallel for other in after)

    @property
    def letters(self) -> str:
        """Which of q, k and v are normalised."""
        return "".join(letter for letter in "qkv" if letter in self.head_norms or letter in self.unnamed_heads) or "none"

    @property
    def norms(self) -> dict[tuple[str, str], nn.Module]:
        """Norms of the stream, and those inside sublayers, by sublayer and slot."""
        inside = {(name, slot): site.module for name, branch in self.branches.items() for slot, site in branch.norms.items()}
        return inside if self.entry is None else {(next(iter(self.branches)), "entry"): self.entry.module, **inside}


@dataclass(frozen=True)
class Evidence:
    """What a recorded block shows.

    Attributes:
        results: what each sublayer computed, by name.
        reads: what the input norms returned.
        latent: whether a norm inside attention stands before a product: q, k and v are then made of normalised numbers.
    """

    results: dict[str, States]
    reads: dict[Site, States]
    latent: bool = False


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

    @property
    def is_state(self) -> bool:
        """Whether a norm received or returned it."""
        return any(call.is_norm for call in (*self.received, *self.returned))

    @property
    def is_result(self) -> bool:
        """Whether it may be what a sublayer adds, up to scales: what was computed, or a norm of it."""
        return self.computed or any(call.is_norm for call in self.returned)


_Updates = tuple[tuple[_Value, Tensor], ...]


@dataclass(frozen=True)
class _Sum:
    """before → after = stream(carry·before + Σ step·update), with a norm of the stream or none.

    Without updates it is the norm of the block's input that the sums begin with. ``tangent`` updates are orthogonal to before.
    """

    before: _Value
    updates: _Updates
    carry: Tensor
    after: _Value
    stream: Call | None = None
    tangent: bool = False


class _Anatomy:
    """The tensors of a block, and how its output is a sum of its input and updates."""

    def __init__(self, block: Block, record: Record) -> None:
        self.block, self._layout, self._shape = block, block.site.layout, block.input.shape
        self.calls = sorted(record.inside(block.call), key=lambda call: call.ended)
        self.attended = record.attended_inside(block.call)
        self.values: list[_Value] = []
        self.tolerance = max(_NEAR, torch.finfo(block.input.dtype).eps)
        self._equal = _ROUNDING * torch.finfo(block.input.dtype).eps
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
        inputs = (x for call in self.calls if _computes(call) for x in call.inputs if x.numel() == made.numel())
        return any(torch.equal(x.flatten(), made) for x in inputs)

    def sums(self) -> list[_Sum] | None:
        """The sums that lead from the block's input to its output; None if there are none."""
        return self._towards(self.y, _MOST_SUBLAYERS)

    def _towards(self, after: _Value, most: int) -> list[_Sum] | None:
        """The sums from the block's input to some states; fewest assumptions first."""
        if after is self.x:
            return []
        if most <= 0 or not bool(after.picked.isfinite().all()):
            return None
        norm = next((call for call in after.returned if call.is_norm), None)
        total = None if norm is None else self.value_of(norm.inputs[0])
        options = [(None, after), *([(norm, total)] if total is not None else [])]
        for fit in (_tangent, _exact, _scaled, _parallel, _channels):
            for stream, value in options:
                for before, updates, carry in fit(_Terms(self, value)):
                    rest = self._towards(before, most - len(updates))
                    if rest is not None:
                        return [*rest, _Sum(before, updates, carry, after, stream, tangent=fit is _tangent)]
        one = after.states.new_ones((), dtype=torch.float32)
        return [_Sum(self.x, (), one, after, norm)] if total is self.x and after is not self.y else None


class _Terms:
    """A sum, and what it may be made of: values that appeared before it, the latest first, and updates among them."""

    def __init__(self, anatomy: _Anatomy, total: _Value) -> None:
        self.total, self.states, self.tolerance = total, total.states, anatomy.tolerance
        self.t = total.picked
        values = [v for v in anatomy.values if v.first < total.first and bool(v.picked.any() & v.picked.isfinite().all())]
        latest = sorted(values, key=lambda v: -v.first)
        self.starts = [*latest[:_MOST_VALUES], *(v for v in latest[_MOST_VALUES:] if v.first < 0)]
        self.updates = [v for v in latest if v.returned][:_MOST_VALUES]
        self.U = torch.stack([v.picked for v in self.updates]) if self.updates else self.t.new_zeros(0, len(self.t))

    def pairs(self, fewer: bool = False) -> Iterator[tuple[_Value, Tensor]]:
        """Every start, and which updates came after it; or only what norms receive, and the block's input."""
        starts = [v for v in self.starts if v.first < 0 or v.is_state] if fewer else self.starts
        for start in starts:
            yield start, torch.tensor([v.first > start.first for v in self.updates], dtype=torch.bool, device=self.t.device)

    def hits(self, start: _Value, made: Float[Tensor, "updates picked"], allowed: Tensor) -> list[int]:
        """The updates whose sums are the target, and not only because the states hardly change."""
        left, change = (self.t - made).norm(dim=-1), (self.t - start.picked).norm()
        rounding = _ROUNDING * torch.finfo(self.states.dtype).eps * self.t.norm()
        good = (left <= self.tolerance * self.t.norm()) & (left <= (_EXPLAINED * change).clamp(min=rounding)) & allowed
        return [int(index) for index in good.nonzero()[:, 0]]

    def is_sum(self, start: _Value, made: Tensor, exact: bool = False) -> bool:
        """Whether all numbers agree, and not only because the states hardly change; ``exact`` is up to rounding."""
        target, x = self.states.double(), start.states.double()
        left, change, size = (float(length(y.flatten())) for y in (target - made, target - x, target))
        rounding = _ROUNDING * torch.finfo(self.states.dtype).eps * size
        return left <= (rounding if exact else self.tolerance * size) and left <= max(_EXPLAINED * change, rounding)


_Found = Iterator[tuple[_Value, _Updates, Tensor]]


def _tangent(terms: _Terms) -> _Found:
    """Before + step·(the part of an update that is orthogonal to before), where the change is orthogonal and the update not."""
    one = terms.states.new_ones((), dtype=torch.float32)
    for start, later in terms.pairs(fewer=True):
        x = start.states.double()
        change = terms.states.double() - x
        if not bool(change.any()) or not _same(orthogonal_part(change, x), change):
            continue
        for update, after in zip(terms.updates, later, strict=True):
            u = update.states.double()
            across = orthogonal_part(u, x)
            if bool(after) and update.is_result and not _same(across, u):
                step = _tidy(torch.tensor(factor_between(change, across)), terms.states)
                if float(step.abs()) >= _SMALLEST and terms.is_sum(start, x + step * across):
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
            step, carry = _fit(terms.t, start.picked, terms.U, free)
            allowed = later & (step.abs() >= _SMALLEST) & (carry.abs() >= _SMALLEST)
            for index in terms.hits(start, carry[:, None] * start.picked + step[:, None] * terms.U, allowed):
                update = terms.updates[index]
                t, x, u = (states.double().flatten() for states in (terms.states, start.states, update.states))
                scale, kept = (_tidy(number[0], terms.states) for number in _fit(t, x, u[None], free))
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
            enough = (steps.abs() >= _SMALLEST).all()[None]
            if terms.hits(start, (start.picked + steps @ U)[None], enough):
                chosen = tuple((terms.updates[index], _tidy(steps[n], terms.states)) for n, index in enumerate(pair))
                if terms.is_sum(start, start.states + sum(step * update.states for update, step in chosen)):
                    yield start, chosen, one


def _channels(terms: _Terms) -> _Found:
    """Carry ⊙ before + step ⊙ update, a number for each channel; fitted to some of the states first."""
    count = terms.states.shape[0] * terms.states.shape[1]
    if count < _FEWEST:
        return
    some = slice(None, None, max(count // _FITTED, 1))
    target = terms.states.flatten(0, 1)[some].double()
    for start, later in terms.pairs(fewer=True):
        allowed = [update for update, after in zip(terms.updates, later, strict=True) if bool(after) and update.is_result]
        x = start.states.flatten(0, 1)[some].double()
        for update in allowed[:_MOST_ENDS]:
            u = update.states.flatten(0, 1)[some].double()
            step, carry = _fit_channels(x, u, target)
            small = min(float(step.abs().mean()), float(carry.abs().mean())) < _SMALLEST
            if small or not _same(target, carry * x + step * u):
                continue
            step, carry = _fit_channels(start.states.double(), update.states.double(), terms.states.double())
            if terms.is_sum(start, carry * start.states + step * update.states):
                yield start, ((update, _tidy(step, terms.states)),), _tidy(carry, terms.states)


def placement_of(block: Block, record: Record) -> tuple[Placement, Evidence]:
    """The slots of a block, and what they were seen by."""
    anatomy = _Anatomy(block, record)
    attention = next((a for a in anatomy.attended if not a.crosses), None)
    plain = Placement({}, {}, None)
    if attention is not None:
        heads, out = _head_norms(anatomy, attention), _output_projection(anatomy, attention)
        plain = replace(plain, head_norms=heads, scores=score_slot(attention.attention))
        plain = plain if out is None else _with_inside(plain, anatomy, attention, out)[0]
    sums = anatomy.sums()
    if anatomy.has_second_stream:
        return replace(plain, unclear="the block returns a second stream of hidden states"), Evidence({}, {})
    if not sums:
        added = "adds nothing that can be seen to its input" if sums == [] else "returns no sum of its input and of updates"
        return replace(plain, unclear=f"the block {added}"), Evidence({}, {})
    return _with_branches(plain, anatomy, sums)


def _with_branches(plain: Placement, anatomy: _Anatomy, sums: Sequence[_Sum]) -> tuple[Placement, Evidence]:
    """The placement with the sublayers of the sums, if these reproduce the block's output."""
    nothing = Evidence({}, {})
    branches: list[Branch] = []
    outputs: list[_Value] = []
    windows: list[tuple[int, int]] = []
    reads: dict[Site, States] = {}
    began = anatomy.block.call.began
    if not sums[0].updates:
        assert sums[0].stream is not None
        plain, sums = replace(plain, entry=_site(anatomy, sums[0].stream, None)), sums[1:]
    for total in sums:
        for number, (update, step) in enumerate(total.updates):
            made = _result(anatomy, update, total.before)
            if made is None or (made[2] is None and _is_unknown(made[0])):
                return replace(
                    plain, unclear="what a block adds is not what a module computed, nor a scale or norm of it"
                ), nothing
            result, computed, norm, scale = made
            window = (began, result.ended)
            reading = _reading(anatomy, total.before, window)
            if isinstance(reading, str):
                return replace(plain, unclear=reading), nothing
            calls = {"input": reading[0], "output": norm, "stream": total.stream}
            sites = {slot: _site(anatomy, call, None) for slot, call in calls.items() if call is not None}
            last = number == len(total.updates) - 1
            reader = _reader(anatomy, total.after, window[1]) if last else None
            scales = Scales(step * scale, total.carry)
            site = _site(anatomy, result, computed, received=result is norm)
            branches.append(Branch(sites, site, scales, reader, reading[1], parallel=number > 0, tangent=total.tangent))
            outputs.append(computed)
            if reading[0] is not None and (read := anatomy.value_of(reading[0].outputs[0])) is not None:
                reads[sites["input"]] = read.states
                known = known_norm(reading[0].module, read.states.shape[-1], read.states.device)
                if known is None or not _same(known(total.before.states), read.states):
                    return replace(plain, unclear=_NEITHER), nothing
            windows.append(window)
            began = window[1]
    names = _names(anatomy, windows, branches)
    if isinstance(names, str):
        return replace(plain, unclear=names), nothing
    if _adds_nothing(anatomy, sums, windows):
        return replace(plain, unclear="a sublayer adds nothing that can be seen"), nothing
    for number, name in enumerate(names):
        inner = None
        if name == "attention":
            plain, inner = _with_output_projection(plain, anatomy, windows[number], branches[number])
        elif name == "feedforward":
            out = _product_of(anatomy, branches[number], windows[number])
            inner = None if out is None else norm_before(anatomy.calls, out, windows[number])
        if inner is not None and _site(anatomy, inner, None) != branches[number].norms.get("input"):
            norms = {**branches[number].norms, "inner": _site(anatomy, inner, None)}
            branches[number] = replace(branches[number], norms=norms)
    inputs = {site.module for site in reads}
    latent = any(call.is_norm and call.module not in inputs and anatomy.is_read(call) for call in anatomy.before_attention)
    evidence = Evidence({name: value.states for name, value in zip(names, outputs, strict=True)}, reads, latent)
    placement = replace(plain, branches=dict(zip(names, branches, strict=True)), note=_note(names))
    return proved(placement, anatomy.block.input, evidence.results, anatomy.block.output), evidence


def _adds_nothing(anatomy: _Anatomy, sums: Sequence[_Sum], windows: Sequence[tuple[int, int]]) -> bool:
    """Whether something is computed of the states after attention, or after the last sum, that reaches no sum."""
    shaped = [call for call in anatomy.calls if _computes(call) and any(anatomy.value_of(x) for x in call.outputs)]
    if any(call.began > windows[-1][1] for call in shaped):
        return True
    starts = [total.before for total in sums for _ in total.updates]
    for (began, ended), before in zip(windows, starts, strict=True):
        times = [attended.time for attended in anatomy.attended if began < attended.time < ended]
        if times and any(min(times) < call.began < ended and (_computes(call) or call.is_norm) for call in before.received):
            return True
    return False


def _with_output_projection(
    plain: Placement, anatomy: _Anatomy, window: tuple[int, int], branch: Branch
) -> tuple[Placement, Call | None]:
    """W_O is the product that gives the output of attention; and the norm before it, if there is one."""
    attended = next(a for a in anatomy.attended if not a.crosses)
    call = _product_of(anatomy, branch, window)
    if call is None or call.inputs[0].numel() != attended.mixed.numel():
        call = _output_projection(anatomy, attended)
    return (plain, None) if call is None else _with_inside(plain, anatomy, attended, call)


def _product_of(anatomy: _Anatomy, branch: Branch, window: tuple[int, int]) -> Call | None:
    """The product that computed the output of a sublayer; None if something else did."""
    call = next((c for c in anatomy.calls if c.module is branch.result.module and c.ended == window[1]), None)
    return call if call is not None and call.is_product and call.inputs else None


def _with_inside(plain: Placement, anatomy: _Anatomy, attended: Attended, out: Call) -> tuple[Placement, Call | None]:
    """The placement with W_O and the gate before it; and the norm before it."""
    inside = before_output([c for c in anatomy.calls if c.began < out.began], attended.mixed, out)
    gate = "sigmoid" if inside.gated else "none"
    return replace(plain, output_projection=out.module, changed=inside != Inside(), gate=gate), inside.norm


def proved(placement: Placement, x: States, results: Mapping[str, States], y: States) -> Placement:
    """The placement with its error, of the block's output y made of its input x and what its sublayers computed.

    It is unclear if the error is larger than the rounding of the precision allows. The norms are ours, with the parameters of
    the model's: nothing of the block is run.
    """
    entry = None if placement.entry is None else known_norm(placement.entry.module, x.shape[-1], x.device)
    before = made = x if entry is None else entry(x)
    for name, branch in placement.branches.items():
        sites = {slot: branch.norms[slot] for slot in ("input", "output", "stream") if slot in branch.norms}
        known = {slot: known_norm(site.module, x.shape[-1], x.device) for slot, site in sites.items()}
        if None in known.values() or (entry is None and placement.entry is not None):
            return replace(placement, branches={}, unclear=_NEITHER, error=None)
        update = Update(output=known.get("output"), stream=known.get("stream"), step=branch.scales.step, tangent=branch.tangent)
        made = (made if branch.parallel else branch.scales.carry * before) + update.written(before, results[name])
        if not placement.shares(name, later=True):
            before = made = update.settle(made)
    error = float(length((made - y).double().flatten()) / length(y.double().flatten()))
    error = max(error, placement.error or 0.0)
    if error <= max(_NEAR, torch.finfo(x.dtype).eps):
        return replace(placement, error=error)
    unclear = f"updates with the slots that were seen miss the block's output by {error:.1e} of its norm"
    return replace(placement, branches={}, unclear=unclear, error=None)


def _note(names: Sequence[str]) -> str:
    """What a block has besides."""
    if "further" not in names:
        return ""
    early = "attention" in names and names.index("further") < names.index("attention")
    return f"a further sublayer {'precedes attention' if early else 'follows the feed-forward layer'}"


def _is_unknown(call: Call) -> bool:
    """Whether a module that is no product, norm or scale has parameters, and so may be any of them in another form."""
    return call.is_leaf and not _computes(call) and any(True for _ in call.module.parameters())


def _names(anatomy: _Anatomy, windows: Sequence[tuple[int, int]], branches: Sequence[Branch]) -> list[str] | str:
    """The names of sublayers by what runs in their windows of time; or why there are none."""
    names: list[str] = []
    for began, ended in windows:
        inside = [a for a in anatomy.attended if began < a.time < ended]
        names.append("cross" if inside and all(a.crosses for a in inside) else "attention" if inside else "")
    others = [position for position, name in enumerate(names) if not name]
    attention = names.index("attention") if "attention" in names else -1
    beside = attention > 0 and branches[attention].parallel  # something mixes tokens beside attention
    kinds = ["feedforward", "further"]
    if attention < 0 or (beside and others and others[0] < attention):
        kinds = ["mixer", *kinds]
    elif len(others) > 1 and others[0] < attention:
        kinds = ["further", "feedforward"]
    if len(others) > len(kinds) or any(names.count(kind) > 1 for kind in ("attention", "cross")):
        return f"the block has {len(windows)} sublayers, more than attention, a mixer and a feed-forward layer"
    for position, kind in zip(others, kinds, strict=False):
        names[position] = kind
    return names


def _result(anatomy: _Anatomy, update: _Value, before: _Value) -> tuple[Call, _Value, Call | None, Tensor] | None:
    """The call that computed an update, what it computed, the output norm after it, and the scale of each channel between.

    Where no call returned what the output norm receives, the call is the norm. None if the update passes through a module
    without parts, such as dropout, and is neither what a module computed nor a scale of that.
    """
    scale, norm = update.states.new_ones((), dtype=torch.float32), None
    while True:
        call = min(update.returned, key=lambda call: (call.ended, -call.began))
        source = anatomy.value_of(call.inputs[0]) if call.inputs else None
        if _computes(call) or not call.is_leaf or norm is not None:
            return call, update, norm, scale
        if source is not None and source in (anatomy.x, before):
            return None if call.is_norm or update is source else (call, update, norm, scale)
        if source is None:
            return None
        if call.is_norm:
            norm, update = call, source
            if not source.returned:
                return norm, source, norm, scale
            continue
        if source is not update:
            factor = _channel_scale(source.states, update.states)
            if factor is None:
                return (call, update, norm, scale) if source.returned else None
            scale, update = scale * factor, source
        if not update.returned or call in update.returned:
            scaled = _scaled_from(anatomy, update, call)
            if scaled is None:
                return (call, update, norm, scale) if _is_rearranged(anatomy, update, call) else None
            scale, update = scale * scaled[0], scaled[1]


def _scaled_from(anatomy: _Anatomy, value: _Value, receiver: Call) -> tuple[Tensor, _Value] | None:
    """The scale and the value of a computed result that a module received times that scale; None if there is none."""
    for other in sorted(anatomy.values, key=lambda v: -v.first):
        if other is not value and other.computed and other.first < receiver.began:
            factor = _channel_scale(other.states, value.states)
            if factor is not None:
                return factor, other
    return None


def _is_rearranged(anatomy: _Anatomy, value: _Value, receiver: Call) -> bool:
    """Whether a value has the numbers of a result in another order, as the windows of an image do."""
    numbers = value.states.flatten().sort().values
    results = (x for call in anatomy.calls if call.ended < receiver.began and _computes(call) for x in call.outputs)
    return any(x.numel() == len(numbers) and torch.equal(x.flatten().sort().values, numbers) for x in results)


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
        plain = all(map(_is_affine, direct))
        return (None, 1.0) if plain else f"what a {type(direct[0].module).__name__} reads of the states is unknown"
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


def _is_affine(call: Call) -> bool:
    """Whether a module is a convolution, or returned the product of its input and its weight, plus a bias."""
    if isinstance(call.module, nn.modules.conv._ConvNd):
        return True
    stored, x, y = getattr(call.module, "weight", None), call.inputs[0], call.outputs[0]
    weight = weight_of(call.module) if isinstance(stored, Tensor) and stored.ndim == 2 and not stored.is_meta else None
    if weight is None:
        return isinstance(call.module, nn.Linear)
    weight = weight.to(x)
    W = weight if weight.shape[0] == x.shape[-1] and weight.shape[1] == y.shape[-1] else weight.mT
    for matrix in (W, W.mT) if W.shape[0] == W.shape[1] else (W,):
        if matrix.shape == (x.shape[-1], y.shape[-1]):
            rest = (y - x @ matrix).flatten(0, -2).double()
            if float((rest - rest[:1]).norm()) <= _AFFINE * float(y.double().norm()):
                return True
    return False


def _computes(call: Call) -> bool:
    """Whether a module without parts has parameters of two axes or more: a product, a convolution, experts."""
    return call.is_leaf and any(parameter.ndim > 1 for parameter in call.module.parameters())


def _reader(anatomy: _Anatomy, after: _Value, time: int) -> Site | None:
    """The first call after a time that reads some states."""
    call = min((call for call in after.received if call.began >= time), key=lambda call: call.began, default=None)
    return None if call is None else _site(anatomy, call, after, received=True)


def _site(anatomy: _Anatomy, call: Call, value: _Value | None, received: bool = False) -> Site:
    """A call by its module and its number among the calls of that module in the block, and which of its tensors is a value."""
    nth = sum(other.module is call.module and other.began < call.began for other in anatomy.calls)
    tensors = call.inputs if received else call.outputs
    place = 0 if value is None else next(n for n, x in enumerate(tensors) if anatomy.value_of(x) is value)
    return Site(call.module, nth, received, place)


def _output_projection(anatomy: _Anatomy, attended: Attended) -> Call | None:
    """The product that reads the mixed values, or in the attention module what a norm or gate makes of them."""
    products = [c for c in anatomy.calls if c.is_product and c.began > attended.time and c.inputs and c.outputs]
    plain = [c for c in products if _same(c.inputs[0], attended.mixed)]
    inside = [c for c in products if attended.within.holds(c) and c.inputs[0].numel() == attended.mixed.numel()]
    return next((c for c in plain + inside if c.outputs[0].numel() == anatomy.block.input.numel()), None)


def _head_norms(anatomy: _Anatomy, attended: Attended) -> dict[str, nn.Module]:
    """Norms between the projections and attention, by letter: by their names, else by the size of what they return."""
    norms: dict[str, nn.Module] = {}
    attention = attended.attention
    sizes = {"q": attention.q, "k": _unshared(attention.k, attention), "v": _unshared(attention.v, attention)}
    for call in anatomy.calls:
        if not call.is_norm or call.ended > attended.time or anatomy.is_read(call):
            continue
        match = _HEAD_NORM.fullmatch(call.name.rpartition(".")[2])
        made = call.outputs[0].double().flatten()
        letters = [
            letter
            for letter, x in sizes.items()
            if x.numel() == made.numel() and abs(float(length(x.double().flatten()) / length(made)) - 1) < _NEAR
        ]
        named = (match[1] or match[5]) if match else ""
        chosen = named if named and (not letters or set(named) & set(letters)) else letters[0] if letters else ""
        norms |= dict.fromkeys(chosen, call.module)
    return norms


def _unshared(x: Tensor, attention: AttentionCall) -> Tensor:
    """Keys or values without the repetition for the queries that share them."""
    return x[:, :: max(attention.q.shape[1] // max(attention.kv_heads, 1), 1)]


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


def fitted(before: States, added: States, total: States, by_channel: bool) -> Scales:
    """The scales of total = carry·before + step·added in one pass: least squares, a number or one for each channel."""
    x, u, target = (y.double().flatten(0, -2) for y in (before, added, total))
    over = (0,) if by_channel and len(x) >= _FEWEST else (0, 1)
    step, carry = _solve(*((a * b).sum(over) for a, b in ((x, x), (x, u), (u, u), (x, target), (u, target))))
    return Scales(step.float(), carry.float())


def _tidy(scale: Tensor, states: Tensor) -> Tensor:
    """A scale as precise as its fit: equal channels are one number, and 1 up to rounding is 1."""
    scale = scale.float()
    scale = scale.mean() if scale.ndim and bool((scale - scale.mean()).abs().max() < _ALIKE * scale.mean().abs()) else scale
    one = not scale.ndim and abs(float(scale) - 1) < _ONE
    return (torch.ones_like(scale) if one else scale).to(states.device)


def rounded(scale: Tensor) -> float:
    """A fitted scale with five digits."""
    return float(f"{float(scale):.5g}")


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to the rounding of their precision."""
    if a.numel() != b.numel():
        return False
    near = max(_NEAR, torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return same(a.flatten().double(), b.flatten().double(), near)
