"""Experiment trackers: TensorBoard, Weights & Biases and MLflow get a snapshot as scalars."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.errors import InputError, MissingExtraError
from normscope.results.tables import floats, plain_rows
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


def _named(snapshot: Snapshot) -> "Iterator[tuple[str, float]]":
    tables = snapshot.tables
    for row in _rows(tables, "steps"):
        yield from ((name, _number(value)) for name, value in row.items() if name not in _KEYS)
    for row in _rows(tables, "layers"):
        yield from ((f"layers/{name}/{row['layer']:02d}", _number(value)) for name, value in row.items() if name not in _KEYS)
    for row in _rows(tables, "sublayers"):
        place = f"{row['layer']:02d}_{row['sublayer']}"
        yield from ((f"sublayers/{name}/{place}", _number(value)) for name, value in row.items() if name not in _KEYS)
    if "heads" in tables:
        numbers = tables["heads"].drop(columns=["step", "head"]).groupby("layer")
        for how, frame in (("mean", numbers.mean()), ("max", numbers.max())):
            for name in frame:
                for layer, value in zip(map(int, frame.index), floats(frame[name]), strict=True):
                    yield f"heads/{name}_{how}/{layer:02d}", value
    yield from ((f"norms/gain/{row['norm']}", _number(row["gain"])) for row in _rows(tables, "norms"))
    yield from ((f"scales/mean/{row['name']}", _number(row["mean"])) for row in _rows(tables, "scales"))
    yield "faults", float(sum(row["count"] for row in _rows(tables, "faults")))
    yield "alarms", float(len(tables.get("alarms", ())))


def _rows(tables: "Mapping[str, pd.DataFrame]", name: str) -> list[dict[str, Any]]:
    return plain_rows(tables[name]) if name in tables else []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def alarm_texts(snapshot: Snapshot) -> list[str]:
    """The sentences of the alarms of a snapshot."""
    return [str(row["text"]) for row in _rows(snapshot.tables, "alarms")]


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
    """Scalars over their own axis ``normscope/step``, in a run of the user's, the active one, or a new one."""

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

    def write(self, snapshots: Sequence[Snapshot]) -> None:
        """Log the scalars of each, and send its alarms."""
        for snapshot in snapshots:
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
