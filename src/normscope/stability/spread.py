"""How far the lengths of embeddings are spread, each weighted by the attention it receives."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_INTERVALS = {"50": (0.25, 0.75), "90": (0.05, 0.95), "99": (0.005, 0.995)}
_POINTS = [0.5, *(point for ends in _INTERVALS.values() for point in ends)]


def weighted_quantiles(
    values: Float[Tensor, " values"], weights: Float[Tensor, "groups values"], points: Sequence[float]
) -> Float[Tensor, "groups points"]:
    """The smallest value at which a group's share of the weight reaches each point; NaN for a group without weight."""
    order = values.argsort()
    share = weights[:, order].double().cumsum(1)
    total = share[:, -1:]
    wanted = total * torch.tensor(points, dtype=torch.float64, device=values.device)
    at = torch.searchsorted(share.contiguous(), wanted.contiguous()).clamp(max=len(values) - 1)
    return torch.where(total > 0, values[order][at].double(), torch.nan)


def spread_rows(layer: int, lengths: Float[Tensor, " tokens"], received: Float[Tensor, "heads tokens"]) -> list[dict[str, Any]]:
    """Intervals of length over median length for the layer and each of its heads.

    Args:
        layer: their number.
        lengths: |y_t| of every embedding that attention may look at.
        received: the attention that each embedding receives from all queries, by head.
    """
    groups = torch.cat((received.sum(0, keepdim=True), received))
    found = weighted_quantiles(lengths, groups, _POINTS)
    ratios = (found[:, 1:] / found[:, :1]).tolist()
    names = [f"{end}{name}" for name in _INTERVALS for end in ("low", "high")]
    return [
        {"layer": layer, "head": None if group == 0 else group - 1, **dict(zip(names, row, strict=True))}
        for group, row in enumerate(ratios)
    ]
