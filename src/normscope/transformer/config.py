"""Everything that fixes a model's shape, as one value that JSON can hold."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from normscope.errors import InputError, did_you_mean
from normscope.schemes import NORM_TITLES, Scheme, scheme_from, scheme_values

_MOST = 100_000
_AT_LEAST_ONE = ("vocabulary", "dim", "layers", "heads", "head", "feedforward")


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model.

    Attributes:
        scheme: where blocks normalise, and with which norm in attention.
        vocabulary: number of characters.
        dim: width of the stream.
        layers: blocks of the decoder.
        encoder_layers: blocks of the encoder; 0 is a decoder alone.
        heads: number of heads.
        head: width of q, k and v of each head; heads · head need not be dim.
        feedforward: width of the hidden layer between attention blocks.
        readout: widths of the hidden layers that turn the last state into logits.
        frequencies: number of learned cyclic positions.
        feedforward_norm: the norm of feed-forward layers, ``rms`` or ``layer``; the scheme's own if None.
        final_norm: the norm before the readout.
        shared_gains: one gain for the inputs of q, k and v, as in practice, instead of one each.
    """

    scheme: Scheme
    vocabulary: int = 17
    dim: int = 512
    layers: int = 10
    encoder_layers: int = 0
    heads: int = 12
    head: int = 64
    feedforward: int = 512
    readout: tuple[int, ...] = (512, 512)
    frequencies: int = 32
    feedforward_norm: str | None = None
    final_norm: str = "layer"
    shared_gains: bool = False

    def __post_init__(self) -> None:
        whole = {name: getattr(self, name) for name in (*_AT_LEAST_ONE, "encoder_layers", "frequencies")}
        for name, value in (*whole.items(), *(("readout", width) for width in self.readout)):
            if type(value) is not int:
                raise InputError(f"{name} is a whole number, not {value!r}")
        for name in _AT_LEAST_ONE:
            if not 1 <= whole[name] <= _MOST:
                raise InputError(f"{name} is from 1 to {_MOST:,}, not {whole[name]}")
        if self.dim < 2:
            raise InputError("dim is at least 2: the norm of a single number is its sign")
        if self.head < 2 and any(stage.attention.heads != "none" for stage in self.scheme.stages):
            raise InputError(f"head is at least 2: '{self.scheme.name}' normalises heads, and one number's norm is its sign")
        if self.encoder_layers < 0 or any(width < 1 for width in self.readout):
            raise InputError(
                f"encoder_layers is 0 or more and readout widths at least 1, not {self.encoder_layers}, {self.readout}"
            )
        if not 0 <= 2 * self.frequencies <= self.dim:
            raise InputError(
                f"frequencies come in pairs of components: from 0 to dim/2 = {self.dim // 2}, not {self.frequencies}"
            )
        for name in ("feedforward_norm", "final_norm"):
            kind = getattr(self, name)
            if kind not in NORM_TITLES and not (kind is None and name == "feedforward_norm"):
                raise InputError(
                    f"{name} is one of {', '.join(NORM_TITLES)}, not '{kind}'{did_you_mean(str(kind), NORM_TITLES)}"
                )

    @property
    def values(self) -> dict[str, Any]:
        """Plain values, such as JSON holds."""
        return {**asdict(self), "scheme": scheme_values(self.scheme), "readout": list(self.readout)}

    @classmethod
    def of(cls, values: dict[str, Any]) -> "TransformerConfig":
        """The configuration that ``values`` wrote down."""
        allowed = [f.name for f in fields(cls)]
        for key in values:
            if key not in allowed:
                raise InputError(f"unknown key '{key}' in a model's configuration{did_you_mean(key, allowed)}")
        if not isinstance(values.get("scheme"), dict):
            raise InputError(f"the scheme in a model's configuration is a table of slots, not {values.get('scheme')!r}")
        try:
            return cls(**{**values, "scheme": scheme_from(values["scheme"]), "readout": tuple(values["readout"])})
        except (KeyError, TypeError) as error:
            raise InputError(f"a model's configuration is not complete: {error}") from error
