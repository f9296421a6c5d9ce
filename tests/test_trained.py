"""What training came to: outcomes and verdicts of known results, and advice that ranks by what predicted them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from helpers.cli import run
from helpers.evidence import CRITERIA, DEPTHS, SCHEMES, evidence, row
from normscope.experiments import advise as advising
from normscope.experiments.advise import Advise
from normscope.experiments.trained import FAILS, NOT_TRAINED, SAFE, SLOW, SOME, Evidence, Verdicts, failed, packaged
from normscope.results.findings import Finding
from normscope.schemes import NAMED

KAIMING = ("kaiming", False, 0.0, 1.0)
PLAIN: dict[str, Any] = {"weights": "kaiming", "causal": False, "feedforward": 0.0}
KNOWN = evidence()


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice with the known results in place of the package's."""
    monkeypatch.setattr(advising, "packaged", lambda: KNOWN)


def lines(depth: int, *names: str) -> list[Finding]:
    return list(Verdicts.of(KNOWN, [NAMED[name] for name in names], depth).findings("Trust it."))


def test_outcomes_are_those_of_the_best_rate() -> None:
    outcomes = KNOWN.outcomes.set_index(["depth", "scheme"])
    first = outcomes.loc[(12, "pre")]
    assert first["loss"] == pytest.approx((3.88 + 3.90) / 2)  # the mean of two seeds
    assert (first["rate"], first["rates"], first["seeds"], first["runs"], first["failed"]) == (3e-3, 2, 2, 3, 0)
    assert first["late_share"] == pytest.approx(1 / 12)
    assert first["learned"] == pytest.approx((7 - 3.89) / (7 - 3.88))  # token frequencies alone have a loss of 7
    assert outcomes.loc[(24, "sqrt-scaling"), "rate"] == 1e-3  # the other one diverged
    assert outcomes.loc[(24, "sqrt-scaling"), "failed"] == 1
    assert outcomes.loc[(48, "ngpt"), "loss"] == math.inf  # token frequencies alone are no language
    assert KNOWN.spread == pytest.approx(0.02 / math.sqrt(2))
    assert failed(KNOWN.runs).sum() == 3


def test_a_rate_that_only_some_schemes_were_tried_at_is_not_compared() -> None:
    runs = pd.concat([KNOWN.runs, pd.DataFrame([row("mix", 24, 1e-2, 2.0), row("peri", 24, 1e-2, math.nan, diverged=9)])])
    outcomes = replace(KNOWN, runs=runs.reset_index(drop=True)).outcomes.set_index(["depth", "scheme"])
    before = KNOWN.outcomes.set_index(["depth", "scheme"])
    pd.testing.assert_series_equal(outcomes["loss"], before["loss"])
    pd.testing.assert_series_equal(outcomes["rate"], before["rate"])
    assert outcomes.loc[(24, "peri"), "failed"] == 1  # a failure counts at any rate
    alone = KNOWN.runs[(KNOWN.runs["rate"] < 2e-3) == (KNOWN.runs["scheme"] == "pre")]  # no rate in common
    assert np.isfinite(replace(KNOWN, runs=alone).outcomes.set_index("scheme").loc["pre", "loss"]).all()


def test_verdicts_come_from_models_that_are_at_least_as_deep() -> None:
    names = ("pre", "sqrt-scaling", "ngpt", "none")
    for depth, expected in (
        (3, [SAFE, SLOW, SLOW, NOT_TRAINED]), (13, [SAFE, SOME, SLOW, NOT_TRAINED]), (99, [SAFE, SLOW, FAILS, NOT_TRAINED]),
    ):  # fmt: skip
        table = Verdicts.of(KNOWN, [NAMED[name] for name in names], depth).table
        assert list(table["verdict"]) == expected
    twin = Verdicts.of(KNOWN, [replace(NAMED["pre"], name="mine", title="")], 12)
    assert twin.named(SAFE) == "mine at 12 layers"
    assert list(twin.runs([replace(NAMED["pre"], name="mine")])["depth"]) == [12, 12, 24, 24, 48, 48, 12]


def test_three_lines_name_what_is_safe_what_is_fast_and_what_fails() -> None:
    safe, fast, fails = (finding.text for finding in lines(24, "sqrt-scaling", "peri", "pre"))
    assert safe == "Safe: pre, peri at 24 layers. Every run learned, with learning rates 0.001 and 0.003."
    assert fast.startswith("Fast at 24 layers: pre 3.760 (the lowest held-out loss is 3.760")
    assert fails.startswith("Fails: none; at some learning rates sqrt-scaling at 24 layers. How sure: 63 language models (")
    assert "20 of them with 24 layers" in fails
    assert fails.endswith("Trust it.")
    assert lines(48, "ngpt")[0].text == "Safe: none of these schemes."  # and not that every run learned
    assert "100 layers are deeper than any" in lines(100, "pre")[0].text
    assert "Slow: ngpt at 24 layers; they learned less than 90 %" in lines(24, "pre", "ngpt")[1].text


def test_a_scheme_counts_with_its_nearest_depth() -> None:
    shallow = Evidence(KNOWN.runs[(KNOWN.runs["depth"] == 24) | (KNOWN.runs["scheme"] != "post")], KNOWN.predictions)
    found = Verdicts.of(shallow, [NAMED["pre"], NAMED["post"]], 48)
    assert list(found.table["depth"]) == [48, 24]
    assert found.named(SAFE) == "pre at 48 layers; post at 24 layers"


def test_without_runs_nothing_is_claimed() -> None:
    nothing = Evidence(KNOWN.runs.iloc[:0], KNOWN.predictions.iloc[:0])
    (only,) = Verdicts.of(nothing, [NAMED["pre"]], 12).findings("")
    assert only.text.startswith("No language model was trained here")
    assert nothing.trust(KAIMING, CRITERIA) is None


def test_a_criterion_that_predicted_the_loss_is_trusted_and_no_other() -> None:
    trust = KNOWN.trust(KAIMING, CRITERIA)
    assert trust is not None
    by_name = dict(zip(CRITERIA, trust.correlations, strict=True))
    assert by_name["late"].value == pytest.approx(1 - 6 * 2 / (10 * 99))  # two neighbours swapped
    assert by_name["early"].value == pytest.approx(-1)
    assert trust.weights[CRITERIA.index("late")] > 0.9
    assert trust.weights[CRITERIA.index("early")] == 0
    assert all(each.value > 0.9 for each in trust.tested)


@pytest.mark.usefixtures("tested")
def test_advice_ranks_by_what_predicted() -> None:
    shape = {"depth": 2, "width": 16, "heads": 2, "context": 8, "runs": 2, "device": "cpu", "schemes": "pre,post,ngpt", **PLAIN}
    by_evidence = Advise(**shape)
    assert by_evidence.criteria["late"] > 0.9
    assert "early" not in by_evidence.criteria
    result = by_evidence.run()
    predicted = result.tables["predicted"].set_index("criterion")
    assert predicted["ranks"].to_dict()["late"]
    assert not predicted["ranks"].to_dict()["early"]
    assert [f"fitted on other depths, at {depth} layers" in predicted.index for depth in DEPTHS] == [True] * 3
    said = "\n".join(finding.text for finding in result.findings)
    assert "Early movement had a rank correlation of -1.00" in said
    assert Advise(**shape, rank_by="early").criteria == {"early": 1.0}  # a user may still choose
    assert "gaussian" not in said
    other = "\n".join(finding.text for finding in Advise(**{**shape, "weights": "gaussian"}).run().findings)
    assert "Criteria were tested with kaiming weights" in other


def test_advice_ranks_nothing_where_nothing_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    backwards = KNOWN.predictions[KNOWN.predictions["criterion"] == "early"]
    useless = pd.concat([backwards.assign(criterion=key) for key in CRITERIA])
    monkeypatch.setattr(advising, "packaged", lambda: Evidence(KNOWN.runs, useless))
    result = Advise(depth=2, width=16, heads=2, context=8, runs=2, device="cpu", schemes="pre,post", **PLAIN).run()
    assert result.configuration["criteria"] == {}
    assert (result.tables["ranks"]["place"] == 1).all()
    assert "No criterion of the simulation predicted their loss, so none ranks." in result.findings[2].text
    assert not any("ranks first" in finding.title for finding in result.findings)


@pytest.mark.usefixtures("here", "tested")
def test_the_command_begins_with_the_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--depth", "2", "--width", "16", "--heads", "2", "--context", "8", "--runs", "2", "--schemes", "pre,post")
    status, out, err = run(capsys, "advise", *shape)
    assert status == 0, err
    assert out.splitlines()[0].startswith("Safe: pre, post at 12 layers.")
    assert " ".join(out.split()).index("Fails: none.") < out.index("place")


def test_the_evidence_of_the_package_can_be_read() -> None:
    known = packaged()
    runs = known.runs
    assert not runs.duplicated(["scheme", "depth", "rate", "seed"]).any()
    assert set(runs["scheme"]) <= set(NAMED) | {"res-post+qk"}
    predicted = known.predictions
    assert set(runs["scheme"]) <= set(predicted["scheme"]) or runs.empty
    for _, rows in predicted.groupby(["weights", "causal", "feedforward", "depth", "criterion"]):
        count = rows["rank"].notna().sum()  # theory has no numbers for some
        assert np.isclose(rows["rank"].sum(), count * (count + 1) / 2)
    assert SCHEMES[0] in NAMED
