"""One run of a simulation for advice: all schemes through the same random layers, forwards and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.audit.advise_layers import Block, RandomLayers
from normscope.audit.advise_setting import LEVELS
from normscope.core.norms import length, unit
from normscope.dynamics import Motion, measure
from normscope.dynamics.trajectory import NotFiniteError
from normscope.schemes import Scheme

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RunMeasures:
    """What a run measures of every scheme; NaN from the layer on where a scheme left the finite numbers.

    Attributes:
        turned: mean angle by which each layer turns a token, in degrees; (schemes, layers).
        moved: the same without the turn that all tokens make together, ``apart``; (schemes, layers).
        gap: 1 − mean cosine of the state that each layer reads, and of the last one; (schemes, layers + 1).
        radius: mean length of these states; (schemes, layers + 1).
        gradient: log₁₀ of ‖∂⟨G, Θ⟩/∂X‖ at the state that each layer reads, Θ the last directions; (schemes, layers).
        drift: mean angle between the last directions with noise and without, in degrees; (schemes, levels).
    """

    turned: Numbers
    moved: Numbers
    gap: Numbers
    radius: Numbers
    gradient: Numbers
    drift: Numbers


def measure_run(layers: RandomLayers, schemes: Sequence[Scheme], tick: Callable[[], None] = lambda: None) -> RunMeasures:
    """Forwards with and without noise, and back; ``tick`` is called after every layer, twice ``depth`` times."""
    first = layers.block(0, _kinds(schemes, 0, layers))
    paths = [_Path.of(scheme, layers, first) for scheme in schemes]
    with torch.no_grad():
        for layer in range(layers.setting.depth):
            blocks, noise = layers.block(layer, _kinds(schemes, layer, layers)), layers.noise(layer)
            for path in paths:
                path.forward(layer, blocks, noise)
            tick()
    for path in paths:
        path.turn_round(layers.probe())
    for layer in reversed(range(layers.setting.depth)):
        blocks = layers.block(layer, _kinds(schemes, layer, layers))
        for path in paths:
            path.back(layer, blocks)
        tick()
    return RunMeasures(*(np.stack([getattr(path, field.name) for path in paths]) for field in fields(RunMeasures)))


def disturbed(scheme: Scheme) -> bool:
    """Whether noise on the norms of q, k and v reaches anything: not where all three are normalised after it."""
    return any(stage.attention.heads != "qkv" for stage in scheme.stages)


def angles(a: Float[Tensor, "*batch dim"], b: Float[Tensor, "*batch dim"]) -> Float[Tensor, " *batch"]:
    """Angles between vectors in degrees, exact where they are small: 2 arcsin(|â − b̂|/2)."""
    half = length(unit(a) - unit(b)).squeeze(-1) / 2
    return torch.rad2deg(2 * torch.asin(half.clamp(max=1)))


def apart(before: Float[Tensor, "tokens dim"], after: Float[Tensor, "tokens dim"]) -> Float[Tensor, " tokens"]:
    """Angles in degrees between R θ_j and θ′_j, where R is the smallest rotation that takes the mean direction θ̄ to θ̄′.

    With a = θ̄/|θ̄| and b = θ̄′/|θ̄′|, R y = y − (⟨a + b, y⟩/(1 + ⟨a, b⟩)) (a + b) + 2⟨a, y⟩ b. A cluster that turns as a
    whole does not move by this measure; where the mean direction stays, as in the symmetric case of theory, R is the identity.
    """
    theta = unit(before)
    a, b = unit(theta.mean(0)), unit(unit(after).mean(0))
    both = a + b
    turned = theta - ((theta @ both) / (1 + a @ b).clamp(min=1e-6))[:, None] * both + 2 * (theta @ a)[:, None] * b
    return angles(turned, after)


class _Path:
    """A scheme on its way through the layers of a run."""

    def __init__(self, scheme: Scheme, depth: int, start: Float[Tensor, "tokens dim"]) -> None:
        self.scheme, self.depth = scheme, depth
        variants = 1 + len(LEVELS) if disturbed(scheme) else 1
        self.x: Tensor | None = start.expand(variants, *start.shape)
        self.states = [start]
        self.gradient_at: Tensor | None = None
        self.log_size = 0.0
        self.turned, self.moved, self.gradient = (np.full(depth, np.nan) for _ in range(3))
        self.gap, self.radius = np.full(depth + 1, np.nan), np.full(depth + 1, np.nan)
        self.drift = np.full(len(LEVELS), np.nan)
        self._measure(0)

    @classmethod
    def of(cls, scheme: Scheme, layers: RandomLayers, blocks: dict[str, Block]) -> "_Path":
        depth = layers.setting.depth
        motion = _motion(scheme, depth, blocks[scheme.at(0, depth).weights], None)
        return cls(scheme, depth, motion.settle(layers.start(), 0.0))

    def forward(self, layer: int, blocks: dict[str, Block], noise: Tensor) -> None:
        """One layer on, for all variants at once."""
        if self.x is None:
            return
        block = blocks[self.scheme.at(layer, self.depth).weights]
        motion = _motion(self.scheme, self.depth, block, noise if len(self.x) > 1 else None)
        try:
            after = motion.layer(self.x, float(layer))
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
        """The last directions: what noise did to them, and the gradient of ⟨G, Θ⟩ there."""
        if self.x is None:
            return
        self.drift[:] = 0.0
        for level in range(1, len(self.x)):
            self.drift[level - 1] = float(angles(self.x[0], self.x[level]).mean(dtype=torch.float64))
        last = self.states.pop().requires_grad_()
        (self.gradient_at,) = torch.autograd.grad((probe * unit(last)).sum(), last)

    def back(self, layer: int, blocks: dict[str, Block]) -> None:
        """The gradient at the state that the layer reads; its length is kept apart, so that it never underflows."""
        if self.gradient_at is None:
            return
        motion = _motion(self.scheme, self.depth, blocks[self.scheme.at(layer, self.depth).weights], None)
        state = self.states.pop().detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(motion.layer(state, float(layer)), state, self.gradient_at)
        size = float(torch.linalg.vector_norm(gradient.double()))
        if not 0 < size < np.inf:
            self.gradient_at = None
            return
        self.log_size += float(np.log10(size))
        self.gradient[layer] = self.log_size
        self.gradient_at = gradient / size

    def _measure(self, place: int) -> None:
        state = self.states[-1]
        found = measure(state, torch.zeros_like(state))
        self.gap[place] = float(found.variance) * len(state) / (len(state) - 1)
        self.radius[place] = float(found.radius)


def _motion(scheme: Scheme, depth: int, block: Block, noise: Tensor | None) -> Motion:
    return Motion(scheme, replace(block.attention, noise=noise), float(depth), block.feedforward)


def _kinds(schemes: Sequence[Scheme], layer: int, layers: RandomLayers) -> list[str]:
    """The kinds of weights that the schemes have at a layer."""
    return sorted({scheme.at(layer, layers.setting.depth).weights for scheme in schemes})
