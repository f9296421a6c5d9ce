"""One way to look at a model: its parts under their usual names, and its attention while it runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.core.norms import NORMS
from normscope.schemes import Scheme

NOTHING = -100  # a target that is not predicted
Watcher = Callable[[int, Tensor], Tensor | None]


@dataclass(frozen=True)
class Sample:
    """Tokens for a model to read, and what it should say of them.

    Attributes:
        tokens: their numbers.
        targets: the token to predict at each place, ``NOTHING`` where none is.
        present: where there is a token at all; the rest of a row is padding, at its end.
        positions: the position of every token, where a model wants it told; else they count from 0.
    """

    tokens: Int[Tensor, "rows tokens"]
    targets: Int[Tensor, "rows tokens"]
    present: Bool[Tensor, "rows tokens"]
    positions: Int[Tensor, "rows tokens"] | None = None


@dataclass(frozen=True)
class HeadProjections:
    """Per-head weights of an attention layer as they act on what it reads: q = x W_Q + b_Q, and the update Σ a v W_O + b_O.

    Gains in front of the matrices are in them; grouped key and value heads are repeated for the ``shared`` queries of each.
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
        """W_Q W_Kᵀ: the scores of receivers x and senders y are x W_QK yᵀ, up to biases and positions."""
        return self.W_Q @ self.W_K.mT


@dataclass(frozen=True)
class BlockNorm:
    """A norm with its parameters: gain · √d x/|x| + bias, of the centred x for ``layer``.

    Attributes:
        slot: what it is for: ``input``, ``output``, ``stream``, ``q``, ``k``, ``v``, ``final`` or ``embedding``.
        layer: whose it is; None outside the layers.
        sublayer: ``attention`` or ``feedforward``; empty outside them.
    """

    slot: str
    layer: int | None
    sublayer: str
    kind: str
    gain: Float[Tensor, " dim"]
    bias: Float[Tensor, " dim"] | None
    eps: float

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """The normalised x."""
        return NORMS[self.kind](x, self.gain, self.bias, self.eps)


@dataclass(frozen=True)
class AttentionStep:
    """One layer's attention in the middle of a forward pass.

    Attributes:
        layer: which, the first is 0.
        stream: the states that come into the block, before any norm.
        read: what W_Q, W_K and W_V are applied to.
        q, k, v: by head, after norms and rotations; shared heads repeated.
        scale: the factor of q·k in the softmax.
        seen: which keys a query sees.
        W_O: what turns a head's values into messages.
        softcap: c, where scores pass through c·tanh(score/c).
        rotation: cosines and sines, where positions are rotations of q and k.
    """

    layer: int
    stream: Float[Tensor, "rows tokens dim"]
    read: Float[Tensor, "rows tokens dim"]
    q: Float[Tensor, "rows heads tokens head"]
    k: Float[Tensor, "rows heads tokens head"]
    v: Float[Tensor, "rows heads tokens value"]
    scale: float
    seen: Bool[Tensor, "rows_or_one 1 tokens tokens"]
    W_O: Float[Tensor, "heads value dim"]
    softcap: float | None = None
    rotation: tuple[Tensor, Tensor] | None = None

    def raw_scores(self, q: Tensor | None = None, k: Tensor | None = None) -> Float[Tensor, "rows heads tokens tokens"]:
        """Q·k, of other queries or keys if given; −∞ for pairs that do not see each other."""
        scores = (self.q if q is None else q) @ (self.k if k is None else k).mT
        return scores.masked_fill_(~self.seen, -torch.inf)

    def weights(self, q: Tensor | None = None, k: Tensor | None = None) -> Float[Tensor, "rows heads tokens tokens"]:
        """Attention weights, softmax(scale·q·k)."""
        return self.soften(self.raw_scores(q, k))

    def soften(self, raw_scores: Float[Tensor, "*rows keys"]) -> Float[Tensor, "*rows keys"]:
        """The weights of raw scores."""
        scores = self.scale * raw_scores
        if self.softcap is not None:
            scores = torch.where(scores.isfinite(), self.softcap * torch.tanh(scores / self.softcap), scores)
        return scores.softmax(-1)

    @property
    def messages(self) -> Float[Tensor, "rows heads tokens dim"]:
        """M_t = v_t W_O of every token and head."""
        return self.v @ self.W_O


Observer = Callable[[AttentionStep], Tensor | None]


class Model(ABC):
    """A model of any make.

    Attributes:
        name: what it was opened by.
        scheme: its placement of norms in our slots; None if that could not be told.
        scheme_note: what else there is to say of it, or why it could not be told.
        layers, heads, dim, head: its shape.
        vocabulary: the number of its tokens.
        context: the most tokens it reads; None if there is no limit.
        causal: whether tokens see only those before them.
        position_kind: ``learned``, ``rotary``, ``cyclic`` or ``unknown``.
    """

    name: str
    scheme: Scheme | None
    scheme_note: str
    layers: int
    heads: int
    dim: int
    head: int
    vocabulary: int
    context: int | None
    causal: bool
    position_kind: str

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the model is."""

    @property
    @abstractmethod
    def checksum(self) -> str:
        """The same for the same weights and configuration."""

    @abstractmethod
    def forward(self, sample: Sample, observe: Observer | None = None, watch: Watcher | None = None) -> Tensor:
        """Logits (rows, tokens, vocabulary), or the last states of a model that predicts nothing.

        ``observe`` is called with every layer's attention; what it returns, if anything, takes the place of the mixed values
        (rows, heads, tokens, value). ``watch`` is called with the states that enter every layer, and those that leave the last;
        what it returns, if anything, takes their place.
        """

    @abstractmethod
    def projections(self, layer: int) -> HeadProjections:
        """Weights and biases of a layer's heads."""

    @abstractmethod
    def heads_of(
        self,
        layer: int,
        read: Float[Tensor, "rows tokens dim"],
        rotation: tuple[Tensor, Tensor] | None = None,
        letters: str = "qkv",
    ) -> tuple[Tensor, ...]:
        """Those of q, k and v (rows, heads, tokens, head) of what a layer reads, norms and rotation applied."""

    def project(self, step: AttentionStep) -> tuple[Tensor, Tensor, Tensor]:
        """Q, k and v of a step once more, from what the layer read."""
        q, k, v = self.heads_of(step.layer, step.read, step.rotation)
        return q, k, v

    def rotation(self, layer: int, positions: Int[Tensor, " positions"]) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of a layer at some positions; None where positions are no rotations."""
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
        """What each token is to begin with."""

    @property
    @abstractmethod
    def positions(self) -> Float[Tensor, "positions dim"] | None:
        """What each position adds to a token; None where positions enter otherwise."""

    @property
    @abstractmethod
    def unembedding(self) -> Float[Tensor, "vocabulary dim"] | None:
        """What logits are read with; None if the model predicts no tokens, or not by one matrix."""

    @property
    @abstractmethod
    def predicts(self) -> bool:
        """Whether the model gives logits."""

    @abstractmethod
    def sample(self, text: str | None, size: int | None, seed: int) -> Sample:
        """What to read: a text, or ``size`` examples of what the model was trained on."""

    @abstractmethod
    def words(self, tokens: Int[Tensor, " tokens"]) -> list[str]:
        """Tokens as texts."""

    @abstractmethod
    def token_of(self, text: str) -> int | None:
        """The token that a text is, blanks and all; None if it is none or several."""

    def frame(self, text: str) -> tuple[list[int], list[int]]:
        """The tokens in front of and behind one that follows a text, with what the model puts at beginnings and ends."""
        found = self.token_of(text)
        return [] if found is None else [found], []

    def read_out(self, states: Float[Tensor, "states dim"]) -> Float[Tensor, "states vocabulary"]:
        """The logits that the model's own last steps, from the final norm on, make of states as they leave the last layer."""
        tokens = torch.zeros(len(states), 1, dtype=torch.long, device=states.device)
        sample = Sample(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool))
        return self.forward(sample, watch=lambda layer, x: states[:, None] if layer == self.layers else None)[:, 0]

    @property
    def summary(self) -> str:
        """A sentence on its scheme and shape."""
        if self.scheme is None:
            return f"{self.name}: its scheme could not be told: {self.scheme_note}."
        note = f" ({self.scheme_note})" if self.scheme_note else ""
        return (
            f"{self.name} places its norms as {self.scheme.name}, {self.scheme.title}{note}: "
            f"{self.layers} layer{'s' * (self.layers > 1)}, {self.heads} head{'s' * (self.heads > 1)} of {self.head}, "
            f"width {self.dim}."
        )

    @property
    def final_norm(self) -> BlockNorm | None:
        """The norm in front of the unembedding."""
        return next((norm for norm in self.norms if norm.slot == "final"), None)

    def read_norm(self, layer: int) -> BlockNorm | None:
        """The norm between the stream and what a layer's attention reads.

        That at its input; where there is none, the last norm that the stream itself went through. None if there is neither.
        """
        places = {(norm.layer, norm.sublayer, norm.slot): norm for norm in self.norms}
        before = (
            [(layer - 1, "feedforward", "stream"), (layer - 1, "attention", "stream")] if layer else [(None, "", "embedding")]
        )
        wanted = [(layer, "attention", "input"), *before]
        return next((places[place] for place in wanted if place in places), None)
