"""Small plans, and what tests of sweeps do with their folders and processes."""

import io
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from normscope.cli import main
from normscope.runs import open_run

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
        models = [list((folder / "runs" / name).glob("model.safetensors")) for folder in (one, other)]
        assert len(models[0]) == len(models[1])
        if models[0]:
            weights, others = (load_file(files[0]) for files in models)
            assert weights.keys() == others.keys()
            assert all(torch.equal(weights[key], others[key]) for key in weights)


def wait_for(ready: Callable[[], Any], seconds: float = 120.0) -> Any:
    """What ``ready`` returns, once that is something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = ready()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"nothing after {seconds:g} s")


def alive(process: int | str) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
