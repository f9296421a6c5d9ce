"""train and evaluate as a user meets them: run folders, being killed and going on, and one line for every mistake."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.cli import run
from normscope.experiments import train
from normscope.runs import open_run
from normscope.training.checkpoints import Checkpoint
from normscope.transformer import load_model

QUICK = ("--preset", "tiny", "--set", "batch=32", "--set", "epoch=8", "--set", "layers=1", "--set", "test_examples=64")


def unfinished(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/.*.unfinished-*"))


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(run_folder / "model.safetensors")
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_leaves_a_model_metrics_pictures_and_a_log(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "train", *QUICK, "--set", "examples=1280", "--scheme", "qkv", "--json")
    assert status == 0, err
    records = json.loads(out)
    assert [r["split"] for r in records] == ["in-distribution", "ood-interpolation", "ood-extrapolation"]
    assert all(r.keys() >= {"split", "accuracy", "stderr", "exact"} for r in records)
    folder = open_run(here / "runs" / "train-tiny-qkv")
    assert folder.tables == ["accuracy", "metrics", "positions", "worked"]
    assert folder.table("metrics")["step"].iloc[-1] == 40
    assert (folder.path / "report.html").is_file()
    assert not unfinished(here)
    saved = load_model(folder.path)
    assert saved.model.config.scheme.name == "qkv"
    assert saved.about["accuracy"] == records
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = events.EventAccumulator(str(folder.path / "tensorboard"))
    log.Reload()
    assert [e.step for e in log.Scalars("train/loss")] == list(folder.table("metrics")["step"])


def test_evaluate_measures_again_what_training_measured(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "train", *QUICK, "--set", "examples=640", "--seed", "3", "--json", "--out", "a")
    trained = json.loads(out)
    status, out, _ = run(capsys, "evaluate", "a", "--examples", "64", "--seed", "3", "--json")
    assert status == 0
    assert json.loads(out) == trained
    status, out, _ = run(capsys, "evaluate", "a", "--split", "ood-extrapolation", "--examples", "50", "--show", "2")
    assert "ood-extrapolation" in out
    assert "in-distribution" not in out
    assert sum(line.startswith("ood-extrapolation  [") for line in out.splitlines()) == 2
    assert out.splitlines()[-1] == str(here / "runs" / "evaluate-2" / "report.html")


def test_the_builtin_models_are_opened_by_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("pre", "qkv"):
        _, out, _ = run(capsys, "evaluate", f"builtin:addition-small-{name}", "--examples", "300", "--json")
        assert json.loads(out)[0]["accuracy"] > 0.95


def test_show_prints_a_recipe_that_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "train", *QUICK, "--set", "examples=64", "--scheme", "peri+qk", "--show")
    assert not (here / "runs").exists()
    Path("mine.toml").write_text(out)
    status, _, err = run(capsys, "train", "mine.toml", "--json")
    assert status == 0, err
    assert load_model(here / "runs" / "train-mine-peri+qk").model.config.scheme.name == "peri+qk"


def test_a_scheme_of_ones_own_is_trained_and_tested_without_its_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text('[attention]\ninput = "norm"\noutput = "norm"\nstep = "1/sqrt(layer)"\n')
    status, _, err = run(capsys, "train", *QUICK, "--set", "examples=64", "--scheme", "./mine.toml", "--json", "--out", "a")
    assert status == 0, err
    Path("mine.toml").unlink()
    status, _, err = run(capsys, "evaluate", "a", "--examples", "10", "--json")
    assert status == 0, err


def test_a_divergence_stops_the_run_and_says_where(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("--set", "rate=1e12", "--set", "warmup=0", "--set", "clip=0", "--set", "epoch=1", "--set", "examples=640")
    status, out, err = run(capsys, "train", *QUICK, *changes, "--checkpoint-every", "0", "--out", "runs/a")
    assert status == 1
    assert out.strip() == str(here / "runs" / "a" / "report.html")
    assert "not a finite number at step" in err
    (kept,) = unfinished(here)
    last = max(kept.glob("checkpoint-*.safetensors"))
    assert last.name in err
    stopped = open_run(here / "runs" / "a")
    assert stopped.tables == ["divergence", "metrics"]
    assert stopped.table("divergence")["step"].iloc[0] == stopped.table("metrics")["step"].max() + 1
    assert not (stopped.path / "model.safetensors").exists()


def test_a_run_that_does_not_learn_is_stopped_where_the_recipe_says(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "train", *QUICK, "--set", "stop_above=0.1", "--set", "examples=640", "--out", "runs/a")
    assert status == 1
    assert out.strip() == str(here / "runs" / "a" / "report.html")
    assert "above stop_above=0.1, at step 7 of 20" in err
    assert "a higher stop_above" in err
    stopped = open_run(here / "runs" / "a")
    assert list(stopped.table("divergence")["step"]) == [7]
    assert stopped.table("metrics")["step"].max() == 8
    assert not (stopped.path / "model.safetensors").exists()
    status, _, err = run(capsys, "train", *QUICK, "--set", "stop_above=-1")
    assert status == 2
    assert "stop_above" in err
    again = ("train", *QUICK, "--set", "examples=1280", "--checkpoint-every", "0", "--out", "runs/b")
    assert run(capsys, *again, "--set", "stop_above=0.1")[0] == 1
    status, _, err = run(capsys, *again, "--set", "stop_above=100", "--overwrite")
    assert status == 0, err
    assert "resuming from step 8 of 40" in err
    assert unfinished(here) == []


def test_a_checkpoint_is_not_kept_in_memory_while_the_training_goes_on(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", *QUICK, "--set", "examples=1280", "--checkpoint-every", "0", "--json")
    _killed(here, *command, "--out", "runs/a")
    fit, kept = train._fit, list[int]()

    def counted(training: Any, *others: Any) -> None:
        gc.collect()
        kept.extend((training.step, sum(isinstance(each, Checkpoint) for each in gc.get_objects())))
        fit(training, *others)

    monkeypatch.setattr(train, "_fit", counted)
    assert run(capsys, *command, "--out", "runs/a")[0] == 0
    assert kept[0] > 0
    assert kept[1] == 0


def test_an_unfinished_run_goes_on_after_a_damaged_checkpoint(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("train", *QUICK, "--set", "examples=1280", "--checkpoint-every", "0", "--json")
    run(capsys, *command, "--out", "runs/whole")
    left = _killed(here, *command, "--out", "runs/a")
    damaged = max(left.glob("checkpoint-*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-50])
    status, _, err = run(capsys, *command, "--out", "runs/a")
    assert status == 0, err
    assert f"checkpoint {damaged.name} is not used" in err
    assert "resuming from step" in err
    assert same(weights(here / "runs" / "whole"), weights(here / "runs" / "a"))


def test_without_a_name_a_run_is_found_again_whatever_came_between(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("train", *QUICK, "--set", "examples=1280", "--checkpoint-every", "0", "--json")
    folder = here / "runs" / "train-tiny-pre"
    _killed(here, *command, "--seed", "1")
    run(capsys, *command, "--seed", "2")
    assert open_run(folder.with_name("train-tiny-pre-2")).description["seed"] == 2
    _, _, err = run(capsys, *command, "--seed", "1")
    assert "resuming from step" in err
    assert open_run(folder).description["seed"] == 1
    assert not unfinished(here)


def test_an_unfinished_run_of_another_recipe_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("train", *QUICK, "--checkpoint-every", "0", "--json", "--out", "runs/a")
    left = _killed(here, *command, "--set", "examples=1280")
    status, _, err = run(capsys, *command, "--set", "examples=64")
    assert status == 0
    assert f"not resumed, because its recipe, scheme or device differs: {left}" in err


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("train", *QUICK, "--set", "examples=9600", "--checkpoint-every", "0", "--json")
    _, out, _ = run(capsys, *command, "--out", "runs/whole")
    for wait in (0.0, 0.1, 0.35):
        _killed(here, *command, "--out", "runs/a", wait=wait)
    status, again, err = run(capsys, *command, "--out", "runs/a")
    assert status == 0, err
    assert same(weights(here / "runs" / "whole"), weights(here / "runs" / "a"))
    assert again == out
    tables = [open_run(here / "runs" / name).table("metrics").drop(columns="seconds") for name in ("whole", "a")]
    assert tables[0].equals(tables[1])


def _killed(here: Path, *command: str, wait: float = 0.0) -> Path:
    """Start a run, end it with kill -9 some time after a new checkpoint, and return what it left."""
    before = {path for folder in unfinished(here) for path in folder.glob("checkpoint-*.safetensors")}
    process = subprocess.Popen(
        [sys.executable, "-c", "from normscope.cli import main; main()", *command],
        cwd=here,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        found = {path for folder in unfinished(here) for path in folder.glob("checkpoint-*.safetensors")}
        if len(found - before) >= 2:
            break
        time.sleep(0.002)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = unfinished(here)
    return left


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train",), "either a recipe file or --preset"),
        (("train", "--preset", "tiny", "mine.toml"), "either a recipe file or --preset"),
        (("train", "--preset", "huge"), "unknown preset 'huge'"),
        (("train", "mine.toml"), "no recipe file 'mine.toml'"),
        (("train", "--preset", "tiny", "--set", "rate"), "key=value"),
        (("train", "--preset", "tiny", "--set", "rats=1"), "did you mean 'rate'"),
        (("train", "--preset", "tiny", "--scheme", "perl"), "did you mean 'peri'"),
        (("train", "--preset", "tiny", "--device", "tpu"), "--device 'tpu' is not available"),
        (("evaluate", "nowhere"), "'nowhere' is no folder"),
        (("evaluate", "."), "holds no trained model"),
        (("evaluate", "builtin:addition-small"), "did you mean 'builtin:addition-small-"),
        (("evaluate", "builtin:addition-small-pre", "--split", "ood"), "unknown split 'ood'"),
        (("evaluate", "builtin:addition-small-pre", "--examples", "1"), "greater than or equal to 2"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(here.iterdir()) == []


def test_a_finished_run_is_not_written_over_unasked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("train", *QUICK, "--set", "examples=64", "--json", "--out", "a")
    run(capsys, *command)
    before = (here / "a" / "run.json").read_text()
    status, _, err = run(capsys, *command)
    assert status == 2
    assert "--overwrite" in err
    assert (here / "a" / "run.json").read_text() == before
    assert run(capsys, *command, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "a", "--examples", "10"),
        ("audit", "a", "--examples", "4"),
        ("audit", "builtin:addition-small-pre", "--text", "a/notes.txt"),
        ("compare", "a", "builtin:addition-small-pre"),
    ],
)
def test_a_run_does_not_replace_what_it_reads(command: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "train", *QUICK, "--set", "examples=256", "--out", "a")[0] == 0
    (here / "a" / "notes.txt").write_text("some notes")
    before = sorted((here / "a").rglob("*"))
    status, out, err = run(capsys, *command, "--out", "a", "--overwrite")
    assert (status, out) == (2, "")
    assert err in (
        "normscope: 'a' is read, and would be replaced; choose another --out\n",
        "normscope: 'a' would be replaced, and 'a/notes.txt' in it is read; choose another --out\n",
    )
    assert sorted((here / "a").rglob("*")) == before
    assert run(capsys, "train", *QUICK, "--set", "examples=256", "--out", "a", "--overwrite")[0] == 0


def test_what_a_recipe_names_and_files_of_schemes_are_read_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "train", *QUICK, "--set", "examples=256", "--out", "pre", "--scheme", "pre")[0] == 0
    assert run(capsys, "train", *QUICK, "--set", "examples=256", "--out", "pre", "--scheme", "pre", "--overwrite")[0] == 0
    (here / "pre" / "mine.toml").write_text('name = "mine"\n[attention]\ninput = "norm"\n')
    (here / "pre" / "texts").mkdir()
    (here / "pre" / "texts" / "a.txt").write_text("some notes")
    small = "layers = 1\ndim = 16\nheads = 2\nhead = 8\nfeedforward = 16\nbatch = 4\nexamples = 40\ncontext = 8\n"
    (here / "r.toml").write_text(f'task = "text"\ncorpus = "{here}/pre/texts"\n{small}')
    (here / "s.toml").write_text('scheme = "pre/mine.toml"\nlayers = 1\ndim = 16\nhead = 8\nfrequencies = 8\nexamples = 256\n')
    stage = '[then]\nuntil = "1/2"\nthen = "pre/mine.toml"\n[then.attention]\nstream = "norm"\n'
    (here / "outer.toml").write_text(f'until = "1/4"\n[attention]\nstream = "norm"\n{stage}')
    for command in (
        ("train", *QUICK, "--scheme", "pre/mine.toml"),
        ("simulate", "--scheme", "post,pre/mine.toml", "--tokens", "4", "--dim", "4", "--time", "1"),
        ("simulate", "--scheme", "post, pre/mine.toml", "--tokens", "4", "--dim", "4", "--time", "1"),
        ("simulate", "--scheme", "outer.toml", "--tokens", "4", "--dim", "4", "--time", "1"),
        ("train", "r.toml"),
        ("train", *QUICK, "--set", "scheme=pre/mine.toml"),
        ("train", "s.toml"),
    ):
        status, _, err = run(capsys, *command, "--out", "pre", "--overwrite")
        assert (status, (here / "pre" / "mine.toml").exists()) == (2, True), err
        assert err.startswith("normscope: 'pre' would be replaced, and '")
        assert err.endswith("in it is read; choose another --out\n")
