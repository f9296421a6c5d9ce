"""A watched run on disk: a run folder that grows with the training."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from normscope.errors import InputError
from normscope.runs import GrowingRun, check_free
from normscope.watch.snapshot import Snapshot

COMMAND = "watch"
_SAME = ("layers", "dim")  # of a model that is watched on


class WatchedFolder:
    """Writes snapshots to a run folder, which ``normscope.load`` and ``normscope watch`` read while it grows."""

    def __init__(self, path: Path | str, resume: bool = False) -> None:
        self.path, self.resume = path, resume
        self._run: GrowingRun | None = None
        with _naming_to():
            check_free(path, COMMAND, resume)

    def begin(self, about: Mapping[str, Any]) -> None:
        """Make the folder, or resume in it."""
        device = str(about.get("device", "cpu"))
        with _naming_to():
            self._run = GrowingRun.begin(
                self.path, COMMAND, about, device=device, summary=summary_of(about), resume=self.resume, same=_SAME
            )

    def write(self, snapshots: Sequence[Snapshot]) -> None:
        """Append the rows of all snapshots as one row group of each table."""
        assert self._run is not None
        names = dict.fromkeys(name for snapshot in snapshots for name in snapshot.tables)
        self._run.append({name: pd.concat([s.tables[name] for s in snapshots if name in s.tables]) for name in names})

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.close()


@contextmanager
def _naming_to() -> Iterator[None]:
    """Errors of run folders name the parameter of a watch."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("out=", "to=")) from error


def summary_of(about: Mapping[str, Any]) -> str:
    """The model and how it is watched, in one line; facts that are not known are left out."""
    words = (
        ("model", "{}"), ("layers", "{} layers"), ("heads", "{} heads"), ("dim", "width {}"),
        ("parameters", "{:,} parameters"), ("scheme", "{}"), ("every", "every {} steps"),
    )  # fmt: skip
    return ", ".join(form.format(about[name]) for name, form in words if about.get(name) is not None)
