"""A conclusion as a number with a sign: what was measured beside what is claimed."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Relation = Literal["=", "≤", "≥", "≈", "±"]
Values = Float[Tensor, "..."] | float
MISTAKES = ("sign", "constant", "exponent")
_EXPONENT = 0.2
_WORST = -1000.0  # the margin of a comparison that is not a number at all


@dataclass(frozen=True)
class Comparison:
    """Measured numbers beside claimed ones.

    Attributes:
        measured: what came out.
        claimed: what the statement says.
        relation: ``=``, ``≤``, ``≥``, ``≈`` for the same up to a factor, or ``±`` for the same sign.
        tolerance: for ``=`` the largest relative error; for ``≤`` and ``≥`` the allowance for rounding, relative too; for ``≈``
            the factor; for ``±`` how far on the wrong side of 0 a number may be.
        scale: what errors are relative to; the larger of the two numbers if None.
        base: the quantity whose power the claim contains, for claims about an exponent.
        decides: whether the case meets the hypothesis; one that does not compares 0 with 0.
    """

    measured: Values
    claimed: Values
    relation: Relation = "="
    tolerance: float = 1e-9
    scale: Values | None = None
    base: Values | None = None
    decides: bool = True

    @property
    def margins(self) -> Float[Tensor, " checks"]:
        """How far each number is from failing: at most 1, below 0 if it fails.

        ``=``: 1 − error/tolerance with error = |m − c|/scale, and −error where that is larger than the tolerance. ``≤``:
        (c − m)/scale + tolerance, ``≥`` likewise. ``≈``: 1 − |ln(m/c)|/ln(factor). ``±``: the smaller of |m| and |c| with the
        sign of m·c, plus the tolerance.
        """
        measured, claimed = _tensor(self.measured), _tensor(self.claimed)
        scale = torch.maximum(measured.abs(), claimed.abs()) if self.scale is None else _tensor(self.scale)
        scale = torch.where(scale == 0, 1.0, scale)
        if self.relation == "=":
            error = (measured - claimed).abs() / scale
            found = torch.where(error > self.tolerance, -error, 1 - error / self.tolerance)
        elif self.relation == "≈":
            ratio = (measured / claimed).clamp(min=0)
            found = 1 - ratio.log().abs() / math.log(self.tolerance)
        elif self.relation == "±":
            found = torch.minimum(measured.abs(), claimed.abs()) * measured.sign() * claimed.sign() + self.tolerance
        else:
            room = (claimed - measured if self.relation == "≤" else measured - claimed) / scale
            found = room + self.tolerance
        return found.nan_to_num(_WORST, 1.0, _WORST).clamp(_WORST, 1.0).flatten()

    @property
    def margin(self) -> float:
        """The worst of the margins."""
        return float(self.margins.min())

    def pair(self, check: int) -> tuple[float, float]:
        """Measured and claimed of one of the numbers compared."""
        measured, claimed = _tensor(self.measured), _tensor(self.claimed)
        both = measured + torch.zeros_like(claimed), torch.zeros_like(measured) + claimed
        return float(both[0].flatten()[check]), float(both[1].flatten()[check])

    def deviation(self, margin: float) -> str:
        """What a margin of such a comparison means, in words."""
        if self.relation == "=":
            error = -margin if margin < 0 else (1 - margin) * self.tolerance
            return f"largest deviation {error:.2g}, {self.tolerance:.2g} allowed"
        if self.relation == "≈":
            factor = self.tolerance ** (1 - margin)
            return f"largest factor between measured and claimed {factor:.3g}, {self.tolerance:.3g} allowed"
        room = margin - self.tolerance
        if self.relation == "±":
            return f"signs {'agree' if margin >= 0 else 'contradict each other'}, the smaller number is {abs(room):.2g}"
        return f"bound {'kept with' if margin >= 0 else 'missed by'} {abs(room):.2g} of the larger side"


def mistaken(comparison: Comparison, mistake: str) -> Comparison:
    """The same with a mistake in the claim: its ``sign`` flipped, its ``constant`` doubled, its ``exponent`` off by 0.2.

    A bound is made to promise more: an upper one half as much, a lower one twice as much; flipped, it holds the other way.
    """
    claimed, relation = _tensor(comparison.claimed), comparison.relation
    if mistake == "sign":
        turned: dict[Relation, Relation] = {"≤": "≥", "≥": "≤"}
        if relation in turned:
            return replace(comparison, relation=turned[relation])
        return replace(comparison, claimed=-claimed)
    if mistake == "constant":
        return replace(comparison, claimed=claimed * (0.5 if relation == "≤" else 2.0))
    if comparison.base is None:
        raise ValueError("this comparison claims no exponent")
    power = _tensor(comparison.base) ** _EXPONENT
    stronger = torch.minimum(power, 1 / power) if relation == "≤" else torch.maximum(power, 1 / power)
    return replace(comparison, claimed=claimed * (power if relation in ("=", "≈") else stronger))


def _tensor(values: Values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)
