"""Removal: what predictions lose when a block is skipped, so that its output is its input."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.measures.base import LAYER, Advance, Measure, Quantity, Subject, Tables
from normscope.measures.curves import columns, percent, statistic
from normscope.measures.predictions import predicted_scores, score_means
from normscope.models import NOTHING, Model, Observer, Sample
from normscope.models.describe import layers_named
from normscope.results.figures import Chart, Line
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import banded, floats, plain_rows, table_of

_HELD = 2**25  # numbers in the largest tensor of the runs that share a forward pass: logits, attention weights or states
_NEEDLESS = 0.01  # share of what a model gains over a uniform guess: blocks that cost less are the first to leave out
_NAMED = 3


def without_blocks(layers: Sequence[int]) -> Observer:
    """An observer of a batch of ``len(layers)`` equal parts: in each part another block's output is replaced by its input.

    Blocks that change the shape of the states cannot be skipped.
    """
    inputs: dict[int, Tensor] = {}

    def state(layer: int, x: Tensor) -> Tensor | None:
        rows = len(x) // len(layers)
        for part in (part for part, skipped in enumerate(layers) if skipped == layer - 1):
            x = torch.cat((x[: part * rows], inputs.pop(part).to(x), x[(part + 1) * rows :]))
        for part in (part for part, skipped in enumerate(layers) if skipped == layer):
            inputs[part] = x[part * rows : (part + 1) * rows].clone()
        return x

    return Observer(state=state)


def removal_scores(model: Model, sample: Sample, layers: Sequence[int]) -> Float[Tensor, "layers 2 predicted"]:
    """Accuracy and loss of every predicted token without each of some blocks, from one forward pass of as many copies."""
    copies = sample.mapped(lambda name, x: x.repeat(len(layers), *[1] * (x.ndim - 1)))
    scores = predicted_scores(model, copies, without_blocks(layers))
    return torch.stack(scores.chunk(len(layers), -1))


def beginning(sample: Sample, predictions: int) -> Sample:
    """The first rows of a sample with so many targets, or the beginning of its first row if that has enough; all with fewer.

    Rows of an encoder-decoder that reads two texts are not cut.
    """
    wanted = sample.predicting.targets != NOTHING
    rows = int((wanted.sum(1).cumsum(0) < predictions).sum()) + 1
    short = rows == 1 and sample.decoded is None
    tokens = int((wanted[0].cumsum(0) < predictions).sum()) + 1 if short else None
    return sample.mapped(lambda name, x: x[:rows] if name == "features" else x[:rows, :tokens])


@dataclass(frozen=True)
class Removal(Measure):
    """Loss and accuracy without each block: x_{ℓ+1} = x_ℓ for one ℓ at a time, the rest of the model as it is.

    Attributes:
        predictions: how many targets of the sample are predicted, the first ones: the model runs once for every block.
    """

    predictions: int = 64

    name: ClassVar[str] = "removal"
    title: ClassVar[str] = "Loss without a block"
    needs: ClassVar[frozenset[str]] = frozenset({"stream", "predictions"})
    passes: ClassVar[str] = "1 + layers, of 64 predictions; several of them as one batch"
    order: ClassVar[int | None] = 47
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "removal", "Loss without a block", LAYER, "rise of the loss",
            "How much the loss rises when a block is skipped; blocks near 0 are hardly needed on this text.",
            "removal", columns("layer", "loss_change"), "rise of the loss without a block, median layer", statistic("median"),
            ratio=False,
        ),
    )  # fmt: skip

    def measure(self, subject: Subject, advance: Advance = lambda done: None) -> Tables:
        """Table ``removal``: the clean model with layer None, and every block that can be skipped."""
        model, sample, shapes = subject.model, beginning(subject.sample, self.predictions), dict[int, torch.Size]()
        clean = predicted_scores(model, sample, Observer(state=lambda layer, x: shapes.update({layer: x.shape})))
        if not bool(clean.isfinite().all()):
            return {}
        count = {"tokens": clean.shape[1]}
        rows: list[dict[str, Any]] = [{"layer": None, **score_means(clean, clean, sample), **count}]
        layers = [layer for layer in range(model.layers) if shapes[layer] == shapes[layer + 1]]
        most = max((sample.tokens, sample.predicting.tokens), key=torch.Tensor.numel)
        largest = max(model.vocabulary, model.heads * most.shape[1], 8 * model.dim)
        together = max(1, _HELD // (most.numel() * largest))
        for first in range(0, len(layers), together):
            some = layers[first : first + together]
            for layer, scores in zip(some, removal_scores(model, sample, some), strict=True):
                rows.append({"layer": layer, **score_means(scores, clean, sample), **count})
            advance(first + len(some))
        return {"removal": pd.DataFrame(rows).astype({"layer": "Int64"})}

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The rise of the loss."""
        return {"loss without it": {row["layer"]: f"{row['loss_change']:+.3g}" for row in _removed(tables)}}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """The blocks whose removal hurts most and least."""
        table, rows = table_of(tables, "removal"), _removed(tables)
        if table is None or not rows:
            return
        clean, named = float(table["loss"].iloc[0]), max(1, min(_NAMED, len(rows) // 2))
        guess = math.log(about["vocabulary"])
        if clean >= guess:
            text = f"Without any change the loss is {clean:.3g}, that of a uniform guess ({guess:.3g}) or more"
            yield Finding(f"{text}: what single blocks contribute cannot be seen in it.", "removal")
            return
        falling = sorted(rows, key=lambda row: -float(row["loss_change"]))
        most, least = (", ".join(map(_cost, some)) for some in (falling[:named], falling[: -named - 1 : -1]))
        needless = [row["layer"] for row in rows if row["loss_change"] < _NEEDLESS * (guess - clean)]
        each = "costs" if len(needless) == 1 else "each cost"
        few = f" {layers_named(needless).capitalize()} {each} less than {percent(_NEEDLESS)} of the gain over a uniform guess."
        median = float(table["loss_change"].iloc[1:].median())
        yield Finding(
            f"Skipping a block raises the loss of {clean:.3g} (of the first {table['tokens'].iloc[0]} predictions) most in "
            f"layer {most}, and least in layer {least}."
            f"{few if needless else ''}",
            "removal",
            "Blocks that can be skipped" if needless else "Every block is needed",
            "notice" if needless else "ok",
            falling[0]["loss_change"],
            f"The median block costs {median:+.3g}; a uniform guess has a loss of {guess:.3g}.",
            f"Prune {layers_named(needless)} one at a time, and measure again: costs do not add up." if needless else "",
            weight=50,
        )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Loss by the block that is skipped, beside that of the whole model."""
        table = table_of(tables, "removal")
        if table is None:
            return None
        rows = table[table["layer"].notna()]
        layers = floats(rows["layer"])
        lines = (
            banded("without the block", rows, "layer", "loss"),
            Line("whole model", layers, [table["loss"].iloc[0]] * len(layers)),
        )
        chart = Chart(
            "Loss without a block", "layer that is skipped", "loss", lines,
            "Blocks whose point is on the line of the whole model are hardly needed on this text.", settings,
        )  # fmt: skip
        text = (
            "One block at a time is skipped: the stream after it is the stream before it, and the rest of the model runs as it "
            "is. Bands are one standard error over tokens. Blocks that change the shape of the stream cannot be skipped.",
        )
        return self.page(text, {"removal": chart})


def _removed(tables: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """The rows of blocks whose removal leaves a finite loss."""
    table = table_of(tables, "removal")
    rows = [] if table is None else plain_rows(table)
    return [row for row in rows if row["layer"] is not None and row["loss_change"] is not None]


def _cost(row: Mapping[str, Any]) -> str:
    return f"{row['layer']} ({row['loss_change']:+.3g})"
