"""The comparison of predictions with trained language models, on results with a known answer."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kendalltau, spearmanr

from helpers.evidence import CRITERIA, DEPTHS, SCHEMES, evidence, row
from normscope.experiments.trained import RUNS, Evidence, packaged

SCRIPTS = Path(__file__).parents[1] / "benchmarks"
KNOWN = evidence()


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return _script("language_models")


@pytest.fixture(scope="module")
def comparison() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        patch.delitem(sys.modules, "language_models", raising=False)  # which the script imports
        return _script("language_models_compare")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"{name}_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_correlations_by_depth_are_scipys(comparison: ModuleType) -> None:
    table = comparison.correlations(KNOWN)
    assert set(table["rate"]) == {"best", "0.001", "0.003"}
    table = table[table["rate"] == "best"]
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
            assert row_of["spearman_low"] <= row_of["spearman"] <= row_of["spearman_high"]
    whole = table[(table["depth"] == "all") & (table["criterion"] == "early") & (table["outcome"] == "loss")]
    assert whole["spearman"].iloc[0] == pytest.approx(-1)


def test_weights_are_fitted_on_the_other_depths(comparison: ModuleType) -> None:
    table = comparison.weights(KNOWN)
    assert set(table["rate"]) == {"best", "0.001", "0.003"}
    table = table[table["rate"] == "best"]
    assert list(table["tested"]) == ["12", "24", "48", "none: fitted on all"]
    assert (table["early"] == 0).all()
    assert (table["late"] > 0.8).all()
    assert (table["fitted"].dropna() > 0.9).all()
    assert (table["fitted"].dropna() > table["equal"].dropna()).all()


def test_pairs_are_compared_with_published_tables(comparison: ModuleType) -> None:
    """Known losses have the order pre, post, mix, deepnorm, ln-scaling at every depth."""
    table = comparison.published(KNOWN)
    at = table[(table["source"] == "LN-Scaling, Table 1") & (table["model"] == "1B") & (table["depth"] == 12)].iloc[0]
    assert (at["same_order"], at["pairs"]) == (3, 7)  # pre before post, mix and deepnorm; ln-scaling is behind all
    assert at["failed_there"] == "post, deepnorm, mix"
    assert at["failed_here"] == "none"
    assert len(table) == len(DEPTHS) * 8


def test_what_is_missing_is_listed(comparison: ModuleType) -> None:
    plan = comparison.the_plan()
    assert len(comparison.cells(plan)) == 2 * 3 * 16
    assert comparison.missing(KNOWN.runs.iloc[:0], plan)["runs"].sum() == 96
    left = comparison.missing(KNOWN.runs, plan)
    assert left["runs"].sum() == 96 - 60
    assert "pre" not in ", ".join(left["schemes"]).split(", ")


def test_a_comparison_works_with_whatever_is_finished(comparison: ModuleType) -> None:
    half = KNOWN.runs[(KNOWN.runs["rate"] == 1e-3) & ~((KNOWN.runs["depth"] == 48) & (KNOWN.runs["scheme"] == "pre"))]
    tables = dict(comparison.comparison(Evidence(half, KNOWN.predictions), comparison.the_plan()))
    assert len(tables) == 5
    assert all(comparison.markdown(table).count("\n") == len(table) + 1 for table in tables.values())
    counted = tables["correlations: of predicted ranks with what training came to"]
    assert set(counted[counted["outcome"] == "loss"].groupby("depth")["schemes"].first().items()) >= {("48", 9), ("12", 10)}


def test_results_of_several_folders_are_merged(benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_cost_of_late_blocks_is_compared_without_the_first(benchmark: ModuleType) -> None:
    """In some schemes the first block costs more than all others together."""
    costs = benchmark.costs_of(pd.Series([5.0, 0.1, 0.1, 0.1, 0.2, 0.4]))
    assert costs == pytest.approx({"first_block_cost": 5, "later_block_cost": 0.18, "late_block_cost": 0.3})


def test_the_packaged_costs_are_those_of_the_blocks(benchmark: ModuleType) -> None:
    """Computed from the published table of single blocks; the runs have six digits of them."""
    blocks = pd.read_csv(benchmark.DATA / benchmark.BLOCKS).groupby(["scheme", "depth", "rate", "seed"])
    runs = pd.read_csv(benchmark.PACKAGED / RUNS).set_index(["scheme", "depth", "rate", "seed"])
    for cell, rows in blocks:
        costs = benchmark.costs_of(rows.sort_values("layer")["loss_change"])
        assert dict(runs.loc[cell, list(costs)]) == pytest.approx(costs, rel=1e-5, abs=1e-6)


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


def test_simulated_geometry_is_compared_with_that_of_the_models(comparison: ModuleType) -> None:
    chosen = comparison.best_runs(watched(), KNOWN)
    models = comparison.watched_models(chosen).set_index(["depth", "scheme"])
    assert models.loc[(24, "pre"), "late_rotation"] == 20
    assert models.loc[(24, "pre"), "growth"] == 25
    assert (24, "sqrt-scaling") not in models.index  # its best rate is the other one
    table = comparison.geometry(KNOWN, chosen).set_index(["criterion", "probe"])["spearman"]
    assert table["late", "last"] > 0.95
    assert table["late", "first"] < -0.95
    drawn = comparison.charts(chosen.assign(loss=4.0), chosen.assign(loss_change=0.1), chosen)
    assert set(drawn) == {f"{name}-{depth}" for name in ("loss", "blocks", "norms") for depth in DEPTHS}


def test_a_best_rate_at_an_edge_has_the_next_one_tried(benchmark: ModuleType) -> None:
    points = {(point["scheme"], point["layers"]): point["rate"] for point in benchmark.at_edges(KNOWN)}
    assert points["pre", 12] == 1e-2
    assert points["sqrt-scaling", 24] == 3e-4  # the higher rate diverged
    assert points["ngpt", 48] == 3e-4  # every rate failed
    between = replace(KNOWN, runs=pd.concat([KNOWN.runs, pd.DataFrame([row("pre", 12, 1e-2, 5.0)])], ignore_index=True))
    assert ("pre", 12) not in {(point["scheme"], point["layers"]) for point in benchmark.at_edges(between)}
    alone = replace(KNOWN, runs=KNOWN.runs[KNOWN.runs["rate"] == 1e-3])
    points = {(point["scheme"], point["layers"]): point["rate"] for point in benchmark.at_edges(alone)}
    assert points == {("ngpt", 48): 3e-4}  # one rate has no edge, but where it failed a lower one may work
    lower = pd.concat([alone.runs, pd.DataFrame([row("ngpt", 48, 3e-4, 3.9)])], ignore_index=True)
    assert benchmark.at_edges(replace(KNOWN, runs=lower)) == []  # and did, though it is not compared
    lacks = (KNOWN.runs["scheme"] == "post") & (KNOWN.runs["rate"] > 2e-3) & (KNOWN.runs["depth"] == 24)
    left = {(p["scheme"], p["layers"]): p["rate"] for p in benchmark.at_edges(replace(KNOWN, runs=KNOWN.runs[~lacks]))}
    assert left["post", 24] == 3e-3  # which all others have
    highest = replace(KNOWN, runs=KNOWN.runs.assign(rate=KNOWN.runs["rate"].map({1e-3: 1e-2, 3e-3: 3e-2})))
    assert ("pre", 12) not in {(p["scheme"], p["layers"]) for p in benchmark.at_edges(highest)}  # there is no higher one


def test_close_losses_get_another_seed(benchmark: ModuleType) -> None:
    points = benchmark.close_losses(KNOWN, within=0.06)
    assert [(point["scheme"], point["layers"]) for point in points] == [
        (scheme, depth) for depth in (24, 48) for scheme in ("pre", "peri")
    ]  # those of 12 layers have two seeds
    assert {(point["rate"], point["seed"]) for point in points} == {(3e-3, 101)}
    assert len(benchmark.close_losses(KNOWN)) == 2 * 2  # within 0.05


def test_the_best_rate_is_compared_where_there_are_several(comparison: ModuleType) -> None:
    """At 48 layers only one rate is left: it counts by itself, and not as the best of several."""
    known = replace(KNOWN, runs=KNOWN.runs[(KNOWN.runs["depth"] < 48) | (KNOWN.runs["rate"] < 2e-3)])
    table = comparison.correlations(known)
    depths = {rate: set(rows["depth"]) for rate, rows in table.groupby("rate")}
    assert depths == {"best": {"12", "24", "all"}, "0.001": {"12", "24", "48", "all"}, "0.003": {"12", "24", "all"}}
    late = table[(table["criterion"] == "late") & (table["depth"] == "12") & (table["rate"] == "best")].set_index("outcome")
    assert late.loc["loss", "spearman"] > 0.9
    assert comparison.OUTCOMES["late_share"] == comparison.OUTCOMES["rate"] == -1  # large is positive


@pytest.fixture(scope="module")
def page() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        patch.delitem(sys.modules, "language_models", raising=False)
        return _script("language_models_page")


def test_the_page_has_the_losses_and_costs_of_the_packaged_runs(page: ModuleType) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    for name, cells in page.tables(packaged().runs).items():
        assert page.in_page(text, name)[2] == f"{page.markdown(cells)}\n", name


def test_tables_of_the_page_have_known_cells(page: ModuleType, comparison: ModuleType) -> None:
    losses = {cells[0]: cells[1:] for cells in page.losses(KNOWN.runs)}
    assert losses["scheme"][:3] == ["12 layers, 1e-3", "12, 3e-3", "24, 1e-3"]
    assert losses["pre"] == ["**3.900**", "**3.890**", "**3.780**", "**3.760**", "**3.540**", "**3.520**"]
    assert losses["sqrt-scaling"][3] == losses["ngpt"][5] == "failed"
    blocks = {cells[0]: cells[1:] for cells in page.blocks(KNOWN.runs[KNOWN.runs["seed"] == 100])}
    assert blocks["pre"] == ["0.017 (0.08)", "0.008 (0.04)", "0.004 (0.02)", "5.00, 5.00, 5.00"]
    assert blocks["ngpt"][2] == "–"
    table = comparison.correlations(KNOWN)
    setting = str(table["setting"].iloc[0])
    rows = {cells[0]: cells[1] for cells in page._criteria(table, [(setting, "best", "loss")])}
    assert rows["early movement"] == "−1.00 (−1.00 to −1.00)"
    assert rows["late movement"].startswith("**+0.99 (+0.")  # bold, for its interval is above 0
    assert rows["mean rank, equal weights"] == "–"
