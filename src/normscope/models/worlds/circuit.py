"""A hand-built induction circuit: a previous-token head, then a prefix-matching head, in four subspaces.

The tokens are a first one, some types in random order, and the same again. Positions lie on a circle, and so do types:

    layer 1, previous-token head:    q = position, rotated one step back;  k = position;  writes type into previous type
    layer 2, prefix-matching head:   q = type;  k = previous type;  writes type into prediction

so each token of the repetition predicts what followed the same type the first time. Attention selects the largest logit, the
limit of a low temperature. Heads read by dual bases, which is exact for linearly independent subspaces. Two knobs remove what
only a norm at the input needs: orthogonality (``angle``), and constant norms (``spread``, of a coordinate that no head reads).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.core import HeadWeights, unproject
from normscope.core.norms import length, unit
from normscope.errors import InputError
from normscope.models.worlds.world import Subspaces, gram, project_heads, update_at
from normscope.schemes import Scheme
from normscope.schemes.update import Update

HEADS = ("previous-token", "prefix-matching")
WIDTHS = (2, 2, 2, 3)  # position, type, previous type, and prediction: a type, and a coordinate that no head reads
KNOBS = {"angle": (90.0, 5.0), "spread": (0.0, 0.99)}  # from what Pre-LN needs to far from it
_GRID = 52
_PRECISION = 1e-11


@dataclass(frozen=True)
class Selection:
    """A run of the circuit: for each head the key that each query selected, and the type that each token predicts."""

    selected: Int[Tensor, "2 tokens"]
    predicted: Int[Tensor, " tokens"]


@dataclass(frozen=True)
class InductionCircuit:
    """The circuit and its tokens.

    Attributes:
        types: how many types are repeated; with the first token there are types + 1, in 2·types + 1 tokens.
        angle: between any two of the four subspaces, in degrees.
        spread: s of the norm 1 + s·u that the prediction part starts with, u uniform in −1..1 for each token.
        seed: of the order of types, of u, and of the frame of the space.
    """

    types: int = 12
    angle: float = 90.0
    spread: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.types < 3:
            raise InputError(f"types={self.types}: the circuit needs at least 3 types")
        if not 0 <= self.spread < 1:
            raise InputError(f"spread={self.spread:g}: the spread of norms is at least 0 and below 1")

    def with_knob(self, knob: str, value: float) -> "InductionCircuit":
        """The same circuit with its ``angle`` or ``spread`` changed."""
        return replace(self, angle=value) if knob == "angle" else replace(self, spread=value)

    @cached_property
    def tokens(self) -> Int[Tensor, " tokens"]:
        """The type of every token: the first is 0, then 1 to ``types`` in random order, twice."""
        order = 1 + torch.randperm(self.types, generator=torch.Generator().manual_seed(self.seed))
        return torch.cat((torch.zeros(1, dtype=torch.long), order, order))

    @cached_property
    def codes(self) -> Float[Tensor, "types 2"]:
        """The types on a circle."""
        return _circle(torch.arange(self.types + 1), self.types + 1)

    @cached_property
    def wanted(self) -> Int[Tensor, "2 tokens"]:
        """The correct key of each query, by head; −1 for queries that do not count."""
        places = torch.arange(len(self.tokens))
        return torch.stack((places - 1, torch.where(places > self.types, places - self.types + 1, -1)))

    @cached_property
    def coordinates(self) -> Float[Tensor, "tokens 9"]:
        """The coordinates of every token before the first layer: position, type, no previous type, and an empty prediction."""
        count = len(self.tokens)
        generator = torch.Generator().manual_seed(self.seed)
        u = 2 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 1
        nothing = torch.zeros(count, 2, dtype=torch.float64)
        positions = _circle(torch.arange(count), count)
        return torch.cat((positions, self.codes[self.tokens], nothing, nothing, 1 + self.spread * u), 1)

    @cached_property
    def subspaces(self) -> Subspaces:
        """The four subspaces."""
        return Subspaces.at_angle(WIDTHS, self.angle, seed=self.seed)

    @cached_property
    def weights(self) -> tuple[HeadWeights, HeadWeights]:
        """The two heads, a layer each."""
        (_, _, E_previous, E_prediction), (D_position, D_type, D_previous, _) = self.subspaces.bases, self.subspaces.duals
        step = torch.tensor(2 * math.pi / len(self.tokens), dtype=torch.float64)
        back = torch.stack((torch.stack((step.cos(), -step.sin())), torch.stack((step.sin(), step.cos()))))
        return (
            HeadWeights((D_position @ back)[None], D_position[None], D_type[None], E_previous.T[None]),
            HeadWeights(D_type[None], D_previous[None], D_type[None], E_prediction[:, :2].T[None]),
        )

    def run(self, scheme: Scheme, corrected: bool = False) -> Selection:
        """Both layers on the embeddings, by the scheme's slots; if ``corrected``, heads write the value of the correct key.

        So each head is tested on clean inputs, whatever the head before it selects.
        """
        x = self.coordinates @ torch.cat(self.subspaces.bases, 1).T
        x = update_at(scheme, 0, 2).settle(x)
        chosen = []
        for depth, weights in enumerate(self.weights):
            q, k, v = project_heads(scheme, weights, x, depth, 2)
            chosen.append(_causal(q[0] @ k[0].T).argmax(1))
            source = torch.where(self.wanted[depth] >= 0, self.wanted[depth], chosen[-1]) if corrected else chosen[-1]
            x = update_at(scheme, depth, 2).state(x, unproject(v[:, source], weights.W_O))
        decoded = x @ self.subspaces.duals[3][:, :2] @ self.codes.T
        return Selection(torch.stack(chosen), decoded.argmax(1))

    def right(self, scheme: Scheme, corrected: bool = False) -> Bool[Tensor, " 2"]:
        """Whether each head selects the correct key, for all queries that count."""
        return ((self.run(scheme, corrected).selected == self.wanted) | (self.wanted < 0)).all(1)

    def solved(self, scheme: Scheme) -> float:
        """The share of the repeated tokens that predict what followed the same type."""
        asked = self.wanted[1] >= 0
        return float((self.run(scheme).predicted == self.tokens[self.wanted[1]])[asked].double().mean())

    def key_norms(self, scheme: Scheme) -> Float[Tensor, "2 tokens"]:
        """|k_t| of both heads while the circuit works, in closed form from coordinates a and products of bases G alone.

        A norm puts the factor 1/|x_t|, |x|² = aᵀG a, on every part; normalised keys have norm 1.
        """
        G = gram(WIDTHS, math.cos(math.radians(self.angle)))
        a, kept = self.coordinates, []

        def norm(a: Tensor) -> Tensor:
            return a / ((a @ G) * a).sum(1, keepdim=True).sqrt()

        for depth, key in enumerate((slice(0, 2), slice(4, 6))):
            stage = scheme.at(depth, 2)
            update = Update.of(stage.attention, stage.place(depth, 2), norm)
            a = update.settle(a)
            read = update.read(a)
            keys = length(read[:, key])
            kept.append((torch.ones_like(keys) if "k" in stage.attention.heads else keys).squeeze(1))
            values = unit(read[:, 2:4]) if "v" in stage.attention.heads else read[:, 2:4]
            output = torch.zeros_like(a)
            output[:, 4:6] = _before(values)
            a = update.state(a, output)
        return torch.stack(kept)

    def margins(self, scheme: Scheme) -> Float[Tensor, " 2"]:
        """How far each head is from collapse by Theorem 7: min over queries and t of w_t*/w_t − λ; negative means collapsed.

        The logits w are those of the codes, and 1 + κ_t is the norm of a key over the mean. The query's factor is common to
        all t, a temperature: κ^q = 0.
        """
        positions, codes = self.coordinates[:, :2], self.codes[self.tokens]
        scores = (positions.roll(1, 0) @ positions.T, codes @ _before(codes).T)
        margins = []
        for w, norms, wanted in zip(scores, self.key_norms(scheme), self.wanted, strict=True):
            asked, kappa = wanted >= 0, norms / norms.mean() - 1
            margins.append(theorem_7_margin(_causal(w)[asked], kappa, wanted[asked]).min())
        return torch.stack(margins)


def theorem_7_margin(
    w: Float[Tensor, "*queries keys"],
    kappa: Float[Tensor, "*queries keys"] | Float[Tensor, " keys"],
    selected: Int[Tensor, " *queries"],
    kappa_q: float = 0.0,
) -> Float[Tensor, " *queries"]:
    """min_t ±(w_t*/w_t − λ_t) over t ≠ t*, with λ_t = (1 + κ^q + κ_t)/(1 + κ^q + κ_t*): negative where attention collapses.

    The sign is + where w_t(1 + κ^q + κ_t*) > 0 and − where it is negative. A logit of 0 never overtakes, nor does one of −∞, a
    masked key.
    """
    at, noise = selected[..., None], (1 + kappa_q + kappa).expand_as(w)
    ratio, other = w.gather(-1, at) / w, noise / noise.gather(-1, at)
    margin = torch.where(w * noise.gather(-1, at) > 0, ratio - other, other - ratio)
    never = (w == 0) | w.isinf()
    return margin.masked_fill(never, torch.inf).scatter(-1, at, torch.inf).amin(-1)


def breaking_point(holds: Callable[[float], bool], first: float, last: float, grid: int = _GRID) -> float:
    """Where a condition first fails on the way from ``first`` to ``last``; NaN if it never does.

    The interval is searched at ``grid`` places, then halved.
    """
    values = [first + (last - first) * i / (grid - 1) for i in range(grid)]
    broken = next((i for i, value in enumerate(values) if not holds(value)), None)
    if broken is None:
        return math.nan
    if broken == 0:
        return first
    good, bad = values[broken - 1], values[broken]
    while abs(bad - good) > _PRECISION * max(abs(first), abs(last)):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return (good + bad) / 2


def breaking_points(circuit: InductionCircuit, scheme: Scheme, knob: str) -> dict[str, tuple[float, float]]:
    """The knob's value at which each head, on clean inputs, and the circuit break: predicted by Theorem 7, and observed."""
    first, last = KNOBS[knob]

    @cache
    def holds(value: float) -> Bool[Tensor, "6"]:
        """Both heads by theory and on clean inputs, then both as they run."""
        turned = circuit.with_knob(knob, value)
        running = turned.right(scheme)
        # while the first head is right, the input of the second needs no correction
        alone = running if running[0] else turned.right(scheme, corrected=True)
        return torch.cat((turned.margins(scheme) > 0, alone, running))

    def point(*which: int) -> float:
        return breaking_point(lambda value: bool(holds(value)[list(which)].all()), first, last)

    return {HEADS[0]: (point(0), point(2)), HEADS[1]: (point(1), point(3)), "circuit": (point(0, 1), point(4, 5))}


def _before(tokens: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
    """For every token the one before it; for the first, itself."""
    return torch.cat((tokens[:1], tokens[:-1]))


def _circle(places: Int[Tensor, " places"], count: int) -> Float[Tensor, "places 2"]:
    angles = places.double() * (2 * math.pi / count)
    return torch.stack((angles.cos(), angles.sin()), 1)


def _causal(scores: Float[Tensor, "tokens tokens"]) -> Float[Tensor, "tokens tokens"]:
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
