"""How many runs a published mean may be of, from how far it is from ours: a statistic of Figure 5 of paper 2.

The mean of N independent runs differs from the expectation by a vector of covariance C/N, where C is the covariance of the
curves of one run: of all schemes and times together, since schemes share starts and weights. Let λ_k, e_k be the largest
eigenvalues of C and their vectors, and a the published means minus ours. If sampling is all that separates them, then
z_k = ⟨e_k, a⟩/√λ_k has variance 1/N for every k, so that N is about K/Σ z_k², and N Σ z_k² follows χ²_K. A change of the
setting has no reason to give z_k of one size. N says how far the edges of the 90 % bands should be off, which tests it.

Digitised values have errors that are independent, that shift a curve, and that shift all curves. They add a variance c_k² to
z_k, so N may be larger: its interval ends where Σ z_k²/(1/N + c_k²) has the upper quantile of χ²_K, or nowhere. It begins
where it would without them. Components are left out whose c_k from independent errors alone is above ``_CLEAR``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from normscope.errors import InputError
from normscope.experiments.ensemble import Ensemble, Nowhere
from normscope.experiments.progress import SILENT, Progress
from normscope.papers.curves import READ, measured, published

Values = npt.NDArray[np.float64]

STORED = "panel-scatter"
RUNS = {"5d": 2048, "5e": 512, "5a": 128, "5b": 128}  # for panels whose curves can be read at our times
_ERROR = 0.0006  # of a digitised value
_CLEAR = 0.02  # the most that independent errors of digitised values may add to a z_k
_LARGEST = 1e9  # runs
_MOST = 10  # components
_SMALLEST = 0.004  # standard deviation over runs at a point that is compared
_INTERVAL = (0.05, 0.95)
_EDGES = {"low": 0.05, "high": 0.95}
_DRAWS = 400
_TIMES = 4
_NEAR, _FAR = 4 / 3, 5 / 6  # of the published difference: as near, as far, with an allowance for errors of digitised values


@dataclass(frozen=True)
class Scatter:
    """What sampling error would explain.

    Attributes:
        z: the difference along each component, in standard deviations of a single run.
        runs: the number of runs whose mean is expected to differ as much, if digitised values are exact.
        low, high: its 90 % interval; ``high`` is infinite where errors of digitised values may explain it.
    """

    z: tuple[float, ...]
    runs: float
    low: float
    high: float


def scatter(curves: Values, difference: Values, owners: npt.NDArray[np.int64], seed: int = 0) -> Scatter:
    """Of the curves (runs, points) of single runs, and the difference (points) of two means.

    ``owners`` (points) has the number of the curve that a point is of.
    """
    values, vectors = np.linalg.eigh(np.atleast_2d(np.cov(curves.T)))
    deviations = np.sqrt(values.clip(min=0))[::-1][:_MOST]
    kept = deviations >= _ERROR / _CLEAR
    deviations, vectors = deviations[kept], vectors[:, ::-1][:, :_MOST][:, kept]
    if not len(deviations):
        raise InputError("single runs differ too little to tell how many a mean is of")
    z = difference @ vectors / deviations
    shifts = np.stack([vectors[owners == owner].sum(0) for owner in np.unique(owners)])  # of each curve, along each component
    errors = _ERROR * np.sqrt(1 + (shifts**2).sum(0) + shifts.sum(0) ** 2) / deviations
    low, high = interval(z, errors, seed)
    return Scatter(tuple(z.tolist()), len(z) / float((z**2).sum()), low, high)


def interval(z: Values, errors: Values, seed: int = 0) -> tuple[float, float]:
    """The 90 % interval of N, where each z_k has an error."""
    lower, upper = np.quantile(np.random.default_rng(seed).chisquare(len(z), 200_000), _INTERVAL)
    runs = np.geomspace(1.0, _LARGEST, 10_001)
    statistic = (z**2 / (1 / runs[:, None] + errors**2)).sum(1)  # rises with N
    high = math.inf if statistic[-1] < upper else float(np.interp(upper, statistic, runs))
    return float(lower / (z**2).sum()), high


def edge_error(curves: Values, runs: int, level: float, seed: int = 0) -> tuple[float, float, float]:
    """The rms by which a quantile of so many runs misses that of all of them: its median, and a 90 % interval."""
    rng, edge = np.random.default_rng(seed), np.quantile(curves, level, axis=0)
    drawn = (np.quantile(curves[rng.integers(len(curves), size=runs)], level, axis=0) for _ in range(_DRAWS))
    rms = [math.sqrt(((other - edge) ** 2).mean()) for other in drawn]
    low, middle, high = np.quantile(rms, (_INTERVAL[0], 0.5, _INTERVAL[1]))
    return float(middle), float(low), float(high)


def upper_edges_alone(curves: Values, points: pd.DataFrame, runs: int, seed: int = 0) -> float:
    """How often so many runs differ from all of them as the published panel does, in the upper edges of its bands alone.

    Args:
        curves: of single runs, (runs, schemes, times).
        points: ``scheme``, ``time``, and how far ``mean``, ``low`` and ``high`` are off there; NaN where an edge was not read.
        runs: of a sample.
        seed: of the samples.

    Returns:
        The share of samples whose mean and lower edges are as near to those of all runs as the published ones to ours, and
        whose upper edges are as far off, in rms.
    """
    rng, levels = np.random.default_rng(seed), {"mean": None, **_EDGES}
    rms: dict[str, list[float]] = {column: [] for column in levels}
    places = {column: points[points[column].notna()] for column in levels}
    of_all = {column: _statistic(curves, level) for column, level in levels.items()}
    for _ in range(_DRAWS):
        drawn = curves[rng.integers(len(curves), size=runs)]
        for column, level in levels.items():
            off = (_statistic(drawn, level) - of_all[column])[places[column]["scheme"], places[column]["time"]]
            rms[column].append(math.sqrt((off**2).mean()))
    published = {column: math.sqrt((rows[column] ** 2).mean()) for column, rows in places.items()}
    near = [np.array(rms[column]) <= _NEAR * published[column] for column in ("mean", "low")]
    return float(np.mean(near[0] & near[1] & (np.array(rms["high"]) >= _FAR * published["high"])))


def _statistic(curves: Values, level: float | None) -> Values:
    """The mean of all runs, or a quantile."""
    values: Values = curves.mean(0) if level is None else np.quantile(curves, level, axis=0)
    return values


def upper_edges_of(name: str, runs: int, progress: Progress = SILENT) -> pd.DataFrame:
    """``upper_edges_alone`` of a panel for samples of different sizes."""
    ensemble = Ensemble(panel=name, runs=runs, device="cpu")
    curves, points = _curves(ensemble, progress), _points(ensemble)
    shares = {size: upper_edges_alone(curves, points, size) for size in (150, 250, 500, 1000, 2000, 5000)}
    return pd.DataFrame({"runs": list(shares), "share": list(shares.values())})


def of_panel(name: str, runs: int, instead: Mapping[str, Any] | None = None, progress: Progress = SILENT) -> dict[str, Any]:
    """What sampling would explain of a published panel; with ``instead``, of a change of the setting in place of it.

    The row of a published panel has also the rms by which the edges of its bands are off and, if there are runs enough to tell,
    what the bands of so many runs would give.
    """
    given: dict[str, Any] = {"panel": name, "runs": runs, "device": "cpu"}
    curves, points = _curves(Ensemble(**given), progress), _points(Ensemble(**given))
    schemes, times = points["scheme"].to_numpy(), points["time"].to_numpy()
    curves, change = curves[:, schemes, times], points["mean"].to_numpy()
    if instead:
        change = (_curves(Ensemble(**given, **instead), progress)[:, schemes, times] - curves).mean(0)
    wide = curves.std(0, ddof=1) >= _SMALLEST
    curves, points, change = curves[:, wide], points[wide], change[wide]
    found = scatter(curves, change, points["scheme"].to_numpy())
    row: dict[str, Any] = {"panel": name, "runs": runs, "effective": found.runs, "low": found.low, "high": found.high}
    row["z"] = " ".join(f"{z:+.3f}" for z in found.z)
    for edge, level in {} if instead else _EDGES.items():
        off = points[edge].to_numpy()
        read = np.isfinite(off)
        row[f"{edge}_edge"] = math.sqrt((off[read] ** 2).mean())
        few = found.runs * _TIMES <= runs  # else the quantiles of so many are those of the same few runs
        expected = edge_error(curves[:, read], max(1, round(found.runs)), level) if few else (math.nan,) * 3
        row |= dict(zip((f"{edge}_expected", f"{edge}_from", f"{edge}_to"), expected, strict=True))
    return row


def _curves(ensemble: Ensemble, progress: Progress) -> Values:
    """Mean cosines (runs, schemes, times) of single runs."""
    shown = progress.stage(f"running {ensemble.panel}", ensemble.runs)
    return ensemble.job.compute(Nowhere(), shown).astype(np.float64)


def _points(ensemble: Ensemble) -> pd.DataFrame:
    """Published minus stored, where the stroke itself was read at a time of ours: mean and edges of the band.

    ``scheme`` and ``time`` are places in the ensemble's curves.
    """
    stored, readings = measured(f"panel-{ensemble.panel}"), published(f"2-fig{ensemble.panel}")
    assert stored is not None
    schemes = {scheme.name: place for place, scheme in enumerate(ensemble.job.schemes)}
    times = {round(time, 6): place for place, time in enumerate(ensemble.job.setting.times)}
    both = readings[readings["how"].isin(READ)].merge(
        stored.assign(time=stored["time"].round(6)), on=["scheme", "time"], suffixes=("", "_stored")
    )
    apart = {column: both[column] - both[f"{column}_stored"] for column in ("mean", *_EDGES)}
    return pd.DataFrame({"scheme": both["scheme"].map(schemes), "time": both["time"].round(6).map(times), **apart})


def stored_scatter() -> pd.DataFrame:
    """The stored rows, one for each panel."""
    rows = measured(STORED)
    return pd.DataFrame(columns=["panel"]) if rows is None else rows
