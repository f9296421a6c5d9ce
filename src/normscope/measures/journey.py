"""Journey: the logit-lens trajectory of one token, its direction before every layer measured in the full space."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import SphereNorm, degrees_between, length
from normscope.errors import InputError
from normscope.measures.base import LAYER, Advance, Quantity, Subject, Tables
from normscope.measures.curves import columns, statistic
from normscope.measures.maps import places
from normscope.measures.readout import OutputNorm, output_bias
from normscope.measures.search import nearest
from normscope.measures.tokens import TokenMeasure, logit_notes
from normscope.models import NOTHING, Model, Observer, Sample
from normscope.models.describe import layers_named
from normscope.models.model import TextOrIds
from normscope.results.conventions import TOKEN_LENGTH
from normscope.results.figures import Chart, Cloud, Figure, Line, Point, Scene, Trail
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import cell, floats, plain_rows, spans_decades, table_of, token_name

_WHOLE = 0.5  # of a landmark's squared norm, if a scene is to show the sphere
_BEFORE = "hidden state before layer"
# Column → heading and format of the table for people.
_TEXTS = {"nearest_text": "nearest token", "predicted_text": "logit lens"}
_NUMBERS = {
    "nearest_cosine": ("cosine", ".2f"),
    "predicted_probability": ("P", ".2f"),
    "angle": ("rotation", ".1f"),
    "travelled": ("sum", ".0f"),
    "from_start": ("from start", ".1f"),
    "cosine_start": ("cosine to start", ".2f"),
    "cosine_predicted": ("cosine to predicted", ".2f"),
    "radius": ("norm", ".3g"),
    "rank": ("rank of target", ",.0f"),
    "probability": ("P of target", ".3f"),
}
_COLUMNS = (
    "nearest_text", "nearest_cosine", "angle", "travelled", "from_start", "cosine_start", "cosine_predicted", "radius",
    "rank", "probability", "predicted_text", "predicted_probability",
)  # fmt: skip


@dataclass(frozen=True)
class Journey(TokenMeasure):
    """Follows one token of a sentence through the layers.

    Attributes:
        token: its position, counted from 0 or, if negative, from the end.
        map: the three-dimensional map: ``sphere``, ``umap`` or ``pca``.
    """

    name: ClassVar[str] = "journey"
    title: ClassVar[str] = "Logit-lens trajectory of a token"
    needs: ClassVar[frozenset[str]] = frozenset({"stream", "vocabulary"})
    asks: ClassVar[tuple[str, ...]] = ("sentence", "seed")
    passes: ClassVar[str] = "1, of the sentence"
    order: ClassVar[int | None] = 900
    large: ClassVar[frozenset[str]] = frozenset({"places"})
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "journey", "Rotation of one token by each layer", LAYER, "degrees",
            "The layers that rotate one token of a sample sentence.",
            "journey", columns("layer", "angle"), "sum of one token's rotations", statistic("sum"), "°",
            states=True,
        ),
    )  # fmt: skip

    token: int = -2
    map: str = "sphere"

    def measure(self, subject: Subject, advance: Advance = lambda done: None) -> Tables:
        """Tables ``journey`` and ``places``; none without a sentence."""
        if subject.sentence is None:
            return {}
        trajectory = follow(subject.model, subject.sentence, self.token)
        advance(subject.model.layers)
        return {"journey": trajectory.table, "places": places(subject.model, trajectory, self.map, subject.seed)}

    def facts(self, subject: Subject, tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
        """The token, the model's final prediction, the target token, and the special tokens around the text."""
        model = subject.model
        assert subject.sentence is not None
        last, (read, place) = plain_rows(tables["journey"])[-1], _read(model, subject.sentence, self.token)
        sample = model.viewed(read)
        followed = {
            "word": model.words(sample.tokens[0, place][None])[0],
            "predicted": last.get("predicted_text", ""),
            "following": "",
            "special": " … ".join(" ".join(end) or "none" for end in model.special_ends(sample.tokens[0])),
        }
        if last.get("predicted_token") is not None:
            following = _following(sample, place, last["predicted_token"], model.causal)
            followed["following"] = model.words(torch.tensor([following]))[0]
        return followed

    def notes(self, model: Model) -> list[str]:
        """On models without predictions, and on output layers."""
        lens = "No logits are computed of these hidden states: there is no next token, and no logit lens."
        return [*super().notes(model), *logit_notes(model), *([] if model.reads_out else [lens])]

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """How far the token moves, and from which layer on the logit lens shows the target token."""
        table = table_of(tables, "journey")
        if table is None:
            return
        every = plain_rows(table)
        rows = [row for row in every if row["nearest_text"] is not None]
        yield from _lost(every)
        first, last = rows[0], rows[-1]
        rotations = [row for row in rows if row["angle"] is not None]
        if not rotations:
            return
        most = max(rotations, key=lambda row: float(row["angle"]))
        yield Finding(
            f"The hidden state of one token of '{about['sentence']}' is nearest to the embedding of "
            f"{token_name(first['nearest_text'], TOKEN_LENGTH)} before layer {first['layer']}; after "
            f"{'the last layer' if last is every[-1] else 'layer ' + str(last['layer'] - 1)} {_end(last)}. The two states are "
            f"{last['from_start']:.0f}° apart, and the rotations between add up to {last['travelled']:.0f}°. "
            f"Layer {most['layer'] - 1} rotates it most, by {most['angle']:.0f}°.",
            "journey-angle",
            number=last["from_start"],
            comparison="Unrelated directions are about 90° apart.",
        )
        reached = reached_after(every)
        if reached:
            yield Finding(f"{reached[0].upper()}{reached[1:]}.", "journey-rank", number=last["probability"])

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """The path among other tokens, its angles, cosines, norm and logit lens, and all of them as a table."""
        table, mapped = table_of(tables, "journey"), table_of(tables, "places")
        figures: dict[str, Figure | None] = {"journey": None if mapped is None else journey_scene(mapped, settings)}
        text = (
            "The hidden state of one token before every layer and after the last, as a norm sees it: as a direction. "
            "3-D projections can show structure that is not there; the charts use all dimensions. The logit lens applies the "
            "model's output layers to every state. The target token is the next one of the text; at its end, the model's "
            "final prediction.",
        )
        if table is not None:
            figures |= _charts(table, settings)
        return self.page(text, figures, () if table is None else (journey_table(table),))


@dataclass(frozen=True)
class Trajectory:
    """The hidden states of a token before every layer and after the last, as directions.

    Attributes:
        word, predicted, following: texts of the token, of the model's final prediction, and of the token whose rank and
            probability are computed: the next of the text; where there is none, the predicted one.
        table: a row for every hidden state.
        path: their directions θ.
        start, end: the directions of the token's embedding and of the predicted token's unembedding with the final gain; None
            where these are 0, and for the end if logits are more than one product.
    """

    word: str
    predicted: str
    following: str
    table: pd.DataFrame
    path: Float[Tensor, "states dim"]
    start: Float[Tensor, " dim"] | None
    end: Float[Tensor, " dim"] | None


@torch.no_grad()
def follow(model: Model, text: TextOrIds, token: int) -> Trajectory:
    """Follow a token of a text, counted from 0 or, if negative, from the end, through all layers.

    With θ_ℓ the direction of the hidden state before layer ℓ: ``angle`` is that between θ_ℓ and θ_ℓ₋₁ in degrees, ``travelled``
    their sum, ``from_start`` that between θ_ℓ and θ_0; ``nearest`` is the token whose embedding's direction is nearest to θ_ℓ;
    ``cosine_start`` and ``cosine_predicted`` compare θ_ℓ with the token's own embedding and with γ∘w of the predicted token,
    since logits are √d θ·(γ∘w) + β·w. ``rank`` and ``probability`` of the next token, and the ``predicted`` token of every
    state, are those of the logit lens.

    Returns:
        The trajectory; columns of logits are missing for a model that predicts nothing.
    """
    sample, place = _read(model, text, token)
    states: list[Tensor] = []
    logits = model.forward(sample, Observer(state=lambda layer, x: states.append(x[0, place].clone())))
    after = logits[0, place] if model.reads_out else logits.new_zeros(0)
    return trajectory_of(model, model.viewed(sample), place, torch.stack(states), after)


@torch.no_grad()
def trajectory_of(
    model: Model,
    sample: Sample,
    place: int,
    stream: Float[Tensor, "states dim"],
    logits: Float[Tensor, " vocabulary"],
    linear: bool | None = None,
) -> Trajectory:
    """The trajectory of the token at a place of what its stream reads, of its hidden states and of the logits after them.

    ``linear``: whether logits are a product of normalised states (``output_bias``); None to test it. A model without a
    vocabulary has columns of angles and norms alone, and no landmarks; see ``follow``.
    """
    norm, known = OutputNorm.of(model), "vocabulary" in model.offers
    direction, followed = SphereNorm(norm.kind), sample.tokens[0, place]
    word, path = model.words(followed[None])[0], direction(stream)
    start = _finite(direction(model.embeddings[followed][None])[0]) if known else None
    if not bool(path.isfinite().all(-1).any()):
        raise InputError(
            f"token={place}: all hidden states of {word!r} in '{model.name}' are 0 or non-finite: without direction"
        )
    table = _nearest_tokens(model, path, start, direction) if known else {}
    table = {"layer": list(range(len(stream))), **table, **_angles(path), "radius": length(stream).squeeze(-1).tolist()}
    if not known or not model.reads_out or not bool(logits.isfinite().all()):
        return Trajectory(word, "", "", _defined(table, path), path, start, None)
    last = int(logits.argmax())
    following = _following(sample, place, last, model.causal)
    table |= _lens(model, stream, following)
    end = None
    linear = output_bias(model) is not None if linear is None else linear
    if model.unembedding is not None and linear and not norm.pointwise:
        end = _finite(direction(norm.gain * model.unembedding[last][None])[0])
    if end is not None:
        table["cosine_predicted"] = (path @ end).tolist()
    predicted_text, following_text = model.words(torch.tensor([last, following]))
    return Trajectory(word, predicted_text, following_text, _defined(table, path), path, start, end)


def _finite(direction: Float[Tensor, " dim"]) -> Float[Tensor, " dim"] | None:
    """A direction; None where a vector has none."""
    return direction if bool(direction.isfinite().all()) else None


def _defined(columns: dict[str, list[Any]], path: Float[Tensor, "states dim"]) -> pd.DataFrame:
    """The table; states without a direction have a layer and a norm, and nothing that follows from a direction."""
    table, known = pd.DataFrame(columns), path.isfinite().all(-1).tolist()
    if not all(known):
        ids = {name: "Int64" for name in ("nearest_token", "predicted_token", "rank") if name in table}
        table = table.astype(ids)
        nearest_columns = [name for name in ("nearest_token", "nearest_text", "nearest_cosine") if name in table]
        table.loc[[not defined for defined in known], nearest_columns] = None
    return table


def _nearest_tokens(
    model: Model, path: Float[Tensor, "states dim"], start: Float[Tensor, " dim"] | None, direction: SphereNorm
) -> dict[str, list[Any]]:
    """The nearest token of every state, and the cosine to the token's own embedding."""
    embedded = direction(model.embeddings[: model.vocabulary]).nan_to_num_(0.0)  # an embedding may be 0
    cosines, tokens = nearest(path, embedded, 1)
    return {
        "nearest_token": tokens[:, 0].tolist(),
        "nearest_text": model.words(tokens[:, 0]),
        "nearest_cosine": cosines[:, 0].tolist(),
        "cosine_start": [None] * len(path) if start is None else (path @ start).tolist(),
    }


def _angles(path: Float[Tensor, "states dim"]) -> dict[str, list[Any]]:
    """Rotation by every layer, the sum so far, and the angle to the first state that has a direction."""
    angles = degrees_between(path[1:], path[:-1])
    first = int(path.isfinite().all(-1).int().argmax())
    return {
        "angle": [None, *angles.tolist()],
        "travelled": [0.0, *angles.nan_to_num(0.0).cumsum(0).tolist()],
        "from_start": degrees_between(path, path[first].expand_as(path)).tolist(),
    }


def _lens(model: Model, stream: Float[Tensor, "states dim"], following: int) -> dict[str, list[Any]]:
    """The logit lens: the most probable token of every state, and rank and probability of the one that follows."""
    logits = model.read_out(stream)
    probabilities = logits.softmax(-1)
    best, tokens = probabilities.max(-1)
    return {
        "predicted_token": tokens.tolist(),
        "predicted_text": list(model.words(tokens)),
        "predicted_probability": best.tolist(),
        "rank": (1 + (logits > logits[:, following, None]).sum(-1)).tolist(),
        "probability": probabilities[:, following].tolist(),
    }


def _following(sample: Sample, place: int, predicted: int, causal: bool) -> int:
    """The next token of the text; for a bidirectional model, and at the end of the text, the predicted one."""
    if causal and place + 1 < sample.tokens.shape[1]:
        return int(sample.tokens[0, place + 1])
    return predicted


def _read(model: Model, text: TextOrIds, token: int) -> tuple[Sample, int]:
    """The text with all its tokens, of which an encoder's sample masks some; and the token's position from 0."""
    sample = model.sample(text, None, 0)
    if not model.causal:
        sample = replace(sample, tokens=torch.where(sample.targets == NOTHING, sample.tokens, sample.targets))
    count = model.viewed(sample).tokens.shape[1]
    if not -count <= token < count:
        raise InputError(f"token={token}: the text has {count} tokens, 0 to {count - 1}, or −{count} to −1 from the end")
    return sample, token % count


def _end(row: dict[str, Any]) -> str:
    """Where a state stands: by what the model predicts of it, and by the nearest embedding."""
    nearest_embedding = f"nearest to the embedding of {token_name(row['nearest_text'], TOKEN_LENGTH)}"
    if row.get("predicted_text") is None:
        return f"it is {nearest_embedding}"
    predicted, probability = token_name(row["predicted_text"], TOKEN_LENGTH), row["predicted_probability"]
    return f"the model predicts {predicted} (probability {probability:.3f}), and the state is {nearest_embedding}"


def _lost(rows: list[dict[str, Any]]) -> Iterator[Finding]:
    """Which states have no direction, and why."""
    lost = [row for row in rows if row["nearest_text"] is None]
    zero = [row["layer"] for row in lost if row["radius"] == 0]
    broken = [row["layer"] for row in lost if row["layer"] not in zero]
    for layers, why in ((zero, "is 0"), (broken, "is non-finite (NaN/Inf)")):
        if layers:
            yield Finding(
                f"The hidden state of the token {why} before {layers_named(layers)} (of 0–{rows[-1]['layer']}), and has no "
                "direction there: angles, cosines and nearest tokens are not defined.",
                title="A state without a direction",
                severity="warning",
                weight=150,
            )


def reached_after(rows: list[dict[str, Any]]) -> str:
    """From where on the logit lens shows the target token, in words; nothing for a model that predicts nothing."""
    last = rows[-1]
    if last.get("rank") is None:
        return ""
    if last["rank"] != 1:
        return f"the target token has rank {last['rank']:,} after the last layer (probability {last['probability']:.3f})"
    others = [row["layer"] for row in rows if row["rank"] != 1]
    since = f"from layer {others[-1]} on" if others else "from the embeddings on"
    return (
        f"the logit lens predicts the target token {since} (of layers 0–{last['layer'] - 1}), with probability "
        f"{last['probability']:.3f} after the last layer"
    )


def journey_table(table: pd.DataFrame) -> PageTable:
    """A row for the embeddings and one for every layer; columns without values are left out."""
    states = ["embeddings", *(f"layer {int(layer) - 1}" for layer in table["layer"][1:])]
    cells: dict[str, list[str]] = {"after": states}
    for name in _COLUMNS:
        if name not in table or table[name].isna().all():
            continue
        if name in _TEXTS:
            cells[_TEXTS[name]] = [token_name(value, TOKEN_LENGTH) for value in table[name]]
        else:
            heading, form = _NUMBERS[name]
            cells[heading] = [cell(value, form) for value in floats(table[name])]
    caption = "Hidden state after the embeddings and after every layer; angles in degrees"
    return PageTable(caption, tuple(cells), tuple(zip(*cells.values(), strict=True)))


def _charts(table: pd.DataFrame, settings: str) -> dict[str, Figure | None]:
    def chart(title: str, label: str, lines: dict[str, str], caption: str, **options: Any) -> Chart | None:
        layers = floats(table["layer"])
        drawn = [
            Line(name, layers, floats(table[column]))
            for name, column in lines.items()
            if column in table and table[column].notna().any()
        ]
        return Chart(title, _BEFORE, label, tuple(drawn), caption, settings, **options) if drawn else None

    rotations = table[table["angle"].notna()]
    angles = Line("rotation", [layer - 1 for layer in floats(rotations["layer"])], floats(rotations["angle"]))
    return {
        "journey-angle": Chart(
            "Rotation by each layer", "layer", "degrees", (angles,),
            "Peaks are the layers that move the token; in many dimensions unrelated directions are about 90° apart.", settings,
        ),
        "journey-way": chart(
            "Sum of rotations and distance from the start", "degrees",
            {"sum of rotations": "travelled", "angle to the start": "from_start"},
            "Where the sum grows and the distance does not, rotations cancel each other.",
        ),
        "journey-cosine": chart(
            "Nearness to tokens", "cosine",
            {"the token itself": "cosine_start", "predicted token": "cosine_predicted", "nearest token": "nearest_cosine"},
            "Where the lines of the token itself and of the predicted token cross, the state has left one for the other.",
        ),
        "journey-radius": chart(
            "Residual norm of the token", "|x|", {"norm": "radius"},
            "The larger the norm, the less an update of a given norm rotates the token.",
            log_y=spans_decades(floats(table["radius"])),
        ),
        "journey-rank": chart(
            "Rank of the target token", "rank", {"target token": "rank"},
            "The logit lens: what the model would predict if it stopped before this layer; 1 is the most probable token.",
            log_y=True,
        ),
        "journey-probability": chart(
            "Probability of the target token", "probability",
            {"target token": "probability", "most probable token": "predicted_probability"},
            "Where the two lines meet, the logit lens predicts the target token.",
        ),
    }  # fmt: skip


def journey_scene(table: pd.DataFrame, settings: str) -> Scene | None:
    """The path among other tokens; on the unit sphere if the map preserves norms."""
    path, cloud, marks = (table[table["kind"] == kind] for kind in ("path", "cloud", "word"))
    if path.empty:
        return None
    path = path.sort_values("layer")
    shown = [share for share in floats(path["shown"]) if share == share]
    if path.dropna(subset=["x", "y", "z"]).empty:
        return None
    marked = "the token and the predicted token" if len(marks) > 1 else "the token"
    clouds = (
        Cloud(f"{len(cloud):,} other tokens", _points(cloud), _names(cloud)),
        Cloud(marked, _points(marks), _names(marks), marked=True),
    )
    trail = Trail("hidden state", _points(path), _names(path), [int(layer) for layer in path["layer"]])
    whole = floats(marks["shown"]) and min(floats(marks["shown"])) > _WHOLE  # else the sphere would dwarf its content
    radius = 1.0 if whole else None  # maps are of directions
    axes = ("first direction", "second direction", "third direction") if radius else ("1st", "2nd", "3rd")
    small_print = "; ".join(text for text in (settings, _share(shown)) if text)
    return Scene(
        "Trajectory on the sphere", clouds, (trail,), _scene_caption(shown, radius), small_print, radius, axes, "before layer"
    )


def _share(shown: list[float]) -> str:
    shares = " to ".join(dict.fromkeys(f"{100 * share:.0f} %" for share in (min(shown), max(shown)))) if shown else ""
    return f"the projection shows {shares} of the path's squared norm" if shown else "a map of neighbours, without a scale"


def _scene_caption(shown: list[float], radius: float | None) -> str:
    labels = "Labels are the nearest token and the layers that follow."
    if radius:
        return f"{labels} Points near the centre are poorly represented by this projection."
    if shown:
        return f"{labels} Points near each other may be far apart in other dimensions."
    return f"{labels} This map preserves neighbours, not angles or distances: see the charts for those."


def _points(rows: pd.DataFrame) -> list[Point]:
    return list(zip(*(floats(rows[axis]) for axis in ("x", "y", "z")), strict=True))


def _names(rows: pd.DataFrame) -> list[str]:
    return [token_name(text) for text in rows["text"]]
