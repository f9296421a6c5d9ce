"""Batches of a task as a model reads them: tensors by name, with the batches along their first dimension."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from normscope.transformer import Transformer

Batches = dict[str, Tensor]


@runtime_checkable
class Feed(Protocol):
    """How a batch becomes logits."""

    @property
    def ignored(self) -> int:
        """The target of a place where nothing is predicted."""

    def trimmed(self, batch: Batches) -> Batches:
        """A batch without what all its rows leave empty; asks the device, so for the CPU alone."""

    def logits(self, model: Transformer, batch: Batches) -> Tensor:
        """The model's logits, a row for each of ``batch["targets"].flatten()``."""


def one_batch(batches: Batches, index: int) -> Batches:
    """One of several batches."""
    return {name: values[index] for name, values in batches.items()}
