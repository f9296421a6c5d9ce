"""The page of stability says what its tables say, for one head as for many, and leaves out what was not measured."""

import math
import warnings
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from normscope.errors import InputError
from normscope.report.charts import HeatMap, save_chart
from normscope.report.heat_png import draw_heat_png
from normscope.report.stability import stability_sections, write_stability_report
from normscope.runs import RunFolder
from test_report import Reader, traces

LEVELS = [0.0, 0.003, 0.01, 0.03, 0.12, 0.3]
SECTIONS = {
    "Findings": ["findings"],
    "Spread of embedding norms": ["spread"],
    "Sensitivity to noise": ["noise"],
    "Circuit collapse": ["collapse", "margins"],
    "Sparsity of attention": ["sparsity", "maxima"],
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


def written(folder: Path, content: dict[str, pd.DataFrame]) -> RunFolder:
    run = RunFolder(folder)
    for name, table in content.items():
        run.write_table(name, table)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of three layers with four heads, drawn once for the tests that only look at it."""
    folder = written(tmp_path_factory.mktemp("run"), tables(3, 4))
    write_stability_report(folder, "3 layers, 4 heads, seed 0")
    return folder


@pytest.fixture(scope="module")
def page(run: RunFolder) -> Reader:
    return Reader((run.path / "report.html").read_text(encoding="utf-8"))


def drawn(run: RunFolder, name: str) -> list[dict[str, Any]]:
    return traces(run.path / "figures" / f"{name}.html")


def curves(run: RunFolder, name: str) -> dict[str, dict[str, Any]]:
    """The first line of every name in an interactive chart."""
    found: dict[str, dict[str, Any]] = {}
    for trace in drawn(run, name):
        if not trace.get("fill") and trace["mode"] != "markers":
            found.setdefault(trace["name"], trace)
    return found


def heat(run: RunFolder, name: str) -> list[list[float | None]]:
    (trace,) = drawn(run, name)
    values: list[list[float | None]] = trace["z"]
    return values


def by_head(table: pd.DataFrame, column: str) -> list[list[float]]:
    rows = table[table["head"].notna()]
    return [list(group.sort_values("head")[column]) for _, group in rows.groupby("layer")]


# The page


def test_the_page_leads_with_the_findings_and_embeds_every_figure(run: RunFolder, page: Reader) -> None:
    headings = [page.text.rindex(f"{title}\n") for title in SECTIONS]
    assert headings == sorted(headings)
    assert len(page.every("section")) == len(SECTIONS)
    assert page.text.index("Noise of 1% costs <2 points.") < page.text.index("Published for Pre-Norm")
    figures = {path.stem for path in (run.path / "figures").glob("*.png")}
    assert len(page.every("img")) == len(figures) == 10
    assert {f"figures/{name}.html" for name in figures} <= {link["href"] for link in page.every("a")}
    assert page.text.count("3 layers, 4 heads, seed 0") == 1 + len(figures)


@pytest.mark.parametrize("title", sorted(set(SECTIONS) - {"Findings"}))
def test_only_what_was_measured_has_a_section(tmp_path: Path, title: str) -> None:
    content = tables(1, 2)
    run = written(tmp_path, {name: content[name] for name in SECTIONS[title]})
    assert [section.title for section in stability_sections(run, "")] == [title]


@pytest.mark.parametrize(("table", "pictures"), [("margins", {"margins"}), ("maxima", {"maxima"}), ("spread", {"spread"})])
def test_one_table_is_enough(tmp_path: Path, table: str, pictures: set[str]) -> None:
    run = written(tmp_path, {table: tables(2, 2)[table]})
    write_stability_report(run, "")
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == pictures


def test_a_run_without_tables_has_a_page(tmp_path: Path) -> None:
    write_stability_report(RunFolder(tmp_path), "nothing asked for")
    assert "nothing asked for" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 5), (5, 1)])
def test_one_layer_or_one_head_is_enough(tmp_path: Path, layers: int, heads: int) -> None:
    run = written(tmp_path, tables(layers, heads))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_stability_report(run, "")
    assert np.shape(heat(run, "sparsity")) == np.shape(heat(run, "margins")) == (layers, heads)


# Lines


def test_bands_of_the_spread_are_the_intervals_of_the_whole_layer(run: RunFolder) -> None:
    table = run.table("spread")
    whole = table[table["head"].isna()]
    bands = [trace for trace in drawn(run, "spread") if trace.get("fill")]
    for band, share in zip(bands, (50, 90, 99), strict=True):
        assert band["x"] == [0, 1, 2, 2, 1, 0, None]
        assert band["y"] == [*whole[f"high{share}"], *whole[f"low{share}"][::-1], None]
    assert curves(run, "spread")["whole layer"]["y"] == [1, 1, 1]
    heads = curves(run, "spread")["single heads, 90%"]["y"]
    assert heads == [value for head in zip(*by_head(table, "low90"), strict=True) for value in (*head, None)]


def test_of_many_heads_the_outermost_limits_are_drawn(tmp_path: Path) -> None:
    run = written(tmp_path, {"spread": tables(3, 20)["spread"]})
    stability_sections(run, "")
    heads = [trace for trace in drawn(run, "spread") if trace["name"] == "outermost heads, 90%"]
    table = run.table("spread")
    assert [line["y"][:-1] for line in heads] == [
        [min(layer) for layer in by_head(table, "low90")],
        [max(layer) for layer in by_head(table, "high90")],
    ]


@pytest.mark.parametrize(("column", "factor"), [("accuracy", 100), ("loss", 1)])
def test_noise_is_drawn_beside_the_clean_value(run: RunFolder, column: str, factor: float) -> None:
    table = run.table("noise")
    lines = curves(run, f"noise-{column}")
    assert list(lines) == [
        *(f"{what}, {where}" for what in ("q,k,m", "q,k") for where in ("all", "sparse", "non-sparse")),
        "clean",
    ]
    rows = table[(table["perturbed"] == "q,k") & (table["where"] == "sparse") & (table["noise"] > 0)]
    assert lines["q,k, sparse"]["x"] == lines["clean"]["x"] == LEVELS[1:]
    assert lines["q,k, sparse"]["y"] == pytest.approx(list(factor * rows[column]))
    assert lines["clean"]["y"] == pytest.approx([factor * table[table["noise"] == 0][column].iloc[0]] * 5)
    band = next(trace for trace in drawn(run, f"noise-{column}") if trace.get("fill") and trace["name"] == "q,k, sparse")
    assert band["y"][:5] == pytest.approx(list(factor * (rows[column] + rows[f"{column}_stderr"])))


def test_noise_in_one_layer_has_a_line_for_each_level(run: RunFolder) -> None:
    table = run.table("noise")
    lines = curves(run, "noise-layers-qkm-all")
    assert list(lines) == [*(f"noise {level:g}" for level in LEVELS[1:]), "clean"]
    rows = table[table["layer"].notna() & (table["noise"] == 0.03)]
    assert lines["noise 0.03"]["x"] == [0, 1, 2]
    assert lines["noise 0.03"]["y"] == pytest.approx(list(100 * rows["accuracy"]))


def test_without_accuracy_the_loss_is_drawn(tmp_path: Path) -> None:
    table = tables(2, 1)["noise"].assign(accuracy=math.nan, accuracy_stderr=math.nan)
    (section,) = stability_sections(written(tmp_path, {"noise": table}), "")
    assert [picture.png.stem for picture in section.pictures] == ["noise-loss", "noise-layers-qkm-all"]
    assert section.pictures[1].title.startswith("Loss")


@pytest.mark.parametrize("layers", [3, 30])
def test_collapse_has_both_definitions_and_every_layer(tmp_path: Path, layers: int) -> None:
    run = written(tmp_path, {"collapse": tables(layers, 2)["collapse"]})
    stability_sections(run, "")
    table = run.table("collapse")
    rows = table[table["head"].isna() & (table["noise"] > 0)]
    lines = curves(run, "collapse")
    for definition in ("loose", "strict"):
        whole = rows[rows["layer"].isna() & (rows["definition"] == definition)]["probability"]
        assert lines[f"whole model, {definition}"]["y"] == [value or None for value in whole]
    shown = [line["y"] for name, line in lines.items() if "layer" in name]
    per_layer = [
        [value or None for value in group["probability"]] for _, group in rows[rows["definition"] == "loose"].groupby("layer")
    ]
    assert shown == (per_layer if layers == 3 else [[value for layer in per_layer for value in (*layer, None)]])


def test_an_error_as_large_as_its_value_does_not_stretch_the_axis(run: RunFolder) -> None:
    shown = [value for trace in drawn(run, "collapse") for value in trace["y"] if value]
    lowest = min(value for line in curves(run, "collapse").values() for value in line["y"] if value)
    assert min(shown) >= 0.1 * lowest


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_model_that_never_collapses_is_drawn(tmp_path: Path, value: float) -> None:
    table = tables(2, 2)["collapse"].assign(probability=value, stderr=0.0)
    run = written(tmp_path, {"collapse": table})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_stability_report(run, "")
    empty = None if math.isnan(value) else value
    assert curves(run, "collapse")["whole model, loose"]["y"] == [empty] * 5
    assert heat(run, "collapse-heads") == [[empty] * 2] * 2


def test_without_sparse_attention_the_page_says_so(tmp_path: Path) -> None:
    content = tables(2, 2)
    collapse = content["collapse"].assign(probability=math.nan, sparse=0)
    margins = content["margins"].assign(margin=math.nan, sparse=0)
    (section,) = stability_sections(written(tmp_path, {"collapse": collapse, "margins": margins}), "")
    assert section.text[-1] == "No attention distribution was sparse, so none could collapse."
    assert not section.pictures


def test_the_histogram_shows_the_counts_of_the_whole_model(run: RunFolder, page: Reader) -> None:
    table = run.table("maxima")
    (line,) = curves(run, "maxima").values()
    assert line["x"][::2] == list(table["low"])
    assert line["x"][1::2] == list(table["high"])
    assert line["y"][::2] == line["y"][1::2] == [count or None for count in table["count"]]
    share = run.table("sparsity")["share"].iloc[0]
    assert f"Of 12,345 distributions {100 * share:.1f} % are sparse and 25.0 % clearly are not" in page.text
    assert "A peak at 1 is sparse attention" in page.text


# Heat maps


def test_heads_are_shown_with_the_values_of_their_tables(run: RunFolder, page: Reader) -> None:
    margins = run.table("margins")
    assert heat(run, "sparsity") == by_head(run.table("sparsity"), "share")
    collapse = run.table("collapse")
    at_level = collapse[(collapse["noise"] == 0.12) & (collapse["definition"] == "loose")]
    assert heat(run, "collapse-heads") == by_head(at_level, "probability")
    assert "Circuit collapse by head at a noise of 0.12" in page.text
    levels = heat(run, "margins")
    assert levels[1][1] is None
    wanted = np.log10(by_head(margins, "margin"))
    assert np.array(levels, dtype=float) == pytest.approx(wanted, nan_ok=True)  # its colours are logarithmic
    (trace,) = drawn(run, "margins")
    assert trace["text"][2][3] == f"layer 2, head 3: {margins['margin'].iloc[-1]:.4g}"


def test_heads_that_are_not_in_the_table_are_empty(tmp_path: Path) -> None:
    table = tables(4, 3)["sparsity"]
    table = table[(table["layer"] != 2).fillna(True)]
    run = written(tmp_path, {"sparsity": table})
    stability_sections(run, "")
    assert [row == [None] * 3 for row in heat(run, "sparsity")] == [False, False, True, False]


def test_attention_maps_have_tokens_at_both_sides(run: RunFolder, page: Reader) -> None:
    assert "Attention of head 3 in layer 1" in page.text
    assert heat(run, "map-1-3") == [[1 / (q + 1) if k <= q else None for k in range(5)] for q in range(5)]
    (trace,) = drawn(run, "map-1-3")
    assert (trace["zmin"], trace["zmax"]) == (0, 1)
    assert trace["text"][3][2] == "query &lt;b&gt;, key 日本␣and␣much…: 0.25"


def test_without_tokens_positions_are_named(tmp_path: Path) -> None:
    run = written(tmp_path, {"maps": tables(1, 1)["maps"]})
    stability_sections(run, "")
    (trace,) = drawn(run, "map-1-3")
    assert trace["text"][4][2] == "query 4, key 2: 0.2"


def heat_map(rows: int, columns: int, **options: Any) -> HeatMap:
    values = np.random.default_rng(0).uniform(0.1, 1, (rows, columns)).tolist()
    names = [str(i) for i in range(columns)], [str(i) for i in range(rows)]
    return HeatMap(
        "Heads", "head", "layer", "share of all distributions", *names, values, "Bright is much.", "seed 0", **options
    )


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (12, 12), (48, 32), (128, 96), (1, 64), (80, 1)])
def test_a_heat_map_of_any_size_is_readable(rows: int, columns: int) -> None:
    figure = draw_heat_png(heat_map(rows, columns))
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    assert width == 1200
    assert height <= 1400
    axes, bar = figure.axes
    words = [axes.xaxis.label, axes.yaxis.label, bar.yaxis.label, *figure.texts]
    ticks = [axes.get_xticklabels(), axes.get_yticklabels()]
    for text in (*words, *ticks[0], *ticks[1]):
        box = text.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= width + 1, text
        assert 0 <= box.y0 <= box.y1 <= height + 1, text
    for labels in ticks:
        boxes = [label.get_window_extent() for label in labels]
        assert labels[0].get_fontsize() >= 5
        assert not any(one.overlaps(other) for one, other in pairwise(boxes))


def test_an_empty_cell_looks_like_no_value(tmp_path: Path) -> None:
    values = [[0.0, math.nan], [math.inf, 1.0]]
    both = HeatMap("Heads", "head", "layer", "share", ["0", "1"], ["0", "1"], values, "")
    figure = draw_heat_png(both)
    assert np.ma.getmaskarray(figure.axes[0].images[0].get_array()).tolist() == [[False, True], [True, False]]  # type: ignore[arg-type]
    assert figure.axes[0].patch.get_hatch()
    _, page = save_chart(both, tmp_path, "empty")
    assert traces(page)[0]["z"] == [[0, None], [None, 1]]


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("value", [math.nan, 0.0, 0.5])
def test_colours_need_no_second_value(tmp_path: Path, value: float, log: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        png, page = save_chart(HeatMap("One", "x", "y", "z", ["0"], ["0"], [[value]], "", log=log), tmp_path, "one")
    with Image.open(png) as image:
        assert image.width == 1200
    assert traces(page)[0]["zmin"] < traces(page)[0]["zmax"]


def test_a_heat_map_says_what_is_wrong_with_it() -> None:
    with pytest.raises(InputError, match="needs 1 rows of 2 values"):
        HeatMap("Heads", "head", "layer", "share", ["0", "1"], ["0"], [[1.0]], "")
    with pytest.raises(InputError, match="has no cells"):
        HeatMap("Heads", "head", "layer", "share", [], [], [], "")
