"""Examples as a model reads them: packed in one row without padding, in rows of their own, or split in two.

A feed of addition arranges several batches at once, and says how one of them enters the model.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from normscope.core import CausalMask, PackedMask, PaddingMask, has_kernel, pack_tiles, tile_for
from normscope.training.batches import Batches, Feed, Reads, one_batch
from normscope.training.tasks.addition.examples import MASK, Addition, Examples
from normscope.training.tasks.task import NOTHING
from normscope.transformer import Row, Transformer

_SAMPLE = 20_000
_MARGIN = 3.0  # standard deviations: one batch in a thousand is longer
_ROUND = 64


@runtime_checkable
class ExamplesFeed(Feed, Protocol):
    """A feed of whole examples."""

    def arrange(self, examples: Examples, offsets: Tensor, batches: int) -> Batches:
        """Tensors with the batches along their first dimension."""


@dataclass(frozen=True)
class PaddedFeed:
    """Every example in a row of its own, followed by masks."""

    ignored: ClassVar[int] = MASK

    def arrange(self, examples: Examples, offsets: Tensor, batches: int) -> Batches:
        """Characters, positions and targets, (batches, rows, places)."""
        places = torch.arange(examples.inputs.shape[1], device=offsets.device)
        parts = {
            "characters": examples.inputs,
            "positions": places + offsets[:, None],
            "targets": examples.targets,
        }
        return {name: _by_batch(part, batches) for name, part in parts.items()}

    def trimmed(self, batch: Batches) -> Batches:
        """The batch up to the end of its longest example."""
        used = _width(batch["targets"] != MASK)
        return {name: values[:, :used] for name, values in batch.items()}

    def logits(self, model: Reads, batch: Batches) -> Tensor:
        """Logits of every place."""
        logits: Tensor = model(Row(batch["characters"], batch["positions"], CausalMask()))
        return logits.flatten(0, 1)

    def observed(self, batch: Batches) -> Batches:
        """What ``Task.probe`` returns of a batch."""
        batch = self.trimmed(batch)
        targets = torch.where(batch["targets"] == MASK, NOTHING, batch["targets"])
        return {**batch, "targets": targets, "there": batch["characters"] != MASK}


@dataclass(frozen=True)
class SplitFeed:
    """The sum for an encoder; ``[`` and the answer, at most ``answer`` places, for a decoder; in rows of their own."""

    ignored: ClassVar[int] = MASK

    answer: int

    def arrange(self, examples: Examples, offsets: Tensor, batches: int) -> Batches:
        """Sum, answer and targets, (batches, rows, places)."""
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
        return {name: _by_batch(part, batches) for name, part in parts.items()}

    def trimmed(self, batch: Batches) -> Batches:
        """The batch as it is."""
        return batch

    def logits(self, model: Reads, batch: Batches) -> Tensor:
        """Logits of every place of the decoder."""
        seen = PaddingMask(batch["question_there"])
        source = Row(batch["question"], batch["positions"], seen)
        answer = Row(batch["answer"], batch["positions"][:, : self.answer], CausalMask())
        logits: Tensor = model(answer, source, seen)
        return logits.flatten(0, 1)

    def observed(self, batch: Batches) -> Batches:
        """What ``Task.probe`` returns of a batch; ``]`` is read where nothing is predicted any more, and counts as padding."""
        there, asked = batch["targets"] != MASK, batch["question_there"]
        read, question = _width(there), _width(asked)
        return {
            "characters": batch["answer"][:, :read],
            "positions": batch["positions"][:, :read],
            "targets": torch.where(there, batch["targets"], NOTHING)[:, :read],
            "there": there[:, :read],
            "question": batch["question"][:, :question],
            "question_positions": batch["positions"][:, :question],
            "question_there": asked[:, :question],
        }


@dataclass(frozen=True)
class PackedFeed:
    """All examples of a batch one after another in one row of ``tokens`` places; logits only where an answer is predicted.

    Row and answers have a little more room than a batch needs on average. An example that does not fit even so is left out,
    about one in a hundred thousand; places that stay empty are examples of masks without targets.
    """

    ignored: ClassVar[int] = MASK

    tokens: int
    answers: int
    tile: int

    @classmethod
    def of(cls, task: Addition, batch: int, tile: int) -> "PackedFeed":
        """Room for batches of that many examples, from the lengths of a fixed sample."""
        drawn = task.draw(_SAMPLE, torch.Generator().manual_seed(0))
        return cls(_room(drawn.lengths - 1, batch), _room(drawn.lengths - drawn.answers, batch), tile)

    @classmethod
    def exactly(cls, examples: Examples, tile: int) -> "PackedFeed":
        """Room for these examples and no more."""
        return cls(int(examples.read.sum()), int(examples.predicted.sum()), tile)

    def arrange(self, examples: Examples, offsets: Tensor, batches: int) -> Batches:
        """Characters, positions and segments (batches, tokens), where tiles begin, and places and targets of the answers."""
        device, places = offsets.device, torch.arange(examples.read.shape[1], device=offsets.device)

        def by_batch(values: Tensor) -> Tensor:
            return _by_batch(values, batches)

        lengths = by_batch(examples.lengths - 1)
        lengths = lengths * (lengths.cumsum(1) <= self.tokens)
        begins = (lengths.cumsum(1) - lengths)[..., None] + places
        read = by_batch(examples.read) & (lengths[..., None] > 0)
        row = torch.where(read, begins, self.tokens).flatten(1)
        predicted = (by_batch(examples.predicted) & read).flatten(1)
        turn = predicted.cumsum(1) - 1
        asked = torch.where(predicted & (turn < self.answers), turn, self.answers)
        numbers = torch.arange(lengths.shape[1], device=device)[:, None].expand_as(read[0]).expand_as(read)
        left = self.tokens - lengths.sum(1, keepdim=True)
        along = torch.arange(self.tokens, device=device) - (self.tokens - left)
        fillers = (left - self.tile * torch.arange(-(-self.tokens // self.tile), device=device)).clamp(0, self.tile)
        segments = torch.where(along < 0, _moved(numbers, row, self.tokens, 0), lengths.shape[1] + along // self.tile)
        return {
            "characters": _moved(by_batch(examples.inputs), row, self.tokens, MASK),
            "positions": _moved(by_batch(places + offsets[:, None]), row, self.tokens, 0),
            "segments": segments.int(),
            "tiles": pack_tiles(torch.cat((lengths, fillers), 1), self.tokens, self.tile),
            "places": _moved(begins, asked, self.answers, 0),
            "targets": _moved(by_batch(examples.targets), asked, self.answers, MASK),
        }

    def trimmed(self, batch: Batches) -> Batches:
        """The batch as it is."""
        return batch

    def logits(self, model: Reads, batch: Batches) -> Tensor:
        """Logits of the places that predict an answer."""
        logits: Tensor = model(self.row(batch), logits_to_keep=batch["places"])
        return logits

    def row(self, batch: Batches) -> Row:
        """The row that holds all examples of a batch."""
        mask = PackedMask(batch["segments"], batch["tiles"], self.tile)
        return Row(batch["characters"][None], batch["positions"][None], mask)


def feed_for(task: Addition, model: Transformer, batch: int, device: torch.device, precision: torch.dtype) -> ExamplesFeed:
    """Packed rows where a GPU has a kernel for them, rows of their own elsewhere, split rows for an encoder-decoder."""
    tile = tile_for(task.longest - 1)
    plain = not model.config.encoder_layers and "scores" not in model.config.scheme.features
    if plain and tile is not None and has_kernel(device, precision, model.config.head):
        return PackedFeed.of(task, batch, tile)
    return feed_in_rows(task, bool(model.config.encoder_layers))


def feed_in_rows(task: Addition, encoder: bool) -> PaddedFeed | SplitFeed:
    """Every example in rows of its own: one for a decoder alone, one for each half of an encoder-decoder."""
    return SplitFeed(task.longest_answer) if encoder else PaddedFeed()


def split_rows(characters: Int[Tensor, "rows begun"]) -> Batches:
    """What an encoder-decoder reads of beginnings of examples, as ``Task.probe`` returns it, with positions from 0 on.

    There are no targets: what follows the last character is not known.
    """
    examples = Examples.begun(characters)
    feed = SplitFeed(int((examples.lengths - examples.answers).max()))
    batch = feed.observed(one_batch(feed.arrange(examples, torch.zeros_like(examples.answers), 1), 0))
    return {**batch, "targets": torch.full_like(batch["targets"], NOTHING)}


def draw_batches(
    task: Addition,
    feed: ExamplesFeed,
    batches: int,
    batch: int,
    offsets: int,
    seed: int,
    device: torch.device,
    rows: slice | None = None,
) -> Batches:
    """Batches from a seed: examples, and for each an offset of its positions, uniform in 0..offsets; all rows or some."""
    generator = torch.Generator(device).manual_seed(seed)
    examples = task.draw(batches * batch, generator)
    shifts = torch.randint(offsets + 1, (batches * batch,), generator=generator, device=device)
    if rows is not None:
        own = torch.arange(batches * batch, device=device).view(batches, batch)[:, rows].flatten()
        examples, shifts = examples[own], shifts[own]
    return feed.arrange(examples, shifts, batches)


def _by_batch(values: Tensor, batches: int) -> Tensor:
    return values.reshape(batches, -1, *values.shape[1:])


def _width(there: Bool[Tensor, "rows places"]) -> int:
    """The places of the longest row."""
    return int(there.any(0).nonzero().max()) + 1


def _moved(values: Tensor, places: Tensor, width: int, empty: int) -> Tensor:
    """Each batch's values at their new places, ``empty`` where none comes; place ``width`` is nowhere."""
    row = torch.full((len(values), width + 1), empty, device=values.device)
    return row.scatter_(1, places, values.flatten(1))[:, :-1].contiguous()


def _room(lengths: Tensor, batch: int) -> int:
    """Places that almost every batch of so many examples of such lengths fits in."""
    sample = lengths.double()
    expected = batch * float(sample.mean()) + _MARGIN * math.sqrt(batch) * float(sample.std())
    return math.ceil(min(expected, batch * int(lengths.max())) / _ROUND) * _ROUND
