"""Alarms: rules over the probes of a training, each a plain sentence with a number and what may help."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from normscope.errors import InputError
from normscope.results.findings import Severity
from normscope.watch.snapshot import Snapshot

Tables = Mapping[str, pd.DataFrame]
Place = tuple[int, int, str]  # layer, head and tensor
NOWHERE = -1  # the layer or head of what belongs to none
_EARLY = 3  # probes whose least extreme value is the early one


@dataclass(frozen=True)
class Alarm:
    """What a rule has to report.

    Attributes:
        step: the step of the probe that raised it.
        rule: the name of the rule.
        layer: where it is worst; −1 if it belongs to no layer.
        head: likewise.
        number: the number that the rule watches.
        text: one sentence with the number, and what may help.
        severity: ``warning`` if it predicts that the training fails, else ``notice``.
    """

    step: int
    rule: str
    layer: int
    head: int
    number: float
    text: str
    severity: Severity = "warning"

    @property
    def row(self) -> dict[str, Any]:
        """The alarm as a row of the table ``alarms``."""
        return asdict(self)


class Reading(NamedTuple):
    """The number of one place, and the name of its tensor if the place has several."""

    number: float
    layer: int = NOWHERE
    head: int = NOWHERE
    tensor: str = ""


Measure = Callable[[Tables, int], Iterable[Reading]]


@dataclass(frozen=True)
class Rule:
    """A number for each place of a model, and when it is too large or too small.

    A place breaches the rule at a probe if its number is above ``limit`` and above ``growth`` times its early value, which is
    the smallest of the first three probes. With ``below`` it is the other way round: under the limit, and under the early
    value (the largest of the first three) divided by ``growth``.

    Attributes:
        name: a few words.
        measure: from the tables of a probe and the width of the model to values; numbers that are NaN breach nothing.
        limit: the number from which on a place may breach the rule.
        sentence: what is reported, with ``{place}``, ``{number}``, ``{early}`` and, where there is one, ``{tensor}``.
        advice: what may help.
        growth: how far it must have moved from its early value; 1: whatever that was.
        probes: the number of probes in a row in which a place must breach the rule. After an alarm, the rule is silent until
            no place has breached it in as many probes in a row.
        below: whether small numbers breach it.
        change: whether the number that counts is the largest relative change of all places since the first probe.
        severity: ``warning`` if it predicts that the training fails, else ``notice``.
    """

    name: str
    measure: Measure
    limit: float
    sentence: str
    advice: str
    growth: float = 1.0
    probes: int = 2
    below: bool = False
    change: bool = False
    severity: Severity = "warning"

    def __post_init__(self) -> None:
        if self.probes < 1:
            raise InputError(f"probes={self.probes}: a rule needs at least one probe in a row")
        if not self.growth >= 1:
            raise InputError(f"growth={self.growth}: at least 1, which asks for no change from the early value")
        if math.isnan(self.limit):
            raise InputError("limit=nan: a rule needs a number to compare with; ±inf for a rule that never fires")

    def breached(self, number: float, early: float) -> bool:
        """Whether a number that began at ``early`` breaches the rule."""
        if self.below:
            return number < self.limit and (self.growth == 1 or number < early / self.growth)
        return number > self.limit and (self.growth == 1 or number > early * self.growth)


@dataclass
class _History:
    """What a rule remembers: the early value of each place, how long each has breached it, and whether it has fired."""

    first: dict[Place, float] = field(default_factory=dict)
    early: dict[Place, float] = field(default_factory=dict)
    seen: int = 0
    breaches: dict[Place, int] = field(default_factory=dict)
    fired: bool = False
    quiet: int = 0

    def change(self, readings: Iterable[Reading]) -> list[Reading]:
        """The largest |number/first − 1| of all places."""
        numbers = {(reading.layer, reading.head, reading.tensor): reading.number for reading in readings}
        self.first = self.first or {place: number for place, number in numbers.items() if number and math.isfinite(number)}
        changes = [abs(numbers.get(place, math.nan) / number - 1) for place, number in self.first.items()]
        return [Reading(max(changes))] if changes and not any(map(math.isnan, changes)) else []

    def add(self, rule: Rule, numbers: Mapping[Place, float]) -> list[Place]:
        """The places that have breached the rule for long enough, if the rule is to fire."""
        if self.seen < _EARLY and numbers:
            self.seen += 1
            least = max if rule.below else min
            for place, number in numbers.items():
                if math.isfinite(number):
                    self.early[place] = least(number, self.early.get(place, number))
        breached = [place for place, number in numbers.items() if rule.breached(number, self.early.get(place, math.nan))]
        self.breaches = {place: self.breaches.get(place, 0) + 1 for place in breached}
        self.quiet = 0 if breached else self.quiet + 1
        if self.fired:
            self.fired = self.quiet < rule.probes
            return []
        lasting = [place for place, count in self.breaches.items() if count >= rule.probes]
        self.fired = bool(lasting)
        return lasting


class Alarms:
    """Rules, and what they have seen of one training.

    Example:
        >>> import pandas as pd
        >>> from normscope.watch.snapshot import Snapshot
        >>> faults = pd.DataFrame({"step": [7], "tensor": ["attention output"], "layer": [3], "count": [12]})
        >>> print(*(alarm.text for alarm in Alarms().add(Snapshot(7, {"faults": faults}))))
        The attention output of layer 3 became non-finite (NaN/Inf; count: 12). What may help: ...

    Args:
        rules: those of ``RULES`` if none are given; others, changed ones (``dataclasses.replace``), or none: ``()``.
        dim: the width of the model, which makes the norm of a vector an RMS value.
    """

    def __init__(self, rules: Iterable[Rule] | None = None, dim: int = 1) -> None:
        self.rules, self.dim = RULES if rules is None else tuple(rules), dim
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise InputError(f"alarms is a sequence of rules (normscope.watch.Rule), not of {type(rule).__name__}")
        self._histories = [_History() for _ in self.rules]

    def add(self, snapshot: Snapshot) -> list[Alarm]:
        """The alarms that the next probe raises: one for each rule at most, at the place where it is worst."""
        alarms = []
        for rule, history in zip(self.rules, self._histories, strict=True):
            measured = rule.measure(snapshot.tables, self.dim)
            if rule.change:
                measured = history.change(measured)
            readings = {(reading.layer, reading.head, reading.tensor): reading for reading in measured}
            places = history.add(rule, {place: reading.number for place, reading in readings.items()})
            if places:
                worst = (min if rule.below else max)(places, key=lambda place: readings[place].number)
                early = history.early.get(worst, math.nan)
                alarms.append(_alarm(rule, snapshot.step, readings[worst], early, len(places) - 1))
        return alarms


def _alarm(rule: Rule, step: int, reading: Reading, early: float, others: int) -> Alarm:
    number, layer, head, tensor = reading
    where = "the model" if layer == NOWHERE else f"layer {layer}" + (f", head {head}" if head != NOWHERE else "")
    if others:
        where += f" (and {others} other place{'s' * (others > 1)})"
    sentence = rule.sentence.format(place=where, number=f"{number:.3g}", early=f"{early:.3g}", tensor=tensor)
    return Alarm(step, rule.name, layer, head, number, f"{sentence} {rule.advice}", rule.severity)


def column(table: str, name: str) -> Measure:
    """A measure: a column of a table, at every layer, sublayer and head that the table has."""

    def measure(tables: Tables, dim: int) -> list[Reading]:
        rows = tables.get(table)
        if rows is None or name not in rows:
            return []
        layers, heads = (rows[place].tolist() if place in rows else [NOWHERE] * len(rows) for place in ("layer", "head"))
        tensors = rows["sublayer"].tolist() if "sublayer" in rows else [""] * len(rows)
        return [Reading(*values) for values in zip(rows[name].tolist(), layers, heads, tensors, strict=True)]

    return measure


def by_layer(table: str, name: str, reduce: Callable[[list[float]], float]) -> Measure:
    """A measure: mean, largest or smallest value of a column in each layer."""
    values_of = column(table, name)

    def measure(tables: Tables, dim: int) -> list[Reading]:
        groups: dict[int, list[float]] = {}
        for reading in values_of(tables, dim):
            if not math.isnan(reading.number):
                groups.setdefault(reading.layer, []).append(reading.number)
        return [Reading(reduce(values), layer) for layer, values in groups.items()]

    return measure


def _faults(tables: Tables, dim: int) -> list[Reading]:
    """The first tensor of the pass that has non-finite values."""
    faults = tables.get("faults")
    if faults is None:
        return []
    count, layer, tensor = faults.iloc[0][["count", "layer", "tensor"]]
    return [Reading(float(count), int(layer), tensor=str(tensor))]


def _last_state(tables: Tables, dim: int) -> list[Reading]:
    """The token cosine after the last layer."""
    return sorted(column("layers", "cosine")(tables, dim), key=lambda reading: reading.layer)[-1:]


def _of_states(name: str) -> Measure:
    """A measure: a column of the states before each layer and after the last, which are called so in ``{tensor}``."""

    def measure(tables: Tables, dim: int) -> list[Reading]:
        readings = column("layers", name)(tables, dim)
        last = max((reading.layer for reading in readings), default=0)
        names = ("after the last layer" if reading.layer == last else f"before layer {reading.layer}" for reading in readings)
        return [reading._replace(tensor=name) for reading, name in zip(readings, names, strict=True)]

    return measure


def _rms(tables: Tables, dim: int) -> list[Reading]:
    """The RMS value of the residual stream, |x|/√dim, before each layer and after the last."""
    return [reading._replace(number=reading.number / math.sqrt(dim)) for reading in _of_states("norm")(tables, dim)]


def _updates(tables: Tables, dim: int) -> list[Reading]:
    """The RMS value of each update over that of the residual stream before the layer, or over 1 where that is less.

    Embeddings often start far below an RMS value of 1: an update that is many times larger is no fault there.
    """
    streams = {reading.layer: reading.number for reading in _rms(tables, dim)}
    updates = column("sublayers", "update")(tables, dim)
    return [update._replace(number=update.number * min(1.0, streams.get(update.layer, 1.0))) for update in updates]


def _gradients_apart(tables: Tables, dim: int) -> list[Reading]:
    """The largest gradient norm of a layer over that of each."""
    known = [reading for reading in column("layers", "gradient")(tables, dim) if reading.number > 0]
    largest = max((reading.number for reading in known), default=math.nan)
    return [reading._replace(number=largest / reading.number) for reading in known]


def _largest_logits(tables: Tables, dim: int) -> list[Reading]:
    """The largest attention logit of each layer, where it is positive."""
    return [reading for reading in by_layer("heads", "logit", max)(tables, dim) if reading.number > 0]


_RATE = "What may help: a lower learning rate, a longer warm-up, gradient clipping"
NON_FINITE = Rule(
    "non-finite values", _faults, 0.0,
    "The {tensor} of {place} became non-finite (NaN/Inf; count: {number}).",
    f"{_RATE}; with float16, loss scaling or bfloat16.", probes=1,
)  # fmt: skip
TOKENS_COLLAPSE = Rule(
    "tokens collapse", _last_state, 0.999,
    "After the last layer the mean cosine between tokens is {number}: the model hardly tells them apart; it began at {early}.",
    f"{_RATE}, smaller initial weights, Pre-LN or Peri-LN in place of Post-LN at this depth.", probes=6,
)  # fmt: skip
LARGE_UPDATES = Rule(
    "large updates", _updates, 50.0,
    "The RMS of the {tensor} update of {place} is {number} times that of the residual stream (or 1, if that is larger); "
    "it began at {early}.",
    f"{_RATE}, norms on sublayer outputs (Peri-LN).", growth=5.0, probes=1,
)  # fmt: skip
GRADIENTS_APART = Rule(
    "gradients apart", _gradients_apart, 100.0,
    "The gradient norm of {place} is {number} times smaller than that of the layer with the largest.",
    f"{_RATE}, Pre-LN or Peri-LN in place of Post-LN, smaller initial weights at depth.", probes=3,
)  # fmt: skip
GRADIENT_GROWTH = Rule(
    "gradient growth", column("layers", "gradient"), 1.0,
    "The gradient norm of {place} is {number}; it began at {early}.", f"{_RATE}.", growth=30.0,
)  # fmt: skip
LARGE_GAINS = Rule(
    "large gains", by_layer("norms", "gain_max", max), 5.0,
    "The largest gain of a norm in {place} is {number}; it began at {early}.",
    f"{_RATE}, weight decay of gains.", growth=10.0,
)  # fmt: skip
ATTENTION_FADES = Rule(
    "attention fades", _largest_logits, 0.1,
    "The largest attention logit of {place} has fallen to {number}, where all tokens get the same weight; it began at {early}.",
    "What may help: less weight decay, a lower learning rate.", growth=5.0, below=True,
)  # fmt: skip
STANDSTILL = Rule(
    "standstill", column("layers", "rotation"), 0.02,
    "No layer's rotation has changed by more than a fraction of {number} since the first probe: the model hardly changes, "
    "as it does in careful fine-tuning.",
    "What may help, where it should learn: a higher learning rate; an optimizer that has all parameters.",
    probes=15, below=True, change=True, severity="notice",
)  # fmt: skip
RESIDUAL_GROWTH = Rule(
    "residual growth", _rms, 50.0,
    "The residual stream {tensor} has an RMS value of {number}; it began at {early}.",
    f"{_RATE}, weight decay, norms on sublayer outputs (Peri-LN).", growth=25.0, probes=1, severity="notice",
)  # fmt: skip
ATTENTION_LOGITS = Rule(
    "attention logits", column("heads", "logit"), 1000.0,
    "The largest attention logit of {place} is {number}; it began at {early}.",
    f"{_RATE}, query and key norms (QK-Norm).", growth=10.0, severity="notice",
)  # fmt: skip
ATTENTION_ENTROPY = Rule(
    "attention entropy", by_layer("heads", "entropy", fmean), 0.03,
    "The mean attention entropy of {place} is {number} nats: all heads are near one-hot; it began at {early}.",
    f"{_RATE}, query and key norms (QK-Norm).", growth=3.0, below=True, severity="notice",
)  # fmt: skip
STILL_LAYERS = Rule(
    "still layers", column("layers", "rotation"), 1.0,
    "Tokens rotate by only {number}° in {place}; it began at {early}°.",
    "What may help: norms on sublayer outputs (Peri-LN), or a factor of 1/√layer on the inputs of layers (LayerNorm Scaling).",
    growth=10.0, below=True, severity="notice",
)  # fmt: skip
MASSIVE_ACTIVATIONS = Rule(
    "massive activations", _of_states("massive"), 100.0,
    "The largest value of the residual stream {tensor} is {number} times the median; it began at {early} times.",
    "Usual in large language models; low precision needs care. What may help: gated attention, or a learned sink.",
    growth=10.0, severity="notice",
)  # fmt: skip
RULES = (
    NON_FINITE, TOKENS_COLLAPSE, LARGE_UPDATES, GRADIENTS_APART, GRADIENT_GROWTH, LARGE_GAINS, ATTENTION_FADES, STANDSTILL,
    RESIDUAL_GROWTH, ATTENTION_LOGITS, ATTENTION_ENTROPY, STILL_LAYERS, MASSIVE_ACTIVATIONS,
)  # fmt: skip
