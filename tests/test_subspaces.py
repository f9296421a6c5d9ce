"""Measures of what heads read: against linear algebra that others wrote, and in worlds where theory gives the number."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.linalg import null_space, subspace_angles
from torch import Tensor

from helpers.models import FAMILIES, opened_smollm2, steps_of, untouched
from normscope.core import HeadWeights
from normscope.core.norms import participation_ratio
from normscope.errors import InputError
from normscope.experiments.subspaces import MEASURES
from normscope.measures import all_measures
from normscope.measures.attention_input import attention_input
from normscope.measures.base import Subject, joined, measure_all
from normscope.measures.head_spaces import (
    chance_cosine,
    data_roots,
    factors,
    input_spaces,
    principal_cosines,
    span,
    weighted_cosine,
)
from normscope.measures.interference import MANY, partners, resample
from normscope.measures.sample import sample_text
from normscope.models import AttentionStep, Model, Sample, open_model
from normscope.models.factors import largest_by_squaring, orthonormal, polar
from normscope.models.worlds import World, WorldModel
from normscope.results.findings import Finding
from normscope.schemes import NAMED

PRE, QKV = "builtin:addition-small-pre", "builtin:addition-small-qkv"
ROUNDING = 1e-12
Tables = dict[str, pd.DataFrame]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def measured(model: Model, sample: Sample, measures: Sequence[str] = MEASURES, seed: int = 0) -> Tables:
    """All tables of some measures, from one forward pass."""
    chosen = [all_measures()[name]() for name in measures]
    return joined(measure_all(Subject(model, sample, seed), chosen).values())


def findings(model: Model, sample: Sample, tables: Tables) -> list[Finding]:
    about = Subject(model, sample).about
    return [finding for name in MEASURES for finding in all_measures()[name]().findings(tables, about)]


def said(model: Model, sample: Sample, tables: Tables) -> str:
    cards = findings(model, sample, tables)
    return "\n".join(" ".join((card.title, card.text, card.comparison, card.advice)) for card in cards)


@cache
def model_tables(name: str, rows: int = 32) -> Tables:
    model = open_model(name)
    return measured(model, model.sample(None, rows, 0))


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
    model, table = open_model(PRE), model_tables(PRE)["rank"].set_index(["layer", "head"])
    for layer in range(model.layers):
        weights = model.projections(layer)
        whole = weights.W_Q.double() @ weights.W_K.double().mT
        wanted = torch.linalg.matrix_rank(whole, rtol=model.dim * torch.finfo(torch.float32).eps)
        assert table.loc[layer]["rank"].tolist() == wanted.tolist()
        squares = torch.linalg.svdvals(whole).square()
        effective = squares.sum(1).square() / squares.square().sum(1)
        assert np.allclose(table.loc[layer]["effective_rank"], effective, rtol=1e-9)
    assert (table["rank"] + table["null"] == model.dim).all()


def test_the_participation_ratio_counts_equal_directions() -> None:
    assert participation_ratio(torch.tensor([[2.0, 2.0, 0.0], [5.0, 0.0, 0.0]])).tolist() == pytest.approx([2.0, 1.0])


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
    model, table = open_model(QKV), model_tables(QKV)["angles"]
    rows = table[table["layer"] == 2].set_index(["side", "head", "other"])
    weights = model.projections(2)
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


def test_the_part_that_a_head_reads_of_a_world_has_a_constant_norm_or_not() -> None:
    for spread, width in ((0.0, 1e-12), (0.4, 1.0)):
        model = WorldModel(World.make(200, (3, 4), spread=spread, dim=10), NAMED["none"])
        table = measured(model, model.sample(), ["spheres"])["spheres"]
        assert table["spread"].max() < width
        assert (table["spread"] > 0.5).all() == bool(spread)
        assert table.groupby(["place", "side"])["share"].sum().tolist() == pytest.approx([1.0] * 4)


def world_of_norms(lengths: Tensor) -> World:
    """Two orthogonal parts in random directions, of given lengths (parts, tokens)."""
    world = World.make(lengths.shape[1], (3, 4), dim=10)
    coordinates = tuple(own * length[:, None] for own, length in zip(world.coordinates, lengths, strict=True))
    return World(world.subspaces, coordinates)


def tables_of_norms(lengths: Tensor, scheme: str) -> dict[str, pd.DataFrame]:
    model = WorldModel(world_of_norms(lengths), NAMED[scheme])
    return measured(model, model.sample(), ["spheres", "interference"])


@pytest.mark.parametrize("scheme", ["none", "pre", "peri", "qkv"])
def test_a_constant_norm_is_found_before_the_norm_whatever_the_other_part_does(scheme: str) -> None:
    lengths = torch.stack((torch.ones(200).double(), torch.linspace(0.2, 3, 200).double()))
    table = tables_of_norms(lengths, scheme)["spheres"].set_index(["place", "head"])["spread"]
    assert table.loc[("before", 0)].max() < ROUNDING
    low, middle, high = np.quantile(lengths[1, 1:], [0.05, 0.5, 0.95])
    assert table.loc[("before", 1)].tolist() == pytest.approx([(high - low) / middle] * 2)
    whole = np.sqrt(1 + lengths[1, 1:].numpy() ** 2) if NAMED[scheme].attention.reads_norm else np.ones(199)
    low, middle, high = np.quantile(1 / whole, [0.05, 0.5, 0.95])
    assert table.loc[("after", 0)].tolist() == pytest.approx([(high - low) / middle] * 2, abs=ROUNDING)


def test_norms_that_vary_together_are_constant_only_after_the_norm() -> None:
    together = torch.linspace(0.2, 3, 200).double()
    tables = tables_of_norms(torch.stack((together, 2 * together)), "pre")
    spread = tables["spheres"].set_index("place")["spread"]
    assert spread.loc["after"].max() < ROUNDING
    low, middle, high = np.quantile(together[1:], [0.05, 0.5, 0.95])
    assert spread.loc["before"].tolist() == pytest.approx([(high - low) / middle] * 4)
    assert tables["interference"].query("place == 'before' and resampled == 'both'")["change"].min() > 0.1
    model = WorldModel(World.make(6, (3, 4)), NAMED["pre"])
    text = said(model, model.sample(), tables)
    assert "nearly constant (90 % within ±20 %) in 0 of 2 heads. After the norm: 2 of 2." in text


def test_spread_is_that_of_projected_norms_in_an_orthonormal_basis() -> None:
    model = open_model(PRE)
    sample = model.sample(None, 32, 0)
    step = steps_of(model, sample)[1]
    counted = sample.attention_mask.clone()
    counted[:, 0] = False
    basis = np.linalg.qr(model.projections(1).W_K[2].double().numpy())[0]
    rows = model_tables(PRE)["spheres"].query("layer == 1 and head == 2 and side == 'keys'").set_index("place")
    for place, x in (("before", step.stream), ("after", step.input)):  # the gain of the norm is in W_K
        lengths, row = np.linalg.norm(x[counted].double().numpy() @ basis, axis=1), rows.loc[place]
        low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
        assert [row["low90"], row["high90"], row["median"]] == pytest.approx([low / middle, high / middle, middle], rel=1e-5)


def test_findings_on_keys_are_about_keys_alone() -> None:
    model = open_model(PRE)
    text = said(model, model.sample(None, 2, 0), model_tables(PRE))
    table = model_tables(PRE)["interference"].query("place == 'before'").groupby("resampled")
    change, kappa, moved = table["change"].median(), table["kappa"].median(), table["moved"]
    assert change["both"] > 1.2 * change["keys"]
    assert f"logits by {100 * change['both']:.3g} % in the median head" in text
    assert f"Of keys alone: {100 * change['keys']:.3g} %, like RMS noise of {100 * kappa['keys']:.3g} % on key norms" in text
    assert f"Median head of the model: {100 * moved.median()['keys']:.2g} % (mean {100 * moved.mean()['keys']:.2g} %)" in text


def test_layers_whose_top_keys_often_change_are_a_warning() -> None:
    model = open_model(PRE)
    table = model_tables(PRE)["interference"]
    moved = table["moved"].where(~table["layer"].isin([0, 1, 3]), 0.5)
    before = table.assign(moved=moved, top_weight=0.25)
    card, *_ = findings(model, model.sample(None, 2, 0), {"interference": before})
    assert (card.severity, card.number) == ("warning", 0.5)
    assert card.number > MANY
    assert card.title == "Content that heads cannot read changes attention in layers 0–1, 3"
    assert "changes the top key for 50 % of the queries" in card.text
    assert "Other layers: " in card.comparison
    assert "Mean top attention weight in these layers: 0.25; diffuse rows switch keys easily" in card.comparison
    assert "QK-Norm" in card.advice


def test_the_top_weight_is_that_of_the_models_attention() -> None:
    model = open_model(PRE)
    sample = model.sample(None, 32, 0)
    step, counted = steps_of(model, sample)[1], Subject(model, sample).counted
    wanted = step.weights().amax(-1).transpose(0, 1)[:, counted].mean(1)
    rows = model_tables(PRE)["interference"].query("layer == 1 and place == 'after' and resampled == 'both'")
    assert np.allclose(rows["top_weight"], wanted, rtol=1e-5)


def test_keys_are_counted_once_for_each_kv_head() -> None:
    known = untouched("llama")
    model, shared = known.view, FAMILIES["llama"].shared
    tables = measured(model, known.sample, ["spheres", "angles"])
    text = said(model, known.sample, tables)
    assert shared > 1
    assert f"of {model.layers * model.heads} heads" in text
    assert f"of {model.layers * model.heads // shared} KV heads" in text
    assert "KV heads 0 and 1" in text


def test_overlap_is_compared_with_random_subspaces() -> None:
    assert chance_cosine(3, 1) == pytest.approx(0.5, abs=0.2)  # E|cos| of two directions in space
    assert chance_cosine(576, 64) == pytest.approx(0.29, abs=0.005)
    assert chance_cosine(8, 8) == pytest.approx(1)
    model = open_model(PRE)
    text = said(model, model.sample(None, 2, 0), model_tables(PRE))
    assert f"({chance_cosine(128, 32):.2f} for random subspaces of this size)" in text


def test_everyone_that_counts_has_another_partner() -> None:
    counted = torch.rand(4, 9, generator=torch.Generator().manual_seed(0)) < 0.7
    partner, own = partners(counted, 3), torch.arange(36)
    assert bool((partner[~counted.flatten()] == own[~counted.flatten()]).all())
    assert bool((partner[counted.flatten()] != own[counted.flatten()]).all())
    assert sorted(partner.tolist()) == own.tolist()
    assert partners(counted, 3).tolist() == partner.tolist() != partners(counted, 4).tolist()


def test_a_resample_ablation_keeps_the_subspace_and_replaces_the_rest() -> None:
    x, basis = seeded(2, 5, 8), span(seeded(1, 8, 3, seed=1))[0]
    partner = partners(torch.ones(2, 5, dtype=torch.bool), 0)
    hidden = torch.tensor(null_space(basis.T.numpy()))
    made, other = resample(x, basis, partner), x.flatten(0, 1)[partner].view_as(x)
    assert torch.allclose(made @ basis, x @ basis, atol=1e-12)
    assert torch.allclose(made @ hidden, other @ hidden, atol=1e-12)


def test_trained_pre_norm_interferes_and_qkv_norm_does_not() -> None:
    pre, qkv = (model_tables(name)["interference"].set_index(["place", "resampled"]) for name in (PRE, QKV))
    assert pre.loc["after"]["change"].max() < 1e-5
    assert qkv["change"].max() < 1e-5
    assert qkv["moved"].max() < 0.01
    assert pre.loc[("before", "both"), "change"].min() > 0.03
    assert pre.loc[("before", "queries"), "moved"].max() == 0  # a factor on the query is a temperature
    assert pre.loc[("before", "keys"), "moved"].mean() > 0.02


def test_interference_of_a_trained_model_by_hand() -> None:
    """Layer 2, head 1: the factor |x|/|x'| on either side, from stream, weights and NumPy alone."""
    model = open_model(PRE)
    sample = model.sample(None, 32, 0)
    step, weights = steps_of(model, sample)[2], model.projections(2)
    counted = sample.attention_mask.clone()
    counted[:, 0] = False
    partner = partners(counted, 0).numpy()
    x = step.stream.double().numpy()
    flat, factor = x.reshape(-1, model.dim), []
    for W in (weights.W_Q[1], weights.W_K[1]):
        basis = np.linalg.qr(W.double().numpy())[0]
        made = flat[partner] + (flat - flat[partner]) @ basis @ basis.T
        factor.append((np.linalg.norm(flat, axis=1) / np.linalg.norm(made, axis=1)).reshape(x.shape[:2]))
    scores = step.q[:, 1].double().numpy() @ step.k[:, 1].double().numpy().transpose(0, 2, 1)
    pairs = np.tril(np.ones(scores.shape[1:], bool)) & counted.numpy()[:, :, None] & counted.numpy()[:, None]
    changed = (factor[0][:, :, None] * factor[1][:, None] - 1) * scores
    wanted = np.linalg.norm(changed[pairs]) / np.linalg.norm(scores[pairs])
    found = model_tables(PRE)["interference"].query("layer == 2 and head == 1 and place == 'before'").set_index("resampled")
    assert found.loc["both", "change"] == pytest.approx(wanted, rel=1e-4)
    kappa = [np.sqrt(np.mean((one[counted.numpy()] - 1) ** 2)) for one in factor]
    assert found.loc[["queries", "keys"], "kappa"].tolist() == pytest.approx(kappa, rel=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_interference_of_every_family_follows_its_placement(name: str) -> None:
    family, known = FAMILIES[name], untouched(name)
    tables = measured(known.view, known.sample)
    assert list(tables) == ["rank", "spheres", "angles", "overlaps", "interference"]
    table = tables["interference"].set_index(["place", "resampled"])
    assert table["change"].notna().all()
    text = said(known.view, known.sample, tables)
    if family.together:  # heads share the length by which their queries and keys are divided
        assert table.loc[("after", "both"), "change"].min() > 1e-3
        assert "normalised over all heads together" in text
        assert "after the norm" not in text.lower()  # there is none at its input
        assert "before the norm" not in text
        return
    assert table.loc["after"]["change"].max() < 1e-4
    scheme = known.view.scheme
    assert scheme is not None
    normed = scheme.attention.reads_norm or scheme.attention.stream == "norm"
    if normed and not family.head_norms:
        later = table[table["layer"] > 0]  # no norm stands before the first layer of a Post-LN decoder
        assert later.loc[("before", "both"), "change"].min() > 1e-3
        assert "Content that heads cannot read changes attention" in text
    else:
        assert table.loc["before"]["change"].max() < 1e-4
        assert "Heads do not interfere" in text


def test_heads_that_share_keys_are_no_pairs() -> None:
    known = untouched("llama")
    angles = measured(known.view, known.sample, ["angles"])["angles"]
    keys = angles.query("layer == 0 and side == 'keys'")
    shared = FAMILIES["llama"].shared
    assert len(keys)
    assert (keys["head"] // shared != keys["other"] // shared).all()
    assert len(angles.query("layer == 0 and side == 'queries'")) == known.view.heads * (known.view.heads - 1) // 2


@pytest.mark.parametrize("name", [*FAMILIES, PRE, QKV])
def test_the_input_of_attention_follows_from_the_states_before_the_norm(name: str) -> None:
    known = untouched(name)
    step = steps_of(known.view, known.sample)[-1]
    source = attention_input(known.view, step)
    assert torch.allclose(source(source.states), step.input, rtol=1e-3, atol=1e-3 * float(step.input.abs().max()))
    scheme = known.view.scheme
    assert scheme is not None
    stage = scheme.at(step.layer, known.view.layers).attention
    assert (source.norm is not None) == (stage.reads_norm or stage.stream == "norm")
    if source.norm is None:
        return
    W = known.view.projections(step.layer).W_Q
    length = source.states - source.states.mean(-1, keepdim=True) if source.norm.kind == "layer" else source.states
    factor = source.factor * math.sqrt(known.view.dim) / length.norm(dim=-1, keepdim=True)
    bias = torch.zeros(known.view.dim) if source.norm.bias is None else source.norm.bias
    wanted = (step.input - source.factor * bias)[:, None] @ W
    made = factor[:, None] * (source.states[:, None] @ source.before(W))
    assert torch.allclose(made, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()))


def test_an_unknown_input_of_attention_is_refused() -> None:
    known = untouched("llama")
    step = steps_of(known.view, known.sample)[-1]
    strange = AttentionStep(
        step.layer, step.stream, step.input.flip(-1), step.q, step.k, step.v, step.scale, step.mask, step.W_O
    )
    with pytest.raises(InputError, match="unsupported architecture: the input of attention is neither"):
        attention_input(known.view, strange)


def test_logits_with_biases_or_rotations_read_whole_column_spaces() -> None:
    W_Q, W_K = seeded(1, 9, 4), seeded(1, 9, 2, seed=1) @ seeded(1, 2, 4, seed=2)
    bare, other = input_spaces(W_Q, W_K, bare=True), input_spaces(W_Q, W_K, bare=False)
    assert int(bare.queries.any(1).sum()) == 2
    assert int(other.queries.any(1).sum()) == 4
    assert int(other.keys.any(1).sum()) == 2


@pytest.mark.parametrize("measure", MEASURES)
def test_only_the_chosen_measures_are_taken(measure: str) -> None:
    model = WorldModel(World.make(6, (2, 2)), NAMED["pre"])
    tables = measured(model, model.sample(), [measure])
    assert set(tables) == {measure} | ({"overlaps"} if measure == "angles" else set())
    assert findings(model, model.sample(), tables)


def test_a_model_with_one_head_has_no_angles() -> None:
    model = WorldModel(World.make(6, (3,)), NAMED["pre"])
    tables = measured(model, model.sample())
    assert "angles" not in tables
    assert findings(model, model.sample(), tables)


def test_a_head_without_weights_is_left_out_of_findings() -> None:
    model = WorldModel(World.make(12, (2, 3, 3), spread=0.4), NAMED["pre"])
    weights = {name: getattr(model.world.weights, name).clone() for name in ("W_Q", "W_K", "W_V", "W_O")}
    weights["W_Q"][1] = weights["W_K"][1] = 0
    model._weights = HeadWeights(**weights)
    tables = measured(model, model.sample())
    assert tables["rank"]["rank"].tolist() == [2, 0, 3]
    assert tables["interference"].query("head == 1")["change"].isna().all()
    assert tables["interference"].query("head != 1")["change"].notna().all()
    text = said(model, model.sample(), tables)
    assert "Content that heads cannot read changes attention" in text
    assert "nan" not in text


@pytest.mark.slow
def test_smollm2_interferes_before_its_norm_and_not_after() -> None:
    model = opened_smollm2()
    tables = measured(model, model.sample(sample_text(), 48, 0), ["rank", "interference"])
    assert (tables["rank"]["rank"] == 64).all()
    table = tables["interference"].set_index(["place", "resampled"])
    assert table.loc["after"]["change"].max() < 1e-4
    assert table.loc[("before", "both"), "change"].median() > 0.05
    assert table.loc[("before", "queries"), "moved"].max() == 0


def spread_matrices(spectrum: Tensor, rows: int) -> Tensor:
    """Matrices with given singular values between random orthonormal vectors."""
    batch, width = spectrum.shape
    left, right = torch.linalg.qr(seeded(batch, rows, width)).Q, torch.linalg.qr(seeded(batch, width, width, seed=1)).Q
    return left * spectrum[:, None] @ right.mT


SPECTRA = torch.stack(
    (
        torch.linspace(1, 0.1, 24),
        torch.logspace(0, -6, 24),
        torch.cat((torch.ones(12), torch.zeros(12))),
        3e5 * (1 - 1e-9 * torch.arange(24)),
        torch.linspace(1, 1 - 1e-7, 24),
        torch.zeros(24),
    )
).double()


@pytest.mark.parametrize("rows", [24, 60])
def test_products_give_the_sum_of_singular_values_the_largest_and_a_root(rows: int) -> None:
    A = spread_matrices(SPECTRA, rows)
    U = polar(A)
    assert torch.allclose(largest_by_squaring(A), SPECTRA.amax(1), rtol=1e-8, atol=1e-12)
    assert torch.allclose((U * A).sum((1, 2)), SPECTRA.sum(1), rtol=1e-7, atol=1e-12)
    root = U.mT @ A
    assert torch.allclose(root.mT @ root, A.mT @ A, rtol=0, atol=1e-9 * float(SPECTRA.max()) ** 2)


def test_cholesky_bases_are_trusted_where_they_are_orthonormal() -> None:
    bases, trusted = orthonormal(spread_matrices(SPECTRA, 60), 1e-4)
    assert trusted.tolist() == [True, False, False, True, True, False]
    ones = torch.eye(24).double().expand(3, -1, -1)
    assert torch.allclose(bases[trusted].mT @ bases[trusted], ones, rtol=0, atol=1e-13)
    read = spread_matrices(SPECTRA, 60)[trusted]
    assert torch.allclose(bases[trusted] @ bases[trusted].mT @ read, read, rtol=1e-12, atol=1e-12)
    assert span(spread_matrices(SPECTRA, 60)).any(1).sum(1).tolist() == [24, 24, 12, 24, 24, 0]
