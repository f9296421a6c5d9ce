"""What advice ranks schemes by: five criteria, their tables over simulated runs, and the same quantities in theory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from normscope.errors import InputError, require_known
from normscope.experiments.settings import as_list
from normscope.schemes import Scheme

if TYPE_CHECKING:
    from normscope.dynamics.advice import RunMeasures

Values = npt.NDArray[np.float64]

LEVELS = (0.01, 0.1)  # RMS of the relative noise on norms
BETA = 1.0  # of theory, as in its theorem on the first step


@dataclass(frozen=True)
class Criterion:
    """What schemes are ranked by.

    Attributes:
        key: its name in tables and JSON.
        name: its name in ``criteria``.
        title: what it is, for people.
        unit: of its values.
        low_is_better: whether small values are good.
        meaning: how it is measured.
        value: its values, one per scheme, in a run.
        theory: the column of the table ``theory`` with the same quantity, if there is one.
    """

    key: str
    name: str
    title: str
    unit: str
    low_is_better: bool
    meaning: str
    value: "Callable[[RunMeasures], Values]"
    theory: str = ""

    @property
    def good(self) -> str:
        """Which values are good."""
        return "low" if self.low_is_better else "high"

    @property
    def sign(self) -> float:
        """The factor that makes large values good."""
        return -1.0 if self.low_is_better else 1.0


def _third(run: "RunMeasures") -> int:
    return max(1, int(run.moved.shape[1]) // 3)


CRITERIA = (
    Criterion(
        "early", "early", "early movement", "°/layer", False,
        "rotation of a token per layer in the first third, after removing the rotation common to all tokens",
        lambda run: run.moved[:, : _third(run)].mean(1), "early",
    ),
    Criterion(
        "late", "late", "late movement", "°/layer", False, "the same in the last third",
        lambda run: run.moved[:, -_third(run) :].mean(1), "late",
    ),
    Criterion(
        "collapse", "diversity", "token diversity", "1 − cosine", False,
        "1 − mean cosine between tokens after the last layer; 0 is rank collapse", lambda run: run.gap[:, -1], "gap",
    ),
    Criterion(
        "gradient", "gradient", "gradient flow", "decades", True,
        "distance from 1, in powers of ten, of the gradient before the first layer over that before the last",
        lambda run: np.abs(run.gradient[:, 0] - run.gradient[:, -1]),
    ),
    Criterion(
        "noise", "noise", "robustness to norm noise", "°", True,
        f"rotation of the final directions by {100 * LEVELS[0]:.0f} % RMS noise on the norms of q, k and v",
        lambda run: run.drift[:, 0],
    ),
)  # fmt: skip
BY_NAME = {criterion.name: criterion for criterion in CRITERIA} | {criterion.key: criterion for criterion in CRITERIA}
KEYS = [criterion.key for criterion in CRITERIA]
SIGNS = np.array([criterion.sign for criterion in CRITERIA])


def as_weights(value: Any) -> dict[str, float] | None:
    """Criteria to rank by with their weights, from ``early,noise=2``, names, or a mapping; None for those of the evidence."""
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else (_weighted(str(item)) for item in as_list(value))
    weights: dict[str, float] = {}
    for name, given in pairs:
        if name not in BY_NAME:
            require_known("criterion", name, [criterion.name for criterion in CRITERIA])
        try:
            weight = float(given)
        except (TypeError, ValueError):
            raise InputError(f"the weight of criterion '{name}' is a number, not '{given}'") from None
        if not 0 < weight < math.inf:
            raise InputError(f"the weight of criterion '{name}' is a positive number, not {given}; leave it out for none")
        weights[BY_NAME[name].key] = weight
    if not weights:
        raise InputError(f"no criterion to rank by: give some of {', '.join(criterion.name for criterion in CRITERIA)}")
    return weights


def _weighted(item: str) -> tuple[str, str]:
    name, _, weight = (piece.strip() for piece in item.partition("="))
    return name, weight or "1"


def theory_table(schemes: Sequence[Scheme], depth: int, tokens: Sequence[int], radius: float = 1.0) -> pd.DataFrame:
    """The reduced flow (identity weights, orthogonal start) of every scheme for each number of tokens.

    Columns: scheme, tokens, speed and radial (the laws as text), first_rate, early, late, gap (see ``reduced_flow``), and why
    there are none (``missing``), usually empty.
    """
    from normscope.dynamics.advice import reduced_flow
    from normscope.dynamics.symmetric import no_reduction

    rows = []
    for scheme in schemes:
        laws = [stage.law_of(stage.attention) for stage in scheme.stages]
        texts = {
            "speed": " then ".join(law.speed.text for law in laws),
            "radial": " then ".join(str(law.radial) for law in laws),
            "missing": no_reduction(scheme),
        }
        for n in dict.fromkeys(tokens):
            rows.append({"scheme": scheme.name, "tokens": n, **texts, **reduced_flow(scheme, depth, n, BETA, radius)})
    return pd.DataFrame(rows)


def runs_table(names: Sequence[str], values: Values) -> pd.DataFrame:
    """Every criterion of every run, from values (runs, schemes, criteria)."""
    rows = [
        {"scheme": name, "run": run, "criterion": key, "value": values[run, i, j]}
        for i, name in enumerate(names)
        for j, key in enumerate(KEYS)
        for run in range(len(values))
    ]
    return pd.DataFrame(rows)


def layers_table(names: Sequence[str], measures: "Sequence[RunMeasures]") -> pd.DataFrame:
    """Mean over runs and 90 % band at every layer: rotation by it, and cosine, norm and gradient before it.

    ``moved`` leaves out the rotation common to all tokens. The gradient is relative to that before the last layer, its mean a
    geometric one; a layer number beyond the last is the state after it.
    """
    from normscope.dynamics.advice import BAND

    columns = {
        "turned": np.stack([run.turned for run in measures]),
        "moved": np.stack([run.moved for run in measures]),
        "cosine": 1 - np.stack([run.gap for run in measures]),
        "gap": np.stack([run.gap for run in measures]),
        "radius": np.stack([run.radius for run in measures]),
        "gradient": np.stack([run.gradient - run.gradient[:, -1:] for run in measures]),
    }
    places = columns["gap"].shape[2]
    tables = []
    for i, name in enumerate(names):
        table = pd.DataFrame({"scheme": name, "layer": range(places)})
        for column, values in columns.items():
            padded = np.full((len(measures), places), np.nan)
            padded[:, : values.shape[2]] = values[:, i]
            numbers = np.stack([padded.mean(0), *np.quantile(padded, BAND, axis=0)])
            if column == "gradient":
                with np.errstate(over="ignore", under="ignore"):  # inf and 0 beyond what a float holds
                    numbers = 10**numbers
            table[column], table[f"{column}_low"], table[f"{column}_high"] = numbers
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def noise_table(names: Sequence[str], measures: "Sequence[RunMeasures]") -> pd.DataFrame:
    """The angle between the final directions with noise and without, by level: mean over runs and 90 % band."""
    from normscope.dynamics.advice import BAND

    drift = np.stack([run.drift for run in measures])
    rows = []
    for i, name in enumerate(names):
        for j, level in enumerate(LEVELS):
            low, high = np.quantile(drift[:, i, j], BAND)
            rows.append({"scheme": name, "noise": level, "angle": drift[:, i, j].mean(), "angle_low": low, "angle_high": high})
    return pd.DataFrame(rows)


def agreement(criteria: pd.DataFrame, theory: pd.DataFrame, tokens: int) -> dict[str, float]:
    """Spearman's rank correlation between theory and simulation at the simulated tokens, by criterion."""
    at = theory[theory["tokens"] == tokens].set_index("scheme")
    means, correlations = means_by_scheme(criteria), {}
    for criterion in CRITERIA:
        if not criterion.theory:
            continue
        both = pd.DataFrame({"theory": at[criterion.theory], "simulation": means[criterion.key]}).dropna()
        if len(both) > 2 and both.nunique().min() > 1:
            correlations[criterion.key] = float(np.corrcoef(both.rank().to_numpy().T)[0, 1])
    return correlations


def means_by_scheme(criteria: pd.DataFrame) -> pd.DataFrame:
    """Mean by scheme and criterion, of schemes that have them all."""
    return criteria.pivot(index="scheme", columns="criterion", values="mean")[KEYS].dropna()
