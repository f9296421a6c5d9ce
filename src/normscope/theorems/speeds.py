"""Paper 2, schemes beside each other: how far tokens move early and late, and LayerNorm Scaling beside sqrt-scaling."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from normscope.core import Attention
from normscope.core.norms import length, tangent, unit
from normscope.dynamics import SCHEDULES, Motion
from normscope.schemes import NAMED
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.flows import follow, in_cone, smallest_cosine, started, turning, variance, variance_rate
from normscope.theorems.law import plain_attention
from normscope.theorems.statement import Curves, Statement, lines_table

_SIZES: Space = {"tokens": whole(2, 12), "dim": whole(2, 8)}
_RADII: Space = {"radius": Range(0.1, 10, log=True)}
_FALLING = "linear"  # α_t = 1/(1 + t)
_STOPPED = 1e-16  # 1 − the smallest cosine of a scheme that has stopped
_FASTER = 10.0  # times as fast as a scheme that has stopped
_KEPT = 0.08  # of its speed at half the time, by a scheme that still moves
_MOVING = (("peri", "constant"), ("pre", "constant"), ("ngpt", _FALLING))
_CONE_TIMES = [10.0, 100.0, 1000.0]


def _motion(scheme: str, beta: float, alpha: str = "constant") -> Motion:
    return Motion(NAMED[scheme], Attention(beta), 4.0, alpha=SCHEDULES[alpha])


def _early(case: Case) -> Comparison:
    """|θ̇_j| of Peri-LN at t = 0 over Pre-LN's, Post-LN's and nGPT's (α_0 = 1), beside 1/|A_j|, 1/(r|A_j|) and 1/r."""
    theta, r = unit(case.normal("theta", case["tokens"], case["dim"])), case["radius"]
    speeds = {}
    for scheme in ("post", "pre", "peri", "ngpt"):
        motion = _motion(scheme, case["beta"], _FALLING)
        x = motion.settle(r * theta, 0.0)
        speeds[scheme] = length(turning(x, motion.velocity(x, 0.0))[0]).squeeze(-1)
    measured = [speeds["peri"] / speeds[other] for other in ("pre", "post", "ngpt")]
    A = length(plain_attention(theta, case["beta"])).squeeze(-1)
    claimed = torch.cat([1 / A, 1 / (r * A), torch.full_like(A, 1 / r)])
    base = torch.cat([A, r * A, torch.full_like(A, r)])
    return Comparison(torch.cat(measured), claimed, tolerance=1e-6, base=base)


def _path(case: Case, scheme: str, alpha: str, times: Sequence[float]) -> Iterator[tuple[float, float, float]]:
    """t, the RMS of |θ̇_j|, and 1 − the smallest cosine, from the case's start."""
    motion = _motion(scheme, case["beta"], alpha)
    for t, x in follow(motion, started(case, 1)[0], times, step=0.4):
        turned, _ = turning(x, motion.velocity(x, t))
        yield t, float(turned.square().sum(-1).mean().sqrt()), float(1 - smallest_cosine(x))


def _late(case: Case) -> Comparison:
    """Speeds of Peri-LN, Pre-LN and nGPT with a falling α_t once Post-LN and nGPT with α_t = 1 have stopped, beside theirs.

    And beside their own at half that time: speeds that fall as t⁻² fall to about a quarter, those of sqrt-scaling to less
    than a tenth.
    """
    times = [8 * math.exp(2 * case["beta"]) * 1.25**i for i in range(20)]
    stops = []
    for scheme in ("post", "ngpt"):
        stop = next(_stops(case, scheme, times), None)
        if stop is None:
            return Comparison(0.0, 0.0, decides=False)
        stops.append(stop)
    last, still = max(t for t, _ in stops), max(speed for _, speed in stops)
    moving, kept = [], []
    for named in _MOVING:
        (_, before, _), (_, speed, _) = _path(case, *named, [last / 2, last])
        moving.append(speed)
        kept.append(speed / before)
    claimed = torch.tensor([_FASTER * still] * len(moving) + [_KEPT] * len(kept))
    base = torch.tensor([_FASTER] * len(moving) + [1.0] * len(kept))
    return Comparison(torch.tensor([*moving, *kept]), claimed, "≥", tolerance=0.0, base=base)


def _stops(case: Case, scheme: str, times: Sequence[float]) -> Iterator[tuple[float, float]]:
    """The times at which all tokens are one, with the speeds that are left."""
    yield from ((t, speed) for t, speed, apart in _path(case, scheme, "constant", times) if apart < _STOPPED)


def _scaled_law(case: Case) -> Comparison:
    """θ̇ and ṙ of both schemes' flows beside Pre-LN's with A(θ/√ℓ), ℓ = t + 1, and beside Post-LN's with A/√ℓ."""
    t, beta = case["time"], case["beta"]
    start = unit(case.normal("theta", case["tokens"], case["dim"]))
    x, ell = start * case["radius"] ** case.uniform("radii", case["tokens"], 1), t + 1
    r, theta = length(x), unit(x)
    A, cooled = plain_attention(theta, beta), plain_attention(theta, beta / ell) / math.sqrt(ell)
    claimed = [tangent(theta, cooled) / r, (theta * cooled).sum(-1), tangent(theta, A) / math.sqrt(ell), torch.zeros(len(x))]
    measured: list[Tensor] = []
    for scheme in ("ln-scaling", "sqrt-scaling"):
        motion = _motion(scheme, beta)
        settled = motion.settle(x, t)
        measured += turning(settled, motion.velocity(settled, t))
    numbers, wanted = (torch.cat([part.flatten() for part in parts]) for parts in (measured, claimed))
    return Comparison(numbers, wanted, tolerance=1e-9, scale=max(1.0, 1 / case["radius"]), base=torch.full_like(wanted, ell))


def _scaled_cone(case: Case) -> Comparison:
    """−(dVar/dt)/Var of both schemes in a narrow cone beside 2/(r√ℓ) with r = r_0 + 2√ℓ − 2, and 2/√ℓ."""
    measured, claimed = [], []
    start = in_cone(Case({**case.values, "place": "rim"}, case.seeds), 1e-4, 1)
    motions = {scheme: _motion(scheme, case["beta"]) for scheme in ("ln-scaling", "sqrt-scaling")}
    for t, x in follow(motions["ln-scaling"], case["radius"] * start, _CONE_TIMES):
        measured.append(-variance_rate(x, motions["ln-scaling"].velocity(x, t)) / variance(x))
        claimed.append(2 / ((case["radius"] + 2 * math.sqrt(t + 1) - 2) * math.sqrt(t + 1)))
    for t in _CONE_TIMES:
        measured.append(-variance_rate(start, motions["sqrt-scaling"].velocity(start, t)) / variance(start))
        claimed.append(2 / math.sqrt(t + 1))
    ells = torch.tensor([t + 1 for t in 2 * _CONE_TIMES], dtype=torch.float64)
    return Comparison(torch.cat(measured), torch.tensor(claimed, dtype=torch.float64), tolerance=0.02, base=ells)


_PARTS = {"early": _early, "late": _late}
_SCALED = {"law": _scaled_law, "cone": _scaled_cone}


def _curves() -> Curves:
    case = Case({"tokens": 8, "dim": 4, "beta": 0.5, "start": "uniform"}, ((1, 1.0),))
    runs = {"post": ("post", "constant"), "pre": ("pre", "constant"), "peri": ("peri", "constant")}
    runs |= {"ngpt, α = 1": ("ngpt", "constant"), "ngpt, α = 1/(1+t)": ("ngpt", _FALLING)}
    lines, times = {}, [0.01 * 1.25**i for i in range(34)]
    for name, (scheme, alpha) in runs.items():
        speeds = [speed for _, speed, _ in _path(case, scheme, alpha, times)]
        lines[name] = (times, speeds)
    return Curves(
        lines_table(lines),
        "time t",
        "RMS angular speed |θ̇_j|",
        "Eight tokens from one random start with r_0 = 1: Peri-LN starts as fast as nGPT and keeps moving as long as Pre-LN.",
        log_x=True,
        log_y=True,
    )


STATEMENTS = (
    Statement(
        id="2:early-late",
        title="Far early, and still moving late",
        claim="Good schemes move tokens far in early layers and still move them in late ones; Peri-LN does both by itself, "
        "nGPT by its α_t.",
        tested="Early: |θ̇_j| of Peri-LN at t = 0 is 1/|A_j| times Pre-LN's, 1/(r_0|A_j|) times Post-LN's and 1/r_0 times "
        "nGPT's with α_0 = 1. Late: Peri-LN, Pre-LN and nGPT with α_t = 1/(1+t) move at least ten times as fast as Post-LN and "
        "nGPT with α_t = 1, and at least 8 % as fast as at half that time.",
        space=_SIZES
        | _RADII
        | {"beta": Range(0.01, 0.5, log=True), "start": choice("uniform", "antipodal", "clusters"), "part": choice(*_PARTS)},
        conclusion=lambda case: _PARTS[case["part"]](case),
        by="part",
        limit="'Late' is when 1 − the smallest cosine is below 10⁻¹⁶ under Post-LN and under nGPT with α_t = 1; n up to 12, β "
        "up to 0.5, r_0 = 1. 'Still move' is ten times as fast, and no faster fall than a power "
        "of t: sqrt-scaling keeps at most 7 % of its speed. How late speeds fall is in 2:4.1ii and 2:4.3.",
        curves=_curves,
        remark="|A_j| ≤ 1, and 1 only where all tokens are one: Peri-LN always moves a token farther than Pre-LN does. That it "
        "moves as far as nGPT early is for r_0 = 1; with a large r_0 both schemes with free radii move little.",
        notices=("sign", "constant", "exponent"),
        cases=36,
        simulation={"schemes": ["post", "pre", "peri", "ngpt"], "tokens": 32, "time": 20, "speeds": "log"},
    ),
    Statement(
        id="2:ln-scaling",
        title="LayerNorm Scaling is not sqrt-scaling",
        claim="The LayerNorm Scaling that people train is different from sqrt-scaling: Pre-LN whose norm output at layer ℓ is "
        "multiplied by 1/√ℓ.",
        tested="Law: θ̇ and ṙ of the library's flows beside P A/r and ⟨θ, A⟩ with A taken at β/ℓ over √ℓ, and beside P A/√ℓ and "
        "0. Cone: −(dVar/dt)/Var at t = 10, 100, 1000 beside 2/(r√ℓ) with r = r_0 + 2√ℓ − 2, and beside 2/√ℓ.",
        space=_SIZES | _RADII | {"beta": Range(0.01, 5, log=True), "time": Range(0, 20), "part": choice(*_SCALED)},
        conclusion=lambda case: _SCALED[case["part"]](case),
        by="part",
        limit="A narrow cone is δ = 10⁻⁴, where the rates are within 2 %.",
        notices=("sign", "constant", "exponent"),
        cases=60,
        remark="Logits see the factor twice: β becomes β/ℓ besides. Radii grow as 2√t, so that the speed factor r√ℓ grows as "
        "2t and Var falls as 1/t; under sqrt-scaling it falls as e^{−4√t}, under Pre-LN as 1/t².",
        simulation={"schemes": ["ln-scaling", "sqrt-scaling", "pre"], "tokens": 32, "time": 40, "speeds": "log"},
    ),
)
