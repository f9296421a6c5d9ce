"""Growth, rotation, clustering and speed: correct on simulated tokens, and those of the states of real models."""

import math
from copy import copy
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor

from helpers.models import FAMILIES, OWN, WIDE, built, random_normscope_model, sample_of, some_tokens, untouched
from normscope.core.norms import degrees_between, length, mean_cosine, theory_norm, unit, visible_part
from normscope.measures.base import Subject, Tables, joined, measure_all
from normscope.measures.clustering import Clustering, token_rank
from normscope.measures.growth import Growth
from normscope.measures.replay import replay_table, replayed_speeds, replayed_turns
from normscope.measures.rotation import Rotation, updates_alike
from normscope.measures.speed import Speed, effective_speed, theory_factors
from normscope.measures.states import norm_kind
from normscope.models import Model, Observer, Sample, SublayerStep, open_model
from normscope.models.module_model import ModuleModel
from normscope.schemes import NAMED
from normscope.schemes.law import MEASURED
from normscope.schemes.update import Update
from normscope.training import Training, read_recipe
from normscope.transformer import save_model


def motion_tables(model: Model, sample: Sample, *schemes: str) -> Tables:
    """The tables of all measures of motion, from one forward pass."""
    measures = (Growth(), Rotation(schemes), Clustering(), Speed())
    return joined(measure_all(Subject(model, sample), measures).values())


def tokens(seed: int = 0, count: int = 12, dim: int = 8) -> Tensor:
    return 0.4 * torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attended(x: Tensor, beta: float = 1.0) -> Tensor:
    """A(X) with identity weights."""
    return (beta * x @ x.T).softmax(-1) @ x


@pytest.mark.parametrize("name", [name for name in NAMED if name != "rezero"])  # its step starts at 0
@pytest.mark.parametrize("t", [0, 5])
def test_the_measured_speed_factor_is_that_of_theory(name: str, t: int) -> None:
    """A small step of a simulated layer with identity weights turns tokens as θ̇ = (1/s) P_θ A says."""
    scheme, depth, stride = NAMED[name].at(t, 12), 12, 1e-6
    place = scheme.place(t, depth)
    update = Update.of(scheme.attention, place, theory_norm(scheme.norm))
    law = scheme.law_of(scheme.attention)
    x = update.settle(tokens())
    A = attended(update.read(x))
    after = update.state(x, A, stride)
    seen, seen_A, seen_after = (visible_part(y, scheme.norm) for y in (x, A, after))
    if update.output is None and "v" not in scheme.attention.heads:
        seen_A = seen_A / update.factor  # theory's A is taken before a factor on the input
    s = effective_speed(seen, seen_after, seen_A, stride)
    r, a = length(seen).squeeze(-1), length(seen_A).squeeze(-1)
    theory = torch.as_tensor(law.speed({**place.values, **MEASURED, "r": r, "A": a})).expand_as(s)
    assert s.tolist() == pytest.approx(theory.tolist(), rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "olmo2", "bert", *OWN])
def test_motion_is_that_of_the_states(name: str) -> None:
    one = untouched(name)
    found = motion_tables(one.view, one.sample, "pre", "peri")
    states: list[Tensor] = []
    one.view.forward(one.sample, Observer(state=lambda layer, x: states.append(x.double())))
    kind = "layer" if name in ("gpt2", "bert", *OWN) else "rms"
    counted = one.sample.attention_mask.clone()
    counted[:, 0] = False
    kept = [visible_part(x, kind) for x in states]
    motion = found["motion"]
    for place, x in enumerate(kept):
        assert motion["radius"][place] == pytest.approx(float(x[counted].norm(dim=-1).mean()), rel=1e-5)
        assert motion["cosine"][place] == pytest.approx(float(mean_cosine(x[counted])), abs=1e-5)
        assert motion["cosine_all"][place] == pytest.approx(float(mean_cosine(x[one.sample.attention_mask])), abs=1e-5)
    angles = [float(degrees_between(a[counted], b[counted]).mean()) for a, b in pairwise(kept)]
    assert motion["angle"][:-1].tolist() == pytest.approx(angles, rel=1e-4)
    assert math.isnan(motion["angle"].iloc[-1])
    if FAMILIES.get(name, FAMILIES["llama"]).scheme == "pre":  # of its own scheme a replay is what was measured
        replay = found["replay"]
        assert replay[replay["scheme"] == "pre"]["angle"].tolist() == pytest.approx(angles, rel=1e-4)
    assert {"speed", "theory"} <= set(found["writes"])


@pytest.mark.parametrize(
    "name", ["post", "deepnorm", "hybrid", "hybrid-star", "pre", "keel", "sub-ln", "gated", "sink", "softcap", "tangent", "dyt"]
)
@torch.no_grad()
def test_small_updates_of_a_trained_model_are_resisted_as_the_slots_say(name: str) -> None:
    """Also where attention is entered with another norm than that of its stream's norm, as in HybridNorm; gains are 1."""
    view = random_normscope_model(name)
    kept = {key: value.clone() for key, value in view.model.state_dict().items()}
    try:
        for block in view.model.decoder:
            block.attention.f.W_O.mul_(1e-3)
            for gain in block.attention.stream.parameters():  # none where the stream is free
                gain.fill_(1.0)
        writes = motion_tables(view, sample_of(some_tokens() % view.vocabulary))["writes"]
    finally:
        view.model.load_state_dict(kept)
    assert writes["speed"].tolist() == pytest.approx(writes["theory"].tolist(), rel=1e-2)


@pytest.mark.parametrize(("name", "spread", "within"), [("layerscale", True, 0.25), ("rezero", False, 0.01)])
@torch.no_grad()
def test_learned_steps_of_either_sign_resist_by_their_size(name: str, spread: bool, within: float) -> None:
    """A vector with entries of both signs counts with its root mean square, which is right for updates unrelated to it."""
    view = random_normscope_model(name)
    alphas = [block.attention.alpha.value for block in view.model.decoder]
    kept = [alpha.clone() for alpha in alphas]
    try:
        for alpha in alphas:
            noise = torch.randn(alpha.shape, generator=torch.Generator().manual_seed(3), dtype=alpha.dtype)
            alpha.copy_(1e-3 * noise if spread else torch.full_like(alpha, -1e-3))
        writes = motion_tables(view, sample_of(some_tokens() % view.vocabulary))["writes"]
    finally:
        for alpha, value in zip(alphas, kept, strict=True):
            alpha.copy_(value)
    assert (writes["theory"] > 0).all()
    assert writes["speed"].tolist() == pytest.approx(writes["theory"].tolist(), rel=within)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "granite"])
def test_small_writes_are_resisted_as_the_slots_say(name: str) -> None:
    """With writes that are small beside the tokens the effective speed factor of a model is theory's."""
    one = untouched(name)
    view = one.view
    assert isinstance(view, ModuleModel)
    modules = [view.output_projection(layer) for layer in range(view.layers)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.mul_(1e-3)
        writes = motion_tables(view, one.sample)["writes"]
    finally:
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    assert writes["speed"].tolist() == pytest.approx(writes["theory"].tolist(), rel=1e-2)


def test_the_rank_of_tokens_counts_directions() -> None:
    assert token_rank(torch.eye(6)) == pytest.approx(6.0)
    assert token_rank(torch.ones(6, 4)) == pytest.approx(1.0)
    assert token_rank(torch.eye(6)[[0, 0, 0, 1, 1, 1]]) == pytest.approx(2.0)


def test_replayed_writes_turn_tokens_as_their_sum_does() -> None:
    x, steps = tokens(), [tokens(seed) for seed in (1, 2, 3)]
    states = [x]
    for step in steps:
        states.append(states[-1] + step)
    lengths = torch.stack([step.norm(dim=-1) for step in steps])
    along = torch.stack([torch.cosine_similarity(step, state, dim=-1) for step, state in zip(steps, states, strict=False)])
    angles, radii = replayed_turns(NAMED["pre"], x.norm(dim=-1), lengths, along)
    for place in range(3):
        assert angles[place].tolist() == pytest.approx(degrees_between(states[place], states[place + 1]).tolist(), rel=1e-6)
        assert radii[place].tolist() == pytest.approx(states[place].norm(dim=-1).tolist(), rel=1e-6)
    post, fixed = replayed_turns(NAMED["post"], x.norm(dim=-1), lengths, along)
    assert torch.allclose(fixed, x.norm(dim=-1).expand(3, -1), rtol=1e-12)
    across = lengths * (1 - along.square()).sqrt()
    assert torch.allclose(post, torch.atan2(across, x.norm(dim=-1) + lengths * along).rad2deg())
    peri, _ = replayed_turns(NAMED["peri"], x.norm(dim=-1), lengths, along)
    assert peri[0].tolist() == pytest.approx(
        torch.atan2(lengths.mean() * (1 - along[0].square()).sqrt(), x.norm(dim=-1) + lengths.mean() * along[0])
        .rad2deg()
        .tolist()
    )
    table = replay_table([NAMED["pre"]], x.norm(dim=-1), lengths, along, lengths.mean(-1), lengths.mean(-1))
    assert table["angle"].tolist() == pytest.approx(angles.mean(-1).tolist())
    assert table["speed"].tolist() == pytest.approx(radii.mean(-1).tolist())  # s_j = r_j


def test_replayed_speed_factors_are_those_of_theory() -> None:
    radius, attention = torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64), torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)

    def speeds(name: str) -> list[float]:
        return replayed_speeds(NAMED[name], radius, attention, attention).tolist()

    assert speeds("post") == pytest.approx([2.0, 3.0, 4.0])  # 1 at radius 1
    assert speeds("peri") == pytest.approx([2.0 * 0.5 / 1.5, 3.0 * 1.0 / 1.5, 4.0 * 3.0 / 1.5])  # r|A|, writes of length 1.5
    assert speeds("ln-scaling") == pytest.approx([2.0, 3.0 * 2**0.5, 4.0 * 3**0.5])  # √(t+1) r
    assert speeds("sqrt-scaling") == pytest.approx([2.0, 3.0 * 2**0.5, 4.0 * 3**0.5])


def test_angles_are_exact_where_they_are_small() -> None:
    a = unit(tokens()[:1])
    b = a + 1e-9 * unit(tokens(1)[:1])
    across = (b - a) - ((b - a) * a).sum() * a
    assert float(degrees_between(a, b)) == pytest.approx(math.degrees(float(across.norm())), rel=1e-5)
    assert float(degrees_between(a, -a)) == pytest.approx(180.0)


def test_a_model_with_an_output_norm_replays_its_own_speed(tmp_path: Path) -> None:
    training = Training(read_recipe("tiny", {"scheme": "peri", "layers": 4, "examples": 64, "batch": 64}))
    save_model(tmp_path, training.model, {"recipe": training.recipe.values})
    view = open_model(tmp_path)
    found = motion_tables(view, view.sample(None, 16, 0), "peri")
    writes, replay = found["writes"], found["replay"]
    assert (writes["written"] / writes["attention"]).max() < 0.1  # the norm changes lengths
    assert replay["speed"].tolist() == pytest.approx(writes["theory"].tolist(), rel=0.35)  # means of tokens beside medians


@pytest.mark.parametrize("name", ["ngpt-lerp", "ngpt"])
def test_the_measured_speed_follows_what_the_model_has_learned(tmp_path: Path, name: str) -> None:
    """A learned step that is ten times as large rotates tokens further: measured and theory's s fall, states decide."""
    training = Training(read_recipe("tiny", {"scheme": name, "layers": 2, "examples": 64, "batch": 64}))
    save_model(tmp_path, training.model, {"recipe": training.recipe.values})
    view = open_model(tmp_path)
    sample = view.sample(None, 16, 0)
    before = motion_tables(view, sample)
    alpha = view.model.decoder[0].attention.alpha  # type: ignore[attr-defined]
    with torch.no_grad():
        for parameter in alpha.parameters():
            parameter.mul_(10)
    after = motion_tables(view, sample)
    assert after["motion"]["angle"][0] > 1.5 * before["motion"]["angle"][0]
    assert after["writes"]["speed"][0] < 0.5 * before["writes"]["speed"][0]
    assert after["writes"]["theory"][0] < 0.5 * before["writes"]["theory"][0]
    steps: list[SublayerStep] = []
    view.forward(sample, Observer(sublayer=steps.append))
    counted, kind = Subject(view, sample).counted, norm_kind(view)
    states = (steps[0].carry * steps[0].before, steps[0].after, steps[0].output)
    x, moved, A = (visible_part(y[counted].double(), kind) for y in states if y is not None)
    assert after["writes"]["speed"][0] == pytest.approx(float(effective_speed(x, moved, A).median()), rel=1e-5)


def test_measures_share_one_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    one = untouched("llama")
    passes, forward = [], type(one.view).forward
    monkeypatch.setattr(type(one.view), "forward", lambda *given: passes.append(given) or forward(*given))
    together = motion_tables(one.view, one.sample, "pre")
    assert len(passes) == 1
    for measure in (Growth(), Rotation(("pre",)), Clustering(), Speed()):
        for name, table in measure.measure(Subject(one.view, one.sample)).items():
            pd.testing.assert_frame_equal(table, together[name][list(table)])
    assert len(passes) == 5


def test_a_model_whose_layers_differ_has_theory_for_each() -> None:
    one = untouched("llama")
    model = copy(one.view)
    writes = motion_tables(one.view, one.sample)["writes"]
    model.schemes = (one.view.schemes[0], None)
    model.scheme = None
    found = motion_tables(model, one.sample)["writes"]
    assert found["theory"][0] == writes["theory"][0]
    assert math.isnan(found["theory"][1])
    assert list(found["speed"]) == list(writes["speed"])


def test_the_difference_between_measured_damping_and_theory_has_two_factors() -> None:
    """Of single tokens, exactly: the part of the update along the token, and the direction that gains give it."""
    drawn = torch.Generator().manual_seed(0)
    for _ in range(20):
        x, A, gain = (torch.randn(1, 16, generator=drawn, dtype=torch.float64) for _ in range(3))
        update = gain.exp() * unit(A + x) * 3  # the gains of an output norm, on what is not perpendicular to x
        radial, direction = theory_factors(x, A + x, update)
        theory = float(length(x) * length(A + x) / length(update))
        measured = float(effective_speed(x, x + update, A + x))
        assert measured == pytest.approx(theory * radial * direction, rel=1e-9)
        assert theory_factors(x, A, 2 * A)[1] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("varied", [False, True])
def test_gains_of_an_output_norm_change_damping_only_where_they_differ(varied: bool) -> None:
    model = built("Gemma2Config", WIDE)
    with torch.no_grad():
        for layer in model.model.layers:
            gain = layer.post_attention_layernorm.weight  # Gemma multiplies by 1 + weight
            gain.copy_(torch.linspace(-1, 8, len(gain)) if varied else torch.full_like(gain, 2.0))
    view = open_model(model)
    writes = measure_all(Subject(view, sample_of(some_tokens())), [Speed()])["speed"]["writes"]
    assert bool(((writes["gain_factor"] - 1).abs() > 1e-3).all()) == varied
    assert writes["radial_factor"].notna().all()


def test_schemes_that_update_as_the_model_does_are_not_other_schemes() -> None:
    for family, alike in (("gemma3", ["peri"]), ("qwen3", ["pre"]), ("llama", ["pre"]), ("granite", [])):
        view = untouched(family).view
        assert [name for name in ("post", "pre", "peri", "ngpt", "ln-scaling") if updates_alike(view, NAMED[name])] == alike
    view = untouched("gemma3").view
    tables = joined(measure_all(Subject(view, untouched("gemma3").sample), [Growth(), Rotation()]).values())
    finding = next(f for f in Rotation().findings(tables, {"layers": view.layers}) if "Replaying" in f.text)
    assert "Pre-LN" in finding.text
    assert "Peri-LN" not in finding.text
