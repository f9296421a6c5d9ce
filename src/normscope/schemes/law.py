"""What follows from the slots of a sublayer: speed factor, radial rate, update and flow, as numbers and as text.

Write x_j = r_j θ_j. A layer is read as one unit Euler step of a flow: with a free stream of

    ẋ_j = (carry − 1) x_j + step · u_j,        u_j = output(A(input(X)))_j,

and with a normalised stream, which cancels every common factor, of ẋ_j = (step/carry) P_{x_j} u_j on the unit sphere.
In both cases the directions obey θ̇_j = (1/s_j) P_{θ_j} A_j, and s_j is a product of powers that the slots contribute.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from normscope.schemes.expressions import ONE, Expression, Product
from normscope.schemes.scheme import Scheme, Slots

_RADIUS = Product.of("r")
_LENGTH = Product.of("A")


@dataclass(frozen=True, repr=False)
class RadialRate:
    """ṙ_j = growth · r_j + pull · ⟨θ_j, A_j⟩; 0 where the stream is normalised.

    Attributes:
        pull: the factor of ⟨θ_j, A_j⟩, r_j/s_j; None when r_j is fixed.
        growth: carry − 1, the rate at which a free radius grows by itself; None when that is 0 or r_j is fixed.
    """

    pull: Product | None
    growth: Expression | None

    def __call__(self, inner: float, values: dict[str, float]) -> float:
        """ṙ_j as a number, from ⟨θ_j, A_j⟩ and the values of r, A, t, depth, alpha."""
        if self.pull is None:
            return 0.0
        growth = 0.0 if self.growth is None else self.growth(values) * values["r"]
        return float(self.pull(values) * inner + growth)

    def __repr__(self) -> str:
        if self.pull is None:
            return "0"
        grown = "" if self.growth is None else f"{Product.of(self.growth) * _RADIUS} + "
        return f"{grown}{self.pull * Product.of('inner')}"


@dataclass(frozen=True, repr=False)
class Law:
    """The law of motion of one sublayer; every part prints as its formula.

    Attributes:
        speed: the speed factor s_j in θ̇_j = (1/s_j) P_{θ_j} A_j; ``r`` is r_j and ``A`` is |A_j|.
        radial: the radial rate ṙ_j.
        sees_radius: whether A_j is taken at X, radii included, rather than at the directions Θ.
        temperature: the factor on β inside A_j: A(cθ) = c·A(θ) at β c².
    """

    speed: Product
    radial: RadialRate
    sees_radius: bool
    temperature: Product

    @property
    def radius_fixed(self) -> bool:
        """Whether the sublayer itself keeps r_j at 1."""
        return self.radial.pull is None

    @property
    def attention(self) -> str:
        """Where A_j is evaluated: ``A_j(Θ)``, ``A_j(X)``, or ``A_j(Θ) at β/(t+1)``."""
        where = "A_j(X)" if self.sees_radius else "A_j(Θ)"
        return where if self.temperature == Product() else f"{where} at {Product.of('β') * self.temperature}"

    def __repr__(self) -> str:
        return _law_text(self.speed, self.radial)


@dataclass(frozen=True, repr=False)
class StagedFormula:
    """A formula of a scheme that changes with depth: each stage has its own, and the values of t and depth choose it."""

    scheme: Scheme
    of: Callable[[Law], Any]

    def __call__(self, *arguments: Any) -> Any:
        """The number for the given variables, which come last."""
        values = arguments[-1]
        return self.of(self.scheme.at(values["t"], values["depth"]).attention.law)(*arguments)

    def __repr__(self) -> str:
        return join_stages(self.scheme, [repr(self.of(stage.attention.law)) for stage in self.scheme.stages])


@dataclass(frozen=True, repr=False)
class StagedLaw:
    """The law of motion of a scheme that changes with depth; ``stage.attention.law`` is the one of each of its stages."""

    scheme: Scheme

    @property
    def speed(self) -> StagedFormula:
        """The speed factor s_j."""
        return StagedFormula(self.scheme, lambda law: law.speed)

    @property
    def radial(self) -> StagedFormula:
        """The radial rate ṙ_j."""
        return StagedFormula(self.scheme, lambda law: law.radial)

    def __repr__(self) -> str:
        return _law_text(self.speed, self.radial)


@lru_cache(maxsize=256)
def law_of(slots: Slots) -> Law:
    """The law of motion from the slots of a sublayer."""
    step, carry = (Product.of(formula) for formula in slots.formulas)
    free = slots.stream == "none"
    written = Product() if "v" in slots.heads else slots.input_factor
    if slots.output == "norm":
        written = _LENGTH**-1
    speed = (_RADIUS if free else carry) / (step * written)
    growth = slots.formulas[1].less_one() if free and slots.formulas[1] != ONE else None
    return Law(
        speed=speed,
        radial=RadialRate(_RADIUS / speed if free else None, growth),
        sees_radius=free and not slots.reads_norm and slots.heads != "qkv",
        temperature=slots.input_factor ** sum(letter not in slots.heads for letter in "qk"),
    )


def update_text(slots: Slots, function: str) -> str:
    """The layer as a formula: ``X ← Norm(X + α_t·Norm(A(X)))``."""
    step, carry = (Product.of(formula) for formula in slots.formulas)
    total = f"{_times(carry, 'X')} + {_times(step, _written(slots, function))}"
    return f"X ← {_wrap(slots.stream, total)}"


def flow_text(slots: Slots, function: str) -> str:
    """The flow as a formula: ``Ẋ = α_t·P_X Norm(A(X))``."""
    step, carry = (Product.of(formula) for formula in slots.formulas)
    written = _written(slots, function)
    if slots.stream == "norm":
        return f"Ẋ = {_times(step / carry, f'P_X {written}')}"
    growth = slots.law.radial.growth
    grows = "" if growth is None else f"{_times(Product.of(growth), 'X')} + "
    return f"Ẋ = {grows}{_times(step, written)}"


def block_radius(scheme: Scheme) -> str:
    """What a whole block of one stage does to r_j: ``fixed``, ``free``, or which sublayer resets it."""
    attention, feedforward = (slots.law.radius_fixed for slots in (scheme.attention, scheme.feedforward))
    if attention and feedforward:
        return "fixed"
    if attention or feedforward:
        return f"reset by {'attention' if attention else 'the feed-forward layer'}"
    return "free"


def join_stages(scheme: Scheme, texts: list[str]) -> str:
    """``1 for t < 0.25·T, then r_j``; a single text when all stages agree."""
    if len(set(texts)) == 1:
        return texts[0]
    parts = [f"{text} for t < {stage.end_text}" for stage, text in zip(scheme.stages, texts, strict=True) if stage.then]
    return ", then ".join([*parts, texts[-1]])


def _law_text(speed: Any, radial: Any) -> str:
    return f"θ̇_j = (1/s_j) P_θj A_j with s_j = {speed}; ṙ_j = {radial}"


def _written(slots: Slots, function: str) -> str:
    """output(f(input(X))) as text."""
    heads = "" if slots.heads == "none" else f"_{slots.heads}"
    read = _times(slots.input_factor, "Norm(X)") if slots.reads_norm else "X"
    return _wrap(slots.output, f"{function}{heads}({read})")


def _wrap(slot: str, text: str) -> str:
    return f"Norm({text})" if slot == "norm" else text


def _times(factor: Product, text: str) -> str:
    """``text`` with a factor: ``text/√(t+1)`` or ``α_t·text``."""
    if factor == Product():
        return text
    if all(power < 0 for _, power in factor.factors):
        return f"{text}{factor.text.removeprefix('1')}"
    return f"{factor.text}·{text}"
