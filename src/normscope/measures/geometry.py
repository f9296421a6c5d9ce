"""Geometry: a norm acting on points in space, gain and bias acting on the sphere, and one head's update of one token."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import NORMS, centre, cosine, layer_norm, length, rms_norm, unit
from normscope.errors import InputError
from normscope.measures.base import Advance, Subject, Tables
from normscope.measures.probes import updates_of
from normscope.measures.readout import OutputNorm
from normscope.measures.tokens import TokenMeasure
from normscope.measures.vocabulary import probe_words
from normscope.models import Model
from normscope.results.figures import Chart, Cloud, Figure, Line, Point, Scene
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import floats, table_of

_POINTS, _CURVE = 60, 181
_GAIN, _BIAS = (1.6, 0.7), (0.6, 0.9)  # of the drawn ellipse: far enough from a circle around 0 to be visible
_VIEW = (25.0, -20.0)  # from here the plane of the centred points, orthogonal to (1, 1, 1), looks neither flat nor round
_CIRCLE = "circle"


@dataclass(frozen=True)
class Geometry(TokenMeasure):
    """What norms do in two and three dimensions, and one head's update in the plane of token and update.

    Attributes:
        layer: one layer.
        head: one head; None for the one that rotates the word most.
        word: one word; None for the most common noun.
    """

    name: ClassVar[str] = "geometry"
    title: ClassVar[str] = "The geometry of a norm"
    needs: ClassVar[frozenset[str]] = frozenset({"vocabulary", "attention", "matrices"})
    asks: ClassVar[tuple[str, ...]] = ("seed",)
    passes: ClassVar[str] = "0"

    layer: tuple[int, ...] | None = (0,)
    head: tuple[int, ...] | None = None
    word: tuple[str, ...] | None = None

    def measure(self, subject: Subject, advance: Advance = lambda done: None) -> Tables:
        """Tables ``norm_points``, ``norm_curves`` and ``head_update``."""
        chosen = self.facts(subject, {})
        token = probe_words(subject.model, chosen["words"])[0].token
        update = head_update(subject.model, chosen["layer"], chosen["head"], token)
        return {"norm_points": norm_points(subject.seed), "norm_curves": norm_curves(), "head_update": update}

    def resolved(self, model: Model) -> "Geometry":
        """With one layer, head and word."""
        for name, values in self.settings.items():
            if values is not None and len(values) != 1:
                raise InputError(f"geometry draws one update: {name}= takes one value, not {len(values)}")
        chosen = super().resolved(model)
        layer, word = (chosen.layer or (0,))[0], (chosen.word or ())[0]
        if self.head is None:
            token = probe_words(model, (word,))[0].token
            chosen = replace(chosen, head=(strongest_head(model, layer, token),))
        return replace(chosen, layer=(layer,), word=(word,))

    def facts(self, subject: Subject, tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
        """Layer, head and word."""
        chosen = self.resolved(subject.model)
        (layer,), (head,), (word,) = chosen.layer or (), chosen.head or (), chosen.word or ()
        return {"layer": layer, "head": head, "words": [word], "word": word}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """How far the head rotates the token."""
        x, y = _part_points(tables["head_update"])["sum"]
        angle, size = math.degrees(math.atan2(y, x)), math.hypot(x - 1, y)
        yield Finding(
            f"The update rotates the token by {angle:.1f}°; it has {size:.2f} times the token's norm.",
            "head-update",
            number=angle,
            comparison="Unrelated directions are about 90° apart.",
        )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Three figures, each if there is a table for it."""
        points, curves, update = (table_of(tables, name) for name in ("norm_points", "norm_curves", "head_update"))
        figures: dict[str, Figure | None] = {
            "norm-points": None if points is None else _points_scene(points, settings),
            "norm-curves": None if curves is None else _curves_chart(curves, settings),
            "head-update": None if update is None else _update_chart(update, settings),
        }
        text = (
            "LayerNorm subtracts the mean, which projects a token onto the plane orthogonal to (1, 1, …, 1), and scales it to "
            "the norm √d. RMSNorm only scales. The gain turns the sphere into an ellipsoid, the bias moves its centre.",
        )
        return self.page(text, figures, () if update is None else (_update_table(update),))


def norm_points(seed: int = 0) -> pd.DataFrame:
    """Random points in space as given, in the plane orthogonal to 1, and on its circle of radius √3, as LayerNorm moves them.

    Returns:
        Rows with stage, point, x, y, z.
    """
    given = 2 * torch.randn(_POINTS, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    stages = {"given": given, "centred": centre(given), "normalised": layer_norm(given)}
    return pd.DataFrame(
        [
            {"stage": stage, "point": number, "x": x, "y": y, "z": z}
            for stage, points in stages.items()
            for number, (x, y, z) in enumerate(points.tolist())
        ]
    )


def norm_curves() -> pd.DataFrame:
    """The circle of radius √2 that RMSNorm maps the plane to, its image under a gain, and that with a bias added.

    Returns:
        Rows with stage, order, x, y.
    """
    circle = _circle()
    gain, bias = (torch.tensor(values, dtype=circle.dtype) for values in (_GAIN, _BIAS))
    stages = {
        "normalised": rms_norm(circle),
        "with gain": rms_norm(circle, gain),
        "with gain and bias": rms_norm(circle, gain, bias),
    }
    return pd.concat([_curve("stage", stage, points) for stage, points in stages.items()], ignore_index=True)


def strongest_head(model: Model, layer: int, token: int) -> int:
    """The head whose update rotates a token by the largest angle."""
    updates = updates_of(model, layer, torch.tensor([token], device=model.device))
    kind = OutputNorm.of(model).kind
    before = NORMS[kind](updates.states)
    after = NORMS[kind](updates.states + updates.by_head)
    return int(cosine(before.expand_as(after), after).argmin())


def head_update(model: Model, layer: int, head: int, token: int) -> pd.DataFrame:
    """One head's update of a token that attends to itself, in the plane of both, which contains all of it.

    In units of the token's norm, and of the centred vectors where the norm is LayerNorm: the token on the unit circle, the
    token plus the update, and the sum back on the circle.

    Returns:
        Rows with part, order, x, y.
    """
    updates = updates_of(model, layer, torch.tensor([token], device=model.device))
    state, update = updates.states[0].double(), updates.by_head[head, 0].double()
    if OutputNorm.of(model).kind == "layer":
        state, update = centre(state), centre(update)
    start, moved = _in_plane(state, update)
    if not bool(moved.isfinite().all()):
        raise InputError(
            f"layer={layer}: the token is 0, or it or the update of head {head} overflows: there is nothing to draw"
        )
    parts = {"token": start, "sum": moved, "back on the sphere": unit(moved)}
    points = [{"part": part, "order": 0, "x": float(x), "y": float(y)} for part, (x, y) in parts.items()]
    return pd.concat([_curve("part", _CIRCLE, _circle()), pd.DataFrame(points)], ignore_index=True)


def _in_plane(state: Float[Tensor, " dim"], update: Float[Tensor, " dim"]) -> tuple[Float[Tensor, "2"], Float[Tensor, "2"]]:
    """State and state + update in the plane of both, the state as (1, 0)."""
    size = length(state)
    along = state / size
    across = update - (update @ along) * along
    moved = torch.stack((1 + (update @ along) / size[0], (length(across) / size)[0]))
    return torch.tensor([1.0, 0.0], dtype=state.dtype), moved


def _circle() -> Float[Tensor, "points 2"]:
    angle = torch.linspace(0, 2 * math.pi, _CURVE, dtype=torch.float64)
    return torch.stack((angle.cos(), angle.sin()), -1)


def _curve(column: str, name: str, points: Float[Tensor, "points 2"]) -> pd.DataFrame:
    x, y = points.T.tolist()
    return pd.DataFrame({column: name, "order": range(len(x)), "x": x, "y": y})


def _points_scene(table: pd.DataFrame, settings: str) -> Scene:
    """Every stage as a cloud, with a line from where each point was in the stage before."""
    clouds: list[Cloud] = []
    last: dict[int, Point] = {}
    for stage, rows in table.groupby("stage", sort=False):
        coordinates = zip(*(floats(rows[axis]) for axis in ("x", "y", "z")), strict=True)
        here = dict(zip(map(int, rows["point"]), coordinates, strict=True))
        origins = [last[point] for point in here] if here.keys() <= last.keys() else []
        clouds.append(Cloud(str(stage), list(here.values()), [f"point {point}: {stage}" for point in here], origins))
        last = here
    return Scene(
        "A norm on points in three dimensions",
        tuple(clouds),
        (),
        "Follow a line: a point moves first to the plane of vectors without a mean, then onto the sphere.",
        settings,
        radius=float(np.nanmax(np.linalg.norm(np.array(list(last.values())), axis=1))),
        axes=("x₁", "x₂", "x₃"),
        view=_VIEW,
    )


def _curves_chart(table: pd.DataFrame, settings: str) -> Chart:
    lines = tuple(_closed(str(stage), rows) for stage, rows in table.groupby("stage", sort=False))
    caption = "The gain stretches the circle along the axes; the bias moves it away from the origin."
    return Chart("Gain and bias on the sphere", "x₁", "x₂", lines, caption, settings, equal=True)


def _closed(name: str, rows: pd.DataFrame) -> Line:
    rows = rows.sort_values("order")
    x, y = floats(rows["x"]), floats(rows["y"])
    return Line(name, [*x, x[0]], [*y, y[0]])


def _part_points(table: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Token, sum and normalised sum by name."""
    rows = table[table["part"] != _CIRCLE]
    return dict(zip(rows["part"], zip(floats(rows["x"]), floats(rows["y"]), strict=True), strict=True))


def _update_table(table: pd.DataFrame) -> PageTable:
    rows = tuple((part, f"{x:.4f}", f"{y:.4f}") for part, (x, y) in _part_points(table).items())
    return PageTable("One head's update, in units of the token's norm", ("", "along the token", "across"), rows)


def _update_chart(table: pd.DataFrame, settings: str) -> Chart:
    """Arrows on the circle: token, sum and the normalised sum from the origin, the update from the token to the sum."""
    points = _part_points(table)
    ends = {part: ((0.0, 0.0), point) for part, point in points.items()}
    arrows = {"token": ends.pop("token"), "update": (points["token"], points["sum"]), **ends}
    lines = [_closed("sphere", table[table["part"] == _CIRCLE])]
    lines += [Line(part, [tail[0], tip[0]], [tail[1], tip[1]], arrow=True) for part, (tail, tip) in arrows.items()]
    caption = "The update rotates the token; the norm then scales the sum to the token's norm."
    return Chart("One head's update", "along the token", "across", tuple(lines), caption, settings, equal=True)
