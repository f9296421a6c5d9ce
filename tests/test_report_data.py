"""The CSV beside a figure holds every number that the figure was given, one row for each point."""

import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest

from normscope.report import save_figure
from normscope.report.charts import draw_chart
from normscope.results import Blocks, Chart, Cloud, Figure, HeatMap, Line, Panels, Scene, Trail
from normscope.schemes import NAMED, block_records


def written(figure: Figure, folder: Path) -> pd.DataFrame:
    save_figure(figure, folder / "figure.csv")
    return pd.read_csv(folder / "figure.csv", keep_default_na=False, na_values=[""])


def chart(*lines: Line, x: str = "layer t", y: str = "1 − cosine", log: bool = False) -> Chart:
    return Chart("Decay", x, y, lines, "", log_x=log, log_y=log)


def test_a_line_keeps_every_digit_and_every_gap(tmp_path: Path) -> None:
    y = [0.1 + 0.2, math.nan, 1 / 3, -2.2250738585072014e-308, 6.02214076e23]
    table = written(chart(Line("a, b", range(5), y), Line('"c"', [0.0, 1.0], [2.0, 1e-17])), tmp_path)
    assert list(table.columns) == ["line", "layer t", "1 − cosine"]
    assert table["line"].tolist() == ["a, b"] * 5 + ['"c"'] * 2
    assert table["layer t"].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert table["layer t"].dtype == int
    assert table["1 − cosine"][:5].tolist() == pytest.approx(y, rel=0, abs=0, nan_ok=True)
    assert table["1 − cosine"][5:].tolist() == [2.0, 1e-17]


def test_what_a_logarithmic_axis_cannot_show_is_in_the_numbers(tmp_path: Path) -> None:
    table = written(chart(Line("a", [0, 1, 10], [-1.5, 0, 2], [-2, -1, 1], [0, 1, 3]), log=True), tmp_path)
    assert table["1 − cosine"].tolist() == [-1.5, 0, 2]
    assert table["low"].tolist() == [-2, -1, 1]
    assert table["high"].tolist() == [0, 1, 3]


def test_bars_that_leave_a_logarithmic_axis_are_drawn_to_its_edge_and_keep_their_numbers(tmp_path: Path) -> None:
    low, high = [-0.5, 0.0, 1e-9, 1.5], [0.03, 3.0, 0.2, 2.5]
    bars = Chart("Bars", "x", "y", (Line("a", [0, 1, 2, 3], [0.01, 1.0, 0.1, 2.0], low, high, dots=True),), "", log_y=True)
    assert written(bars, tmp_path)["low"].tolist() == low
    drawn = draw_chart(bars, interactive=True).to_dict()
    assert [float(row.split(",")[5]) for row in drawn["data"]["values"].split()[1:]] == low
    save_figure(bars, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    rules = re.search(r'class="mark-rule role-mark.*?clip-path.*?</g>', text, re.DOTALL)
    assert rules is not None
    ends = re.findall(r'translate\([\d.]+,([\d.]+)\)" x2="0" y2="([-\d.]+)"', rules[0])
    height = float(re.findall(r'<clipPath[^>]*><rect x="0" y="0" width="[\d.]+" height="([\d.]+)"', text)[0])
    below = [max(float(start), float(start) + float(length)) > height for start, length in ends]
    assert below == [True, True, True, False]


def test_a_line_without_a_band_has_no_edges_beside_one_that_has(tmp_path: Path) -> None:
    table = written(chart(Line("a", [0], [1.0], [0.5], [1.5]), Line("b", [0], [2.0])), tmp_path)
    assert table[["low", "high"]].to_numpy().tolist()[0] == [0.5, 1.5]
    assert table[["low", "high"]].iloc[1].isna().all()


def test_strokes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    gap = math.nan
    lines = (
        Line("heads", [0, 1, gap, 0, 1, gap], [1.5, 2, gap, 3, 4, gap]),
        Line("mean", [0, 1], [2, 3]),
        Line("heads", [5], [6]),
    )
    table = written(chart(*lines), tmp_path)
    assert table.to_numpy().tolist() == [
        ["heads", 1, 0, 1.5],
        ["heads", 1, 1, 2],
        ["heads", 2, 0, 3],
        ["heads", 2, 1, 4],
        ["mean", 1, 0, 2],
        ["mean", 1, 1, 3],
        ["heads", 3, 5, 6],
    ]


@pytest.mark.parametrize("labels", [("x", "x"), ("line", "low"), ("part", "high")])
def test_no_column_hides_another_of_its_name(tmp_path: Path, labels: tuple[str, str]) -> None:
    table = written(chart(Line("a", [3], [4], [1], [7]), Line("a", [5], [6], [2], [8]), x=labels[0], y=labels[1]), tmp_path)
    assert len(set(table.columns)) == 6
    assert table.to_numpy().tolist() == [["a", 1, 3, 4, 1, 7], ["a", 2, 5, 6, 2, 8]]


def test_a_chart_without_lines_has_a_heading_only(tmp_path: Path) -> None:
    assert list(written(chart(), tmp_path).columns) == ["line", "layer t", "1 − cosine"]


def test_a_heat_map_has_a_row_for_each_cell(tmp_path: Path) -> None:
    heat = HeatMap("Heads", "head", "layer", "share", ["0", "1", "2"], ["4", "5"], [[0.1, math.nan, 0], [0.3, 0.4, 1 / 7]], "")
    table = written(heat, tmp_path)
    assert list(table.columns) == ["layer", "head", "share"]
    grid = table.pivot(index="layer", columns="head", values="share")
    assert grid.index.tolist() == [4, 5]
    assert grid.columns.tolist() == [0, 1, 2]
    assert grid.to_numpy() == pytest.approx(pd.DataFrame(heat.values).to_numpy(), rel=0, abs=0, nan_ok=True)


def test_cells_of_tokens_that_come_twice_are_numbered(tmp_path: Path) -> None:
    names = ["NA", "the", "the"]
    table = written(HeatMap("Map", "key", "query", "weight", names, ["a", "b"], [[1, 2, 3], [4, 5, 6.5]], ""), tmp_path)
    assert list(table.columns) == ["query", "key number", "key", "weight"]
    assert table["key"].tolist() == names * 2
    assert table["key number"].tolist() == [0, 1, 2] * 2
    assert table["weight"].tolist() == [1, 2, 3, 4, 5, 6.5]


def test_a_scene_has_its_clouds_and_its_trails(tmp_path: Path) -> None:
    clouds = (
        Cloud("words", [(0.1, 0.2, 0.3), (math.nan, 1, 1)], ["␣a", "␣b"]),
        Cloud("moved", [(1.0, 0.0, 1 / 3)], origins=[(0.5, 0.25, 0.125)]),
    )
    trail = Trail("way", [(0.0, 0.0, 1.0), (0.0, 1.0, 0.0)], ["x", "y"], [3, 4])
    table = written(Scene("Journey", clouds, (trail,), "", order="layer"), tmp_path)
    assert list(table.columns) == ["name", "layer", "label", "x", "y", "z", "x of origin", "y of origin", "z of origin"]
    assert table["name"].tolist() == ["words", "words", "moved", "way", "way"]
    assert table["layer"].isna().tolist() == [True, True, True, False, False]
    assert table["layer"].tolist()[3:] == [3, 4]
    assert table["label"].tolist()[:2] == ["␣a", "␣b"]
    assert table[["x", "y", "z"]].to_numpy()[2].tolist() == [1.0, 0.0, 1 / 3]
    assert table.filter(like="origin").to_numpy()[2].tolist() == [0.5, 0.25, 0.125]
    assert table.filter(like="origin").iloc[[0, 1, 3, 4]].isna().to_numpy().all()


def test_panels_have_the_numbers_of_all_their_figures(tmp_path: Path) -> None:
    both = Panels("Both", [chart(Line("a", [0, 1], [2.5, 3])), chart(Line("b", [4], [5.0]))], "")
    table = written(both, tmp_path)
    assert table["line"].tolist() == ["a", "a", "b"]
    assert table["1 − cosine"].tolist() == [2.5, 3, 5]


def test_blocks_have_a_row_for_each_sublayer(tmp_path: Path) -> None:
    table = written(Blocks("Peri", block_records(NAMED["peri"]), ""), tmp_path)
    assert table["branch"].tolist() == ["Norm; Attention; Norm", "Norm; Feed-forward; Norm"]


def test_json_has_the_same_numbers(tmp_path: Path) -> None:
    drawn = chart(Line("a", [0, 1], [1 / 3, math.nan]))
    records = json.loads(save_figure(drawn, tmp_path / "figure.json").read_text(encoding="utf-8"))
    assert records == [
        {"line": "a", "layer t": 0, "1 − cosine": pytest.approx(1 / 3)},
        {"line": "a", "layer t": 1, "1 − cosine": None},
    ]
