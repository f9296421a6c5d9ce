"""A scheme is a handful of slots: where a block normalises, how large its updates are, how much of the residual it keeps.

Every residual sublayer f at depth t is

    x ← stream( carry · x + step · output( f( input(x) ) ) )

and inside it, with W its last matrix,

    attention:     q, k, v ← heads(q, k, v);  f = (gate ⊙ inner(scores(q kᵀ) v)) W,  gate = σ(W_G input(x)) or 1
    feed-forward:  f = inner(hidden activation) W
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from normscope.errors import InputError, did_you_mean
from normscope.schemes.expressions import ONE, Expression, Product, finite_value
from normscope.schemes.score_slot import PLAIN, SCORE_PARTS, score_text, score_title

if TYPE_CHECKING:
    from normscope.core.scores import Scores
    from normscope.schemes.law import Law, StagedLaw

NormKind = Literal["rms", "layer", "tanh", "erf"]
NORM_TITLES: dict[NormKind, str] = {"rms": "RMSNorm", "layer": "LayerNorm", "tanh": "tanh", "erf": "erf"}
_SPHERES = ("rms", "layer")  # the other kinds are pointwise maps
WEIGHTS = ("free", "normalised")
LEARNED = ("vector", "scalar")
_CHOICES = {
    "inner": ("none", "norm"),
    "gate": ("none", "sigmoid"),
    "output": ("none", "norm", "tangent"),
    "stream": ("none", "norm"),
}
_ATTENTION_ALONE = {"heads": "none", "scores": PLAIN, "gate": "none"}
_MOST_LAYERS = 100_000


@dataclass(frozen=True)
class At:
    """A place in depth: the time t (0 at the first layer), the number of layers, and the value of alpha there."""

    t: float = 0.0
    depth: float = 12.0
    alpha: Any = 1.0

    @property
    def values(self) -> dict[str, Any]:
        """The variables of an ``Expression``."""
        return {"t": self.t, "depth": self.depth, "alpha": self.alpha}

    def __str__(self) -> str:
        layer = f", layer {self.t:g} of {self.depth:g}" if float(self.t).is_integer() and self.t < self.depth else ""
        return f"t = {self.t:g}{layer}"


@dataclass(frozen=True)
class Slots:
    """The slots of one sublayer; every slot takes the text that a TOML file would hold.

    Example:
        >>> Slots(input="norm/sqrt(layer)").texts["input"]
        'norm/√(t+1)'

    Attributes:
        input: norm of what the sublayer reads: ``none``, ``norm``, or a norm with a factor, ``norm/sqrt(layer)``.
        heads: which of q, k, v are normalised after their projections: ``none``, ``qk``, ``qkv``, ...
        scores: how attention's logits become weights: ``softmax``, or some of ``temperature(log(n))``, ``softcap(50)`` and
            ``sink`` joined by +; n is the number of keys that a query sees.
        inner: norm before the sublayer's last matrix, of the concatenated heads or the hidden activation: ``none``, ``norm``.
        gate: factor on what attention's heads mix, before its last matrix: ``none``, or ``sigmoid`` of W_G times its input.
        output: what becomes of the sublayer's output: ``none``, ``norm``, or ``tangent``, its part orthogonal to x.
        step: size of the update: a formula in ``t``, ``layer``, ``depth``, ``alpha``.
        carry: weight of the residual: a formula likewise.
        stream: norm of the sum: ``none`` or ``norm``.
    """

    input: str = "none"
    heads: str = "none"
    scores: str = PLAIN
    inner: str = "none"
    gate: str = "none"
    output: str = "none"
    step: str | float | Expression = ONE
    carry: str | float | Expression = ONE
    stream: str = "none"

    def __post_init__(self) -> None:
        _slot_factor(self.input)
        for name, allowed in _CHOICES.items():
            _require(getattr(self, name), allowed, f"slot '{name}'")
        if self.heads != "none" and (not self.heads or "".join(c for c in "qkv" if c in self.heads) != self.heads):
            raise InputError(f"slot 'heads' is 'none' or some of q, k, v in this order, such as 'qk', not '{self.heads}'")
        object.__setattr__(self, "scores", score_text(self.scores))
        for name in ("step", "carry"):
            object.__setattr__(self, name, Expression.parse(getattr(self, name)))

    @property
    def score_rule(self) -> "Scores":
        """How logits become weights, as ``core.scores`` computes it."""
        from normscope.schemes.score_slot import score_rule

        return score_rule(self.scores)

    @property
    def without_attention(self) -> "Slots":
        """The same without the slots that attention alone has."""
        return replace(self, **_ATTENTION_ALONE)

    @property
    def reads_norm(self) -> bool:
        """Whether the sublayer reads a normalised state."""
        return self.input != "none"

    @property
    def input_factor(self) -> Product:
        """The factor c(t) on the input norm; 1 if there is none."""
        return _slot_factor(self.input)

    @property
    def formulas(self) -> tuple[Expression, Expression]:
        """Step and carry as expressions."""
        return Expression.parse(self.step), Expression.parse(self.carry)

    @cached_property
    def named_formulas(self) -> "dict[str, Expression | Product]":
        """Step, carry and the factor on the input norm, by slot."""
        step, carry = self.formulas
        return {"step": step, "carry": carry, "input": self.input_factor}

    @property
    def learns_alpha(self) -> bool:
        """Whether alpha stands in a slot, as the step that training learns."""
        return any("alpha" in formula.names for formula in self.named_formulas.values())

    def number(self, slot: str, at: At) -> Any:
        """The value of ``step``, ``carry`` or the factor of ``input`` at a place in depth.

        A number is finite, positive for ``input``, and for ``carry`` where the stream is normalised, which would otherwise keep
        nothing of x; any other is refused. With a learned alpha the value is a tensor, as it comes.
        """
        formula = self.named_formulas[slot]
        if not isinstance(at.alpha, int | float) and "alpha" in formula.names:
            return formula(at.values)
        value = finite_value(formula, at.values)
        if value is None:
            raise InputError(f"{slot} = '{formula.text}' is not a finite number at {at}")
        if slot == "carry" and self.stream == "norm" and not value > 0:
            raise InputError(f"with a normalised stream carry must be positive; '{formula.text}' is {value:g} at {at}")
        if slot == "input" and not value > 0:
            raise InputError(f"the factor on the input norm must be positive; '{formula.text}' is {value:g} at {at}")
        return value

    def update(self, function: str = "A", norm: str = "Norm") -> str:
        """The sublayer as a formula: ``X ← Norm(X + α_t·Norm(A(X)))``."""
        from normscope.schemes.law import update_text

        return update_text(self, function, norm)

    def flow(self, function: str = "A", norm: str = "Norm") -> str:
        """Its flow as a formula: ``Ẋ = α_t·P_X Norm(A(X))``."""
        from normscope.schemes.law import flow_text

        return flow_text(self, function, norm)

    @property
    def texts(self) -> dict[str, str]:
        """Every slot as a reader would write it."""
        step, carry = self.formulas
        return {
            "input": (Product.of("norm") * self.input_factor).text if self.reads_norm else "none",
            "heads": self.heads,
            "scores": score_title(self.scores),
            "inner": self.inner,
            "gate": self.gate,
            "output": self.output,
            "step": step.text,
            "carry": carry.text,
            "stream": self.stream,
        }


@dataclass(frozen=True, repr=False)
class Scheme:
    """Slots for attention and for the feed-forward layer, and a rule for depth.

    A scheme prints its slots, update, law and block.

    Example:
        >>> mine = Scheme("mine", Slots(input="norm", output="norm", step="1/sqrt(layer)"))
        >>> mine.law.speed
        r_j·√(t+1)·|A_j|

    Attributes:
        name: how commands call it.
        attention: slots of the attention sublayer.
        feedforward: slots of the feed-forward sublayer; attention's, without those that it alone has, unless given.
        norm: RMSNorm, LayerNorm or a pointwise map (tanh, erf), wherever a slot says norm; with a map, heads have RMSNorm.
        alpha: the value of ``alpha`` in the slots, a formula in t: the start of a learned step, or its schedule.
        learned: whether training learns alpha as a ``vector``, one number for each component, or as a ``scalar``.
        initial: a factor on the initial weights of W_V, W_O, W_in and W_out, a formula in ``t``, ``layer`` and ``depth``.
        weights: ``free``, or ``normalised``: every matrix keeps unit length along the stream's dimension while it is trained.
        until: share of the depth for which these slots hold, when ``then`` follows: a number, or a formula in ``depth``
            (``1/depth`` is the first layer).
        then: the scheme of the remaining layers.
        title, users, papers, note: for people.
    """

    name: str
    attention: Slots
    feedforward: Slots = None  # type: ignore[assignment]
    norm: NormKind = "rms"
    alpha: str | float | Expression = ONE
    learned: str = "vector"
    initial: str | float | Expression = ONE
    weights: str = "free"
    until: str | float | Expression = ONE
    then: "Scheme | None" = None
    title: str = field(default="", compare=False)
    users: str = field(default="", compare=False)
    papers: tuple[str, ...] = field(default=(), compare=False)
    note: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.name or any(c.isspace() or c in ",/" for c in self.name):
            raise InputError(f"a scheme's name is one word without commas or slashes, not '{self.name}'")
        if self.feedforward is None:
            object.__setattr__(self, "feedforward", self.attention.without_attention)
        for slot, empty in _ATTENTION_ALONE.items():
            if getattr(self.feedforward, slot) != empty:
                raise InputError(f"slot '{slot}' belongs to attention: in a feed-forward layer it must be '{empty}'")
        _require(self.norm, tuple(NORM_TITLES), "norm")
        _require(self.weights, WEIGHTS, "weights")
        _require(self.learned, LEARNED, "learned")
        for name in ("alpha", "initial"):
            formula = Expression.parse(getattr(self, name))
            if "alpha" in formula.names:
                itself = "itself" if name == "alpha" else "alpha"
                raise InputError(f"{name} is a number or a formula in t, layer and depth; it cannot refer to {itself}")
            object.__setattr__(self, name, formula)
        self._check_until()
        self._check_constants()

    def _check_until(self) -> None:
        """A stage ends at a share of the depth, before the stage after it does."""
        allowed = "'until' is a share of the depth, above 0 and at most 1, or a formula in depth such as 1/depth"
        try:
            until = Expression.parse(self.until)
        except InputError as error:
            raise InputError(f"{allowed}, not {self.until!r}") from error
        object.__setattr__(self, "until", until)
        if until.names - {"depth"} or (not until.names and not 0 < (finite_value(until, {}) or 0.0) <= 1):
            raise InputError(f"{allowed}, not '{until.text}'")
        if self.then is None and until != ONE:
            raise InputError("'until' below 1 needs 'then': the scheme of the remaining layers")
        if self.then is not None and until == ONE:
            raise InputError("'then' needs 'until' below 1: the share of the depth before it")
        if self.then is not None and not (until.names or self.then.share.names):
            self._check_order(1.0)

    def _check_order(self, depth: float) -> None:
        if self.then is not None and self.then.then is not None and self.then.end(depth) <= self.end(depth):
            raise InputError(f"'{self.then.name}' holds for t < {self.then.end_text}, which is over when it would begin")

    def _check_constants(self) -> None:
        """Formulas without t and depth have their value at every depth, so it is checked at once; ``check`` does the others."""
        fixed = not self.schedule.names
        place = self.place(0.0, 1.0) if fixed else At()
        for slots in (self.attention, self.feedforward):
            for name, formula in slots.named_formulas.items():
                if formula.names <= ({"alpha"} if fixed else set()):
                    slots.number(name, place)
        if not Expression.parse(self.initial).names:
            self.initial_factor(0.0, 1.0)

    @property
    def initial_text(self) -> str:
        """``initial`` as a reader would write it."""
        return Expression.parse(self.initial).text

    def initial_factor(self, t: float, depth: float) -> float:
        """The factor on the initial weights of W_V, W_O, W_in and W_out at time t."""
        formula = Expression.parse(self.initial)
        value = finite_value(formula, {"t": t, "depth": depth})
        if value is None or not value > 0:
            raise InputError(f"initial = '{formula.text}' is not a positive number at {At(t, depth)}")
        return value

    def check(self, depth: float, times: Iterable[float] = (), alpha: "Callable[[float], float] | None" = None) -> None:
        """Refuse a scheme that cannot run at a depth: the one check of every formula where a scheme meets a depth.

        Args:
            depth: the number of layers, or the length of time.
            times: where the formulas are evaluated besides every layer 0, 1, ..., depth − 1: those of a flow.
            alpha: α_t as a function of time, in place of the scheme's own.
        """
        try:
            for stage in self.stages:
                share = finite_value(stage.share, {"depth": depth})
                if share is None or not share > 0:
                    raise InputError(f"until = '{stage.share.text}' is not a positive number at depth {depth:g}")
                stage._check_order(depth)
            varying = alpha is not None or any(stage._varies for stage in self.stages)
            for t in (*_layers(depth), *times):
                stage = self.at(t, depth)
                place = stage.place(t, depth, alpha)
                stage.initial_factor(t, depth)
                for slots in (stage.attention, stage.feedforward):
                    for name in slots.named_formulas:
                        slots.number(name, place)
                if not varying:
                    break
        except InputError as error:
            raise InputError(f"scheme '{self.name}' cannot run at depth {depth:g}: {error}") from error

    def check_head(self, width: int) -> None:
        """Refuse heads of one dimension where they are normalised."""
        if width < 2 and any(stage.attention.heads != "none" for stage in self.stages):
            raise InputError(
                f"a head has at least 2 dimensions: '{self.name}' normalises heads, and one number's norm is its sign"
            )

    @property
    def _varies(self) -> bool:
        """Whether any formula of this stage depends on time."""
        slots = (*self.attention.named_formulas.values(), *self.feedforward.named_formulas.values())
        return any("t" in formula.names for formula in (self.schedule, Expression.parse(self.initial), *slots))

    @property
    def share(self) -> Expression:
        """``until`` as an expression in depth."""
        return Expression.parse(self.until)

    def end(self, depth: float) -> float:
        """The time at which this stage ends."""
        return min(1.0, float(self.share({"depth": depth}))) * depth

    @property
    def end_text(self) -> str:
        """The same as a formula: ``0.25·T``."""
        return (Product.of(self.share) * Product.of("depth")).text

    def at(self, t: float, depth: float) -> "Scheme":
        """The stage that holds at time t of ``depth`` layers (t = 0 is the first layer)."""
        if self.then is None or t < self.end(depth) - 1e-9 * depth:  # 0.07 · 100 is 7 layers, not 8
            return self
        return self.then.at(t, depth)

    def on_sphere(self, feedforward: bool = True) -> bool:
        """Whether hidden states start normalised: if any sublayer of this stage normalises the stream.

        Embeddings of trained models and starts of simulations follow this one rule; so does a simulation, not a trained model,
        where a stage with a free stream ends and one with a normalised stream begins. ``feedforward=False`` is for blocks of
        attention alone. A pointwise map has no sphere.
        """
        normalised = self.attention.stream == "norm" or (feedforward and self.feedforward.stream == "norm")
        return normalised and not self.pointwise

    @property
    def pointwise(self) -> bool:
        """Whether the kind of norm is a map of every component alone."""
        return self.norm not in _SPHERES

    @property
    def norm_text(self) -> str:
        """What stands in formulas and drawings where a slot says norm: ``Norm``, or the name of the map."""
        return NORM_TITLES[self.norm] if self.pointwise else "Norm"

    @property
    def head_kind(self) -> NormKind:
        """The kind of norm that heads have: a pointwise map leaves them RMSNorm."""
        return "rms" if self.pointwise else self.norm

    @property
    def features(self) -> frozenset[str]:
        """What blocks have, in any stage, besides norms of input, heads, output and stream, and besides numbers."""
        return frozenset(
            name
            for stage in self.stages
            for slots in (stage.attention, stage.feedforward)
            for name, there in {
                "scores": slots.scores != PLAIN,
                "inner": slots.inner != "none",
                "gate": slots.gate != "none",
                "output=tangent": slots.output == "tangent",
                f"norm={stage.norm}": stage.pointwise,
                "learned=scalar": stage.learned == "scalar",
            }.items()
            if there
        )

    def require_plain(self, who: str, *treats: str) -> None:
        """Refuse a scheme with features other than those that ``who`` treats."""
        missing = sorted(self.features - set(treats))
        if missing:
            raise InputError(f"{who} cannot treat {' and '.join(missing)} of scheme '{self.name}'")

    @property
    def stages(self) -> Iterator["Scheme"]:
        """The stages from the first layer to the last; one, unless the scheme changes with depth."""
        yield self
        if self.then is not None:
            yield from self.then.stages

    def place(self, t: float, depth: float, alpha: "Callable[[float], float] | None" = None) -> At:
        """The variables of the slots at time t; ``alpha`` is α_t in place of the scheme's own."""
        value = finite_value(self.schedule, {"t": t, "depth": depth}) if alpha is None else alpha(t)
        if value is None or not math.isfinite(value):
            text = f" = '{self.schedule.text}'" if alpha is None else ""
            raise InputError(f"alpha{text} is not a finite number at {At(t, depth)}")
        return At(t, depth, value)

    @property
    def law(self) -> "Law | StagedLaw":
        """The law of motion of attention: ``law.speed`` is s_j, ``law.radial`` is ṙ_j; they print and they compute."""
        from normscope.schemes.law import law_by_stage

        return law_by_stage(self, attends=True)

    def law_of(self, slots: Slots) -> "Law":
        """The law of motion of attention with some slots and this stage's norm."""
        from normscope.schemes.law import law_of

        return law_of(slots, self.norm)

    @property
    def feedforward_law(self) -> "Law | StagedLaw":
        """The law of motion of the feed-forward layer F, which stands for A."""
        from normscope.schemes.law import law_by_stage

        return law_by_stage(self, attends=False)

    @property
    def update(self) -> str:
        """The attention sublayer as a formula: ``X ← X + Norm(A(Norm(X)))``."""
        return self._joined(lambda stage: stage.attention.update("A", stage.norm_text))

    @property
    def flow(self) -> str:
        """Its flow as a formula: ``Ẋ = Norm(A(Norm(X)))``; a dash where a pointwise map of the stream leaves it none."""
        return self._joined(
            lambda stage: stage.attention.flow("A", stage.norm_text) if stage.law_of(stage.attention).flows else "–"
        )

    @property
    def block(self) -> str:
        """The block as a drawing in box characters, x entering at the top; one for each stage."""
        from normscope.schemes.drawing import draw_blocks

        return draw_blocks(self)

    def _joined(self, text: "Callable[[Scheme], str]") -> str:
        from normscope.schemes.law import join_stages

        return join_stages(self, [text(stage) for stage in self.stages])

    def __repr__(self) -> str:
        from normscope.schemes.display import scheme_text

        return scheme_text(self)

    def _repr_html_(self) -> str:
        from normscope.schemes.display import scheme_html

        return scheme_html(self)

    @property
    def schedule(self) -> Expression:
        """``alpha`` as an expression in t."""
        return Expression.parse(self.alpha)

    @property
    def learns_alpha(self) -> bool:
        """Whether alpha stands in a slot of this stage, as the step that training learns."""
        return self.attention.learns_alpha or self.feedforward.learns_alpha

    def with_heads(self, heads: str) -> "Scheme":
        """The same scheme with q, k (and v) normalised: ``peri.with_heads("qk")`` is called ``peri+qk``."""
        return self._with(heads, f"normalised heads: {heads}", {"heads": heads}, {})

    def with_part(self, part: str) -> "Scheme":
        """The same scheme with one slot more: ``peri.with_part("softcap(50)")`` is called ``peri+softcap(50)``.

        A part is normalised heads (``qk``), ``gate``, ``inner``, or one of the parts of ``scores`` (``sink``).
        """
        if part and set(part) <= set("qkv"):
            return self.with_heads(part)
        if part == "gate":
            return self._with(part, "with a gate", {"gate": "sigmoid"}, {})
        if part == "inner":
            return self._with(part, "with inner norms", {"inner": "norm"}, {"inner": "norm"})
        if part.partition("(")[0] in SCORE_PARTS:
            scores = self.attention.scores
            return self._with(part, f"with {part}", {"scores": part if scores == PLAIN else f"{scores}+{part}"}, {})
        raise InputError(
            f"'{part}' is no part of a scheme: +qk, +qkv, +gate, +inner, +sink, +softcap(50), +temperature(log(n)) are"
        )

    def _with(self, part: str, said: str, attention: dict[str, str], feedforward: dict[str, str]) -> "Scheme":
        return replace(
            self,
            name=f"{self.name}+{part}",
            attention=replace(self.attention, **attention),
            feedforward=replace(self.feedforward, **feedforward),
            then=None if self.then is None else self.then._with(part, said, attention, feedforward),
            title=f"{self.title or self.name}, {said}",
            users="",
        )

    def with_norm(self, norm: str) -> "Scheme":
        """The same scheme with another kind of norm in every stage: ``rms``, ``layer``, ``tanh`` or ``erf``."""
        _require(norm, tuple(NORM_TITLES), "norm")
        then = None if self.then is None else self.then.with_norm(norm)
        return replace(self, norm=norm, then=then)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _slot_factor(slot: str) -> Product:
    """The factor beside the norm in ``none``, ``norm`` or ``norm/sqrt(layer)``."""
    if slot == "none":
        return Product()
    powers = dict(Product.of(Expression.parse(slot, extra=frozenset({"norm"}))).factors)
    power_of_norm = powers.pop("norm", None)
    factor = Product(tuple(powers.items()))
    if power_of_norm != 1 or any("norm" in Expression(atom).names for atom in powers):
        raise InputError(f"slot 'input' is 'none', 'norm', or 'norm' times a factor (norm/sqrt(layer)), not '{slot}'")
    return factor


def _require(value: str, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise InputError(f"{what} is one of {', '.join(allowed)}, not '{value}'{did_you_mean(str(value), allowed)}")


def _layers(depth: float) -> Iterator[float]:
    """Every layer of a model; of one that is deeper than any, as many spread over its depth."""
    count = math.ceil(depth)
    return (float(i * count // min(count, _MOST_LAYERS)) for i in range(min(count, _MOST_LAYERS)))
