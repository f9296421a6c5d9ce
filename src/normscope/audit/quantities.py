"""What models and runs are compared by: every quantity with its table, its curve, its one number and its words."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from normscope.experiments.advise import Advise
from normscope.measures.base import Quantity
from normscope.measures.curves import late_layers

Frame = pd.DataFrame
LAYER = "layer"
_NOISE = 0.1  # at which circuit collapse is compared


def _columns(x: str, y: str) -> Callable[[Frame], Frame]:
    """Two columns where both have values; nothing where the table lacks one."""
    return lambda table: table.reindex(columns=[x, y]).set_axis(["x", "y"], axis=1).dropna()


def _speed(table: Frame) -> Frame:
    """Gaps where attention turns tokens too far to have a speed; nothing for an unknown scheme, whose table has none."""
    rows = table.reindex(columns=["layer", "speed"]).set_axis(["x", "y"], axis=1)
    return rows if rows["y"].notna().any() else rows.dropna()


def _first(curve: Frame) -> float:
    return float(curve["y"].iloc[0])


def _last(curve: Frame) -> float:
    return float(curve["y"].iloc[-1])


def _growth(curve: Frame) -> float:
    return _last(curve) / _first(curve)


def _late(curve: Frame) -> float:
    """The mean over the last third."""
    return float(curve["y"].iloc[list(late_layers(len(curve)))].mean())


def _at_noise(curve: Frame) -> float:
    """The value at a noise of a tenth, on the line between the levels beside it; nan where the levels do not reach it."""
    return float(np.interp(_NOISE, curve["x"], curve["y"], left=np.nan, right=np.nan))


def _of(function: str) -> Callable[[Frame], float]:
    """A statistic of all values, by pandas' name for it."""
    return lambda curve: float(curve["y"].agg(function))


def _spread(table: Frame) -> Frame:
    rows = table[table["head"].isna()].sort_values("layer")
    return pd.DataFrame({"x": rows["layer"], "y": rows["high90"] - rows["low90"]})


def _sparse(table: Frame) -> Frame:
    return _columns("layer", "share")(table[table["head"].isna() & table["layer"].notna()])


def _collapse(table: Frame) -> Frame:
    rows = table[table["layer"].isna() & (table["definition"] == "loose") & (table["noise"] > 0)]
    return _columns("noise", "probability")(rows.sort_values("noise"))


def _margin(table: Frame) -> Frame:
    return _columns("layer", "margin")(Frame(table.groupby("layer", as_index=False).agg({"margin": "min"})))


def _interference(table: Frame) -> Frame:
    rows = table[(table["place"] == "before") & (table["exchanged"] == "both")]
    return _columns("layer", "change")(Frame(rows.groupby("layer", as_index=False).agg({"change": "median"})))


def _by_scheme(x: str, y: str) -> Callable[[Frame], Frame]:
    return lambda table: pd.DataFrame({"x": table[x], "y": table[y], "line": table["scheme"]}).dropna()


def _values(names: str, y: str) -> Callable[[Frame], Frame]:
    """A single value for every name in a column."""
    return lambda table: pd.DataFrame({"x": np.nan, "y": table[y], "line": table[names]}).dropna(subset=["y"])


QUANTITIES = (
    Quantity(
        "radius", "Length of the residual stream", LAYER, "|x|",
        "The line that grows most belongs to the model whose late layers turn tokens least for the same write.",
        "motion", _columns("layer", "radius"), "residual growth, last over first", _growth, "×",
    ),
    Quantity(
        "angle", "Angle turned by each layer", LAYER, "degrees",
        "Lines that stay up move tokens late too; a line that falls away wastes its depth.",
        "motion", _columns("layer", "angle"), "turned by a layer of the last third", _late, "°",
    ),
    Quantity(
        "speed", "Effective speed factor of attention", LAYER, "s",
        "The larger, the more a token resists being turned.",
        "writes", _speed, "speed factor in the last third", _late,
    ),
    Quantity(
        "cosine", "Mean cosine between tokens", LAYER, "cosine", "Near 1 all tokens point one way; without the first token.",
        "motion", _columns("layer", "cosine"), "mean cosine behind the last layer", _last, ratio=False,
    ),
    Quantity(
        "rank", "Effective rank of the tokens", LAYER, "directions", "How many directions the tokens take up.",
        "motion", _columns("layer", "rank"), "effective rank behind the last layer", _last,
    ),
    Quantity(
        "spread", "Spread of embedding norms", LAYER, "width of the 90 % interval / median",
        "Near 0 what attention reads lies on a sphere, as Pre-Norm needs it.",
        "spread", _spread, "widest spread of norms", _of("max"),
    ),
    Quantity(
        "sparsity", "Share of sparse attention", LAYER, "share of distributions", "High where heads select single tokens.",
        "sparsity", _sparse, "share of sparse attention in the sparsest layer", _of("max"), ratio=False,
    ),
    Quantity(
        "collapse", "Circuit collapse under noise", "RMS of the relative noise", "share of sparse distributions",
        "The further left a line rises, the less noise makes sparse heads select another token.",
        "collapse", _collapse, "circuits that collapse at a noise of 0.1", _at_noise, ratio=False,
    ),
    Quantity(
        "margins", "Smallest noise that can collapse a head", LAYER, "relative noise",
        "The least of the layer's heads; lower is more fragile.",
        "margins", _margin, "least margin", _of("min"),
    ),
    Quantity(
        "interference", "Interference", LAYER, "relative change of scores",
        "How much scores change in the median head when what it does not attend to is exchanged before the norm.",
        "interference", _interference, "interference in the median layer", _of("median"),
    ),
    Quantity(
        "journey", "Angle turned on the sample journey", LAYER, "degrees",
        "The layers that move one token of a sample sentence.",
        "journey", _columns("layer", "angle"), "turned on the sample journey in all", _of("sum"), "°",
    ),
    Quantity(
        "loss", "Loss in training", "examples", "loss", "Spikes are instability; lower is better.",
        "metrics", _columns("examples", "loss"), "last loss in training", _last,
    ),
    Quantity(
        "accuracy", "Accuracy in training", "examples", "share of answer tokens", "On the training batches.",
        "metrics", _columns("examples", "accuracy"), "last accuracy in training", _last, ratio=False,
    ),
    Quantity(
        "test-accuracy", "Accuracy in tests", "split", "share of answer tokens", "Within and beyond what was seen in training.",
        "accuracy", _values("split", "accuracy"), "test accuracy", _last, ratio=False,
    ),
    Quantity(
        "clusters", "Mean cosine over time, random weights", "time", "cosine", "How fast tokens cluster, scheme by scheme.",
        "cosines", _by_scheme("time", "mean"), "mean cosine at the end of the ensemble", _last, ratio=False,
    ),
    Quantity(
        "particles", "Mean cosine over time, simulated", "time", "cosine", "How fast tokens cluster, scheme by scheme.",
        "trajectories", _by_scheme("time", "cosine"), "mean cosine at the end of the simulation", _last, ratio=False,
    ),
    *Advise.quantities,
)  # fmt: skip
LAYERED = tuple(dict.fromkeys(quantity.table for quantity in QUANTITIES if quantity.x == LAYER))
AUDITED = (*LAYERED, "collapse")  # tables that audits have
