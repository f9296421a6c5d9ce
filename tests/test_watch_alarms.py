"""Alarms: each rule fires where its fault is and nowhere else, once, and again after it has recovered."""

import doctest
from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
import pytest

from normscope.errors import InputError
from normscope.watch import alarms as alarms_module
from normscope.watch.alarms import RULES, Alarm, Alarms, Rule, column
from normscope.watch.snapshot import Snapshot

LAYERS = 4


def probe(step: int, **changes: float) -> Snapshot:
    """A probe of a healthy model of four layers with two heads; ``changes`` are of layer 2, head 1, or of the whole."""
    numbers = {"norm": 8.0, "update": 0.3, "rotation": 20.0, "cosine": 0.3, "rank": 12.0, "massive": 6.0, "gradient": 0.1}
    layers = pd.DataFrame({"layer": range(LAYERS + 1), **numbers})
    heads = pd.DataFrame([{"layer": i, "head": h, "logit": 4.0, "entropy": 2.0} for i in range(LAYERS) for h in range(2)])
    norms = pd.DataFrame({"norm": [f"layer {i} input" for i in range(LAYERS)], "layer": range(LAYERS), "gain_max": 1.0})
    steps = pd.DataFrame({"loss": [2.0], "gradient": [0.5]})
    sublayers = pd.DataFrame([{"layer": i, "sublayer": s, "update": 0.3} for i in range(LAYERS) for s in ("attention", "mlp")])
    tables = {"steps": steps, "layers": layers, "sublayers": sublayers, "heads": heads, "norms": norms}
    for name, value in changes.items():
        table, _, place = name.partition("__")
        rows = tables[table]
        rows.loc[rows["layer"] == 2 if "layer" in rows and place != "cosine" else rows.index, place] = value
    for table in tables.values():
        table.insert(0, "step", step)
    return Snapshot(step, tables)


def series(values: Sequence[dict[str, float]], rules: Sequence[Rule] | None = None) -> list[Alarm]:
    alarms = Alarms(rules, dim=64)
    return [alarm for index, value in enumerate(values) for alarm in alarms.add(probe(10 * index, **value))]


FAULTS = {
    "tokens collapse": ("layers__cosine", 0.9999),
    "large updates": ("sublayers__update", 90.0),
    "residual growth": ("layers__norm", 8e3),
    "gradients apart": ("layers__gradient", 1e-6),
    "gradient growth": ("layers__gradient", 50.0),
    "attention fades": ("heads__logit", 0.01),
    "attention logits": ("heads__logit", 5000.0),
    "attention entropy": ("heads__entropy", 0.001),
    "still layers": ("layers__rotation", 0.001),
    "massive activations": ("layers__massive", 9e3),
    "large gains": ("norms__gain_max", 90.0),
}


MOVING = [{"layers__rotation": 20.0 + step} for step in range(20)]


def test_a_healthy_series_raises_nothing() -> None:
    assert series(MOVING) == []


def test_a_model_that_does_not_change_is_reported_once() -> None:
    (alarm,) = series([{}] * 20)
    assert (alarm.rule, alarm.layer, alarm.number) == ("standstill", -1, 0.0)
    assert series([{}] * 10 + MOVING) == []


def test_every_rule_of_one_place_is_tried_here() -> None:
    assert {rule.name for rule in RULES} == {*FAULTS, "non-finite values", "standstill"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_rule_fires_once_and_again_after_it_has_recovered(name: str) -> None:
    where, value = FAULTS[name]
    rule = next(rule for rule in RULES if rule.name == name)
    sound: list[dict[str, float]] = [{}] * 8
    faulty = [{where: value}] * 8
    alarms = series([*sound, *faulty, *sound, *faulty], [rule])
    assert [alarm.rule for alarm in alarms] == [name] * 2
    first = 10 * (len(sound) + rule.probes - 1)
    assert [alarm.step for alarm in alarms] == [first, first + 10 * (len(sound) + len(faulty))]
    assert f"{alarms[0].number:.3g}" in alarms[0].text
    assert alarms[0].severity == rule.severity


def test_non_finite_values_are_reported_with_tensor_layer_and_step() -> None:
    faults = pd.DataFrame({"step": 30, "tensor": ["keys", "attention output"], "layer": [3, 3], "count": [12, 7]})
    (alarm,) = Alarms().add(Snapshot(30, {"faults": faults}))
    assert (alarm.rule, alarm.step, alarm.layer, alarm.number) == ("non-finite values", 30, 3, 12.0)
    assert "The keys of layer 3 became non-finite (NaN/Inf; count: 12)" in alarm.text


def test_gains_and_gradients_that_start_at_zero_may_grow() -> None:
    """Output projections and gains are often initialised with zeros."""
    changes = {"norms__gain_max": 0.0, "layers__gradient": 0.0}
    grown = [{"norms__gain_max": 0.5 + step, "layers__gradient": 0.1} for step in range(3)]
    names = {"large gains", "gradient growth", "gradients apart"}
    assert series([changes, changes, changes, *grown], [rule for rule in RULES if rule.name in names]) == []


def test_the_example_is_true() -> None:
    result = doctest.testmod(alarms_module, optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed


def test_one_probe_is_no_trend() -> None:
    assert series([{}, {"heads__logit": 5000.0}, {}, {"heads__logit": 5000.0}, {}]) == []


def test_a_model_that_always_was_like_that_is_no_alarm_where_the_change_counts() -> None:
    rules = [rule for rule in RULES if rule.growth > 1]
    assert len(rules) > 5
    assert series([dict(FAULTS.values())] * 8, rules) == []


def test_the_worst_place_is_reported_and_the_others_are_counted() -> None:
    alarms = Alarms([rule for rule in RULES if rule.name == "attention logits"])
    for step in range(3):
        alarms.add(probe(step))
    for step in range(3, 6):
        snapshot = probe(step)
        snapshot.tables["heads"]["logit"] = [4.0] * 3 + [3000.0, 4.0, 7000.0, 4.0, 4.0]
        for alarm in alarms.add(snapshot):
            assert (alarm.layer, alarm.head, alarm.number) == (2, 1, 7000.0)
            assert "layer 2, head 1 (and 1 other place)" in alarm.text
            return
    raise AssertionError("no alarm")


def test_updates_are_compared_with_an_rms_value_of_one_where_the_stream_is_smaller() -> None:
    """Small embeddings: |x| = 0.3 for a width of 64, an update of 60 times that is an RMS value of 2.25."""
    rule = next(rule for rule in RULES if rule.name == "large updates")
    small, large = ({"layers__norm": norm, "sublayers__update": 60.0} for norm in (0.3, 8.0))
    assert series([{}, {}, {}, small, small], [rule]) == []
    (alarm,) = series([{}, {}, {}, large, large], [rule])
    assert (alarm.layer, alarm.number) == (2, 60.0)
    assert "The RMS of the attention update of layer 2 (and 1 other place) is 60 times" in alarm.text


def test_missing_tables_and_columns_raise_no_alarm() -> None:
    alarms = Alarms()
    assert [alarm for step in range(5) for alarm in alarms.add(Snapshot(step, {}))] == []
    assert alarms.add(Snapshot(5, {"layers": pd.DataFrame({"step": [5], "layer": [0], "norm": [1.0]})})) == []


def test_rules_are_changed_replaced_and_turned_off() -> None:
    mine = Rule("sinks", column("heads", "sink"), 0.5, "{place}: {number}", "Nothing.", probes=1)
    snapshot = Snapshot(1, {"heads": pd.DataFrame({"step": 1, "layer": [0], "head": [2], "sink": [0.7]})})
    assert [alarm.text for alarm in Alarms([mine]).add(snapshot)] == ["layer 0, head 2: 0.7 Nothing."]
    assert Alarms([replace(mine, limit=0.8)]).add(snapshot) == []
    assert Alarms(()).add(snapshot) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(RULES[0], probes=0), "probes=0"),
        (lambda: replace(RULES[0], growth=0.5), "growth=0.5"),
        (lambda: replace(RULES[0], limit=float("nan")), "limit=nan"),
        (lambda: Alarms(["attention logits"]), "not of str"),  # type: ignore[list-item]
    ],
)
def test_wrong_rules_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
