"""The advise command: a table, findings, a run folder, one JSON document, one line for every mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import run
from normscope.runs import open_run
from normscope.schemes import NAMED

SHAPE = ("--depth", "2", "--width", "32", "--heads", "4", "--context", "16", "--runs", "2")
FEW = ("--schemes", "pre,post,qkv")


def records_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    status, out, err = run(capsys, "advise", *SHAPE, *arguments, "--json")
    assert status == 0, err
    records: list[dict[str, Any]] = json.loads(out)
    return records


def test_a_run_prints_a_table_and_findings_and_leaves_a_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "advise", *SHAPE, *FEW, "--rank-by", "early,late,diversity,gradient,noise")
    assert status == 0, err
    folder = open_run(here / "runs" / "advise")
    assert out.splitlines()[-1].startswith(str(folder.path))
    assert {"simulation", "theory", "training", "language models"} <= set(folder.table("findings")["basis"])
    assert "more findings in the report." in out
    for row in folder.table("ranks").itertuples(index=False):
        assert f"{row.rank:.1f} ({row.low:.1f}–{row.high:.1f})" in out
    configuration = folder.description["configuration"]
    assert [scheme["name"] for scheme in configuration["schemes"]] == ["pre", "post", "qkv"]
    assert configuration["simulated_width"] == 32


@pytest.mark.usefixtures("here")
def test_json_has_a_record_for_every_scheme_and_is_repeated_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    records = records_of(capsys, *FEW)
    assert sorted(record["scheme"] for record in records) == ["post", "pre", "qkv"]
    qkv = next(record for record in records if record["scheme"] == "qkv")
    assert qkv["criteria"]["noise"]["mean"] == 0
    assert {row["noise"] for row in qkv["noise"]} == {0.01, 0.1}
    assert qkv["theory"][0]["speed"] == "r_j"
    assert qkv["trained"][0]["source"].startswith("docs/results/")
    assert records == records_of(capsys, *FEW)
    assert records != records_of(capsys, *FEW, "--seed", "1")


def test_all_named_schemes_and_a_users_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.toml").write_text('[attention]\ninput = "norm"\nstep = "1/sqrt(layer)"\n', encoding="utf-8")
    records = records_of(capsys, "--schemes", f"{','.join(NAMED)},./mine.toml", "--depth", "1", "--out", "own")
    assert {record["scheme"] for record in records} == {*NAMED, "mine"}
    mine = next(record for record in records if record["scheme"] == "mine")
    assert mine["trained"] == [{"what": "not trained here", "value": "", "source": ""}]
    assert open_run(here / "own").table("layers")["layer"].max() == 1


@pytest.mark.usefixtures("here")
def test_weights_with_the_spectrum_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--schemes", "pre,qkv", "--weights", "spectrum-of", "builtin:addition-small-pre")
    spectral = records_of(capsys, *arguments)
    assert spectral != records_of(capsys, "--schemes", "pre,qkv")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--depth", "3", "--heads", "4"), "--width"),
        ((*SHAPE, "--schemes", "perl"), "did you mean 'peri'"),
        ((*SHAPE, "--schemes", "pre,pre"), "named twice"),
        ((*SHAPE, "--heads", "5"), "cannot be divided among 5 heads"),
        ((*SHAPE, "--weights", "xavier"), "kaiming, gaussian, spectrum-of"),
        ((*SHAPE, "--weights", "spectrum-of"), "needs a model"),
        ((*SHAPE, "gpt2"), "with --weights spectrum-of only"),
        ((*SHAPE, "--rank-by", "speed"), "early, late, diversity, gradient, noise"),
        ((*SHAPE, "--tokens", "17"), "--tokens 17 is more than --context 16"),
        ((*SHAPE, "--simulated-width", "36"), "--simulated-width 36 is more than --width 32"),
        ((*SHAPE, "--norm", "batch"), "rms, layer"),
        ((*SHAPE, "--device", "abacus"), "--device 'abacus' is not available"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    status, out, err = run(capsys, "advise", *arguments)
    assert status == 2
    assert said in err
    assert err.count("\n") == 1
    assert out == ""
    assert not list(here.iterdir())
