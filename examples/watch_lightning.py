"""Lightning on a small vision transformer, which learns to tell vertical from horizontal bars.

python examples/watch_lightning.py; one line is that of the watch: ``ns.watch.LightningCallback(...)``.
"""

from typing import Any

import lightning as L
import shared
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import normscope as ns


def pictures(count: int, side: int = 16) -> TensorDataset:
    """Noisy bars (count, 1, side, side), and whether they are horizontal."""
    generator = torch.Generator().manual_seed(1)
    horizontal = torch.randint(2, (count,), generator=generator)
    waves = torch.sin(torch.arange(side) * torch.rand(count, 1, generator=generator).add(0.5))
    bars = waves[:, None, None, :].expand(count, 1, side, side)
    bars = torch.where(horizontal[:, None, None, None].bool(), bars.mT, bars)
    return TensorDataset(bars + 0.5 * torch.randn(bars.shape, generator=generator), horizontal)


class Classifier(L.LightningModule):
    """A vision transformer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        config = ViTConfig(
            hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=16, patch_size=4,
            num_channels=1, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        )  # fmt: skip
        self.vit = ViTForImageClassification(config)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        pixels, labels = batch
        loss: Tensor = self.vit(pixel_values=pixels, labels=labels).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(to: str | None, steps: int, every: int = 10, **options: Any) -> Classifier:
    """Train a small vision transformer; without a watch if ``to`` is None."""
    L.seed_everything(0, verbose=False)
    model = Classifier()
    settings = {
        "max_steps": steps, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    callbacks = [] if to is None else [ns.watch.LightningCallback(every=every, to=to)]
    trainer = L.Trainer(callbacks=callbacks, **{**settings, **options})
    trainer.fit(model, DataLoader(pictures(512), batch_size=16, shuffle=True))
    return model


def main(arguments: list[str] | None = None) -> None:
    """Train, and show the page."""
    given = shared.options(__doc__, to="runs/lightning").parse_args(arguments)
    train(given.to, given.steps)
    shared.show(given.to)


if __name__ == "__main__":
    main()
