"""How many runs a published mean may be of: a statistic whose answer is known where the runs are drawn here."""

import math

import numpy as np
import pandas as pd
import pytest

from normscope.errors import InputError
from normscope.papers.curves import measured, published
from normscope.papers.scatter import RUNS, edge_error, interval, of_panel, scatter, stored_scatter, upper_edges_alone

POINTS, SINGLE = 40, 3000
OWNERS = np.repeat(np.arange(4), 10)  # four curves of ten points


def curves(runs: int, seed: int) -> np.ndarray:
    """Runs with correlated points, whose principal components have standard deviations from 2 down to 0.03."""
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((POINTS, POINTS)))[0]
    deviations = 2 * np.geomspace(1, 1e-4, POINTS)
    return np.random.default_rng(seed).standard_normal((runs, POINTS)) * deviations @ rotation.T


def test_the_mean_of_some_runs_is_taken_for_one_of_so_many() -> None:
    """Over 60 means of 50 runs the interval holds 50 in nine of ten cases, give or take."""
    single = curves(SINGLE, 1)
    found = [scatter(single, curves(50, 100 + i).mean(0) - single.mean(0), OWNERS) for i in range(60)]
    assert 48 <= sum(each.low < 50 < each.high for each in found) <= 59
    assert np.median([each.runs for each in found]) == pytest.approx(50, rel=0.2)
    assert all(len(each.z) == 10 for each in found)


def test_errors_of_readings_are_not_taken_for_few_runs() -> None:
    """The mean of 100,000 runs, read with errors as large as a component that counts may have."""
    single, rng = curves(SINGLE, 1) / 20, np.random.default_rng(5)
    exact = single.std(0) / math.sqrt(100_000) * rng.standard_normal((60, POINTS))
    found = [scatter(single, difference, OWNERS) for difference in exact + 0.0006 * rng.standard_normal((60, POINTS))]
    assert sum(each.low < 100_000 < each.high for each in found) >= 54
    assert np.median([each.runs for each in found]) < 50_000  # which by itself looks like fewer


@pytest.mark.parametrize("shifted", [OWNERS, 0 * OWNERS])
def test_curves_that_were_read_too_high_are_not_taken_for_few_runs(shifted: np.ndarray) -> None:
    """The same with an error that a whole curve, or all of them, have in common."""
    rng = np.random.default_rng(6)
    shifts = np.kron(np.eye(4), np.ones((10, 1))) / math.sqrt(10)
    single = rng.standard_normal((SINGLE, 4)) * 0.05 @ shifts.T + rng.standard_normal((SINGLE, POINTS)) * 1e-4
    exact = single.std(0) / math.sqrt(100_000) * rng.standard_normal((60, POINTS))
    moved = exact + 0.0006 * rng.standard_normal((60, 4))[:, shifted]
    found = [scatter(single, each, OWNERS) for each in moved]
    assert sum(each.low < 100_000 < each.high for each in found) >= 54
    independent = [interval(np.array(each.z), np.full(4, 0.0006 / 0.05)) for each in found]
    assert sum(low < 100_000 < high for low, high in independent) < 30


def test_components_that_readings_do_not_resolve_are_left_out() -> None:
    single = curves(SINGLE, 1) / 20
    difference = curves(50, 2).mean(0) / 20
    assert len(scatter(single, difference, OWNERS).z) < 10
    assert len(scatter(single * 20, difference * 20, OWNERS).z) == 10
    with pytest.raises(InputError, match="differ too little"):
        scatter(single / 1000, difference / 1000, OWNERS)


def test_the_edge_of_a_band_errs_as_a_quantile_does() -> None:
    """√(p(1 − p)/n)/φ at the quantile, for normal values; the median of |error| is 0.674 of that for one point."""
    single = np.random.default_rng(3).standard_normal((100_000, 1))
    quantile = -1.6449
    density = math.exp(-(quantile**2) / 2) / math.sqrt(2 * math.pi)
    middle, low, high = edge_error(single, 400, 0.05)
    assert middle == pytest.approx(0.674 * math.sqrt(0.05 * 0.95 / 400) / density, rel=0.15)
    assert low < middle < high


def test_upper_edges_that_are_off_alone_are_not_taken_for_few_runs() -> None:
    curves = np.random.default_rng(5).standard_normal((4000, 1, 30)).cumsum(-1)  # neighbouring times are alike
    points = pd.DataFrame({"scheme": 0, "time": range(30), "mean": 0.1, "low": 0.1, "high": 0.1})
    points.loc[::3, "low"] = np.nan
    sizes = {"mean": 0.5, "low": 1.0, "high": 0.5}  # means and edges of 200 runs are about as far off
    assert upper_edges_alone(curves, points.assign(**sizes), 200) > 0.3
    assert upper_edges_alone(curves, points.assign(**sizes | {"high": 3.0}), 200) < 0.02
    assert upper_edges_alone(curves, points.assign(**sizes | {"mean": 0.02}), 200) < 0.02
    assert upper_edges_alone(curves, points.assign(**sizes | {"low": 0.02}), 200) < 0.02
    skewed = np.exp(curves / 4)  # whose upper edges miss by more than the lower ones
    small, large = {"mean": 0.3, "low": 0.03, "high": 1.0}, {"mean": 0.3, "low": 1.0, "high": 0.03}
    assert upper_edges_alone(skewed, points.assign(**small), 200) < upper_edges_alone(skewed, points.assign(**large), 200)


def test_what_is_stored_agrees_with_the_curves_beside_it() -> None:
    rows = stored_scatter().set_index("panel")
    assert set(rows.index) <= set(RUNS)
    assert (rows["low"] < rows["effective"]).all()
    assert (rows["effective"] < rows["high"]).all()
    for panel, row in rows.iterrows():
        z = np.array([float(number) for number in row["z"].split()])
        assert row["effective"] == pytest.approx(len(z) / (z**2).sum(), rel=0.05)
        both = published(f"2-fig{panel}").merge(measured(f"panel-{panel}"), on=["scheme", "time"], suffixes=("", "_ours"))
        apart = (both["low"] - both["low_ours"])[both["how"].isin(["m", "e", "k"])]
        assert row["low_edge"] == pytest.approx(math.sqrt((apart**2).mean()), rel=0.25)


def test_a_larger_change_of_the_setting_is_taken_for_fewer_runs() -> None:
    small, large = (of_panel("5d", 16, {"beta": beta}) for beta in (1.05, 2.0))
    assert small["effective"] > 20 * large["effective"]
    assert small["z"].count(" ") == large["z"].count(" ")
    assert "low_edge" not in small  # bands are those of the published panel


def test_a_published_panel_is_compared_with_the_stored_one() -> None:
    """z of all runs would be the stored ones; of a few, the component with the largest variance is the same one."""
    row = of_panel("5d", 48)
    stored = stored_scatter().set_index("panel").loc["5d"]
    assert row["low_edge"] == pytest.approx(stored["low_edge"], rel=0.1)  # published against stored, whatever the runs
    assert row["high_edge"] == pytest.approx(stored["high_edge"], rel=0.1)
    first, of_all = (abs(float(each["z"].split()[0])) for each in (row, stored))
    assert first == pytest.approx(of_all, abs=0.04)
    assert np.isnan(row["low_expected"])  # 48 runs are too few for the quantiles of about 160
