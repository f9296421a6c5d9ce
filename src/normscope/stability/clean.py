"""All that one clean forward pass tells: spread, sparsity, and the probability that a circuit collapses."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.models import AttentionStep, Model, Observer, Sample
from normscope.stability.collapse import collapse_margin, collapse_probability, sampled_collapse
from normscope.stability.noise import NON_SPARSE, SPARSE
from normscope.stability.spread import spread_rows

CLEAN_MEASURES = ("spread", "collapse", "sparsity")
_BINS = 20
_MAP = 64  # tokens of an attention map
_MAPS = 6


def measure_clean(
    view: Model,
    sample: Sample,
    measures: Collection[str] = CLEAN_MEASURES,
    levels: Sequence[float] = (0.01, 0.03, 0.1, 0.3),
    noise: str = "uniform",
    draws: int = 16,
    sampled: int = 512,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, pd.DataFrame]:
    """Tables by name: ``spread``, ``collapse`` and ``margins``, ``sparsity``, ``maxima``, ``maps`` and ``tokens``.

    Args:
        view: the model.
        sample: what it reads; the first token of every row does not count as a receiver, and for spread not as a sender.
        measures: some of ``CLEAN_MEASURES``.
        levels: RMS of the noise on the norms of keys and queries.
        noise: ``uniform`` or ``gaussian``.
        draws: for the strict definition, which has no closed form; 0 leaves it out.
        sampled: the most sparse distributions of a layer that are drawn for.
        seed: of those draws.
        progress: told the number of layers that are done.
    """
    generator = torch.Generator(sample.tokens.device).manual_seed(seed)
    tables = _Tables(view, sample, set(measures), list(levels), noise, draws, sampled, generator)

    def observe(step: AttentionStep) -> None:
        tables.add(step)
        progress(step.layer + 1)

    view.forward(sample, Observer(attention=observe))
    return tables.finished()


@dataclass
class _Tables:
    """Rows of the tables, a layer at a time; no layer's scores outlive it."""

    view: Model
    sample: Sample
    measures: set[str]
    levels: list[float]
    noise: str
    draws: int
    sampled: int
    generator: torch.Generator
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    maps: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _totals: dict[str, Tensor] = field(default_factory=dict)

    def add(self, step: AttentionStep) -> None:
        """What one layer adds."""
        raw = step.raw_scores()
        weights = step.soften(raw)
        later = self.sample.attention_mask.clone()
        later[:, 0] = False
        if "spread" in self.measures:
            received = (later.to(weights)[:, None, None] @ weights).squeeze(2).transpose(0, 1)[:, later]
            self._keep("spread", spread_rows(step.layer, step.stream.norm(dim=-1)[later], received))
        by_head = weights.amax(-1).transpose(0, 1)[:, later]
        if "sparsity" in self.measures:
            self._add_sparsity(step.layer, by_head)
            size = min(_MAP, int(self.sample.attention_mask[0].sum()))
            for head in range(len(by_head)):
                self.maps[step.layer, head] = weights[0, head, :size, :size].clone()
        if "collapse" in self.measures:
            sparse = by_head >= SPARSE
            scores = raw.transpose(0, 1)[:, later][sparse]
            self._add_collapse(step, scores, sparse)
        if "sparsity" in self.measures:
            self.maps = {one: self.maps[one] for one in self._most_telling()}

    def finished(self) -> dict[str, pd.DataFrame]:
        """The tables, with the lines of the whole model."""
        if "collapse" in self.measures:
            self._keep("collapse", self._whole_model())
        if "sparsity" in self.measures:
            whole = self._totals["maxima"]
            self._keep("maxima", _histogram(None, None, whole))
            self._keep("sparsity", [self._sparsity_of_all()])
            self._keep("maps", self._chosen_maps())
            size = min(_MAP, int(self.sample.attention_mask[0].sum()))
            words = self.view.words(self.sample.tokens[0, :size])
            self._keep("tokens", [{"position": i, "text": word} for i, word in enumerate(words)])
        tables = {name: pd.DataFrame(rows) for name, rows in self.rows.items()}
        for table in tables.values():
            for column in ("layer", "head"):
                if column in table:
                    table[column] = table[column].astype("Int64")
        return tables

    def _keep(self, table: str, rows: list[dict[str, Any]]) -> None:
        self.rows.setdefault(table, []).extend(rows)

    def _add_sparsity(self, layer: int, maxima: Float[Tensor, "heads distributions"]) -> None:
        bins = (maxima * _BINS).long().clamp(max=_BINS - 1)
        counts = torch.stack([torch.bincount(row, minlength=_BINS) for row in bins]).cpu()
        self._totals["maxima"] = self._totals.get("maxima", torch.zeros(_BINS, dtype=torch.long)) + counts.sum(0)
        for head in (None, *range(len(maxima))):
            own = maxima if head is None else maxima[head]
            sparse = int((own >= SPARSE).sum())
            row = {
                "layer": layer,
                "head": head,
                "distributions": own.numel(),
                "sparse": sparse,
                "share": sparse / max(own.numel(), 1),
                "non_sparse_share": float((own < NON_SPARSE).double().mean()),
                "mean_max": float(own.double().mean()),
            }
            self._keep("sparsity", [row])
            self._keep("maxima", _histogram(layer, head, counts.sum(0) if head is None else counts[head]))

    def _sparsity_of_all(self) -> dict[str, Any]:
        heads = [row for row in self.rows["sparsity"] if row["head"] is not None]
        count = sum(int(row["distributions"]) for row in heads)

        def mean(column: str) -> float:
            return sum(float(row[column]) * int(row["distributions"]) for row in heads) / max(count, 1)

        shares = {column: mean(column) for column in ("share", "non_sparse_share", "mean_max")}
        return {"layer": None, "head": None, "distributions": count, "sparse": sum(row["sparse"] for row in heads), **shares}

    def _add_collapse(
        self, step: AttentionStep, scores: Float[Tensor, "sparse keys"], sparse: Bool[Tensor, "heads distributions"]
    ) -> None:
        """Exact probabilities of the loose definition, drawn ones of the strict, and the margins."""
        of_head = sparse.nonzero()[:, 0]
        disturbed = "k" not in self.view.normalised_heads
        probability = torch.zeros(len(self.levels), len(scores), device=scores.device)
        margins = torch.full((len(scores),), torch.nan, device=scores.device)
        if disturbed and len(scores):
            probability = collapse_probability(scores, self.levels, self.noise)
            margins = collapse_margin(scores)
        every = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
        self._add_probabilities(step.layer, "loose", probability, of_head, every, len(sparse))
        self._add_margins(step.layer, margins, of_head, len(sparse))
        if self.draws:
            kept = torch.randperm(len(scores), generator=self.generator, device=scores.device)[: self.sampled].sort().values
            strict = torch.zeros(len(self.levels), len(scores), device=scores.device)
            drawn = torch.zeros_like(every).index_fill(0, kept, True)
            moved = kept[self._can_collapse(margins[kept])]
            if disturbed and len(moved):
                strict[:, moved] = sampled_collapse(
                    scores[moved], step.scale, self.levels, self.draws, self.generator, self.noise, SPARSE, softcap=step.softcap
                ).strict
            self._add_probabilities(step.layer, "strict", strict, of_head, drawn, len(sparse))

    def _can_collapse(self, margins: Float[Tensor, " sparse"]) -> Bool[Tensor, " sparse"]:
        """Whether uniform noise of the largest level reaches a distribution's margin; Gaussian noise reaches all."""
        return margins < math.sqrt(3) * max(self.levels) if self.noise == "uniform" else torch.ones_like(margins).bool()

    def _add_probabilities(
        self,
        layer: int,
        definition: str,
        found: Float[Tensor, "levels sparse"],
        of_head: Int[Tensor, " sparse"],
        known: Bool[Tensor, " sparse"],
        heads: int,
    ) -> None:
        """Means over the distributions that are known, of the layer and of each head."""
        for head in (None, *range(heads)):
            own = torch.ones_like(known) if head is None else of_head == head
            values, count = found[:, own & known].double(), int(own.sum())
            drawn = values.shape[1]
            means, errors = [math.nan] * len(self.levels), [0.0] * len(self.levels)
            if drawn:
                means = values.mean(1).tolist()
            if definition == "strict":
                errors = _drawn_errors(values, self.draws, count).tolist()
            rows = [
                _probability(layer, head, level, definition, mean, stderr, count)
                for level, mean, stderr in zip(self.levels, means, errors, strict=True)
            ]
            self._keep("collapse", rows)

    def _whole_model(self) -> list[dict[str, Any]]:
        """The layers together, each by the number of its sparse distributions."""
        layers = [row for row in self.rows["collapse"] if row["head"] is None and row["sparse"]]
        definitions = dict.fromkeys(row["definition"] for row in self.rows["collapse"])
        rows = []
        for definition, level in product(definitions, self.levels):
            parts = [row for row in layers if row["definition"] == definition and row["noise"] == level]
            count = sum(row["sparse"] for row in parts)
            mean = sum(row["sparse"] * row["probability"] for row in parts) / count if count else math.nan
            error = math.hypot(*(row["sparse"] * row["stderr"] for row in parts)) / max(count, 1)
            rows.append(_probability(None, None, level, definition, mean, error, count))
        return rows

    def _add_margins(self, layer: int, margins: Tensor, of_head: Tensor, heads: int) -> None:
        for head in range(heads):
            own = margins[of_head == head].double()
            known = bool(len(own)) and not bool(own.isnan().any())
            row = {
                "layer": layer,
                "head": head,
                "margin": float(own.min()) if known else torch.nan,
                "median_margin": float(own.median()) if known else torch.nan,
                "sparse": len(own),
            }
            self._keep("margins", [row])

    def _most_telling(self) -> list[tuple[int, int]]:
        """The heads so far that lose most to noise, where that is known, then those with the largest share that is sparse."""
        share = {(r["layer"], r["head"]): r["share"] for r in self.rows["sparsity"] if r["head"] is not None}
        risk = {
            (row["layer"], row["head"]): row["probability"] * row["sparse"]
            for row in self.rows.get("collapse", [])
            if row["definition"] == "loose" and row["head"] is not None and row["noise"] == self.levels[-1] and row["sparse"]
        }
        return sorted(self.maps, key=lambda one: (-risk.get(one, 0.0), -share[one], one))[:_MAPS]

    def _chosen_maps(self) -> list[dict[str, Any]]:
        return [
            {"layer": layer, "head": head, "query": query, "key": key, "weight": weight}
            for layer, head in sorted(self.maps)
            for query, row in enumerate(self.maps[layer, head].tolist())
            for key, weight in enumerate(row)
        ]


def _drawn_errors(shares: Float[Tensor, "levels drawn"], draws: int, count: int) -> Float[Tensor, " levels"]:
    """Standard errors of mean shares: each share's own from its draws, and that of having drawn for a part of ``count`` only.

    A share of 0 or 1 has an error too: half a draw is added to either side.
    """
    drawn = shares.shape[1]
    if not drawn:
        return torch.full((len(shares),), math.nan, dtype=shares.dtype)
    likely = (shares * draws + 0.5) / (draws + 1)
    own = (likely * (1 - likely)).sum(1) / draws / drawn**2
    among = shares.var(1, correction=0) / drawn * (1 - drawn / count)
    return (own + among).sqrt()


def _probability(
    layer: int | None, head: int | None, noise: float, definition: str, probability: float, stderr: float, sparse: int
) -> dict[str, Any]:
    return {
        "layer": layer,
        "head": head,
        "noise": noise,
        "definition": definition,
        "probability": probability,
        "stderr": stderr,
        "sparse": sparse,
    }


def _histogram(layer: int | None, head: int | None, counts: Tensor) -> list[dict[str, Any]]:
    return [
        {"layer": layer, "head": head, "low": i / _BINS, "high": (i + 1) / _BINS, "count": count}
        for i, count in enumerate(counts.tolist())
    ]
