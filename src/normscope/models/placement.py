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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from normscope.core.norms import factor_between, length
from normscope.models.attention_interface import AttentionCall
from normscope.models.blocks import Block
from normscope.models.fits import NEAR, SMALLEST, Scales, States, agree, channel_scale, rounded
from normscope.models.hooks import Site
from normscope.models.inside import Inside, before_output, norm_before, score_slot
from normscope.models.norm_modules import known_norm
from normscope.models.offload import weight_of
from normscope.models.record import Attended, Call, Record
from normscope.models.sums import Anatomy, Sum, Value, computes
from normscope.schemes import Slots
from normscope.schemes.update import Update

_HEAD_NORM = re.compile(r"(qk|q|k|v)(uery|ey|alue)?_?(layer_?)?(norm|ln)|norm_?(qk|q|k|v)")
_AFFINE = 1e-3  # of a product whose own arithmetic may be half precision
_NEITHER = "a norm is neither LayerNorm nor RMSNorm"


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
        return bool(self.scales.step.any()) and not bool((carry == 1).all()) and agree(carry, rest + torch.zeros_like(carry))

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


def placement_of(block: Block, record: Record) -> tuple[Placement, Evidence]:
    """The slots of a block, and what they were seen by."""
    anatomy = Anatomy(block, record)
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


def _with_branches(plain: Placement, anatomy: Anatomy, sums: Sequence[Sum]) -> tuple[Placement, Evidence]:
    """The placement with the sublayers of the sums, if these reproduce the block's output."""
    nothing = Evidence({}, {})
    branches: list[Branch] = []
    outputs: list[Value] = []
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
                if known is None or not agree(known(total.before.states), read.states):
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


def _adds_nothing(anatomy: Anatomy, sums: Sequence[Sum], windows: Sequence[tuple[int, int]]) -> bool:
    """Whether something is computed of the states after attention, or after the last sum, that reaches no sum."""
    shaped = [call for call in anatomy.calls if computes(call) and any(anatomy.value_of(x) for x in call.outputs)]
    if any(call.began > windows[-1][1] for call in shaped):
        return True
    starts = [total.before for total in sums for _ in total.updates]
    for (began, ended), before in zip(windows, starts, strict=True):
        times = [attended.time for attended in anatomy.attended if began < attended.time < ended]
        if times and any(min(times) < call.began < ended and (computes(call) or call.is_norm) for call in before.received):
            return True
    return False


def _with_output_projection(
    plain: Placement, anatomy: Anatomy, window: tuple[int, int], branch: Branch
) -> tuple[Placement, Call | None]:
    """W_O is the product that gives the output of attention; and the norm before it, if there is one."""
    attended = next(a for a in anatomy.attended if not a.crosses)
    call = _product_of(anatomy, branch, window)
    if call is None or call.inputs[0].numel() != attended.mixed.numel():
        call = _output_projection(anatomy, attended)
    return (plain, None) if call is None else _with_inside(plain, anatomy, attended, call)


def _product_of(anatomy: Anatomy, branch: Branch, window: tuple[int, int]) -> Call | None:
    """The product that computed the output of a sublayer; None if something else did."""
    call = next((c for c in anatomy.calls if c.module is branch.result.module and c.ended == window[1]), None)
    return call if call is not None and call.is_product and call.inputs else None


def _with_inside(plain: Placement, anatomy: Anatomy, attended: Attended, out: Call) -> tuple[Placement, Call | None]:
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
    if error <= max(NEAR, torch.finfo(x.dtype).eps):
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
    return call.is_leaf and not computes(call) and any(True for _ in call.module.parameters())


def _names(anatomy: Anatomy, windows: Sequence[tuple[int, int]], branches: Sequence[Branch]) -> list[str] | str:
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


def _result(anatomy: Anatomy, update: Value, before: Value) -> tuple[Call, Value, Call | None, Tensor] | None:
    """The call that computed an update, what it computed, the output norm after it, and the scale of each channel between.

    Where no call returned what the output norm receives, the call is the norm. None if the update passes through a module
    without parts, such as dropout, and is neither what a module computed nor a scale of that.
    """
    scale, norm = update.states.new_ones((), dtype=torch.float32), None
    while True:
        call = min(update.returned, key=lambda call: (call.ended, -call.began))
        source = anatomy.value_of(call.inputs[0]) if call.inputs else None
        if computes(call) or not call.is_leaf or norm is not None:
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
            factor = channel_scale(source.states, update.states)
            if factor is None:
                return (call, update, norm, scale) if source.returned else None
            scale, update = scale * factor, source
        if not update.returned or call in update.returned:
            scaled = _scaled_from(anatomy, update, call)
            if scaled is None:
                return (call, update, norm, scale) if _is_rearranged(anatomy, update, call) else None
            scale, update = scale * scaled[0], scaled[1]


def _scaled_from(anatomy: Anatomy, value: Value, receiver: Call) -> tuple[Tensor, Value] | None:
    """The scale and the value of a computed result that a module received times that scale; None if there is none."""
    for other in sorted(anatomy.values, key=lambda v: -v.first):
        if other is not value and other.computed and other.first < receiver.began:
            factor = channel_scale(other.states, value.states)
            if factor is not None:
                return factor, other
    return None


def _is_rearranged(anatomy: Anatomy, value: Value, receiver: Call) -> bool:
    """Whether a value has the numbers of a result in another order, as the windows of an image do."""
    numbers = value.states.flatten().sort().values
    results = (x for call in anatomy.calls if call.ended < receiver.began and computes(call) for x in call.outputs)
    return any(x.numel() == len(numbers) and torch.equal(x.flatten().sort().values, numbers) for x in results)


def _reading(anatomy: Anatomy, before: Value, window: tuple[int, int]) -> tuple[Call | None, float] | str:
    """The input norm of a sublayer and the factor after it, from what its modules read; or why that is unclear."""
    norms = [call for call in before.received if call.is_norm]
    readers = [call for call in anatomy.calls if window[0] < call.began < window[1] and not call.is_norm]
    direct = [call for call in readers if call in before.received and computes(call)]
    for norm in norms:
        value = anatomy.value_of(norm.outputs[0])
        if value is not None and any(call in value.received for call in readers):
            both = direct and value is not before  # a norm of what is normalised already changes nothing
            return "a sublayer reads both the states and a norm of them" if both else (norm, 1.0)
    if direct:
        plain = all(map(_is_affine, direct))
        return (None, 1.0) if plain else f"what a {type(direct[0].module).__name__} reads of the states is unknown"
    for norm, call in product(norms, (call for call in readers if computes(call))):
        read = anatomy.value_of(call.inputs[0]) if call.inputs else None
        made = anatomy.value_of(norm.outputs[0])
        if read is not None and made is not None:
            factor = factor_between(read.states, made.states)
            if abs(factor) >= SMALLEST and agree(read.states, factor * made.states.double()):
                return norm, round(factor, 6)
    rearranged = [
        call for call in readers if computes(call) and call.inputs and call.inputs[0].numel() == before.states.numel()
    ]
    for norm, call in product(norms, rearranged[:1]):  # windows of an image are read one by one
        if agree(call.inputs[0].flatten().sort().values, norm.outputs[0].flatten().sort().values):
            return norm, 1.0
    if not any(computes(call) for call in readers) and any(call in before.received for call in readers):
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


def _reader(anatomy: Anatomy, after: Value, time: int) -> Site | None:
    """The first call after a time that reads some states."""
    call = min((call for call in after.received if call.began >= time), key=lambda call: call.began, default=None)
    return None if call is None else _site(anatomy, call, after, received=True)


def _site(anatomy: Anatomy, call: Call, value: Value | None, received: bool = False) -> Site:
    """A call by its module and its number among the calls of that module in the block, and which of its tensors is a value."""
    nth = sum(other.module is call.module and other.began < call.began for other in anatomy.calls)
    tensors = call.inputs if received else call.outputs
    place = 0 if value is None else next(n for n, x in enumerate(tensors) if anatomy.value_of(x) is value)
    return Site(call.module, nth, received, place)


def _output_projection(anatomy: Anatomy, attended: Attended) -> Call | None:
    """The product that reads the mixed values, or in the attention module what a norm or gate makes of them."""
    products = [c for c in anatomy.calls if c.is_product and c.began > attended.time and c.inputs and c.outputs]
    plain = [c for c in products if agree(c.inputs[0], attended.mixed)]
    inside = [c for c in products if attended.within.holds(c) and c.inputs[0].numel() == attended.mixed.numel()]
    return next((c for c in plain + inside if c.outputs[0].numel() == anatomy.block.input.numel()), None)


def _head_norms(anatomy: Anatomy, attended: Attended) -> dict[str, nn.Module]:
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
            if x.numel() == made.numel() and abs(float(length(x.double().flatten()) / length(made)) - 1) < NEAR
        ]
        named = (match[1] or match[5]) if match else ""
        chosen = named if named and (not letters or set(named) & set(letters)) else letters[0] if letters else ""
        norms |= dict.fromkeys(chosen, call.module)
    return norms


def _unshared(x: Tensor, attention: AttentionCall) -> Tensor:
    """Keys or values without the repetition for the queries that share them."""
    return x[:, :: max(attention.q.shape[1] // max(attention.kv_heads, 1), 1)]
