"""Batches of a task as a model reads them: tensors by name, with the batches along their first dimension."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

Batches = dict[str, Tensor]
Reads = Callable[..., Tensor]  # a ``Transformer``, or its ``states``


@runtime_checkable
class Feed(Protocol):
    """How a batch becomes logits."""

    @property
    def ignored(self) -> int:
        """The target of a place where nothing is predicted."""

    def trimmed(self, batch: Batches) -> Batches:
        """A batch without what all its rows leave empty; asks the device, so for the CPU alone."""

    def logits(self, model: Reads, batch: Batches) -> Tensor:
        """What the model returns, logits or its last hidden states, a row for each of ``batch["targets"].flatten()``."""


def one_batch(batches: Batches, index: int) -> Batches:
    """One of several batches."""
    return {name: values[index] for name, values in batches.items()}
