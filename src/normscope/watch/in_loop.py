"""What callbacks of training libraries share: where a watch is kept by default, and the batch that they probe with."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import InputError
from normscope.models.attention_interface import same_random_numbers

_FOLDER = "watch"
TWICE = "{} has two callbacks of normscope: give it one, with several destinations if needed, to=['runs/gpt', 'tensorboard']"


def default_folder(base: Path | str, resumed: bool) -> Path:
    """The folder ``watch`` in a training's folder; ``watch-2`` and so on for later trainings that do not resume the last."""
    folder, number = Path(base) / _FOLDER, 1
    while (following := folder.with_name(f"{_FOLDER}-{number + 1}")).exists():
        folder, number = following, number + 1
    return following if folder.exists() and not resumed else folder


def kept(batch: Any, device: torch.device) -> Any:
    """A copy of a batch on a device: loops may reuse the memory of theirs."""
    if isinstance(batch, Tensor):
        return batch.detach().to(device, copy=True)
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return {name: kept(batch[name], device) for name in batch.keys()}  # noqa: SIM118  # of a BatchEncoding, too
    return [kept(item, device) for item in batch] if isinstance(batch, list | tuple) else batch


def first_rows(loader: Any, rows: int, model: nn.Module) -> Any:
    """The first rows of a loader's dataset as its collator makes a batch of them; nothing is drawn from any generator."""
    dataset: Any = getattr(loader, "dataset", None)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InputError(
            "probe=None: the training dataset cannot be indexed (is it streaming?); pass a batch of it, probe=batch"
        )
    with same_random_numbers(model.modules()):
        examples = [dataset[row] for row in range(min(rows, len(dataset)))]
        return deepcopy(loader.collate_fn)(examples)  # a collator may have a generator of its own
