"""Measurements of stability in a sweep."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

from normscope.errors import InputError
from normscope.models import ModelView, Sample, open_model
from normscope.models.open import check_model
from normscope.results import RunFolder, fingerprint, new_run, plain_rows
from normscope.stability import MEASURES, StabilitySetting, chosen_sample, measure_stability
from normscope.stability.noise import disturbances
from normscope.sweeps.job import OnePiece, Outcome
from normscope.sweeps.state import Report
from normscope.training.recipe import checked_value

READING: dict[str, Any] = {"model": str, "text": str, "tokens": int, "examples": int}
FIELDS = (*READING, *(f.name for f in fields(StabilitySetting)))
_LISTS = ("levels", "noise_levels", "layer_noise")
_TIMED_LEVEL = 0.1


@dataclass(frozen=True)
class Reading:
    """A model and what it reads."""

    model: str
    device: str
    seed: int
    text: str | None = None
    tokens: int | None = None
    examples: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], device: str) -> "Reading":
        """The reading of a run's fields; a model that is not there is refused."""
        if "model" not in values:
            raise InputError('a run needs a model, such as model = "builtin:addition-small-pre"')
        given = {name: checked_value(name, values[name], kind) for name, kind in READING.items() if name in values}
        check_model(given["model"])
        reading = cls(device=device, seed=checked_value("seed", values.get("seed", 0), int), **given)
        reading.content  # noqa: B018  # refuse a text that cannot be read
        return reading

    @property
    def content(self) -> str | None:
        """The text, if there is one."""
        try:
            return None if self.text is None else Path(self.text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the text '{self.text}': {error}") from error

    def open(self) -> tuple[ModelView, Sample]:
        """The model, and what it reads."""
        view = open_model(self.model, self.device)
        return view, chosen_sample(view, self.content, self.tokens, self.examples, self.seed)


@dataclass(frozen=True)
class StabilityJob(OnePiece):
    """A model, what it reads, and what is measured."""

    reading: Reading
    setting: StabilitySetting

    @classmethod
    def of(cls, values: Mapping[str, Any], device: str) -> "StabilityJob":
        """The job of a run's fields."""
        types = get_type_hints(StabilitySetting)
        given = {name: value for name, value in values.items() if name not in READING}
        for name in given:
            if name == "measures":
                given[name] = _names(given[name])
            elif name in _LISTS:
                given[name] = _levels(name, given[name])
            else:
                given[name] = checked_value(name, given[name], types[name])
        return cls(Reading.of(values, device), StabilitySetting(**given))

    @property
    def record(self) -> dict[str, Any]:
        """Reading and setting."""
        return {**asdict(self.reading), **asdict(self.setting)}

    @property
    def values(self) -> dict[str, Any]:
        """The same."""
        return self.record

    @property
    def shape(self) -> str:
        """All but the seed and the kind of noise."""
        return fingerprint({**self.record, "seed": None, "noise": None})

    def finish(self, folder: Path, report: Report) -> None:
        """Measure, and write the tables."""
        started = datetime.now(UTC)
        view, sample = self.reading.open()
        tables = measure_stability(view, sample, self.setting, bars(report))
        configuration = {**self.setting.record(view, sample), "text": self.reading.text}
        with new_run(
            folder, "stability", configuration, seed=self.setting.seed, device=self.reading.device, started=started
        ) as run:
            for name, table in tables.items():
                run.write_table(name, table)

    def seconds(self) -> float:
        """Opening the model and one level of noise, as often as there are levels and layers."""
        started = time.monotonic()
        view, sample = self.reading.open()
        opened = time.monotonic()
        wanted = self.setting.wanted(view)
        short = replace(self.setting, levels=(_TIMED_LEVEL,), noise_levels=(_TIMED_LEVEL,), layer_noise=())
        measure_stability(view, sample, replace(short, measures=tuple(wanted)), bars(lambda done, total, note: None))
        once = time.monotonic() - opened
        planned = disturbances(self.setting.noise_levels, self.setting.layer_noise, view.layers)
        timed = disturbances(short.noise_levels, (), view.layers)
        return opened - started + once * (max(1.0, len(planned) / len(timed)) if "noise" in wanted else 1.0)

    def outcome(self, run: RunFolder) -> Outcome:
        """What the totals over all layers say: spread, what noise costs, collapse, sparsity."""
        return Outcome(totals(run))


def totals(run: RunFolder) -> dict[str, float]:
    """Plain numbers of a whole model: its widest spread, what noise costs, collapse by noise, the share that is sparse."""
    numbers: dict[str, float] = {}
    rows = {name: plain_rows(run.table(name)) for name in ("spread", "noise", "collapse", "sparsity") if name in run.tables}
    layers = [row for row in rows.get("spread", ()) if row["head"] is None]
    if layers:
        numbers["widest_spread"] = max(row["high90"] - row["low90"] for row in layers)
    for row in rows.get("noise", ()):
        if row["layer"] is None and (row["perturbed"], row["where"]) == ("q,k,m", "all"):
            numbers[f"accuracy_at_{row['noise']:g}"] = row["accuracy"]
            numbers[f"loss_at_{row['noise']:g}"] = row["loss"]
    for row in rows.get("collapse", ()):
        if row["layer"] is None and row["definition"] == "loose":
            numbers[f"collapse_at_{row['noise']:g}"] = row["probability"]
    for row in rows.get("sparsity", ()):
        if row["layer"] is None:
            numbers["sparse"] = row["share"]
    return numbers


def bars(report: Report) -> Callable[[str, int], Any]:
    """Progress bars that report instead."""

    @contextmanager
    def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda done: report(done, total, what)

    return bar


def _names(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"measures are a list of some of {', '.join(MEASURES)}, not {value!r}")
    return tuple(name.strip() for name in names)


def _levels(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise InputError(f"'{name}' is a list of numbers, not {value!r}")
    return tuple(sorted({checked_value(name, one, float) for one in value}))
