"""The sections of stability show what their tables hold, for one head as for many, and leave out what was not measured."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from helpers.pages import lines_of, points_of, read_page
from normscope.report.stability import stability_sections, write_stability_report
from normscope.results import Chart, Figure, HeatMap, Line
from normscope.runs import RunFolder

LEVELS = [0.0, 0.003, 0.01, 0.03, 0.12, 0.3]
SECTIONS = {
    "Spread of hidden state norms": ["spread"],
    "Sensitivity to noise": ["noise"],
    "Circuit collapse": ["collapse", "margins"],
    "Near-one-hot attention": ["sparsity", "maxima"],
    "Attention maps": ["maps"],
}


def places(layers: int, heads: int, *, model: bool = True, layer: bool = True, head: bool = True) -> pd.DataFrame:
    """Rows for the model, for its layers and for their heads, as the tables name them."""
    rows: list[tuple[int | None, int | None]] = [(None, None)] if model else []
    rows += [(one, None) for one in range(layers)] if layer else []
    rows += list(product(range(layers), range(heads))) if head else []
    return pd.DataFrame(rows, columns=["layer", "head"]).astype("Int64")


def tables(layers: int, heads: int) -> dict[str, pd.DataFrame]:
    random = np.random.default_rng(0)
    spread = places(layers, heads, model=False)
    width = random.uniform(0.05, 0.3, len(spread))
    for share, factor in ((50, 0.4), (90, 1.0), (99, 1.8)):
        spread[f"low{share}"], spread[f"high{share}"] = 1 - factor * width, 1 + 1.1 * factor * width
    noise = pd.DataFrame(
        [
            *product(["q,k,m", "q,k"], ["all", "sparse", "non-sparse"], [None], LEVELS),
            *product(["q,k,m"], ["all"], range(layers), LEVELS),
        ],
        columns=["perturbed", "where", "layer", "noise"],
    ).astype({"layer": "Int64"})
    noise["accuracy"] = np.where(noise["noise"] == 0, 0.9, 0.9 - noise["noise"] * random.uniform(0.5, 2.0, len(noise)))
    noise = noise.assign(accuracy_stderr=0.01, loss=1.5 - noise["accuracy"], loss_stderr=0.02, tokens=4000)
    rows = places(layers, heads).merge(
        pd.DataFrame(product(LEVELS, ["loose", "strict"]), columns=["noise", "definition"]), "cross"
    )
    rows["probability"] = np.where(rows["noise"] < 0.01, 0.0, rows["noise"] ** 2 * random.uniform(0.1, 2.0, len(rows)))
    margins = places(layers, heads, model=False, layer=False)
    margins["margin"] = 10 ** random.uniform(-3, 0, len(margins))
    margins.loc[margins["layer"].eq(1) & margins["head"].eq(1), "margin"] = math.nan
    sparsity = places(layers, heads).assign(distributions=12345)
    sparsity["sparse"] = random.integers(0, 12345, len(sparsity))
    maxima = pd.DataFrame({"layer": None, "head": None, "low": np.arange(20) / 20, "high": np.arange(1, 21) / 20})
    attention = [(1, 3, q, k, 1 / (q + 1)) for q in range(5) for k in range(q + 1)]
    return {
        "findings": pd.DataFrame({"text": ["Norms vary by ±15%.", "Noise of 1% costs <2 points."]}),
        "spread": spread,
        "noise": noise,
        "collapse": rows.assign(stderr=0.999 * rows["probability"], sparse=400),
        "margins": margins.assign(median_margin=0.5, sparse=7),
        "sparsity": sparsity.assign(share=sparsity["sparse"] / 12345, non_sparse_share=0.25, mean_max=0.625),
        "maxima": maxima.astype({"layer": "Int64", "head": "Int64"}).assign(count=[0, 3, *range(10, 27), 5000]),
        "maps": pd.DataFrame(attention, columns=["layer", "head", "query", "key", "weight"]),
        "tokens": pd.DataFrame({"position": range(5), "text": [" a", "\n", "日本 and much more", "<b>", "$x$"]}),
    }


def figures(content: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    """All figures of these tables."""
    return {name: figure for section in stability_sections(content, "") for name, figure in section.figures.items()}


def lines(figure: Figure) -> dict[str, Line]:
    assert isinstance(figure, Chart)
    return lines_of(figure)


def values(figure: Figure) -> list[list[float]]:
    assert isinstance(figure, HeatMap)
    return [list(row) for row in figure.values]


def by_head(table: pd.DataFrame, column: str) -> list[list[float]]:
    rows = table[table["head"].notna()]
    return [list(group.sort_values("head")[column]) for _, group in rows.groupby("layer")]


@pytest.fixture(scope="module")
def content() -> dict[str, pd.DataFrame]:
    """Tables of three layers with four heads."""
    return tables(3, 4)


# The page


def test_the_page_leads_with_the_findings_and_holds_every_figure(tmp_path: Path, content: dict[str, pd.DataFrame]) -> None:
    run = RunFolder(tmp_path)
    for name, table in content.items():
        run.write_table(name, table)
    write_stability_report(run, "3 layers, 4 heads, seed 0")
    page = read_page(tmp_path / "report.html")
    headings = [page.text.rindex(f"{title}\n") for title in SECTIONS]
    assert headings == sorted(headings)
    assert len(page.every("section")) == len(SECTIONS)
    assert page.text.index("Noise of 1% costs <2 points.") < page.text.index("Published value for Pre-Norm")
    assert set(page.figures) == set(figures(content))
    assert len(page.figures) == 10
    assert not (tmp_path / "figures").exists()


def test_a_run_without_tables_has_a_page(tmp_path: Path) -> None:
    write_stability_report(RunFolder(tmp_path), "nothing measured")
    assert "nothing measured" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("title", sorted(SECTIONS))
def test_only_what_was_measured_has_a_section(title: str) -> None:
    content = tables(1, 2)
    sections = stability_sections({name: content[name] for name in SECTIONS[title]}, "")
    assert [section.title for section in sections] == [title]


@pytest.mark.parametrize(("table", "names"), [("margins", {"margins"}), ("maxima", {"maxima"}), ("spread", {"spread"})])
def test_one_table_is_enough(table: str, names: set[str]) -> None:
    assert set(figures({table: tables(2, 2)[table]})) == names


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 5), (5, 1)])
def test_one_layer_or_one_head_is_enough(layers: int, heads: int) -> None:
    drawn = figures(tables(layers, heads))
    assert np.shape(values(drawn["sparsity"])) == np.shape(values(drawn["margins"])) == (layers, heads)


# Lines


def test_bands_of_the_spread_are_the_intervals_of_the_whole_layer(content: dict[str, pd.DataFrame]) -> None:
    table, chart = content["spread"], figures(content)["spread"]
    assert isinstance(chart, Chart)
    whole = table[table["head"].isna()]
    bands = [line for line in chart.lines if line.low is not None]
    for band, share in zip(bands, (50, 90, 99), strict=True):
        assert band.x == [0, 1, 2]
        assert (band.low, band.high) == (list(whole[f"low{share}"]), list(whole[f"high{share}"]))
    assert lines(chart)["whole layer"].y == [1, 1, 1]
    heads = lines(chart)["single heads, 90%"].y
    wanted = [value for head in zip(*by_head(table, "low90"), strict=True) for value in (*head, math.nan)]
    np.testing.assert_array_equal(heads, wanted)


def test_of_many_heads_the_outermost_limits_are_drawn() -> None:
    table = tables(3, 20)["spread"]
    chart = figures({"spread": table})["spread"]
    assert isinstance(chart, Chart)
    heads = [line for line in chart.lines if line.name == "outermost heads, 90%"]
    assert [list(line.y)[:-1] for line in heads] == [
        [min(layer) for layer in by_head(table, "low90")],
        [max(layer) for layer in by_head(table, "high90")],
    ]


@pytest.mark.parametrize(("column", "factor"), [("accuracy", 100), ("loss", 1)])
def test_noise_is_drawn_beside_the_clean_value(content: dict[str, pd.DataFrame], column: str, factor: float) -> None:
    table = content["noise"]
    drawn = lines(figures(content)[f"noise-{column}"])
    names = [f"{what}, {where}" for what in ("q,k,m", "q,k") for where in ("all", "sparse", "non-sparse")]
    assert set(drawn) == {*names, "clean"}
    rows = table[(table["perturbed"] == "q,k") & (table["where"] == "sparse") & (table["noise"] > 0)]
    line = drawn["q,k, sparse"]
    assert line.x == drawn["clean"].x == LEVELS[1:]
    assert line.y == pytest.approx(list(factor * rows[column]))
    assert drawn["clean"].y == pytest.approx([factor * table[table["noise"] == 0][column].iloc[0]] * 5)
    assert line.high == pytest.approx(list(factor * (rows[column] + rows[f"{column}_stderr"])))


def test_noise_in_one_layer_has_a_line_for_each_level(content: dict[str, pd.DataFrame]) -> None:
    drawn = lines(figures(content)["noise-layers-qkm-all"])
    assert set(drawn) == {*(f"noise {level:g}" for level in LEVELS[1:]), "clean"}
    table = content["noise"]
    rows = table[table["layer"].notna() & (table["noise"] == 0.03)]
    assert drawn["noise 0.03"].x == [0, 1, 2]
    assert drawn["noise 0.03"].y == pytest.approx(list(100 * rows["accuracy"]))


def test_without_accuracy_the_loss_is_drawn() -> None:
    table = tables(2, 1)["noise"].assign(accuracy=math.nan, accuracy_stderr=math.nan)
    drawn = figures({"noise": table})
    assert list(drawn) == ["noise-loss", "noise-layers-qkm-all"]
    assert drawn["noise-layers-qkm-all"].title.startswith("Loss")


@pytest.mark.parametrize("layers", [3, 30])
def test_collapse_has_both_definitions_and_every_layer(layers: int) -> None:
    table = tables(layers, 2)["collapse"]
    rows = table[table["head"].isna() & (table["noise"] > 0)]
    drawn = lines(figures({"collapse": table})["collapse"])
    for definition in ("loose", "strict"):
        whole = rows[rows["layer"].isna() & (rows["definition"] == definition)]["probability"]
        assert drawn[f"whole model, {definition}"].y == list(whole)
    shown = [value for name, line in drawn.items() if "layer" in name for value in line.y if not math.isnan(value)]
    groups = [list(group["probability"]) for _, group in rows[rows["definition"] == "loose"].groupby("layer")]
    assert sorted(shown) == sorted(value for group in groups for value in group)


def test_an_error_as_large_as_its_value_does_not_stretch_the_axis(content: dict[str, pd.DataFrame]) -> None:
    chart = figures(content)["collapse"]
    assert isinstance(chart, Chart)
    points = points_of(chart)
    assert points["l"].min() >= 0.0999 * points["y"].min()


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_model_that_never_collapses_is_drawn(value: float) -> None:
    table = tables(2, 2)["collapse"].assign(probability=value, stderr=0.0)
    drawn = figures({"collapse": table})
    np.testing.assert_array_equal(lines(drawn["collapse"])["whole model, loose"].y, [value] * 5)
    np.testing.assert_array_equal(values(drawn["collapse-heads"]), [[value] * 2] * 2)


def test_without_near_one_hot_attention_the_page_says_so() -> None:
    content = tables(2, 2)
    collapse = content["collapse"].assign(probability=math.nan, sparse=0)
    margins = content["margins"].assign(margin=math.nan, sparse=0)
    (section,) = stability_sections({"collapse": collapse, "margins": margins}, "")
    assert section.text[-1] == "No attention row was near-one-hot, so none could collapse."
    assert not section.figures


def test_the_histogram_shows_the_counts_of_the_whole_model(content: dict[str, pd.DataFrame]) -> None:
    (section,) = stability_sections({name: content[name] for name in ("sparsity", "maxima")}, "")
    table, (line,) = content["maxima"], lines(section.figures["maxima"]).values()
    assert line.x[::2] == list(table["low"])
    assert line.x[1::2] == list(table["high"])
    assert line.y[::2] == line.y[1::2] == list(table["count"])
    share = content["sparsity"]["share"].iloc[0]
    assert f"Of 12,345 attention rows {100 * share:.1f} % are near-one-hot and 25.0 % clearly are not" in section.text[0]


# Heat maps


def test_heads_are_shown_with_the_values_of_their_tables(content: dict[str, pd.DataFrame]) -> None:
    drawn = figures(content)
    assert values(drawn["sparsity"]) == by_head(content["sparsity"], "share")
    collapse = content["collapse"]
    at_level = collapse[(collapse["noise"] == 0.12) & (collapse["definition"] == "loose")]
    assert values(drawn["collapse-heads"]) == by_head(at_level, "probability")
    assert drawn["collapse-heads"].title == "Circuit collapse by head at a noise of 0.12"
    np.testing.assert_array_equal(values(drawn["margins"]), by_head(content["margins"], "margin"))
    assert math.isnan(values(drawn["margins"])[1][1])
    for name in ("sparsity", "collapse-heads", "margins"):
        assert getattr(drawn[name], "heads", False)  # a page links them


def test_heads_that_are_not_in_the_table_are_empty() -> None:
    table = tables(4, 3)["sparsity"]
    table = table[(table["layer"] != 2).fillna(True)]
    empty = [all(map(math.isnan, row)) for row in values(figures({"sparsity": table})["sparsity"])]
    assert empty == [False, False, True, False]


def test_attention_maps_have_tokens_at_both_sides(content: dict[str, pd.DataFrame]) -> None:
    heat = figures(content)["map-1-3"]
    assert isinstance(heat, HeatMap)
    assert heat.title == "Attention of head 3 in layer 1"
    assert heat.of_head == (1, 3)
    np.testing.assert_array_equal(heat.values, [[1 / (q + 1) if k <= q else math.nan for k in range(5)] for q in range(5)])
    assert heat.limits == (0, 1)
    assert heat.x_names == heat.y_names == ["␣a", "⏎", "日本␣and␣much…", "<b>", "$x$"]


def test_without_tokens_positions_are_named() -> None:
    heat = figures({"maps": tables(1, 1)["maps"]})["map-1-3"]
    assert isinstance(heat, HeatMap)
    assert list(heat.x_names) == ["0", "1", "2", "3", "4"]
