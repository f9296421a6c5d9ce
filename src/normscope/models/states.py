"""Hidden states as (rows, positions, dim), however a module lays them out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

ROWS_FIRST, POSITIONS_FIRST, CHANNELS_FIRST, FOLDED = "rows first", "positions first", "channels first", "folded"
LANES_LAST, LANES_FIRST = "lanes last", "lanes first"


def floats(values: Any) -> Iterator[Tensor]:
    """The tensors of real numbers with two axes or more among arguments or results, in order; nested tuples are searched."""
    if isinstance(values, Tensor):
        if values.is_floating_point() and values.ndim > 1:
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from floats(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from floats(value)
    elif is_dataclass(values) and not isinstance(values, type):
        yield from floats(tuple(vars(values).values()))


@dataclass(frozen=True)
class Layout:
    """How the states of a stream are laid out.

    Attributes:
        kind: ``rows first`` (rows, positions, dim) or (rows, height, width, dim); ``positions first`` (positions, rows, dim);
            ``channels first`` (rows, dim, height, width); ``folded`` (rows · positions, dim); ``lanes last`` (rows, positions,
            lanes, channels) and ``lanes first`` (lanes, rows, positions, channels), where dim = lanes · channels.
        rows: how many rows there are.
    """

    kind: str
    rows: int

    @classmethod
    def of(cls, x: Tensor, given: Sequence[int], convolves: bool = False) -> "Layout":
        """The layout of states.

        Args:
            x: the states.
            given: how many rows the model reads, and how many tokens its streams may have.
            convolves: decides for images whose axes are all equal.
        """
        shape, rows, tokens = x.shape, given[0], given[1:]
        if x.ndim == 2:
            return cls(FOLDED, rows)
        if x.ndim == 3:
            return cls(POSITIONS_FIRST if shape[0] != rows and shape[1] == rows else ROWS_FIRST, rows)
        if shape[0] == rows and shape[1] in tokens:
            return cls(LANES_LAST, rows)
        if shape[1] == rows and shape[2] in tokens:
            return cls(LANES_FIRST, rows)
        first = shape[2] == shape[3] and (convolves or shape[1] != shape[2])
        return cls(CHANNELS_FIRST if x.ndim == 4 and first else ROWS_FIRST, rows)

    def states(self, x: Tensor) -> Float[Tensor, "rows positions dim"]:
        """The states of a tensor in this layout."""
        if self.kind == FOLDED:
            return x.reshape(self.rows if len(x) % self.rows == 0 else 1, -1, x.shape[-1])
        if self.kind == POSITIONS_FIRST:
            return x.transpose(0, 1)
        if self.kind == CHANNELS_FIRST:
            return x.flatten(2).transpose(1, 2)
        if self.kind == LANES_FIRST:
            return x.permute(1, 2, 0, 3).flatten(2)
        return x.flatten(2) if self.kind == LANES_LAST else x.flatten(1, -2)

    def restored(self, states: Float[Tensor, "rows positions dim"], like: Tensor) -> Tensor:
        """States in this layout, of the shape of another tensor."""
        if self.kind == POSITIONS_FIRST:
            return states.transpose(0, 1)
        if self.kind == CHANNELS_FIRST:
            return states.transpose(1, 2).reshape(like.shape)
        if self.kind == LANES_FIRST:
            return states.reshape(*states.shape[:2], len(like), -1).permute(2, 0, 1, 3)
        return states.reshape(like.shape)

    def unseen(self, states: Float[Tensor, "rows positions dim"], like: Tensor) -> Tensor:
        """States in place of a tensor inside a block; the inverse of ``seen``."""
        rows, positions, dim = states.shape
        if self.kind == POSITIONS_FIRST and (like.ndim == 2 or like.shape[:2] == (positions, rows)):
            return states.transpose(0, 1).reshape(like.shape)
        first = self.kind == CHANNELS_FIRST and like.ndim == 4 and like.shape[:2] == (rows, dim)
        if first or (self.kind == LANES_FIRST and like.ndim == 4 and like.shape[1:3] == (rows, positions)):
            return self.restored(states, like)
        return states.reshape(like.shape)

    def seen(self, x: Tensor, shape: Sequence[int]) -> Float[Tensor, "rows positions dim"] | None:
        """A tensor inside a block as states of a shape (rows, positions, dim); None if it is not one of as many channels."""
        rows, positions, dim = shape
        if x.numel() != rows * positions * dim:
            return None
        if self.kind == CHANNELS_FIRST and x.ndim == 4 and x.shape[:2] == (rows, dim):
            return self.states(x)
        if self.kind == LANES_FIRST and x.ndim == 4 and x.shape[1:3] == (rows, positions):
            return self.states(x)
        if x.shape[-1] != dim and self.kind != LANES_LAST:
            return None
        if self.kind == POSITIONS_FIRST and (x.ndim == 2 or x.shape[:2] == (positions, rows)):
            return x.reshape(positions, rows, dim).transpose(0, 1)
        return x.reshape(rows, positions, dim)
