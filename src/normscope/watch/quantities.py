"""The curves over steps by which watched trainings are compared."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from normscope.measures.base import Quantity
from normscope.measures.curves import last, statistic

_POINTS = 400  # of a curve; more would not show


def over_steps(column: str, reduced: str = "mean", layer: str = "all") -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A column by step: over all rows of a step ``mean``, ``max``, or ``ratio`` of largest to smallest; of one layer ``end``.

    Tables of other experiments that have the name but not the columns give no curve.
    """

    def curve(table: pd.DataFrame) -> pd.DataFrame:
        needed = {"step", column, *(["layer"] if layer == "end" else [])}
        if not needed <= set(table) or not is_numeric_dtype(table[column]):
            return pd.DataFrame({"x": [], "y": []}, dtype=float)
        rows = table[np.isfinite(table[column].to_numpy(dtype=float, na_value=math.nan))]
        if layer == "end" and len(rows):
            rows = rows[rows["layer"] == table["layer"].max()]
        groups = rows.groupby("step")[column]
        values = groups.max() / groups.min().clip(lower=1e-30) if reduced == "ratio" else groups.agg(reduced)
        return _thinned(pd.DataFrame({"x": values.index.to_numpy(dtype=float), "y": values.to_numpy(dtype=float)}), reduced)

    return curve


def _thinned(curve: pd.DataFrame, reduced: str) -> pd.DataFrame:
    """At most 400 points: blocks of them by their last step, and their mean or, so that no spike is lost, their largest."""
    block = math.ceil(len(curve) / _POINTS)
    if block <= 1:
        return curve
    groups = curve.groupby(np.arange(len(curve)) // block)
    return pd.DataFrame({"x": groups["x"].max(), "y": groups["y"].mean() if reduced == "mean" else groups["y"].max()})


QUANTITIES = (
    Quantity("watch-loss", "Loss of the watched training", "step", "loss", "Spikes are instability; lower is better.",
             "steps", over_steps("loss"), "last loss", last, ratio=False),
    Quantity("watch-gradient", "Gradient norm", "step", "norm of all gradients", "Spikes come before divergence.",
             "steps", over_steps("gradient"), "largest gradient norm", statistic("max")),
    Quantity("watch-depth", "Gradients by depth", "step", "largest / smallest layer", "1 is the same gradient in every layer.",
             "layers", over_steps("gradient", "ratio"), "largest ratio of gradients by depth", statistic("max")),
    Quantity("watch-norm", "Residual stream norm at the end", "step", "mean |x| after the last layer", "Growth over training.",
             "layers", over_steps("norm", layer="end"), "last residual stream norm", last),
    Quantity("watch-update", "Update of the stream", "step", "mean |x′ − x| / |x|", "Near 0 layers add nothing.",
             "layers", over_steps("update"), "last update of a layer", last),
    Quantity("watch-rotation", "Rotation per layer", "step", "degrees, mean over layers", "Near 0 layers move no token.",
             "layers", over_steps("rotation"), "last rotation per layer", last, "°"),
    Quantity("watch-cosine", "Token cosine at the end", "step", "mean cosine of two tokens", "Near 1 all tokens look alike.",
             "layers", over_steps("cosine", layer="end"), "last token cosine", last, ratio=False),
    Quantity("watch-rank", "Effective rank at the end", "step", "participation ratio", "Small: states in few directions.",
             "layers", over_steps("rank", layer="end"), "last effective rank", last),
    Quantity("watch-massive", "Massive activations", "step", "max |x| / median |x|", "Spikes are single huge activations.",
             "layers", over_steps("massive", "max"), "largest activation in training over the median", statistic("max")),
    Quantity("watch-logit", "Largest attention logit", "step", "logit", "Growth without bound ends in one-hot attention.",
             "heads", over_steps("logit", "max"), "largest attention logit in training", statistic("max")),
    Quantity("watch-entropy", "Attention entropy", "step", "nats, mean over heads", "0 is attention to a single key.",
             "heads", over_steps("entropy"), "last attention entropy", last),
    Quantity("watch-collapse", "Collapse probability", "step", "mean over heads", "Near-one-hot rows that noise switches.",
             "heads", over_steps("collapse"), "last collapse probability", last, ratio=False),
)  # fmt: skip
