"""What a block is made of: attention, the feed-forward layer, norms and learned scales.

A gain g before a matrix is folded into it, W diag(g) Norm(x): q, k and v have separate gains and still are one product.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normscope.core import AttentionMask, HeadNorm, unproject
from normscope.core.norms import EPSILON, NORMS
from normscope.schemes import Scheme
from normscope.transformer.calibration import Calibrated
from normscope.transformer.config import TransformerConfig

_ROPE_BASE = 10_000.0
States = Float[Tensor, "rows tokens dim"]
Matrices = list[tuple[Tensor, int]]  # each with the axis of the residual stream's dimension
Rotation = tuple[Float[Tensor, "#rows tokens half"], Float[Tensor, "#rows tokens half"]]  # cosine and sine of RoPE's angles


class Attention(nn.Module):
    """Σ_heads softmax(scale·q kᵀ) v W_O; W_Q, W_K and W_V are one matrix, read in one product."""

    def __init__(self, config: TransformerConfig, stage: Scheme) -> None:
        super().__init__()
        heads, dim, head, slots = config.heads, config.dim, config.head, stage.attention
        self.free = free = stage.weights == "free"
        like_scores = math.sqrt(3) * (0.1 / head**3) ** 0.25
        most = torch.tensor([like_scores, like_scores, math.sqrt(3 / head)])[:, None, None]
        self.W_QKV = drawn(config.initial_std, most, dim, 3, heads, head)
        self.W_O = drawn(config.initial_std, math.sqrt(3 / (heads * head)), heads, head, dim)
        self.input_gains = LearnedScale(1 if config.shared_gains else 3, dim) if slots.reads_norm and free else None
        letters = [] if slots.heads == "none" else list(slots.heads)
        self.kind = stage.norm
        self.norms = nn.ModuleDict(
            {letter: Norm(stage.norm, LearnedScale(heads, head) if free else None) for letter in letters}
        )
        self.score_gain = None if free else LearnedScale(heads, head, base=dim**-0.5)  # one for q and k, as nGPT has it
        self.score_scale = Calibrated(0.1 if free else None, start=head**-0.5)

    def matrices(self) -> Matrices:
        """W_Q, W_K and W_V in one, and W_O."""
        return [(self.W_QKV, 0), (self.W_O, -1)]

    def forward(self, x: States, mask: AttentionMask, memory: Tensor | None = None, rotation: Rotation | None = None) -> States:
        """Queries from x; keys and values from ``memory`` if it is given, else from x; q and k by their positions' rotation."""
        weights, norm, scale = self.W_QKV, self.head_norm, self.score_scale
        if self.input_gains is not None:
            weights = weights * self.input_gains().T[:, :, None, None]
        if memory is None and rotation is None:  # q, k and v stay in one tensor, which packed rows have a kernel for
            qkv = _by_token(x, weights)
            if scale.measuring:
                self._calibrate(mask, *(qkv if norm is None else norm(qkv)).unbind(2)[:2])
            mixed = mask.stacked(qkv, scale.factor, norm)
        else:
            if memory is None:
                q, k, v = self.positioned(_by_token(x, weights).unbind(2), norm, rotation)
            else:
                kv = _by_token(memory, weights[:, 1:])
                q, k, v = self.positioned((_by_token(x, weights[:, 0]), *kv.unbind(2)), norm, None)
            if scale.measuring:
                self._calibrate(mask, q, k)
            mixed = mask(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale.factor)
        return unproject(mixed, self.W_O)

    def positioned(
        self, qkv: tuple[Tensor, ...], norm: HeadNorm | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q, k, v (rows, tokens, heads, head), normalised, and q, k rotated by their positions.

        Normalised weights rotate first, since nGPT scales components after RoPE.
        """
        q, k, v = qkv
        if rotation is not None and not self.free:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if norm is not None:
            q, k = norm.single("q", q), norm.single("k", k)
            v = norm.single("v", v) if "v" in norm.letters else v  # v has a gain only with a norm
        if rotation is not None and self.free:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    @property
    def head_norm(self) -> HeadNorm | None:
        """The norms and gains of q, k and v; None if they are left as they are."""
        if not self.norms and self.score_gain is None:
            return None
        ones = torch.ones_like(self.W_QKV[0, 0])
        of_scores = ones if self.score_gain is None else self.score_gain()
        factors = {"q": of_scores, "k": of_scores, "v": ones}
        for letter, norm in self.norms.items():
            if isinstance(norm, Norm) and norm.gain is not None:
                factors[letter] = factors[letter] * norm.gain()
        return HeadNorm("".join(self.norms), self.kind, torch.stack([factors[letter] for letter in "qkv"]))

    def _calibrate(self, mask: AttentionMask, q: Tensor, k: Tensor) -> None:
        scores, seen = mask.scores(q.transpose(1, 2), k.transpose(1, 2))
        self.score_scale.fit(scores[seen.expand_as(scores)])


class FeedForward(nn.Module):
    """φ(x W_in + b_in) W_out + b_out with φ relu or gelu; swiglu: (u ⊙ silu(v)) W_out with u, v the two halves of x W_in.

    Normalised weights have a learned scale for each hidden unit in place of the biases. nGPT also multiplies v by √d, which
    norms of radius √d have done already.
    """

    def __init__(self, config: TransformerConfig, stage: Scheme) -> None:
        super().__init__()
        dim, hidden, self.activation = config.dim, config.feedforward, config.activation
        wide = 2 * hidden if self.activation == "swiglu" else hidden
        self.free = free = stage.weights == "free"
        self.W_in, self.W_out = glorot(config.initial_std, dim, wide), glorot(config.initial_std, hidden, dim)
        biased = free and config.biases
        self.b_in, self.b_out = (nn.Parameter(torch.zeros(n)) if biased else None for n in (wide, dim))
        self.input_gain = LearnedScale(dim) if stage.feedforward.reads_norm and free else None
        self.hidden_scale = None if free else LearnedScale(wide)

    def matrices(self) -> Matrices:
        """W_in and W_out."""
        return [(self.W_in, -2), (self.W_out, -1)]

    def forward(
        self, x: States, mask: AttentionMask | None = None, memory: Tensor | None = None, rotation: Rotation | None = None
    ) -> States:
        """F of every token; mask, memory and rotation are attention's."""
        W_in = self.W_in if self.input_gain is None else self.W_in * self.input_gain()[:, None]
        hidden = F.linear(x, W_in.T, self.b_in)
        if self.hidden_scale is not None:
            hidden = hidden * self.hidden_scale()
        return F.linear(self._activated(hidden), self.W_out.T, self.b_out)

    def _activated(self, hidden: Tensor) -> Tensor:
        if self.activation == "swiglu":
            u, v = hidden.chunk(2, -1)
            return u * F.silu(v)
        return F.gelu(hidden) if self.activation == "gelu" else F.relu(hidden)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, with a gain or without."""

    def __init__(self, kind: str, gain: "LearnedScale | None" = None) -> None:
        super().__init__()
        self.kind, self.gain = kind, gain

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Gain · √d · x/|x|, with LayerNorm of the centred x."""
        normalised = NORMS[self.kind](x, eps=EPSILON)
        return normalised if self.gain is None else normalised * self.gain().to(x.dtype)


class LearnedScale(nn.Module):
    """A learned factor for each component, started at ``start``.

    The parameter is base/start times the factor: with one learning rate for all parameters, the factor moves start/base times
    as fast.
    """

    ratio: Tensor

    def __init__(self, *shape: int, start: float = 1.0, base: float = 1.0) -> None:
        super().__init__()
        ratio = (start or 1.0) / base
        self.register_buffer("ratio", number(ratio), persistent=False)
        self.value = nn.Parameter(torch.full(shape, start / ratio))

    def forward(self) -> Tensor:
        """The factors."""
        return self.value * self.ratio


def rope_angles(positions: Tensor, head: int, dtype: torch.dtype) -> Rotation:
    """Cosine and sine of position · 10000^(−2i/head) for i < head/2."""
    along = torch.arange(0, head, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].to(torch.float32) / _ROPE_BASE ** (along / head)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Float[Tensor, "rows tokens heads head"], rotation: Rotation) -> Float[Tensor, "rows tokens heads head"]:
    """RoPE: components i and i + head/2 of every head turn by the angle of their position, as Llama pairs them."""
    cos, sin = (part[..., None, :] for part in rotation)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def number(value: float) -> Tensor:
    """A fixed number as a tensor, so that one compiled block serves every depth; float64, so that no precision rounds it."""
    return torch.tensor(value, dtype=torch.float64)


def drawn(std: float | None, most: float | Tensor, *shape: int) -> nn.Parameter:
    """A matrix from the normal distribution with a standard deviation, or uniform in [−most, most] if that is None."""
    if std is not None:
        return nn.Parameter(std * torch.randn(shape))
    if isinstance(most, Tensor):
        return nn.Parameter(most * torch.empty(shape).uniform_(-1, 1))
    return nn.Parameter(torch.empty(shape).uniform_(-most, most))


def glorot(std: float | None, rows: int, columns: int) -> nn.Parameter:
    """A matrix with the standard deviation, or with Glorot's if it is None."""
    return drawn(std, math.sqrt(6 / (rows + columns)), rows, columns)


def _by_token(x: States, weights: Float[Tensor, "dim *qkv head"]) -> Float[Tensor, "rows tokens *qkv head"]:
    """X W for q, k, v and all heads in one product, token by token."""
    return (x @ weights.flatten(1)).reshape(*x.shape[:-1], *weights.shape[1:])
