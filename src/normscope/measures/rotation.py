"""Rotation: the angle by which every layer rotates the residual stream, and what other schemes would make of its updates."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from normscope.core.norms import cosine, degrees_between, length
from normscope.measures.base import LAYER, Measure, PassObserver, Quantity, Subject, Tables
from normscope.measures.curves import columns, late, late_layers
from normscope.measures.degenerate import left_out
from normscope.measures.replay import replay_table
from normscope.measures.states import MIXING, BlockObserver, Counted
from normscope.models import Model, SublayerStep
from normscope.models.describe import layers_named
from normscope.results.figures import Chart, Line
from normscope.results.findings import Finding, Severity
from normscope.results.sections import Section
from normscope.results.tables import by_layer, floats, plain_rows, table_of
from normscope.schemes import NAMED, Scheme, Slots

Row = dict[str, Any]
REPLAYED = ("post", "pre", "peri", "ngpt", "ln-scaling", "sqrt-scaling")
_STILL, _SLOW = 2.0, 5.0  # degrees per layer below which late layers do next to nothing, and little


class _Observer(BlockObserver):
    """Updates of every layer, token by token: their lengths, and their cosines to the token."""

    def __init__(self, subject: Subject, schemes: tuple[str, ...]) -> None:
        super().__init__(subject)
        self.subject, self.schemes = subject, schemes
        self.radius: Tensor | None = None
        self.lengths: list[Tensor] = []
        self.along: list[Tensor] = []
        self.angles: dict[int, float] = {}
        self.outputs: dict[int, tuple[float, float]] = {}

    def block(self, layer: int, before: Counted, after: Counted) -> None:
        """The update of a layer."""
        if self.radius is None:
            self.radius = length(before).squeeze(-1)
        update = after - before
        self.lengths.append(length(update).squeeze(-1))
        self.along.append(cosine(update, before))
        self.angles[layer] = float(degrees_between(before, after).mean())

    def sublayer(self, step: SublayerStep) -> None:
        """The mean length of what the sublayer that mixes tokens computes, before and after an output norm."""
        super().sublayer(step)
        if step.sublayer in MIXING:
            norm, A = self.subject.model.norm_at(step.layer, step.sublayer, "output"), step.output
            computed, normed = (float(length(self.states.counted(y)).mean()) for y in (A, A if norm is None else norm(A)))
            self.outputs[step.layer] = computed, normed

    def tables(self) -> Tables:
        layers, unknown = list(self.angles), (math.nan, math.nan)
        outputs = torch.tensor([self.outputs.get(layer, unknown) for layer in layers], dtype=torch.float64).view(-1, 2)
        last = [] if self.before is None else [self.before[0]]
        motion = pd.DataFrame({"layer": [*layers, *last], "angle": [*self.angles.values(), *(math.nan for _ in last)]})
        writes = {
            "layer": layers,
            "attention": outputs[:, 0].tolist(),
            "written": outputs[:, 1].tolist(),
            "write": [float(lengths.mean()) for lengths in self.lengths],
            "along": [float(along.mean()) for along in self.along],
        }
        tables = {"motion": motion.astype({"angle": float}), "writes": pd.DataFrame(writes)}
        sizes = [len(of_tokens) for of_tokens in self.lengths]
        unbroken = sum(i == layer and size == sizes[0] for i, (layer, size) in enumerate(zip(layers, sizes, strict=True)))
        if not unbroken or self.radius is None:
            return tables
        lengths, along = (torch.stack(of_tokens[:unbroken]) for of_tokens in (self.lengths, self.along))
        computed, written = outputs[:unbroken].T
        schemes = [NAMED[name] for name in self.schemes]
        replay = replay_table(schemes, self.radius, lengths, along, computed, written, self.subject.model.layers)
        alike = [scheme.name for scheme in schemes if updates_alike(self.subject.model, scheme)]
        return {**tables, "replay": replay.assign(own=replay["scheme"].isin(alike))}


@dataclass(frozen=True)
class Rotation(Measure):
    """Mean angle between the residual stream before and after every layer.

    Attributes:
        schemes: named schemes through which the recorded updates are replayed.
    """

    schemes: tuple[str, ...] = REPLAYED

    name: ClassVar[str] = "rotation"
    title: ClassVar[str] = "Rotation per layer"
    order: ClassVar[int | None] = 20
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "angle", "Rotation by every layer", LAYER, "degrees",
            "Lines that stay up keep moving tokens in late layers; a line that falls to 0 wastes its depth.",
            "motion", columns("layer", "angle"), "rotation per layer in the last third", late, "°",
            fact="late rotation per layer",
        ),
    )  # fmt: skip

    def observer(self, subject: Subject) -> PassObserver:
        """Hidden states before every layer, and what attention computes where sublayers are identified."""
        return _Observer(subject, self.schemes)

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The mean angle."""
        return {"rotation by layer": by_layer(tables, "motion", "angle", "{:.3g}°")}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """Whether late layers still rotate tokens, and what other schemes would do with the same updates."""
        motion = tables["motion"].dropna(subset="angle")
        angles = dict(zip(map(int, motion["layer"]), floats(motion["angle"]), strict=True))
        late_third = [layer for layer in late_layers(about["layers"]) if layer in angles]
        if left_out(tables) or not late_third:
            return  # some layers cannot be measured, and the last third of the others is not that of the model
        yield _verdict(angles, late_third, _radii(tables["motion"]))
        replayed = table_of(tables, "replay")
        others = [] if replayed is None else plain_rows(_others(replayed))
        replay = [row for row in others if row["layer"] in late_third]
        names = dict.fromkeys(row["scheme"] for row in replay)
        means = {name: fmean(row["angle"] for row in replay if row["scheme"] == name) for name in names}
        if means:
            listed = ", ".join(f"{_title(name)} {value:.3g}°" for name, value in means.items())
            yield Finding(
                "Replaying this model's recorded updates through other norm placements, without retraining, the last third of "
                f"layers rotates tokens per layer by: {listed} (this model: {fmean(angles[i] for i in late_third):.3g}°). A "
                "model trained with that placement would learn other updates.",
                "angle",
                title="Rotation with other norm placements",
            )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """The angle by layer, beside the replays."""
        motion, replay = table_of(tables, "motion"), table_of(tables, "replay")
        if motion is None or "angle" not in motion:
            return None
        chart = Chart(
            "Rotation by every layer",
            "layer",
            "degrees",
            (Line("this model", floats(motion["layer"]), floats(motion["angle"])), *replayed_lines(replay, "angle")),
            "A line that stays up keeps moving tokens in late layers; the others replay this model's updates.",
            settings,
        )
        text = (
            "The angle between the residual stream before and after a layer: 0° is no change, 90° an unrelated direction. "
            "Other schemes get the lengths and directions of this model's updates, layer by layer: with an output norm all "
            "updates have the mean length, with a stream norm the residual norm stays what it is before layer 0. Trained "
            "models of these schemes would learn other updates; this is what the norm placement alone makes of these.",
        )
        return self.page(text, {"angle": chart})


def updates_alike(model: Model, scheme: Scheme) -> bool:
    """Whether every layer of a model updates the residual stream as a scheme does: norms of q, k and v aside."""

    def texts(slots: Slots) -> tuple[str, ...]:
        return (slots.input_factor.text, *(slots.texts[name] for name in ("output", "step", "carry", "stream")))

    stages = [(of_layer, scheme.at(layer, model.layers)) for layer, of_layer in enumerate(model.schemes)]
    return all(of_layer is not None and texts(of_layer.attention) == texts(stage.attention) for of_layer, stage in stages)


def _others(replay: pd.DataFrame) -> pd.DataFrame:
    """The rows of schemes other than the model's: its own updates are not what it would do with another placement."""
    return replay[~replay["own"].astype(bool)] if "own" in replay else replay


def replayed_lines(replay: pd.DataFrame | None, column: str) -> list[Line]:
    """A line for every scheme of the table ``replay`` that is not the model's."""
    groups = () if replay is None or column not in replay else _others(replay).groupby("scheme", sort=False)
    return [Line(f"as {name}", floats(rows["layer"]), floats(rows[column])) for name, rows in groups]


def _verdict(angles: dict[int, float], late_third: list[int], radius: list[float]) -> Finding:
    """One card: rotation in late layers beside that in the middle, and the growth of the norm."""
    number = fmean(angles[i] for i in late_third)
    severity: Severity = "warning" if number < _STILL else "notice" if number < _SLOW else "ok"
    title = {"warning": "Late layers hardly move tokens", "notice": "Late layers move tokens little", "ok": "Late layers work"}
    first = min(angles)
    middle = {i: angles[i] for i in range(max(first + 1, late_third[0] - len(late_third)), late_third[0]) if i in angles}
    ends = dict.fromkeys(f"{angle:.3g}" for angle in (min(middle.values(), default=0.0), max(middle.values(), default=0.0)))
    compared = [f"{'–'.join(ends)}° in {layers_named(middle)}"] if middle else []
    compared.append(f"{angles[first]:.3g}° in layer {first}")
    if radius:
        compared.append(f"the residual norm grows {radius[-1] / radius[min(1, len(radius) - 2)]:.3g} times after layer 0")
    still = [i for i in late_third if angles[i] < _SLOW]
    comparison = "; ".join(compared)
    return Finding(
        f"{layers_named(late_third).capitalize()}, the last third, rotate tokens by {number:.3g}° each."
        if len(late_third) > 1
        else f"The last layer rotates tokens by {number:.3g}°.",
        "angle",
        title[severity],
        severity,
        number,
        f"{comparison[0].upper()}{comparison[1:]}.",
        ""
        if severity == "ok"
        else f"Test whether {layers_named(still)} can be pruned; in a new model, smaller residual growth "
        "(output norm, scaled residual) keeps late layers active.",
        weight=70,
    )


def _radii(motion: pd.DataFrame) -> list[float]:
    """The residual norms; none where they were not measured, or the stream changes its width."""
    known = "radius" in motion and motion["width"].nunique() == 1
    return floats(motion["radius"]) if known else []


def _title(name: str) -> str:
    return NAMED[name].title.partition(",")[0] or name
