"""Hostile files, names and sizes: one line, exit status 2, nothing written, and no waiting."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import normscope as ns
from helpers.cli import run
from normscope.errors import InputError
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
