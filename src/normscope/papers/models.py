"""The models that entries of paper 1 measure: what they are, what was found on each, and means over seeds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from normscope.errors import InputError
from normscope.experiments.result import Result
from normscope.experiments.trained import same_blocks
from normscope.papers.curves import residual
from normscope.papers.entry import THIS_RUN, Panel, Residual, Value
from normscope.schemes import NAMED

STRATEGIES = {"pre": "Pre-Norm", "qkv": "QKV-Norm"}  # scheme → as the paper calls it
SHAPES = {"Baseline": (10, 512, 12), "Alternative": (8, 512, 12), "Large": (12, 1024, 16)}  # layers, width, heads
SEVERAL = (
    "Of several models of one strategy and shape, such as seeds, the mean is compared, with their standard deviation as its "
    "error, and each has a row of its own."
)


@dataclass(frozen=True)
class MeasuredModel:
    """A model that was measured.

    Attributes:
        name, strategy: of the model.
        shape: layers, width and heads.
        published_shape: whether that is the shape of the entry's model.
        results: one for each sample of examples.
        encoder: layers of the encoder; 0 for a decoder alone.
        stream: of an encoder-decoder, the half that was measured; empty for what is of the whole model.
    """

    name: str
    strategy: str
    shape: tuple[int, ...]
    published_shape: bool
    results: tuple[Result, ...]
    encoder: int = 0
    stream: str = ""

    @property
    def label(self) -> str:
        """Strategy, name and half."""
        return ", ".join(filter(None, (f"{self.strategy}: {self.name}", self.stream)))

    @property
    def kind(self) -> str:
        """Strategy and half: what models have in common that are averaged."""
        return ", ".join(filter(None, (self.strategy, self.stream)))

    @property
    def described(self) -> str:
        """Name, strategy and shape."""
        layers, width, heads = self.shape
        depth = f"{self.encoder} + {layers} layers" if self.encoder else f"{layers} layers"
        return f"{self.name} ({self.strategy}, {depth}, width {width}, {heads} heads)"

    def table(self, name: str) -> pd.DataFrame:
        """A table of the first sample."""
        return self.results[0].tables[name]


@dataclass(frozen=True)
class Half:
    """The encoder or the decoder of a model: the model, what an experiment opens, and the stream."""

    model: MeasuredModel
    source: Any
    stream: str


@dataclass(frozen=True)
class Reading:
    """A measured curve with the published one; the arguments of ``residual``."""

    curve: str
    quantity: str
    theirs: pd.DataFrame
    ours: pd.DataFrame
    columns: tuple[str, str, str]
    allowed: float | None
    between: bool = False

    def residual(self, label: str, allowed: float | None) -> Residual:
        """How far the two are apart."""
        curve = f"{label}: {self.curve}" if self.curve else label
        return residual(
            curve, self.quantity, self.theirs, self.ours, self.columns, allowed=allowed, between=self.between
        )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What was measured on one model, as if it had the published shape: values, curves and how they are drawn."""

    model: MeasuredModel
    values: Sequence[Value] = ()
    readings: Sequence[Reading] = ()
    panels: Sequence[Panel] = ()


def mean_and_error(numbers: Sequence[float]) -> tuple[float, float]:
    """The mean of independent numbers and its standard error; 0 for a single one."""
    if len(numbers) < 2:
        return float(np.mean(numbers)), 0.0
    return float(np.mean(numbers)), float(np.std(numbers, ddof=1) / math.sqrt(len(numbers)))


def comparison(found: Iterable[Found]) -> tuple[list[Value], list[Residual]]:
    """Values and residuals of every model, and means over models of one strategy and shape.

    Compared with the published numbers are models of the published shape: each by itself, or where there are several of a
    strategy, their mean with their standard deviation as its error.
    """
    found = list(found)
    values: dict[tuple[Any, ...], list[tuple[Found, Value]]] = {}
    readings: dict[tuple[Any, ...], list[tuple[Found, Reading]]] = {}
    for one in found:
        of_kind = (one.model.kind, one.model.shape, one.model.encoder)
        for value in one.values:
            values.setdefault((*of_kind, value.quantity), []).append((one, value))
        for reading in one.readings:
            readings.setdefault((*of_kind, reading.curve, reading.quantity), []).append((one, reading))
    every_value = [row for group in values.values() for row in _value_rows(group)]
    every_residual = [row for group in readings.values() for row in _residual_rows(group)]
    return every_value, [row for row in every_residual if row.points]


def _value_rows(group: list[tuple[Found, Value]]) -> list[Value]:
    """A quantity of the models of one strategy and shape: a row for each, and the mean of numbers where there are several."""
    model, first = group[0][0].model, group[0][1]
    allowed = first.allowed if model.published_shape else None
    numbers = [value.measured for _, value in group if isinstance(value.measured, float) and math.isfinite(value.measured)]
    averaged = len(group) > 1 and len(numbers) == len(group)
    quantity = f"{model.kind}, {first.quantity}"
    rows = [
        replace(value, quantity=quantity, allowed=None if averaged else allowed, source=f"{THIS_RUN}: {one.model.name}")
        for one, value in group
    ]
    if averaged:
        mean, spread = float(np.mean(numbers)), float(np.std(numbers, ddof=1))
        what = f"{quantity}: mean ± standard deviation of {len(group)} models"
        rows.append(
            replace(first, quantity=what, measured=mean, measured_error=spread, allowed=allowed, source=f"{THIS_RUN}: mean")
        )
    return rows


def _residual_rows(group: list[tuple[Found, Reading]]) -> list[Residual]:
    """The same for a curve; the mean curve has the standard deviation over models as its sampling error."""
    model, first = group[0][0].model, group[0][1]
    allowed = first.allowed if model.published_shape else None
    rows = [reading.residual(one.model.label, None if len(group) > 1 else allowed) for one, reading in group]
    if len(group) > 1:
        at, _, own = first.columns
        by_place = pd.concat([reading.ours for _, reading in group]).groupby(at, as_index=False)[own]
        mean = by_place.mean().assign(stderr=by_place.std()[own])
        rows.append(replace(first, ours=mean).residual(f"{model.kind}: mean of {len(group)} models", allowed))
    return rows


@dataclass(frozen=True)
class SavedShape:
    """What a model that normscope trained is: its strategy, its layers, width and heads, and the layers of its encoder."""

    strategy: str
    shape: tuple[int, ...]
    encoder: int

    def is_of(self, model: str) -> bool:
        """Whether it is a decoder of the shape of one of the paper's models."""
        return not self.encoder and self.shape == SHAPES[model]


def saved_shape(name: str) -> SavedShape:
    """The shape of a model that normscope trained to add integers; its strategy is the paper's if its blocks are.

    Raises:
        InputError: if it was trained on something else.
    """
    from normscope.transformer.config import TransformerConfig
    from normscope.transformer.files import model_folder, read_config

    about = read_config(model_folder(name))
    task = (about.get("recipe") or {}).get("task", "addition")
    if task != "addition":
        raise InputError(f"'{name}' was trained on {task}; the entries of paper 1 measure models that add integers")
    config = TransformerConfig.of(about["model"])
    scheme = config.scheme
    plain = scheme if scheme.pointwise else scheme.with_norm(NAMED["pre"].norm)  # RMSNorm and LayerNorm are one strategy
    strategy = next((title for name, title in STRATEGIES.items() if same_blocks(NAMED[name], plain)), scheme.name)
    return SavedShape(strategy, (config.layers, config.dim, config.heads), config.encoder_layers)
