"""What was seen of a model's blocks, proved on other states.

A block that was recorded once may do something else than it seemed: a sublayer may read more than the norm of the states, a
fitted scale may depend on the input. So the model runs again. Every layer gets other states, its input norms return what they
returned before, and then

- a sublayer that reads a norm of the states must compute what it computed before, and
- the updates with the slots that were seen must give the block's output.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from normscope.core.norms import same
from normscope.models.blocks import Block
from normscope.models.hooks import Running, SiteHooks
from normscope.models.placement import Evidence, Placement, proved

_NEAR = 1e-4


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
