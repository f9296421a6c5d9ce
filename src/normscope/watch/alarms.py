"""Alarms: rules over the probes of a training, each a plain sentence with a number and what may help."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from normscope.errors import InputError
from normscope.results.findings import Severity
from normscope.watch.snapshot import Snapshot

Tables = Mapping[str, pd.DataFrame]
NOWHERE = -1  # the layer or head of what belongs to none
_PLACE = ["layer", "head"]
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


@dataclass(frozen=True)
class Rule:
    """A number for each place of a model, and when it is too large or too small.

    A place breaches the rule at a probe if its number is above ``limit`` and above ``growth`` times its early value, which is
    the smallest of the first three probes. With ``below`` it is the other way round: under the limit, and under the early
    value (the largest of the first three) divided by ``growth``.

    Attributes:
        name: a few words.
        measure: from the tables of a probe to a table with ``number`` and, where they apply, ``layer``, ``head`` and
            ``tensor``. Numbers that are NaN breach nothing.
        limit: the number from which on a place may breach the rule.
        sentence: what is reported, with ``{place}``, ``{number}``, ``{early}`` and, where there is one, ``{tensor}``.
        advice: what may help.
        growth: how far it must have moved from its early value; 1: whatever that was.
        probes: the number of probes in a row in which a place must breach the rule. After an alarm, the rule is silent until
            no place has breached it in as many probes in a row.
        below: whether small numbers breach it.
        severity: ``warning`` if it predicts that the training fails, else ``notice``.
    """

    name: str
    measure: Callable[[Tables], pd.DataFrame]
    limit: float
    sentence: str
    advice: str
    growth: float = 1.0
    probes: int = 2
    below: bool = False
    severity: Severity = "warning"

    def __post_init__(self) -> None:
        if self.probes < 1:
            raise InputError(f"probes={self.probes}: a rule needs at least one probe in a row")
        if not self.growth >= 1:
            raise InputError(f"growth={self.growth}: at least 1, which asks for no change from the early value")
        if math.isnan(self.limit):
            raise InputError("limit=nan: a rule needs a number to compare with; ±inf for a rule that never fires")


@dataclass
class _History:
    """What a rule remembers: the early value of each place, how long each has breached it, and whether it has fired."""

    early: pd.Series = field(default_factory=lambda: pd.Series(dtype=np.float64))
    seen: int = 0
    breaches: pd.Series = field(default_factory=lambda: pd.Series(dtype=np.int64))
    fired: bool = False
    quiet: int = 0

    def add(self, rule: Rule, numbers: pd.Series) -> pd.Index:
        """The places that have breached the rule for long enough, if the rule is to fire."""
        sign = -1.0 if rule.below else 1.0
        known = numbers[np.isfinite(numbers)]
        if self.seen < _EARLY and len(known):
            joined = pd.concat([self.early, known])
            self.early = joined.groupby(level=[0, 1]).max() if rule.below else joined.groupby(level=[0, 1]).min()
            self.seen += 1
        early = self.early.reindex(numbers.index)
        bound = early / rule.growth if rule.below else early * rule.growth
        breached = sign * numbers > sign * rule.limit
        if rule.growth > 1:
            breached &= sign * numbers > sign * bound
        counts = self.breaches.reindex(numbers.index, fill_value=0) + 1
        self.breaches = counts[breached]
        lasting = self.breaches.index[self.breaches >= rule.probes]
        self.quiet = 0 if breached.any() else self.quiet + 1
        if self.fired:
            self.fired = self.quiet < rule.probes
            return lasting[:0]
        self.fired = len(lasting) > 0
        return lasting


class Alarms:
    """Rules, and what they have seen of one training.

    Example:
        >>> import pandas as pd
        >>> from normscope.watch.snapshot import Snapshot
        >>> faults = pd.DataFrame({"step": [7], "tensor": ["attention output"], "layer": [3], "count": [12]})
        >>> print(*(alarm.text for alarm in Alarms().add(Snapshot(7, {"faults": faults}))))
        12 values of attention output in layer 3 are NaN or infinite. …

    Args:
        rules: those of ``RULES`` if none are given; others, changed ones (``dataclasses.replace``), or none: ``()``.
    """

    def __init__(self, rules: Iterable[Rule] | None = None) -> None:
        self.rules = RULES if rules is None else tuple(rules)
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise InputError(f"alarms is a sequence of rules (normscope.watch.Rule), not of {type(rule).__name__}")
        self._histories = [_History() for _ in self.rules]

    def add(self, snapshot: Snapshot) -> list[Alarm]:
        """The alarms that the next probe raises: one for each rule at most, at the place where it is worst."""
        alarms = []
        for rule, history in zip(self.rules, self._histories, strict=True):
            table = rule.measure(snapshot.tables)
            table = table.assign(**{name: NOWHERE for name in _PLACE if name not in table}).set_index(_PLACE)
            table = table[~table.index.duplicated()]
            places = history.add(rule, table["number"].astype(np.float64))
            if len(places):
                alarms.append(_alarm(rule, snapshot.step, table.loc[places], history.early, len(places)))
        return alarms


def _alarm(rule: Rule, step: int, rows: pd.DataFrame, early: pd.Series, count: int) -> Alarm:
    """The alarm of the worst of some places."""
    numbers = rows["number"].astype(np.float64)
    place = numbers.idxmin() if rule.below else numbers.idxmax()
    layer, head = (int(i) for i in place)
    number, row = float(numbers.loc[place]), rows.loc[place]
    where = "the model" if layer == NOWHERE else f"layer {layer}" + (f", head {head}" if head != NOWHERE else "")
    if count > 1:
        where += f" (and {count - 1} other place{'s' * (count > 2)})"
    values = {
        "place": where,
        "number": f"{number:.3g}",
        "early": f"{early.get(place, math.nan):.3g}",
        "tensor": row.get("tensor", ""),
    }
    return Alarm(step, rule.name, layer, head, number, f"{rule.sentence.format(**values)} {rule.advice}", rule.severity)


def column(table: str, name: str) -> Callable[[Tables], pd.DataFrame]:
    """A measure: a column of a table, at every layer and head that the table has."""

    def measure(tables: Tables) -> pd.DataFrame:
        rows = tables.get(table)
        if rows is None or name not in rows:
            return _NOTHING
        return rows[[place for place in _PLACE if place in rows]].assign(number=rows[name])

    return measure


def _faults(tables: Tables) -> pd.DataFrame:
    """Non-finite values of each tensor; those of the earliest layer come first."""
    faults = tables.get("faults")
    return _NOTHING if faults is None else faults[["layer", "tensor"]].assign(number=faults["count"])


def _last_state(tables: Tables) -> pd.DataFrame:
    """The token cosine after the last layer."""
    layers = tables.get("layers")
    return _NOTHING if layers is None else layers.nlargest(1, "layer")[["layer"]].assign(number=layers["cosine"])


def _gradients_apart(tables: Tables) -> pd.DataFrame:
    """The largest gradient norm of a layer over the smallest, at the layer with the smallest."""
    layers = tables.get("layers")
    if layers is None or "gradient" not in layers:
        return _NOTHING
    known = layers[layers["gradient"] > 0]
    smallest = known.nsmallest(1, "gradient")
    return smallest[["layer"]].assign(number=known["gradient"].max() / smallest["gradient"])


def _mean_of_heads(name: str) -> Callable[[Tables], pd.DataFrame]:
    """A measure: the mean over the heads of a layer."""

    def measure(tables: Tables) -> pd.DataFrame:
        heads = tables.get("heads")
        if heads is None or name not in heads:
            return _NOTHING
        return heads.groupby("layer", as_index=False)[name].mean().rename(columns={name: "number"})

    return measure


def _gains(tables: Tables) -> pd.DataFrame:
    """The largest gain of a norm in each layer."""
    norms = tables.get("norms")
    if norms is None:
        return _NOTHING
    return norms.groupby("layer", as_index=False)["gain_max"].max().rename(columns={"gain_max": "number"})


_NOTHING = pd.DataFrame({"layer": pd.Series(dtype=np.int64), "number": pd.Series(dtype=np.float64)})
_RATE = "What may help: a lower learning rate, a longer warm-up, gradient clipping"
NON_FINITE = Rule(
    "non-finite values", _faults, 0.0,
    "{number} values of the {tensor} of {place} are NaN or infinite.",
    f"{_RATE}; with float16, loss scaling or bfloat16.", probes=1,
)  # fmt: skip
ATTENTION_LOGITS = Rule(
    "attention logits", column("heads", "logit"), 50.0,
    "The largest attention logit of {place} is {number}; it began at {early}.",
    f"{_RATE}, norms of queries and keys (QK-Norm).", growth=4.0,
)  # fmt: skip
ATTENTION_ENTROPY = Rule(
    "attention entropy", _mean_of_heads("entropy"), 0.1,
    "The attention of {place} has an entropy of {number} nats, near one-hot in all heads; it began at {early}.",
    f"{_RATE}, norms of queries and keys (QK-Norm).", growth=4.0, below=True,
)  # fmt: skip
TOKENS_COLLAPSE = Rule(
    "tokens collapse", _last_state, 0.98,
    "After the last layer the mean cosine between tokens is {number}: the model hardly tells them apart; it began at {early}.",
    f"{_RATE}, smaller initial weights, Pre-LN or Peri-LN in place of Post-LN at this depth.",
)  # fmt: skip
STILL_LAYERS = Rule(
    "still layers", column("layers", "rotation"), 0.1,
    "{place} rotates tokens by {number}° only; it began at {early}°.",
    "What may help: output norms (Peri-LN) or a factor of 1/√layer on the inputs of layers (LayerNorm Scaling), so that updates "
    "keep up with the residual stream.", growth=10.0, below=True, severity="notice",
)  # fmt: skip
RESIDUAL_GROWTH = Rule(
    "residual growth", column("layers", "norm"), 0.0,
    "The residual stream norm before {place} is {number}; it began at {early}.",
    f"{_RATE}, weight decay, output norms (Peri-LN).", growth=20.0,
)  # fmt: skip
MASSIVE_ACTIVATIONS = Rule(
    "massive activations", column("layers", "massive"), 300.0,
    "Before {place} the largest value of the residual stream is {number} times the median; it began at {early}.",
    "Usual in large language models; quantisation needs care. What may help: gated attention, or a sink that is learned.",
    growth=5.0, severity="notice",
)  # fmt: skip
GRADIENTS_APART = Rule(
    "gradients apart", _gradients_apart, 100.0,
    "Gradient norms of layers differ by a factor of {number}; the smallest is that of {place}.",
    f"{_RATE}, Pre-LN or Peri-LN in place of Post-LN, smaller initial weights at depth.",
)  # fmt: skip
GRADIENT_GROWTH = Rule(
    "gradient growth", column("steps", "gradient"), 0.0,
    "The gradient norm is {number}; it began at {early}.", f"{_RATE}.", growth=20.0,
)  # fmt: skip
GAINS = Rule(
    "gains", _gains, 0.0,
    "A gain of a norm in {place} has grown to {number}; the largest began at {early}.",
    f"{_RATE}, weight decay of gains.", growth=5.0,
)  # fmt: skip
RULES = (
    NON_FINITE, ATTENTION_LOGITS, ATTENTION_ENTROPY, TOKENS_COLLAPSE, STILL_LAYERS, RESIDUAL_GROWTH, MASSIVE_ACTIVATIONS,
    GRADIENTS_APART, GRADIENT_GROWTH, GAINS,
)  # fmt: skip
