"""Hidden states as measures take them: the part that the model's norm keeps, token by token."""

from collections.abc import Callable

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import visible_part
from normscope.measures.base import PassObserver, Subject, Tables
from normscope.models import Model, SublayerStep
from normscope.schemes import NormKind

MIXING = ("attention", "mixer")  # the names of sublayers that mix tokens of one stream; ``cross`` mixes those of two
Tokens = Float[Tensor, "tokens dim"]
Counted = Float[Tensor, "counted dim"]  # those of them that means are taken over


def norm_kind(model: Model) -> NormKind:
    """The kind of the norm that reads the last hidden states: directions are those that it keeps."""
    norm = model.final_norm or model.read_norm(model.layers)
    return "layer" if norm is not None and norm.kind == "layer" else "rms"


class TokenStates:
    """Hidden states (rows, tokens, dim) of a forward pass as float64 tokens × dim on the CPU, without padding and zeros.

    With LayerNorm they are centred: their mean over channels is invisible to the model.
    """

    def __init__(self, subject: Subject) -> None:
        self.kind = norm_kind(subject.model)
        self._subject = subject

    def every(self, x: Float[Tensor, "rows positions dim"]) -> Tokens:
        """All tokens."""
        return visible_part(x, self.kind)[self._subject.present_in(x)].double().cpu()

    def counted(self, x: Float[Tensor, "rows positions dim"]) -> Counted:
        """The tokens that means are taken over: without the first of every row."""
        return visible_part(x, self.kind)[self._subject.counted_in(x)].double().cpu()


class BlockObserver(PassObserver):
    """Gives every block's states before and after it to ``block``, where both have one shape.

    Where the stream changes its shape between two blocks, the states after the first are those after its last sublayer, if
    the model identifies that.
    """

    def __init__(self, subject: Subject) -> None:
        self.states = TokenStates(subject)
        self.before: tuple[int, Counted] | None = None
        self._inside: tuple[int, Tensor] | None = None

    def block(self, layer: int, before: Counted, after: Counted) -> None:
        """The tokens before and after a block that means are taken over."""
        raise NotImplementedError

    def sublayer(self, step: SublayerStep) -> None:
        """Remember the states after the last sublayer."""
        self._inside = None if step.after is None else (step.layer, step.after)

    def state(self, layer: int, x: Tensor) -> None:
        """Give the block before this state."""
        after, last, inside = self.states.counted(x), self.before, self._inside
        if last is not None and last[0] == layer - 1:
            if last[1].shape == after.shape:
                self.block(layer - 1, last[1], after)
            elif (
                inside is not None
                and inside[0] == layer - 1
                and (left := self.states.counted(inside[1])).shape == last[1].shape
            ):
                self.block(layer - 1, last[1], left)
        self.before, self._inside = (layer, after), None


class StateRows(PassObserver):
    """A table with a row for the hidden states before every layer, from all tokens and from those that are counted."""

    def __init__(self, subject: Subject, table: str, row: Callable[[Tokens, Counted], dict[str, float]]) -> None:
        self.states, self.table, self.row = TokenStates(subject), table, row
        self.rows: list[dict[str, float]] = []

    def state(self, layer: int, x: Tensor) -> None:
        """Add the row of a layer."""
        self.rows.append({"layer": layer, **self.row(self.states.every(x), self.states.counted(x))})

    def tables(self) -> Tables:
        """The table under its name."""
        return {self.table: pd.DataFrame(self.rows)}
