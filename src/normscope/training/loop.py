"""The training loop: blocks of steps between which a run can be observed, stopped and resumed.

The data of a block is a function of the seed and of the step at which it begins, so that weights, the optimiser's averages and
the table of metrics are all the state there is.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Protocol, runtime_checkable

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.seeds import stream_seed
from normscope.core.threads import one_thread
from normscope.training.batches import Batches
from normscope.training.checkpoints import Checkpoint, Checkpoints
from normscope.training.parallel import Team, check_shares
from normscope.training.recipe import Recipe, precision_of
from normscope.training.steps import Stepper, optimiser_for, optimiser_state, restore_optimiser, stepper_for
from normscope.training.tasks.task import Advance, changed_data, silent
from normscope.transformer import Transformer, calibrating

_WORTH_THREADS = 1_000_000_000  # multiplications a step
_JUDGED = 20  # steps whose mean loss decides whether a run is stopped


@dataclass(frozen=True)
class Metrics:
    """A row of the table of metrics: what the steps of one block came to; ``tokens`` are those predicted so far."""

    step: int
    examples: int
    tokens: int
    seconds: float
    loss: float
    accuracy: float
    rate: float


@runtime_checkable
class StepObserver(Protocol):
    """Something that looks at the model after some of the steps, between which everything is as without it."""

    def due(self, step: int) -> bool:
        """Whether it is called after this step; the first is 1."""

    def step(self, loss: float, *, step: int, rate: float) -> None:
        """The step is over, and its gradients are still there."""


class StoppedError(Exception):
    """A run that ends before its last step, after a step that it names."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step


class DivergedError(StoppedError):
    """The loss, or a weight, became non-finite (NaN/Inf)."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(step, f"{what} is not a finite number at step {step:,}")


class NotLearningError(StoppedError):
    """The loss was above the recipe's ``stop_above`` after a third of the steps; ``step`` is where that was."""

    def __init__(self, step: int, loss: float, limit: float) -> None:
        super().__init__(step, f"the loss is {loss:.4g}, above stop_above={limit:g}, at step {step:,}")


class Training:
    """A run of a recipe on a device, alone or as one of a team of processes; ``progress`` is of preparing its data.

    With a ``checkpoint`` it resumes there, if the data are those of the checkpoint.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device | str = "cpu",
        team: Team | None = None,
        progress: Advance = silent,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.recipe, self.device, self.team = recipe, torch.device(device), team
        check_shares(recipe.batch, team.size if team else 1)
        identity = None if checkpoint is None else checkpoint.identity
        if team is not None:
            identity = team.from_first(identity)  # which alone has the checkpoint
        self.task = recipe.data.prepare(progress, recipe.batch, identity)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(recipe.seed, "weights"))
            # drawn on the CPU, so that every device starts from the same weights
            model = Transformer(recipe.model_for(self.task))
        if recipe.calibrate:
            with calibrating(model):
                self.task.run_some(model, recipe.batch, recipe.seed)
        self.model = model.to(self.device)
        self.optimiser = optimiser_for(self.model, recipe, self.device)
        self.metrics: list[Metrics] = []
        self.precision = precision_of(recipe.precision, self.device)
        if checkpoint is not None:
            self.restore(checkpoint)

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self.metrics[-1].step if self.metrics else 0

    @property
    def table(self) -> pd.DataFrame:
        """The metrics so far."""
        return pd.DataFrame([asdict(row) for row in self.metrics], columns=[f.name for f in fields(Metrics)])

    def run(
        self, checkpoints: Checkpoints | None = None, every: float = 60.0, observer: StepObserver | None = None
    ) -> Iterator[Metrics]:
        """Train to the end, a row of metrics at a time, with a checkpoint at most every so many seconds and at the end.

        All processes continue from where the first one is, and the first process alone is given checkpoints to write; each
        has its observer, if any has one.

        Raises:
            DivergedError: if the loss or a weight is no longer finite; the last checkpoint is from before that.
            NotLearningError: if the loss is above the recipe's ``stop_above`` after a third of the steps.
        """
        recipe, team = self.recipe, self.team
        if team is not None:
            self.restore(team.from_first(self.checkpoint.on_cpu))
        share, own = (math.ceil(recipe.batch / team.size), team.rows) if team else (recipe.batch, None)
        feed = self.task.feed(self.model, share, self.device, self.precision)
        size = max(1, min(self.task.block(self.device.type) // recipe.batch, recipe.epoch, recipe.steps))
        stepper = None
        last_saved = began = time.monotonic()
        before = self.metrics[-1].seconds if self.metrics else 0.0
        self.model.train()
        while self.step < recipe.steps:
            start = self.step
            steps = min(size, recipe.epoch - start % recipe.epoch, recipe.steps - start)
            batches = self.task.batches(feed, start, size, recipe.batch, recipe.seed, self.device, own)
            if stepper is None:
                stepper = stepper_for(self.model, feed, self.optimiser, recipe, self.precision, batches, team)
                began = time.monotonic()  # compiling is no training
            rates = self._rates(start, steps)
            rows = self._steps(stepper, {name: values[:steps] for name, values in batches.items()}, rates, start, observer)
            broken = ~rows[:, 0].isfinite()
            if broken.any():
                raise DivergedError(start + int(broken.nonzero()[0]) + 1, "the loss")
            if not self._finite():
                raise DivergedError(start + steps, "a weight")
            self.metrics.append(
                Metrics(
                    step=start + steps,
                    examples=(start + steps) * recipe.batch,
                    tokens=(self.metrics[-1].tokens if self.metrics else 0) + int(rows[:, 2].double().sum()),
                    seconds=before + time.monotonic() - began,
                    loss=float(rows[:, 0].double().mean()),
                    accuracy=float(rows[:, 1].double().sum() / rows[:, 2].double().sum()),
                    rate=rates[-1],
                )
            )
            if start < recipe.judged_at <= self.step < recipe.steps:
                self._judge(rows[: recipe.judged_at - start, 0])
            ended = self.step == recipe.steps
            if checkpoints is not None and (ended or time.monotonic() - last_saved >= every):
                checkpoints.save(self.checkpoint)
                last_saved = time.monotonic()
            yield self.metrics[-1]

    def _judge(self, last: Float[Tensor, " steps"]) -> None:
        """Stop a run whose mean loss before ``judged_at`` is above the limit; ``last`` are the last losses before it.

        Where they are few, blocks before count with their means, so that single batches decide nothing.
        """
        limit, losses = self.recipe.stop_above, last[-_JUDGED:].double().tolist()
        begins = [0, *(row.step for row in self.metrics)]
        for row, begin in reversed(list(zip(self.metrics[:-1], begins[:-2], strict=True))):
            losses += [row.loss] * min(row.step - begin, _JUDGED - len(losses))
        if limit is not None and (loss := sum(losses) / len(losses)) > limit:
            raise NotLearningError(self.recipe.judged_at, loss, limit)

    def _steps(
        self, stepper: Stepper, batches: Batches, rates: list[float], start: int, observer: StepObserver | None
    ) -> Float[Tensor, "steps 3"]:
        """The rows of all steps of a block, which pauses where the observer is due."""
        ends = [] if observer is None else [end for end in range(1, len(rates)) if observer.due(start + end)]
        rows = []
        for begin, end in pairwise([0, *ends, len(rates)]):
            with one_thread(self._small):
                rows.append(stepper.run({name: values[begin:end] for name, values in batches.items()}, rates[begin:end]))
            if observer is not None and observer.due(start + end):
                observer.step(float(rows[-1][-1, 0]), step=start + end, rate=rates[end - 1])
        return torch.cat(rows)

    @property
    def checkpoint(self) -> Checkpoint:
        """Everything that the rest of the run depends on."""
        weights = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        averages = optimiser_state(self.model, self.optimiser)
        rows = torch.tensor([list(asdict(row).values()) for row in self.metrics], dtype=torch.float64)
        return Checkpoint(self.step, {**weights, **averages, "metrics": rows, "data": self._data_digest})

    @property
    def _data_digest(self) -> Tensor:
        """What the task's data are known by, as bytes."""
        return torch.tensor(list(self.task.identity.encode()), dtype=torch.uint8)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume a run where a checkpoint left it.

        Raises:
            InputError: if the task's data are not those of the checkpoint.
        """
        if checkpoint.identity != self.task.identity:
            raise changed_data(self.task.summary)
        prefix = "model."
        weights = {name[len(prefix) :]: v for name, v in checkpoint.tensors.items() if name.startswith(prefix)}
        self.model.load_state_dict(weights)
        restore_optimiser(self.model, self.optimiser, checkpoint.tensors)
        rows = checkpoint.tensors["metrics"].tolist()
        self.metrics = [Metrics(int(step), int(examples), int(tokens), *others) for step, examples, tokens, *others in rows]

    def _finite(self) -> bool:
        """Whether all weights are finite numbers."""
        largest = torch._foreach_norm([parameter.detach() for parameter in self.model.parameters()], math.inf)
        return bool(torch.stack(largest).isfinite().all())

    @property
    def _small(self) -> bool:
        """Whether a step is too little work to share among threads."""
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        return weights * self.recipe.batch * self.task.longest < _WORTH_THREADS

    def _rates(self, start: int, steps: int) -> list[float]:
        """The learning rates of the steps of a block (0 is the run's first), which lies within one epoch."""
        recipe, halvings = self.recipe, 0
        if recipe.schedule == "plateau":
            halvings = plateaus(epoch_losses(self.metrics, recipe.epoch)[: start // recipe.epoch], recipe.patience)
        return [recipe.rate_at(step) * 0.5**halvings for step in range(start, start + steps)]


def plateaus(losses: Sequence[float], patience: int) -> int:
    """How often a loss had not improved on the best before it for ``patience`` epochs in a row."""
    halvings, best, waited = 0, math.inf, 0
    for loss in losses:
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        if waited == patience:
            halvings, waited = halvings + 1, 0
    return halvings


def epoch_losses(metrics: Sequence[Metrics], epoch: int) -> list[float]:
    """The mean loss of each epoch of so many steps."""
    steps_and_losses: dict[int, list[tuple[int, float]]] = {}
    before = 0
    for row in metrics:
        steps_and_losses.setdefault(before // epoch, []).append((row.step - before, row.loss))
        before = row.step
    return [sum(n * loss for n, loss in rows) / sum(n for n, _ in rows) for rows in steps_and_losses.values()]
