"""Where a block normalises and what it adds to the stream, identified from one forward pass: whose output is whose input.

A forward pass of a few tokens records input and output of every module of a block. A norm of the block's input whose output is
the input of attention is an input norm; a norm of attention's output is an output norm; a norm of their sum that the stream
continues with is a stream norm. Branch and residual scale are fitted: after = carry·before + step·update. Class names decide
only which modules are norms, and attribute names which of them are norms of q, k and v.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normscope.core.norms import factor_between, same
from normscope.schemes import NAMED, Expression, Scheme, Slots

_HEAD_NORM = re.compile(r"(qk|q|k|v)(uery|ey|alue)?_?(layer_?)?norm")
_NEAR = 1e-4
_SMALLEST = 1e-3


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by the name of its class; one with parts is not, whatever it is called."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its input, its output, and how many calls in the block had ended when it began."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor
    began: int = 0

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm that keeps the shape of its input."""
        return is_norm(self.module) and self.input.shape == self.output.shape

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product."""
        weight = getattr(self.module, "weight", None)
        return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(self.module, nn.Embedding)


@dataclass(frozen=True)
class BlockRecord:
    """The forward pass of a block: its input and output, the input and mixed values of attention, and every call in order.

    ``attention`` is the name of the attention module; ``attended`` the number of calls before it mixed its values.
    """

    attention: str
    input: Tensor
    output: Tensor
    attention_input: Tensor
    mixed: Tensor
    calls: Sequence[Call]
    attended: int

    @property
    def reached(self) -> list[Tensor]:
        """The states after attention that are visible: what modules read, and the block's output."""
        visible = [*(c.input for c in self.calls if c.began >= self.attended), self.output]
        return [x.reshape_as(self.input) for x in visible if x.numel() == self.input.numel()]


@dataclass(frozen=True)
class Scales:
    """The fitted branch and residual scale of a sublayer, each a number or one for each channel."""

    step: Tensor
    carry: Tensor

    def __call__(self, states: Tensor, update: Tensor) -> Tensor:
        """carry·states + step·update."""
        return self.carry * states + self.step * update


@dataclass(frozen=True)
class Branch:
    """A sublayer in the modules of its block.

    Attributes:
        norms: by slot, ``input``, ``output`` and ``stream``.
        result: the module whose output is that of the sublayer, before any output norm.
        scales: of its update and of the residual.
        reader: the first module that reads the states after the sublayer; None if the block returns them, or adds the updates
            of both sublayers at once.
    """

    norms: dict[str, nn.Module]
    result: nn.Module
    scales: Scales
    reader: nn.Module | None = None

    def slots(self, heads: str = "none") -> Slots:
        """Which slots are filled."""
        norms = {slot: "norm" if slot in self.norms else "none" for slot in ("input", "output", "stream")}
        if self.scales.step.ndim or self.scales.carry.ndim:
            lerp = bool(self.scales.carry.ndim) and _same(self.scales.carry, 1 - self.scales.step)
            return Slots(heads=heads, step="alpha", carry="1 - alpha" if lerp else _rounded(self.scales.carry.mean()), **norms)
        return Slots(heads=heads, step=_rounded(self.scales.step), carry=_rounded(self.scales.carry), **norms)


@dataclass(frozen=True)
class Placement:
    """The slots of a block, which module fills which, and what else was observed.

    Attributes:
        branches: attention and feed-forward layer by name; empty if they could not be identified.
        head_norms: norms of q, k and v by letter.
        output_projection: the module of W_O.
        changed: whether a norm or gate changes the mixed values of attention before W_O.
        parallel: whether attention and feed-forward layer read the same states.
        note: what the block does besides.
        unclear: why the branches could not be identified; empty if they were.
    """

    branches: dict[str, Branch]
    head_norms: dict[str, nn.Module]
    output_projection: nn.Module | None
    changed: bool = False
    parallel: bool = False
    note: str = ""
    unclear: str = ""

    @property
    def letters(self) -> str:
        """Which of q, k and v are normalised."""
        return "".join(letter for letter in "qkv" if letter in self.head_norms) or "none"

    @property
    def norms(self) -> dict[tuple[str, str], nn.Module]:
        """Norms of the stream by sublayer and slot."""
        return {(name, slot): norm for name, branch in self.branches.items() for slot, norm in branch.norms.items()}


def placement_of(block: BlockRecord) -> Placement:
    """The slots of a block."""
    heads = _head_norms(block)
    out = _output_projection(block)
    if out is None:
        return Placement({}, heads, None, unclear="the mixed values of attention enter no matrix product")
    changed = not _same(out.input, block.mixed)
    x, after = block.input, [c for c in block.calls[block.calls.index(out) + 1 :] if c.is_product]
    if not after:
        return Placement({}, heads, out.module, changed, unclear="no feed-forward layer follows attention in its block")
    read = _through(block, x, block.attention_input)
    if read is None:
        unclear = "attention reads neither the block's input nor a norm of it"
        return Placement({}, heads, out.module, changed, unclear=unclear)
    update, output = _updated(block, out.output)
    scales = _scales(x, update, block.reached)
    for settled, stream in _settled(block, scales(x, update.reshape_as(x))):
        for last in _results(block, after):
            branch_and_note = _feedforward(block, settled, last, stream is not None)
            if branch_and_note is None:
                continue
            feed, note = branch_and_note
            for start, parallel in ((settled, False), (x, True)):
                feed_read = _through(block, start, after[0].input)
                if feed_read is not None:
                    norms = _modules(input=read, output=output, stream=stream)
                    attention = Branch(norms, out.module, scales, None if parallel else _reader(block, settled))
                    feed = replace(feed, norms=_modules(input=feed_read) | feed.norms)
                    branches = {"attention": attention, "feedforward": feed}
                    return Placement(branches, heads, out.module, changed, parallel, note)
    unclear = "the block's output is not a sum of its input and the updates of its sublayers"
    return Placement({}, heads, out.module, changed, unclear=unclear)


def _output_projection(block: BlockRecord) -> Call | None:
    """The product that reads the mixed values, or in the attention module what a norm or gate makes of them."""
    products = [c for c in block.calls[block.attended :] if c.is_product]
    plain = [c for c in products if _same(c.input, block.mixed)]
    inside = [c for c in products if c.name.startswith(f"{block.attention}.") and c.input.numel() == block.mixed.numel()]
    return next((c for c in plain + inside if c.output.numel() == block.input.numel()), None)


def _settled(block: BlockRecord, total: Tensor) -> Iterator[tuple[Tensor, Call | None]]:
    """The states after attention, without and with a norm of the stream."""
    yield total, None
    norm = _norm_of(block, total)
    if norm is not None:
        yield norm.output, norm


def _feedforward(block: BlockRecord, settled: Tensor, last: Call, normalised: bool) -> tuple[Branch, str] | None:
    """The feed-forward branch that ends with a call, and a note; None if the block does not continue with its sum."""
    update, output = _updated(block, last.output)
    if update.numel() != settled.numel():
        return None
    update = update.reshape_as(settled)
    scales = _scales(settled, update, block.reached)
    total, norm = scales(settled, update), None
    if normalised:
        norm = _norm_of(block, total)
        if norm is None:
            return None
    end = total if norm is None else norm.output
    norms = _modules(output=output, stream=norm)
    factor = factor_between(block.output, end)
    if _same(block.output, factor * end):
        note = "" if abs(factor - 1) < _SMALLEST else f"every block multiplies its output by {factor:.4g}"
        return Branch(norms, last.module, scales), note
    if any(c.is_product and _same(c.input, end) for c in block.calls):
        return Branch(norms, last.module, scales, _reader(block, end)), "a further sublayer follows the feed-forward layer"
    return None


def scheme_of(placement: Placement, kind: str) -> Scheme | None:
    """The named scheme with these slots, or one without a name; ``kind`` is its norm. None if the slots are unknown."""
    if placement.unclear:
        return None
    attention, feedforward = placement.branches["attention"], placement.branches["feedforward"]
    learned = [branch.scales.step.mean() for branch in (attention, feedforward) if branch.scales.step.ndim]
    scheme = _named(attention.slots(placement.letters), feedforward.slots(), kind)
    return replace(scheme, alpha=_rounded(learned[0])) if learned else scheme


def _named(attention: Slots, feedforward: Slots, kind: str) -> Scheme:
    """The scheme of the slots of both sublayers."""
    named = [scheme for scheme in NAMED.values() if scheme.then is None and scheme.weights == "free"]
    for slots, heads in ((attention, "none"), (replace(attention, heads="none"), attention.heads)):
        for scheme in named:
            if (scheme.attention, scheme.feedforward) == (slots, feedforward):
                return (scheme if heads == "none" else scheme.with_heads(heads)).with_norm(kind)
    step = Expression.parse(attention.step).text
    if attention.step == feedforward.step and step != "1":
        like = _named(replace(attention, step=1.0), replace(feedforward, step=1.0), kind)
        title = f"{like.title}, every update times {step}"
        return replace(like, name=f"{like.name}*{step}", attention=attention, feedforward=feedforward, title=title)
    return Scheme("unnamed", attention, feedforward, title="a placement without a name").with_norm(kind)


def _head_norms(block: BlockRecord) -> dict[str, nn.Module]:
    """Norms between the projections and attention, by letter."""
    norms: dict[str, nn.Module] = {}
    for call in block.calls[: block.attended]:
        parent, _, name = call.name.rpartition(".")
        match = _HEAD_NORM.fullmatch(name)
        if match and call.is_norm and parent == block.attention:
            norms |= dict.fromkeys(match[1], call.module)
    return norms


def _through(block: BlockRecord, states: Tensor, read: Tensor) -> "Call | bool | None":
    """How ``read`` comes from the states: True if it is them, the call of the norm between, None if neither."""
    norm = next((c for c in block.calls if c.is_norm and _same(c.input, states) and _same(c.output, read)), None)
    return norm or _same(read, states) or None


def _updated(block: BlockRecord, output: Tensor) -> tuple[Tensor, Call | None]:
    """What a sublayer adds to the stream before any scale, and the output norm between."""
    norm = _norm_of(block, output)
    return (output, None) if norm is None else (norm.output, norm)


def _modules(**calls: "Call | bool | None") -> dict[str, nn.Module]:
    """The norms among calls by slot."""
    return {slot: call.module for slot, call in calls.items() if isinstance(call, Call)}


def _scales(states: Tensor, update: Tensor, reached: list[Tensor]) -> Scales:
    """The scales for which carry·states + step·update is one of the states that were reached; 1 and 1 if there are none.

    Tried in this order: a step with carry 1, two numbers, a number for each channel.
    """
    states64, update64 = states.double(), update.reshape_as(states).double()
    for fit in (_fit_step, _fit_both, _fit_channels):
        for target in reached:
            step, carry = fit(states64, update64, target.double())
            small = min(float(step.abs().mean()), float(carry.mean())) < _SMALLEST
            if not small and _same(target, carry * states64 + step * update64):
                return Scales(*(_tidy(scale, states.dtype).to(states.device) for scale in (step, carry)))
    return Scales(states.new_ones(()), states.new_ones(()))


def _fit_step(x: Tensor, u: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares of target = x + step·u."""
    return ((target - x) * u).sum() / u.square().sum(), x.new_ones(())


def _fit_both(x: Tensor, u: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares of target = carry·x + step·u."""
    return _solve(*((a * b).sum() for a, b in ((x, x), (x, u), (u, u), (x, target), (u, target))))


def _fit_channels(x: Tensor, u: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same for each channel."""
    x, u, target = (y.flatten(0, -2) for y in (x, u, target))
    return _solve(*((a * b).sum(0) for a, b in ((x, x), (x, u), (u, u), (x, target), (u, target))))


def _solve(xx: Tensor, xu: Tensor, uu: Tensor, xt: Tensor, ut: Tensor) -> tuple[Tensor, Tensor]:
    """The normal equations of two unknowns."""
    determinant = xx * uu - xu.square()
    step, carry = (xx * ut - xu * xt) / determinant, (uu * xt - xu * ut) / determinant
    return step.nan_to_num(0.0), carry.nan_to_num(0.0)


def _tidy(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale as precise as its fit: 1 up to rounding is 1, equal channels are one number, half precision has two digits."""
    scale = scale.float() if torch.finfo(dtype).bits >= 32 else scale.float().round(decimals=2)
    scale = scale.mean() if scale.ndim and bool((scale - scale.mean()).abs().max() < _SMALLEST * scale.mean().abs()) else scale
    return torch.ones_like(scale) if bool(((scale - 1).abs() < _SMALLEST).all()) and not scale.ndim else scale


def _rounded(scale: Tensor) -> float:
    return round(float(scale), 4)


def _norm_of(block: BlockRecord, states: Tensor) -> Call | None:
    return next((c for c in block.calls if c.is_norm and _same(c.input, states)), None)


def _reader(block: BlockRecord, states: Tensor) -> nn.Module | None:
    """The first module after attention that reads the states."""
    return next((c.module for c in block.calls if c.began >= block.attended and _same(c.input, states)), None)


def _results(block: BlockRecord, after: list[Call]) -> list[Call]:
    """The calls that may end the feed-forward layer: its last product, or a part that holds several."""
    parts = [c for c in reversed(block.calls) if c.began > block.attended and c.output.numel() == block.input.numel()]
    first = {c.module: c for c in reversed(block.calls)}  # hooks take the first call of a module
    return [c for c in (after[-1], *parts) if first[c.module] is c and not c.is_norm]


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to the rounding of their precision."""
    if a.numel() != b.numel():
        return False
    near = max(_NEAR, torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return same(a.flatten().double(), b.flatten().double(), near)
