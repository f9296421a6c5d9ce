"""How much a late token still depends on an early one: gradients back through the layers, by depth."""

import math
from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import Attention
from normscope.core.norms import length, unit
from normscope.dynamics.motion import FeedForward, Motion
from normscope.dynamics.schedules import Schedule
from normscope.dynamics.starts import check_start
from normscope.dynamics.trajectory import NotFiniteError
from normscope.errors import InputError
from normscope.schemes import Scheme


def gradient_by_depth(
    start: Float[Tensor, "tokens dim"],
    scheme: Scheme,
    attention: Attention,
    layers: int,
    *,
    late: int = -1,
    early: int = 0,
    probes: int | None = None,
    feedforward: FeedForward | None = None,
    alpha: Schedule | None = None,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """‖∂ θ_late(L) / ∂ x_early(ℓ)‖ (Frobenius) for every layer ℓ, with θ_late the last layer's direction.

    Args:
        start: tokens before the first layer.
        scheme: what the slots say.
        attention: A(X).
        layers: L, at least 1.
        late: the token whose final direction is differentiated.
        early: the token whose state is moved.
        probes: random orthonormal directions to estimate the norm with; None takes all coordinates, which is exact.
        feedforward: F(X), if a block has a feed-forward layer too.
        alpha: α_t in place of the scheme's own.
        generator: for the probes.

    Returns:
        A row for each ℓ = 0 … L−1 (the state that layer ℓ+1 reads): ``scheme``, ``layer``, ``gradient`` as above,
        ``relative`` = r_early(ℓ)·gradient (the effect of turning the early token), and the same summed over all early
        tokens, ``gradient_all``.
    """
    if layers < 1:
        raise InputError(f"layers are at least 1, not {layers}")
    tokens = len(check_start(start))
    for name, token in (("late", late), ("early", early)):
        if not -tokens <= token < tokens:
            raise InputError(f"the {name} token is between {-tokens} and {tokens - 1}, not {token}")
    motion = Motion(scheme, attention, float(layers), feedforward, alpha)
    states = [motion.settle(start, 0.0).detach().requires_grad_()]
    x = states[0]
    for t in range(layers):
        x = motion.layer(x, float(t))
        states.append(x)
    jacobians = _jacobian_norms(unit(x[late]), states[:-1], probes, generator)
    rows = []
    for depth, (state, norms) in enumerate(zip(states, jacobians, strict=False)):
        broken = (~norms.isfinite()).nonzero()
        if len(broken):
            where = f"at layer {depth}, token {int(broken[0])}: its gradient has no value"
            raise NotFiniteError(f"scheme '{scheme.name}' became non-finite (NaN/Inf) {where}")
        gradient = float(norms[early])
        rows.append(
            {
                "scheme": scheme.name,
                "layer": depth,
                "gradient": gradient,
                "relative": gradient * float(length(state[early].detach())),
                "gradient_all": float(length(norms)),
            }
        )
    return pd.DataFrame(rows)


def _jacobian_norms(
    output: Tensor, states: Sequence[Tensor], probes: int | None, generator: torch.Generator | None
) -> list[Tensor]:
    """‖∂ output / ∂ x_j‖ for every token of every state; a random unit v gives E |vᵀJ|² = ‖J‖²/d."""
    dim = len(output)
    if probes is None:
        directions, factor = torch.eye(dim, dtype=output.dtype, device=output.device), 1.0
    else:
        normal = torch.randn(dim, min(probes, dim), generator=generator, dtype=output.dtype, device=output.device)
        directions, factor = torch.linalg.qr(normal).Q.T, math.sqrt(dim / min(probes, dim))
    totals = [torch.zeros(len(state), dtype=output.dtype, device=output.device) for state in states]
    for direction in directions:
        gradients = torch.autograd.grad(output, list(states), direction, retain_graph=True)
        for total, gradient in zip(totals, gradients, strict=True):
            torch.hypot(total, factor * length(gradient).squeeze(-1), out=total)
    return totals
