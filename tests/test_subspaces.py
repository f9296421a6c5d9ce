"""Subspaces: worlds where theory knows the answer, and measures against linear algebra that others wrote."""

import math
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.linalg import null_space, subspace_angles
from torch import Tensor

from helpers.models import FAMILIES, opened_smollm2, steps_of, untouched
from normscope.core import HeadWeights
from normscope.errors import InputError
from normscope.models import AttentionStep, Model, Observer, open_model
from normscope.schemes import NAMED, Scheme, Slots
from normscope.stability import sample_text
from normscope.subspaces import (
    MEASURES,
    InductionCircuit,
    Subspaces,
    World,
    WorldView,
    breaking_points,
    circuit_tables,
    factors,
    findings,
    head_scores,
    interference_table,
    measure_subspaces,
    principal_cosines,
    theorem_7_margin,
    weighted_cosine,
    world_findings,
)
from normscope.subspaces.circuit import KNOBS, breaking_point
from normscope.subspaces.interference import exchange, partners
from normscope.subspaces.reading import reading_of
from normscope.subspaces.spaces import data_roots, effective_rank, span, visible

PRE, QKV = "builtin:addition-small-pre", "builtin:addition-small-qkv"
ROUNDING = 1e-12
ALL_SCHEMES = pytest.mark.parametrize("scheme", NAMED.values(), ids=list(NAMED))
KINDS = pytest.mark.parametrize(("angle", "spread"), [(90.0, 0.0), (90.0, 0.6), (50.0, 0.0), (20.0, 0.8)])


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reads_through_a_norm(scheme: Scheme) -> bool:
    """Whether a norm of the whole embedding stands between a token and the scores of the first layer."""
    slots = scheme.at(0, 1).attention
    return (slots.reads_norm or slots.stream == "norm") and not {"q", "k"} <= set(slots.heads)


@cache
def model_tables(name: str, rows: int = 32) -> dict[str, pd.DataFrame]:
    view = open_model(name)
    return measure_subspaces(view, view.sample(None, rows, 0))


@pytest.mark.parametrize("angle", [90.0, 60.0, 10.0, 1.0])
def test_subspaces_stand_at_the_angle_that_is_asked_for(angle: float) -> None:
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


def test_parts_have_the_lengths_that_are_asked_for() -> None:
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
def test_worlds_that_cannot_be_are_refused(wrong: dict[str, float], message: str) -> None:
    options = {"widths": (2, 3), "tokens": 4} | wrong
    with pytest.raises(InputError, match=message):
        World.make(**options)  # type: ignore[arg-type]


@ALL_SCHEMES
@KINDS
def test_scores_carry_the_interference_factor_or_none(scheme: Scheme, angle: float, spread: float) -> None:
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


def test_the_factor_is_one_over_the_length_of_the_sum() -> None:
    world = World.make(9, (2, 3), angle=40.0, spread=0.7)
    assert torch.allclose(world.interference_factors, 1 / world.embeddings.norm(dim=1), rtol=1e-13)
    separable = World.make(9, (2, 3))
    assert torch.allclose(separable.interference_factors, torch.tensor(2.0).double().rsqrt(), rtol=1e-13)


@ALL_SCHEMES
@KINDS
def test_measured_interference_is_theorys_number(scheme: Scheme, angle: float, spread: float) -> None:
    world = World.make(24, (3, 4, 2), angle=angle, spread=spread, dim=14, seed=2)
    view = WorldView(world, scheme)
    table = measure_subspaces(view, view.sample(), ["interference"], seed=4)["interference"].set_index(
        ["place", "exchanged", "head"]
    )
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
        exchanged = x.numpy() @ (np.eye(14) - hidden) + x.numpy()[partner] @ hidden
        factor = np.linalg.norm(x.numpy(), axis=1) / np.linalg.norm(exchanged, axis=1)
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


def test_a_scheme_of_ones_own_runs_the_circuit_by_its_slots() -> None:
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
def test_the_circuit_breaks_where_theorem_7_says(knob: str, name: str, seed: int) -> None:
    points = breaking_points(InductionCircuit(9, seed=seed), NAMED[name], knob)
    for predicted, seen in points.values():
        assert predicted == pytest.approx(seen, abs=1e-8, nan_ok=True)
    earlier = np.nanmin if knob == "spread" else np.nanmax
    assert points["circuit"][0] == earlier([points["previous-token"][0], points["prefix-matching"][0]])


@pytest.mark.parametrize("name", ["none", "qkv", "qk", "res-post", "hybrid"])
def test_nothing_breaks_where_no_norm_stands_between(name: str) -> None:
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
def test_theorem_7_says_when_another_score_is_the_largest(seed: int) -> None:
    random = np.random.default_rng(seed)
    w = torch.tensor(random.normal(size=6) + random.choice([-3.0, 0.0, 3.0]))
    kappa_q, kappa = float(random.uniform(-0.3, 0.3)), torch.tensor(random.uniform(-0.4, 0.4, size=6))
    disturbed = w * (1 + kappa_q + kappa)
    collapsed = int(disturbed.argmax()) != int(w.argmax())
    assert bool(theorem_7_margin(w, kappa, w.argmax(), kappa_q) < 0) == collapsed


def test_noise_of_the_query_alone_never_collapses() -> None:
    w = seeded(8)
    for kappa_q in (-0.9, -0.1, 0.5, 20.0):
        assert float(theorem_7_margin(w, torch.zeros_like(w), w.argmax(), kappa_q)) > 0


def test_a_breaking_point_is_the_first() -> None:
    assert breaking_point(lambda value: value < 0.3 or value > 0.6, 0.0, 1.0) == pytest.approx(0.3, abs=1e-10)
    assert math.isnan(breaking_point(lambda value: True, 0.0, 1.0))
    assert breaking_point(lambda value: False, 0.0, 1.0) == 0.0
    assert breaking_point(lambda value: value > 60, 90.0, 5.0) == pytest.approx(60, abs=1e-9)


@pytest.mark.parametrize("wrong", [{"types": 2}, {"spread": 1.0}, {"spread": -0.1}])
def test_a_circuit_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
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
    said = world_findings({**tables, "worlds": interference_table([NAMED["pre"], NAMED["qkv"]])})
    assert "qkv: no interference in any world" in "\n".join(said)
    assert any(text.startswith("pre: the induction circuit breaks at") for text in said)
    assert any(text.startswith("qkv: the induction circuit holds down to 5°") for text in said)


@pytest.mark.parametrize(("dim", "width", "rank"), [(24, 6, 6), (24, 6, 3), (6, 6, 6), (24, 6, 0), (8, 12, 8)])
def test_rank_and_singular_values_are_those_of_the_whole_matrix(dim: int, width: int, rank: int) -> None:
    W_Q = seeded(3, dim, rank) @ seeded(3, rank, width, seed=1)
    W_K = seeded(3, dim, width, seed=2)
    found, whole = factors(W_Q, W_K), W_Q @ W_K.mT
    assert found.rank.tolist() == torch.linalg.matrix_rank(whole).tolist() == [rank] * 3
    few = min(dim, width)
    assert torch.allclose(found.singular[:, :few], torch.linalg.svdvals(whole)[:, :few], atol=1e-11)
    for head in range(3):
        seen, hidden = found.queries[head], null_space(whole[head].T.numpy())
        assert seen.any(0).sum() == rank
        assert hidden.shape[1] == dim - rank
        assert rank == 0 or np.allclose(hidden.T @ seen.numpy(), 0, atol=1e-10)
        hidden = null_space(whole[head].numpy())
        assert rank == 0 or np.allclose(hidden.T @ found.keys[head].numpy(), 0, atol=1e-10)


def test_ranks_of_a_trained_model_are_those_of_its_matrices() -> None:
    view, table = open_model(PRE), model_tables(PRE)["rank"].set_index(["layer", "head"])
    for layer in range(view.layers):
        weights = view.projections(layer)
        whole = weights.W_Q.double() @ weights.W_K.double().mT
        wanted = torch.linalg.matrix_rank(whole, rtol=view.dim * torch.finfo(torch.float32).eps)
        assert table.loc[layer]["rank"].tolist() == wanted.tolist()
        squares = torch.linalg.svdvals(whole).square()
        effective = squares.sum(1).square() / squares.square().sum(1)
        assert np.allclose(table.loc[layer]["effective_rank"], effective, rtol=1e-9)
    assert (table["rank"] + table["null"] == view.dim).all()


def test_effective_rank_counts_equal_directions() -> None:
    assert effective_rank(torch.tensor([[2.0, 2.0, 0.0], [5.0, 0.0, 0.0]])).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("width", [1, 4])
def test_principal_angles_are_scipys(width: int) -> None:
    one, other = span(seeded(2, 10, width)).unbind()
    found = torch.rad2deg(principal_cosines(one.T @ other).acos())
    wanted = np.degrees(subspace_angles(one.numpy(), other.numpy()))[::-1]
    assert np.allclose(found.numpy(), wanted, atol=1e-6)


def weighted(one: Tensor, other: Tensor, x: Tensor) -> float:
    roots = data_roots(x, torch.stack((one, other)))
    return float(weighted_cosine(one.T @ other, roots[0], roots[1]))


def test_data_that_lie_alike_in_all_directions_weigh_nothing() -> None:
    one, other = span(seeded(2, 10, 4)).unbind()
    mean = float(principal_cosines(one.T @ other).mean())
    assert weighted(one, other, 3 * torch.eye(10).double()) == pytest.approx(mean, rel=1e-12)
    assert weighted(one, other, seeded(100_000, 10, seed=3)) == pytest.approx(mean, abs=0.01)


def test_only_directions_with_data_weigh() -> None:
    axes = torch.eye(5).double()
    one, other = axes[:, [0, 1]], axes[:, [0, 2]]
    x = seeded(50, 5)
    x[:, 0] = 0  # the shared direction has no data
    assert weighted(one, other, x) == pytest.approx(0, abs=1e-12)
    x[:, 0], x[:, 1:] = 1, 0  # all data lie in it
    assert weighted(one, other, x) == pytest.approx(1)
    assert weighted(one, one, seeded(50, 5)) == pytest.approx(1)


def test_parts_of_every_token_may_be_orthogonal_where_the_weighted_cosine_is_not_0() -> None:
    axes = torch.eye(2).double()
    x = torch.tensor([[1.0, -1.0], [0.0, 1.0]]).double()  # the axis sees one token only, and the diagonal the other
    one, other = axes[:, :1], axes.sum(1, keepdim=True) / math.sqrt(2)
    products = (x @ one @ one.T) @ (x @ other @ other.T).T
    assert products.diagonal().tolist() == [0, 0]
    assert products[0, 1] > 0.4
    assert weighted(one, other, x) == pytest.approx(math.cos(math.pi / 4))


def test_the_weighted_cosine_does_not_depend_on_the_bases_and_bounds_the_parts() -> None:
    one, other = span(seeded(2, 10, 4)).unbind()
    x = seeded(30, 10, seed=1) * torch.logspace(0, 2, 10).double()
    turn, turn_back = torch.linalg.qr(seeded(2, 4, 4, seed=2)).Q.unbind()
    value = weighted(one, other, x)
    assert weighted(one @ turn, other @ turn_back, x) == pytest.approx(value, rel=1e-10)
    parts, others = x @ one @ one.T, x @ other @ other.T
    mean = float((parts * others).sum() / (parts.square().sum() * others.square().sum()).sqrt())
    assert abs(mean) <= value <= 1


def test_angles_of_a_trained_model_are_scipys() -> None:
    view, table = open_model(QKV), model_tables(QKV)["angles"]
    rows = table[table["layer"] == 2].set_index(["side", "head", "other"])
    weights = view.projections(2)
    for side, W in (("queries", weights.W_Q), ("keys", weights.W_K)):
        for head, other in ((0, 1), (1, 3)):
            angles = subspace_angles(W[head].double().numpy(), W[other].double().numpy())
            row = rows.loc[(side, head, other)]
            assert row["smallest_angle"] == pytest.approx(np.degrees(angles.min()), abs=1e-6)
            assert row["mean_cosine"] == pytest.approx(np.cos(angles).mean(), abs=1e-9)


def test_overlaps_are_means_over_pairs() -> None:
    tables = model_tables(PRE)
    angles = tables["angles"].query("layer == 1 and side == 'keys'")
    own = angles[(angles["head"] == 2) | (angles["other"] == 2)]
    row = tables["overlaps"].query("layer == 1 and side == 'keys' and head == 2").iloc[0]
    assert len(own) == 3
    assert row["weighted_cosine"] == pytest.approx(own["weighted_cosine"].mean())


def test_what_a_head_sees_of_a_world_is_a_sphere_or_not() -> None:
    for spread, width in ((0.0, 1e-12), (0.4, 1.0)):
        view = WorldView(World.make(200, (3, 4), spread=spread, dim=10), NAMED["none"])
        table = measure_subspaces(view, view.sample(), ["spheres"])["spheres"]
        assert table["spread"].max() < width
        assert (table["spread"] > 0.5).all() == bool(spread)
        assert table.groupby(["place", "side"])["share"].sum().tolist() == pytest.approx([1.0] * 4)


def world_of_lengths(lengths: Tensor) -> World:
    """Two orthogonal parts in random directions, of given lengths (parts, tokens)."""
    world = World.make(lengths.shape[1], (3, 4), dim=10)
    coordinates = tuple(own * length[:, None] for own, length in zip(world.coordinates, lengths, strict=True))
    return World(world.subspaces, coordinates)


def tables_of_lengths(lengths: Tensor, scheme: str) -> dict[str, pd.DataFrame]:
    view = WorldView(world_of_lengths(lengths), NAMED[scheme])
    return measure_subspaces(view, view.sample(), ["spheres", "interference"])


@pytest.mark.parametrize("scheme", ["none", "pre", "peri", "qkv"])
def test_a_sphere_is_one_before_the_norm_whatever_the_other_part_does(scheme: str) -> None:
    lengths = torch.stack((torch.ones(200).double(), torch.linspace(0.2, 3, 200).double()))
    table = tables_of_lengths(lengths, scheme)["spheres"].set_index(["place", "head"])["spread"]
    assert table.loc[("before", 0)].max() < ROUNDING
    low, middle, high = np.quantile(lengths[1, 1:], [0.05, 0.5, 0.95])
    assert table.loc[("before", 1)].tolist() == pytest.approx([(high - low) / middle] * 2)
    whole = np.sqrt(1 + lengths[1, 1:].numpy() ** 2) if NAMED[scheme].attention.reads_norm else np.ones(199)
    low, middle, high = np.quantile(1 / whole, [0.05, 0.5, 0.95])
    assert table.loc[("after", 0)].tolist() == pytest.approx([(high - low) / middle] * 2, abs=ROUNDING)


def test_lengths_that_vary_together_are_a_sphere_only_after_the_norm() -> None:
    together = torch.linspace(0.2, 3, 200).double()
    tables = tables_of_lengths(torch.stack((together, 2 * together)), "pre")
    spread = tables["spheres"].set_index("place")["spread"]
    assert spread.loc["after"].max() < ROUNDING
    low, middle, high = np.quantile(together[1:], [0.05, 0.5, 0.95])
    assert spread.loc["before"].tolist() == pytest.approx([(high - low) / middle] * 4)
    assert tables["interference"].query("place == 'before' and exchanged == 'both'")["change"].min() > 0.1
    said = "\n".join(findings(WorldView(World.make(6, (3, 4)), NAMED["pre"]), tables))
    assert "before the norm in 0 of 2 heads" in said
    assert "(after the norm: in 2)" in said


def test_spread_is_that_of_the_lengths_of_queries_in_an_orthonormal_frame() -> None:
    view = open_model(PRE)
    sample = view.sample(None, 32, 0)
    step = steps_of(view, sample)[1]
    counted = sample.attention_mask.clone()
    counted[:, 0] = False
    basis = np.linalg.qr(view.projections(1).W_K[2].double().numpy())[0]
    rows = model_tables(PRE)["spheres"].query("layer == 1 and head == 2 and side == 'keys'").set_index("place")
    for place, x in (("before", step.stream), ("after", step.input)):  # the gain of the norm is in W_K
        lengths, row = np.linalg.norm(x[counted].double().numpy() @ basis, axis=1), rows.loc[place]
        low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
        assert [row["low90"], row["high90"], row["median"]] == pytest.approx([low / middle, high / middle, middle], rel=1e-5)


def test_what_is_said_of_keys_is_of_keys_alone() -> None:
    said = "\n".join(findings(open_model(PRE), model_tables(PRE)))
    table = model_tables(PRE)["interference"].query("place == 'before'").groupby("exchanged")
    change, kappa, moved = table["change"].median(), table["kappa"].median(), table["moved"].mean()
    assert change["both"] > 1.2 * change["keys"]
    assert f"together, it changes scores by {100 * change['both']:.3g} % in the median head" in said
    assert f"keys alone it changes them by {100 * change['keys']:.3g} %, as noise of {100 * kappa['keys']:.3g} %" in said
    assert f"makes {100 * moved['keys']:.3g} % of the receivers" in said


def test_everyone_that_counts_has_another_partner() -> None:
    counted = torch.rand(4, 9, generator=torch.Generator().manual_seed(0)) < 0.7
    partner, own = partners(counted, 3), torch.arange(36)
    assert bool((partner[~counted.flatten()] == own[~counted.flatten()]).all())
    assert bool((partner[counted.flatten()] != own[counted.flatten()]).all())
    assert sorted(partner.tolist()) == own.tolist()
    assert partners(counted, 3).tolist() == partner.tolist() != partners(counted, 4).tolist()


def test_an_exchange_keeps_what_is_seen_and_takes_the_rest() -> None:
    x, basis = seeded(2, 5, 8), span(seeded(1, 8, 3, seed=1))[0]
    partner = partners(torch.ones(2, 5, dtype=torch.bool), 0)
    hidden = torch.tensor(null_space(basis.T.numpy()))
    made, other = exchange(x, basis, partner), x.flatten(0, 1)[partner].view_as(x)
    assert torch.allclose(made @ basis, x @ basis, atol=1e-12)
    assert torch.allclose(made @ hidden, other @ hidden, atol=1e-12)


def test_trained_pre_norm_interferes_and_qkv_norm_does_not() -> None:
    pre, qkv = (model_tables(name)["interference"].set_index(["place", "exchanged"]) for name in (PRE, QKV))
    assert pre.loc["after"]["change"].max() < 1e-5
    assert qkv["change"].max() < 1e-5
    assert qkv["moved"].max() < 0.01
    assert pre.loc[("before", "both"), "change"].min() > 0.03
    assert pre.loc[("before", "queries"), "moved"].max() == 0  # a factor on the query is a temperature
    assert pre.loc[("before", "keys"), "moved"].mean() > 0.02


def test_interference_of_a_trained_model_by_hand() -> None:
    """Layer 2, head 1: the factor |x|/|x'| on either side, from stream, weights and NumPy alone."""
    view = open_model(PRE)
    sample = view.sample(None, 32, 0)
    step, weights = steps_of(view, sample)[2], view.projections(2)
    counted = sample.attention_mask.clone()
    counted[:, 0] = False
    partner = partners(counted, 0).numpy()
    x = step.stream.double().numpy()
    flat, factor = x.reshape(-1, view.dim), []
    for W in (weights.W_Q[1], weights.W_K[1]):
        basis = np.linalg.qr(W.double().numpy())[0]
        made = flat[partner] + (flat - flat[partner]) @ basis @ basis.T
        factor.append((np.linalg.norm(flat, axis=1) / np.linalg.norm(made, axis=1)).reshape(x.shape[:2]))
    scores = step.q[:, 1].double().numpy() @ step.k[:, 1].double().numpy().transpose(0, 2, 1)
    pairs = np.tril(np.ones(scores.shape[1:], bool)) & counted.numpy()[:, :, None] & counted.numpy()[:, None]
    changed = (factor[0][:, :, None] * factor[1][:, None] - 1) * scores
    wanted = np.linalg.norm(changed[pairs]) / np.linalg.norm(scores[pairs])
    found = model_tables(PRE)["interference"].query("layer == 2 and head == 1 and place == 'before'").set_index("exchanged")
    assert found.loc["both", "change"] == pytest.approx(wanted, rel=1e-4)
    kappa = [np.sqrt(np.mean((one[counted.numpy()] - 1) ** 2)) for one in factor]
    assert found.loc[["queries", "keys"], "kappa"].tolist() == pytest.approx(kappa, rel=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_interference_of_every_family_follows_its_placement(name: str) -> None:
    family, known = FAMILIES[name], untouched(name)
    tables = measure_subspaces(known.view, known.sample)
    assert list(tables) == [*MEASURES, "overlaps"]
    table = tables["interference"].set_index(["place", "exchanged"])
    assert table["change"].notna().all()
    said = "\n".join(findings(known.view, tables))
    if family.together:  # heads share the length by which their queries and keys are divided
        assert table.loc[("after", "both"), "change"].min() > 1e-3
        assert "normalised over all heads together" in said
        assert "after the norm" not in said.lower()  # there is none at its input
        assert "before the norm" not in said
        assert "normalised per head" in said
        return
    assert table.loc["after"]["change"].max() < 1e-4
    scheme = known.view.scheme
    assert scheme is not None
    normed = scheme.attention.reads_norm or scheme.attention.stream == "norm"
    if normed and not family.head_norms:
        later = table[table["layer"] > 0]  # no norm stands before the first layer of a Post-LN decoder
        assert later.loc[("before", "both"), "change"].min() > 1e-3
        assert "Interference: " in said
    else:
        assert table.loc["before"]["change"].max() < 1e-4
        assert "No interference" in said


def test_heads_that_share_keys_are_no_pairs() -> None:
    known = untouched("llama")
    angles = measure_subspaces(known.view, known.sample, ["angles"])["angles"]
    keys = angles.query("layer == 0 and side == 'keys'")
    shared = FAMILIES["llama"].shared
    assert len(keys)
    assert (keys["head"] // shared != keys["other"] // shared).all()
    assert len(angles.query("layer == 0 and side == 'queries'")) == known.view.heads * (known.view.heads - 1) // 2


def captured(view: Model, sample: object) -> AttentionStep:
    return steps_of(view, sample)[-1]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*FAMILIES, PRE, QKV])
def test_what_is_read_follows_from_the_states_before_the_norm(name: str) -> None:
    known = untouched(name)
    step = captured(known.view, known.sample)
    reading = reading_of(known.view, step, known.view.norms)
    assert torch.allclose(reading(reading.states), step.input, rtol=1e-3, atol=1e-3 * float(step.input.abs().max()))
    scheme = known.view.scheme
    assert scheme is not None
    stage = scheme.at(step.layer, known.view.layers).attention
    assert (reading.norm is not None) == (stage.reads_norm or stage.stream == "norm")
    if reading.norm is None:
        return
    W = known.view.projections(step.layer).W_Q
    length = reading.states - reading.states.mean(-1, keepdim=True) if reading.norm.kind == "layer" else reading.states
    factor = reading.factor * math.sqrt(known.view.dim) / length.norm(dim=-1, keepdim=True)
    bias = torch.zeros(known.view.dim) if reading.norm.bias is None else reading.norm.bias
    wanted = (step.input - reading.factor * bias)[:, None] @ W
    made = factor[:, None] * (reading.states[:, None] @ reading.before(W))
    assert torch.allclose(made, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()))


def test_something_else_between_is_refused() -> None:
    known = untouched("llama")
    step = captured(known.view, known.sample)
    strange = AttentionStep(
        step.layer, step.stream, step.input.flip(-1), step.q, step.k, step.v, step.scale, step.mask, step.W_O
    )
    with pytest.raises(InputError, match="neither its stream nor a norm of it"):
        reading_of(known.view, strange, known.view.norms)


def test_scores_that_are_not_bare_see_all_that_the_columns_span() -> None:
    W_Q, W_K = seeded(1, 9, 4), seeded(1, 9, 2, seed=1) @ seeded(1, 2, 4, seed=2)
    bare, other = visible(W_Q, W_K, bare=True), visible(W_Q, W_K, bare=False)
    assert int(bare.queries.any(1).sum()) == 2
    assert int(other.queries.any(1).sum()) == 4
    assert int(other.keys.any(1).sum()) == 2


@pytest.mark.parametrize("measure", MEASURES)
def test_only_what_is_asked_for_is_measured(measure: str) -> None:
    view = WorldView(World.make(6, (2, 2)), NAMED["pre"])
    tables = measure_subspaces(view, view.sample(), [measure])
    assert set(tables) == {measure} | ({"overlaps"} if measure == "angles" else set())
    assert len(findings(view, tables)) >= 2


def test_a_model_with_one_head_has_no_angles() -> None:
    view = WorldView(World.make(6, (3,)), NAMED["pre"])
    tables = measure_subspaces(view, view.sample())
    assert tables["angles"].empty
    assert findings(view, tables)


def test_a_world_is_a_model_that_attends() -> None:
    view = WorldView(World.make(6, (2, 3), spread=0.4), NAMED["peri"])
    states: dict[int, Tensor] = {}
    after = view.forward(view.sample(), Observer(state=states.__setitem__))
    step = steps_of(view, view.sample())[0]
    mixed = step.weights() @ step.v
    written = sum(mixed[:, head] @ step.W_O[head] for head in range(2))
    assert isinstance(written, Tensor)
    wanted = step.stream + written / written.norm(dim=-1, keepdim=True)
    assert torch.allclose(after, wanted, atol=1e-12)
    assert torch.equal(states[0], step.stream)
    assert torch.equal(states[1], after)
    assert torch.equal(view.forward(view.sample(), Observer(state=lambda layer, x: 2 * x if layer else None)), 2 * after)
    assert [view.token_of(text) for text in ("5", "6", "five")] == [5, None, None]


def test_a_head_without_weights_is_left_out_of_what_is_said() -> None:
    view = WorldView(World.make(12, (2, 3, 3), spread=0.4), NAMED["pre"])
    weights = {name: getattr(view.world.weights, name).clone() for name in ("W_Q", "W_K", "W_V", "W_O")}
    weights["W_Q"][1] = weights["W_K"][1] = 0
    view._weights = HeadWeights(**weights)
    tables = measure_subspaces(view, view.sample())
    assert tables["rank"]["rank"].tolist() == [2, 0, 3]
    assert tables["interference"].query("head == 1")["change"].isna().all()
    assert tables["interference"].query("head != 1")["change"].notna().all()
    said = "\n".join(findings(view, tables))
    assert "Interference: " in said
    assert "nan" not in said


@pytest.mark.slow
def test_smollm2_interferes_before_its_norm_and_not_after() -> None:
    view = opened_smollm2()
    tables = measure_subspaces(view, view.sample(sample_text(), 48, 0), ["rank", "interference"])
    assert (tables["rank"]["rank"] == 64).all()
    table = tables["interference"].set_index(["place", "exchanged"])
    assert table.loc["after"]["change"].max() < 1e-4
    assert table.loc[("before", "both"), "change"].median() > 0.05
    assert table.loc[("before", "queries"), "moved"].max() == 0
