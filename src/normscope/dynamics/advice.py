"""Schemes through the same random layers: what each does to tokens, gradients and noise at depth, and how they rank.

States have norm 1 where a model's norm gives √d. Weights act as in a model if the logits' factor is d/√d_h and a head that a
model normalises to √d_h has norm √(d_h/d) here.
"""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import Attention, HeadWeights, Mixing
from normscope.core.attention import Backend
from normscope.core.norms import length, unit
from normscope.core.seeds import stream_seed
from normscope.core.threads import one_thread
from normscope.dynamics.measures import measure
from normscope.dynamics.motion import FeedForward, Motion
from normscope.dynamics.starts import make_start
from normscope.dynamics.symmetric import SymmetricFlow, no_reduction
from normscope.dynamics.trajectory import NotFiniteError
from normscope.dynamics.weights import random_gate, random_weights
from normscope.schemes import Scheme

Numbers = npt.NDArray[np.float64]
Factors = Float[Tensor, "variants letters heads tokens 1"]

REDRAWS = 2000
BAND = (0.05, 0.95)  # an interval holds 90 % of the redraws
SURE = 0.95  # a scheme ranks above another if this share of the redraws agrees
_SAME = 1e-3  # values closer than this, relatively, are equal
_SMALLEST = 1e-6  # and those closer than this, absolutely
_NON_FINITE = -1e30  # the score of a run that became non-finite
_SAMPLES, _STEP = 2, 0.1  # times of the reduced flow per layer, and its longest step in ln(1 + t)


@dataclass(frozen=True)
class Spectrum:
    """Singular values of the heads of every layer of a model, in falling order.

    Attributes:
        qk: of W_QK = W_Q W_Kᵀ.
        vo: of W_VO = W_V W_O.
    """

    qk: Float[Tensor, "layers heads rank"]
    vo: Float[Tensor, "layers heads value_rank"]

    def at(self, matrix: str, depth: float, heads: int, rank: int) -> Float[Tensor, "heads rank"]:
        """The values at a share of the depth: heads in turn, the curve of singular values resampled to ``rank``."""
        values = getattr(self, matrix)
        layer = values[round(depth * (len(values) - 1))]
        chosen = layer[[head * len(layer) // heads for head in range(heads)]]
        if chosen.shape[-1] == rank:
            return torch.as_tensor(chosen)
        return torch.nn.functional.interpolate(chosen[None], size=rank, mode="linear", align_corners=rank > 1)[0]


@dataclass(frozen=True)
class Stack:
    """What is simulated, with every setting resolved.

    Attributes:
        depth: number of layers T.
        width: dimension d of the states.
        heads: number of heads.
        tokens: number of tokens n.
        weights: ``kaiming`` or ``gaussian``; ignored with a spectrum.
        scale: standard deviation of gaussian weights.
        hidden: hidden width of a random feed-forward layer in every block; 0 for none.
        causal: whether attention has a causal mask.
        radius: norm r_0 of the initial states.
        levels: RMS of the relative noise on the norms of q, k and v.
        spectrum: singular values for W_QK and W_VO, whose singular vectors are then random.
        dtype, device, seed: of the computation.
    """

    depth: int
    width: int
    heads: int
    tokens: int
    weights: str = "kaiming"
    scale: float = 0.02
    hidden: int = 0
    causal: bool = False
    radius: float = 1.0
    levels: tuple[float, ...] = (0.01, 0.1)
    spectrum: Spectrum | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    @property
    def beta(self) -> float:
        """The factor on ⟨q, k⟩: a model has states of norm √d and 1/√d_h; with states of norm 1 that is d/√d_h."""
        return self.width / math.sqrt(self.width / self.heads)


@dataclass(frozen=True)
class LayerAttention(Attention):
    """A(X) with head norms of radius √(d_h/d), and factors on the norms of q, k and v that no norm removes.

    Attributes:
        noise: the factors 1 + κ for every variant of x, for q, k, v in this order; None for none.
    """

    noise: Factors | None = None

    def projected(self, x: Float[Tensor, "*batch tokens dim"], mixing: Mixing) -> tuple[Tensor, Tensor, Tensor]:
        """Q, k and v, normalised as the slot ``heads`` says; with noise the first dimension of x is the variants."""
        made = zip("qkv", super().projected(x, mixing), strict=True)
        q, k, v = (self._sized(y, letter, mixing.heads) for letter, y in made)
        return q, k, v

    def _sized(self, y: Tensor, letter: str, heads: str) -> Tensor:
        if letter in heads:
            return y / math.sqrt(y.shape[-3])  # d_h/d is 1/heads
        return y if self.noise is None else y * self.noise[:, "qkv".index(letter)]


@dataclass(frozen=True)
class Kind:
    """What a scheme does to the random weights of a layer.

    Attributes:
        weights: ``free`` or ``normalised``.
        initial: factor on W_V, W_O and the matrices of the feed-forward layer.
    """

    weights: str = "free"
    initial: float = 1.0


@dataclass(frozen=True)
class Block:
    """A layer's random maps for one kind of weights."""

    attention: LayerAttention
    feedforward: FeedForward | None


@dataclass(frozen=True)
class RandomLayers:
    """What a run draws: start, weights of every layer, noise and the direction of the gradient, each from its own seed.

    Any layer can be drawn again, so the backward pass stores no weights.
    """

    stack: Stack
    run: int

    def start(self) -> Float[Tensor, "tokens dim"]:
        """Isotropic directions of norm r_0."""
        s = self.stack
        generator = self._generator("start")
        return s.radius * make_start("uniform", s.tokens, s.width, generator=generator, dtype=s.dtype, device=s.device)

    def probe(self) -> Float[Tensor, "tokens dim"]:
        """A normal G: the squared norm of the gradient of ⟨G, Θ⟩ is on average that of the Jacobian of Θ."""
        s = self.stack
        return torch.randn(s.tokens, s.width, generator=self._generator("probe"), dtype=s.dtype, device=s.device)

    def noise(self, layer: int) -> Factors:
        """1 + κ on q, k, v of a layer: none for the first variant, then the same uniform κ at every level."""
        s = self.stack
        most = math.sqrt(3)
        kappa = torch.empty((3, s.heads, s.tokens, 1), dtype=s.dtype, device=s.device)
        kappa.uniform_(-most, most, generator=self._generator("noise", layer))
        levels = torch.tensor([0.0, *s.levels], dtype=s.dtype, device=s.device)
        return 1 + levels[:, None, None, None, None] * kappa

    def blocks(self, layer: int, schemes: Sequence[Scheme]) -> dict[Kind, Block]:
        """The maps of a layer for each kind of weights that the schemes have there: the same draw, scaled or normalised."""
        stages = [scheme.at(layer, self.stack.depth) for scheme in schemes]
        gated = any(stage.attention.gate != "none" for stage in stages)
        drawn = self._weights(layer, gated), self._feedforward(layer)
        blocks = {}
        for kind in {self.kind(layer, stage) for stage in stages}:
            weights, feedforward = normalised(*drawn) if kind.weights == "normalised" else shrunk(*drawn, kind.initial)
            attention = LayerAttention(self.stack.beta, weights, self.stack.causal, backend=self._backend)
            blocks[kind] = Block(attention, feedforward)
        return blocks

    def kind(self, layer: int, stage: Scheme) -> Kind:
        """The weights of a stage: its factor is on initial ones, so not on those with a trained model's spectrum."""
        if stage.weights == "normalised" or self.stack.spectrum is not None:
            return Kind(stage.weights)
        return Kind(stage.weights, stage.initial_factor(layer, self.stack.depth))

    @property
    def _backend(self) -> Backend | None:
        """On a GPU one that is the same with and without a gradient."""
        return "blocks" if torch.device(self.stack.device).type == "cuda" else None

    @property
    def _kind(self) -> str:
        """How weights are drawn that have no spectrum: those of gates and feed-forward layers too."""
        return "kaiming" if self.stack.spectrum is not None else self.stack.weights

    def _weights(self, layer: int, gated: bool) -> HeadWeights:
        s = self.stack
        generator = self._generator("weights", layer)
        if s.spectrum is not None:
            weights = spectral_weights(s, s.spectrum, layer / max(s.depth - 1, 1), generator)
        else:
            weights = random_weights(self._kind, s.width, s.heads, generator, scale=s.scale, dtype=s.dtype)
        if not gated:
            return weights
        gates = self._generator("gate", layer)
        return replace(weights, W_G=random_gate(self._kind, s.width, s.heads, gates, scale=s.scale, dtype=s.dtype))

    def _feedforward(self, layer: int) -> FeedForward | None:
        s = self.stack
        if not s.hidden:
            return None
        generator = torch.Generator().manual_seed(self._seed("feedforward", layer))
        drawn = FeedForward.random(s.width, s.hidden, generator, s.dtype, s.scale if self._kind == "gaussian" else None)
        return FeedForward(drawn.W_in.to(s.device), drawn.W_out.to(s.device))

    def _generator(self, stream: str, layer: int = 0) -> torch.Generator:
        return torch.Generator(self.stack.device).manual_seed(self._seed(stream, layer))

    def _seed(self, stream: str, layer: int) -> int:
        return stream_seed(self.stack.seed, f"advise {stream} {self.run}", layer)


def spectral_weights(stack: Stack, spectrum: Spectrum, depth: float, generator: torch.Generator) -> HeadWeights:
    """W_Q W_Kᵀ = U diag(σ) Vᵀ and W_V W_O likewise, with a model's σ and random orthonormal U and V."""
    heads, head = stack.heads, stack.width // stack.heads

    def half(values: Tensor) -> Tensor:
        normal = torch.randn(heads, stack.width, head, generator=generator, dtype=stack.dtype, device=stack.device)
        orthonormal: Tensor = torch.linalg.qr(normal).Q
        return orthonormal * values.to(normal).sqrt()[:, None]

    qk, vo = (spectrum.at(matrix, depth, heads, head) for matrix in ("qk", "vo"))
    return HeadWeights(half(qk), half(qk), half(vo), half(vo).mT)


def normalised(weights: HeadWeights, feedforward: FeedForward | None) -> tuple[HeadWeights, FeedForward | None]:
    """Every matrix scaled to unit norm along the residual dimension, from which it reads or to which it writes."""

    def along(weight: Tensor, axis: int) -> Tensor:
        return unit(weight, axis)

    heads = {
        name: None if weight is None else along(weight, -1 if name == "W_O" else -2) for name, weight in vars(weights).items()
    }
    wide = None if feedforward is None else FeedForward(along(feedforward.W_in, -2), along(feedforward.W_out, -1))
    return HeadWeights(**heads), wide


def shrunk(weights: HeadWeights, feedforward: FeedForward | None, factor: float) -> tuple[HeadWeights, FeedForward | None]:
    """A factor on W_V, W_O and both matrices of the feed-forward layer."""
    if factor == 1:
        return weights, feedforward
    W_V, W_O = (None if weight is None else factor * weight for weight in (weights.W_V, weights.W_O))
    wide = None if feedforward is None else FeedForward(factor * feedforward.W_in, factor * feedforward.W_out)
    return replace(weights, W_V=W_V, W_O=W_O), wide


@dataclass(frozen=True)
class RunMeasures:
    """What a run measures of every scheme; NaN from the layer at which a scheme became non-finite.

    Attributes:
        turned: mean rotation of a token per layer, in degrees; (schemes, layers).
        moved: the same after removing the rotation common to all tokens (``apart``); (schemes, layers).
        gap: 1 − mean cosine of the state before each layer, and after the last; (schemes, layers + 1).
        radius: mean norm of these states; (schemes, layers + 1).
        gradient: log₁₀ of ‖∂⟨G, Θ⟩/∂X‖ at the state before each layer, Θ the final directions; (schemes, layers).
        drift: mean angle between the final directions with noise and without, in degrees; (schemes, levels).
    """

    turned: Numbers
    moved: Numbers
    gap: Numbers
    radius: Numbers
    gradient: Numbers
    drift: Numbers


def measure_runs(
    stack: Stack, schemes: Sequence[Scheme], runs: int, progress: Callable[[int], None] = lambda done: None
) -> list[RunMeasures]:
    """All runs; on a CPU several at a time, each on one thread, so that the numbers are the same on any number of cores.

    ``progress`` takes how many of the 2 · depth · runs passes through a layer are done.
    """
    workers = runs_at_a_time(stack.device)
    stopping, counting, done = threading.Event(), threading.Lock(), [0]

    def tick() -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        with counting:
            done[0] += 1
            progress(done[0])

    with one_thread(True), ThreadPoolExecutor(min(workers, runs)) as pool:
        futures = [pool.submit(measure_run, RandomLayers(stack, run), schemes, tick) for run in range(runs)]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def runs_at_a_time(device: str) -> int:
    """How many runs are computed at the same time: one on each thread of a CPU."""
    return torch.get_num_threads() if torch.device(device).type == "cpu" else 1


def measure_run(layers: RandomLayers, schemes: Sequence[Scheme], tick: Callable[[], None] = lambda: None) -> RunMeasures:
    """One run: forward with and without noise, then backward; ``tick`` is called after every layer, 2 · depth times."""
    depth = layers.stack.depth
    first = layers.blocks(0, schemes)
    paths = [_Path(scheme, layers, first) for scheme in schemes]
    with torch.no_grad():
        for layer in range(depth):
            drawn, noise = layers.blocks(layer, schemes), layers.noise(layer)
            for path in paths:
                path.forward(layer, drawn, noise)
            tick()
    for path in paths:
        path.turn_round(layers.probe())
    for layer in reversed(range(depth)):
        drawn = layers.blocks(layer, schemes)
        for path in paths:
            path.backward(layer, drawn)
        tick()
    return RunMeasures(*(np.stack([getattr(path, field.name) for path in paths]) for field in fields(RunMeasures)))


def feels_noise(scheme: Scheme) -> bool:
    """Whether noise on the norms of q, k and v has any effect: not where all three are normalised after it."""
    return any(stage.attention.heads != "qkv" for stage in scheme.stages)


def angles(a: Float[Tensor, "*batch dim"], b: Float[Tensor, "*batch dim"]) -> Float[Tensor, " *batch"]:
    """Angles between vectors in degrees, exact where they are small: 2 arcsin(|â − b̂|/2)."""
    half = length(unit(a) - unit(b)).squeeze(-1) / 2
    return torch.rad2deg(2 * torch.asin(half.clamp(max=1)))


def apart(before: Float[Tensor, "tokens dim"], after: Float[Tensor, "tokens dim"]) -> Float[Tensor, " tokens"]:
    """Angles in degrees between R θ_j and θ′_j, where R is the smallest rotation that takes the mean direction θ̄ to θ̄′.

    With a = θ̄/|θ̄| and b = θ̄′/|θ̄′|, R y = y − (⟨a + b, y⟩/(1 + ⟨a, b⟩)) (a + b) + 2⟨a, y⟩ b. A cluster that rotates as a
    whole does not move by this measure; where the mean direction stays, as in the symmetric case of theory, R is the identity.
    """
    theta = unit(before)
    a, b = unit(theta.mean(0)), unit(unit(after).mean(0))
    both = a + b
    turned = theta - ((theta @ both) / (1 + a @ b).clamp(min=1e-6))[:, None] * both + 2 * (theta @ a)[:, None] * b
    return angles(turned, after)


class _Path:
    """A scheme on its way through the layers of a run; its arrays are the rows of ``RunMeasures``."""

    def __init__(self, scheme: Scheme, layers: RandomLayers, blocks: dict[Kind, Block]) -> None:
        depth, levels = layers.stack.depth, layers.stack.levels
        self.scheme, self.layers, self.depth = scheme, layers, depth
        start = self._motion(0, blocks).settle(layers.start(), 0.0)
        variants = 1 + len(levels) if feels_noise(scheme) else 1
        self.x: Tensor | None = start.expand(variants, *start.shape)
        self.states = [start]
        self.gradient_at: Tensor | None = None
        self.log_size = 0.0
        self.turned, self.moved, self.gradient = (np.full(depth, np.nan) for _ in range(3))
        self.gap, self.radius = np.full(depth + 1, np.nan), np.full(depth + 1, np.nan)
        self.drift = np.full(len(levels), np.nan)
        self._measure(0)

    def forward(self, layer: int, blocks: dict[Kind, Block], noise: Tensor) -> None:
        """One layer forward, for all variants at once."""
        if self.x is None:
            return
        try:
            after = self._motion(layer, blocks, noise if len(self.x) > 1 else None).layer(self.x, float(layer))
        except NotFiniteError:
            self.x = None
            return
        size = length(after)
        if not bool((torch.isfinite(size) & (size > 0)).all()):
            self.x = None
            return
        self.turned[layer] = float(angles(self.x[0], after[0]).mean(dtype=torch.float64))
        self.moved[layer] = float(apart(self.x[0], after[0]).mean(dtype=torch.float64))
        self.x = after
        self.states.append(after[0].clone())
        self._measure(layer + 1)

    def turn_round(self, probe: Float[Tensor, "tokens dim"]) -> None:
        """The final directions: what noise did to them, and the gradient of ⟨G, Θ⟩ there."""
        if self.x is None:
            return
        self.drift[:] = 0.0
        for level in range(1, len(self.x)):
            self.drift[level - 1] = float(angles(self.x[0], self.x[level]).mean(dtype=torch.float64))
        last = self.states.pop().requires_grad_()
        (self.gradient_at,) = torch.autograd.grad((probe * unit(last)).sum(), last)

    def backward(self, layer: int, blocks: dict[Kind, Block]) -> None:
        """The gradient at the state before the layer; its norm is stored as a logarithm, so that it never underflows."""
        if self.gradient_at is None:
            return
        state = self.states.pop().detach().requires_grad_()
        with torch.enable_grad():
            after = self._motion(layer, blocks).layer(state, float(layer))
            (gradient,) = torch.autograd.grad(after, state, self.gradient_at)
        size = float(length(gradient.double().flatten()))
        if not 0 < size < np.inf:
            self.gradient_at = None
            return
        self.log_size += float(np.log10(size))
        self.gradient[layer] = self.log_size
        self.gradient_at = gradient / size

    def _motion(self, layer: int, blocks: dict[Kind, Block], noise: Tensor | None = None) -> Motion:
        block = blocks[self.layers.kind(layer, self.scheme.at(layer, self.depth))]
        return Motion(self.scheme, replace(block.attention, noise=noise), float(self.depth), block.feedforward)

    def _measure(self, place: int) -> None:
        state = self.states[-1]
        measured = measure(state, torch.zeros_like(state))
        self.gap[place] = float(measured.variance) * len(state) / (len(state) - 1)
        self.radius[place] = float(measured.radius)


def reduced_flow(scheme: Scheme, depth: int, tokens: int, beta: float, radius: float = 1.0) -> dict[str, float]:
    """Theory's numbers for a scheme: the symmetric reduction (identity weights, orthogonal start) up to t = depth.

    Returns:
        first_rate: γ̇ at t = 0. early, late: mean speed in the first and last third, in degrees per layer. gap: 1 − γ at
        t = depth. NaN where the flow becomes non-finite, and for schemes without a reduction (``no_reduction``).
    """
    if no_reduction(scheme):
        return dict.fromkeys(("first_rate", "early", "late", "gap"), np.nan)
    times = np.linspace(0, depth, _SAMPLES * depth + 1)
    start = 1.0 if scheme.law_of(scheme.attention).radius_fixed else radius
    path = SymmetricFlow(scheme, tokens, beta, float(depth)).solve(times.tolist(), radius=start, step=_STEP)
    third = max(1, depth // 3) * _SAMPLES
    speed = np.full(len(times), np.nan)
    speed[: len(path.measures)] = [row["speed"] for row in path.measures]
    return {
        "first_rate": path.measures[0]["cosine_rate"],
        "early": _mean_angle(speed[: third + 1]),
        "late": _mean_angle(speed[-third - 1 :]),
        "gap": np.nan if path.stopped else path.measures[-1]["variance"] * tokens / (tokens - 1),
    }


def _mean_angle(speed: Numbers) -> float:
    """Mean over time by the trapezoidal rule, in degrees."""
    return float(np.rad2deg((speed[1:] + speed[:-1]).mean() / 2))


def ranks_of(scores: Numbers) -> Numbers:
    """Ranks from 1, the largest score, along the axis before the last; equal ones share the mean of their ranks."""
    own, other = scores[..., :, None, :], scores[..., None, :, :]
    difference = other - own
    same = np.abs(difference) <= np.maximum(_SAME * np.maximum(np.abs(own), np.abs(other)), _SMALLEST)
    above = (difference > 0) & ~same
    ranks: Numbers = above.sum(-2) + 0.5 * same.sum(-2) + 0.5
    return ranks


@dataclass(frozen=True)
class Ranking:
    """The order of schemes and its uncertainty, as tables.

    Attributes:
        criteria: a row for each scheme and criterion: mean, low, high, rank, rank_low, rank_high, runs (finite ones).
        order: a row for each scheme, the best first: place, rank, low, high, level_with, first. A place counts the schemes
            that surely rank above; ``level_with`` names those that rank surely neither above nor below; ``first`` is how
            often a scheme is first when the weights of the criteria are drawn too, all sets of weights equally likely.
        pairs: the share of redraws that rank ``scheme`` above ``other``.
    """

    criteria: pd.DataFrame
    order: pd.DataFrame
    pairs: pd.DataFrame


def rank(
    schemes: Sequence[str], criteria: Sequence[str], values: Numbers, signs: Numbers, weights: Numbers, seed: int = 0
) -> Ranking:
    """Rank schemes by the weighted mean of their ranks in the criteria.

    Runs are redrawn with replacement, the same runs for all schemes, since all went through the same layers. A redraw has one
    run fewer than there are: then its mean varies as much as the mean of the runs itself, s²/R.

    Args:
        schemes: their names.
        criteria: their names.
        values: (runs, schemes, criteria).
        signs: for each criterion 1 where large values are good, −1 where small ones are.
        weights: of the criteria.
        seed: of the redraws.
    """
    runs = len(values)
    generator = np.random.default_rng(seed)
    redrawn = generator.integers(runs, size=(REDRAWS, runs - 1))
    scores = np.where(np.isfinite(values), signs * values, _NON_FINITE)
    share = weights / (weights.sum() or 1.0)  # without any weight all schemes are level
    ranks, by_redraw = ranks_of(scores.mean(0)), ranks_of(scores[redrawn].mean(1))
    any_weights = np.where(share > 0, generator.exponential(size=(REDRAWS, 1, len(share))), 0.0)
    firsts = _firsts((by_redraw * any_weights).sum(-1))
    rank_low, rank_high = np.quantile(by_redraw, BAND, axis=0)
    rows = [
        {
            "scheme": scheme,
            "criterion": criterion,
            **_mean_of(values[:, i, j], redrawn),
            "rank": ranks[i, j],
            "rank_low": rank_low[i, j],
            "rank_high": rank_high[i, j],
            "runs": int(np.isfinite(values[:, i, j]).sum()),
        }
        for i, scheme in enumerate(schemes)
        for j, criterion in enumerate(criteria)
    ]
    return Ranking(pd.DataFrame(rows), *_order(schemes, by_redraw @ share, firsts))


def _mean_of(values: Numbers, redrawn: npt.NDArray[np.int64]) -> dict[str, float]:
    if not np.isfinite(values).all():
        return {"mean": np.nan, "low": np.nan, "high": np.nan}
    low, high = np.quantile(values[redrawn].mean(1), BAND)
    return {"mean": values.mean(), "low": low, "high": high}


def _firsts(totals: Numbers) -> Numbers:
    """In which share of the redraws each scheme is first; schemes that are level share it."""
    first = totals <= totals.min(-1, keepdims=True) * (1 + _SMALLEST)
    shares: Numbers = (first / first.sum(-1, keepdims=True)).mean(0)
    return shares


def _order(names: Sequence[str], redrawn: Numbers, firsts: Numbers) -> tuple[pd.DataFrame, pd.DataFrame]:
    difference = redrawn[:, None, :] - redrawn[:, :, None]  # positive where the row's scheme ranks above the column's
    equal = np.abs(difference) < _SMALLEST
    above = ((difference > 0) & ~equal).mean(0) + 0.5 * equal.mean(0)
    low, high = np.quantile(redrawn, BAND, axis=0)
    rows = [
        {
            "scheme": name,
            "place": 1 + int((above[:, i] >= SURE).sum()),
            "rank": redrawn[:, i].mean(),
            "low": low[i],
            "high": high[i],
            "level_with": ", ".join(other for j, other in enumerate(names) if j != i and 1 - SURE < above[i, j] < SURE),
            "first": firsts[i],
        }
        for i, name in enumerate(names)
    ]
    pairs = [
        {"scheme": name, "other": other, "above": above[i, j]}
        for i, name in enumerate(names)
        for j, other in enumerate(names)
        if i != j
    ]
    order = pd.DataFrame(rows).sort_values(["place", "rank"], kind="stable", ignore_index=True)
    return order, pd.DataFrame(pairs, columns=["scheme", "other", "above"])
