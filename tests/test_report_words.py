"""Sections on tokens show what their tables hold, scenes hold their points, and no label covers another."""

import base64
import math
import re
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from helpers.pages import lines_of, read_page
from normscope.errors import InputError
from normscope.report.labels import Box, place_labels
from normscope.report.sphere import camera, frame, scene_data, scene_svg, wire_sphere
from normscope.report.words import words_sections, write_words_report
from normscope.results import Chart, Cloud, Figure, HeatMap, Line, Scene, Section, Trail
from normscope.results.tables import token_name
from normscope.runs import RunFolder

WORDS = [" time", " life", " world", " year"]
SECTIONS = {
    "What to know about this model": ["notes"],
    "Journey of a token": ["journey", "places"],
    "The journey, layer by layer": ["journey"],
    "Embeddings on the sphere": ["distances", "extremes"],
    "What heads do to tokens": ["heads"],
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


@pytest.fixture(scope="module")
def content() -> dict[str, pd.DataFrame]:
    """Tables of three layers with four heads."""
    return tables(3, 4)


@pytest.fixture(scope="module")
def sections(content: dict[str, pd.DataFrame]) -> dict[str, Section]:
    return {section.title: section for section in words_sections(content, "tiny model, seed 0")}


@pytest.fixture(scope="module")
def figures(sections: dict[str, Section]) -> dict[str, Figure]:
    return figures_of(*sections.values())


def figures_of(*sections: Section) -> dict[str, Figure]:
    return {name: figure for section in sections for name, figure in section.figures.items()}


def section(content: dict[str, pd.DataFrame], title: str) -> Section:
    (found,) = (one for one in words_sections(content, "") if one.title == title)
    return found


def lines(figure: Figure) -> dict[str, Line]:
    assert isinstance(figure, Chart)
    return lines_of(figure)


def heat(figure: Figure) -> HeatMap:
    assert isinstance(figure, HeatMap)
    return figure


# The page


def test_the_page_has_every_section_and_holds_every_figure(
    tmp_path: Path, content: dict[str, pd.DataFrame], figures: dict[str, Figure]
) -> None:
    run = RunFolder(tmp_path)
    for name, table in content.items():
        run.write_table(name, table)
    write_words_report(run, "tiny model, seed 0")
    page = read_page(tmp_path / "report.html")
    headings = [page.text.rindex(f"{title}\n") for title in SECTIONS]
    assert headings == sorted(headings)
    assert len(page.every("section")) == len(SECTIONS)
    assert page.figures == [re.sub(r"[^a-z0-9]+", "-", name) for name in figures]
    assert "The embedding is <tied>." in page.text
    assert not [source for source in page.sources() if "//" in source.split(",")[0]]


@pytest.mark.parametrize("name", sorted({name for names in SECTIONS.values() for name in names}))
def test_one_table_is_enough(name: str) -> None:
    sections = words_sections({name: tables(1, 2)[name]}, "")
    assert {one.title for one in sections} == {title for title, names in SECTIONS.items() if name in names}


def test_empty_tables_have_no_section(content: dict[str, pd.DataFrame]) -> None:
    assert words_sections({name: table.iloc[:0] for name, table in content.items()}, "") == []


def test_what_was_not_measured_is_left_out() -> None:
    content = tables(2, 2)
    kept = ["layer", "nearest_text", "nearest_cosine", "angle", "travelled", "from_start", "cosine_start", "radius"]
    content["journey"] = content["journey"][kept]
    none = {f"precedence{end}": None for end in ("", "_low", "_high", "_random")}
    content["heads"] = content["heads"].assign(**none, nearness_low=math.nan, same_random=math.nan)
    content["places"] = content["places"].assign(shown=None)
    content["places"].loc[3, "x"] = math.nan
    content["nearest"]["nearest_text"] = None
    content["updates"] = content["updates"][content["updates"]["head"].notna()]
    figures = figures_of(*words_sections(content, ""))
    assert {"journey", "journey-angle", "heads-values-same", "heads-values-nearness"} <= set(figures)
    assert not {"journey-rank", "journey-probability", "heads-queries-precedence", "heads-values-precedence"} & set(figures)
    (table,) = section(content, "The journey, layer by layer").tables
    assert "rank of target" not in table.columns
    assert set(lines(figures["journey-cosine"])) == {"start token", "nearest token"}


# Journeys


def test_the_journey_is_summarised_and_listed(content: dict[str, pd.DataFrame], sections: dict[str, Section]) -> None:
    table, text = content["journey"], " ".join(sections["Journey of a token"].text)
    assert "The nearest token is ␣one at the start and ␣stone at the end." in text
    assert f"Its path is {table['travelled'].iloc[-1]:.0f}° long and ends 80° from its start." in text
    assert "The target is the most probable token from the state before layer 6 on." in text
    (listed,) = sections["The journey, layer by layer"].tables
    assert [row[0] for row in listed.rows] == [str(layer) for layer in range(9)]
    assert listed.rows[0][1:4] == ("␣one", "0.90", "$x$")
    assert listed.rows[1][listed.columns.index("nearest token")] == "⏎<b>"
    assert [row[listed.columns.index("rank of target")] for row in listed.rows][-4:] == ["4,000", "1", "1", "1"]
    assert listed.rows[0][listed.columns.index("rotation")] == "–"


def test_a_target_that_is_not_predicted_has_a_rank() -> None:
    content = {"journey": tables(3, 4)["journey"].assign(rank=7)}
    assert "After the last layer the target has rank 7" in " ".join(section(content, "Journey of a token").text)


def test_a_target_that_is_lost_again_counts_from_its_return() -> None:
    table = journey(9).assign(rank=[5, 1, 1, 3, 2, 1, 1, 1, 1])
    assert "before layer 5 on." in section({"journey": table}, "Journey of a token").text[-1]


def test_charts_of_the_journey_are_its_table(content: dict[str, pd.DataFrame], figures: dict[str, Figure]) -> None:
    table = content["journey"]
    rotation = lines(figures["journey-angle"])["rotation"]
    assert rotation.x == [layer - 1 for layer in table["layer"]]  # the layer between two states
    np.testing.assert_array_equal(rotation.y, table["angle"])
    for name, line, column in (
        ("journey-way", "path length", "travelled"),
        ("journey-radius", "norm", "radius"),
        ("journey-rank", "target", "rank"),
        ("journey-probability", "most probable token", "predicted_probability"),
    ):
        assert list(lines(figures[name])[line].y) == list(table[column]), name


def test_the_path_is_a_trail_between_marked_tokens(content: dict[str, pd.DataFrame], figures: dict[str, Figure]) -> None:
    drawn, table = figures["journey"], content["places"]
    assert isinstance(drawn, Scene)
    path = table[table["kind"] == "path"]
    (trail,), (others, marked) = drawn.trails, drawn.clouds
    assert trail.numbers == list(range(9))
    assert [point[0] for point in trail.points] == list(path["x"])
    assert (marked.marked, list(marked.labels)) == (True, ["␣one", "␣stone"])
    assert others.name == "200 other tokens"
    seen = f"{path['shown'].min():.0%} to {path['shown'].max():.0%}"
    assert drawn.settings == f"tiny model, seed 0; the projection holds {seen} of the path's squared norm"
    assert drawn.radius == 1.0


def test_a_map_without_norms_has_no_sphere_and_says_so() -> None:
    drawn = section({"places": places(9, umap=True)}, "Journey of a token").figures["journey"]
    assert isinstance(drawn, Scene)
    assert "not angles or distances" in drawn.caption
    assert drawn.radius is None


# Heads


def test_maps_of_heads_have_the_values_of_the_table(content: dict[str, pd.DataFrame], figures: dict[str, Figure]) -> None:
    table = content["heads"]
    for probe, score in product(("queries", "values"), ("same", "nearness", "precedence")):
        rows = table[table["probe"] == probe]
        found, random = heat(figures[f"heads-{probe}-{score}"]), heat(figures[f"heads-{probe}-{score}-random"])
        assert found.values == [list(group[score]) for _, group in rows.groupby("layer")]
        assert random.values == [list(group[f"{score}_random"]) for _, group in rows.groupby("layer")]
        assert found.limits == random.limits == (0, 1)


def test_chosen_layers_stand_without_gaps() -> None:
    table = heads(3, 2, ("queries",)).replace({"layer": {1: 7, 2: 29}})
    found = heat(figures_of(*words_sections({"heads": table}, ""))["heads-queries-same"])
    assert found.values == [list(group["same"]) for _, group in table.groupby("layer")]
    assert found.y_names == ["0", "7", "29"]


def test_one_layer_shows_heads_beside_random_weights() -> None:
    table = heads(1, 5, ("queries",))
    drawn = figures_of(*words_sections({"heads": table}, ""))
    found = lines(drawn["heads-queries-nearness"])
    assert set(found) == {"head", "random weights", "chance"}
    assert found["head"].dots
    assert (found["head"].y, found["head"].low) == (list(table["nearness"]), list(table["nearness_low"]))
    assert found["random weights"].y == list(table["nearness_random"])
    same = drawn["heads-queries-same"]
    assert isinstance(same, Chart)
    assert same.limits == (-0.03, 1.03)
    assert "chance" not in lines(same)


def test_heads_are_counted_and_sorted_by_kind(content: dict[str, pd.DataFrame], sections: dict[str, Section]) -> None:
    table = content["heads"]
    counts, queries, values = sections["What heads do to tokens"].tables
    assert counts.columns[1:4] == ("meaning-preserving", "precedence", "none")
    for row in counts.rows:
        assert [int(cell) for cell in row[1:4]] == [
            sum((table["probe"] == row[0]) & (table["label"] == label)) for label in counts.columns[1:4]
        ]
    assert len(queries.rows) == len(values.rows) == 12
    kinds = [row[1].replace("‑", "-") for row in queries.rows]
    assert kinds == sorted(kinds, key=["meaning-preserving", "precedence", "none"].index)
    first = table[(table["probe"] == "queries") & (table["label"] == kinds[0])].sort_values("same").iloc[-1]
    assert queries.columns[0] == "layer, head"  # by which a page links the row to its head
    assert queries.rows[0][0] == f"{first['layer']}, {first['head']}"
    assert queries.rows[0][2] == f"{first['same']:.2f} ({first['same_low']:.2f}–{first['same_high']:.2f})"


def test_of_many_heads_the_table_shows_the_first() -> None:
    _, table = section({"heads": heads(6, 9, ("values",))}, "What heads do to tokens").tables
    assert len(table.rows) == 20
    assert "the first 20 of 54" in table.caption
    assert "over 100 tokens" in table.caption


# Nearest tokens, updates, singular vectors, embeddings


def test_nearest_tokens_stand_by_head_and_token(sections: dict[str, Section]) -> None:
    queries, values = sections["Queries and their keys"].tables, sections["Keys and their values"].tables
    assert [table.columns for table in queries] == [("head", "␣time", "␣life", "␣world")] * 3
    assert [row[0] for row in queries[0].rows] == [f"head {head}" for head in range(4)]
    assert [row[0] for row in values[0].rows] == [*(f"head {head}" for head in range(4)), "all heads"]
    assert queries[0].rows[0][2] == "␣life1 · ␣life2 · ␣life3 · ␣life4 · ␣life5"


def test_of_many_layers_three_have_tables() -> None:
    tables_shown = section({"nearest": nearest(9, 1)}, "Queries and their keys").tables
    assert [table.caption.split(",")[0] for table in tables_shown] == [f"Nearest tokens in layer {n}" for n in (0, 4, 8)]


def test_updates_are_means_over_tokens(content: dict[str, pd.DataFrame], figures: dict[str, Figure]) -> None:
    table = content["updates"]
    means = table[table["head"].notna()].groupby(["layer", "head"])["relative_norm"].mean()
    assert np.array(heat(figures["updates"]).values).ravel() == pytest.approx(means.to_numpy())
    one = lines(figures_of(*words_sections({"updates": table[table["layer"] == 0]}, ""))["updates"])
    assert one["one head"].y == pytest.approx(list(means[0]))
    whole = table[(table["layer"] == 0) & table["head"].isna()]["relative_norm"].mean()
    assert one["sum of all heads"].y == pytest.approx([whole] * 2)


def test_spectra_and_the_tokens_of_singular_vectors(
    content: dict[str, pd.DataFrame], sections: dict[str, Section], figures: dict[str, Figure]
) -> None:
    table, found = content["spectrum"], lines(figures["spectrum-2-vo"])
    assert set(found) == {f"head {head}" for head in range(4)}
    assert found["head 1"].y == list(table[table["head"] == 1]["value"])
    (listed,) = sections["Singular vectors"].tables
    assert len(listed.rows) == 4 * 3
    assert listed.rows[3] == ("head 1, 0", "10", "␣l1.1 · ␣l1.2 · ␣l1.3", "␣r1.1 · ␣r1.2 · ␣r1.3")
    many, _ = singular(0, 20)
    drawn = figures_of(*words_sections({"spectrum": many.drop(columns="matrix")}, ""))
    assert list(lines(drawn["spectrum-0"])) == ["20 heads"]


def test_embeddings_have_the_tables_of_the_paper(sections: dict[str, Section]) -> None:
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


def test_points_are_joined_to_where_they_came_from(content: dict[str, pd.DataFrame], figures: dict[str, Figure]) -> None:
    drawn, table = figures["norm-points"], content["norm_points"]
    assert isinstance(drawn, Scene)
    assert [cloud.name for cloud in drawn.clouds] == ["given", "centred", "normalised"]
    stages = {str(stage): list(rows["x"]) for stage, rows in table.groupby("stage")}
    last = drawn.clouds[-1]
    assert [origin[0] for origin in last.origins] == stages["centred"]
    assert [point[0] for point in last.points] == stages["normalised"]
    assert drawn.radius == pytest.approx(math.sqrt(3))


def test_curves_close_and_arrows_lead_where_they_should(figures: dict[str, Figure]) -> None:
    for curve in lines(figures["norm-curves"]).values():
        assert (curve.x[0], curve.y[0]) == (curve.x[-1], curve.y[-1])
    arrows = lines(figures["head-update"])
    assert set(arrows) == {"sphere", "token", "update", "sum", "back on the sphere"}
    assert (arrows["token"].x, arrows["token"].y) == ([0, 1.2], [0, 0.75])
    assert (arrows["update"].x, arrows["update"].y) == ([1.2, 0.8], [0.75, 1.9])
    assert arrows["sum"].arrow
    assert not arrows["sphere"].arrow


# Scenes


def scene(states: int, **options: Any) -> Scene:
    table = places(states)
    path, cloud = (table[table["kind"] == kind][["x", "y", "z"]].to_numpy() for kind in ("path", "cloud"))
    trail = Trail("state", list(map(tuple, path.tolist())), [f"␣word{i}" for i in range(states)])
    clouds = (Cloud("words", list(map(tuple, cloud.tolist()))), Cloud("marked", [(0.0, 0.0, 1.0)], ["$x$ <b>"], marked=True))
    return Scene("Journey", clouds, (trail,), "See the way.", "seed 0", **options)


@pytest.mark.parametrize("radius", [None, 1.0])
@pytest.mark.parametrize("states", [1, 2, 31])
def test_labels_of_a_picture_stay_on_it(states: int, radius: float | None) -> None:
    svg = scene_svg(scene(states, radius=radius, order="layer"))
    size = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
    assert size is not None
    found = [
        (float(x), float(y), text) for x, y, text in re.findall(r'<text x="([\d.-]+)" y="([\d.-]+)"[^>]*>([^<]*)</text>', svg)
    ]
    assert {"$x$ &lt;b&gt;", "␣word0 (0)", f"␣word{states - 1} ({states - 1})", "Journey", "seed 0"} <= {
        text for *_, text in found
    }
    assert all(0 <= x <= int(size[1]) and 0 <= y <= int(size[2]) for x, y, _ in found)
    for x, y in re.findall(r'<circle cx="([\d.-]+)" cy="([\d.-]+)"', svg):
        assert 0 <= float(x) <= int(size[1])
        assert 0 <= float(y) <= int(size[2])


def test_the_page_has_the_points_to_four_digits() -> None:
    drawn = scene(31, radius=1.0)
    data = scene_data(drawn)
    points = np.frombuffer(base64.b64decode(data["trails"][0]["points"]), dtype="<i2").reshape(-1, 3) / 32767
    assert points == pytest.approx(np.array(drawn.trails[0].points), abs=2e-5)
    assert data["radius"] == 1.0
    assert data["steps"] == (0.0, 30.0)


def test_a_caption_stands_where_it_changes_with_the_steps_that_it_holds_for() -> None:
    points = [(float(i), 0.0, 0.0) for i in range(6)]
    points[2] = (math.nan, 0.0, 0.0)
    trail = Trail("t", points, ["a", "a", "b", "a", "c", "c"], steps=[0, 2, 4, 6, 8, 10])
    assert trail.captions() == {0: "a (0–6)", 4: "c (8–10)"}
    assert Trail("t", points).captions() == {}


def test_the_camera_faces_the_trail() -> None:
    on_sphere = Scene("s", (), (Trail("t", [(0.0, 1.0, 0.1), (0.1, 1.0, 0.0)]),), "", radius=1.0)
    elevation, azimuth = camera(on_sphere)
    assert azimuth == pytest.approx(90, abs=5)
    assert elevation == pytest.approx(2.9, abs=1)
    flat = Scene("s", (), (Trail("t", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]),), "")
    assert abs(math.cos(math.radians(camera(flat)[1]))) == pytest.approx(1)
    for shown in (on_sphere, flat):
        _, _, screen = frame(shown)
        assert screen @ screen.T == pytest.approx(np.eye(2))


def test_a_wire_sphere_has_its_radius() -> None:
    lines = np.array(wire_sphere(2.5))
    assert np.linalg.norm(lines, axis=-1) == pytest.approx(2.5)
    assert lines[:, 0] == pytest.approx(lines[:, -1])


@pytest.mark.parametrize(
    "shown",
    [
        Scene("s", (Cloud("c", [(1.0, 1.0, 1.0)]),), (), ""),
        Scene("s", (), (Trail("t", [(0.0, 0.0, 0.0)], ["a"]),), "", radius=1.0),
        Scene("s", (Cloud("c", []),), (Trail("t", [(0.0, math.nan, 0.0), (0.0, 0.0, 0.0)]), Trail("u", [])), ""),
    ],
)
def test_a_scene_of_one_point_or_without_trails_is_drawn(shown: Scene) -> None:
    assert "nan" not in scene_svg(shown)
    assert len(scene_data(shown)["clouds"]) + len(scene_data(shown)["trails"]) == 1


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
