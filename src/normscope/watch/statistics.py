"""What one forward pass of the probe shows, layer by layer; numbers stay on the device until the pass is over."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.core.norms import degrees_between, effective_rank, length, mean_cosine, unit, visible_part
from normscope.errors import InputError
from normscope.measures.base import LayerAttention
from normscope.measures.collapse_probability import collapse_probability
from normscope.measures.speed import speeds_of
from normscope.measures.states import MIXING, norm_kind
from normscope.models import AttentionStep, Model, Observer, Sample, SublayerStep
from normscope.models.model import BlockNorm
from normscope.results.conventions import NEAR_ONE_HOT
from normscope.watch.packed import Packed

_MEDIAN_OF = 1 << 18  # values of a state that its median is taken of, evenly spaced
_SPARSE = 256  # near-one-hot rows of a layer whose collapse probability is computed, evenly spaced
Counted = Float[Tensor, "counted dim"]


class Statistics:
    """Adds what a pass of the probe shows to packed numbers.

    Means are taken over the tokens without padding and without the first of every row, as in an audit.
    """

    def __init__(self, model: Model, sample: Sample, noise: float) -> None:
        self.model, self.noise = model, noise
        self.kind = norm_kind(model)
        self.rows, self.tokens = sample.tokens.shape
        counted = sample.attention_mask.clone()
        counted[:, 0] = False
        self._masks = {True: sample.attention_mask, False: counted}
        self._chosen = {every: mask.flatten().nonzero().squeeze(1) for every, mask in self._masks.items()}
        self.disturbed = "k" not in model.normalised_heads  # a norm of the keys removes noise on their norms

    def read(self, packed: Packed) -> Observer:
        """An observer of one pass, which adds to ``packed``; ``finish`` must follow it."""
        self.packed = packed
        self.norms = {(norm.layer, norm.sublayer, norm.slot): norm for norm in self.model.norms}
        self._before: Counted | None = None
        self._sparse: dict[int, list[_SparseRows]] = defaultdict(list)
        sublayers, attention = "sublayers" in self.model.offers, bool(self.model.attention_layers)
        return Observer(self._attention if attention else None, self._sublayer if sublayers else None, self._state)

    def _tokens(self, x: Float[Tensor, "rows positions dim"], every: bool = False) -> Counted:
        """The tokens that count, or all but padding, as far as a norm sees them, in float64.

        All positions where a layer has others than the sample, as pyramids do.
        """
        return visible_part(self._select(x, every), self.kind).double()

    def _select(self, x: Float[Tensor, "rows positions dim"], every: bool = False) -> Counted:
        flat = x.flatten(0, 1)
        same = x.shape[:2] == (self.rows, self.tokens)
        return flat.index_select(0, self._chosen[every].to(x.device)) if same else flat

    def _state(self, layer: int, x: Tensor) -> None:
        """Norm, clustering and largest value of the states before a layer; update and rotation of the layer before it."""
        place, tokens, before = {"layer": layer}, self._tokens(x), self._before
        directions = unit(tokens, quick=True).float()
        numbers = {
            "norm": length(tokens).mean(),
            "cosine": mean_cosine(tokens, quick=True),
            "rank": effective_rank(directions),
            "massive": _largest_over_median(self._select(x, every=True)),
        }
        for column, value in numbers.items():
            self.packed.add("layers", column, value, place, over_ranks="max" if column == "massive" else "mean")
        if before is not None and before.shape == tokens.shape:
            block = {"layer": layer - 1}
            self.packed.add("layers", "update", (length(tokens - before) / length(before)).mean(), block)
            self.packed.add("layers", "rotation", degrees_between(before, tokens).mean(), block)
        self._before = tokens
        self._check("residual stream", layer, x)

    def _sublayer(self, step: SublayerStep) -> None:
        """Size and scale of an update, and the speed of attention beside theory."""
        place = {"layer": step.layer, "sublayer": step.sublayer}
        realised = self._realised(step)
        before, update = self._tokens(realised.before), self._tokens(realised.update)
        self.packed.add("sublayers", "update", (length(update) / length(before)).mean(), place)
        self.packed.add("sublayers", "scale", realised.step.double().mean(), place)
        self.packed.add("sublayers", "carry", realised.carry.double().mean(), place)
        self._check(f"{step.sublayer} output", step.layer, step.output)
        if step.sublayer in MIXING:
            speeds = speeds_of(self.model, realised, self.kind, self._select, self._norm_at)
            self.packed.add("layers", "speed", speeds.measured, {"layer": step.layer})
            if speeds.theory is not None:
                self.packed.add("layers", "theory", speeds.theory, {"layer": step.layer})

    def _realised(self, step: SublayerStep) -> SublayerStep:
        """The step with the update and the scale of now: those of a model in memory are from when it was opened.

        Without a norm of the sum the update is what the states differ by; its scale is ⟨update, y⟩/|y|² for the output y, or
        for the update with the old scale where an output norm stands between.
        """
        if step.after is None or self._norm_at(step.layer, step.sublayer, "stream") is not None:
            return step
        update, y, scale = step.after - step.carry * step.before, step.output, torch.ones(())
        if self._norm_at(step.layer, step.sublayer, "output") is not None:
            y, scale = step.update, step.step.double().mean()
        update, y = update.double(), y.double()
        fitted = scale.to(y) * (update * y).sum() / y.square().sum()
        return replace(step, update=update.to(step.output), step=fitted)

    def _norm_at(self, layer: int, sublayer: str, slot: str) -> BlockNorm | None:
        return self.norms.get((layer, sublayer, slot))

    def _attention(self, step: AttentionStep) -> None:
        """Logits, entropy, sinks and sparsity of every head; scores of near-one-hot rows are kept for ``finish``."""
        queries = step.q.shape[2]
        same = (len(step.q), queries) == (self.rows, self.tokens)
        counted = self._masks[False].to(step.q.device) if same else step.q.new_ones(len(step.q), queries).bool()
        attention = LayerAttention(step, counted)
        logits, weights = step.logits(attention.raw_scores), attention.weights
        share = counted / counted.sum()

        def mean(values: Float[Tensor, "rows heads queries"]) -> Float[Tensor, " heads"]:
            return torch.einsum("rhq,rq->h", values.double(), share.double())

        sparse = (attention.largest >= NEAR_ONE_HOT) & counted[:, None]
        columns = {
            "logit": logits.amax((0, 2, 3)),
            "entropy": mean(torch.special.entr(weights).sum(-1)),
            "sink": mean(weights[..., 0]),
            "sparse": mean(sparse),
        }
        rows = [{"layer": step.layer, "head": head} for head in range(weights.shape[1])]
        for column, values in columns.items():
            self.packed.add("heads", column, values, rows, "max" if column == "logit" else "mean")
        self._check("queries", step.layer, step.q)
        self._check("keys", step.layer, step.k)
        kept = _SparseRows.of(attention, sparse)
        self._sparse[kept.scores.shape[1]].append(kept)

    def finish(self) -> None:
        """Add the collapse probabilities, of all layers with as many keys at once."""
        for layers in self._sparse.values():
            known = [layer for layer in layers if layer.known and self.disturbed]
            if known:
                scores = torch.cat([layer.scores for layer in known])
                biased = any(layer.shift is not None for layer in known)
                shift = torch.cat([layer.shifts for layer in known]) if biased else None
                probabilities = collapse_probability(scores, [self.noise], shift=shift)[0]
            start = 0
            for layer in layers:
                size = len(layer.scores)
                layer.add(self.packed, probabilities[start : start + size] if layer in known else layer.scores.new_zeros(size))
                start += size * (layer in known)

    def _check(self, tensor: str, layer: int, x: Tensor) -> None:
        """Count non-finite values."""
        count = (~x.isfinite()).sum()
        self.packed.add("faults", "count", count, {"tensor": tensor, "layer": layer}, over_ranks="sum")


@dataclass(frozen=True, eq=False)
class _SparseRows:
    """Raw scores of some near-one-hot rows of a layer, evenly spaced over its heads."""

    layer: int
    heads: int
    scores: Float[Tensor, "sparse keys"]
    shift: Float[Tensor, "sparse keys"] | None
    of_head: Int[Tensor, " sparse"]
    known: bool = True

    @classmethod
    def of(cls, attention: LayerAttention, sparse: Bool[Tensor, "rows heads queries"]) -> "_SparseRows":
        """At most 256 of the rows."""
        places = sparse.transpose(0, 1).nonzero()
        if len(places) > _SPARSE:
            places = places[torch.linspace(0, len(places) - 1, _SPARSE, device=places.device).long()]
        head, row, query = places.unbind(1)

        def chosen(x: Tensor) -> Tensor:
            return x[row, head, query]

        raw = attention.raw_scores
        try:
            shift = attention.step.softmax.select(raw.shape, chosen).shift
        except InputError:  # a bias that is added to capped scores: the probability is not known
            return cls(attention.layer, raw.shape[1], chosen(raw), None, head, known=False)
        return cls(attention.layer, raw.shape[1], chosen(raw), shift, head)

    @property
    def shifts(self) -> Float[Tensor, "sparse keys"]:
        """The bias, or zeros."""
        return torch.zeros_like(self.scores) if self.shift is None else self.shift.to(self.scores)

    def add(self, packed: Packed, probability: Float[Tensor, " sparse"]) -> None:
        """The mean of every head: 0/0 for one without near-one-hot rows."""
        total, count = (
            torch.zeros(self.heads, dtype=torch.float64, device=self.of_head.device).index_add_(0, self.of_head, x.double())
            for x in (probability, torch.ones_like(probability))
        )
        mean = total / count if self.known else torch.full_like(total, torch.nan)
        packed.add("heads", "collapse", mean, [{"layer": self.layer, "head": head} for head in range(self.heads)])


def _largest_over_median(x: Float[Tensor, "tokens dim"]) -> Float[Tensor, ""]:
    """max|x| / median|x|; the median of so many values at most, evenly spaced."""
    size = x.abs().flatten().float()
    part = size[:: -(-len(size) // _MEDIAN_OF)] if len(size) > _MEDIAN_OF else size
    return size.max() / part.median()


def faults_only(tables: dict[str, Any]) -> None:
    """Leave the rows of the table of faults that count any."""
    faults = tables.pop("faults", None)
    if faults is not None and (faults["count"] > 0).any():
        tables["faults"] = faults[faults["count"] > 0].reset_index(drop=True).astype({"count": int})
