"""The slots inside sublayers, tangent outputs and pointwise norms in the simulator, beside plain PyTorch and the law."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from normscope.core import Attention, HeadWeights, Mixing, Scores
from normscope.core.norms import SphereNorm, length, tangent, unit
from normscope.dynamics import FeedForward, Motion, SymmetricFlow, make_start, measure, random_weights, simulate
from normscope.dynamics.advice import RandomLayers, Stack, measure_run
from normscope.dynamics.ensemble import Ensemble, run_chunk
from normscope.dynamics.symmetric import no_reduction
from normscope.dynamics.weights import random_gate
from normscope.errors import InputError
from normscope.experiments.advise import Advise
from normscope.experiments.simulate import Simulate
from normscope.schemes import NAMED, Scheme, Slots, find_scheme

N, D, HEADS = 7, 12, 3
RULES = {
    "softcap(2)": Scores(cap=2.0),
    "sink(1.5)": Scores(sink=1.5),
    "temperature(log(n))": Scores(temperature=torch.log),
    "softcap(2)+sink+temperature(1 + n/4)": Scores(2.0, 0.0, lambda n: 1 + n / 4),
}


TOGETHER = {
    "scores": Slots(input="norm/2", scores="softcap(2)+sink+temperature(1 + n/4)"),
    "inner and gate": Slots(inner="norm", gate="sigmoid", scores="sink(1)", carry="3/4"),
    "tangent and stream": Slots(input="norm", heads="qk", gate="sigmoid", output="tangent", carry="sqrt(depth)", stream="norm"),
    "output and gate": Slots(heads="q", gate="sigmoid", output="norm", step="1/layer"),
}
SCHEMES = {**NAMED, **{name: Scheme("mine", slots) for name, slots in TOGETHER.items()}}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def start() -> Tensor:
    return make_start("gaussian", N, D, generator=generator(3))


def weights() -> HeadWeights:
    drawn = random_weights("kaiming", D, HEADS, generator(1))
    return replace(drawn, W_G=random_gate("kaiming", D, HEADS, generator(2)))


def norm1(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def by_hand(
    x: Tensor,
    w: HeadWeights,
    beta: float,
    causal: bool = False,
    logit: Callable[[Tensor, int], Tensor] = lambda s, n: s,
    sink: float | None = None,
    inner: bool = False,
    gate: bool = False,
) -> Tensor:
    """Attention token by token and head by head, from the definitions."""
    W_Q, W_K, W_V, W_O, W_G = (weight for weight in vars(w).values() if weight is not None)
    rows = []
    for i in range(len(x)):
        keys = i + 1 if causal else len(x)
        heads = []
        for h in range(HEADS):
            q, k, v = x[i] @ W_Q[h], x[:keys] @ W_K[h], x[:keys] @ W_V[h]
            powers = logit(beta * (k @ q), keys).exp()
            heads.append((powers @ v) / (powers.sum() + (0 if sink is None else math.exp(sink))))
        mixed = torch.cat(heads)
        mixed = norm1(mixed) if inner else mixed
        if gate:
            mixed = mixed * torch.sigmoid(math.sqrt(D) * x[i] @ torch.cat(list(W_G), -1))
        rows.append(mixed @ torch.cat(list(W_O), 0))
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_every_slot_inside_is_that_by_hand(causal: bool) -> None:
    x, w = start(), weights()
    attention = Attention(0.8, w, causal)
    cases: list[tuple[Mixing, Tensor]] = [
        (Mixing(scores=Scores(cap=2.0)), by_hand(x, w, 0.8, causal, lambda s, n: 2 * torch.tanh(s / 2))),
        (Mixing(scores=Scores(sink=1.5)), by_hand(x, w, 0.8, causal, sink=1.5)),
        (Mixing(scores=Scores(temperature=torch.log)), by_hand(x, w, 0.8, causal, lambda s, n: math.log(n) * s)),
        (Mixing(inner=SphereNorm()), by_hand(x, w, 0.8, causal, inner=True)),
        (Mixing(gated=True), by_hand(x, w, 0.8, causal, gate=True)),
        (
            Mixing(scores=Scores(sink=0.0), inner=SphereNorm(), gated=True),
            by_hand(x, w, 0.8, causal, sink=0, inner=True, gate=True),
        ),
    ]
    for mixing, expected in cases:
        torch.testing.assert_close(attention(x, mixing), expected)
    ungated = replace(attention, weights=replace(w, W_G=None))
    torch.testing.assert_close(ungated(x, Mixing(gated=True)), ungated(x) / 2)


def test_weights_that_do_not_fit_a_gate_are_refused() -> None:
    with pytest.raises(InputError, match="W_G"):
        replace(weights(), W_G=torch.zeros(HEADS, D, 5, dtype=torch.float64))


LAYERS: dict[str, tuple[Slots, str, Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]]] = {
    "tangent": (Slots(input="norm", output="tangent"), "rms", lambda x, A: x + _sideways(A(norm1(x)), x)),
    "tanh": (Slots(input="norm"), "tanh", lambda x, A: x + A(torch.tanh(0.5 * math.sqrt(D) * x) / math.sqrt(D))),
    "erf": (Slots(input="norm"), "erf", lambda x, A: x + A(torch.erf(0.5 * math.sqrt(D) * x) / math.sqrt(D))),
    "tanh after": (Slots(stream="norm"), "tanh", lambda x, A: torch.tanh(0.5 * math.sqrt(D) * (x + A(x))) / math.sqrt(D)),
    "tanh of the output": (Slots(output="norm"), "tanh", lambda x, A: x + torch.tanh(0.5 * math.sqrt(D) * A(x)) / math.sqrt(D)),
}


def _sideways(u: Tensor, x: Tensor) -> Tensor:
    return torch.stack([a - (a @ b) / (b @ b) * b for a, b in zip(u, x, strict=True)])


@pytest.mark.parametrize("name", LAYERS)
def test_a_simulated_layer_is_that_by_hand(name: str) -> None:
    slots, norm, layer = LAYERS[name]
    x, attention = start(), Attention(0.8, weights())
    motion = Motion(Scheme("mine", slots, norm=norm), attention, 4.0)  # type: ignore[arg-type]
    torch.testing.assert_close(motion.layer(x, 1.0), layer(x, attention))


@pytest.mark.parametrize("slot", [*RULES, "inner", "gate"])
def test_slots_reach_the_inside_of_sublayers(slot: str) -> None:
    """A layer of a scheme with the slot, and with a feed-forward layer, beside its parts."""
    given = {"scores": slot} if slot in RULES else {slot: "norm" if slot == "inner" else "sigmoid"}
    rules = {"logit": lambda s, n: s, "sink": None, "inner": slot == "inner", "gate": slot == "gate"}
    if slot in RULES:
        rule = RULES[slot]
        cap, warm = rule.cap, rule.temperature

        def logit(s: Tensor, n: int) -> Tensor:
            s = s if warm is None else s * warm(torch.tensor(float(n), dtype=torch.float64))
            return s if cap is None else cap * torch.tanh(s / cap)

        rules |= {"logit": logit, "sink": rule.sink}
    x, w = start(), weights()
    wide = FeedForward.random(D, 20, generator(5))
    motion = Motion(Scheme("mine", Slots(input="norm", **given)), Attention(0.8, w), 4.0, wide)
    middle = x + by_hand(norm1(x), w, 0.8, False, **rules)  # type: ignore[arg-type]
    hidden = torch.relu(norm1(middle) @ wide.W_in)
    hidden = math.sqrt(20 / D) * norm1(hidden) if slot == "inner" else hidden
    torch.testing.assert_close(motion.layer(x, 0.0), middle + hidden @ wide.W_out)


@pytest.mark.parametrize("name", SCHEMES)
def test_simulated_tokens_turn_at_the_speed_of_the_law(name: str) -> None:
    """θ̇_j of the flow with identity weights beside P_θ A_j/s_j, with the softmax, the sink's mass and the gate written out."""
    scheme, t, depth, beta = SCHEMES[name], 5.0, 12.0, 0.8
    motion = Motion(scheme, Attention(beta), depth)
    stage = scheme.at(t, depth)
    slots, law, place = stage.attention, stage.law_of(stage.attention), stage.place(t, depth)
    x = motion.settle(start(), t)
    if slots.reads_norm:
        read = torch.tanh(0.5 * math.sqrt(D) * x) if stage.norm == "tanh" else torch.erf(0.5 * math.sqrt(D) * x)
        read = read / math.sqrt(D) if stage.pointwise else norm1(x)
    else:
        read = x
    q, k, v = (norm1(read) if letter in slots.heads else read for letter in "qkv")
    logits = beta * float(law.temperature(place.values)) * (q @ k.T) * (1 + N / 4 if slots.score_rule.temperature else 1)
    cap, sink = slots.score_rule.cap, slots.score_rule.sink
    powers = (logits if cap is None else cap * torch.tanh(logits / cap)).exp()
    mixed = powers @ v / powers.sum(-1, keepdim=True)
    A = mixed / 2 if slots.gate == "sigmoid" else mixed
    r, size, before = (length(y).squeeze(-1) for y in (x, A, mixed))
    mass = torch.zeros(N) if sink is None else math.exp(sink) / (math.exp(sink) + powers.sum(-1))
    s = torch.as_tensor(law.speed({**place.values, "r": r, "A": size, "M": before, "m": mass})).expand_as(r)
    turning = tangent(unit(x), motion.velocity(x, t)) / r[:, None]
    torch.testing.assert_close(turning, tangent(unit(x), A) / s[:, None])


@pytest.mark.parametrize("name", SCHEMES)
def test_the_reduction_is_the_flow_of_orthogonal_tokens(name: str) -> None:
    """γ̇, speed and ṙ of two numbers beside those of the tokens, on the way and not only at the start."""
    scheme, n, depth, t = SCHEMES[name], 6, 12.0, 4.0
    reason = no_reduction(scheme)
    if reason:
        assert any(stage.norm in ("tanh", "erf") for stage in scheme.stages)
        with pytest.raises(InputError, match=reason[:20]):
            SymmetricFlow(scheme, n, 1.0, depth)
        return
    stage = scheme.at(t, depth)
    gamma, r = 0.3, 1.0 if stage.law_of(stage.attention).radius_fixed else 1.7
    gram = gamma + (1 - gamma) * torch.eye(n, dtype=torch.float64)
    x = r * torch.linalg.cholesky(gram)
    motion = Motion(scheme, Attention(1.0), depth)
    measured = measure(x, velocity := motion.velocity(x, t))
    rates = SymmetricFlow(scheme, n, 1.0, depth).rates(t, np.array([math.log(1 - gamma), math.log(r)]))
    assert rates["cosine_rate"] == pytest.approx(float(measured.cosine_rate), rel=1e-9)
    assert rates["speed"] == pytest.approx(float(measured.speed), rel=1e-9)
    radial = (unit(x) * velocity).sum(-1).mean()
    assert rates["radial_rate"] == pytest.approx(float(radial), rel=1e-9, abs=1e-12)


def test_several_schemes_at_once_move_as_each_alone() -> None:
    """Ensembles: other numbers stay as they are beside a gate, which has a stream of its own."""
    setting = Ensemble(tokens=5, dim=8, heads=2, time=1.0, step=0.25, samples=3, redraw=0.5)
    names = ("pre", "gated", "sink", "softcap", "tangent", "sub-ln", "dyt", "qk", "keel")
    schemes = [find_scheme(name) for name in names]
    together = run_chunk(setting, schemes, 2, 7)
    for i, scheme in enumerate(schemes):
        np.testing.assert_allclose(run_chunk(setting, [scheme], 2, 7)[:, 0], together[:, i], rtol=2e-4, atol=2e-5)
    assert len({round(float(x), 4) for x in together[0, :, -1]}) == len(names)


def test_a_stream_without_a_sphere_has_layers_but_no_flow() -> None:
    scheme = Scheme("mine", Slots(stream="norm"), norm="tanh")
    path = simulate(start(), scheme, Attention(1.0), [0.0, 1.0, 2.0], solver="layers")
    assert not path.stopped
    with pytest.raises(InputError, match="layers"):
        simulate(start(), scheme, Attention(1.0), [1.0])
    with pytest.raises(InputError, match="layers"):
        run_chunk(Ensemble(tokens=4, dim=8, time=1.0), [scheme], 1, 0)


def test_a_gate_leaves_other_schemes_of_advice_alone() -> None:
    stack = Stack(depth=3, width=16, heads=2, tokens=6, hidden=32)
    alone = measure_run(RandomLayers(stack, 0), [NAMED["pre"], NAMED["ngpt-lerp"]])
    beside = measure_run(RandomLayers(stack, 0), [NAMED["pre"], NAMED["ngpt-lerp"], NAMED["gated"]])
    for name, values in vars(alone).items():
        np.testing.assert_array_equal(getattr(beside, name)[:2], values)
    assert (beside.turned[2] != beside.turned[0]).all()


def test_gaussian_weights_of_advice_are_those_of_all_matrices() -> None:
    stack = Stack(depth=1, width=64, heads=2, tokens=4, hidden=256, weights="gaussian", scale=0.03)
    block = RandomLayers(stack, 0).blocks(0, [NAMED["gated"]]).popitem()[1]
    assert block.feedforward is not None
    for weight in (*vars(block.attention.weights).values(), block.feedforward.W_in, block.feedforward.W_out):
        assert float(weight.std()) == pytest.approx(0.03, rel=0.05)


def test_advice_shrinks_initial_weights_as_the_scheme_says() -> None:
    """DeepNorm's factor (8·depth)^(−1/4) on W_V, W_O and the feed-forward layer, and on nothing else."""
    stack = Stack(depth=6, width=16, heads=2, tokens=6, hidden=32, dtype=torch.float64)
    layers, factor = RandomLayers(stack, 0), 48**-0.25
    plain, small = (layers.blocks(1, [NAMED[name]]).popitem()[1] for name in ("pre", "deepnorm"))
    for name, expected in (("W_Q", 1.0), ("W_K", 1.0), ("W_V", factor), ("W_O", factor)):
        torch.testing.assert_close(getattr(small.attention.weights, name), expected * getattr(plain.attention.weights, name))
    assert plain.feedforward is not None
    assert small.feedforward is not None
    torch.testing.assert_close(small.feedforward.W_in, factor * plain.feedforward.W_in)
    torch.testing.assert_close(small.feedforward.W_out, factor * plain.feedforward.W_out)


def test_a_command_simulates_gates_beside_other_schemes(tmp_path: Path) -> None:
    """Random gates leave other numbers alone; a file may have a gate's weights; two numbers do not determine every flow."""
    sizes: dict[str, Any] = {"tokens": 5, "dim": 6, "heads": 2, "time": 0.2, "step": 0.1, "samples": 3, "start": "gaussian"}

    def curves(names: str, kind: str) -> pd.DataFrame:
        table = Simulate(scheme=names, weights=kind, feedforward=8, **sizes).run().tables["trajectories"]
        return table.set_index("scheme")

    pd.testing.assert_frame_equal(curves("pre,gated", "kaiming").loc["pre"], curves("pre", "kaiming").loc["pre"])
    file = tmp_path / "weights.safetensors"
    save_file({"W_G": torch.zeros(6, 6)}, file)
    half = curves("gated", "identity").reset_index(drop=True)
    pd.testing.assert_frame_equal(curves("gated", str(file)).reset_index(drop=True), half)
    with pytest.raises(InputError, match="two numbers do not determine the flow"):
        Simulate(scheme="dyt", symmetric=True, tokens=5, dim=6).run()


def test_advice_ranks_unasked_only_schemes_that_move_at_first() -> None:
    named = {scheme.name for scheme in Advise(depth=2, width=8, heads=1, context=4).schemes}
    assert set(NAMED) - named == {"rezero", "layerscale"}


@pytest.mark.parametrize("slot", ["softcap", "sink", "inner", "gate", "tanh"])
def test_slots_of_advice_are_those_of_a_model_in_its_own_units(slot: str) -> None:
    """A block as a model computes it: states of norm √d, RMSNorm, logits over √d_h, and no factor of √d anywhere else."""
    stack = Stack(depth=1, width=D, heads=HEADS, tokens=N, hidden=20, dtype=torch.float64)
    slots = {"softcap": {"scores": "softcap(0.5)"}, "sink": {"scores": "sink(1)"}, "inner": {"inner": "norm"}, "tanh": {}}
    given = slots.get(slot, {"gate": "sigmoid"})
    scheme = Scheme("mine", Slots(input="norm", **given), norm="tanh" if slot == "tanh" else "rms")
    layers = RandomLayers(stack, 0)
    block = layers.blocks(0, [scheme]).popitem()[1]
    wide = block.feedforward
    assert wide is not None
    simulated = Motion(scheme, block.attention, 1.0, wide).layer(layers.start(), 0.0)

    def norm(y: Tensor) -> Tensor:
        return torch.tanh(0.5 * y) if slot == "tanh" else F.rms_norm(y, y.shape[-1:])

    w = {name: weight for name, weight in vars(block.attention.weights).items() if weight is not None}
    x = math.sqrt(D) * layers.start()
    read = norm(x)
    logits = (read @ w["W_Q"]) @ (read @ w["W_K"]).mT / math.sqrt(D / HEADS)
    logits = 0.5 * torch.tanh(logits / 0.5) if slot == "softcap" else logits
    logits = F.pad(logits, (0, 1), value=1.0) if slot == "sink" else logits
    mixed = torch.cat(list(logits.softmax(-1)[..., :N] @ (read @ w["W_V"])), -1)
    mixed = norm(mixed) if slot == "inner" else mixed
    mixed = mixed * torch.sigmoid(torch.cat(list(read @ w["W_G"]), -1)) if slot == "gate" else mixed
    x = x + mixed @ w["W_O"].flatten(0, 1)
    hidden = torch.relu(norm(x) @ wide.W_in)
    x = x + (norm(hidden) if slot == "inner" else hidden) @ wide.W_out
    torch.testing.assert_close(math.sqrt(D) * simulated, x)
