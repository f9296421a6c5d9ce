"""The Model noun: anything with a residual stream behind one interface."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normscope.core.norms import NORMS, POINTWISE, pointwise
from normscope.errors import InputError
from normscope.models.capture import Captured
from normscope.models.check import WeightFault
from normscope.models.describe import as_html, as_text, size_text, view_text
from normscope.models.inputs import device_of
from normscope.models.observe import AttentionStep, Observer, Rotation, Sample, combine
from normscope.models.precision import wide, widened
from normscope.models.tokenizing import encode, special_ends
from normscope.schemes import Scheme
from normscope.schemes.update import Update

TextOrIds = str | Sequence[int] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class HeadProjections:
    """Per-head weights of an attention layer as they act on its input: q = x W_Q + b_Q, and the output Σ a v W_O + b_O.

    The input x is what attention reads, ``AttentionStep.input``: the gain of a norm before attention is in x and not in the
    matrices. Gains inside attention are in them, such as those of the norms in the factors of latent attention; norms of q, k
    and v act after them. Key and value heads are repeated for the ``shared`` queries of each.
    """

    W_Q: Float[Tensor, "heads dim head"]
    W_K: Float[Tensor, "heads dim head"]
    W_V: Float[Tensor, "heads dim value"]
    W_O: Float[Tensor, "heads value dim"]
    b_Q: Float[Tensor, "heads head"]
    b_K: Float[Tensor, "heads head"]
    b_V: Float[Tensor, "heads value"]
    b_O: Float[Tensor, " dim"]
    shared: int = 1

    @property
    def W_QK(self) -> Float[Tensor, "heads dim dim"]:
        """W_Q W_Kᵀ: the scores of queries x and keys y are x W_QK yᵀ, up to biases and positions."""
        return self.W_Q @ self.W_K.mT


@dataclass(frozen=True)
class BlockNorm:
    """A norm with its parameters: gain · √d x/|x| + bias, of the centred x for ``layer``.

    A pointwise map in its place, ``tanh`` or ``erf``, is gain · φ(slope · x + shift) + bias.

    Attributes:
        slot: ``input``, ``inner``, ``output``, ``stream``, ``q``, ``k``, ``v``, ``final`` or ``embedding``; ``entry`` for one
            of a block's input that the residual stream continues with.
        layer: the number of its layer; None outside the layers.
        sublayer: ``attention`` or ``feedforward``; empty outside them.
    """

    slot: str
    layer: int | None
    sublayer: str
    kind: str
    gain: Float[Tensor, " dim"]
    bias: Float[Tensor, " dim"] | None
    eps: float
    slope: float = 1.0
    shift: float = 0.0

    def times(self, factor: Tensor | float) -> "BlockNorm":
        """The same with values that many times as large."""
        return replace(self, gain=factor * self.gain, bias=None if self.bias is None else factor * self.bias)

    @property
    def pointwise(self) -> bool:
        """Whether it is a map of every component alone."""
        return self.kind in POINTWISE

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """The normalised x."""
        if self.pointwise:
            return pointwise(x, self.kind, self.slope, self.shift, self.gain, self.bias)
        return NORMS[self.kind](x, self.gain, self.bias, self.eps)


_FEWEST = 3  # tokens of a text
_ALWAYS = ("stream", "attention", "matrices", "vocabulary")


def require_tokens(count: int, reason: str) -> None:
    """Raise an error where there are too few tokens for means over them."""
    if count < _FEWEST:
        raise InputError(f"{reason}: {count} token{'s' * (count != 1)}, and at least {_FEWEST} are needed")


class Model(ABC):
    """A model of any architecture.

    Example:
        >>> import normscope as ns
        >>> model = ns.open("builtin:addition-small-pre")
        >>> model.layers, model.heads, model.dim
        (4, 4, 128)

    Attributes:
        name: what it was opened by.
        model: the module that has its weights.
        schemes: the placement of norms of every layer; None for a layer whose placement is unknown.
        scheme: the scheme of all layers; None if they differ or a placement is unknown.
        scheme_note: remarks on the scheme, or why there is none.
        reconstruction: for every layer the largest relative error of the update with the recognised slots against the
            block's output; None where there is no scheme.
        stream: the residual stream that is viewed.
        streams: all residual streams of the model, such as ``encoder`` and ``decoder``.
        attention_layers: the layers with softmax attention.
        layers, heads, kv_heads, dim, head_dim: its shape; without attention it has 0 heads.
        vocabulary: the number of its tokens.
        context: the largest number of tokens in a sequence; None if there is no limit.
        causal: whether tokens attend only to themselves and those before them.
        position_kind: ``learned``, ``rotary``, ``cyclic``, ``none`` or ``unknown``.
        zero_weights: its matrices of zeros, as they were when it was opened.
        tokenizer: as those of the ``transformers`` library; None where there is none.
        bos: whether texts begin with BOS; None where that is left to the tokenizer.
        reads_examples: whether it reads examples of the task that it was trained on, and no texts.
        thorough: whether every pass checks again that attention is what it was recognised as; which waits for a GPU.
    """

    name: str
    model: Any
    schemes: tuple[Scheme | None, ...]
    scheme: Scheme | None
    scheme_note: str
    reconstruction: tuple[float | None, ...] = ()
    stream: str = "decoder"
    streams: tuple[str, ...] = ("decoder",)
    layers: int
    heads: int
    kv_heads: int
    dim: int
    head_dim: int
    vocabulary: int
    context: int | None
    causal: bool
    position_kind: str
    zero_weights: tuple[WeightFault, ...] = ()
    tokenizer: Any = None
    bos: bool | None = None
    reads_examples: bool = False
    thorough: bool = True
    _captures: tuple[Captured, ...] = ()

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return device_of(self.model)

    @property
    def blocks(self) -> list[nn.Module]:
        """The module of every layer; none where layers are not modules."""
        return []

    @property
    def norm_modules(self) -> list[nn.Module]:
        """The modules of all norms; one without parameters may be missing."""
        return []

    @cached_property
    def learned_scales(self) -> list[list[nn.Parameter]]:
        """Learned steps and other numbers and vectors of every layer: those of modules that hold no matrix and are no norms."""
        norms = {id(parameter) for module in self.norm_modules for parameter in module.parameters()}
        layers: list[list[nn.Parameter]] = [[] for _ in range(self.layers)]
        for scales, block in zip(layers, self.blocks, strict=False):
            for module in block.modules():
                own = list(module.parameters(recurse=False))
                if all(parameter.numel() == max(parameter.shape, default=1) for parameter in own):
                    scales += [parameter for parameter in own if id(parameter) not in norms]
        return layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with softmax attention."""
        return tuple(range(self.layers))

    @property
    @abstractmethod
    def checksum(self) -> str:
        """The same for the same weights and configuration; computed anew, since weights in memory may change."""

    @property
    def parameters(self) -> int:
        """The number of its parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def __call__(self, x: "TextOrIds | Sample") -> Tensor:
        """Logits (rows, tokens, vocabulary) of a text, of token ids or of a sample; see ``forward``."""
        return self.forward(self.batch(x))

    def forward(self, sample: Sample, *observers: Observer) -> Tensor:
        """One forward pass without gradients; the observers are called while it runs, with float32 of half precision.

        Returns:
            Logits (rows, tokens, vocabulary), or the last hidden states of a model that predicts nothing.
        """
        with torch.no_grad():
            observer = combine([*observers, *(captured.observer for captured in self._captures)])
            return wide(self._run(sample, widened(observer, self.device)), self.device)

    @abstractmethod
    def _run(self, sample: Sample, observer: Observer) -> Tensor:
        """The forward pass under an observer."""

    @contextmanager
    def capture(self, *names: str) -> Iterator[Captured]:
        """Capture values of the forward passes in a ``with`` block, under the names of TransformerLens.

        Example:
            >>> import normscope as ns
            >>> model = ns.open("builtin:addition-small-pre")
            >>> with model.capture("resid_mid", "pattern") as c:
            ...     logits = model(model.sample(None, 2, seed=0))
            >>> c["resid_mid", 3].shape[-1], c["pattern", 0].shape[1]
            (128, 4)
        """
        captured = Captured(names, self.layers, self._missing)
        for name in names:
            reasons = [self._missing(name, layer) for layer in range(self.layers)]
            if all(reasons):
                raise InputError(f"'{name}' cannot be captured from '{self.name}': {reasons[0]}")
        self._captures = (*self._captures, captured)
        try:
            yield captured
        finally:
            self._captures = tuple(other for other in self._captures if other is not captured)

    def _missing(self, name: str, layer: int) -> str:
        """Why a layer has no value of this name; empty if it has."""
        return ""

    def batch(self, x: "TextOrIds | Sample") -> Sample:
        """A text, token ids or a sample as a sample on the model's device."""
        if isinstance(x, Sample):
            return x
        tokens = self._ids(x)
        if tokens.numel() == 0:
            raise InputError("the text is empty: there are no tokens to read")
        if self.context is not None and tokens.shape[1] > self.context:
            raise InputError(f"{tokens.shape[1]:,} tokens are too many: '{self.name}' takes at most {self.context:,}")
        return Sample.of(tokens)

    def viewed(self, sample: Sample) -> Sample:
        """What the stream that is viewed reads of a sample: tokens and padding are those of its positions."""
        return sample

    def _ids(self, x: TextOrIds) -> Int[Tensor, "rows tokens"]:
        """Token ids (rows, tokens) on the model's device."""
        given = self.encode(x) if isinstance(x, str) else x
        try:
            tokens = torch.as_tensor(given, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"a model takes a text, token ids (rows of one length), or a Sample: {error}") from error
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        integers = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
        if tokens.ndim != 2 or (tokens.numel() and not integers):
            raise InputError(f"token ids are integers (tokens) or (rows, tokens), not {tokens.dtype} of {list(tokens.shape)}")
        low, high = (int(tokens.min()), int(tokens.max())) if tokens.numel() else (0, 0)
        if low < 0 or high >= self.vocabulary:
            wrong = low if low < 0 else high
            raise InputError(f"token {wrong} does not exist: '{self.name}' has tokens 0 to {self.vocabulary - 1}")
        return tokens.long()

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, special tokens included."""
        if self.tokenizer is None:
            raise InputError(
                f"'{self.name}' has no tokenizer: give token ids (token_ids=…), or open it with one, "
                "normscope.open(model, tokenizer=...)"
            )
        return encode(self.tokenizer, text, self.bos)

    def with_bos(self, bos: bool | None) -> "Model":
        """The model whose texts begin with BOS, or do not; itself if that is left to the tokenizer (None)."""
        if bos is None or (self.tokenizer is None and not bos):
            return self
        if self.tokenizer is None:
            raise InputError(f"bos=True: '{self.name}' has no tokenizer that could add BOS")
        changed = copy(self)
        changed.bos = bos
        changed.encode("")  # a tokenizer may have no BOS
        return changed

    def special_ends(self, tokens: Int[Tensor, " tokens"]) -> tuple[list[str], list[str]]:
        """The special tokens before and after a text; none without a tokenizer."""
        ends = ([], []) if self.tokenizer is None else special_ends(self.tokenizer, tokens.tolist())
        before, after = (self.words(torch.tensor(ids, dtype=torch.long)) for ids in ends)
        return before, after

    def unknown(self, tokens: Int[Tensor, " tokens"]) -> int | None:
        """How many tokens of a text are the unknown token, special ones at its ends aside; None if there is no such token."""
        if self.tokenizer is None or self.tokenizer.unk_token_id is None:
            return None
        ids = tokens.tolist()
        before, after = special_ends(self.tokenizer, ids)
        return ids[len(before) : len(ids) - len(after)].count(self.tokenizer.unk_token_id)

    def step(self, layer: int, sublayer: str) -> Tensor | None:
        """The realised branch scale of a sublayer, a number or one for each channel; None where it is unknown."""
        return None

    def carry(self, layer: int, sublayer: str) -> Tensor | None:
        """The realised residual scale of a sublayer, a number or one for each channel; None where it is unknown."""
        return None

    def input_scale(self, layer: int, sublayer: str) -> Tensor | float:
        """The realised factor of a sublayer's input, after the input norm if there is one."""
        return 1.0

    def depth_factor(self, layer: int, sublayer: str) -> Tensor | float:
        """The factor of a sublayer's input that a scheme states, such as 1/√layer: ``input_scale`` without calibration."""
        return self.input_scale(layer, sublayer)

    def adds_tangent(self, layer: int, sublayer: str) -> bool:
        """Whether a sublayer adds only the part of its output that is orthogonal to the states."""
        scheme = self.schemes[layer]
        slots = None if scheme is None else scheme.feedforward if sublayer == "feedforward" else scheme.attention
        return slots is not None and slots.output == "tangent"

    def changes_mixed(self, layer: int) -> str:
        """What changes what heads mix before it enters W_O, so that the output is no sum of v W_O; empty if nothing does."""
        return ""

    def sublayers(self, layer: int) -> tuple[str, ...]:
        """The names of a layer's sublayers, as they run; none if they are unclear."""
        return "attention", "feedforward"

    def unclear(self, layer: int) -> str:
        """Why the sublayers of a layer are not identified; empty if they are."""
        return ""

    def norm_at(self, layer: int, sublayer: str, slot: str) -> BlockNorm | None:
        """The norm in a slot of a sublayer."""
        place = (layer, sublayer, slot)
        return next((norm for norm in self.norms if (norm.layer, norm.sublayer, norm.slot) == place), None)

    def update(self, layer: int, sublayer: str) -> Update:
        """The residual update of a sublayer with its norms and its realised step, carry and input factor.

        It belongs to the weights of ``projections``: ``update.state(x, y)`` are the hidden states after attention for the
        output y = Σ_h v_h W_O + b_O of what it computes of ``update.read(x)``. Scales that are unknown are 1.
        """
        step, carry = (1.0 if scale is None else scale for scale in (self.step(layer, sublayer), self.carry(layer, sublayer)))
        reads, output, stream = (self.norm_at(layer, sublayer, slot) for slot in ("input", "output", "stream"))
        factor, tangent = self.input_scale(layer, sublayer), self.adds_tangent(layer, sublayer)
        return Update(lambda x: x if reads is None else reads(x), output, stream, factor, step, carry, tangent)

    @property
    def modality(self) -> str:
        """What it reads: ``text`` (token ids), ``image`` or ``sound``."""
        return "text"

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """The shape of what it reads besides tokens, for one row, such as (channels, height, width); empty if nothing."""
        return ()

    @property
    def offers(self) -> frozenset[str]:
        """What can be measured.

        ``stream``: hidden states before and after blocks; ``sublayers``: the states and updates inside every block;
        ``attention``: q, k, v and weights; ``matrices``: W_Q, W_K, W_V and W_O by head; ``vocabulary``: token embeddings;
        ``predictions``: logits.
        """
        inside = all(self.step(layer, "attention") is not None for layer in range(self.layers))
        offered = {"sublayers": inside, "predictions": self.predicts, **dict.fromkeys(_ALWAYS, True)}
        return frozenset(name for name, has in offered.items() if has)

    @property
    def reasons(self) -> dict[str, str]:
        """Why capabilities are not offered, as far as the model's modules show more than that they are not."""
        return {}

    @abstractmethod
    def projections(self, layer: int) -> HeadProjections:
        """Weights and biases of a layer's heads."""

    @abstractmethod
    def heads_of(
        self, layer: int, x: Float[Tensor, "rows tokens dim"], rotation: Rotation | None = None, letters: str = "qkv"
    ) -> tuple[Tensor, ...]:
        """Those of q, k and v (rows, heads, tokens, head) of the input of a layer's attention, norms and rotation applied."""

    def project(self, step: AttentionStep) -> tuple[Tensor, Tensor, Tensor]:
        """Q, k and v of a step, computed again from the input of its attention."""
        q, k, v = self.heads_of(step.layer, step.input, step.rotation)
        return q, k, v

    def rotation(self, layer: int, positions: Int[Tensor, " positions"]) -> Rotation | None:
        """Cosines and sines of a layer at some positions; None where positions are not rotations."""
        return None

    @property
    @abstractmethod
    def normalised_heads(self) -> str:
        """The letters of q, k and v that are normalised after their projections, each head by itself, in every layer."""

    @property
    @abstractmethod
    def norms(self) -> list[BlockNorm]:
        """All norms, the final one last."""

    @property
    @abstractmethod
    def embeddings(self) -> Float[Tensor, "vocabulary dim"]:
        """The vector of each token before the first layer."""

    @property
    def positions(self) -> Float[Tensor, "positions dim"] | None:
        """What each position adds to a token; None where positions enter in another way."""
        return None

    @property
    def unembedding(self) -> Float[Tensor, "vocabulary dim"] | None:
        """The matrix of the logits; None if the model predicts no tokens, or not by one matrix."""
        return None

    @property
    @abstractmethod
    def predicts(self) -> bool:
        """Whether the model gives logits."""

    @property
    def reads_out(self) -> bool:
        """Whether the logits are of the states after the last layer; those of an encoder-decoder are of its decoder's alone."""
        return self.predicts

    @abstractmethod
    def sample(self, text: Any, size: int | None, seed: int) -> Sample:
        """A batch to read: the first ``size`` tokens of a text or of token ids, pictures, or examples of the model's task."""

    def _first_tokens(self, text: TextOrIds, size: int | None) -> Int[Tensor, "rows first"]:
        """The first ``size`` tokens of a text; an encoder keeps the special tokens at the end of what is cut short."""
        tokens = self._ids(text)
        if size is None or size >= tokens.shape[1] or self.causal or self.tokenizer is None:
            tokens = tokens[:, :size]
        else:
            end = len(special_ends(self.tokenizer, tokens[0].tolist())[1])
            tokens = torch.cat((tokens[:, : max(size - end, 0)], tokens[:, tokens.shape[1] - end :]), 1)
        count = tokens.shape[1]
        require_tokens(count, "the text is empty or too short")
        if self.context is not None and count > self.context:
            raise InputError(
                f"the text has {count:,} tokens and '{self.name}' reads at most {self.context:,}; "
                f"shorten it, or give its first tokens only (tokens={self.context})"
            )
        return tokens

    def words(self, tokens: Int[Tensor, " tokens"]) -> list[str]:
        """Tokens as texts; their ids where there is no tokenizer."""
        if self.tokenizer is None:
            return [str(token) for token in tokens.tolist()]
        return [self.tokenizer.decode([number]) for number in tokens.tolist()]

    def token_of(self, text: str) -> int | None:
        """The id of the token that a text is, blanks included; without a tokenizer, of a number. None if there is none."""
        if self.tokenizer is None:
            return int(text) if text.isdecimal() and int(text) < self.vocabulary else None
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        known = len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id and ids[0] < self.vocabulary
        return ids[0] if known else None

    def frame(self, text: str) -> tuple[list[int], list[int]]:
        """The token ids before and after one that follows a text, special tokens included."""
        if self.tokenizer is None:
            token = self.token_of(text)
            return [] if token is None else [token], []
        whole, bare = self.encode(text), self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ends = (i + len(bare) for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        end = next(ends, len(whole))
        return whole[:end], whole[end:]

    def read_out(self, states: Float[Tensor, "states dim"]) -> Float[Tensor, "states vocabulary"]:
        """The logits that the model computes, from the final norm on, of hidden states after the last layer."""
        if self.predicts and not self.reads_out:
            raise InputError(f"'{self.name}' computes no logits of the states of its {self.stream}")
        tokens = torch.zeros(len(states), 1, dtype=torch.long, device=states.device)
        replace = Observer(state=lambda layer, x: states[:, None] if layer == self.layers else None)
        return self.forward(Sample.of(tokens), replace)[:, 0]

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its states."""
        return self.embeddings.dtype

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    @property
    def summary(self) -> str:
        """A sentence on its scheme and shape."""
        if self.scheme is None:
            return f"{view_text(self)}: no common scheme: {self.scheme_note}."
        title = f", {self.scheme.title}" if self.scheme.title else ""
        note = f" ({self.scheme_note})" if self.scheme_note else ""
        return f"{view_text(self)} uses the scheme {self.scheme.name}{title}{note}: {size_text(self)}."

    @property
    def final_norm(self) -> BlockNorm | None:
        """The norm before the unembedding."""
        return next((norm for norm in self.norms if norm.slot == "final"), None)

    def read_norm(self, layer: int) -> BlockNorm | None:
        """The norm between the stream and the input of a layer's attention.

        Its input norm; without one, the last norm of the stream before it. None if there is neither.
        """
        places = {(norm.layer, norm.sublayer, norm.slot): norm for norm in self.norms}
        before = (
            [(layer - 1, "feedforward", "stream"), (layer - 1, "attention", "stream")] if layer else [(None, "", "embedding")]
        )
        wanted = [(layer, "attention", "input"), (layer, "attention", "entry"), *before]
        return next((places[place] for place in wanted if place in places), None)
