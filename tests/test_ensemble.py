"""Ensembles: the published order, the same numbers however they are cut, interrupted or stacked."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pytest
import torch

from normscope import InputError
from normscope.core import Attention
from normscope.dynamics import PANELS, Ensemble, EnsembleRun, make_start, random_weights, simulate
from normscope.dynamics.ensemble import chunk_seeds, plan, run_chunk, setting_of
from normscope.runs import Parts, open_run
from normscope.schemes import NAMED, Scheme

SIX = tuple(NAMED[name] for name in ("post", "pre", "mix", "peri", "ngpt", "sqrt-scaling"))
SMALL = Ensemble(tokens=10, dim=8, heads=2, beta=2.0, time=4.0, samples=5, redraw=0.0)


def test_panels_have_the_published_settings() -> None:
    assert set(PANELS) == {"4", "5a", "5b", "5c", "5d", "5e", "5f", "5g"}
    assert PANELS["4"] == PANELS["5a"]
    assert all(panel.tokens == 128 for panel in PANELS.values())
    settings = {name: (p.dim, p.heads, round(p.beta, 6), p.weights, p.redraw, p.time) for name, p in PANELS.items()}
    root = round(math.sqrt(512), 6)
    assert settings["5a"] == (512, 1, root, "kaiming", 0.0, 10.0)
    assert settings["5b"][2] == round(4 * math.sqrt(512), 6)
    assert settings["5c"] == (512, 1, root, "kaiming", 1.0, 20.0)
    assert settings["5d"] == (16, 1, 1.0, "kaiming", 0.0, 20.0)
    assert settings["5f"] == (128, 1, round(4 * math.sqrt(128), 6), "kaiming", 0.0, 20.0)
    assert settings["5g"] == (768, 12, 8.0, "gaussian", 0.0, 50.0)


@pytest.mark.slow
def test_panel_5a_is_near_the_published_curves_with_eight_runs() -> None:
    setting = replace(PANELS["5a"], time=5.0, step=0.1, samples=6)  # the Mix-LN of a shorter run switches earlier
    schemes = [scheme for scheme in SIX if scheme.name != "mix"]
    means = dict(zip((s.name for s in schemes), run_chunk(setting, schemes, 8, 1).mean(0), strict=True))
    published = {  # Figure 5a at t = 1, 2 and 5
        "ngpt": (0.4718, 0.8838, 1.0),
        "peri": (0.4111, 0.7469, 0.9516),
        "post": (0.0143, 0.1154, 0.9841),
        "pre": (0.0143, 0.1087, 0.8664),
        "sqrt-scaling": (0.0088, 0.0414, 0.4687),
    }
    for name, curve in published.items():
        assert means[name][[1, 2, 5]] == pytest.approx(curve, abs=0.08), name


def test_schemes_in_one_stack_are_the_schemes_alone() -> None:
    schemes = (*SIX, NAMED["qkv"], NAMED["deepnorm"], NAMED["ngpt-lerp"])
    together = run_chunk(SMALL, schemes, 3, 7)
    for i, scheme in enumerate(schemes):
        assert np.allclose(run_chunk(SMALL, [scheme], 3, 7)[:, 0], together[:, i], atol=2e-6), scheme.name


@pytest.mark.parametrize("solver", ["midpoint", "layers"])
@pytest.mark.parametrize("name", ["post", "mix", "peri", "qkv"])
def test_a_run_of_an_ensemble_is_a_simulation_with_its_weights(name: str, solver: Literal["midpoint", "layers"]) -> None:
    generator = torch.Generator().manual_seed(11)
    start = make_start("uniform", 10, 8, generator=generator, dtype=torch.float32, runs=(2, 1))
    weights = random_weights("kaiming", 8, 2, generator, dtype=torch.float32, runs=(2,))
    cosines = run_chunk(replace(SMALL, solver=solver), [NAMED[name]], 2, 11)
    for run in range(2):
        own = type(weights)(*(getattr(weights, w)[run].double() for w in ("W_Q", "W_K", "W_V", "W_O")))
        path = simulate(start[run, 0].double(), NAMED[name], Attention(2.0, own), SMALL.times, solver=solver, step=0.1)
        assert np.allclose(path.table["cosine"], cosines[run, 0], atol=1e-4)


def test_later_stages_normalise_their_own_heads() -> None:
    late_qkv = Scheme("late", NAMED["post"].attention, until=0.5, then=NAMED["qkv"])
    late_pre = Scheme("plain", NAMED["post"].attention, until=0.5, then=NAMED["none"])
    together = run_chunk(SMALL, (late_qkv, late_pre), 3, 7)
    assert np.array_equal(together[:, 0, :3], together[:, 1, :3])
    assert not np.allclose(together[:, 0, 4], together[:, 1, 4])
    assert np.allclose(run_chunk(SMALL, (late_qkv,), 3, 7)[:, 0], together[:, 0], atol=2e-6)


def test_weights_are_redrawn_once_even_where_rounding_moves_the_time() -> None:
    setting = replace(SMALL, time=7.0, samples=11, redraw=0.7)  # 7·1/10 and 0.7 differ in the last digit
    assert sum(stage.draws for stage in plan(setting, SIX, "cpu")) == 9


def test_later_stages_have_their_own_norm_and_begin_on_the_sphere() -> None:
    late = Scheme("late", NAMED["pre"].attention, until=0.5, then=NAMED["post"].with_norm("layer"))
    generator = torch.Generator().manual_seed(11)
    start = make_start("uniform", 10, 8, generator=generator, dtype=torch.float32, runs=(1, 1))
    weights = random_weights("kaiming", 8, 2, generator, dtype=torch.float32, runs=(1,))
    own = type(weights)(*(getattr(weights, w)[0].double() for w in ("W_Q", "W_K", "W_V", "W_O")))
    path = simulate(start[0, 0].double(), late, Attention(2.0, own), SMALL.times, solver="midpoint", step=0.1)
    assert np.allclose(path.table["cosine"], run_chunk(SMALL, [late], 1, 11)[0, 0], atol=1e-4)


def test_runs_that_leave_the_finite_numbers_are_named_and_left_out() -> None:
    job = EnsembleRun(replace(SMALL, samples=2), (NAMED["pre"], NAMED["none"]), runs=4, chunk=4)
    cosines = np.full((4, 2, 2), 0.5, dtype=np.float32)
    cosines[2, 1, 1] = np.nan
    table = job.table(cosines)
    assert table["mean"].tolist() == [0.5] * 4
    assert table["runs"].tolist() == [4, 4, 4, 3]
    (line,) = job.not_finite(cosines)
    assert "scheme 'none' became non-finite (NaN/Inf) in 1 of 4 runs, first by time 4 in run 2" in line


def test_redrawn_weights_change_the_path_after_the_first_draw_only() -> None:
    kept, redrawn = (run_chunk(replace(SMALL, redraw=r), SIX, 3, 5) for r in (0.0, 2.0))
    assert np.array_equal(kept[:, :, :3], redrawn[:, :, :3])
    assert not np.allclose(kept[:, :, 3], redrawn[:, :, 3])


def test_interrupted_ensembles_end_with_the_same_numbers(tmp_path: Path) -> None:
    job = EnsembleRun(SMALL, SIX, runs=10, chunk=4, seed=3)
    whole = job.compute(Parts.of(tmp_path / "whole", job.record))
    parts = Parts.of(tmp_path / "broken", job.record)

    class StopError(Exception):
        pass

    def stop_after_five(done: int) -> None:
        if done > 5:
            raise StopError

    with pytest.raises(StopError):
        job.compute(parts, stop_after_five)
    (parts.folder / "000001.npy").write_bytes(b"damaged")
    assert np.array_equal(job.compute(parts), whole)
    assert parts.folder != Parts.of(tmp_path / "broken", replace(job, seed=4).record).folder


def test_chunks_have_seeds_of_their_own() -> None:
    assert len(set(chunk_seeds(0, 1000))) == 1000
    assert chunk_seeds(0, 5) == chunk_seeds(0, 9)[:5]
    assert chunk_seeds(0, 5) != chunk_seeds(1, 5)


def test_summary_is_the_mean_and_the_90_percent_band() -> None:
    job = EnsembleRun(replace(SMALL, samples=2), (NAMED["pre"],), runs=101, chunk=101)
    values = np.linspace(0, 1, 101, dtype=np.float32)[:, None, None].repeat(2, 2)
    row = job.table(values).iloc[0]
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((0.5, 0.05, 0.95))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens=0: should be greater than or equal to 2"),
        ({"beta": math.inf}, "beta=inf: should be a finite number"),
        ({"heads": 3}, "cannot be shared among 3 heads"),
        ({"time": -1.0}, "time=-1: should be greater than 0"),
        ({"weights": "kaming"}, "did you mean 'kaiming'"),
        ({"solver": "rk9"}, "solver='rk9': should be 'euler', 'midpoint' or 'layers'"),
        ({"redraw": math.nan}, "redraw"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        setting_of("4", change)
    assert message in str(caught.value)


def test_a_killed_command_goes_on_and_ends_with_the_same_table(tmp_path: Path) -> None:
    command = [
        sys.executable, "-c", "from normscope.cli import main; main()", "ensemble", "--panel", "5d", "--runs", "48",
        "--chunk", "4", "--time", "6", "--samples", "7", "--device", "cpu", "--out",
    ]  # fmt: skip
    process = subprocess.Popen([*command, str(tmp_path / "killed")], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.time() + 60
    while time.time() < deadline and not list(tmp_path.glob(".killed.unfinished-*/*.npy")):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = list(tmp_path.glob(".killed.unfinished-*/*.npy"))
    assert 0 < len(finished) < 12
    assert not (tmp_path / "killed").exists()
    again = subprocess.run([*command, str(tmp_path / "killed")], capture_output=True, text=True, check=True)
    assert "resuming" in again.stderr
    subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=True)
    tables = [open_run(tmp_path / name).table("cosines") for name in ("killed", "whole")]
    pd.testing.assert_frame_equal(*tables)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


def test_weights_whose_outputs_have_no_squares_give_the_numbers_of_ordinary_ones() -> None:
    """Norms of what attention computes cancel a factor of W_O; 2¹⁰⁰ rounds nothing."""
    schemes = [NAMED["peri"], NAMED["ngpt"]]
    ordinary, huge = (run_chunk(replace(SMALL, output_gain=gain), schemes, 3, 0) for gain in (1.0, 2.0**100))
    assert np.array_equal(ordinary, huge)
