"""What the pages of paper 2 share: starts at the edges of the hypotheses, and flows that are followed to late times."""

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import Attention, HeadWeights
from normscope.core.norms import length, tangent, unit
from normscope.dynamics import Motion
from normscope.dynamics.integrators import METHODS, runge_kutta_step
from normscope.schemes import NAMED
from normscope.theorems.cases import Case

SIX = ("post", "pre", "mix", "peri", "ngpt", "sqrt-scaling")
Tokens = Float[Tensor, "*batch tokens dim"]


def follow(motion: Motion, x: Tokens, times: Sequence[float], step: float = 0.2) -> Iterator[tuple[float, Tokens]]:
    """(t, x) at each of ``times``, which rise; fourth-order steps that grow with the time in which the scheme moves.

    A free stream of radius about t moves by ln t, a normalised one by ∫ step/carry, so late times cost no more than early ones.
    """
    x, t = motion.settle(x, 0.0), 0.0
    ends = sorted({*times, *(b for b in motion.breaks if b < times[-1])})
    for end in ends:
        while t < end:
            h = min(step * _pace(motion, x, t), end - t)
            h = end - t if end - t < 1.001 * h else h
            within = t + h / 2
            x = motion.settle(x, within)
            moved = runge_kutta_step(lambda s, y: motion.velocity(y, s, within), t, x, h, METHODS["rk4"])  # noqa: B023
            x, t = motion.settle(moved, within), (end if h == end - t else t + h)
        if end in times:
            yield t, x


def _pace(motion: Motion, x: Tokens, t: float) -> float:
    """The time in which directions move by about as much as Post-LN's do in 1: the smallest radius, or the inverse step.

    It stays between a thousandth of 1 + t and all of it: a token that passes close by 0 would stop the clock, and a step that
    begins at 0 would break it.
    """
    update = motion.slots(t, t)[0][0]
    pace = float(length(x).min()) if update.stream is None else update.carry / max(update.step, 1e-9)
    return min(max(pace, 1e-3 * (1 + t)), 1 + t)


def ends_free(scheme: str) -> bool:
    """Whether radii are free in the last stage of a scheme."""
    *_, last = NAMED[scheme].stages
    return not last.law_of(last.attention).radius_fixed


def turning(x: Tokens, velocity: Tokens) -> tuple[Tokens, Float[Tensor, "*batch tokens"]]:
    """θ̇ and ṙ of tokens x that move with ``velocity``."""
    theta, radius = unit(x), length(x)
    return tangent(theta, velocity) / radius, (theta * velocity).sum(-1)


def variance(x: Tokens) -> Float[Tensor, " *batch"]:
    """Var = (1/n) Σ |θ_k − θ̄|²."""
    theta = unit(x)
    return (theta - theta.mean(-2, keepdim=True)).square().sum((-1, -2)) / x.shape[-2]


def variance_rate(x: Tokens, velocity: Tokens) -> Float[Tensor, " *batch"]:
    """dVar/dt = (2/n) Σ ⟨θ_k − θ̄, θ̇_k⟩."""
    theta, (speed, _) = unit(x), turning(x, velocity)
    return 2 * ((theta - theta.mean(-2, keepdim=True)) * speed).sum((-1, -2)) / x.shape[-2]


def smallest_cosine(x: Tokens) -> Float[Tensor, " *batch"]:
    """The smallest ⟨θ_j, θ_k⟩; 1 − it keeps its digits near a cluster, since it comes from distances."""
    theta = unit(x)
    return 1 - (theta.unsqueeze(-2) - theta.unsqueeze(-3)).square().sum(-1).amax((-1, -2)) / 2


def started(case: Case, runs: int) -> Float[Tensor, "runs tokens dim"]:
    """Directions of the case's start: ``uniform``, ``antipodal`` (pairs, a little off), or ``clusters`` on opposite sides."""
    n, d = case["tokens"], case["dim"]
    drawn = case.normal("start", runs, n, d)
    if case["start"] == "uniform":
        return unit(drawn)
    signs = torch.ones(n, 1, dtype=torch.float64)
    signs[1::2] = -1.0
    if case["start"] == "antipodal":
        pairs = unit(case.normal("pairs", runs, (n + 1) // 2, d)).repeat_interleave(2, dim=1)[:, :n]
        return unit(pairs * signs + 0.02 * drawn)
    return unit(signs * unit(case.normal("axis", runs, 1, d)) + 0.1 * drawn)


def in_cone(case: Case, delta: float, runs: int) -> Float[Tensor, "runs tokens dim"]:
    """Directions with every cosine at least 1 − δ: ``inside`` the cone, on its ``rim``, or at two ``opposite`` places of it."""
    n, d = case["tokens"], case["dim"]
    tilt = math.acos(max(1 - delta, -1.0)) / 2
    axis, drawn = unit(case.normal("axis", runs, 1, d)), case.normal("start", runs, n, d)
    sideways = unit(tangent(axis.expand_as(drawn), drawn))
    if case["place"] == "inside":
        angle = tilt * case.uniform("angles", runs, n, 1)
    else:
        angle = torch.full((runs, n, 1), tilt, dtype=torch.float64)
    if case["place"] == "opposite":
        signs = torch.tensor([1.0, -1.0] * n, dtype=torch.float64)[:n, None]
        sideways = signs * sideways[:, :1]
    elif case["place"] == "rim":
        sideways[:, 1] = -sideways[:, 0]  # two tokens as far apart as the cone allows
    return torch.cos(angle) * axis + torch.sin(angle) * sideways


def query_key(case: Case, beta: float) -> Attention:
    """Attention with V = I and |QᵀK| = ``size_QK``: ``identity``, its ``negative``, a ``rotation`` or ``random``, times it."""
    d, kind = case["dim"], case["weights"]
    eye = torch.eye(d, dtype=torch.float64)
    W = {"identity": eye, "negative": -eye}.get(kind)
    if W is None:
        W = case.normal("W_QK", d, d)
        W = torch.linalg.qr(W).Q if kind == "rotation" else W / torch.linalg.matrix_norm(W, 2)
    return Attention(beta, HeadWeights(W_Q=case["size_QK"] * W[None], W_K=eye[None]))


def log_times(first: float, last: float, count: int) -> list[float]:
    """Times evenly spread in the logarithm."""
    return [first * (last / first) ** (i / (count - 1)) for i in range(count)]


def even_times(first: float, last: float, count: int) -> list[float]:
    """Times evenly spread."""
    return [first + (last - first) * i / (count - 1) for i in range(count)]
