"""Alarms: each rule fires on a series that has its fault, is silent on one that has not, fires once, and again after recovery."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
import pytest

from normscope.errors import InputError
from normscope.watch.alarms import RULES, Alarm, Alarms, Rule, column
from normscope.watch.snapshot import Snapshot

LAYERS = 4


def probe(step: int, **changes: float) -> Snapshot:
    """A probe of a healthy model of four layers with two heads; ``changes`` are of layer 2, head 1, or of the whole."""
    layers = pd.DataFrame(
        {"layer": range(LAYERS + 1), "norm": 8.0, "update": 0.3, "rotation": 20.0, "cosine": 0.3, "rank": 12.0, "massive": 6.0, "gradient": 0.1}
    )
    heads = pd.DataFrame([{"layer": i, "head": h, "logit": 4.0, "entropy": 2.0} for i in range(LAYERS) for h in range(2)])
    norms = pd.DataFrame({"norm": [f"layer {i} input" for i in range(LAYERS)], "layer": range(LAYERS), "gain_max": 1.0})
    steps = pd.DataFrame({"loss": [2.0], "gradient": [0.5]})
    tables = {"steps": steps, "layers": layers, "heads": heads, "norms": norms}
    for name, value in changes.items():
        table, _, place = name.partition("__")
        rows = tables[table]
        rows.loc[rows["layer"] == 2 if "layer" in rows and place != "cosine" else rows.index, place] = value
    for table in tables.values():
        table.insert(0, "step", step)
    return Snapshot(step, tables)


def series(values: Sequence[dict[str, float]], rules: Sequence[Rule] | None = None) -> list[Alarm]:
    alarms = Alarms(rules)
    return [alarm for index, value in enumerate(values) for alarm in alarms.add(probe(10 * index, **value))]


FAULTS = {
    "attention logits": ("heads__logit", 500.0),
    "attention entropy": ("heads__entropy", 0.001),
    "tokens collapse": ("layers__cosine", 0.9999),
    "still layers": ("layers__rotation", 0.001),
    "residual growth": ("layers__norm", 8e3),
    "massive activations": ("layers__massive", 9e3),
    "gradients apart": ("layers__gradient", 1e-6),
    "gradient growth": ("steps__gradient", 5e3),
    "gains": ("norms__gain_max", 90.0),
}


def test_a_healthy_series_raises_nothing() -> None:
    assert series([{}] * 10) == []


def test_every_rule_but_that_of_faults_is_tried_here() -> None:
    assert {rule.name for rule in RULES} == {*FAULTS, "non-finite values"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_rule_fires_once_and_again_after_it_has_recovered(name: str) -> None:
    where, value = FAULTS[name]
    rule = next(rule for rule in RULES if rule.name == name)
    sound, faulty = [{}] * 5, [{where: value}] * 6
    alarms = series([*sound, *faulty, *sound, *faulty], [rule])
    assert [alarm.rule for alarm in alarms] == [name] * 2
    first = 10 * (len(sound) + rule.probes - 1)
    assert [alarm.step for alarm in alarms] == [first, first + 10 * (len(sound) + len(faulty))]
    assert f"{alarms[0].number:.3g}" in alarms[0].text
    assert alarms[0].severity == rule.severity
