"""What stands beside a simulation: theory from a scheme's slots alone, and what training measured of it."""

import tomllib
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from importlib.resources import files

import numpy as np
import pandas as pd

from normscope.dynamics import SymmetricFlow
from normscope.schemes import Scheme, find_scheme

BETA = 1.0  # of theory, as in its theorem on the first step
NOT_TRAINED = "not trained here"
_SAMPLES, _STEP = 2, 0.1  # times of the reduced flow for each layer, and its longest step in ln(1 + t)


def theory_table(schemes: Sequence[Scheme], depth: int, tokens: Sequence[int], radius: float = 1.0) -> pd.DataFrame:
    """The reduced flow of every scheme (identity weights, orthogonal start) for so many tokens, a row for each of them.

    Columns: speed and radial, the laws as text; first_rate, γ̇ at t = 0; early and late, mean speed in the first and the last
    third in degrees for a unit of time, one layer; gap, 1 − γ at t = depth. NaN where the flow leaves the finite numbers.
    """
    return pd.DataFrame([_theory(scheme, depth, n, radius) for scheme in schemes for n in dict.fromkeys(tokens)])


def _theory(scheme: Scheme, depth: int, tokens: int, radius: float) -> dict[str, object]:
    laws = [stage.attention.law for stage in scheme.stages]
    times = np.linspace(0, depth, _SAMPLES * depth + 1)
    flow = SymmetricFlow(scheme, tokens, BETA, float(depth))
    start = 1.0 if laws[0].radius_fixed else radius
    path = flow.solve(times.tolist(), radius=start, step=_STEP)
    third = max(1, depth // 3) * _SAMPLES
    speed = np.full(len(times), np.nan)
    speed[: len(path.measures)] = [row["speed"] for row in path.measures]
    last = path.measures[-1]["variance"] * tokens / (tokens - 1) if not path.stopped else np.nan
    return {
        "scheme": scheme.name,
        "tokens": tokens,
        "speed": " then ".join(law.speed.text for law in laws),
        "radial": " then ".join(str(law.radial) for law in laws),
        "first_rate": path.measures[0]["cosine_rate"],
        "early": _mean_angle(speed[: third + 1]),
        "late": _mean_angle(speed[-third - 1 :]),
        "gap": last,
    }


def _mean_angle(speed: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    """Mean over time by the trapezoidal rule, in degrees."""
    return float(np.rad2deg((speed[1:] + speed[:-1]).mean() / 2))


def trained_table(schemes: Sequence[Scheme]) -> pd.DataFrame:
    """What training in this project measured of each scheme, with its source; a row that says so where there is nothing."""
    rows = []
    for scheme in schemes:
        found = [fact for known, fact in _trained() if _same_blocks(known, scheme)]
        rows += [{"scheme": scheme.name, **fact} for fact in found or [{"what": NOT_TRAINED, "value": "", "source": ""}]]
    return pd.DataFrame(rows)


@lru_cache(maxsize=1)
def _trained() -> tuple[tuple[Scheme, dict[str, str]], ...]:
    content = tomllib.loads(files("normscope.audit").joinpath("trained.toml").read_text(encoding="utf-8"))
    return tuple((find_scheme(fact.pop("scheme")), fact) for fact in content["fact"])


def _same_blocks(one: Scheme, other: Scheme) -> bool:
    """Whether two schemes define the same blocks, whatever they are called."""
    stages = list(one.stages), list(other.stages)
    return len(stages[0]) == len(stages[1]) and all(
        getattr(a, field.name) == getattr(b, field.name)
        for a, b in zip(*stages, strict=True)
        for field in fields(Scheme)
        if field.compare and field.name not in ("name", "then")
    )
