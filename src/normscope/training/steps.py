"""Training steps: many at a time, one by one, alone or with other processes, or as a graph that a GPU replays by itself.

On a GPU one compiled block serves all layers of the same structure, and the readout and the loss are another compiled piece, so
that compiling takes as long at depth 48 as at depth 12. The pieces are called by the step alone: the model itself stays eager,
and hooks on its modules see every other forward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from normscope.core.cross_entropy import cross_entropy
from normscope.training.batches import Batches, Feed, one_batch
from normscope.training.parallel import Team
from normscope.training.recipe import Recipe
from normscope.transformer import Transformer
from normscope.transformer.model import Readout, Run, call

_WARMUPS = 3
_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,  # the fastest on Hopper
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@runtime_checkable
class Stepper(Protocol):
    """Something that trains on several batches in a row."""

    def run(self, batches: Batches, rates: Sequence[float]) -> Tensor:
        """A step for each batch and rate: loss, right characters and all characters of each, (steps, 3), on the CPU."""


def optimiser_for(model: Transformer, recipe: Recipe, device: torch.device) -> torch.optim.AdamW:
    """AdamW; the decay pulls at matrices alone, not at gains, biases and frequencies."""
    matrices = {id(weight) for module in model.modules_with_matrices() for weight, _ in module.matrices()}
    decayed = [p for p in model.parameters() if id(p) in matrices]
    others = [p for p in model.parameters() if id(p) not in matrices]
    captured = device.type == "cuda"
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=torch.tensor(recipe.rate, device=device) if captured else recipe.rate,
        betas=(0.9, recipe.beta2),
        fused=True,
        capturable=captured,
    )


def optimiser_state(model: Transformer, optimiser: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimiser's averages by the names of their parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{what}.{names[id(parameter)]}": value for parameter, state in optimiser.state.items() for what, value in state.items()
    }


def restore_optimiser(model: Transformer, optimiser: torch.optim.AdamW, saved: dict[str, Tensor]) -> None:
    """Put the averages of ``optimiser_state`` back, in place where they exist already."""
    for name, parameter in model.named_parameters():
        state: dict[str, Any] = optimiser.state[parameter]
        for what in ("step", "exp_avg", "exp_avg_sq"):
            value = saved.get(f"{what}.{name}")
            if what in state:
                state[what].zero_() if value is None else state[what].copy_(value)
            elif value is not None:
                state[what] = value.to(parameter.device).clone()


def next_token_loss(
    readout: Readout,
    states: Float[Tensor, "positions dim"],
    unembedding: Float[Tensor, "last vocabulary"],
    targets: Int[Tensor, " positions"],
    ignored: int,
    characters: Float[Tensor, ""] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, " 3"]]:
    """The loss of the last hidden states, and (loss, right, all); in float32 whatever the precision of the logits."""
    losses, right = cross_entropy(*readout.before_logits(states, unembedding), targets, ignored)
    wanted = (targets != ignored).sum()
    loss = losses.sum() / (wanted if characters is None else characters)
    return loss, torch.stack((loss.detach(), right.sum(), wanted))


@dataclass
class _Step:
    """One step: the loss of a batch, its gradient, the optimiser, and the norms of the weights.

    ``run`` calls the embedding and the blocks, and ``loss`` the readout and the loss, as they are or compiled.
    """

    model: Transformer
    feed: Feed
    optimiser: torch.optim.AdamW
    recipe: Recipe
    precision: torch.dtype
    run: Run = call
    loss: Callable[..., tuple[Tensor, Tensor]] = next_token_loss

    @property
    def compiled(self) -> "_Step":
        """The same with its two pieces compiled; each is compiled once for every structure of blocks."""
        compiled = partial(torch.compile, fullgraph=True, dynamic=False)
        return replace(self, run=compiled(call), loss=compiled(next_token_loss))

    def measures(self, batch: Batches, characters: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss, mean cross-entropy of the characters to predict, and (loss, right, all).

        Given a number of ``characters``, the loss is the sum divided by it, whatever their number in this batch.
        """
        targets, model = batch["targets"].flatten(), self.model
        with torch.autocast(targets.device.type, self.precision, enabled=self.precision != torch.float32):
            states = self.feed.logits(partial(model.states, run=self.run), batch)
            return self.loss(model.readout, states, model.unembedding, targets, self.feed.ignored, characters)

    def update(self) -> None:
        """Follow the gradient."""
        if self.recipe.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip, foreach=True)
        self.optimiser.step()
        self.model.renormalise()


class EagerStepper:
    """Step by step, for CPUs."""

    def __init__(self, step: _Step) -> None:
        self.step = step
        self.measures: Callable[..., tuple[Tensor, Tensor]] = step.measures

    def run(self, batches: Batches, rates: Sequence[float]) -> Tensor:
        """A step for each batch."""
        return torch.stack([self.once(one_batch(batches, index), rate) for index, rate in enumerate(rates)])

    def once(self, batch: Batches, rate: float, characters: Tensor | None = None) -> Tensor:
        """A step."""
        step = self.step
        for group in step.optimiser.param_groups:
            group["lr"] = rate
        step.optimiser.zero_grad()
        loss, row = self.measures(step.feed.trimmed(batch), characters)
        loss.backward()  # type: ignore[no-untyped-call]
        step.update()
        return row


class SharedStepper(EagerStepper):
    """Step by step on a share of every batch; gradients and measures are those of all shares together."""

    def __init__(self, step: _Step, team: Team) -> None:
        super().__init__(step)
        self.team = team
        self.measures = DistributedDataParallel(_Measures(step))

    def run(self, batches: Batches, rates: Sequence[float]) -> Tensor:
        """A step for each batch; DistributedDataParallel takes the mean over processes of what should be their sum."""
        team = self.team
        characters = team.sum((batches["targets"] != self.step.feed.ignored).flatten(1).sum(1)) / team.size
        steps = zip(rates, characters, strict=True)
        rows = torch.stack([self.once(one_batch(batches, index), *step) for index, step in enumerate(steps)])
        return team.sum(rows).cpu() / torch.tensor([team.size, 1, 1])


class _Measures(nn.Module):
    """The measures of a step as a module, which is what gradients can be shared of; its buffers never change and stay out."""

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self.step, self.weights = step, nn.ParameterList(step.model.parameters())

    def forward(self, batch: Batches, characters: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and (loss, right, all)."""
        return self.step.measures(batch, characters)


class CapturedStepper:
    """The whole step, data to weights, as one graph of fused kernels; the host only says go."""

    def __init__(self, step: _Step, batches: Batches) -> None:
        self.step = step.compiled
        self.batches = {name: values.clone() for name, values in batches.items()}
        steps, device = len(batches["targets"]), batches["targets"].device
        self.index = torch.zeros(1, dtype=torch.long, device=device)
        self.rates = torch.zeros(steps, device=device)
        self.rows = torch.zeros(steps, 3, device=device)
        # streams and graphs belong to the current GPU, which need not be this one
        with torch.cuda.device(device), sdpa_kernel(_KERNELS, set_priority=True):
            self.graph = self._capture()

    def run(self, batches: Batches, rates: Sequence[float]) -> Tensor:
        """Replays of the graph, one for each batch."""
        for name, values in batches.items():
            self.batches[name][: len(rates)].copy_(values)
        self.rates[: len(rates)].copy_(torch.tensor(rates))
        self.index.zero_()
        with torch.cuda.device(self.index.device):
            for _ in rates:
                self.graph.replay()
        return self.rows[: len(rates)].cpu()

    def _once(self) -> None:
        step = self.step
        batch = {name: values.index_select(0, self.index).squeeze(0) for name, values in self.batches.items()}
        rate = self.rates.index_select(0, self.index).squeeze(0)
        for group in step.optimiser.param_groups:
            group["lr"].copy_(rate)
        loss, row = step.measures(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        step.update()
        self.rows.index_copy_(0, self.index, row[None])
        self.index.add_(1).remainder_(len(self.rows))

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Warm up, capture, and put everything back as it was."""
        step = self.step
        weights = {name: value.clone() for name, value in step.model.state_dict().items()}
        averages = {name: value.clone() for name, value in optimiser_state(step.model, step.optimiser).items()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                step.optimiser.zero_grad(set_to_none=True)
                self._once()
        torch.cuda.current_stream().wait_stream(stream)
        step.optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._once()
        step.model.load_state_dict(weights)
        restore_optimiser(step.model, step.optimiser, averages)
        return graph


def stepper_for(
    model: Transformer,
    feed: Feed,
    optimiser: torch.optim.AdamW,
    recipe: Recipe,
    precision: torch.dtype,
    batches: Batches,
    team: Team | None = None,
) -> Stepper:
    """Captured on a GPU, eager on a CPU or with others; ``batches`` are as many as will come at a time."""
    step = _Step(model, feed, optimiser, recipe, precision)
    if team is not None:
        return SharedStepper(step, team)
    return CapturedStepper(step, batches) if batches["targets"].is_cuda else EagerStepper(step)
