"""Commands that are killed at random moments: a sample; ``make kills`` runs all."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from helpers.kills import Killer, Problem, digest
from normscope.runs import new_run


def test_killed_commands_leave_nothing_and_resume() -> None:
    command = [sys.executable, "-m", "helpers.kills", "--kills", "4", "--commands", "ensemble,train", "--seed", "1"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[:3] == ["all", "4", "kills"]


@pytest.mark.parametrize(
    ("name", "number", "status", "errors"),
    [
        ("simulate", signal.SIGTERM, 1, ""),
        ("simulate", signal.SIGINT, 143, ""),
        ("simulate", signal.SIGINT, 130, "Traceback (most recent call last)"),
        ("simulate", signal.SIGINT, 130, "unexpected KeyboardInterrupt"),
        ("simulate", signal.SIGINT, 130, "interrupted; the same command resumes"),
        ("train", signal.SIGTERM, 143, "terminated"),
    ],
)
def test_a_wrong_end_is_noticed(name: str, number: signal.Signals, status: int, errors: str, tmp_path: Path) -> None:
    with pytest.raises(Problem):
        Killer(tmp_path, random.Random(0))._check_end(name, number, status, errors)


@pytest.mark.parametrize("left", [[], [".it.partial-01234567"], [".it.unfinished-0123"], ["it", "it-2"]])
def test_what_is_left_is_noticed(left: list[str], tmp_path: Path) -> None:
    with pytest.raises(Problem):
        Killer(tmp_path, random.Random(0))._check_left("simulate", left)


def test_folders_with_different_numbers_differ(tmp_path: Path) -> None:
    for name, value, clock in (("a", 1.0, 1.0), ("b", 1.0, 2.0), ("c", 1.0 + 2**-52, 1.0)):
        with new_run(tmp_path / name, "demo", {}) as run:
            run.write_table("t", pd.DataFrame({"x": [value], "seconds": [clock]}))
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")
    (tmp_path / "a" / "run.json").unlink()
    assert digest(tmp_path / "a") == "no run.json in a"
