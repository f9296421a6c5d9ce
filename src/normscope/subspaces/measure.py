"""All that one forward pass tells of a model's subspaces: rank, spheres, angles and interference."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.core.threads import one_thread
from normscope.models import AttentionStep, BlockNorm, HeadProjections, Model, Observer, Sample
from normscope.subspaces.interference import PLACES, interference_rows, partners
from normscope.subspaces.reading import Reading, reading_of
from normscope.subspaces.spaces import (
    Factors,
    Visible,
    data_roots,
    effective_rank,
    factors,
    principal_cosines,
    visible,
    weighted_cosine,
)

MEASURES = ("rank", "spheres", "angles", "interference")
SIDES = ("queries", "keys")
_SMALL = 1 << 20  # numbers in what a layer reads


def measure_subspaces(
    view: Model,
    sample: Sample,
    measures: Collection[str] = MEASURES,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, pd.DataFrame]:
    """A table for each measure, with a row for each layer, head and whatever else it depends on.

    With ``angles`` comes ``overlaps``: for each head and side the means over its pairs.

    Args:
        view: the model.
        sample: what it reads; the first token of every row counts neither as receiver nor as sender.
        measures: some of ``MEASURES``.
        seed: of who is exchanged with whom.
        progress: told the number of layers that are done.
    """
    counted = sample.attention_mask.clone()
    counted[:, 0] = False
    tables = _Tables(view, set(measures), view.norms, counted, partners(counted, seed))

    def observe(step: AttentionStep) -> None:
        with one_thread(small=step.input.numel() < _SMALL):
            tables.add(step)
        progress(step.layer + 1)

    view.forward(sample, Observer(attention=observe))
    made = {name: pd.DataFrame(tables.rows[name]) for name in MEASURES if name in tables.rows}
    if not made.get("angles", pd.DataFrame()).empty:
        made["overlaps"] = _overlaps(made["angles"])
    return made


@dataclass
class _Tables:
    """Rows of the tables, a layer at a time."""

    view: Model
    measures: set[str]
    norms: list[BlockNorm]
    counted: Bool[Tensor, "rows tokens"]
    partner: Int[Tensor, " tokens_of_all_rows"]
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, step: AttentionStep) -> None:
        """What one layer adds."""
        weights = self.view.projections(step.layer)
        bare = self._bare(step, weights)
        after = visible(weights.W_Q, weights.W_K, bare, weights.shared)
        x = step.input[self.counted].double()
        makers: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "rank": lambda: _rank_rows(step.layer, factors(weights.W_Q, weights.W_K), self.view.dim),
            "angles": lambda: _angle_rows(step.layer, after, x),
        }
        if self.measures & {"spheres", "interference"}:
            reading = reading_of(self.view, step, self.norms)
            spaces = {"before": _before(reading, weights, bare), "after": after}
            states = {"before": reading.states[self.counted].double(), "after": x}
            makers["spheres"] = lambda: _sphere_rows(step.layer, spaces, states)
            makers["interference"] = lambda: interference_rows(self.view, step, reading, spaces, self.counted, self.partner)
        for name, make in makers.items():
            if name in self.measures:
                self.rows.setdefault(name, []).extend(make())

    def _bare(self, step: AttentionStep, weights: HeadProjections) -> bool:
        """Whether scores are x W_QK y and nothing else."""
        normalised = any(norm.layer == step.layer and norm.slot in ("q", "k") for norm in self.norms)
        return step.rotation is None and not normalised and not bool(weights.b_Q.any() or weights.b_K.any())


def _before(reading: Reading, weights: HeadProjections, bare: bool) -> Visible:
    """What heads can see of the states before the norm."""
    # a norm with a bias adds a constant to q and k, which then stands in the scores like a bias of theirs
    bare = bare and (reading.norm is None or reading.norm.bias is None)
    return visible(reading.before(weights.W_Q), reading.before(weights.W_K), bare, weights.shared)


def _rank_rows(layer: int, found: Factors, dim: int) -> Iterator[dict[str, Any]]:
    effective = effective_rank(found.singular).tolist()
    largest = found.singular[:, 0].tolist()
    for head, rank in enumerate(found.rank.tolist()):
        yield {
            "layer": layer,
            "head": head,
            "rank": rank,
            "null": dim - rank,
            "effective_rank": effective[head],
            "largest": largest[head],
            "smallest": float(found.singular[head, max(rank - 1, 0)]),
        }


def _sphere_rows(layer: int, spaces: dict[str, Visible], states: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """Lengths of P x over their median, and the share |P x|²/|x|² that a head sees, before the norm and after it.

    Theorem 2 asks for one length before the norm; after it, P x is divided by the length of the whole.
    """
    for place in PLACES:
        for side, bases in zip(SIDES, (spaces[place].queries, spaces[place].keys), strict=True):
            for head, basis in enumerate(bases):
                yield {"layer": layer, "head": head, "place": place, "side": side} | _spread(states[place], basis)


def _spread(x: Float[Tensor, "tokens dim"], basis: Float[Tensor, "dim width"]) -> dict[str, float]:
    """Of one head, with its orthonormal basis."""
    seen = (x @ basis).square().sum(1)
    low, median, high = seen.sqrt().quantile(torch.tensor([0.05, 0.5, 0.95], dtype=x.dtype, device=x.device)).tolist()
    share = float((seen / x.square().sum(1)).mean())
    over = median or math.nan  # a head without weights sees nothing
    return {"share": share, "median": median, "low90": low / over, "high90": high / over, "spread": (high - low) / over}


def _angle_rows(layer: int, spaces: Visible, x: Float[Tensor, "tokens dim"]) -> Iterator[dict[str, Any]]:
    """Angles of every pair of heads on either side; heads that share their keys are no pair on the side of keys."""
    for side, bases, shared in zip(SIDES, (spaces.queries, spaces.keys), (1, spaces.shared), strict=True):
        pairs = [pair for pair in combinations(range(len(bases)), 2) if pair[0] // shared != pair[1] // shared]
        if not pairs:
            continue
        one, other = torch.tensor(pairs).T
        wide = bases.transpose(0, 1).flatten(1)
        heads, _, width = bases.shape
        products = (wide.T @ wide).view(heads, width, heads, width)[one, :, other]
        roots = data_roots(x, bases)
        cosines = principal_cosines(products)
        weighted = weighted_cosine(products, roots[one], roots[other]).tolist()
        ranks = bases.any(1).sum(1)
        common = torch.minimum(ranks[one], ranks[other])
        means = (cosines.sum(1) / common).tolist()
        smallest = torch.rad2deg(cosines[:, 0].acos()).tolist()
        for i, (head, another) in enumerate(pairs):
            row = {"layer": layer, "head": head, "other": another, "side": side}
            yield row | {"smallest_angle": smallest[i], "mean_cosine": means[i], "weighted_cosine": weighted[i]}


def _overlaps(angles: pd.DataFrame) -> pd.DataFrame:
    """Means of the cosines of every head over its pairs."""
    mirrored = angles.rename(columns={"head": "other", "other": "head"})
    both = pd.concat([angles, mirrored])[["layer", "head", "side", "mean_cosine", "weighted_cosine"]]
    return both.groupby(["layer", "side", "head"], as_index=False, sort=False).mean().sort_values(["layer", "side", "head"])
