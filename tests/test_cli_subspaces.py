"""subspaces as a user meets it: a run folder, one JSON document, a page, and one line for every mistake."""

import json
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cli_run import run
from helpers.models import GROUPED, built, opened_smollm2, word_tokenizer
from helpers.pages import read_page
from normscope.cli import main
from normscope.report.subspaces import subspaces_sections
from normscope.results import Chart, Panels
from normscope.runs import RunFolder, open_run
from normscope.subspaces import MEASURES

PRE, QKV = "builtin:addition-small-pre", "builtin:addition-small-qkv"
FEW = ("--examples", "12")
SMALL = ("--types", "5")
Run = tuple[RunFolder, list[dict[str, Any]]]


def made(folder: Path, *arguments: str) -> Run:
    """A run folder, and the records that were printed."""
    out = StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as left:
        main(["subspaces", *arguments, "--json", "--out", str(folder)])
    assert left.value.code in (0, None)
    return open_run(folder), json.loads(out.getvalue())


@pytest.fixture(scope="module")
def model_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made(tmp_path_factory.mktemp("model") / "a", PRE, *FEW)


@pytest.fixture(scope="module")
def world_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made(tmp_path_factory.mktemp("world") / "a", "world", *SMALL, "--schemes", "pre,qkv")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random Llama and a tokenizer of seventeen words."""
    folder = tmp_path_factory.mktemp("decoder")
    built("LlamaConfig", GROUPED).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a page: its figures take longer than what is measured."""
    monkeypatch.setattr("normscope.report.subspaces.write_subspaces_report", lambda *arguments: None)


def test_a_model_leaves_tables_pictures_and_a_page(model_run: Run) -> None:
    folder, _ = model_run
    assert folder.tables == sorted(["findings", "overlaps", *MEASURES])
    assert folder.description["command"] == "subspaces"
    assert folder.description["configuration"] | {"tokens": 0} == {
        "model": PRE,
        "scheme": "pre",
        "text": None,
        "rows": 12,
        "tokens": 0,
        "measures": list(MEASURES),
    }
    page = read_page(folder.path / "report.html")
    for title in ("Interference", "Do heads read inputs of constant norm?", "Are input subspaces orthogonal?", "Rank of W_QK"):
        assert f"{title}\n" in page.text
    drawn = {"interference", "interference-keys", "interference-moved", "rank", "angles-keys", "spheres-queries"}
    assert drawn <= set(page.figures)


def test_records_of_a_model_are_its_tables(model_run: Run) -> None:
    folder, records = model_run
    assert all(list(record)[:3] == ["measure", "layer", "head"] for record in records)
    by_measure = {
        name: [record for record in records if record["measure"] == measure]
        for name, measure in {"rank": "rank", "spheres": "sphere", "angles": "angle", "interference": "interference"}.items()
    }
    assert sum(map(len, by_measure.values())) == len(records)
    for name, own in by_measure.items():
        table = folder.table(name)
        assert len(own) == len(table)
        for column in table.columns.difference(["layer", "head"]):
            wanted = [None if pd.isna(value) else value for value in table[column]]
            assert [record[column] for record in own] == wanted
    assert {(record["layer"], record["head"]) for record in by_measure["interference"]} == {
        (layer, head) for layer in range(4) for head in range(4)
    }
    assert {(record["place"], record["side"]) for record in by_measure["spheres"]} == {
        (place, side) for place in ("before", "after") for side in ("queries", "keys")
    }
    assert {(record["place"], record["exchanged"]) for record in by_measure["interference"]} == {
        (place, exchanged) for place in ("before", "after") for exchanged in ("queries", "keys", "both")
    }


def test_a_run_prints_its_layers_its_findings_and_where_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "subspaces", QKV, *FEW)
    assert status == 0, err
    folder = open_run(here / "runs" / "subspaces")
    assert out.splitlines()[-1] == str(folder.path / "report.html")
    said = folder.table("findings")["text"].tolist()
    assert all(text in out for text in said)
    assert any(text.startswith("No interference") for text in said)
    assert "change before norm" in out
    assert "nan" not in out
    assert "there is nothing to draw" in (folder.path / "report.html").read_text()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("measure", ["rank", "angles,spheres", "interference"])
def test_only_what_is_asked_for_is_measured(here: Path, capsys: pytest.CaptureFixture[str], measure: str) -> None:
    status, out, err = run(capsys, "subspaces", PRE, *FEW, "--measure", measure)
    assert status == 0, err
    wanted = set(measure.split(",")) | ({"overlaps"} if "angles" in measure else set())
    assert set(open_run(here / "runs" / "subspaces").tables) == wanted | {"findings"}
    assert "layer" in out


@pytest.mark.usefixtures("no_pictures")
def test_the_seed_says_what_is_read_and_who_is_exchanged(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("subspaces", PRE, *FEW, "--measure", "interference", "--json", "--seed")
    outputs = [run(capsys, *arguments, seed)[1] for seed in ("3", "3", "4")]
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_world_leaves_tables_and_the_circuit_in_one_look(world_run: Run) -> None:
    folder, records = world_run
    assert folder.tables == ["curves", "findings", "points", "selections", "worlds"]
    assert folder.description["configuration"] == {"model": "world", "schemes": ["pre", "qkv"], "types": 5}
    page = read_page(folder.path / "report.html")
    for title in ("The induction circuit", "Constructed worlds"):
        assert f"{title}\n" in page.text
    assert "by Theorem 7" in page.text
    assert set(page.figures) == {"circuit", "circuit-angle", "circuit-spread"}
    points = [record for record in records if record["measure"] == "breaking point"]
    assert {record["scheme"] for record in points} == {"pre", "qkv"}
    for record in points:
        assert (record["predicted"] is None) == (record["observed"] is None)
        assert record["predicted"] is None or abs(record["predicted"] - record["observed"]) < 1e-8
        assert record["scheme"] != "qkv" or record["observed"] is None
    worlds = [record for record in records if record["measure"] == "interference"]
    assert max(abs(record["before"] - record["predicted"]) for record in worlds) < 1e-12
    assert max(record["before"] for record in worlds if record["scheme"] == "qkv") < 1e-12


def test_the_circuit_has_a_panel_for_each_scheme_and_world(world_run: Run) -> None:
    tables = {name: world_run[0].table(name) for name in ("points", "curves", "selections")}
    (section,) = subspaces_sections(tables, "")
    panels, rows = section.figures["circuit"], tables["selections"]
    assert isinstance(panels, Panels)
    assert panels.columns == rows["world"].nunique()
    right = rows[rows["selected"] == rows["wanted"]].groupby(["scheme", "world"], sort=False).size()
    for panel, (scheme, world) in zip(panels.figures, product(("pre", "qkv"), rows["world"].drop_duplicates()), strict=True):
        assert panel.title == f"{scheme}, {world}: {right.get((scheme, world), 0)} of 5 right"
        assert isinstance(panel, Chart)
        assert sum(len(line.x) for line in panel.lines[:2]) == 5


def test_a_world_prints_theory_beside_what_was_seen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text('name = "mine"\n[attention]\ninput = "norm"\nheads = "k"\n')
    status, out, err = run(capsys, "subspaces", "world", *SMALL, "--schemes", "pre,./mine.toml")
    assert status == 0, err
    assert "breaks at, by Theorem 7" in out
    assert "mine: no interference in orthogonal spheres; elsewhere scores change" in out  # queries are not normalised
    assert "mine: the induction circuit holds down to 5°" in out
    assert "pre: the induction circuit breaks at" in out


@pytest.mark.usefixtures("no_pictures")
def test_a_text_of_ones_own_is_read(here: Path, decoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.txt").write_text("the cat sat on a mat " * 4)
    status, out, err = run(
        capsys, "subspaces", str(decoder), "--text", "mine.txt", "--tokens", "9", "--measure", "interference"
    )
    assert status == 0, err
    assert open_run(here / "runs" / "subspaces").description["configuration"]["tokens"] == 9
    assert "Interference: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PRE, "--measure", "sphers"), "did you mean 'spheres'"),
        ((PRE, "--schemes", "pre"), "--schemes does not go here"),
        ((PRE, "--types", "5"), "--types does not go here"),
        (("world", "--text", "a.txt"), "--text does not go here: 'world' reads its own tokens"),
        (("world", "--tokens", "5"), "--tokens does not go here"),
        (("world", "--examples", "5"), "--examples does not go here"),
        (("world", "--measure", "rank"), "--measure does not go here"),
        (("world", "--schemes", "perl"), "did you mean 'peri'"),
        (("world", "--types", "2"), "greater than or equal to 3"),
        ((PRE, "--tokens", "8"), "examples of its task"),
        ((PRE, "--text", "nowhere.txt"), "cannot read the text 'nowhere.txt'"),
        ((PRE, "--device", "tpu"), "no device 'tpu'"),
        (("./nowhere",), "there is no file or folder"),
        (("builtin:addition-small",), "did you mean"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, "subspaces", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(here.iterdir()) == []


@pytest.mark.usefixtures("no_pictures")
def test_a_run_is_not_replaced_unasked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("subspaces", "world", *SMALL, "--schemes", "none", "--out", "a")
    assert run(capsys, *arguments)[0] == 0
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "--overwrite" in err
    assert run(capsys, *arguments, "--overwrite")[0] == 0


def test_help_shows_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "subspaces", "--help")
    assert status == 0
    assert out.count("normscope subspaces ") >= 3
    for option in ("--text", "--tokens", "--examples", "--measure", "--schemes", "--types", "--json"):
        assert option in out


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_decoder_with_real_weights(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.models.open_model", lambda name, device: opened_smollm2())
    status, out, err = run(capsys, "subspaces", "package:smollm2", "--tokens", "32")
    assert status == 0, err
    assert "30 layers, 9 heads of 64, width 576" in out
    assert "Interference: " in out
