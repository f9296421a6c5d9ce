"""Sections of token measures show what their tables hold."""

import math
import warnings
from itertools import product

import numpy as np
import pandas as pd
import pytest

from normscope.measures.embeddings import Embeddings
from normscope.measures.geometry import Geometry
from normscope.measures.journey import Journey
from normscope.measures.queries import Queries
from normscope.measures.singular import SingularVectors
from normscope.measures.tokens import TokenMeasure
from normscope.measures.values import Values
from normscope.results.figures import Chart, HeatMap, Line, Scene
from normscope.results.sections import Section
from normscope.results.tables import token_name

WORDS = [" time", " life", " world", " year"]


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
            **{score: value, f"{score}_low": value - 0.08, f"{score}_high": value + 0.08, f"{score}_random": chance},
            **{f"{score}_random_low": chance - 0.02, f"{score}_random_high": chance + 0.02},
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
    update += [("token", 0, 1.2, 0.75), ("sum", 0, 0.8, 1.9)]
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


TABLES = {
    Journey: ["journey", "places"],
    Embeddings: ["distances", "extremes"],
    Queries: ["heads", "nearest"],
    Values: ["heads", "nearest", "updates"],
    SingularVectors: ["spectrum", "singular"],
    Geometry: ["norm_points", "norm_curves", "head_update"],
}


def of_probe(content: dict[str, pd.DataFrame], probe: str) -> dict[str, pd.DataFrame]:
    """The tables that one probe makes."""
    return {name: table[table["probe"] == probe] if "probe" in table else table for name, table in content.items()}


def section(kind: type[TokenMeasure], content: dict[str, pd.DataFrame], settings: str = "") -> Section:
    shown = kind().section(of_probe(content, kind.name), settings)
    assert shown is not None
    return shown


def chart(shown: Section, name: str) -> dict[str, Line]:
    """The lines of a chart by name."""
    figure = shown.figures[name]
    assert isinstance(figure, Chart)
    return {line.name: line for line in figure.lines}


def heat_map(shown: Section, name: str) -> HeatMap:
    figure = shown.figures[name]
    assert isinstance(figure, HeatMap)
    return figure


def scene(shown: Section, name: str) -> Scene:
    figure = shown.figures[name]
    assert isinstance(figure, Scene)
    return figure


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in TABLES.items() for name in names])
def test_one_table_is_enough(kind: type[TokenMeasure], name: str) -> None:
    shown = section(kind, {name: tables(1, 2)[name]}, "small print")
    assert shown.name == kind.name
    assert shown.figures or shown.tables
    assert all("small print" in figure.settings for figure in shown.figures.values())


@pytest.mark.parametrize("kind", TABLES)
def test_empty_tables_have_no_section(kind: type[TokenMeasure]) -> None:
    assert kind().section({name: table.iloc[:0] for name, table in tables(1, 2).items()}, "") is None


@pytest.mark.parametrize("kind", TABLES)
def test_every_finding_has_its_figure(kind: type[TokenMeasure]) -> None:
    content = of_probe(tables(2, 3), kind.name)
    findings = list(kind().findings(content, {"sentence": "one stone"}))
    assert findings
    assert {finding.figure for finding in findings} <= {None, *section(kind, content).figures}


def test_what_was_not_measured_is_left_out_without_a_warning() -> None:
    content = tables(2, 2)
    kept = ["layer", "nearest_text", "nearest_cosine", "angle", "travelled", "from_start", "cosine_start", "radius"]
    content["journey"] = content["journey"][kept]
    none = {f"precedence{end}": None for end in ("", "_low", "_high", "_random")}
    content["heads"] = content["heads"].assign(**none, nearness_low=math.nan, same_random=math.nan)
    content["places"] = content["places"].assign(shown=None)
    content["places"].loc[3, "x"] = math.nan
    content["nearest"]["nearest_text"] = None
    content["updates"] = content["updates"][content["updates"]["head"].notna()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        journeyed, heads_shown = section(Journey, content), section(Values, content)
        assert len(list(Journey().findings(content, {"sentence": ""}))) == 1
    assert {"journey", "journey-angle"} <= set(journeyed.figures)
    assert not {"journey-rank", "journey-probability"} & set(journeyed.figures)
    assert {"heads-values-same", "heads-values-nearness"} <= set(heads_shown.figures)
    assert "heads-values-precedence" not in heads_shown.figures
    assert "rank of target" not in journeyed.tables[0].columns
    assert list(chart(journeyed, "journey-cosine")) == ["the token itself", "nearest token"]


# Journeys


def test_the_journey_is_listed_from_the_embeddings_to_the_last_layer() -> None:
    content = tables(3, 4)
    (listed,) = section(Journey, content).tables
    assert [row[0] for row in listed.rows] == ["embeddings", *(f"layer {layer}" for layer in range(8))]
    assert listed.rows[0][1:3] == ("␣one", "0.90")
    assert listed.rows[1][listed.columns.index("nearest token")] == "⏎<b>"
    assert [row[listed.columns.index("rank of target")] for row in listed.rows][-4:] == ["4,000", "1", "1", "1"]
    assert listed.rows[0][listed.columns.index("rotation")] == "–"
    moved, reached = Journey().findings(content, {"sentence": "To kill"})
    assert "embedding of ␣one before layer 0; after the last layer the model predicts ␣stone (probability" in moved.text
    assert "from layer 5 on" in reached.text


@pytest.mark.parametrize(
    ("ranks", "reached"),
    [
        ([5, 1, 1, 3, 2, 1, 1, 1, 1], "from layer 4 on (of layers 0–7)"),
        ([5, 1, 1, 3, 2, 1, 1, 1, 1200], "rank 1,200 after the last layer"),
        ([1] * 9, "from the embeddings on"),
    ],
)
def test_a_prediction_that_is_left_again_counts_from_its_return(ranks: list[int], reached: str) -> None:
    _, finding = Journey().findings({"journey": journey(9).assign(rank=ranks)}, {"sentence": ""})
    assert reached in finding.text


def test_charts_of_the_journey_have_the_values_of_the_table() -> None:
    content = tables(3, 4)
    table, shown = content["journey"], section(Journey, content)
    for name, lines in {
        "journey-way": {"sum of rotations": "travelled", "angle to the start": "from_start"},
        "journey-cosine": {"the token itself": "cosine_start", "predicted token": "cosine_predicted"},
        "journey-radius": {"norm": "radius"},
        "journey-rank": {"target token": "rank"},
        "journey-probability": {"most probable token": "predicted_probability"},
    }.items():
        for line, column in lines.items():
            drawn = chart(shown, name)[line]
            assert list(drawn.x) == list(table["layer"])
            assert list(drawn.y) == list(table[column])
    rotation = chart(shown, "journey-angle")["rotation"]  # row 1 is the state after layer 0, which rotates it
    assert list(rotation.x) == list(range(8))
    assert list(rotation.y) == list(table["angle"][1:])


def test_the_journey_is_drawn_where_the_table_says() -> None:
    content = tables(3, 4)
    path = content["places"][content["places"]["kind"] == "path"]
    drawn = scene(section(Journey, content, "seed 0"), "journey")
    (trail,), (cloud, marks) = drawn.trails, drawn.clouds
    assert list(trail.points) == list(zip(path["x"], path["y"], path["z"], strict=True))
    assert list(trail.labels) == [text.replace(" ", "␣") for text in path["text"]]
    assert (len(cloud.points), list(marks.labels), drawn.radius) == (200, ["␣one", "␣stone"], 1.0)
    shares = path["shown"]
    share = f"{100 * shares.min():.0f} % to {100 * shares.max():.0f} %"
    assert drawn.settings == f"seed 0; the projection shows {share} of the path's squared norm"


def test_a_map_without_norms_has_no_sphere_and_says_so() -> None:
    drawn = scene(section(Journey, {"places": places(9, umap=True)}), "journey")
    assert "not angles or distances" in drawn.caption
    assert drawn.radius is None


# Heads


@pytest.mark.parametrize("kind", [Queries, Values])
def test_maps_of_heads_have_the_values_of_the_table(kind: type[TokenMeasure]) -> None:
    content = of_probe(tables(3, 4), kind.name)
    shown, rows = section(kind, content), content["heads"]
    for score, suffix in product(("same", "nearness", "precedence"), ("", "-random")):
        drawn = heat_map(shown, f"heads-{kind.name}-{score}{suffix}")
        column = f"{score}{suffix.replace('-', '_')}"
        assert [list(row) for row in drawn.values] == [list(group[column]) for _, group in rows.groupby("layer")]
        assert drawn.limits == (0.0, 1.0)


def test_chosen_layers_stand_without_gaps() -> None:
    table = heads(3, 2, ("queries",)).replace({"layer": {1: 7, 2: 29}})
    drawn = heat_map(section(Queries, {"heads": table}), "heads-queries-same")
    assert [list(row) for row in drawn.values] == [list(group["same"]) for _, group in table.groupby("layer")]
    assert list(drawn.y_names) == ["0", "7", "29"]


def test_one_layer_shows_heads_beside_random_weights() -> None:
    table = heads(1, 5, ("queries",))
    lines = chart(section(Queries, {"heads": table}), "heads-queries-nearness")
    assert list(lines) == ["head", "random weights", "chance"]
    assert list(lines["head"].y) == list(table["nearness"])
    assert list(lines["head"].low or ()) == list(table["nearness_low"])
    assert list(lines["random weights"].y) == list(table["nearness_random"])
    assert "chance" not in chart(section(Queries, {"heads": table}), "heads-queries-same")


def test_heads_are_counted_and_sorted_by_kind() -> None:
    content = of_probe(tables(3, 4), "queries")
    table = content["heads"]
    counts, listed, *_ = section(Queries, content).tables
    assert counts.columns == ("meaning-preserving", "precedence", "none")
    assert [int(cell) for cell in counts.rows[0]] == [sum(table["label"] == label) for label in counts.columns]
    assert len(listed.rows) == 12
    kinds = [row[1].replace("‑", "-") for row in listed.rows]
    assert kinds == sorted(kinds, key=["meaning-preserving", "precedence", "none"].index)
    first = table[table["label"] == kinds[0]].sort_values("same").iloc[-1]
    assert listed.rows[0][0] == f"{first['layer']}, {first['head']}"
    assert listed.rows[0][2] == f"{first['same']:.2f} ({first['same_low']:.2f}–{first['same_high']:.2f})"


def test_of_many_heads_the_table_shows_the_first() -> None:
    _, table = section(Values, {"heads": heads(6, 9, ("values",))}).tables
    assert len(table.rows) == 20
    assert "the first 20 of 54" in table.caption
    assert "over 100 words" in table.caption


# Nearest tokens, updates, singular vectors, embeddings


def test_nearest_tokens_stand_by_head_and_word() -> None:
    content = {"nearest": nearest(3, 4)}
    queries, values = section(Queries, content).tables, section(Values, content).tables
    assert [table.columns for table in queries] == [("head", "␣time", "␣life", "␣world", "␣year")] * 3
    assert [row[0] for row in queries[0].rows] == [f"head {head}" for head in range(4)]
    assert [row[0] for row in values[0].rows] == [*(f"head {head}" for head in range(4)), "all heads"]
    assert queries[0].rows[0][2] == "␣life1 · ␣life2 · ␣life3 · ␣life4 · ␣life5"


def test_of_many_layers_three_have_tables() -> None:
    shown = section(Queries, {"nearest": nearest(9, 1)}).tables
    assert [table.caption.split(",")[0] for table in shown] == [f"Nearest tokens in layer {n}" for n in (0, 4, 8)]


def test_updates_are_means_over_words() -> None:
    table = tables(3, 4)["updates"]
    means = table[table["head"].notna()].groupby(["layer", "head"])["relative_norm"].mean()
    drawn = heat_map(section(Values, {"updates": table}), "updates")
    assert np.array(drawn.values).ravel() == pytest.approx(means.to_numpy())
    lines = chart(section(Values, {"updates": table[table["layer"] == 0]}), "updates")
    assert list(lines["one head"].y) == pytest.approx(list(means[0]))
    whole = table[(table["layer"] == 0) & table["head"].isna()]["relative_norm"].mean()
    assert list(lines["sum of all heads"].y) == pytest.approx([whole] * 2)


def test_spectra_and_the_tokens_of_singular_vectors() -> None:
    content = tables(3, 4)
    shown, table = section(SingularVectors, content), content["spectrum"]
    lines = chart(shown, "spectrum-2-vo")
    assert list(lines) == [f"head {head}" for head in range(4)]
    assert list(lines["head 1"].y) == list(table[table["head"] == 1]["value"])
    (listed,) = shown.tables
    assert len(listed.rows) == 4 * 4
    assert listed.rows[4] == ("head 1, 0", "10", "␣l1.1 · ␣l1.2 · ␣l1.3", "␣r1.1 · ␣r1.2 · ␣r1.3")
    many, _ = singular(0, 20)
    assert list(chart(section(SingularVectors, {"spectrum": many}), "spectrum-0-vo")) == ["20 heads"]


def test_embeddings_have_the_tables_of_the_paper() -> None:
    distances, extremes = section(Embeddings, tables(1, 1)).tables
    assert distances.rows[0] == ("original", "23.747 ± 0.432", "< 0.001 ± < 0.001")
    assert [row[0] for row in extremes.rows] == [f"{end} {rank}" for end in ("top", "bottom") for rank in range(1, 6)]
    assert extremes.rows[0][1] == "␣the (3.9)"
    assert len(extremes.columns) == 5


def test_tokens_show_invisible_characters() -> None:
    assert [token_name(text) for text in (" a\n", "\x00\u200b", None, math.nan, pd.NA)] == ["␣a⏎", "□□", "–", "–", "–"]
    assert token_name("x" * 13) == "x" * 11 + "…"
    assert token_name("x" * 13, 24) == "x" * 13


# The geometry of a norm


def test_points_are_joined_to_where_they_came_from() -> None:
    content = norm_tables()
    drawn = scene(section(Geometry, content), "norm-points")
    assert [cloud.name for cloud in drawn.clouds] == ["given", "centred", "normalised"]
    assert list(drawn.clouds[2].origins) == list(drawn.clouds[1].points)
    assert drawn.clouds[0].origins == []
    assert drawn.radius == pytest.approx(math.sqrt(3))


def test_curves_close_and_arrows_lead_where_they_should() -> None:
    shown = section(Geometry, norm_tables())
    for curve in chart(shown, "norm-curves").values():
        assert (curve.x[0], curve.y[0]) == (curve.x[-1], curve.y[-1])
    arrows = chart(shown, "head-update")
    assert list(arrows) == ["sphere", "token", "update", "sum", "back on the sphere"]
    assert (list(arrows["token"].x), list(arrows["token"].y)) == ([0, 1.2], [0, 0.75])
    assert (list(arrows["update"].x), list(arrows["update"].y)) == ([1.2, 0.8], [0.75, 1.9])
    assert arrows["sum"].arrow
    assert not arrows["sphere"].arrow
