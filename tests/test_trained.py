"""What training came to: outcomes and verdicts of known results, and advice that ranks by what predicted them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from helpers.cli import run
from helpers.evidence import CRITERIA, DEPTHS, SCHEMES, evidence, row
from normscope.experiments import advise as advising
from normscope.experiments.advise import Advise
from normscope.experiments.trained import (
    FAILS,
    NOT_TRAINED,
    SAFE,
    SLOW,
    SOME,
    THEORY,
    UNTUNED,
    Evidence,
    Verdicts,
    failed,
    packaged,
    published_failures,
    rates_compared,
)
from normscope.experiments.verdict_lines import verdict_lines
from normscope.results.findings import Finding
from normscope.results.sections import PageTable
from normscope.schemes import NAMED, Scheme

KAIMING = ("kaiming", False, 0.0, 1.0)
PLAIN: dict[str, Any] = {"weights": "kaiming", "causal": False, "feedforward": 0.0}
KNOWN = evidence()


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice with the known results in place of the package's."""
    monkeypatch.setattr(advising, "packaged", lambda: KNOWN)


def lines(depth: int, *names: str) -> list[Finding]:
    return list(verdict_lines(Verdicts.of(KNOWN, [NAMED[name] for name in names], depth), "Trust it."))


def texts(known: Evidence, schemes: Sequence[Scheme], depth: int) -> list[str]:
    return [finding.text for finding in verdict_lines(Verdicts.of(known, schemes, depth), "")]


def test_outcomes_are_those_of_the_best_rate() -> None:
    outcomes = KNOWN.outcomes.set_index(["depth", "scheme"])
    first = outcomes.loc[(12, "pre")]
    assert first["loss"] == pytest.approx((3.88 + 3.90) / 2)  # the mean of two seeds
    assert (first["rate"], first["rates"], first["seeds"], first["runs"], first["failed"]) == (3e-3, 2, 2, 3, 0)
    assert first["late_share"] == pytest.approx(1 / 12)
    assert first["learned"] == 1
    assert outcomes.loc[(12, "peri"), "learned"] == pytest.approx((7 - 3.94) / (7 - 3.89))  # token frequencies have a loss of 7
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
    assert (outcomes.loc[(24, "peri"), "failed"], outcomes.loc[(24, "peri"), "runs"]) == (0, 2)  # any scheme fails at some rate
    apart = replace(KNOWN, runs=KNOWN.runs[(KNOWN.runs["rate"] < 2e-3) == (KNOWN.runs["scheme"] == "pre")])
    assert apart.rates == {12: [3e-3], 24: [3e-3], 48: [3e-3]}  # which all but one were tried at
    assert apart.outcomes.set_index("scheme").loc["pre", "loss"].isna().all()
    assert list(Verdicts.of(apart, [NAMED["pre"]], 12).table["verdict"]) == [UNTUNED]


def test_a_rate_counts_if_those_without_it_have_nothing_to_gain() -> None:
    """The loss rises towards it already, or training failed at a lower rate and learned at none."""
    low, high, higher = 1e-3, 3e-3, 1e-2
    losses = {"a": {low: 3.0, high: 2.0, higher: 2.5}, "b": {low: 2.0, high: 3.0}, "c": {low: math.inf}}
    assert rates_compared(losses) == [low, high, higher]
    assert rates_compared(losses | {"d": {low: 3.0, high: 2.0}}) == [low, high, higher]  # one of four may lack one
    assert rates_compared({"a": {low: 3.0, high: 2.0}, "b": {low: 3.0}}) == [low]
    assert rates_compared({"a": {high: math.inf}, "b": {low: 2.0, high: 3.0}}) == [high]  # a lower rate might have worked
    assert rates_compared({"a": {low: 2.0}, "b": {high: 2.0}}) == [low, high]  # nothing in common


def test_only_depths_with_several_rates_say_what_predicts_if_there_are_any() -> None:
    assert KNOWN.tuned == [12, 24, 48]
    shallow = replace(KNOWN, runs=KNOWN.runs[(KNOWN.runs["depth"] < 48) | (KNOWN.runs["rate"] < 2e-3)])
    assert shallow.tuned == [12, 24]
    trust = shallow.trust(KAIMING, CRITERIA)
    assert trust is not None
    assert len(trust.tested) == trust.correlations[0].depths == 2
    assert replace(KNOWN, runs=KNOWN.runs[KNOWN.runs["rate"] < 2e-3]).tuned == [12, 24, 48]


def test_a_scheme_that_lacks_a_compared_rate_has_no_loss_that_compares() -> None:
    """Unless that rate could not have been better."""
    lacks = (KNOWN.runs["scheme"] == "post") & (KNOWN.runs["rate"] > 2e-3) & (KNOWN.runs["depth"] == 24)
    known = replace(KNOWN, runs=KNOWN.runs[~lacks])
    assert known.rates[24] == [1e-3, 3e-3]
    row = known.outcomes.set_index(["depth", "scheme"]).loc[(24, "post")]
    assert row[["loss", "learned", "late_block_cost"]].isna().all()
    assert (row["rate"], row["rates"], row["runs"]) == (1e-3, 1, 1)
    found = Verdicts.of(known, [NAMED[name] for name in ("post", "sqrt-scaling", "none", "ngpt", "pre", "mix")], 24)
    assert list(found.table["verdict"]) == [UNTUNED, SOME, NOT_TRAINED, SLOW, SAFE, SAFE]
    assert found.order == ["pre", "mix", "ngpt", "post", "sqrt-scaling", "none"]
    assert "Not tuned: post, perhaps better at" in list(verdict_lines(found, ""))[1].text
    assert not found.table.set_index("scheme").loc["post", "fast"]


def test_a_scheme_that_failed_at_the_higher_rate_alone_may_learn_at_the_lower() -> None:
    at = (KNOWN.runs["scheme"] == "post") & (KNOWN.runs["depth"] == 24)
    failed = pd.DataFrame([row("post", 24, 3e-3, 6.9, diverged=100)])
    known = replace(KNOWN, runs=pd.concat([KNOWN.runs[~at], failed], ignore_index=True))
    assert list(Verdicts.of(known, [NAMED["post"]], 24).table["verdict"]) == [UNTUNED]


def test_the_only_rate_is_no_edge() -> None:
    known = replace(KNOWN, runs=KNOWN.runs[(KNOWN.runs["depth"] < 48) | (KNOWN.runs["rate"] < 2e-3)])
    edges = known.outcomes.set_index(["depth", "scheme"])["at_edge"]
    assert (edges[24, "pre"], edges[48, "pre"]) == (True, False)


def test_a_rate_at_which_one_seed_failed_counts_as_failed() -> None:
    again = row("pre", 24, 3e-3, 6.9, seed=101)
    known = replace(KNOWN, runs=pd.concat([KNOWN.runs, pd.DataFrame([again])], ignore_index=True))
    outcome = known.outcomes.set_index(["depth", "scheme"]).loc[(24, "pre")]
    assert (outcome["rate"], outcome["failed"], outcome["runs"], outcome["seeds"]) == (1e-3, 1, 3, 2)
    both = pd.concat([known.runs, pd.DataFrame([row("pre", 24, 1e-3, 6.9, seed=101)])], ignore_index=True)
    found = Verdicts.of(replace(KNOWN, runs=both), [NAMED["pre"], NAMED["peri"]], 24)
    assert list(found.table["verdict"]) == [SOME, SAFE]
    assert np.isnan(found.table["loss"].iloc[0])  # and not infinite
    assert found.table["rate"].isna().tolist() == [True, False]


def test_verdicts_come_from_models_that_are_at_least_as_deep() -> None:
    names = ("pre", "sqrt-scaling", "ngpt", "none")
    for depth, expected in (
        (3, [SAFE, SLOW, SLOW, NOT_TRAINED]), (13, [SAFE, SOME, SLOW, NOT_TRAINED]), (99, [SAFE, SLOW, FAILS, NOT_TRAINED]),
    ):  # fmt: skip
        table = Verdicts.of(KNOWN, [NAMED[name] for name in names], depth).table
        assert list(table["verdict"]) == expected
    twin = Verdicts.of(KNOWN, [replace(NAMED["pre"], name="mine", title="")], 12)
    assert twin.named(twin.having(SAFE)) == "mine"
    assert list(twin.runs([replace(NAMED["pre"], name="mine")])["depth"]) == [12, 12, 24, 24, 48, 48, 12]


def test_three_lines_name_what_is_safe_what_is_fast_and_what_fails() -> None:
    safe, fast, fails, changes = (finding.text for finding in lines(24, "sqrt-scaling", "peri", "pre"))
    assert safe == "Safe at 24 layers (learning rates 0.001 and 0.003), lowest loss first: pre, peri."
    assert fast == (
        "Lowest loss at 24 layers (held-out, in nats per token, with the best learning rate): pre 3.760 (0.003). "
        "The 10 schemes that learned: 3.760 to 4.210, median 3.985. Token frequencies alone: 7.00."
    )
    assert fails == (
        "Fail: no scheme; in some runs: sqrt-scaling. How sure: 20 language models with 24 layers, 2 for each scheme (width "
        "256, 50 M tokens, one recipe for all, 2 seeds); 63 in all. Your width, heads and context are not used here."
    )
    assert changes.startswith(
        "What may change this order: Of 10 schemes, the best learning rate is the highest tried for 9 and the lowest tried for "
        "1; others may change the order. Seeds differ by 0.014."  # one diverged at the highest
    )
    assert changes.endswith("Trust it.")
    assert "Slow: ngpt, with less than 90 % of what the best learned." in lines(24, "pre", "ngpt")[1].text


def test_models_of_another_depth_stand_for_one_that_was_not_trained() -> None:
    assert lines(48, "ngpt")[0].text == "Safe at 48 layers: none of these schemes."  # and not that none failed
    deepest, deeper = (lines(depth, "pre")[0].text for depth in (100, 30))
    assert deepest == "Safe at 48 layers (the deepest trained here; learning rates 0.001 and 0.003): pre."
    assert deeper == "Safe at 48 layers (no model of 30 layers was trained here; learning rates 0.001 and 0.003): pre."


def test_schemes_that_failed_elsewhere_are_safe_with_reservations() -> None:
    """In larger models of others, or in deeper ones here."""
    published = texts(KNOWN, [NAMED[name] for name in ("post", "pre", "mix")], 24)[0]
    assert published.endswith(
        ": pre. Safe, with reservations: post, which failed in published models of 250M, 350M and 1B; mix, which failed in "
        "published models of 350M and 1B (one of two papers)."
    )
    close = replace(KNOWN, runs=pd.concat([KNOWN.runs, pd.DataFrame([row("qk", 48, 3e-3, 6.9, seed=101)])], ignore_index=True))
    deeper = texts(close, [NAMED["qk"], replace(NAMED["post"], name="mine")], 12)[0]
    assert deeper == (
        "Safe at 12 layers (learning rates 0.001 and 0.003): none without reservations. Safe, with reservations: mine, which "
        "failed in published models of 250M, 350M and 1B; qk, which failed here with 48 layers."
    )
    assert "failed here" not in texts(close, [NAMED["qk"], NAMED["pre"]], 48)[0]


def test_a_rate_that_was_tried_and_is_worse_is_no_edge_of_the_order() -> None:
    higher = pd.DataFrame([row(name, 24, 1e-2, 5.0) for name in ("pre", "peri", "post")])  # too few to be compared
    known = replace(KNOWN, runs=pd.concat([KNOWN.runs, higher], ignore_index=True))
    assert known.rates[24] == [1e-3, 3e-3]
    assert "Of 10 schemes, the best learning rate is the highest tried for 6" in texts(known, [NAMED["pre"]], 24)[3]


def test_safe_schemes_are_said_to_be_trained_at_their_own_rates_alone() -> None:
    lower = pd.DataFrame([row("deepnorm", 24, 3e-4, 4.3), row("ngpt", 24, 3e-4, 4.4)])  # covers this rate for all
    known = replace(KNOWN, runs=pd.concat([KNOWN.runs, lower], ignore_index=True))
    assert known.rates[24] == [3e-4, 1e-3, 3e-3]
    safe = texts(known, [NAMED["pre"], NAMED["peri"]], 24)[0]
    assert safe == "Safe at 24 layers (learning rates 0.001 and 0.003), lowest loss first: pre, peri."


def test_a_scheme_that_failed_at_the_only_rate_that_was_tried_may_learn_at_a_lower_one() -> None:
    several = replace(KNOWN, runs=pd.concat([KNOWN.runs, pd.DataFrame([row("ngpt", 48, 3e-3, 6.9)])], ignore_index=True))
    only = replace(KNOWN, runs=KNOWN.runs[KNOWN.runs["rate"] == KNOWN.runs["rate"].min()])
    lower = replace(only, runs=pd.concat([only.runs, pd.DataFrame([row("ngpt", 48, 3e-4, 6.9)])], ignore_index=True))
    for known, alone in ((several, False), (only, True), (lower, False)):
        text = texts(known, [NAMED["ngpt"]], 48)[2]
        assert text.startswith("Fail: ngpt.")
        assert ("Of ngpt one learning rate was tried; a lower one may work." in text) == alone


def test_the_lowest_losses_are_those_of_all_schemes_that_were_trained() -> None:
    """Whatever schemes are chosen; of these the best is named if it is none of the lowest, and other blocks are no match."""
    known = replace(KNOWN, runs=KNOWN.runs[KNOWN.runs["seed"] == 100])  # the three lowest, without a spread between seeds
    pre, twin = NAMED["pre"], replace(NAMED["peri"], name="mine", title="")
    with_twin, with_qkv = (texts(known, [pre, scheme], 24)[1] for scheme in (twin, NAMED["qkv"]))
    assert ": pre 3.760 (0.003), mine 3.810 (0.003), post* 3.860 (0.003). * is not in this list. " in with_twin
    assert "Of these schemes" not in with_twin
    assert "peri* 3.810" in with_qkv
    others = texts(known, [NAMED["qkv"], NAMED["qk"], NAMED["sqrt-scaling"]], 24)[1]
    assert "pre* 3.760 (0.003), peri* 3.810 (0.003), post* 3.860 (0.003). Of these schemes: qk 3.960 (0.003)." in others
    some = texts(known, [NAMED["sqrt-scaling"], NAMED["ngpt"]], 24)[1]
    assert "Of these schemes: sqrt-scaling 4.180 (0.001)." in some  # although it failed at another rate, and at its own best
    layered = texts(known, [pre.with_norm("layer")], 24)
    assert "pre* 3.760" in layered[1]
    assert "* is not in this list with these blocks." in layered[1]
    assert "Not trained here: pre; models trained as pre have other blocks or norms." in layered[3]
    copies = texts(known, [pre, replace(pre, name="mine"), replace(pre, name="yours")], 24)[1]
    assert ": pre, mine and yours 3.760 (0.003), peri* 3.810" in copies
    swapped = texts(known, [replace(pre, name="peri")], 24)[1]  # the name of another scheme
    assert "peri 3.760 (0.003), peri* 3.810 (0.003)" in swapped


def test_at_one_rate_no_scheme_is_slow() -> None:
    """Another rate might suit it: at depths with several the order is another one."""
    assert list(Verdicts.of(KNOWN, [NAMED["ngpt"]], 24).table["verdict"]) == [SLOW]
    once = KNOWN.runs[(KNOWN.runs["depth"] != 24) | (KNOWN.runs["rate"] < 2e-3)]
    found = Verdicts.of(replace(KNOWN, runs=once), [NAMED["ngpt"]], 24)
    assert list(found.table["verdict"]) == [UNTUNED]
    assert (
        "One learning rate is compared; at 12 and 48 layers, the best of several changed the order."
        in list(verdict_lines(found, ""))[3].text
    )


def test_a_scheme_counts_with_its_nearest_depth() -> None:
    shallow = Evidence(KNOWN.runs[(KNOWN.runs["depth"] == 24) | (KNOWN.runs["scheme"] != "post")], KNOWN.predictions)
    found = Verdicts.of(shallow, [NAMED["pre"], NAMED["post"]], 48)
    assert list(found.table["depth"]) == [48, 24]
    assert found.named(found.having(SAFE)) == "pre, post (24 layers)"


def test_without_runs_nothing_is_claimed() -> None:
    nothing = Evidence(KNOWN.runs.iloc[:0], KNOWN.predictions.iloc[:0])
    (only,) = texts(nothing, [NAMED["pre"]], 12)
    assert only.startswith("No language model was trained here")
    assert nothing.correlation(KAIMING, "late", "failed_share") is None
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
    chosen = Advise(**shape, rank_by="early")
    assert chosen.criteria == {"early": 1.0}  # a user may still choose
    warned = [finding.text for finding in chosen.run().findings]
    assert any("ranks by early, as chosen. Rank correlation with" in text and "early -1.00" in text for text in warned)
    assert "gaussian" not in said
    other = "\n".join(finding.text for finding in Advise(**{**shape, "weights": "gaussian"}).run().findings)
    assert "Criteria were tested with kaiming weights" in other


def test_advice_ranks_nothing_where_nothing_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    backwards = KNOWN.predictions[KNOWN.predictions["criterion"] == "early"]
    useless = pd.concat([backwards.assign(criterion=key) for key in CRITERIA])
    monkeypatch.setattr(advising, "packaged", lambda: Evidence(KNOWN.runs, useless))
    result = Advise(depth=2, width=16, heads=2, context=8, runs=2, device="cpu", schemes="post,pre", **PLAIN).run()
    assert result.configuration["criteria"] == {}
    assert result.tables["ranks"].drop(columns="scheme").isna().all(axis=None)
    assert all(record["place"] is None and record["level_with"] == [] for record in Advise.records(result))
    texts = [shown.columns for shown in Advise.terminal(result) if isinstance(shown, PageTable)]
    assert texts[0][:3] == ("scheme", "trained here", "loss (best rate)")
    ranking = next(section for section in Advise.sections(result) if section.title == "Ranking")
    assert all(row[1:3] == ("–", "–") for row in ranking.tables[0].rows)
    assert "No simulated criterion predicted the loss at the best of several learning rates" in result.findings[3].text
    assert list(result.tables["ranks"]["scheme"]) == ["pre", "post"]  # by their trained loss
    assert not any("ranks first" in finding.title for finding in result.findings)


@pytest.mark.usefixtures("here", "tested")
def test_the_command_begins_with_the_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--depth", "2", "--width", "16", "--heads", "2", "--context", "8", "--runs", "2", "--schemes", "pre,post")
    status, out, err = run(capsys, "advise", *shape)
    assert status == 0, err
    assert out.splitlines()[0].startswith(
        "Safe at 12 layers (no model of 2 layers was trained here; learning rates 0.001 and 0.003): pre."
    )
    assert " ".join(out.split()).index("Fail: no scheme.") < " ".join(out.split()).index("place")


def test_advice_warns_of_schemes_that_failed_in_published_models() -> None:
    names = ("pre", "post", "mix", "deepnorm", "ln-scaling", "keel")
    assert [published_failures(NAMED[name]) for name in names] == [
        "", "250M, 350M and 1B", "350M and 1B (one of two papers)", "350M and 1B", "", ""
    ]  # fmt: skip
    assert published_failures(replace(NAMED["post"], name="mine", title="")) == "250M, 350M and 1B"


@pytest.mark.usefixtures("tested")
def test_uneven_gradients_are_grave_unless_a_test_of_the_same_simulation_found_them_harmless() -> None:
    shape = {"depth": 48, "width": 16, "heads": 2, "context": 8, "runs": 2, "device": "cpu", "schemes": "res-post,pre"}

    def severity(**changes: Any) -> str:
        findings = Advise(**{**shape, **PLAIN, **changes}).run().findings
        return next(finding.severity for finding in findings if finding.title.startswith("Uneven gradients"))

    assert severity() == severity(rank_by="gradient") == "notice"
    assert severity(feedforward=1.0) == severity(norm="layer") == "warning"


@pytest.mark.usefixtures("tested")
def test_what_one_scheme_or_one_criterion_leaves_open_is_not_reported() -> None:
    shape = {"depth": 2, "width": 16, "heads": 2, "context": 8, "runs": 2, "device": "cpu", "rank_by": "late", **PLAIN}
    alone, pair = (Advise(**shape, schemes=schemes).run().findings for schemes in ("pre", "pre,post"))
    assert not any("ranks first" in finding.title for finding in alone)
    assert any("ranks first" in finding.title for finding in pair)
    assert not any("Over all possible weights" in finding.text for finding in (*alone, *pair))


def test_collapse_in_theory_is_reported_if_it_goes_with_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    known = packaged()
    predicted = known.predictions[(known.predictions["weights"] == THEORY[0]) & (known.predictions["criterion"] == "collapse")]
    both = predicted.merge(known.outcomes, on=["depth", "scheme"]).dropna(subset=["rank", "failed_share"])
    by_depth = [(len(at) - 1, spearmanr(at["rank"], at["failed_share"]).statistic) for _, at in both.groupby("depth")]
    expected = sum(weight * value for weight, value in by_depth) / sum(weight for weight, _ in by_depth)
    measured = known.correlation(THEORY, "collapse", "failed_share")
    assert measured is not None
    assert measured.positive
    assert measured.value == pytest.approx(expected, abs=1e-9)

    def reported(**changes: Any) -> list[Finding]:
        shape = {"depth": 24, "width": 16, "heads": 2, "context": 8, "runs": 2, "device": "cpu"}
        findings = Advise(**shape, schemes="pre,ngpt,post,hybrid,qk", **changes).run().findings
        return [finding for finding in findings if finding.title == "Collapse in theory"]

    (finding,) = reported()
    assert "under schemes ngpt, post, hybrid." in finding.text
    assert f"rank correlation {measured.value:+.2f} (" in finding.comparison
    assert finding.comparison.endswith("Safe here all the same: post.")
    assert not reported(radius=2.0)  # theory was compared at norm 1
    theory = known.predictions["weights"] == THEORY[0]
    backwards = known.predictions.assign(rank=known.predictions["rank"].where(~theory, -known.predictions["rank"]))
    monkeypatch.setattr(advising, "packaged", lambda: Evidence(known.runs, backwards))
    assert not reported()
    without = known.runs[~failed(known.runs)]
    assert Evidence(without, known.predictions).correlation(THEORY, "collapse", "failed_share") is None


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
