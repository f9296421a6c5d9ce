"""Hypotheses as a space of cases: drawn at random, taken to its edges, and moved a little in search of a worse one."""

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_SEEDS = 2**31
_CORNERS = 4096  # of more corners than these some are drawn


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both allowed; evenly spread or, with ``log``, evenly in the logarithm."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @property
    def edges(self) -> tuple[float, ...]:
        """The smallest and the largest number."""
        return (self._clean(self.low), self._clean(self.high))

    def at(self, share: float) -> float:
        """The number at a share of the way from low to high."""
        share = min(max(share, 0.0), 1.0)
        if self.log:
            return self._clean(math.exp(math.log(self.low) + share * math.log(self.high / self.low)))
        return self._clean(self.low + share * (self.high - self.low))

    def share(self, value: float) -> float:
        """How far along a number is: the inverse of ``at``."""
        if self.high == self.low:
            return 0.0
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def draw(self, random: np.random.Generator) -> float:
        """A number at random."""
        return self.at(random.random())

    def near(self, value: float, size: float, random: np.random.Generator) -> float:
        """A number close by; whole ones move by at least one."""
        moved = self.at(self.share(value) + size * random.standard_normal())
        if self.whole and moved == value:
            moved = min(max(value + (1 if random.random() < 0.5 else -1), self.low), self.high)
        return self._clean(moved)

    def simpler(self, value: float) -> Iterator[float]:
        """Numbers that are easier to read than this one: smaller ones, fewer digits."""
        if self.whole:
            yield from range(int(self.low), min(int(value), int(self.low) + 4))
        else:
            short = [float(f"{value:.{digits}g}") for digits in (1, 2, 3)]
            smaller = [] if self.log else [0.0, float(f"{value / 2:.1g}")]
            yield from (number for number in smaller + short if self.low <= number <= self.high and number != value)

    def _clean(self, value: float) -> float:
        return round(value) if self.whole else float(min(max(value, self.low), self.high))


@dataclass(frozen=True)
class Choice:
    """One of some values; the first is the simplest."""

    options: tuple[Any, ...]

    @property
    def edges(self) -> tuple[Any, ...]:
        """All of them."""
        return self.options

    def draw(self, random: np.random.Generator) -> Any:
        """One at random."""
        return self.options[random.integers(len(self.options))]

    def near(self, value: Any, size: float, random: np.random.Generator) -> Any:
        """Mostly the same, sometimes another."""
        return self.draw(random) if random.random() < size / 2 else value

    def simpler(self, value: Any) -> Iterator[Any]:
        """The ones before it."""
        yield from self.options[: self.options.index(value)]


Space = dict[str, Range | Choice]


def whole(low: int, high: int) -> Range:
    """Whole numbers, spread evenly in the logarithm."""
    return Range(low, high, log=True, whole=True)


def choice(*options: Any) -> Choice:
    """One of the options."""
    return Choice(options)


@dataclass(frozen=True)
class Case:
    """A point of a space, and random tensors that belong to it.

    Attributes:
        values: a value for every name of the space.
        seeds: what its tensors are mixed from: (seed, weight), the squares of the weights adding up to 1.
        origin: how it came about: ``edge``, ``random``, ``search``, ``simpler`` or ``dial``.
    """

    values: Mapping[str, Any]
    seeds: tuple[tuple[int, float], ...]
    origin: str = "random"

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def normal(self, name: str, *shape: int) -> Float[Tensor, "..."]:
        """A standard normal tensor in float64 that belongs to the case and to the name."""
        total = torch.zeros(shape, dtype=torch.float64)
        for seed, weight in self.seeds:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
            total += weight * torch.randn(shape, generator=generator, dtype=torch.float64)
        return total

    def uniform(self, name: str, *shape: int) -> Float[Tensor, "..."]:
        """A tensor with entries uniform in 0..1 that belongs to the case and to the name."""
        shares: Tensor = torch.special.ndtr(self.normal(name, *shape))
        return shares

    @property
    def text(self) -> str:
        """The values, as a reader would write them."""
        numbers = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in self.values.items()}
        return ", ".join(f"{name} = {number}" for name, number in numbers.items())


def draw(space: Space, random: np.random.Generator) -> Case:
    """A case at random."""
    return Case({name: part.draw(random) for name, part in space.items()}, _new_seed(random))


def edges(space: Space, count: int, random: np.random.Generator, by: str = "") -> list[Case]:
    """At most ``count`` corners of the space, where every value is at an end of its range.

    The options of ``by`` take turns, and each begins with corners that have every single end of the other ranges.
    """
    options = space[by].edges if by in space else (None,)
    turns = [_corners({**space, by: Choice((option,))} if by in space else space, count, random) for option in options]
    picked = [corner for corners in itertools.zip_longest(*turns) for corner in corners if corner is not None][:count]
    return [Case(dict(zip(space, corner, strict=True)), _new_seed(random), "edge") for corner in picked]


def _corners(space: Space, count: int, random: np.random.Generator) -> list[tuple[Any, ...]]:
    """Corners in a random order, first those that together have every end of every range."""
    parts = [part.edges for part in space.values()]
    if math.prod(len(part) for part in parts) > _CORNERS:
        return [tuple(part[random.integers(len(part))] for part in parts) for _ in range(count)]
    corners = list(itertools.product(*parts))
    left = [corners[i] for i in random.permutation(len(corners))]
    missing = {(place, end) for place, ends in enumerate(parts) for end in ends}
    first: list[tuple[Any, ...]] = []
    while missing and len(first) < count:
        best = max(left, key=lambda corner: len(missing & set(enumerate(corner))))
        first.append(best)
        left.remove(best)
        missing -= set(enumerate(best))
    return (first + left)[:count]


def near(space: Space, case: Case, size: float, random: np.random.Generator) -> Case:
    """A case close by: some of its values moved, its tensors rotated by an angle of about ``size``."""
    moved = {name: part.near(case[name], size, random) if random.random() < 0.5 else case[name] for name, part in space.items()}
    angle = min(size, math.pi / 2) * random.random()
    turned = tuple((seed, weight * math.cos(angle)) for seed, weight in case.seeds)
    return Case(moved, (*turned, (_new_seed(random)[0][0], math.sin(angle))), "search")


def simpler(space: Space, case: Case) -> Iterator[Case]:
    """Cases that differ from this one in one value, which is easier to read."""
    if len(case.seeds) > 1:
        yield replace(case, seeds=((case.seeds[0][0], 1.0),), origin="simpler")
    for name, part in space.items():
        for value in part.simpler(case[name]):
            yield replace(case, values={**case.values, name: value}, origin="simpler")


def _new_seed(random: np.random.Generator) -> tuple[tuple[int, float], ...]:
    return ((int(random.integers(_SEEDS)), 1.0),)
