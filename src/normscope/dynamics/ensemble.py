"""Ensembles: many independent starts and random weights, all schemes on the same ones, in chunks that can be resumed.

Every chunk has its own seed, so a chunk's numbers do not depend on which chunks came before it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from normscope.core import Attention, steady_backend
from normscope.dynamics.integrators import time_grid
from normscope.dynamics.measures import mean_cosine
from normscope.dynamics.motion import check_schemes
from normscope.dynamics.starts import make_start
from normscope.dynamics.weights import WEIGHTS, random_weights
from normscope.errors import InputError, did_you_mean
from normscope.schemes import Scheme
from normscope.schemes.update import Coefficients, coefficients, read, settle, stack, velocity, written

_MOST_STEPS = 1_000_000
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
        output_gain: gain of Kaiming W_O, the output matrix (docs/results/dynamics.md says why it differs).
        scale: standard deviation of gaussian weights.
        redraw: draw new weights after this much time; 0 keeps them.
        time: the last time; the first is 0.
        step: length of an integrator's step.
        solver: ``midpoint`` or ``euler``.
        samples: number of times, equally spaced from 0, at which the mean cosine is taken.
    """

    tokens: int = 128
    dim: int = 512
    heads: int = 1
    beta: float = math.sqrt(512)
    weights: str = "kaiming"
    gain: float = math.sqrt(2)
    output_gain: float = 1.0
    scale: float = 0.02
    redraw: float = 0.0
    time: float = 10.0
    step: float = 0.1
    solver: str = "midpoint"
    samples: int = 101

    def __post_init__(self) -> None:
        for name in ("tokens", "dim", "heads", "samples"):
            if getattr(self, name) < (2 if name in ("tokens", "samples") else 1):
                raise InputError(f"{name} is too small: {getattr(self, name)}")
        if self.dim % self.heads:
            raise InputError(f"{self.dim} dimensions cannot be shared among {self.heads} heads")
        for name in ("beta", "gain", "output_gain", "scale", "time", "step"):
            value = getattr(self, name)
            if not math.isfinite(value) or (name != "beta" and value <= 0):
                raise InputError(f"{name} is a {'finite' if name == 'beta' else 'positive'} number, not {value}")
        if not (math.isfinite(self.redraw) and self.redraw >= 0):
            raise InputError(f"redraw is 0 or a positive time, not {self.redraw}")
        if self.weights not in WEIGHTS:
            raise InputError(
                f"weights are one of {', '.join(WEIGHTS)}, not '{self.weights}'{did_you_mean(self.weights, WEIGHTS)}"
            )
        if self.time / self.step > _MOST_STEPS or (self.redraw and self.time / self.redraw > _MOST_STEPS):
            raise InputError(f"more than {_MOST_STEPS:,} steps or redraws: choose a longer step or redraw, or a shorter time")
        if self.solver not in STAGES:
            raise InputError(f"an ensemble's solver is one of {', '.join(STAGES)}, not '{self.solver}'")

    @property
    def times(self) -> list[float]:
        """When the mean cosine is taken."""
        return [self.time * i / (self.samples - 1) for i in range(self.samples)]

    @property
    def evaluations(self) -> int:
        """How often a run evaluates A(X)."""
        steps = sum(1 for _ in time_grid(self.times, self.redraws, self.step))
        return steps * len(STAGES[self.solver])

    @property
    def redraws(self) -> list[float]:
        """The times at which new weights are drawn, after 0."""
        return [i * self.redraw for i in range(1, math.ceil(self.time / self.redraw - 1e-9))] if self.redraw else []

    def flops(self, schemes: int) -> int:
        """Matrix FLOP of one run as the model is written: x W_Q, x W_K, x W_V, q kᵀ, attention · v, · W_O."""
        n, d = self.tokens, self.dim
        return self.evaluations * schemes * (4 * 2 * n * d * d + 2 * 2 * n * n * d)


# Methods whose every stage starts from the step's first state and uses the latest velocity only: (c_i, a_i) for each stage.
STAGES: dict[str, tuple[tuple[float, float], ...]] = {
    "euler": ((0.0, 1.0),),
    "midpoint": ((0.0, 0.5), (0.5, 1.0)),
}

PANELS: dict[str, Ensemble] = {
    "4": Ensemble(),
    "5a": Ensemble(),
    "5b": Ensemble(beta=4 * math.sqrt(512)),
    "5c": Ensemble(redraw=1.0, time=20.0),
    "5d": Ensemble(dim=16, beta=1.0, time=20.0),
    "5e": Ensemble(dim=128, beta=math.sqrt(128)),
    "5f": Ensemble(dim=128, beta=4 * math.sqrt(128), time=20.0),
    "5g": Ensemble(dim=768, heads=12, beta=math.sqrt(64), weights="gaussian", time=50.0),
}


def setting_of(panel: str | None, given: Mapping[str, Any]) -> Ensemble:
    """The panel's setting, or the default one with β = √(d/heads), with what is given in its place."""
    if panel is not None:
        if panel not in PANELS:
            raise InputError(f"unknown panel '{panel}'; allowed: {', '.join(PANELS)}{did_you_mean(panel, PANELS)}")
        return replace(PANELS[panel], **given)
    dim, heads = given.get("dim", Ensemble.dim), given.get("heads", Ensemble.heads)
    beta = {"beta": math.sqrt(dim / heads)} if dim > 0 and heads > 0 else {}
    return Ensemble(**{**beta, **given})


@dataclass(frozen=True)
class Stage:
    """One evaluation of A(X) in a chunk's way through time.

    Attributes:
        coefficients: the slots of all schemes there, as tensors (schemes, 1, 1).
        heads: which of q, k, v each scheme normalises there.
        weight: h·a: the next state is the step's first state plus this much of the velocity.
        ends_step: whether the next state is the first of a new step.
        draws: whether new weights are drawn before it.
        sampled: whether the mean cosine is taken after it.
    """

    coefficients: Coefficients
    heads: tuple[str, ...]
    weight: Tensor
    ends_step: bool
    draws: bool
    sampled: bool


Advance = Callable[[Tensor, Tensor, Tensor, Coefficients, Tensor, Coefficients], tuple[Tensor, Tensor]]


def advance(
    first: Tensor, x: Tensor, attended: Tensor, c: Coefficients, weight: Tensor, following: Coefficients
) -> tuple[Tensor, Tensor]:
    """The state after a stage, and what the next stage reads of it (in the precision of the products)."""
    u = written(c, attended.to(x.dtype))
    state = settle(following, settle(c, first + weight * velocity(c, x, u)))
    return state, read(following, state).to(attended.dtype)


@dataclass(frozen=True)
class Kernels:
    """The parts of a chunk's loop that touch every number: as they are, or compiled for a GPU."""

    advance: Advance = advance
    mean_cosine: Callable[[Tensor], Tensor] = mean_cosine

    @classmethod
    def compiled(cls) -> "Kernels":
        """The same functions through torch.compile, which makes one pass over the data out of a dozen."""
        return cls(torch.compile(advance, dynamic=False), torch.compile(mean_cosine, dynamic=False))


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
    """Mean cosines of shape (runs, schemes, samples) for one chunk: its starts and weights come from ``seed`` alone."""
    check_schemes(schemes)
    generator = torch.Generator(device).manual_seed(seed)
    start = make_start(
        "uniform", setting.tokens, setting.dim, generator=generator, dtype=torch.float32, device=device, runs=(runs, 1)
    )
    stages = plan(setting, schemes, device)
    first = settle(stages[0].coefficients, start.expand(runs, len(schemes), setting.tokens, setting.dim))
    x, seen = first, read(stages[0].coefficients, first).to(precision)
    attention = _draw_attention(setting, schemes, runs, generator, precision)
    cosines = [kernels.mean_cosine(first)]
    last = _moved(stages[-1:], device)  # a copy: the compiler would take one tensor in two places for another function
    for stage, following in zip(stages, [*stages[1:], *last], strict=True):
        if stage.draws:
            attention = _draw_attention(setting, schemes, runs, generator, precision)
        attended = _attend(attention, seen, stage.heads)
        x, seen = kernels.advance(first, x, attended, stage.coefficients, stage.weight, following.coefficients)
        if stage.ends_step:
            first = x
        if stage.sampled:
            cosines.append(kernels.mean_cosine(x))
    return torch.stack(cosines, -1).to("cpu", torch.float32).numpy()


def plan(setting: Ensemble, schemes: Sequence[Scheme], device: torch.device | str) -> list[Stage]:
    """Every stage of every step, with its numbers already on the device."""
    breaks = {stage.until * setting.time for scheme in schemes for stage in scheme.stages if stage.then}
    steps = list(time_grid(setting.times, sorted({*setting.redraws, *breaks}), setting.step))
    ends = [sampled for _, _, sampled in steps[1:]] + [True]
    stages = []
    for (t, h, _), sampled in zip(steps, ends, strict=True):
        draws = any(math.isclose(t, redraw) for redraw in setting.redraws)
        method = STAGES[setting.solver]
        for i, (at, weight) in enumerate(method):
            c = stack([_coefficients(scheme, t + at * h, t + h / 2, setting.time) for scheme in schemes], "cpu", torch.float32)
            heads = tuple(scheme.at(t + h / 2, setting.time).attention.heads for scheme in schemes)
            last = i == len(method) - 1
            stages.append(Stage(c, heads, torch.tensor(h * weight), last, draws and i == 0, sampled and last))
    return _moved(stages, device)


def chunk_seeds(seed: int, chunks: int) -> list[int]:
    """A seed for each chunk, from the ensemble's."""
    return [int(s.generate_state(1, np.uint64)[0] >> 1) for s in np.random.SeedSequence(seed).spawn(chunks)]


def chunk_sizes(runs: int, chunk: int) -> list[int]:
    """Runs in each chunk; the last may be smaller."""
    if runs < 1 or chunk < 1:
        raise InputError(f"runs and chunk are at least 1, not {runs} and {chunk}")
    return [chunk] * (runs // chunk) + ([runs % chunk] if runs % chunk else [])


def summarise(setting: Ensemble, schemes: Sequence[Scheme], cosines: Cosines) -> pd.DataFrame:
    """Mean and 90% band over runs: a row for each scheme and time, ``mean``, ``low`` (5%), ``high`` (95%), ``stderr``.

    Runs that left the finite numbers are left out from there on, and ``runs`` says how many are in a row.
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
    """A line for each scheme with runs that left the finite numbers: how many, and the first run and time."""
    lines = []
    for i, scheme in enumerate(schemes):
        broken = ~np.isfinite(cosines[:, i])
        if broken.any():
            sample = int(broken.any(0).argmax())
            lines.append(
                f"scheme '{scheme.name}' left the finite numbers in {int(broken.any(1).sum())} of {len(cosines)} runs, first "
                f"by time {setting.times[sample]:g} in run {int(broken[:, sample].argmax())}"
            )
    return lines


def _coefficients(scheme: Scheme, t: float, within: float, depth: float) -> Coefficients:
    stage = scheme.at(within, depth)
    return coefficients(stage.attention, stage.norm, stage.place(t, depth))


def _moved(stages: list[Stage], device: torch.device | str) -> list[Stage]:
    """The stages with their tensors on the device, sent in one copy per kind of number."""
    names = [f.name for f in fields(Coefficients) if f.name != "kind"]
    sent = {name: torch.stack([getattr(stage.coefficients, name) for stage in stages]).to(device) for name in names}
    weights = torch.stack([stage.weight for stage in stages]).to(device)
    return [
        replace(
            stage,
            weight=weights[i],
            coefficients=Coefficients(kind=stage.coefficients.kind, **{name: sent[name][i] for name in names}),
        )
        for i, stage in enumerate(stages)
    ]


def _draw_attention(
    setting: Ensemble, schemes: Sequence[Scheme], runs: int, generator: torch.Generator, precision: torch.dtype
) -> Attention:
    weights = random_weights(
        setting.weights, setting.dim, setting.heads, generator, gain=setting.gain, output_gain=setting.output_gain,
        scale=setting.scale, dtype=precision, runs=(runs,),
    )  # fmt: skip
    if all(stage.attention.heads == "none" for scheme in schemes for stage in scheme.stages):
        weights = weights.folded()
    width = setting.dim // setting.heads
    return Attention(setting.beta, weights, backend=steady_backend(generator.device, precision, setting.tokens, width))


def _attend(attention: Attention, x: Tensor, heads: Sequence[str]) -> Tensor:
    """A(X) of (runs, schemes, tokens, dim); schemes that normalise other heads go separately."""
    if len(set(heads)) == 1:
        return attention(x, heads[0])
    out = torch.empty_like(x)
    for kind in sorted(set(heads)):
        chosen = [i for i, own in enumerate(heads) if own == kind]
        out[:, chosen] = attention(x[:, chosen], kind)
    return out
