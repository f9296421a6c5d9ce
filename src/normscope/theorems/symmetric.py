"""Paper 2, the symmetric start and Theorem 4.1: the common cosine γ(t), and its speed at both ends of time."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from normscope.core import Attention
from normscope.core.norms import length, unit
from normscope.dynamics import SCHEDULES, Motion, SymmetricFlow, measure
from normscope.schemes import NAMED
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.flows import SIX, follow, turning
from normscope.theorems.law import alpha_integral
from normscope.theorems.statement import Curves, Statement, lines_table

_DEPTH = 8.0  # Mix-LN changes over at a quarter of it
_LATE = (40.0, 60.0)  # of a scheme's own time, in which 1 − γ falls as e^{−2τ}
_SPEEDS: Space = {"radius": Range(0.1, 10, log=True), "alpha": Range(0.01, 10, log=True), "scheme": choice(*SIX)}


def _formulas(n: int, beta: float, gamma: float) -> tuple[float, float, float, float]:
    """Z, N, G and R as printed, all divided by e^β."""
    E = math.exp(beta * (gamma - 1))
    N2 = 1 + 2 * (n - 1) * E * gamma + (n - 1) * E**2 * (1 + (n - 2) * gamma)
    return (n - 1) * E + 1, math.sqrt(N2), 2 * E * (1 - gamma) * ((n - 1) * gamma + 1), (n - 1) * E * gamma + 1


def _printed_rates(scheme: str, n: int, beta: float, gamma: float, r: float, t: float, alpha: float) -> tuple[float, float]:
    """γ̇ and ṙ as printed."""
    Z, N, G, R = _formulas(n, beta, gamma)
    stage = ("post" if t <= _DEPTH / 4 else "pre") if scheme == "mix" else scheme
    return {
        "post": (G / Z, 0.0),
        "pre": (G / (r * Z), R / Z),
        "peri": (G / (r * N), R / N),
        "ngpt": (alpha * G / N, 0.0),
        "sqrt-scaling": (G / (math.sqrt(t + 1) * Z), 0.0),
    }[stage]


def _reduction(case: Case) -> Comparison:
    """γ̇ of every pair and ṙ of every token of particles with one common cosine, and of the reduction, beside the formulas."""
    n, beta, t = case["tokens"], case["beta"], case["time"]
    low = -1 / (n - 1)
    gamma = low + (1 - low) * case["share"]
    gram = (1 - gamma) * torch.eye(n, dtype=torch.float64) + gamma
    theta = torch.linalg.cholesky(gram)
    motion = Motion(NAMED[case["scheme"]], Attention(beta), _DEPTH, alpha=lambda t: case["alpha"])
    x = motion.settle(case["radius"] * theta, t)
    speed, radial = turning(x, motion.velocity(x, t))
    closing = theta @ speed.T + speed @ theta.T
    pairs = closing[~torch.eye(n, dtype=torch.bool)]
    r = float(x[0].norm())
    claimed = _printed_rates(case["scheme"], n, beta, gamma, r, t, case["alpha"])
    state = np.array([math.log1p(-gamma), math.log(r)])
    library = SymmetricFlow(NAMED[case["scheme"]], n, beta, _DEPTH, lambda t: case["alpha"]).rates(t, state)
    measured = torch.cat([pairs, torch.tensor([library["cosine_rate"]], dtype=torch.float64)])
    radii = torch.cat([radial, torch.tensor([library["radial_rate"]], dtype=torch.float64)])
    return Comparison(
        torch.cat([measured, radii]),
        torch.cat([torch.full_like(measured, claimed[0]), torch.full_like(radii, claimed[1])]),
        tolerance=1e-7,
        scale=max(abs(claimed[0]), 1e-6),
    )


def _printed_path(case: Case, r: float) -> tuple[float, float]:
    """γ and r at the case's time, from γ = 0 and a first r by fourth-order steps of the printed rates; Mix-LN in two stages."""
    gamma, t, end, switch = 0.0, 0.0, case["time"], _DEPTH / 4

    def rates(t: float, gamma: float, r: float) -> tuple[float, float]:
        return _printed_rates(case["scheme"], case["tokens"], case["beta"], gamma, r, t, case["alpha"])

    for stop in sorted({min(switch, end), end}):
        while t < stop:
            h = min(0.02 * min(1.0, r, 1 / case["alpha"]), stop - t)
            k1 = rates(math.nextafter(t, math.inf), gamma, r)  # at τ itself the first stage still holds
            k2 = rates(t + h / 2, gamma + h / 2 * k1[0], r + h / 2 * k1[1])
            k3 = rates(t + h / 2, gamma + h / 2 * k2[0], r + h / 2 * k2[1])
            k4 = rates(t + h, gamma + h * k3[0], r + h * k3[1])
            moves = [(a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(k1, k2, k3, k4, strict=True)]
            gamma, r, t = gamma + h * moves[0], r + h * moves[1], stop if h == stop - t else t + h
    return gamma, r


def _kept(case: Case) -> Comparison:
    """The cosine of every pair and the radius of every token along the flow of particles, beside the printed equations."""
    n, scheme = case["tokens"], NAMED[case["scheme"]]
    motion = Motion(scheme, Attention(case["beta"]), _DEPTH, alpha=lambda t: case["alpha"])
    start = case["radius"] * torch.eye(n, dtype=torch.float64)
    ((_, x),) = follow(motion, start, [case["time"]], step=0.05)
    theta, (gamma, r) = unit(x), _printed_path(case, float(length(motion.settle(start, 0.0))[0]))
    cosines = (theta @ theta.T)[~torch.eye(n, dtype=torch.bool)]
    radii = length(x).squeeze(-1) / r
    claimed = torch.cat([torch.full_like(cosines, gamma), torch.ones_like(radii)])
    return Comparison(torch.cat([cosines, radii]), claimed, tolerance=1e-5, scale=1.0)


def _first_speed(case: Case) -> Comparison:
    """γ̇ at t = 0 of orthogonal particles and of the reduction, beside the table."""
    n, beta, r0, alpha, scheme = case["tokens"], case["beta"], case["radius"], case["alpha"], case["scheme"]
    plain, normed = 2 / (math.exp(beta) + n - 1), 2 / math.sqrt(math.exp(2 * beta) + n - 1)
    claimed = {"pre": plain / r0, "peri": normed / r0, "ngpt": alpha * normed}.get(scheme, plain)
    flow = SymmetricFlow(NAMED[scheme], n, beta, _DEPTH, lambda t: alpha)
    measured = [flow.rates(0.0, np.array([0.0, math.log(r0)]))["cosine_rate"]]
    if n <= 64:
        motion = Motion(NAMED[scheme], Attention(beta), _DEPTH, alpha=lambda t: alpha)
        x = motion.settle(r0 * torch.eye(n, dtype=torch.float64), 0.0)
        measured.append(float(measure(x, motion.velocity(x, 0.0)).cosine_rate))
    base = math.exp(beta) + n - 1
    return Comparison(torch.tensor(measured, dtype=torch.float64), claimed, tolerance=1e-8, base=base)


@dataclass(frozen=True)
class _End:
    """The last column of the table: the time t at which a scheme's own time is τ, and the logarithm of γ̇/C as printed."""

    time: Callable[[float], float]
    form: Callable[[float], float]


def _with_alpha(schedule: str, time: Callable[[float], float]) -> _End:
    return _End(time, lambda t: math.log(SCHEDULES[schedule](t)) - 2 * alpha_integral(schedule, t))


_FREE = _End(math.exp, lambda t: -3 * math.log(t))
_ENDS = {
    "post": _End(lambda tau: tau, lambda t: -2 * t),
    "pre": _FREE,
    "mix": _FREE,
    "peri": _FREE,
    "sqrt-scaling": _End(lambda tau: (1 + tau / 2) ** 2 - 1, lambda t: -4 * math.sqrt(t) - math.log(t) / 2),
}
_ALPHA_ENDS = {
    "constant": _with_alpha("constant", lambda tau: tau),
    "root": _with_alpha("root", lambda tau: (1 + tau / 2) ** 2 - 1),
    "linear": _with_alpha("linear", math.expm1),
    "power": _with_alpha("power", math.expm1),  # ∫α is bounded: tokens never meet, and γ̇ falls as α_t does
}


def _late_rates(n: int, beta: float, scheme: str, schedule: str, times: list[float]) -> list[float]:
    flow = SymmetricFlow(NAMED[scheme], n, beta, _DEPTH, SCHEDULES[schedule])
    return [m["cosine_rate"] for m in flow.solve(times, step=0.05).measures]


def _last_speed(case: Case) -> Comparison:
    """γ̇(t_2)/γ̇(t_1) at two late times beside the ratio of the printed forms."""
    scheme, schedule = case["scheme"], case["alpha"]
    end = _ENDS.get(scheme, _ALPHA_ENDS[schedule])
    first, last = map(end.time, _LATE)
    early, late = _late_rates(case["tokens"], case["beta"], scheme, schedule, [first, last])
    claimed = end.form(last) - end.form(first)
    ratio = math.exp(math.log(late) - math.log(early) - claimed)
    return Comparison(ratio, 1.0, tolerance=0.05, base=last / first)


def _end_curves() -> Curves:
    lines, taus = {}, [0.5 + 0.5 * i for i in range(60)]
    for scheme in SIX:
        end = _ENDS.get(scheme, _ALPHA_ENDS["constant"])
        times = [end.time(tau) for tau in taus]
        rates = _late_rates(64, 1.0, scheme, "constant", times)
        lines[scheme] = (taus, [rate / math.exp(end.form(t)) for rate, t in zip(rates, times, strict=True)])
    return Curves(
        lines_table(lines),
        "the scheme's own time: t, ln t, 2√(t+1) − 2",
        "γ̇ over its printed form",
        "Where a line becomes level, γ̇ has the printed form, and the level is its constant C; n = 64, β = 1.",
        log_y=True,
    )


STATEMENTS = (
    Statement(
        id="2:symmetric",
        title="The symmetric reduction",
        claim="From equal cosines all pairs keep one cosine γ(t), with the printed Z, N, G, R and γ̇, ṙ for each scheme.",
        tested="γ̇ of every pair and ṙ of every token, from particles and from the reduction of the library, beside the "
        "printed formulas.",
        space=_SPEEDS
        | {"tokens": whole(2, 32), "beta": Range(0.001, 10, log=True), "share": Range(0.01, 0.99), "time": Range(0, 6)},
        conclusion=_reduction,
        by="scheme",
        cases=90,
        simulation={"schemes": ["post", "pre", "peri", "ngpt"], "tokens": 16, "dim": 16, "start": "orthogonal"},
    ),
    Statement(
        id="2:symmetric-flow",
        title="One cosine for all times",
        claim="From ⟨θ_j,θ_k⟩ = δ_jk and r_j = r_0 all pairs keep one cosine γ(t), which follows the printed equations.",
        tested="The cosine of every pair and the radius of every token of the library's flow at time t, beside γ(t) and r(t) "
        "from the printed γ̇ and ṙ, integrated on their own.",
        space={
            "tokens": whole(2, 16),
            "beta": Range(0.01, 5, log=True),
            "radius": Range(0.1, 10, log=True),
            "alpha": Range(0.1, 3, log=True),
            "time": Range(0.2, 6),
            "scheme": choice(*SIX),
        },
        conclusion=_kept,
        limit="'All times' are t up to 6; n up to 16, β up to 5, r_0 from 0.1 to 10, a constant α_t from 0.1 to 3.",
        by="scheme",
        cases=36,
        simulation={"schemes": ["post", "pre", "peri", "ngpt"], "tokens": 16, "dim": 16, "start": "orthogonal"},
    ),
    Statement(
        id="2:4.1i",
        title="First speeds",
        claim="γ̇ for t → 0: Post, Mix and sqrt 2/(e^β+n−1); Pre 2/(r_0(e^β+n−1)); Peri 2/(r_0√(e^{2β}+n−1)); nGPT "
        "2α_0/√(e^{2β}+n−1).",
        tested="γ̇ at t = 0 of orthogonal particles (up to 64) and of the reduction, beside the table.",
        space=_SPEEDS | {"tokens": whole(2, 1_000_000), "beta": Range(0.001, 20, log=True)},
        conclusion=_first_speed,
        by="scheme",
        cases=90,
        notices=("sign", "constant", "exponent"),
        simulation={"schemes": ["post", "pre", "peri", "ngpt"], "tokens": 64, "dim": 64, "start": "orthogonal", "time": 4},
    ),
    Statement(
        id="2:4.1ii",
        title="Last speeds",
        claim="γ̇ for t → ∞: Post C e^{−2t}; Pre, Mix and Peri C/t³; nGPT C α_t exp(−2∫α); sqrt C e^{−4√t}/√t.",
        tested="γ̇ at two late times, own time 40 and 60, over the ratio of the printed forms: one constant C for both, within "
        "5 %.",
        space={
            "tokens": whole(2, 1_000_000),
            "beta": Range(0.001, 3, log=True),
            "alpha": choice(*_ALPHA_ENDS),
            "scheme": choice(*SIX),
        },
        conclusion=_last_speed,
        by="scheme",
        limit="t → ∞ is where a scheme's own time (t, ln t, ∫α, 2√(t+1)) goes from 40 to 60; β up to 3, since orthogonal "
        "tokens wait for e^β. For sqrt-scaling e^{−4√t} stands for e^{−4√(t+1)}: their ratio tends to 1.",
        curves=_end_curves,
        cases=42,
        notices=("sign", "constant", "exponent"),
        simulation={
            "schemes": ["post", "pre", "ngpt", "sqrt-scaling"],
            "tokens": 16,
            "dim": 16,
            "start": "orthogonal",
            "time": 40,
            "speeds": "log",
        },
    ),
)
