"""Hostile files, names and sizes: one line, exit status 2, nothing written, and no waiting."""

import ctypes
import gc
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import normscope as ns
from helpers.cli import run
from normscope.errors import InputError
from normscope.experiments.ensemble import Ensemble
from normscope.experiments.experiment import Experiment
from normscope.experiments.simulate import Simulate
from normscope.experiments.train import Train
from normscope.transformer.files import model_folder

Damage = Callable[[Path], object]


def nested(path: Path) -> None:
    deep = "[" * 5000 + "]" * 5000
    path.write_text(deep if path.suffix == ".json" else f"x = {deep}")


def long_integer(path: Path) -> None:
    digits = "9" * 5000
    path.write_text(f'{{"x": {digits}}}' if path.suffix == ".json" else f"x = {digits}")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


UNREADABLE: dict[str, Damage] = {
    "FIFO": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "folder": Path.mkdir,
    "a terabyte": sparse,
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 9),
}
UNPARSABLE: dict[str, Damage] = {
    "nested": nested,
    "long integer": long_integer,
    "NUL": lambda path: path.write_bytes(b"a\0b"),
    "nonsense": lambda path: path.write_text("]]"),
}
READERS = {
    "mine.toml": ("simulate", "--scheme", "mine.toml"),
    "recipe.toml": ("train", "recipe.toml"),
    "plan.toml": ("sweep", "plan.toml"),
    "text.txt": ("audit", "builtin:addition-small-pre", "--text", "text.txt"),
    "start.npy": ("simulate", "--start", "start.npy"),
    "start.csv": ("simulate", "--start", "start.csv"),
    "start.safetensors": ("simulate", "--start", "start.safetensors"),
    "W.safetensors": ("simulate", "--tokens", "4", "--weights", "W.safetensors"),
    "m.gguf": ("audit", "./m.gguf"),
}


def refused(capsys: pytest.CaptureFixture[str], here: Path, *arguments: str) -> str:
    """The one line by which a command refuses; it leaves nothing behind."""
    before = sorted(here.rglob("*"))
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, ""), err
    line = err.splitlines()[-1]
    assert line.startswith("normscope: "), err
    assert len(err.splitlines()) == 1, err
    assert "unexpected" not in err
    assert len(line) < 600, line
    assert sorted(here.rglob("*")) == before
    return line


@pytest.mark.parametrize("damage", [*UNREADABLE, *UNPARSABLE])
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_cannot_be_read_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str) -> None:
    (UNREADABLE | UNPARSABLE)[damage](here / name)
    refused(capsys, here, *READERS[name])


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "x" * 300, "a\0b"])
@pytest.mark.parametrize("suffix", READERS)
def test_a_name_that_no_file_can_have_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], suffix: str, name: str
) -> None:
    given = f"{name}{Path(suffix).suffix}" if suffix != "m.gguf" else f"./{name}.gguf" if name[0] != "~" else f"{name}.gguf"
    refused(capsys, here, *(given if argument.endswith(suffix) else argument for argument in READERS[suffix]))


@pytest.mark.parametrize("damage", [*UNREADABLE, *UNPARSABLE])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_model_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str) -> None:
    shutil.copytree(model_folder("builtin:addition-small-pre"), here / "model")
    (here / "model" / name).unlink()
    (UNREADABLE | UNPARSABLE)[damage](here / "model" / name)
    for command in ("evaluate", "audit"):
        refused(capsys, here, command, "model")


@pytest.fixture
def two_runs(here: Path) -> Path:
    """A run folder and a damaged-to-be one beside it."""
    ns.simulate("pre", tokens=4, dim=4, time=1, samples=3, device="cpu", progress=False).save(here / "one", formats=())
    shutil.copytree(here / "one", here / "two")
    return here / "two"


def changed(**values: object) -> Damage:
    def write(path: Path) -> None:
        content = json.loads(path.with_name("kept").read_text())
        path.write_text(json.dumps({**content, **values}))

    return write


DESCRIPTIONS: dict[str, Damage] = {
    "a list": lambda path: path.write_text("[]"),
    "versions of another type": lambda path: path.write_text('{"versions": 1}'),
    "another command": changed(command="nonsense"),
    "command of another type": changed(command=["simulate"]),
    "configuration of another shape": changed(configuration={}),
    "seed of another type": changed(seed=[1]),
    "tables of another type": changed(tables=3),
}


@pytest.mark.parametrize("damage", [*UNREADABLE, *UNPARSABLE, *DESCRIPTIONS])
def test_a_damaged_description_of_a_run_is_one_line(two_runs: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    (two_runs / "run.json").rename(two_runs / "kept")
    (UNREADABLE | UNPARSABLE | DESCRIPTIONS)[damage](two_runs / "run.json")
    with pytest.raises(InputError):
        ns.load(two_runs)
    refused(capsys, two_runs.parent, "compare", "one", "two")
    refused(capsys, two_runs.parent, "simulate", "--tokens", "4", "--out", "two")


@pytest.mark.parametrize("damage", [*UNREADABLE, "nonsense", "truncated", "another table"])
def test_a_damaged_table_of_a_run_is_one_line(two_runs: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    table = two_runs / "trajectories.parquet"
    content = table.read_bytes()
    table.unlink()
    others: dict[str, Damage] = {
        "truncated": lambda path: path.write_bytes(content[: len(content) // 2]),
        "another table": lambda path: pd.DataFrame({"x": ["a"]}).to_parquet(path),
    }
    (UNREADABLE | UNPARSABLE | others)[damage](table)
    with pytest.raises(InputError, match="trajectories"):
        ns.load(two_runs)
    refused(capsys, two_runs.parent, "compare", "one", "two")


@pytest.mark.parametrize("damage", [*UNREADABLE, *UNPARSABLE, "points", "name"])
def test_a_damaged_sweep_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    (here / "sweep").mkdir()
    others: dict[str, Damage] = {
        "points": lambda path: path.write_text('{"points": 3}'),
        "name": lambda path: path.write_text('{"points": [{"name": "../../etc"}]}'),
    }
    (UNREADABLE | UNPARSABLE | others)[damage](here / "sweep" / "sweep.json")
    refused(capsys, here, "sweep", "status", "sweep")


TRAIN = ("train", "--preset", "tiny", "--set")
SIZES = [
    ("advise", "--depth", "1000000000", "--width", "64", "--heads", "4"),
    ("advise", "--depth", "4", "--width", "64", "--heads", "4", "--runs", "100000000"),
    ("simulate", "--tokens", "100000", "--dim", "100000"),
    ("simulate", "--samples", "100000000"),
    ("simulate", "--tokens", "4", "--dim", "200000", "--weights", "kaiming"),
    ("simulate", "--tokens", "4", "--dim", "4", "--feedforward", "100000000000"),
    ("ensemble", "--runs", "100000000000"),
    ("ensemble", "--runs", "100000000000", "--chunk", "100000000000"),
    ("ensemble", "--samples", "1000000000"),
    (*TRAIN, "heads=100000", "--set", "dim=2000"),
    (*TRAIN, "batch=100000000000", "--set", "examples=100000000000"),
    (*TRAIN, "examples=100000000000000"),
    (*TRAIN, "integers=[1000]", "--set", "digits=[15]"),
    ("train", "--preset", "tiny", "--processes", "1000000"),
    ("audit", "builtin:addition-small-pre", "--examples", "100000000000"),
    ("stability", "builtin:addition-small-pre", "--examples", "1000000000000000000"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", SIZES, ids=" ".join)
def test_what_does_not_fit_is_refused_with_its_size(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert re.search(r"needs about [\d,.]+ TB of memory, this machine has [\d,.]+ [GM]B free|about \d+ GB", err), err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "--step", "1e-300"), "that is 2e+301 steps, at most 1,000,000"),
        (("simulate", "--time", "1e20"), "--time 1e+20 with --step 0.025: that is 4e+21 steps"),
        (("ensemble", "--step", "1e-300"), "steps, at most 1,000,000"),
        (("ensemble", "--redraw", "1e-300"), "steps, at most 1,000,000"),
        ((*TRAIN, "encoder_layers=1000000000"), "encoder_layers=1000000000: should be less than or equal to 100000"),
        ((*TRAIN, "examples=1e30"), "should be less than or equal to 1000000000000000"),
        (("simulate", "--tokens", "9" * 40), "should fit into 64 bits"),
        (("simulate", "--tokens", "9" * 5000), "Invalid value for '--tokens'"),
    ],
)
def test_endless_work_is_refused_with_the_count(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in refused(capsys, here, *arguments)


CELLS = [
    ('kind = "train"\npreset = "tiny"', "seed = [1, -1]", "seed"),
    ('kind = "train"\npreset = "tiny"', "offsets = [1, 1e30]", "offsets"),
    ('kind = "train"\npreset = "tiny"', "batch = [4, 100000000000]\nexamples = [100000000000]", "needs about"),
    ('kind = "stability"\nmodel = "builtin:addition-small-pre"', "draws = [1, 1e30]", "draws"),
    ('kind = "simulate"', "tokens = [4, 1e30]", "tokens"),
    ('kind = "simulate"', 'start = ["uniform", "unifrom"]', "did you mean 'uniform'"),
    ('kind = "simulate"', 'weights = ["identity", "nowhere.safetensors"]', "no weights file"),
    ('kind = "simulate"\nweights = "kaiming"', "heads = [1, 7]", "shared among 7 heads"),
    ('kind = "simulate"\nscheme = "ngpt"', 'alpha = ["1", "1/(t-20)"]', "alpha"),
    ('kind = "evaluate"', 'model = ["builtin:addition-small-pre", "builtin:nothing"]', "no model"),
    ('kind = "evaluate"\nmodel = "builtin:addition-small-pre"', 'split = ["in-distribution", "nonsense"]', "nonsense"),
    ('kind = "audit"\nmodel = "builtin:addition-small-pre"', 'text = ["nowhere.txt"]', "no text"),
    ('kind = "ensemble"\nruns = 2', "samples = [2, 1000000000]", "needs about"),
]


@pytest.mark.parametrize(("fixed", "grid", "message"), CELLS, ids=[grid for _, grid, _ in CELLS])
def test_every_cell_of_a_plan_is_checked_before_a_folder_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], fixed: str, grid: str, message: str
) -> None:
    (here / "plan.toml").write_text(f"{fixed}\n[grid]\n{grid}\n")
    assert message in refused(capsys, here, "sweep", "plan.toml", "--out", "sweep")


def test_a_chain_of_schemes_has_an_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(40):
        (here / f"s{i}.toml").write_text(f'until = 0.5\nthen = "./s{i + 1}.toml"\n[attention]\ninput = "norm"\n')
    assert "'then'" in refused(capsys, here, "simulate", "--scheme", "./s0.toml")


def peak_of(compute: Callable[[], object]) -> float:
    """Bytes that a computation adds to what this process holds, at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")

    def held(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return 1024 * int(found[1])

    before = held("VmRSS")
    compute()
    return held("VmHWM") - before


ESTIMATES: dict[str, Callable[[], Experiment]] = {
    "states": lambda: Simulate(scheme="pre", tokens=700, dim=700, time=0.025, samples=2, device="cpu"),
    "weights": lambda: Simulate(scheme="pre", tokens=8, dim=2000, weights="kaiming", time=0.025, samples=2, device="cpu"),
    "chunk": lambda: Ensemble(scheme="pre,post", runs=16, tokens=32, dim=512, time=0.1, samples=2, device="cpu"),
    "model": lambda: Train(
        preset="tiny", set={"examples": 4, "batch": 2, "test_examples": 2, "dim": 512, "feedforward": 4096}, device="cpu"
    ),
}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of a process is not reset here")
@pytest.mark.parametrize("name", ESTIMATES)
def test_an_estimate_is_right_to_a_factor_of_about_two(name: str) -> None:
    experiment = ESTIMATES[name]()
    estimate = sum(experiment.memory().values())
    assert 0.4 < peak_of(experiment.run) / estimate < 2.5, f"{estimate / 1e6:.0f} MB"
