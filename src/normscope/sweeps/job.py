"""What a kind of run has to offer so that a sweep can plan it, share it out and read what it came to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from normscope.runs import RunFolder
from normscope.sweeps.state import Report


@dataclass(frozen=True)
class Outcome:
    """What a run came to: plain numbers by name, its curves, and why it is not to be believed, if so."""

    numbers: dict[str, Any]
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    note: str | None = None


class Job(Protocol):
    """One run: independent parts in any order and place (a training has none), and then its end, which writes the folder.

    A job travels to other processes, so it is a plain value.
    """

    @property
    def record(self) -> Mapping[str, Any]:
        """What the run is known by: two runs with the same record are the same."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The fields of the recipe as they come out, those of the base included."""

    @property
    def shape(self) -> str:
        """A text that two runs share only if they take the same time."""

    @property
    def parts(self) -> int:
        """How many independent parts there are before the end."""

    def missing(self, folder: Path) -> list[int]:
        """The parts of the run that is to end up under ``folder`` that are not there yet."""

    def run_part(self, part: int, folder: Path) -> None:
        """Compute one part and keep it beside ``folder``."""

    def finish(self, folder: Path, report: Report) -> None:
        """Do what is left and write the complete run folder."""

    def fits(self, run: RunFolder) -> bool:
        """Whether a complete folder is of this very run: of what its files hold now, not of what they held then."""

    def seconds(self) -> float:
        """How long the whole run takes on this device, from one timed step."""

    def outcome(self, run: RunFolder) -> Outcome:
        """What the complete folder says."""


class OnePiece:
    """A run without parts: everything is done at its end."""

    def fits(self, run: RunFolder) -> bool:
        """Always: its record says all."""
        return True

    @property
    def parts(self) -> int:
        """None."""
        return 0

    def missing(self, folder: Path) -> list[int]:
        """Nothing."""
        return []

    def run_part(self, part: int, folder: Path) -> None:
        """There is none to run."""
        raise IndexError(f"no part {part}: this run is one piece")
