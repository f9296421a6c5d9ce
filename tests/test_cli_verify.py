"""The verify command: a table, single claims with their evidence, one JSON document, a run folder, and clear mistakes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import run
from normscope.experiments.result import load
from normscope.runs import open_run
from normscope.theorems import LEDGER, VERDICTS


@pytest.fixture(scope="module")
def records(ledger_run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ledger_run / "printed.json").read_text(encoding="utf-8"))
    return found


def test_json_has_a_record_for_every_statement(records: list[dict[str, Any]]) -> None:
    assert [record["id"] for record in records] == list(LEDGER)
    for record in records:
        assert list(record)[:2] == ["paper", "statement"]
        assert f"{record['paper']}:{record['statement']}" == record["id"]
        assert record["verdict"] in VERDICTS
        assert record["cases"] >= 15
        assert (record["margin"] < 0) == (record["verdict"] == "fails as printed")
        assert record["tested"]
        assert (record["corrected"] is None) == (record["verdict"] != "fails as printed")


def test_the_quick_form_leaves_tables_and_is_quick(ledger_run: Path) -> None:
    folder = open_run(ledger_run)
    assert folder.tables == ["curves", "dials", "groups", "ledger", "margins", "pictures", "positions"]
    assert folder.description["command"] == "verify"
    assert folder.description["configuration"]["statements"] == list(LEDGER)
    assert float((ledger_run / "seconds.txt").read_text()) < 120


def test_sections_have_every_claim_and_its_correction(ledger_run: Path) -> None:
    result = load(ledger_run)
    assert [row[0] for row in result["ledger"].tables[0].rows] == list(LEDGER)
    assert result.findings[0].text == (
        "69 published claims: 43 confirmed, 18 confirmed within the tested range, 8 wrong as printed (corrections below)."
    )
    for id, statement in LEDGER.items():
        if statement.correction is not None:
            section = result[id]
            assert section.title == f"{id} {statement.title}"
            assert f"Corrected: {statement.correction.claim}" in section.text


def test_one_statement_is_shown_with_its_evidence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "verify", "1:7ii", "1:9")
    assert status == 0, err
    plain = " ".join(out.split())
    page = LEDGER["1:7ii"]
    assert page.correction is not None
    assert page.correction.claim in plain
    assert page.correction.why in plain
    assert "kappa_query = " in plain
    assert "2 published claims: 1 confirmed, 1 wrong as printed (corrections below)" in plain
    assert "1:10" not in out
    assert open_run(here / "runs" / "verify").table("ledger")["id"].tolist() == ["1:7ii", "1:9"]


def test_a_claim_has_its_figures(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "verify", "1:7v", "--out", "a")
    assert status == 0, err
    assert set(load("a").figures) == {"curves-1-7v", "margins-1-7v"}
    curves = open_run(here / "a").table("curves")
    assert set(curves["line"]) == {"measured", "½θ²"}


def test_options_of_a_choice_are_distinguished(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "verify", "1:dof")
    assert status == 0
    for strategy in ("No-Norm", "Pre-LayerNorm", "Pre-RMSNorm", "QKV-Norm"):
        assert re.search(rf"^ ?{strategy} +printed +\d+ +1 *$", out, re.MULTILINE), strategy


def test_thorough_tries_more_cases(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for more in ((), ("--thorough",)):
        status, out, _ = run(capsys, "verify", "1:9", "--json", *more)
        assert status == 0
        counts.append(json.loads(out)[0]["cases"])
    assert counts[1] > 5 * counts[0]


def test_the_same_seed_gives_the_same_numbers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = (json.loads(run(capsys, "verify", "1:11", "--json", "--seed", s)[1]) for s in ("1", "1", "2"))
    assert one == same
    assert one != other


def test_a_finished_run_is_not_written_over_unasked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("verify", "1:9", "--json", "--out", "a")
    assert run(capsys, *arguments)[0] == 0
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "--overwrite" in err
    assert run(capsys, *arguments, "--overwrite")[0] == 0


@pytest.mark.parametrize("name", ["2:4.4", "5", "2:4.3iiii", "theorem"])
def test_an_unknown_statement_is_one_line_and_no_folder(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, err = run(capsys, "verify", name)
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert f"no statement '{name}'" in err
    assert not (here / "runs").exists()


def test_help_shows_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "verify", "--help")
    assert status == 0
    assert out.count("normscope verify") >= 4
    for option in ("--thorough", "--seed", "--out", "--json"):
        assert option in out
