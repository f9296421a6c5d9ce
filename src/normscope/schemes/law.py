"""What follows from the slots alone: speed factor, radial rate, update and flow, as numbers and as text.

Write x_j = r_j θ_j. A layer is read as one unit Euler step of a flow: with a free stream of

    ẋ_j = (carry − 1) x_j + step · u_j,        u_j = output(A(input(X)))_j,

and with a normalised stream, which cancels every common factor, of ẋ_j = (step/carry) P_{x_j} u_j on the unit sphere.
In both cases the directions obey θ̇_j = (1/s_j) P_{θ_j} A_j, and s_j is a product of powers that the slots contribute:
"""

from dataclasses import dataclass
from functools import lru_cache

from normscope.schemes.expressions import ONE, Expression, Product
from normscope.schemes.scheme import Scheme, Slots

_RADIUS = Product.of("r")
_LENGTH = Product.of("A")


@dataclass(frozen=True)
class Derived:
    """The law of motion of one sublayer.

    Attributes:
        speed: the speed factor s_j in θ̇_j = (1/s_j) P_{θ_j} A_j; ``r`` is r_j and ``A`` is |A_j|.
        pull: the factor of ⟨θ_j, A_j⟩ in ṙ_j, r_j/s_j; None when r_j is fixed.
        growth: carry − 1, the rate at which a free radius grows by itself; None when that is 0 or r_j is fixed.
        sees_radius: whether A_j is taken at X, radii included, rather than at the directions Θ.
        temperature: the factor on β inside A_j: A(cθ) = c·A(θ) at β c².
    """

    speed: Product
    pull: Product | None
    growth: Expression | None
    sees_radius: bool
    temperature: Product

    @property
    def radius_fixed(self) -> bool:
        """Whether the sublayer itself keeps r_j at 1."""
        return self.pull is None

    @property
    def attention_text(self) -> str:
        """Where A_j is evaluated: ``A_j(Θ)``, ``A_j(X)``, or ``A_j(Θ) at β/(t+1)``."""
        where = "A_j(X)" if self.sees_radius else "A_j(Θ)"
        beta = Product.of("β") * self.temperature
        return where if self.temperature == Product() else f"{where} at {beta.text}"

    @property
    def radial_text(self) -> str:
        """ṙ_j as a formula."""
        if self.pull is None:
            return "0"
        pulled = (self.pull * Product.of("inner")).text
        grown = "" if self.growth is None else f"{(Product.of(self.growth) * _RADIUS).text} + "
        return grown + pulled

    def radial(self, inner: float, values: dict[str, float]) -> float:
        """ṙ_j as a number, from ⟨θ_j, A_j⟩ and the values of r, A, t, depth, alpha."""
        if self.pull is None:
            return 0.0
        growth = 0.0 if self.growth is None else self.growth(values) * values["r"]
        return float(self.pull(values) * inner + growth)


@lru_cache(maxsize=256)
def derive(slots: Slots) -> Derived:
    """The law of motion from the slots of a sublayer."""
    step, carry = (Product.of(formula) for formula in slots.formulas)
    free = slots.stream == "none"
    written = Product() if "v" in slots.heads else slots.input_factor
    if slots.output == "norm":
        written = _LENGTH**-1
    reach = step * written
    speed = _RADIUS / reach if free else carry / reach
    unnormalised_scores = sum(letter not in slots.heads for letter in "qk")
    growth = slots.formulas[1].less_one() if free and slots.formulas[1] != ONE else None
    return Derived(
        speed=speed,
        pull=_RADIUS / speed if free else None,
        growth=growth,
        sees_radius=free and not slots.reads_norm and slots.heads != "qkv",
        temperature=slots.input_factor**unnormalised_scores,
    )


def update_text(slots: Slots, function: str = "A") -> str:
    """The layer as a formula: ``X ← Norm(X + α_t·Norm(A(X)))``."""
    step, carry = (Product.of(formula) for formula in slots.formulas)
    total = f"{_times(carry, 'X')} + {_times(step, _written(slots, function))}"
    return f"X ← {_wrap(slots.stream, total)}"


def flow_text(slots: Slots, function: str = "A") -> str:
    """The flow as a formula: ``Ẋ = α_t·P_X Norm(A(X))``."""
    step, carry = (Product.of(formula) for formula in slots.formulas)
    written = _written(slots, function)
    if slots.stream == "norm":
        return f"Ẋ = {_times(step / carry, f'P_X {written}')}"
    growth = derive(slots).growth
    grows = "" if growth is None else f"{_times(Product.of(growth), 'X')} + "
    return f"Ẋ = {grows}{_times(step, written)}"


def block_radius(scheme: Scheme) -> str:
    """What a whole block of one stage does to r_j: ``fixed``, ``free``, or which sublayer resets it."""
    attention, feedforward = (derive(slots).radius_fixed for slots in (scheme.attention, scheme.feedforward))
    if attention and feedforward:
        return "fixed"
    if attention or feedforward:
        return f"reset by {'attention' if attention else 'the feed-forward layer'}"
    return "free"


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
