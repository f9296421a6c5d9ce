"""The papers' figures: published curves as data, residuals that notice a wrong setting, and the command with its gallery."""

import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.integrate import solve_ivp

import normscope as ns
from helpers.cli import run
from normscope.dynamics import SCHEDULES
from normscope.experiments.trained import packaged
from normscope.papers import all_entries, find_entries, panels
from normscope.papers.curves import READ, SCHEMES, measured, published, residual
from normscope.papers.entry import (
    NO_NUMBERS,
    NOT_REPRODUCED,
    REPRODUCED,
    WITH_REMARK,
    Made,
    Reproduction,
    Request,
    Residual,
    Value,
    judge,
)
from normscope.papers.flows import BETA, TIME, TOKENS, as_plotted, figure_2, figure_3, path_of
from normscope.papers.gallery import entry_section, with_worst
from normscope.papers.others import two_tables
from normscope.papers.panels import panel
from normscope.papers.reproduce import Reproduce
from normscope.papers.scatter import stored_scatter
from normscope.papers.subspaces import norm_spread
from normscope.papers.words import theme_counts
from normscope.results.sections import Section
from normscope.schemes import NAMED


def printed(scheme: str, t: float, state: np.ndarray, alpha: str) -> list[float]:
    """γ̇ and ṙ as the paper prints them: Z, N, G and R of γ, with nothing of the library."""
    gamma, r = state
    n, E = TOKENS, math.exp(BETA * gamma)
    Z = (n - 1) * E + math.exp(BETA)
    square = math.exp(2 * BETA) + 2 * (n - 1) * math.exp(BETA * (1 + gamma)) * gamma + (n - 1) * E**2 * (1 + (n - 2) * gamma)
    N, G, R = math.sqrt(square), 2 * E * (1 - gamma) * ((n - 1) * gamma + 1), (n - 1) * E * gamma + math.exp(BETA)
    return {
        "post": [G / Z, 0.0],
        "pre": [G / (r * Z), R / Z],
        "peri": [G / (r * N), R / N],
        "ngpt": [SCHEDULES[alpha](t) * G / N, 0.0],
        "sqrt-scaling": [G / (math.sqrt(t + 1) * Z), 0.0],
    }[scheme]


@pytest.mark.parametrize(
    ("scheme", "alpha"),
    [*((scheme, "constant") for scheme in SCHEMES.values() if scheme != "mix"), ("ngpt", "mixed"), ("ngpt", "power")],
)
def test_the_curves_of_figures_2_and_3_solve_the_printed_equations(scheme: str, alpha: str) -> None:
    ours = path_of(NAMED[scheme], alpha if scheme == "ngpt" else None)
    times = ours["time"].to_numpy()
    exact = solve_ivp(
        lambda t, y: printed(scheme, t, y, alpha),
        (0, times[-1]),
        [0.0, 1.0],
        t_eval=times,
        rtol=1e-9,
        atol=1e-11,
        max_step=0.05,
    )
    tolerance = 5e-4 if alpha == "mixed" else 1e-5  # its corners cost a fixed step some digits
    assert np.abs(ours["gamma"] - exact.y[0]).max() < tolerance


def test_figure_2_is_reproduced_and_a_wrong_switch_is_not() -> None:
    found = figure_2(Request())
    assert found.verdict == WITH_REMARK
    gamma = {r.curve: r for r in found.residuals if r.quantity.startswith("a:")}
    assert set(gamma) == set(SCHEMES.values())
    assert max(r.rms for r in gamma.values()) < 0.0015
    assert max(r.largest for r in gamma.values()) < 0.003
    readings = published("2-fig2-gamma")
    quarter = residual(
        "mix", "γ", readings[readings["scheme"] == "mix"], path_of(NAMED["mix"]), ("time", "gamma", "gamma"),
        allowed=0.003, between=True,
    )  # fmt: skip
    assert quarter.rms > 0.05
    assert judge([quarter]) == NOT_REPRODUCED


def test_figure_3_is_reproduced_by_its_own_schedule_alone() -> None:
    found = figure_3(Request())
    assert found.verdict == WITH_REMARK
    assert max(r.rms for r in found.residuals if r.quantity.startswith("a:")) < 0.001
    spikes = {r.quantity: r for r in found.residuals if r.curve == "mixed" and "s of γ̇" in r.quantity}
    troughs, peaks = spikes["b: troughs of γ̇ above 0.02"], spikes["b: peaks of γ̇ above 0.02"]
    assert (troughs.points, troughs.agrees, peaks.points, peaks.agrees) == (9, True, 16, True)
    assert max(troughs.rms, peaks.rms) < 0.001
    speeds = next(each for each in found.panels if each.title == "Figure 3b")
    drawn = next(curve for curve in speeds.curves if curve.name == "mixed" and not curve.published)
    fine = path_of(NAMED["ngpt"], "mixed")
    coarse = as_plotted(fine, TIME / 999)
    assert max(drawn.y) == coarse["speed"].max()  # no tip is cut
    assert fine["speed"].max() > 1.1 * coarse["speed"].max()  # the derivative itself has higher peaks
    way = np.trapezoid(coarse["speed"], coarse["time"])
    assert way == pytest.approx(coarse["gamma"].iloc[-1] - coarse["gamma"].iloc[0], rel=1e-3)
    readings = published("2-fig3-gamma")
    power = readings[readings["alpha"] == "pow"]
    other = residual("power", "γ", power, path_of(NAMED["ngpt"], "linear"), ("time", "gamma", "gamma"), between=True)
    assert other.rms > 0.1


def test_residuals_use_what_was_read_and_where_both_have_a_point() -> None:
    readings = pd.DataFrame({"t": [0.0, 1.0, 2.0, 2.5], "y": [0.0, 1.0, 9.0, 9.0], "how": ["m", "k", "h", "m"]})
    ours = pd.DataFrame({"t": [0.0, 1.0, 2.0, 3.0], "v": [0.3, 1.4, 2.0, 3.0], "stderr": [0.3, 0.4, 0.0, 0.0]})
    found = residual("c", "q", readings, ours, ("t", "y", "v"), allowed=0.1)
    assert found.points == 2
    assert found.rms == pytest.approx(math.sqrt((0.3**2 + 0.4**2) / 2))
    assert (found.largest, found.noise) == pytest.approx((0.4, found.rms))
    assert found.agrees
    assert not replace(found, noise=0.0).agrees
    between = residual("c", "q", readings, ours, ("t", "y", "v"), between=True)
    assert between.points == 3
    assert between.largest == pytest.approx(6.5)


def test_verdicts() -> None:
    right, wrong = Value("a", 1.0, 1.09, measured_error=0.05), Value("b", 1.0, 1.1, measured_error=0.01)
    open_, words = Value("c", None, 3.0), Value("d", "one", "two")
    assert [value.agrees for value in (right, wrong, open_, words)] == [True, False, None, False]
    assert judge([right, open_]) == REPRODUCED
    assert judge([right], remark=True) == WITH_REMARK
    assert judge([right, wrong], remark=True) == NOT_REPRODUCED
    assert judge([open_]) == NO_NUMBERS
    assert Residual("c", "q", 0.1, 0.1, 0, 0.01).agrees is None


def caption_of(found: Reproduction) -> str:
    """The caption of the figure of an entry."""
    tables = Made(find_entries(("2:fig2",))[0], found, {"seed": 0, "device": "cpu"}, 1.0, "2026-01-01").tables
    (figure,) = entry_section(with_worst(tables)[0], tables).figures.values()
    return str(figure.caption)


def section_of(*checks: Value | Residual) -> Section:
    """An entry of these checks as the gallery shows it."""
    values = tuple(check for check in checks if isinstance(check, Value))
    residuals = tuple(check for check in checks if isinstance(check, Residual))
    found = Reproduction(judge(checks), "", "", values, residuals)
    tables = Made(find_entries(("2:fig2",))[0], found, {"seed": 0, "device": "cpu"}, 1.0, "2026-01-01").tables
    return entry_section(with_worst(tables)[0], tables)


def test_what_is_not_reproduced_names_what_is_outside_its_limit() -> None:
    fine, noisy = Residual("a", "q", 0.001, 0.002, 9, 0.01), Residual("b", "q", 0.02, 0.03, 9, 0.01, noise=0.02)
    wrong, value = Residual("c", "q", 0.015, 0.02, 9, 0.01), Value("height", 1.0, 2.0, allowed=0.1)
    assert not section_of(fine, noisy).findings
    (finding,) = section_of(fine, noisy, wrong).findings
    assert finding.text.endswith("not reproduced: decisive residual 0.015 (c, q; limit 0.01).")
    (finding,) = section_of(fine, value).findings
    assert finding.text.endswith("not reproduced: height 2 (published 1).")


def test_values_of_this_run_stand_beside_the_stored_ones_with_the_digits_of_their_errors() -> None:
    stored = Value("height", 91.378, 90.3712, 0.04, 0.031, 0.5, source="stored: before")
    alone = Value("depth", None, 3.14159, measured_error=0.2, allowed=None)
    (table,) = section_of(stored, Value("height", 91.378, 99.4126, 0.04, 0.09, None), alone).tables
    assert table.columns == ("quantity", "published", "stored", "limit", "agrees", "this run")
    assert table.rows == (
        ("height", "91.378 ± 0.04", "90.371 ± 0.031", "0.5", "no", "99.413 ± 0.09"),
        ("depth", "–", "–", "–", "–", "3.14 ± 0.2"),
    )


def test_panels_compare_this_run_the_stored_run_and_the_flow() -> None:
    found = panel("5d", Request(runs=2))
    assert found.verdict == NOT_REPRODUCED
    stored = {r.curve: r for r in found.residuals if r.source.startswith("stored") and r.quantity == "mean cosine"}
    assert 0.004 < stored["ngpt"].rms < 0.0045
    mine = [r for r in found.residuals if r.source.startswith("this run") and r.quantity == "mean cosine"]
    assert len(mine) == len(stored) == 6
    assert all(r.agrees is None for r in found.residuals if r.source.startswith("this run"))
    assert all(r.noise > 0 for r in mine)
    assert sum("resolved flow" in value.quantity for value in found.values) == 12
    drawn = found.panels[0].curves
    dots = [curve.name for curve in drawn if curve.published]
    assert all(dots.count(scheme) == 3 for scheme in SCHEMES.values())  # the mean and both edges of the band
    assert sum(curve.published for curve in found.panels[1].curves) == 6  # the flow has no band
    captions = [caption_of(each) for each in (found, panel("5c", Request(runs=2)))]
    assert ["their edges" in caption for caption in captions] == [True, False]  # 5c was not digitised
    assert all("90 % of the runs" in caption for caption in captions)
    (apart,) = (value for value in found.values if value.quantity.startswith("largest difference"))
    assert 0 < float(apart.measured or 0) < 6 * apart.measured_error  # of two runs
    (runs,) = (value for value in found.values if value.quantity.startswith("number of runs"))
    interval = runs.quantity.partition("90 % interval ")[2].rstrip(")")
    assert re.fullmatch(r"\d+ to \d+", interval)
    assert f"as those of {interval} runs would" in found.remark
    assert float(str(runs.measured)) == pytest.approx(stored_scatter().set_index("panel").loc["5d", "effective"], rel=0.05)
    (least,) = (value for value in panel("5a", Request(runs=2)).values if value.quantity.startswith("number of runs"))
    assert re.fullmatch(r"at least [\d,]+", str(least.measured))
    assert "interval" not in least.quantity


@pytest.mark.parametrize("name", ["5a", "5b", "5e", "5g"])
def test_stored_panels_are_within_the_limit(name: str) -> None:
    table, readings = measured(f"panel-{name}"), published(f"2-fig{name}")
    assert table is not None
    for scheme in SCHEMES.values():
        theirs, ours = (rows[rows["scheme"] == scheme] for rows in (readings, table))
        assert residual(scheme, "", theirs, ours, ("time", "mean", "mean")).rms < 0.003
    assert set(readings["how"]) <= {*READ, "h", "i"}


@pytest.mark.parametrize(("name", "agrees"), [("5a", True), ("5b", True), ("5d", False), ("5e", False), ("5g", True)])
def test_the_edges_of_all_bands_are_judged_together(name: str, agrees: bool) -> None:
    table, readings = measured(f"panel-{name}"), published(f"2-fig{name}")
    assert table is not None
    together = panels._residuals(name, "stored", table)[-1]
    assert (together.curve, together.agrees) == ("all schemes", agrees)
    apart, few = [], 0
    for scheme, edge in product(SCHEMES.values(), ("low", "high")):
        theirs, ours = (rows[rows["scheme"] == scheme].dropna(subset=[edge]) for rows in (readings, table))
        both = theirs[theirs["how"].isin(list(READ))].merge(ours, on="time", suffixes=("", "_ours"))
        counts = len(both) >= 5
        apart += list(both[f"{edge}_ours"] - both[edge]) if counts else []
        few += 0 if counts else len(both)
    assert few == (3 if name == "5g" else 0)
    assert together.points == pytest.approx(len(apart), abs=2)
    assert together.rms == pytest.approx(math.sqrt(np.mean(np.square(apart))), rel=0.02)
    (within,) = panels._within(name, table, "stored")
    assert within.measured == pytest.approx(100 * np.mean(np.abs(apart) <= 0.0025), abs=0.5)
    assert panels._residuals(name, "stored", table.assign(runs=100))[-1].agrees is None  # too few runs for a quantile
    wider = panels._residuals(name, "stored", table.assign(high=table["high"] + 0.02))[-1]
    assert wider.agrees is False


def test_the_words_on_panel_5a_are_compared() -> None:
    table = measured("panel-5a")
    assert table is not None
    assert [value.agrees for value in panels._words(table, "stored")] == [True, True]
    slower = table.assign(mean=table["mean"].where(table["scheme"] != "post", 0.9 * table["mean"]))
    order, collapsed = panels._words(slower, "stored")
    assert (order.agrees, collapsed.agrees) == (False, False)
    assert order.measured == "ngpt > peri > mix > pre > post > sqrt-scaling"


def test_a_model_of_another_shape_is_drawn_and_not_compared() -> None:
    request = Request(models=("builtin:addition-small-pre",))
    spread = norm_spread("1:fig15", "Alternative", request)
    assert spread.verdict == "not run here"
    assert not spread.residuals
    assert any(curve.published for curve in spread.panels[0].curves)
    baseline = norm_spread("1:fig1", "Baseline", request)
    assert baseline.verdict == NOT_REPRODUCED
    stored, mine = baseline.values[:2], baseline.values[2:]
    assert [(value.published, value.measured) for value in stored] == [(21.7, 32.5), (69.0, 444.0)]
    assert [(value.published, value.agrees) for value in mine] == [(pytest.approx(21.7, abs=0.05), None)]
    assert 20 < float(mine[0].measured) < 40
    assert 0 < mine[0].measured_error < 1


def test_every_entry_states_what_it_needs() -> None:
    entries = all_entries()
    assert {key.partition(":")[0] for key in entries} == {"1", "2", "3", "others"}
    for entry in entries.values():
        assert entry.title
        assert entry.needs
        assert entry.published
    assert [entry.id for entry in find_entries(("2:fig3", "2:speeds"))] == ["2:fig3", "2:speeds"]
    for id in ("2:fig2", "2:fig4", *(f"2:fig5{letter}" for letter in "abcdefg"), "3:table1", "3:tableA4", "1:fig1"):
        assert id in entries


def test_tokens_of_singular_vectors_are_counted_by_theme() -> None:
    read = {(0, 0): ["Paris", "x"], (0, 1): ["one", "y"], (1, 0): ["!", "z"], (1, 1): ["two", "w"]}
    written = {
        (0, 0): [" paris", " France"],
        (0, 1): ["nurse", " she"],
        (1, 0): ["!", "?!", "\ufffd", "\xa0"],
        (1, 1): [" Anna", "Two"],
    }
    rows = [
        {"head": head, "index": index, "side": side, "rank": rank, "nearest_text": text}
        for side, found in (("left", read), ("right", written))
        for (head, index), texts in found.items()
        for rank, text in enumerate(texts, 1)
    ]
    counts = theme_counts(pd.DataFrame(rows))
    expected = {"gender words": [1, 0], "places": [2, 0], "jobs and industries": [1, 0], "names": [0, 1]}
    expected |= {"punctuation": [0, 2], "near-identity": [1, 0]}  # "!" is no word
    assert {theme: counts[theme].tolist() for theme in counts} == expected


def test_two_papers_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = two_tables(Request())
    published = {value.quantity: value.published for value in found.values}
    assert published["perplexity of mix at 1B"] == "1415 (LN-Scaling); 18.18 (Mix-LN)"
    assert published["perplexity of pre at 1B"] == "17.02 (LN-Scaling); 18.65 (Mix-LN)"
    assert published["mix: sizes that fail to train; held-out loss here"] == "350M, 1B (LN-Scaling); none (Mix-LN)"
    assert sum("perplexity of" in quantity for quantity in published) == 2
    assert "mix at 1B has perplexity 1415" in found.remark
    own = {value.quantity.partition(":")[0]: value.measured for value in found.values}
    assert str(own["deepnorm"]).endswith("48 layers fails")
    assert str(own["post"]).endswith("48 layers loss 2.22 (1 of 2 runs failed)")
    assert "fails" not in str(own["mix"])
    assert not any(value.agrees for value in found.values)
    known = packaged()
    higher = known.runs[(known.runs["depth"] == 12) & (known.runs["rate"] == 3e-3) & ~known.runs["scheme"].isin(["pre", "mix"])]
    runs = pd.concat([known.runs, higher.assign(rate=1e-2, loss=higher["loss"] - 0.01)], ignore_index=True)
    monkeypatch.setattr("normscope.papers.others.packaged", lambda: replace(known, runs=runs))
    own = {value.quantity.partition(":")[0]: value.measured for value in two_tables(Request()).values}
    assert str(own["mix"]).startswith("12 layers not tuned; 24 layers loss")


def test_the_gallery_grows_and_all_is_resumed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = run(capsys, "reproduce", "2:speeds", "--out", "g")
    assert status == 0
    assert "2:speeds" in out
    status, out, _ = run(capsys, "reproduce", "2:rates", "--out", "g", "--json", "--format", "html,md")
    assert [(row["entry"], row["verdict"]) for row in json.loads(out)] == [("2:rates", "reproduced")]  # what was asked for
    text = (here / "g" / "report.md").read_text(encoding="utf-8")
    assert "2:speeds" in text
    assert "slope of ln γ̇" in text
    assert list(ns.load("g").tables["entries"]["entry"]) == ["2:speeds", "2:rates"]
    monkeypatch.setattr("normscope.papers.reproduce.find_entries", lambda names: find_entries(names or ("2:speeds", "2:rates")))
    status, _, err = run(capsys, "reproduce", "--all", "--out", "g")
    assert status == 0
    assert err.count("complete already") == 2
    assert not (here / "g" / "unfinished").exists()


def test_unfinished_experiments_of_other_entries_are_kept(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a complete entry has in common with the unfinished one."""
    shared = [
        replace(entry, make=lambda request: panel("5d", replace(request, runs=2))) for entry in find_entries(("2:fig5d",))
    ]
    monkeypatch.setattr("normscope.papers.reproduce.find_entries", lambda names: shared)
    monkeypatch.setattr("normscope.papers.reproduce._remove", lambda experiments, folder: None)  # as if another goes on
    assert run(capsys, "reproduce", "2:fig5d", "--out", "g")[0] == 0
    kept = sorted(path.name for path in (here / "g" / "unfinished").iterdir())
    assert kept
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert run(capsys, "reproduce", "2:speeds", "--out", "g")[0] == 0
    assert sorted(path.name for path in (here / "g" / "unfinished").iterdir()) == kept


def test_what_an_interrupted_all_left_is_removed_once_its_entry_is_complete(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [replace(find_entries(("2:fig5d",))[0], make=lambda request: panel("5d", replace(request, runs=2)))]
    monkeypatch.setattr("normscope.papers.reproduce.find_entries", lambda names: entries)
    monkeypatch.setattr("normscope.papers.reproduce._remove", lambda experiments, folder: None)  # as if it were killed
    assert run(capsys, "reproduce", "--all", "--out", "g")[0] == 0
    (here / "g" / "unfinished" / "of-another-entry").mkdir()
    assert len(list((here / "g" / "unfinished").iterdir())) > 1
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr("normscope.papers.reproduce.find_entries", lambda names: entries)
    assert "complete already" in run(capsys, "reproduce", "--all", "--out", "g")[2]
    assert [path.name for path in (here / "g" / "unfinished").iterdir()] == ["of-another-entry"]


def test_all_leaves_out_what_cannot_measure_a_model(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ("1:fig1", "2:speeds", "3:fig3")
    monkeypatch.setattr("normscope.papers.reproduce.find_entries", lambda names: find_entries(names or some))
    status, out, err = run(capsys, "reproduce", "--all", "--model", "package:smollm2", "--out", "g", "--format", "md")
    assert status == 0
    assert "left out: 1:fig1: 'package:smollm2' is no folder" in err
    assert "Left out: 1:fig1: 'package:smollm2' is no folder" in out
    assert "Left out: 1:fig1:" in (here / "g" / "report.md").read_text(encoding="utf-8")
    assert list(ns.load("g").tables["entries"]["entry"]) == ["2:speeds", "3:fig3"]
    some = ("2:speeds", "1:fig1")
    status, _, err = run(capsys, "reproduce", "--all", "--model", "package:smollm2", "--out", "none-fits")
    assert (status, (here / "none-fits").exists()) == (2, False)  # and nothing was made first
    status, _, err = run(capsys, "reproduce", "3:fig3", "--model", "package:smollm2,builtin:addition-small-pre", "--out", "h")
    assert status == 2
    assert "figures of paper 3 are of one model; give one of them" in err


def test_of_a_paper_what_cannot_measure_a_model_is_left_out_and_of_names_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some, decoder = ("1:sparsity", "1:encoder-decoder"), "builtin:addition-small-pre"
    chosen = {("1",): some, ("3",): ("3:fig2", "3:fig3")}
    monkeypatch.setattr("normscope.papers.reproduce.find_entries", lambda names: find_entries(chosen.get(names, names)))
    status, out, _ = run(capsys, "reproduce", "1", "--model", decoder, "--out", "g")
    assert status == 0
    assert f"Left out: 1:encoder-decoder: '{decoder}' has no encoder" in out
    assert "model=" not in out
    status, _, err = run(capsys, "reproduce", *some, "--model", decoder, "--out", "h")
    assert status == 2
    assert "has no encoder" in err
    for folder in ("none", "g"):  # all of these measure one model
        status, _, err = run(capsys, "reproduce", "3", "--model", f"package:smollm2,{decoder}", "--out", folder)
        assert status == 2
        assert "figures of paper 3 are of one model" in err.splitlines()[-1]
    assert not (here / "none").exists()


def test_a_model_counts_once_however_its_path_is_written(here: Path) -> None:
    for name in ("a", "b"):
        ns.train("tiny", set={"layers": 1, "dim": 16, "heads": 2, "head": 8, "batch": 8, "examples": 8, "test_examples": 8},
                 device="cpu", out=name, progress=False)  # fmt: skip
    wanted = Reproduce(entries=("1:fig1",), model="b,./a,a,a/", device="cpu")
    assert wanted.request.models == ("b", "./a")


def test_the_list_has_the_last_verdict(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "reproduce", "2:speeds")
    status, out, _ = run(capsys, "reproduce", "--json")
    assert status == 0
    rows = {row["entry"]: row for row in json.loads(out)}
    assert set(rows) == set(all_entries())
    assert rows["2:speeds"]["verdict"] == "reproduced"
    assert "100000" in rows["2:fig5g"]["commands"]
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["papers"]
    with pytest.raises(ns.InputError, match="nothing is saved"):
        ns.reproduce(out="list")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2:fig5z",), "no figure or table '2:fig5z'; did you mean '2:fig5"),
        (("--all", "2:fig2"), "--all makes all of them"),
        (("2:speeds", "--runs", "5"), "--runs has no meaning for 2:speeds; it belongs to 2:fig4"),
        (("2:fig2", "--model", "gpt2"), "--model has no meaning for 2:fig2"),
        (("3:table1", "--model", "./nowhere"), "nowhere"),
        (("--out", "g"), "--out g has no meaning here: nothing is saved"),
    ],
)
def test_mistakes_are_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, "reproduce", *arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    assert not (here / "runs").exists()


def test_a_folder_with_something_else_is_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").write_text("mine", encoding="utf-8")
    status, _, err = run(capsys, "reproduce", "2:speeds", "--out", "mine")
    assert status == 2
    assert "is no gallery" in err
    assert [path.name for path in (here / "mine").iterdir()] == ["notes.txt"]


def test_values_are_texts_on_the_page_and_numbers_in_full_in_the_tables() -> None:
    values = ns.reproduce("2:speeds", progress=False).tables["values"]
    assert list(values["published"]) == [f"{number:.6g}" for number in values["published_number"]]
    expected = 2 / math.sqrt(math.exp(2 * BETA) + TOKENS - 1)
    (peri,) = values[values["quantity"].str.startswith("peri: γ̇ at t = 0, n = 256")]["published_number"]
    assert peri == pytest.approx(expected, rel=1e-15)
