"""What was seen of a model's blocks, proved on other states.

A block that was recorded once may do something else than it seemed: a sublayer may read more than the norm of the states, a
fitted scale may depend on the input. So the model runs again. Every layer gets other states, its input norms return what they
returned before, and then

- a sublayer that reads a norm of the states must compute what it computed before, and
- the updates with the slots that were seen must give the block's output.

Which of q, k and v are normalised shows when attention reads much larger states in one row, and smaller ones in another: the
others become as much larger or smaller. All positions get one vector there, so that queries which differ in their norm have a
temperature that depends on the position. Whether the scale of an update is learned shows when parameters that may be scales are
larger: the block's output is then that of a larger scale.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from normscope.core.norms import length, same
from normscope.models.attention_interface import AttentionCall
from normscope.models.attention_trace import observing_attention
from normscope.models.blocks import Block
from normscope.models.foreign import in_one_line
from normscope.models.hooks import Running, Site, SiteHooks
from normscope.models.inside import temperature
from normscope.models.placement import Evidence, Placement, proved
from normscope.models.record import Attended, is_norm
from normscope.models.wrapped import other_weights

_NEAR = 1e-4
_LARGER = 1e8  # the factor of what attention reads, far above what biases of projections may be worth
_SMALLER = 0.05
_SCALED = 1.5  # the factor of parameters that may be scales of updates
_KEPT = 0.3  # of the size of what is normalised remains at least so much, if it is made of smaller numbers


def proved_again(
    blocks: Sequence[Block], seen: Sequence[tuple[Placement, Evidence]], run: Callable[[], object]
) -> list[Placement]:
    """The placements, unclear where other states contradict them; ``run`` runs the model on what it read before."""
    running = Running([block.site for block in blocks], blocks[0].input.shape[0])
    generator = torch.Generator().manual_seed(1)
    others = [_other_states(block.input, generator) for block in blocks]
    results: list[dict[str, Tensor]] = [{} for _ in blocks]
    left: dict[int, Tensor] = {}
    sites = SiteHooks(running)
    for layer, (placement, evidence) in enumerate(seen):
        for name, branch in placement.branches.items():
            sites.at(layer, branch.result, partial(_keep, results[layer], name))
        for site, states in evidence.reads.items():
            sites.at(layer, site, partial(_given, states))
    running.entering(lambda layer, x: others[layer].to(x, copy=True))  # a block may change its states in place
    running.leaving(lambda layer, x: left.update({layer: x.clone()}))
    with ExitStack() as stack:
        running.install(stack)
        sites.install(stack)
        refused = _refusal(run)
    if refused or len(left) < len(blocks):
        unclear = f"the model does not run on other states{f': {refused}' if refused else ''}"
        return [replace(placement, branches={}, unclear=placement.unclear or unclear, error=None) for placement, _ in seen]
    return [
        _proved(placement, evidence, others[layer], results[layer], left[layer])
        for layer, (placement, evidence) in enumerate(seen)
    ]


def proved_scales(
    model: nn.Module, blocks: Sequence[Block], placements: Sequence[Placement], run: Callable[[], object]
) -> list[Placement]:
    """The placements with the shape of learned scales of updates: numbers, or vectors as wide as the stream."""
    placements = list(placements)
    norms = {
        module for placement in placements for several in (placement.norms, placement.head_norms) for module in several.values()
    }
    inside = {part for block in blocks for part in block.site.module.modules() if part not in norms and not is_norm(part)}
    for shape, size in (("vector", blocks[0].input.shape[-1]), ("scalar", 1)):
        scales = {
            (part, name)
            for part in inside
            if all(parameter.numel() == max(parameter.shape, default=1) for parameter in part.parameters(recurse=False))
            for name, parameter in part.named_parameters(recurse=False)
            if parameter.numel() == size
        }
        if scales:
            with other_weights(model, partial(_larger, scales)):
                passed = _results(blocks, placements, run)
            placements = [
                _with_learned(placement, shape, *passed[layer]) if layer in passed else placement
                for layer, placement in enumerate(placements)
            ]
    return placements


def _larger(scales: set[tuple[nn.Module, str]], part: nn.Module, name: str, x: Tensor) -> Tensor | None:
    """A larger parameter in place of one of some; None in place of others."""
    return _SCALED * x if (part, name) in scales else None


def _results(
    blocks: Sequence[Block], placements: Sequence[Placement], run: Callable[[], object]
) -> dict[int, tuple[Tensor, dict[str, Tensor], Tensor]]:
    """Of every layer that ran: the states before it, what its sublayers computed, and the states after it."""
    running = Running([block.site for block in blocks], blocks[0].input.shape[0])
    results: list[dict[str, Tensor]] = [{} for _ in blocks]
    entered, left = dict[int, Tensor](), dict[int, Tensor]()
    sites = SiteHooks(running)
    for layer, placement in enumerate(placements):
        for name, branch in placement.branches.items():
            sites.at(layer, branch.result, partial(_keep, results[layer], name))
    running.entering(lambda layer, x: entered.update({layer: x.clone()}))
    running.leaving(lambda layer, x: left.update({layer: x.clone()}))
    with ExitStack() as stack:
        running.install(stack)
        sites.install(stack)
        _refusal(run)
    return {layer: (entered[layer], results[layer], left[layer]) for layer in left}


def _with_learned(placement: Placement, shape: str, x: Tensor, results: dict[str, Tensor], y: Tensor) -> Placement:
    """The placement with branches whose scales grew with the parameters; as it is if none or something else did."""
    open_branches = [name for name, branch in placement.branches.items() if not branch.learned]
    for grown in sorted(product((False, True), repeat=len(open_branches)), key=sum):
        names = {name for name, is_grown in zip(open_branches, grown, strict=True) if is_grown}
        branches = {name: branch.grown(_SCALED) if name in names else branch for name, branch in placement.branches.items()}
        if branches and not proved(replace(placement, branches=branches), x, results, y).unclear:
            learned = {name: replace(b, learned=shape) if name in names else b for name, b in placement.branches.items()}
            return replace(placement, branches=learned)
    return placement


def _refusal(run: Callable[[], object]) -> str:
    """Why a model does not run; empty if it does."""
    try:
        run()
    except Exception as error:  # of a module that got states which it did not expect
        return in_one_line(error)
    return ""


def proved_heads(
    model: nn.Module,
    blocks: Sequence[Block],
    seen: Sequence[tuple[Placement, Evidence]],
    attended: Sequence[Attended | None],
    sites: Sequence[Site | None],
    run: Callable[[], object],
) -> list[Placement]:
    """The placements with the norms of q, k and v that have an effect, those that are no modules, and temperatures."""
    running = Running([block.site for block in blocks], blocks[0].input.shape[0])
    larger, nth = SiteHooks(running), [-1]
    ratios: dict[int, dict[str, tuple[float, ...]]] = {}
    factors: dict[int, str | None] = {}
    reads = [_attention_read(placement, evidence) for placement, evidence in seen]
    for layer, read in enumerate(reads):
        if read is not None:
            larger.at(layer, read[0], partial(_given, _rescaled(read[1])))

    def enter(layer: int, x: Tensor) -> Tensor:
        nth[0] = -1
        given = blocks[layer].input
        return (_rescaled(given) if reads[layer] is None else given).to(x, copy=True)

    def attend(call: AttentionCall) -> Tensor:
        layer, nth[0] = running.layer, nth[0] + 1
        site, known = (None, None) if layer is None else (sites[layer], attended[layer])
        if layer is not None and site is not None and known is not None and site.nth == nth[0]:
            before, pairs = known.attention, (("q", call.q), ("k", call.k), ("v", call.v))
            depends = [(letter, now) for letter, now in pairs if not same(now, getattr(before, letter), _NEAR)]
            ratios[layer] = {letter: _ratios(now, getattr(before, letter)) for letter, now in depends}
            factors[layer] = temperature(call)
        return call.mixed()

    running.entering(enter)
    with ExitStack() as stack:
        running.install(stack)
        larger.install(stack)
        stack.enter_context(observing_attention(model, attend))
        _refusal(run)  # layers that did not run keep what was seen
    placements = [_with_heads(placement, ratios.get(layer, {}), evidence) for layer, (placement, evidence) in enumerate(seen)]
    return [_with_temperature(placement, factors.get(layer)) for layer, placement in enumerate(placements)]


def _with_temperature(placement: Placement, formula: str | None) -> Placement:
    """The placement with the factor of its logits, or a note that no formula of the number of keys is that factor."""
    if formula is None:
        return placement
    if not formula:
        notes = [placement.note, "the logits of a query are multiplied by a factor of its position that has no slot"]
        return replace(placement, note="; ".join(filter(None, notes)))
    parts = [f"temperature({formula})", *([] if placement.scores == "softmax" else [placement.scores])]
    return replace(placement, scores="+".join(parts))


def _attention_read(placement: Placement, evidence: Evidence) -> tuple[Site, Tensor] | None:
    """The input norm of attention and what it returned; None if there is none, or it is unknown."""
    branch = placement.branches.get("attention")
    site = None if branch is None else branch.norms.get("input")
    return None if site is None or site not in evidence.reads else (site, evidence.reads[site])


def _rescaled(states: Tensor) -> Tensor:
    """One larger state for all positions of the first row, a smaller one for those of the second, and so on.

    They are in other channels, so that directions change.
    """
    factors = torch.tensor([_LARGER, _SMALLER], dtype=states.dtype, device=states.device)
    first = states[:, :1].roll(1, -1) * factors.repeat(len(states))[: len(states), None, None]
    return first.expand_as(states)


def _ratios(now: Tensor, before: Tensor) -> tuple[float, ...]:
    """How much larger the numbers of the first row became, and of the second if there is one."""
    return tuple(
        float(length(a.double().flatten()) / length(b.double().flatten())) for a, b in zip(now[:2], before[:2], strict=True)
    )


def _with_heads(placement: Placement, ratios: dict[str, tuple[float, ...]], evidence: Evidence) -> Placement:
    if not ratios:  # weights of zero hide what is normalised
        return placement
    normalised = [
        letter for letter, (up, *down) in ratios.items() if up < _LARGER**0.5 and all(ratio > _KEPT for ratio in down)
    ]
    modules = {name: norm for name, norm in placement.head_norms.items() if name in normalised or name not in ratios}
    others = "".join(letter for letter in normalised if letter not in modules)
    return replace(placement, head_norms=modules, unnamed_heads="" if evidence.latent else others)


def _other_states(x: Tensor, generator: torch.Generator) -> Tensor:
    """States that differ from x by about as much as they are large."""
    drawn = torch.randn(x.shape, generator=generator).to(x)
    return x + x.square().mean().sqrt() * drawn


def _keep(kept: dict[str, Tensor], name: str, states: Tensor) -> None:
    kept[name] = states.clone()


def _given(states: Tensor, x: Tensor) -> Tensor:
    return states.clone()


def _proved(placement: Placement, evidence: Evidence, x: Tensor, results: dict[str, Tensor], y: Tensor) -> Placement:
    if not placement.branches:
        return placement
    for name, branch in placement.branches.items():
        before, now = evidence.results[name].double(), results[name].double()
        if "input" in branch.norms and not same(now.flatten(), before.flatten(), _NEAR):
            unclear = f"{name} reads more than the norm of the states that it seemed to read"
            return replace(placement, branches={}, unclear=unclear, error=None)
    return proved(placement, x, results, y)
