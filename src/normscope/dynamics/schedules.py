"""Step sizes α_t for nGPT as plain functions of time, those of the published comparison."""

import math
from collections.abc import Callable

Schedule = Callable[[float], float]


def constant(t: float) -> float:
    """α_t = 1."""
    return 1.0


def root(t: float) -> float:
    """α_t = √t."""
    return math.sqrt(t)


def linear(t: float) -> float:
    """α_t = t."""
    return t


def mixed(t: float) -> float:
    """α_t = sin²(4t)·t + cos²(4t): between linear and constant, with frequency 4."""
    return math.sin(4 * t) ** 2 * t + math.cos(4 * t) ** 2


def power(t: float) -> float:
    """α_t = 1/√(t + 1): a power law, which slows nGPT down."""
    return 1 / math.sqrt(t + 1)


SCHEDULES: dict[str, Schedule] = {f.__name__: f for f in (constant, root, linear, mixed, power)}
