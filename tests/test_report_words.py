"""The page of words says what its tables say, its scenes hold their points, and no label covers another."""

import math
import warnings
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from normscope.errors import InputError
from normscope.report.chart_png import draw_png
from normscope.report.charts import Chart, Cloud, Line, Scene, Trail, save_chart
from normscope.report.labels import Box, place_labels
from normscope.report.page import Section
from normscope.report.scene_png import draw_scene_png
from normscope.report.tables import token_name
from normscope.report.words import words_sections, write_words_report
from normscope.results.scene import camera, frame, wire_sphere
from normscope.runs import RunFolder
from test_report import Reader, traces

WORDS = [" time", " life", " world", " year"]
SECTIONS = {
    "What to know about this model": ["notes"],
    "Journey of a token": ["journey", "places"],
    "The journey, layer by layer": ["journey"],
    "Embeddings on the sphere": ["distances", "extremes"],
    "What heads do to words": ["heads"],
    "Queries and their keys": ["nearest"],
    "Keys and their values": ["nearest", "updates"],
    "Singular vectors": ["spectrum", "singular"],
    "The geometry of a norm": ["norm_points", "norm_curves", "head_update"],
}


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def places(states: int, *, umap: bool = False) -> pd.DataFrame:
    """A path from one word to another inside the unit sphere, in a cloud."""
    random = np.random.default_rng(1)
    way = np.linspace(0, 1, states)[:, None]
    path = (0.9 - 0.5 * way * (1 - way)) * unit(
        (1 - way) * [1, 0.1, 0.2] + way * [0.1, 1, 0.4] + 0.05 * random.normal(size=(states, 3))
    )
    cloud = 0.3 * unit(random.normal(size=(200, 3)))
    texts = [" one"] * (states // 2) + [" single"] * (states // 4)
    texts += [" stone"] * (states - len(texts))
    parts = {
        "cloud": (cloud, [f"w{i}" for i in range(200)]),
        "path": (path, texts),
        "word": (np.eye(3)[:2], [" one", " stone"]),
    }
    rows = [
        (kind, layer if kind == "path" else None, text, *point)
        for kind, (points, names) in parts.items()
        for layer, (point, text) in enumerate(zip(points.tolist(), names, strict=True))
    ]
    table = pd.DataFrame(rows, columns=["kind", "layer", "text", "x", "y", "z"]).astype({"layer": "Int64"})
    return table.assign(shown=math.nan if umap else (table[["x", "y", "z"]] ** 2).sum(axis=1))


def journey(states: int) -> pd.DataFrame:
    steps = np.arange(states)
    angle = np.where(steps > 0, 10.0 + 5 * np.sin(steps), np.nan)
    share = steps / (states - 1)
    return pd.DataFrame(
        {
            "layer": steps,
            "nearest_token": steps,
            "nearest_text": [" one", *["\n<b>"] * (states - 2), " stone"],
            "nearest_cosine": 0.9 - 0.3 * np.sin(math.pi * share),
            "predicted_token": steps,
            "predicted_text": ["$x$", *[" bird"] * (states - 4), *[" stone"] * 3],
            "predicted_probability": 0.1 + 0.8 * share,
            "angle": angle,
            "travelled": np.nancumsum(angle),
            "from_start": 80.0 * share,
            "cosine_start": 1 - share,
            "cosine_predicted": 0.6 * share,
            "radius": 3.0 * 40**share,
            "rank": [9000 - 1000 * min(step, 8) if step < states - 3 else 1 for step in steps],
            "probability": 0.85 * share**3,
        }
    )


def heads(layers: int, count: int, probes: tuple[str, ...] = ("queries", "values")) -> pd.DataFrame:
    random = np.random.default_rng(2)
    table = pd.DataFrame(product(probes, range(layers), range(count)), columns=["probe", "layer", "head"]).assign(words=100)
    for score, chance in (("same", 0.02), ("nearness", 0.5), ("precedence", 0.5)):
        value = random.uniform(0.1, 0.9, len(table))
        table = table.assign(
            **{score: value, f"{score}_low": value - 0.08, f"{score}_high": value + 0.08, f"{score}_random": chance}
        )
    table["label"] = np.select([table["same"] > 0.6, table["precedence"] > 0.7], ["meaning-preserving", "precedence"], "none")
    return table


def nearest(layers: int, count: int) -> pd.DataFrame:
    queries = product(["queries"], range(layers), range(count), WORDS, range(1, 6))
    values = product(["values"], range(layers), [*range(count), None], WORDS, range(1, 6))
    table = pd.DataFrame([*queries, *values], columns=["probe", "layer", "head", "word", "rank"]).astype({"head": "Int64"})
    texts = [f"{word}{rank}" for word, rank in zip(table["word"], table["rank"], strict=True)]
    return table.assign(token=7, nearest_token=8, nearest_text=texts, score=1.5)


def singular(layer: int, count: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    spectrum = pd.DataFrame(product([layer], range(count), ["vo"], range(8)), columns=["layer", "head", "matrix", "index"])
    spectrum["value"] = 5.0 * np.exp(-0.6 * spectrum["index"]) * (1 + spectrum["head"])
    sides = pd.DataFrame(product(["left", "right"], range(1, 4)), columns=["side", "rank"])
    tokens = spectrum[spectrum["index"] < 4].merge(sides, "cross")
    texts = [
        f" {side[0]}{head}.{rank}" for side, head, rank in zip(tokens["side"], tokens["head"], tokens["rank"], strict=True)
    ]
    return spectrum.assign(share=0.1), tokens.assign(nearest_token=3, nearest_text=texts, score=0.4)


def norm_tables() -> dict[str, pd.DataFrame]:
    given = np.random.default_rng(3).normal(size=(30, 3)) + np.array([0.4, 0.2, 0.0])
    centred = given - given.mean(1, keepdims=True)
    stages = {"given": given, "centred": centred, "normalised": math.sqrt(3) * unit(centred)}
    points = [(stage, i, *point) for stage, values in stages.items() for i, point in enumerate(values.tolist())]
    turn = np.linspace(0, 2 * math.pi, 60, endpoint=False)
    circle = math.sqrt(2) * np.stack([np.cos(turn), np.sin(turn)], 1)
    curves = {"normalised": circle, "with gain": circle * [1.5, 0.6], "with gain and bias": circle * [1.5, 0.6] + [0.4, 0.9]}
    rows = [(stage, i, *point) for stage, values in curves.items() for i, point in enumerate(values.tolist())]
    update = [("circle", i, *point) for i, point in enumerate(circle.tolist())]
    update += [("token", 0, 1.2, 0.75), ("update", 0, 1.2, 0.75), ("update", 1, 0.8, 1.9), ("sum", 0, 0.8, 1.9)]
    return {
        "norm_points": pd.DataFrame(points, columns=["stage", "point", "x", "y", "z"]),
        "norm_curves": pd.DataFrame(rows, columns=["stage", "order", "x", "y"]),
        "head_update": pd.DataFrame([*update, ("back on the sphere", 0, 0.55, 1.3)], columns=["part", "order", "x", "y"]),
    }


def tables(layers: int, count: int) -> dict[str, pd.DataFrame]:
    settings = ["original", "centred", "scaled", "centred and scaled"]
    scores = ["norm", "norm with gain", "norm and bias", "norm with gain and bias"]
    extremes = pd.DataFrame(product(scores, ["top", "bottom"], range(1, 6)), columns=["score", "end", "rank"])
    updates = pd.DataFrame(product(range(layers), [*range(count), None], WORDS), columns=["layer", "head", "word"])
    spectrum, vectors = singular(layers - 1, count)
    return {
        "notes": pd.DataFrame({"text": ["Positions are rotary: probes are at distance 0.", "The embedding is <tied>."]}),
        "journey": journey(layers + 6),
        "places": places(layers + 6),
        "distances": pd.DataFrame(
            {
                "setting": settings,
                "l2_mean": 23.747,
                "l2_std": 0.432,
                "cosine_mean": [1e-5, 0.15, 1e-5, 0.15],
                "cosine_std": 1e-4,
            }
        ),
        "extremes": extremes.assign(token=262, text=" the", value=4.0 - 0.1 * extremes["rank"]),
        "heads": heads(layers, count),
        "nearest": nearest(layers, count),
        "updates": updates.astype({"head": "Int64"}).assign(norm=2.0, relative_norm=np.linspace(0.05, 0.9, len(updates))),
        "spectrum": spectrum,
        "singular": vectors,
        **norm_tables(),
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
    write_words_report(folder, "tiny model, seed 0")
    return folder


@pytest.fixture(scope="module")
def page(run: RunFolder) -> Reader:
    return Reader((run.path / "report.html").read_text(encoding="utf-8"))


def drawn(run: RunFolder, name: str) -> dict[str, dict[str, Any]]:
    """The traces of an interactive chart that a legend names."""
    return {trace["name"]: trace for trace in traces(run.path / "figures" / f"{name}.html") if trace.get("showlegend")}


def section(run: RunFolder, title: str) -> Section:
    (found,) = (one for one in words_sections(run, "") if one.title == title)
    return found


@pytest.fixture(scope="module")
def sections(run: RunFolder) -> dict[str, Section]:
    return {one.title: one for one in words_sections(run, "tiny model, seed 0")}


# The page


def test_the_page_has_every_section_and_embeds_every_figure(run: RunFolder, page: Reader) -> None:
    headings = [page.text.rindex(f"{title}\n") for title in SECTIONS]
    assert headings == sorted(headings)
    assert len(page.every("section")) == len(SECTIONS)
    figures = {path.stem for path in (run.path / "figures").glob("*.png")}
    assert len(page.every("img")) == len(figures)
    assert {f"figures/{name}.html" for name in figures} <= {link["href"] for link in page.every("a")}
    assert page.text.count("tiny model, seed 0") == 1 + len(figures)
    assert "The embedding is <tied>." in page.text


def test_every_picture_opens_and_nothing_is_loaded_from_the_network(run: RunFolder, page: Reader) -> None:
    for path in (run.path / "figures").glob("*.png"):
        with Image.open(path) as image:
            image.load()
            assert image.width == 1200
    for path in [run.path / "report.html", *(run.path / "figures").glob("*.html")]:
        text = path.read_text(encoding="utf-8")
        assert not [source for source in Reader(text).sources() if "//" in source.split(",")[0]]
        assert "http" not in Reader(text).text
        assert 'href="http' not in text


@pytest.mark.parametrize("name", sorted({name for names in SECTIONS.values() for name in names}))
def test_one_table_is_enough(tmp_path: Path, name: str) -> None:
    sections = words_sections(written(tmp_path, {name: tables(1, 2)[name]}), "")
    assert {one.title for one in sections} == {title for title, names in SECTIONS.items() if name in names}


def test_empty_tables_make_an_empty_page(tmp_path: Path) -> None:
    run = written(tmp_path, {name: table.iloc[:0] for name, table in tables(1, 2).items()})
    assert words_sections(run, "") == []
    write_words_report(run, "")


def test_what_was_not_measured_is_left_out_without_a_warning(tmp_path: Path) -> None:
    content = tables(2, 2)
    kept = ["layer", "nearest_text", "nearest_cosine", "angle", "travelled", "from_start", "cosine_start", "radius"]
    content["journey"] = content["journey"][kept]
    none = {f"precedence{end}": None for end in ("", "_low", "_high", "_random")}
    content["heads"] = content["heads"].assign(**none, nearness_low=math.nan, same_random=math.nan)
    content["places"] = content["places"].assign(shown=None)
    content["places"].loc[3, "x"] = math.nan
    content["nearest"]["nearest_text"] = None
    content["updates"] = content["updates"][content["updates"]["head"].notna()]
    run = written(tmp_path, content)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        write_words_report(run, "")
    figures = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert {"journey", "journey-angle", "heads-values-same", "heads-values-nearness"} <= figures
    assert not {"journey-rank", "journey-probability", "heads-queries-precedence", "heads-values-precedence"} & figures
    (table,) = section(run, "The journey, layer by layer").tables
    assert "rank of expected" not in table.columns
    assert list(drawn(run, "journey-cosine")) == ["start word", "nearest word"]


# Journeys


def test_the_journey_is_told_and_listed(run: RunFolder, sections: dict[str, Section], page: Reader) -> None:
    table = run.table("journey")
    assert "The nearest word is ␣one at the start and ␣stone at the end." in page.text
    assert f"turns by {table['travelled'].iloc[-1]:.0f}° in all, and ends 80° from where it started" in page.text
    assert "The expected word is the most probable one from layer 6 on." in page.text
    (listed,) = sections["The journey, layer by layer"].tables
    assert [row[0] for row in listed.rows] == [str(layer) for layer in range(9)]
    assert listed.rows[0][1:4] == ("␣one", "0.90", "$x$")
    assert listed.rows[1][listed.columns.index("nearest word")] == "⏎<b>"
    assert [row[listed.columns.index("rank of expected")] for row in listed.rows][-4:] == ["4,000", "1", "1", "1"]
    assert listed.rows[0][listed.columns.index("turned")] == "–"


def test_a_next_word_that_is_left_again_counts_from_its_return(tmp_path: Path) -> None:
    table = journey(9).assign(rank=[5, 1, 1, 3, 2, 1, 1, 1, 1])
    assert "from layer 5 on." in section(written(tmp_path, {"journey": table}), "Journey of a token").text[-1]
    table["rank"] = [5, 1, 1, 3, 2, 1, 1, 1, 1200]
    assert "rank 1,200" in section(written(tmp_path, {"journey": table}), "Journey of a token").text[-1]


def test_charts_of_the_journey_have_the_values_of_the_table(run: RunFolder) -> None:
    table = run.table("journey")
    for name, lines in {
        "journey-angle": {"since the layer before": "angle"},
        "journey-way": {"travelled in all": "travelled", "from the start": "from_start"},
        "journey-cosine": {
            "start word": "cosine_start",
            "predicted word": "cosine_predicted",
            "nearest word": "nearest_cosine",
        },
        "journey-radius": {"radius": "radius"},
        "journey-rank": {"expected word": "rank"},
        "journey-probability": {"most probable word": "predicted_probability"},
    }.items():
        found = drawn(run, name)
        for line, column in lines.items():
            assert found[line]["x"] == list(table["layer"])
            assert found[line]["y"] == [None if value != value else value for value in table[column]]


def test_the_journey_is_drawn_where_the_table_says(run: RunFolder, sections: dict[str, Section]) -> None:
    table = run.table("places")
    path = table[table["kind"] == "path"]
    found = drawn(run, "journey")
    trail = found["state of the token"]
    for axis in "xyz":
        assert trail[axis] == pytest.approx(list(path[axis]), rel=1e-4)
        assert len(found["200 other words"][axis]) == 200
    assert trail["hovertext"] == [f"layer {layer}: {text.replace(' ', '␣')}" for layer, text in enumerate(path["text"])]
    assert trail["marker"]["color"] == list(range(9))
    assert trail["marker"]["size"] == sorted(trail["marker"]["size"])
    assert found["start and predicted word"]["text"] == ["␣one", "␣stone"]
    (picture, *_) = sections["Journey of a token"].pictures
    shares = path["shown"]
    seen = f"{shares.min():.0%} to {shares.max():.0%}"
    assert picture.settings == f"tiny model, seed 0; of the path's squared length {seen} can be seen"


def test_a_map_without_lengths_has_no_sphere_and_says_so(tmp_path: Path) -> None:
    run = written(tmp_path, {"places": places(9, umap=True)})
    (picture,) = section(run, "Journey of a token").pictures
    assert "not angles or distances" in picture.caption
    assert all(trace.get("showlegend") for trace in traces(tmp_path / "figures" / "journey.html"))


# Heads


def test_maps_of_heads_have_the_values_of_the_table(run: RunFolder) -> None:
    table = run.table("heads")
    for probe, score in product(("queries", "values"), ("same", "nearness", "precedence")):
        (trace,) = traces(run.path / "figures" / f"heads-{probe}-{score}.html")
        rows = table[table["probe"] == probe]
        assert trace["z"] == [list(group[score]) for _, group in rows.groupby("layer")]
        (random,) = traces(run.path / "figures" / f"heads-{probe}-{score}-random.html")
        assert random["z"] == [list(group[f"{score}_random"]) for _, group in rows.groupby("layer")]
        assert {(each["zmin"], each["zmax"]) for each in (trace, random)} == {(0, 1)}


def test_chosen_layers_stand_without_gaps(tmp_path: Path) -> None:
    table = heads(3, 2, ("queries",)).replace({"layer": {1: 7, 2: 29}})
    words_sections(written(tmp_path, {"heads": table}), "")
    (trace,) = traces(tmp_path / "figures" / "heads-queries-same.html")
    assert trace["z"] == [list(group["same"]) for _, group in table.groupby("layer")]
    assert trace["text"][2][1].startswith("layer 29, head 1: ")


def test_one_layer_shows_heads_beside_random_weights(tmp_path: Path) -> None:
    table = heads(1, 5, ("queries",))
    run = written(tmp_path, {"heads": table})
    words_sections(run, "")
    found = traces(tmp_path / "figures" / "heads-queries-nearness.html")
    shown = [trace for trace in found if trace["mode"] == "markers"]
    assert shown[0]["y"] == list(table["nearness"])
    assert [value for value in shown[1]["y"] if value is not None] == list(table["nearness_random"])
    bars = next(trace for trace in found if trace["name"] == "head" and not trace["showlegend"] and trace["mode"] == "lines")
    assert bars["y"][:2] == [table["nearness_low"][0], table["nearness_high"][0]]
    assert "chance" in [trace["name"] for trace in found]
    assert '"range":[-0.03,1.03]' in (tmp_path / "figures" / "heads-queries-same.html").read_text(encoding="utf-8")
    assert "chance" not in [trace["name"] for trace in traces(tmp_path / "figures" / "heads-queries-same.html")]


def test_heads_are_counted_and_sorted_by_kind(run: RunFolder, sections: dict[str, Section]) -> None:
    table = run.table("heads")
    counts, queries, values = sections["What heads do to words"].tables
    assert counts.columns[1:4] == ("meaning-preserving", "precedence", "none")
    for row in counts.rows:
        assert [int(cell) for cell in row[1:4]] == [
            sum((table["probe"] == row[0]) & (table["label"] == label)) for label in counts.columns[1:4]
        ]
    assert len(queries.rows) == len(values.rows) == 12
    kinds = [row[1].replace("‑", "-") for row in queries.rows]
    assert kinds == sorted(kinds, key=["meaning-preserving", "precedence", "none"].index)
    first = table[(table["probe"] == "queries") & (table["label"] == kinds[0])].sort_values("same").iloc[-1]
    assert queries.rows[0][0] == f"{first['layer']}, {first['head']}"
    assert queries.rows[0][2] == f"{first['same']:.2f} ({first['same_low']:.2f}–{first['same_high']:.2f})"


def test_of_many_heads_the_table_shows_the_first(tmp_path: Path) -> None:
    run = written(tmp_path, {"heads": heads(6, 9, ("values",))})
    _, table = section(run, "What heads do to words").tables
    assert len(table.rows) == 20
    assert "the first 20 of 54" in table.caption
    assert "over 100 words" in table.caption


# Nearest tokens, updates, singular vectors, embeddings


def test_nearest_tokens_stand_by_head_and_word(run: RunFolder, sections: dict[str, Section]) -> None:
    queries, values = sections["Queries and their keys"].tables, sections["Keys and their values"].tables
    assert [table.columns for table in queries] == [("head", "␣time", "␣life", "␣world")] * 3
    assert [row[0] for row in queries[0].rows] == [f"head {head}" for head in range(4)]
    assert [row[0] for row in values[0].rows] == [*(f"head {head}" for head in range(4)), "all heads"]
    assert queries[0].rows[0][2] == "␣life1 · ␣life2 · ␣life3 · ␣life4 · ␣life5"


def test_of_many_layers_three_have_tables(tmp_path: Path) -> None:
    tables_shown = section(written(tmp_path, {"nearest": nearest(9, 1)}), "Queries and their keys").tables
    assert [table.caption.split(",")[0] for table in tables_shown] == [f"Nearest tokens in layer {n}" for n in (0, 4, 8)]


def test_updates_are_means_over_words(run: RunFolder, tmp_path: Path) -> None:
    table = run.table("updates")
    (trace,) = traces(run.path / "figures" / "updates.html")
    means = table[table["head"].notna()].groupby(["layer", "head"])["relative_norm"].mean()
    assert np.array(trace["z"]).ravel() == pytest.approx(np.log10(means.to_numpy()))  # its colours are logarithmic
    one = written(tmp_path, {"updates": table[table["layer"] == 0]})
    words_sections(one, "")
    found = traces(tmp_path / "figures" / "updates.html")
    assert next(trace for trace in found if trace["mode"] == "markers")["y"] == pytest.approx(list(means[0]))
    whole = next(trace for trace in found if trace["name"] == "sum of all heads")["y"]
    assert whole == pytest.approx([table[(table["layer"] == 0) & table["head"].isna()]["relative_norm"].mean()] * 2)


def test_spectra_and_the_tokens_of_singular_vectors(run: RunFolder, sections: dict[str, Section], tmp_path: Path) -> None:
    table = run.table("spectrum")
    lines = drawn(run, "spectrum-2-vo")
    assert list(lines) == [f"head {head}" for head in range(4)]
    assert lines["head 1"]["y"] == list(table[table["head"] == 1]["value"])
    (listed,) = sections["Singular vectors"].tables
    assert len(listed.rows) == 4 * 3
    assert listed.rows[3] == ("head 1, 0", "10", "␣l1.1 · ␣l1.2 · ␣l1.3", "␣r1.1 · ␣r1.2 · ␣r1.3")
    many, _ = singular(0, 20)
    words_sections(written(tmp_path, {"spectrum": many.drop(columns="matrix")}), "")
    assert [trace["name"] for trace in traces(tmp_path / "figures" / "spectrum-0.html")] == ["20 heads"]


def test_embeddings_have_the_tables_of_the_paper(run: RunFolder, sections: dict[str, Section]) -> None:
    distances, extremes = sections["Embeddings on the sphere"].tables
    assert distances.rows[0] == ("original", "23.747 ± 0.432", "< 0.001 ± < 0.001")
    assert [row[0] for row in extremes.rows] == [f"{end} {rank}" for end in ("top", "bottom") for rank in range(1, 6)]
    assert extremes.rows[0][1] == "␣the (3.9)"
    assert len(extremes.columns) == 5


def test_tokens_show_what_cannot_be_seen() -> None:
    assert [token_name(text) for text in (" a\n", "\x00\u200b", None, math.nan, pd.NA)] == ["␣a⏎", "□□", "–", "–", "–"]
    assert token_name("x" * 13) == "x" * 11 + "…"
    assert token_name("x" * 13, 24) == "x" * 13


# The geometry of a norm


def test_points_are_joined_to_where_they_came_from(run: RunFolder) -> None:
    table = run.table("norm_points")
    found = traces(run.path / "figures" / "norm-points.html")
    assert [trace["name"] for trace in found if trace["showlegend"]] == ["given", "centred", "normalised"]
    links = [trace for trace in found if trace["mode"] == "lines" and trace.get("legendgroup") == "normalised"]
    stages = {stage: rows["x"].to_numpy() for stage, rows in table.groupby("stage")}
    assert links[0]["x"][0::3] == pytest.approx(list(stages["centred"]), rel=1e-4)
    assert links[0]["x"][1::3] == pytest.approx(list(stages["normalised"]), rel=1e-4)
    sphere = np.array(next(trace for trace in found if trace["hoverinfo"] == "skip")["z"], dtype=float)
    assert np.nanmax(sphere) == pytest.approx(math.sqrt(3), rel=1e-4)


def test_curves_close_and_arrows_lead_where_they_should(run: RunFolder) -> None:
    for curve in drawn(run, "norm-curves").values():
        assert (curve["x"][0], curve["y"][0]) == (curve["x"][-1], curve["y"][-1])
    arrows = drawn(run, "head-update")
    assert list(arrows) == ["sphere", "token", "update", "sum", "back on the sphere"]
    assert (arrows["token"]["x"], arrows["token"]["y"]) == ([0, 1.2], [0, 0.75])
    assert (arrows["update"]["x"], arrows["update"]["y"]) == ([1.2, 0.8], [0.75, 1.9])
    assert arrows["sum"]["marker"]["symbol"] == "arrow"
    assert arrows["sphere"].get("marker", {}).get("symbol") != "arrow"


def test_equal_axes_keep_a_circle_round() -> None:
    turn = np.linspace(0, 2 * math.pi, 50)
    circle = Line("circle", (5 * np.cos(turn)).tolist(), (5 * np.sin(turn)).tolist())
    for equal in (True, False):
        figure = draw_png(Chart("Round", "x", "y", (circle, Line("to", [0, 5], [0, 0], arrow=True)), "", equal=equal))
        figure.canvas.draw()
        across, up = np.diff(figure.axes[0].transData.transform([[0, 0], [1, 1]]), axis=0)[0]
        assert (across == pytest.approx(up)) == equal
        (head,) = figure.axes[0].texts
        assert head.xy == (5, 0)  # type: ignore[attr-defined]


# Scenes


def scene(states: int, **options: Any) -> Scene:
    table = places(states)
    path, cloud = (table[table["kind"] == kind][["x", "y", "z"]].to_numpy() for kind in ("path", "cloud"))
    trail = Trail("state", list(map(tuple, path.tolist())), [f"␣word{i}" for i in range(states)])
    clouds = (Cloud("words", list(map(tuple, cloud.tolist()))), Cloud("marked", [(0.0, 0.0, 1.0)], ["$x$ 日本"], marked=True))
    return Scene("Journey", clouds, (trail,), "See the way.", "seed 0", **options)


@pytest.mark.parametrize("radius", [None, 1.0])
@pytest.mark.parametrize("states", [1, 2, 31])
def test_labels_of_a_scene_stay_on_the_picture_and_apart(states: int, radius: float | None) -> None:
    figure = draw_scene_png(scene(states, radius=radius, order="layer"))
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    assert width == 1200
    labels = [text for text in figure.texts if "word" in text.get_text() or "□" in text.get_text()]
    written = [text.get_text() for text in labels]
    assert {"$x$ □□", "␣word0 (0)", f"␣word{states - 1} ({states - 1})"} <= set(written)
    assert min(states, 10) < len(written) <= states + 1
    boxes = [text.get_window_extent() for text in labels]
    for box in boxes:
        assert 0 <= box.x0 <= box.x1 <= width
        assert 0 <= box.y0 <= box.y1 <= height
    inner = [box.expanded(1, 0.6) for box in boxes]  # without the empty room above and below its letters
    assert not [1 for one, other in combinations(inner, 2) if one.overlaps(other)]


def test_a_label_stands_where_it_changes_with_the_steps_that_it_holds_for() -> None:
    points = [(float(i), 0.0, 0.0) for i in range(6)]
    points[2] = (math.nan, 0.0, 0.0)
    trail = Trail("t", points, ["a", "a", "b", "a", "c", "c"], steps=[0, 2, 4, 6, 8, 10])
    assert trail.words() == {0: "a (0–6)", 4: "c (8–10)"}
    assert Trail("t", points).words() == {}


def test_a_scene_is_seen_from_its_trail() -> None:
    on_sphere = Scene("s", (), (Trail("t", [(0.0, 1.0, 0.1), (0.1, 1.0, 0.0)]),), "", radius=1.0)
    elevation, azimuth = camera(on_sphere)
    assert azimuth == pytest.approx(90, abs=5)
    assert elevation == pytest.approx(2.9, abs=1)
    flat = Scene("s", (), (Trail("t", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]),), "")
    assert abs(math.cos(math.radians(camera(flat)[1]))) == pytest.approx(1)
    for shown in (on_sphere, flat):
        _, _, screen = frame(shown)
        assert screen @ screen.T == pytest.approx(np.eye(2))


def test_everything_in_a_scene_is_inside_its_frame() -> None:
    figure = draw_scene_png(scene(9))
    figure.canvas.draw()
    axes = figure.axes[0]
    box = axes.get_window_extent()
    for collection in axes.collections:
        spots = axes.transData.transform(np.asarray(collection.get_offsets()))
        assert ((spots >= box.min - 1) & (spots <= box.max + 1)).all()


def test_a_wire_sphere_has_its_radius() -> None:
    lines = np.array(wire_sphere(2.5))
    assert np.linalg.norm(lines, axis=-1) == pytest.approx(2.5)
    assert lines[:, 0] == pytest.approx(lines[:, -1])


def test_words_in_space_carry_no_markup(tmp_path: Path) -> None:
    odd = Scene("s", (), (Trail("<i>", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0)], ["<b>", "&"]),), "", axes=("<x>", "y", "z"))
    _, page = save_chart(odd, tmp_path, "odd")
    (trace,) = traces(page)
    assert trace["text"] == ["‹b› (0)", "& (1)"]
    assert trace["hovertext"] == ["step 0: &lt;b&gt;", "step 1: &amp;"]
    assert trace["name"] == "&lt;i&gt;"


def test_a_scene_of_one_point_or_without_trails_is_drawn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, one in enumerate(
            [
                Scene("s", (Cloud("c", [(1.0, 1.0, 1.0)]),), (), ""),
                Scene("s", (), (Trail("t", [(0.0, 0.0, 0.0)], ["a"]),), "", radius=1.0),
                Scene("s", (Cloud("c", []),), (Trail("t", [(0.0, math.nan, 0.0), (0.0, 0.0, 0.0)]), Trail("u", [])), ""),
            ]
        ):
            picture, _ = save_chart(one, tmp_path, f"scene-{number}")
            with Image.open(picture) as image:
                assert image.width == 1200


def test_a_scene_says_what_is_wrong_with_it() -> None:
    with pytest.raises(InputError, match="no points"):
        Scene("s", (Cloud("c", [(math.nan, 0.0, 0.0)]),), (), "")
    with pytest.raises(InputError, match="2 points and 1 labels"):
        Trail("t", [(0.0, 0.0, 0.0)] * 2, ["a"])
    with pytest.raises(InputError, match="1 points and 2 origins"):
        Cloud("c", [(0.0, 0.0, 0.0)], origins=[(0.0, 0.0, 0.0)] * 2)


def overlaps(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def test_labels_find_room_beside_a_crowd() -> None:
    anchors = [(100.0 + 2 * i, 100.0) for i in range(20)]
    room = (0.0, 0.0, 300.0, 200.0)
    boxes = place_labels(anchors, [(40.0, 8.0)] * 20, anchors, room)
    assert not [1 for one, other in combinations(boxes, 2) if overlaps(one, other)]
    assert all(box[0] >= 0 and box[1] >= 0 and box[2] <= 300 and box[3] <= 200 for box in boxes)
    (alone,) = place_labels([(50.0, 50.0)], [(40.0, 8.0)], [(50.0, 50.0)], room)
    assert not overlaps(alone, (49.0, 49.0, 51.0, 51.0))
    assert place_labels([], [], [], room) == []
