"""The calibrated initial state: fixed factors, measured on the first batch, that make all schemes start alike."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Calibrated(nn.Module):
    """A fixed factor that gives what passes on the first batch the target's standard deviation; without a target, ``start``."""

    factor: Tensor

    def __init__(self, target: float | None, start: float = 1.0) -> None:
        super().__init__()
        self.target = target
        self.measuring = False
        self.register_buffer("factor", torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        """The factor times x."""
        if self.measuring:
            self.fit(x)
        return x * self.factor

    def fit(self, x: Tensor) -> None:
        """Fix the factor so that factor · x has the target's standard deviation."""
        if self.target is not None:
            self.factor.copy_(self.target / x.float().std())


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """While this holds, what passes through the model fixes its factors, from the first to the last."""
    points = [module for module in model.modules() if isinstance(module, Calibrated)]
    for point in points:
        point.measuring = True
    try:
        with torch.no_grad():
            yield
    finally:
        for point in points:
            point.measuring = False
