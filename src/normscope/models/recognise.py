"""The name of a placement: the scheme of a layer, and the one that all layers share."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from normscope.core.norms import root_mean_square
from normscope.models.fits import rounded
from normscope.models.placement import Placement
from normscope.schemes import NAMED, Expression, Scheme, Slots
from normscope.schemes.scheme import At

_NEAR = 5e-5  # of a fitted number to that of a formula
_EXTRAS = {"heads": "none", "scores": Slots().scores, "gate": "none", "inner": "none"}  # slots that any scheme may have besides
_SAID = {"scores": "scores: ", "gate": "with a ", "inner": "with norms: "}


def scheme_of(placement: Placement, kind: str, normalised: bool = False) -> Scheme | None:
    """The named scheme with these slots, or one without a name; ``kind`` is its norm. None if the slots are unknown.

    ``normalised``: whether the next block continues with a norm of what this one returns, which is a norm of the stream.
    """
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
    attention = mixing.slots()
    if mixing is branches.get("attention"):
        attention = replace(attention, heads=placement.letters, scores=placement.scores, gate=placement.gate)
    others = feedforward.slots()
    if normalised:
        others = replace(others, stream="norm")
    alphas = [branch.alpha for branch in (mixing, feedforward) if branch.alpha is not None]
    shape = next((branch.learned for branch in (mixing, feedforward) if branch.learned), "vector")
    if not alphas:
        return _named(attention, others, kind)
    return _named(attention, others, kind, shape, rounded(root_mean_square(alphas[0])))


def _named(attention: Slots, feedforward: Slots, kind: str, learned: str = "vector", alpha: float | None = None) -> Scheme:
    """The scheme of the slots of both sublayers: a named one, also with further slots that its name then lists."""
    named = [scheme for scheme in NAMED.values() if scheme.then is None and scheme.weights == "free"]
    named = [scheme for scheme in named if scheme.learned == learned or not scheme.learns_alpha]
    named.sort(key=lambda scheme: scheme.norm != kind)  # which other kinds of norms may replace
    for extras in (extras for count in range(len(_EXTRAS) + 1) for extras in combinations(_EXTRAS, count)):
        bare = replace(attention, **{name: _EXTRAS[name] for name in extras})
        inner = replace(feedforward, inner="none") if "inner" in extras else feedforward
        for scheme in named:
            if (scheme.attention, scheme.feedforward) == (bare, inner):
                scheme = _extended(scheme, attention, feedforward, extras).with_norm(kind)
                return scheme if alpha is None else replace(scheme, alpha=alpha, learned=learned)
    step = Expression.parse(attention.step).text
    constant = not any("alpha" in Expression.parse(slots.carry).names for slots in (attention, feedforward))
    if attention.step == feedforward.step and step != "1" and constant:
        like = _named(replace(attention, step=1.0), replace(feedforward, step=1.0), kind)
        title = f"{like.title}, every update times {step}"
        scheme = replace(like, name=f"{like.name}*{step}", title=title)
    else:
        scheme = Scheme("unnamed", Slots(), title="a placement without a name").with_norm(kind)
    given: dict[str, Any] = {} if alpha is None else {"alpha": alpha, "learned": learned}
    return replace(scheme, attention=attention, feedforward=feedforward, **given)


def _extended(scheme: Scheme, attention: Slots, feedforward: Slots, extras: tuple[str, ...]) -> Scheme:
    """The scheme with slots that it has not, named after both: ``peri+softcap(50)``."""
    for name in extras:
        if name == "heads":
            scheme = scheme.with_heads(attention.heads)
            continue
        value, other = getattr(attention, name), getattr(feedforward, name)
        where = "" if name != "inner" or value == other else "-attention" if value == "norm" else "-feedforward"
        text = value.replace(" ", "") if name == "scores" else f"{name}{where}"
        scheme = replace(scheme, name=f"{scheme.name}+{text}", title=f"{scheme.title}, {_SAID[name]}{text}", users="")
    return replace(scheme, attention=attention, feedforward=feedforward)


def common_scheme(schemes: Sequence[Scheme | None]) -> Scheme | None:
    """The scheme of all layers: theirs, apart from learned scales, or a named one whose formulas of depth give all of them."""
    known = [scheme for scheme in schemes if scheme is not None]
    if not known or len(known) < len(schemes):
        return None
    alike = len({replace(scheme, alpha=0.0) for scheme in known}) == 1
    if alike and known[0].name.partition("+")[0] in NAMED and "*" not in known[0].name:
        return known[0]
    kinds = {scheme.norm for scheme in known}
    named = [scheme.with_norm(kind) for scheme in NAMED.values() for kind in kinds if scheme.weights == "free"]
    extras = {tuple(getattr(scheme.attention, name) for name in _EXTRAS) for scheme in known}
    if len(extras) == 1:
        named += [more for scheme in named if (more := _with_extras(scheme, known[0])) is not None]
    for scheme in named:
        stages = [(scheme.at(layer, len(known)), At(layer, len(known))) for layer in range(len(known))]
        if all(_agrees(stage, seen, at) for (stage, at), seen in zip(stages, known, strict=True)):
            return scheme
    return known[0] if alike else None


def _with_extras(scheme: Scheme, seen: Scheme) -> Scheme | None:
    """A named scheme with the further slots of what was seen, in all of its stages; None if it has others already."""
    slots = {name: getattr(seen.attention, name) for name in _EXTRAS}
    extras = tuple(name for name, value in slots.items() if value != _EXTRAS[name])
    stages = [stage.attention for stage in scheme.stages]
    if not extras or any(getattr(stage, name) != none for stage in stages for name, none in _EXTRAS.items()):
        return None
    inner = {"inner": seen.feedforward.inner}
    then = None if scheme.then is None else _with_extras(scheme.then, seen)
    attention, feedforward = replace(scheme.attention, **slots), replace(scheme.feedforward, **inner)
    return replace(_extended(scheme, attention, feedforward, extras), then=then)


def _agrees(scheme: Scheme, seen: Scheme, at: At) -> bool:
    """Whether a stage of a scheme has the slots that were seen at a place in depth."""
    pairs = ((scheme.attention, seen.attention), (scheme.feedforward, seen.feedforward))
    return scheme.norm == seen.norm and all(_same_slots(slots, other, at) for slots, other in pairs)


def _same_slots(slots: Slots, seen: Slots, at: At) -> bool:
    norms = [
        (each.heads, each.scores, each.inner, each.gate, each.reads_norm, each.output, each.stream) for each in (slots, seen)
    ]
    if norms[0] != norms[1] or any("alpha" in formula.names for each in (slots, seen) for formula in each.formulas):
        return False
    numbers = [[each.number(name, at) for name in ("input", "step", "carry")] for each in (slots, seen)]
    return all(abs(number - other) <= _NEAR * abs(other) for number, other in zip(*numbers, strict=True))
