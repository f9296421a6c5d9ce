"""What a model loses when the norms of its queries, keys and messages are disturbed."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from normscope.errors import InputError
from normscope.models import NOTHING, AttentionStep, Model, Observer, Sample
from normscope.training.tasks import stream_seed

SPARSE, NON_SPARSE = 0.95, 0.70  # a distribution is sparse from here on, and not at all below there
PLACES = ("all", "sparse", "non-sparse")
PARTS = ("qkm", "qk")
_FEWEST_ROWS = 30


@dataclass(frozen=True)
class Disturbance:
    """Where noise goes.

    Attributes:
        level: RMS of κ in the factors 1 + κ, uniform with mean 0.
        parts: the letters of q, k and m (messages) that get a factor.
        where: every distribution, or those that are sparse, or those that are not.
        layer: the one layer that is disturbed; None for all at once.
    """

    level: float
    parts: str = "qkm"
    where: str = "all"
    layer: int | None = None


def norm_noise(disturbance: Disturbance, normalised: str, generator: torch.Generator) -> Observer:
    """An observer that multiplies the norms of q, k_t and m_t by independent factors 1 + κ.

    A norm removes a factor in front of it, so the letters that a model normalises after their projections (``normalised``)
    stay as they are: a model with QKV-Norm is not disturbed at all.
    """
    parts = [part for part in disturbance.parts if {"m": "v"}.get(part, part) not in normalised]

    def observe(step: AttentionStep) -> Tensor | None:
        if disturbance.layer not in (None, step.layer) or not parts or disturbance.level == 0:
            return None

        def disturbed(part: str, x: Tensor) -> Tensor:
            if part not in parts:
                return x
            most = math.sqrt(3) * disturbance.level
            kappa = torch.empty(x.shape[:-1], device=generator.device).uniform_(-most, most, generator=generator)
            return x * (1 + kappa.to(x)[..., None])

        q, k, v = (disturbed(part, x) for part, x in (("q", step.q), ("k", step.k), ("m", step.v)))
        mixed = step.weights(q, k) @ v
        if disturbance.where == "all":
            return mixed
        clean = step.weights()
        largest = clean.amax(-1, keepdim=True)
        chosen = largest >= SPARSE if disturbance.where == "sparse" else largest < NON_SPARSE
        return torch.where(chosen, mixed, clean @ step.v)

    return Observer(attention=observe)


def disturbances(levels: Sequence[float], layer_levels: Sequence[float], layers: int) -> list[Disturbance]:
    """All places and parts at every level, then every layer alone."""
    everywhere = [Disturbance(level, parts, where) for parts in PARTS for where in PLACES for level in levels]
    alone = [Disturbance(level, layer=layer) for level in layer_levels for layer in range(layers)]
    return everywhere + alone


def measure_noise(
    view: Model,
    sample: Sample,
    planned: Sequence[Disturbance],
    draws: int = 1,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> pd.DataFrame:
    """Accuracy and loss of the clean model and under every disturbance, with standard errors, a row for each.

    Changes are against the clean model, token by token, so their errors are smaller than those of the values. The same seed
    gives a disturbance the same noise at every level, but for its size.
    """
    need_predictions(view, sample)
    clean = _scores(view, sample)
    rows = [_row(Disturbance(0.0), clean, clean, sample)]
    for done, disturbance in enumerate(planned, 1):
        totals = torch.zeros_like(clean)
        for draw in range(draws):
            generator = torch.Generator(sample.tokens.device).manual_seed(stream_seed(seed, "noise", draw))
            totals += _scores(view, sample, norm_noise(disturbance, view.normalised_heads, generator))
        rows.append(_row(disturbance, totals / draws, clean, sample))
        progress(done)
    table = pd.DataFrame(rows)
    return table.astype({"layer": "Int64"})


def need_predictions(view: Model, sample: Sample) -> None:
    """Refuse a model that predicts nothing."""
    if not view.predicts or not bool((sample.targets != NOTHING).any()):
        raise InputError(f"'{view.name}' predicts no tokens here: noise is measured by what predictions lose")


def _scores(view: Model, sample: Sample, *observers: Observer) -> Float[Tensor, "2 predicted"]:
    """Whether each predicted token is right, and its loss."""
    wanted = sample.targets != NOTHING
    logits, targets = view.forward(sample, *observers)[wanted].float(), sample.targets[wanted]
    return torch.stack(((logits.argmax(-1) == targets).double(), F.cross_entropy(logits, targets, reduction="none").double()))


def _row(disturbance: Disturbance, found: Tensor, clean: Tensor, sample: Sample) -> dict[str, Any]:
    row: dict[str, Any] = {
        "perturbed": ",".join(disturbance.parts),
        "where": disturbance.where,
        "layer": disturbance.layer,
        "noise": disturbance.level,
    }
    groups = (sample.targets != NOTHING).sum(1).tolist()
    for name, values, before in zip(("accuracy", "loss"), found, clean, strict=True):
        row |= dict(_mean(name, values, groups)) | dict(_mean(f"{name}_change", values - before, groups))
    return row | {"tokens": found.shape[1]}


def _mean(name: str, values: Float[Tensor, " predicted"], groups: list[int]) -> Iterator[tuple[str, float]]:
    """A mean and its standard error, over rows where there are enough of them, else over tokens."""
    mean = float(values.mean())
    deviations = values - mean
    if len(groups) >= _FEWEST_ROWS:
        deviations = torch.stack([part.sum() for part in torch.split(deviations, groups)])
    yield name, mean
    yield f"{name}_stderr", float(deviations.square().sum().sqrt()) / len(values)
