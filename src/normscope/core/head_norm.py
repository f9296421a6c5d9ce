"""Norms and gains on q, k and v after their projections, head by head."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import EPSILON, NORMS


@dataclass(frozen=True, eq=False)  # the compiler of PyTorch 2.11 hashes it before it has its fields
class HeadNorm:
    """Gain · Norm(x) over each head, for the letters that are normalised; gain · x for the others.

    Attributes:
        letters: those of q, k and v that are normalised.
        kind: the norm, a name of ``NORMS``; its radius is the square root of the head's width.
        gains: one factor for each component of q, k and v.
    """

    letters: str
    kind: str
    gains: Float[Tensor, "3 heads head"]

    def __call__(self, qkv: Float[Tensor, "*rows tokens 3 heads head"]) -> Float[Tensor, "*rows tokens 3 heads head"]:
        """Q, k and v of the same tokens, normalised."""
        return torch.stack([self.single(letter, x) for letter, x in zip("qkv", qkv.unbind(-3), strict=True)], -3)

    def single(self, letter: str, x: Float[Tensor, "*tokens heads head"]) -> Float[Tensor, "*tokens heads head"]:
        """One of q, k and v, normalised."""
        normalised = NORMS[self.kind](x, eps=EPSILON) if letter in self.letters else x
        return normalised * self.gains["qkv".index(letter)].to(x.dtype)
