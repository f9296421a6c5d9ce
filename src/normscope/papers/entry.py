"""An entry: one figure or table of a paper, how it is made here, and how what was measured compares with what was published."""

import json
import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from normscope.experiments import completed
from normscope.experiments.experiment import Experiment
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.runs import fingerprint, open_run

REPRODUCED, WITH_REMARK, NOT_REPRODUCED = "reproduced", "reproduced with a remark", "not reproduced"
NOT_RUN, NO_NUMBERS = "not run here", "nothing to compare with"
VERDICTS = (REPRODUCED, WITH_REMARK, NOT_REPRODUCED, NO_NUMBERS, NOT_RUN)
THIS_RUN = "this run"
ESTIMATED = "(estimated from the Baseline's time and the number of multiplications)"


@dataclass(frozen=True)
class Request:
    """How an entry is to be made.

    Attributes:
        full: at the published scale instead of in about a minute on two cores.
        runs: of an ensemble, in place of the number that the scale implies.
        models: names or paths of models, where an entry measures one.
        seed, device: of everything that is run.
        folder: where experiments are saved, so that an interrupted entry resumes; None keeps nothing.
        progress: receives how far it is.
        took: seconds that experiments took by their names, shared by the entries of a command.
        earlier: the experiments of this entry, each with the seconds that it did not wait for because a result was there.
    """

    full: bool = False
    runs: int | None = None
    models: tuple[str, ...] = ()
    seed: int = 0
    device: str = "cpu"
    folder: Path | None = None
    progress: Progress = SILENT
    took: dict[str, float] = field(default_factory=dict)
    earlier: dict[str, float] = field(default_factory=dict)

    def record(self, takes: Iterable[str] = ("full", "runs", "model")) -> dict[str, Any]:
        """What the outcome of an entry depends on that takes these settings."""
        given = {"full": self.full, "runs": self.runs, "model": list(self.models)}
        return {**{name: given[name] for name in takes}, "seed": self.seed, "device": self.device.partition(":")[0]}

    def run(self, experiment: Experiment) -> Result:
        """The result of an experiment; one that is complete in the folder is not run again."""
        name = f"{experiment.folder_name}-{fingerprint(experiment.record)}"
        folder, began = None if self.folder is None else self.folder / name, time.monotonic()
        result = completed(experiment, folder, self.progress)
        waited = time.monotonic() - began
        took = self.took.setdefault(name, waited if folder is None else open_run(folder).description["seconds"])
        self.earlier[name] = self.earlier.get(name, 0.0) + max(0.0, took - waited)
        return result


@dataclass(frozen=True)
class Value:
    """A number, or a text, that was published and measured.

    Attributes:
        quantity: what it is.
        published, measured: both as numbers, or as texts where there is no number.
        published_error, measured_error: their standard errors, where they are known. Of a mean over models it is their standard
            deviation: what was published is one model.
        allowed: the largest difference that counts as agreement, on top of twice the errors; None compares nothing.
        source: what was measured, this run or one that is stored.
    """

    quantity: str
    published: float | str | None
    measured: float | str | None
    published_error: float = 0.0
    measured_error: float = 0.0
    allowed: float | None = 0.0
    source: str = THIS_RUN

    @property
    def agrees(self) -> bool | None:
        """Whether both agree; None where that cannot be decided."""
        if self.allowed is None or self.published is None or self.measured is None:
            return None
        if isinstance(self.published, str) or isinstance(self.measured, str):
            return self.published == self.measured
        error = 2 * math.hypot(self.published_error, self.measured_error)
        return abs(self.measured - self.published) <= self.allowed + error


@dataclass(frozen=True)
class Residual:
    """How far a measured curve is from the published one.

    Attributes:
        curve: its name.
        quantity: what the curve shows.
        rms, largest: of the differences.
        points: how many readings were compared.
        allowed: the largest rms that counts as agreement; None compares nothing.
        noise: expected rms of the sampling error alone; twice of it is allowed besides.
        source: what was measured, this run or one that is stored.
    """

    curve: str
    quantity: str
    rms: float
    largest: float
    points: int
    allowed: float | None = None
    noise: float = 0.0
    source: str = THIS_RUN

    @property
    def agrees(self) -> bool | None:
        """Whether the curves agree; None where nothing is compared."""
        return None if self.allowed is None or not self.points else self.rms <= math.hypot(self.allowed, 2 * self.noise)


@dataclass(frozen=True)
class Curve:
    """A line of a figure: ``published`` readings are drawn as dots, everything else as lines."""

    name: str
    x: Iterable[float]
    y: Iterable[float]
    low: Iterable[float] | None = None
    high: Iterable[float] | None = None
    published: bool = False


@dataclass(frozen=True)
class Panel:
    """A chart with published and measured curves."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Reproduction:
    """What an entry came to.

    Attributes:
        verdict: one of ``VERDICTS``.
        remark: what a reader has to know besides: what was inferred, what differs and why.
        settings: of this run.
        values, residuals, panels: the comparison.
    """

    verdict: str
    remark: str
    settings: str
    values: tuple[Value, ...] = ()
    residuals: tuple[Residual, ...] = ()
    panels: tuple[Panel, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A figure or table of a paper.

    Attributes:
        id: paper and figure, such as ``2:fig5a``.
        title: what it shows.
        published: the published setting, as far as it is stated.
        needs: what its short form takes, such as ``CPU, 5 s``.
        full: what the published scale takes; empty where the short form is that.
        make: the comparison.
        commands: the commands that give the same numbers, or that train what the entry needs.
        takes: settings that mean something to it besides seed and device: ``runs``, ``model``, ``full``.
    """

    id: str
    title: str
    published: str
    needs: str
    make: Callable[[Request], Reproduction]
    full: str = ""
    commands: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The id as a name of files."""
        return self.id.replace(":", "-").lower()

    def command(self, request: Mapping[str, Any]) -> str:
        """The command line of this entry with the settings of a request."""
        options = [
            *(["--full"] if request.get("full") else []),
            *(["--runs", str(request["runs"])] if request.get("runs") else []),
            *(["--model", ",".join(request["model"])] if request.get("model") else []),
            *(["--seed", str(request["seed"])] if request["seed"] else []),
        ]
        return shlex.join(["normscope", "reproduce", self.id, *options])


def judge(checks: Iterable[Value | Residual], remark: bool = False) -> str:
    """The verdict of what was compared; ``remark`` if something about the setting was inferred or is not as published."""
    agreements = [check.agrees for check in checks if check.agrees is not None]
    if not agreements:
        return NO_NUMBERS
    return NOT_REPRODUCED if not all(agreements) else WITH_REMARK if remark else REPRODUCED


@dataclass(frozen=True)
class Made:
    """An entry that was made: what it came to, how, how long it took, and the names of the experiments that it ran."""

    entry: Entry
    reproduction: Reproduction
    request: Mapping[str, Any]
    seconds: float
    date: str
    experiments: Iterable[str] = ()

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Everything as tidy tables, from which the gallery is rendered."""
        entry, found, owner = self.entry, self.reproduction, {"entry": self.entry.id}
        about = {
            "title": entry.title, "verdict": found.verdict, "remark": found.remark, "published": entry.published,
            "settings": found.settings, "needs": entry.needs, "full": entry.full,
            "command": entry.command(self.request), "commands": "\n".join(entry.commands),
            "request": json.dumps(dict(self.request)), "device": self.request["device"],
            "seconds": round(self.seconds, 1), "date": self.date, "experiments": "\n".join(self.experiments),
        }  # fmt: skip
        values = [_text_values({**owner, **asdict(value), "agrees": value.agrees}) for value in found.values]
        residuals = [{**owner, **asdict(residual), "agrees": residual.agrees} for residual in found.residuals]
        panels = [
            {**owner, "panel": panel.title, "x_label": panel.x_label, "y_label": panel.y_label, "log_x": panel.log_x,
             "log_y": panel.log_y}
            for panel in found.panels
        ]  # fmt: skip
        return {
            "entries": pd.DataFrame([{**owner, **about}]),
            "values": _frame(values, _VALUES),
            "residuals": _frame(residuals, _RESIDUALS),
            "panels": _frame(panels, _PANELS),
            "curves": pd.concat(
                [_frame([], _CURVES), *(_rows(entry.id, panel, curve) for panel in found.panels for curve in panel.curves)],
                ignore_index=True,
            ),
        }


# Columns and their types: empty tables have them too.
_VALUES = {
    "entry": "object", "quantity": "object", "published": "object", "measured": "object", "published_error": "float64",
    "measured_error": "float64", "allowed": "float64", "source": "object", "agrees": "boolean",
    "published_number": "float64", "measured_number": "float64",
}  # fmt: skip
_RESIDUALS = {
    "entry": "object", "curve": "object", "quantity": "object", "rms": "float64", "largest": "float64", "points": "int64",
    "allowed": "float64", "noise": "float64", "source": "object", "agrees": "boolean",
}  # fmt: skip
_PANELS = {"entry": "object", "panel": "object", "x_label": "object", "y_label": "object", "log_x": "bool", "log_y": "bool"}
_CURVES = {
    "entry": "object", "panel": "object", "curve": "object", "published": "bool", "x": "float64", "y": "float64",
    "low": "float64", "high": "float64",
}  # fmt: skip


def _frame(rows: list[dict[str, Any]], types: Mapping[str, str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(types)).astype(dict(types))


def _text_values(row: dict[str, Any]) -> dict[str, Any]:
    """Published and measured as texts, since some are numbers and some are words; those that are numbers also in full."""
    names = ("published", "measured")
    numbers = {f"{name}_number": None if isinstance(row[name], str) else row[name] for name in names}
    return {**row, **{name: _text(row[name]) for name in names}, **numbers}


def _text(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def _rows(entry: str, panel: Panel, curve: Curve) -> pd.DataFrame:
    columns = {"x": curve.x, "y": curve.y, "low": curve.low, "high": curve.high}
    numbers = {name: list(values) for name, values in columns.items() if values is not None}
    table = pd.DataFrame(numbers, dtype=float).reindex(columns=list(columns))
    table = table.assign(entry=entry, panel=panel.title, curve=curve.name, published=curve.published)
    return table[list(_CURVES)].astype(_CURVES)
