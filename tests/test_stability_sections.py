"""Sections of stability: figures have the numbers of their tables, for one head as for many; the rest is left out."""

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest

from normscope.measures.base import Measure
from normscope.measures.collapse import Collapse
from normscope.measures.noise import Noise
from normscope.measures.sparsity import Sparsity
from normscope.measures.spread import Spread
from normscope.report.charts import draw_chart
from normscope.results.figures import Chart, Figure, HeatMap, Line
from normscope.results.sections import Section

MEASURES: tuple[Measure, ...] = (Spread(), Noise(), Collapse(), Sparsity())
LEVELS = [0.0, 0.003, 0.01, 0.03, 0.12, 0.3]


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
        "spread": spread,
        "noise": noise,
        "collapse": rows.assign(stderr=0.999 * rows["probability"], sparse=400),
        "margins": margins.assign(median_margin=0.5, sparse=7),
        "sparsity": sparsity.assign(share=sparsity["sparse"] / 12345, non_sparse_share=0.25, mean_max=0.625),
        "maxima": maxima.astype({"layer": "Int64", "head": "Int64"}).assign(count=[0, 3, *range(10, 27), 5000]),
        "maps": pd.DataFrame(attention, columns=["layer", "head", "query", "key", "weight"]),
        "tokens": pd.DataFrame({"position": range(5), "text": [" a", "\n", "日本 and much more", "<b>", "$x$"]}),
    }


def section(measure: Measure, content: dict[str, pd.DataFrame], settings: str = "") -> Section:
    found = measure.section(content, settings)
    assert found is not None
    return found


def lines(figure: Figure) -> dict[str, Line]:
    """The first line of every name."""
    assert isinstance(figure, Chart)
    found: dict[str, Line] = {}
    for line in figure.lines:
        found.setdefault(line.name, line)
    return found


def heat(figure: Figure) -> list[list[float]]:
    assert isinstance(figure, HeatMap)
    return [list(row) for row in figure.values]


def by_head(table: pd.DataFrame, column: str) -> list[list[float]]:
    rows = table[table["head"].notna()]
    return [list(group.sort_values("head")[column]) for _, group in rows.groupby("layer")]


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: str(measure.name))
def test_only_what_was_measured_has_a_section(measure: Measure) -> None:
    content = tables(3, 4)
    found = section(measure, content, "3 layers, 4 heads, seed 0")
    assert found.name == measure.name
    assert all(figure.settings == "3 layers, 4 heads, seed 0" for figure in found.figures.values())
    assert measure.section({}, "") is None


@pytest.mark.parametrize(("measure", "table"), [(Collapse(), "margins"), (Sparsity(), "maxima"), (Spread(), "spread")])
def test_one_table_is_enough(measure: Measure, table: str) -> None:
    assert set(section(measure, {table: tables(2, 2)[table]}).figures) == {table}


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 5), (5, 1)])
def test_one_layer_or_one_head_is_enough(layers: int, heads: int) -> None:
    content = tables(layers, heads)
    figures = {name: figure for measure in MEASURES for name, figure in section(measure, content).figures.items()}
    assert np.shape(heat(figures["sparsity"])) == np.shape(heat(figures["margins"])) == (layers, heads)


# Lines


def test_bands_of_the_spread_are_the_intervals_of_the_whole_layer() -> None:
    table = tables(3, 4)["spread"]
    whole, chart = table[table["head"].isna()], section(Spread(), {"spread": table}).figures["spread"]
    assert isinstance(chart, Chart)
    bands = [line for line in chart.lines if line.low is not None]
    for band, share in zip(bands, (50, 90, 99), strict=True):
        assert list(band.x) == [0, 1, 2]
        assert (list(band.low or ()), list(band.high or ())) == (list(whole[f"low{share}"]), list(whole[f"high{share}"]))
    assert list(lines(chart)["whole layer"].y) == [1, 1, 1]
    heads = lines(chart)["single heads, 90 %"].y
    wanted = [value for head in zip(*by_head(table, "low90"), strict=True) for value in (*head, math.nan)]
    assert list(heads) == pytest.approx(wanted, nan_ok=True)


def test_of_many_heads_the_outermost_limits_are_drawn() -> None:
    table = tables(3, 20)["spread"]
    chart = section(Spread(), {"spread": table}).figures["spread"]
    assert isinstance(chart, Chart)
    heads = [line for line in chart.lines if line.name == "outermost heads, 90 %"]
    assert [list(line.y)[:-1] for line in heads] == [
        [min(layer) for layer in by_head(table, "low90")],
        [max(layer) for layer in by_head(table, "high90")],
    ]


@pytest.mark.parametrize(("column", "factor"), [("accuracy", 100), ("loss", 1)])
def test_noise_is_drawn_beside_the_clean_value(column: str, factor: float) -> None:
    table = tables(3, 4)["noise"]
    drawn = lines(section(Noise(), {"noise": table}).figures[f"noise-{column}"])
    assert list(drawn) == [
        *(f"{what}, {where}" for what in ("q,k,m", "q,k") for where in ("all", "sparse", "non-sparse")),
        "clean",
    ]
    rows = table[(table["perturbed"] == "q,k") & (table["where"] == "sparse") & (table["noise"] > 0)]
    line = drawn["q,k, sparse"]
    assert list(line.x) == list(drawn["clean"].x) == LEVELS[1:]
    assert list(line.y) == pytest.approx(list(factor * rows[column]))
    assert list(drawn["clean"].y) == pytest.approx([factor * table[table["noise"] == 0][column].iloc[0]] * 5)
    assert list(line.high or ()) == pytest.approx(list(factor * (rows[column] + rows[f"{column}_stderr"])))


def test_noise_in_one_layer_has_a_line_for_each_level() -> None:
    table = tables(3, 4)["noise"]
    drawn = lines(section(Noise(), {"noise": table}).figures["noise-layers-qkm-all"])
    assert list(drawn) == [*(f"noise {level:g}" for level in LEVELS[1:]), "clean"]
    rows = table[table["layer"].notna() & (table["noise"] == 0.03)]
    assert list(drawn["noise 0.03"].x) == [0, 1, 2]
    assert list(drawn["noise 0.03"].y) == pytest.approx(list(100 * rows["accuracy"]))


def test_without_accuracy_the_loss_is_drawn() -> None:
    table = tables(2, 1)["noise"].assign(accuracy=math.nan, accuracy_stderr=math.nan)
    figures = section(Noise(), {"noise": table}).figures
    assert list(figures) == ["noise-loss", "noise-layers-qkm-all"]
    assert figures["noise-layers-qkm-all"].title.startswith("Loss")


@pytest.mark.parametrize("layers", [3, 30])
def test_collapse_has_both_definitions_and_every_layer(layers: int) -> None:
    table = tables(layers, 2)["collapse"]
    rows = table[table["head"].isna() & (table["noise"] > 0)]
    drawn = lines(section(Collapse(), {"collapse": table}).figures["collapse"])
    for definition in ("loose", "strict"):
        whole = rows[rows["layer"].isna() & (rows["definition"] == definition)]["probability"]
        assert list(drawn[f"whole model, {definition}"].y) == list(whole)
    shown = [list(line.y) for name, line in drawn.items() if "layer" in name]
    per_layer = [list(group["probability"]) for _, group in rows[rows["definition"] == "loose"].groupby("layer")]
    if layers == 3:
        assert shown == per_layer
    else:
        assert shown[0] == pytest.approx([value for layer in per_layer for value in (*layer, math.nan)], nan_ok=True)


def test_an_error_as_large_as_its_value_is_in_the_figure_and_does_not_stretch_its_axis() -> None:
    found = tables(3, 4)
    found["collapse"]["stderr"] = 2 * found["collapse"]["probability"]
    chart = section(Collapse(), found).figures["collapse"]
    assert isinstance(chart, Chart)
    assert chart.log_y
    for line in chart.lines:
        assert line.low is not None
        assert list(line.low) == pytest.approx([-y for y in line.y], nan_ok=True)
    lowest = min(value for line in chart.lines for value in line.y if value > 0)
    axis = draw_chart(chart).to_dict()["layer"][-1]["encoding"]["y"]["scale"]
    assert 0.099 * lowest < axis["domain"][0] <= lowest


def test_without_near_one_hot_attention_the_section_reports_so() -> None:
    content = tables(2, 2)
    collapse = content["collapse"].assign(probability=math.nan, sparse=0)
    margins = content["margins"].assign(margin=math.nan, sparse=0)
    found = section(Collapse(), {"collapse": collapse, "margins": margins})
    assert found.text[-1] == "No attention row was near-one-hot, so none could collapse."
    assert not found.figures


def test_the_histogram_shows_the_counts_of_the_whole_model() -> None:
    content = tables(3, 4)
    found, table = section(Sparsity(), content), content["maxima"]
    (line,) = lines(found.figures["maxima"]).values()
    assert list(line.x)[::2] == list(table["low"])
    assert list(line.x)[1::2] == list(table["high"])
    assert list(line.y)[::2] == list(line.y)[1::2] == list(table["count"])
    share = content["sparsity"]["share"].iloc[0]
    assert f"Of 12,345 attention rows {100 * share:.1f} % are near-one-hot" in found.text[0]


# Heat maps


def test_heads_are_shown_with_the_values_of_their_tables() -> None:
    content = tables(3, 4)
    figures = {**section(Sparsity(), content).figures, **section(Collapse(), content).figures}
    assert heat(figures["sparsity"]) == by_head(content["sparsity"], "share")
    collapse = content["collapse"]
    at_level = collapse[(collapse["noise"] == 0.12) & (collapse["definition"] == "loose")]
    assert heat(figures["collapse-heads"]) == by_head(at_level, "probability")
    assert figures["collapse-heads"].title == "Circuit collapse by head at 12 % RMS noise"
    margins = np.array(heat(figures["margins"]))
    assert margins == pytest.approx(np.array(by_head(content["margins"], "margin")), nan_ok=True)
    assert math.isnan(margins[1][1])


def test_heads_that_are_not_in_the_table_are_empty() -> None:
    table = tables(4, 3)["sparsity"]
    table = table[(table["layer"] != 2).fillna(True)]
    shown = np.array(heat(section(Sparsity(), {"sparsity": table}).figures["sparsity"]))
    assert np.isnan(shown).all(1).tolist() == [False, False, True, False]


def test_attention_maps_have_tokens_at_both_sides() -> None:
    figure = section(Sparsity(), tables(3, 4)).figures["map-1-3"]
    assert isinstance(figure, HeatMap)
    assert figure.title == "Attention of layer 1 head 3"
    wanted = [[1 / (q + 1) if k <= q else math.nan for k in range(5)] for q in range(5)]
    assert np.array(heat(figure)) == pytest.approx(np.array(wanted), nan_ok=True)
    assert figure.limits == (0, 1)
    assert (figure.y_names[3], figure.x_names[2]) == ("<b>", "日本␣and␣much…")


def test_without_tokens_positions_are_named() -> None:
    figure = section(Sparsity(), {"maps": tables(1, 1)["maps"]}).figures["map-1-3"]
    assert isinstance(figure, HeatMap)
    assert list(figure.x_names) == list("01234")
