"""Sweeps on real Ray clusters: the same folders as here, whatever node is lost, and one error where there is no cluster."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest

from helpers.sweeps import ENSEMBLE, EVERY_STEP, TINY, alive, assert_same, sweep, wait_for
from normscope.errors import InputError
from normscope.experiments.experiment import Experiment
from normscope.experiments.result import Result
from normscope.runs import open_run
from normscope.sweeps import on_ray
from normscope.sweeps.folder import SweepFolder
from normscope.sweeps.on_ray import Needs, RayExecutor
from normscope.sweeps.tasks import Task

TWELVE = TINY + '[grid]\nscheme = ["pre", "qkv"]\nseed = [1, 2, 3, 4, 5, 6]\n'
LONG = TINY + '[[points]]\nname = "long"\nexamples = 4_000_000\n'
STORE = 80 << 20
FAST = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    for name, text in {"twelve": TWELVE, "long": LONG, "ensemble": ENSEMBLE}.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def here(place: Path) -> Path:
    """The same sweeps on this machine, in ``twelve`` and ``ensemble``, by processes that cannot import Ray."""
    hidden = place / "hidden" / "ray"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        patch.setenv("PYTHONPATH", f"{hidden.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        for name in ("twelve", "ensemble"):
            status, _, err = sweep(place / f"{name}.toml", "--out", place / "here" / name, "--workers", 2)
            assert status == 0, err
        status, out, err = sweep(place / "twelve.toml", "--out", place / "nowhere", "--ray", "local")
        assert (status, out) == (2, "")
        assert not (place / "nowhere").exists()
        assert err.splitlines()[-1] == "normscope: a sweep on a cluster needs ray; pip install 'normscope[sweeps]'"
    return place / "here"


@dataclass
class TwoNodes:
    """A cluster of two nodes of one core, each with a GPU by its own word, and the process that is the second."""

    address: str
    second: Any

    def workers(self, lock: Path) -> list[int]:
        """The processes that are in the run with this lock."""
        found = []
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if link.readlink() == lock:
                    found.append(int(link.parts[2]))
            except OSError:
                continue
        return found

    def on_second(self) -> list[int]:
        """All processes of the second node."""
        (raylet,) = self.second.all_processes["raylet"]
        return [raylet.process.pid, *_descendants(raylet.process.pid)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    pytest.importorskip("ray", reason="pip install 'normscope[sweeps]'")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # for the experiment of these tests
        nodes = Cluster(initialize_head=True, head_node_args={**node, "_system_config": FAST})
        second = nodes.add_node(**node)
    try:
        yield TwoNodes(nodes.address, second)
    finally:
        nodes.shutdown()


def start(*arguments: object) -> subprocess.Popen[str]:
    """``normscope sweep`` in a process group of its own, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, "-c", "from normscope.cli import main; main()", "sweep", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


class Assigned(Experiment):
    """Reports what Ray assigned to it."""

    command: ClassVar[str] = "assigned"
    title: ClassVar[str] = "Assigned"

    def run(self, progress: object = None, folder: Path | None = None) -> Result:
        """A table of resources, threads and the process."""
        import ray
        import torch

        given = ray.get_runtime_context().get_assigned_resources()
        row = {**given, "threads": torch.get_num_threads(), "process": os.getpid()}
        return Result(Assigned, {}, {"assigned": pd.DataFrame([row])})


@pytest.mark.slow
def test_a_run_gets_the_cores_and_the_share_of_a_gpu_that_it_asks_for(cluster: TwoNodes, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    with RayExecutor(cluster.address, Needs(1, 4)) as executor:
        assert executor.room == 2  # by cores; eight by GPUs
        future = executor.submit(Task(tmp_path, "first", Assigned()))
        assert executor.room == 1
        assert future.result(60) is None
        wait_for(lambda: executor.room == 2)
        (row,) = open_run(tmp_path / "runs" / "first").table("assigned").to_dict("records")
        assert row.pop("process") != os.getpid()
        assert row == {"CPU": 1.0, "GPU": 0.25, "threads": 1}
        hidden = executor.submit(Task(tmp_path / "elsewhere", "first", Assigned()))  # a folder that the node does not see
        with pytest.raises(InputError, match=r"does not see .*elsewhere'; out= must be on a file system that all nodes share"):
            executor.loss(hidden.exception(60) or AssertionError("no error"))
    with pytest.raises(InputError, match=r"no node of .* has 2 cores and a GPU for a run"):
        RayExecutor(cluster.address, Needs(2, 1))


@pytest.mark.slow
def test_a_node_is_killed_and_every_run_is_there_once_as_if_made_here(cluster: TwoNodes, place: Path, here: Path) -> None:
    out = place / "cluster"
    folder = SweepFolder.of(out)
    driver = start(place / "twelve.toml", "--out", out, "--ray", cluster.address, "--json", *EVERY_STEP)
    try:
        name = wait_for(lambda: _stopped_on_second(cluster, folder))
        _signal(cluster.on_second(), signal.SIGKILL)
        assert folder.complete(name) is None
        kept = {path: path.stat().st_mtime_ns for path in out.glob("runs/[!.]*/run.json")}
        assert len(kept) < 12
        wait_for(lambda: (noted := folder.progress(name)) is not None and noted.note.startswith("resuming from step") and noted)
        printed, err = driver.communicate(timeout=200)
    finally:
        driver.kill()
    assert driver.returncode == 0, err
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # nothing was run twice
    assert [row["name"] for row in json.loads(printed)] == [f"scheme={s},seed={n}" for s in ("pre", "qkv") for n in range(1, 7)]
    assert_same(here / "twelve", out)
    assert_same_folders(here / "twelve", out)


@pytest.mark.slow
def test_ctrl_c_ends_the_tasks_and_leaves_the_cluster(cluster: TwoNodes, place: Path) -> None:
    out = place / "long"
    driver = start(place / "long.toml", "--out", out, "--ray", cluster.address)
    try:
        (worker,) = wait_for(lambda: cluster.workers(out / "progress" / "long.lock"))
        wait_for(lambda: SweepFolder.of(out).progress("long"))
        os.killpg(driver.pid, signal.SIGINT)
        _, said = driver.communicate(timeout=30)
    finally:
        driver.kill()
    assert driver.returncode == 130
    assert "resumes from what is saved" in said
    assert "Traceback" not in said
    wait_for(lambda: not alive(worker))
    socket.create_connection(tuple(cluster.address.split(":")), 5).close()


@pytest.mark.slow
def test_a_cluster_of_its_own_makes_the_same_and_leaves_no_process(place: Path, here: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'normscope[sweeps]'")
    driver = start(place / "ensemble.toml", "--out", place / "local", "--ray", "local")
    try:
        started: set[int] = set()
        while driver.poll() is None:
            started |= set(_descendants(driver.pid))
            time.sleep(0.05)
        _, said = driver.communicate()
    finally:
        driver.kill()
    assert driver.returncode == 0, said
    assert len(started) > 4
    assert not [process for process in started if alive(process)]
    assert_same(here / "ensemble", place / "local")
    assert_same_folders(here / "ensemble", place / "local")


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", "127.0.0.1:99999", "closed", "silent", "127.0.0.1:x"])
def test_a_wrong_address_is_one_clear_error(address: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="pip install 'normscope[sweeps]'")
    monkeypatch.setattr(on_ray, "_REACH", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        listening = {"silent": silent, "closed": closed}
        if address in listening:
            address = f"127.0.0.1:{listening[address].getsockname()[1]}"
        started = time.monotonic()
        status, out, err = sweep(place / "long.toml", "--out", place / "nowhere", "--ray", address)
    assert time.monotonic() - started < 20
    assert (status, out) == (2, "")
    assert address in err.splitlines()[-1]
    assert err.count("normscope: ") == 1
    assert list(place.glob("nowhere/runs/*")) == []


def assert_same_folders(one: Path, other: Path) -> None:
    """Run folders that differ in nothing but times of the clock."""
    for path in (one / "runs").iterdir():
        run, its_twin = open_run(path), open_run(other / "runs" / path.name)
        assert {file.name for file in path.iterdir()} == {file.name for file in its_twin.path.iterdir()}
        for about in ("command", "configuration", "seed", "device"):
            assert run.description[about] == its_twin.description[about]
        assert run.tables == its_twin.tables
        for name in run.tables:
            table, twin = (some.table(name).drop(columns="seconds", errors="ignore") for some in (run, its_twin))
            pd.testing.assert_frame_equal(table, twin, check_exact=True)


def _stopped_on_second(cluster: TwoNodes, folder: SweepFolder) -> str | None:
    """Stop the second node while it is in the middle of a run that has a checkpoint, once another run is finished."""
    if not list(folder.path.glob("runs/*/run.json")):
        return None
    processes = cluster.on_second()
    _signal(processes, signal.SIGSTOP)
    for checkpoint in folder.path.glob("runs/.*.unfinished-*/checkpoint-*.safetensors"):
        name = checkpoint.parent.name[1:].partition(".unfinished-")[0]
        there = set(processes).intersection(cluster.workers(folder.path / "progress" / f"{name}.lock"))
        if there and folder.complete(name) is None:
            return name
    _signal(processes, signal.SIGCONT)
    return None


def _signal(processes: list[int], what: signal.Signals) -> None:
    for process in processes:
        os.kill(process, what)


def _descendants(process: int) -> list[int]:
    try:
        children = [
            int(child) for path in Path(f"/proc/{process}/task").glob("*/children") for child in path.read_text().split()
        ]
    except OSError:
        return []
    return [*children, *(grandchild for child in children for grandchild in _descendants(child))]
