"""What a sublayer does between its first matrices and its last: norms, gates, and the scores of attention, as observed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import length, same
from normscope.models.attention_interface import AttentionCall
from normscope.models.record import Call

_NEAR = 1e-4
_VARIES = 1e-3  # from which factors of the logits differ
_NEIGHBOURS = 2  # columns on either side of the nearest one that a gate may be


@dataclass(frozen=True)
class Inside:
    """How what the last matrix of a sublayer reads is made of what was computed before it.

    Attributes:
        norm: the norm of it; None if there is none.
        gated: whether it is multiplied by a sigmoid of a product.
        plain: whether norm and gate are all that changes it.
    """

    norm: Call | None = None
    gated: bool = False
    plain: bool = True


def before_output(calls: Sequence[Call], mixed: Tensor, out: Call) -> Inside:
    """What happens to the mixed values of attention before W_O: nothing, a norm, a gate, a norm and then a gate, or others."""
    read = out.inputs[0]
    if _alike(read, mixed):
        return Inside()
    earlier = [call for call in calls if call.ended < out.began and call.inputs and call.outputs]
    norms = [call for call in earlier if call.is_norm and _alike(call.inputs[0], mixed)]
    products = [call.outputs[0] for call in earlier if call.is_product]
    for norm in norms:
        if _alike(norm.outputs[0], read):
            return Inside(norm)
        if is_gated(read, norm.outputs[0], products):
            return Inside(norm, gated=True)
    if is_gated(read, mixed, products):
        return Inside(gated=True)
    return Inside(plain=False)


def norm_before(calls: Sequence[Call], out: Call, window: tuple[int, int]) -> Call | None:
    """The norm that returns what a product reads, in a window of time; None if there is none."""
    inside = (call for call in calls if window[0] < call.began and call.ended < out.began and call.is_norm)
    return next((call for call in inside if _alike(call.outputs[0], out.inputs[0])), None)


def is_gated(read: Tensor, mixed: Tensor, products: Sequence[Tensor]) -> bool:
    """Whether read = mixed ⊙ σ(z), where every column of z is one of a product's output: a gate by component or by head."""
    if read.numel() != mixed.numel():
        return False
    y = read.flatten(0, -2).double()
    x = mixed.reshape(-1, y.shape[-1]).double()
    ratio = y / x
    large = x.abs() > _NEAR * x.abs().amax()
    if not bool(((ratio > -_NEAR) & (ratio < 1 + _NEAR))[large].all()):
        return False
    token = int(x.abs().amin(-1).argmax())  # whose ratios are the most precise
    several = (z.flatten(0, -2) for z in products if z.numel() % len(y) == 0)
    return any(
        same((x * _nearest(ratio, z.double().sigmoid(), token)).flatten(), y.flatten(), _NEAR)
        for z in several
        if len(z) == len(y)
    )


def _nearest(
    ratio: Float[Tensor, "tokens width"], gates: Float[Tensor, "tokens columns"], token: int
) -> Float[Tensor, "tokens width"]:
    """For every column of ratios the column of gates that is nearest to it, among those that are near at one token."""
    order = gates[token].argsort()
    place = torch.searchsorted(gates[token][order].contiguous(), ratio[token].nan_to_num().contiguous())
    best, least = gates[:, order[place.clamp(max=len(order) - 1)]], None
    for offset in range(-_NEIGHBOURS, _NEIGHBOURS + 1):
        candidate = gates[:, order[(place + offset).clamp(0, len(order) - 1)]]
        error = (candidate - ratio).nan_to_num().abs().median(0).values
        nearer = torch.ones_like(error, dtype=torch.bool) if least is None else error < least
        best = torch.where(nearer, candidate, best)
        least = error if least is None else torch.where(nearer, error, least)
    return best


def score_slot(attention: AttentionCall) -> str:
    """The slot of the logits and their softmax: a cap, a sink."""
    parts = [] if attention.softcap is None else [f"softcap({attention.softcap:g})"]
    return "+".join([*parts, *["sink"] * (attention.sink is not None)]) or "softmax"


def temperature(attention: AttentionCall) -> str | None:
    """The factor of logits by n, the number of keys that a query sees, where attention reads one vector at all positions.

    The norms of queries then differ by that factor alone, which rows and heads share. It is 1 for one key, or 0, as log n is.

    Returns:
        A formula of n; empty if no known one is the factor; None if all queries have the same.
    """
    q, scale = attention.q.double(), attention.scale
    norms = length(q).squeeze(-1) * (scale.double().squeeze(-1) if isinstance(scale, Tensor) else 1.0)
    largest = norms.amax(-1, keepdim=True)
    factors = (norms / largest).flatten(0, 1)
    f = factors.median(0).values
    constant = bool((factors.amax(-1) - factors.amin(-1) < _VARIES).all())
    if constant or not bool(((factors - f).abs() < _VARIES).all()):
        return None
    n = attention.mask[0, 0].sum(-1).double()
    line = torch.linalg.lstsq(torch.stack((n.log(), torch.ones_like(n)), 1), f[:, None]).solution[:, 0]
    if not torch.allclose(line[0] * n.log() + line[1], f, rtol=0, atol=_VARIES):
        return ""
    slope, start = float(line[0]), float(line[1])
    return "log(n)" if abs(start) < _VARIES else f"1 + {slope / start:.4g}*log(n)"


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same numbers, up to rounding."""
    return a.numel() == b.numel() and same(a.flatten().double(), b.flatten().double(), _NEAR)
