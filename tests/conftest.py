"""What all tests share: one thread each, signals as a terminal gives them, and the cases of the fuzzer."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import runtime_types

if TYPE_CHECKING:
    from helpers.browser import Tab

os.environ["OMP_NUM_THREADS"] = "1"  # tests are small, and on a busy machine waiting threads cost time
os.environ["NUMBA_OPT"] = "0"  # UMAP compiles for longer than it runs

gc.disable()  # until all tests are collected

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one

with suppress(ImportError):  # property tests draw the same cases every time
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay to the end: a collection that visits them costs a third of a second
    gc.enable()


def pytest_runtest_setup() -> None:
    runtime_types.begin_test()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", choices=("some", "all"), default="some", help="which cases of the fuzzer run")
    parser.addoption("--fuzz-seed", type=int, default=0, help="seed of the values that the fuzzer draws")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cases of the fuzzer: a sample of them, or all."""
    if "case" in metafunc.fixturenames and metafunc.module.__name__ == "test_fuzz":
        from helpers.fuzz import cases, sample

        seed = metafunc.config.getoption("--fuzz-seed")
        chosen = sample(seed) if metafunc.config.getoption("--fuzz") == "some" else cases(seed)
        metafunc.parametrize("case", chosen, ids=[case.name.replace(" ", "-") for case in chosen])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run a command in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def tab() -> "Iterator[Tab]":
    """A page of a browser for the tests of a module."""
    from helpers.browser import open_tab

    with open_tab() as opened:
        yield opened


@pytest.fixture(scope="session")
def ledger_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the whole ledger in its quick form, with what was printed and how long a processor took.

    Made once for all tests and their processes, in one of its own, where no run-time type checks slow the flows down.
    """
    from filelock import FileLock

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "ledger"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            command = [sys.executable, "-c", "from normscope.cli import main; main()"]
            arguments = ["verify", "--json", "--out", str(folder)]
            before = os.times().children_user
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            (folder / "printed.json").write_text(done.stdout, encoding="utf-8")
            (folder / "seconds.txt").write_text(str(os.times().children_user - before), encoding="utf-8")
    return folder
