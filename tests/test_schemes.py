"""What follows from the slots: the published table, and the numerical derivative of every scheme's layer."""

import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from xml.etree.ElementTree import fromstring

import pytest
import torch
from torch import Tensor

from normscope import InputError
from normscope.core.norms import SphereNorm, rms_norm, theory_norm, visible_part
from normscope.schemes import NAMED, At, NormKind, Scheme, Slots, scheme_from, scheme_record, scheme_values
from normscope.schemes.display import fact_rows
from normscope.schemes.update import Update

TABLE_2 = {  # paper 2: continuous time, speed factor, radial rate
    "post": ("Ẋ = P_X A(X)", "1", "0"),
    "pre": ("Ẋ = A(Norm(X))", "r_j", "⟨θ_j,A_j⟩"),
    "mix": (
        "Ẋ = P_X A(X) for t < 0.25·T, then Ẋ = A(Norm(X))",
        "1 for t < 0.25·T, then r_j",
        "0 for t < 0.25·T, then ⟨θ_j,A_j⟩",
    ),
    "peri": ("Ẋ = Norm(A(Norm(X)))", "r_j·|A_j|", "⟨θ_j,A_j⟩/|A_j|"),
    "ngpt": ("Ẋ = α_t·P_X Norm(A(X))", "|A_j|/α_t", "0"),
    "sqrt-scaling": ("Ẋ = P_X A(X)/√(t+1)", "√(t+1)", "0"),
}
OWN = Scheme(
    "own",
    Slots(input="norm*2/layer", heads="q", output="none", step="1/depth + alpha", carry="1 - alpha/4"),
    alpha=0.2,
)
SCORES = "sink(0.7) + softcap(2) + temperature(log(n))"
MIXED = [
    Scheme("sinks", Slots(input="norm/layer", scores=SCORES, carry=0.9)),
    Scheme("sink-post", Slots(heads="qkv", scores=SCORES, step="alpha", stream="norm"), alpha=0.3),
    Scheme("sink-peri", Slots(input="norm", scores=SCORES, output="norm")),
    Scheme("inner", Slots(input="norm/layer", scores="sink", inner="norm", stream="norm", carry=2)),
    Scheme("gated", Slots(heads="k", inner="norm", gate="sigmoid", output="tangent", carry="1 - 1/depth", step=0.5)),
    Scheme("tangent-post", Slots(output="tangent", stream="norm", carry=3)),
    Scheme("qkv-gated", Slots(heads="qkv", gate="sigmoid")),
    Scheme("fading-gated", Slots(input="norm/sqrt(layer)", scores="sink", gate="sigmoid")),
    Scheme("fading-gated-inner", Slots(input="norm/layer", heads="q", inner="norm", gate="sigmoid")),
]
SCHEMES = [*NAMED.values(), NAMED["peri"].with_heads("qk"), NAMED["res-post"].with_heads("qk"), OWN, *MIXED]


@pytest.mark.parametrize("name", TABLE_2)
def test_derived_forms_are_those_of_the_published_table(name: str) -> None:
    record = scheme_record(NAMED[name])
    assert (record["flow"], record["speed"], record["radial"]) == TABLE_2[name]


def by_hand(x: Tensor, slots: Slots, beta: float, weights: list[Tensor], kind: NormKind) -> dict[str, Tensor]:
    """Attention of one head written out, A_j = Σ_k softmax(β⟨Q x_j, K x_k⟩) V x_k: ``A`` without sink and inner norm.

    ``f`` is with both, ``M`` what the head mixes, ``m`` the sink's mass.
    """
    q, k, v = (x @ w.T for w in weights[:3])
    q, k, v = (
        y / y.norm(dim=-1, keepdim=True) if letter in slots.heads else y for letter, y in zip("qkv", (q, k, v), strict=True)
    )
    logits = beta * q @ k.T
    if "temperature(log(n))" in slots.scores:
        logits = logits * math.log(len(x))
    if "softcap(2)" in slots.scores:
        logits = 2 * torch.tanh(logits / 2)
    if "softcap(50)" in slots.scores:
        logits = 50 * torch.tanh(logits / 50)
    gate = torch.sigmoid(x @ weights[4].T) if slots.gate == "sigmoid" else torch.ones_like(x)
    M = visible_part(torch.softmax(logits, -1) @ v, kind if slots.inner == "norm" else "rms")
    sink = torch.full((len(x), 1), 0.7 if "sink(0.7)" in slots.scores else 0.0, dtype=x.dtype)
    m = torch.softmax(torch.cat((logits, sink), -1), -1)[:, -1:] if "sink" in slots.scores else torch.zeros_like(sink)
    mixed = (1 - m) * M
    if slots.inner == "norm":
        mixed = theory_norm(kind)(mixed)
    return {"A": gate * M @ weights[3].T, "f": gate * mixed @ weights[3].T, "M": M.norm(dim=-1, keepdim=True), "m": m}


def attention(heads: str, beta: float, weights: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Plain attention, of what it reads."""
    one = torch.eye(len(weights[0]), dtype=torch.float64)
    return lambda x: by_hand(x, Slots(heads=heads), beta, [*weights, one], "rms")["f"]


def state(slots: Slots, kind: NormKind, generator: torch.Generator) -> Tensor:
    x = 3.0 * torch.randn(6, 10, dtype=torch.float64, generator=generator)
    return theory_norm(kind)(x) if slots.stream == "norm" else x


@pytest.mark.parametrize("weights", ["random", "identity"])
@pytest.mark.parametrize("kind", ["rms", "layer", "tanh", "erf"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_law_of_motion_is_the_derivative_of_the_layer(scheme: Scheme, kind: NormKind, weights: str) -> None:
    """θ̇_j = (1/s_j) P_θj A_j and ṙ_j, with A_j at what is read and at β times the derived factor, against differences."""
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(10, 10, dtype=torch.float64, generator=generator) / 10**0.5 for _ in range(5)]
    used = drawn if weights == "random" else [torch.eye(10, dtype=torch.float64)] * 5
    t, depth, beta, h = 3.0, 12.0, 1.7, 1e-5
    for stage in scheme.with_norm(kind).stages:
        slots, law, at = stage.attention, stage.law_of(stage.attention), stage.place(t, depth)
        if kind in ("tanh", "erf") and "norm" in (slots.inner, slots.output, slots.stream):
            assert kind in law.statement
            assert not law.known
            assert str(law.speed) == str(law.radial) == "–"
            with pytest.raises(InputError, match="theory has no law of motion here"):
                law.speed({})
            continue
        x = state(slots, kind, generator)
        update = Update.of(slots, at, theory_norm(kind))
        y = by_hand(update.read(x), slots, beta, used, kind)["f"]
        ahead, behind = (update.state(x, y, stride) for stride in (h, -h))
        r, theta = x.norm(dim=-1, keepdim=True), x / x.norm(dim=-1, keepdim=True)

        seen = theory_norm(kind)(x) if slots.reads_norm else x if law.sees_radius else theta
        assert law.read == {"Θ": "Θ", "X": "X"}.get(law.read, f"{kind}(X)")
        inside = [*used[:4], law.gate(at.values) * used[4]]
        found = by_hand(seen, slots, beta * law.temperature(at.values), inside, kind)
        A = found["A"]
        if "norm" in (slots.output, slots.stream):
            A = visible_part(A, kind)  # a LayerNorm after A sees only its centred part
        values = {**at.values, "r": r, "A": A.norm(dim=-1, keepdim=True), "M": found["M"], "m": found["m"]}
        turned = (A - (A * theta).sum(-1, keepdim=True) * theta) / law.speed(values)
        measured = (ahead / ahead.norm(dim=-1, keepdim=True) - behind / behind.norm(dim=-1, keepdim=True)) / (2 * h)
        assert torch.allclose(measured, turned, rtol=1e-6, atol=1e-8)

        grown = (ahead.norm(dim=-1) - behind.norm(dim=-1)) / (2 * h)
        inner = (A * theta).sum(-1)
        expected = [
            law.radial(float(inner[j]), {**at.values, **{name: float(values[name][j]) for name in "rAMm"}})
            for j in range(len(x))
        ]
        assert torch.allclose(grown, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-8)
        assert law.radius_fixed == (slots.stream == "norm")


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_flow_is_the_derivative_of_the_layer(scheme: Scheme, kind: NormKind) -> None:
    generator = torch.Generator().manual_seed(8)
    weights = [torch.randn(10, 10, dtype=torch.float64, generator=generator) for _ in range(5)]
    for stage in scheme.stages:
        slots, at, h = stage.attention, stage.place(2.0, 8.0), 1e-5
        x = state(slots, kind, generator)
        update = Update.of(slots, at, theory_norm(kind))
        y = by_hand(update.read(x), slots, 0.4, weights, kind)["f"]
        difference = (update.state(x, y, h) - update.state(x, y, -h)) / (2 * h)
        assert torch.allclose(update.velocity(x, y), difference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_schemes_in_a_stack_move_as_they_do_alone(kind: NormKind) -> None:
    generator = torch.Generator().manual_seed(9)
    norm = SphereNorm(kind)
    x = norm(torch.randn(6, 10, dtype=torch.float64, generator=generator))
    y = torch.randn(6, 10, dtype=torch.float64, generator=generator)
    alone = [Update.of(scheme.attention, scheme.place(2.0, 8.0), norm) for scheme in SCHEMES]
    together = Update.stacked(alone, (norm,), "cpu", torch.float64)
    tokens, outputs = x.expand(len(alone), 6, 10), y.expand(len(alone), 6, 10)
    for i, update in enumerate(alone):
        assert torch.allclose(together.read(tokens)[i], update.read(x), atol=1e-15)
        assert torch.allclose(together.state(tokens, outputs, 0.5)[i], update.state(x, y, 0.5), atol=1e-15)
        assert torch.allclose(together.state(tokens, outputs)[i], update.state(x, y), atol=1e-15)
        assert torch.allclose(together.velocity(tokens, outputs)[i], update.velocity(x, y), atol=1e-15)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_norms_of_another_radius_give_the_same_law_at_that_radius(scheme: Scheme) -> None:
    """Models have norms of radius √d: their states are √d times those of theory where f writes √d times as much."""
    generator = torch.Generator().manual_seed(5)
    slots, at, radius = scheme.attention, scheme.place(2.0, 8.0), 10**0.5
    x, y = (torch.randn(6, 10, dtype=torch.float64, generator=generator) for _ in range(2))
    theory, model = (Update.of(slots, at, norm) for norm in (SphereNorm(), SphereNorm(radius=radius)))
    plain = Update.of(slots, at, rms_norm)
    x = theory.settle(x)
    assert torch.allclose(model.state(radius * x, radius * y), radius * theory.state(x, y), atol=1e-13)
    assert torch.allclose(plain.state(radius * x, radius * y), radius * theory.state(x, y), atol=1e-13)
    assert torch.allclose(model.velocity(radius * x, radius * y), radius * theory.velocity(x, y), atol=1e-13)


def test_learned_values_take_the_place_of_formulas() -> None:
    """Norm(carry∘x + step∘Norm(y)), written out, with vectors that a model has learned."""
    generator = torch.Generator().manual_seed(6)
    x, y = (torch.randn(3, 10, dtype=torch.float64, generator=generator) for _ in range(2))
    alpha, step, carry, gain = (torch.rand(10, dtype=torch.float64, generator=generator) + 0.1 for _ in range(4))
    slots = NAMED["ngpt-lerp"].attention

    def norm(z: Tensor) -> Tensor:
        return gain * z / z.square().mean(-1, keepdim=True).sqrt()

    def gained(z: Tensor) -> Tensor:
        return rms_norm(z, gain)

    learned = Update.of(slots, At(2.0, 8.0, alpha), gained)
    assert torch.allclose(learned.state(x, y), norm((1 - alpha) * x + alpha * norm(y)), atol=1e-13)
    assert torch.allclose(learned.written(x, y), alpha * norm(y), atol=1e-13)
    given = Update.of(slots, At(2.0, 8.0), {"output": gained, "stream": gained}, step=step, carry=carry)
    assert torch.allclose(given.state(x, y), norm(carry * x + step * norm(y)), atol=1e-13)
    with pytest.raises(TypeError, match="has no flow"):
        given.velocity(x, y)


def test_layers_are_the_published_updates() -> None:
    """At stride 1 a layer is the update of paper 2's table, written out here by hand."""
    generator = torch.Generator().manual_seed(1)
    f = attention("none", 1.0, [torch.eye(5, dtype=torch.float64)] * 3)
    x = torch.nn.functional.normalize(torch.randn(4, 5, dtype=torch.float64, generator=generator), dim=-1)

    def norm(y: Tensor) -> Tensor:
        return torch.nn.functional.normalize(y, dim=-1)

    by_hand = {
        "post": norm(x + f(x)),
        "pre": x + f(norm(x)),
        "peri": x + norm(f(norm(x))),
        "ngpt": norm(x + 0.3 * norm(f(x))),
        "sqrt-scaling": norm(x + f(x) / 3.0**0.5),
        "ngpt-lerp": norm(0.7 * x + 0.3 * norm(f(x))),
        "ln-scaling": x + f(norm(x) / 3.0**0.5),
        "deepnorm": norm(24.0**0.25 * x + f(x)),
        "res-post": x + norm(f(x)),
    }
    for name, expected in by_hand.items():
        update = Update.of(NAMED[name].attention, At(t=2.0, depth=12.0, alpha=0.3), SphereNorm())
        assert torch.allclose(update.state(x, f(update.read(x))), expected, atol=1e-14), name


def test_mix_changes_after_its_share_of_the_layers() -> None:
    mix = NAMED["mix"]
    streams = [mix.at(t, 8).attention.stream for t in range(8)]
    assert streams == ["norm"] * 2 + ["none"] * 6


def test_a_user_scheme_in_a_few_lines_equals_the_named_one() -> None:
    assert replace(Scheme("mine", Slots(input="norm", output="norm")), name="peri") == NAMED["peri"]
    assert hash(NAMED["peri"]) == hash(replace(Scheme("mine", Slots(input="norm", output="norm")), name="peri"))


def test_norm_is_a_parameter_of_every_stage() -> None:
    mixed = NAMED["mix"].with_norm("layer")
    assert [stage.norm for stage in mixed.stages] == ["layer", "layer"]
    with pytest.raises(InputError, match="one of rms, layer"):
        NAMED["mix"].with_norm("batch")


def test_a_map_of_the_stream_has_layers_but_no_flow() -> None:
    """Norm(x) is x on the sphere; tanh(x) is not, so that a layer without any update still changes x."""
    scheme = NAMED["post"].with_norm("tanh")
    update = Update.of(scheme.attention, scheme.place(0.0, 2.0), theory_norm("tanh"))
    x, y = (torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert torch.allclose(update.state(x, y), torch.tanh(x + y) / 2, atol=1e-15)  # √d/2 = 1
    assert scheme.flow == "–"
    assert not scheme.on_sphere()
    with pytest.raises(InputError, match="a stream through tanh has no flow"):
        update.velocity(x, y)
    with pytest.raises(InputError, match="norm = 'tanh' puts nothing on a sphere"):
        SphereNorm("tanh")


def test_a_scheme_with_more_than_somebody_treats_is_refused_in_one_line() -> None:
    late = Scheme("late", NAMED["pre"].attention, until=0.5, then=Scheme("both", Slots(inner="norm", gate="sigmoid")))
    assert late.features == {"inner", "gate"}
    late.require_plain("the oracle", "inner", "gate", "scores")
    with pytest.raises(InputError, match=r"^the oracle cannot treat gate of scheme 'late'$"):
        late.require_plain("the oracle", "inner")
    assert {name for name, scheme in NAMED.items() if scheme.features} == {
        "rezero", "dyt", "derf", "sub-ln", "gated", "sink", "softcap", "tangent",
    }  # fmt: skip


def test_initial_weights_of_deepnorm_and_sub_ln_are_those_of_their_papers() -> None:
    assert NAMED["deepnorm"].initial_factor(3, 2) == pytest.approx(0.5)  # (8·2)^(-1/4)
    assert NAMED["sub-ln"].initial_factor(0, 24) == pytest.approx(math.log(48) ** 0.5)
    assert NAMED["pre"].initial_factor(0, 24) == 1


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_drawing_shows_every_slot_that_is_filled(scheme: Scheme) -> None:
    for stage in scheme.stages:
        drawing = replace(stage, until=1.0, then=None).block
        filled = [
            s for slots in (stage.attention, stage.feedforward) for s in (slots.input, slots.inner, slots.output, slots.stream)
        ]
        assert drawing.count(stage.norm_text) - drawing.count("Norm(") == sum(s.startswith("norm") for s in filled)
        assert drawing.count("Norm(") == (stage.attention.heads != "none")
        assert drawing.count("part ⟂ x") == filled.count("tangent")
        assert drawing.count("σ(W_G·)") == (stage.attention.gate == "sigmoid")
        assert drawing.count(stage.attention.texts["scores"]) == (stage.attention.scores != "softmax")
        assert drawing.count("⊕") == 2
        assert len({line.find("⊕") for line in drawing.splitlines() if "⊕" in line}) == 1
        for slots in (stage.attention, stage.feedforward):
            for text in (slots.texts["step"], slots.texts["carry"]):
                assert text == "1" or f"× {text}" in drawing


def test_a_scheme_shows_slots_update_law_and_block_as_text_and_as_html() -> None:
    mine = Scheme("mine", Slots(input="norm", output="norm", step="1/sqrt(layer)"))
    assert str(mine.law.speed) == repr(mine.law.speed) == "r_j·√(t+1)·|A_j|"
    assert str(mine.law.radial) == repr(mine.law.radial) == "⟨θ_j,A_j⟩/(√(t+1)·|A_j|)"
    assert mine.law.speed({"r": 2.0, "A": 3.0, "t": 3.0}) == 12.0
    shown = [mine.update, mine.flow, str(mine.law.speed), str(mine.law.radial), mine.block, "1/√(t+1)", *mine.attention.texts]
    for text in (str(mine), repr(mine), unescape(mine._repr_html_())):
        for part in shown:
            assert part in text, part


def test_html_of_a_scheme_is_escaped_and_needs_nothing_else() -> None:
    odd = Scheme("<b>&mine", Slots(input="norm"), title="<script>alert(1)</script>", note='"&<', users="<i>")
    page = odd._repr_html_()
    assert "<script" not in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert "http" not in page
    assert page.count("<div") == page.count("</div>") == 2
    fromstring(page)  # well-formed


def test_laws_of_a_scheme_that_changes_with_depth_print_all_stages_and_compute_the_one_that_holds() -> None:
    mix = NAMED["mix"]
    assert str(mix.law.speed) == "1 for t < 0.25·T, then r_j"
    assert str(mix.law.radial) == "0 for t < 0.25·T, then ⟨θ_j,A_j⟩"
    values = {"depth": 8.0, "r": 3.0, "A": 2.0, "alpha": 1.0}
    assert [mix.law.speed({**values, "t": t}) for t in (0.0, 1.0, 2.0, 7.0)] == [1.0, 1.0, 3.0, 3.0]
    assert [mix.law.radial(0.5, {**values, "t": t}) for t in (1.0, 2.0)] == [0.0, 0.5]
    assert mix.block.count("⊕") == 4


def test_what_theory_says_of_some_stages_alone_is_a_dash_for_the_others() -> None:
    gated = Scheme("mine", Slots(input="norm", gate="sigmoid"), until=0.5, then=NAMED["pre"])
    assert str(scheme_record(gated)["statement"]).endswith("where W_G is zero for t < 0.5·T, then –")
    mapped = Scheme("mine", Slots(stream="norm"), norm="tanh")
    assert mapped.law.attention == "A_j(X)"  # tanh leaves no sphere
    assert "directions" not in dict(fact_rows(mapped))
    assert "directions" in dict(fact_rows(NAMED["pre"]))


def test_a_law_says_which_number_it_lacks() -> None:
    with pytest.raises(InputError, match=r"the formula 2·T needs a value of 'depth'"):
        NAMED["keel"].law.speed({"T": 4})


def test_schemes_need_no_torch() -> None:
    shown = "str(NAMED['mix']); NAMED['mix']._repr_html_()"
    code = f"import sys; from normscope.schemes import NAMED; {shown}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slots(input="nrom"), "nrom"),
        (lambda: Slots(input="norm + 1"), "slot 'input'"),
        (lambda: Slots(input="norm*(norm + 1)"), "slot 'input'"),
        (lambda: Slots(heads="kq"), "slot 'heads'"),
        (lambda: Slots(output="yes"), "slot 'output' is one of none, norm"),
        (lambda: Slots(output="tangnt"), "slot 'output' is one of none, norm, tangent, not 'tangnt'; did you mean 'tangent'?"),
        (lambda: Slots(inner="layer"), "slot 'inner' is one of none, norm"),
        (lambda: Slots(gate="relu"), "slot 'gate' is one of none, sigmoid"),
        (lambda: Scheme("a", Slots(), norm="tan"), "norm is one of rms, layer, tanh, erf, not 'tan'"),  # type: ignore[arg-type]
        (lambda: Scheme("a", Slots(), learned="matrix"), "learned is one of vector, scalar"),
        (lambda: Scheme("a", Slots(), initial="alpha"), "initial is a number or a formula in t, layer and depth"),
        (lambda: Scheme("a", Slots(), initial=0), "initial = '0' is not a positive number"),
        (
            lambda: Scheme("a", Slots(), initial="1/t").check(3),
            "initial = '1/t' is not a positive number at t = 0, layer 0 of 3",
        ),
        (lambda: Scheme("a", Slots(), feedforward=Slots(scores="sink")), "slot 'scores' belongs to attention"),
        (lambda: Scheme("a", Slots(), feedforward=Slots(gate="sigmoid")), "in a feed-forward layer it must be 'none'"),
        (lambda: Scheme("a", Slots(step=float("nan"))), "nan"),
        (lambda: Scheme("a", Slots(), alpha="sqrt(0 - 1)"), "alpha = '√(0−1)' is not a finite number"),
        (lambda: Scheme("a", Slots(step="1/(alpha - 2)"), alpha=2), "step = '1/(α_t−2)' is not a finite number"),
        (lambda: Scheme("a", Slots(carry="-1", stream="norm")), "carry must be positive"),
        (lambda: Scheme("a", Slots(), feedforward=Slots(heads="qk")), "slot 'heads' belongs to attention"),
        (lambda: Scheme("a", Slots(), until=0.5), "needs 'then'"),
        (lambda: Scheme("a", Slots(), then=NAMED["pre"]), "needs 'until'"),
        (lambda: Scheme("a", Slots(), until=float("nan"), then=NAMED["pre"]), "share of the depth"),
        (lambda: Scheme("a", Slots(), until="1/t", then=NAMED["pre"]), "share of the depth"),
        (lambda: Scheme("a", Slots(), until=True, then=NAMED["pre"]), "share of the depth"),
        (lambda: Scheme("two words", Slots()), "one word"),
    ],
)
def test_wrong_schemes_are_refused_with_a_reason(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("scheme", "depth", "message"),
    [
        (
            Scheme("a", Slots(step="1/(20 - layer)")),
            24,
            "step = '1/(20−(t+1))' is not a finite number at t = 19, layer 19 of 24",
        ),
        (Scheme("a", Slots(step="1/t")), 1, "at t = 0, layer 0 of 1"),
        (Scheme("a", Slots(step="0*t/t")), 1, "at t = 0"),
        (Scheme("a", Slots(carry="exp(100*t)")), 9, "carry = 'exp(100·t)' is not a finite number at t = 8"),
        (Scheme("a", Slots(carry="10**(t*100)")), 5, "at t = 4"),
        (Scheme("a", Slots(input="norm*(5 - t)")), 7, "must be positive; '(5−t)' is 0 at t = 5"),
        (Scheme("a", Slots(input="norm*sqrt(5 - t)")), 7, "'√(5−t)' is 0 at t = 5"),
        (Scheme("a", Slots(input="norm*sqrt(4.5 - t)")), 7, "input = '√(4.5−t)' is not a finite number at t = 5"),
        (Scheme("a", Slots(step="log(3 - t)")), 5, "at t = 3"),
        (Scheme("a", Slots(step="exp((2 - t)**0.5)")), 5, "at t = 3"),
        (Scheme("a", Slots(step="(2 - t)**(1/3)")), 5, "at t = 3"),
        (Scheme("a", Slots(), feedforward=Slots(step="9**9**t")), 12, "at t = 3"),
        (Scheme("a", Slots(), alpha="1/(depth - 8)"), 8, "alpha = '1/(T−8)' is not a finite number at t = 0, layer 0 of 8"),
        (Scheme("a", Slots(carry="2 - t", stream="norm")), 4, "carry must be positive; '2−t' is 0 at t = 2"),
        (Scheme("a", Slots(), until="1/(depth - 4)", then=NAMED["pre"]), 4, "until = '1/(T−4)' is not a positive number"),
        (Scheme("a", Slots(), until="1/depth", then=NAMED["mix"]), 4, "over when it would begin"),
    ],
)
def test_every_formula_is_checked_at_the_depth_that_runs(scheme: Scheme, depth: int, message: str) -> None:
    with pytest.raises(InputError, match=rf"^scheme 'a' cannot run at depth {depth}: .*{re.escape(message)}"):
        scheme.check(depth)


def test_a_formula_need_not_have_a_value_where_it_is_not_used() -> None:
    for depth in (1, 19):
        Scheme("a", Slots(step="1/(20 - layer)")).check(depth)
    late = Scheme("late", Slots(step="log(t)"))
    with pytest.raises(InputError, match="layer 0"):
        late.check(8)
    Scheme("a", Slots(step="sqrt(1 - t)"), until=0.25, then=late).check(8)  # layers 0 and 1, then 2 to 7


def test_a_stage_may_end_after_a_number_of_layers() -> None:
    star = NAMED["hybrid-star"]
    for depth in (1, 2, 7, 100):
        assert [star.at(layer, depth).name for layer in range(depth)] == ["hybrid-star", *["hybrid"] * (depth - 1)]
    assert scheme_from(scheme_values(star)) == star
    assert "t < 1" in star.block
    assert "T" not in star.end_text


@pytest.mark.parametrize(("activation", "holds"), [("relu", True), ("gelu", False), ("silu", False)])
def test_the_law_of_a_feed_forward_layer_takes_it_as_homogeneous(activation: str, holds: bool) -> None:
    """LN-Scaling multiplies its input by 1/√(t+1), and theory's F is taken at the directions."""
    scheme, t = NAMED["ln-scaling"], 3
    law, generator = scheme.feedforward_law, torch.Generator().manual_seed(2)
    assert law.attention == "A_j(Θ)"  # there is no β
    assert str(NAMED["mix"].feedforward_law.speed) == "1 for t < 0.25·T, then r_j"
    assert "holds for ReLU without biases" in law.statement
    assert NAMED["pre"].feedforward_law.statement == ""
    x, W_in, W_out = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 8), (8, 32), (32, 8)))

    def layer(y: Tensor) -> Tensor:
        return getattr(torch.nn.functional, activation)(y @ W_in) @ W_out

    place, r = scheme.place(t, 8), x.norm(dim=-1)
    A, step = layer(x / r[:, None]), 1e-6
    moved = x + step * layer(x / r[:, None] / math.sqrt(t + 1))
    theta, after = (y / y.norm(dim=-1, keepdim=True) for y in (x, moved))
    across = A - (A * theta).sum(-1, keepdim=True) * theta
    speed = ((after - theta) / step).norm(dim=-1)
    s = law.speed({**place.values, "r": r, "A": A.norm(dim=-1)})
    assert torch.allclose(speed, across.norm(dim=-1) / s, rtol=1e-4) == holds


def test_laws_of_stages_are_values() -> None:
    for scheme in (NAMED["mix"], replace(NAMED["mix"], name="mine")):
        for law in (scheme.law, scheme.feedforward_law):
            assert pickle.loads(pickle.dumps(law)) == law
            assert law.speed == law.speed
        assert scheme.law == scheme.law != scheme.feedforward_law


def test_only_stages_with_alpha_learn_it() -> None:
    staged = replace(NAMED["ngpt-lerp"], name="staged", until="0.5", then=NAMED["post"], title="")
    (text,) = (text for label, text in fact_rows(staged) if label == "alpha")
    assert text.endswith(", learned for each component")
    other = replace(staged, then=replace(NAMED["rezero"], until="1"))
    (text,) = (text for label, text in fact_rows(other) if label == "alpha")
    assert text.endswith(", learned for each component and learned as one number")
