"""Experiment trackers: TensorBoard, Weights & Biases and MLflow get a snapshot as scalars."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pandas.api.types import is_numeric_dtype

from normscope.errors import InputError, MissingExtraError
from normscope.results.tables import floats
from normscope.training.log import FOLDER, tensorboard_writer
from normscope.watch.snapshot import Snapshot

if TYPE_CHECKING:
    import pandas as pd

PREFIX = "normscope"
_KEYS = ("step", "layer", "sublayer", "head")
_LARGEST_BATCH = 1000  # metrics that MLflow takes at a time
_LONGEST_PARAMETER = 500  # characters that every store of MLflow takes


def scalars_of(snapshot: Snapshot) -> dict[str, float]:
    """The numbers of a snapshot by stable names; those that are not finite are left out.

    ``normscope/loss``; ``normscope/layers/norm/03`` (quantity, layer); ``normscope/sublayers/update/03_attention``;
    ``normscope/heads/logit_max/03`` and ``logit_mean`` over the heads of a layer; ``normscope/norms/gain/NAME``;
    ``normscope/scales/mean/NAME``; ``normscope/faults`` (non-finite values) and ``normscope/alarms`` (how many at this step).
    """
    named = dict(_named(snapshot))
    return {f"{PREFIX}/{name}": value for name, value in named.items() if math.isfinite(value)}


def _named(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
    tables = snapshot.tables
    if "steps" in tables:
        yield from ((name, value) for name, values in _numbers(tables["steps"]) for value in values)
    for table, names in (("layers", _layers), ("sublayers", _sublayers)):
        if table in tables:
            places = names(tables[table])
            for name, values in _numbers(tables[table]):
                yield from ((f"{table}/{name}/{place}", value) for place, value in zip(places, values, strict=True))
    if "heads" in tables:
        yield from _reduced(tables["heads"])
    for table, key, column in (("norms", "norm", "gain"), ("scales", "name", "mean")):
        if table in tables:
            rows = zip(tables[table][key], floats(tables[table][column]), strict=True)
            yield from ((f"{table}/{column}/{name}", value) for name, value in rows)
    yield "faults", float(tables["faults"]["count"].sum()) if "faults" in tables else 0.0
    yield "alarms", float(len(tables.get("alarms", ())))


def _numbers(table: "pd.DataFrame") -> Iterator[tuple[str, list[float]]]:
    """The columns of numbers, without those that say where they are from."""
    for name in table:
        if name not in _KEYS and is_numeric_dtype(table[name]):
            yield str(name), floats(table[name])


def _layers(table: "pd.DataFrame") -> list[str]:
    return [f"{layer:02d}" for layer in table["layer"]]


def _sublayers(table: "pd.DataFrame") -> list[str]:
    return [f"{layer:02d}_{sublayer}" for layer, sublayer in zip(table["layer"], table["sublayer"], strict=True)]


def _reduced(heads: "pd.DataFrame") -> Iterator[tuple[str, float]]:
    """Mean and largest over the heads of every layer that are numbers."""
    layers, rows = np.unique(heads["layer"].to_numpy(), return_inverse=True)
    for name, values in _numbers(heads):
        known = np.isfinite(values)
        column, places = np.array(values)[known], rows[known]
        counts = np.bincount(places, minlength=len(layers))
        means = np.bincount(places, column, len(layers)) / np.where(counts, counts, np.nan)
        largest = np.full(len(layers), -math.inf)
        np.maximum.at(largest, places, column)
        for layer, mean, most in zip(layers, means, largest, strict=True):
            yield f"heads/{name}_mean/{layer:02d}", float(mean)
            yield f"heads/{name}_max/{layer:02d}", float(most)


def alarm_texts(snapshot: Snapshot) -> list[str]:
    """The sentences of the alarms of a snapshot."""
    return [str(text) for text in snapshot.tables["alarms"]["text"]] if "alarms" in snapshot.tables else []


def _require(package: str) -> None:
    """Refuse a tracker whose package is not installed."""
    try:
        import_module(package)
    except ImportError as error:
        raise MissingExtraError(f"to='{package}' needs {package}; pip install 'normscope[watch]'") from error


class TensorBoard:
    """Scalars, and texts of alarms; a resumed run hides the steps that it repeats.

    They go to a writer of the user's, to ``tensorboard`` inside the run folder, or where torch puts them.
    """

    def __init__(self, writer: Any = None, folder: Path | None = None, resume: bool = False) -> None:
        self.writer, self.folder, self.resume = writer, folder, resume
        self._own, self._about = writer is None, ""
        if self._own:
            tensorboard_writer()

    def begin(self, about: Mapping[str, Any]) -> None:
        """Remember what is watched; the log begins with the first snapshot."""
        self._about = ", ".join(f"{name} {value}" for name, value in about.items())

    def write(self, snapshots: Sequence[Snapshot]) -> None:
        """Log the scalars of each."""
        if self.writer is None:
            step = snapshots[0].step
            self.writer = tensorboard_writer()(
                None if self.folder is None else str(self.folder / FOLDER), purge_step=step if self.resume else None
            )
            self.writer.add_text(f"{PREFIX}/about", self._about, step)
        for snapshot in snapshots:
            for name, value in scalars_of(snapshot).items():
                self.writer.add_scalar(name, value, snapshot.step)
            for text in alarm_texts(snapshot):
                self.writer.add_text(f"{PREFIX}/alarm", text, snapshot.step)
        self.writer.flush()

    def close(self) -> None:
        """Write what is left; a writer of the user's stays open."""
        if self.writer is not None and self._own:
            self.writer.close()


class WeightsAndBiases:
    """Scalars over their own axis ``normscope/step``, in a run of the user's, the active one, or a new one.

    Logged on the thread of the training: a row that was committed at some later moment could close one that the user's own
    ``log(..., step=...)`` is still to fill.
    """

    def __init__(self, run: Any = None) -> None:
        _require("wandb")
        self.run = run
        self._own = False

    def begin(self, about: Mapping[str, Any]) -> None:
        """Use the run that is active, or start one."""
        import wandb

        if self.run is None:
            self.run = wandb.run
        if self.run is None:
            try:
                self.run, self._own = wandb.init(project=PREFIX), True
            except (wandb.Error, OSError) as error:
                raise InputError(
                    f"to='wandb' cannot start a run: {error}; log in with wandb login, or set WANDB_MODE=offline"
                ) from error
        self.run.config.update({PREFIX: dict(about)}, allow_val_change=True)
        self.run.define_metric(f"{PREFIX}/step")
        self.run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")

    def write(self, snapshot: Snapshot) -> None:
        """Log the scalars, and send the alarms."""
        self.run.log({f"{PREFIX}/step": snapshot.step, **scalars_of(snapshot)})
        for text in alarm_texts(snapshot):
            self.run.alert(title=f"{PREFIX} at step {snapshot.step}", text=text)

    def close(self) -> None:
        """Finish the run if it was started here."""
        if self._own:
            self.run.finish()


class MLflow:
    """Metrics and, for alarms, tags, in the active run or a new one."""

    def __init__(self) -> None:
        _require("mlflow")
        self._run, self._own = "", False
        self._client: Any = None

    def begin(self, about: Mapping[str, Any]) -> None:
        """Use the run that is active, or start one."""
        import mlflow
        from mlflow.entities import Param

        active = mlflow.active_run()
        try:
            self._own = active is None
            self._run = (active or mlflow.start_run()).info.run_id
            self._client = mlflow.MlflowClient()
            params = [Param(f"{PREFIX}.{name}", str(value)[:_LONGEST_PARAMETER]) for name, value in about.items()]
            known = self._client.get_run(self._run).data.params
            self._client.log_batch(self._run, params=[param for param in params if param.key not in known])
        except (mlflow.MlflowException, OSError) as error:
            hint = "set MLFLOW_TRACKING_URI to a server, or pip install mlflow for a local database"
            raise InputError(f"to='mlflow' cannot start a run: {hint} ({' '.join(str(error).split())[:200]})") from error

    def write(self, snapshots: Sequence[Snapshot]) -> None:
        """Log the metrics of all, with their steps."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, s.step) for s in snapshots for name, value in scalars_of(s).items()]
        for first in range(0, len(metrics), _LARGEST_BATCH):
            self._client.log_batch(self._run, metrics=metrics[first : first + _LARGEST_BATCH])
        for snapshot in snapshots:
            for text in alarm_texts(snapshot):
                self._client.set_tag(self._run, f"{PREFIX}.alarm.{snapshot.step}", text)

    def close(self) -> None:
        """End the run if it was started here."""
        if self._own:
            import mlflow

            active = mlflow.active_run()
            if active is not None and active.info.run_id == self._run:
                mlflow.end_run()
            else:
                self._client.set_terminated(self._run)
