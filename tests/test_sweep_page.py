"""The page of a sweep shows what its tables hold, whichever fields vary and whatever became of its runs."""

import math
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import pytest

from normscope.experiments.result import Result
from normscope.results.figures import Chart, Figure, HeatMap, Panels
from normscope.sweeps.page import View, sweep_sections
from normscope.sweeps.sweep import Sweep
from normscope.training import DivergedError, Training
from normscope.training.recipe import read_recipe

# At the second rate runs diverge after a block or two, at the third within the first.
GRID: dict[str, list[Any]] = {"scheme": ["pre", "qkv"], "dim": [16, 8], "rate": [1e-2, 1e3, 1e8], "seed": [100, 101]}
FIXED = {
    "layers": 1, "heads": 2, "head": 4, "feedforward": 8, "readout": [8], "frequencies": 2, "batch": 8, "examples": 96,
    "epoch": 4, "warmup": 0, "clip": 0.0, "schedule": "constant", "test_examples": 16,
}  # fmt: skip
FAILED = {"scheme": "pre", "dim": 16, "rate": 1e-2, "seed": 101}
Tables = dict[str, pd.DataFrame]


def points(grid: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def named(point: dict[str, Any]) -> str:
    return ",".join(f"{field}={value}" for field, value in point.items())


def trained(point: dict[str, Any]) -> tuple[dict[str, Any], pd.DataFrame]:
    """A row of the table of runs and the curve of a real training, as small as can be."""
    row = {"name": named(point), "state": "finished", "error": None, **point}
    if point == FAILED:
        return {
            **row,
            "state": "failed",
            "error": "Traceback\n  line 3\nMemoryError: no room for <b>tensors</b>",
        }, pd.DataFrame()
    training = Training(read_recipe("tiny", {**FIXED, **point}))
    try:
        for _ in training.run():
            pass
    except DivergedError as diverged:
        row |= {"state": "diverged", "error": str(diverged)}
    table = training.table
    last = {key: float(table[key].iloc[-1]) if len(table) else math.nan for key in ("loss", "accuracy")}
    return {**row, "steps": training.step, **last}, table[["step", "loss", "accuracy"]].assign(name=named(point), **point)


def swept(runs: pd.DataFrame, varied: list[str], kind: str = "train", curves: pd.DataFrame | None = None) -> Result:
    """The result of a sweep with these tables."""
    values = [{"preset": "tiny", **FIXED, **point} for point in points(GRID)]
    configuration = {"kind": kind, "varied": varied, "points": [{"name": "", "values": one, "run": "8f"} for one in values]}
    return Result(Sweep, configuration, {"runs": runs, **({} if curves is None else {"curves": curves})})


def synthetic(grid: dict[str, list[Any]], **results: Any) -> pd.DataFrame:
    """Runs of all points of a grid, with results as functions of the number of a run."""
    rows = [{"name": named(point), "state": "finished", "error": None, **point} for point in points(grid)]
    return pd.DataFrame(rows).assign(**{key: [make(i) for i in range(len(rows))] for key, make in results.items()})


def panels(figure: Figure) -> dict[str, Chart | HeatMap]:
    """The panels of a figure by their titles."""
    return {panel.title: panel for panel in figure.figures} if isinstance(figure, Panels) else {"": figure}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def scan() -> Tables:
    """A scan in the spirit of the paper's: schemes, widths, rates, seeds; some runs diverge, one fails."""
    rows, curves = zip(*map(trained, points(GRID)), strict=True)
    return {"runs": pd.DataFrame(rows), "curves": pd.concat([curve for curve in curves if len(curve)], ignore_index=True)}


@pytest.fixture(scope="module")
def result(scan: Tables) -> Result:
    return swept(scan["runs"], list(GRID), curves=scan["curves"])


# A scan of real trainings


def test_the_scan_has_runs_of_every_state(scan: Tables) -> None:
    runs, curves = scan["runs"], scan["curves"]
    assert set(runs["state"]) == {"finished", "diverged", "failed"}
    assert set(runs.loc[runs["rate"] == 1e8, "state"]) == {"diverged"}
    assert set(runs.loc[runs["rate"] == 1e3, "name"]) & set(curves["name"])
    assert not set(runs.loc[runs["rate"] == 1e8, "name"]) & set(curves["name"])


def test_the_page_has_its_sections_and_figures(result: Result) -> None:
    assert [s.title for s in result.sections] == ["Final numbers", "Accuracy over training", "Loss over training", "Runs"]
    assert list(result.figures) == ["accuracy", "diverged", "curve-accuracy", "curve-loss"]
    assert list(panels(result.figures["accuracy"])) == ["scheme pre", "scheme qkv"]
    shown = [f"scheme {scheme}, rate {rate}" for scheme in ("pre", "qkv") for rate in ("0.01", "1000")]
    assert list(panels(result.figures["curve-loss"])) == shown
    for name in ("curve-accuracy", "curve-loss"):
        assert "No run has a curve at scheme pre, rate 1e+08; scheme qkv, rate 1e+08." in result[name].text
    settings = result.figures["diverged"].settings
    assert settings.startswith("train; preset tiny; layers 1; heads 2; head 4; feedforward 8; readout 8; frequencies 2;")
    assert settings.endswith("scheme pre, qkv; dim 8, 16; rate 0.01, 1000, 1e+08; seed 100, 101; mean over seeds")


def test_maps_are_means_and_shares_over_seeds(result: Result, scan: Tables) -> None:
    runs = scan["runs"].to_dict("records")
    for scheme in ("pre", "qkv"):
        accuracy, diverged = (panels(result.figures[name])[f"scheme {scheme}"] for name in ("accuracy", "diverged"))
        assert isinstance(accuracy, HeatMap)
        assert isinstance(diverged, HeatMap)
        assert (accuracy.x_names, accuracy.y_names, accuracy.limits) == (["8", "16"], ["0.01", "1000", "1e+08"], (0.0, 100.0))
        for (i, rate), (j, dim) in product(enumerate([0.01, 1e3, 1e8]), enumerate([8, 16])):
            point = [row for row in runs if (row["scheme"], row["rate"], row["dim"]) == (scheme, rate, dim)]
            assert len(point) == 2
            known = [100 * row["accuracy"] for row in point if math.isfinite(row["accuracy"])]
            assert accuracy.values[i][j] == pytest.approx(fmean(known) if known else math.nan, nan_ok=True)
            ended = [row["state"] == "diverged" for row in point if row["state"] != "failed"]
            assert diverged.values[i][j] == 100 * sum(ended) / len(ended)


def test_curves_are_the_trainings_and_a_dot_ends_one_that_diverged(result: Result, scan: Tables) -> None:
    runs, curves = scan["runs"], scan["curves"]
    dotted = 0
    for (scheme, rate), panel in runs[runs["rate"] < 1e8].groupby(["scheme", "rate"]):
        for column, factor in (("accuracy", 100), ("loss", 1)):
            chart = panels(result.figures[f"curve-{column}"])[f"scheme {scheme}, rate {rate:g}"]
            assert isinstance(chart, Chart)
            for dim, group in panel.groupby("dim"):
                wanted = curves[curves["name"].isin(group["name"])]
                lines = [line for line in chart.lines if line.name == f"dim {dim}"]
                assert [x for line in lines for x in line.x] == wanted["step"].tolist()
                assert [y for line in lines for y in line.y] == pytest.approx((factor * wanted[column]).tolist(), rel=1e-14)
            ended = curves[curves["name"].isin(panel.loc[panel["state"] == "diverged", "name"])].groupby("name", sort=False)
            dots = [x for line in chart.lines if line.dots for x in line.x]
            assert dots == [rows["step"].max() for _, rows in ended]
            dotted += len(dots)
    assert dotted > 0


def test_runs_that_did_not_finish_are_listed_with_what_went_wrong(result: Result, scan: Tables) -> None:
    troubled, every = result["runs"].tables
    runs = scan["runs"]
    assert [row[0].replace(", ", ",") for row in troubled.rows] == runs.loc[runs["state"] != "finished", "name"].tolist()
    errors = [error for _, _, error in troubled.rows]
    assert "MemoryError: no room for <b>tensors</b>" in errors  # the last line of its traceback
    assert any("is not a finite number at step" in error for error in errors)
    assert every.columns == ("scheme", "dim", "rate", "seed", "state", "steps", "loss", "accuracy in %", "name")
    for row, wanted in zip(every.rows, runs.itertuples(), strict=True):
        assert row[:5] == (wanted.scheme, str(wanted.dim), f"{wanted.rate:g}", str(wanted.seed), wanted.state)
        assert row[7] == (f"{100 * wanted.accuracy:.2f}" if math.isfinite(wanted.accuracy) else "–")
        assert row[8].replace(", ", ",") == wanted.name


# Which field is what


@pytest.mark.parametrize(
    ("numeric", "axes"),
    [
        (["dim", "rate"], ("dim", "rate")),
        (["rate", "dim"], ("dim", "rate")),
        (["layers", "rate", "heads", "dim"], ("dim", "rate")),
        (["rate", "layers"], ("layers", "rate")),
        (["heads", "dim"], ("dim", "heads")),
        (["warmup", "clip", "heads"], ("warmup", "clip")),
        (["rate"], ("rate",)),
        (["dim"], ("dim",)),
        ([], ()),
    ],
)
def test_width_and_rate_are_the_axes_where_they_vary_and_otherwise_the_first_numbers(
    numeric: list[str], axes: tuple[str, ...]
) -> None:
    grid: dict[str, list[Any]] = {"scheme": ["b", "a"], **{field: [1, 2] for field in numeric}, "seed": [1, 2]}
    grid["calibrate"] = [True, False]
    result = swept(synthetic(grid, accuracy=lambda i: i / 100), list(grid))
    view = View.of(result.tables, result.configuration)
    assert view.axes == axes
    assert set(view.others) == {"scheme", "calibrate", *numeric} - set(axes)
    assert list(result.figures) == ["accuracy", "diverged"]
    if len(axes) == 2:
        maps = panels(result.figures["accuracy"])
        assert len(maps) == 2 ** len(view.others)
        assert all(isinstance(heat, HeatMap) and (heat.x_label, heat.y_label) == axes for heat in maps.values())


def test_names_and_values_of_fields_change_nothing_but_words() -> None:
    grid = {"scheme": ["pre", "qkv"], "layers": [1, 2, 3], "heads": [2, 4], "seed": [0, 1]}
    runs = synthetic(grid, accuracy=lambda i: (7 * i % 24) / 24)
    renamed = runs.rename(columns={"scheme": "colour", "layers": "alpha", "heads": "beta"})
    renamed = renamed.assign(colour=renamed["colour"].map({"pre": "red", "qkv": "blue"}), alpha=0.5 * renamed["alpha"])
    first = panels(swept(runs, list(grid)).figures["accuracy"])
    other = panels(swept(renamed, ["colour", "alpha", "beta", "seed"]).figures["accuracy"])
    assert [heat.values for heat in first.values()] == [heat.values for heat in other.values()]  # type: ignore[union-attr]
    assert list(other) == ["colour red", "colour blue"]


def test_a_field_that_keeps_its_value_is_no_axis() -> None:
    result = swept(synthetic({"dim": [8], "rate": [1, 2]}, accuracy=lambda i: i), ["dim", "rate"])
    view = View.of(result.tables, result.configuration)
    assert (view.axes, view.others) == (("rate",), ())


def test_one_number_that_varies_gives_a_line_with_the_range_of_seeds() -> None:
    grid = {"scheme": ["pre", "qkv"], "rate": [1e-2, 1e-4, 1e-3], "seed": [0, 1, 2]}
    runs = synthetic(grid, accuracy=lambda i: (5 * i % 18) / 20)
    figures = swept(runs, list(grid)).figures
    chart, diverged = figures["accuracy"], figures["diverged"]
    assert isinstance(chart, Chart)
    assert chart.log_x
    for line, scheme in zip(chart.lines, ("pre", "qkv"), strict=True):
        assert line.name == f"scheme {scheme}"
        assert line.x == [1e-4, 1e-3, 1e-2]
        for rate, y, low, high in zip(line.x, line.y, line.low or (), line.high or (), strict=True):
            values = [100 * row.accuracy for row in runs.itertuples() if (row.scheme, row.rate) == (scheme, rate)]
            assert (y, low, high) == pytest.approx((fmean(values), min(values), max(values)))
    assert isinstance(diverged, Chart)
    assert all(line.low is None for line in diverged.lines)


def test_no_number_that_varies_gives_dots() -> None:
    grid = {"scheme": ["qkv", "pre", "peri"], "seed": [0, 1]}
    chart = swept(synthetic(grid, accuracy=lambda i: i / 10), list(grid)).figures["accuracy"]
    assert isinstance(chart, Chart)
    assert [line.name for line in chart.lines] == ["1 scheme qkv", "2 scheme pre", "3 scheme peri"]
    assert [line.y[0] for line in chart.lines] == pytest.approx([5, 25, 45])
    assert [(line.low or [0])[0] for line in chart.lines] == pytest.approx([0, 20, 40])
    assert all(line.dots for line in chart.lines)


@pytest.mark.parametrize("grid", [{"seed": [0]}, {"seed": [0, 1, 2]}, {}])
def test_a_single_point_has_its_curves_and_no_map(scan: Tables, grid: dict[str, list[Any]]) -> None:
    runs = synthetic(grid, accuracy=lambda i: 0.25).assign(name=[f"run {i}" for i in range(max(1, len(grid.get("seed", []))))])
    curve = scan["curves"][scan["curves"]["name"] == scan["curves"]["name"].iloc[0]][["step", "loss", "accuracy"]]
    result = swept(runs, list(grid), curves=pd.concat([curve.assign(name=name) for name in runs["name"]]))
    assert list(result.figures) == ["curve-accuracy", "curve-loss"]
    chart = result.figures["curve-loss"]
    assert isinstance(chart, Chart)
    assert [line.name for line in chart.lines] == (["all runs"] if len(runs) == 1 else [f"seed {n}" for n in grid["seed"]])
    assert any("25.00" in row for row in result["runs"].tables[-1].rows)


def test_names_of_lines_are_the_same_in_all_panels_even_where_a_run_is_missing() -> None:
    grid = {"rate": [1, 2], "dim": [8, 16, 32]}
    runs = synthetic(grid, accuracy=lambda i: 0.5)
    curves = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "accuracy": [0.1, 0.2]}).merge(runs[["name"]], "cross")
    result = swept(runs, list(grid), curves=curves[curves["name"] != "rate=2,dim=8"])
    charts = panels(result.figures["curve-loss"])
    lines = [[line.name for line in chart.lines] for chart in charts.values() if isinstance(chart, Chart)]
    assert lines == [["dim 8", "dim 16", "dim 32"]] * 2
    assert [len(line.x) for line in charts["rate 2"].lines if np.isfinite(line.x).any()] == [2, 2]  # type: ignore[union-attr]


def test_lists_switches_and_missing_values_are_fields_too() -> None:
    runs = pd.DataFrame(
        {
            "name": list("abcdef"),
            "state": "finished",
            "error": None,
            "readout": [[8], [8, 8], [8], [8, 8], [8], [8]],
            "norm": ["rms", None, "rms", None, "rms", "layer"],
            "calibrate": [True, True, False, False, True, True],
            "dim": [8, 8, 16, 16, None, 8],
            "accuracy": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        }
    )
    result = swept(runs, ["readout", "norm", "calibrate", "dim"])
    chart = result.figures["accuracy"]
    assert isinstance(chart, Chart)
    assert {line.name: list(line.x) for line in chart.lines} == {
        "readout 8, norm rms, calibrate true": [8],
        "readout 8, norm layer, calibrate true": [8],
        "readout 8, norm rms, calibrate false": [16],
        "readout 8,8, norm –, calibrate true": [8],
        "readout 8,8, norm –, calibrate false": [16],
    }
    rows = [row[:5] for row in result["runs"].tables[-1].rows]
    assert ("8", "rms", "true", "–", "finished") in rows
    assert ("8,8", "–", "false", "16", "finished") in rows


def test_more_panels_than_a_figure_can_show_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.sweeps.page._PANELS", 3)
    grid = {"scheme": ["a", "b", "c", "d"], "dim": [1, 2], "rate": [1, 2]}
    figure = swept(synthetic(grid, accuracy=lambda i: 0.5), list(grid)).figures["accuracy"]
    assert list(panels(figure)) == ["scheme a", "scheme b", "scheme c"]
    assert "3 of 4 panels are shown, the tables have all of them" in figure.settings


def test_a_sweep_whose_runs_all_failed_lists_their_errors() -> None:
    grid = {"dim": [8, 16], "rate": [1, 2]}
    runs = synthetic(grid).assign(state="failed", error="first\nlast " + 1000 * "x")
    result = swept(runs, list(grid), curves=pd.DataFrame({"name": []}))
    assert not result.figures
    troubled = result["runs"].tables[0]
    assert [row[2].startswith("last xxx") for row in troubled.rows] == [True] * 4
    assert max(len(row[2]) for row in troubled.rows) <= 300


# Other kinds


def cosines(names: list[str]) -> pd.DataFrame:
    """Curves of three schemes for each run."""
    rows = [
        {"name": name, "time": float(t), "scheme": scheme, "mean": 0.1 * t + 0.01 * i, "low": -0.1, "high": 0.1 * t + 0.2}
        for i, name in enumerate(names)
        for scheme in ("pre", "post", "peri")
        for t in range(4)
    ]
    return pd.DataFrame(rows)


def test_ensembles_have_a_panel_for_each_point_with_a_line_and_a_band_for_each_scheme() -> None:
    grid = {"dim": [8, 16], "beta": [1.0, 4.0]}
    runs = synthetic(grid, cosine_pre=lambda i: 0.1 * i, cosine_post=lambda i: 0.2 * i)
    curves = cosines(list(runs["name"]))
    result = swept(runs, list(grid), "ensemble", curves)
    assert list(result.figures) == ["final-cosine-pre", "final-cosine-post", "curve-cosine"]
    charts = panels(result.figures["curve-cosine"])
    assert list(charts) == [f"dim {dim}, beta {beta}" for dim in (8, 16) for beta in (1, 4)]
    for name, chart in zip(runs["name"], charts.values(), strict=True):
        assert isinstance(chart, Chart)
        assert [line.name for line in chart.lines] == ["pre", "post", "peri"]
        for line in chart.lines:
            wanted = curves[(curves["name"] == name) & (curves["scheme"] == line.name)]
            for values, column in ((line.x, "time"), (line.y, "mean"), (line.low, "low"), (line.high, "high")):
                assert list(values or ()) == wanted[column].tolist()
    final = result.figures["final-cosine-post"]
    assert isinstance(final, HeatMap)
    assert final.values == [[0.0, 0.4], [0.2, pytest.approx(0.6)]]  # beta up, dim across


def test_ensembles_of_one_scheme_each_are_in_one_panel() -> None:
    runs = synthetic({"scheme": ["pre", "post", "peri"]}, cosine=lambda i: 0.1 * i)
    curves = cosines(["x"])
    result = swept(runs, ["scheme"], "ensemble", curves.assign(name="scheme=" + curves["scheme"]))
    assert list(result.figures) == ["final-cosine", "curve-cosine"]
    chart = result.figures["curve-cosine"]
    assert isinstance(chart, Chart)
    assert [line.name for line in chart.lines] == ["pre", "post", "peri"]


def test_a_field_may_have_the_name_of_a_column_of_curves() -> None:
    runs = synthetic({"time": [2.0, 3.0, 4.0]}, cosine_pre=lambda i: 0.1 * i).assign(state=["finished", "finished", "waiting"])
    result = swept(runs, ["time"], "ensemble", cosines(["time=2.0", "time=3.0"]))
    assert list(panels(result.figures["curve-cosine"])) == ["time 2", "time 3"]
    assert "No run has a curve at time 4." in result["curve-cosine"].text
    assert len(result["runs"].tables) == 1  # none diverged or failed


def test_other_kinds_have_a_map_of_every_number() -> None:
    grid = {"model": ["one", "two"], "level": [0.1, 0.2, 0.3], "heads": [1, 2]}
    runs = synthetic(
        grid, spread=lambda i: 10.0 ** -(i % 5), change=lambda i: i - 6.0, note=lambda i: "text", none=lambda i: math.nan
    )
    figures = swept(runs, list(grid), "stability").figures
    assert list(figures) == ["final-spread", "final-change"]
    spread, change = (list(panels(figure).values()) for figure in figures.values())
    assert [(heat.log, heat.limits) for heat in spread] == [(True, (1e-4, 1.0))] * 2  # type: ignore[union-attr]
    assert [(heat.log, heat.limits) for heat in change] == [(False, (-6.0, 5.0))] * 2  # type: ignore[union-attr]
    assert isinstance(change[1], HeatMap)
    assert change[1].values == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def test_results_that_are_not_finite_leave_their_cell_empty() -> None:
    grid = {"dim": [1, 2], "rate": [1, 2], "seed": [0, 1]}
    runs = synthetic(grid, loss=lambda i: [math.inf, 1.0, math.nan, -math.inf, 2.0, 4.0, 5.0, 5.0][i])
    (chart,) = swept(runs, list(grid), "audit").figures.values()
    assert isinstance(chart, HeatMap)
    np.testing.assert_array_equal(chart.values, [[1.0, 3.0], [math.nan, 5.0]])


def test_sections_need_the_table_of_runs_alone() -> None:
    runs = synthetic({"rate": [1, 2]}, accuracy=lambda i: 0.5)
    titles = [section.title for section in sweep_sections({"runs": runs}, {"kind": "train", "varied": ["rate"]})]
    assert titles == ["Final numbers", "Runs"]
