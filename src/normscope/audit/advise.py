"""Advice on a scheme for a model of a given shape: all schemes simulated at that shape, ranked, with what backs the ranks."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from normscope.audit.advise_facts import theory_table, trained_table
from normscope.audit.advise_layers import RandomLayers, Spectrum
from normscope.audit.advise_ranks import BAND, CRITERIA, Ranking, chosen_criteria, criteria_of, rank
from normscope.audit.advise_run import RunMeasures, measure_run
from normscope.audit.advise_setting import LEVELS, AdviceSetting
from normscope.core.threads import one_thread
from normscope.dynamics.motion import check_schemes
from normscope.schemes import Scheme

_POWERS = 300.0  # of ten that a number holds


@dataclass(frozen=True)
class Advice:
    """What is advised, and everything behind it, as tables (docs/audit.md says what their columns are)."""

    setting: AdviceSetting
    ranking: Ranking
    runs: pd.DataFrame
    layers: pd.DataFrame
    noise: pd.DataFrame
    theory: pd.DataFrame
    trained: pd.DataFrame

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """All tables under the names that they have in a run folder."""
        return {
            "ranks": self.ranking.order,
            "criteria": self.ranking.criteria,
            "pairs": self.ranking.pairs,
            "runs": self.runs,
            "layers": self.layers,
            "noise": self.noise,
            "theory": self.theory,
            "trained": self.trained,
        }


def advise(
    setting: AdviceSetting,
    schemes: Sequence[Scheme],
    *,
    spectrum: Spectrum | None = None,
    weights: Mapping[str, float] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Advice:
    """Simulate the schemes and rank them.

    Args:
        setting: the shape, and how it is simulated.
        schemes: which ones.
        spectrum: singular values of a model's heads, for weights ``spectrum-of``.
        weights: of the criteria, by name; all alike if None.
        progress: hears how many of the 2 · depth · runs passes through a layer are done.
    """
    check_schemes(schemes)
    measures = simulate_runs(setting, schemes, spectrum, progress)
    names = [scheme.name for scheme in schemes]
    values = criteria_of(measures)
    return Advice(
        setting,
        rank(names, values, chosen_criteria(None) if weights is None else weights, setting.seed),
        _runs_table(names, values),
        _layers_table(names, measures),
        _noise_table(names, measures),
        theory_table(schemes, setting.depth, (setting.tokens, setting.context), setting.radius),
        trained_table(schemes),
    )


def simulate_runs(
    setting: AdviceSetting, schemes: Sequence[Scheme], spectrum: Spectrum | None, progress: Callable[[int], None]
) -> list[RunMeasures]:
    """All runs; on a CPU several at a time, each on one thread, so that the numbers are the same on any number of cores."""
    workers = torch.get_num_threads() if torch.device(setting.device).type == "cpu" else 1
    stopping, counting, done = threading.Event(), threading.Lock(), [0]

    def tick() -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        with counting:
            done[0] += 1
            progress(done[0])

    def one(run: int) -> RunMeasures:
        return measure_run(RandomLayers(setting, run, spectrum), schemes, tick)

    with one_thread(True), ThreadPoolExecutor(min(workers, setting.runs)) as pool:
        futures = [pool.submit(one, run) for run in range(setting.runs)]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _runs_table(names: Sequence[str], values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> pd.DataFrame:
    rows = [
        {"scheme": name, "run": run, "criterion": criterion.name, "value": values[run, i, j]}
        for i, name in enumerate(names)
        for j, criterion in enumerate(CRITERIA)
        for run in range(len(values))
    ]
    return pd.DataFrame(rows)


def _layers_table(names: Sequence[str], measures: Sequence[RunMeasures]) -> pd.DataFrame:
    """Mean over runs and 90 % band at every layer: angles it turns tokens, and cosine, radius and gradient of what it reads.

    ``moved`` leaves out what tokens turn together. The gradient is relative to that at the last layer, its mean a
    geometric one; a layer number beyond the last is the state after it.
    """
    found = {
        "turned": np.stack([run.turned for run in measures]),
        "moved": np.stack([run.moved for run in measures]),
        "cosine": 1 - np.stack([run.gap for run in measures]),
        "gap": np.stack([run.gap for run in measures]),
        "radius": np.stack([run.radius for run in measures]),
        "gradient": np.stack([run.gradient - run.gradient[:, -1:] for run in measures]),
    }
    places = found["gap"].shape[2]
    tables = []
    for i, name in enumerate(names):
        table = pd.DataFrame({"scheme": name, "layer": range(places)})
        for column, values in found.items():
            own = np.full((len(measures), places), np.nan)
            own[:, : values.shape[2]] = values[:, i]
            numbers = np.stack([own.mean(0), *np.quantile(own, BAND, axis=0)])
            if column == "gradient":
                numbers = 10 ** numbers.clip(-_POWERS, _POWERS)
            table[column], table[f"{column}_low"], table[f"{column}_high"] = numbers
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _noise_table(names: Sequence[str], measures: Sequence[RunMeasures]) -> pd.DataFrame:
    """The angle between the last directions with noise and without, by level: mean over runs and 90 % band."""
    rows = []
    drift = np.stack([run.drift for run in measures])
    for i, name in enumerate(names):
        for j, level in enumerate(LEVELS):
            low, high = np.quantile(drift[:, i, j], BAND)
            rows.append({"scheme": name, "noise": level, "angle": drift[:, i, j].mean(), "angle_low": low, "angle_high": high})
    return pd.DataFrame(rows)
