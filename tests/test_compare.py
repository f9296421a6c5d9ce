"""Comparisons: models and runs side by side."""

import json
from pathlib import Path

import pandas as pd
import pytest

from helpers.cli import run
from normscope.errors import InputError
from normscope.experiments.audit import Audit
from normscope.experiments.compare import (
    Compare,
    Side,
    all_quantities,
    compare_sides,
    measured_tables,
    number_cell,
    short_names,
)
from normscope.experiments.criteria import CRITERIA
from normscope.experiments.result import Result, load
from normscope.experiments.simulate import Simulate
from normscope.models import open_model
from normscope.results.figures import HeatMap
from normscope.runs import open_run

OURS = "builtin:addition-small-pre"
FEW = ("--examples", "8")


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    return Audit(model=OURS, examples=8, fresh=True, device="cpu").run().tables


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def said(tables: dict[str, pd.DataFrame], start: str) -> str:
    return str(next(text for text in tables["findings"]["text"] if text.startswith(start)))


def test_models_of_one_depth_are_compared_layer_by_layer(
    here: Path, capsys: pytest.CaptureFixture[str], tables: dict[str, pd.DataFrame]
) -> None:
    status, out, err = run(capsys, "compare", OURS, "builtin:addition-small-qkv", *FEW)
    assert status == 0, err
    folder = open_run(here / "runs" / "compare")
    curves, told = folder.table("curves"), folder.table("numbers")
    rows = curves[(curves["subject"] == "pre") & (curves["quantity"] == "radius")]
    assert list(rows["x"]) == [0, 1, 2, 3, 4]
    assert list(rows["y"]) == pytest.approx(list(tables["motion"]["radius"]))
    growth = told[(told["subject"] == "pre") & (told["quantity"] == "radius")]["value"].iloc[0]
    assert growth == pytest.approx(tables["motion"]["radius"].iloc[-1] / tables["motion"]["radius"].iloc[0])
    shown = {cell for row in load(folder.path)["numbers"].tables[0].rows for cell in row}
    for value in map(number_cell, told["value"]):
        assert value in shown
        assert value in out


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (("builtin:addition-small-pre", "builtin:addition-small-qkv"), ["pre", "qkv"]),
        (("runs/train-tiny-pre", "runs/train-tiny-post"), ["pre", "post"]),
        (("runs/audit", "runs/audit-2"), ["audit", "audit-2"]),
        (("a/SmolLM2-135M", "b/SmolLM2-360M"), ["SmolLM2-135M", "SmolLM2-360M"]),
        (("a/model", "b/model"), ["a/model", "b/model"]),
    ],
)
def test_subjects_have_the_shortest_names_that_tell_them_apart(names: tuple[str, str], short: list[str]) -> None:
    result = Result(Compare, {"subjects": names}, {})
    assert short_names(names) == short
    assert Compare.facts(result) == [(name, full) for name, full in zip(short, names, strict=True) if name != full]


def test_where_depths_differ_layers_are_shares_of_the_depth(tables: dict[str, pd.DataFrame]) -> None:
    short = {"motion": tables["motion"].iloc[[0, 1, 2]]}
    found = compare_sides([Side("long", tables), Side("short", short)])
    curves = found["curves"].query("quantity == 'radius'")
    assert list(curves[curves["subject"] == "short"]["x"]) == [0, 0.5, 1]
    assert list(curves[curves["subject"] == "long"]["x"]) == [0, 0.25, 0.5, 0.75, 1]
    assert set(found["quantities"]["x"]) == {"share of the depth"}
    assert set(found["quantities"]["name"]) == {"radius", "angle", "cosine", "rank"}


def test_a_depth_is_that_of_a_subjects_own_tables(tables: dict[str, pd.DataFrame]) -> None:
    short = {"sparsity": tables["sparsity"][~tables["sparsity"]["layer"].isin([2, 3])]}  # a row for each layer, and no more
    assert [Side("", some).depth for some in (tables, {"motion": tables["motion"]}, short, {})] == [4, 4, 2, None]
    curves = compare_sides([Side("audit", tables), Side("stability", short)])["curves"]
    assert {name: list(rows["x"]) for name, rows in curves.groupby("subject")} == {
        "audit": [0, 0.25, 0.5, 0.75],
        "stability": [0, 0.5],
    }


def test_an_audit_has_the_tables_that_are_compared(tables: dict[str, pd.DataFrame]) -> None:
    assert measured_tables() - {"journey"} <= set(tables)  # of models that read text


def test_different_numbers_of_tokens_are_a_warning(tables: dict[str, pd.DataFrame]) -> None:
    found = compare_sides([Side("a", tables, 12_345), Side("b", tables, 99), Side("c", tables)])
    rows = found["numbers"].query("number == 'tokens read'")
    assert dict(zip(rows["subject"], rows["value"], strict=True)) == {"a": 12_345, "b": 99}
    assert "a 12,345, b 99" in said(found, "Tokens read")
    assert found["findings"]["figure"][0] == "rank"
    assert found["findings"]["severity"][0] == "warning"
    same = compare_sides([Side("a", tables, 99), Side("b", tables, 99)])
    assert not same["findings"]["text"].str.startswith("Tokens read").any()


def test_findings_say_how_far_apart_subjects_are() -> None:
    def read(radius: float, cosine: float) -> dict[str, pd.DataFrame]:
        columns = {"layer": [0, 1], "radius": [1.0, radius], "cosine": [0.0, cosine], "rank": [2.0, 2.0], "angle": [0.0, None]}
        return {"motion": pd.DataFrame(columns)}

    subjects = {"low": read(2.0, -0.25), "high": read(5.0, 0.5), "middle": read(4.0, 0.0)}
    found = compare_sides([Side(name, some) for name, some in subjects.items()])
    assert said(found, "Residual growth").endswith(": high 5×, middle 4×, low 2×; 2.5 times as much in high as in low.")
    assert said(found, "Mean cosine").endswith(": high 0.5, middle 0, low -0.25; 0.75 more in high than in low.")
    assert said(found, "Effective rank").endswith("; hardly a difference.")
    for still in (0.0, 1e-7):  # of which nothing is a multiple
        angles = {"still": still, "rotating": 3.0}
        turned = {name: {"motion": subjects["low"]["motion"].assign(angle=[angle, None])} for name, angle in angles.items()}
        found = compare_sides([Side(name, some) for name, some in turned.items()])
        assert said(found, "Rotation per layer").endswith("; 3° more in rotating than in still.")


def test_a_model_whose_scheme_is_unknown_is_compared_by_all_but_speed(tables: dict[str, pd.DataFrame]) -> None:
    unknown = {**tables, "writes": tables["writes"].drop(columns=["speed", "theory"])}
    names = compare_sides([Side("known", tables), Side("unknown", unknown)])["quantities"]["name"]
    assert "speed" not in set(names)
    assert {"angle", "cosine"} <= set(names)


def test_a_late_speed_is_that_of_late_layers_also_where_some_have_none() -> None:
    def writes(*speeds: float | None) -> dict[str, pd.DataFrame]:
        return {"writes": pd.DataFrame({"layer": range(len(speeds)), "speed": speeds})}

    speeds = {"all": writes(1, 2, 3, 4, 5, 7), "some": writes(1, 2, 3, 4, 5, None), "early": writes(1, 2, 3, 4, None, None)}
    numbers = compare_sides([Side(name, some) for name, some in speeds.items()])["numbers"]
    assert dict(zip(numbers["subject"], numbers["value"], strict=True)) == {"all": 6, "some": 5}


def test_collapse_is_compared_at_the_noise_that_is_named() -> None:
    def curve(noise: list[float], share: list[float]) -> dict[str, pd.DataFrame]:
        rows = {"layer": None, "definition": "loose", "noise": noise, "probability": share}
        return {"collapse": pd.DataFrame(rows)}

    subjects = [
        ("at", curve([0.1, 0.3], [0.2, 0.9])),
        ("around", curve([0.05, 0.25], [0.1, 0.5])),
        ("above", curve([0.2], [0.7])),
    ]
    found = compare_sides([Side(name, tables) for name, tables in subjects])
    assert list(found["numbers"]["subject"]) == ["at", "around"]
    assert list(found["numbers"]["value"]) == pytest.approx([0.2, 0.2])
    assert set(found["curves"]["subject"]) == {"at", "around", "above"}


def test_runs_with_nothing_in_common_are_refused(tables: dict[str, pd.DataFrame]) -> None:
    metrics = {"metrics": pd.DataFrame({"examples": [1, 2], "loss": [1.0, 0.5], "accuracy": [0.1, 0.2]})}
    with pytest.raises(InputError, match="no measure in common"):
        compare_sides([Side("model", {"motion": tables["motion"]}), Side("training", metrics)])
    both = compare_sides([Side("a", metrics), Side("b", metrics)])
    assert list(both["numbers"]["value"]) == [0.5, 0.5, 0.2, 0.2]


SMALL = ("--scheme", "pre,post", "--tokens", "4", "--dim", "8", "--time", "1", "--samples", "3")


@pytest.mark.parametrize(
    ("command", "table", "column", "number"),
    [
        (("ensemble", "--runs", "2"), "cosines", "mean", "mean cosine at the end of the ensemble"),
        (("simulate",), "trajectories", "cosine", "mean cosine at the end of the simulation"),
    ],
)
def test_simulations_are_compared_scheme_by_scheme(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    table: str,
    column: str,
    number: str,
) -> None:
    for seed in ("0", "1"):
        assert run(capsys, *command, *SMALL, "--seed", seed, "--out", f"runs/{seed}")[0] == 0
    status, out, err = run(capsys, "compare", "runs/0", "runs/1", "--json")
    assert status == 0, err
    told = {(row["number"], row["subject"]): row["value"] for row in json.loads(out)}
    ends = {
        (f"{number}, {scheme}", name): rows[column].iloc[-1]
        for name in ("0", "1")
        for scheme, rows in open_run(f"runs/{name}").table(table).groupby("scheme")
    }
    assert told == ends
    assert len(told) == 2 * 2
    curves = open_run(here / "runs" / "compare").table("curves")
    assert len(curves) == sum(len(open_run(f"runs/{name}").table(table)) for name in ("0", "1"))


def test_evaluations_are_compared_split_by_split(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("pre", "qkv"):
        assert run(capsys, "evaluate", f"builtin:addition-small-{model}", "--examples", "32", "--out", f"runs/{model}")[0] == 0
    status, out, err = run(capsys, "compare", "runs/pre", "runs/qkv")
    assert status == 0, err
    folder = open_run(here / "runs" / "compare")
    numbers = folder.table("numbers").set_index(["line", "subject"])["value"]
    accuracy = {name: open_run(f"runs/{name}").table("accuracy").set_index("split")["accuracy"] for name in ("pre", "qkv")}
    assert len(numbers) == 6
    assert all(numbers[split, name] == found[split] for name, found in accuracy.items() for split in found.index)
    most = (accuracy["pre"] - accuracy["qkv"]).abs().idxmax()
    assert f"for {most}: " in said({"findings": folder.table("findings")}, "Test accuracy differs most")
    drawn = load(folder.path).figures["test-accuracy"]
    assert isinstance(drawn, HeatMap)
    assert sorted(value for row in drawn.values for value in row) == pytest.approx(sorted(numbers))
    for value in map(number_cell, numbers):
        assert value in out


def test_advice_is_compared_scheme_by_scheme(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--width", "8", "--heads", "2", "--context", "8", "--runs", "2", "--schemes", "pre,post")
    for depth in ("2", "3"):
        assert run(capsys, "advise", *shape, "--depth", depth, "--out", f"runs/{depth}")[0] == 0
    status, out, err = run(capsys, "compare", "runs/2", "runs/3", "--json")
    assert status == 0, err
    told = {(row["quantity"], row["line"], row["subject"]): row["value"] for row in json.loads(out)}
    means = {
        (f"advice-{row.criterion}", row.scheme, name): row.mean
        for name in ("2", "3")
        for row in open_run(f"runs/{name}").table("criteria").itertuples()
    }
    assert told == means
    assert len(told) == len(CRITERIA) * 2 * 2


def test_everything_is_opened_before_anything_is_measured(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "simulate", *SMALL, "--out", "runs/simulate")[0] == 0
    monkeypatch.setattr(Audit, "measure", None)
    for others, words in (
        (("nowhere/at/all",), "no file or folder"),
        (("builtin:addition-small-qkv", "--tokens", "12"), "--examples"),
        (("builtin:addition-small-qkv", "--sentence", "To kill two birds"), "--sentence is not used"),
        (("runs/simulate",), "no measure in common"),
        ((), "at least two models or runs"),
        ((OURS,), "named twice"),
    ):
        status, out, err = run(capsys, "compare", OURS, *others)
        assert status == 2
        assert words in err.splitlines()[-1]
        assert not out


def test_a_run_under_two_names_is_one_and_reads_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        assert run(capsys, "simulate", *SMALL, "--out", f"runs/{name}")[0] == 0
    (here / "link").symlink_to("runs/a")
    for other in ("runs/a/", "./runs/b/../a", "link", str(here / "runs" / "a")):
        status, _, err = run(capsys, "compare", "runs/a", other)
        assert status == 2
        assert "named twice" in err
    status, _, err = run(capsys, "compare", "runs/a", "runs/b", "--tokens", "12")
    assert status == 2
    assert "--tokens is not used" in err


def test_the_summary_has_the_number_of_tokens(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "audit", OURS, "--examples", "4")[0] == 0
    status, out, err = run(capsys, "compare", "runs/audit", OURS, *FEW)
    assert status == 0, err
    few = open_run(here / "runs" / "audit").description["configuration"]["tokens"]
    many = int(open_model(OURS).sample(None, 8, 0).attention_mask.sum())
    result = load(here / "runs" / "compare")
    assert result.summary == f"audit ({few} tokens), {OURS} ({many} tokens); seed 0"
    assert next(line.split()[-2:] for line in out.splitlines() if "tokens read" in line) == [str(few), str(many)]
    assert f"audit {few}, {OURS} {many}" in said(result.tables, "Tokens read")


def test_models_in_memory_and_results_are_compared() -> None:
    audited = Audit(model="builtin:addition-small-qkv", examples=8, device="cpu").run()
    result = Compare(subjects=(open_model(OURS), audited), examples=8, device="cpu").run()
    assert set(result.tables["numbers"]["subject"]) == {"pre", "qkv"}
    runs = [Simulate(scheme="pre", tokens=4, dim=8, time=1, samples=3, seed=seed, start="uniform").run() for seed in (0, 1)]
    assert set(Compare(subjects=runs).run().tables["numbers"]["subject"]) == {"simulate (1)", "simulate (2)"}
    with pytest.raises(InputError, match="named twice"):
        Compare(subjects=(audited, audited))


def test_numbers_that_are_compared_have_names_of_their_own() -> None:
    """Those of an audit, of a watched training and of other runs stand in one table."""
    numbers = [(quantity.number, quantity.unit) for quantity in all_quantities()]
    assert len(set(numbers)) == len(numbers)
