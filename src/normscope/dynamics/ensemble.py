"""Ensembles: many independent starts and random weights, all schemes on the same ones, in chunks that can be resumed.

Every chunk has its own seed, so a chunk's numbers do not depend on which chunks came before it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from normscope.core import Attention, Mixing
from normscope.core.norms import mean_cosine, theory_norm
from normscope.core.seeds import stream_seed
from normscope.dynamics.integrators import (
    METHODS,
    Advance,
    Outputs,
    Stage,
    advance,
    advance_layer,
    integrate,
    stages,
    time_grid,
)
from normscope.dynamics.motion import check_schemes, mixing_of
from normscope.dynamics.starts import make_start
from normscope.dynamics.weights import check_heads, random_gate, random_weights
from normscope.errors import make, require_known, validate
from normscope.machine.memory import require_steps
from normscope.schemes import Scheme
from normscope.schemes.update import Update

Several = Annotated[int, Field(ge=2)]
Cosines = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Ensemble:
    """The setting of an ensemble: everything but the schemes, the number of runs and the seed.

    Attributes:
        tokens: n.
        dim: d.
        heads: number of heads, each of width d/heads.
        beta: the factor on the scores.
        weights: ``kaiming``, N(0, gain²/fan_in), or ``gaussian``, N(0, scale²).
        gain: gain of Kaiming W_Q, W_K and W_V.
        output_gain: gain of Kaiming W_O, the output matrix.
        scale: standard deviation of gaussian weights.
        redraw: draw new weights after this much time; 0 keeps them.
        time: the last time; the first is 0.
        step: length of an integrator's step.
        solver: ``midpoint`` or ``euler`` for the flow, ``layers`` for layers of length ``step``.
        samples: number of times, equally spaced from 0, at which the mean cosine is taken.
    """

    tokens: Several = 128
    dim: PositiveInt = 512
    heads: PositiveInt = 1
    beta: float = math.sqrt(512)
    weights: Literal["kaiming", "gaussian"] = "kaiming"
    gain: PositiveFloat = 2**0.5
    output_gain: PositiveFloat = 1.0
    scale: PositiveFloat = 0.02
    redraw: NonNegativeFloat = 0.0
    time: PositiveFloat = 10.0
    step: PositiveFloat = 0.1
    solver: Literal["euler", "midpoint", "layers"] = "midpoint"
    samples: Several = 101

    def __post_init__(self) -> None:
        validate(self)
        check_heads(self.dim, self.heads)
        require_steps(self.time / self.step, f"time={self.time:g} with step={self.step:g}")
        if self.redraw:
            require_steps(self.time / self.redraw, f"time={self.time:g} with redraw={self.redraw:g}")

    @property
    def times(self) -> list[float]:
        """When the mean cosine is taken."""
        return [self.time * i / (self.samples - 1) for i in range(self.samples)]

    @property
    def evaluations(self) -> int:
        """How often a run evaluates A(X)."""
        steps = sum(1 for _ in time_grid(self.times, self.redraws, self.step))
        return steps * len(METHODS[self.solver])

    @property
    def most_evaluations(self) -> float:
        """How often a run evaluates A(X) at most, without listing the steps."""
        steps = self.time / self.step + self.samples + (self.time / self.redraw if self.redraw else 0)
        return steps * len(METHODS[self.solver])

    @property
    def redraws(self) -> list[float]:
        """The times at which new weights are drawn, after 0."""
        return [i * self.redraw for i in range(1, math.ceil(self.time / self.redraw - 1e-9))] if self.redraw else []


# What the published curves are (docs/results/dynamics.md): layers of length 0.05, and a fan-in of 3d for W_Q, W_K and W_V.
_PUBLISHED = Ensemble(gain=math.sqrt(2 / 3), output_gain=math.sqrt(2), solver="layers", step=0.05)
PANELS: dict[str, Ensemble] = {
    "4": _PUBLISHED,
    "5a": _PUBLISHED,
    "5b": replace(_PUBLISHED, beta=4 * math.sqrt(512)),
    "5c": replace(_PUBLISHED, redraw=1.0, time=20.0),
    "5d": replace(_PUBLISHED, dim=16, beta=1.0, time=20.0),
    "5e": replace(_PUBLISHED, dim=128, beta=math.sqrt(128)),
    "5f": replace(_PUBLISHED, dim=128, beta=4 * math.sqrt(128), time=20.0),
    "5g": replace(_PUBLISHED, dim=768, heads=12, beta=math.sqrt(64), weights="gaussian", time=50.0),
}


def setting_of(panel: str | None, given: Mapping[str, Any]) -> Ensemble:
    """The panel's setting, or the default one with β = √(d/heads), with what is given in its place."""
    if panel is not None:
        require_known("panel", panel, PANELS)
        given = asdict(PANELS[panel]) | dict(given)
    dim, heads = given.get("dim", Ensemble.dim), given.get("heads", Ensemble.heads)
    beta = {"beta": math.sqrt(dim / heads)} if dim > 0 and heads > 0 else {}
    return make(Ensemble, {**beta, **given}, "an ensemble")


@dataclass(frozen=True)
class DrawingStage(Stage):
    """A stage for all schemes at once, with its tensors on the device.

    Attributes:
        draws: whether new weights are drawn before it.
    """

    draws: bool = False


def advance_states(
    first: Tensor, total: Tensor, x: Tensor, outputs: Outputs, now: Stage, following: Stage
) -> tuple[Tensor, Tensor, Outputs, None]:
    """``advance`` without the velocity, which nobody asks for: a compiler need not store it."""
    return (*advance(first, total, x, outputs, now, following)[:3], None)


@dataclass(frozen=True)
class Kernels:
    """The parts of a chunk's loop that touch every number: as they are, or compiled for a GPU."""

    advance: Advance = advance_states
    advance_layer: Advance = advance_layer
    mean_cosine: Callable[[Tensor, bool], Tensor] = mean_cosine

    @classmethod
    def compiled(cls) -> "Kernels":
        """The same functions through torch.compile, which makes one pass over the data out of a dozen."""
        return cls(
            torch.compile(advance_states, dynamic=False),
            torch.compile(advance_layer, dynamic=False),
            torch.compile(mean_cosine, dynamic=False),
        )


PLAIN = Kernels()


def run_chunk(
    setting: Ensemble,
    schemes: Sequence[Scheme],
    runs: int,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    precision: torch.dtype = torch.float32,
    kernels: Kernels = PLAIN,
) -> Cosines:
    """Mean cosines of shape (runs, schemes, samples) for one chunk: its starts and weights come from ``seed`` alone.

    Norms whose squares are not representable come out as NaN the first time; a chunk with NaN is computed again without that
    shortcut. What is NaN then became non-finite.
    """
    check_schemes(schemes, setting.time, setting.times, flow=True)
    cosines = _chunk(setting, schemes, runs, seed, device, precision, kernels, quick=True)
    return (
        cosines if np.isfinite(cosines).all() else _chunk(setting, schemes, runs, seed, device, precision, PLAIN, quick=False)
    )


def _chunk(
    setting: Ensemble,
    schemes: Sequence[Scheme],
    runs: int,
    seed: int,
    device: torch.device | str,
    precision: torch.dtype,
    kernels: Kernels,
    quick: bool,
) -> Cosines:
    generator = torch.Generator(device).manual_seed(seed)
    start = make_start(
        "uniform", setting.tokens, setting.dim, generator=generator, dtype=torch.float32, device=device, runs=(runs, 1)
    )
    gates = torch.Generator(device).manual_seed(stream_seed(seed, "gate"))
    planned = plan(setting, schemes, device, quick)
    inside = {mixing for stage in planned for mixing in stage.inside}
    attention: Attention | None = None

    def evaluate(stage: DrawingStage, reads: Outputs) -> Outputs:
        nonlocal attention
        if attention is None or stage.draws:
            attention = _draw_attention(setting, inside, runs, generator, gates, precision)
        return (_attend(attention, reads[0].to(precision), stage.inside),)

    x = start.expand(runs, len(schemes), setting.tokens, setting.dim)
    advance = kernels.advance_layer if setting.solver == "layers" else kernels.advance
    path = integrate(x, planned, evaluate, advance)
    cosines = [kernels.mean_cosine(state, quick) for stage, state, _ in path if stage.wanted]
    return torch.stack(cosines, -1).to("cpu", torch.float32).numpy()


def plan(setting: Ensemble, schemes: Sequence[Scheme], device: torch.device | str, quick: bool = False) -> list[DrawingStage]:
    """Every stage of every step, with its numbers already on the device; ``quick`` is that of the norms."""
    breaks = {stage.end(setting.time) for scheme in schemes for stage in scheme.stages if stage.then}
    norms = tuple(dict.fromkeys(theory_norm(stage.norm, quick) for scheme in schemes for stage in scheme.stages))

    def slots(t: float, within: float) -> tuple[tuple[Update, ...], tuple[Mixing, ...]]:
        holding = [(stage, theory_norm(stage.norm, quick)) for stage in (scheme.at(within, setting.time) for scheme in schemes)]
        updates = [Update.of(stage.attention, stage.place(t, setting.time), norm) for stage, norm in holding]
        inside = tuple(mixing_of(stage, stage.attention, norm) for stage, norm in holding)
        return (Update.stacked(updates, norms, "cpu", torch.float32),), inside

    planned = stages(setting.times, sorted({*setting.redraws, *breaks}), setting.step, METHODS[setting.solver], slots)
    return _moved(
        [
            DrawingStage(**vars(stage), draws=stage.first and any(math.isclose(stage.t, redraw) for redraw in setting.redraws))
            for stage in planned
        ],
        device,
    )


def chunk_seeds(seed: int, chunks: int) -> list[int]:
    """A seed for each chunk, from the ensemble's."""
    return [int(s.generate_state(1, np.uint64)[0] >> 1) for s in np.random.SeedSequence(seed).spawn(chunks)]


def summarise(setting: Ensemble, schemes: Sequence[Scheme], cosines: Cosines) -> pd.DataFrame:
    """Mean and 90 % band over runs: a row for each scheme and time, ``mean``, ``low`` (5 %), ``high`` (95 %), ``stderr``.

    Runs that became non-finite (NaN/Inf) are left out from there on; ``runs`` is the number of runs in a row.
    """
    rows = []
    for i, scheme in enumerate(schemes):
        for t, values in zip(setting.times, cosines[:, i].astype(np.float64).T, strict=True):
            finite = values[np.isfinite(values)]
            low, high = np.quantile(finite, [0.05, 0.95]) if len(finite) else (math.nan, math.nan)
            stderr = finite.std(ddof=1) / math.sqrt(len(finite)) if len(finite) > 1 else math.nan
            mean = finite.mean() if len(finite) else math.nan
            rows.append((scheme.name, t, mean, low, high, stderr, len(finite)))
    return pd.DataFrame(rows, columns=["scheme", "time", "mean", "low", "high", "stderr", "runs"])


def not_finite(setting: Ensemble, schemes: Sequence[Scheme], cosines: Cosines) -> list[str]:
    """A line for each scheme with runs that became non-finite (NaN/Inf): how many, and the first run and time."""
    lines = []
    for i, scheme in enumerate(schemes):
        broken = ~np.isfinite(cosines[:, i])
        if broken.any():
            sample = int(broken.any(0).argmax())
            lines.append(
                f"scheme '{scheme.name}' became non-finite (NaN/Inf) in {int(broken.any(1).sum())} of {len(cosines)} runs, "
                f"first by time {setting.times[sample]:g} in run {int(broken[:, sample].argmax())}"
            )
    return lines


def _moved(planned: list[DrawingStage], device: torch.device | str) -> list[DrawingStage]:
    """The stages with their tensors on the device, sent in one copy per kind of number."""
    updates = [stage.updates[0].tensors for stage in planned]
    names = {name for tensors in updates for name in tensors}  # ``tangent`` is there only where a scheme has it
    nowhere = torch.zeros_like(updates[0]["step"], dtype=torch.bool)
    sent = {name: torch.stack([tensors.get(name, nowhere) for tensors in updates]).to(device) for name in sorted(names)}
    weights = torch.tensor([(stage.to_next, stage.to_end or 0.0) for stage in planned]).to(device)
    return [
        replace(
            stage,
            updates=(stage.updates[0].with_tensors({name: values[i] for name, values in sent.items()}),),
            to_next=weights[i, 0],
            to_end=None if stage.to_end is None else weights[i, 1],
        )
        for i, stage in enumerate(planned)
    ]


def _draw_attention(
    setting: Ensemble,
    inside: Collection[Mixing],
    runs: int,
    generator: torch.Generator,
    gates: torch.Generator,
    precision: torch.dtype,
) -> Attention:
    """New weights; those of a gate only where a scheme has one."""
    kind, shape = setting.weights, (setting.dim, setting.heads)
    sizes: dict[str, Any] = {"gain": setting.gain, "scale": setting.scale, "dtype": precision, "runs": (runs,)}
    weights = random_weights(kind, *shape, generator, output_gain=setting.output_gain, **sizes)
    if all(mixing.foldable for mixing in inside):
        weights = weights.folded()
    if any(mixing.gated for mixing in inside):
        weights = replace(weights, W_G=random_gate(kind, *shape, gates, **sizes))
    return Attention(setting.beta, weights)


def _attend(attention: Attention, x: Tensor, inside: Sequence[Mixing]) -> Tensor:
    """A(X) of (runs, schemes, tokens, dim); schemes that differ inside attention go separately."""
    kinds = list(dict.fromkeys(inside))
    if len(kinds) == 1:
        return attention(x, kinds[0])
    out = torch.empty_like(x)
    for kind in kinds:
        chosen = [i for i, own in enumerate(inside) if own == kind]
        out[:, chosen] = attention(x[:, chosen], kind)
    return out
