"""One training on two processes is the training of one process: losses, weights, going on, and ends of all kinds."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from helpers.cli import run
from normscope.core import tile_for
from normscope.errors import InputError
from normscope.machine.exits import leave, skip_teardown
from normscope.runs import open_run
from normscope.training import Checkpoints, DivergedError, Training, parallel, read_recipe
from normscope.training.parallel import Team, check_devices
from normscope.training.steps import stepper_for
from normscope.training.tasks import MASK, AdditionTask
from normscope.training.tasks.addition.feeds import PackedFeed, PaddedFeed, draw_batches

SHORT = {
    "examples": 20 * 32,
    "batch": 32,
    "epoch": 1,  # a row of metrics for each step
    "layers": 2,
    "dim": 32,
    "head": 8,
    "schedule": "constant",
    "warmup": 0,
    "clip": 0.0,
}
A_MINUTE = timedelta(seconds=60)  # processes that lost step wait for each other no longer
CASES = {
    "pre": {},
    "uneven": {"scheme": "qkv", "batch": 33, "examples": 20 * 33, "clip": 0.5},
    "encoder": {"scheme": "peri", "encoder_layers": 1},
    "renormalised": {"scheme": "ngpt"},
    "plateau": {"schedule": "plateau", "epoch": 2, "patience": 1, "rate": 0.01, "scheme": "post"},
    "packed": {"scheme": "qkv"},
}


def short(**changes):
    return read_recipe("tiny", {**SHORT, **changes})


def packed_feed(task, model, batch, device, precision):
    return PackedFeed.of(task.train, batch, tile_for(task.longest - 1))


def trained(case, team=None):
    """Metrics and weights of a case; packed rows are what a GPU gets, computed here by a CPU."""
    usual = AdditionTask.feed
    if case == "packed":
        AdditionTask.feed = packed_feed
    try:
        training = Training(short(**CASES[case]), "cpu", team)
        return [asdict(row) for row in training.run()], training.model.state_dict()
    finally:
        AdditionTask.feed = usual


@cache
def alone(case):
    """The same by one process."""
    return trained(case)


def half(training, checkpoints):
    """Train for ten steps and keep them."""
    for row in training.run():
        if row.step == 10:
            break
    if checkpoints is not None:
        checkpoints.save(training.checkpoint)


def rows_of_a_step(training):
    """How many rows the model reads in the first step."""
    read = []
    training.model.embed.register_forward_pre_hook(lambda embed, arguments: read.append(len(arguments[0].characters)))
    next(training.run())
    return read


def process(rank, folder):
    """What each of two processes does; the first alone reads and writes checkpoints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=A_MINUTE)
    team = Team(rank, 2)
    found = {case: trained(case, team) for case in CASES}
    going_on = Training(short(), "cpu", team)
    if team.first:
        going_on.restore(Checkpoints(folder / "alone", "run").load("cpu")[0])
    list(going_on.run())
    found["gone on"] = [asdict(row) for row in going_on.metrics], going_on.model.state_dict()
    half(Training(short(), "cpu", team), Checkpoints(folder / "together", "run") if team.first else None)
    diverging = Training(short(rate=1e12, scheme="none"), "cpu", team)
    with suppress(DivergedError):
        list(diverging.run())
    found["diverged"] = [asdict(row) for row in diverging.metrics], {}
    found["rows"] = rows_of_a_step(Training(short(batch=33), "cpu", team))
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    skip_teardown()
    leave(0)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two real processes found, and the folder of the checkpoints."""
    folder = tmp_path_factory.mktemp("together")
    for name in ("alone", "together"):
        (folder / name).mkdir()
    half(Training(short()), Checkpoints(folder / "alone", "run"))
    torch.multiprocessing.spawn(process, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)], folder


def assert_same_training(one, other):
    """Equal to float32 rounding: every loss, accuracy and rate, and every weight.

    Adam moves a weight by about the rate, 0.003 a step, whatever the size of its gradient: of one that is nearly 0 the rounding
    is seen.
    """
    (rows, weights), (other_rows, other_weights) = one, other
    assert len(rows) == len(other_rows)
    for row, other_row in zip(rows, other_rows, strict=True):
        assert row["loss"] == pytest.approx(other_row["loss"], rel=2e-6)
        assert {k: row[k] for k in ("step", "examples", "rate")} == {k: other_row[k] for k in ("step", "examples", "rate")}
        assert row["accuracy"] == pytest.approx(other_row["accuracy"], abs=1e-7)
    assert weights.keys() == other_weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, other_weights[name], rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one_does(together, case):
    (first, second), _ = together
    assert_same_training(first[case], alone(case))
    if case == "plateau":
        assert first[case][0][-1]["rate"] == 0.005
    assert {**first[case][0][-1], "seconds": 0} == {**second[case][0][-1], "seconds": 0}
    assert all(torch.equal(value, second[case][1][name]) for name, value in first[case][1].items())


def test_two_processes_go_on_from_what_one_left_to_the_first(together):
    (first, second), _ = together
    assert_same_training(first["gone on"], alone("pre"))
    assert all(torch.equal(value, second["gone on"][1][name]) for name, value in first["gone on"][1].items())


def test_one_process_goes_on_from_what_two_left(together):
    _, folder = together
    training = Training(short())
    training.restore(Checkpoints(folder / "together", "run").load("cpu")[0])
    assert training.step == 10
    rows = [asdict(row) for row in training.metrics] + [asdict(row) for row in training.run()]
    assert_same_training((rows, training.model.state_dict()), alone("pre"))


def test_all_processes_stop_where_one_would(together):
    single = Training(short(rate=1e12, scheme="none"))
    with pytest.raises(DivergedError):
        list(single.run())
    for found in together[0]:
        assert [row["step"] for row in found["diverged"][0]] == [row.step for row in single.metrics]


def test_each_process_reads_its_rows_alone(together):
    assert [found["rows"] for found in together[0]] == [[17], [16]]


def test_shares_are_the_whole_batch():
    task, cpu = short().data.train, torch.device("cpu")

    def drawn(rows):
        return draw_batches(task, PaddedFeed(), 3, 7, 50, 1, cpu, rows)

    whole = drawn(None)
    for name, values in whole.items():
        put_together = torch.empty_like(values)
        for rank in range(3):
            put_together[:, Team(rank, 3).rows] = drawn(Team(rank, 3).rows)[name]
        assert torch.equal(put_together, values)


def test_a_share_without_characters_adds_nothing():
    training = Training(short(batch=2))
    batches = draw_batches(training.task.train, PaddedFeed(), 1, 2, 0, 1, training.device)
    stepper = stepper_for(training.model, PaddedFeed(), training.optimiser, training.recipe, torch.float32, batches)
    batch = {name: values[0] for name, values in batches.items()}
    loss, row = stepper.step.measures({**batch, "targets": torch.full_like(batch["targets"], MASK)}, torch.tensor(5.0))
    loss.backward()
    assert row.tolist() == [0, 0, 0]
    assert all(not parameter.grad.any() for parameter in training.model.parameters())


def test_a_process_without_a_row_or_a_gpu_is_refused(here, capsys):
    with pytest.raises(InputError, match="a batch of 2 has no row for each of 3 processes"):
        Training(short(batch=2), "cpu", Team(0, 3))
    with pytest.raises(InputError, match="each process takes its own"):
        check_devices("cuda:1", 2)
    with pytest.raises(InputError, match="need a GPU each"):
        check_devices("cuda", torch.cuda.device_count() + 1)
    status, out, err = run(capsys, "train", "--preset", "tiny", "--set", "batch=4", "--processes", "5", "--device", "cpu")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "a batch of 4 has no row for each of 5 processes" in err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("failures", "found"),
    [
        ({0: 2, 1: 1}, 2),
        ({0: 1, 1: 130}, 130),
        ({0: -15, 1: 1}, 1),
        ({0: 1, 1: -9}, "process 1 .* SIGKILL"),
        ({0: -9, 1: -15}, "process 0 .* SIGKILL"),
        ({0: -15}, "process 0 .* SIGTERM"),
    ],
)
def test_the_first_cause_is_told_from_what_followed(failures, found):
    if isinstance(found, int):
        assert parallel._status_of(failures, 2) == found
    else:
        with pytest.raises(ConnectionError, match=found):
            parallel._status_of(failures, 2)


QUICK = ("--preset", "tiny", "--device", "cpu", "--json", "--out", "a",
         *(word for key, value in {**SHORT, "test_examples": 64, "examples": 2000 * 32}.items()
           for word in ("--set", f"{key}={value}")))  # fmt: skip


class Command:
    """A command in a process of its own."""

    def __init__(self, *command, here):
        words = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-m", *command], cwd=here, **words)
        self.here = here

    @property
    def checkpoints(self):
        return sorted(self.here.glob(".a.unfinished-*/checkpoint-*.safetensors"))

    def after_a_checkpoint(self):
        """Its processes, once it has written a new checkpoint."""
        before, deadline = self.checkpoints, time.monotonic() + 60
        while set(self.checkpoints) <= set(before) and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def ended(self):
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def alive(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes as Linux shows them")
def test_an_interrupt_or_a_killed_process_ends_all_and_keeps_the_checkpoint(here):
    shared = ("normscope", "train", *QUICK, "--checkpoint-every", "0", "--processes", "2")
    interrupted = Command(*shared, here=here)
    workers = interrupted.after_a_checkpoint()
    interrupted.process.send_signal(signal.SIGINT)
    status, out, err = interrupted.ended()
    assert (status, out, len(workers)) == (130, "", 2), err
    assert "interrupted; the same command with --out" in err
    assert interrupted.checkpoints
    assert "Traceback" not in err

    killed = Command(*shared, here=here)
    workers += killed.after_a_checkpoint()
    os.kill(workers[-1], signal.SIGKILL)
    status, out, err = killed.ended()
    assert (status, out) == (1, ""), err
    assert "resuming from step" in err
    assert "process 1 of 2 was ended by SIGKILL, and all with it; the same command resumes from the last checkpoint" in err
    assert "Traceback" not in err
    assert len(workers) == 4
    assert not any(alive(pid) for pid in workers)
    assert killed.checkpoints


def test_a_worker_whose_launcher_was_killed_before_it_joined_ends_at_once(here):
    """Its parent is another process by then, which does not end."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a",
                "MASTER_ADDR": "localhost", "MASTER_PORT": "1", parallel._LAUNCHER: f"{gone.pid} a"}  # fmt: skip
    command = [sys.executable, "-m", "normscope", "train", *QUICK]
    worker = subprocess.run(command, cwd=here, env=os.environ | torchrun, capture_output=True, text=True, timeout=60)
    assert worker.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), worker.stderr
    assert not list(here.iterdir())


def test_only_the_launcher_of_this_run_is_waited_for(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this")
    for launcher, expected in (("17 this", 17), ("17 another", os.getppid()), ("", os.getppid())):
        monkeypatch.setenv(parallel._LAUNCHER, launcher)
        assert parallel._launcher() == expected


def test_a_process_ends_with_the_one_that_started_it():
    code = (
        "import os, time\n"
        "from normscope.training.parallel import _end_with\n"
        "own = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    _end_with(own)\n"
        "    print('still there')\n"
        "time.sleep(0.2)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == ""  # read to its end, which comes when both have ended


def test_a_shared_command_ends_before_the_interpreter_goes_down():
    code = (
        "import atexit, os\n"
        "class AtTheEnd:\n"
        "    def __del__(self):\n"
        "        os.abort()\n"
        "kept = AtTheEnd()\n"
        "atexit.register(print, 'cleaned up')\n"
        "from normscope.cli import main\n"
        "from normscope.machine.exits import skip_teardown\n"
        "skip_teardown()\n"
        "main(['train', '--preset', 'tiny', '--layers'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "cleaned up\n"), ended.stderr
    assert "--layers" in ended.stderr


@pytest.mark.slow
def test_torchrun_goes_on_from_one_process_and_prints_once(here):
    command = ("train", *QUICK, "--set", f"examples={20 * 32}")
    recipe = short(test_examples=64)
    begun = Checkpoints.of(here / "a", {**recipe.record, "device": "cpu"})
    begun.folder.mkdir()
    half(Training(recipe), begun)
    shared = Command("torch.distributed.run", "--nproc-per-node", "2", "-m", "normscope", *command, here=here)
    status, out, err = shared.ended()
    assert status == 0, err
    assert err.count("resuming from step 10 of 20") == 1
    assert [row["split"] for row in json.loads(out)] == ["in-distribution", "ood-interpolation", "ood-extrapolation"]
    run_folder = open_run(here / "a")
    assert not begun.folder.exists()
    found = run_folder.table("metrics").to_dict("records"), load_file(run_folder.path / "model.safetensors")
    rows, weights = alone("pre")
    assert_same_training(found, (rows, {name: weights[name] for name in found[1]}))
