"""Sweeps as they run: the same numbers for any number of workers, whatever is killed, fails or fills up in between."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
import pytest

import normscope as ns
from helpers.sweeps import ENSEMBLE, EVERY_STEP, TINY, alive, assert_same, normscope, sweep, wait_for
from normscope.experiments.progress import Progress
from normscope.experiments.result import load
from normscope.runs import open_run
from normscope.sweeps import estimate
from normscope.sweeps.folder import SweepFolder
from normscope.sweeps.local import LocalExecutor, visible_gpus
from normscope.sweeps.plan import read_plan
from normscope.sweeps.scheduler import ATTEMPTS, Status, begin, run_plan
from normscope.transformer.files import model_folder

TRAINING = TINY + 'watch = 20\n[grid]\nscheme = ["pre", "qkv"]\nseed = [1, 2]\n[[points]]\nname = "wild"\nrate = 1e12\n'


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
    monkeypatch.setattr("normscope.report.write.write_report", lambda *given: [])


def test_one_table_holds_all_runs(whole: Path) -> None:
    run = open_run(whole)
    runs, curves = run.table("runs"), run.table("curves")
    assert list(runs["name"]) == [f"scheme={s},seed={n}" for s in ("pre", "qkv") for n in (1, 2)] + ["wild"]
    assert list(runs["state"]) == ["finished"] * 4 + ["diverged"]
    assert list(runs.columns[:6]) == ["name", "state", "error", "scheme", "seed", "rate"]
    assert list(runs["seed"]) == [1, 2, 1, 2, 100]  # the last is the recipe's default
    assert "not a finite number at step" in runs["error"].iloc[4]
    assert runs["steps"].iloc[4] < runs["steps"].iloc[0] == 40
    first = open_run(whole / "runs" / runs["name"].iloc[0])
    assert list(open_run(first.path / "watch").all_tables()["steps"]["step"]) == [1, 20, 40]
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
    assert "is not a sweep" in err
    assert not (place / "lock").exists()
    assert {path: path.stat().st_mtime_ns for path in whole.glob("runs/*/*")} == written


def test_a_second_process_is_kept_out(place: Path, whole: Path) -> None:
    with SweepFolder.of(whole).exclusive():
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
        seen = wait_for(lambda: _states(folder) if {"finished", "running"} <= set(_states(folder).values()) else None)
        assert seen["scheme=pre,seed=1"] == "finished"
        assert list(seen.values()).count("running") == 1
        wait_for(lambda: list(folder.glob("runs/.*.unfinished-*/checkpoint-*.safetensors")))
        workers = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        assert workers
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not any(alive(worker) for worker in workers))
    left = _states(folder)
    assert "running" not in left.values()
    assert "waiting" in left.values()
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/run.json")}
    status, _, err = sweep(*arguments)
    assert status == 0, err
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert_same(whole, folder)


class Killer(Progress):
    """Kills the only worker whenever a run is in progress and has a checkpoint that it has not killed at, so many times."""

    def __init__(self, folder: SweepFolder, name: str, times: int) -> None:
        self.folder, self.name, self.times = folder, name, times
        self.killed: list[int] = []

    def parallel(self, running: Mapping[str, tuple[float, str]]) -> None:
        """Kill the worker."""
        saved = list(self.folder.path.glob(f"runs/.{self.name}.unfinished-*/checkpoint-*.safetensors"))
        workers = multiprocessing.active_children()
        if self.name in running and saved and workers and len(self.killed) < self.times and workers[0].pid not in self.killed:
            self.killed.append(int(workers[0].pid or 0))
            os.kill(self.killed[-1], signal.SIGKILL)


def killed_sweep(path: Path, times: int) -> tuple[SweepFolder, Status]:
    """Two trainings with one worker, which is killed so many times in the first."""
    points = '[[points]]\nname = "long"\nexamples = 240\n[[points]]\nname = "short"\nseed = 3\n'
    plan, folder = read_plan(tomllib.loads(TINY + points), checkpoint_every=0.0), SweepFolder.of(path)
    killer = Killer(folder, "long", times)
    with folder.exclusive(), LocalExecutor(folder.path, 1, 1) as executor:
        begin(folder, plan, {"device": "cpu", "threads": 1})
        status = run_plan(folder, plan, executor, killer)
    assert len(killer.killed) == times
    return folder, status


def test_a_killed_worker_costs_no_run(place: Path) -> None:
    folder, status = killed_sweep(place / "once", 1)
    assert status.states == {"long": "finished", "short": "finished"}
    alone = read_plan(tomllib.loads(TINY + "[[points]]\nexamples = 240\n")).points[0].experiment.run().tables["metrics"]
    metrics = open_run(folder.run("long")).table("metrics")
    pd.testing.assert_frame_equal(metrics.drop(columns="seconds"), alone.drop(columns="seconds"), check_exact=True)


def test_a_run_whose_worker_always_dies_fails_alone(place: Path) -> None:
    folder, status = killed_sweep(place / "always", ATTEMPTS)
    assert status.states == {"long": "failed", "short": "finished"}
    assert f"its process was killed; memory may have run out, or workers.log has the reason ({ATTEMPTS} times)" in str(
        folder.error("long")
    )


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
    assert "was of another model or text" in err  # and its numbers are not reported for the new model
    assert (place / "stability" / "runs" / finished["name"] / "run.json").stat().st_mtime_ns == written


@pytest.mark.usefixtures("undrawn")
def test_ensembles_are_the_same_for_any_number_of_workers(place: Path) -> None:
    for workers in (1, 2):
        status, _, err = sweep(place / "ensemble.toml", "--out", place / f"ensemble{workers}", "--workers", workers)
        assert status == 0, err
    assert_same(place / "ensemble1", place / "ensemble2")
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
    part = open_run(place / "ensemble2" / "runs" / "dim=8").table("cosines")
    pd.testing.assert_frame_equal(alone, part, check_exact=True)
    runs, curves = (open_run(place / "ensemble2").table(name) for name in ("runs", "curves"))
    assert list(curves.columns) == ["name", "dim", "time", "scheme", "mean", "low", "high"]
    last = alone[alone["time"] == 1.0].set_index("scheme")["mean"]
    assert runs.set_index("name").loc["dim=8", "cosine_peri"] == last["peri"]


def test_an_audit_in_a_sweep_is_the_audit(place: Path) -> None:
    plan = {"kind": "audit", "examples": 4, "grid": {"model": ["builtin:addition-small-qkv"]}}
    swept = ns.sweep(plan, device="cpu", out=place / "audit", progress=False)
    alone = ns.audit("builtin:addition-small-qkv", examples=4, device="cpu", progress=False)
    run = load(place / "audit" / "runs" / "model=builtin-addition-small-qkv")
    assert set(run.tables) == set(alone.tables)
    pd.testing.assert_frame_equal(run.tables["motion"], alone.tables["motion"], check_exact=True)
    (row,) = swept.records
    assert row["cosine"] == alone.tables["motion"]["cosine"].iloc[-1]
    assert row["growth"] > 1
    assert row["collapse_at_0.3"] == 0.0  # its keys are normalised
    assert read_plan(plan).points[0].experiment.seconds() > 0


def test_any_experiment_can_be_swept_from_python_without_a_folder(here: Path) -> None:
    plan = {"kind": "simulate", "scheme": "pre,post", "tokens": 6, "dim": 8, "time": 1, "grid": {"beta": [1.0, 4.0]}}
    swept = ns.sweep(plan, device="cpu", progress=False)
    assert list(here.iterdir()) == []
    assert list(swept.tables["runs"]["beta"]) == [1.0, 4.0]
    alone = ns.simulate("pre,post", tokens=6, dim=8, time=1, beta=4.0, device="cpu", progress=False).tables["trajectories"]
    last = alone[alone["scheme"] == "post"].iloc[-1]
    assert swept.tables["runs"]["cosine_post"].iloc[1] == last["cosine"]
    assert "final-cosine-post" in swept.figures


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_is_one_error_and_loses_nothing(small_disk: Path, place: Path, whole: Path) -> None:
    command = (place / "training.toml", "--out", small_disk / "sweep", "--workers", 1, *EVERY_STEP)
    status, out, err = sweep(*command)
    assert (status, out) == (2, "")
    assert [line for line in err.splitlines() if "normscope: the disk is full" in line] == err.splitlines()[-1:]
    kept = {path: path.stat().st_mtime_ns for path in small_disk.glob("sweep/runs/*/run.json")}
    assert 0 < len(kept) < 5
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    status, _, err = sweep(*command)
    assert status == 0, err
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert_same(whole, small_disk / "sweep")


def test_a_dry_run_times_every_shape_and_writes_nothing(here: Path, place: Path) -> None:
    (place / "limited.toml").write_text(TRAINING.replace("watch = 20", "watch = 20\nstop_above = 0.01"))
    status, out, err = sweep(place / "limited.toml", "--dry-run", "--json", "--out", "mine")
    assert status == 0, err
    records = json.loads(out)
    assert [record["runs"] for record in records] == [3, 2]
    assert all(record["seconds"] > 0 for record in records)
    assert {record["basis"] for record in records} <= {"timed", "scaled"}
    assert list(here.iterdir()) == []


def test_an_estimate_takes_seconds_whatever_the_runs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_BUDGET", {"cpu": 2.0})
    endless = {"kind": "simulate", "scheme": "pre", "tokens": 32, "dim": 32, "time": 1e4, "grid": {"step": [0.01, 0.02]}}
    found = [point.experiment for point in read_plan(endless).points]
    huge = {"kind": "ensemble", "panel": "5a", "chunk": 1, "grid": {"dim": [16, 2048], "tokens": [8, 2048]}}
    scaled = [point.experiment for point in read_plan(huge).points]
    started = time.monotonic()
    lower = estimate.estimate(found)
    middle = time.monotonic()
    by_work = estimate.estimate(scaled)
    assert max(middle - started, time.monotonic() - middle) < 2.0 + 40.0  # a process starts meanwhile, on a busy machine
    assert {expected.basis for expected in lower} == {estimate.AT_LEAST}
    assert by_work[3].basis == estimate.SCALED
    assert by_work[3].seconds > 100 * by_work[0].seconds
    assert by_work[3].low < by_work[3].seconds < by_work[3].high


def test_what_was_not_timed_follows_from_the_arithmetic() -> None:
    known = estimate._Timings(seconds={0: 2.0, 1: 30.0}, shares={3: (5.0, 0.25)}, speed=1e9)
    timed, largest, scaled, unknown = known.estimates([1e9, 10e9, 50e9, 0.0])
    assert (timed.seconds, largest.seconds, scaled.seconds, unknown.seconds) == (2.0, 30.0, 150.0, 30.0)
    assert [e.basis for e in (timed, largest, scaled, unknown)] == ["timed", "timed", "scaled", "at least"]
    assert estimate._Timings(speed=1e9).estimates([5e9])[0].seconds == 5.0
    assert estimate._Timings(shares={0: (5.0, 0.25)}).estimates([0.0])[0].seconds == 20.0


def test_gpus_are_named_as_their_owner_numbers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert visible_gpus("cuda") == ("2", "5")
    assert visible_gpus("cuda:1") == ("5",)
    assert visible_gpus("cpu") == ()


def _states(folder: Path) -> dict[str, str]:
    """What ``normscope sweep status`` says; nothing while there is no plan."""
    status, out, _ = sweep("status", folder, "--json")
    return {row["name"]: row["state"] for row in json.loads(out)} if status == 0 else {}
