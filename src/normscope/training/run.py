"""A training that ends in a run folder: taken up where it was left, tested, and written whole."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from normscope.runs import RunFolder, new_run
from normscope.training.checkpoints import Checkpoints
from normscope.training.evaluation import Evaluation, evaluate
from normscope.training.log import FOLDER
from normscope.training.loop import DivergedError, Training
from normscope.training.recipe import Recipe
from normscope.transformer import save_model


@dataclass(frozen=True)
class TrainingRun:
    """A recipe on a device, and the folder in which it is to end."""

    recipe: Recipe
    device: str
    folder: Path

    @property
    def configuration(self) -> dict[str, Any]:
        """What the run is known by: recipe, model with its scheme in full, and the kind of device."""
        return training_record(self.recipe, self.device)

    @property
    def checkpoints(self) -> Checkpoints:
        """Those of this run, beside its folder."""
        return Checkpoints.of(self.folder, self.configuration)

    def take_up(self, training: Training) -> list[str]:
        """Bring a training to the last sound checkpoint, if there is one; lines that say so."""
        checkpoint, said = self.checkpoints.load(training.device)
        if checkpoint is not None:
            training.restore(checkpoint)
            return [*said, f"going on from step {checkpoint.step:,} of {training.recipe.steps:,}"]
        return [*said, "no checkpoint can be used: starting from the beginning"] if said else []

    def write(
        self,
        training: Training,
        evaluation: Evaluation,
        started: datetime,
        *,
        overwrite: bool = False,
        report: Callable[[RunFolder], None] = lambda run: None,
    ) -> None:
        """Write the folder: the model, metrics, accuracies and the log; ``report`` may add to it before it is complete."""
        recipe, log = self.recipe, self.checkpoints.folder / FOLDER
        about = {"recipe": recipe.values, "accuracy": evaluation.accuracy.to_dict("records")}
        with new_run(
            self.folder, "train", self.configuration, seed=recipe.seed, device=self.device, overwrite=overwrite, started=started
        ) as run:
            save_model(run.path, training.model, about)
            run.write_table("metrics", training.table)
            run.write_table("accuracy", evaluation.accuracy)
            run.write_table("positions", evaluation.positions)
            if log.is_dir():
                shutil.copytree(log, run.path / FOLDER)
            report(run)

    def write_diverged(self, training: Training, error: DivergedError, started: datetime) -> None:
        """Write the folder of a run that left the finite numbers: metrics up to there, where it was, and no model."""
        seed = self.recipe.seed
        with new_run(self.folder, "train", self.configuration, seed=seed, device=self.device, started=started) as run:
            run.write_table("metrics", training.table)
            run.write_table("divergence", pd.DataFrame([{"step": error.step, "reason": str(error)}]))


def training_record(recipe: Recipe, device: str) -> dict[str, Any]:
    """What a training is known by, wherever it ends up."""
    return {**recipe.record, "device": device.partition(":")[0]}


def final_evaluation(training: Training, progress: Callable[[int], None] = lambda done: None) -> Evaluation:
    """The trained model on every split of its recipe's task."""
    recipe = training.recipe
    return evaluate(
        training.model.eval(),
        recipe.task,
        list(recipe.task.splits),
        recipe.test_examples,
        seed=recipe.seed,
        offsets=recipe.offsets,
        progress=progress,
    )
