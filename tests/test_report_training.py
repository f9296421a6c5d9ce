"""The pages of training and evaluation say what their tables say, also for runs that went wrong."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from helpers.pages import read_page
from normscope.experiments.evaluate import Evaluate, evaluation_section
from normscope.experiments.result import Result
from normscope.experiments.train import Train, training_section
from normscope.report.files import figure_svg
from normscope.results import Chart, Section

ACCURACY = pd.DataFrame(
    {
        "split": ["in-distribution", "ood-interpolation", "ood-extrapolation"],
        "accuracy": [0.91379, 0.8, 0.031],
        "stderr": [0.00041, 0.0123, 0.000004],
        "exact": [0.5, 1.0, math.nan],
        "exact_stderr": [math.nan, 0.0, math.nan],
        "tokens": [460_000, 900, 2_000_000],
        "examples": [65536, 128, 300_000],
    }
)
POSITIONS = pd.DataFrame(
    {
        "split": ["in-distribution"] * 3 + ["ood-extrapolation"] * 2,
        "position": [3, 1, 2, 1, 2],
        "accuracy": [0.5, 1.0, 0.75, 0.25, 0.125],
        "stderr": [0.25, 0.0, 0.125, 0.125, math.nan],
        "tokens": [4, 4, 4, 12, 1],
    }
)


def metrics(rows: int) -> pd.DataFrame:
    steps = np.arange(1, rows + 1)
    noise = np.random.default_rng(0).uniform(0.8, 1.25, rows)
    return pd.DataFrame(
        {
            "step": steps,
            "examples": steps * 256,
            "seconds": steps * 0.1,
            "loss": noise * (0.01 + 2.5 * np.exp(-steps / 300)),
            "accuracy": 1 - 0.9 * np.exp(-steps / 300),
            "rate": 1e-3 * np.minimum(steps / 100, 1),
        }
    )


def trained(table: pd.DataFrame, scheme: str, summary: str) -> Result:
    tables = {"metrics": table, "accuracy": ACCURACY, "positions": POSITIONS}
    return Result(Train, {"model": {"scheme": {"name": scheme}}}, tables, summary)


def evaluated(summary: str = "") -> Result:
    return Result(Evaluate, {}, {"accuracy": ACCURACY, "positions": POSITIONS}, summary)


def drawn(section: Section, name: str) -> tuple[list[float], list[float]]:
    """The points of the one line of a chart."""
    chart = section.figures[name]
    assert isinstance(chart, Chart)
    (line,) = chart.lines
    return list(line.x), list(line.y)


def test_a_training_page_shows_the_curves_and_the_accuracy(tmp_path: Path) -> None:
    trained(metrics(50), "peri", "peri, 4 blocks, seed 7").save(tmp_path / "run")
    reader = read_page(tmp_path / "run" / "report.html")
    assert reader.figures == ["loss", "accuracy", "learning-rate", "positions"]
    for words in ("peri, 4 blocks, seed 7", "peri saw 12,800 examples up to step 50.", "91.38 ± 0.04 %", "Learning rate"):
        assert words in reader.text
    section = training_section({"peri": metrics(50)}, "")
    for name, column, scale in (("loss", "loss", 1), ("accuracy", "accuracy", 100), ("learning-rate", "rate", 1)):
        x, y = drawn(section, name)
        assert x == list(metrics(50)["examples"])
        assert y == pytest.approx(list(scale * metrics(50)[column]))


def test_an_evaluation_page_shows_accuracy_by_split_and_by_position(tmp_path: Path) -> None:
    evaluated("64 problems of each length").save(tmp_path / "run")
    reader = read_page(tmp_path / "run" / "report.html")
    assert reader.figures == ["positions"]
    for words in (*ACCURACY["split"], "64 problems of each length", "91.38 ± 0.04 %", "65,536"):
        assert words in reader.text
    chart = evaluation_section(evaluated()).figures["positions"]
    assert isinstance(chart, Chart)
    assert [(line.name, line.x, line.y) for line in chart.lines] == [
        ("in-distribution", [1, 2, 3], [100, 75, 50]),
        ("ood-extrapolation", [1, 2], [25, 12.5]),
    ]
    assert (chart.lines[0].low, chart.lines[0].high) == ([100, 62.5, 25], [100, 87.5, 75])


def test_percentages_show_their_error_and_leave_out_what_is_unknown() -> None:
    (table,) = evaluation_section(evaluated()).tables
    assert table.columns == ("split", "accuracy per character", "exact answers", "examples")
    assert table.rows == (
        ("in-distribution", "91.38 ± 0.04 %", "50.00 %", "65,536"),
        ("ood-interpolation", "80.00 ± 1.23 %", "100.00 ± 0.00 %", "128"),
        ("ood-extrapolation", "3.1000 ± 0.0004 %", "–", "300,000"),
    )


@pytest.mark.parametrize("rows", [400, 401, 4000, 4321])
def test_a_thinned_curve_keeps_the_mean_of_the_loss(rows: int) -> None:
    table = metrics(rows)
    section = training_section({"peri": table}, "seed 0")
    x, y = drawn(section, "loss")
    block = math.ceil(rows / 400)
    assert len(x) == len(y) == math.ceil(rows / block) <= 400
    sizes = [min(block, rows - start) for start in range(0, rows, block)]
    assert np.average(np.array(y, dtype=float), weights=sizes) == pytest.approx(table["loss"].mean())
    assert np.average(x, weights=sizes) == pytest.approx(table["examples"].mean())
    assert f"{rows * 256:,} examples" in section.text[0]
    thinned = f"seed 0; every point is a mean over {block} rows of the table"
    assert {figure.settings for figure in section.figures.values()} == {thinned if block > 1 else "seed 0"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [50, 2000])
def test_a_diverged_run_is_drawn_up_to_where_it_diverged_and_says_so(rows: int, value: float) -> None:
    table = metrics(rows)
    first = rows // 2 + 1
    table.loc[first:, "loss"] = value
    page = trained(table, "post", "seed 0").to_html()
    assert f"The loss first became non-finite at {(first + 1) * 256:,} examples" in page
    x, y = drawn(training_section({"post": table}, ""), "loss")
    finite = [math.isfinite(value) for value in y]
    # A block with one bad step in it is a gap: a mean over the others would hide the step.
    assert finite == [i < first // math.ceil(rows / 400) for i in range(len(x))]


@pytest.mark.parametrize("loss", [math.nan, 0.0, 2.5])
def test_one_row_is_enough(loss: float) -> None:
    section = training_section({"peri": metrics(1).assign(loss=loss)}, "")
    assert section.text[0] == "peri saw 256 examples up to step 1."
    assert all(figure_svg(figure).startswith("<svg") for figure in section.figures.values())


def test_a_run_too_short_to_be_recorded_has_a_section() -> None:
    assert training_section({"peri": metrics(0)}, "").text == ("peri has no recorded step.",)
