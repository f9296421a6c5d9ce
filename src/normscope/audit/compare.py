"""Models and runs side by side: the measures that they have in common, as curves and as one number each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from normscope.audit.findings import Finding, late_layers
from normscope.errors import InputError
from normscope.results import plain_rows

Frame = pd.DataFrame
_NOISE = 0.1  # at which circuit collapse is compared
_LAYER = "layer"


@dataclass(frozen=True)
class Quantity:
    """Something that subjects are compared by.

    Attributes:
        name: of its figure.
        title: of its figure.
        x, y: what the axes show.
        caption: what to see in the figure.
        table: where it is measured.
        curve: columns ``x`` and ``y``, and ``line`` where a subject has several, from the table.
        number: what the one number of a subject is, and in which unit.
        value: the one number, from the curve; None where a subject has several curves.
    """

    name: str
    title: str
    x: str
    y: str
    caption: str
    table: str
    curve: Callable[[Frame], Frame]
    number: str = ""
    unit: str = ""
    value: Callable[[Frame], float] | None = None


def _columns(x: str, y: str) -> Callable[[Frame], Frame]:
    return lambda table: pd.DataFrame({"x": table[x], "y": table[y]}).dropna()


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
    """The value at the noise that is nearest to a tenth."""
    return float(curve["y"].iloc[int((curve["x"] - _NOISE).abs().argmin())])


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


QUANTITIES = (
    Quantity(
        "radius", "Length of the residual stream", _LAYER, "|x|",
        "The line that grows most belongs to the model whose late layers turn tokens least for the same write.",
        "motion", _columns("layer", "radius"), "residual growth, last over first", "×", _growth,
    ),
    Quantity(
        "angle", "Angle turned by each layer", _LAYER, "degrees",
        "Lines that stay up move tokens late too; a line that falls away wastes its depth.",
        "motion", _columns("layer", "angle"), "turned by a layer of the last third", "°", _late,
    ),
    Quantity(
        "speed", "Effective speed factor of attention", _LAYER, "s",
        "The larger, the more a token resists being turned.",
        "writes", _columns("layer", "speed"), "speed factor in the last third", "", _late,
    ),
    Quantity(
        "cosine", "Mean cosine between tokens", _LAYER, "cosine", "Near 1 all tokens point one way; without the first token.",
        "motion", _columns("layer", "cosine"), "mean cosine behind the last layer", "", _last,
    ),
    Quantity(
        "rank", "Effective rank of the tokens", _LAYER, "directions", "How many directions the tokens take up.",
        "motion", _columns("layer", "rank"), "effective rank behind the last layer", "", _last,
    ),
    Quantity(
        "spread", "Spread of embedding norms", _LAYER, "width of the 90 % interval / median",
        "Near 0 what attention reads lies on a sphere, as Pre-Norm needs it.",
        "spread", _spread, "widest spread of norms", "", _of("max"),
    ),
    Quantity(
        "sparsity", "Share of sparse attention", _LAYER, "share of distributions", "High where heads select single tokens.",
        "sparsity", _sparse, "share of sparse attention in the sparsest layer", "", _of("max"),
    ),
    Quantity(
        "collapse", "Circuit collapse under noise", "RMS of the relative noise", "share of sparse distributions",
        "The further left a line rises, the less noise makes sparse heads select another token.",
        "collapse", _collapse, "circuits that collapse at a noise of 0.1", "", _at_noise,
    ),
    Quantity(
        "margins", "Smallest noise that can collapse a head", _LAYER, "relative noise",
        "The least of the layer's heads; lower is more fragile.",
        "margins", _margin, "least margin", "", _of("min"),
    ),
    Quantity(
        "interference", "Interference", _LAYER, "relative change of scores",
        "How much scores change in the median head when what it does not attend to is exchanged before the norm.",
        "interference", _interference, "interference in the median layer", "", _of("median"),
    ),
    Quantity(
        "journey", "Angle turned on the sample journey", _LAYER, "degrees",
        "The layers that move one token of a sample sentence.",
        "journey", _columns("layer", "angle"), "turned on the sample journey in all", "°", _of("sum"),
    ),
    Quantity(
        "loss", "Loss in training", "examples", "loss", "Spikes are instability; lower is better.",
        "metrics", _columns("examples", "loss"), "last loss in training", "", _last,
    ),
    Quantity(
        "accuracy", "Accuracy in training", "examples", "share of answer tokens", "On the training batches.",
        "metrics", _columns("examples", "accuracy"), "last accuracy in training", "", _last,
    ),
    Quantity(
        "clusters", "Mean cosine over time, random weights", "time", "cosine", "How fast tokens cluster, scheme by scheme.",
        "cosines", _by_scheme("time", "mean"),
    ),
    Quantity(
        "particles", "Mean cosine over time, simulated", "time", "cosine", "How fast tokens cluster, scheme by scheme.",
        "trajectories", _by_scheme("time", "cosine"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """One side of a comparison: its name, its tables, and how many layers it has, if it has any."""

    name: str
    tables: Mapping[str, Frame]
    layers: int | None = None


@dataclass(frozen=True)
class Comparison:
    """What subjects have in common.

    Attributes:
        tables: ``curves`` (subject, quantity, line, x, y), ``numbers`` (quantity, number, unit, subject, value), ``quantities``
            (name, title, x, y, caption: of the figures), ``findings`` (text, figure).
    """

    tables: dict[str, Frame]


def compare(subjects: Sequence[Subject]) -> Comparison:
    """All quantities that two subjects or more were measured by; layers as shares of the depth where depths differ.

    Raises:
        InputError: if there are fewer than two subjects, two of one name, or none that have something in common.
    """
    check_names([subject.name for subject in subjects])
    share = len({subject.layers for subject in subjects if subject.layers}) > 1
    curves, numbers, quantities = [], [], []
    for quantity in QUANTITIES:
        found = {one.name: _curve(quantity, one, share) for one in subjects if quantity.table in one.tables}
        drawn = {name: curve for name, curve in found.items() if not curve.empty}
        if len(drawn) < 2:
            continue
        x = "share of the depth" if share and quantity.x == _LAYER else quantity.x
        words = {"name": quantity.name, "title": quantity.title, "x": x, "y": quantity.y, "caption": quantity.caption}
        quantities.append(words)
        for name, curve in drawn.items():
            curves.append(curve.assign(subject=name, quantity=quantity.name))
            if quantity.value is not None:
                number = {"quantity": quantity.name, "number": quantity.number, "unit": quantity.unit}
                numbers.append({**number, "subject": name, "value": quantity.value(curve)})
    if not quantities:
        have = "; ".join(f"{one.name}: {', '.join(one.tables) or 'nothing'}" for one in subjects)
        raise InputError(f"these have no measure in common ({have}); compare models, or runs of the same command")
    told = Frame(numbers, columns=["quantity", "number", "unit", "subject", "value"])
    columns = ["subject", "quantity", "line", "x", "y"]
    return Comparison(
        {
            "findings": Frame([vars(one) for one in _findings(told)], columns=["text", "figure"]),
            "numbers": told,
            "quantities": Frame(quantities),
            "curves": pd.concat(curves, ignore_index=True)[columns],
        }
    )


def check_names(names: Sequence[str]) -> None:
    """Refuse a comparison of fewer than two, or of one with itself."""
    if len(names) < 2:
        raise InputError("a comparison needs two models or runs at least: normscope compare A B")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"'{twice}' is named twice: there is nothing to compare it with")


def _curve(quantity: Quantity, subject: Subject, share: bool) -> Frame:
    curve = quantity.curve(subject.tables[quantity.table])
    curve = curve.assign(line=curve.get("line", ""), x=curve["x"].astype(float), y=curve["y"].astype(float))
    if share and quantity.x == _LAYER and subject.layers:
        curve = curve.assign(x=curve["x"] / subject.layers)
    return curve


def _findings(numbers: Frame) -> Iterable[Finding]:
    """A sentence for each number, the largest first."""
    for name, rows in numbers.groupby("quantity", sort=False):
        falling = sorted(plain_rows(rows), key=lambda row: -float(row["value"]))
        listed = ", ".join(f"{row['subject']} {row['value']:.3g}{row['unit']}" for row in falling)
        title = str(falling[0]["number"])
        yield Finding(f"{title[0].upper()}{title[1:]}: {listed}.", str(name))
