"""Where a block normalises, found by watching it run: whose output is whose input.

One forward pass of a few tokens records what every leaf module of a block read and wrote. A norm that reads the block's input
and writes what attention reads is an input norm; one that reads what attention wrote is an output norm; one that reads their
sum, and is what the stream goes on with, is a norm of the stream. Names tell only which modules are norms, and whose.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from normscope.schemes import NAMED, Expression, Scheme, Slots

_HEAD_NORM = re.compile(r"(q|k|v)(uery|ey|alue)?_?(layer_?)?norm")
_NEAR = 1e-4
_SMALLEST_STEP = 1e-3


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: what it read and what it wrote."""

    name: str
    module: nn.Module
    read: Tensor
    wrote: Tensor

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm, by the name of its class."""
        return "norm" in type(self.module).__name__.lower()

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product."""
        weight = getattr(self.module, "weight", None)
        return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(self.module, nn.Embedding)


@dataclass(frozen=True)
class BlockRecord:
    """A block's run: its input and output, what attention read and mixed, and every call of its leaves and parts in order.

    ``attended`` is the number of calls before attention mixed its values.
    """

    entered: Tensor
    left: Tensor
    read: Tensor
    mixed: Tensor
    calls: Sequence[Call]
    attended: int


@dataclass(frozen=True)
class Placement:
    """The slots of a block, which norm fills which, and what else was seen.

    Attributes:
        norms: by slot, ``attention.input`` and so on.
        head_norms: by letter.
        parallel: whether attention and feed-forward layer read the same states.
        note: what the block does besides.
        unclear: why the slots could not be told; empty if they could.
    """

    attention: Slots
    feedforward: Slots
    norms: dict[str, nn.Module]
    head_norms: dict[str, nn.Module]
    output_projection: nn.Module | None
    parallel: bool = False
    note: str = ""
    unclear: str = ""


def placement_of(block: BlockRecord) -> Placement:
    """The slots of a block."""
    heads = _head_norms(block)
    letters = "".join(letter for letter in "qkv" if letter in heads) or "none"
    out = next((c for c in block.calls[block.attended :] if c.is_product and _same(c.read, block.mixed)), None)
    if out is None:
        return _unclear("what attention mixes goes into no matrix product", letters, heads)
    x, after = block.entered, [c for c in block.calls[block.calls.index(out) + 1 :] if c.is_product]
    if not after:
        return _unclear("no feed-forward layer follows attention in its block", letters, heads, out.module)

    read = _through(block, x, block.read)
    if read is None:
        return _unclear("attention reads neither the block's input nor a norm of it", letters, heads, out.module)
    written, output = _written(block, out.wrote)
    step = _step(x, written.reshape_as(x), [*(c.read for c in block.calls if c.is_norm), block.left])
    total = x + step * written.reshape_as(x)
    sequential = _norm_of(block, total)
    for settled, stream in [(total, None)] + ([(sequential.wrote, sequential)] if sequential else []):
        for last in _outputs(block, after):
            wrote, feed_output = _written(block, last)
            if wrote.numel() != x.numel():
                continue
            wrote = wrote.reshape_as(x)
            feed_step = _step(settled, wrote, [*(c.read for c in block.calls if c.is_norm), block.left])
            end, ends = settled + feed_step * wrote, None
            if stream is not None:
                ends = _norm_of(block, end)
                end = end if ends is None else ends.wrote
            note = _goes_on(block, end)
            if (stream is None) != (ends is None) or note is None:
                continue
            for start, parallel in ((settled, False), (x, True)):
                feed_read = _through(block, start, after[0].read)
                if feed_read is None:
                    continue
                found = {"attention.input": read, "attention.output": output, "attention.stream": stream}
                found |= {"feedforward.input": feed_read, "feedforward.output": feed_output}
                found |= {"feedforward.stream": ends}
                norms = {slot: call.module for slot, call in found.items() if isinstance(call, Call)}
                attention = _slots("attention", norms, step, letters)
                return Placement(attention, _slots("feedforward", norms, feed_step), norms, heads, out.module, parallel, note)
    return _unclear("the block's output is not the sum of its input and what its sublayers write", letters, heads, out.module)


def scheme_of(placement: Placement, kind: str) -> Scheme:
    """The named scheme with these slots, or one of no name; ``kind`` is its norm."""
    attention, feedforward = placement.attention, placement.feedforward
    named = [scheme for scheme in NAMED.values() if scheme.then is None and scheme.weights == "free"]
    for slots, heads in ((attention, "none"), (replace(attention, heads="none"), attention.heads)):
        for scheme in named:
            if (scheme.attention, scheme.feedforward) == (slots, feedforward):
                return (scheme if heads == "none" else scheme.with_heads(heads)).with_norm(kind)
    step = Expression.parse(attention.step).text
    if attention.step == feedforward.step and step != "1":
        unscaled = replace(placement, attention=replace(attention, step=1.0), feedforward=replace(feedforward, step=1.0))
        like = scheme_of(unscaled, kind)
        title = f"{like.title}, every write times {step}"
        return replace(like, name=f"{like.name}*{step}", attention=attention, feedforward=feedforward, title=title)
    return Scheme("unnamed", attention, feedforward, title="a placement without a name").with_norm(kind)


def _slots(sublayer: str, norms: dict[str, nn.Module], step: float, heads: str = "none") -> Slots:
    input_, output, stream = ("norm" if f"{sublayer}.{slot}" in norms else "none" for slot in ("input", "output", "stream"))
    return Slots(input_, heads, output, step, stream=stream)


def _unclear(why: str, letters: str, heads: dict[str, nn.Module], out: nn.Module | None = None) -> Placement:
    return Placement(Slots(heads=letters), Slots(), {}, heads, out, unclear=why)


def _head_norms(block: BlockRecord) -> dict[str, nn.Module]:
    """Norms between the projections and attention, by letter."""
    found = {}
    for call in block.calls[: block.attended]:
        match = _HEAD_NORM.fullmatch(call.name.rsplit(".", 1)[-1])
        if match and call.is_norm:
            found[match[1]] = call.module
    return found


def _through(block: BlockRecord, states: Tensor, read: Tensor) -> "Call | bool | None":
    """How ``read`` comes from the states: True if it is them, the call of the norm between, None if neither."""
    if _same(read, states):
        return True
    return next((c for c in block.calls if c.is_norm and _same(c.read, states) and _same(c.wrote, read)), None)


def _written(block: BlockRecord, wrote: Tensor) -> tuple[Tensor, Call | None]:
    """What a sublayer adds to the stream, and the output norm it goes through."""
    norm = _norm_of(block, wrote)
    return (wrote, None) if norm is None else (norm.wrote, norm)


def _step(states: Tensor, written: Tensor, reached: list[Tensor]) -> float:
    """The factor s for which states + s·written is one of the states that were reached; 1 if none is."""
    for target in reached:
        if target.numel() == states.numel():
            step = float(((target.reshape_as(states) - states) * written).sum() / written.square().sum())
            if abs(step) > _SMALLEST_STEP and _same(target, states + step * written):
                return 1.0 if abs(step - 1) < _SMALLEST_STEP else round(step, 4)
    return 1.0


def _norm_of(block: BlockRecord, states: Tensor) -> Call | None:
    return next((c for c in block.calls if c.is_norm and _same(c.read, states)), None)


def _outputs(block: BlockRecord, after: list[Call]) -> list[Tensor]:
    """What the feed-forward layer may have written: its last product's output, or that of a part that holds several."""
    parts = [c.wrote for c in reversed(block.calls) if c.wrote.numel() == block.entered.numel() and not c.is_norm]
    return [after[-1].wrote, *parts]


def _goes_on(block: BlockRecord, states: Tensor) -> str | None:
    """How the states go on: empty if they leave the block, else what happens to them; None if they go nowhere."""
    factor = float((block.left * states).sum() / states.square().sum())
    if _same(block.left, factor * states):
        return "" if abs(factor - 1) < _SMALLEST_STEP else f"every block multiplies its output by {factor:.4g}"
    read = any(c.is_product and _same(c.read, states) for c in block.calls)
    return "a further sublayer follows the feed-forward layer" if read else None


def _same(a: Tensor, b: Tensor) -> bool:
    if a.numel() != b.numel():
        return False
    a, b = a.flatten().float(), b.flatten().float()
    return bool((a - b).norm() <= _NEAR * b.norm())
