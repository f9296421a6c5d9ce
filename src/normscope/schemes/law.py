"""What follows from the slots of a sublayer: speed factor, radial rate, update and flow, as numbers and as text.

Write x_j = r_j θ_j. A layer is read as one unit Euler step of a flow: with a free stream of

    ẋ_j = (carry − 1) x_j + step · u_j,        u_j = output(A(input(X)))_j,

and with a normalised stream, which cancels every common factor, of ẋ_j = (step/carry) P_{x_j} u_j on the unit sphere.
In both cases the directions obey θ̇_j = (1/s_j) P_{θ_j} A_j, and s_j is a product of powers that the slots contribute.

A_j is what attention computes with a softmax over the keys alone, capped and tempered as the slot ``scores`` says, and gated.
Two slots inside attention multiply it, for one head: a sink by 1 − m_j, its mass taken away, and a norm before W_O by 1/|M_j|,
M_j what the head mixes. Where theory has no factor, a ``NoFormula`` says so in place of a number.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from normscope.errors import InputError
from normscope.schemes.expressions import ONE, Expression, Product
from normscope.schemes.scheme import NormKind, Scheme, Slots
from normscope.schemes.score_slot import score_parts

_RADIUS = Product.of("r")
_LENGTH = Product.of("A")
_MIXED = Product.of("M")
_KEPT = Product.of("1 - m")
MEASURED = {"M": 1.0, "m": 0.0}  # of an A that was measured: what an inner norm and a sink make of it is in it
_SCALED = "F at c·x is taken for c·F(x), c the factor on the input: that holds for ReLU without biases, not for GELU or SwiGLU"
_GATED = "the gate acts on each component separately: A_j includes it, and s_j has no factor for it, except ½ where W_G is zero"


@dataclass(frozen=True, repr=False)
class NoFormula:
    """What stands in place of a formula that theory does not have; it prints as a dash and refuses to compute."""

    why: str
    text = "–"

    def __call__(self, *arguments: Any) -> float:
        """Refuse: there is no number."""
        raise InputError(f"theory has no law of motion here: {self.why}")

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class RadialRate:
    """ṙ_j = growth · r_j + pull · ⟨θ_j, A_j⟩; 0 where the stream is normalised.

    Attributes:
        pull: the factor of ⟨θ_j, A_j⟩, r_j/s_j; None where r_j is fixed or updates are orthogonal to x_j.
        growth: carry − 1, the rate at which a free radius grows by itself; None when that is 0 or r_j is fixed.
    """

    pull: Product | None
    growth: Expression | None

    def __call__(self, inner: float, values: dict[str, float]) -> float:
        """ṙ_j as a number, from ⟨θ_j, A_j⟩ and the values of r, A, t, depth, alpha (with an inner norm M, with a sink m)."""
        growth = 0.0 if self.growth is None else self.growth(values) * values["r"]
        return float(growth if self.pull is None else self.pull(values) * inner + growth)

    def __repr__(self) -> str:
        grown = [] if self.growth is None else [str(Product.of(self.growth) * _RADIUS)]
        pulled = [] if self.pull is None else [str(self.pull * Product.of("inner"))]
        return " + ".join([*grown, *pulled]) or "0"


@dataclass(frozen=True, repr=False)
class Law:
    """The law of motion of one sublayer; every part prints as its formula.

    Attributes:
        speed: the speed factor s_j in θ̇_j = (1/s_j) P_{θ_j} A_j; ``r`` is r_j, ``A`` is |A_j|, ``M`` is |M_j| and ``m`` is m_j.
        radial: the radial rate ṙ_j.
        radius_fixed: whether the sublayer itself keeps r_j at 1.
        read: what A_j is taken at: the directions Θ, X with its radii, or X through a pointwise map.
        temperature: the factor on β inside A_j: A(cθ) = c·A(θ) at β c².
        gate: the factor on the gate's W_G inside A_j, which reads cθ, too.
        flows: whether a layer without updates leaves X as it is, so that it is a step of a flow.
        statement: what theory does not treat; empty if it treats everything.
    """

    speed: Product | NoFormula
    radial: RadialRate | NoFormula
    radius_fixed: bool
    read: str
    temperature: Product
    gate: Product = field(default_factory=Product)
    flows: bool = True
    statement: str = ""

    @property
    def known(self) -> bool:
        """Whether theory has s_j and ṙ_j."""
        return not isinstance(self.speed, NoFormula)

    @property
    def sees_radius(self) -> bool:
        """Whether A_j is taken at X, radii included, rather than at the directions Θ."""
        return self.read == "X"

    @property
    def attention(self) -> str:
        """Where A_j is evaluated: ``A_j(Θ)``, ``A_j(X)``, ``A_j(Θ) at β/(t+1)``; with a gate ``… at β/(t+1), W_G/√(t+1)``."""
        factors = {"β": self.temperature, "W_G": self.gate}
        at = ", ".join(f"{Product.of(name) * factor}" for name, factor in factors.items() if factor != Product())
        return f"A_j({self.read})" + f" at {at}" * bool(at)

    def __repr__(self) -> str:
        return _law_text(self.speed, self.radial)


@dataclass(frozen=True, repr=False)
class StagedFormula:
    """``speed`` or ``radial`` of a scheme that changes with depth: the values of t and depth choose the stage."""

    law: "StagedLaw"
    name: str

    def __call__(self, *arguments: Any) -> Any:
        """The number for the given variables, which come last."""
        values = arguments[-1]
        return self._of(self.law.scheme.at(values["t"], values["depth"]))(*arguments)

    def _of(self, stage: Scheme) -> Any:
        return getattr(self.law.of(stage), self.name)

    def __repr__(self) -> str:
        return join_stages(self.law.scheme, [repr(self._of(stage)) for stage in self.law.scheme.stages])


@dataclass(frozen=True, repr=False)
class StagedLaw:
    """The law of motion of attention, or of the feed-forward layer, in a scheme that changes with depth."""

    scheme: Scheme
    attends: bool

    def of(self, stage: Scheme) -> Law:
        """The law of one of its stages."""
        return law_of(stage.attention if self.attends else stage.feedforward, stage.norm, self.attends)

    @property
    def speed(self) -> StagedFormula:
        """The speed factor s_j."""
        return StagedFormula(self, "speed")

    @property
    def radial(self) -> StagedFormula:
        """The radial rate ṙ_j."""
        return StagedFormula(self, "radial")

    @property
    def statement(self) -> str:
        """What theory does not treat, by stage; empty if it treats everything."""
        texts = [self.of(stage).statement for stage in self.scheme.stages]
        return join_stages(self.scheme, texts) if any(texts) else ""

    def __repr__(self) -> str:
        return _law_text(self.speed, self.radial)


def law_by_stage(scheme: Scheme, attends: bool) -> Law | StagedLaw:
    """The law of motion of attention, or of the feed-forward layer, in all stages of a scheme."""
    staged = StagedLaw(scheme, attends)
    return staged.of(scheme) if scheme.then is None else staged


@lru_cache(maxsize=256)
def law_of(slots: Slots, kind: NormKind = "rms", attends: bool = True) -> Law:
    """The law of motion from the slots of a sublayer and the kind of their norms; a feed-forward layer does not attend."""
    step, carry = (Product.of(formula) for formula in slots.formulas)
    free, pointwise = slots.stream == "none", kind not in ("rms", "layer")
    mapped = [name for name in ("inner", "output", "stream") if pointwise and getattr(slots, name) == "norm"]
    gated = slots.gate != "none"
    statement = _GATED if gated else _SCALED if not attends and slots.input_factor != Product() else ""
    speed: Product | NoFormula
    radial: RadialRate | NoFormula
    if mapped:
        statement = f"{kind} as {' and '.join(mapped)} acts on every component alone and keeps no direction"
        speed = radial = NoFormula(statement)
    else:
        speed = (_RADIUS if free else carry) / (step * _added_length(slots))
        growth = slots.formulas[1].less_one() if free and slots.formulas[1] != ONE else None
        radial = RadialRate(_RADIUS / speed if free and slots.output != "tangent" else None, growth)
    sphere = not free and not pointwise
    normalised = sphere or (slots.heads == "qkv" and not gated)  # a gate reads what q, k and v are made of
    read = f"{kind}(X)" if pointwise and slots.reads_norm else "Θ" if slots.reads_norm or normalised else "X"
    return Law(
        speed=speed,
        radial=radial,
        radius_fixed=sphere,
        read=read,
        temperature=slots.input_factor ** sum(letter not in slots.heads for letter in "qk" * attends),
        gate=slots.input_factor if gated else Product(),
        flows=free or not pointwise,
        statement=statement,
    )


def _added_length(slots: Slots) -> Product:
    """|u_j|/|A_j|: what the slots between attention and the residual stream make of the length of A_j."""
    if slots.output == "norm":
        return _LENGTH**-1
    if slots.inner == "norm":
        return _MIXED**-1
    kept = _KEPT if "sink" in score_parts(slots.scores) else Product()
    return kept if "v" in slots.heads else kept * slots.input_factor


def update_text(slots: Slots, function: str, norm: str) -> str:
    """The layer as a formula: ``X ← Norm(X + α_t·Norm(A(X)))``."""
    step, carry = (Product.of(formula) for formula in slots.formulas)
    total = f"{_times(carry, 'X')} + {_times(step, _written(slots, function, norm))}"
    return f"X ← {_wrap(slots.stream, total, norm)}"


def flow_text(slots: Slots, function: str, norm: str) -> str:
    """The flow as a formula: ``Ẋ = α_t·P_X Norm(A(X))``."""
    step, carry = (Product.of(formula) for formula in slots.formulas)
    written = _written(slots, function, norm)
    if slots.stream == "norm":
        return f"Ẋ = {_times(step / carry, f'P_X {written}')}"
    grows = "" if carry == Product() else f"{_times(Product.of(slots.formulas[1].less_one()), 'X')} + "
    return f"Ẋ = {grows}{_times(step, written)}"


def block_radius(scheme: Scheme) -> str:
    """What a whole block of one stage does to r_j: ``fixed``, ``free``, or which sublayer resets it."""
    attention, feedforward = (scheme.law_of(slots).radius_fixed for slots in (scheme.attention, scheme.feedforward))
    if attention and feedforward:
        return "fixed"
    if attention or feedforward:
        return f"reset by {'attention' if attention else 'the feed-forward layer'}"
    return "free"


def join_stages(scheme: Scheme, texts: list[str]) -> str:
    """``1 for t < 0.25·T, then r_j``; a single text when all stages agree. An empty one is a dash."""
    if len(set(texts)) == 1:
        return texts[0]
    texts = [text or "–" for text in texts]
    parts = [f"{text} for t < {stage.end_text}" for stage, text in zip(scheme.stages, texts, strict=True) if stage.then]
    return ", then ".join([*parts, texts[-1]])


def _law_text(speed: Any, radial: Any) -> str:
    return f"θ̇_j = (1/s_j) P_θj A_j with s_j = {speed}; ṙ_j = {radial}"


def _written(slots: Slots, function: str, norm: str) -> str:
    """output(f(input(X))) as text; what acts inside f stands below it."""
    inside = [part for part, there in _inside(slots).items() if there]
    below = f"_{','.join(inside)}" if inside else ""
    read = _times(slots.input_factor, f"{norm}(X)") if slots.reads_norm else "X"
    return _wrap(slots.output, f"{function}{below}({read})", norm)


def _inside(slots: Slots) -> dict[str, bool]:
    """What a slot changes inside the sublayer, and whether it does."""
    return {
        slots.heads: slots.heads != "none",
        **dict.fromkeys(score_parts(slots.scores), True),
        "inner": slots.inner != "none",
        "gate": slots.gate != "none",
    }


def _wrap(slot: str, text: str, norm: str) -> str:
    return {"none": text, "norm": f"{norm}({text})", "tangent": f"P_X {text}"}[slot]


def _times(factor: Product, text: str) -> str:
    """``text`` with a factor: ``text/√(t+1)`` or ``α_t·text``."""
    if factor == Product():
        return text
    if all(power < 0 for _, power in factor.factors):
        return f"{text}{factor.text.removeprefix('1')}"
    return f"{factor.text}·{text}"
