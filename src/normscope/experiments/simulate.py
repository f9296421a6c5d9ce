"""simulate: Simulate schemes: how tokens cluster, grow and slow down.

Schemes and theory: normscope simulate --tokens 256 --dim 512 --beta 5 --time 20
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pandas as pd
from pydantic import model_validator

from normscope.errors import InputError, did_you_mean
from normscope.experiments.experiment import Seeded, Shown
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import SIX_SCHEMES, Numbers, Schemes, one_of, setting
from normscope.machine.files import regular_file
from normscope.machine.memory import MOST_STEPS, require_steps
from normscope.measures.base import Quantity
from normscope.measures.curves import by_scheme, last
from normscope.results.figures import Chart, Figure, Line, Scene, Scenes, Trail
from normscope.results.sections import PageTable, Section
from normscope.schemes import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from normscope.core import Attention
    from normscope.dynamics.motion import FeedForward
    from normscope.dynamics.schedules import Schedule
    from normscope.dynamics.trajectory import Trajectory

Precision = Literal["float64", "float32", "bfloat16"]
_WORTH_THREADS = 4_000_000
_PROBES = 32
_ROW = 1100  # bytes of the measures of a scheme at one time, as they come and in the table
_EXACT_UP_TO = 64
_FRAMES, _MOST_DRAWN = 49, 512  # times and tokens of the spheres


class Simulate(Seeded):
    """Simulate schemes: how tokens cluster, grow and slow down.

    All schemes start from the same tokens. By default they follow the continuous flow of theory; ``layers`` applies
    discrete layers instead.

    Example:
        >>> import normscope as ns
        >>> run = ns.simulate("pre,post", tokens=16, dim=16, time=2, progress=False)
        >>> list(run.tables)
        ['trajectories', 'milestones']
    """

    command: ClassVar[str] = "simulate"
    title: ClassVar[str] = "Tokens as particles"
    usage: ClassVar[tuple[str, ...]] = (
        "normscope simulate --tokens 256 --dim 512 --beta 5 --time 20",
        "normscope simulate --scheme peri,./mine.toml --start cone --delta 0.01",
        "normscope simulate --scheme pre,post --layers --time 48 --weights kaiming --gradient",
        "normscope simulate --symmetric --tokens 1000000 --time 1000 --times 1,10,1000",
        "normscope simulate --scheme ngpt --alpha linear --json",
    )
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "particles", "Mean cosine over time, simulated", "time", "cosine", "How fast tokens cluster, scheme by scheme.",
            "trajectories", by_scheme("time", "cosine"), "mean cosine at the end of the simulation", last, ratio=False,
        ),
    )  # fmt: skip

    scheme: Schemes = setting(SIX_SCHEMES, "Comma-separated schemes: names, or paths of TOML files.")
    tokens: int = setting(256, "Number of tokens n.", ge=1)
    dim: int | None = setting(None, "Dimension d.", shown="2·tokens up to 512, or tokens if orthogonal", ge=1)
    beta: float = setting(5.0, "Inverse temperature of the attention logits.", allow_inf_nan=False)
    start: str = setting("orthogonal", "orthogonal, uniform, gaussian, cone, or a file (.npy, .csv, .safetensors).")
    delta: float = setting(0.01, "Width of the cone: every pairwise cosine is at least 1 - delta.")
    radius: float = setting(1.0, "Norm of the initial tokens (its mean, for gaussian).")
    time: float | None = setting(None, "The last time.", shown="20, or the last of times=", gt=0, allow_inf_nan=False)
    times: Numbers | None = setting(None, "Comma-separated times to report.", shown="five between 0 and time=")
    layers: bool = setting(False, "Apply discrete layers, one per unit of time, instead of the flow.")
    symmetric: bool = setting(False, "Solve the two-variable reduction of the orthogonal start.")
    solver: str = setting("rk4", "euler, midpoint, rk4, dopri5 or dopri8.")
    step: float | None = setting(None, "Largest time step.", shown="0.025; 1 with layers=True; adaptive solvers choose alone")
    samples: int = setting(201, "Number of times at which the curves are sampled.", ge=2)
    norm: Annotated[str | None, one_of("rms", "layer")] = setting(
        None, "The norm in every slot: rms or layer.", shown="each scheme's own"
    )
    alpha: str | None = setting(None, "Step of nGPT: constant, root, linear, mixed, power, or a formula in t.", shown="1")
    weights: str = setting("identity", "identity, kaiming, gaussian, or a .safetensors file with W_Q, W_K, W_V, W_O, W_G.")
    heads: int = setting(1, "Number of heads of random weights.", ge=1)
    causal: bool = setting(False, "Use a causal mask.")
    feedforward: int = setting(0, "Width of a random feed-forward layer in every block; 0 for none.", ge=0)
    gradient: bool = setting(False, "Also compute the gradient of the last token by depth (needs layers=True).")
    precision: Precision = setting("float64", "float64, float32, or bfloat16 (products only; the state stays float32).")
    save_states: bool = setting(False, "Save the tokens at the reported times (states.safetensors).")

    @model_validator(mode="after")
    def _consistent(self) -> "Simulate":
        from normscope.dynamics.motion import check_schemes
        from normscope.dynamics.trajectory import check_times

        check_times(self.report_times)
        steps = self.end / self.stride  # refuses an unknown solver
        if not self.symmetric or self.step is not None:  # without a step the reduction takes few
            require_steps(steps, f"time={self.end:g} with step={self.stride:g}")
        if self.times and self.times[-1] > self.end:
            raise InputError(f"times= goes up to {self.times[-1]:g}, past time={self.end:g}")
        if self.gradient and (not self.layers or self.stride != 1):
            raise InputError("gradient=True goes back through whole layers: it needs layers=True, and step= left at 1")
        if self.layers:
            for t in (*self.report_times, self.end):
                if not math.isclose(t / self.stride, round(t / self.stride), abs_tol=1e-6):
                    raise InputError(f"with layers=True every time is a multiple of step={self.stride:g}; {t:g} is not")
        if self.symmetric:
            self._check_symmetric()
        if self.alpha is not None and not any(stage.learns_alpha for scheme in self.schemes for stage in scheme.stages):
            raise InputError("alpha= is given, but none of the schemes has it in a slot (ngpt has)")
        check_schemes(self.schemes, self.end, self.grid, named_schedule(self.alpha), flow=not self.layers or self.stride != 1)
        self._check_inputs()
        return self

    def _check_inputs(self) -> None:
        """Refuse a start that cannot be drawn or read, and weights that do not exist."""
        from normscope.dynamics.starts import STARTS, check_sizes
        from normscope.dynamics.weights import WEIGHTS, check_heads

        if self.start in STARTS:
            check_sizes(self.start, self.tokens, self.width, self.delta, self.radius)
        elif self.start_file is None:
            raise InputError(
                f"unknown start='{self.start}'; allowed: {', '.join((*STARTS, 'a file'))}{did_you_mean(self.start, STARTS)}"
            )
        allowed = ("identity", *WEIGHTS)
        if self.weights.endswith(".safetensors"):
            regular_file(self.weights, "weights file")
        elif self.weights not in allowed:
            raise InputError(
                f"weights= is one of {', '.join(allowed)}, or a .safetensors file, not '{self.weights}'"
                f"{did_you_mean(self.weights, allowed)}"
            )
        elif self.start_file is None:
            heads = 1 if self.weights == "identity" else self.heads
            check_heads(self.width, heads)
            self._check_head(self.width // heads)

    def _check_head(self, width: int) -> None:
        """Refuse schemes that normalise heads of one dimension."""
        for scheme in self.schemes:
            scheme.check_head(width)

    @property
    def start_file(self) -> Path | None:
        """The file that the start is read from, if it is one."""
        from normscope.dynamics.starts import STARTS

        is_file = self.start not in STARTS and ("." in self.start or "/" in self.start)
        return regular_file(self.start, "start file") if is_file else None

    def memory(self) -> dict[str, float]:
        """States of the solver, weights, and the rows of the curves."""
        n, d, exact = self.tokens, self.width, 8 if self.precision == "float64" else 4
        count = min(self.end / self.stride, MOST_STEPS) if self.layers else self.samples
        needs = {f"samples={self.samples}" if not self.layers else f"time={self.end:g}": _ROW * len(self.schemes) * count}
        if self.symmetric:
            return needs
        if self.start_file is not None:
            n = max(1, self.start_file.stat().st_size // (8 * d))
        state = n * d * exact
        held = (
            8 * state if self.device.startswith("cuda") else 24 * n * d + 19 * state
        )  # a start is drawn on the CPU in float64
        needs[f"tokens={n}, dim={d}"] = held + (8 * count * state if self.gradient else 0)
        if self.save_states:
            needs["save_states=True"] = 2 * len(self.report_times) * len(self.schemes) * state
        if self.weights != "identity":
            needs[f"dim={d}, weights={self.weights}"] = 5.5 * d**2 * 8
        if self.feedforward:
            needs[f"dim={d}, feedforward={self.feedforward}"] = 4.0 * d * self.feedforward * 8
        return needs

    def _check_symmetric(self) -> None:
        plain = self.start == "orthogonal" and self.weights == "identity" and not self.causal and not self.feedforward
        if not plain or self.layers or self.save_states:
            raise InputError(
                "symmetric=True solves the flow of the orthogonal start with identity weights; it takes no other start= or "
                "weights=, no causal=True, feedforward=, layers=True or save_states=True"
            )
        if any(stage.norm == "layer" for scheme in self.schemes for stage in scheme.stages):
            raise InputError("symmetric=True needs RMSNorm: LayerNorm moves the orthogonal start")
        if self.precision != "float64":
            raise InputError(f"symmetric=True is solved in float64; it takes no precision={self.precision}")
        if self.width < self.tokens:
            raise InputError(f"{self.tokens} orthogonal tokens need at least dim={self.tokens}, not dim={self.width}")

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes, with ``norm`` in every slot if one is given."""
        return self.scheme if self.norm is None else tuple(scheme.with_norm(self.norm) for scheme in self.scheme)

    @property
    def method(self) -> str:
        """The solver, or ``layers``."""
        return "layers" if self.layers else self.solver

    @property
    def stride(self) -> float:
        """The longest step in time; infinite where an adaptive solver chooses alone."""
        from normscope.dynamics.integrators import longest_step

        return longest_step(self.method, self.step)

    @property
    def end(self) -> float:
        """The last time."""
        return self.time if self.time is not None else (self.times[-1] if self.times else 20.0)

    @property
    def width(self) -> int:
        """The dimension d."""
        usual = min(2 * self.tokens, 512)
        return self.dim or (max(self.tokens, usual) if self.start == "orthogonal" else usual)

    @property
    def report_times(self) -> list[float]:
        """The times to report: with layers, at some of them."""
        if self.times is not None:
            return list(self.times)
        times = [self.end * share for share in (0, 0.05, 0.25, 0.5, 1)]
        if self.layers and self.stride > 0:
            times = sorted({*(round(t / self.stride) * self.stride for t in times[:-1]), self.end})
        return times

    @cached_property
    def grid(self) -> list[float]:
        """The times of the curves: equally spaced, or every layer, together with those to report."""
        count = round(self.end / self.stride) if self.layers else self.samples - 1
        even = (self.end * i / count for i in range(count + 1))
        report = self.report_times
        return sorted({*report, *(t for t in even if not any(math.isclose(t, other, rel_tol=1e-9) for other in report))})

    @property
    def frames(self) -> list[float]:
        """The times at which spheres show their tokens."""
        last = len(self.grid) - 1
        count = min(last, _FRAMES - 1)
        return [self.grid[round(last * k / count)] for k in range(count + 1)]

    @property
    def summary(self) -> str:
        """One line for people."""
        step = f"step {self.stride:g}" if math.isfinite(self.stride) else "steps by its error"
        if self.symmetric and self.step is None:
            step = "steps in ln(1 + t)"
        how = f"{'symmetric reduction, ' * self.symmetric}{self.method}, {step}, {self.precision}"
        about = [
            f"n = {self.tokens}, d = {self.width}, β = {self.beta:g}",
            f"start {self.start}",
            f"weights {self.weights}",
            how,
        ]
        if self.feedforward:
            about.append(f"feed-forward width {self.feedforward}")
        return "; ".join([*about, f"seed {self.seed}"])

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """All schemes from the same start."""
        paths, gradients = _simulated(self, progress.stage("simulating", len(self.schemes) * len(self.grid)))
        tables = {
            "trajectories": pd.concat([path.table for path in paths], ignore_index=True),
            "milestones": pd.DataFrame(
                [{"scheme": p.scheme, "half": p.milestones.half, "ninety": p.milestones.ninety} for p in paths]
            ),
        }
        if gradients:
            tables["gradients"] = pd.concat(gradients, ignore_index=True)
        drawn = [_token_table(path, self.frames) for path in paths if path.states and _has_sphere(path.states[0])]
        if drawn:
            tables["tokens"] = pd.concat(drawn, ignore_index=True)
        reported = self.report_times if self.save_states else []
        states = {
            f"{path.scheme}/t={t:.12g}": state.detach().cpu().clone()
            for path in paths
            for t, state in zip(path.kept, path.states, strict=True)
            if t in reported
        }
        return Result(
            type(self),
            {**self.record, "times": self.report_times, "time": self.end, "dim": self.width},
            tables,
            self.summary,
            self.seed,
            self.device,
            problems=tuple(path.stopped for path in paths if path.stopped),
            files={"states.safetensors": lambda path: _save_states(states, path)} if states else {},
            objects={"states": states},
        )

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """The measures at the times to report."""
        table = result.tables["trajectories"]
        return table[table["time"].isin(result.configuration["times"])].to_dict("records")  # type: ignore[return-value]

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The measures at the times to report, and when collapse came near."""
        rows = [
            (
                r["scheme"],
                f"{r['time']:g}",
                f"{r['cosine']:.6f}",
                f"{r['variance']:.3e}",
                f"{r['radius']:.4g}",
                f"{r['speed']:.3e}",
            )
            for r in cls.records(result)
        ]
        yield PageTable(
            "", ("scheme", "time", "mean cosine", "variance of directions", "mean norm", "mean speed |θ̇|"), tuple(rows)
        )
        yield _milestones(result.tables["milestones"])

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """Mean cosine, its rate, the phase plot, and radius and gradients where the run has them."""
        table, settings = result.tables["trajectories"], result.summary
        figures: dict[str, Figure] = {}
        if "tokens" in result.tables:
            figures["spheres"] = _spheres(result.tables["tokens"], table, settings)
        figures |= {
            name: _chart(table, x, y, title, label, caption, settings, log_y=log)
            for name, (x, y, title, label, caption, log) in _CURVES.items()
        }
        if "gradients" in result.tables:
            figures["gradient"] = _chart(
                result.tables["gradients"], "layer", "relative", "Gradient by depth", "effect of rotating an early token",
                "How much the last token's final direction depends on an early token's direction at each layer.",
                settings, log_y=True,
            )  # fmt: skip
        text = (
            "Tokens are particles on a sphere: attention pulls them together, and the scheme regulates how fast. A good scheme "
            "moves them far in early layers and still moves them in late ones.",
        )
        yield Section(cls.title, text, (_milestones(result.tables["milestones"]),), figures, name="particles")


_CURVES = {
    "cosine": (
        "time", "cosine", "Clustering over time", "mean cosine γ",
        "At 1 all tokens point one way: rank collapse.", False,
    ),
    "speed": (
        "time", "speed", "Rotation over time", "mean |θ̇|, in radians per unit of time",
        "How far a token rotates in one unit of time, which stands for one layer.", True,
    ),
    "rate": (
        "time", "cosine_rate", "Speed of clustering over time", "γ̇",
        "A straight line is exponential decay; a curve that flattens keeps moving late.", True,
    ),
    "phase": (
        "cosine", "cosine_rate", "Phase plot", "γ̇",
        "How fast tokens cluster when they are this clustered already.", False,
    ),
    "radius": (
        "time", "radius", "Residual norm over time", "mean |x|",
        "A growing norm is what slows a free residual stream down.", False,
    ),
}  # fmt: skip


def _chart(
    table: pd.DataFrame, x: str, y: str, title: str, label: str, caption: str, settings: str, log_y: bool = False
) -> Chart:
    lines = tuple(Line(str(name), list(rows[x]), list(rows[y])) for name, rows in table.groupby("scheme", sort=False))
    x_label = {"time": "time t", "cosine": "mean cosine γ", "layer": "layer"}[x]
    return Chart(title, x_label, label, lines, caption, settings, log_y=log_y)


def _has_sphere(tokens: "Tensor") -> bool:
    """Whether tokens × dim can be drawn on a sphere."""
    return tokens.shape[-1] == 3 and len(tokens) <= _MOST_DRAWN


def _token_table(path: "Trajectory", frames: list[float]) -> pd.DataFrame:
    """A row for each token at each frame: scheme, time, token, x, y, z."""
    rows = [
        (path.scheme, t, token, *place)
        for t, state in zip(path.kept, path.states, strict=True)
        if t in frames
        for token, place in enumerate(state.tolist())
    ]
    return pd.DataFrame(rows, columns=["scheme", "time", "token", "x", "y", "z"])


def _spheres(tokens: pd.DataFrame, measures: pd.DataFrame, settings: str) -> Scenes:
    """The directions of the tokens over time, a sphere for each scheme; most tokens go to the front."""
    axes = ("x", "y", "z")
    directions = tokens[list(axes)].div((tokens[list(axes)] ** 2).sum(axis=1) ** 0.5, axis=0)
    x, y, z = directions.mean()
    elevation, azimuth = math.degrees(math.atan2(z, math.hypot(x, y))), math.degrees(math.atan2(y, x))
    view = (max(-50.0, min(50.0, elevation + 20)), azimuth - 25)  # aside, so that ways to the front are not seen end on
    tokens = tokens.assign(**{axis: directions[axis] for axis in axes})
    scenes = []
    for scheme, rows in tokens.groupby("scheme", sort=False):
        trails = tuple(
            Trail(
                f"token {token}", list(way[list(axes)].itertuples(index=False, name=None)), steps=list(way["time"]), thin=True
            )
            for token, way in rows.groupby("token")
        )
        end = measures[measures["scheme"] == scheme].iloc[-1]
        about = f"mean cosine {end['cosine']:.2f}, norm {end['radius']:.3g}"
        scenes.append(Scene(str(scheme), (), trails, about, radius=1.0, axes=axes, order="time", view=view))
    caption = (
        "Each line is the path of one token's direction, the dot is its end. All schemes have the same start and the same time."
    )
    return Scenes("Tokens on the sphere", scenes, caption, settings)


def _milestones(table: pd.DataFrame) -> PageTable:
    rows = tuple((str(r.scheme), _reached(r.half), _reached(r.ninety)) for r in table.itertuples(index=False))
    return PageTable("Time to collapse", ("scheme", "time to half of collapse", "to 90 %"), rows)


def _reached(time: Any) -> str:
    return "not reached" if time != time else f"{time:.3f}"


def _save_states(states: "Mapping[str, Tensor]", path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(states), path)


@dataclass(frozen=True)
class _Particles:
    """Everything that a simulation reads or draws before it starts."""

    alpha: "Schedule | None"
    start: "Tensor"
    attention: "Attention"
    feedforward: "FeedForward | None"


def _simulated(settings: Simulate, advance: Callable[[float], None]) -> "tuple[list[Trajectory], list[pd.DataFrame]]":
    """The trajectory of every scheme, and gradients by depth where the settings have them."""
    from normscope.core.threads import one_thread

    alpha = named_schedule(settings.alpha)
    if settings.symmetric:
        return _reduced(settings, alpha, advance), []
    particles = _particles(settings, alpha)
    with one_thread(particles.start.shape[-2] ** 2 * particles.start.shape[-1] < _WORTH_THREADS):
        return _integrated(settings, particles, advance)


def _reduced(settings: Simulate, alpha: "Schedule | None", advance: Callable[[float], None]) -> "list[Trajectory]":
    """The two-variable reduction; a scheme that it cannot treat is refused before any is solved."""
    from normscope.dynamics.symmetric import SymmetricFlow

    flows = [SymmetricFlow(scheme, settings.tokens, settings.beta, settings.end, alpha) for scheme in settings.schemes]
    for flow in flows:
        flow.solve([0.0], radius=settings.radius)
    paths = []
    for number, flow in enumerate(flows, 1):
        paths.append(flow.solve(settings.grid, radius=settings.radius, solver=settings.solver, time_step=settings.step))
        advance(number * len(settings.grid))
    return paths


def _integrated(
    settings: Simulate, particles: _Particles, advance: Callable[[float], None]
) -> "tuple[list[Trajectory], list[pd.DataFrame]]":
    from normscope.dynamics.simulate import simulate
    from normscope.dynamics.trajectory import NotFiniteError

    done, paths, gradients = 0, [], []
    keep = [
        *(settings.frames if _has_sphere(particles.start) else []),
        *(settings.report_times if settings.save_states else []),
    ]

    def count(t: float, numbers: dict[str, float]) -> None:
        nonlocal done
        done += 1
        advance(done)

    for scheme in settings.schemes:
        paths.append(
            simulate(
                particles.start, scheme, particles.attention, settings.grid, solver=settings.method, step=settings.step,
                depth=settings.end, feedforward=particles.feedforward, alpha=particles.alpha,
                keep_states=keep, on_measures=count,
            )
        )  # fmt: skip
        if settings.gradient and not paths[-1].stopped:
            try:
                gradients.append(_gradient(settings, particles, scheme))
            except NotFiniteError as error:
                paths[-1].stopped = str(error)
    return paths, gradients


def _gradient(settings: Simulate, particles: _Particles, scheme: Scheme) -> pd.DataFrame:
    import torch

    from normscope.dynamics.gradients import gradient_by_depth

    return gradient_by_depth(
        particles.start, scheme, particles.attention, round(settings.end),
        probes=_PROBES if particles.start.shape[-1] > _EXACT_UP_TO else None,
        feedforward=particles.feedforward, alpha=particles.alpha,
        generator=torch.Generator(settings.device).manual_seed(settings.seed),
    )  # fmt: skip


def named_schedule(text: str | None) -> "Schedule | None":
    """α_t from the name of a schedule or from a formula in t."""
    from normscope.dynamics.schedules import SCHEDULES
    from normscope.schemes.expressions import Expression, finite_value

    if text is None:
        return None
    if text in SCHEDULES:
        return SCHEDULES[text]
    allowed = f"alpha= is one of {', '.join(SCHEDULES)}, or a formula in t, not '{text}'{did_you_mean(text, SCHEDULES)}"
    try:
        formula = Expression.parse(text)
    except InputError as error:
        raise InputError(allowed) from error
    if formula.names - {"t"}:
        raise InputError(allowed)

    def schedule(t: float) -> float:
        value = finite_value(formula, {"t": t})
        if value is None:
            raise InputError(f"alpha='{text}' is not a finite number at t = {t:g}")
        return value

    return schedule


def _particles(settings: Simulate, alpha: "Schedule | None") -> _Particles:
    """Start, attention and feed-forward layer, drawn on the CPU so that every device gets the same ones."""
    import torch

    from normscope.core import Attention, HeadWeights
    from normscope.dynamics.motion import FeedForward

    generator = torch.Generator().manual_seed(settings.seed)
    dtype, products = {
        "float64": (torch.float64, None),
        "float32": (torch.float32, None),
        "bfloat16": (torch.float32, torch.bfloat16),
    }[settings.precision]
    start = _start(settings, generator)
    dim = start.shape[-1]
    weights = _weights(settings, dim, generator)
    weights = HeadWeights(**{name: None if w is None else w.to(settings.device, dtype) for name, w in vars(weights).items()})
    feedforward = None
    if settings.feedforward:
        drawn = FeedForward.random(dim, settings.feedforward, generator)
        feedforward = FeedForward(drawn.W_in.to(settings.device, dtype), drawn.W_out.to(settings.device, dtype))
    attention = Attention(settings.beta, weights, settings.causal, products)
    return _Particles(alpha, start.to(settings.device, dtype), attention, feedforward)


def _start(settings: Simulate, generator: Any) -> "Tensor":
    from normscope.dynamics.starts import make_start, read_start

    if settings.start_file is not None:
        return settings.radius * read_start(settings.start_file)
    return make_start(
        settings.start, settings.tokens, settings.width, delta=settings.delta, radius=settings.radius, generator=generator
    )


def _weights(settings: Simulate, dim: int, generator: Any) -> Any:
    import torch

    from normscope.core import HeadWeights
    from normscope.core.seeds import stream_seed
    from normscope.dynamics.weights import random_gate, random_weights

    if settings.weights == "identity":
        settings._check_head(dim)
        return HeadWeights()
    if settings.weights.endswith(".safetensors"):
        weights = HeadWeights.read(Path(settings.weights), dim)
        settings._check_head(dim if weights.W_Q is None else weights.W_Q.shape[-1])
        return weights
    settings._check_head(dim // settings.heads)
    weights = random_weights(settings.weights, dim, settings.heads, generator)
    if all(stage.attention.gate == "none" for scheme in settings.schemes for stage in scheme.stages):
        return weights
    gates = torch.Generator().manual_seed(stream_seed(settings.seed, "gate"))
    return replace(weights, W_G=random_gate(settings.weights, dim, settings.heads, gates))
