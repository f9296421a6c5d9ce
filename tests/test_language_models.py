"""The comparison of predictions with trained language models, on results with a known answer."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kendalltau, spearmanr

from helpers.evidence import CRITERIA, DEPTHS, SCHEMES, evidence, row
from normscope.experiments.trained import RUNS, Evidence

FILE = Path(__file__).parents[1] / "benchmarks" / "language_models.py"
KNOWN = evidence()


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("language_models_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["language_models_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_correlations_by_depth_are_scipys(benchmark: ModuleType) -> None:
    table = benchmark.correlations(KNOWN)
    losses, ranks = KNOWN.outcomes, KNOWN.predictions
    for depth in DEPTHS:
        loss = losses[losses["depth"] == depth].set_index("scheme")["loss"]
        for criterion in CRITERIA:
            chosen = ranks[(ranks["depth"] == depth) & (ranks["criterion"] == criterion)].set_index("scheme")["rank"]
            row_of = table[
                (table["depth"] == str(depth)) & (table["criterion"] == criterion) & (table["outcome"] == "loss")
            ].iloc[0]
            ordered = loss.loc[list(chosen.index)].rank()
            assert row_of["spearman"] == pytest.approx(spearmanr(chosen, ordered).statistic)
            assert row_of["kendall"] == pytest.approx(kendalltau(chosen, ordered).statistic)
            assert row_of["low"] <= row_of["spearman"] <= row_of["high"]
    whole = table[(table["depth"] == "all") & (table["criterion"] == "early") & (table["outcome"] == "loss")]
    assert whole["spearman"].iloc[0] == pytest.approx(-1)


def test_weights_are_fitted_on_the_other_depths(benchmark: ModuleType) -> None:
    table = benchmark.weights(KNOWN)
    assert list(table["tested"]) == ["12", "24", "48", "none: fitted on all"]
    assert (table["early"] == 0).all()
    assert (table["late"] > 0.8).all()
    assert (table["fitted"].dropna() > 0.9).all()
    assert (table["fitted"].dropna() > table["equal"].dropna()).all()


def test_pairs_are_compared_with_published_tables(benchmark: ModuleType) -> None:
    """Known losses have the order pre, post, mix, deepnorm, ln-scaling at every depth."""
    table = benchmark.published(KNOWN)
    at = table[(table["source"] == "LN-Scaling, Table 1") & (table["model"] == "1B") & (table["depth"] == 12)].iloc[0]
    assert (at["same_order"], at["pairs"]) == (3, 7)  # pre before post, mix and deepnorm; ln-scaling is behind all
    assert at["failed_there"] == "post, deepnorm, mix"
    assert at["failed_here"] == "none"
    assert len(table) == len(DEPTHS) * 8


def test_what_is_missing_is_listed(benchmark: ModuleType) -> None:
    plan = benchmark.the_plan()
    assert len(benchmark.cells(plan)) == 2 * 3 * 16
    assert benchmark.missing(KNOWN.runs.iloc[:0], plan)["runs"].sum() == 96
    left = benchmark.missing(KNOWN.runs, plan)
    assert left["runs"].sum() == 96 - 60
    assert "pre" not in ", ".join(left["schemes"]).split(", ")


def test_a_comparison_works_with_whatever_is_finished(benchmark: ModuleType) -> None:
    half = KNOWN.runs[(KNOWN.runs["rate"] == 1e-3) & ~((KNOWN.runs["depth"] == 48) & (KNOWN.runs["scheme"] == "pre"))]
    tables = dict(benchmark.comparison(Evidence(half, KNOWN.predictions), benchmark.the_plan()))
    assert len(tables) == 5
    assert all(benchmark.markdown(table).count("\n") == len(table) + 1 for table in tables.values())
    counted = tables["correlations: of predicted ranks with what training came to"]
    assert set(counted[counted["outcome"] == "loss"].groupby("depth")["schemes"].first().items()) >= {("48", 9), ("12", 10)}


def test_results_of_sessions_are_merged(benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, first, second = (tmp_path / name for name in ("home", "first", "second"))
    for folder in (home, first, second):
        folder.mkdir()
    monkeypatch.setattr(benchmark, "PACKAGED", home)
    monkeypatch.setattr(benchmark, "DATA", home)
    write = benchmark.write_tables
    write({RUNS: pd.DataFrame([row("pre", 12, 1e-3, 4.0), row("post", 12, 1e-3, 5.0)])}, first)
    write({RUNS: pd.DataFrame([row("pre", 12, 1e-3, 3.5), row("pre", 24, 1e-3, 3.4)])}, second)
    benchmark.merge([first, second])
    benchmark.merge([second])
    merged = pd.read_csv(home / RUNS)
    assert list(merged["scheme"]) == ["post", "pre", "pre"]
    assert list(merged["loss"]) == [5.0, 3.5, 3.4]


def test_tables_are_thinned_to_their_ends(benchmark: ModuleType) -> None:
    thin = benchmark._thinned(pd.DataFrame({"step": np.arange(1000)}), 7)["step"]
    assert (thin.iloc[0], thin.iloc[-1], len(thin)) == (0, 999, 7)
    assert len(benchmark._thinned(pd.DataFrame({"step": [1, 2]}), 7)) == 2
    assert SCHEMES[0] == "pre"


def watched() -> pd.DataFrame:
    """Models whose late rotation falls with the scheme's place in the list at the last step, and rises at the first."""
    rows = []
    for depth in DEPTHS:
        for place, scheme in enumerate(SCHEMES):
            for step, late in ((1, 1.0 + place), (1500, 20.0 - place)):
                rotation = [30.0] * (2 * depth // 3) + [late] * (depth - 2 * depth // 3) + [np.nan]
                rows += [
                    {"scheme": scheme, "depth": depth, "rate": 3e-3, "seed": 100, "step": step, "layer": layer,
                     "norm": 1.0 + layer, "rotation": angle, "cosine": 0.5, "rank": 9.0, "gradient": np.nan, "collapse": 0.1}
                    for layer, angle in enumerate(rotation)
                ]  # fmt: skip
    return pd.DataFrame(rows)


def test_simulated_geometry_is_compared_with_that_of_the_models(benchmark: ModuleType) -> None:
    chosen = benchmark.best_runs(watched(), KNOWN)
    models = benchmark.watched_models(chosen).set_index(["depth", "scheme"])
    assert models.loc[(24, "pre"), "late_rotation"] == 20
    assert models.loc[(24, "pre"), "growth"] == 25
    assert (24, "sqrt-scaling") not in models.index  # its best rate is the other one
    table = benchmark.geometry(KNOWN, chosen).set_index(["criterion", "probe"])["spearman"]
    assert table["late", "last"] > 0.95
    assert table["late", "first"] < -0.95
    drawn = benchmark.charts(chosen.assign(loss=4.0), chosen.assign(loss_change=0.1), chosen)
    assert set(drawn) == {f"{name}-{depth}" for name in ("loss", "blocks", "norms") for depth in DEPTHS}
