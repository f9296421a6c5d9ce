"""Batches of examples as a model reads them: packed in one row without padding, in rows of their own, or split in two.

A ``Feed`` draws several batches at once, each a function of the seed and its place in the run alone, and says how one of them enters
the model.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from normscope.attention import Causal, Packed, Present, has_kernel, pack_tiles, tile_for
from normscope.tasks import MASK, Addition, Examples
from normscope.transformer import Row, Transformer

Batches = dict[str, Tensor]
_SAMPLE = 20_000
_MARGIN = 4.0  # standard deviations: a batch overflows about once in 30,000
_ROUND = 128


class Feed(Protocol):
    """How examples become batches, and a batch becomes logits."""

    def arrange(self, examples: Examples, offsets: Tensor, batches: int) -> Batches:
        """Tensors with the batches along their first dimension."""

    def trimmed(self, batch: Batches) -> Batches:
        """A batch without what all its rows leave empty; asks the device, so for the CPU alone."""

    def logits(self, model: Transformer, batch: Batches) -> Tensor:
        """The model's logits, a row for each of ``batch["targets"].flatten()``."""


@dataclass(frozen=True)
class PaddedFeed:
    """Every example in a row of its own, followed by masks."""

    def arrange(self, examples: Examples, offsets: Tensor, batches: int) -> Batches:
        """Characters, positions and targets, (batches, rows, places)."""
        places = torch.arange(examples.inputs.shape[1], device=offsets.device)
        parts = {
            "characters": examples.inputs,
            "positions": places + offsets[:, None],
            "targets": examples.targets,
        }
        return {name: part.unflatten(0, (batches, -1)) for name, part in parts.items()}

    def trimmed(self, batch: Batches) -> Batches:
        """The batch up to the end of its longest example."""
        used = int((batch["targets"] != MASK).any(0).nonzero().max()) + 1
        return {name: values[:, :used] for name, values in batch.items()}

    def logits(self, model: Transformer, batch: Batches) -> Tensor:
        """Logits of every place."""
        return model(Row(batch["characters"], batch["positions"], Causal())).flatten(0, 1)


@dataclass(frozen=True)
class SplitFeed:
    """The question for an encoder; ``[`` and the answer, at most ``answer`` places, for a decoder; each in rows of their own."""

    answer: int

    def arrange(self, examples: Examples, offsets: Tensor, batches: int) -> Batches:
        """Question, answer and targets, (batches, rows, places)."""
        asked, ends = examples.answers[:, None], examples.lengths[:, None]
        places = torch.arange(examples.characters.shape[1], device=offsets.device)

        def characters(at: Tensor) -> Tensor:
            return torch.where(at < ends, examples.characters.gather(1, at.clamp(max=len(places) - 1)), MASK)

        targets = characters(asked + places[: self.answer])
        parts = {
            "question": torch.where(places < asked, examples.characters, MASK),
            "question_there": places < asked,
            "positions": places + offsets[:, None],
            "answer": torch.cat((examples.characters[:, :1], targets[:, :-1]), 1),
            "targets": targets,
        }
        return {name: part.unflatten(0, (batches, -1)) for name, part in parts.items()}

    def trimmed(self, batch: Batches) -> Batches:
        """The batch as it is."""
        return batch

    def logits(self, model: Transformer, batch: Batches) -> Tensor:
        """Logits of every place of the decoder."""
        seen = Present(batch["question_there"])
        source = Row(batch["question"], batch["positions"], seen)
        answer = Row(batch["answer"], batch["positions"][:, : self.answer], Causal())
        return model(answer, source, seen).flatten(0, 1)


@dataclass(frozen=True)
class PackedFeed:
    """All examples of a batch one after another in one row of ``tokens`` places.

    The row is a little longer than a batch is on average; examples that do not fit, about one in as many batches as ``_MARGIN`` says,
    are left out, and places that stay empty are examples of masks without targets.
    """

    tokens: int
    tile: int
    fillers: int

    @classmethod
    def of(cls, task: Addition, batch: int, tile: int) -> "PackedFeed":
        """The row for batches of that many examples, from the lengths of a fixed sample."""
        lengths = (task.draw(_SAMPLE, torch.Generator().manual_seed(0)).lengths - 1).double()
        expected = batch * float(lengths.mean()) + _MARGIN * math.sqrt(batch) * float(lengths.std())
        tokens = math.ceil(min(expected, batch * (task.longest - 1)) / _ROUND) * _ROUND
        return cls(tokens, tile, fillers=math.ceil(tokens / tile))

    def arrange(self, examples: Examples, offsets: Tensor, batches: int) -> Batches:
        """Characters, positions, targets and segments (batches, tokens), and where tiles begin."""
        read, places = examples.read, torch.arange(examples.read.shape[1], device=offsets.device)
        lengths = (examples.lengths - 1).unflatten(0, (batches, -1))
        lengths = lengths * (lengths.cumsum(1) <= self.tokens)
        begins = lengths.cumsum(1) - lengths
        target = begins.flatten()[:, None] + places
        target = torch.where(read & (lengths.flatten()[:, None] > 0), target, self.tokens).unflatten(0, (batches, -1)).flatten(1)

        def packed(values: Tensor, empty: int) -> Tensor:
            row = torch.full((batches, self.tokens + 1), empty, device=offsets.device)
            return row.scatter_(1, target, values.unflatten(0, (batches, -1)).flatten(1))[:, :-1].contiguous()

        numbers = torch.arange(lengths.shape[1], device=offsets.device).repeat(batches)[:, None].expand_as(read)
        left = self.tokens - lengths.sum(1, keepdim=True)
        fillers = (left - self.tile * torch.arange(self.fillers, device=offsets.device)).clamp(0, self.tile)
        along = torch.arange(self.tokens, device=offsets.device) - (self.tokens - left)
        segments = torch.where(along < 0, packed(numbers, 0), lengths.shape[1] + along // self.tile)
        return {
            "characters": packed(examples.inputs, MASK),
            "positions": packed(places + offsets[:, None], 0),
            "targets": packed(examples.targets, MASK),
            "segments": segments.int(),
            "tiles": pack_tiles(torch.cat((lengths, fillers), 1), self.tokens, self.tile),
        }

    def trimmed(self, batch: Batches) -> Batches:
        """The batch as it is."""
        return batch

    def logits(self, model: Transformer, batch: Batches) -> Tensor:
        """Logits of every place of the row."""
        reach = Packed(batch["segments"], batch["tiles"], self.tile)
        return model(Row(batch["characters"][None], batch["positions"][None], reach))[0]


def feed_for(task: Addition, model: Transformer, batch: int, device: torch.device, precision: torch.dtype) -> Feed:
    """Packed rows where a GPU has a kernel for them, rows of their own elsewhere, split rows for an encoder-decoder."""
    if model.config.encoder_layers:
        return SplitFeed(task.longest_answer)
    tile = tile_for(task.longest - 1)
    if tile is not None and has_kernel(device, precision, model.config.head):
        return PackedFeed.of(task, batch, tile)
    return PaddedFeed()


def draw_batches(
    task: Addition, feed: Feed, batches: int, batch: int, offsets: int, seed: int, device: torch.device
) -> Batches:
    """Batches from a seed: examples, and for each an offset of its positions, uniform in 0..offsets."""
    generator = torch.Generator(device).manual_seed(seed)
    examples = task.draw(batches * batch, generator)
    shifts = torch.randint(offsets + 1, (batches * batch,), generator=generator, device=device)
    return feed.arrange(examples, shifts, batches)


def one_batch(batches: Batches, index: int) -> Batches:
    """One of several batches."""
    return {name: values[index] for name, values in batches.items()}
