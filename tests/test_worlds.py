"""Constructed models: subspaces at given angles, interference in closed form, and the induction circuit against Theorem 7."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import null_space, subspace_angles
from torch import Tensor

from helpers.models import steps_of
from helpers.schemes import names_with
from normscope.errors import InputError
from normscope.experiments.subspaces import circuit_tables, interference_table
from normscope.measures.base import Subject
from normscope.measures.interference import Interference, partners
from normscope.models import Observer
from normscope.models.worlds import (
    KNOBS,
    InductionCircuit,
    Subspaces,
    World,
    WorldModel,
    breaking_points,
    head_scores,
    theorem_7_margin,
)
from normscope.models.worlds.circuit import breaking_point
from normscope.schemes import NAMED, Scheme, Slots

ROUNDING = 1e-12
ALL_SCHEMES = pytest.mark.parametrize(
    "scheme", [NAMED[name] for name in names_with("output=tangent")], ids=lambda scheme: scheme.name
)
KINDS = pytest.mark.parametrize(("angle", "spread"), [(90.0, 0.0), (90.0, 0.6), (50.0, 0.0), (20.0, 0.8)])


def reads_through_a_norm(scheme: Scheme) -> bool:
    """Whether a norm of the whole embedding is applied between a token and the logits of the first layer."""
    slots = scheme.at(0, 1).attention
    return (slots.reads_norm or slots.stream == "norm") and not {"q", "k"} <= set(slots.heads)


@pytest.mark.parametrize("angle", [90.0, 60.0, 10.0, 1.0])
def test_subspaces_have_the_given_angle(angle: float) -> None:
    made = Subspaces.at_angle((3, 4, 2), angle, dim=12, seed=5)
    for i, one in enumerate(made.bases):
        assert torch.allclose(one.T @ one, torch.eye(one.shape[1]).double(), atol=1e-12)
        assert float(one.sum(0).abs().max()) < 1e-12  # orthogonal to 1
        for other in made.bases[:i]:
            assert np.allclose(np.degrees(subspace_angles(one.numpy(), other.numpy())), angle, atol=1e-9)


@pytest.mark.parametrize("angle", [90.0, 5.0])
def test_duals_read_one_part_and_nothing_of_the_others(angle: float) -> None:
    world = World.make(7, (3, 4, 2), angle=angle, spread=0.5)
    for own, dual in zip(world.coordinates, world.subspaces.duals, strict=True):
        assert torch.allclose(world.embeddings @ dual, own, atol=1e-12)


def test_parts_have_the_given_norms() -> None:
    world = World.make(500, (3, 5), spread=0.3, radius=2.0)
    lengths = world.parts.norm(dim=-1)
    assert 1.4 <= float(lengths.min()) < 1.41 < 2.59 < float(lengths.max()) <= 2.6
    assert torch.allclose(World.make(5, (3, 5), radius=2.0).parts.norm(dim=-1), torch.tensor(2.0).double())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"angle": 0.0}, "above 0"),
        ({"angle": 91.0}, "at most 90"),
        ({"spread": 1.0}, "below 1"),
        ({"dim": 5}, "need 6 dimensions"),
        ({"widths": (2, 0)}, "at least 1 dimension"),
    ],
)
def test_impossible_worlds_are_refused(wrong: dict[str, float], message: str) -> None:
    options = {"widths": (2, 3), "tokens": 4} | wrong
    with pytest.raises(InputError, match=message):
        World.make(**options)  # type: ignore[arg-type]


@ALL_SCHEMES
@KINDS
def test_logits_have_the_interference_factor_or_none(scheme: Scheme, angle: float, spread: float) -> None:
    """The factor 1/|x| on either side, to rounding: from vectors that run through the slots, and from coordinates."""
    world = World.make(20, (3, 4, 2), angle=angle, spread=spread, dim=12, seed=1)
    found = head_scores(scheme, world.weights, world.embeddings)
    slots = scheme.at(0, 1).attention
    factor = world.interference_factors
    for own, scores in zip(world.coordinates, found, strict=True):
        unit = own / own.norm(dim=1, keepdim=True)
        q, k = (unit if letter in slots.heads else own for letter in "qk")
        wanted = q @ k.T
        if reads_through_a_norm(scheme):
            wanted = wanted * factor[:, None] * factor * float(slots.input_factor(scheme.place(0, 1).values)) ** 2
        assert torch.allclose(scores, wanted, rtol=0, atol=1e-12 * max(1.0, float(wanted.abs().max())))


def test_the_factor_is_one_over_the_norm_of_the_sum() -> None:
    world = World.make(9, (2, 3), angle=40.0, spread=0.7)
    assert torch.allclose(world.interference_factors, 1 / world.embeddings.norm(dim=1), rtol=1e-13)
    separable = World.make(9, (2, 3))
    assert torch.allclose(separable.interference_factors, torch.tensor(2.0).double().rsqrt(), rtol=1e-13)


@ALL_SCHEMES
@KINDS
def test_measured_interference_is_theorys_number(scheme: Scheme, angle: float, spread: float) -> None:
    world = World.make(24, (3, 4, 2), angle=angle, spread=spread, dim=14, seed=2)
    model = WorldModel(world, scheme)
    table = Interference().measure(Subject(model, model.sample(), seed=4))["interference"]
    table = table.set_index(["place", "resampled", "head"])
    assert table.loc["after"]["change"].max() < ROUNDING
    counted = torch.ones(1, 24, dtype=torch.bool)
    counted[0, 0] = False
    partner = partners(counted, 4)
    x = world.embeddings
    if scheme.at(0, 1).attention.stream == "norm":
        x = x / x.norm(dim=1, keepdim=True)
    pairs = np.tril(np.ones((24, 24), dtype=bool))
    pairs[0] = pairs[:, 0] = False
    scores = head_scores(scheme, world.weights, world.embeddings).numpy()
    for head, dual in enumerate(world.subspaces.duals):
        hidden = null_space(dual.T.numpy())
        hidden = hidden @ hidden.T
        resampled = x.numpy() @ (np.eye(14) - hidden) + x.numpy()[partner] @ hidden
        factor = np.linalg.norm(x.numpy(), axis=1) / np.linalg.norm(resampled, axis=1)
        if not reads_through_a_norm(scheme):
            factor = np.ones_like(factor)
        for side, factors_of in {
            "queries": factor[:, None] * np.ones(24),
            "keys": np.ones((24, 1)) * factor,
            "both": factor[:, None] * factor,
        }.items():
            changed = (factors_of - 1) * scores[head]
            wanted = np.linalg.norm(changed[pairs]) / np.linalg.norm(scores[head][pairs])
            assert table.loc[("before", side, head), "change"] == pytest.approx(wanted, abs=ROUNDING)


def test_the_table_of_worlds_agrees_with_theory() -> None:
    schemes = [NAMED[name] for name in ("none", "pre", "qkv", "post", "qk", "ln-scaling")]
    table = interference_table(schemes, seed=3)
    assert (table["before"] - table["predicted"]).abs().max() < ROUNDING
    assert table["after"].max() < ROUNDING
    free = table["scheme"].isin(["none", "qkv", "qk"]) | (table["world"] == "orthogonal spheres")
    assert table[free]["before"].max() < ROUNDING
    assert table[~free]["before"].min() > 0.02


@pytest.mark.parametrize("norm", ["rms", "layer"])
@ALL_SCHEMES
def test_the_circuit_is_exact_for_every_scheme_on_orthogonal_spheres(scheme: Scheme, norm: str) -> None:
    for types, seed in ((3, 0), (12, 1)):
        circuit = InductionCircuit(types, seed=seed)
        assert circuit.solved(scheme.with_norm(norm)) == 1.0
        assert bool(circuit.right(scheme.with_norm(norm)).all())


def test_the_circuit_predicts_what_followed() -> None:
    circuit = InductionCircuit(6, seed=3)
    tokens = circuit.tokens.tolist()
    assert sorted(tokens) == [0, *sorted([*range(1, 7), *range(1, 7)])]
    predicted = circuit.run(NAMED["pre"]).predicted.tolist()
    for place in range(7, 13):
        first = tokens.index(tokens[place])
        assert predicted[place] == tokens[first + 1]


def test_a_custom_scheme_runs_the_circuit_by_its_slots() -> None:
    mine = Scheme("mine", Slots(input="norm/sqrt(layer)", heads="k", step="1/2"))
    circuit = InductionCircuit(5)
    assert circuit.solved(mine) == 1
    assert all(math.isnan(value) for pair in breaking_points(circuit, mine, "spread").values() for value in pair)
    loose = Scheme("loose", Slots(input="norm", heads="qv"))
    for predicted, seen in breaking_points(circuit, loose, "angle").values():
        assert predicted == pytest.approx(seen, abs=1e-8)


@pytest.mark.parametrize(
    ("knob", "name", "seed"),
    [
        ("angle", "pre", 1),
        ("spread", "pre", 1),
        ("angle", "post", 0),
        ("spread", "peri", 1),
        ("angle", "mix", 0),
        ("spread", "deepnorm", 0),
    ],
)
def test_the_circuit_breaks_where_theorem_7_predicts(knob: str, name: str, seed: int) -> None:
    points = breaking_points(InductionCircuit(9, seed=seed), NAMED[name], knob)
    for predicted, seen in points.values():
        assert predicted == pytest.approx(seen, abs=1e-8, nan_ok=True)
    earlier = np.nanmin if knob == "spread" else np.nanmax
    assert points["circuit"][0] == earlier([points["previous-token"][0], points["prefix-matching"][0]])


@pytest.mark.parametrize("name", ["none", "qkv", "qk", "res-post", "hybrid"])
def test_nothing_breaks_without_a_norm_between_stream_and_heads(name: str) -> None:
    for knob in KNOBS:
        for pair in breaking_points(InductionCircuit(5), NAMED[name], knob).values():
            assert all(map(math.isnan, pair))


def test_the_first_heads_breaking_point_in_closed_form() -> None:
    """|x|² = 3 + 2c·(position·type) for an angle of cosine c, and 2 + (1 + s·u)² for a spread s: roots of polynomials."""
    circuit = InductionCircuit(9)
    count = len(circuit.tokens)
    turn = 2 * math.pi / count
    guess = circuit.with_knob("spread", 0.5).coordinates[:, -1].numpy()
    u = (guess - 1) / 0.5
    overlap = np.cos(turn * np.arange(count) - 2 * math.pi / 10 * circuit.tokens.numpy())
    cosines, spreads = [], []
    for receiver in range(1, count):
        best = receiver - 1
        for key in range(receiver + 1):
            w = math.cos(turn * (key - best))
            if key == best or w <= 0:
                continue
            # collapse where |x_key|² < w²·|x_best|²
            constant, slope = 3 * (1 - w**2), 2 * (overlap[key] - w**2 * overlap[best])
            cosines += [-constant / slope] if slope < 0 else []
            square = np.array([u[key] ** 2, 2 * u[key], 3]) - w**2 * np.array([u[best] ** 2, 2 * u[best], 3])
            spreads += [root.real for root in np.roots(square) if abs(root.imag) < 1e-12 and root.real > 0]
    for knob, wanted in (("angle", math.degrees(math.acos(min(cosines)))), ("spread", min(spreads))):
        predicted, seen = breaking_points(circuit, NAMED["pre"], knob)["previous-token"]
        assert predicted == pytest.approx(wanted, abs=1e-8)
        assert seen == pytest.approx(wanted, abs=1e-8)


@pytest.mark.parametrize("seed", range(40))
def test_theorem_7_predicts_when_another_logit_is_the_largest(seed: int) -> None:
    random = np.random.default_rng(seed)
    w = torch.tensor(random.normal(size=6) + random.choice([-3.0, 0.0, 3.0]))
    kappa_q, kappa = float(random.uniform(-0.3, 0.3)), torch.tensor(random.uniform(-0.4, 0.4, size=6))
    disturbed = w * (1 + kappa_q + kappa)
    collapsed = int(disturbed.argmax()) != int(w.argmax())
    assert bool(theorem_7_margin(w, kappa, w.argmax(), kappa_q) < 0) == collapsed


def test_noise_of_the_query_alone_never_collapses() -> None:
    w = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for kappa_q in (-0.9, -0.1, 0.5, 20.0):
        assert float(theorem_7_margin(w, torch.zeros_like(w), w.argmax(), kappa_q)) > 0


def test_a_breaking_point_is_the_first() -> None:
    assert breaking_point(lambda value: value < 0.3 or value > 0.6, 0.0, 1.0) == pytest.approx(0.3, abs=1e-10)
    assert math.isnan(breaking_point(lambda value: True, 0.0, 1.0))
    assert breaking_point(lambda value: False, 0.0, 1.0) == 0.0
    assert breaking_point(lambda value: value > 60, 90.0, 5.0) == pytest.approx(60, abs=1e-9)


@pytest.mark.parametrize("wrong", [{"types": 2}, {"spread": 1.0}, {"spread": -0.1}])
def test_an_impossible_circuit_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        InductionCircuit(**wrong)  # type: ignore[arg-type]


def test_tables_of_the_circuit_tell_one_story() -> None:
    tables = circuit_tables([NAMED["pre"], NAMED["qkv"]], types=8, seed=1)
    points = tables["points"].set_index(["scheme", "knob", "part"])
    for (scheme, knob), curve in tables["curves"].groupby(["scheme", "knob"]):
        first, predicted = KNOBS[str(knob)][0], points.loc[(scheme, knob, "circuit"), "predicted"]
        far = abs(predicted - first) if math.isfinite(predicted) else math.inf
        assert (curve[curve["turned"] < far]["solved"] == 1).all()
        assert math.isinf(far) or curve["solved"].min() < 1
    chosen = tables["selections"]
    wrong = chosen[chosen["selected"] != chosen["wanted"]]
    assert set(wrong["scheme"]) == {"pre"}
    assert "orthogonal spheres" not in set(wrong["world"])


def test_a_world_is_a_model_that_attends() -> None:
    model = WorldModel(World.make(6, (2, 3), spread=0.4), NAMED["peri"])
    states: dict[int, Tensor] = {}
    after = model.forward(model.sample(), Observer(state=states.__setitem__))
    (step,) = steps_of(model, model.sample())
    mixed = step.weights() @ step.v
    written = sum(mixed[:, head] @ step.W_O[head] for head in range(2))
    assert isinstance(written, Tensor)
    wanted = step.stream + written / written.norm(dim=-1, keepdim=True)
    assert torch.allclose(after, wanted, atol=1e-12)
    assert torch.equal(states[0], step.stream)
    assert torch.equal(states[1], after)
    assert torch.equal(model.forward(model.sample(), Observer(state=lambda layer, x: 2 * x if layer else None)), 2 * after)
    assert [model.token_of(text) for text in ("5", "6", "five")] == [5, None, None]
