"""Paper 2, Theorem 3.1, Corollary 3.2 and their lemma: where all schemes end."""

import math

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from normscope.core import Attention
from normscope.core.norms import length, tangent, unit
from normscope.dynamics import Motion, interaction_energy
from normscope.schemes import NAMED
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.flows import SIX, ends_free, follow, log_times, smallest_cosine, started, turning
from normscope.theorems.merging import MergingFlow
from normscope.theorems.statement import Curves, Statement, lines_table
from normscope.theorems.tensors import hessian, in_blocks, jacobian

_CLUSTER = 1e-3  # 1 − the smallest cosine at which tokens count as one cluster
_STILL = 1e-2  # the size of a radial speed that counts as none
_PLAIN = 8.0  # the scheme's own time up to which the library's flow is followed
_RUNS = 3
_SMALL = 1e-5  # an angle
_HALVINGS = 50
_STARTS = ("uniform", "antipodal", "clusters")


def _when(scheme: str, own: float) -> float:
    """The time t at which a scheme's own time is ``own``: ln(t + 1) for free radii, else the integral of its step."""
    if ends_free(scheme):
        return math.expm1(own)
    slow = NAMED[scheme].attention.formulas[0]
    return (1 + own / 2) ** 2 - 1 if "t" in slow.names or "layer" in slow.names else own


def _followed(case: Case, beta: float) -> tuple[Float[ndarray, " runs"], Float[ndarray, " runs"]]:
    """1 − the smallest cosine at the end, and the smallest |ṙ| there; it ends when all tokens are together.

    The library's flow up to own time 8, from there on with tokens that have met as one.
    """
    scheme = case["scheme"]
    motion = Motion(NAMED[scheme], Attention(beta), 4.0)
    ((t, x),) = follow(motion, started(case, _RUNS), [_when(scheme, _PLAIN)], step=0.25)
    flow = MergingFlow(scheme, beta)
    _, apart, radial = flow.follow(flow.begin(x.numpy(), t), _CLUSTER / 10)
    return apart, np.abs(radial).min(-1) if ends_free(scheme) else np.ones_like(apart)


def _one_cluster(case: Case) -> Comparison:
    """1 − the smallest cosine at the end; a token whose radial speed is left with no size is the other way to end."""
    apart, radial = _followed(case, case["beta"])
    ended = np.where((apart > _CLUSTER) & (radial < _STILL), _CLUSTER / 2, apart)
    return Comparison(torch.from_numpy(ended), _CLUSTER, "≤", tolerance=0.0, scale=_CLUSTER)


def _always_one_cluster(case: Case) -> Comparison:
    apart, _ = _followed(case, math.log(case["tokens"]) + case["extra"])
    return Comparison(torch.from_numpy(apart), _CLUSTER, "≤", tolerance=0.0, scale=_CLUSTER)


def _radial_bound(case: Case) -> Comparison:
    """Radial speeds of the library's flow beside 1/(n e^β), for n ≤ e^β."""
    n, d = case["tokens"], case["dim"]
    beta = math.log(n) + case["extra"]
    drawn = unit(case.normal("start", n, d))
    if case["place"] == "against":  # all others where they pull the first one back most: c e^{βc} is least at c = −1/β
        cosine = max(-1.0, -1 / beta)
        sideways = unit(tangent(drawn[:1].expand(n, d), case.normal("ways", n, d)))
        drawn = torch.cat([drawn[:1], cosine * drawn[:1] + math.sqrt(1 - cosine**2) * sideways[1:]])
    motion = Motion(NAMED[case["scheme"]], Attention(beta), 1.0)
    _, radial = turning(drawn, motion.velocity(drawn, 0.0))
    return Comparison(radial, 1 / (n * math.exp(beta)), "≥", tolerance=1e-12)


def _opposite(case: Case) -> tuple[Float[Tensor, "tokens dim"], int]:
    """Tokens at e, n − p of them, then p < n/2 at −e; and p."""
    n = case["tokens"]
    few = 1 + int(case["share"] * ((n - 1) // 2 - 1) + 0.5)
    signs = torch.ones(n, 1, dtype=torch.float64)
    signs[n - few :] = -1.0
    return signs * unit(case.normal("axis", 1, case["dim"])), few


def _still_beta(scheme: str, theta: Float[Tensor, "tokens dim"]) -> float:
    """The β at which the last token's radial speed is 0, by bisection on the library's flow: below it the speed is negative."""
    low, high = 1e-9, 10.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if float(_free_speeds(scheme, middle, theta)[1][-1]) < 0 else (low, middle)
    return (low + high) / 2


def _free_speeds(scheme: str, beta: float, x: Float[Tensor, "tokens dim"]) -> tuple[Tensor, Tensor]:
    """θ̇ and ṙ in the stage of a scheme in which radii are free."""
    return turning(x, Motion(NAMED[scheme], Attention(beta), 4.0).velocity(x, 3.0))


def _second_way(case: Case) -> Comparison:
    """The alternative of Theorem 3.1 at its exact starts; then moved a little sideways.

    The β at which the p tokens at −e have no radial speed, beside ½ ln((n − p)/p). There: their radii and their cosine with the
    others along the flow, which stay. They turn at the rate 1/(2r) when all of them are rotated by a small angle, and all
    tokens end in one cluster from a start nearby.
    """
    theta, few = _opposite(case)
    scheme, r, n = case["scheme"], case["radius"], case["tokens"]
    beta = math.log((n - few) / few) / 2
    motion = Motion(NAMED[scheme], Attention(beta), 4.0)
    start = 1.0 if scheme == "mix" else r  # Post-LN comes first, up to t = 1
    ((_, x),) = follow(motion, r * theta, [4.0 * min(start, 1.0)])
    kept = length(x).squeeze(-1)[n - few :] / start, -unit(x)[n - few :] @ theta[0]
    sideways = unit(tangent(theta[:1], case.normal("sideways", 1, case["dim"])))
    turned = theta.clone()
    turned[n - few :] = unit(theta[n - few :] + _SMALL * sideways)
    rate = (_free_speeds(scheme, beta, r * turned)[0][n - few :] @ sideways[0]) / _SMALL
    flow, near = MergingFlow(scheme, beta), unit(theta + 0.01 * case.normal("near", n, case["dim"]))
    _, apart, _ = flow.follow(flow.begin(near[None].numpy(), 1.0), _CLUSTER / 10)
    measured = [torch.tensor([_still_beta(scheme, theta), float(apart[0] < _CLUSTER)], dtype=torch.float64), *kept, rate]
    ones = torch.ones(few, dtype=torch.float64)
    claimed = torch.cat([torch.tensor([beta, 1.0], dtype=torch.float64), ones, ones, ones / (2 * r)])
    base = torch.cat([torch.ones(2 + 2 * few, dtype=torch.float64), r * ones])
    return Comparison(torch.cat(measured), claimed, tolerance=1e-6, base=base)


def _inertia(case: Case) -> Comparison:
    """How many eigenvalues of D A have a positive real part, beside A's; and the largest beside its bound from below."""
    n, positive = case["size"], 1 + int(case["positive"] * (case["size"] - 1))
    basis = torch.linalg.qr(case.normal("basis", n, n)).Q
    size = 0.1 + case.uniform("values", n)
    values = torch.where(torch.arange(n) < positive, size * case["small"], -size)
    A = basis @ (values[:, None] * basis.T)
    D = (math.log(case["spread"]) * (2 * case.uniform("speeds", n) - 1)).exp()
    found = torch.linalg.eigvals(D[:, None] * A)
    measured = [float((found.real > 0).sum()), float(found.real.max() >= float(D.min() * values.max()) * (1 - 1e-6))]
    return Comparison(torch.tensor(measured), torch.tensor([float(positive), 1.0]), tolerance=1e-9, scale=1.0)


def _equilibrium(case: Case) -> Float[Tensor, "tokens dim"]:
    """Directions that do not move, not all the same: two ``poles``, a ``polygon``, a ``simplex``, a ``cross`` of ± axes."""
    n, kind, frame = case["tokens"], case["shape"], torch.linalg.qr(case.normal("frame", 6, 6)).Q
    if kind == "poles":
        up = 1 + int(case["share"] * (n - 2))
        signs = torch.tensor([1.0] * up + [-1.0] * (n - up), dtype=torch.float64)
        return torch.mm(signs[:, None], frame[:1])
    if kind == "polygon":
        angle = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
        return torch.mm(torch.stack([angle.cos(), angle.sin()], 1), frame[:2])
    if kind == "simplex":
        corners = torch.eye(n, dtype=torch.float64) - 1 / n
        return torch.mm(unit(torch.linalg.svd(corners).U[:, : n - 1]), frame[: n - 1])
    half = max(n // 2, 1)
    return torch.cat([frame[:half], -frame[:half]])


def _unstable(case: Case) -> Comparison:
    """The largest eigenvalue of the linearised directions, D A, beside min D · max eig A > 0; A = −∇²E and D = 1/(s_j Z_j)."""
    theta, beta, scheme = _equilibrium(case), case["beta"], case["scheme"]
    n, d = theta.shape
    motion = Motion(NAMED[scheme], Attention(beta), 4.0)
    radii = case["radius"] ** case.uniform("radii", n, 1) if ends_free(scheme) else torch.ones(n, 1, dtype=torch.float64)
    time = 2.0

    def speed(flat: Tensor) -> Tensor:
        x = radii * unit(flat.view(n, d))
        return turning(x, motion.velocity(x, time))[0].flatten()

    def energy(flat: Tensor) -> Tensor:
        return interaction_energy(unit(flat.view(n, d)), beta)

    frame = in_blocks([torch.linalg.svd(token[None]).Vh[1:] for token in theta])  # tangent vectors, token by token
    J = frame @ jacobian(speed, theta.flatten()) @ frame.T
    A = -frame @ hessian(energy, theta.flatten()) @ frame.T
    scores = (beta * theta @ theta.T).exp()
    pull = length(scores @ theta / scores.sum(-1, keepdim=True))
    values = {"r": radii, "A": pull, "t": time, "depth": 4.0, "alpha": 1.0}
    stage = NAMED[scheme].at(time, 4.0)
    D = 1 / (stage.law_of(stage.attention).speed(values) * scores.sum(-1, keepdim=True) * torch.ones(n, 1))
    unstable = torch.linalg.eigvalsh((A + A.T) / 2)[-1]
    measured = torch.stack([torch.linalg.eigvals(J).real.max(), unstable])
    claimed = torch.stack([D.min() * unstable, torch.full_like(unstable, 1e-9)])
    return Comparison(measured, claimed, "≥", tolerance=1e-9, base=torch.stack([D.min(), torch.ones_like(unstable)]))


def _curves() -> Curves:
    case = Case({"tokens": 6, "dim": 3, "start": "uniform"}, ((7, 1.0),))
    lines = {}
    for scheme in SIX:
        motion = Motion(NAMED[scheme], Attention(1.0), 4.0)
        points = [(t, float(1 - smallest_cosine(x))) for t, x in follow(motion, started(case, 1)[0], log_times(0.1, 100, 40))]
        lines[scheme] = ([t for t, _ in points], [gap for _, gap in points])
    return Curves(
        lines_table(lines),
        "time t",
        "1 − smallest cosine",
        "Six tokens from one random start: every scheme ends in one cluster, each in its own time.",
        log_x=True,
        log_y=True,
    )


_SIZES: Space = {"tokens": whole(2, 10), "dim": whole(2, 5)}
_STILL_PLACES = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]

STATEMENTS = (
    Statement(
        id="2:3.1",
        title="One cluster",
        claim="From almost every start Post-LN, nGPT and sqrt-scaling end in one cluster; Pre-LN, Mix-LN and Peri-LN do, or "
        "some token's radial speed has lower limit 0.",
        tested="1 − the smallest cosine falls below 0.001 (or some |ṙ| below 0.01 is left), three starts a case.",
        space=_SIZES | {"beta": Range(0.01, 50, log=True), "start": choice(*_STARTS), "scheme": choice(*SIX)},
        conclusion=_one_cluster,
        limit="'Almost every' are starts drawn at random, and antipodal or two-sided ones a little off: exact ones are "
        "equilibria. 'End' is after at most 20,000 steps, each as long as the rates of that moment allow; the own time to it "
        "(t; ln t for Pre-LN, Mix-LN and Peri-LN; about 2√t for sqrt-scaling) grows as e^{2β}, to 10⁴³ at β = 50; n up to 10. "
        "A flow is followed until 1 − the smallest cosine is below 0.0001, so that the slack of every start that ends in one "
        "cluster is about 0.9: it does not measure how close a start comes to failing. Every start ended so; the second "
        "alternative was never met. Its exact starts are in 2:3.1-still.",
        remark="The library's flow up to own time 8 (t, ln t, 2√(t+1) − 2), then one in which tokens with 1 − cosine below "
        "10⁻¹² (a distance of 1.4·10⁻⁶) move as one with their joint mass. The second is compared with the library's flow "
        "where that is feasible, β ≤ 2, with an implicit solver for Post-LN from one start at β = 5, and for two tokens with "
        "quadrature up to β = 50. The second alternative exists at single starts of Pre-LN and Mix-LN, from "
        "which nearby ones lead away: 2:3.1-still.",
        curves=_curves,
        by="scheme",
        cases=60,
        notices=("sign",),
        simulation={"schemes": ["post", "pre", "peri", "ngpt"], "tokens": 32, "time": 60},
    ),
    Statement(
        id="2:3.1-still",
        title="One cluster: the other way to end",
        claim="Pre-LN, Mix-LN: or some token's radial speed has lower limit 0.",
        tested="n − p tokens at e and p at −e: the β at which the p have ṙ = 0, by bisection on the library's flow, beside "
        "½ ln((n − p)/p); there their radii and directions stay. Rotated by a small angle they turn at the rate 1/(2r), and a "
        "start nearby ends in one cluster.",
        space={"tokens": whole(3, 24), "dim": whole(2, 5), "share": Range(0, 1), "radius": Range(0.1, 10, log=True)}
        | {"scheme": choice("pre", "mix")},
        conclusion=_second_way,
        limit="Single starts, such as {e, e, −e} at β = ½ ln 2, followed to t = 4 min(r, 1), r the radius with which Pre-LN "
        "begins; 'nearby' is 0.01 off in every "
        "component, and 'one cluster' as in 2:3.1. That almost every start is another one is 2:3.1.",
        by="scheme",
        cases=36,
        notices=("sign", "constant", "exponent"),
        remark="At the p tokens A_j = 0: (n − p)e^{−β} = p e^{β}. With p = 1 that is n − 1 = e^{2β}. Peri-LN divides by |A_j| "
        "and is undefined there.",
        simulation={"schemes": ["pre"], "tokens": 3, "dim": 3, "beta": math.log(2) / 2, "moved": _STILL_PLACES},
    ),
    Statement(
        id="2:3.2i",
        title="Radii grow",
        claim="For Pre-LN and Peri-LN with n ≤ e^β: ṙ_j ≥ 1/(n e^β).",
        tested="The smallest radial speed of the library's flow, at random places and with all others at the cosine that pulls "
        "back most.",
        space={"tokens": whole(2, 64), "dim": whole(2, 8), "extra": Range(0, 3)}
        | {"place": choice("against", "uniform"), "scheme": choice("pre", "peri")},
        conclusion=_radial_bound,
        by="scheme",
        remark="True with room. ṙ_j Z_j = e^β + Σ c e^{βc}, and c e^{βc} ≥ −1/(eβ) (or −e^{−β} for β < 1), so with n ≤ e^β the "
        "sum is at least 1.5, and Z_j ≤ n e^β. The tightest case, n = 2 antipodal at β = ln 2, has ṙ = 0.6 = 2.4/(n e^β).",
        notices=("sign",),
        simulation={"schemes": ["pre", "peri"], "tokens": 7, "beta": 2, "time": 60},
    ),
    Statement(
        id="2:3.2ii",
        title="Always one cluster",
        claim="For Pre-LN and Peri-LN with n ≤ e^β always one cluster.",
        tested="1 − the smallest cosine falls below 0.001, three starts a case.",
        space=_SIZES | {"extra": Range(0, 20)} | {"start": choice(*_STARTS), "scheme": choice("pre", "peri")},
        conclusion=_always_one_cluster,
        limit="'Always' is from almost every start, and 'one cluster' as in Theorem 3.1, with a slack of about 0.9 wherever it "
        "is reached; n up to 10, β from ln n to ln n + 20.",
        by="scheme",
        cases=30,
        notices=("sign",),
        simulation={"schemes": ["pre", "peri"], "tokens": 7, "beta": 2, "time": 400, "axis": "log"},
    ),
    Statement(
        id="2:DAi",
        title="Speeds cannot stabilise: the lemma",
        claim="A symmetric A with a positive eigenvalue and a positive diagonal D: D·A has a positive eigenvalue.",
        tested="D·A has as many eigenvalues with positive real part as A, and the largest is at least min D · max eig A.",
        space={
            "size": whole(2, 16),
            "positive": Range(0, 1),
            "small": Range(1e-3, 1, log=True),
            "spread": Range(1, 100, log=True),
        },
        conclusion=_inertia,
        remark="D·A is similar to D^{1/2} A D^{1/2}, which has the inertia of A (Sylvester); the bound is Ostrowski's.",
    ),
    Statement(
        id="2:DAii",
        title="Speeds cannot stabilise: equilibria",
        claim="Equilibria that are not one cluster are unstable in every scheme: the linearised directions are D·A with A = "
        "−∇²E.",
        tested="The largest eigenvalue of the library's linearised flow is at least min D · max eig A, which is positive.",
        space={
            "tokens": whole(2, 6),
            "beta": Range(0.05, 4, log=True),
            "radius": Range(0.1, 10, log=True),
            "share": Range(0, 1),
        }
        | {"shape": choice("poles", "polygon", "simplex", "cross"), "scheme": choice(*SIX)},
        conclusion=_unstable,
        limit="Four families of equilibria in six dimensions, not all that there are.",
        by="shape",
        remark="With free radii this is the block of the directions; q = r/t is attracted (−1) and, where P A = 0, does not "
        "act back on them.",
        notices=("sign", "constant", "exponent"),
        cases=36,
    ),
)
