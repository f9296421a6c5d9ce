"""Recipes: everything that a training run depends on, as a flat TOML file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat

from normscope.errors import InputError, make, require_known, validate
from normscope.machine.files import parse_toml, read_toml, user_path
from normscope.schemes import NormKind, Scheme, find_scheme
from normscope.training.tasks import CHARACTERS, AdditionTask
from normscope.transformer import TransformerConfig
from normscope.transformer.config import Activation, Positions

Count = Annotated[int, Field(ge=1, le=10**15)]
PRESETS = ("tiny", "small", "baseline", "alternative", "large")
_MODEL_KEYS = tuple(f.name for f in fields(TransformerConfig) if f.name not in ("scheme", "vocabulary"))


@dataclass(frozen=True)
class Recipe:
    """A training run: task, model and schedule. The fields are the keys of a recipe file (docs/training.md)."""

    scheme: str | Scheme = "pre"
    norm: str | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 100

    integers: tuple[int, ...] = (3, 4, 6)
    interpolation: tuple[int, ...] = (5,)
    extrapolation: tuple[int, ...] = (7, 8, 9)
    digits: tuple[int, ...] = (2, 3)
    offsets: Annotated[int, Field(ge=0, le=1_000_000)] = 50

    layers: int = 10
    encoder_layers: int = 0
    dim: int = 512
    heads: int = 12
    head: int = 64
    feedforward: int = 512
    readout: tuple[int, ...] = (512, 512)
    frequencies: int = 32
    feedforward_norm: NormKind | None = None
    final_norm: NormKind = "layer"
    shared_gains: bool = False
    positions: Positions = "cyclic"
    activation: Activation = "relu"
    biases: bool = True
    tied: bool = False
    initial_std: float | None = None
    calibrate: bool = True

    examples: Count = 110_000_000
    batch: Count = 128
    epoch: Count = 2000
    rate: NonNegativeFloat = 3e-4
    schedule: Literal["constant", "plateau", "linear", "cosine"] = "plateau"
    warmup: Annotated[Count, Field(ge=0)] = 0
    patience: Count = 3
    weight_decay: NonNegativeFloat = 0.01
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    clip: NonNegativeFloat = 0.0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    test_examples: Annotated[Count, Field(ge=2)] = 128_000

    def __post_init__(self) -> None:
        validate(self)
        if self.batch > self.examples:
            raise InputError(f"a batch of {self.batch} is more than the {self.examples} examples of the whole run")
        self.task, self.model  # noqa: B018  # refuse what they refuse

    @property
    def steps(self) -> int:
        """The number of batches."""
        return self.examples // self.batch

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, 0 the first, before any halving on a plateau."""
        rate = self.rate * min(1.0, (step + 1) / self.warmup) if self.warmup else self.rate
        left = 1 - max(0, step - self.warmup) / max(1, self.steps - self.warmup)
        match self.schedule:
            case "linear":
                return rate * left
            case "cosine":
                return rate * (1 - math.cos(math.pi * left)) / 2
        return rate

    @property
    def found_scheme(self) -> Scheme:
        """The scheme by its name or file, with the recipe's norm."""
        scheme = self.scheme if isinstance(self.scheme, Scheme) else find_scheme(self.scheme)
        return scheme if self.norm is None else scheme.with_norm(self.norm)

    @property
    def task(self) -> AdditionTask:
        """What is trained and tested on."""
        return AdditionTask.of(self.integers, self.interpolation, self.extrapolation, self.digits)

    @property
    def model(self) -> TransformerConfig:
        """The shape of the model."""
        given = {key: getattr(self, key) for key in _MODEL_KEYS}
        return TransformerConfig(scheme=self.found_scheme, vocabulary=len(CHARACTERS), **given)

    @property
    def values(self) -> dict[str, Any]:
        """Plain values, such as TOML and JSON hold."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {key: _plain(value) for key, value in values.items()}

    @property
    def record(self) -> dict[str, Any]:
        """The values, and the model with its scheme in full: what a run is known by."""
        return {"recipe": self.values, "model": self.model.values}

    @property
    def toml(self) -> str:
        """The recipe as a file would hold it."""
        return "".join(f"{key} = {_toml(value)}\n" for key, value in self.values.items() if value is not None)

    @property
    def summary(self) -> str:
        """One line for people."""
        depth = f"{self.encoder_layers}+{self.layers}" if self.encoder_layers else f"{self.layers}"
        return (
            f"{_plain(self.scheme)}; {depth} layers, d = {self.dim}, {self.heads} heads of {self.head}; "
            f"{_joined(self.integers)} integers of {_joined(self.digits)} digits; {self.examples:,} examples in batches of "
            f"{self.batch}; learning rate {self.rate:g}, {self.schedule}; seed {self.seed}"
        )


def read_recipe(name_or_path: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """A preset by its name, or a TOML file, with ``changes`` in place of some of its values."""
    if name_or_path not in PRESETS and ("." in name_or_path or "/" in name_or_path):
        content = read_toml(name_or_path, "recipe file", f"; presets: {', '.join(PRESETS)}")
    else:
        require_known("preset", name_or_path, PRESETS)
        text = files("normscope.training").joinpath("presets", f"{name_or_path}.toml").read_text(encoding="utf-8")
        content = parse_toml(text, name_or_path)
    parts = ((content, Path(name_or_path).parent), (changes or {}, Path()))
    values = {key: _located(key, value, folder) for part, folder in parts for key, value in part.items()}
    try:
        return recipe_from(values)
    except InputError as error:
        raise InputError(str(error) if changes else f"in '{name_or_path}': {error}") from error


def recipe_from(values: Mapping[str, Any]) -> Recipe:
    """The recipe with those values, checked one by one; what is left out has its default."""
    return make(Recipe, values, "a recipe")


def task_of(values: Mapping[str, Any]) -> tuple[AdditionTask, int]:
    """Task and offsets of a recipe's values, as a saved model has them; what else they name need not be there any more."""
    try:
        counts = (tuple(values[key]) for key in ("integers", "interpolation", "extrapolation", "digits"))
        return AdditionTask.of(*counts), int(values["offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the recipe of this model has no task that can be read: {error}") from error


def parse_change(text: str) -> tuple[str, Any]:
    """``key=value`` with the value as TOML has it; a text may go without its quotes."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"a change is written key=value, such as rate=1e-3, not '{text}'")
    try:
        parsed = parse_toml(f"value = {value.strip()}", text)
    except InputError:
        return key.strip(), value.strip()
    return key.strip(), parsed["value"]


def _located(key: str, value: Any, folder: Path) -> Any:
    """The path of a scheme's file as an absolute one, if it was written from ``folder``; other values as they are."""
    is_file = key == "scheme" and isinstance(value, str | Path) and (str(value).endswith(".toml") or "/" in str(value))
    return str((folder / user_path(value, "scheme file")).resolve()) if is_file else value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value.name if isinstance(value, Scheme) else value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


def _joined(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))
