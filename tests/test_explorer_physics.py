"""The simulation in the page, in a real browser, beside the Python library: the same states to 1e-9, from the same seeds."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from helpers.browser import Tab
from normscope.core import Attention, HeadWeights
from normscope.core.seeds import stream_seed
from normscope.dynamics import SCHEDULES, FeedForward, SymmetricFlow, make_start, random_weights, simulate
from normscope.dynamics.measures import MEASURES
from normscope.dynamics.symmetric import no_reduction
from normscope.dynamics.weights import random_gate
from normscope.errors import InputError
from normscope.experiments.simulate import Simulate
from normscope.explorer.page import FOLDERS
from normscope.report.bundle import bundle
from normscope.schemes import NAMED, Scheme, find_scheme, scheme_from, scheme_values

Numbers = npt.NDArray[np.float64]
MODULES = ("simulation", "symmetric", "starts", "norms", "clusters", "measures")
N, D, HEADS, HIDDEN, TIMES = 7, 6, 2, 16, [0.0, 1.0, 2.0, 3.0]
IDENTITY = HeadWeights()
SOLVERS = {"rk4": 1.0, "midpoint": 1.0, "euler": 0.5, "layers": 1.0}

# States and measures at every frame of every case, or what the page says of it.
RUN = """text => JSON.stringify(JSON.parse(text).map(settings => {
  try {
    const run = new simulation.Simulation(settings);
    run.advance();
    const [stop] = run.take().filter(news => "text" in news), [only] = run.runs;
    const measures = Object.fromEntries(["times", "cosine", "variance", "radius", "speed", "cosine_rate"].map(name =>
      [name, [...only[{radius: "meanRadius", cosine_rate: "cosineRate"}[name] ?? name].slice(0, only.length)]]));
    return {...measures, states: measures.times.map((_, frame) => [...run.states(0, frame)]), stopped: stop?.text ?? ""};
  } catch (error) {
    if (error.name !== "InputError") throw error;
    return {refused: error.message};
  }
}))"""


@pytest.fixture(scope="module")
def tab(tab: Tab) -> Iterator[Tab]:
    for module in MODULES:
        tab.page.evaluate(bundle(f"{module}.js", FOLDERS, module))
    yield tab
    assert tab.errors == []


@dataclass(frozen=True)
class Case:
    """A simulation that the page and the library both run."""

    scheme: Scheme
    solver: str = "rk4"
    norm: str | None = None
    weights: HeadWeights = IDENTITY
    causal: bool = False
    feedforward: FeedForward | None = None
    alpha: str | None = None
    beta: float = 1.3
    dim: int = D
    step: float | None = None

    @property
    def start(self) -> Tensor:
        return make_start("gaussian", N, self.dim, generator=torch.Generator().manual_seed(3))

    @property
    def settings(self) -> dict[str, Any]:
        """What the page is given."""
        layer = self.feedforward
        return {
            "schemes": [scheme_values(self.scheme)],
            "tokens": N,
            "dim": self.dim,
            "beta": self.beta,
            "causal": self.causal,
            "weights": {name: None if w is None else w.tolist() for name, w in vars(self.weights).items()},
            "feedforward": None if layer is None else {"W_in": layer.W_in.tolist(), "W_out": layer.W_out.tolist()},
            "start": {"states": self.start.tolist()},
            "solver": self.solver,
            "step": self.step or SOLVERS[self.solver],
            "time": TIMES[-1],
            "every": TIMES[1],
            "norm": self.norm,
            "alpha": self.alpha,
        }

    def golden(self) -> dict[str, Any]:
        """What the library computes."""
        scheme = self.scheme if self.norm is None else self.scheme.with_norm(self.norm)
        alpha = None if self.alpha is None else SCHEDULES[self.alpha]
        path = simulate(
            self.start, scheme, Attention(self.beta, self.weights, self.causal), TIMES, solver=self.solver,
            step=self.step or SOLVERS[self.solver], feedforward=self.feedforward, alpha=alpha,
        )  # fmt: skip
        rows = {name: [row[name] for row in path.measures] for name in MEASURES}
        return {**rows, "times": path.times, "states": [x.flatten().tolist() for x in path.states], "stopped": path.stopped}


def drawn_weights(gate: bool = True) -> HeadWeights:
    generator = torch.Generator().manual_seed(1)
    weights = random_weights("kaiming", D, HEADS, generator)
    return replace(weights, W_G=random_gate("kaiming", D, HEADS, generator)) if gate else weights


def drawn_feedforward() -> FeedForward:
    return FeedForward.random(D, HIDDEN, torch.Generator().manual_seed(2))


def assert_same(page: dict[str, Any], library: dict[str, Any], case: object) -> None:
    assert page.get("refused") is None, (case, page)
    assert page["stopped"] == library["stopped"], case
    for name in ("times", "states", *MEASURES):
        ours, theirs = np.asarray(page[name]), np.asarray(library[name])
        assert ours.shape == theirs.shape, (name, case)
        if ours.size:
            scale = max(1.0, float(np.abs(theirs).max()))
            assert float(np.abs(ours - theirs).max()) <= 1e-9 * scale, (name, case)


def run(tab: Tab, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page makes of each; as text, since the browser's driver takes long for many numbers."""
    pages: list[dict[str, Any]] = json.loads(tab.page.evaluate(RUN, json.dumps(settings)))
    return pages


def compare(tab: Tab, cases: list[Case]) -> None:
    for case, page in zip(cases, run(tab, [case.settings for case in cases]), strict=True):
        assert_same(page, case.golden(), (case.scheme.name, case.solver, case.norm))


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_named_scheme_moves_as_in_the_library(tab: Tab, solver: str) -> None:
    """With identity weights, and with several heads, a gate, a causal mask and a feed-forward layer; RMSNorm and LayerNorm."""
    full = {"weights": drawn_weights(), "causal": True, "feedforward": drawn_feedforward()}
    given: list[dict[str, Any]] = [{}, full] if solver in ("rk4", "layers") else [full]
    compare(tab, [Case(s, solver, norm, **more) for s in NAMED.values() for norm in (None, "layer") for more in given])


def test_slots_inside_attention_move_as_in_the_library(tab: Tab) -> None:
    names = ["peri+softcap(0.7)", "pre+sink(1.5)", "ngpt+temperature(log(n))", "post+gate+inner", "pre+qk+gate"]
    names += ["none+sink+softcap(2)+temperature(1+0.25*n)", "post+qkv+inner+sink"]
    schemes = [find_scheme(name) for name in names]
    compare(tab, [Case(s, solver, w and "layer", weights, causal)
                  for s in schemes for solver in ("rk4", "layers") for causal in (False, True)
                  for w, weights in ((None, IDENTITY), ("layer", drawn_weights()))])  # fmt: skip


def test_pointwise_norms_stages_and_schedules_move_as_in_the_library(tab: Tab) -> None:
    cases = [
        Case(replace(NAMED[name], norm=kind), solver, None, drawn_weights())
        for name, solver in (("pre", "rk4"), ("peri", "rk4"), ("post", "layers"), ("sub-ln", "rk4"), ("tangent", "rk4"))
        for kind in ("tanh", "erf")
    ]  # fmt: skip
    three = replace(
        NAMED["mix"], name="three", until=0.3, then=replace(NAMED["pre"], name="b", until="0.7", then=NAMED["ngpt"])
    )
    cases += [Case(three, solver, None, weights) for solver in SOLVERS for weights in (IDENTITY, drawn_weights())]
    cases += [Case(NAMED["ngpt"], solver, alpha=alpha) for solver in SOLVERS for alpha in SCHEDULES]
    cases += [Case(NAMED["pre"], dim=dim) for dim in (1, 2, 3, 4, 9)]
    compare(tab, cases)


def random_scheme(choose: random.Random, name: str) -> dict[str, Any]:
    formulas = ["1", "0.5", "1/sqrt(layer)", "alpha", "exp(-t/9)", "1 + t/depth", "depth**(1/4)", "2 - alpha", "cos(t)"]

    def slots(attention: bool) -> dict[str, Any]:
        values = {
            "input": choose.choice(["none", "norm", "norm/sqrt(layer)", "2*norm"]),
            "inner": choose.choice(["none", "none", "norm"]),
            "output": choose.choice(["none", "norm", "tangent"]),
            "step": choose.choice(formulas),
            "carry": choose.choice(formulas),
            "stream": choose.choice(["none", "norm"]),
        }
        if attention:
            values["heads"] = choose.choice(["none", "q", "qk", "qkv", "v"])
            values["gate"] = choose.choice(["none", "sigmoid"])
            values["scores"] = choose.choice(
                ["softmax", "sink", "softcap(2)", "temperature(sqrt(n))", "softcap(1) + sink(0.5)"]
            )
        return values

    return {
        "name": name,
        "norm": choose.choice(["rms", "layer", "tanh", "erf"]),
        "alpha": choose.choice(["1", "0.3", "1/layer"]),
        "attention": slots(True),
        "feedforward": slots(False),
    }


def test_any_slots_move_as_in_the_library_or_stop_and_are_refused_in_its_words(tab: Tab) -> None:
    choose = random.Random(0)
    cases: list[Case] = []
    for number in range(60):
        first, then = random_scheme(choose, f"random-{number}"), random_scheme(choose, "then")
        scheme = {**first, "until": 0.5, "then": then} if number % 3 == 0 else first
        cases.append(
            Case(
                scheme_from(scheme), choose.choice(list(SOLVERS)), None, choose.choice([IDENTITY, drawn_weights()]),
                choose.random() < 0.5, choose.choice([None, drawn_feedforward()]),
            )
        )  # fmt: skip
    reached = 0
    for case, page in zip(cases, run(tab, [case.settings for case in cases]), strict=True):
        try:
            case.scheme.check(TIMES[-1], TIMES)
            golden = case.golden()
        except InputError as error:
            expected = str(error).replace("simulate with layers=True applies whole layers", "choose layers with step 1")
            assert page["refused"] == expected, case
        else:
            reached += 1
            assert_same(page, golden, case)
    assert reached > 30


def test_what_is_not_finite_stops_a_scheme_with_the_librarys_sentence(tab: Tab) -> None:
    slots = [{"carry": "1e200"}, {"carry": "1e-200", "step": "0"}, {"step": "1e299*1e9"}, {"carry": "1 - 1e40*t"}]
    cases = [
        Case(scheme_from({"name": "mine", "attention": given, "feedforward": given}), solver)
        for given in slots for solver in ("layers", "euler")
    ]  # fmt: skip
    goldens = [case.golden() for case in cases]
    pages = run(tab, [case.settings for case in cases])
    assert [page["stopped"] for page in pages] == [golden["stopped"] for golden in goldens]
    assert [page["times"] for page in pages] == [golden["times"] for golden in goldens]
    assert len({golden["stopped"] for golden in goldens}) >= 5


def test_with_a_causal_mask_the_page_names_the_token_that_broke(tab: Tab) -> None:
    """A narrow feed-forward layer is silent for one token, whose norm is then NaN; PyTorch's attention spreads it to all."""
    narrow, silent = FeedForward.random(D, 5, torch.Generator().manual_seed(2)), []

    def hidden(layer: FeedForward, x: Tensor, mixing: Any) -> Tensor:
        silent.extend(((x @ layer.W_in) <= 0).all(-1).nonzero().flatten().tolist())
        return FeedForward(layer.W_in, layer.W_out)(x, mixing)

    watched = type("Watched", (FeedForward,), {"__call__": hidden})(narrow.W_in, narrow.W_out)
    case = Case(NAMED["ngpt"], "midpoint", "layer", drawn_weights(), True, watched, step=0.25)
    assert case.golden()["stopped"] == "scheme 'ngpt' became non-finite (NaN/Inf) at time 1.5, token 0"
    (page,) = run(tab, [case.settings])
    assert page["stopped"] == f"scheme 'ngpt' became non-finite (NaN/Inf) at time 1.5, token {silent[0]}"


def test_the_symmetric_reduction_has_the_librarys_curves(tab: Tab) -> None:
    script = """([scheme, alpha, cosine, radius, times]) => new symmetric.SymmetricFlow(
      new simulation.Simulation({schemes: [scheme], tokens: 2, solver: "layers", time: 1}).runs[0].scheme,
      12, 3, times.at(-1), alpha ? t => 1 / Math.sqrt(t + 1) : null).solve(times, {cosine, radius})"""
    times = [0.0, 0.5, 4.0]
    names = [
        *(name for name, scheme in NAMED.items() if not no_reduction(scheme)),
        "none+softcap(2)+sink",
        "pre+temperature(log(n))",
    ]
    cases: list[tuple[Scheme, Any, float, float]] = [(find_scheme(name), None, 0.4, 2.5) for name in names]
    cases += [(scheme, SCHEDULES["root"], 0.0, 1.0) for scheme in NAMED.values() if scheme.learns_alpha]
    for scheme, alpha, cosine, radius in cases:
        path = SymmetricFlow(scheme, 12, 3.0, times[-1], alpha).solve(times, cosine=cosine, radius=radius)
        page = tab.page.evaluate(script, [scheme_values(scheme), alpha is not None, cosine, radius, times])
        for measure in MEASURES:
            expected = [row[measure] for row in path.measures]
            np.testing.assert_allclose(page[measure], expected, rtol=1e-9, atol=1e-9, err_msg=f"{scheme.name} {measure}")
        assert page["stopped"] == path.stopped


def test_theory_stands_beside_a_run_of_its_start_and_says_why_where_it_does_not(tab: Tab) -> None:
    script = """settings => {
      const run = new simulation.Simulation(settings);
      run.advance();
      const curves = settings.schemes.map((_, scheme) => simulation.theoryCurve(settings, scheme));
      return [curves.map(({cosine, speed, radius, ...rest}) =>
          ({...rest, cosine: [...cosine ?? []], speed: [...speed ?? []], radius: [...radius ?? []]})),
        run.runs.map(({cosine, speed, meanRadius}) => ({cosine: [...cosine], speed: [...speed], radius: [...meanRadius]}))];
    }"""
    schemes = [scheme_values(NAMED[name]) for name in ("post", "peri", "derf")]
    settings = {"schemes": schemes, "tokens": 9, "dim": 9, "beta": 2, "time": 4, "step": 0.01, "every": 1}
    curves, runs = tab.page.evaluate(script, {**settings, "start": {"kind": "orthogonal", "radius": 1.0}})
    for curve, run in zip(curves[:2], runs[:2], strict=True):
        assert curve["note"] == ""
        for name in ("cosine", "speed", "radius"):
            np.testing.assert_allclose(curve[name], run[name], atol=1e-7)
    assert "acts on every component alone" in curves[2]["text"]
    curves, runs = tab.page.evaluate(script, {**settings, "start": {"kind": "uniform"}})
    assert "one cosine, the mean of this start" in curves[0]["note"]
    assert curves[0]["cosine"][0] == pytest.approx(runs[0]["cosine"][0])
    curves, _ = tab.page.evaluate(script, {**settings, "causal": True})
    assert "identity weights without causal mask" in curves[0]["text"]


def test_seeds_give_the_numbers_of_pytorch(tab: Tab) -> None:
    """Starts, weights and the gate's own stream; few numbers, blocks of sixteen, and a rest."""
    script = """([kind, tokens, dim, seed, heads]) => {
      const generator = new starts.Generator(seed);
      const start = starts.makeStart({kind, delta: 0.2, radius: 1.5}, tokens, dim, generator);
      const weights = starts.randomWeights("kaiming", dim, heads, generator);
      const flat = value => ArrayBuffer.isView(value) ? [...value] : value.map(flat);
      const drawn = {...weights, ...starts.randomFeedForward(dim, 5, generator),
        W_G: starts.randomGate("gaussian", dim, heads, seed)};
      return {start: [...start], ...Object.fromEntries(Object.entries(drawn).map(([name, value]) => [name, flat(value)]))};
    }"""
    for kind, tokens, dim, seed, heads in (
        ("uniform", 64, 3, 0, 1), ("gaussian", 5, 3, 7, 3), ("cone", 11, 6, 2**32 - 1, 2), ("orthogonal", 4, 4, 5, 1),
    ):  # fmt: skip
        page = tab.page.evaluate(script, [kind, tokens, dim, seed, heads])
        generator = torch.Generator().manual_seed(seed)
        start = make_start(kind, tokens, dim, delta=0.2, radius=1.5, generator=generator)
        expected = {
            "start": start.flatten(),
            **{k: w for k, w in vars(random_weights("kaiming", dim, heads, generator)).items() if w is not None},
        }
        expected |= vars(FeedForward.random(dim, 5, generator))
        expected["W_G"] = random_gate("gaussian", dim, heads, torch.Generator().manual_seed(stream_seed(seed, "gate")))
        for name, value in expected.items():
            np.testing.assert_allclose(page[name], value.numpy(), rtol=1e-13, atol=1e-15, err_msg=name)


def test_a_run_of_the_page_is_that_of_the_command(tab: Tab) -> None:
    """The same settings and seed give the states that ``normscope simulate`` saves."""
    settings = {"tokens": 12, "dim": 6, "heads": 3, "weights": "kaiming", "seed": 11, "beta": 2.0, "time": 2.0, "step": 0.1}
    result = Simulate(
        scheme="pre,gated",
        start="uniform",
        times=(0.0, 1.0, 2.0),
        feedforward=8,
        causal=True,
        samples=3,
        save_states=True,
        **settings,
    ).run()
    page = tab.page.evaluate(
        """settings => {
          const run = new simulation.Simulation(settings);
          run.advance();
          return run.runs.map((_, scheme) => [...run.states(scheme, 2)]);
        }""",
        {**settings, "schemes": [scheme_values(NAMED[name]) for name in ("pre", "gated")], "feedforward": 8, "causal": True,
         "start": {"kind": "uniform"}, "every": 1.0},
    )  # fmt: skip
    for name, states in zip(("pre", "gated"), page, strict=True):
        np.testing.assert_allclose(states, result.objects["states"][f"{name}/t=2"].flatten(), atol=1e-9)


def test_erf_is_exact_to_a_few_units_in_the_last_place(tab: Tab) -> None:
    x = np.concatenate([np.linspace(-7, 7, 4001), 10.0 ** np.arange(-300, 1)])
    page = np.asarray(tab.page.evaluate("x => x.map(norms.erf)", x.tolist()))
    expected = np.asarray([math.erf(value) for value in x])
    assert float(np.abs(page - expected).max()) <= 1e-15
    assert float((np.abs(page - expected) / np.maximum(np.abs(expected), 1e-300)).max()) <= 2e-15
    assert tab.run("[norms.erf(Infinity), norms.erf(-Infinity), String(norms.erf(NaN))]") == [1, -1, "NaN"]


def test_norms_are_right_where_squares_are_not(tab: Tab) -> None:
    script = """() => [1e-320, 1e-200, 1, 1e200, 1.7e308].flatMap(size => ["rms", "layer"].map(kind => {
      const x = Float64Array.of(size, -0.5 * size, 0.25 * size);
      norms.theoryNorm(kind).apply(x, 1, 3, x);
      return [...x];
    }))"""
    rows = tab.page.evaluate(f"({script})()")
    direction = np.asarray([1, -0.5, 0.25])
    centred = direction - direction.mean()
    for i, row in enumerate(rows):
        seen = centred if i % 2 else direction
        np.testing.assert_allclose(row, seen / np.linalg.norm(seen), rtol=1e-3 if i < 2 else 1e-14, atol=1e-15)


def test_clusters_are_the_connected_groups_of_near_directions(tab: Tab) -> None:
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(9, 5))
    x = np.concatenate(
        [centres[generator.integers(0, 9, 80)] + 0.03 * generator.normal(size=(80, 5)), generator.normal(size=(20, 5))]
    )
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    script = """x => {
      const groups = new clusters.Clusters(x.length, x[0].length), flat = Float64Array.from(x.flat());
      return [groups.find(flat), [...groups.labels], clusters.TOGETHER, [...groups.centres(flat)]];
    }"""
    count, labels, threshold, centre = tab.page.evaluate(script, x.tolist())
    expected, groups = connected_components(csr_array(x @ x.T > threshold), directed=False)
    assert 20 < expected < 100
    assert count == expected
    assert len({*zip(labels, groups, strict=True)}) == expected
    sizes = np.bincount(labels)
    assert (np.diff(sizes) <= 0).all()
    largest = x[np.asarray(labels) == 0].sum(0)
    np.testing.assert_allclose(centre[:5], largest / np.linalg.norm(largest), atol=1e-12)


def test_frames_show_the_run_and_do_not_change_it(tab: Tab) -> None:
    """The share shown, points on three axes, moved tokens, and states that are computed again where they were not kept."""
    script = """given => {
      const make = (more, between) => {
        const run = new simulation.Simulation({...given, ...more});
        run.between = between;
        while (!run.advance(0)) if (run.runs[0].length > 5) run.states(0, 5);  // in the middle of a run
        return run;
      };
      const fine = make({every: 0.1}, 3), coarse = make({every: 1}, 1), small = make({dim: 3}, 1);
      const layered = {solver: "layers", step: 1, time: 8, every: 1, feedforward: "random", schemes: [given.hybrid]};
      const moved = make({start: {kind: "uniform", moved: {2: [0, 3, 0]}}}, 1);
      const [frames] = fine.take(), [flat] = small.take(), [by] = moved.take();
      return {again: [...fine.states(0, 20)], straight: [...coarse.states(0, 2)], last: [...fine.states(0, 30)],
        end: [...coarse.states(0, 3)], points: [...frames.points.slice(0, 3 * given.tokens)], shown: [...frames.shown],
        axes: [...fine.axes], first: [...fine.states(0, 0)], flat: [...flat.shown], token: [...by.points.slice(6, 9)],
        count: frames.times.length, layers: [...make(layered, 5).states(0, 8)],
        whole: [...make(layered, 1).states(0, 8)]};
    }"""
    given = {"schemes": [scheme_values(NAMED["post"])], "tokens": 10, "dim": 8, "time": 3, "step": 0.1, "beta": 3}
    page = tab.page.evaluate(script, {**given, "hybrid": scheme_values(NAMED["hybrid"])})
    np.testing.assert_allclose(page["layers"], page["whole"], atol=1e-12)  # attention normalises the stream, F leaves it free
    np.testing.assert_allclose(page["again"], page["straight"], atol=1e-12)
    np.testing.assert_allclose(page["last"], page["end"], atol=1e-12)
    assert page["count"] == 31
    axes, theta = np.reshape(page["axes"], (3, 8)), np.reshape(page["first"], (10, 8))
    np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-9)
    np.testing.assert_allclose(np.reshape(page["points"], (10, 3)), theta @ axes.T, atol=1e-6)
    assert page["shown"][0] == pytest.approx(((theta @ axes.T) ** 2).sum() / 10)
    mean = theta.mean(0) / np.linalg.norm(theta.mean(0))
    np.testing.assert_allclose(axes[0], mean, atol=1e-9)
    rest = theta - np.outer(theta @ mean, mean)
    np.testing.assert_allclose(np.abs(axes[1:]), np.abs(np.linalg.svd(rest)[2][:2]), atol=1e-3)
    np.testing.assert_allclose(page["flat"], 1, atol=1e-12)
    np.testing.assert_allclose(page["token"], [0, 1, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tokens": 5000}, "tokens is a whole number from 1 to 1024, not 5000"),
        ({"dim": 2.5}, "dim is a whole number from 1 to 512, not 2.5"),
        ({"beta": None}, "beta is a finite number, not None"),
        ({"step": 0}, "step is a positive number, not 0"),
        ({"time": 1e9}, "more than 1000000 steps"),
        ({"step": 1e-3, "every": 1e-4}, "more than 2000 frames"),
        ({"solver": "rk5"}, "did you mean 'rk4'?"),
        ({"solver": "layers", "time": 2.5}, "with layers the last time is a multiple of the step 1; 2.5 is not"),
        ({"norm": "batch"}, "norm is one of rms, layer, not 'batch'"),
        ({"weights": "kaimin"}, "did you mean 'kaiming'?"),
        ({"weights": "kaiming", "heads": 2}, "3 dimensions cannot be shared among 2 heads"),
        ({"start": {"kind": "orthogonal"}}, "64 orthogonal tokens need at least 64 dimensions, not 3"),
        ({"start": {"kind": "cone", "delta": 2}}, "the cone's delta is above 0 and at most 1, not 2"),
        ({"start": {"states": [[0, 0, 0]]}, "tokens": 1}, "token 0 of the start is zero or not finite"),
        ({"start": {"moved": {"3": [0, 0, 0]}}}, "token 3 cannot be moved to (0, 0, 0)"),
        ({"weights": {"W_Q": [[1, 0], [0, 1]]}}, "the weights do not fit together"),
        ({"alpha": "sqrt(x)"}, "alpha is one of constant, root, linear, mixed, power, or a formula in t"),
        ({"schemes": []}, "a run has one to 4 schemes, not 0"),
    ],
)
def test_settings_that_cannot_run_are_refused_in_plain_words(tab: Tab, given: dict[str, Any], sentence: str) -> None:
    page = run(tab, [{"schemes": [scheme_values(NAMED["pre"])], "time": 4, **given}])
    assert sentence in page[0]["refused"]


def test_a_worker_sends_all_frames_of_the_last_run_and_answers_in_words(tab: Tab) -> None:
    script = """async ([source, settings]) => {
      const worker = new Worker(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
      const news = [], waiting = [];
      worker.onmessage = ({data}) => {
        news.push(data);
        for (const wait of waiting.splice(0)) wait();
      };
      const until = async test => {
        while (!news.some(test)) await new Promise(wait => waiting.push(wait));
        return news.find(test);
      };
      worker.postMessage({kind: "begin", id: 1, settings: {...settings, time: 4000, step: 0.01, every: 10}});
      await until(({kind}) => kind === "frames");
      worker.postMessage({kind: "begin", id: 2, settings});
      worker.postMessage({kind: "theory", id: 2, settings});
      await until(({kind, id}) => kind === "done" && id === 2);
      await until(({kind, scheme}) => kind === "theory" && scheme === 1);
      const after = news.slice(news.findIndex(({id}) => id === 2));
      worker.postMessage({kind: "states", id: 2, scheme: 1, frame: 3});
      const states = await until(({kind}) => kind === "states");
      worker.postMessage({kind: "states", id: 2, scheme: 0, frame: 99});
      const missing = await until(({kind, frame}) => kind === "states" && frame === 99);
      worker.postMessage({kind: "begin", id: 3, settings: {...settings, tokens: 0}});
      const error = await until(({kind}) => kind === "error");
      worker.postMessage({kind: "begin", id: 4, settings: {...settings, time: 4000, step: 0.01, every: 10}});
      await until(({kind, id}) => kind === "frames" && id === 4);
      worker.postMessage({kind: "stop", id: 4});
      worker.postMessage({kind: "begin", id: 5, settings: {...settings, solver: "layers", step: 1, every: 1,
        schemes: [{name: "grows", attention: {carry: "1e200"}}]}});
      const stopped = await until(({kind}) => kind === "stopped");
      await until(({kind, id}) => kind === "done" && id === 5);
      worker.terminate();
      const frames = scheme => after.filter(item => item.kind === "frames" && item.scheme === scheme);
      return {old: after.filter(({id}) => id !== 2).length, first: [0, 1].map(scheme => frames(scheme).map(item => item.first)),
        counts: [0, 1].map(scheme => frames(scheme).reduce((sum, item) => sum + item.times.length, 0)),
        sizes: frames(0).map(item =>
          [item.points, item.radius, item.labels, item.clusters].map(values => values.length / item.times.length)),
        types: ["times", "points", "radius", "cosine", "labels"].map(name => frames(0)[0][name].constructor.name),
        theory: after.filter(({kind}) => kind === "theory").map(({scheme, times}) => [scheme, times.length]),
        states: states.states.length, missing: missing.text, error: error.text,
        stopped: [stopped.id, stopped.scheme, stopped.t, stopped.text]};
    }"""
    settings = {
        "schemes": [scheme_values(NAMED[name]) for name in ("pre", "post")],
        "tokens": 16,
        "dim": 4,
        "time": 5,
        "every": 0.5,
    }
    page = tab.page.evaluate(script, [bundle("worker.js", FOLDERS), settings])
    assert page["old"] == 0
    assert page["counts"] == [11, 11]
    assert all(first == sorted(first) and first[0] == 0 for first in page["first"])
    assert all(sizes == [48, 16, 16, 1] for sizes in page["sizes"])
    assert page["types"] == ["Float64Array", "Float32Array", "Float64Array", "Float64Array", "Uint16Array"]
    assert page["theory"] == [[0, 11], [1, 11]]
    assert page["states"] == 64
    assert page["missing"] == "scheme 0 has no frame 99 yet"
    assert page["error"] == "tokens is a whole number from 1 to 1024, not 0"
    sentence = "scheme 'grows' became non-finite (NaN/Inf) at time 1, token 0: its speed |ẋ|/|x| has no value"
    assert page["stopped"] == [5, 0, 1, sentence]
