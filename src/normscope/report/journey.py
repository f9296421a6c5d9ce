"""Pictures of a token's journey: its path in three dimensions, and beside it what happens in the full space."""

from typing import Any

import pandas as pd

from normscope.report.charts import Chart, Cloud, Drawing, Line, Scene, Trail
from normscope.report.figures import charts_section
from normscope.report.page import PageTable, Section
from normscope.report.tables import cell, floats, spans_decades, table_of, token_name
from normscope.results.scene import Point
from normscope.runs import RunFolder

_LONGEST = 24  # characters of a token in a table
# Column → heading and form of a number in the table of the journey.
_NUMBERS = {
    "nearest_cosine": ("cosine", ".2f"),
    "predicted_probability": ("P", ".2f"),
    "angle": ("turned", ".1f"),
    "travelled": ("travelled", ".1f"),
    "from_start": ("from start", ".1f"),
    "radius": ("radius", ".3g"),
    "rank": ("rank of expected", ",.0f"),
    "probability": ("P of expected", ".2g"),
}
_WHOLE = 0.5  # of a landmark's squared length, if a picture is to show the sphere
_COLUMNS = ["layer", "nearest_text", "predicted_text", "cosine_start", "cosine_predicted", *_NUMBERS]


def journey_sections(run: RunFolder, settings: str) -> list[Section]:
    """The path of a token over the sphere, and its angles, cosines, radius and logit lens by layer."""
    table, places = table_of(run, "journey"), table_of(run, "places")
    charts: dict[str, Drawing | None] = {}
    text: tuple[str, ...] = (
        "The state of one token in front of every layer and behind the last (layer 0 is its start), seen as a norm sees it: "
        "as a direction. A picture in three dimensions can make a journey out of nothing; what the charts show is measured in "
        "all dimensions. The expected word is the next one of the text; where there is none, the one that the model says "
        "at last.",
    )
    if places is not None:
        charts["journey"] = _scene(places, settings)
    if table is not None:
        table = table.reindex(columns=_COLUMNS).sort_values("layer")  # a model that predicts nothing leaves some out
        text += _findings(table)
        charts |= _charts(table, settings)
    sections = [charts_section(run, "Journey of a token", text, charts)] if charts else []
    return sections if table is None else [*sections, Section("The journey, layer by layer", (), (_journey_table(table),))]


def _findings(table: pd.DataFrame) -> tuple[str, ...]:
    """Where it starts and ends, how far it goes, and from where on the expected word is the most probable."""
    first, last = table.iloc[0], table.iloc[-1]
    found = [
        f"The nearest word is {token_name(first['nearest_text'], _LONGEST)} at the start and "
        f"{token_name(last['nearest_text'], _LONGEST)} at the end."
    ]
    travelled, away = floats(table["travelled"])[-1], floats(table["from_start"])[-1]
    if travelled == travelled and away == away:
        found[0] += f" On its way it turns by {travelled:.0f}° in all, and ends {away:.0f}° from where it started."
    ranks = dict(zip(table["layer"].astype(int), floats(table["rank"]), strict=True))
    later = [layer for layer, rank in ranks.items() if rank > 1]
    end = floats(table["rank"])[-1]
    if end == 1:
        since = min(layer for layer in ranks if layer > max(later, default=-1))
        found.append(f"The expected word is the most probable one from layer {since} on.")
    elif end == end:
        found.append(f"At the end the expected word has rank {end:,.0f}: the model would say another.")
    return tuple(found)


def _journey_table(table: pd.DataFrame) -> PageTable:
    """All that was measured, a row for each layer; columns without a value are left out."""
    columns: list[tuple[str, list[str]]] = [("layer", [str(int(layer)) for layer in table["layer"]])]
    for text, heading in (("nearest_text", "nearest word"), ("predicted_text", "would say")):
        if table[text].notna().any():
            columns.append((heading, [token_name(value, _LONGEST) for value in table[text]]))
        number = text.replace("text", "cosine" if text.startswith("nearest") else "probability")
        columns += _number_column(table, number)
    for name in ("angle", "travelled", "from_start", "radius", "rank", "probability"):
        columns += _number_column(table, name)
    caption = "The nearest word, what the model would say, angles in degrees, and rank and probability of the expected word"
    return PageTable(caption, tuple(name for name, _ in columns), tuple(zip(*(cells for _, cells in columns), strict=True)))


def _number_column(table: pd.DataFrame, name: str) -> list[tuple[str, list[str]]]:
    heading, form = _NUMBERS[name]
    return [(heading, [cell(value, form) for value in floats(table[name])])] if table[name].notna().any() else []


def _charts(table: pd.DataFrame, settings: str) -> dict[str, Drawing | None]:
    def chart(title: str, label: str, lines: dict[str, str], caption: str, **options: Any) -> Chart | None:
        layers = floats(table["layer"])
        there = {name: floats(table[column]) for name, column in lines.items() if table[column].notna().any()}
        drawn = tuple(Line(name, layers, values) for name, values in there.items())
        return Chart(title, "layer", label, drawn, caption, settings, **options) if drawn else None

    return {
        "journey-angle": chart(
            "Angle turned by each layer",
            "degrees",
            {"since the layer before": "angle"},
            "High points are the layers that move the token; in many dimensions 90° is as far as any unrelated direction.",
        ),
        "journey-way": chart(
            "Way and distance",
            "degrees",
            {"travelled in all": "travelled", "from the start": "from_start"},
            "Where the way grows and the distance does not, the token wanders about without going anywhere.",
        ),
        "journey-cosine": chart(
            "Nearness to words",
            "cosine",
            {"start word": "cosine_start", "predicted word": "cosine_predicted", "nearest word": "nearest_cosine"},
            "Where the lines of the start and of the predicted word cross, the token has left one for the other.",
        ),
        "journey-radius": chart(
            "Radius",
            "|x|",
            {"radius": "radius"},
            "The larger the radius, the less an update of a given length turns the token.",
            log_y=spans_decades(floats(table["radius"])),
        ),
        "journey-rank": chart(
            "Rank of the expected word",
            "rank",
            {"expected word": "rank"},
            "What the model would say if it stopped at this layer (logit lens); 1 is the most probable.",
            log_y=True,
        ),
        "journey-probability": chart(
            "Probability of the expected word",
            "probability",
            {"expected word": "probability", "most probable word": "predicted_probability"},
            "Where the two lines meet, the expected word is what the model would say.",
        ),
    }


def _scene(table: pd.DataFrame, settings: str) -> Scene | None:
    """The path among other words; on the unit sphere if the map keeps lengths."""
    path, cloud, words = (table[table["kind"] == kind] for kind in ("path", "cloud", "word"))
    if path.empty:
        return None
    path = path.sort_values("layer")
    shown = [share for share in floats(path["shown"]) if share == share]
    clouds = (
        Cloud(f"{len(cloud):,} other words", _points(cloud), _names(cloud)),
        Cloud("start and predicted word" if len(words) > 1 else "start word", _points(words), _names(words), marked=True),
    )
    trail = Trail("state of the token", _points(path), _names(path), [int(layer) for layer in path["layer"]])
    whole = floats(words["shown"]) and min(floats(words["shown"])) > _WHOLE  # else the sphere would dwarf what it holds
    radius = 1.0 if whole else None  # what is mapped are directions
    axes = ("first direction", "second direction", "third direction") if radius else ("1st", "2nd", "3rd")
    small_print = "; ".join(text for text in (settings, _seen(shown)) if text)
    return Scene("Journey over the sphere", clouds, (trail,), _scene_caption(shown, radius), small_print, radius, axes, "layer")


def _seen(shown: list[float]) -> str:
    shares = " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(shown), max(shown)))) if shown else ""
    return f"of the path's squared length {shares} can be seen" if shown else "a map of neighbours, without a scale"


def _scene_caption(shown: list[float], radius: float | None) -> str:
    told = "The nearest word and its layers stand beside the path where there is room."
    if radius:
        return f"{told} The deeper a point lies in the sphere, the less of it can be seen."
    if shown:
        return f"{told} Points near each other may be far apart in what cannot be seen."
    return f"{told} This map keeps neighbours together, not angles or distances: see the charts for those."


def _points(rows: pd.DataFrame) -> list[Point]:
    return list(zip(*(floats(rows[axis]) for axis in ("x", "y", "z")), strict=True))


def _names(rows: pd.DataFrame) -> list[str]:
    return [token_name(text) for text in rows["text"]]
