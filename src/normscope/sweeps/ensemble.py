"""Ensembles in a sweep: their chunks are computed anywhere and merge into the same numbers."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import pandas as pd

from normscope.dynamics import Ensemble, EnsembleRun
from normscope.dynamics.ensemble_run import ensemble_from
from normscope.errors import InputError
from normscope.runs import Parts, RunFolder, fingerprint, new_run
from normscope.sweeps.job import Outcome
from normscope.sweeps.state import Report
from normscope.training.recipe import checked_value

FIELDS: dict[str, Any] = {
    "panel": str,
    "scheme": str,
    "norm": str,
    "runs": int,
    "chunk": int,
    "precision": str,
    "seed": int,
    **{f.name: get_type_hints(Ensemble)[f.name] for f in fields(Ensemble)},
}
_TIMED_STEPS = 2


@dataclass(frozen=True)
class EnsembleJob:
    """An ensemble and the fields that were given for it."""

    job: EnsembleRun
    given: dict[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any], device: str) -> "EnsembleJob":
        """The job of an ensemble's fields."""
        for needed, example in (("scheme", '"pre,peri"'), ("runs", "1000")):
            if needed not in values:
                raise InputError(f"an ensemble needs {needed}, such as {needed} = {example}")
        given = {name: checked_value(name, value, FIELDS[name]) for name, value in values.items()}
        return cls(ensemble_from(given, device), given)

    @property
    def record(self) -> dict[str, Any]:
        """The job in full."""
        return self.job.record

    @property
    def values(self) -> dict[str, Any]:
        """The setting, the numbers of runs, and what was given."""
        own = {name: getattr(self.job, name) for name in ("runs", "chunk", "precision", "seed")}
        return {"panel": None, "norm": None, **asdict(self.job.setting), **own, **self.given}

    @property
    def shape(self) -> str:
        """All but the seed."""
        return fingerprint({**self.record, "seed": None})

    @property
    def parts(self) -> int:
        """The chunks."""
        return len(self.job.chunks)

    def missing(self, folder: Path) -> list[int]:
        """Chunks that are not kept yet."""
        parts = Parts.of(folder, self.record)
        return [index for index in range(self.parts) if not parts.has(index)]

    def run_part(self, part: int, folder: Path) -> None:
        """Compute a chunk and keep it."""
        self.job.compute_chunk(part, Parts.of(folder, self.record))

    def finish(self, folder: Path, report: Report) -> None:
        """Merge the chunks, in their order."""
        started, parts = datetime.now(UTC), Parts.of(folder, self.record)
        cosines = self.job.compute(parts, lambda done: report(done, self.job.runs, "merging"))
        broken = self.job.not_finite(cosines)
        with new_run(folder, "ensemble", self.record, seed=self.job.seed, device=self.job.device, started=started) as run:
            run.write_table("cosines", self.job.table(cosines))
            if broken:
                run.write_table("divergence", pd.DataFrame({"reason": broken}))
        parts.discard()

    def fits(self, run: RunFolder) -> bool:
        """Always: its record says all."""
        return True

    def seconds(self) -> float:
        """The time of a chunk of a few steps, as many times as there are steps and chunks."""
        setting = self.job.setting
        short = replace(setting, time=_TIMED_STEPS * setting.step, samples=2, redraw=0.0)
        times = []
        for _ in range(2):  # the first one warms up
            started = time.monotonic()
            timed = replace(self.job, setting=short, runs=min(self.job.runs, self.job.chunk))
            timed.compute(_Nowhere())
            times.append(time.monotonic() - started)
        return min(times) * self.parts * setting.evaluations / short.evaluations

    def outcome(self, run: RunFolder) -> Outcome:
        """The mean cosine of each scheme at the last time, and all curves."""
        table = run.table("cosines")
        last = table[table["time"] == table["time"].max()]
        numbers = {f"cosine_{name}": mean for name, mean in zip(last["scheme"], last["mean"], strict=True)}
        note = "; ".join(run.table("divergence")["reason"]) if "divergence" in run.tables else None
        return Outcome(numbers, table[["time", "scheme", "mean", "low", "high"]], note)


class _Nowhere:
    """Keeps nothing."""

    def load(self, index: int) -> None:
        return None

    def save(self, index: int, values: Any) -> None:
        return None
