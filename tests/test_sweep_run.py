"""Sweeps as they run: the same numbers for any number of workers, whatever is killed, fails or fills up in between."""

import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from normscope.audit import Question, audit
from safetensors.torch import load_file

from normscope.cli import main
from normscope.models import open_model
from normscope.runs import open_run
from normscope.sweeps import LocalExecutor, Standing, SweepFolder, begin, read_sweep, run_sweep, visible_gpus
from normscope.transformer.files import model_folder

TINY = """
kind = "train"
preset = "tiny"
[fixed]
layers = 2
dim = 8
heads = 2
head = 4
feedforward = 8
readout = [8]
frequencies = 2
batch = 4
examples = 160
epoch = 2
warmup = 0
clip = 0
test_examples = 8
"""
TRAINING = TINY + '[grid]\nscheme = ["pre", "qkv"]\nseed = [1, 2]\n[[points]]\nname = "wild"\nrate = 1e12\n'
ENSEMBLE = """
kind = "ensemble"
[fixed]
scheme = "post,peri"
runs = 40
chunk = 8
tokens = 6
time = 1.0
samples = 3
[grid]
dim = [4, 8]
"""
EVERY_STEP = ("--checkpoint-every", "0")


def normscope(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


def sweep(*arguments: object) -> tuple[int, str, str]:
    """The same of ``normscope sweep``."""
    return normscope("sweep", *arguments)


def assert_same(one: Path, other: Path) -> None:
    """The same tables, and the same weights in every run."""
    for name in ("runs", "curves"):
        pd.testing.assert_frame_equal(open_run(one).table(name), open_run(other).table(name), check_exact=True)
    runs = sorted(path.name for path in (one / "runs").iterdir())
    assert runs == sorted(path.name for path in (other / "runs").iterdir())  # and nothing is left beside them
    for name in runs:
        found = [list((folder / "runs" / name).glob("model.safetensors")) for folder in (one, other)]
        assert len(found[0]) == len(found[1])
        if found[0]:
            weights, others = (load_file(files[0]) for files in found)
            assert weights.keys() == others.keys()
            assert all(torch.equal(weights[key], others[key]) for key in weights)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps")
    (folder / "training.toml").write_text(TRAINING)
    (folder / "ensemble.toml").write_text(ENSEMBLE)
    return folder


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A sweep of five trainings that nothing happened to, with one worker."""
    status, out, err = sweep(place / "training.toml", "--out", place / "whole", "--workers", 1, "--json", *EVERY_STEP)
    assert status == 0, err
    assert (place / "whole" / "report.html").is_file()
    (place / "whole.json").write_text(out)
    return place / "whole"


@pytest.fixture
def undrawn(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pages, which take seconds to draw and have tests of their own."""
    monkeypatch.setattr("normscope.report.sweep.write_sweep_report", lambda run, title, formats: None)


def test_one_table_holds_all_runs(whole: Path) -> None:
    run = open_run(whole)
    runs, curves = run.table("runs"), run.table("curves")
    assert list(runs["name"]) == [f"scheme={s},seed={n}" for s in ("pre", "qkv") for n in (1, 2)] + ["wild"]
    assert list(runs["state"]) == ["finished"] * 4 + ["diverged"]
    assert list(runs.columns[:6]) == ["name", "state", "error", "scheme", "seed", "rate"]
    assert list(runs["seed"]) == [1, 2, 1, 2, 100]  # the last by the recipe's default
    assert "not a finite number at step" in runs["error"].iloc[4]
    assert runs["steps"].iloc[4] < runs["steps"].iloc[0] == 40
    first = open_run(whole / "runs" / runs["name"].iloc[0])
    assert (
        runs["accuracy_ood-extrapolation"].iloc[0]
        == first.table("accuracy").set_index("split")["accuracy"]["ood-extrapolation"]
    )
    assert runs["loss"].iloc[0] == first.table("metrics")["loss"].iloc[-1]
    drawn = curves[curves["name"] == runs["name"].iloc[0]]
    assert list(drawn["loss"]) == list(first.table("metrics")["loss"])
    assert run.description["configuration"]["varied"] == ["scheme", "seed", "rate"]
    assert [row["name"] for row in json.loads((whole.parent / "whole.json").read_text())] == list(runs["name"])


@pytest.mark.usefixtures("undrawn")
def test_two_workers_make_the_same(place: Path, whole: Path) -> None:
    status, _, err = sweep(place / "training.toml", "--out", place / "two", "--workers", 2)
    assert status == 0, err
    assert_same(whole, place / "two")


@pytest.mark.usefixtures("undrawn")
def test_what_is_finished_is_not_run_again_and_not_replaced_by_another_sweep(place: Path, whole: Path) -> None:
    written = {path: path.stat().st_mtime_ns for path in whole.glob("runs/*/*")}
    status, out, _ = sweep(place / "training.toml", "--out", whole, "--json")
    assert status == 0
    assert out == (place / "whole.json").read_text()
    (place / "other.toml").write_text(TRAINING.replace("examples = 160", "examples = 80"))
    status, _, err = sweep(place / "other.toml", "--out", whole)
    assert status == 2
    assert "holds another sweep" in err
    status, _, err = sweep(place / "other.toml", "--out", place)
    assert status == 2
    assert "is no sweep" in err
    assert not (place / "lock").exists()
    assert {path: path.stat().st_mtime_ns for path in whole.glob("runs/*/*")} == written


def test_a_second_driver_is_kept_out(place: Path, whole: Path) -> None:
    with SweepFolder.of(whole).alone():
        status, out, err = sweep(place / "training.toml", "--out", whole)
    assert (status, out) == (2, "")
    assert "another process runs the sweep" in err


@pytest.mark.usefixtures("undrawn")
def test_killed_and_started_again_it_ends_with_the_same_table(place: Path, whole: Path) -> None:
    folder = place / "killed"
    arguments = (str(place / "training.toml"), "--out", str(folder), "--workers", "1", *EVERY_STEP)
    driver = subprocess.Popen(
        [sys.executable, "-c", "from normscope.cli import main; main()", "sweep", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        seen = _wait(lambda: _states(folder) if {"finished", "running"} <= set(_states(folder).values()) else None)
        assert seen["scheme=pre,seed=1"] == "finished"
        assert list(seen.values()).count("running") == 1
        _wait(lambda: list(folder.glob("runs/.*.unfinished-*/checkpoint-*.safetensors")))
        workers = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        assert workers
    finally:
        driver.kill()
        driver.wait()
    _wait(lambda: not any(_alive(worker) for worker in workers))
    left = _states(folder)
    assert "running" not in left.values()
    assert "waiting" in left.values()
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/run.json")}
    status, _, err = sweep(*arguments)
    assert status == 0, err
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert_same(whole, folder)


def test_a_worker_that_is_killed_is_a_failure_of_its_run_alone(place: Path) -> None:
    (place / "long.toml").write_text(
        TINY + '[[points]]\nname = "long"\nexamples = 400_000\n[[points]]\nname = "short"\nseed = 3\n'
    )
    wanted, folder = read_sweep(str(place / "long.toml")), SweepFolder.of(place / "long")
    killed = []

    def kill_once(standing: Standing) -> None:
        if "long" in standing.running and not killed:
            (worker,) = multiprocessing.active_children()
            os.kill(int(worker.pid or 0), signal.SIGKILL)
            killed.append(worker.pid)

    with folder.alone(), LocalExecutor(folder.path, 1, 1) as executor:
        begin(folder, wanted, {"device": "cpu", "threads": 1})
        standing = run_sweep(folder, wanted, executor, kill_once)
    assert killed
    assert standing.states == {"long": "failed", "short": "finished"}
    assert "SIGKILL" in str(folder.error("long"))


@pytest.mark.usefixtures("undrawn")
def test_a_failed_run_is_recorded_and_run_again_when_asked(place: Path) -> None:
    model = model_folder("builtin:addition-small-pre")
    shutil.copytree(model, place / "broken")
    (place / "broken" / "model.safetensors").write_bytes(b"nothing")
    (place / "stability.toml").write_text(
        'kind = "stability"\n[fixed]\nexamples = 4\nmeasures = ["sparsity"]\n'
        '[grid]\nmodel = ["./broken", "builtin:addition-small-pre"]\n'
    )
    command = (place / "stability.toml", "--out", place / "stability", "--workers", 1, "--json")
    status, out, err = sweep(*command)
    assert status == 1
    assert "1 of 2 runs failed" in err
    failed, finished = json.loads(out)
    assert (failed["state"], finished["state"]) == ("failed", "finished")
    assert "cannot read the weights" in failed["error"]
    assert failed["sparse"] is None
    assert "Traceback" in (place / "stability" / "errors" / f"{failed['name']}.txt").read_text()
    shutil.copy(model / "model.safetensors", place / "broken")
    assert sweep(*command)[:2] == (1, out)
    written = (place / "stability" / "runs" / finished["name"] / "run.json").stat().st_mtime_ns
    status, out, err = sweep(*command, "--retry-failed")
    assert status == 0, err
    again, other = json.loads(out)
    assert (again["state"], again["error"], again["sparse"]) == ("finished", None, finished["sparse"])
    assert other == finished
    (place / "broken" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1] + b"x")
    status, _, err = sweep(*command)
    assert status == 2
    assert "was of another model or text" in err  # and its old numbers are not given for new ones
    assert (place / "stability" / "runs" / finished["name"] / "run.json").stat().st_mtime_ns == written


@pytest.mark.usefixtures("undrawn")
def test_ensembles_are_the_same_for_any_number_of_workers(place: Path) -> None:
    for workers in (1, 3):
        status, _, err = sweep(place / "ensemble.toml", "--out", place / f"ensemble{workers}", "--workers", workers)
        assert status == 0, err
    assert_same(place / "ensemble1", place / "ensemble3")
    given = {
        "scheme": "post,peri",
        "runs": 40,
        "chunk": 8,
        "tokens": 6,
        "dim": 8,
        "time": 1,
        "samples": 3,
        "out": place / "alone",
    }
    status, _, err = normscope("ensemble", *(word for name, value in given.items() for word in (f"--{name}", value)))
    assert status == 0, err
    alone = open_run(place / "alone").table("cosines")
    part = open_run(place / "ensemble3" / "runs" / "dim=8").table("cosines")
    pd.testing.assert_frame_equal(alone, part, check_exact=True)
    runs, curves = (open_run(place / "ensemble3").table(name) for name in ("runs", "curves"))
    assert list(curves.columns) == ["name", "dim", "time", "scheme", "mean", "low", "high"]
    last = alone[alone["time"] == 1.0].set_index("scheme")["mean"]
    assert runs.set_index("name").loc["dim=8", "cosine_peri"] == last["peri"]


def test_an_audit_in_a_sweep_is_the_audit(place: Path) -> None:
    (place / "audit.toml").write_text('kind = "audit"\nexamples = 4\n[grid]\nmodel = ["builtin:addition-small-qkv"]\n')
    (point,) = read_sweep(str(place / "audit.toml")).points
    told: list[tuple[int, int, str]] = []
    point.job.finish(place / "audit", lambda *progress: told.append(progress))
    assert {done for done, total, _ in told if total == 4} == {0, 1, 2, 3, 4}
    alone = audit(Question.of(open_model("builtin:addition-small-qkv"), examples=4)).tables
    run = open_run(place / "audit")
    assert set(run.tables) == set(alone)
    pd.testing.assert_frame_equal(run.table("motion"), alone["motion"], check_exact=True)
    numbers = point.job.outcome(run).numbers
    assert numbers["cosine"] == alone["motion"]["cosine"].iloc[-1]
    assert numbers["growth"] > 1
    assert numbers["collapse_at_0.3"] == 0.0  # its keys are normalised
    assert point.job.seconds() > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_is_one_error_and_loses_nothing(small_disk: Path, place: Path, whole: Path) -> None:
    command = (place / "training.toml", "--out", small_disk / "sweep", "--workers", 1, *EVERY_STEP)
    status, out, err = sweep(*command)
    assert (status, out) == (1, "")
    assert [line for line in err.splitlines() if "normscope: the disk is full" in line] == err.splitlines()[-1:]
    kept = {path: path.stat().st_mtime_ns for path in small_disk.glob("sweep/runs/*/run.json")}
    assert 0 < len(kept) < 5
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    status, _, err = sweep(*command)
    assert status == 0, err
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert_same(whole, small_disk / "sweep")


def test_a_dry_run_times_every_shape_and_writes_nothing(here: Path, place: Path) -> None:
    status, out, err = sweep(place / "training.toml", "--dry-run", "--json")
    assert status == 0, err
    records = json.loads(out)
    assert [record["runs"] for record in records] == [3, 2]
    assert all(record["seconds"] > 0 for record in records)
    status, out, _ = sweep(place / "ensemble.toml", "--dry-run")
    assert status == 0
    assert "2 runs, about" in out
    assert list(here.iterdir()) == []


def test_gpus_are_named_as_their_owner_numbers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert visible_gpus("cuda") == ("2", "5")
    assert visible_gpus("cuda:1") == ("5",)
    assert visible_gpus("cpu") == ()


def _states(folder: Path) -> dict[str, str]:
    """What ``normscope sweep status`` says; nothing while there is no plan."""
    status, out, _ = sweep("status", folder, "--json")
    return {row["name"]: row["state"] for row in json.loads(out)} if status == 0 else {}


def _wait(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = ready()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError("waited in vain")


def _alive(pid: str) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
