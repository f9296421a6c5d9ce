"""Measurements of stability in a sweep."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

from normscope.errors import InputError
from normscope.runs import RunFolder, fingerprint, new_run
from normscope.stability import MEASURES, StabilitySetting, measure_stability
from normscope.stability.noise import disturbances
from normscope.sweeps.job import OnePiece, Outcome
from normscope.sweeps.reading import READING, Reading, totals
from normscope.sweeps.state import Report
from normscope.training.recipe import checked_value

FIELDS = (*READING, *(f.name for f in fields(StabilitySetting)))
_LISTS = ("levels", "noise_levels", "layer_noise")
_TIMED_LEVEL = 0.1


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
        return self.values

    @property
    def values(self) -> dict[str, Any]:
        """Reading and setting."""
        return {**asdict(self.reading), **asdict(self.setting)}

    @property
    def shape(self) -> str:
        """All but the seed and the kind of noise."""
        return fingerprint({**self.record, "seed": None, "noise": None})

    def finish(self, folder: Path, report: Report) -> None:
        """Measure, and write the tables."""
        started = datetime.now(UTC)
        view, sample = self.reading.open()
        tables = measure_stability(view, sample, self.setting, bars(report))
        configuration = {**self.setting.record(view, sample), "text": self.reading.text, **self.reading.digests}
        with new_run(
            folder, "stability", configuration, seed=self.setting.seed, device=self.reading.device, started=started
        ) as run:
            for name, table in tables.items():
                run.write_table(name, table)

    def fits(self, run: RunFolder) -> bool:
        """Whether the run was of the model and the text that are there now."""
        return self.reading.fits(run)

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
