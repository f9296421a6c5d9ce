"""Audits in a sweep."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normscope.audit import Question, audit
from normscope.models import open_model
from normscope.runs import RunFolder, fingerprint, new_run
from normscope.sweeps.job import OnePiece, Outcome
from normscope.sweeps.reading import READING, Reading, totals
from normscope.sweeps.state import Report
from normscope.training.recipe import checked_value

FIELDS = (*READING, "sentence", "seed")


@dataclass(frozen=True)
class AuditJob(OnePiece):
    """A model, what it reads, and the sentence whose token is followed, if there is one."""

    reading: Reading
    sentence: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], device: str) -> "AuditJob":
        """The job of a run's fields."""
        return cls(Reading.of(values, device), checked_value("sentence", values.get("sentence"), str | None))

    @property
    def record(self) -> dict[str, Any]:
        """The reading and the sentence."""
        return self.values

    @property
    def values(self) -> dict[str, Any]:
        """The reading and the sentence."""
        return {**asdict(self.reading), "sentence": self.sentence}

    @property
    def shape(self) -> str:
        """All but the seed."""
        return fingerprint({**self.record, "seed": None})

    def finish(self, folder: Path, report: Report) -> None:
        """Audit, and write the tables."""
        started, seed = datetime.now(UTC), self.reading.seed
        question = self._question()
        found = audit(question, progress=lambda part, done, total: report(done, total, part))
        configuration = {**question.about, "text": self.reading.text, **self.reading.digests}
        with new_run(folder, "audit", configuration, seed=seed, device=self.reading.device, started=started) as run:
            for name, table in found.tables.items():
                run.write_table(name, table)

    def fits(self, run: RunFolder) -> bool:
        """Whether the run was of the model and the text that are there now."""
        return self.reading.fits(run)

    def seconds(self) -> float:
        """An audit has no steps that stand for the others: it is timed as a whole."""
        started = time.monotonic()
        audit(self._question())
        return time.monotonic() - started

    def _question(self) -> Question:
        reading = self.reading
        view = open_model(reading.model, reading.device)
        return Question.of(view, reading.content, reading.tokens, reading.examples, self.sentence, reading.seed)

    def outcome(self, run: RunFolder) -> Outcome:
        """Growth of tokens through the layers, their mean cosine and rank behind the last, and the totals of stability."""
        motion = run.table("motion").sort_values("layer")
        first, last = motion.iloc[0], motion.iloc[-1]
        moved = {"growth": last["radius"] / first["radius"], "cosine": last["cosine"], "rank": last["rank"]}
        return Outcome({**{name: float(value) for name, value in moved.items()}, **totals(run)})
