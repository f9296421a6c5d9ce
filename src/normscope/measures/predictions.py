"""How well a model predicts the targets of a sample: accuracy and loss, token by token, with standard errors."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.measures.reading import token_scores
from normscope.models import NOTHING, Model, Observer, Sample

_FEWEST_ROWS = 30  # rows of a sample from which errors are taken over rows
QUALITIES = ("accuracy", "loss")


def predicted_scores(model: Model, sample: Sample, *observers: Observer) -> Float[Tensor, "2 predicted"]:
    """Whether each predicted token is right, and its loss; NaN for both where a logit is not finite."""
    right, losses = token_scores(model.forward(sample, *observers), sample)
    return torch.stack((right.double().masked_fill(losses.isnan(), torch.nan), losses))


def score_means(scores: Float[Tensor, "2 predicted"], clean: Float[Tensor, "2 predicted"], sample: Sample) -> dict[str, float]:
    """Accuracy and loss, and their changes against the clean model token by token, each with its standard error."""
    groups = (sample.targets != NOTHING).sum(1).tolist()
    means: dict[str, float] = {}
    for name, values, before in zip(QUALITIES, scores, clean, strict=True):
        means |= dict(_mean(name, values, groups)) | dict(_mean(f"{name}_change", values - before, groups))
    return means


def _mean(name: str, values: Float[Tensor, " predicted"], groups: Sequence[int]) -> Iterator[tuple[str, float]]:
    """A mean and its standard error, over rows where there are enough of them, else over tokens."""
    mean = float(values.mean())
    deviations = values - mean
    if len(groups) >= _FEWEST_ROWS:
        deviations = torch.stack([part.sum() for part in torch.split(deviations, list(groups))])
    yield name, mean
    yield f"{name}_stderr", float(deviations.square().sum().sqrt()) / len(values)
