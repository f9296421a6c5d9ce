"""Experiments: one settings object gives the function, the command, the run folder and the JSON."""

import inspect
import json
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

import normscope as ns
from helpers.cli import run
from normscope.cli.command import with_options
from normscope.experiments import kind_of, summaries
from normscope.experiments.audit import Audit
from normscope.experiments.progress import Progress, ProgressLines, progress_bar
from normscope.experiments.simulate import Simulate
from normscope.experiments.terminal import Terminal
from normscope.measures.interference import Interference

SMALL = {"tokens": 6, "dim": 8, "time": 1.0, "samples": 3}


class Recorder(Progress):
    """Keeps what a progress bar would show."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[float, float]] = {}

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        self.stages[stage] = (done, total)


@pytest.mark.parametrize("name", list(summaries()))
def test_every_experiment_is_found_by_its_file_and_documented(name: str) -> None:
    kind = kind_of(name)
    assert kind.command == name
    assert kind.usage
    assert len(summaries()[name]) <= 63, "the list of commands cuts longer summaries"
    assert "Example:" in (kind.__doc__ or "")
    for field, about in kind.fields().items():
        assert about.description, f"{name}: {field} has no help"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Simulate(scheme="pre,pre"), "named twice"),
        (lambda: Simulate(scheme="pre", gradient=True), "gradient=True goes back through whole layers: it needs layers=True"),
        (lambda: Simulate(scheme="pre", symmetric=True, start="uniform"), "symmetric=True"),
        (lambda: Simulate(scheme="pre", layers=True, times="0.5"), "every time is a multiple of step=1; 0.5 is not"),
        (lambda: Simulate(scheme="pre", times=[3], time=2), "times= goes up to 3, past time=2"),
        (lambda: Simulate(scheme="pre", times="1,x"), "times: a list of numbers such as 1,5,20 is needed, not '1,x'"),
        (lambda: Simulate(scheme="prr"), "unknown scheme 'prr'; did you mean 'pre'?"),
        (lambda: Simulate(tokns=3), "simulate has no setting 'tokns'; did you mean 'tokens'?"),
        (lambda: Simulate(tokens=0), "tokens=0: should be greater than or equal to 1"),
        (lambda: Simulate(device="tpu"), "device='tpu' is not available"),
        (lambda: Simulate(scheme="post", alpha="linear", **SMALL).run(), "none of the schemes has it"),
        (lambda: Simulate(scheme="ngpt-lerp", alpha="2", **SMALL).run(), "carry must be positive"),
        (lambda: Simulate(scheme="pre", symmetric=True, radius=-1.0, **SMALL).run(), "radius"),
        (lambda: ns.load("nowhere"), "does not exist"),
    ],
)
def test_errors_name_parameters(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ns.InputError) as caught:
        make()
    assert message in str(caught.value)


def test_the_command_line_translates_parameters_to_options() -> None:
    message = "gradient=True needs layers=True, and step= left at 1; save_states=True and time=3 are no reason"
    options = "--gradient needs --layers, and --step left at 1; --save-states and --time 3 are no reason"
    assert with_options(message, Simulate) == options
    assert with_options("choose another out=, or overwrite=True", Simulate) == "choose another --out, or --overwrite"
    assert with_options("save_states: not there", Simulate) == "--save-states: not there"


def test_function_command_and_folder_give_the_same_numbers(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    recorder = Recorder()
    result = ns.simulate(["pre", ns.find_scheme("ngpt")], **SMALL, progress=recorder)
    assert recorder.stages == {"simulating": (10, 10)}
    status, out, err = run(
        capsys, "simulate", "--scheme", "pre,ngpt", "--tokens", "6", "--dim", "8", "--time", "1", "--samples", "3",
        "--out", "run", "--json",
    )  # fmt: skip
    assert status == 0, err
    assert json.loads(out) == result.records
    loaded = ns.load("run")
    assert loaded.summary == result.summary
    pd.testing.assert_frame_equal(loaded.tables["trajectories"], result.tables["trajectories"])
    assert list(loaded.figures) == list(result.figures) == ["cosine", "speed", "rate", "phase", "radius"]
    assert loaded["particles"].title == "Tokens as particles"
    with pytest.raises(ns.InputError, match="did you mean 'radius'"):
        loaded.plot("radus")
    with pytest.raises(ns.InputError, match="no section 'x'; there are: particles"):
        loaded["x"]


def test_a_result_is_reproducible_and_saved_once(here: Path) -> None:
    given = {
        "scheme": "pre,qkv", "start": "gaussian", "weights": "kaiming", "heads": 2, "feedforward": 8, "layers": True,
        "tokens": 6, "dim": 8, "time": 3.0, "times": (3.0,), "gradient": True, "progress": False,
    }  # fmt: skip
    first, second, other = (ns.simulate(**given, seed=seed) for seed in (4, 4, 5))
    for name in ("trajectories", "gradients"):
        assert first.tables[name].equals(second.tables[name])
        assert not first.tables[name].equals(other.tables[name])
    first.save("run")
    with pytest.raises(ns.InputError, match="holds a run already"):
        second.save("run")
    assert second.save("run", overwrite=True).path == here / "run"


def test_a_run_has_the_time_of_its_work_and_not_only_of_its_saving(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worked, began = Simulate.run, list[datetime]()

    def slowly(self: Simulate, progress: Progress, folder: Path | None = None) -> ns.Result:
        began.append(datetime.now(UTC).replace(microsecond=0))
        result = worked(self, progress, folder)
        time.sleep(0.5)
        return result

    before = ns.simulate("post", **SMALL, out="runs/before", progress=False)
    monkeypatch.setattr(Simulate, "run", slowly)
    after = ns.simulate("post", **SMALL, out="runs/after", progress=False)
    later = ns.simulate("post", **SMALL, progress=False).save("runs/later")
    about = [json.loads(Path(str(run.path), "run.json").read_text()) for run in (before, after, later)]
    for each, first in zip(about[1:], began, strict=True):
        assert datetime.fromisoformat(each["started"]) <= first
    assert all(each["seconds"] >= 0.5 for each in about[1:])
    assert 0 < about[0]["seconds"] < 30


def test_a_folder_of_an_earlier_version_gives_its_tables(here: Path) -> None:
    Simulate(scheme="pre", **SMALL).run().save("run")
    description = json.loads((here / "run" / "run.json").read_text(encoding="utf-8"))
    for name in ("summary", "configuration", "tables", "digest"):
        del description[name]
    (here / "run" / "run.json").write_text(json.dumps({**description, "configuration": {}}), encoding="utf-8")
    older = ns.load("run")
    assert list(older.tables) == list(ns.load("run").tables)
    (here / "run" / "trajectories.parquet").unlink()
    with pytest.raises(ns.InputError, match="earlier version of normscope, without 'trajectories'"):
        _ = ns.load("run").figures


def test_a_function_shows_its_settings_and_refuses_too_many_positions() -> None:
    signature = inspect.signature(ns.simulate)
    assert list(signature.parameters)[:2] == ["scheme", "tokens"]
    assert list(signature.parameters)[-3:] == ["progress", "out", "overwrite"]
    assert "tokens: Number of tokens n." in (ns.simulate.__doc__ or "")
    with pytest.raises(TypeError):
        ns.simulate(*range(60))


def test_the_public_names_are_listed_and_unknown_ones_are_not_there() -> None:
    assert {"simulate", "open", "load", "Scheme", "Slots", "train"} <= set(dir(ns))
    with pytest.raises(AttributeError, match="no attribute 'simulatee'"):
        ns.simulatee  # noqa: B018


@pytest.mark.parametrize(
    "command",
    [
        "simulate --scheme SCHEME --tokens 4 --time 24",
        "simulate --scheme SCHEME --tokens 4 --time 24 --layers",
        "simulate --scheme SCHEME --tokens 4 --time 24 --symmetric",
        "ensemble --scheme pre,SCHEME --tokens 4 --dim 4 --time 24 --runs 2",
        "train --preset tiny --scheme SCHEME --set layers=24",
        "train --preset tiny --scheme SCHEME --set encoder_layers=24",
        "advise --depth 24 --width 64 --heads 2 --schemes pre,SCHEME",
        "sweep PLAN --out out",
    ],
)
def test_a_formula_is_checked_at_the_depth_that_runs_before_any_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scheme, plan = tmp_path / "mine.toml", tmp_path / "plan.toml"
    scheme.write_text("[attention]\n[feedforward]\nstep = '1/(20 - layer)'\n", encoding="utf-8")
    plan.write_text("kind = 'train'\npreset = 'tiny'\nscheme = './mine.toml'\n[grid]\nlayers = [2, 24]\n", encoding="utf-8")
    status, _, said = run(capsys, *command.replace("SCHEME", "./mine.toml").replace("PLAN", "plan.toml").split())
    assert status == 2
    expected = "scheme 'mine' cannot run at depth 24: step = '1/(20−(t+1))' is not a finite number at t = 19, layer 19 of 24"
    assert expected in said
    assert len(said.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == [scheme, plan]


def test_log_files_get_a_line_at_intervals_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as quick:
        quick.stage("opening a model", 1)(1)
    assert capsys.readouterr().err == ""  # nothing before the first interval
    lines = ProgressLines(Terminal(sys.stderr), every=0.02)
    advance = lines.stage("one forward pass", 32)
    advance(8)
    time.sleep(0.1)
    lines.message("between")
    lines.end()
    err = capsys.readouterr().err.splitlines()
    assert "between" in err
    assert all(re.fullmatch(r"one forward pass: 8/32 \(25%\) after 0:00, about 0:00 left", line) for line in err[:-1])
    assert len(err) > 2


def test_the_time_left_follows_from_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = ProgressLines(Terminal(sys.stderr))
    advance = lines.stage("layers", 30)
    now[0] += 3600
    assert lines.line() == "layers: 0/30 after 1:00:00"
    advance(10)
    assert lines.line() == "layers: 10/30 (33%) after 1:00:00, about 2:00:00 left"
    lines.end()


def test_an_interrupted_audit_says_what_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told: list[str] = []

    class Listening(Progress):
        def message(self, text: str) -> None:
            told.append(text)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Interference, "observer", lambda *_: None)
        patched.setattr(Interference, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Audit(model="builtin:addition-small-pre", examples=4).run(Listening())
    assert "measures are kept in the cache: " in told[-1]
    kept = told[-1].split("cache: ")[1].split(";")[0].split(", ")
    assert "growth" in kept
    assert "interference" not in kept
    Audit(model="builtin:addition-small-pre", examples=4).run(Listening())
    loaded = told[-1].removeprefix("from the cache of an earlier audit: ").split(" (")[0].split(", ")
    assert sorted(loaded) == sorted(kept)
