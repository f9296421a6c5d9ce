"""stability: Measure what norm noise does to a model's attention.

Look into a model: normscope stability builtin:addition-small-pre
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pandas as pd
from pydantic import AfterValidator, model_validator

from normscope.errors import InputError
from normscope.experiments.experiment import Outcome, Shown
from normscope.experiments.on_model import (
    ALWAYS,
    OnModel,
    description,
    layer_table,
    measure_outcome,
    measure_records,
    measure_sections,
    named_measures,
)
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Names, Numbers, one_of, setting
from normscope.results.conventions import NOISE
from normscope.results.findings import card_text
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows
from normscope.runs import fingerprint

if TYPE_CHECKING:
    from normscope.measures.base import Measure

_MEASURES = ("spread", "noise", "collapse", "sparsity")
_RECORDS = {
    **{name: name for name in ALWAYS},
    **{name: name for name in _MEASURES},
    "margins": "margin",
    "collapse_level": "collapse level",
}
_STRICT_DRAWS = 16  # for each draw of the noise
_LEVELS = 0.005, 0.3, 25


def _default_levels() -> tuple[float, ...]:
    """The noise levels of a collapse curve, equally spaced by their logarithms but for the one at which models are compared."""
    low, high, count = _LEVELS
    levels = [round(low * (high / low) ** (i / (count - 1)), 6) for i in range(count)]
    nearest = min(levels, key=lambda level: abs(level - NOISE))
    return tuple(NOISE if level == nearest else level for level in levels)


def _levels(values: tuple[float, ...]) -> tuple[float, ...]:
    """Noise levels in rising order, all of which leave norms positive."""
    for level in values:
        if not 0 < level < 1 / math.sqrt(3):
            raise InputError(f"a noise level is above 0 and below 0.577, so that norms stay positive; {level:g} is not")
    return tuple(sorted(set(values)))


Levels = Annotated[Numbers, AfterValidator(_levels)]


class Stability(OnModel):
    """Measure what norm noise does to a model's attention.

    Norm spread, noise sensitivity, circuit collapse (near-one-hot attention rows that switch key) and sparsity, by layer
    and head.

    Example:
        >>> import normscope as ns
        >>> found = ns.stability("builtin:addition-small-pre", examples=8, measures="spread", progress=False)
        >>> list(found.tables)
        ['findings', 'reading', 'spread']
    """

    command: ClassVar[str] = "stability"
    title: ClassVar[str] = "Stability of attention"
    copies: ClassVar[tuple[float, float]] = (25, 0)
    usage: ClassVar[tuple[str, ...]] = (
        "normscope stability builtin:addition-small-pre",
        "normscope stability ./SmolLM2-135M-Instruct.Q4_1.gguf --measure spread,collapse,sparsity",
        "normscope stability runs/train-baseline-pre --examples 1000 --device cuda",
        "normscope stability gpt2 --text notes.txt --tokens 512 --json",
    )

    measures: Annotated[Names | None, one_of(*_MEASURES)] = setting(
        None, f"Comma-separated measures: {', '.join(_MEASURES)}.", shown="all that the model offers", option="--measure"
    )
    levels: Levels = setting(
        help="RMS noise levels of the collapse curve.", factory=_default_levels, shown="25 from 0.005 to 0.3"
    )
    noise_levels: Levels = setting("0.003,0.01,0.03,0.1,0.3", "RMS noise levels at which the model is run.")
    layer_noise: Levels = setting("0.1", "RMS noise levels for one layer at a time; none to leave it out.")
    noise: Annotated[str, one_of("uniform", "gaussian")] = setting(
        "uniform", "Distribution of the noise for collapse: uniform or gaussian."
    )
    draws: int | None = setting(
        None, "Draws of the noise; 16 times as many for strict collapse.", shown="4 to 16, as the errors need", ge=2, le=1000
    )

    @model_validator(mode="after")
    def _has_levels(self) -> "Stability":
        wanted = self.measures or _MEASURES
        if "noise" in wanted and not self.noise_levels and not self.layer_noise:
            raise InputError("noise needs at least one level in noise_levels= or layer_noise= ")
        if "collapse" in wanted and not self.levels:
            raise InputError("collapse needs at least one level in levels= ")
        return self

    @property
    def shape(self) -> str:
        """Everything but the seed and the distribution of the noise."""
        return fingerprint({**self.record, "seed": None, "noise": None})

    def chosen(self) -> "list[Measure]":
        """The measures with their settings."""
        from normscope.measures.collapse import Collapse
        from normscope.measures.noise import Noise
        from normscope.measures.sparsity import Sparsity
        from normscope.measures.spread import Spread

        every = (
            Spread(),
            Noise(self.noise_levels, self.layer_noise, self.draws),
            Collapse(self.levels, self.noise, _STRICT_DRAWS * (self.draws or 1)),
            Sparsity(),
        )
        return [measure for measure in every if measure.name in (self.measures or _MEASURES)]

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """One forward pass for all measures but noise, which takes one for every disturbance."""
        from normscope.measures.base import joined, measure_all

        subject = self.subject(progress)
        measures = self.offered(subject, self.chosen(), self.measures is not None, progress)
        taken = [*named_measures(ALWAYS), *measures]
        tables = joined(measure_all(subject, taken, progress).values())
        settings = {
            "measures": [measure.name for measure in measures],
            **{name: list(getattr(self, name)) for name in ("levels", "noise_levels", "layer_noise")},
            "noise": self.noise,
            "draws": self.draws,
        }
        return self.measured_result(subject, taken, tables, settings)

    def seconds(self, progress: Progress = SILENT) -> float:
        """Opening the model and one level of noise, times the number of levels and layers."""
        from normscope.measures.base import measure_all
        from normscope.measures.noise import Noise

        started = time.monotonic()
        subject = self.subject()
        opened = time.monotonic()
        level = self.levels[:1] or self.noise_levels[:1]
        short = self.model_copy(update={"levels": level, "noise_levels": level, "layer_noise": ()})
        timed, planned = (run.offered(subject, run.chosen(), False, SILENT) for run in (short, self))
        measure_all(subject, timed)
        once = time.monotonic() - opened
        passes = [[len(m.planned(subject.model)) for m in measures if isinstance(m, Noise)] for measures in (timed, planned)]
        return opened - started + once * (max(1.0, passes[1][0] / passes[0][0]) if passes[0] else 1.0)

    @classmethod
    def outcome(cls, result: Result) -> Outcome:
        """Totals of the whole model: spread, what noise costs, collapse, sparsity."""
        return measure_outcome(named_measures(_MEASURES), result)

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """A record for every row: its measure, layer and head, null for totals, and its columns."""
        return measure_records(result, _RECORDS)

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The model, a row for each layer, the noise curve, and the findings."""
        yield description(result)
        table = layer_table(named_measures(_MEASURES), result)
        if table.rows:
            yield table
        if "noise" in result.tables:
            yield _noise_table(result.tables["noise"])
        yield from map(card_text, result.findings)

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The sections of the measures."""
        yield from measure_sections(named_measures([*ALWAYS, *_MEASURES]), result)


def _noise_table(table: pd.DataFrame) -> PageTable:
    rows = tuple(
        (
            row["perturbed"],
            row["where"],
            f"{100 * row['noise']:g} %",
            f"{100 * row['accuracy']:.2f} ± {100 * row['accuracy_stderr']:.2f} %",
            f"{row['loss']:.4g} ± {row['loss_stderr']:.2g}",
        )
        for row in plain_rows(table)
        if row["layer"] is None and row["loss"] is not None
    )
    return PageTable("", ("noise on", "in attention rows", "RMS noise", "accuracy", "loss"), rows)
