"""The kinds of runs that a sweep can hold: their fields, and how a job is made of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from normscope.errors import InputError, did_you_mean
from normscope.sweeps import audit, ensemble, stability, train
from normscope.sweeps.job import Job


@dataclass(frozen=True)
class Kind:
    """What may be said of a run, and the job of what is said: ``make(values, device, seconds between checkpoints)``."""

    fields: tuple[str, ...]
    make: Callable[[Mapping[str, Any], str, float], Job]


KINDS: dict[str, Kind] = {
    "train": Kind(train.FIELDS, train.TrainJob.of),
    "ensemble": Kind(tuple(ensemble.FIELDS), lambda values, device, every: ensemble.EnsembleJob.of(values, device)),
    "stability": Kind(stability.FIELDS, lambda values, device, every: stability.StabilityJob.of(values, device)),
    "audit": Kind(audit.FIELDS, lambda values, device, every: audit.AuditJob.of(values, device)),
}


def find_kind(name: Any) -> Kind:
    """The kind of that name."""
    if not isinstance(name, str) or name not in KINDS:
        close = did_you_mean(name, KINDS) if isinstance(name, str) else ""
        raise InputError(f"a sweep's kind is one of {', '.join(KINDS)}, not {name!r}{close}")
    return KINDS[name]
