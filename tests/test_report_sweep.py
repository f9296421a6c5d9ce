"""The page of a sweep says what its tables say, whichever fields vary and whatever became of its runs."""

import json
import math
import re
import traceback
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import pytest
from normscope.report.sweep import write_sweep_report
from normscope.report.sweep_curves import training_charts
from normscope.report.sweep_fields import Sweep, read_sweep
from normscope.report.sweep_final import final_charts, measures_of

from normscope.dynamics.ensemble import Ensemble
from normscope.dynamics.ensemble_run import EnsembleRun
from normscope.errors import InputError
from normscope.report.charts import Chart, HeatMap
from normscope.runs import Parts, RunFolder, new_run, open_run
from normscope.schemes import NAMED
from normscope.training import DivergedError, Training
from normscope.training.recipe import read_recipe
from test_report import Reader, traces

# At the second rate runs diverge after a block or two, at the third within the first.
GRID: dict[str, list[Any]] = {"scheme": ["pre", "qkv"], "dim": [16, 8], "rate": [1e-2, 1e4, 1e8], "seed": [100, 101]}
FIXED = {
    "layers": 1, "heads": 2, "head": 4, "feedforward": 8, "readout": [8], "frequencies": 2, "batch": 8, "examples": 96,
    "epoch": 4, "warmup": 0, "clip": 0.0, "schedule": "constant", "test_examples": 16,
}  # fmt: skip
FAILED = {"scheme": "pre", "dim": 16, "rate": 1e-2, "seed": 101}
Tables = tuple[pd.DataFrame, pd.DataFrame]


def points(grid: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def named(point: dict[str, Any]) -> str:
    return ",".join(f"{field}={value}" for field, value in point.items())


def trained(point: dict[str, Any]) -> tuple[dict[str, Any], pd.DataFrame]:
    """A row of the table of runs and the curve of a real training, as small as can be."""
    training, state, error = Training(read_recipe("tiny", {**FIXED, **point})), "finished", None
    try:
        for _ in training.run():
            if point == FAILED:
                raise MemoryError("no room for <b>tensors</b>")
    except DivergedError as diverged:
        state, error = "diverged", str(diverged)
    except MemoryError:
        return {"name": named(point), "state": "failed", "error": traceback.format_exc(), **point}, pd.DataFrame()
    table = training.table
    last = {key: float(table[key].iloc[-1]) if len(table) else math.nan for key in ("loss", "accuracy")}
    row = {"name": named(point), "state": state, "error": error, **point, "steps": training.step, **last}
    return row, table[["step", "loss", "accuracy"]].assign(name=named(point), **point)


def configuration(varied: list[str], kind: str = "train") -> dict[str, Any]:
    values = [{"preset": "tiny", **FIXED, **point} for point in points(GRID)]
    return {"kind": kind, "varied": varied, "points": [{"name": "", "values": one, "run": "8f"} for one in values]}


def written(
    folder: Path, tables: dict[str, pd.DataFrame], varied: list[str], kind: str = "train", title: str = "A sweep"
) -> RunFolder:
    with new_run(folder, "sweep", configuration(varied, kind)) as run:
        for name, table in tables.items():
            run.write_table(name, table)
    run = open_run(folder)
    write_sweep_report(run, title, ("html", "md"))
    return run


@pytest.fixture(scope="module")
def scan() -> Tables:
    """A scan in the spirit of the paper's: schemes, widths, rates, seeds; some runs diverge, one fails."""
    rows, curves = zip(*map(trained, points(GRID)), strict=True)
    return pd.DataFrame(rows), pd.concat([curve for curve in curves if len(curve)], ignore_index=True)


@pytest.fixture(scope="module")
def run(scan: Tables, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    findings = pd.DataFrame({"text": ["All runs at a rate of 1e8 diverged."], "figure": ["diverged-pre"]})
    tables = {"runs": scan[0], "curves": scan[1], "findings": findings}
    return written(tmp_path_factory.mktemp("sweep") / "run", tables, list(GRID), title="Stability scan")


@pytest.fixture(scope="module")
def page(run: RunFolder) -> Reader:
    return Reader((run.path / "report.html").read_text(encoding="utf-8"))


def csv(run: RunFolder, name: str) -> pd.DataFrame:
    return pd.read_csv(run.path / "figures" / f"{name}.csv")


def figures(run: RunFolder) -> set[str]:
    return {path.stem for path in (run.path / "figures").glob("*.png")}


def synthetic(grid: dict[str, list[Any]], **results: Any) -> pd.DataFrame:
    """Runs of all points of a grid, with results as functions of the number of a run."""
    rows = [{"name": named(point), "state": "finished", "error": None, **point} for point in points(grid)]
    return pd.DataFrame(rows).assign(**{key: [make(i) for i in range(len(rows))] for key, make in results.items()})


def swept(folder: Path, runs: pd.DataFrame, varied: list[str], kind: str = "train") -> Sweep:
    run = RunFolder(folder)
    run.write_table("runs", runs)
    return read_sweep(run, {"kind": kind, "varied": varied})


def final(sweep: Sweep) -> dict[str, Any]:
    return {name: chart for measure in measures_of(sweep) for name, chart in final_charts(sweep, measure).items()}


# A scan of real trainings


def test_the_scan_has_runs_of_every_fate(scan: Tables) -> None:
    runs, curves = scan
    assert set(runs["state"]) == {"finished", "diverged", "failed"}
    assert set(runs.loc[runs["rate"] == 1e8, "state"]) == {"diverged"}
    assert set(runs.loc[runs["rate"] == 1e4, "name"]) & set(curves["name"])
    assert not set(runs.loc[runs["rate"] == 1e8, "name"]) & set(curves["name"])


def test_the_page_has_its_sections_and_figures(run: RunFolder, page: Reader) -> None:
    titles = ["Findings", "Final numbers", "Accuracy over training", "Loss over training", "Runs"]
    headings = [page.text.rindex(f"{title}\n") for title in titles]
    assert headings == sorted(headings)
    counts = run.table("runs")["state"].value_counts()
    states = f"{counts['finished']} finished, {counts['diverged']} diverged, 1 failed."
    assert f"24 runs of kind train over scheme, dim, rate, seed: {states}" in page.text
    panels = [f"{scheme}-{rate}" for scheme in ("pre", "qkv") for rate in ("0-01", "10000")]
    maps = {f"{name}-{scheme}" for name in ("accuracy", "diverged") for scheme in ("pre", "qkv")}
    assert figures(run) == maps | {f"curve-{name}-{panel}" for name in ("accuracy", "loss") for panel in panels}
    assert page.text.count("No run has a curve at scheme pre, rate 1e+08; scheme qkv, rate 1e+08.") == 2
    small_print = (
        "train; preset tiny; layers 1; heads 2; head 4; feedforward 8; readout 8; frequencies 2; batch 8; examples 96;"
    )
    assert small_print in page.text
    assert "scheme pre, qkv; dim 8, 16; rate 0.01, 10000, 1e+08; seed 100, 101; mean over seeds" in page.text
    links = [link["href"] for link in page.every("a")]
    assert all(f"figures/{name}.{kind}" in links for name in figures(run) for kind in ("html", "csv"))
    assert "#figure-diverged-pre" in links
    assert "All runs at a rate of 1e8 diverged." in page.text


def test_maps_are_means_and_shares_over_seeds(run: RunFolder, scan: Tables) -> None:
    runs = scan[0].to_dict("records")
    for scheme in ("pre", "qkv"):
        accuracy, diverged = csv(run, f"accuracy-{scheme}"), csv(run, f"diverged-{scheme}")
        assert list(accuracy) == ["rate", "dim", "accuracy in %"]
        assert list(zip(accuracy["rate"], accuracy["dim"], strict=True)) == list(product([0.01, 1e4, 1e8], [8, 16]))
        for i, (rate, dim) in enumerate(product([0.01, 1e4, 1e8], [8, 16])):
            point = [row for row in runs if (row["scheme"], row["rate"], row["dim"]) == (scheme, rate, dim)]
            assert len(point) == 2
            known = [100 * row["accuracy"] for row in point if math.isfinite(row["accuracy"])]
            assert accuracy["accuracy in %"][i] == pytest.approx(fmean(known) if known else math.nan, nan_ok=True)
            ended = [row["state"] == "diverged" for row in point if row["state"] != "failed"]
            assert diverged["runs diverged in %"][i] == 100 * sum(ended) / len(ended)
        assert traces(run.path / "figures" / f"accuracy-{scheme}.html")[0]["zmax"] == 100


def test_curves_are_the_trainings_and_a_dot_ends_one_that_diverged(run: RunFolder, scan: Tables) -> None:
    runs, curves = scan
    dotted = 0
    for (scheme, rate), panel in runs[runs["rate"] < 1e8].groupby(["scheme", "rate"]):
        for column, label, factor in (("accuracy", "accuracy in %", 100), ("loss", "loss", 1)):
            found = csv(run, f"curve-{column}-{scheme}-{f'{rate:g}'.replace('.', '-')}")
            for dim, group in panel.groupby("dim"):
                wanted = curves[curves["name"].isin(group["name"])]
                line = found[found["line"] == f"dim {dim}"]
                assert line["step"].tolist() == wanted["step"].tolist()
                assert line[label].tolist() == pytest.approx((factor * wanted[column]).tolist(), rel=1e-14)
            ended = curves[curves["name"].isin(panel.loc[panel["state"] == "diverged", "name"])].groupby("name", sort=False)
            dots = found[found["line"] == "diverged"]
            assert dots["step"].tolist() == [rows["step"].max() for _, rows in ended]
            dotted += len(dots)
    assert dotted > 0


def test_runs_that_did_not_finish_are_named_with_what_went_wrong(run: RunFolder, page: Reader, scan: Tables) -> None:
    runs = scan[0]
    start, end = page.text.index("Runs that diverged or failed"), page.text.rindex("All runs")
    said = page.text[start:end]
    for row in runs[runs["state"] != "finished"].itertuples():
        assert row.name.replace(",", ", ") in said
    assert "MemoryError: no room for <b>tensors</b>" in said
    assert "Traceback" not in said
    assert "is not a finite number at step" in said
    assert not any(name.replace(",", ", ") in said for name in runs.loc[runs["state"] == "finished", "name"])
    assert r"no room for \<b\>tensors\</b\>" in (run.path / "report.md").read_text(encoding="utf-8")


def test_the_table_of_runs_has_every_run_once(run: RunFolder, scan: Tables) -> None:
    text = (run.path / "report.md").read_text(encoding="utf-8").partition("**All runs**")[2]
    table = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert head == ["scheme", "dim", "rate", "seed", "state", "steps", "loss", "accuracy in %", "name"]
    runs = scan[0]
    for row, wanted in zip(rows, runs.itertuples(), strict=True):
        cells = [cell.replace("\\", "") for cell in row]
        assert cells[:5] == [wanted.scheme, str(wanted.dim), f"{wanted.rate:g}", str(wanted.seed), wanted.state]
        assert cells[7] == (f"{100 * wanted.accuracy:.2f}" if math.isfinite(wanted.accuracy) else "–")
        assert cells[8].replace(", ", ",") == wanted.name


def test_inside_a_run_that_is_being_written_the_configuration_is_given(scan: Tables, tmp_path: Path) -> None:
    runs = scan[0].head(2)
    with new_run(tmp_path / "run", "sweep", configuration(list(GRID))) as run:
        run.write_table("runs", runs)
        write_sweep_report(run, "Two runs", configuration=configuration(list(GRID)))
    assert "2 runs of kind train" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no table 'runs'"):
        write_sweep_report(RunFolder(tmp_path), "Nothing", configuration=configuration([]))


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
def test_width_and_rate_are_the_axes_where_they_vary_and_else_the_first_numbers(
    tmp_path: Path, numeric: list[str], axes: tuple[str, ...]
) -> None:
    grid: dict[str, list[Any]] = {"scheme": ["b", "a"], **{field: [1, 2] for field in numeric}, "seed": [1, 2]}
    grid["calibrate"] = [True, False]
    sweep = swept(tmp_path, synthetic(grid, accuracy=lambda i: i / 100), list(grid))
    assert sweep.axes == axes
    assert set(sweep.others) == {"scheme", "calibrate", *numeric} - set(axes)
    drawn = final(sweep)
    if len(axes) == 2:
        assert all((chart.x_label, chart.y_label) == axes for chart in drawn.values())
        assert len(drawn) == 2 * 2 ** len(sweep.others)
    else:
        assert list(drawn) == ["accuracy", "diverged"]


def test_names_and_values_of_fields_change_nothing_but_words(tmp_path: Path) -> None:
    grid = {"scheme": ["pre", "qkv"], "layers": [1, 2, 3], "heads": [2, 4], "seed": [0, 1]}
    runs = synthetic(grid, accuracy=lambda i: (7 * i % 24) / 24)
    renamed = runs.rename(columns={"scheme": "colour", "layers": "alpha", "heads": "beta"})
    renamed = renamed.assign(colour=renamed["colour"].map({"pre": "red", "qkv": "blue"}), alpha=0.5 * renamed["alpha"])
    one = final(swept(tmp_path, runs, list(grid)))
    other = final(swept(tmp_path, renamed, ["colour", "alpha", "beta", "seed"]))
    assert [chart.values for chart in one.values()] == [chart.values for chart in other.values()]
    assert [name.replace("red", "pre").replace("blue", "qkv") for name in other] == list(one)


def test_a_field_that_keeps_its_value_is_no_axis(tmp_path: Path) -> None:
    sweep = swept(tmp_path, synthetic({"dim": [8], "rate": [1, 2]}, accuracy=lambda i: i), ["dim", "rate"])
    assert sweep.axes == ("rate",)
    assert sweep.others == ()


def test_one_number_that_varies_gives_a_line_with_the_range_of_seeds(tmp_path: Path) -> None:
    grid = {"scheme": ["pre", "qkv"], "rate": [1e-2, 1e-4, 1e-3], "seed": [0, 1, 2]}
    runs = synthetic(grid, accuracy=lambda i: (5 * i % 18) / 20)
    drawn = final(swept(tmp_path, runs, list(grid)))
    chart = drawn["accuracy"]
    assert isinstance(chart, Chart)
    assert chart.log_x
    for line, scheme in zip(chart.lines, ("pre", "qkv"), strict=True):
        assert line.name == f"scheme {scheme}"
        assert line.x == [1e-4, 1e-3, 1e-2]
        assert line.low is not None
        assert line.high is not None
        for rate, y, low, high in zip(line.x, line.y, line.low, line.high, strict=True):
            values = [100 * row.accuracy for row in runs.itertuples() if (row.scheme, row.rate) == (scheme, rate)]
            assert (y, low, high) == pytest.approx((fmean(values), min(values), max(values)))
    assert all(line.low is None for line in drawn["diverged"].lines)


def test_no_number_that_varies_gives_dots(tmp_path: Path) -> None:
    grid = {"scheme": ["qkv", "pre", "peri"], "seed": [0, 1]}
    drawn = final(swept(tmp_path, synthetic(grid, accuracy=lambda i: i / 10), list(grid)))
    lines = drawn["accuracy"].lines
    assert [line.name for line in lines[::2]] == ["1 scheme qkv", "2 scheme pre", "3 scheme peri"]
    assert [line.y[0] for line in lines[::2]] == pytest.approx([5, 25, 45])
    assert [line.y[:2] for line in lines[1::2]] == [pytest.approx(pair) for pair in ([0, 10], [20, 30], [40, 50])]


@pytest.mark.parametrize("grid", [{"seed": [0]}, {"seed": [0, 1, 2]}, {}])
def test_a_single_point_has_a_page_with_its_curves_and_no_map(tmp_path: Path, scan: Tables, grid: dict[str, list[Any]]) -> None:
    runs = synthetic(grid, accuracy=lambda i: 0.25).assign(name=[f"run {i}" for i in range(max(1, len(grid.get("seed", []))))])
    curve = scan[1][scan[1]["name"] == scan[1]["name"].iloc[0]][["step", "loss", "accuracy"]]
    curves = pd.concat([curve.assign(name=name) for name in runs["name"]])
    run = written(tmp_path / "run", {"runs": runs, "curves": curves}, list(grid))
    assert figures(run) == {"curve-accuracy", "curve-loss"}
    names = ["all runs"] if len(runs) == 1 else [f"seed {seed}" for seed in grid["seed"]]
    assert [trace["name"] for trace in traces(run.path / "figures" / "curve-loss.html")] == names
    assert "25.00" in (run.path / "report.html").read_text(encoding="utf-8")


def test_colours_mean_the_same_in_all_panels_even_where_a_run_is_missing(tmp_path: Path) -> None:
    grid = {"rate": [1, 2], "dim": [8, 16, 32]}
    runs = synthetic(grid, accuracy=lambda i: 0.5)
    curves = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "accuracy": [0.1, 0.2]}).merge(runs[["name"]], "cross")
    missing = curves[curves["name"] != "rate=2,dim=8"]
    run = RunFolder(tmp_path)
    run.write_table("curves", missing)
    charts = training_charts(swept(tmp_path, runs, list(grid)), missing)["loss"]
    assert [list(dict.fromkeys(line.name for line in chart.lines)) for chart in charts.values()] == [
        ["dim 8", "dim 16", "dim 32"]
    ] * 2
    write_sweep_report(run, "A run is missing", configuration={"kind": "train", "varied": list(grid)})
    colours = [
        {trace["name"]: trace["line"]["color"] for trace in traces(run.path / "figures" / f"curve-loss-{rate}.html")}
        for rate in (1, 2)
    ]
    assert colours[0] == colours[1]
    assert set(csv(run, "curve-loss-2")["line"]) == {"dim 16", "dim 32"}


def test_lists_switches_and_missing_values_are_fields_too(tmp_path: Path) -> None:
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
    run = written(tmp_path / "run", {"runs": runs}, ["readout", "norm", "calibrate", "dim"])
    drawn = csv(run, "accuracy").set_index("line")
    assert drawn["dim"].to_dict() == {
        "readout 8, norm rms, calibrate true": 8,
        "readout 8, norm layer, calibrate true": 8,
        "readout 8, norm rms, calibrate false": 16,
        "readout 8,8, norm –, calibrate true": 8,
        "readout 8,8, norm –, calibrate false": 16,
    }
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "| 8 | rms | true | – | finished |" in text
    assert "| 8,8 | – | false | 16 | finished |" in text


@pytest.mark.parametrize("schemes", [["./my scheme.toml", "./My/Scheme.toml"], ["ñ", "pre"], ["x" * 300, "y"]])
def test_values_that_are_no_names_of_files_get_names_of_their_own(tmp_path: Path, schemes: list[str]) -> None:
    grid = {"scheme": schemes, "dim": [1, 2], "rate": [1, 2]}
    names = list(final(swept(tmp_path, synthetic(grid, accuracy=lambda i: 0.5), list(grid))))
    assert len(set(names)) == 4
    assert all(re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name) and len(name) < 100 for name in names)


def test_large_and_small_values_have_different_names(tmp_path: Path) -> None:
    grid = {"rate": [1e-8, 1e8, 2], "dim": [8, 16], "heads": [1, 2]}
    curves = pd.DataFrame({"step": [1], "loss": [2.0], "accuracy": [0.1], "name": "rate=2,dim=8,heads=1"})
    charts = training_charts(swept(tmp_path, synthetic(grid, accuracy=lambda i: 0.5), list(grid)), curves)
    names = [f"curve-loss-{heads}-{rate}" for heads in (1, 2) for rate in ("1e-08", "2", "1e08")]
    assert list(charts["loss"]) == names


def test_more_figures_than_a_page_can_show_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.report.sweep._FIGURES", 3)
    grid = {"scheme": ["pre", "qkv"], "dim": [1, 2], "rate": [1, 2]}
    run = written(tmp_path / "run", {"runs": synthetic(grid, accuracy=lambda i: 0.5)}, list(grid))
    assert figures(run) == {"accuracy-pre", "accuracy-qkv", "diverged-pre"}
    assert "Of 4 figures the first 3 are drawn" in (run.path / "report.html").read_text(encoding="utf-8")


def test_a_sweep_whose_runs_all_failed_says_so(tmp_path: Path) -> None:
    grid = {"dim": [8, 16], "rate": [1, 2]}
    runs = synthetic(grid).assign(state="failed", error="first\nlast " + 1000 * "x")
    run = written(tmp_path / "run", {"runs": runs, "curves": pd.DataFrame({"name": []})}, list(grid))
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "4 runs of kind train over dim, rate: 4 failed." in text
    assert text.count("last xxx") == 4
    assert max(map(len, text.splitlines())) < 500
    assert not figures(run)


# Other kinds


@pytest.fixture(scope="module")
def ensembles(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Real ensembles of three schemes over width and β."""
    rows, curves = [], []
    for point in points({"dim": [8, 16], "beta": [1.0, 4.0]}):
        setting = Ensemble(tokens=6, samples=6, time=2.0, **point)
        job = EnsembleRun(setting, (NAMED["pre"], NAMED["post"], NAMED["peri"]), runs=8, chunk=8)
        table = job.table(job.compute(Parts(tmp_path_factory.mktemp("parts"))))
        last = table[table["time"] == table["time"].max()].set_index("scheme")["mean"]
        cosines = {f"cosine_{scheme}": value for scheme, value in last.items()}
        rows.append({"name": named(point), "state": "finished", "error": None, **point, **cosines})
        curves.append(table[["time", "scheme", "mean", "low", "high"]].assign(name=named(point), **point))
    return pd.DataFrame(rows), pd.concat(curves, ignore_index=True)


def test_ensembles_have_a_panel_for_each_point_with_a_line_and_a_band_for_each_scheme(
    ensembles: Tables, tmp_path: Path
) -> None:
    runs, curves = ensembles
    run = written(tmp_path / "run", {"runs": runs, "curves": curves}, ["dim", "beta"], "ensemble")
    panels = {f"curve-cosine-{dim}-{beta}" for dim in (8, 16) for beta in (1, 4)}
    assert figures(run) == panels | {f"final-cosine-{scheme}" for scheme in ("pre", "post", "peri")}
    for dim, beta in product((8, 16), (1, 4)):
        found = csv(run, f"curve-cosine-{dim}-{beta}")
        wanted = curves[(curves["dim"] == dim) & (curves["beta"] == beta)]
        assert found["line"].tolist() == wanted["scheme"].tolist()
        for column, key in (("time t", "time"), ("mean cosine", "mean"), ("low", "low"), ("high", "high")):
            assert found[column].tolist() == pytest.approx(wanted[key].tolist(), rel=1e-14)
    final_post = csv(run, "final-cosine-post")
    assert final_post["cosine post"].tolist() == runs.sort_values(["beta", "dim"])["cosine_post"].tolist()


def test_ensembles_of_one_scheme_each_stand_in_one_panel(ensembles: Tables, tmp_path: Path) -> None:
    curves = ensembles[1][ensembles[1]["name"] == "dim=8,beta=1.0"]
    curves = curves.assign(name="scheme=" + curves["scheme"]).drop(columns=["dim", "beta"])
    runs = synthetic({"scheme": ["pre", "post", "peri"]}, cosine=lambda i: 0.1 * i)
    run = written(tmp_path / "run", {"runs": runs, "curves": curves}, ["scheme"], "ensemble")
    assert figures(run) == {"curve-cosine", "final-cosine"}
    assert list(dict.fromkeys(csv(run, "curve-cosine")["line"])) == ["pre", "post", "peri"]


def test_a_field_may_have_the_name_of_a_column_of_curves(ensembles: Tables, tmp_path: Path) -> None:
    curves = ensembles[1].assign(name=ensembles[1]["name"].map({"dim=8,beta=1.0": "time=2.0", "dim=8,beta=4.0": "time=3.0"}))
    curves = curves.dropna().drop(columns=["dim", "beta"])
    runs = synthetic({"time": [2.0, 3.0, 4.0]}, cosine_pre=lambda i: 0.1 * i).assign(state=["finished", "finished", "waiting"])
    run = written(tmp_path / "run", {"runs": runs, "curves": curves}, ["time"], "ensemble")
    assert figures(run) == {"curve-cosine-2", "curve-cosine-3", "final-cosine-pre"}
    assert csv(run, "curve-cosine-3")["time t"].tolist() == curves.loc[curves["name"] == "time=3.0", "time"].tolist()
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "3 runs of kind ensemble over time: 2 finished, 1 waiting." in text
    assert "No run has a curve at time 4." in text
    assert "diverged or failed" not in text


def test_other_kinds_have_a_map_of_every_number(tmp_path: Path) -> None:
    grid = {"model": ["one", "two"], "level": [0.1, 0.2, 0.3], "heads": [1, 2]}
    runs = synthetic(
        grid, spread=lambda i: 10.0 ** -(i % 5), change=lambda i: i - 6.0, note=lambda i: "text", none=lambda i: math.nan
    )
    sweep = swept(tmp_path, runs, list(grid), "stability")
    drawn = final(sweep)
    assert list(drawn) == [f"final-{column}-{model}" for column in ("spread", "change") for model in ("one", "two")]
    assert all(isinstance(chart, HeatMap) for chart in drawn.values())
    assert [chart.log for chart in drawn.values()] == [True, True, False, False]
    assert {chart.limits for chart in list(drawn.values())[:2]} == {(1e-4, 1.0)}
    assert {chart.limits for chart in list(drawn.values())[2:]} == {(-6.0, 5.0)}
    assert drawn["final-change-two"].values == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def test_results_that_are_not_finite_leave_their_cell_empty(tmp_path: Path) -> None:
    grid = {"dim": [1, 2], "rate": [1, 2], "seed": [0, 1]}
    runs = synthetic(grid, loss=lambda i: [math.inf, 1.0, math.nan, -math.inf, 2.0, 4.0, 5.0, 5.0][i])
    (chart,) = final(swept(tmp_path, runs, list(grid), "audit")).values()
    np.testing.assert_array_equal(chart.values, [[1.0, 3.0], [math.nan, 5.0]])


def test_a_description_says_which_fields_vary(run: RunFolder) -> None:
    kept = json.loads((run.path / "run.json").read_text(encoding="utf-8"))["configuration"]
    assert read_sweep(run, kept).varied == tuple(GRID)
