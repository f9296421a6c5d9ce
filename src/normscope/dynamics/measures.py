"""What is measured of a set of tokens: how clustered they are, how far out, how fast they turn.

No tokens × tokens tensor: with S = Σ_j θ_j the mean cosine over pairs is (|S|² − n)/(n(n − 1)). Var, which is 1 − |S|²/n², is
taken from its definition, so that it keeps its digits near collapse.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import length, tangent, unit

Tokens = Float[Tensor, "*batch tokens dim"]
Number = Float[Tensor, "*batch"]


@dataclass(frozen=True)
class Measures:
    """Numbers for every set in the batch.

    Attributes:
        cosine: mean of ⟨θ_j, θ_k⟩ over pairs j ≠ k (1 for a single token).
        variance: Var = (1/n) Σ |θ_j − θ̄|².
        radius: mean of |x_j|.
        speed: mean of |θ̇_j|.
        cosine_rate: the derivative of ``cosine`` in time.
    """

    cosine: Number
    variance: Number
    radius: Number
    speed: Number
    cosine_rate: Number


MEASURES = tuple(field.name for field in fields(Measures))


def measure(x: Tokens, velocity: Tokens) -> Measures:
    """The measures of tokens x that move with ẋ; sums are taken in float64."""
    radius, theta = length(x), unit(x)
    turning = tangent(theta, velocity) / radius
    n = x.shape[-2]
    total, total_rate = (y.sum(-2, dtype=torch.float64) for y in (theta, turning))
    square = total.square().sum(-1)
    pairs = max(n * (n - 1), 1)
    return Measures(
        cosine=(square - n) / pairs if n > 1 else torch.ones_like(square),
        variance=(theta - theta.mean(-2, keepdim=True)).square().sum((-1, -2), dtype=torch.float64) / n,
        radius=_mean(radius.squeeze(-1)),
        speed=_mean(length(turning).squeeze(-1)),
        cosine_rate=2 * (total * total_rate).sum(-1) / pairs,
    )


def interaction_energy(x: Tokens, beta: float) -> Number:
    """E(Θ) = −(1/2β) Σ_{j,k} exp(β⟨θ_j, θ_k⟩), of which the flow with identity weights is a gradient flow."""
    theta = unit(x)
    return -(beta * (theta @ theta.mT)).exp().sum((-1, -2)) / (2 * beta)


def _mean(sizes: Float[Tensor, "*batch tokens"]) -> Number:
    """The mean over tokens, which is representable where their sum is not."""
    mean = sizes.mean(-1, dtype=torch.float64)
    return mean.where(mean.isfinite(), (sizes.double() / sizes.shape[-1]).sum(-1))
