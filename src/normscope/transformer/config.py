"""Everything that fixes a model's shape, as one value that JSON can hold."""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from normscope.errors import InputError, make, validate
from normscope.schemes import NormKind, Scheme, Slots, scheme_from, scheme_values

_MODULES = 100e3  # bytes of a block's modules and small tensors
Size = Annotated[int, Field(ge=1, le=100_000)]
Vocabulary = Annotated[int, Field(ge=1, le=10_000_000)]
Positions = Literal["cyclic", "rope"]
Activation = Literal["relu", "gelu", "swiglu"]


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model.

    Attributes:
        scheme: where blocks normalise, and with which norm in attention.
        vocabulary: number of characters or tokens.
        dim: width of the stream.
        layers: blocks of the decoder.
        encoder_layers: blocks of the encoder; 0 is a decoder alone.
        heads: number of heads.
        head: width of q, k and v of each head; heads · head need not be dim.
        feedforward: width of the hidden layer between attention blocks.
        readout: widths of the hidden layers that turn the last state into logits.
        frequencies: number of learned cyclic positions.
        feedforward_norm: the norm of feed-forward layers; the scheme's own if None, or where that is a pointwise map.
        final_norm: the norm before the readout.
        shared_gains: one gain for the inputs of q, k and v, as in practice, instead of one each; with ``rope`` also one for
            the norms of all heads, instead of one for each head.
        positions: ``cyclic`` waves of learned frequencies that are added to embeddings, or ``rope``: rotations of q and k.
        activation: of feed-forward layers; ``swiglu`` has twice the hidden layer's width in its first matrix.
        biases: whether feed-forward layers and the readout add biases.
        tied: whether the unembedding is the embedding.
        initial_std: standard deviation of every matrix at the start; None draws uniformly with Glorot's bounds.
    """

    scheme: Scheme
    vocabulary: Vocabulary = 17
    dim: Annotated[Size, Field(ge=2)] = 512  # the norm of a single number is its sign
    layers: Size = 10
    encoder_layers: Annotated[int, Field(ge=0, le=100_000)] = 0
    heads: Size = 12
    head: Size = 64
    feedforward: Size = 512
    readout: tuple[Size, ...] = (512, 512)
    frequencies: NonNegativeInt = 32
    feedforward_norm: NormKind | None = None
    final_norm: NormKind = "layer"
    shared_gains: bool = False
    positions: Positions = "cyclic"
    activation: Activation = "relu"
    biases: bool = True
    tied: bool = False
    initial_std: Annotated[float, Field(gt=0, lt=100)] | None = None

    def __post_init__(self) -> None:
        validate(self)
        for depth in (self.layers, self.encoder_layers):
            if depth:
                self.scheme.check(depth)
        self.scheme.check_head(self.head)
        if self.positions == "rope" and (self.head % 2 or self.encoder_layers):
            raise InputError(
                f"positions='rope' rotates pairs of components in a decoder: head even and encoder_layers=0, "
                f"not head={self.head}, encoder_layers={self.encoder_layers}"
            )
        if self.encoder_layers and "scores" in self.scheme.features:
            raise InputError(f"scheme '{self.scheme.name}' has scores other than softmax, which need encoder_layers=0")
        if self.tied and self.readout:
            raise InputError(f"tied=True needs readout=(): hidden layers of widths {list(self.readout)} change the dimension")
        if self.positions == "cyclic" and 2 * self.frequencies > self.dim:
            raise InputError(
                f"frequencies come in pairs of components: from 0 to dim/2 = {self.dim // 2}, not {self.frequencies}"
            )

    @property
    def has_softcap(self) -> bool:
        """Whether attention in any layer caps its logits."""
        return any(stage.attention.score_rule.cap is not None for stage in self.scheme.stages)

    def plain_steps(self, stage: Scheme, slots: Slots) -> bool:
        """Whether learned steps are their parameters, as in language models with a free stream; nGPT's are times 1/√d."""
        free = stage.weights == "free" and slots.stream == "none"
        return self.initial_std is not None and free and "alpha" not in slots.named_formulas["input"].names

    @property
    def made_differently(self) -> str:
        """What versions up to 0.2.0 made of this configuration that is made differently now; empty if nothing."""
        blocks = [(self.scheme.at(t, depth), t, depth) for depth in (self.encoder_layers, self.layers) for t in range(depth)]
        pointwise = [stage for stage, _, _ in blocks if stage.pointwise and stage.feedforward.reads_norm]
        if any(self.feedforward_norm not in (None, stage.norm) for stage in pointwise):
            return f"feed-forward layers had {self.feedforward_norm} norms in place of the scheme's"
        last = blocks[-1][0]
        if last.weights != "free" and last.feedforward.stream == "none":
            return "there was no norm after the last layer"
        for stage, t, depth in blocks:
            learning = [slots for slots in (stage.attention, stage.feedforward) if slots.learns_alpha]
            if any(stage.place(t, depth).alpha < 0 and not self.plain_steps(stage, slots) for slots in learning):
                return "a negative alpha lost its sign"
        return ""

    @property
    def format(self) -> int:
        """The number of the format of files from which on their weights mean what they mean now."""
        return 2 if self.made_differently else 1

    def feedforward_kind(self, stage: Scheme) -> NormKind:
        """What feed-forward layers of a stage have as norm of their input."""
        return self.feedforward_norm if self.feedforward_norm is not None and not stage.pointwise else stage.norm

    @property
    def parameters(self) -> int:
        """The number of weights in matrices, without building the model: gains, biases and scales are few beside them."""
        matrices = 3 if self.activation == "swiglu" else 2
        gated = "gate" in self.scheme.features
        attention, feedforward = (4 + gated) * self.dim * self.heads * self.head, matrices * self.dim * self.feedforward
        blocks = (self.layers + self.encoder_layers) * (attention + feedforward)
        crossed = self.layers * attention if self.encoder_layers else 0
        widths = (self.dim, *self.readout, self.vocabulary)
        embedding = 0 if self.tied else self.vocabulary * self.dim
        return blocks + crossed + embedding + sum(a * b for a, b in pairwise(widths))

    def memory(self, bytes_each: float) -> dict[str, float]:
        """Bytes of the model with so many bytes for each weight, by what they follow from."""
        sizes = f"layers={self.layers}, dim={self.dim}, heads={self.heads}, head={self.head}, feedforward={self.feedforward}"
        modules = _MODULES * (self.layers + self.encoder_layers)
        return {sizes: bytes_each * self.parameters + modules}

    @property
    def values(self) -> dict[str, Any]:
        """Plain values, such as JSON holds."""
        return {**asdict(self), "scheme": scheme_values(self.scheme), "readout": list(self.readout)}

    @classmethod
    def of(cls, values: dict[str, Any]) -> "TransformerConfig":
        """The configuration that ``values`` wrote down."""
        if not isinstance(values.get("scheme"), dict):
            raise InputError(f"the scheme in a model's configuration is a table of slots, not {values.get('scheme')!r}")
        return make(cls, {**values, "scheme": scheme_from(values["scheme"])}, "a model's configuration")
