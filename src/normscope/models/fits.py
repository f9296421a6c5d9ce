"""Fits of scales: the numbers, or one for each channel, with which one tensor of hidden states is made of others."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import same

NEAR = 1e-4
SMALLEST = 1e-6  # a step or carry
_ALIKE = 1e-3  # channels that differ by less have one number
_ONE = 1e-5  # a fitted number this near to 1 is 1
FEWEST = 6  # states to fit two numbers for each channel
States = Float[Tensor, "rows positions dim"]


@dataclass(frozen=True)
class Scales:
    """The fitted branch and residual scale of a sublayer, each a number or one for each channel."""

    step: Tensor
    carry: Tensor


def fit(target: Tensor, x: Tensor, U: Float[Tensor, "updates picked"], free: bool) -> tuple[Tensor, Tensor]:
    """Least squares of target = carry·x + step·u for every update u, with carry 1 unless it is free."""
    uu, ut, xu = U.square().sum(-1), U @ target, U @ x
    if free:
        return _solve((x * x).sum(), xu, uu, (x * target).sum(), ut)
    return ((ut - xu) / uu).nan_to_num(0.0), torch.ones_like(uu)


def fit_channels(x: Tensor, u: Tensor, target: Tensor, over: tuple[int, ...] = (0,)) -> tuple[Tensor, Tensor]:
    """The same with two numbers for each channel, or with ``over=(0, 1)`` for all of them."""
    x, u, target = (y.flatten(0, -2) for y in (x, u, target))
    return _solve(*((a * b).sum(over) for a, b in ((x, x), (x, u), (u, u), (x, target), (u, target))))


def _solve(xx: Tensor, xu: Tensor, uu: Tensor, xt: Tensor, ut: Tensor) -> tuple[Tensor, Tensor]:
    """The normal equations of two unknowns."""
    determinant = xx * uu - xu.square()
    step, carry = (xx * ut - xu * xt) / determinant, (uu * xt - xu * ut) / determinant
    return step.nan_to_num(0.0), carry.nan_to_num(0.0)


def fitted(before: States, added: States, total: States, by_channel: bool) -> Scales:
    """The scales of total = carry·before + step·added in one pass: least squares, a number or one for each channel."""
    several = by_channel and before.shape[:-1].numel() >= FEWEST
    step, carry = fit_channels(before.double(), added.double(), total.double(), (0,) if several else (0, 1))
    return Scales(step.float(), carry.float())


def tidy(scale: Tensor, states: Tensor) -> Tensor:
    """A scale as precise as its fit: equal channels are one number, and 1 up to rounding is 1."""
    scale = scale.float()
    scale = scale.mean() if scale.ndim and bool((scale - scale.mean()).abs().max() < _ALIKE * scale.mean().abs()) else scale
    one = not scale.ndim and abs(float(scale) - 1) < _ONE
    return (torch.ones_like(scale) if one else scale).to(states.device)


def rounded(scale: Tensor) -> float:
    """A fitted scale with five digits."""
    return float(f"{float(scale):.5g}")


def channel_scale(x: States, y: States) -> Tensor | None:
    """The vector s for which y = s ⊙ x; None if there is none."""
    flat_x, flat_y = x.double().flatten(0, -2), y.double().flatten(0, -2)
    scale = (flat_x * flat_y).sum(0) / flat_x.square().sum(0)
    return tidy(scale, x) if bool(scale.isfinite().all()) and agree(y, scale * x.double()) else None


def agree(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to the rounding of their precision."""
    if a.numel() != b.numel():
        return False
    near = max(NEAR, torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return same(a.flatten().double(), b.flatten().double(), near)
