"""Curves as they were published, read from the figures, and as they were measured at full scale; and how far two are apart."""

from functools import cache
from importlib import resources

import numpy as np
import numpy.typing as npt
import pandas as pd

from normscope.papers.entry import THIS_RUN, Residual
from normscope.results.tables import plain_rows

Numbers = npt.NDArray[np.float64]

SCHEMES = {"ngpt": "ngpt", "peri": "peri", "post": "post", "mix": "mix", "pre": "pre", "sqrt": "sqrt-scaling"}  # read → ours
READ = ("m", "e", "k")  # readings of the stroke itself; others are those of a covering curve, or interpolated


@cache
def published(name: str) -> pd.DataFrame:
    """A file of ``published``: readings of a figure, with how each was read in the column ``how``."""
    return _read("published", name)


@cache
def measured(name: str) -> pd.DataFrame | None:
    """A file of ``measured``: a full-scale run that is stored; None where there is none."""
    return _read("measured", name) if (_FILES / "measured" / f"{name}.csv").is_file() else None


_FILES = resources.files("normscope.papers")


def _read(folder: str, name: str) -> pd.DataFrame:
    with (_FILES / folder / f"{name}.csv").open(encoding="utf-8") as file:
        table = pd.read_csv(file)
    return table.assign(scheme=table["scheme"].replace(SCHEMES)) if "scheme" in table else table


def spaced(x: pd.Series, y: pd.Series, count: int = 16) -> tuple[pd.Series, pd.Series]:
    """Some of the points, for dots that do not hide the line below them."""
    every = max(1, len(x) // count)
    return x[::every], y[::every]


def residual(
    curve: str,
    quantity: str,
    readings: pd.DataFrame,
    ours: pd.DataFrame,
    columns: tuple[str, str, str],
    *,
    allowed: float | None = None,
    source: str = THIS_RUN,
    between: bool = False,
) -> Residual:
    """The differences of two curves where the stroke itself was read.

    Args:
        curve: its name.
        quantity: what it shows.
        readings: the published curve, with the column ``how`` if some of it was hidden.
        ours: the measured curve; its column ``stderr``, if there is one, gives the sampling error.
        columns: the abscissa, and the values of ``readings`` and of ``ours``.
        allowed: the largest rms that counts as agreement.
        source: what was measured.
        between: compare also between our points, by linear interpolation; else only where both have a point.
    """
    at = columns[0]
    places, difference = differences(readings, ours, columns, between)
    if not len(difference):
        return Residual(curve, quantity, float("nan"), float("nan"), 0, None, source=source)
    noise = 0.0
    if "stderr" in ours:
        sampled = ours.sort_values(at)
        errors = np.interp(places, sampled[at].to_numpy(float), sampled["stderr"].to_numpy(float))
        noise = float(np.sqrt(np.mean(errors**2)))
    rms, largest = float(np.sqrt(np.mean(difference**2))), float(np.abs(difference).max())
    return Residual(curve, quantity, rms, largest, len(difference), allowed, noise, source)


def differences(
    readings: pd.DataFrame, ours: pd.DataFrame, columns: tuple[str, str, str], between: bool = False
) -> tuple[Numbers, Numbers]:
    """Where both curves have a point and the stroke itself was read, and ours minus theirs there; arguments as above."""
    at, theirs, own = columns
    read = readings[readings["how"].isin(READ)] if "how" in readings else readings
    read, ours = read.dropna(subset=[theirs]), ours.sort_values(at)
    x, y = ours[at].to_numpy(float), ours[own].to_numpy(float)
    places, values = read[at].to_numpy(float), read[theirs].to_numpy(float)
    if not len(places) or not len(x):
        return np.array([]), np.array([])
    nearest = np.abs(x[None] - places[:, None]).argmin(1)
    met = np.isclose(x[nearest], places, atol=1e-6)
    inside = (places >= x[0]) & (places <= x[-1]) if between else met
    return places[inside], (np.interp(places, x, y) - values)[inside]


def verdicts() -> dict[str, dict[str, str]]:
    """The verdicts of the gallery in docs/results/papers.md, by entry."""
    file = _FILES / "verdicts.csv"
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8") as lines:
        return {row["entry"]: row for row in plain_rows(pd.read_csv(lines, dtype=str, keep_default_na=False))}
