"""Trainings in a sweep."""

import gc
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from normscope.errors import InputError
from normscope.runs import RunFolder, fingerprint
from normscope.sweeps.job import OnePiece, Outcome
from normscope.sweeps.state import Report
from normscope.training import DivergedError, Recipe, Training, TrainingRun, read_recipe
from normscope.training.evaluation import evaluate
from normscope.training.run import final_evaluation, training_record

BASES = ("preset", "recipe")
FIELDS = (*BASES, *(f.name for f in fields(Recipe)))
_NO_SHAPE = ("seed", "rate", "schedule", "warmup", "patience", "epoch", "weight_decay", "beta2", "calibrate")
_TIMED_STEPS = 3
_TIMED_EXAMPLES = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True)
class TrainJob(OnePiece):
    """A recipe on a device, with a checkpoint at most every so many seconds."""

    recipe: Recipe
    base: str
    device: str
    every: float = 60.0

    @classmethod
    def of(cls, values: Mapping[str, Any], device: str, every: float) -> "TrainJob":
        """The job of a recipe's fields, in place of those of its ``preset`` or of the file ``recipe``."""
        given = [values[name] for name in BASES if name in values]
        if len(given) != 1 or not isinstance(given[0], str):
            raise InputError('a training needs either preset = "tiny" (or another) or recipe = "FILE.toml"')
        changes = {name: value for name, value in values.items() if name not in BASES}
        return cls(read_recipe(given[0], changes), given[0], device, every)

    @property
    def record(self) -> dict[str, Any]:
        """Recipe, model and kind of device."""
        return training_record(self.recipe, self.device)

    @property
    def values(self) -> dict[str, Any]:
        """The recipe's, and its scheme by name wherever its file lies."""
        return {**self.recipe.values, "scheme": self.recipe.found_scheme.name, **dict.fromkeys(BASES, self.base)}

    @property
    def shape(self) -> str:
        """Everything but the fields that a step's time does not hang on."""
        return fingerprint({name: value for name, value in self.record["recipe"].items() if name not in _NO_SHAPE})

    def finish(self, folder: Path, report: Report) -> None:
        """Train from the last checkpoint on, test, and write the folder; a divergence is a result too."""
        _start_afresh(self.device)
        started = datetime.now(UTC)
        run = TrainingRun(self.recipe, self.device, folder)
        training, steps = Training(self.recipe, self.device), self.recipe.steps
        with run.checkpoints.alone():
            run.take_up(training)
            report(training.step, steps, "training")
            try:
                for row in training.run(run.checkpoints, self.every):
                    report(row.step, steps, f"loss {row.loss:.3f} accuracy {100 * row.accuracy:.1f}%")
            except DivergedError as error:
                run.write_diverged(training, error, started)
            else:
                run.write(
                    training, final_evaluation(training, lambda done: report(steps, steps, f"testing, {done:,}")), started
                )
            run.checkpoints.discard()

    def seconds(self) -> float:
        """The time of a few steps and of a small test, as many times as the run has them; without compiling."""
        _start_afresh(self.device)
        recipe = replace(self.recipe, examples=_TIMED_STEPS * self.recipe.batch, epoch=1, rate=0.0, calibrate=False)
        training = Training(recipe, self.device)
        times = [row.seconds for row in training.run()]
        step = min(later - before for before, later in pairwise(times))
        started = time.monotonic()
        count = min(_TIMED_EXAMPLES[training.device.type], recipe.test_examples)
        splits = list(recipe.task.splits)
        evaluate(training.model.eval(), recipe.task, splits, count, offsets=recipe.offsets, worked=0)
        return step * self.recipe.steps + (time.monotonic() - started) * recipe.test_examples / count

    def outcome(self, run: RunFolder) -> Outcome:
        """The last block of training, and the accuracy on every split; of a divergence, its step."""
        metrics = run.table("metrics")
        last = metrics.iloc[-1] if len(metrics) else pd.Series({"step": 0, "loss": math.nan, "accuracy": math.nan})
        numbers = {"steps": int(last["step"]), "loss": float(last["loss"]), "accuracy": float(last["accuracy"])}
        curves, note = metrics[["step", "loss", "accuracy"]], None
        if "divergence" in run.tables:
            where = run.table("divergence").iloc[0]
            numbers["steps"], note = int(where["step"]), str(where["reason"])
        else:
            tests = run.table("accuracy")
            numbers |= {f"accuracy_{split}": share for split, share in zip(tests["split"], tests["accuracy"], strict=True)}
        return Outcome(numbers, curves, note)


def _start_afresh(device: str) -> None:
    """Forget the models that a process trained before: a compiler has a limit for one function, and a GPU for its memory."""
    if device.startswith("cuda"):
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
