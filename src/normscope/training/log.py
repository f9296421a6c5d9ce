"""A TensorBoard log of a run, written while it trains."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from normscope.errors import MissingExtraError
from normscope.training.loop import Metrics

FOLDER = "tensorboard"


def tensorboard_writer() -> Any:
    """The class ``SummaryWriter``, which needs an extra."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("a TensorBoard log needs tensorboard; pip install 'normscope[training]'") from error
    return SummaryWriter


class TensorBoardLog:
    """Loss, accuracy, learning rate and speed by step; a resumed run overwrites the steps that it repeats."""

    def __init__(self, folder: Path, from_step: int) -> None:
        self.writer: Any = tensorboard_writer()(str(folder / FOLDER), purge_step=from_step + 1)
        self.before: Metrics | None = None

    def add(self, metrics: Metrics) -> None:
        """Log one row."""
        for name, value in asdict(metrics).items():
            if name in ("loss", "accuracy", "rate"):
                self.writer.add_scalar(f"train/{name}", value, metrics.step)
        if self.before is not None and metrics.seconds > self.before.seconds:
            speed = (metrics.examples - self.before.examples) / (metrics.seconds - self.before.seconds)
            self.writer.add_scalar("train/examples per second", speed, metrics.step)
        self.before = metrics

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()
