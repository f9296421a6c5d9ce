"""The model, top to bottom: embedding and cyclic positions, blocks of residual sublayers, a small readout.

A sublayer at depth t is x ← stream(carry·x + step·output(f(input(x)))): an ``Update`` with the slots of its scheme and norms of
radius √d. A gain g before a matrix is folded into it, W diag(g) Norm(x): q, k and v have separate gains and still are one
product.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from normscope.core import AttentionMask, HeadNorm, unproject
from normscope.core.norms import EPSILON, NORMS, unit
from normscope.errors import InputError
from normscope.schemes import At, Scheme, Slots
from normscope.schemes.update import Update
from normscope.transformer.calibration import Calibrated
from normscope.transformer.config import TransformerConfig

_SHORTEST_PERIOD, _LONGEST_PERIOD = 3.0, 1000.0
States = Float[Tensor, "rows tokens dim"]
Matrices = list[tuple[Tensor, int]]  # each with the axis of the residual stream's dimension


@dataclass(frozen=True)
class Row:
    """What a stack of blocks reads: characters, their positions, and the attention mask."""

    characters: Int[Tensor, "rows tokens"]
    positions: Int[Tensor, "rows tokens"]
    mask: AttentionMask


class Transformer(nn.Module):
    """A decoder, or an encoder and a decoder, for any scheme."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        encoder, decoder = config.encoder_layers, config.layers
        self.embed = Embedding(config)
        self.encoder = nn.ModuleList(Block(config, t, encoder, crossed=False) for t in range(encoder))
        self.decoder = nn.ModuleList(Block(config, t, decoder, crossed=encoder > 0) for t in range(decoder))
        self.readout = Readout(config)
        self.renormalise()

    def forward(
        self,
        row: Row,
        source: Row | None = None,
        memory_mask: AttentionMask | None = None,
        logits_to_keep: Int[Tensor, " positions"] | None = None,
    ) -> Float[Tensor, "*positions characters"]:
        """Logits of the next character at every position, or at those of ``logits_to_keep``, counted through all rows.

        After the last attention positions no longer interact, so the rest is computed for those positions alone.
        An encoder-decoder also takes the ``source`` that its encoder reads, and the mask of the decoder's attention to it.
        """
        decoder_only = len(self.encoder) == 0
        if (source is None) != decoder_only or (memory_mask is None) != decoder_only:
            raise InputError("an encoder-decoder needs source= and memory_mask=; a decoder alone takes neither")
        memory = None
        if source is not None:
            memory = self.embed(source)
            for block in self.encoder:
                memory = block(memory, source.mask)
        x = self.embed(row)
        *blocks, last = self.decoder
        for block in blocks:
            x = block(x, row.mask, memory, memory_mask)
        logits: Tensor = self.readout(last(x, row.mask, memory, memory_mask, logits_to_keep))
        return logits if logits_to_keep is None else logits[0]

    @torch.no_grad()
    def renormalise(self) -> None:
        """Bring the matrices of stages whose weights are normalised back to unit length along the stream."""
        for module in self.modules_with_matrices():
            if not module.free:
                for weight, axis in module.matrices():
                    weight.copy_(unit(weight, axis))

    def modules_with_matrices(self) -> "Iterator[Embedding | Attention | FeedForward | Readout]":
        """Every module that has matrices of its own."""
        yield from (m for m in self.modules() if isinstance(m, Embedding | Attention | FeedForward | Readout))


class Embedding(nn.Module):
    """Type plus position: sine and cosine of learned frequencies in the first components, zero in the others."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        first = config.scheme.at(0, config.layers)
        self.free = first.weights == "free"
        self.types = _glorot(config.vocabulary, config.dim)
        share = torch.linspace(0, 1, config.frequencies, dtype=torch.float64)
        periods = _SHORTEST_PERIOD * (_LONGEST_PERIOD / _SHORTEST_PERIOD) ** share
        self.frequencies = nn.Parameter((2 * math.pi / periods).float())
        self.type_scale, self.scale = Calibrated(0.5), Calibrated(1.0)
        self.norm = Norm(first.norm) if first.on_sphere() else nn.Identity()

    def matrices(self) -> Matrices:
        """The types."""
        return [(self.types, -1)]

    def forward(self, row: Row) -> States:
        """The initial hidden states, normalised if any sublayer of the first block normalises the stream."""
        one_hot = F.one_hot(row.characters, len(self.types)).to(self.types.dtype)
        types = (one_hot @ self.types).to(self.types.dtype)  # a product's gradient adds up in the same order every time
        angles = row.positions[..., None] * self.frequencies
        waves = torch.cat((angles.sin(), angles.cos()), -1)
        positions = F.pad(waves, (0, self.types.shape[1] - waves.shape[-1]))
        states: Tensor = self.norm(self.scale(self.type_scale(types) + positions))
        return states


class Block(nn.Module):
    """Attention, attention to the encoder where there is one, and a feed-forward layer, each a residual sublayer."""

    def __init__(self, config: TransformerConfig, t: int, depth: int, crossed: bool) -> None:
        super().__init__()
        stage = config.scheme.at(t, depth)
        at = stage.place(t, depth)

        def attention() -> Sublayer:
            return Sublayer(Attention(config, stage), stage.attention, stage.norm, stage.norm, at, config.dim)

        self.attention = attention()
        self.cross = attention() if crossed else None
        kind = config.feedforward_norm or stage.norm
        self.feedforward = Sublayer(FeedForward(config, stage), stage.feedforward, stage.norm, kind, at, config.dim)

    def forward(
        self,
        x: States,
        mask: AttentionMask,
        memory: Tensor | None = None,
        memory_mask: AttentionMask | None = None,
        keep: Int[Tensor, " positions"] | None = None,
    ) -> Float[Tensor, "rows_or_one tokens_or_positions dim"]:
        """The hidden states after the block, or those of some positions alone, in one row."""
        x = self.attention(x, mask)
        if self.cross is not None:
            x = self.cross(x, memory_mask, memory)
        x = self.feedforward(x if keep is None else x.flatten(0, 1)[keep][None])
        return x


class Sublayer(nn.Module):
    """One residual sublayer: f (attention or feed-forward) within the ``Update`` of its slots at one depth."""

    def __init__(self, f: "Attention | FeedForward", slots: Slots, kind: str, input_kind: str, at: At, dim: int) -> None:
        super().__init__()
        free = f.free  # normalised matrices have a fixed scale: nothing to calibrate, and no gains

        def norm(slot: str) -> nn.Module:
            return nn.Identity() if slot == "none" else Norm(kind, LearnedScale(dim) if free else None)

        self.f, self.at = f, at.values
        self.input = Norm(input_kind) if slots.reads_norm else nn.Identity()  # its gain is folded into the matrices of f
        self.output, self.stream = norm(slots.output), norm(slots.stream)
        self.step_carry_input = [*(formula.function for formula in slots.formulas), slots.input_factor.function]
        # saved models know the calibrated factor of the encoder's states by the name sender_scale
        self.read_scale, self.sender_scale = (Calibrated(1.0 if free else None) for _ in range(2))
        self.write_scale = Calibrated(0.05 if free else None)
        self.alpha = LearnedScale(dim, start=float(at.alpha), base=dim**-0.5) if slots.learns_alpha else None

    def forward(self, x: States, mask: AttentionMask | None = None, memory: Tensor | None = None) -> States:
        """The hidden states after the sublayer; keys and values come from ``memory`` if it is given, else from x."""
        update = self.update()
        if memory is not None:
            memory = self.sender_scale(self.input(memory)) * update.factor
        return update.state(x, self.f(update.read(x), mask, memory))

    def update(self) -> Update:
        """The residual update with what has been learned so far: step, carry and factor, gains, calibrated factors."""
        step, carry, factor = self.values()
        return Update(self._input, self._output, self.stream, factor, step, carry)

    def values(self) -> tuple[Any, Any, Any]:
        """Step, carry and the factor on the input, with the learned alpha: numbers, or one for each component.

        An alpha that starts at 0 may take either sign, any other stays positive.
        """
        values = self.at
        if self.alpha is not None:
            alpha = self.alpha()
            values = {**self.at, "alpha": alpha.abs() if self.at["alpha"] else alpha}
        step, carry, factor = (formula(values) for formula in self.step_carry_input)
        return step, carry, factor

    def _input(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.read_scale(self.input(x))
        return scaled

    def _output(self, y: Tensor) -> Tensor:
        scaled: Tensor = self.write_scale(self.output(y))
        return scaled


class Attention(nn.Module):
    """Σ_heads softmax(scale·q kᵀ) v W_O; W_Q, W_K and W_V are one matrix, read in one product."""

    def __init__(self, config: TransformerConfig, stage: Scheme) -> None:
        super().__init__()
        heads, dim, head, slots = config.heads, config.dim, config.head, stage.attention
        self.free = free = stage.weights == "free"
        like_scores = math.sqrt(3) * (0.1 / head**3) ** 0.25
        most = torch.tensor([like_scores, like_scores, math.sqrt(3 / head)])[:, None, None]
        self.W_QKV = nn.Parameter(most * torch.empty(dim, 3, heads, head).uniform_(-1, 1))
        self.W_O = _uniform(math.sqrt(3 / (heads * head)), heads, head, dim)
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

    def forward(self, x: States, mask: AttentionMask, memory: Tensor | None = None) -> States:
        """Queries from x; keys and values from ``memory`` if it is given, else from x."""
        weights, norm = self.W_QKV, self.head_norm
        if self.input_gains is not None:
            weights = weights * self.input_gains().T[:, :, None, None]
        if memory is None:
            qkv = _by_token(x, weights)
            if self.score_scale.measuring:
                self._calibrate(mask, *(qkv if norm is None else norm(qkv)).unbind(2)[:2])
            mixed = mask.stacked(qkv, self.score_scale.factor, norm)
        else:
            q, kv = _by_token(x, weights[:, 0]), _by_token(memory, weights[:, 1:])
            q, k, v = q, *kv.unbind(2)
            if norm is not None:
                q, k, v = (norm.single(letter, y) for letter, y in zip("qkv", (q, k, v), strict=True))
            if self.score_scale.measuring:
                self._calibrate(mask, q, k)
            mixed = mask(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.score_scale.factor)
        return unproject(mixed, self.W_O)

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
    """relu(x W_in + b_in) W_out + b_out; weights of unit length have a learned scale in place of the biases."""

    def __init__(self, config: TransformerConfig, stage: Scheme) -> None:
        super().__init__()
        dim, hidden = config.dim, config.feedforward
        self.free = free = stage.weights == "free"
        self.W_in, self.W_out = _glorot(dim, hidden), _glorot(hidden, dim)
        self.b_in, self.b_out = (nn.Parameter(torch.zeros(n)) if free else None for n in (hidden, dim))
        self.input_gain = LearnedScale(dim) if stage.feedforward.reads_norm and free else None
        self.hidden_scale = None if free else LearnedScale(hidden)

    def matrices(self) -> Matrices:
        """W_in and W_out."""
        return [(self.W_in, -2), (self.W_out, -1)]

    def forward(self, x: States, mask: AttentionMask | None = None, memory: Tensor | None = None) -> States:
        """F of every token; mask and memory are attention's."""
        W_in = self.W_in if self.input_gain is None else self.W_in * self.input_gain()[:, None]
        hidden = F.linear(x, W_in.T, self.b_in)
        if self.hidden_scale is not None:
            hidden = hidden * self.hidden_scale()
        return F.linear(F.relu(hidden), self.W_out.T, self.b_out)


class Readout(nn.Module):
    """The last norm, hidden ReLU layers, and logits."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.free = free = config.scheme.at(config.layers - 1, config.layers).weights == "free"
        widths = (config.dim, *config.readout, config.vocabulary)
        self.norm = Norm(config.final_norm, LearnedScale(config.dim)) if free else nn.Identity()
        self.weights = nn.ParameterList(_glorot(a, b) for a, b in pairwise(widths))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(b)) for b in widths[1:]) if free else None
        self.scale = None if free else LearnedScale(config.vocabulary, base=config.dim**-0.5)

    def matrices(self) -> Matrices:
        """All of them."""
        return [(weight, -2) for weight in self.weights]

    def forward(self, x: Float[Tensor, "*positions dim"]) -> Float[Tensor, "*positions characters"]:
        """Logits of every character."""
        x = self.norm(x)
        for i, weight in enumerate(self.weights):
            x = F.linear(F.relu(x) if i else x, weight.T, self.biases[i] if self.biases is not None else None)
        return x if self.scale is None else x * self.scale()


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

    def __init__(self, *shape: int, start: float = 1.0, base: float = 1.0) -> None:
        super().__init__()
        self.ratio = (start or 1.0) / base
        self.value = nn.Parameter(torch.full(shape, start / self.ratio))

    def forward(self) -> Tensor:
        """The factors."""
        return self.value * self.ratio


def _by_token(x: States, weights: Float[Tensor, "dim *qkv head"]) -> Float[Tensor, "rows tokens *qkv head"]:
    """X W for q, k, v and all heads in one product, token by token."""
    return (x @ weights.flatten(1)).reshape(*x.shape[:-1], *weights.shape[1:])


def _uniform(most: float, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(-most, most))


def _glorot(rows: int, columns: int) -> nn.Parameter:
    return _uniform(math.sqrt(6 / (rows + columns)), rows, columns)
