"""subspaces as a user runs it: a run folder, one JSON document, a result in Python, and one line for every mistake."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from helpers.cli import run
from helpers.models import GROUPED, built, opened_smollm2, word_tokenizer
from helpers.pages import read_page
from normscope.cli import main
from normscope.experiments.result import Result, load
from normscope.experiments.subspaces import MEASURES, Subspaces
from normscope.models import open_model
from normscope.results.figures import Chart, HeatMap, Panels
from normscope.runs import open_run

PRE, QKV = "builtin:addition-small-pre", "builtin:addition-small-qkv"
FEW = ("--examples", "12")
SMALL = ("--types", "5")
Run = tuple[Result, list[dict[str, Any]]]


def made(folder: Path, *arguments: str) -> Run:
    """The result in a run folder, and the records that were printed."""
    out = StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as left:
        main(["subspaces", *arguments, "--json", "--out", str(folder)])
    assert left.value.code in (0, None)
    return load(folder), json.loads(out.getvalue())


def folder_of(result: Result) -> Path:
    assert result.path is not None
    return result.path


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


def test_a_model_leaves_tables_findings_and_figures(model_run: Run) -> None:
    result, _ = model_run
    assert sorted(result.tables) == sorted(["findings", "overlaps", "reading", *MEASURES])
    expected = {"model": PRE, "scheme": "pre", "text": None, "rows": 12, "measures": list(MEASURES)}
    assert {name: result.configuration[name] for name in expected} == expected
    assert [section.name for section in result.sections] == ["reading", "interference", "spheres", "angles", "rank"]
    maps = ["interference-moved", "interference", "interference-keys", "spheres-queries", "spheres-keys"]
    assert list(result.figures) == [*maps, "angles-keys", "angles-queries", "qk-rank"]
    assert all(isinstance(figure, HeatMap) and figure.heads for figure in result.figures.values())
    assert all(finding.figure in result.figures for finding in result.findings)
    assert result["interference"].findings
    page = read_page(folder_of(result) / "report.html")
    assert set(page.figures) == set(result.figures)
    assert all(f"{section.title}\n" in page.text for section in result.sections)


def test_records_of_a_model_are_its_tables(model_run: Run) -> None:
    result, records = model_run
    assert all(list(record)[:3] == ["measure", "layer", "head"] for record in records)
    by_measure = {
        name: [record for record in records if record["measure"] == measure]
        for name, measure in {"rank": "rank", "spheres": "sphere", "angles": "angle", "interference": "interference"}.items()
    }
    assert sum(map(len, by_measure.values())) == len(records) - 1  # one for what was read
    for name, rows in by_measure.items():
        table = result.tables[name]
        assert len(rows) == len(table)
        for column in table.columns.difference(["layer", "head"]):
            assert [record[column] for record in rows] == [None if pd.isna(value) else value for value in table[column]]
    assert {(record["layer"], record["head"]) for record in by_measure["interference"]} == {
        (layer, head) for layer in range(4) for head in range(4)
    }
    assert {(record["place"], record["side"]) for record in by_measure["spheres"]} == {
        (place, side) for place in ("before", "after") for side in ("queries", "keys")
    }
    assert {(record["place"], record["resampled"]) for record in by_measure["interference"]} == {
        (place, resampled) for place in ("before", "after") for resampled in ("queries", "keys", "both")
    }


def test_a_run_prints_its_layers_its_findings_and_its_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "subspaces", QKV, *FEW)
    assert status == 0, err
    folder = here / "runs" / "subspaces"
    assert out.splitlines()[-1].startswith(str(folder))
    result = load(folder)
    assert all(" ".join(finding.text.split()) in " ".join(out.split()) for finding in result.findings)
    assert any(finding.title == "Heads do not interfere" and finding.severity == "ok" for finding in result.findings)
    assert all(finding.severity == "ok" for finding in result.findings)  # q and k are normalised per head
    assert "top key" in out
    assert "nan" not in out
    assert "there is nothing to draw" in result["interference"].text[-1]


@pytest.mark.parametrize("measure", ["rank", "angles,spheres", "interference"])
def test_only_the_chosen_measures_are_taken(here: Path, capsys: pytest.CaptureFixture[str], measure: str) -> None:
    status, out, err = run(capsys, "subspaces", PRE, *FEW, "--measure", measure)
    assert status == 0, err
    wanted = set(measure.split(",")) | ({"overlaps"} if "angles" in measure else set())
    assert set(open_run(here / "runs" / "subspaces").tables) == wanted | {"findings", "reading"}
    assert "layer" in out


def test_the_seed_chooses_examples_and_partners(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("subspaces", PRE, *FEW, "--measure", "interference", "--json", "--seed")
    outputs = [run(capsys, *arguments, seed)[1] for seed in ("3", "3", "4")]
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_model_in_memory_is_measured_as_by_its_name() -> None:
    by_name, in_memory = (Subspaces(model=model, examples=4, measures=("rank",)).run() for model in (PRE, open_model(PRE)))
    pd.testing.assert_frame_equal(by_name.tables["rank"], in_memory.tables["rank"])
    assert by_name.configuration["model"] == in_memory.configuration["model"] == PRE


def test_a_world_leaves_tables_and_the_circuit_at_a_glance(world_run: Run) -> None:
    result, records = world_run
    assert sorted(result.tables) == ["curves", "findings", "points", "selections", "worlds"]
    assert result.configuration == {"model": "world", "schemes": ["pre", "qkv"], "types": 5}
    assert [section.name for section in result.sections] == ["circuit", "worlds"]
    assert list(result.figures) == ["circuit", "circuit-angle", "circuit-spread"]
    page = read_page(folder_of(result) / "report.html")
    assert set(page.figures) == set(result.figures)
    assert "by Theorem 7" in page.text
    points = [record for record in records if record["measure"] == "breaking point"]
    assert {record["scheme"] for record in points} == {"pre", "qkv"}
    for record in points:
        assert (record["predicted"] is None) == (record["observed"] is None)
        assert record["predicted"] is None or abs(record["predicted"] - record["observed"]) < 1e-8
        assert record["scheme"] != "qkv" or record["observed"] is None
    worlds = [record for record in records if record["measure"] == "interference"]
    assert max(abs(record["before"] - record["predicted"]) for record in worlds) < 1e-12
    assert max(record["before"] for record in worlds if record["scheme"] == "qkv") < 1e-12


def test_the_circuit_has_a_panel_for_every_scheme_and_world(world_run: Run) -> None:
    result, _ = world_run
    circuit, selections = result.figures["circuit"], result.tables["selections"]
    assert isinstance(circuit, Panels)
    *panels, angle, spread = circuit.figures
    assert (angle, spread) == (result.figures["circuit-angle"], result.figures["circuit-spread"])
    assert (len(panels), circuit.columns) == (6, 3)
    groups = selections.groupby(["scheme", "world"], sort=False)
    for panel, ((scheme, world), rows) in zip(panels, groups, strict=True):
        assert isinstance(panel, Chart)
        assert all(line.dots for line in panel.lines)
        right = int((rows["selected"] == rows["wanted"]).sum())
        assert panel.title == f"{scheme}, {world}: {right} of {len(rows)} correct"
        drawn = sorted((x, y) for line in panel.lines[:2] for x, y in zip(line.x, line.y, strict=True))
        assert drawn == sorted(zip(rows["selected"], rows["receiver"], strict=True))


def test_curves_and_the_table_of_breaking_points_are_those_of_the_tables(world_run: Run) -> None:
    result, _ = world_run
    (table,) = result["circuit"].tables
    points, curves = result.tables["points"], result.tables["curves"]
    assert [row[:3] for row in table.rows] == [tuple(row) for row in points[["knob", "scheme", "part"]].to_numpy()]
    for row, predicted in zip(table.rows, points["predicted"], strict=True):
        value = float(row[3].strip("°±% ")) / (100 if row[3].endswith("%") else 1) if row[3] != "never" else float("nan")
        assert value == pytest.approx(predicted, rel=1e-5, nan_ok=True)
    for knob in ("angle", "spread"):
        chart = result.figures[f"circuit-{knob}"]
        assert isinstance(chart, Chart)
        lines = {line.name: line for line in chart.lines}
        for scheme, rows in curves[curves["knob"] == knob].groupby("scheme"):
            assert list(lines[str(scheme)].y) == pytest.approx(list(100 * rows["solved"]))


def test_a_world_prints_theory_beside_measurement(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text('name = "mine"\n[attention]\ninput = "norm"\nheads = "k"\n')
    status, out, err = run(capsys, "subspaces", "world", *SMALL, "--schemes", "pre,./mine.toml")
    assert status == 0, err
    assert "by Theorem 7" in out
    assert "mine: heads interfere" in out  # queries are not normalised
    assert "No interference in orthogonal spheres; elsewhere attention logits change" in out
    assert "mine: the induction circuit holds" in out
    assert "It holds down to 5° between subspaces" in out
    assert "pre: the induction circuit breaks" in out


def test_a_text_is_read(here: Path, decoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.txt").write_text("the cat sat on a mat " * 4)
    status, out, err = run(
        capsys, "subspaces", str(decoder), "--text", "mine.txt", "--tokens", "9", "--measure", "interference"
    )
    assert status == 0, err
    assert open_run(here / "runs" / "subspaces").description["configuration"]["tokens"] == 9
    assert "Content that heads cannot read changes attention" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PRE, "--measure", "sphers"), "did you mean 'spheres'"),
        ((PRE, "--schemes", "pre"), "--schemes does not apply here"),
        ((PRE, "--types", "5"), "--types does not apply here"),
        (("world", "--text", __file__), "--text does not apply here: a constructed world has its own tokens"),
        (("world", "--tokens", "5"), "--tokens does not apply here"),
        (("world", "--examples", "5"), "--examples does not apply here"),
        (("world", "--measure", "rank"), "--measure does not apply here"),
        (("world", "--schemes", "perl"), "did you mean 'peri'"),
        (("world", "--types", "2"), "greater than or equal to 3"),
        ((PRE, "--tokens", "8"), "examples of its task"),
        ((PRE, "--text", "nowhere.txt"), "no text file 'nowhere.txt'"),
        ((PRE, "--device", "tpu"), "--device 'tpu' is not available"),
        (("./nowhere",), "there is no file or folder"),
        (("builtin:addition-small",), "did you mean"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, "subspaces", *arguments)
    assert (status, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert list(here.iterdir()) == []


def test_a_run_is_replaced_only_with_overwrite(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_decoder_with_real_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.models.open_model", lambda name, device, **how: opened_smollm2())  # once for all tests
    result = Subspaces(model="package:smollm2", tokens=32).run()
    assert "30 layers, 9 heads (3 KV heads) of 64" in result.configuration["description"]
    assert result.findings[0].title.startswith("Content that heads cannot read changes attention in layer")
    assert "of 90 KV heads" in "\n".join(finding.text for finding in result.findings)
