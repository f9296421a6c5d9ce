"""Models and runs side by side: the measures that they have in common, as curves and as one number each."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from normscope.audit.advise_ranks import CRITERIA, Criterion
from normscope.audit.findings import Finding, late_layers
from normscope.errors import InputError

Frame = pd.DataFrame
Row = dict[str, Any]
COMPARABLE = (
    "models; runs of one command, which may be audit, train, evaluate, stability, subspaces, words (journey), ensemble, "
    "simulate or advise; and whatever else has a table in common"
)
_NOISE = 0.1  # at which circuit collapse is compared
_NOTHING = 1e-6  # smaller values are rounding, and a ratio to them has no meaning
_LAYER = "layer"
_OF_STATES = ("motion", "journey")  # tables with a row for what every layer reads, and one for what leaves the last


@dataclass(frozen=True)
class Quantity:
    """Something that subjects are compared by.

    Attributes:
        name: of its figure.
        title: of its figure.
        x, y: what the axes show.
        caption: what to see in the figure.
        table: where it is measured.
        curve: columns ``x`` and ``y``, and ``line`` where a subject has several, from the table; without an ``x`` where a line
            is a single value.
        number: what the one number of a line is.
        value: the one number, from the line.
        unit: of the number.
        ratio: whether numbers are told apart by their ratio; else it is by their difference.
    """

    name: str
    title: str
    x: str
    y: str
    caption: str
    table: str
    curve: Callable[[Frame], Frame]
    number: str
    value: Callable[[Frame], float]
    unit: str = ""
    ratio: bool = True


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


def _advised(criterion: Criterion) -> Quantity:
    """A criterion of advice, scheme by scheme."""
    good, values = "low" if criterion.low_is_better else "high", _values("scheme", "mean")
    return Quantity(
        f"advice-{criterion.name}", criterion.title.capitalize(), "scheme", criterion.unit,
        f"{good.capitalize()} is good; a row of one colour is a scheme that does as well in all of these.",
        "criteria", lambda table: values(table[table["criterion"] == criterion.name]),
        f"{criterion.title} ({criterion.unit}, {good} is good)", _last,
        ratio=criterion.unit != "decades",  # which are logarithms of ratios already
    )  # fmt: skip


QUANTITIES = (
    Quantity(
        "radius", "Length of the residual stream", _LAYER, "|x|",
        "The line that grows most belongs to the model whose late layers turn tokens least for the same write.",
        "motion", _columns("layer", "radius"), "residual growth, last over first", _growth, "×",
    ),
    Quantity(
        "angle", "Angle turned by each layer", _LAYER, "degrees",
        "Lines that stay up move tokens late too; a line that falls away wastes its depth.",
        "motion", _columns("layer", "angle"), "turned by a layer of the last third", _late, "°",
    ),
    Quantity(
        "speed", "Effective speed factor of attention", _LAYER, "s",
        "The larger, the more a token resists being turned.",
        "writes", _speed, "speed factor in the last third", _late,
    ),
    Quantity(
        "cosine", "Mean cosine between tokens", _LAYER, "cosine", "Near 1 all tokens point one way; without the first token.",
        "motion", _columns("layer", "cosine"), "mean cosine behind the last layer", _last, ratio=False,
    ),
    Quantity(
        "rank", "Effective rank of the tokens", _LAYER, "directions", "How many directions the tokens take up.",
        "motion", _columns("layer", "rank"), "effective rank behind the last layer", _last,
    ),
    Quantity(
        "spread", "Spread of embedding norms", _LAYER, "width of the 90 % interval / median",
        "Near 0 what attention reads lies on a sphere, as Pre-Norm needs it.",
        "spread", _spread, "widest spread of norms", _of("max"),
    ),
    Quantity(
        "sparsity", "Share of sparse attention", _LAYER, "share of distributions", "High where heads select single tokens.",
        "sparsity", _sparse, "share of sparse attention in the sparsest layer", _of("max"), ratio=False,
    ),
    Quantity(
        "collapse", "Circuit collapse under noise", "RMS of the relative noise", "share of sparse distributions",
        "The further left a line rises, the less noise makes sparse heads select another token.",
        "collapse", _collapse, "circuits that collapse at a noise of 0.1", _at_noise, ratio=False,
    ),
    Quantity(
        "margins", "Smallest noise that can collapse a head", _LAYER, "relative noise",
        "The least of the layer's heads; lower is more fragile.",
        "margins", _margin, "least margin", _of("min"),
    ),
    Quantity(
        "interference", "Interference", _LAYER, "relative change of scores",
        "How much scores change in the median head when what it does not attend to is exchanged before the norm.",
        "interference", _interference, "interference in the median layer", _of("median"),
    ),
    Quantity(
        "journey", "Angle turned on the sample journey", _LAYER, "degrees",
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
    *map(_advised, CRITERIA),
)  # fmt: skip
_LAYERED = tuple(dict.fromkeys(quantity.table for quantity in QUANTITIES if quantity.x == _LAYER))
AUDITED = (*_LAYERED, "collapse")  # tables that audits have


@dataclass(frozen=True)
class Subject:
    """One side of a comparison: its name, its tables, and how many tokens were read for them, if that is known."""

    name: str
    tables: Mapping[str, Frame]
    tokens: int | None = None

    @property
    def depth(self) -> int | None:
        """How many layers its tables speak of, if they speak of layers."""
        last = {name: self.tables[name]["layer"].max() for name in _LAYERED if name in self.tables}
        return max((int(layer) + (name not in _OF_STATES) for name, layer in last.items() if pd.notna(layer)), default=None)


@dataclass(frozen=True)
class Comparison:
    """What subjects have in common.

    Attributes:
        tables: ``curves`` (subject, quantity, line, x, y), ``numbers`` (quantity, line, number, unit, subject, value),
            ``quantities`` (name, title, x, y, caption: of the figures), ``findings`` (text, figure).
    """

    tables: dict[str, Frame]


def compare(subjects: Sequence[Subject]) -> Comparison:
    """All quantities that two subjects or more were measured by; layers as shares of the depth where depths differ.

    Raises:
        InputError: if there are fewer than two subjects, two of one name, or none that have something in common.
    """
    check_names([subject.name for subject in subjects])
    depths = {subject.depth for subject in subjects} - {None}
    numbers, curves, quantities = _token_rows(subjects), [], []
    findings: list[Finding] = []
    for quantity in QUANTITIES:
        share = quantity.x == _LAYER and len(depths) > 1
        found = {one.name: _curve(quantity, one, share) for one in subjects if quantity.table in one.tables}
        drawn = {name: curve for name, curve in found.items() if not curve.empty}
        if len(drawn) < 2:
            continue
        x = "share of the depth" if share else quantity.x
        words = {"name": quantity.name, "title": quantity.title, "x": x, "y": quantity.y, "caption": quantity.caption}
        quantities.append(words)
        curves += [curve.assign(subject=name, quantity=quantity.name) for name, curve in drawn.items()]
        rows = [row for name, curve in drawn.items() for row in _number_rows(quantity, name, curve)]
        numbers += rows
        findings += _findings(quantity, rows)
    if not quantities:
        raise _nothing_in_common({one.name: one.tables for one in subjects})
    findings = [*_token_findings(subjects, [words["name"] for words in quantities]), *findings]
    return Comparison(
        {
            "findings": Frame([vars(one) for one in findings], columns=["text", "figure"]),
            "numbers": Frame(numbers, columns=["quantity", "line", "number", "unit", "subject", "value"]),
            "quantities": Frame(quantities),
            "curves": pd.concat(curves, ignore_index=True)[["subject", "quantity", "line", "x", "y"]],
        }
    )


def check_names(names: Sequence[str]) -> None:
    """Refuse a comparison of fewer than two, or of one with itself."""
    if len(names) < 2:
        raise InputError("a comparison needs two models or runs at least: normscope compare A B")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"'{twice}' is named twice: there is nothing to compare it with")


def check_common(tables: Mapping[str, Collection[str]]) -> None:
    """Refuse subjects no two of which have a table in common, by the names of the tables that they have or will have."""
    if not any(sum(quantity.table in names for names in tables.values()) > 1 for quantity in QUANTITIES):
        raise _nothing_in_common(tables)


def _nothing_in_common(tables: Mapping[str, Collection[str]]) -> InputError:
    have = "; ".join(f"{name}: {', '.join(names) or 'nothing'}" for name, names in tables.items())
    return InputError(f"these have no measure in common ({have}); what can be compared: {COMPARABLE}")


def _curve(quantity: Quantity, subject: Subject, share: bool) -> Frame:
    curve = quantity.curve(subject.tables[quantity.table])
    curve = curve.assign(line=curve.get("line", ""), x=curve["x"].astype(float), y=curve["y"].astype(float))
    return curve.assign(x=curve["x"] / subject.depth) if share and subject.depth else curve


def _number_rows(quantity: Quantity, subject: str, curve: Frame) -> Iterator[Row]:
    """The number of every line, if it has one."""
    for line in dict.fromkeys(map(str, curve["line"])):
        number = f"{quantity.number}, {line}" if line else quantity.number
        value = quantity.value(curve[curve["line"] == line])
        if math.isfinite(value):
            told = {"quantity": quantity.name, "line": line, "number": number, "unit": quantity.unit}
            yield {**told, "subject": subject, "value": value}


def _findings(quantity: Quantity, numbers: list[Row]) -> Iterator[Finding]:
    """A number's values, the largest first, and how far apart they are; of several lines the one where that is most."""
    lines = [[row for row in numbers if row["line"] == line] for line in dict.fromkeys(row["line"] for row in numbers)]
    shared = [sorted(rows, key=lambda row: -float(row["value"])) for rows in lines if len(rows) > 1]
    if not shared:
        return
    rows = max(shared, key=lambda rows: _apart(quantity, rows))
    listed, far = ", ".join(f"{row['subject']} {row['value']:.3g}{row['unit']}" for row in rows), _how_far(quantity, rows)
    if len(shared) == 1:
        said = f"{rows[0]['number']}: {listed}; {far or 'hardly a difference'}"
    elif far:
        said = f"{quantity.number} differs most for {rows[0]['line']}: {listed}; {far}"
    else:
        said = f"{quantity.number}: hardly a difference in any of {len(shared)} lines"
    yield Finding(f"{said[0].upper()}{said[1:]}.", quantity.name)


def _apart(quantity: Quantity, falling: list[Row]) -> float:
    """The largest over the smallest, infinite if that is nothing; or the largest less the smallest."""
    largest, smallest = falling[0]["value"], falling[-1]["value"]
    if not quantity.ratio:
        return float(largest - smallest)
    if largest <= _NOTHING:
        return 1.0
    return float(largest / smallest) if smallest > _NOTHING else math.inf


def _how_far(quantity: Quantity, falling: list[Row]) -> str:
    """How much more the largest is than the smallest, in words; nothing where three digits show no difference."""
    first, last = falling[0], falling[-1]
    apart, more = f"{_apart(quantity, falling):.3g}", f"{first['value'] - last['value']:.3g}"
    if more == "0" or (quantity.ratio and apart == "1"):
        return ""
    if quantity.ratio and apart != "inf":
        return f"{apart} times as much in {first['subject']} as in {last['subject']}"
    return f"{more}{first['unit']} more in {first['subject']} than in {last['subject']}"


def _token_rows(subjects: Sequence[Subject]) -> list[Row]:
    told = {"quantity": "tokens", "line": "", "number": "tokens read", "unit": ""}
    return [{**told, "subject": one.name, "value": float(one.tokens)} for one in subjects if one.tokens]


def _token_findings(subjects: Sequence[Subject], figures: Sequence[str]) -> Iterator[Finding]:
    """A warning where not all read as much, with the figure of the effective rank, which that bounds, if it is drawn."""
    if len({one.tokens for one in subjects if one.tokens}) > 1:
        listed = ", ".join(f"{one.name} {one.tokens:,}" for one in subjects if one.tokens)
        yield Finding(
            f"Tokens read are not as many everywhere: {listed}. An effective rank is at most their number, and cosines and "
            "margins move with what is read: some of the differences may come from that.",
            "rank" if "rank" in figures else figures[0],
        )
