"""Sections of a logit-lens trajectory: one token's path in three dimensions, and what happens in the full space."""

from typing import Any

import pandas as pd

from normscope.results import Chart, Cloud, Figure, Line, PageTable, Point, Scene, Section, Trail
from normscope.results.conventions import TOKEN_LENGTH
from normscope.results.tables import Tables, cell, figures_section, floats, spans_decades, table_of, token_name

# Column → heading and form of a number in the table.
_NUMBERS = {
    "nearest_cosine": ("cosine", ".2f"),
    "predicted_probability": ("P", ".2f"),
    "angle": ("rotation", ".1f"),
    "travelled": ("path length", ".1f"),
    "from_start": ("from the start", ".1f"),
    "radius": ("norm", ".3g"),
    "rank": ("rank of target", ",.0f"),
    "probability": ("P of target", ".2g"),
}
_WHOLE = 0.5  # of a landmark's squared norm, if a figure is to show the sphere
_COLUMNS = ["layer", "nearest_text", "predicted_text", "cosine_start", "cosine_predicted", *_NUMBERS]


def journey_sections(tables: Tables, settings: str) -> list[Section]:
    """The path of a token over the sphere, and its angles, cosines, norm and logit lens by layer."""
    table, places = table_of(tables, "journey"), table_of(tables, "places")
    charts: dict[str, Figure | None] = {}
    text: tuple[str, ...] = (
        "The hidden state of one token before every layer and after the last, as a direction, which is what a norm passes on. "
        "3-D projections can show structure that is not there; the charts use all dimensions. The target is the next token of "
        "the text, otherwise the model's final prediction.",
    )
    if places is not None:
        charts["journey"] = _scene(places, settings)
    if table is not None:
        table = table.reindex(columns=_COLUMNS).sort_values("layer")  # a model that predicts nothing leaves some out
        text += _findings(table)
        charts |= _charts(table, settings)
    sections = [figures_section("Journey of a token", text, charts, name="journey")] if charts else []
    return (
        sections
        if table is None
        else [*sections, Section("The journey, layer by layer", (), (_journey_table(table),), folded=True)]
    )


def _findings(table: pd.DataFrame) -> tuple[str, ...]:
    """Where it starts and ends, how far it goes, and from where on the target is the most probable token."""
    first, last = table.iloc[0], table.iloc[-1]
    texts = [
        f"The nearest token is {token_name(first['nearest_text'], TOKEN_LENGTH)} at the start and "
        f"{token_name(last['nearest_text'], TOKEN_LENGTH)} at the end."
    ]
    travelled, away = floats(table["travelled"])[-1], floats(table["from_start"])[-1]
    if travelled == travelled and away == away:
        texts[0] += f" Its path is {travelled:.0f}° long and ends {away:.0f}° from its start."
    ranks = dict(zip(table["layer"].astype(int), floats(table["rank"]), strict=True))
    later = [layer for layer, rank in ranks.items() if rank > 1]
    end = floats(table["rank"])[-1]
    if end == 1:
        since = min(layer for layer in ranks if layer > max(later, default=-1))
        texts.append(f"The target is the most probable token from the state {_state(since, max(ranks))} on.")
    elif end == end:
        texts.append(f"After the last layer the target has rank {end:,.0f}: the model predicts another token.")
    return tuple(texts)


def _state(layer: int, last: int) -> str:
    return "after the last layer" if layer == last else f"before layer {layer}"


def _journey_table(table: pd.DataFrame) -> PageTable:
    """All that was measured, a row for each layer; columns without a value are left out."""
    columns: list[tuple[str, list[str]]] = [("before layer", [str(int(layer)) for layer in table["layer"]])]
    for text, heading in (("nearest_text", "nearest token"), ("predicted_text", "logit lens")):
        if table[text].notna().any():
            columns.append((heading, [token_name(value, TOKEN_LENGTH) for value in table[text]]))
        number = text.replace("text", "cosine" if text.startswith("nearest") else "probability")
        columns += _number_column(table, number)
    for name in ("angle", "travelled", "from_start", "radius", "rank", "probability"):
        columns += _number_column(table, name)
    caption = "Nearest token, logit-lens prediction, angles in degrees, and the target; the last row is after the last layer"
    return PageTable(caption, tuple(name for name, _ in columns), tuple(zip(*(cells for _, cells in columns), strict=True)))


def _number_column(table: pd.DataFrame, name: str) -> list[tuple[str, list[str]]]:
    heading, form = _NUMBERS[name]
    return [(heading, [cell(value, form) for value in floats(table[name])])] if table[name].notna().any() else []


def _charts(table: pd.DataFrame, settings: str) -> dict[str, Figure | None]:
    def chart(title: str, label: str, lines: dict[str, str], caption: str, **options: Any) -> Chart | None:
        layers, axis = floats(table["layer"]), "before layer"
        if "angle" in lines.values():  # of the layer between two states
            layers, axis = [layer - 1 for layer in layers], "layer"
        there = {name: floats(table[column]) for name, column in lines.items() if table[column].notna().any()}
        drawn = tuple(Line(name, layers, values) for name, values in there.items())
        return Chart(title, axis, label, drawn, caption, settings, **options) if drawn else None

    return {
        "journey-angle": chart(
            "Rotation of the token per layer",
            "degrees",
            {"rotation": "angle"},
            "High points are the layers that move the token; 90° is an unrelated direction.",
        ),
        "journey-way": chart(
            "Path length and distance",
            "degrees",
            {"path length": "travelled", "from the start": "from_start"},
            "Where the path grows and the distance does not, the token moves back and forth.",
        ),
        "journey-cosine": chart(
            "Cosine to token embeddings",
            "cosine",
            {"start token": "cosine_start", "predicted token": "cosine_predicted", "nearest token": "nearest_cosine"},
            "Where the lines of the start and of the predicted token cross, the hidden state has left one for the other.",
        ),
        "journey-radius": chart(
            "Residual stream norm of the token",
            "|x|",
            {"norm": "radius"},
            "The larger the norm, the less an update of a given size rotates the token.",
            log_y=spans_decades(floats(table["radius"])),
        ),
        "journey-rank": chart(
            "Rank of the target by logit lens",
            "rank",
            {"target": "rank"},
            "The unembedding applied to the hidden state before each layer; 1 is the most probable token.",
            log_y=True,
        ),
        "journey-probability": chart(
            "Probability of the target by logit lens",
            "probability",
            {"target": "probability", "most probable token": "predicted_probability"},
            "Where the two lines meet, the target is the logit lens' prediction.",
        ),
    }


def _scene(table: pd.DataFrame, settings: str) -> Scene | None:
    """The path among other tokens; on the unit sphere if the map keeps norms."""
    path, cloud, words = (table[table["kind"] == kind] for kind in ("path", "cloud", "word"))
    if path.empty:
        return None
    path = path.sort_values("layer")
    shown = [share for share in floats(path["shown"]) if share == share]
    clouds = (
        Cloud(f"{len(cloud):,} other tokens", _points(cloud), _names(cloud)),
        Cloud("start and predicted token" if len(words) > 1 else "start token", _points(words), _names(words), marked=True),
    )
    trail = Trail("hidden state", _points(path), _names(path), [int(layer) for layer in path["layer"]])
    whole = floats(words["shown"]) and min(floats(words["shown"])) > _WHOLE  # else the sphere would dwarf what it holds
    radius = 1.0 if whole else None  # what is mapped are directions
    axes = ("first direction", "second direction", "third direction") if radius else ("1st", "2nd", "3rd")
    small_print = "; ".join(text for text in (settings, _seen(shown)) if text)
    return Scene("Journey over the sphere", clouds, (trail,), _scene_caption(shown, radius), small_print, radius, axes, "layer")


def _seen(shown: list[float]) -> str:
    shares = " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(shown), max(shown)))) if shown else ""
    return f"the projection holds {shares} of the path's squared norm" if shown else "a map of neighbours, without a scale"


def _scene_caption(shown: list[float], radius: float | None) -> str:
    labels = "Labels are the nearest tokens, with the layers before which they hold."
    if radius:
        return f"{labels} Points near the centre are poorly represented by this projection."
    if shown:
        return f"{labels} Points near each other may be far apart in the directions that are not shown."
    return f"{labels} This map keeps neighbours together, not angles or distances: see the charts for those."


def _points(rows: pd.DataFrame) -> list[Point]:
    return list(zip(*(floats(rows[axis]) for axis in ("x", "y", "z")), strict=True))


def _names(rows: pd.DataFrame) -> list[str]:
    return [token_name(text) for text in rows["text"]]
