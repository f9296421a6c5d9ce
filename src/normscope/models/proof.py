"""What was seen of a model's blocks, proved on other states.

A block that was recorded once may do something else than it seemed: a sublayer may read more than the norm of the states, a
fitted scale may depend on the input. So the model runs again. Every layer gets other states, its input norms return what they
returned before, and then

- a sublayer that reads a norm of the states must compute what it computed before, and
- the updates with the slots that were seen must give the block's output.

Which of q, k and v are normalised shows when attention reads much larger states in one row, and smaller ones in another: the
others become as much larger or smaller.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from normscope.core.norms import length, same
from normscope.models.attention_interface import AttentionCall
from normscope.models.attention_trace import observing_attention
from normscope.models.blocks import Block
from normscope.models.hooks import Running, Site, SiteHooks
from normscope.models.placement import Evidence, Placement, proved
from normscope.models.record import Attended

_NEAR = 1e-4
_LARGER = 1e4  # the factor of what attention reads, far above what biases of projections may be worth
_SMALLER = 0.05
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
    running.entering(lambda layer, x: others[layer].to(x))
    running.leaving(lambda layer, x: left.update({layer: x.clone()}))
    with ExitStack() as stack:
        running.install(stack)
        sites.install(stack)
        run()
    return [
        _proved(placement, evidence, others[layer], results[layer], left[layer])
        for layer, (placement, evidence) in enumerate(seen)
    ]


def proved_heads(
    model: nn.Module,
    blocks: Sequence[Block],
    seen: Sequence[tuple[Placement, Evidence]],
    attended: Sequence[Attended | None],
    sites: Sequence[Site | None],
    run: Callable[[], object],
) -> list[Placement]:
    """The placements with the norms of q, k and v that have an effect, and those that are no modules."""
    running = Running([block.site for block in blocks], blocks[0].input.shape[0])
    larger, nth = SiteHooks(running), [-1]
    ratios: dict[int, dict[str, tuple[float, ...]]] = {}
    reads = [_attention_read(placement, evidence) for placement, evidence in seen]
    for layer, read in enumerate(reads):
        if read is not None:
            larger.at(layer, read[0], partial(_given, _rescaled(read[1])))

    def enter(layer: int, x: Tensor) -> Tensor:
        nth[0] = -1
        given = blocks[layer].input
        return (_rescaled(given) if reads[layer] is None else given).to(x)

    def attend(call: AttentionCall) -> Tensor:
        layer, nth[0] = running.layer, nth[0] + 1
        site, known = (None, None) if layer is None else (sites[layer], attended[layer])
        if layer is not None and site is not None and known is not None and site.nth == nth[0]:
            before, pairs = known.attention, (("q", call.q), ("k", call.k), ("v", call.v))
            ratios[layer] = {letter: _ratios(now, getattr(before, letter)) for letter, now in pairs}
        return call.mixed()

    running.entering(enter)
    with ExitStack() as stack:
        running.install(stack)
        larger.install(stack)
        stack.enter_context(observing_attention(model, attend))
        run()
    return [_with_heads(placement, ratios.get(layer, {}), evidence) for layer, (placement, evidence) in enumerate(seen)]


def _attention_read(placement: Placement, evidence: Evidence) -> tuple[Site, Tensor] | None:
    """The input norm of attention and what it returned; None if there is none, or it is unknown."""
    branch = placement.branches.get("attention")
    site = None if branch is None else branch.norms.get("input")
    return None if site is None or site not in evidence.reads else (site, evidence.reads[site])


def _rescaled(states: Tensor) -> Tensor:
    """Larger states in the first row, smaller ones in the second, and so on."""
    factors = torch.tensor([_LARGER, _SMALLER], dtype=states.dtype, device=states.device)
    return states * factors.repeat(len(states))[: len(states), None, None]


def _ratios(now: Tensor, before: Tensor) -> tuple[float, ...]:
    """How much larger the numbers of the first row became, and of the second if there is one."""
    return tuple(
        float(length(a.double().flatten()) / length(b.double().flatten())) for a, b in zip(now[:2], before[:2], strict=True)
    )


def _with_heads(placement: Placement, ratios: dict[str, tuple[float, ...]], evidence: Evidence) -> Placement:
    if not ratios:
        return placement
    normalised = [
        letter for letter, (up, *down) in ratios.items() if up < _LARGER**0.5 and all(ratio > _KEPT for ratio in down)
    ]
    modules = {letter: norm for letter, norm in placement.head_norms.items() if letter in normalised}
    others = "".join(letter for letter in normalised if letter not in modules)
    return replace(placement, head_norms=modules, unnamed_heads="" if evidence.latent else others)


def _other_states(x: Tensor, generator: torch.Generator) -> Tensor:
    """States that differ from x by about as much as they are large."""
    drawn = torch.randn(x.shape, generator=generator).to(x)
    return x + x.square().mean().sqrt() * drawn


def _keep(kept: dict[str, Tensor], name: str, states: Tensor) -> None:
    kept[name] = states.clone()


def _given(states: Tensor, x: Tensor) -> Tensor:
    return states


def _proved(placement: Placement, evidence: Evidence, x: Tensor, results: dict[str, Tensor], y: Tensor) -> Placement:
    if not placement.branches:
        return placement
    for name, branch in placement.branches.items():
        before, now = evidence.results[name].double(), results[name].double()
        if "input" in branch.norms and not same(now.flatten(), before.flatten(), _NEAR):
            unclear = f"{name} reads more than the norm of the states that it seemed to read"
            return replace(placement, branches={}, unclear=unclear, error=None)
    return proved(placement, x, results, y)
