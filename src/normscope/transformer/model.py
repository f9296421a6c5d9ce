"""The model, top to bottom: embedding, blocks of residual sublayers, readout; what sublayers compute is in ``layers``.

A sublayer at depth t is x ← stream(carry·x + step·output(f(input(x)))): an ``Update`` with the slots of its scheme and norms of
radius √d. Numbers that vary with depth are tensors, so that one compiled block serves all layers.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from normscope.core import AttentionMask, CausalMask
from normscope.core.fused_scores import causal_blocks
from normscope.core.norms import POINTWISE, length
from normscope.errors import InputError
from normscope.schemes import At, Scheme, Slots
from normscope.schemes.update import Update
from normscope.transformer.calibration import Calibrated
from normscope.transformer.config import TransformerConfig
from normscope.transformer.layers import (
    Attention,
    FeedForward,
    LearnedScale,
    Matrices,
    Norm,
    Rotation,
    States,
    glorot,
    norm_in,
    number,
    rope_angles,
)

_SHORTEST_PERIOD, _LONGEST_PERIOD = 3.0, 1000.0
_FEW_TYPES = 256  # up to which embedding is a product with one-hot vectors
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Row:
    """What a stack of blocks reads: characters or tokens, their positions, and the attention mask."""

    characters: Int[Tensor, "rows tokens"]
    positions: Int[Tensor, "#rows tokens"]
    mask: AttentionMask


def call(module: nn.Module, *args: Any) -> Tensor:
    """The module of those arguments."""
    output: Tensor = module(*args)
    return output


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
        """Logits of the next character at every position, or at those of ``logits_to_keep``, counted through all rows."""
        return call(self.readout, self.states(row, source, memory_mask, logits_to_keep), self.unembedding)

    def states(
        self,
        row: Row,
        source: Row | None = None,
        memory_mask: AttentionMask | None = None,
        logits_to_keep: Int[Tensor, " positions"] | None = None,
        run: Run = call,
    ) -> Float[Tensor, "*positions dim"]:
        """The last hidden states, which the readout turns into logits, of every position or of those to keep.

        After the last attention positions no longer interact, so the rest is computed for those positions alone.
        An encoder-decoder also takes the ``source`` that its encoder reads, and the mask of the decoder's attention to it.
        ``run`` calls a module with its arguments: one compiled function can serve all blocks, and hooks are untouched.
        """
        decoder_only = len(self.encoder) == 0
        if (source is None) != decoder_only or (memory_mask is None) != decoder_only:
            raise InputError("an encoder-decoder needs source= and memory_mask=; a decoder alone takes neither")
        memory = None
        if source is not None:
            memory = run(self.embed, source)
            for block in self.encoder:
                memory = run(block, memory, source.mask)
        rotation, mask = self.rotation(row), self._mask(row)
        x = run(self.embed, row)
        last = self.decoder[-1]
        for block in self.decoder:
            x = run(block, x, mask, memory, memory_mask, rotation, logits_to_keep if block is last else None)
        return x if logits_to_keep is None else x[0]

    def _mask(self, row: Row) -> AttentionMask:
        """The attention mask, with the blocks that a softcap needs on a GPU, made here once for all layers."""
        if not row.characters.is_cuda or not isinstance(row.mask, CausalMask) or not self.config.has_softcap:
            return row.mask
        return CausalMask(causal_blocks(row.characters.shape[1], row.characters.device))

    def rotation(self, row: Row) -> Rotation | None:
        """The angles by which RoPE rotates q and k; None for positions of another kind."""
        config = self.config
        return rope_angles(row.positions, config.head, self.embed.types.dtype) if config.positions == "rope" else None

    @property
    def unembedding(self) -> Float[Tensor, "dim vocabulary"]:
        """The readout's last matrix: the embedding's where they are tied."""
        return self.embed.types.T if self.config.tied else self.readout.weights[-1]

    @torch.no_grad()
    def renormalise(self) -> None:
        """Bring the matrices of stages whose weights are normalised back to unit length along the stream."""
        for module in self.modules_with_matrices():
            if not module.free:
                for weight, axis in module.matrices():
                    weight.div_(length(weight, axis, quick=weight.is_cuda))

    def modules_with_matrices(self) -> "Iterator[Embedding | Attention | FeedForward | Readout]":
        """Every module that has matrices of its own."""
        yield from (m for m in self.modules() if isinstance(m, Embedding | Attention | FeedForward | Readout))


class Embedding(nn.Module):
    """Type plus position: sine and cosine of learned frequencies in the first components, zero in the others.

    With RoPE a position enters attention instead, and this is the type alone.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        first = config.scheme.at(0, config.layers)
        self.free = first.weights == "free"
        self.types = glorot(config.initial_std, config.vocabulary, config.dim)
        share = torch.linspace(0, 1, config.frequencies, dtype=torch.float64)
        periods = _SHORTEST_PERIOD * (_LONGEST_PERIOD / _SHORTEST_PERIOD) ** share
        self.frequencies = nn.Parameter((2 * math.pi / periods).float()) if config.positions == "cyclic" else None
        self.type_scale, self.scale = Calibrated(0.5), Calibrated(1.0)
        # a pointwise map is linear for small numbers, so DyT's language models learn a factor that starts at √d
        grown = config.initial_std is not None and first.pointwise
        self.growth = LearnedScale(start=math.sqrt(config.dim), base=math.sqrt(config.dim)) if grown else None
        self.norm = Norm(first.norm) if first.on_sphere() else nn.Identity()

    def matrices(self) -> Matrices:
        """The types."""
        return [(self.types, -1)]

    def scaled(self, x: Tensor) -> Tensor:
        """Sums of types and positions with the factors on them, calibrated and learned."""
        scaled: Tensor = self.scale(x)
        return scaled if self.growth is None else (scaled * self.growth()).to(scaled.dtype)

    def forward(self, row: Row) -> States:
        """The initial hidden states, normalised if any sublayer of the first block normalises the stream."""
        x = self.type_scale(self._types(row.characters))
        if self.frequencies is not None:
            angles = row.positions[..., None] * self.frequencies
            waves = torch.cat((angles.sin(), angles.cos()), -1)
            x = x + F.pad(waves, (0, self.types.shape[1] - waves.shape[-1]))
        states: Tensor = self.norm(self.scaled(x))
        return states

    def _types(self, characters: Int[Tensor, "rows tokens"]) -> States:
        if len(self.types) > _FEW_TYPES:
            return F.embedding(characters, self.types)
        one_hot = F.one_hot(characters, len(self.types)).to(self.types.dtype)
        return (one_hot @ self.types).to(self.types.dtype)  # a product's gradient adds up in the same order every time


class Block(nn.Module):
    """Attention, attention to the encoder where there is one, and a feed-forward layer, each a residual sublayer."""

    def __init__(self, config: TransformerConfig, t: int, depth: int, crossed: bool) -> None:
        super().__init__()
        stage = config.scheme.at(t, depth)
        initial = stage.initial_factor(t, depth)

        def attention() -> Sublayer:
            return Sublayer(Attention(config, stage, initial), config, stage, stage.attention, stage.place(t, depth))

        self.attention = attention()
        self.cross = attention() if crossed else None
        feedforward = FeedForward(config, stage, initial)
        kind = config.feedforward_kind(stage)
        self.feedforward = Sublayer(feedforward, config, stage, stage.feedforward, stage.place(t, depth), kind)

    def forward(
        self,
        x: States,
        mask: AttentionMask,
        memory: Tensor | None = None,
        memory_mask: AttentionMask | None = None,
        rotation: Rotation | None = None,
        keep: Int[Tensor, " positions"] | None = None,
    ) -> Float[Tensor, "rows_or_one tokens_or_positions dim"]:
        """The hidden states after the block, or those of some positions alone, in one row."""
        x = self.attention(x, mask, None, rotation)
        if self.cross is not None:
            x = self.cross(x, memory_mask, memory)
        x = self.feedforward(x if keep is None else x.flatten(0, 1)[keep][None])
        return x


class Sublayer(nn.Module):
    """One residual sublayer: f (attention or feed-forward) within the ``Update`` of its slots at one depth."""

    def __init__(
        self,
        f: Attention | FeedForward,
        config: TransformerConfig,
        stage: Scheme,
        slots: Slots,
        at: At,
        input_kind: str | None = None,
    ) -> None:
        super().__init__()
        free, dim = f.free, config.dim  # normalised matrices have a fixed scale: nothing to calibrate, and no gains
        kind = input_kind or stage.norm
        self.f = f
        # the gain of a norm of the input is folded into the matrices of f, a pointwise map has its own
        self.input = norm_in("norm" if slots.reads_norm else "none", kind, dim, free and kind in POINTWISE)
        self.output = norm_in(slots.output, stage.norm, dim, free)
        self.stream = norm_in(slots.stream, stage.norm, dim, free)
        self.tangent = slots.output == "tangent"
        self.learned = {}  # formulas of alpha; the values of the others are fixed
        for slot, formula in slots.named_formulas.items():
            if "alpha" in formula.names:
                self.learned[slot] = formula.function
            else:
                self.register_buffer(f"{slot}_value", number(slots.number(slot, at)), persistent=False)
        self.depth = at.depth
        self.register_buffer("t", number(at.t), persistent=False)
        # saved models know the calibrated factor of the encoder's states by the name sender_scale
        self.read_scale, self.sender_scale = (Calibrated(1.0 if free else None) for _ in range(2))
        self.write_scale = Calibrated(0.05 if free else None)
        # nGPT keeps its steps times 1/√d; those of a language model with a free stream are plain, as LayerScale's are
        plain = config.plain_steps(stage, slots)
        start, shape = float(at.alpha), () if stage.learned == "scalar" else (dim,)
        self.signed = plain or start <= 0
        base = (start or 1.0) if plain else dim**-0.5
        self.alpha = LearnedScale(*shape, start=start, base=base) if slots.learns_alpha else None

    def forward(
        self,
        x: States,
        mask: AttentionMask | None = None,
        memory: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> States:
        """The hidden states after the sublayer; keys and values come from ``memory`` if it is given, else from x."""
        update = self.update()
        if memory is not None:
            memory = self.sender_scale(self.input(memory)) * update.factor
        return update.state(x, self.f(update.read(x), mask, memory, rotation))

    def update(self) -> Update:
        """The residual update with what has been learned so far: step, carry and factor, gains, calibrated factors."""
        step, carry, factor = self.values()
        return Update(self._input, self._output, self.stream, factor, step, carry, self.tangent)

    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """Step, carry and the factor on the input, with the learned alpha: one number each, or one for each component.

        A plain alpha, or one that starts at 0 or below, may take either sign; any other stays positive.
        """
        variables: dict[str, Any] = {"t": self.t, "depth": self.depth}
        if self.alpha is not None:
            alpha = self.alpha()
            variables["alpha"] = alpha if self.signed else alpha.abs()
        step, carry, factor = (
            self.learned[slot](variables) if slot in self.learned else getattr(self, f"{slot}_value")
            for slot in ("step", "carry", "input")
        )
        return step, carry, factor

    def _input(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.read_scale(self.input(x))
        return scaled

    def _output(self, y: Tensor) -> Tensor:
        scaled: Tensor = self.write_scale(self.output(y))
        return scaled


class Readout(nn.Module):
    """The last norm, hidden ReLU layers, and logits: the product with the unembedding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        last = config.scheme.at(config.layers - 1, config.layers)
        self.free = free = last.weights == "free"
        widths = (config.dim, *config.readout, config.vocabulary)
        shapes, self.hidden = list(pairwise(widths)), len(config.readout)
        biased = free and config.biases
        normed = free or last.feedforward.stream == "none"  # else the stream ends with a norm
        gain = LearnedScale(config.dim) if free else None  # normalised weights have the scale of logits
        self.norm = Norm(config.final_norm, gain) if normed else nn.Identity()
        self.weights = nn.ParameterList(glorot(config.initial_std, a, b) for a, b in (shapes[:-1] if config.tied else shapes))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(b)) for b in widths[1:]) if biased else None
        # nGPT's logits start as cosines, which norms of radius √d make √d times as large
        start = 1.0 if config.initial_std is None else config.dim**-0.5
        self.scale = None if free else LearnedScale(config.vocabulary, start=start, base=config.dim**-0.5)

    def matrices(self) -> Matrices:
        """All of them."""
        return [(weight, -2) for weight in self.weights]

    def forward(
        self, x: Float[Tensor, "*positions dim"], unembedding: Float[Tensor, "last vocabulary"]
    ) -> Float[Tensor, "*positions vocabulary"]:
        """Logits of every character or token."""
        x, weights, bias = self.before_logits(x, unembedding)
        return F.linear(x, weights.T, bias)

    def before_logits(
        self, x: Float[Tensor, "*positions dim"], unembedding: Float[Tensor, "last vocabulary"]
    ) -> tuple[Float[Tensor, "*positions last"], Float[Tensor, "last vocabulary"], Float[Tensor, " vocabulary"] | None]:
        """What the last product takes: logits are x W + b. A scale of logits is folded into W."""
        x = self.norm(x)
        for i in range(self.hidden):  # torch 2.11 cannot compile a slice of the matrices
            x = F.relu(F.linear(x, self.weights[i].T, None if self.biases is None else self.biases[i]))
        weights = unembedding if self.scale is None else unembedding * self.scale()
        return x, weights, None if self.biases is None else self.biases[self.hidden]
