"""The shape that advice is asked for, and the shape that stands for it in simulation."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from normscope.dynamics.weights import WEIGHTS
from normscope.errors import InputError, did_you_mean

SPECTRUM = "spectrum-of"
LEVELS = (0.01, 0.1)  # RMS of the noise on norms
GAUSSIAN = 0.02  # standard deviation of gaussian weights at the width that was asked for
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
MOST_TOKENS = 128
_OPERATIONS = {"cpu": 3e12, "cuda": 4e15}  # that a default simulation may take: a minute on 2 cores or on a GPU
_NARROWEST = 8  # a head that is made narrower to save time keeps so many dimensions
_PASSES = 5.2  # forward, forward with noise at two levels, once more forward and back for the gradient


@dataclass(frozen=True)
class AdviceSetting:
    """Everything but the schemes.

    Attributes:
        depth: number of layers T.
        width: dimension d of the model.
        heads: number of heads.
        context: tokens that the model will attend to.
        weights: ``kaiming``, ``gaussian``, or ``spectrum-of``: singular values of a model's heads.
        tokens: tokens n that are simulated, at most the context.
        simulated_width: dimension that is simulated, with as many heads.
        feedforward: hidden width of a random feed-forward layer in every block, as a multiple of the width; 0 for none.
        causal: whether a token sees only itself and those before it.
        radius: length r_0 of the first states, where the length that norms give is 1.
        runs: independent draws of start, weights and noise.
        precision: ``float32`` or ``float64``.
        seed: of everything random.
        device: where it is computed.
    """

    depth: int
    width: int
    heads: int
    context: int
    weights: str = "kaiming"
    tokens: int = MOST_TOKENS
    simulated_width: int = 256
    feedforward: float = 0.0
    causal: bool = False
    radius: float = 1.0
    runs: int = 8
    precision: str = "float32"
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        least = {"depth": 1, "width": 1, "heads": 1, "context": 2, "tokens": 2, "simulated_width": 1, "runs": 2}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise InputError(f"{name.replace('_', ' ')} is at least {smallest}, not {getattr(self, name)}")
        for width in (self.width, self.simulated_width):
            if width % self.heads:
                raise InputError(f"width {width} cannot be shared among {self.heads} heads; choose a multiple of {self.heads}")
        if self.tokens > self.context:
            raise InputError(f"at most as many tokens as the context are simulated, {self.context}, not {self.tokens}")
        if self.simulated_width > self.width:
            raise InputError(f"the simulated width is at most the model's, {self.width}, not {self.simulated_width}")
        if self.simulated_width // self.heads < 2:
            raise InputError(
                f"a head needs 2 dimensions or more; width {self.simulated_width} with {self.heads} heads has fewer"
            )
        allowed = (*WEIGHTS, SPECTRUM)
        if self.weights not in allowed:
            raise InputError(
                f"weights are one of {', '.join(allowed)}, not '{self.weights}'{did_you_mean(self.weights, allowed)}"
            )
        if not (math.isfinite(self.feedforward) and self.feedforward >= 0):
            raise InputError(f"feedforward is 0 or a positive multiple of the width, not {self.feedforward}")
        if not (math.isfinite(self.radius) and self.radius > 0):
            raise InputError(f"the radius of the start is a positive number, not {self.radius}")
        if self.precision not in PRECISIONS:
            raise InputError(f"precision is one of {', '.join(PRECISIONS)}, not '{self.precision}'")

    @property
    def dtype(self) -> torch.dtype:
        """The precision as torch names it."""
        return PRECISIONS[self.precision]

    @property
    def beta(self) -> float:
        """The factor on ⟨q, k⟩: a model has √d-long states and 1/√d_h; with states of length 1 that is d/√d_h."""
        return self.simulated_width / math.sqrt(self.simulated_width / self.heads)

    @property
    def hidden(self) -> int:
        """Hidden width of the feed-forward layer that is simulated; 0 for none."""
        return round(self.feedforward * self.simulated_width)

    @property
    def record(self) -> dict[str, Any]:
        """The setting as plain values, for ``run.json``."""
        return asdict(self)

    @property
    def summary(self) -> str:
        """One line for people: what was asked for and what was simulated."""
        block = "attention alone" if not self.hidden else f"attention and a feed-forward layer of {self.feedforward:g} widths"
        seen = "causal, " if self.causal else ""
        return (
            f"{self.depth} layers, width {self.width}, {self.heads} heads, context {self.context}; simulated: {self.tokens} "
            f"tokens, width {self.simulated_width}, {block}, {seen}{self.weights} weights, new in every layer, {self.runs} "
            f"runs, {self.precision}; seed {self.seed}"
        )


def operations(depth: int, width: int, tokens: int, feedforward: float, schemes: int, runs: int) -> float:
    """Matrix operations of a simulation: products with W_Q, W_K, W_V, W_O, q kᵀ, attention · v, and the feed-forward layer."""
    a_layer = (8 + 4 * feedforward) * tokens * width**2 + 4 * tokens**2 * width
    return _PASSES * a_layer * depth * schemes * runs


def fitting_width(
    depth: int, width: int, heads: int, tokens: int, feedforward: float, schemes: int, runs: int, device: str
) -> int:
    """The width, with heads halved until the simulation fits the time; it depends on the kind of device, not on its load."""
    most = _OPERATIONS[torch.device(device).type]
    head = width // heads
    while head >= 2 * _NARROWEST and operations(depth, head * heads, tokens, feedforward, schemes, runs) > most:
        head //= 2
    return head * heads
