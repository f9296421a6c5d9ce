"""Recipes: everything that a training run depends on, as a flat TOML file."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

from normscope.errors import InputError, did_you_mean
from normscope.schemes import Scheme, find_scheme
from normscope.training.tasks import CHARACTERS, AdditionTask
from normscope.transformer import TransformerConfig

PRESETS = ("tiny", "small", "baseline", "alternative", "large")
SCHEDULES = ("constant", "plateau", "linear", "cosine")
PRECISIONS = ("auto", "float32", "bfloat16")
_MOST_OFFSETS = 1_000_000
_MODEL_KEYS = tuple(f.name for f in fields(TransformerConfig) if f.name not in ("scheme", "vocabulary"))


@dataclass(frozen=True)
class Recipe:
    """A training run: task, model and schedule. The fields are the keys of a recipe file (docs/training.md)."""

    scheme: str | Scheme = "pre"
    norm: str | None = None
    seed: int = 100

    integers: tuple[int, ...] = (3, 4, 6)
    interpolation: tuple[int, ...] = (5,)
    extrapolation: tuple[int, ...] = (7, 8, 9)
    digits: tuple[int, ...] = (2, 3)
    offsets: int = 50

    layers: int = 10
    encoder_layers: int = 0
    dim: int = 512
    heads: int = 12
    head: int = 64
    feedforward: int = 512
    readout: tuple[int, ...] = (512, 512)
    frequencies: int = 32
    feedforward_norm: str | None = None
    final_norm: str = "layer"
    shared_gains: bool = False
    calibrate: bool = True

    examples: int = 110_000_000
    batch: int = 128
    epoch: int = 2000
    rate: float = 3e-4
    schedule: str = "plateau"
    warmup: int = 0
    patience: int = 3
    weight_decay: float = 0.01
    beta2: float = 0.999
    clip: float = 0.0
    precision: str = "auto"
    test_examples: int = 128_000

    def __post_init__(self) -> None:
        for name, least in (("offsets", 0), ("examples", 1), ("batch", 1), ("epoch", 1), ("warmup", 0), ("patience", 1),
                            ("test_examples", 2), ("seed", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise InputError(f"{name} is at least {least}, not {getattr(self, name)}")
        for name in ("rate", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is a finite number, 0 or more, not {value}")
        if not 0 <= self.beta2 < 1:
            raise InputError(f"beta2 is from 0 to below 1, not {self.beta2}")
        for name, allowed in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
            value = getattr(self, name)
            if value not in allowed:
                raise InputError(f"{name} is one of {', '.join(allowed)}, not '{value}'{did_you_mean(value, allowed)}")
        if self.offsets > _MOST_OFFSETS:
            raise InputError(f"offsets is at most {_MOST_OFFSETS:,}, not {self.offsets}")
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
    if name_or_path in PRESETS:
        text = files("normscope.training").joinpath("presets", f"{name_or_path}.toml").read_text(encoding="utf-8")
    elif "." in name_or_path or "/" in name_or_path:
        text = _read(Path(name_or_path))
    else:
        raise InputError(f"unknown preset '{name_or_path}'; allowed: {', '.join(PRESETS)}{did_you_mean(name_or_path, PRESETS)}")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"'{name_or_path}' is not valid TOML: {error}") from error
    try:
        given = recipe_values(content)
    except InputError as error:
        raise InputError(f"in '{name_or_path}': {error}") from error
    changed = recipe_values(changes or {})
    for values, folder in ((given, Path(name_or_path).parent), (changed, Path())):
        if "scheme" in values:
            values["scheme"] = _scheme_from(values["scheme"], folder)
    return recipe_from({**given, **changed})


def recipe_from(values: Mapping[str, Any]) -> Recipe:
    """The recipe with those values, checked one by one; what is left out has its default."""
    return Recipe(**recipe_values(values))


def task_of(values: Mapping[str, Any]) -> tuple[AdditionTask, int]:
    """Task and offsets of a recipe's values, as a saved model has them; what else they name need not be there any more."""
    try:
        counts = (tuple(values[key]) for key in ("integers", "interpolation", "extrapolation", "digits"))
        return AdditionTask.of(*counts), int(values["offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the recipe of this model has no task that can be read: {error}") from error


def recipe_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with lists as tuples; unknown keys and wrong types are refused."""
    types = get_type_hints(Recipe)
    allowed = [f.name for f in fields(Recipe)]
    checked = {}
    for key, value in values.items():
        if key not in allowed:
            raise InputError(f"unknown key '{key}' in a recipe{did_you_mean(key, allowed)} (allowed: {', '.join(allowed)})")
        checked[key] = checked_value(key, value, types[key])
    return checked


def parse_change(text: str) -> tuple[str, Any]:
    """``key=value`` with the value as TOML has it; a text may go without its quotes."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"a change is written key=value, such as rate=1e-3, not '{text}'")
    try:
        return key.strip(), tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def checked_value(key: str, value: Any, wanted: Any) -> Any:
    """The value as the type that is wanted; another is refused."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None and type(None) in get_args(wanted):
        return None
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is int and (whole or (isinstance(value, float) and value.is_integer())):
        return int(value)  # 1e8 is a whole number too
    if wanted is float and (whole or isinstance(value, float)):
        return float(value)
    if (wanted is str or str in get_args(wanted)) and isinstance(value, str):
        return value
    if isinstance(value, Scheme) and Scheme in get_args(wanted):
        return value
    if isinstance(value, Path) and Scheme in get_args(wanted):
        return str(value)
    if wanted == tuple[int, ...] and isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
        return tuple(value)
    names = {bool: "true or false", int: "a whole number", float: "a number", tuple[int, ...]: "a list of whole numbers"}
    raise InputError(f"'{key}' is {names.get(wanted, 'a text')}, not {value!r}")


def _scheme_from(scheme: str | Scheme, folder: Path) -> str | Scheme:
    """A scheme or its name as it is; the path of its file as an absolute one, if it was written from ``folder``."""
    if isinstance(scheme, Scheme):
        return scheme
    is_file = scheme.endswith(".toml") or "/" in scheme
    return str((folder / Path(scheme).expanduser()).resolve()) if is_file else scheme


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"no recipe file '{path}'; presets: {', '.join(PRESETS)}") from None
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise InputError(f"cannot read the recipe '{path}': {error}") from error


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
