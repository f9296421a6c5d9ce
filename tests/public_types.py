"""What a user's type checker sees of the public API. ``make types`` checks this file; nothing runs it.

``assert_type`` fails where a type is Any. A ``type: ignore`` without an error is an error, so the mistakes at the end are seen.
"""

from pathlib import Path
from typing import assert_type

import pandas as pd
from torch import nn, randint

import normscope as ns
from normscope.watch import Alarm, Watch

mine = ns.Scheme("mine", ns.Slots(input="norm", output="norm", step="1/sqrt(layer)"))
assert_type(mine, ns.Scheme)
assert_type(ns.find_scheme("peri"), ns.Scheme)

runs = ns.simulate(["pre", mine, Path("mine.toml")], tokens=64, dim=64, time=20, times=[1, 5.5])
assert_type(runs, ns.Result)
assert_type(runs.tables, dict[str, pd.DataFrame])
assert_type(runs.findings[0], ns.Finding)

model = ns.open("package:smollm2", dtype="bfloat16")
assert_type(model, ns.Model)
assert_type(ns.audit(model, tokens=32, text="notes.txt", progress=False, out="runs/mine"), ns.Result)
assert_type(ns.audit(nn.Linear(2, 2), token_ids=randint(32, (2, 8))), ns.Result)
assert_type(ns.train("tiny", scheme=mine, set={"examples": 2560}).model, ns.Model)
assert_type(ns.compare(model, "builtin:addition-small-qkv", runs), ns.Result)
assert_type(ns.advise(depth=24, width=1024, heads=16, rank_by={"late": 2.0}), ns.Result)
assert_type(ns.words(model, "queries", layer=[0, 5], word="time,life"), ns.Result)
assert_type(ns.check("2:4.3"), ns.Result)
assert_type(ns.check_scheme(model, scheme="pre"), ns.Result)
assert_type(ns.follow("runs/gpt"), ns.Result)
assert_type(ns.load(Path("runs/mine")), ns.Result)


def note(alarm: Alarm) -> None:
    """What a user does with an alarm."""


watch = ns.watch(nn.Linear(2, 2), probe=randint(3, (2, 2)), every=100, to="runs/gpt", on_alarm=note)
assert_type(watch, Watch)
assert_type(ns.watch.Alarm, type[Alarm])

ns.simulate(tokenz=3)  # type: ignore[call-arg]
ns.simulate(tokens="many")  # type: ignore[arg-type]
ns.advise(depth=3)  # type: ignore[call-arg]
ns.audit(model, dtype="float8")  # type: ignore[arg-type]
ns.watch(model, every="often")  # type: ignore[call-arg, arg-type]
ns.simulates()  # type: ignore[attr-defined]
