"""A whole simulation as one value: several schemes from one start, with everything that a user can choose."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from normscope.core import Attention, HeadWeights
from normscope.core.threads import one_thread
from normscope.dynamics.gradients import gradient_by_depth
from normscope.dynamics.integrators import check_solver
from normscope.dynamics.motion import FeedForward, Motion, check_schemes
from normscope.dynamics.schedules import SCHEDULES, Schedule
from normscope.dynamics.simulate import simulate
from normscope.dynamics.starts import STARTS, make_start, read_start
from normscope.dynamics.symmetric import SymmetricFlow
from normscope.dynamics.trajectory import Trajectory, check_times
from normscope.dynamics.weights import WEIGHTS, random_weights
from normscope.errors import InputError, did_you_mean
from normscope.schemes import Expression, Scheme

_WORTH_THREADS = 4_000_000
_PROBES = 32
_EXACT_UP_TO = 64
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float64": (torch.float64, None),
    "float32": (torch.float32, None),
    "bfloat16": (torch.float32, torch.bfloat16),
}


@dataclass(frozen=True)
class SimulationSetting:
    """What to simulate; the fields are the options of ``normscope simulate``."""

    schemes: tuple[Scheme, ...]
    tokens: int = 256
    dim: int = 512
    beta: float = 5.0
    start: str = "orthogonal"
    delta: float = 0.01
    radius: float = 1.0
    time: float = 20.0
    times: tuple[float, ...] = (0.0, 1.0, 5.0, 10.0, 20.0)
    samples: int = 201
    solver: str = "rk4"
    step: float = 0.025
    symmetric: bool = False
    alpha: str | None = None
    weights: str = "identity"
    heads: int = 1
    causal: bool = False
    feedforward: int = 0
    gradient: bool = False
    precision: str = "float64"
    save_states: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_schemes(self.schemes)
        check_times(self.times)
        _require(self.precision, tuple(PRECISIONS), "precision")
        if self.feedforward < 0:
            raise InputError(f"the feed-forward width is 0 or more, not {self.feedforward}")
        check_solver(self.solver, self.step)
        if self.gradient and (self.solver != "layers" or self.step != 1):
            raise InputError("gradient=True goes back through whole layers: it needs solver='layers' and step=1")
        if self.solver == "layers":
            for t in (*self.times, self.time):
                if not math.isclose(t / self.step, round(t / self.step), abs_tol=1e-6):
                    raise InputError(f"with solver='layers' every time is a multiple of the step {self.step:g}; {t:g} is not")
        if self.symmetric:
            self._check_symmetric()

    def _check_symmetric(self) -> None:
        plain = self.start == "orthogonal" and self.weights == "identity" and not self.causal and not self.feedforward
        if not plain or self.solver == "layers" or self.save_states:
            raise InputError(
                "symmetric=True solves the flow of the orthogonal start with identity weights; it takes no other start or "
                "weights, and no causal, feedforward, save_states or solver='layers'"
            )
        if any(stage.norm != "rms" for scheme in self.schemes for stage in scheme.stages):
            raise InputError("symmetric=True needs RMSNorm: LayerNorm moves the orthogonal start")

    @property
    def grid(self) -> list[float]:
        """The times of the curves: equally spaced, or every layer, together with those to report."""
        count = round(self.time / self.step) if self.solver == "layers" else self.samples - 1
        even = (self.time * i / count for i in range(count + 1))
        return sorted({*self.times, *(t for t in even if not any(math.isclose(t, own, rel_tol=1e-9) for own in self.times))})

    @property
    def record(self) -> dict[str, Any]:
        """The setting as plain values, for ``run.json``."""
        return {**asdict(self), "schemes": [asdict(scheme) for scheme in self.schemes]}

    @property
    def summary(self) -> str:
        """One line for people."""
        how = "symmetric reduction" if self.symmetric else f"{self.solver}, step {self.step:g}, {self.precision}"
        parts = [
            f"n = {self.tokens}, d = {self.dim}, β = {self.beta:g}",
            f"start {self.start}",
            f"weights {self.weights}",
            how,
        ]
        if self.feedforward:
            parts.append(f"feed-forward width {self.feedforward}")
        return "; ".join([*parts, f"seed {self.seed}"])


@dataclass
class SimulationResult:
    """The tables of a simulation."""

    trajectories: pd.DataFrame
    milestones: pd.DataFrame
    gradients: pd.DataFrame | None = None
    states: dict[str, Tensor] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Simulation:
    """A setting with everything read, drawn and checked: ready to run."""

    setting: SimulationSetting
    alpha: Schedule | None
    start: Tensor | None = None
    attention: Attention | None = None
    feedforward: FeedForward | None = None

    @classmethod
    def prepare(cls, setting: SimulationSetting) -> "Simulation":
        """Read files, draw start and weights (on the CPU, so that every device gets the same ones), refuse what is wrong."""
        alpha = named_schedule(setting.alpha, setting.grid)
        uses_alpha = any(stage.learns_alpha for scheme in setting.schemes for stage in scheme.stages)
        if alpha is not None and not uses_alpha:
            raise InputError("alpha is given, but none of the schemes has it in a slot (ngpt has)")
        for scheme in setting.schemes:
            Motion(scheme, Attention(setting.beta), setting.time, None, alpha).check(setting.grid)
        if setting.symmetric:
            for scheme in setting.schemes:
                SymmetricFlow(scheme, setting.tokens, setting.beta, setting.time, alpha).solve([0.0], radius=setting.radius)
            return cls(setting, alpha)
        start, attention, feedforward = _ingredients(setting)
        return cls(replace(setting, tokens=start.shape[0], dim=start.shape[1]), alpha, start, attention, feedforward)

    def run(self, progress: Callable[[int], None] = lambda done: None) -> SimulationResult:
        """All schemes from the same start; ``progress`` hears how many (scheme, time) pairs are done."""
        setting = self.setting
        if self.start is None or self.attention is None:
            paths = []
            for number, scheme in enumerate(setting.schemes, 1):
                flow = SymmetricFlow(scheme, setting.tokens, setting.beta, setting.time, self.alpha)
                paths.append(flow.solve(setting.grid, radius=setting.radius))
                progress(number * len(setting.grid))
            return _result(paths)
        with one_thread(self.start.shape[-2] ** 2 * self.start.shape[-1] < _WORTH_THREADS):
            return self._particles(self.start, self.attention, progress)

    def _particles(self, start: Tensor, attention: Attention, progress: Callable[[int], None]) -> SimulationResult:
        setting, done, paths, gradients = self.setting, 0, [], []

        def count(t: float, numbers: dict[str, float]) -> None:
            nonlocal done
            done += 1
            progress(done)

        for scheme in setting.schemes:
            path = simulate(
                start, scheme, attention, setting.grid, solver=setting.solver, step=setting.step, depth=setting.time,
                feedforward=self.feedforward, alpha=self.alpha,
                keep_states=setting.times if setting.save_states else False, on_measures=count,
            )  # fmt: skip
            paths.append(path)
            if setting.gradient:
                gradients.append(self._gradient(start, scheme, attention))
        result = _result(paths)
        result.gradients = pd.concat(gradients, ignore_index=True) if gradients else None
        return result

    def _gradient(self, start: Tensor, scheme: Scheme, attention: Attention) -> pd.DataFrame:
        setting = self.setting
        return gradient_by_depth(
            start,
            scheme,
            attention,
            round(setting.time),
            probes=_PROBES if setting.dim > _EXACT_UP_TO else None,
            feedforward=self.feedforward,
            alpha=self.alpha,
            generator=torch.Generator(setting.device).manual_seed(setting.seed),
        )


def run_simulation(setting: SimulationSetting) -> SimulationResult:
    """Prepare a setting and run it."""
    return Simulation.prepare(setting).run()


def named_schedule(text: str | None, times: Sequence[float]) -> Schedule | None:
    """α_t from the name of a schedule or from a formula in t, which must have a value at all the times."""
    if text is None:
        return None
    if text in SCHEDULES:
        return SCHEDULES[text]
    allowed = f"alpha is one of {', '.join(SCHEDULES)}, or a formula in t, not '{text}'{did_you_mean(text, SCHEDULES)}"
    try:
        formula = Expression.parse(text)
    except InputError as error:
        raise InputError(allowed) from error
    if formula.names - {"t"}:
        raise InputError(allowed)
    for t in times:
        try:
            value = formula({"t": t})
        except (ArithmeticError, ValueError):
            value = math.nan
        if isinstance(value, complex) or not math.isfinite(value):
            raise InputError(f"alpha = '{text}' is not a finite number at t = {t:g}")
    return lambda t: float(formula({"t": t}))


def _ingredients(setting: SimulationSetting) -> tuple[Tensor, Attention, FeedForward | None]:
    """Start, attention and feed-forward layer."""
    generator = torch.Generator().manual_seed(setting.seed)
    dtype, products = PRECISIONS[setting.precision]
    if setting.start in STARTS:
        start = make_start(
            setting.start, setting.tokens, setting.dim, delta=setting.delta, radius=setting.radius, generator=generator
        )
    elif "." in setting.start or "/" in setting.start:
        start = setting.radius * read_start(Path(setting.start))
    else:
        allowed = (*STARTS, "a file")
        raise InputError(f"unknown start '{setting.start}'; allowed: {', '.join(allowed)}{did_you_mean(setting.start, STARTS)}")
    dim = start.shape[-1]
    weights = _weights(setting, dim, generator)
    weights = HeadWeights(**{name: None if w is None else w.to(setting.device, dtype) for name, w in vars(weights).items()})
    feedforward = None
    if setting.feedforward:
        drawn = FeedForward.random(dim, setting.feedforward, generator)
        feedforward = FeedForward(drawn.W_in.to(setting.device, dtype), drawn.W_out.to(setting.device, dtype))
    attention = Attention(setting.beta, weights, setting.causal, products)
    return start.to(setting.device, dtype), attention, feedforward


def _weights(setting: SimulationSetting, dim: int, generator: torch.Generator) -> HeadWeights:
    if setting.weights == "identity":
        return HeadWeights()
    if setting.weights.endswith(".safetensors"):
        return HeadWeights.read(Path(setting.weights), dim)
    _require(setting.weights, ("identity", *WEIGHTS), "weights without the ending .safetensors")
    return random_weights(setting.weights, dim, setting.heads, generator)


def _result(paths: list[Trajectory]) -> SimulationResult:
    states = {
        f"{path.scheme}/t={t:.12g}": state.detach().cpu().clone()
        for path in paths
        for t, state in zip(path.kept, path.states, strict=True)
    }
    return SimulationResult(
        pd.concat([path.table for path in paths], ignore_index=True),
        pd.DataFrame([{"scheme": p.scheme, "half": p.milestones.half, "ninety": p.milestones.ninety} for p in paths]),
        states=states,
        stopped=[path.stopped for path in paths if path.stopped],
    )


def _require(value: str, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise InputError(f"{what} is one of {', '.join(allowed)}, not '{value}'{did_you_mean(value, allowed)}")
