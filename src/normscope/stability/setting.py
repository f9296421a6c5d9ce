"""Everything that a measurement of stability depends on, and the measurement itself."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pandas as pd

from normscope.errors import InputError, did_you_mean
from normscope.models import Model, Sample
from normscope.stability.clean import CLEAN_MEASURES, measure_clean
from normscope.stability.collapse import NOISES
from normscope.stability.findings import findings
from normscope.stability.noise import disturbances, measure_noise, need_predictions

MEASURES = ("spread", "noise", "collapse", "sparsity")
_COLLAPSE_LEVELS = (0.005, 0.3, 25)
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def default_levels() -> tuple[float, ...]:
    """The noise levels of a collapse curve, equally spaced by their logarithms."""
    low, high, count = _COLLAPSE_LEVELS
    return tuple(round(low * (high / low) ** (i / (count - 1)), 6) for i in range(count))


@dataclass(frozen=True)
class StabilitySetting:
    """What is measured and how.

    Attributes:
        measures: some of ``MEASURES``; None for all that the model has.
        levels: noise levels (RMS) of the collapse curve.
        noise_levels: at which the model is run.
        layer_noise: for one layer at a time.
        noise: distribution of the noise for collapse.
        draws: of the noise; 16 times as many for strict collapse.
        seed: of everything random.
    """

    measures: tuple[str, ...] | None = None
    levels: tuple[float, ...] = default_levels()
    noise_levels: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
    layer_noise: tuple[float, ...] = (0.1,)
    noise: str = "uniform"
    draws: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.measures or ():
            if name not in MEASURES:
                raise InputError(f"unknown measure '{name}'; allowed: {', '.join(MEASURES)}{did_you_mean(name, MEASURES)}")
        for what in ("levels", "noise_levels", "layer_noise"):
            for level in getattr(self, what):
                if not 0 < level < 1 / math.sqrt(3):
                    raise InputError(
                        f"--{what.replace('_', '-')}: a noise level lies above 0 and below 0.577, so that norms stay positive; "
                        f"not {level:g}"
                    )
        if self.noise not in NOISES:
            raise InputError(f"unknown noise '{self.noise}'; allowed: {', '.join(NOISES)}{did_you_mean(self.noise, NOISES)}")
        wanted = self.measures or MEASURES
        if not self.noise_levels and not self.layer_noise and "noise" in wanted:
            raise InputError("--noise-levels and --layer-noise: noise needs at least one level")
        if not self.levels and "collapse" in wanted:
            raise InputError("--levels: collapse needs at least one level of noise")
        if self.draws < 1:
            raise InputError(f"draws are at least 1, not {self.draws}")

    def wanted(self, view: Model) -> list[str]:
        """The measures; where all are wanted, noise only of a model whose predictions can suffer."""
        if self.measures is not None:
            return list(self.measures)
        return [name for name in MEASURES if view.predicts or name != "noise"]

    def record(self, view: Model, sample: Sample) -> dict[str, Any]:
        """What was done, for ``run.json``."""
        return {
            "model": view.name,
            "scheme": None if view.scheme is None else view.scheme.name,
            "rows": sample.tokens.shape[0],
            "tokens": int(sample.attention_mask.sum()),
            "measures": self.wanted(view),
            "levels": list(self.levels),
            "noise_levels": list(self.noise_levels),
            "layer_noise": list(self.layer_noise),
            "noise": self.noise,
            "draws": self.draws,
        }


def measure_stability(view: Model, sample: Sample, setting: StabilitySetting, bar: Bar) -> dict[str, pd.DataFrame]:
    """Tables by name, ``findings`` among them; ``bar(what, total)`` opens something that is told how much is done."""
    wanted, seed, tables = setting.wanted(view), setting.seed, {}
    if "noise" in wanted:
        need_predictions(view, sample)
        planned = disturbances(setting.noise_levels, setting.layer_noise, view.layers)
        with bar("running with noise", len(planned)) as advance:
            tables["noise"] = measure_noise(view, sample, planned, setting.draws, seed, advance)
    clean = [name for name in wanted if name in CLEAN_MEASURES]
    if clean:
        with bar("looking at attention", view.layers) as advance:
            tables |= measure_clean(
                view, sample, clean, setting.levels, setting.noise, 16 * setting.draws, seed=seed, progress=advance
            )
    return {"findings": pd.DataFrame({"text": findings(view, tables)}), **tables}
