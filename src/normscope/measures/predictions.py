"""How well a model predicts the targets of a sample: accuracy and loss, token by token, with standard errors."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.measures.reading import token_scores
from normscope.models import NOTHING, Model, Observer, Sample

FEWEST_ROWS = 30  # rows of a sample from which errors are taken over rows
QUALITIES = ("accuracy", "loss")


def predicted_scores(model: Model, sample: Sample, *observers: Observer) -> Float[Tensor, "2 predicted"]:
    """Whether each predicted token is right, and its loss; NaN for both where a logit is not finite."""
    right, losses = token_scores(model.forward(sample, *observers), sample)
    return torch.stack((right.double().masked_fill(losses.isnan(), torch.nan), losses))


def score_means(
    scores: Float[Tensor, "2 predicted"] | Float[Tensor, "draws 2 predicted"],
    clean: Float[Tensor, "2 predicted"],
    sample: Sample,
) -> dict[str, float]:
    """Accuracy and loss, and their changes against the clean model token by token, each with its standard error."""
    means: dict[str, float] = {}
    drawn = scores.reshape(-1, *clean.shape).unbind(1)
    for name, values, before in zip(QUALITIES, drawn, clean, strict=True):
        for suffix, shown in (("", values), ("_change", values - before)):
            means[f"{name}{suffix}"] = float(shown.mean())
            means[f"{name}{suffix}_stderr"] = math.hypot(*standard_errors(shown, sample))
    return means


def independent_rows(sample: Sample) -> bool:
    """Whether there are rows enough for errors over rows, which are independent; tokens of a row are not."""
    return len(sample.tokens) >= FEWEST_ROWS


def standard_errors(values: Float[Tensor, "draws predicted"], sample: Sample) -> tuple[float, float]:
    """Standard errors of the mean: over draws of a disturbance, and over tokens, or over rows where there are enough.

    Every row has noise of its own, so that errors over rows include it; tokens of a row share it, so that theirs do not.
    """
    means = values.mean(0)
    deviations = means - means.mean()
    if independent_rows(sample):
        groups = (sample.predicting.targets != NOTHING).sum(1).tolist()
        deviations = torch.stack([part.sum() for part in torch.split(deviations, groups)])
    over_tokens = float(deviations.square().sum().sqrt()) / len(means)
    if len(values) < 2 or independent_rows(sample):
        return 0.0, over_tokens
    return float(values.mean(1).std()) / math.sqrt(len(values)), over_tokens
