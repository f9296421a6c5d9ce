"""Addition as a task: the training distribution, and two beyond it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from normscope.core import tile_for
from normscope.core.seeds import stream_seed
from normscope.training.batches import Batches, Feed, one_batch
from normscope.training.tasks.addition.evaluation import DRAWN_FOR_A_TEST, TESTED_AT_A_TIME, Evaluation, evaluate
from normscope.training.tasks.addition.examples import CHARACTERS, Addition
from normscope.training.tasks.addition.feeds import ExamplesFeed, PackedFeed, draw_batches, feed_for, feed_in_rows
from normscope.training.tasks.task import Advance, Report, Score, silent
from normscope.transformer import Transformer

_EXAMPLES_A_BLOCK = {"cpu": 2048, "cuda": 1 << 16}
_PROBED = 64
_DRAWN = 96.0  # bytes of a character while examples are drawn


@dataclass(frozen=True)
class AdditionTask:
    """The training distribution, and two beyond it: between and beyond the numbers of integers seen in training.

    The positions of every example begin at an offset, uniform in 0..offsets.
    """

    train: Addition
    interpolation: Addition
    extrapolation: Addition
    offsets: int = 50

    name: ClassVar[str] = "addition"
    keys: ClassVar[tuple[str, ...]] = ("integers", "interpolation", "extrapolation", "digits", "offsets")
    settled: ClassVar[Mapping[str, str]] = {}
    sized: ClassVar[tuple[str, ...]] = ("integers", "digits")
    defaults: ClassVar[Mapping[str, Any]] = {}
    calibrated: ClassVar[int] = 128
    report: ClassVar[Report] = Report(
        table="accuracy",
        title="Accuracy by split",
        scores=(
            Score("accuracy", "accuracy per character", "stderr", percent=True),
            Score("exact", "exact answers", "exact_stderr", percent=True, swept=False),
        ),
        unit="examples",
        by_position="Accuracy by position in the answer",
        position="position from the left",
        caption="A dip shows which characters are hard; lines that part show what does not carry over from training.",
        note="An answer is exact if every character of it is right; ± is one standard error.",
    )

    @classmethod
    def of(
        cls,
        train: tuple[int, ...],
        interpolation: tuple[int, ...],
        extrapolation: tuple[int, ...],
        digits: tuple[int, ...],
        offsets: int = 50,
    ) -> "AdditionTask":
        """From the numbers of integers of each distribution, and the digits and offsets, which they share."""
        return cls(Addition(train, digits), Addition(interpolation, digits), Addition(extrapolation, digits), offsets)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "AdditionTask":
        """The task of a recipe's values."""
        integers, interpolation, extrapolation, digits = (tuple(values[key]) for key in cls.keys[:-1])
        return cls.of(integers, interpolation, extrapolation, digits, int(values["offsets"]))

    @property
    def splits(self) -> dict[str, Addition]:
        """The test sets by name."""
        return {
            "in-distribution": self.train,
            "ood-interpolation": self.interpolation,
            "ood-extrapolation": self.extrapolation,
        }

    @property
    def vocabulary(self) -> int:
        """The number of characters."""
        return len(CHARACTERS)

    @property
    def longest(self) -> int:
        """The most characters of an example in training."""
        return self.train.longest

    @property
    def longest_tested(self) -> int:
        """The most characters of an example of any split."""
        return max(split.longest for split in self.splits.values())

    @property
    def summary(self) -> str:
        """How many integers of how many digits."""
        return f"{_joined(self.train.counts)} integers of {_joined(self.train.digits)} digits"

    @property
    def identity(self) -> str:
        """Nothing: a seed is enough."""
        return ""

    @property
    def files(self) -> dict[str, str]:
        """None."""
        return {}

    def prepare(self, progress: Advance = silent, batch: int = 1, identity: str | None = None) -> "AdditionTask":
        """The task as it is: there are always more examples."""
        return self

    def block(self, kind: str) -> int:
        """Examples drawn at a time."""
        return _EXAMPLES_A_BLOCK[kind]

    def tested(self, kind: str) -> tuple[int, int]:
        """Examples drawn and tested at a time."""
        return DRAWN_FOR_A_TEST, TESTED_AT_A_TIME[kind]

    def drawn_bytes(self, examples: int) -> float:
        """A dozen 64-bit arrays with the characters of all examples."""
        return _DRAWN * examples * self.longest_tested

    def tested_examples(self, split: str, examples: int) -> int:
        """As many as wanted."""
        return examples

    def feed(self, model: Transformer, batch: int, device: torch.device, precision: torch.dtype) -> ExamplesFeed:
        """Packed rows where a GPU has a kernel for them, rows of their own elsewhere, split rows for an encoder-decoder."""
        return feed_for(self.train, model, batch, device, precision)

    def batches(
        self, feed: Feed, start: int, steps: int, batch: int, seed: int, device: torch.device, rows: slice | None = None
    ) -> Batches:
        """Batches from the seed of the block that begins at ``start``."""
        assert isinstance(feed, ExamplesFeed)
        block = stream_seed(seed, "training", start)
        return draw_batches(self.train, feed, steps, batch, self.offsets, block, device, rows)

    def run_some(self, model: Transformer, batch: int, seed: int) -> None:
        """A forward pass, packed so that no padding counts where that can be."""
        task, cpu, seed = self.train, torch.device("cpu"), stream_seed(seed, "calibration")
        tile = tile_for(task.longest - 1)
        if model.config.encoder_layers or tile is None or "scores" in model.config.scheme.features:
            feed = feed_for(task, model, batch, cpu, torch.float32)
            first = one_batch(draw_batches(task, feed, 1, self.calibrated, self.offsets, seed, cpu), 0)
            feed.logits(model, feed.trimmed(first))
        else:
            packed = PackedFeed.exactly(task.draw(self.calibrated, torch.Generator().manual_seed(seed)), tile)
            model(packed.row(one_batch(draw_batches(task, packed, 1, self.calibrated, self.offsets, seed, cpu), 0)))

    def probe(self, examples: int | None, seed: int, device: torch.device, encoder: bool = False) -> Batches:
        """Examples in rows of their own; an encoder reads the sums, its decoder the answers."""
        feed = feed_in_rows(self.train, encoder)
        return feed.observed(one_batch(draw_batches(self.train, feed, 1, examples or _PROBED, self.offsets, seed, device), 0))

    def evaluate(
        self,
        model: Transformer,
        splits: Sequence[str],
        examples: int,
        *,
        seed: int = 0,
        precision: torch.dtype = torch.float32,
        worked: int = 6,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Evaluation:
        """Accuracy on every split, on that many examples of its own."""
        chosen = {split: self.splits[split] for split in splits}
        return evaluate(model, chosen, examples, self.offsets, seed, precision, worked, progress)


def _joined(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))
