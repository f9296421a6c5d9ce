"""What a block is made of: attention, the feed-forward layer, norms and learned scales.

A gain g before a matrix is folded into it, W diag(g) Norm(x): q, k and v have separate gains and still are one product.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normscope.core import AttentionMask, HeadNorm
from normscope.core.norms import EPSILON, NORMS, POINTWISE, SLOPE, pointwise
from normscope.core.swiglu import swiglu
from normscope.schemes import Scheme
from normscope.transformer.calibration import Calibrated
from normscope.transformer.config import TransformerConfig

_ROPE_BASE = 10_000.0
States = Float[Tensor, "rows tokens dim"]
Matrices = list[tuple[Tensor, int]]  # each with the axis of the residual stream's dimension
Rotation = tuple[Float[Tensor, "#rows tokens head"], Float[Tensor, "#rows tokens head"]]  # factors on components, on partners


class Attention(nn.Module):
    """(gate ⊙ inner(scores(scale·q kᵀ) v)) W_O over all heads, gate = σ(x W_G); W_Q, W_K and W_V are one matrix.

    ``initial`` is a factor on W_V and W_O at the start.
    """

    def __init__(self, config: TransformerConfig, stage: Scheme, initial: float = 1.0) -> None:
        super().__init__()
        heads, dim, head, slots = config.heads, config.dim, config.head, stage.attention
        self.free = free = stage.weights == "free"
        like_scores = math.sqrt(3) * (0.1 / head**3) ** 0.25
        most = torch.tensor([like_scores, like_scores, math.sqrt(3 / head)])[:, None, None]
        self.W_QKV = drawn(config.initial_std, most, dim, 3, heads, head)
        self.W_O = drawn(config.initial_std, math.sqrt(3 / (heads * head)), heads, head, dim)
        with torch.no_grad():
            self.W_QKV[:, 2].mul_(initial)
            self.W_O.mul_(initial)
        folded = slots.reads_norm and free and not stage.pointwise
        self.input_gains = LearnedScale(1 if config.shared_gains else 3, dim) if folded else None
        letters = [] if slots.heads == "none" else list(slots.heads)
        self.kind = stage.head_kind
        gains = 1 if config.shared_gains and config.positions == "rope" else heads  # Qwen3 and Gemma 3 have one for all heads
        self.norms = nn.ModuleDict({letter: Norm(self.kind, LearnedScale(gains, head) if free else None) for letter in letters})
        self.scores = None if slots.score_rule.plain else slots.score_rule
        sink = slots.score_rule.sink
        self.sink = None if sink is None else nn.Parameter(torch.full((heads,), sink))
        self.inner = norm_in(slots.inner, stage.norm, heads * head, free)
        self.W_G = glorot(config.initial_std, dim, heads * head) if slots.gate == "sigmoid" else None
        self.score_gain = None if free else LearnedScale(heads, head, base=dim**-0.5)  # one for q and k, as nGPT has it
        self.score_scale = Calibrated(0.1 if free else None, start=head**-0.5)

    def matrices(self) -> Matrices:
        """W_Q, W_K and W_V in one, W_O, and W_G if there is a gate."""
        gate: Matrices = [] if self.W_G is None else [(self.W_G, 0)]
        return [(self.W_QKV, 0), (self.W_O, -1), *gate]

    def forward(self, x: States, mask: AttentionMask, memory: Tensor | None = None, rotation: Rotation | None = None) -> States:
        """Queries from x; keys and values from ``memory`` if it is given, else from x; q and k by their positions' rotation."""
        weights, norm, scale = self.W_QKV, self.head_norm, self.score_scale
        if self.input_gains is not None:
            weights = weights * self.input_gains().T[:, :, None, None]
        if memory is None and rotation is None and self.scores is None:  # in one tensor, which packed rows have a kernel for
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
            mixed = self._mixed(mask, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        heads: Tensor = self.inner(mixed.transpose(1, 2).flatten(2))
        if self.W_G is not None:
            heads = heads * torch.sigmoid(x @ self.gate_weights)
        return heads @ self.W_O.flatten(0, 1)

    @property
    def gate_weights(self) -> Float[Tensor, "dim heads_head"]:
        """W_G with the gain of its input, which is that of q."""
        assert self.W_G is not None
        return self.W_G if self.input_gains is None else self.W_G * self.input_gains()[0][:, None]

    def _mixed(self, mask: AttentionMask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The values that heads mix, (rows, heads, tokens, head)."""
        factor = self.score_scale.factor
        if self.scores is None:
            return mask(q, k, v, factor)
        return mask.scored(q, k, v, factor, self.scores, self.sink)

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
    """inner(φ(x W_in + b_in)) W_out + b_out with φ relu or gelu; swiglu: φ = u ⊙ silu(v), u and v the halves of x W_in.

    Normalised weights have a learned scale for each hidden unit in place of the biases. nGPT also multiplies v by √d, which
    norms of radius √d have done already. ``initial`` is a factor on both matrices at the start.
    """

    def __init__(self, config: TransformerConfig, stage: Scheme, initial: float = 1.0) -> None:
        super().__init__()
        dim, hidden, self.activation = config.dim, config.feedforward, config.activation
        wide = 2 * hidden if self.activation == "swiglu" else hidden
        self.free = free = stage.weights == "free"
        self.W_in, self.W_out = glorot(config.initial_std, dim, wide), glorot(config.initial_std, hidden, dim)
        with torch.no_grad():
            self.W_in.mul_(initial)
            self.W_out.mul_(initial)
        biased = free and config.biases
        self.b_in, self.b_out = (nn.Parameter(torch.zeros(n)) if biased else None for n in (wide, dim))
        folded = stage.feedforward.reads_norm and free and config.feedforward_kind(stage) not in POINTWISE
        self.input_gain = LearnedScale(dim) if folded else None
        self.inner = norm_in(stage.feedforward.inner, stage.norm, hidden, free)
        self.hidden_scale = None if free else LearnedScale(wide)

    def matrices(self) -> Matrices:
        """W_in and W_out."""
        return [(self.W_in, -2), (self.W_out, -1)]

    def forward(
        self, x: States, mask: AttentionMask | None = None, memory: Tensor | None = None, rotation: Rotation | None = None
    ) -> States:
        """F of every token; mask, memory and rotation are attention's."""
        W_in = self.W_in if self.input_gain is None else self.W_in * self.input_gain()[:, None]
        if self.hidden_scale is not None:  # there are no biases with it
            W_in = W_in * self.hidden_scale()
        hidden = self._activated(F.linear(x, W_in.T, self.b_in))
        return F.linear(self.inner(hidden), self.W_out.T, self.b_out)

    def _activated(self, hidden: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return swiglu(hidden)
        return F.gelu(hidden) if self.activation == "gelu" else F.relu(hidden)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, with a gain or without; or a pointwise map in its place.

    A map φ(a·x + s) learns the number a, with erf also s, and where it has a gain also a bias.
    """

    def __init__(self, kind: str, gain: "LearnedScale | None" = None) -> None:
        super().__init__()
        self.kind, self.gain = kind, gain
        self.slope = nn.Parameter(torch.tensor(SLOPE)) if kind in POINTWISE else None
        self.shift = nn.Parameter(torch.tensor(0.0)) if kind == "erf" else None
        self.bias = nn.Parameter(torch.zeros_like(gain.value)) if gain is not None and kind in POINTWISE else None

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Gain · √d · x/|x|, with LayerNorm of the centred x; gain · φ(a·x + s) + bias."""
        if self.slope is None:
            normalised = NORMS[self.kind](x, eps=EPSILON)
        else:
            normalised = pointwise(x, self.kind, self.slope, 0.0 if self.shift is None else self.shift)
        if self.gain is not None:
            normalised = normalised * self.gain().to(x.dtype)
        return normalised if self.bias is None else normalised + self.bias.to(x.dtype)


def norm_in(slot: str, kind: str, width: int, gain: bool) -> nn.Module:
    """The norm of a slot, with a gain or without; the identity where the slot has none."""
    return Norm(kind, LearnedScale(width) if gain else None) if slot == "norm" else nn.Identity()


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
    """Cos φ_i for components i and i + head/2 of a head, and ∓sin φ_i for their partners; φ_i = position · 10000^(−2i/head)."""
    along = torch.arange(0, head, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].to(torch.float32) / _ROPE_BASE ** (along / head)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Float[Tensor, "rows tokens heads head"], rotation: Rotation) -> Float[Tensor, "rows tokens heads head"]:
    """RoPE: components i and i + head/2 of every head are rotated by the angle of their position, as Llama pairs them.

    The halves are swapped, not split and joined: a compiler makes an index of that, forward and backward.
    """
    own, other = (part[..., None, :] for part in rotation)
    partners = torch.unflatten(x, -1, (2, x.shape[-1] // 2)).flip(-2).flatten(-2)
    return (x * own + partners * other).to(x.dtype)


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
