"""simulate and ensemble as a user meets them: records, run folders, and one line for every mistake."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import normscope as ns
from helpers.cli import run
from normscope.results import Scenes
from normscope.runs import open_run

SMALL = ("--tokens", "6", "--dim", "8", "--samples", "5", "--step", "0.2")


def test_simulate_prints_records_and_writes_a_run_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "simulate", *SMALL, "--scheme", "post,peri+qk", "--times", "1,2.5,7", "--json")
    assert status == 0
    records = json.loads(out)
    assert [(r["scheme"], r["time"]) for r in records] == [(s, t) for s in ("post", "peri+qk") for t in (1.0, 2.5, 7.0)]
    assert all(r.keys() >= {"scheme", "time", "cosine", "variance", "radius", "speed"} for r in records)
    folder = open_run(here / "runs" / "simulate")
    assert folder.tables == ["milestones", "trajectories"]
    assert (folder.path / "report.html").is_file()
    assert folder.description["configuration"]["beta"] == 5.0
    table = folder.table("trajectories").set_index(["scheme", "time"])["cosine"]
    assert [table[r["scheme"], r["time"]] for r in records] == [r["cosine"] for r in records]


def test_the_table_for_people_ends_with_the_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "simulate", *SMALL, "--scheme", "ngpt", "--alpha", "linear", "--time", "3")
    assert status == 0
    for words in ("mean cosine", "variance of directions", "mean norm", "mean speed", "time to half of collapse", "to 90 %"):
        assert words in out
    assert Path(out.splitlines()[-1]) == here / "runs" / "simulate" / "report.html"
    run(capsys, "simulate", *SMALL, "--scheme", "ngpt", "--time", "1")
    assert (here / "runs" / "simulate-2" / "run.json").is_file()


def test_the_reduction_and_the_particles_print_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("simulate", *SMALL, "--scheme", "pre,mix", "--time", "2", "--radius", "1.5", "--json")
    particles, reduced = (json.loads(run(capsys, *common, *extra)[1]) for extra in ((), ("--symmetric",)))
    for one, other in zip(particles, reduced, strict=True):
        assert one["cosine"] == pytest.approx(other["cosine"], abs=1e-5)
        assert one["radius"] == pytest.approx(other["radius"], rel=1e-4)


def test_layers_weights_feedforward_gradients_and_states(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"W_Q": torch.randn(8, 8), "W_V": torch.eye(8)}, here / "w.safetensors")
    status, _, err = run(
        capsys, "simulate", "--tokens", "6", "--dim", "8", "--layers", "--time", "4", "--weights", "w.safetensors", "--causal",
        "--feedforward", "12", "--gradient", "--save-states", "--scheme", "pre,qkv", "--start", "gaussian", "--out", "r",
    )  # fmt: skip
    assert status == 0, err
    folder = open_run(here / "r")
    gradients = folder.table("gradients")
    assert gradients.groupby("scheme")["layer"].apply(list).to_dict() == {"pre": [0, 1, 2, 3], "qkv": [0, 1, 2, 3]}
    states = load_file(folder.path / "states.safetensors")
    assert states["pre/t=4"].shape == (6, 8)
    assert (folder.path / "report.html").is_file()


def test_tokens_in_three_dimensions_are_drawn_on_spheres(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--start", "uniform", "--tokens", "5", "--dim", "3", "--time", "2", "--samples", "5", "--step", "0.2")
    status, _, err = run(
        capsys,
        "simulate",
        *common,
        "--scheme",
        "post,pre",
        "--times",
        "0,1,2",
        "--save-states",
        "--format",
        "html,png",
        "--out",
        "r",
    )
    assert status == 0, err
    tokens = open_run(here / "r").table("tokens")
    assert tokens["time"].unique().tolist() == [0, 0.5, 1, 1.5, 2]
    states = load_file(here / "r" / "states.safetensors")
    assert set(states) == {f"{scheme}/t={t}" for scheme in ("post", "pre") for t in (0, 1, 2)}
    end = tokens[(tokens["scheme"] == "pre") & (tokens["time"] == 2)]
    assert np.allclose(end[["x", "y", "z"]].to_numpy(), states["pre/t=2"])
    assert (here / "r" / "figures" / "spheres.png").is_file()
    drawn = ns.load(here / "r").figures["spheres"]
    assert isinstance(drawn, Scenes)
    assert [scene.title for scene in drawn.scenes] == ["post", "pre"]
    for scene in drawn.scenes:
        ways = np.array([trail.points for trail in scene.trails])
        assert ways.shape == (5, 5, 3)
        assert np.allclose((ways**2).sum(-1), 1)  # directions, also where norms have grown
    starts = [[trail.points[0] for trail in scene.trails] for scene in drawn.scenes]
    assert np.allclose(*starts)


def test_a_run_that_leaves_the_finite_numbers_keeps_what_came_before(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "grow.toml").write_text('[attention]\ncarry = "1e60"\n')
    status, out, err = run(
        capsys, "simulate", "--scheme", "post,./grow.toml", "--tokens", "4", "--dim", "4", "--layers", "--time", "9", "--json"
    )
    assert status == 1
    assert "scheme 'grow' became non-finite (NaN/Inf) at time" in err
    assert {r["scheme"] for r in json.loads(out)} == {"post", "grow"}
    kept = open_run(here / "runs" / "simulate").table("trajectories")
    assert kept[kept["scheme"] == "grow"]["time"].max() < 9


def test_ensemble_prints_records_for_all_schemes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys,
        "ensemble",
        "--panel",
        "5d",
        "--tokens",
        "8",
        "--runs",
        "5",
        "--chunk",
        "2",
        "--time",
        "1",
        "--samples",
        "3",
        "--json",
    )
    assert status == 0
    records = json.loads(out)
    assert all(r.keys() >= {"scheme", "time", "mean", "low", "high"} for r in records)
    assert [r["time"] for r in records][:3] == [0.0, 0.5, 1.0]
    assert len({r["scheme"] for r in records}) == 6
    assert all(r["low"] <= r["mean"] <= r["high"] or r["time"] == 0 for r in records)
    assert (here / "runs" / "ensemble-5d" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "--tokens", "0"), "greater than or equal to 1"),
        (("simulate", "--tokens", "4", "--dim", "-3"), "greater than or equal to 1"),
        (("simulate", "--beta", "inf"), "--beta inf: should be a finite number"),
        (("simulate", "--beta", "hot"), "--beta"),
        (("simulate", "--times", "5,1"), "times go forwards"),
        (("simulate", "--times", "1,x"), "list of numbers"),
        (("simulate", "--time", "-2"), "should be greater than 0"),
        (("simulate", "--time", "2", "--times", "1,3"), "past --time 2"),
        (("simulate", "--start", "zero.npy"), "token 1 of the start is zero"),
        (("simulate", "--start", "nowhere.npy"), "no start file"),
        (("simulate", "--start", "orthogonel"), "did you mean 'orthogonal'"),
        (("simulate", "--tokens", "4", "--dim", "4", "--weights", "nan.safetensors"), "W_Q has an entry that is not a finite"),
        (("simulate", "--weights", "kaimng"), "did you mean 'kaiming'"),
        (("simulate", "--weights", "kaiming", "--heads", "5", "--dim", "512"), "cannot be shared among 5 heads"),
        (("simulate", "--scheme", "perl"), "did you mean 'peri'"),
        (
            ("simulate", "--weights", "kaiming", "--heads", "8", "--dim", "8", "--tokens", "4", "--scheme", "qk"),
            "a head has at least 2 dimensions: 'qk' normalises heads",
        ),
        (
            ("simulate", "--weights", "kaiming", "--heads", "2", "--start", "start.npy", "--scheme", "qkv"),
            "a head has at least 2 dimensions: 'qkv' normalises heads",
        ),
        (
            ("simulate", "--tokens", "3", "--dim", "1", "--start", "uniform", "--scheme", "qk"),
            "a head has at least 2 dimensions",
        ),
        (("simulate", "--scheme", "pre,pre"), "named twice"),
        (("simulate", "--precision", "float16"), "should be 'float64', 'float32' or 'bfloat16'"),
        (("simulate", "--solver", "rk5"), "unknown solver"),
        (("simulate", "--symmetric", "--precision", "float32"), "it takes no --precision float32"),
        (("simulate", "--symmetric", "--tokens", "8", "--dim", "4"), "need at least --dim 8"),
        (("simulate", "--step", "0"), "step"),
        (("simulate", "--alpha", "log(0-1)"), "alpha"),
        (("simulate", "--gradient"), "--layers"),
        (("simulate", "--symmetric", "--start", "uniform"), "--symmetric"),
        (("simulate", "--device", "tpu"), "--device 'tpu' is not available"),
        (("ensemble", "--panel", "5z"), "unknown panel '5z'"),
        (("ensemble", "--runs", "0"), "greater than or equal to 1"),
        (("ensemble", "--heads", "3"), "cannot be shared among 3 heads"),
        (("ensemble", "--heads", "16", "--dim", "16", "--scheme", "qkv"), "a head has at least 2 dimensions"),
        (("ensemble", "--precision", "float64"), "allowed: float32, bfloat16"),
        (("ensemble", "--redraw", "-1"), "redraw"),
    ],
)
def test_bad_input_is_one_line_and_status_2_and_nothing_written(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    np.save(here / "zero.npy", np.array([[1.0, 0.0], [0.0, 0.0]]))
    np.save(here / "start.npy", np.eye(2))
    save_file({"W_Q": torch.full((4, 4), torch.nan)}, here / "nan.safetensors")
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    lines = [line for line in err.splitlines() if line.strip() and "━" not in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert sorted(path.name for path in here.iterdir()) == ["nan.safetensors", "start.npy", "zero.npy"]


def test_tokens_far_out_are_measured_and_those_without_a_speed_stop(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("simulate", "--scheme", "pre", "--tokens", "4", "--dim", "4", "--time", "1", "--samples", "3", "--json")
    status, out, _ = run(capsys, *common, "--radius", "2e19", "--precision", "float32")
    assert status == 0
    assert [row["cosine"] for row in json.loads(out)] == pytest.approx([0.0] * 5, abs=1e-6)
    status, out, err = run(capsys, *common, "--radius", "1e-310")
    assert json.loads(out) == []
    assert "scheme 'pre' became non-finite (NaN/Inf) at time 0, token 0: its speed |ẋ|/|x| has no value" in err
    assert open_run(here / "runs" / "simulate-2").table("trajectories").empty
