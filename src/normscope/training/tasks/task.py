"""What a task is: data from a seed on any device, how a model reads them, and how it is tested on them.

The loop, calibration, memory estimates and experiments know a task by this protocol alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import pandas as pd
import torch

from normscope.errors import InputError
from normscope.training.batches import Batches, Feed
from normscope.transformer import Transformer

NOTHING = -100  # the target of a position where nothing is predicted
Advance = Callable[[str, float, float], None]  # a stage, how much of it is done, and of how much


def silent(stage: str, done: float, total: float) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Score:
    """A column of a test's tables.

    Attributes:
        column: its name.
        label: what it is, for a table.
        error: the column of its standard error, if it has one.
        percent: whether it is a share.
        swept: whether the table of a sweep has it.
    """

    column: str
    label: str
    error: str | None = None
    percent: bool = False
    swept: bool = True


@dataclass(frozen=True)
class Report:
    """How the tests of a task are shown.

    Attributes:
        table: the name of the table with a row for each split.
        title: of that table.
        scores: its columns; the first is also shown by position.
        unit: what is counted in a second of training: ``examples`` or ``tokens``.
        by_position: title of the figure.
        position: what a position is.
        caption: what the figure shows.
        note: how to read the table.
    """

    table: str
    title: str
    scores: tuple[Score, ...]
    unit: str
    by_position: str
    position: str
    caption: str
    note: str


def changed_data(summary: str) -> InputError:
    """The error of a task whose data are not those that a model was trained on."""
    return InputError(
        f"{summary}: the data have changed since the training began (or this version of normscope holds out other parts of "
        "them); restore them, or train a new model in another folder"
    )


@runtime_checkable
class Tested(Protocol):
    """What a test came to."""

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """A row for each split, then ``positions``, and others."""


@runtime_checkable
class Task(Protocol):
    """Data that a model can be trained on.

    Attributes:
        name: the value of ``task`` in a recipe.
        keys: the keys of a recipe that belong to it.
        settled: keys of a preset that a change of another key makes void: a tokenizer has a size of its own.
        sized: those among them that the length of examples follows from.
        defaults: values of other keys that a recipe of this task has unless it names them.
        calibrated: the number of examples that ``run_some`` runs.
        report: how tests are shown.
    """

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    settled: ClassVar[Mapping[str, str]]
    sized: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Mapping[str, Any]]
    calibrated: ClassVar[int]
    report: ClassVar[Report]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Task":
        """The task of a recipe's values."""

    @property
    def vocabulary(self) -> int:
        """The number of token ids; before ``prepare`` at most so many."""

    @property
    def longest(self) -> int:
        """The most tokens of an example in training."""

    @property
    def longest_tested(self) -> int:
        """The most tokens of an example of any split."""

    @property
    def splits(self) -> Mapping[str, Any]:
        """The test sets by name."""

    @property
    def summary(self) -> str:
        """A few words for people."""

    @property
    def identity(self) -> str:
        """What the data depend on beyond the recipe, such as the content of files; a checkpoint is not used with another."""

    @property
    def files(self) -> Mapping[str, str]:
        """Texts by the names of files that belong beside a trained model."""

    def prepare(self, progress: Advance = silent, batch: int = 1, identity: str | None = None) -> "Task":
        """The task with its data at hand.

        Raises:
            InputError: if there are none that can be used, too few for a batch of that many examples, or others than those of
                an ``identity``; nothing is written then.
        """

    def block(self, kind: str) -> int:
        """How many examples are drawn at a time, on a kind of device."""

    def tested(self, kind: str) -> tuple[int, int]:
        """How many examples of a test are drawn at a time, and how many a model reads at a time, on a kind of device."""

    def drawn_bytes(self, examples: int) -> float:
        """Bytes of so many examples while they are drawn."""

    def feed(self, model: Transformer, batch: int, device: torch.device, precision: torch.dtype) -> Feed:
        """How batches of that many examples become logits."""

    def batches(
        self, feed: Feed, start: int, steps: int, batch: int, seed: int, device: torch.device, rows: slice | None = None
    ) -> Batches:
        """The batches of the steps from ``start`` on, a function of seed and step alone; all their rows or some."""

    def run_some(self, model: Transformer, batch: int, seed: int) -> None:
        """One forward pass of examples of the training distribution, on the CPU, such as scales are calibrated on."""

    def probe(self, examples: int | None, seed: int, device: torch.device, encoder: bool = False) -> Batches:
        """Examples of the training distribution in rows: characters, positions, targets, and ``there`` for what is no padding.

        None for as many as are enough to observe a model. The target is ``NOTHING`` where nothing is predicted. For an
        encoder-decoder these are of its decoder; its ``encoder`` reads ``question``, ``question_positions`` and
        ``question_there``.
        """

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
    ) -> Tested:
        """Every split on at most that many examples; ``worked`` of them are shown where that says something."""

    def tested_examples(self, split: str, examples: int) -> int:
        """How many examples a test of so many has."""
