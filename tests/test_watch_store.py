"""Where snapshots go: nothing on disk is lost, doubled or unreadable, whatever ends the process; trackers get the scalars."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import normscope as ns
from helpers.watched import ABOUT, snapshot, watched_folder
from normscope.runs import GrowingRun, growth, new_run, open_run
from normscope.runs.segments import FOLDER, Session, read_segments, segments_of
from normscope.watch.destinations import destination_of
from normscope.watch.snapshot import Snapshot
from normscope.watch.trackers import scalars_of

_APPENDING = """
import sys; import pandas as pd
from normscope.runs import GrowingRun
run = GrowingRun.begin(sys.argv[1], "watch", {}, resume=True)
print("begun", flush=True)
for step in range(100_000):
    rows = [step] * 3
    run.append({"a": pd.DataFrame({"step": rows, "row": range(3)}), "b": pd.DataFrame({"step": [step], "text": [str(step)]})})
    print(step, flush=True)
"""


def frames(*steps: int, columns: tuple[str, ...] = ("step", "row")) -> dict[str, pd.DataFrame]:
    return {name: pd.DataFrame({column: list(steps) for column in columns}) for name in ("a", "b")}


def steps_of(folder: Path) -> list[int]:
    """The steps in a folder, the same in all tables."""
    tables = read_segments(folder)
    (steps,) = {tuple(table["step"]) for table in tables.values()} or {()}
    return list(steps)


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_loses_at_most_the_last_append(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-c", _APPENDING, tmp_path / "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(random.Random(seed).uniform(0.05, 0.6))
        process.send_signal(signal.SIGKILL)
        reported = [int(line) for line in process.stdout if line.endswith("\n")]
    tables = open_run(tmp_path / "run").all_tables()
    last = reported[-1] if reported else -1
    steps = tables["b"]["step"].tolist() if tables else []
    assert steps == list(range(len(steps)))
    assert len(steps) - 1 in (last, last + 1)  # the last line may not have been printed yet
    assert tables.get("b", pd.DataFrame({"text": []}))["text"].tolist() == [str(step) for step in steps]
    assert tables.get("a", pd.DataFrame({"step": []}))["step"].tolist() == [step for step in steps for _ in range(3)]
    assert growth(tmp_path / "run") == "interrupted"


class StoppedError(Exception):
    """Takes the place of a kill."""


def interrupted(work: Callable[[], None], at: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the work was stopped before its ``at``-th rename or removal."""
    count = iter(range(10_000))

    def stopping(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if next(count) == at:
                raise StoppedError
            return call(*arguments, **options)

        return counted

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", stopping(Path.rename))
        patched.setattr(os, "unlink", stopping(os.unlink))
        patched.setattr(os, "rmdir", stopping(os.rmdir))
        try:
            work()
        except StoppedError:
            return True
    return False


def test_merging_can_stop_before_every_rename_and_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    base.mkdir()
    session = Session(base)
    for step in range(16):
        session.append(frames(step))
    session.append(frames(16))
    at, stopped = 0, True
    while stopped:
        copy = tmp_path / str(at)
        shutil.copytree(base, copy)
        again = Session(copy)
        again.number, again.appended = session.number, session.appended
        stopped = interrupted(again.merge, at, monkeypatch)
        assert steps_of(copy) == list(range(17))
        Session(copy).append(frames(17))  # the next process cleans up and goes on
        assert steps_of(copy) == list(range(18))
        assert len(os.listdir(copy / FOLDER)) == len(segments_of(copy))
        at += 1
    assert at > 5


def test_few_segments_are_left_of_many_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.runs.segments._MERGED", 3)
    session, most = Session(tmp_path), 0
    for step in range(60):
        session.append({"a": pd.DataFrame({"step": [step]})})
        most = max(most, len(segments_of(tmp_path)))
    assert most <= 2 * 4  # two of each size, 1, 3, 9, 27
    assert steps_of(tmp_path) == list(range(60))
    session.merge()
    (whole,) = segments_of(tmp_path)
    assert (whole.first, whole.last) == (1, 60)


def test_later_rows_win_where_a_resumed_run_repeats_steps(tmp_path: Path) -> None:
    folder = watched_folder(tmp_path / "run", range(0, 100, 10), seed=1, alarms=(80,))
    assert growth(folder) == "finished"
    assert "alarms" in open_run(folder).tables
    watched_folder(folder, range(50, 80, 10), seed=2, resume=True)
    table = open_run(folder).all_tables()["layers"]
    assert table["step"].drop_duplicates().tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    for step, seed in ((40, 1), (50, 2)):
        expected = snapshot(step, seed=seed).tables["layers"]
        rows = table[table["step"] == step].reset_index(drop=True)
        pd.testing.assert_frame_equal(rows[expected.columns], expected, check_dtype=False)
    assert open_run(folder).all_tables()["alarms"].empty  # that of step 80 was of the other past


def test_a_number_that_is_logged_later_is_a_column_with_gaps(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.append({"a": pd.DataFrame({"step": [0]})})
    session.append({"a": pd.DataFrame({"step": [1], "rate": [0.5], "note": ["x"]})})
    session.merge()
    table = read_segments(tmp_path)["a"]
    assert table["rate"].isna().tolist() == [True, False]
    assert table["note"].iloc[1] == "x"


def test_a_reader_sees_a_prefix_at_every_moment(tmp_path: Path) -> None:
    run, ended = GrowingRun.begin(tmp_path / "run", "watch", {}), threading.Event()

    def write() -> None:
        for step in range(60):
            run.append(frames(step))
        ended.set()

    thread, seen = threading.Thread(target=write), [0]
    thread.start()
    while not ended.is_set():
        steps = steps_of(tmp_path / "run")
        assert steps == list(range(len(steps)))
        assert len(steps) >= seen[-1]
        seen.append(len(steps))
    thread.join()
    assert len(set(seen)) > 2
    assert steps_of(tmp_path / "run") == list(range(60))
    run.close()


def test_one_process_writes_at_a_time_and_a_fork_does_not_count(tmp_path: Path) -> None:
    run = GrowingRun.begin(tmp_path / "run", "watch", {})
    assert growth(tmp_path / "run") == "running"
    with pytest.raises(ns.InputError, match=r"this process writes to .* already: close that run first"):
        GrowingRun.begin(tmp_path / "run", "watch", {}, resume=True)
    begin = f"from normscope.runs import GrowingRun; GrowingRun.begin({str(tmp_path / 'run')!r}, 'watch', {{}}, resume=True)"
    other = subprocess.run([sys.executable, "-c", begin], capture_output=True, text=True, check=False)
    assert "another process writes to" in other.stderr
    (waiting, ending), (ready, begun) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # as a process that loads data does: it outlives the one that is watched
        os.close(ending)
        os.write(begun, b".")
        os.read(waiting, 1)
        os._exit(0)
    os.read(ready, 1)
    run.release()
    assert growth(tmp_path / "run") == "interrupted"
    GrowingRun.begin(tmp_path / "run", "watch", {}, resume=True).close()
    for pipe in (waiting, ending, ready, begun):
        os.close(pipe)
    os.waitpid(child, 0)


def simulated(path: Path) -> None:
    with new_run(path, "simulate", {}):
        pass


def refused() -> Iterator[tuple[str, Callable[[Path], None], str]]:
    yield "run", lambda path: watched_folder(path, [0]) and None, "holds a run already; choose another to=, or resume=True"
    yield "run", lambda path: path.mkdir() or ((path / "mine.txt").write_text("x") and None), "exists and is not a run folder"
    yield "run", lambda path: path.write_text("x") and None, "to="
    yield "run", lambda path: simulated(path), "holds a run of simulate"
    yield "x" * 300, lambda path: None, "File name too long"


@pytest.mark.parametrize(("name", "prepare", "message"), list(refused()))
def test_a_folder_that_cannot_be_used_is_refused_at_the_beginning(
    tmp_path: Path, name: str, prepare: Callable[[Path], None], message: str
) -> None:
    prepare(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ns.InputError, match=message):
        destination_of(str(tmp_path / name))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("/proc/1/watched", "cannot .*; choose another to="),
        (3, "to= takes a run folder, 'tensorboard', 'wandb', 'mlflow', a callable, or a list, not 3"),
        ("tensorbord", "did you mean 'tensorboard'"),
        (["wandb", 4.0], "not 4.0"),
    ],
)
def test_what_is_no_destination_is_refused(to: Any, message: str) -> None:
    with pytest.raises(ns.InputError, match=message):
        destination_of(to)


def test_a_run_without_a_row_is_begun_again(tmp_path: Path) -> None:
    watched_folder(tmp_path / "run", [])
    assert open_run(tmp_path / "run").all_tables() == {}
    watched_folder(tmp_path / "run", [0])
    (tmp_path / "killed" / FOLDER).mkdir(parents=True)  # before run.json was written
    (tmp_path / "killed" / "lock").touch()
    watched_folder(tmp_path / "killed", [0])


def test_another_model_does_not_resume(tmp_path: Path) -> None:
    watched_folder(tmp_path / "run", [0])
    with pytest.raises(ns.InputError, match=r"with layers 3, not 5; choose another to="):
        destination_of(tmp_path / "run", resume=True).begin({**ABOUT, "layers": 5})
    watched_folder(tmp_path / "run", [10], resume=True)
    watched_folder(tmp_path / "new", [10], resume=True)  # a script that may be restarted says so the first time, too


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ns.InputError, match=rf"to='{name}' needs {name}; pip install 'normscope\[watch\]'"):
            destination_of(name)


def test_snapshots_are_written_within_seconds_and_without_waiting(tmp_path: Path) -> None:
    destination = destination_of(tmp_path / "run")
    destination.begin(ABOUT)
    began = time.perf_counter()
    for step in range(20):
        destination.write(snapshot(step))
    assert time.perf_counter() - began < 1.0  # most of it makes the snapshots
    deadline = time.monotonic() + 20
    while len(open_run(tmp_path / "run").all_tables().get("steps", ())) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    destination.close()
    assert growth(tmp_path / "run") == "finished"


def test_nothing_is_lost_where_the_interpreter_exits_without_close(tmp_path: Path) -> None:
    script = (
        "import sys, torch, normscope as ns; from transformers import LlamaConfig, LlamaForCausalLM\n"
        "sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)\n"
        "model = LlamaForCausalLM(LlamaConfig(**sizes))\n"
        "watch = ns.watch(model, probe=torch.zeros(2, 4, dtype=torch.long), every=2, to=sys.argv[1])\n"
        "for _ in range(6): watch.step(loss=1.0)\n"
        "watch.steps = 8; watch._launch(2.0, {})  # as on a GPU, whose numbers are still on their way\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "run"], check=True)
    steps = open_run(tmp_path / "run").all_tables()["steps"]
    assert list(zip(steps["step"], steps["loss"], strict=True)) == [(1, 1.0), (2, 1.0), (4, 1.0), (6, 1.0), (8, 2.0)]
    assert growth(tmp_path / "run") == "finished"


def test_several_destinations_get_every_snapshot_and_one_that_fails_stops_none(tmp_path: Path) -> None:
    taken: list[Snapshot] = []

    def fails(_: Snapshot) -> None:
        raise ZeroDivisionError

    destination = destination_of([fails, str(tmp_path / "run"), taken.append])
    destination.begin(ABOUT)
    for step in range(3):
        with pytest.raises(ZeroDivisionError):
            destination.write(snapshot(step))
    destination.close()
    assert [item.step for item in taken] == open_run(tmp_path / "run").all_tables()["steps"]["step"].tolist() == [0, 1, 2]


def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = destination_of(tmp_path / "run")
    destination.begin(ABOUT)
    with monkeypatch.context() as patched:
        patched.setattr(Session, "append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        destination.write(snapshot(0))
        time.sleep(0.3)
        with pytest.raises(OSError, match="No space"):
            destination.write(snapshot(1))
    destination.close()
    assert open_run(tmp_path / "run").all_tables()["steps"]["step"].tolist() == [0, 1]


def test_a_merge_that_fails_repeats_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run = GrowingRun.begin(tmp_path / "run", "watch", {})
    monkeypatch.setattr("normscope.runs.segments._MERGED", 2)
    monkeypatch.setattr(Session, "_merge", full)
    for step in range(5):
        run.append(frames(step))
    run.close()
    assert steps_of(tmp_path / "run") == list(range(5))
    assert growth(tmp_path / "run") == "finished"


def test_names_of_scalars_are_stable_and_heads_are_aggregated() -> None:
    taken = snapshot(10, alarm="logits grow")
    scalars, tables = scalars_of(taken), taken.tables
    assert scalars["normscope/loss"] == tables["steps"]["loss"][0]
    assert scalars["normscope/layers/norm/03"] == tables["layers"]["norm"][3]
    assert "normscope/layers/update/03" not in scalars  # not a number after the last layer
    logits = tables["heads"].groupby("layer")["logit"]
    assert scalars["normscope/heads/logit_max/01"] == logits.max()[1]
    assert scalars["normscope/heads/logit_mean/01"] == pytest.approx(logits.mean()[1])
    assert scalars["normscope/sublayers/update/02_attention"] == tables["sublayers"]["update"][4]
    assert scalars["normscope/norms/gain/layer 2 attention input"] == tables["norms"]["gain"][2]
    assert scalars["normscope/scales/mean/alpha"] == tables["scales"]["mean"][0]
    assert scalars["normscope/alarms"] == 1
    assert scalars["normscope/faults"] == 0


def test_tensorboard_gets_the_scalars_in_the_run_folder_or_in_a_writer(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    mine = SummaryWriter(str(tmp_path / "mine"))
    destination = destination_of(["tensorboard", mine, tmp_path / "run"])
    destination.begin(ABOUT)
    for step in (0, 10):
        destination.write(snapshot(step, alarm="logits grow"))
    destination.close()
    mine.add_scalar("still/open", 1.0, 0)
    mine.close()
    for folder in (tmp_path / "run" / "tensorboard", tmp_path / "mine"):
        log = EventAccumulator(str(folder)).Reload()
        events = log.Scalars("normscope/layers/norm/02")
        assert [event.step for event in events] == [0, 10]
        assert events[1].value == pytest.approx(snapshot(10).tables["layers"]["norm"][2])
        assert "normscope/alarm/text_summary" in log.Tags()["tensors"]


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: a log of LevelDB, blocks of 32 KiB of pieces with checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) < 7 and left:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + length > len(data):  # still being written
            return
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def wandb_rows(file: Path) -> list[dict[str, float]]:
    logged = [record.history.item for record in wandb_records(file) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "".join(item.nested_key): float(item.value_json) for item in items} for items in logged]


def test_wandb_gets_the_scalars_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    destination = destination_of("wandb")
    destination.begin(ABOUT)
    for step in (0, 10):
        destination.write(snapshot(step))
    destination.close()
    assert wandb.run is None  # it was started here, and is finished
    (file,) = tmp_path.rglob("*.wandb")
    deadline = time.monotonic() + 60  # wandb's own process writes the file, and may do so after finish() has returned
    while len(rows := wandb_rows(file)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [row["normscope/step"] for row in rows] == [0, 10]
    assert rows[1]["normscope/layers/norm/02"] == pytest.approx(snapshot(10).tables["layers"]["norm"][2])


def test_mlflow_gets_the_metrics_of_the_active_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store that mlflow-skinny brings
    try:
        mlflow.set_tracking_uri("nothing://there")
        with pytest.raises(ns.InputError, match="to='mlflow' cannot start a run: set MLFLOW_TRACKING_URI to a server"):
            destination_of("mlflow").begin(ABOUT)
        mlflow.set_tracking_uri((tmp_path / "store").as_uri())
        with mlflow.start_run() as run:
            destination = destination_of("mlflow")
            destination.begin(ABOUT)
            for step in (0, 10):
                destination.write(snapshot(step, alarm="logits grow"))
            destination.close()
            assert mlflow.active_run() is not None  # it is the user's
        client = mlflow.MlflowClient()
        history = client.get_metric_history(run.info.run_id, "normscope/layers/norm/02")
        assert [metric.step for metric in history] == [0, 10]
        assert history[1].value == pytest.approx(snapshot(10).tables["layers"]["norm"][2])
        data = client.get_run(run.info.run_id).data
        assert data.params["normscope.layers"] == "3"
        assert data.tags["normscope.alarm.10"] == "logits grow at layer 1."
    finally:
        mlflow.set_tracking_uri(None)
