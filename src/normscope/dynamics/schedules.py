"""Step sizes α_t for nGPT as plain functions of time: those of Figure 3 of Karagodin et al. 2025, read from its curves."""

import math
from collections.abc import Callable

Schedule = Callable[[float], float]


def constant(t: float) -> float:
    """α_t = 1."""
    return 1.0


def root(t: float) -> float:
    """α_t = (1 + t)^(−1/2)."""
    return 1 / math.sqrt(1 + t)


def linear(t: float) -> float:
    """α_t = 1/(1 + t)."""
    return 1 / (1 + t)


def mixed(t: float) -> float:
    """α_t = 1/(|sin 4t|·(1 + t) + |cos 4t|): between linear and constant, with frequency 4."""
    return 1 / (abs(math.sin(4 * t)) * (1 + t) + abs(math.cos(4 * t)))


def power(t: float) -> float:
    """α_t = (1 + t)^(−3/2): its integral is at most 2, so that tokens never meet."""
    return 1 / math.sqrt(1 + t) ** 3


SCHEDULES: dict[str, Schedule] = {f.__name__: f for f in (constant, root, linear, mixed, power)}
