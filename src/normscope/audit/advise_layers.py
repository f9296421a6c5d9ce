"""The random layers that all schemes of a run go through: weights drawn anew for every layer, noise on norms.

States have length 1 where a model's norm gives √d. Then weights act as in a model if the scores' factor is d/√d_h and a head
that is normalised to √d_h in a model has length √(d_h/d) here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.audit.advise_setting import GAUSSIAN, LEVELS, SPECTRUM, AdviceSetting
from normscope.core import Attention, HeadWeights
from normscope.core.attention import Backend, attend, normalise_heads
from normscope.core.heads import project, unproject
from normscope.dynamics import FeedForward, make_start, random_weights
from normscope.errors import InputError
from normscope.models import Model
from normscope.training.tasks import stream_seed
from normscope.words import head_factors, singular_factors

Factors = Float[Tensor, "variants letters heads tokens 1"]


@dataclass(frozen=True)
class LayerAttention(Attention):
    """A(X) with head norms of radius √(d_h/d), and factors on the norms of q, k and v that no norm removes.

    Attributes:
        noise: the factors 1 + κ for every variant of x, for q, k, v in this order; None for none.
    """

    noise: Factors | None = None

    def __call__(self, x: Float[Tensor, "*batch tokens dim"], heads: str = "none") -> Float[Tensor, "*batch tokens dim"]:
        """A(X), with q, k, v normalised as the slot ``heads`` says; with noise the first dimension of x is the variants."""
        w = self.weights
        qkv = normalise_heads(project(x, w.W_Q), project(x, w.W_K), project(x, w.W_V), heads)
        q, k, v = (self._sized(y, letter, heads) for letter, y in zip("qkv", qkv, strict=True))
        return unproject(attend(q, k, v, self.beta, self.causal, self.backend), w.W_O)

    def _sized(self, y: Tensor, letter: str, heads: str) -> Tensor:
        if letter in heads:
            return y / math.sqrt(y.shape[-3])  # d_h/d is 1/heads
        return y if self.noise is None else y * self.noise[:, "qkv".index(letter)]


@dataclass(frozen=True)
class Spectrum:
    """Singular values of the heads of every layer of a model, in falling order.

    Attributes:
        name: the model.
        qk: of W_QK = W_Q W_Kᵀ.
        vo: of W_VO = W_V W_O.
    """

    name: str
    qk: Float[Tensor, "layers heads rank"]
    vo: Float[Tensor, "layers heads value_rank"]

    @classmethod
    def of(cls, view: Model) -> "Spectrum":
        """The spectrum of an opened model."""

        def values(matrix: str) -> Tensor:
            pairs = (head_factors(view, layer, matrix) for layer in range(view.layers))
            return torch.stack([singular_factors(left.double(), right.double()).values for left, right in pairs]).cpu()

        return cls(view.name, values("qk"), values("vo"))

    def at(self, matrix: str, depth: float, heads: int, rank: int) -> Float[Tensor, "heads rank"]:
        """The values at a share of the depth for so many heads of that rank: heads in turn, the curve of values resampled."""
        values = getattr(self, matrix)
        layer = values[round(depth * (len(values) - 1))]
        chosen = layer[[head * len(layer) // heads for head in range(heads)]]
        if chosen.shape[-1] == rank:
            return torch.as_tensor(chosen)
        return torch.nn.functional.interpolate(chosen[None], size=rank, mode="linear", align_corners=rank > 1)[0]


@dataclass(frozen=True)
class Block:
    """A layer's random maps for one kind of weights (``free`` or ``normalised``)."""

    attention: LayerAttention
    feedforward: FeedForward | None


@dataclass(frozen=True)
class RandomLayers:
    """What a run draws: start, weights of every layer, noise and the direction of the gradient, each from its own seed.

    Any layer can be drawn again, so the way back through the layers needs no weights kept.
    """

    setting: AdviceSetting
    run: int
    spectrum: Spectrum | None = None

    def __post_init__(self) -> None:
        if (self.setting.weights == SPECTRUM) != (self.spectrum is not None):
            raise InputError(f"weights '{SPECTRUM}' need a model whose singular values they take, and other weights take none")

    def start(self) -> Float[Tensor, "tokens dim"]:
        """Isotropic directions of length r_0."""
        s = self.setting
        generator = self._generator("start")
        start = make_start("uniform", s.tokens, s.simulated_width, generator=generator, dtype=s.dtype, device=s.device)
        return s.radius * start

    def probe(self) -> Float[Tensor, "tokens dim"]:
        """A normal G: ⟨G, Θ⟩ has a gradient whose squared length is on average the squared norm of the Jacobian of Θ."""
        s = self.setting
        return torch.randn(s.tokens, s.simulated_width, generator=self._generator("probe"), dtype=s.dtype, device=s.device)

    def noise(self, layer: int) -> Factors:
        """1 + κ on q, k, v of a layer: none for the first variant, then the same κ, uniform, at every level."""
        s = self.setting
        shape = (3, s.heads, s.tokens, 1)
        most = math.sqrt(3)
        kappa = torch.empty(shape, dtype=s.dtype, device=s.device).uniform_(
            -most, most, generator=self._generator("noise", layer)
        )
        levels = torch.tensor([0.0, *LEVELS], dtype=s.dtype, device=s.device)
        return 1 + levels[:, None, None, None, None] * kappa

    def block(self, layer: int, kinds: Sequence[str]) -> dict[str, Block]:
        """The maps of a layer for each kind of weights: the same draw, as it is or brought to unit length along the stream."""
        weights, feedforward = self._weights(layer), self._feedforward(layer)
        blocks = {}
        for kind in kinds:
            own, wide = (weights, feedforward) if kind == "free" else normalised(weights, feedforward)
            blocks[kind] = Block(LayerAttention(self.setting.beta, own, self.setting.causal, backend=self._backend), wide)
        return blocks

    @property
    def _backend(self) -> Backend | None:
        """On a GPU one that is differentiable and the same in every process, not the fastest of a trial."""
        return "blocks" if torch.device(self.setting.device).type == "cuda" else None

    def _weights(self, layer: int) -> HeadWeights:
        s = self.setting
        generator = self._generator("weights", layer)
        if self.spectrum is not None:
            return spectral_weights(self.spectrum, layer / max(s.depth - 1, 1), s, generator)
        scale = GAUSSIAN * math.sqrt(s.width / s.simulated_width)
        return random_weights(s.weights, s.simulated_width, s.heads, generator, scale=scale, dtype=s.dtype)

    def _feedforward(self, layer: int) -> FeedForward | None:
        s = self.setting
        if not s.hidden:
            return None
        generator = torch.Generator().manual_seed(self._seed("feedforward", layer))
        drawn = FeedForward.random(s.simulated_width, s.hidden, generator, s.dtype)
        return FeedForward(drawn.W_in.to(s.device), drawn.W_out.to(s.device))

    def _generator(self, stream: str, layer: int = 0) -> torch.Generator:
        return torch.Generator(self.setting.device).manual_seed(self._seed(stream, layer))

    def _seed(self, stream: str, layer: int) -> int:
        return stream_seed(self.setting.seed, f"advise {stream} {self.run}", layer)


def spectral_weights(spectrum: Spectrum, depth: float, setting: AdviceSetting, generator: torch.Generator) -> HeadWeights:
    """W_Q W_Kᵀ = U diag(σ) Vᵀ and W_V W_O likewise, with a model's σ and random orthonormal U and V."""
    d, heads, head = setting.simulated_width, setting.heads, setting.simulated_width // setting.heads

    def half(values: Tensor) -> Tensor:
        normal = torch.randn(heads, d, head, generator=generator, dtype=setting.dtype, device=setting.device)
        orthonormal: Tensor = torch.linalg.qr(normal).Q
        return orthonormal * values.to(normal).sqrt()[:, None]

    qk, vo = (spectrum.at(matrix, depth, heads, head) for matrix in ("qk", "vo"))
    return HeadWeights(half(qk), half(qk), half(vo), half(vo).mT)


def normalised(weights: HeadWeights, feedforward: FeedForward | None) -> tuple[HeadWeights, FeedForward | None]:
    """Every matrix brought to unit length along the stream's dimension, which it reads from or writes to."""

    def along(weight: Tensor, axis: int) -> Tensor:
        return torch.nn.functional.normalize(weight, dim=axis, eps=0)

    def of_heads(weight: Tensor | None, axis: int) -> Tensor | None:
        return None if weight is None else along(weight, axis)

    W_Q, W_K, W_V = (of_heads(weight, -2) for weight in (weights.W_Q, weights.W_K, weights.W_V))
    own = HeadWeights(W_Q, W_K, W_V, of_heads(weights.W_O, -1))
    wide = None if feedforward is None else FeedForward(along(feedforward.W_in, -2), along(feedforward.W_out, -1))
    return own, wide
