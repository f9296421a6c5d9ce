"""A watched run on disk: a run folder that grows with the training."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from normscope.errors import InputError
from normscope.machine.files import user_path
from normscope.runs import GrowingRun, check_free, is_run, open_run, unfinished_runs
from normscope.watch.snapshot import Snapshot

COMMAND = "watch"
WATCHED = "watch"  # the folder of a watched run inside that of a training of normscope
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


def watched_run(path: Path | str) -> Path:
    """The folder of a watched run: itself, inside the run folder of a training, or inside its unfinished work."""
    folder = user_path(path, "run folder")
    places = (folder, folder / WATCHED, *(unfinished / WATCHED for unfinished in unfinished_runs(folder)))
    for place in places:
        if is_run(place) and open_run(place).description["command"] == COMMAND:
            return place
    command = open_run(folder).description["command"]
    raise InputError(f"'{folder}' holds a run of {command}, not of a watched training")


def last_watched(path: Path | str) -> int:
    """The last step of a watched run; 0 where there is none."""
    tables = open_run(path).all_tables() if is_run(path) else {}
    return int(tables["steps"]["step"].max()) if "steps" in tables else 0


def summary_of(about: Mapping[str, Any]) -> str:
    """The model and how it is watched, in one line; facts that are not known are left out."""
    words = (
        ("model", "{}"), ("layers", "{} layers"), ("heads", "{} heads"), ("dim", "width {}"),
        ("parameters", "{:,} parameters"), ("scheme", "{}"), ("every", "every {} steps"),
    )  # fmt: skip
    return ", ".join(form.format(about[name]) for name, form in words if about.get(name) is not None)
