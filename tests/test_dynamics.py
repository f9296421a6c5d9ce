"""Tokens as particles: the flow against theory, symmetries, orders of convergence, and what happens to bad input."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from normscope import InputError
from normscope.core import Attention
from normscope.core.norms import length
from normscope.dynamics import (
    SCHEDULES,
    FeedForward,
    SymmetricFlow,
    gradient_by_depth,
    interaction_energy,
    make_start,
    measure,
    random_weights,
    read_start,
    simulate,
)
from normscope.dynamics.motion import Motion
from normscope.schemes import NAMED, Scheme, Slots

SIX = ("post", "pre", "mix", "peri", "ngpt", "sqrt-scaling")
BETA, TIMES = 5.0, [0.0, 1.0, 2.0, 5.0, 10.0, 20.0]
MEASURES = ["cosine", "variance", "radius", "speed", "cosine_rate"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(tokens: int = 8, dim: int = 6, seed: int = 0) -> Tensor:
    return make_start("uniform", tokens, dim, generator=generator(seed))


def orthogonal_rotation(dim: int, seed: int) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=generator(seed)))
    return q


@pytest.mark.parametrize("name", ["hybrid-star", "ngpt-lerp", "sink", "tangent"])
def test_particles_from_the_orthogonal_start_follow_the_reduction(name: str) -> None:
    path = simulate(make_start("orthogonal", 24, 24), NAMED[name], Attention(BETA), TIMES, step=0.1).table
    reduced = SymmetricFlow(NAMED[name], 24, BETA, depth=20.0).solve(TIMES).table
    for column in MEASURES:
        assert np.allclose(path[column], reduced[column], rtol=2e-5, atol=1e-6), column


@pytest.mark.parametrize("name", SIX)
def test_six_schemes_agree_with_the_reduction_to_a_millionth(name: str) -> None:
    start = make_start("orthogonal", 64, 80, radius=1.5)
    path = simulate(start, NAMED[name], Attention(BETA), TIMES, step=0.05).table
    reduced = SymmetricFlow(NAMED[name], 64, BETA, depth=20.0).solve(TIMES, radius=1.5).table
    assert np.abs(path["cosine"] - reduced["cosine"]).max() < 1e-6
    assert np.abs(path["radius"] - reduced["radius"]).max() < 1e-5


@pytest.mark.parametrize("name", SIX)
def test_initial_speeds_are_those_of_theorem_4_1(name: str) -> None:
    n, r0, alpha = 16, 1.7, 0.6
    plain, normed = math.exp(BETA) + n - 1, math.sqrt(math.exp(2 * BETA) + n - 1)
    expected = {
        "post": 2 / plain,
        "pre": 2 / (r0 * plain),
        "mix": 2 / plain,
        "peri": 2 / (r0 * normed),
        "ngpt": 2 * alpha / normed,
        "sqrt-scaling": 2 / plain,
    }[name]
    start = make_start("orthogonal", n, n, radius=r0)
    path = simulate(start, NAMED[name], Attention(BETA), [0.0, 0.1], alpha=lambda t: alpha)
    assert path.measures[0]["cosine_rate"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("name", ["post", "peri", "ngpt-lerp", "ln-scaling", "none", "hybrid"])
def test_rotation_and_permutation_of_the_start_rotate_and_permute_the_path(name: str, norm: str) -> None:
    start, order = uniform(), torch.randperm(8, generator=generator(3))
    rotation = orthogonal_rotation(6, 2)
    if norm == "layer":  # rotations that keep 1 = (1, ..., 1): coordinates may only be permuted
        rotation = torch.eye(6, dtype=torch.float64)[torch.randperm(6, generator=generator(4))]
    scheme = NAMED[name].with_norm(norm)
    moved, plain = (simulate(s, scheme, Attention(2.0), [0.5, 2.0], step=0.1) for s in (start[order] @ rotation, start))
    for after, before in zip(moved.states, plain.states, strict=True):
        assert torch.allclose(after, before[order] @ rotation, atol=1e-10)


@pytest.mark.parametrize("name", SIX)
def test_energy_never_rises_in_the_gradient_case(name: str) -> None:
    path = simulate(uniform(10, 4), NAMED[name], Attention(1.5), [0.1 * i for i in range(60)], step=0.05)
    energies = interaction_energy(torch.stack(path.states), 1.5)
    assert (energies.diff() < 0).all()


@pytest.mark.parametrize("name", ["post", "ngpt"])
def test_unit_norms_hold_over_ten_thousand_steps(name: str) -> None:
    """An error that adds up would be seen at 1e-17 a step, a tenth of a rounding."""
    motion, x, worst = Motion(NAMED[name], Attention(1.0), depth=10.0), uniform(3, 3), 0.0
    for _ in range(10_000):
        x = motion.layer(x, 0.0, 1e-4)
        worst = max(worst, float((x.norm(dim=-1) - 1).abs().max()))
    assert worst < 1e-13


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("layers", 1), ("midpoint", 2), ("rk4", 4)])
@pytest.mark.parametrize("name", ["post", "peri", "mix", "ln-scaling"])
def test_steps_tend_to_the_flow_at_their_order(solver: str, order: int, name: str) -> None:
    def end(step: float, how: str = solver) -> Tensor:
        return simulate(uniform(), NAMED[name], Attention(2.0), [4.0], solver=how, step=step).states[-1]

    exact = end(0.02, "rk4")
    coarse, fine = (float((end(step) - exact).norm()) for step in (0.25, 0.125))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.35)


def test_adaptive_solver_agrees_with_the_fixed_one() -> None:
    adaptive, fixed = (
        simulate(uniform(), NAMED["mix"], Attention(2.0), [1.0, 4.0], solver=s, step=0.02) for s in ("dopri5", "rk4")
    )
    assert torch.allclose(adaptive.states[-1], fixed.states[-1], atol=1e-7)


def test_layers_are_the_layers_of_the_scheme() -> None:
    """Three Pre-LN layers by hand."""
    start = uniform()
    x, attention = start, Attention(2.0)
    for _ in range(3):
        x = x + attention(x / x.norm(dim=-1, keepdim=True))
    path = simulate(start, NAMED["pre"], attention, [0.0, 3.0], solver="layers", step=1.0)
    assert torch.allclose(path.states[-1], x, atol=1e-13)


def test_measures_are_their_definitions() -> None:
    x, v = 2 * uniform() + 0.1, uniform(seed=1)
    theta = x / x.norm(dim=-1, keepdim=True)
    cosines = theta @ theta.T
    pairs = ~torch.eye(8, dtype=torch.bool)
    numbers = measure(x, v)
    assert numbers.cosine.item() == pytest.approx(cosines[pairs].mean().item())
    assert numbers.variance.item() == pytest.approx((theta - theta.mean(0)).square().sum(-1).mean().item())
    assert numbers.radius.item() == pytest.approx(x.norm(dim=-1).mean().item())
    h = 1e-6
    ahead, behind = ((x + s * h * v) / (x + s * h * v).norm(dim=-1, keepdim=True) for s in (1, -1))
    assert numbers.speed.item() == pytest.approx(((ahead - behind) / (2 * h)).norm(dim=-1).mean().item(), rel=1e-6)
    rate = ((ahead @ ahead.T)[pairs].mean() - (behind @ behind.T)[pairs].mean()) / (2 * h)
    assert numbers.cosine_rate.item() == pytest.approx(rate.item(), rel=1e-5)


def test_a_callback_streams_the_measures_as_they_come() -> None:
    heard: list[tuple[float, float]] = []
    path = simulate(
        uniform(), NAMED["pre"], Attention(1.0), [0.0, 0.5, 1.0], on_measures=lambda t, m: heard.append((t, m["cosine"]))
    )
    assert heard == list(zip(path.times, path.table["cosine"], strict=True))
    assert path.directions.shape == (3, 8, 6)
    assert torch.allclose(path.radii, torch.stack(path.states).norm(dim=-1))


def test_feedforward_layers_add_to_the_flow_and_follow_attention_in_a_layer() -> None:
    start, attention = uniform(), Attention(2.0)
    forward = FeedForward.random(6, 12, generator(5))
    x = start + attention(start)
    x = x + forward(x / x.norm(dim=-1, keepdim=True))
    layers = simulate(start, NAMED["pre"], attention, [1.0], solver="layers", step=1.0, feedforward=forward)
    assert torch.allclose(layers.states[-1], x)
    pre = Motion(NAMED["pre"], attention, 4.0, forward)
    r = length(start)
    assert torch.allclose(pre.velocity(start, 0.0), attention(start / r) + forward(start / r))
    hybrid = simulate(start, NAMED["hybrid"], attention, [0.0, 3.0], feedforward=forward)
    assert torch.allclose(hybrid.radii, torch.ones(2, 8, dtype=torch.float64))  # the norm after attention resets r


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("name", ["pre", "post", "hybrid", "ngpt-lerp"])
def test_layer_and_velocity_together_are_what_they_are_apart(name: str, forward: bool) -> None:
    motion = Motion(NAMED[name], Attention(2.0), 4.0, FeedForward.random(6, 12, generator(5)) if forward else None)
    x = motion.settle(uniform(), 1.0)
    moved, slope = motion.layer_and_velocity(x, 1.0, 0.5)
    assert torch.equal(moved, motion.layer(x, 1.0, 0.5))
    assert torch.allclose(slope, motion.velocity(x, 1.0), atol=1e-15)


def test_one_user_scheme_runs_everywhere_without_another_file_changed() -> None:
    own = Scheme("own", Slots(input="norm/sqrt(layer)", output="norm", step="alpha", carry="1 - alpha/4"), alpha="1/(1 + t)")
    path = simulate(make_start("orthogonal", 12, 12), own, Attention(3.0), TIMES, step=0.1).table
    reduced = SymmetricFlow(own, 12, 3.0, depth=20.0).solve(TIMES).table
    for column in MEASURES:
        assert np.allclose(path[column], reduced[column], rtol=1e-5, atol=1e-6), column
    assert len(gradient_by_depth(uniform(), own, Attention(3.0), 4)) == 4


@pytest.mark.parametrize("name", [*SIX, "qkv", "deepnorm"])
def test_gradients_by_depth_are_finite_differences(name: str) -> None:
    start, attention, h = uniform(5, 4), Attention(1.5, random_weights("kaiming", 4, 2, generator(1)), causal=True), 1e-6
    table = gradient_by_depth(start, NAMED[name], attention, 3, late=-1, early=1)
    motion = Motion(NAMED[name], attention, 3.0)
    first = motion.settle(start, 0.0)

    def final(x: Tensor) -> Tensor:
        for t in (1.0, 2.0):
            x = motion.layer(x, t)
        return x[-1] / x[-1].norm()

    state = motion.layer(first, 0.0)
    columns = []
    for i in range(4):
        bump = torch.zeros_like(state)
        bump[1, i] = h
        columns.append((final(state + bump) - final(state - bump)) / (2 * h))
    assert table["gradient"][1] == pytest.approx(torch.stack(columns).norm().item(), rel=1e-5)
    assert table["relative"][1] == pytest.approx(table["gradient"][1] * state[1].norm().item(), rel=1e-9)


def test_causal_gradients_vanish_backwards_and_probes_estimate_the_exact_norm() -> None:
    attention = Attention(1.5, causal=True)
    none = gradient_by_depth(uniform(), NAMED["pre"], attention, 3, late=0, early=5)
    assert (none["gradient"] == 0).all()
    exact = gradient_by_depth(uniform(), NAMED["pre"], attention, 3)
    rough = [gradient_by_depth(uniform(), NAMED["pre"], attention, 3, probes=2, generator=generator(s)) for s in range(300)]
    squares = np.mean([table["gradient"] ** 2 for table in rough], axis=0)
    assert np.allclose(squares, exact["gradient"] ** 2, rtol=0.1)


def test_schedules_are_plain_functions_of_time() -> None:
    assert set(SCHEDULES) == {"constant", "root", "linear", "mixed", "power"}
    assert [SCHEDULES[name](3.0) for name in ("constant", "root", "linear", "power")] == [1, 1 / 2, 1 / 4, 1 / 8]
    assert SCHEDULES["mixed"](0.0) == 1
    assert SCHEDULES["mixed"](math.pi / 4) == pytest.approx(1)  # where the sine vanishes it is the constant
    assert SCHEDULES["mixed"](math.pi / 8) == pytest.approx(SCHEDULES["linear"](math.pi / 8))


def test_starts_are_what_they_are_called() -> None:
    cone = make_start("cone", 200, 5, delta=0.02, generator=generator())
    assert (cone @ cone.T).min() >= 1 - 0.02 - 1e-12
    assert torch.allclose(cone.norm(dim=-1), torch.ones(200, dtype=torch.float64))
    gaussian = make_start("gaussian", 4000, 50, generator=generator())
    assert gaussian.square().sum(-1).mean() == pytest.approx(1.0, abs=0.02)
    assert torch.equal(make_start("orthogonal", 3, 5, radius=2.0), 2 * torch.eye(3, 5).double())


def test_starts_from_files_read_back(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    start = uniform()
    np.save(tmp_path / "a.npy", start.numpy())
    np.savetxt(tmp_path / "a.csv", start.numpy(), delimiter=",")
    save_file({"x": start}, tmp_path / "a.safetensors")
    for suffix in ("npy", "csv", "safetensors"):
        assert torch.allclose(read_start(tmp_path / f"a.{suffix}"), start)
    np.save(tmp_path / "zero.npy", np.array([[1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(InputError, match="token 1 of the start is zero"):
        read_start(tmp_path / "zero.npy")


def test_times_to_collapse_do_not_depend_on_when_one_looks() -> None:
    start, attention = make_start("orthogonal", 32, 32), Attention(BETA)
    often = simulate(start, NAMED["post"], attention, [0.2 * i for i in range(101)], step=0.1).milestones
    once = simulate(start, NAMED["post"], attention, [20.0], step=0.1).milestones
    reduced = SymmetricFlow(NAMED["post"], 32, BETA, depth=100.0).solve([100.0]).milestones
    for other in (once, reduced):
        assert other.half == pytest.approx(often.half, abs=1e-3)
        assert other.ninety == pytest.approx(often.ninety, abs=1e-3)
    assert often.half < often.ninety
    assert math.isnan(simulate(start, NAMED["post"], attention, [1.0]).milestones.half)


@pytest.mark.parametrize("solver", ["rk4", "dopri5"])
def test_a_stage_that_normalises_the_stream_begins_on_the_sphere(solver: str) -> None:
    scheme = Scheme("late", NAMED["pre"].attention, until=0.5, then=NAMED["post"])
    start = make_start("orthogonal", 8, 8)
    whole = simulate(start, scheme, Attention(1.0), [4.0, 5.0, 8.0], solver=solver, step=0.1)
    before = simulate(start, NAMED["pre"], Attention(1.0), [4.0], solver="rk4", step=0.02).states[-1]
    after = simulate(before, NAMED["post"], Attention(1.0), [1.0, 4.0], solver="rk4", step=0.02)
    assert torch.allclose(whole.states[1], after.states[0], atol=1e-5)
    reduced = SymmetricFlow(scheme, 8, 1.0, depth=8.0).solve([5.0, 8.0]).table
    assert np.allclose(whole.table["cosine"][1:], reduced["cosine"], atol=1e-5)
    assert np.allclose(whole.table["radius"][1:], reduced["radius"])


@pytest.mark.parametrize("stride", [1.0, 1e-4])
@pytest.mark.parametrize("first", ["pre", "none", "peri"])
def test_speeds_of_layers_are_the_angles_between_saved_states(first: str, stride: float) -> None:
    """Also in the layer that changes from a free to a normalised stream: tan of the angle is h|P_θ A|/(1 + h⟨θ, A⟩)."""
    scheme, attention = Scheme("late", NAMED[first].attention, until=0.5, then=NAMED["post"]), Attention(1.0)
    start, times = make_start("uniform", 8, 8, generator=generator()), [stride * i for i in range(9)]
    path = simulate(start, scheme, attention, times, solver="layers", step=stride)
    for layer in range(4, 8):
        theta, after = path.states[layer], path.states[layer + 1]
        assert torch.allclose(theta.norm(dim=-1), torch.ones(8, dtype=torch.float64))
        A = attention(theta)
        inner = (A * theta).sum(-1)
        turned = torch.atan2((after - (after * theta).sum(-1, keepdim=True) * theta).norm(dim=-1), (after * theta).sum(-1))
        speed = (turned.tan() * (1 + stride * inner) / stride).mean()
        assert path.measures[layer]["speed"] == pytest.approx(float(speed), rel=1e-6)
    assert stride < 1 or first != "pre" or path.measures[4]["speed"] == pytest.approx(0.405, abs=5e-4)
    by_hand = path.states[4] + attention(path.states[4])
    if stride == 1:
        assert torch.allclose(path.states[5], by_hand / by_hand.norm(dim=-1, keepdim=True), atol=1e-13)


@pytest.mark.parametrize("solver", ["rk4", "layers", "euler"])
def test_a_run_that_ends_at_a_change_of_stage_ends_where_the_next_one_begins(solver: str) -> None:
    scheme = Scheme("late", NAMED["pre"].attention, until=0.5, then=NAMED["post"])
    step = 1.0 if solver == "layers" else 0.1
    short, whole = (
        simulate(uniform(), scheme, Attention(1.0), times, solver=solver, step=step, depth=8.0) for times in ([4.0], [4.0, 8.0])
    )
    assert short.measures[0] == pytest.approx(whole.measures[0], rel=1e-12)
    assert torch.allclose(short.radii, torch.ones(1, 8, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMED)
def test_a_start_is_normalised_where_any_sublayer_normalises_the_stream(name: str) -> None:
    forward, start = FeedForward.random(6, 12, generator(5)), 1.7 * uniform()
    whole = simulate(start, NAMED[name], Attention(1.0), [0.0, 1.0], solver="layers", step=1.0, feedforward=forward)
    slots = (NAMED[name].attention, NAMED[name].feedforward)
    expected = 1.0 if "norm" in (slots[0].stream, slots[1].stream) else 1.7
    assert torch.allclose(whole.radii[0], torch.full((8,), expected, dtype=torch.float64))


def test_later_stages_have_their_own_norm() -> None:
    scheme = Scheme("late", NAMED["pre"].attention, until=0.5, then=NAMED["peri"].with_norm("layer"))
    whole = simulate(uniform(), scheme, Attention(1.0), [4.0, 8.0], step=0.1)
    after = simulate(whole.states[0], NAMED["peri"].with_norm("layer"), Attention(1.0), [4.0], step=0.1)
    assert torch.allclose(whole.states[1], after.states[0], atol=1e-12)


def test_a_state_that_leaves_the_finite_numbers_stops_the_run_and_keeps_what_came_before() -> None:
    growing = Scheme("growing", Slots(carry="1e60"))
    path = simulate(uniform(), growing, Attention(0.0), [0.0, 1.0, 2.0, 9.0], solver="layers", step=1.0)
    assert path.times == [0.0, 1.0, 2.0]
    assert "scheme 'growing' became non-finite (NaN/Inf) at time 4, token 0" in path.stopped


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_start("uniform", 0, 4), "tokens and dim are at least 1, not 0 and 4"),
        (lambda: make_start("orthogonal", 5, 4), "5 orthogonal tokens need at least 5 dimensions"),
        (lambda: make_start("orthagonal", 2, 4), "did you mean 'orthogonal'"),
        (lambda: make_start("cone", 2, 4, delta=0.0), "delta"),
        (lambda: make_start("uniform", 2, 4, radius=float("nan")), "radius"),
        (lambda: read_start(Path("nowhere.npy")), "no start file 'nowhere.npy'"),
        (lambda: read_start(Path(__file__)), "ends in .npy, .csv or .safetensors"),
        (lambda: simulate(torch.zeros(2, 3).double(), NAMED["pre"], Attention(1.0), [1.0]), "token 0 of the start is zero"),
        (lambda: simulate(uniform(), NAMED["pre"], Attention(1.0), [2.0, 1.0]), "times go forwards; 2, 1 do not"),
        (lambda: simulate(uniform(), NAMED["pre"], Attention(1.0), [-1.0]), "not negative"),
        (lambda: simulate(uniform(), NAMED["pre"], Attention(1.0), []), "at least one time"),
        (lambda: simulate(uniform(), NAMED["pre"], Attention(1.0), [1.0], solver="rk5"), "unknown solver 'rk5'"),
        (lambda: simulate(uniform(), NAMED["pre"], Attention(1.0), [1.0], step=0.0), "step is a positive number"),
        (lambda: simulate(uniform(), NAMED["pre"], Attention(1.0), [1.5], solver="layers", step=1.0), "multiple of the step"),
        (lambda: Attention(math.nan), "beta is a finite number"),
        (lambda: SymmetricFlow(NAMED["pre"], 1, 1.0, 1.0), "at least 2 tokens"),
        (lambda: gradient_by_depth(uniform(), NAMED["pre"], Attention(1.0), 0), "layers are at least 1"),
        (lambda: gradient_by_depth(uniform(), NAMED["pre"], Attention(1.0), 2, late=9), "between -8 and 7"),
        (lambda: random_weights("kaiming", 6, 4, generator()), "cannot be shared among 4 heads"),
        (lambda: FeedForward(torch.full((2, 2), torch.nan), torch.ones(2, 2)), "W_in has an entry that is not a finite"),
    ],
)
def test_bad_input_is_refused_with_a_reason(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)


def in_extended_precision(scheme: Scheme, x: npt.NDArray[np.longdouble], layers: int) -> npt.NDArray[np.longdouble]:
    """Layers of attention with identity weights as the slots define them, in numbers from 1e-4932 to 1e4932."""

    def norm(x: npt.NDArray[np.longdouble]) -> npt.NDArray[np.longdouble]:
        return x / np.sqrt((x**2).sum(-1, keepdims=True))

    maps = {"tanh": np.tanh, "erf": np.vectorize(math.erf, otypes=[np.longdouble])}
    for t in range(layers):
        stage = scheme.at(t, layers)
        slots, values = stage.attention, stage.place(float(t), layers).values
        step, carry = (float(formula(values)) for formula in slots.formulas)
        if stage.on_sphere(feedforward=False) and (t == 0 or stage is not scheme.at(t - 1, layers)):
            x = norm(x)
        width = np.sqrt(np.longdouble(x.shape[-1]))
        entered = maps[stage.norm](0.5 * width * x) / width if stage.pointwise else norm(x)
        read = entered * float(slots.input_factor(values)) if slots.reads_norm else x
        q, k, v = (norm(read) if letter in slots.heads.replace("none", "") else read for letter in "qkv")
        scores = np.longdouble(BETA) * (q @ k.T)
        cap, sink = slots.score_rule.cap, slots.score_rule.sink
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        most = scores.max(-1, keepdims=True)
        weights = np.exp(scores - most)
        y = weights / (weights.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - most))) @ v
        y = norm(y) if slots.inner == "norm" else y
        y = y / 2 if slots.gate == "sigmoid" else y
        y = y - (y * x).sum(-1, keepdims=True) * x / (x**2).sum(-1, keepdims=True) if slots.output == "tangent" else y
        x = carry * x + step * (norm(y) if slots.output == "norm" else y)
        x = norm(x) if slots.stream == "norm" else x
    return x


@pytest.mark.skipif(np.finfo(np.longdouble).maxexp < 16000, reason="numpy has no extended precision here")
@pytest.mark.parametrize(
    ("dtype", "radius"),
    [(torch.float32, r) for r in (1e-38, 1e-25, 1e13, 2e19, 3e38)]
    + [(torch.float64, r) for r in (1e-300, 1e-170, 1e150, 1e200, 1e300, 1.7e308)],
)
@pytest.mark.parametrize("name", NAMED)
def test_any_representable_state_gives_the_right_numbers_or_stops(name: str, dtype: torch.dtype, radius: float) -> None:
    start, layers = (uniform(4, 5).double() * radius).to(dtype), 3
    path = simulate(start, NAMED[name], Attention(BETA), range(layers + 1), solver="layers")
    near = 1e-4 if dtype == torch.float32 else 1e-10
    for t, row in zip(path.times, path.measures, strict=True):
        x = start.numpy().astype(np.longdouble)
        x = in_extended_precision(NAMED[name], x, layers) if t == layers else x
        if t in (0, layers):
            norms = np.sqrt((x**2).sum(-1))
            total = ((x / norms[:, None]).sum(0) ** 2).sum()
            assert row["cosine"] == pytest.approx(float((total - 4) / 12), abs=near)
        assert all(map(math.isfinite, row.values()))
    if len(path.times) <= layers:
        assert f"scheme '{name}'" in path.stopped
        assert "time" in path.stopped
        assert "token" in path.stopped


def test_a_stream_that_doubles_stays_right_until_it_overflows() -> None:
    """Carry = 2: after 64 layers squares overflow in float32, after 127 the numbers themselves."""
    scheme = Scheme("doubling", Slots(input="norm", carry=2.0))
    narrow = simulate(uniform().float(), scheme, Attention(BETA), [float(t) for t in range(140)], solver="layers")
    wide = simulate(uniform().float().double(), scheme, Attention(BETA), [float(t) for t in range(140)], solver="layers")
    count = len(narrow.times)
    assert 120 < count < 130
    assert "scheme 'doubling' became non-finite (NaN/Inf) at time" in narrow.stopped
    assert "token" in narrow.stopped
    assert not wide.stopped
    assert np.allclose(narrow.table["cosine"], wide.table["cosine"][:count], atol=1e-5)
    assert np.allclose(narrow.table["radius"], wide.table["radius"][:count], rtol=1e-5)


def test_a_token_that_vanishes_stops_the_run() -> None:
    scheme = Scheme("fading", Slots(input="norm", step=0.0, carry=0.5))
    path = simulate(uniform().float(), scheme, Attention(BETA), [float(t) for t in range(160)], solver="layers")
    assert "scheme 'fading' underflowed to zero at time" in path.stopped
    assert all(math.isfinite(value) for row in path.measures for value in row.values())


def test_logits_that_overflow_stop_the_run() -> None:
    """Fused attention returns 0 for a token whose logits are all −∞."""
    scheme = NAMED["none"]
    path = simulate(uniform(4, 5) * 1e200, scheme, Attention(-BETA, causal=True), [0.0, 1.0])
    assert path.times == []
    assert "scheme 'none'" in path.stopped
    assert "token 0" in path.stopped


@pytest.mark.parametrize("solver", ["dopri5", "dopri8"])
def test_adaptive_solvers_locate_collapse_between_the_times(solver: str) -> None:
    start, attention = make_start("orthogonal", 8, 8), Attention(1.0)
    fine = simulate(start, NAMED["post"], attention, [5.0], step=0.01).milestones
    rough = simulate(start, NAMED["post"], attention, [5.0], solver=solver).milestones
    assert fine.ninety < 5
    assert rough.half == pytest.approx(fine.half, abs=1e-4)
    assert rough.ninety == pytest.approx(fine.ninety, abs=1e-4)
