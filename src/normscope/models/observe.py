"""What a forward pass shows: the sample that a model reads, and what an observer receives at every layer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.errors import InputError

NOTHING = -100  # the target of a position where nothing is predicted
States = Float[Tensor, "rows tokens dim"]


@dataclass(frozen=True)
class Sample:
    """A batch of tokens with the targets of its predictions.

    Attributes:
        tokens: token ids.
        targets: the id to predict at each position, ``NOTHING`` where none is.
        attention_mask: True for tokens, False for padding, which is at the end of a row.
        positions: the position of every token, for models that take positions; by default they count from 0.
        features: pixels or a spectrogram, for models that read them; ``tokens`` are then the numbers of the positions in the
            stream, unless the model reads both.
        decoded: what the decoder of an encoder-decoder reads, with its targets, if not the same tokens.
    """

    tokens: Int[Tensor, "rows tokens"]
    targets: Int[Tensor, "rows tokens"]
    attention_mask: Bool[Tensor, "rows tokens"]
    positions: Int[Tensor, "rows tokens"] | None = None
    features: Float[Tensor, "rows ..."] | None = None
    decoded: "Sample | None" = None

    @property
    def predicting(self) -> "Sample":
        """The positions that logits and targets belong to: those that the decoder reads."""
        return self if self.decoded is None else self.decoded

    @property
    def parts(self) -> "tuple[Sample, ...]":
        """The sample, and what a decoder reads of it if that is something else."""
        return (self,) if self.decoded is None else (self, self.decoded)

    @cached_property
    def padded(self) -> bool:
        """Whether some rows are padded; read once, since it is on the device."""
        return not bool(self.attention_mask.all())

    def mapped(self, change: Callable[[str, Tensor], Tensor]) -> "Sample":
        """The sample with what a function makes of the tensor of each name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: change(name, value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **tensors, decoded=None if self.decoded is None else self.decoded.mapped(change))

    @classmethod
    def of(cls, tokens: Int[Tensor, "rows tokens"]) -> "Sample":
        """Tokens without padding, targets or positions."""
        return cls(tokens, torch.full_like(tokens, NOTHING), torch.ones_like(tokens, dtype=torch.bool))

    @classmethod
    def continued(cls, tokens: Int[Tensor, "rows tokens"]) -> "Sample":
        """Tokens without padding, each of which but the last of its row predicts the next."""
        return cls.of(tokens).with_next()

    def with_next(self) -> "Sample":
        """The same, where each token that logits belong to predicts the next of its row."""
        decoded = self.predicting
        targets = torch.full_like(decoded.tokens, NOTHING)
        targets[:, :-1] = torch.where(decoded.attention_mask[:, 1:], decoded.tokens[:, 1:], NOTHING)
        own = replace(decoded, targets=targets)
        return own if self.decoded is None else replace(self, decoded=own)

    @classmethod
    def drawn(cls, batch: Mapping[str, Tensor]) -> "Sample":
        """Examples of a task, as ``Task.probe`` returns them; an encoder-decoder has a part of them in each half."""
        decoded = cls(batch["characters"], batch["targets"], batch["there"], batch["positions"])
        if "question" not in batch:
            return decoded
        unpredicted = torch.full_like(batch["question"], NOTHING)
        return cls(
            batch["question"], unpredicted, batch["question_there"], batch["question_positions"], decoded=decoded
        )  # fmt: skip


Rotation = tuple[Tensor, ...]  # cosines and sines of rotary positions, or the positions where a module rotates by itself


@dataclass(frozen=True)
class Softmax:
    """How scores q·k become attention weights: softmax(cap(scale·q·k) + bias), cap(s) = softcap·tanh(s/softcap).

    Attributes:
        scale: the factor of q·k, a positive number, or one for every query, 0 where it sees a single key or all keys alike.
        softcap: the bound of capped scores; None where they are not capped.
        bias: what positions add to the logits (ALiBi, relative position biases).
        sink: a further logit, whose weight goes to no key.
    """

    scale: "float | Float[Tensor, '*rows 1']" = 1.0
    softcap: float | None = None
    bias: Float[Tensor, "*rows keys"] | None = None
    sink: Float[Tensor, "*rows 1"] | None = None

    def logits(self, raw_scores: Float[Tensor, "*rows keys"]) -> Float[Tensor, "*rows keys"]:
        """The arguments of the softmax; −∞ where the scores are."""
        scores = self.scale * raw_scores
        if isinstance(self.scale, Tensor):  # which may be 0, where a query sees one key and its temperature is log(1)
            scores = scores.masked_fill(raw_scores.isneginf(), -torch.inf)
        if self.softcap is not None:
            scores = torch.where(scores.isfinite(), self.softcap * torch.tanh(scores / self.softcap), scores)
        return scores if self.bias is None else scores + self.bias

    def weights(self, raw_scores: Float[Tensor, "*rows keys"]) -> Float[Tensor, "*rows keys"]:
        """Attention weights; with a sink they sum to less than 1."""
        logits = self.logits(raw_scores)
        if self.sink is None:
            nowhere = logits.amax(-1, keepdim=True).isneginf()  # padding, whose window holds padding alone
            return logits.softmax(-1).masked_fill_(nowhere, 0.0)
        sink = self.sink.to(logits).expand(*logits.shape[:-1], 1)
        return torch.cat((logits, sink), -1).softmax(-1)[..., :-1]

    @property
    def shift(self) -> Float[Tensor, "*rows keys"] | None:
        """The bias in units of q·k: keys are ordered by q·k + shift; None where there is no bias."""
        if self.bias is None:
            return None
        if self.softcap is not None:
            raise InputError("unsupported architecture: attention adds a bias to capped scores")
        return self.bias / self.scale

    def select(self, shape: tuple[int, ...], chosen: Callable[[Tensor], Tensor]) -> "Softmax":
        """The same for some rows of scores of a shape (rows, heads, queries, keys); ``chosen`` takes them from a tensor."""

        def of(x: "float | Tensor | None", width: int) -> Tensor | None:
            return chosen(x.expand(*shape[:-1], width)) if isinstance(x, Tensor) else None

        scale = of(self.scale, 1)
        return Softmax(self.scale if scale is None else scale, self.softcap, of(self.bias, shape[-1]), of(self.sink, 1))


@dataclass(frozen=True)
class AttentionStep:
    """The attention of one layer during a forward pass.

    Attributes:
        layer: its number; the first layer is 0.
        stream: the hidden states that enter the block (resid_pre).
        input: what W_Q, W_K and W_V are applied to.
        q, k, v: by head, after norms and rotations; shared key and value heads are repeated. In cross-attention there may be
            another number of keys than of queries.
        scale: the factor of q·k in the softmax; a tensor where it depends on the position of the query.
        mask: True where a query attends to a key.
        output_matrix: W_O by head; None where a norm or gate changes the mixed values before it.
        softcap: c, where scores pass through c·tanh(score/c).
        rotation: cosines and sines, where positions are rotations of q and k.
        bias: what is added to the scaled and capped scores (ALiBi, position biases).
        sink: by head, a logit in the denominator of the softmax that belongs to no key.
    """

    layer: int
    stream: States
    input: States
    q: Float[Tensor, "rows heads tokens head"]
    k: Float[Tensor, "rows heads keys head"]
    v: Float[Tensor, "rows heads keys value"]
    scale: "float | Float[Tensor, 'scale_rows scale_heads scale_tokens 1']"
    mask: Bool[Tensor, "mask_rows mask_heads tokens keys"]
    output_matrix: Float[Tensor, "heads value dim"] | None
    softcap: float | None = None
    rotation: Rotation | None = None
    bias: Float[Tensor, "bias_rows bias_heads tokens keys"] | None = None
    sink: Float[Tensor, " heads"] | None = None

    @property
    def softmax(self) -> Softmax:
        """From raw scores to weights, of all rows; ``softmax.select`` gives that of some."""
        return Softmax(self.scale, self.softcap, self.bias, None if self.sink is None else self.sink[None, :, None, None])

    def raw_scores(self, q: Tensor | None = None, k: Tensor | None = None) -> Float[Tensor, "rows heads tokens keys"]:
        """Q·k, of other queries or keys if given; −∞ where the mask is False."""
        scores = (self.q if q is None else q) @ (self.k if k is None else k).mT
        return scores.masked_fill_(~self.mask, -torch.inf)

    def weights(self, q: Tensor | None = None, k: Tensor | None = None) -> Float[Tensor, "rows heads tokens keys"]:
        """Attention weights: softmax(cap(scale·q·k) + bias)."""
        return self.soften(self.raw_scores(q, k))

    def soften(self, raw_scores: Float[Tensor, "rows heads tokens keys"]) -> Float[Tensor, "rows heads tokens keys"]:
        """The attention weights of raw scores."""
        return self.softmax.weights(raw_scores)

    def logits(self, raw_scores: Float[Tensor, "rows heads tokens keys"]) -> Float[Tensor, "rows heads tokens keys"]:
        """The arguments of the softmax: cap(scale·q·k) + bias."""
        return self.softmax.logits(raw_scores)

    @property
    def W_O(self) -> Float[Tensor, "heads value dim"]:
        """The output matrix by head."""
        if self.output_matrix is None:
            raise InputError(f"layer {self.layer} has no updates by head: its mixed values do not enter W_O as they are")
        return self.output_matrix

    @property
    def messages(self) -> Float[Tensor, "rows heads tokens dim"]:
        """M_t = v_t W_O of every token and head."""
        return self.v @ self.W_O


@dataclass(frozen=True)
class SublayerStep:
    """One residual sublayer f during a forward pass: after = stream(carry·before + update), update = step·output_norm(output).

    Attributes:
        layer: its number; the first layer is 0.
        sublayer: ``attention``, ``cross`` (attention to another stream), ``mixer`` (what mixes tokens without a softmax) or
            ``feedforward``.
        before: the hidden states that the sublayer adds to.
        output: what f computed, before any output norm.
        update: what is added to the stream, output norm and step included (attn_out, mlp_out).
        after: the hidden states after the sublayer, stream norm included; None where attention and feed-forward layer are
            parallel, since the block adds both at once.
        step, carry: the realised branch and residual scale, a number or one for each channel.
    """

    layer: int
    sublayer: str
    before: States
    output: States
    update: States
    after: States | None
    step: Float[Tensor, " *step"]
    carry: Float[Tensor, " *carry"]


OnAttention = Callable[[AttentionStep], Tensor | None]


@dataclass(frozen=True)
class Observer:
    """Functions that a forward pass calls; only the hooks of those that are given are installed.

    Attributes:
        attention: called with the attention of every layer; a returned tensor (rows, heads, tokens, value) replaces the mixed
            values.
        sublayer: called with every sublayer whose update the model identifies, in order, at the end of its block.
        state: called with layer and hidden states before every layer, and with the number of layers and the states after the
            last; returned states replace them.
        left: called with layer and hidden states that the layer returns.
        cross: as ``attention``, for the attention of a decoder to the states of its encoder; the keys are theirs.
    """

    attention: OnAttention | None = None
    sublayer: Callable[[SublayerStep], None] | None = None
    state: Callable[[int, Tensor], Tensor | None] | None = None
    cross: OnAttention | None = None
    left: Callable[[int, Tensor], None] | None = None


def combine(observers: Iterable[Observer]) -> Observer:
    """Several observers as one: each sees the states that the one before it returned; the last mixed values count."""
    observers = list(observers)
    sublayer = [o.sublayer for o in observers if o.sublayer is not None]
    state = [o.state for o in observers if o.state is not None]
    left = [o.left for o in observers if o.left is not None]

    def on_left(layer: int, x: Tensor) -> None:
        for call in left:
            call(layer, x)

    def on_sublayer(step: SublayerStep) -> None:
        for call in sublayer:
            call(step)

    def on_state(layer: int, x: Tensor) -> Tensor | None:
        states = x
        for call in state:
            replaced = call(layer, states)
            states = states if replaced is None else replaced
        return None if states is x else states

    return Observer(
        _in_turn([o.attention for o in observers if o.attention is not None]),
        on_sublayer if sublayer else None,
        on_state if state else None,
        _in_turn([o.cross for o in observers if o.cross is not None]),
        on_left if left else None,
    )


def _in_turn(calls: list[OnAttention]) -> OnAttention | None:
    """Several functions as one; the last mixed values count."""

    def on_attention(step: AttentionStep) -> Tensor | None:
        mixed = None
        for call in calls:
            replaced = call(step)
            mixed = mixed if replaced is None else replaced
        return mixed

    return on_attention if calls else None
