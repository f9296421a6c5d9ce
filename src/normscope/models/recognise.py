"""The name of a placement: the scheme of a layer, and the one that all layers share."""

from collections.abc import Sequence
from dataclasses import replace

from normscope.models.placement import Placement, rounded
from normscope.schemes import NAMED, Expression, Scheme, Slots
from normscope.schemes.scheme import At

_NEAR = 5e-5  # of a fitted number to that of a formula


def scheme_of(placement: Placement, kind: str) -> Scheme | None:
    """The named scheme with these slots, or one without a name; ``kind`` is its norm. None if the slots are unknown."""
    if placement.unclear:
        return None
    branches = placement.branches
    feedforward = branches.get("feedforward")
    mixing = next((branches[name] for name in ("attention", "mixer", "cross") if name in branches), feedforward)
    if mixing is None:
        return None
    feedforward = feedforward or mixing
    if not (mixing.has_slots and feedforward.has_slots):
        return None
    learned = [branch.scales.step.mean() for branch in (mixing, feedforward) if branch.scales.step.ndim]
    scheme = _named(mixing.slots(placement.letters), feedforward.slots(), kind)
    return replace(scheme, alpha=rounded(learned[0])) if learned else scheme


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


def common_scheme(schemes: Sequence[Scheme | None]) -> Scheme | None:
    """The scheme of all layers: theirs, apart from learned scales, or a named one whose formulas of depth give all of them."""
    known = [scheme for scheme in schemes if scheme is not None]
    if not known or len(known) < len(schemes):
        return None
    alike = len({replace(scheme, alpha=0.0) for scheme in known}) == 1
    if alike and known[0].name in NAMED:
        return known[0]
    kinds = {scheme.norm for scheme in known}
    named = [scheme.with_norm(kind) for scheme in NAMED.values() for kind in kinds if scheme.weights == "free"]
    heads = {scheme.attention.heads for scheme in known} - {"none"}
    named += [scheme.with_heads(letters) for scheme in named for letters in heads if scheme.attention.heads == "none"]
    for scheme in named:
        stages = [(scheme.at(layer, len(known)), At(layer, len(known))) for layer in range(len(known))]
        if all(_agrees(stage, seen, at) for (stage, at), seen in zip(stages, known, strict=True)):
            return scheme
    return known[0] if alike else None


def _agrees(scheme: Scheme, seen: Scheme, at: At) -> bool:
    """Whether a stage of a scheme has the slots that were seen at a place in depth."""
    pairs = ((scheme.attention, seen.attention), (scheme.feedforward, seen.feedforward))
    return scheme.norm == seen.norm and all(_same_slots(slots, other, at) for slots, other in pairs)


def _same_slots(slots: Slots, seen: Slots, at: At) -> bool:
    norms = [(each.heads, each.reads_norm, each.output, each.stream) for each in (slots, seen)]
    if norms[0] != norms[1] or any("alpha" in formula.names for each in (slots, seen) for formula in each.formulas):
        return False
    numbers = [[each.number(name, at) for name in ("input", "step", "carry")] for each in (slots, seen)]
    return all(abs(number - other) <= _NEAR * abs(other) for number, other in zip(*numbers, strict=True))
