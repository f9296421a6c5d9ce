"""What one forward pass of the probe shows, layer by layer.

A probe may run often, so that what counts is how many operations are launched and how often the device is read: tokens are
kept while the pass runs, those of many layers are reduced together, and nothing waits for a number before the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from normscope.core.norms import (
    degrees_between,
    effective_rank,
    length,
    mean_cosine,
    root_mean_square,
    unit,
    visible_part,
)
from normscope.measures.base import LayerAttention
from normscope.measures.collapse_probability import collapse_probability
from normscope.measures.speed import Motion, effective_speed, theory_of
from normscope.measures.states import MIXING, norm_kind
from normscope.models import AttentionStep, Model, Observer, Sample, SublayerStep
from normscope.results.conventions import NEAR_ONE_HOT
from normscope.watch.packed import Packed, Transfer
from normscope.watch.weights import GRADIENT

_TOGETHER = 1 << 28  # bytes of tokens that are kept before they are reduced
_MEDIAN_OF = 1 << 18  # values of a state that its median is taken of, evenly spaced
_MET = ("residual stream", "queries", "keys")  # tensors of a layer in the order of a pass; updates follow
_FAULTS = 32  # tensors with non-finite values of a probe that are kept, the first
_SPARSE = 256  # near-one-hot rows of a layer, drawn once, whose collapse probability is computed
Tokens = Float[Tensor, "tokens dim"]
Layers = Float[Tensor, "layers tokens dim"]


@dataclass(frozen=True)
class _State:
    """The tokens before a layer, padding left out; ``known`` if they were reduced before and only the next layer needs them."""

    layer: int
    tokens: Tokens
    known: bool = False


@dataclass(frozen=True)
class _Sublayer:
    """The tokens of a sublayer that count, and the motion of one that mixes them."""

    layer: int
    sublayer: str
    before: Tokens
    update: Tokens
    output: Tokens
    scale: Float[Tensor, ""]
    carry: Float[Tensor, ""]
    motion: Motion | None


class Statistics:
    """Adds what a pass of the probe shows to packed numbers.

    Means are taken over the tokens without padding and without the first of every row, as in an audit.
    """

    def __init__(self, model: Model, sample: Sample) -> None:
        self.model = model
        self.kind = norm_kind(model)
        present = model.viewed(sample).attention_mask
        (self.rows, self.tokens), counted = present.shape, present.clone()
        counted[:, 0] = False
        self._mask, self._counted = present, counted
        self._present = present.flatten().nonzero().squeeze(1)
        self._among = counted.flatten()[self._present].nonzero().squeeze(1)  # the counted among the present
        self._places = self._present[self._among]
        self.disturbed = "k" not in model.normalised_heads  # a norm of the keys removes noise on their norms
        self.sublayers = any(model.sublayers(layer) for layer in range(model.layers))
        self._orders: dict[int, Tensor] = {}

    def read(self, packed: Packed) -> Observer:
        """An observer of one pass, which adds to ``packed``; ``finish`` must follow it."""
        self.packed = packed
        self.norms = {(norm.layer, norm.sublayer, norm.slot): norm for norm in self.model.norms}
        self._states: list[_State] = []
        self._sublayers: list[_Sublayer] = []
        self._sparse: list[SparseRows] = []
        attention = self._attention if self.model.attention_layers else None
        return Observer(attention, self._sublayer if self.sublayers else None, self._state)

    def finish(self) -> "list[SparseRows]":
        """Reduce what is left; the near-one-hot rows, whose collapse probabilities are still to be computed."""
        self._reduce_states()
        self._reduce_sublayers()
        return self._sparse

    def _same(self, x: Float[Tensor, "rows positions dim"]) -> bool:
        """Whether a layer has the positions of the sample; a pyramid has others, and then all of them count."""
        return x.shape[:2] == (self.rows, self.tokens)

    def _select(self, x: Float[Tensor, "rows positions dim"]) -> Tokens:
        """The tokens that count."""
        flat = x.flatten(0, 1)
        return flat.index_select(0, self._places) if self._same(x) else flat.clone()

    def _state(self, layer: int, x: Tensor) -> None:
        flat = x.flatten(0, 1)
        tokens = flat.index_select(0, self._present) if self._same(x) else flat.clone()
        if self._states and self._states[-1].tokens.shape != tokens.shape:
            self._reduce_states()
        self._states.append(_State(layer, tokens))
        if _bytes(tokens) * len(self._states) > _TOGETHER:
            self._reduce_states()
            self._states.append(_State(layer, tokens, known=True))

    def _reduce_states(self) -> None:
        """Norm, clustering and largest value of states; update and rotation of the layers between them."""
        states, self._states = self._states, []
        if all(state.known for state in states):
            return
        x = torch.stack([state.tokens for state in states])
        tokens = visible_part(x[:, self._among] if x.shape[1] == len(self._present) else x, self.kind).double()
        norms, new = length(tokens, quick=True), slice(int(states[0].known), None)
        columns = {
            "norm": norms.mean((1, 2)),
            "cosine": mean_cosine(tokens, quick=True),
            "rank": effective_rank(unit(tokens, quick=True).float()),
            "massive": _largest_over_median(x),
        }
        rows = [{"layer": state.layer} for state in states]
        for column, values in columns.items():
            self.packed.add("layers", column, values[new], rows[new], "max" if column == "massive" else "mean")
        self._check(x[new], [{"tensor": "residual stream", **row} for row in rows[new]])
        if len(tokens) > 1:
            moved = length(tokens[1:] - tokens[:-1], quick=True) / norms[:-1]
            self.packed.add("layers", "update", moved.mean((1, 2)), rows[:-1])
            self.packed.add("layers", "rotation", degrees_between(tokens[:-1], tokens[1:], quick=True).mean(1), rows[:-1])

    def _sublayer(self, step: SublayerStep) -> None:
        """Keep the tokens of a sublayer."""
        stream, output = (self.norms.get((step.layer, step.sublayer, slot)) for slot in ("stream", "output"))
        motion = Motion.of(step, self._select, stream, output) if step.sublayer in MIXING else None
        before, update, A = (self._select(y) for y in (step.before, step.update, step.output))
        scale, carry = root_mean_square(step.step.double()), step.carry.double().mean()
        if self._sublayers and self._sublayers[0].before.shape != before.shape:
            self._reduce_sublayers()
        self._sublayers.append(_Sublayer(step.layer, step.sublayer, before, update, A, scale, carry, motion))
        if 6 * _bytes(before) * len(self._sublayers) > _TOGETHER:
            self._reduce_sublayers()

    def _reduce_sublayers(self) -> None:
        """Size and scale of updates, and the speed of attention beside theory."""
        several, self._sublayers = self._sublayers, []
        if not several:
            return
        rows = [{"layer": one.layer, "sublayer": one.sublayer} for one in several]

        def seen(tokens: list[Tokens]) -> Layers:
            return visible_part(torch.stack(tokens), self.kind).double()

        before, update = seen([one.before for one in several]), seen([one.update for one in several])
        size = (length(update, quick=True) / length(before, quick=True)).mean((1, 2))
        scale, carry = (torch.stack([getattr(one, name) for one in several]) for name in ("scale", "carry"))
        columns = {"update": size, "scale": scale, "carry": carry}
        for column, values in columns.items():
            self.packed.add("sublayers", column, values, rows)
        faults = [{"tensor": f"{one.sublayer} output", "layer": one.layer} for one in several]
        self._check(torch.stack([one.output for one in several]), faults)
        moving = [(one, one.motion) for one in several if one.motion is not None]
        if moving:
            motions = [motion for _, motion in moving]
            unmoved, radius, A, written, after = (
                seen([getattr(motion, name) for motion in motions]) for name in ("unmoved", "radius", "A", "written", "after")
            )
            layers = [{"layer": one.layer} for one, _ in moving]
            speeds = effective_speed(unmoved, after, A, quick=True)
            self.packed.add("layers", "speed", speeds.median(-1).values, layers)
            r, a, w = (length(y, quick=True).squeeze(-1) for y in (radius, A, written))
            for index, (one, _) in enumerate(moving):
                theory = theory_of(self.model, one.layer, one.scale, one.carry, r[index], a[index], w[index])
                if theory is not None:
                    self.packed.add("layers", "theory", theory, layers[index])

    def _attention(self, step: AttentionStep) -> None:
        """Logits, entropy, sinks and sparsity of every head; scores of near-one-hot rows are kept for ``finish``."""
        rows, heads, queries, _ = step.q.shape
        same = (rows, queries) == (self.rows, self.tokens)
        every = step.q.new_ones(rows, queries).bool()
        present, counted = (mask.to(step.q.device) if same else every for mask in (self._mask, self._counted))
        attention = LayerAttention(step, counted)
        logits, weights = step.logits(attention.raw_scores), attention.weights
        share = (counted / counted.sum()).double()

        def mean(values: Float[Tensor, "rows heads queries"]) -> Float[Tensor, " heads"]:
            return torch.einsum("rhq,rq->h", values.double(), share)

        sparse = (attention.largest >= NEAR_ONE_HOT) & counted[:, None]
        columns = {
            "logit": logits.amax(3).masked_fill(~present[:, None], -torch.inf).amax((0, 2)),
            "entropy": mean(torch.special.entr(weights).sum(-1)),
            "sink": mean(weights[..., 0]),
            "sparse": mean(sparse.double()),
        }
        of_heads = _heads(step.layer, heads)
        for column, values in columns.items():
            self.packed.add("heads", column, values, of_heads, "max" if column == "logit" else "mean")
        for name, x in {"queries": step.q, "keys": step.k}.items():
            self._check(x[None], [{"tensor": name, "layer": step.layer}])
        if self.disturbed:
            self._sparse.append(SparseRows.of(attention, sparse, self._order(sparse)))
        else:
            collapse = torch.where(sparse.any(2).any(0), 0.0, torch.nan)
            self.packed.add("heads", "collapse", collapse, of_heads)

    def _order(self, sparse: Tensor) -> Float[Tensor, " order"]:
        """A random number below 1 for each row of attention, always the same."""
        size, device = sparse.numel(), sparse.device
        if size not in self._orders:
            self._orders[size] = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(device)
        return self._orders[size].to(device)

    def _check(self, x: Float[Tensor, "several ..."], rows: Sequence[Mapping[str, Any]]) -> None:
        """Count the non-finite values of tensors, to be reported with these names."""
        self.packed.add("faults", "count", (~x.isfinite()).flatten(1).sum(1), rows, "sum")


@dataclass(frozen=True)
class SparseRows:
    """Raw scores of near-one-hot rows of a layer: a fixed number, some of which may be other rows, which do not count."""

    layer: int
    heads: int
    scores: Transfer
    shift: Transfer | None
    of_head: Transfer
    counts: Transfer

    @classmethod
    def of(
        cls, attention: LayerAttention, sparse: Bool[Tensor, "rows heads queries"], order: Float[Tensor, " order"]
    ) -> "SparseRows":
        """The near-one-hot rows that come first in the given order; none where a bias is added to capped scores."""
        _, heads, queries = sparse.shape
        chosen = (order + sparse.flatten()).topk(min(_SPARSE, sparse.numel())).indices
        row, head, query = chosen // (heads * queries), chosen // queries % heads, chosen % queries

        def of_chosen(x: Tensor) -> Tensor:
            return x[row, head, query]

        raw, softmax = attention.raw_scores, attention.step.softmax
        unknown = softmax.bias is not None and softmax.softcap is not None
        shift = None if unknown else softmax.select(raw.shape, of_chosen).shift
        counts = sparse.flatten()[chosen] & (not unknown)
        shifts = None if shift is None else Transfer.of(shift)
        return cls(attention.layer, heads, Transfer.of(of_chosen(raw)), shifts, Transfer.of(head), Transfer.of(counts))


def collapse_of(layers: Sequence[SparseRows], noise: float) -> Iterator[tuple[int, Float[Tensor, " heads"]]]:
    """The mean exact collapse probability of every head, by layer; NaN for a head without near-one-hot rows.

    Computed where the training's device does not wait for it: on the CPU, for all layers with as many keys at once.
    """
    for keys in {rows.scores.host.shape[1] for rows in layers}:
        alike = [rows for rows in layers if rows.scores.host.shape[1] == keys]
        counts = [rows.counts.tensor for rows in alike]
        scores = torch.cat([rows.scores.tensor[known] for rows, known in zip(alike, counts, strict=True)])
        shift = None
        if any(rows.shift is not None for rows in alike):
            zeros = [torch.zeros_like(rows.scores.host) if rows.shift is None else rows.shift.tensor for rows in alike]
            shift = torch.cat([x[known] for x, known in zip(zeros, counts, strict=True)])
        probability = collapse_probability(scores, [noise], shift=shift)[0].double() if len(scores) else scores.new_zeros(0)
        start = 0
        for rows, known in zip(alike, counts, strict=True):
            of_head, end = rows.of_head.tensor[known], start + int(known.sum())
            total = torch.zeros(rows.heads, dtype=torch.float64).index_add_(0, of_head, probability[start:end].double())
            yield rows.layer, total / torch.bincount(of_head, minlength=rows.heads)
            start = end


def _heads(layer: int, heads: int) -> list[dict[str, int]]:
    return [{"layer": layer, "head": head} for head in range(heads)]


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _largest_over_median(x: Layers) -> Float[Tensor, " layers"]:
    """max|x| / median|x|; the median of so many values at most, evenly spaced."""
    size = x.flatten(1).abs().float()
    every = -(-size.shape[1] // _MEDIAN_OF)
    return size.amax(1) / size[:, ::every].median(1).values


def faults_only(tables: dict[str, Any]) -> None:
    """Leave the first rows of the table of faults that count any: of the pass as it met them, then of gradients."""
    faults = tables.pop("faults", None)
    if faults is None or not (faults["count"] > 0).any():
        return

    def met(row: Any) -> tuple[bool, int, int]:
        tensor = row["tensor"]
        return tensor.startswith(GRADIENT), row["layer"], _MET.index(tensor) if tensor in _MET else len(_MET)

    rows = faults[faults["count"] > 0].astype({"count": int}).to_dict("records")
    tables["faults"] = pd.DataFrame(sorted(rows, key=met)[:_FAULTS])
