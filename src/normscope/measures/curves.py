"""Curves of tables and the one number that stands for each: what quantities are made of."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from normscope.results.conventions import NOISE

Frame = pd.DataFrame


def late_layers(depth: int) -> range:
    """The last third of the layers, one at least."""
    return range(depth - max(1, depth // 3), depth)


def columns(x: str, y: str) -> Callable[[Frame], Frame]:
    """Two columns where both have values; nothing where the table lacks one."""
    return lambda table: table.reindex(columns=[x, y]).set_axis(["x", "y"], axis=1).dropna()


def by_scheme(x: str, y: str) -> Callable[[Frame], Frame]:
    """A line of two columns for every scheme."""
    return lambda table: Frame({"x": table[x], "y": table[y], "line": table["scheme"]}).dropna()


def values_of(names: str, y: str) -> Callable[[Frame], Frame]:
    """A single value for every name in a column."""
    return lambda table: Frame({"x": np.nan, "y": table[y], "line": table[names]}).dropna(subset=["y"])


def first(curve: Frame) -> float:
    """The first value."""
    return float(curve["y"].iloc[0])


def last(curve: Frame) -> float:
    """The last value."""
    return float(curve["y"].iloc[-1])


def growth(curve: Frame) -> float:
    """The last value over the first."""
    return last(curve) / first(curve)


def late(curve: Frame) -> float:
    """The mean over the last third."""
    return float(curve["y"].iloc[list(late_layers(len(curve)))].mean())


def at_noise(curve: Frame) -> float:
    """The value at the noise at which models are compared, by interpolation; NaN where the levels do not reach it."""
    return float(np.interp(NOISE, curve["x"], curve["y"], left=np.nan, right=np.nan))


def statistic(name: str) -> Callable[[Frame], float]:
    """A statistic of all values, by its name in pandas."""
    return lambda curve: float(curve["y"].agg(name))


def two_digits(value: float) -> str:
    """A number with two significant digits: ``0.12``, ``9.8``, ``100``."""
    return f"{float(f'{value:.2g}'):g}"


def share_text(share: float, count: int) -> str:
    """A share of so many with its standard error √(p(1 − p)/n), both rounded to what the error allows: ``12 ± 3 %``."""
    error = 100 * math.sqrt(share * (1 - share) / count)
    if not error:
        return percent(share)
    digits = max(0, -math.floor(math.log10(error)))
    return f"{100 * share:.{digits}f} ± {error:.{digits}f} %"


def percent(value: float, sign: str = "") -> str:
    """A share as people write it."""
    return f"{100 * value:{sign}.3g} %"
