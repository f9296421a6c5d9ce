"""Advice: schemes through the same random layers, measured as theory says, ranked no more surely than runs allow."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import expm
from scipy.stats import rankdata

from normscope.core import Attention, Mixing
from normscope.core.norms import unit
from normscope.dynamics import Motion, SymmetricFlow, make_start
from normscope.dynamics.advice import (
    Kind,
    LayerAttention,
    RandomLayers,
    Ranking,
    Stack,
    angles,
    apart,
    measure_run,
    measure_runs,
    rank,
    ranks_of,
)
from normscope.dynamics.symmetric import no_reduction
from normscope.errors import InputError
from normscope.experiments.advise import Advise, spectrum_of
from normscope.experiments.criteria import CRITERIA, agreement, as_weights, theory_table
from normscope.experiments.result import Result
from normscope.experiments.trained import NOT_TRAINED, trained_table
from normscope.models import open_model
from normscope.results.findings import most_important
from normscope.schemes import NAMED, Scheme, Slots

DOCS = Path(__file__).parent.parent / "docs"
PLAIN = {"weights": "kaiming", "causal": False, "feedforward": 0.0}  # attention alone, as in theory
SMALL = {"depth": 9, "width": 32, "heads": 4, "context": 24, "runs": 3, "device": "cpu", **PLAIN}
STACK = Stack(depth=9, width=32, heads=4, tokens=24)
SEEN = ("post", "pre", "peri", "ngpt", "ngpt-lerp", "sqrt-scaling", "qk", "qkv", "pre-qkv", "hybrid")
KEYS = [criterion.key for criterion in CRITERIA]
SIGNS = np.array([criterion.sign for criterion in CRITERIA])


def advise(schemes: list[Scheme], **settings: Any) -> Result:
    return Advise(schemes=schemes, **{**SMALL, "rank_by": KEYS, **settings}).run()


def ranked(names: list[str], values: npt.NDArray[np.float64], by: str | None = None) -> Ranking:
    weights = as_weights(by or KEYS) or {}
    return rank(names, KEYS, values, SIGNS, np.array([weights.get(key, 0.0) for key in KEYS]))


def chosen(*names: str) -> list[Scheme]:
    return [NAMED[name] for name in names]


def mean(advice: Result, scheme: str, criterion: str) -> float:
    table = advice.tables["criteria"]
    return float(table[(table["scheme"] == scheme) & (table["criterion"] == criterion)]["mean"].iloc[0])


@pytest.fixture(scope="module")
def all_schemes() -> Result:
    return advise(chosen(*SEEN))


def test_small_angles_are_exact() -> None:
    a, b = torch.eye(2, 5, dtype=torch.float64)
    for angle in (1e-9, 0.3, 45.0, 179.0):
        t = math.radians(angle)
        assert float(angles(a, math.cos(t) * a + math.sin(t) * b)) == pytest.approx(angle, rel=1e-6)


def test_a_cluster_that_turns_as_one_does_not_move() -> None:
    generator = torch.Generator().manual_seed(0)
    theta = make_start("cone", 6, 8, delta=0.3, generator=generator)
    a, b = (unit(x) for x in (unit(theta).mean(0), torch.randn(8, generator=generator, dtype=torch.float64)))
    side = unit(b - (a @ b) * a)
    angle = math.acos(float(a @ b))
    turn = torch.from_numpy(expm(angle * (torch.outer(side, a) - torch.outer(a, side)).numpy()))
    after = theta @ turn.T
    assert float(angles(theta, after).mean()) > 10
    assert float(apart(theta, 3 * after).max()) < 1e-5


@pytest.mark.parametrize("name", [name for name, scheme in NAMED.items() if not no_reduction(scheme)])
def test_movement_is_the_speed_of_theory(name: str) -> None:
    """From an orthogonal start with identity weights the mean direction stays, and a short step moves tokens by h|θ̇|."""
    h, scheme = 1e-5, NAMED[name]
    start = make_start("orthogonal", 16, 16)
    after = Motion(scheme, Attention(1.0), 12.0).layer(start, 0.0, h)
    speed = SymmetricFlow(scheme, 16, 1.0, 12.0).rates(0.0, np.zeros(2))["speed"]
    assert float(apart(start, after).mean()) / h == pytest.approx(math.degrees(speed), rel=1e-3)


@pytest.mark.parametrize("heads", ["none", "qk", "qkv"])
def test_states_of_length_1_stand_for_a_models_units(heads: str) -> None:
    """The same layer as a model computes it: states of length √d, RMSNorm of heads to √d_h, scores over √d_h."""
    layers = RandomLayers(replace(STACK, dtype=torch.float64), 0)
    x, attention = layers.start(), layers.blocks(0, [NAMED["pre"]])[Kind()].attention
    d, w = x.shape[-1], attention.weights
    q, k, v = (math.sqrt(d) * x @ weight for weight in (w.W_Q, w.W_K, w.W_V) if weight is not None)
    q, k, v = (F.rms_norm(y, y.shape[-1:]) if letter in heads else y for letter, y in zip("qkv", (q, k, v), strict=True))
    mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    assert w.W_O is not None
    torch.testing.assert_close(math.sqrt(d) * attention(x, Mixing(heads)), (mixed @ w.W_O).sum(0))


def test_noise_multiplies_what_no_norm_follows() -> None:
    layers = RandomLayers(replace(STACK, dtype=torch.float64), 0)
    x, factors = layers.start().expand(3, -1, -1), layers.noise(3)
    plain = layers.blocks(0, [NAMED["pre"]])[Kind()].attention
    noisy = replace(plain, noise=factors)
    torch.testing.assert_close(noisy(x)[0], plain(x[0]))
    assert float((noisy(x)[2] - plain(x[0])).abs().max()) > 1e-3
    torch.testing.assert_close(noisy(x, Mixing("qkv"))[2], plain(x[0], Mixing("qkv")))
    for level, values in zip((0.01, 0.1), factors[1:] - 1, strict=True):
        assert float(values.square().mean().sqrt()) == pytest.approx(level, rel=0.05)
    keys_only = LayerAttention(plain.beta, plain.weights, noise=torch.cat([torch.ones(3, 1, 4, 24, 1), factors[:, 1:]], 1))
    torch.testing.assert_close(noisy(x, Mixing("q"))[1], keys_only(x, Mixing("q"))[1])


def test_gradients_are_those_of_finite_differences() -> None:
    tiny = Stack(depth=4, width=4, heads=2, tokens=3, dtype=torch.float64)
    layers, schemes = RandomLayers(tiny, 1), chosen("peri", "mix", "ngpt-lerp", "qkv")
    found = measure_run(layers, schemes)
    for scheme, gradient in zip(schemes, found.gradient, strict=True):

        def objective(x: torch.Tensor, scheme: Scheme = scheme) -> float:
            for layer in range(tiny.depth):
                block = layers.blocks(layer, [scheme]).popitem()[1]
                x = Motion(scheme, block.attention, float(tiny.depth)).layer(x, float(layer))
            return float((layers.probe() * unit(x)).sum())

        start, h = unit(layers.start()), 1e-6
        steps = h * torch.eye(start.numel(), dtype=torch.float64).view(-1, *start.shape)
        numeric = [(objective(start + step) - objective(start - step)) / (2 * h) for step in steps]
        assert 10 ** gradient[0] == pytest.approx(np.linalg.norm(numeric), rel=1e-5), scheme.name


def test_schemes_that_are_the_same_are_level(all_schemes: Result) -> None:
    twin = replace(NAMED["pre"], name="twin")
    advice = advise([NAMED["pre"], twin, NAMED["none"]], depth=3)
    order = advice.tables["ranks"].set_index("scheme")
    assert order.loc["pre", "rank"] == order.loc["twin", "rank"]
    assert order.loc["pre", "place"] == order.loc["twin", "place"]
    assert "twin" in str(order.loc["pre", "level_with"])
    pairs = advice.tables["pairs"].set_index(["scheme", "other"])["above"]
    assert pairs["pre", "twin"] == pairs["twin", "pre"] == 0.5
    alike = [finding.text for finding in all_schemes.findings if "have the same values" in finding.text]
    assert len(alike) == 1
    assert alike[0].startswith("pre-qkv, qkv have the same values")


def test_a_feed_forward_layer_tells_apart_what_attention_alone_cannot() -> None:
    schemes = [NAMED["qkv"], Scheme("free", NAMED["qkv"].attention, feedforward=NAMED["none"].feedforward)]
    for width, different in ((0.0, False), (2.0, True)):
        advice = advise(schemes, feedforward=width, depth=4, runs=2)
        assert (mean(advice, "qkv", "collapse") != pytest.approx(mean(advice, "free", "collapse"), rel=0.01)) == different


def test_schemes_come_in_the_order_that_theory_gives(all_schemes: Result) -> None:
    """Theorem 4.1: Post-LN and nGPT close in exponentially, so they collapse and stop; Peri-LN and nGPT start fastest."""
    for collapsed in ("post", "ngpt"):
        for other in ("pre", "peri", "sqrt-scaling"):
            assert mean(all_schemes, collapsed, "collapse") < 0.1 * mean(all_schemes, other, "collapse")
            assert mean(all_schemes, collapsed, "late") < mean(all_schemes, other, "late")
    layers = all_schemes.tables["layers"]
    first = layers[layers["layer"] == 0].set_index("scheme")["moved"]
    assert first["peri"] == pytest.approx(first["ngpt"], rel=1e-4)
    assert first["peri"] > 1.2 * first["pre"]
    assert first["pre"] == pytest.approx(first["post"], rel=1e-4)
    radius = layers[layers["layer"] == SMALL["depth"]].set_index("scheme")["radius"]
    assert radius["post"] == pytest.approx(1)
    assert radius["pre"] > 2
    assert agreement(all_schemes.tables["criteria"], all_schemes.tables["theory"], 24)["early"] > 0.5


def test_deeper_post_ln_is_more_collapsed() -> None:
    gaps = [mean(advise(chosen("post"), depth=depth, runs=2), "post", "collapse") for depth in (2, 4, 8)]
    assert gaps[0] > 2 * gaps[1] > 8 * gaps[2]


def test_norm_noise_is_removed_by_norms_and_grows_in_proportion(all_schemes: Result) -> None:
    noise = all_schemes.tables["noise"].pivot(index="scheme", columns="noise", values="angle")
    for name in ("qkv", "hybrid"):
        assert (noise.loc[name] == 0).all()
    assert 0 < noise.loc["qk", 0.01] < 0.6 * noise.loc["pre", 0.01]
    for name in ("pre", "post", "peri", "qk"):
        assert 5 < noise.loc[name, 0.1] / noise.loc[name, 0.01] < 11, name


def test_a_seed_fixes_every_number_on_any_number_of_threads() -> None:
    schemes = chosen("pre", "ngpt-lerp")
    threads = torch.get_num_threads()
    one = advise(schemes, depth=3)
    try:
        torch.set_num_threads(3)
        again = advise(schemes, depth=3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    other = advise(schemes, depth=3, seed=1)
    for name, table in one.tables.items():
        assert table.equals(again.tables[name]), name
    runs = one.tables["runs"]
    assert not runs.equals(other.tables["runs"])
    fewer = advise(schemes[:1], depth=3, runs=2)
    same = runs[(runs["scheme"] == "pre") & (runs["run"] < 2)]
    assert same.reset_index(drop=True).equals(fewer.tables["runs"])  # neither the other schemes nor the other runs matter


def test_progress_counts_every_layer_and_an_interrupt_ends_it() -> None:
    heard: list[int] = []
    measure_runs(replace(STACK, depth=3), chosen("pre"), 2, heard.append)
    assert heard == list(range(1, 13))

    def interrupt(done: int) -> None:
        heard.append(done)
        raise KeyboardInterrupt

    heard.clear()
    with pytest.raises(KeyboardInterrupt):
        measure_runs(replace(STACK, depth=200), chosen("pre"), 3, interrupt)
    assert len(heard) < 10


def test_a_scheme_that_becomes_non_finite_is_last_and_listed() -> None:
    wild = Scheme("wild", Slots(step="10**(12*layer)"))
    advice = advise([wild, *chosen("pre", "qkv")], depth=5)
    order, criteria = advice.tables["ranks"], advice.tables["criteria"]
    assert order["scheme"].iloc[-1] == "wild"
    assert order["rank"].iloc[-1] > 2.5
    rows = criteria[criteria["scheme"] == "wild"]
    assert rows["runs"].min() == 0
    assert rows["mean"].isna().any()
    warned = next(finding for finding in advice.findings if "non-finite" in finding.text)
    assert "wild" in warned.text
    assert warned.severity == "warning"
    assert most_important(advice.findings)[0] == warned


def test_ranks_are_those_of_scipy() -> None:
    scores = np.random.default_rng(0).integers(0, 6, size=(7, 9, 5)).astype(float)
    expected = rankdata(-scores, method="average", axis=1)
    np.testing.assert_array_equal(ranks_of(scores), expected)


def test_intervals_are_as_wide_as_the_error_of_a_mean() -> None:
    runs = 12
    values = np.random.default_rng(1).normal(size=(runs, 2, len(CRITERIA)))
    table = ranked(["a", "b"], values).criteria
    for i, name in enumerate(("a", "b")):
        for j, criterion in enumerate(KEYS):
            row = table[(table["scheme"] == name) & (table["criterion"] == criterion)].iloc[0]
            error = values[:, i, j].std(ddof=1) / math.sqrt(runs)
            assert row["high"] - row["low"] == pytest.approx(2 * 1.645 * error, rel=0.15)


def test_an_order_is_sure_only_where_runs_agree() -> None:
    generator = np.random.default_rng(2)
    level = np.repeat([[3.0], [0.0], [0.0]], len(CRITERIA), axis=1) * SIGNS
    values = level + 0.5 * generator.normal(size=(8, 3, len(CRITERIA)))
    found = ranked(["good", "one", "other"], values)
    order = found.order.set_index("scheme")
    assert order.loc["good", "place"] == 1
    assert order.loc["good", "level_with"] == ""
    assert order.loc["good", "low"] == order.loc["good", "high"] == 1
    assert order.loc["one", "place"] == order.loc["other", "place"] == 2
    above = found.pairs.set_index(["scheme", "other"])["above"]
    assert above["good", "one"] == 1
    assert above["one", "other"] + above["other", "one"] == pytest.approx(1)


def test_weights_of_criteria_change_the_order() -> None:
    values = np.zeros((4, 2, len(CRITERIA)))
    values[:, 0, KEYS.index("early")] = 5  # the first is better early
    values[:, 0, KEYS.index("noise")] = 7  # and worse under noise
    values += 1e-9 * np.random.default_rng(0).normal(size=values.shape)
    assert ranked(["a", "b"], values, "early=2,noise").order["scheme"].iloc[0] == "a"
    assert ranked(["a", "b"], values, "early,noise=2").order["scheme"].iloc[0] == "b"
    alike = ranked(["a", "b"], values).order
    assert list(alike["place"]) == [1, 1]
    # each is first where its criterion weighs more: half of all weights
    assert list(alike["first"]) == pytest.approx([0.5, 0.5], abs=0.05)
    assert list(ranked(["a", "b"], values, "early").order["first"]) == [1, 0]


def test_theory_starts_as_theorem_4_1_prints_it() -> None:
    n = 64
    at = theory_table(chosen("post", "pre", "mix", "peri", "ngpt", "sqrt-scaling"), 9, (n,), radius=2.0).set_index("scheme")
    plain, normed = 2 / (math.e + n - 1), 2 / math.sqrt(math.e**2 + n - 1)
    expected = {"post": plain, "pre": plain / 2, "mix": plain, "peri": normed / 2, "ngpt": normed, "sqrt-scaling": plain}
    for name, rate in expected.items():
        assert at.loc[name, "first_rate"] == pytest.approx(rate, rel=1e-9), name
    assert at.loc["peri", "speed"] == "r_j·|A_j|"
    assert at.loc["mix", "speed"] == "1 then r_j"
    # C e^{−2t} against C/t³: Post-LN and nGPT no longer move late, the others do
    for name in ("pre", "mix", "peri", "sqrt-scaling"):
        assert at.loc[name, "late"] > 3 * max(at.loc["post", "late"], at.loc["ngpt", "late"])
        assert at.loc[name, "gap"] > 3 * max(at.loc["post", "gap"], at.loc["ngpt", "gap"])


def test_what_was_trained_stands_in_the_documents_and_nothing_else_is_claimed() -> None:
    table = trained_table([*NAMED.values(), replace(NAMED["pre"], name="mine", title="")])
    known = table[table["what"] != NOT_TRAINED]
    assert set(known["scheme"]) == {"pre", "qkv", "peri", "mine"}
    for row in known.itertuples(index=False):
        text = (DOCS.parent / str(row.source)).read_text(encoding="utf-8")
        for number in re.findall(r"\d+\.\d+", str(row.value)):
            assert number in text, (row.value, row.source)
    assert (table[table["scheme"] == "post"]["what"] == NOT_TRAINED).all()


def test_weights_have_the_spectrum_of_a_model() -> None:
    view = open_model("builtin:addition-small-pre", "cpu")
    spectrum = spectrum_of(view.name)
    weights = view.projections(1)
    whole = torch.linalg.svdvals(weights.W_QK.double())[:, : view.head_dim]
    torch.testing.assert_close(spectrum.qk[1], whole, rtol=1e-4, atol=1e-5)
    stack = Stack(
        depth=view.layers, width=view.dim, heads=view.heads, tokens=8, spectrum=spectrum, dtype=torch.float64
    )  # fmt: skip
    drawn = RandomLayers(stack, 0).blocks(1, [NAMED["pre"]])[Kind()].attention.weights
    assert drawn.W_Q is not None
    assert drawn.W_K is not None
    assert drawn.W_V is not None
    assert drawn.W_O is not None
    for product, values in ((drawn.W_Q @ drawn.W_K.mT, spectrum.qk[1]), (drawn.W_V @ drawn.W_O, spectrum.vo[1])):
        torch.testing.assert_close(torch.linalg.svdvals(product)[:, : view.head_dim], values, rtol=1e-6, atol=1e-9)
    narrow = spectrum.at("qk", 0.0, 2, 3)
    assert narrow.shape == (2, 3)
    assert bool((narrow.diff(dim=-1) <= 0).all())
    shape = {"depth": 3, "width": view.dim, "heads": view.heads, "context": 8, "runs": 2, "weights": "spectrum-of"}
    advice = advise(chosen("pre"), **shape, model=view.name)
    assert np.isfinite(advice.tables["runs"]["value"]).all()
    with pytest.raises(InputError, match="needs a model"):
        advise(chosen("pre"), **shape)


@pytest.mark.parametrize("kind", ["kaiming", "gaussian"])
def test_a_narrower_simulation_keeps_the_norms_of_messages(kind: str) -> None:
    """|A(x)|² of a single token is on average the same at any simulated width."""
    sizes = []
    for width in (64, 256):
        shape = {"depth": 1, "width": 512, "context": 2, "weights": kind, "simulated_width": width, "seed": 3}
        stack = Advise(**{**SMALL, **shape}).stack()
        draws = [RandomLayers(stack, run) for run in range(12)]
        messages = [draw.blocks(0, [NAMED["pre"]])[Kind()].attention(draw.start()[:1]) for draw in draws]
        sizes.append(float(torch.stack(messages).square().sum(-1).mean()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)


def test_the_simulated_width_fits_the_time() -> None:
    def fitted(**shape: Any) -> int:
        return Advise(**{**SMALL, "runs": 8, **shape}).simulated

    assert fitted(depth=4, width=64) == 64
    deep = {"width": 2048, "heads": 16, "context": 4096}
    width = fitted(depth=48, **deep)
    assert width < 2048
    assert width % 16 == 0
    assert fitted(depth=96, feedforward=4.0, **deep) <= width


def test_findings_carry_the_numbers_of_the_tables(all_schemes: Result) -> None:
    assert set(all_schemes.tables["findings"]["basis"]) >= {"setting", "simulation", "theory", "training", "language models"}
    said = "\n".join(finding.text for finding in all_schemes.findings)
    first = all_schemes.tables["ranks"].iloc[0]
    assert f"{first['scheme']} has the best mean rank over the simulated criteria, {first['rank']:.1f} of {len(SEEN)}" in said
    assert f"ngpt-lerp, {mean(all_schemes, 'ngpt-lerp', 'gradient'):.3g}" in said
    assert re.search(r"all tokens point the same way after 9 layers.*post.*ngpt", said)
    longer = advise(chosen("pre"), depth=1, context=96, tokens=24)
    sampled = next(finding.text for finding in longer.findings if "sampled tokens" in finding.text)
    assert sampled.startswith("24 sampled tokens stand for a context of 96.")
    assert "2 times smaller" in sampled


def test_cards_have_figures_that_exist(all_schemes: Result) -> None:
    cards = most_important(all_schemes.findings)
    assert 3 <= len(cards) <= 5
    assert [card.title for card in cards[:3]] == ["Safe at this depth", "Lowest loss at this depth", "Fails at this depth"]
    for finding in all_schemes.findings:
        assert finding.figure is None or finding.figure in all_schemes.figures


def test_sections_show_the_numbers_of_the_tables(all_schemes: Result) -> None:
    shown = {cell for section in all_schemes.sections for table in section.tables for row in table.rows for cell in row}
    for value in all_schemes.tables["criteria"]["mean"]:
        assert f"{value:.3g}" in shown
    for value in all_schemes.tables["theory"]["early"]:
        assert f"{value:.3g}" in shown
    assert {"90.37 ± 0.03 %, 87.00 ± 0.03 %, 68.20 ± 0.04 % (one seed)", NOT_TRAINED} <= shown
    criteria, curves = ("early", "late", "collapse", "gradient", "noise"), ("moved", "turned", "gap", "radius", "gradient")
    assert set(all_schemes.figures) == {"ranks", *(f"criterion-{n}" for n in criteria), *(f"layers-{n}" for n in curves)}


def test_a_scheme_that_is_worse_at_everything_is_named() -> None:
    from normscope.experiments.advise_findings import _beaten

    table = advise(chosen("pre", "qkv"), runs=2, depth=3).tables["criteria"].copy()
    for criterion in CRITERIA:
        chosen_rows = table["criterion"] == criterion.key
        table.loc[chosen_rows, "mean"] = [2.0, 1.0] if not criterion.low_is_better else [1.0, 2.0]
    assert [finding.text for finding in _beaten(table)] == ["qkv is beaten in every criterion by pre."]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"depth": 0}, "depth=0: should be greater than or equal to 1"),
        ({"width": 30}, "cannot be divided among 4 heads"),
        ({"runs": 1}, "runs=1: should be greater than or equal to 2"),
        ({"tokens": 25}, "tokens=25 is more than context=24"),
        ({"simulated_width": 64}, "simulated_width=64 is more than width=32"),
        ({"simulated_width": 4}, "at least 2 dimensions"),
        ({"weights": "kaming"}, "did you mean 'kaiming'"),
        ({"feedforward": -1.0}, "feedforward=-1.0"),
        ({"radius": 0.0}, "radius=0.0: should be greater than 0"),
        ({"depht": 3}, "advise has no setting 'depht'"),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Advise(**{**SMALL, **change})


@pytest.mark.parametrize(
    ("text", "said"), [("erly", "did you mean 'early'"), ("noise=x", "a number"), ("noise=0", "leave it out")]
)
def test_wrong_criteria_say_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        as_weights(text)


def test_diversity_is_what_tables_call_collapse() -> None:
    assert as_weights("diversity=2") == as_weights({"collapse": 2}) == {"collapse": 2.0}


def test_no_criteria_are_refused() -> None:
    for nothing in ({}, [], ""):
        with pytest.raises(InputError, match="criteri"):
            Advise(rank_by=nothing, **SMALL)


def test_no_schemes_and_twice_the_same_are_refused() -> None:
    with pytest.raises(InputError, match="at least one scheme"):
        advise([])
    with pytest.raises(InputError, match="named twice"):
        advise(chosen("pre", "pre"))
