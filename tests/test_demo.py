"""The demo: other experiments one after the other, on one page, resumed after those that are complete."""

import re
from pathlib import Path

import pytest

from helpers.browser import open_tab
from helpers.cli import run
from normscope.experiments.demo import members_of
from normscope.experiments.progress import Progress
from normscope.experiments.result import load
from normscope.experiments.settings import SIX_SCHEMES
from normscope.experiments.train import Train

DEMO = ("demo", "builtin:addition-small-pre", "--out", "run")


def test_an_interrupted_demo_resumes_after_what_is_complete_and_is_one_page(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An audit, the schemes, two trainings and the claims; with fewer examples, runs and claims than ``make demo`` has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    for name, value in (("_EXAMPLES", 2048), ("_TESTS", 16), ("_RUNS", 4), ("_CLAIMS", ("2:4.1",))):
        monkeypatch.setattr(f"normscope.experiments.demo.{name}", value)

    def interrupted(self: Train, progress: Progress, folder: Path | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Train, "run", interrupted)
        status, out, err = run(capsys, *DEMO)
    assert (status, out) == (130, ""), err
    assert not (here / "run").exists()

    status, out, err = run(capsys, *DEMO)
    assert status == 0, err
    assert re.findall(r"complete already: (\S+)", err) == ["audit", "simulation", "ensemble"]
    result = load(here / "run")
    assert set(members_of(result)) == {"audit", "simulation", "ensemble", "pre", "qkv", "claims"}
    assert result.tables["pre.metrics"]["examples"].max() == 2048
    report = here / "run" / "report.html"
    assert out.splitlines()[-1] == str(report)
    page = report.read_text(encoding="utf-8")
    for name in (*SIX_SCHEMES.split(","), "Training, scheme by scheme", "2:4.1ii"):
        assert name in page
    assert [section.name.partition("-")[0] for section in result.sections][-1] == "claims"
    assert all(finding.figure is None or finding.figure in result.figures for finding in result.findings)
    assert not list(here.glob(".run*"))

    status, _, err = run(capsys, *DEMO)
    assert status == 2
    assert "--overwrite" in err
    with open_tab() as tab:
        tab.open(report)
        assert not tab.errors
        anchors = set(re.findall(r'href="#([^"$]+)"', page))  # a script has one with $
        assert all(tab.run(f"document.getElementById('{anchor}') !== null") for anchor in anchors)
