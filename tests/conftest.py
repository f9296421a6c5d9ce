"""One thread for every test and every process it starts: they are small, and on a busy machine waiting threads cost time."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"

with suppress(ImportError):  # property tests draw the same cases every time
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run a command in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
