"""Flows followed to their end at any β: steps as long as the fastest rate allows, and tokens that have met move as one.

Two clusters at cosine c approach at a speed of about e^{−β(1−c)}, tokens within a cluster at about 1. So the own time to one
cluster grows as e^{2β}, and steps that resolve a cluster would never get there. Here tokens that have come as close as ``_MET``
become one token with the mass m of both: they are in the narrow cone of Theorem 4.3, in which they only come closer.

    A_j = Σ_k w_jk θ_k,   w_jk = m_k e^{β⟨θ_j,θ_k⟩}/Z_j,   P A_j = Σ_{k≠j} w_jk P θ_k,

the second form without the token's own weight, which is nearly 1. What is left to move is as slow as e^{−2β}, and a step is a
share of the inverse of the largest rate that is left. A common factor on all speeds only re-times a flow, so that a factor of t
is left out; free radii are followed in u = ln t as q = r/t, whose relaxation at rate 1 is integrated exactly:

    dθ_j/du = P A_j/s_j(q_j),   dq_j/du = T_j − q_j,   T_j = ⟨θ_j, A_j⟩ q_j/s_j(q_j).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from normscope.errors import InputError
from normscope.schemes import NAMED
from normscope.schemes.law import Law, NoFormula

_MET = 1e-12  # 1 − the cosine of two tokens, and the square of the relative difference of their q, that become one
_SHARE = 0.4  # of the inverse of the largest rate: a step
_STEPS = 20_000  # after which a flow is given up

Directions = Float[ndarray, "runs tokens dim"]
Numbers = Float[ndarray, "runs tokens"]
RunNumbers = Float[ndarray, " runs"]
Formula = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Clusters:
    """Tokens with masses, for some runs; a token that another one has absorbed has mass 0.

    Attributes:
        theta: directions.
        q: radii over t where radii are free, else 1.
        mass: how many tokens each stands for.
        time: how long each run has been followed, in its own time: ln t where radii are free, else ∫ of what multiplies A.
    """

    theta: Directions
    q: Numbers
    mass: Numbers
    time: RunNumbers

    @property
    def count(self) -> list[int]:
        """How many clusters each run has."""
        return [int(n) for n in (self.mass > 0).sum(-1)]


@dataclass(frozen=True)
class Pull:
    """What moves tokens: cosines, P A_j, |A_j|, ⟨θ_j, A_j⟩, and Σ_{k≠j} w_jk (1 + β|P θ_k|), which bounds the rates of P A_j.

    A token that another one has absorbed does not move and has |A| = ⟨θ, A⟩ = 1.
    """

    cosines: Float[ndarray, "runs tokens tokens"]
    sideways: Directions
    size: Numbers
    inner: Numbers
    rate: Numbers


@dataclass(frozen=True)
class MergingFlow:
    """The flow of a scheme's last stage, with identity weights, for tokens with masses.

    Attributes:
        scheme: its name.
        beta: the inverse temperature.
    """

    scheme: str
    beta: float

    @cached_property
    def law(self) -> Law:
        """The law of the last stage, in which a flow ends."""
        *_, last = NAMED[self.scheme].stages
        return last.law_of(last.attention)

    @cached_property
    def _formulas(self) -> tuple[Formula, Formula]:
        """s_j, and the factor of ⟨θ_j, A_j⟩ in ṙ_j, which is 0 where radii are fixed."""
        speed, radial = self.law.speed, self.law.radial
        if isinstance(speed, NoFormula) or isinstance(radial, NoFormula):
            raise InputError(f"theory has no law of motion for the scheme '{self.scheme}'")
        return speed.function, (lambda values: 0.0) if radial.pull is None else radial.pull.function

    def begin(self, x: Directions, t: float) -> Clusters:
        """Tokens x of a flow at time t, each its own cluster."""
        r = np.sqrt((x * x).sum(-1))
        return Clusters(_unit(x), np.ones_like(r) if self.law.radius_fixed else r / t, np.ones_like(r), np.zeros(len(x)))

    def pull(self, theta: Directions, mass: Numbers) -> Pull:
        """Attention of tokens with masses, its part across each token summed over the others alone."""
        cosines = theta @ theta.swapaxes(-1, -2)
        weights = mass[:, None, :] * np.exp(self.beta * (cosines - 1))
        weights /= weights.sum(-1, keepdims=True)
        A = weights @ theta
        np.einsum("rjj->rj", weights)[...] = 0.0
        sideways = weights @ theta - (weights * cosines).sum(-1)[..., None] * theta
        across = np.sqrt(np.maximum(1 - cosines**2, 0.0))
        alive = mass > 0
        return Pull(
            cosines,
            sideways * alive[..., None],
            np.where(alive, np.sqrt((A * A).sum(-1)), 1.0),
            np.where(alive, (theta * A).sum(-1), 1.0),
            (weights * (1 + self.beta * across)).sum(-1) * alive,
        )

    def radial(self, pull: Pull) -> Numbers:
        """T_j: what q_j relaxes to, the radial speed ṙ_j."""
        speeds: Numbers = self._formulas[1](self._values(pull, 1.0)) * pull.inner
        return speeds

    def _values(self, pull: Pull, q: Numbers | float) -> dict[str, Numbers | float]:
        return {"r": q, "A": pull.size, "t": 0.0, "depth": 1.0, "alpha": 1.0}

    def _speed(self, pull: Pull, q: Numbers) -> Numbers:
        """1/s_j."""
        inverse: Numbers = np.ones_like(q) / self._formulas[0](self._values(pull, q))
        return inverse

    def _rate(self, now: Clusters, pull: Pull) -> RunNumbers:
        """The largest rate of each run: that of directions, and of q as far as it is not where it relaxes to."""
        rates = pull.rate * self._speed(pull, now.q)
        if not self.law.radius_fixed:
            rates = np.maximum(rates, np.abs(self.radial(pull) / now.q - 1) * (now.mass > 0))
        fastest: RunNumbers = rates.max(-1)
        return fastest

    def step(self, now: Clusters, pull: Pull, h: RunNumbers) -> Clusters:
        """A fourth-order step of length h of the directions; q follows T as if that changed evenly within the step."""
        first, free = self.radial(pull), not self.law.radius_fixed
        moves = [pull.sideways * self._speed(pull, now.q)[..., None]]
        q = now.q
        for share in (0.5, 0.5, 1.0):
            part = (share * h)[:, None]
            there = self.pull(_unit(now.theta + part[..., None] * moves[-1]), now.mass)
            q = _relaxed(now.q, first, self.radial(there), part) if free else q
            moves.append(there.sideways * self._speed(there, q)[..., None])
        total = (moves[0] + 2 * moves[1] + 2 * moves[2] + moves[3]) / 6
        return replace(now, theta=_unit(now.theta + h[:, None, None] * total), q=q, time=now.time + h)

    def follow(self, now: Clusters, together: float) -> tuple[Clusters, RunNumbers, Numbers]:
        """The clusters when 1 − the smallest cosine is below ``together`` in every run, or after 20,000 steps.

        Returns them with 1 − the smallest cosine of each run, and the radial speeds ṙ_j; 1 for absorbed tokens.
        """
        for _ in range(_STEPS):
            pull = self.pull(now.theta, now.mass)
            merged = _merged(now, pull.cosines)
            if merged is not now:
                now, pull = merged, self.pull(merged.theta, merged.mass)
            apart = _apart(pull.cosines, now.mass > 0)
            moving = apart >= together
            if not moving.any():
                break
            h = _SHARE / np.maximum(self._rate(now, pull), 1e-300)
            now = self.step(now, pull, np.where(moving, h, 0.0))
        return now, apart, np.where(now.mass > 0, self.radial(pull), 1.0)


def _unit(x: Directions) -> Directions:
    directions: Directions = x / np.sqrt((x * x).sum(-1, keepdims=True))
    return directions


def _relaxed(q: Numbers, first: Numbers, last: Numbers, h: Float[ndarray, "runs 1"]) -> Numbers:
    """The q after a time h of dq/du = T − q with T going evenly from ``first`` to ``last``."""
    decay = -np.expm1(-h)
    lag = np.where(h > 0, decay / np.where(h > 0, h, 1.0), 1.0)
    relaxed: Numbers = q + decay * (first - q) + (1 - lag) * (last - first)
    return relaxed


def _apart(cosines: Float[ndarray, "runs tokens tokens"], alive: Bool[ndarray, "runs tokens"]) -> RunNumbers:
    """1 − the smallest cosine between tokens that are alive."""
    pairs = alive[:, :, None] & alive[:, None, :]
    widest: RunNumbers = np.where(pairs, 1 - cosines, 0.0).max((-1, -2))
    return widest


def _merged(now: Clusters, cosines: Float[ndarray, "runs tokens tokens"]) -> Clusters:
    """The same clusters, or new ones in which tokens that have met are one, at their mean direction and mean q."""
    alive = now.mass > 0
    near = (1 - cosines < _MET) & alive[:, :, None] & alive[:, None, :]
    near &= np.square(now.q[:, :, None] - now.q[:, None, :]) < _MET * now.q[:, :, None] * now.q[:, None, :]
    near = np.triu(near, 1)
    if not near.any():
        return now
    theta, q, mass = now.theta.copy(), now.q.copy(), now.mass.copy()
    for run, j, k in np.argwhere(near):
        if mass[run, j] > 0 and mass[run, k] > 0:
            share = mass[run, k] / (mass[run, j] + mass[run, k])
            theta[run, j] += share * (theta[run, k] - theta[run, j])
            q[run, j] += share * (q[run, k] - q[run, j])
            mass[run, j], mass[run, k] = mass[run, j] + mass[run, k], 0.0
    return replace(now, theta=_unit(theta), q=q, mass=mass)
