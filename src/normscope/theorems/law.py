"""Paper 2, the model: one law for all schemes, its gradient structure, and changes of time."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import Attention, HeadWeights
from normscope.core.norms import length, tangent, unit
from normscope.dynamics import SCHEDULES, Motion, interaction_energy
from normscope.schemes import NAMED, Slots
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.flows import SIX, follow, turning
from normscope.theorems.statement import Correction, Dial, Statement

_SIZES: Space = {"tokens": whole(2, 12), "dim": whole(2, 8), "beta": Range(0.01, 8, log=True)}
_RADII: Space = {"radius": Range(0.1, 10, log=True)}
_DEPTH = 8.0  # Mix-LN changes over at a quarter of it
_ENERGY_TIMES = [1e-3, 0.3, 1.0, 1.9, 2.1, 4.0]

# As printed: 1/s_j and ṙ_j from r_j, |A_j|, ⟨θ_j, A_j⟩, t and α_t.
_PRINTED: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "post": lambda r, A, inner, t, alpha: (torch.ones_like(r), 0 * r),
    "pre": lambda r, A, inner, t, alpha: (1 / r, inner),
    "peri": lambda r, A, inner, t, alpha: (1 / (r * A), inner / A),
    "ngpt": lambda r, A, inner, t, alpha: (alpha / A, 0 * r),
    "sqrt-scaling": lambda r, A, inner, t, alpha: (torch.ones_like(r) / math.sqrt(t + 1), 0 * r),
}
_PRINTED["mix"] = lambda r, A, inner, t, alpha: _PRINTED["post" if t <= _DEPTH / 4 else "pre"](r, A, inner, t, alpha)


# As printed: the layer X, with its write multiplied by h; A is taken at Norm(X), which is X where the stream is normalised.
_LAYERS: dict[str, Callable[..., Tensor]] = {
    "post": lambda X, A, h, t, alpha: unit(X + h * A),
    "pre": lambda X, A, h, t, alpha: X + h * A,
    "peri": lambda X, A, h, t, alpha: X + h * unit(A),
    "ngpt": lambda X, A, h, t, alpha: unit(X + h * alpha * unit(A)),
    "sqrt-scaling": lambda X, A, h, t, alpha: unit(X + h * A / math.sqrt(t + 1)),
}
_LAYERS["mix"] = lambda X, A, h, t, alpha: _LAYERS["post" if t <= _DEPTH / 4 else "pre"](X, A, h, t, alpha)


def plain_attention(theta: Float[Tensor, "tokens dim"], beta: float) -> Float[Tensor, "tokens dim"]:
    """A_j = Σ_k w_jk θ_k with identity weights, written out."""
    weights = (beta * (theta @ theta.T - 1)).exp()
    return weights @ theta / weights.sum(-1, keepdim=True)


def _tokens(case: Case) -> Float[Tensor, "tokens dim"]:
    theta = unit(case.normal("theta", case["tokens"], case["dim"]))
    return theta * float(case["radius"]) ** case.uniform("radii", case["tokens"], 1)


def _law(case: Case) -> Comparison:
    """θ̇ and ṙ of the library's flow beside (1/s_j) P A_j and ṙ_j as printed."""
    x, t, alpha = _tokens(case), case["time"], case["alpha"]
    motion = Motion(NAMED[case["scheme"]], Attention(case["beta"]), _DEPTH, alpha=lambda t: alpha)
    x = motion.settle(x, t)
    theta = unit(x)
    A = plain_attention(theta, case["beta"])
    numbers = (length(x), length(A), (theta * A).sum(-1, keepdim=True))
    speed, radial = _PRINTED[case["scheme"]](*numbers, t, alpha)
    measured = turning(x, motion.velocity(x, t))
    scale = max(float(speed.max()) * float(length(A).max()), 1e-9)
    return Comparison(
        torch.cat([measured[0].flatten(), measured[1]]),
        torch.cat([(speed * tangent(theta, A)).flatten(), radial.flatten()]),
        tolerance=1e-9,
        scale=scale,
        base=torch.cat([length(x).expand_as(x).flatten(), torch.ones(len(x))]),
    )


def _euler(case: Case) -> Comparison:
    """The printed layer with a short step h, (x(h) − x)/h, beside the library's flow."""
    x, t, alpha, h = _tokens(case), case["time"], case["alpha"], 1e-6
    motion = Motion(NAMED[case["scheme"]], Attention(case["beta"]), _DEPTH, alpha=lambda t: alpha)
    x = motion.settle(x, t)
    A = plain_attention(unit(x), case["beta"])
    moved = _LAYERS[case["scheme"]](x, A, h, t, alpha)
    flow = motion.velocity(x, t)
    return Comparison((moved - x) / h, flow, tolerance=1e-3, scale=max(1.0, alpha))


def _symmetric_weights(case: Case) -> tuple[Tensor, HeadWeights]:
    """V = QᵀK = KᵀQ = I + bend·S with a random symmetric S and a random invertible Q."""
    d = case["dim"]
    S, Q = case.normal("S", d, d), torch.linalg.qr(case.normal("Q", d, d)).Q * 2
    V = torch.eye(d, dtype=torch.float64) + case["bend"] * (S + S.T) / (2 * math.sqrt(d))
    K = torch.linalg.solve(Q.T, V)
    return V, HeadWeights(W_Q=Q.T[None], W_K=K.T[None], W_V=V.T[None])


def _bent_energy(theta: Tensor, beta: float, V: Tensor) -> Tensor:
    """−(1/2β) Σ exp(β θ_jᵀ V θ_k)."""
    return -(beta * (theta @ V @ theta.T)).exp().sum() / (2 * beta)


def _gradient(case: Case, corrected: bool) -> Comparison:
    """θ̇_j beside −(1/(s_j Z_j)) P_j ∂E/∂θ_j, with E by automatic differentiation."""
    beta, alpha = case["beta"], case["alpha"]
    V, weights = _symmetric_weights(case)
    motion = Motion(NAMED[case["scheme"]], Attention(beta, weights), _DEPTH, alpha=lambda t: alpha)
    x = motion.settle(_tokens(case), 0.0)
    theta = unit(x).requires_grad_()
    energy = _bent_energy(theta, beta, V) if corrected else interaction_energy(theta, beta)
    (gradient,) = torch.autograd.grad(energy, theta)
    theta = theta.detach()
    scores = (beta * theta @ V @ theta.T).exp()
    Z = scores.sum(-1, keepdim=True)
    A = scores @ theta @ V.T / Z
    speed, _ = _PRINTED[case["scheme"]](length(x), length(A), (theta * A).sum(-1, keepdim=True), 0.0, alpha)
    claimed = -speed / Z * tangent(theta, gradient)
    measured, _ = turning(x, motion.velocity(x, 0.0))
    scale = max(float((speed * length(A)).max()), float(claimed.abs().max()))
    return Comparison(measured, claimed, tolerance=1e-8, scale=scale)


def _own_energy(x: Float[Tensor, "tokens dim"], beta: float) -> Float[Tensor, ""]:
    """E of the directions of x, written out for V = I."""
    theta = x / x.square().sum(-1, keepdim=True).sqrt()
    return -(beta * theta @ theta.T).exp().sum() / (2 * beta)


def _energy_falls(case: Case) -> Comparison:
    """dE/dt along the flow, by automatic differentiation, beside −Σ_j |∇_jE|²/(s_j Z_j); what E rises in between, beside 0.

    Rates are compared relative to the largest, or to 10⁻⁶ of what E could change by where tokens are nearly still.
    """
    beta, alpha, scheme = case["beta"], case["alpha"], case["scheme"]
    motion = Motion(NAMED[scheme], Attention(beta), _DEPTH, alpha=lambda t: alpha)
    rates, claimed, energies, bases, sizes = [], [], [], [], []
    for t, x in follow(motion, _tokens(case), _ENERGY_TIMES):
        theta, r = unit(x), length(x)
        scores = (beta * theta @ theta.T).exp()
        Z, A = scores.sum(-1, keepdim=True), plain_attention(theta, beta)
        speed, _ = _PRINTED[scheme](r, length(A), (theta * A).sum(-1, keepdim=True), t, alpha)
        gradient = -tangent(theta, scores @ theta)
        claimed.append(-(speed / Z * gradient.square()).sum())
        energy = _own_energy(x, beta)
        rates.append(torch.func.jvp(lambda x: _own_energy(x, beta), (x,), (motion.velocity(x, t),))[1])
        energies.append(energy)
        bases.append(beta * r.mean())
        sizes.append(torch.maximum(claimed[-1].abs(), 1e-6 * beta * energy.abs() * speed.max()))
    falls, found = torch.stack(claimed), torch.stack(energies)
    rises = (found.diff() / found[:-1].abs()).clamp(min=0)
    measured, wanted = torch.cat([torch.stack(rates), rises]), torch.cat([falls, torch.zeros_like(rises)])
    scale = torch.cat([torch.stack(sizes).max().expand_as(falls), torch.ones_like(rises)])
    return Comparison(
        measured, wanted, tolerance=1e-8, scale=scale, base=torch.cat([torch.stack(bases), torch.ones_like(rises)])
    )


def _quadrature(rate: Callable[[float], float], end: float, smooth: float) -> float:
    """∫ of a rate from 0, by Gauss's rule on pieces between the multiples of ``smooth``, where it may have corners."""
    nodes, weights = np.polynomial.legendre.leggauss(32)
    ends = [*(i * smooth for i in range(math.ceil(end / smooth))), end]
    pieces = ((low, (high - low) / 2) for low, high in itertools.pairwise(ends))
    return float(sum(half * weights @ [rate(low + half * (1 + node)) for node in nodes] for low, half in pieces))


_INTEGRALS: dict[str, Callable[[float], float]] = {
    "constant": lambda t: t,
    "root": lambda t: 2 * (math.sqrt(1 + t) - 1),
    "linear": math.log1p,
    "mixed": lambda t: _quadrature(SCHEDULES["mixed"], t, math.pi / 8),
    "power": lambda t: 2 - 2 / math.sqrt(1 + t),
}


def alpha_integral(schedule: str, t: float) -> float:
    """∫ α from 0 to t, for the schedules of the published comparison."""
    return _INTEGRALS[schedule](t)


def _retimed(case: Case) -> Comparison:
    """Directions at time t of a re-timed flow beside those of the plain one at τ(t)."""
    start, attention, t = _tokens(case), Attention(case["beta"]), case["time"]
    if case["retimed"] == "pre":
        slower = replace(NAMED["pre"], attention=Slots(input="norm", step=0.5))
        motions, tau = (Motion(slower, attention, 1.0), Motion(NAMED["pre"], attention, 1.0)), t / 2
    elif case["retimed"] == "sqrt-scaling":
        motions = (Motion(NAMED["sqrt-scaling"], attention, 1.0), Motion(NAMED["post"], attention, 1.0))
        tau = alpha_integral("root", t)
    else:
        ngpt, alpha = NAMED["ngpt"], SCHEDULES[case["retimed"]]
        motions = (Motion(ngpt, attention, 1.0, alpha=alpha), Motion(ngpt, attention, 1.0))
        tau = alpha_integral(case["retimed"], t)
    ends = (next(follow(motion, start, [end], step=0.025)) for motion, end in zip(motions, (t, tau), strict=True))
    measured, claimed = (unit(x) for _, x in ends)
    return Comparison(measured, claimed, tolerance=2e-3, scale=1.0)


def _logarithmic(case: Case) -> Comparison:
    """(θ, r/t) of the flow at t = e^u beside dθ/du = P A/q, dq/du = ⟨θ, A⟩ − q (A/|A| for Peri-LN), and q ≤ max(q_0, 1)."""
    x, beta = _tokens(case), case["beta"]
    motion = Motion(NAMED[case["scheme"]], Attention(beta), 1.0)
    (_, early), (_, late) = follow(motion, x, [1.0, math.exp(case["span"])], step=0.05)

    def rates(theta: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        A = plain_attention(unit(theta), beta)
        A = unit(A) if motion.scheme.attention.output == "norm" else A
        return tangent(unit(theta), A) / q, (unit(theta) * A).sum(-1, keepdim=True) - q

    theta, q = unit(early), length(early)
    largest = torch.maximum(q, torch.ones_like(q))
    left = case["span"]
    while left > 0:
        h = min(left, 0.05 * max(min(1.0, float(q.min())), 1e-3))
        k1 = rates(theta, q)
        k2 = rates(theta + h / 2 * k1[0], q + h / 2 * k1[1])
        k3 = rates(theta + h / 2 * k2[0], q + h / 2 * k2[1])
        k4 = rates(theta + h * k3[0], q + h * k3[1])
        moves = [(a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(k1, k2, k3, k4, strict=True)]
        theta, q, left = theta + h * moves[0], q + h * moves[1], left - h
    measured = torch.cat([unit(late), length(late) / math.exp(case["span"])], 1)
    bounded = torch.where(q <= largest * (1 + 1e-9), q, -q)  # a q beyond its bound counts as wrong
    return Comparison(measured, torch.cat([unit(theta), bounded], 1), tolerance=1e-4, scale=1.0)


_WEIGHTS_DIAL = Dial(
    name="bend",
    label="distance b of the weights V = I + b·S from the identity",
    start=0.0,
    end=1.0,
    case=Case({"tokens": 3, "dim": 3, "beta": 1.0, "radius": 1.0, "alpha": 1.0, "scheme": "post"}, ((3, 1.0),)),
    quantity="a component of θ̇",
    caption="At V = I the printed energy is that of the flow. With any other weights its gradient is another direction, and "
    "the further V is from I, the further it is from where tokens move.",
)

STATEMENTS = (
    Statement(
        id="2:law",
        title="One law for all schemes",
        claim="θ̇_j = (1/s_j) P_{θ_j} A_j(Θ) in every scheme, with the table's s_j and ṙ_j.",
        tested="Directions and radii of the library's flow, which comes from the slots, beside the printed table.",
        space=_SIZES | _RADII | {"time": Range(0, 6), "alpha": Range(0.01, 10, log=True), "scheme": choice(*SIX)},
        conclusion=_law,
        notices=("sign", "constant", "exponent"),
        by="scheme",
        cases=120,
        simulation={"schemes": ["post", "pre", "peri", "ngpt"], "tokens": 32},
    ),
    Statement(
        id="2:layers",
        title="Layers are Euler steps",
        claim="Residual layers are Euler steps of an ODE, with the table's layer and flow for each scheme.",
        tested="The printed layer with its update multiplied by h = 10⁻⁶: (x(h) − x)/h beside the library's flow.",
        space=_SIZES | _RADII | {"time": Range(0, 6), "alpha": Range(0.01, 10, log=True), "scheme": choice(*SIX)},
        conclusion=_euler,
        by="scheme",
        cases=120,
        limit="h → 0 is h = 10⁻⁶, within 0.1 %.",
        simulation={"schemes": ["post", "pre"], "tokens": 32, "solver": "layers"},
    ),
    Statement(
        id="2:gradient",
        title="Gradient structure",
        claim="With V = QᵀK = KᵀQ: θ̇_j = −(1/(s_j Z_j)) ∇_j E, E(Θ) = −(1/2β) Σ exp(β⟨θ_j, θ_k⟩).",
        tested="The library's flow with weights V = I + bend·S beside the gradient of E.",
        space=_SIZES | _RADII | {"bend": Range(0, 1), "alpha": Range(0.1, 10, log=True), "scheme": choice(*SIX)},
        conclusion=lambda case: _gradient(case, corrected=False),
        by="scheme",
        correction=Correction(
            claim="E(Θ) = −(1/2β) Σ exp(β θ_jᵀ V θ_k); for V = I this is the printed E.",
            why="−∂E/∂θ_j = Σ_k exp(β θ_jᵀVθ_k)·½(V + Vᵀ)θ_k = Z_j A_j needs the logits inside E: an E without V has weights "
            "exp(β⟨θ_j, θ_k⟩) and no factor V. It is a gradient of the flow only for V = I.",
            conclusion=lambda case: _gradient(case, corrected=True),
        ),
        dial=_WEIGHTS_DIAL,
        notices=(),
    ),
    Statement(
        id="2:energy",
        title="The energy never rises",
        claim="Gradient structure, V = I: E(Θ) = −(1/2β) Σ exp(β⟨θ_j, θ_k⟩) never rises along the flow of any scheme, since "
        "dE/dt = −Σ_j |∇_jE|²/(s_j Z_j).",
        tested="dE/dt by automatic differentiation of E along the library's flow, at six times up to t = 4, beside the formula "
        "with the printed s_j; and E at each time is not above E at the time before.",
        space=_SIZES | _RADII | {"alpha": Range(0.1, 10, log=True), "scheme": choice(*SIX)},
        conclusion=_energy_falls,
        by="scheme",
        cases=60,
        notices=("sign", "constant", "exponent"),
        remark="Every term is negative or 0 whatever the s_j > 0, so that no regulation of speed lets E rise. With weights E "
        "needs them inside (2:gradient).",
        simulation={"schemes": list(SIX), "tokens": 16, "beta": 2},
    ),
    Statement(
        id="2:time",
        title="Time change",
        claim="Dividing every s_j by the same positive factor only re-times the flow.",
        tested="Directions at t beside those of the plain flow at τ(t): sqrt-scaling and Post-LN, nGPT with rising and falling "
        "α_t, Pre-LN halved.",
        space={"tokens": whole(2, 8), "dim": whole(2, 6), "beta": Range(0.01, 5, log=True), "time": Range(0.2, 3)}
        | _RADII
        | {"retimed": choice("sqrt-scaling", "pre", *_INTEGRALS)},
        conclusion=_retimed,
        by="retimed",
        cases=36,
        remark="The factor may depend on time. Tolerance: √t is not smooth at 0, where fixed steps lose digits.",
        simulation={"schemes": ["post", "sqrt-scaling"], "tokens": 32, "time": 20},
    ),
    Statement(
        id="2:log-time",
        title="Logarithmic time",
        claim="With u = ln t and q_j = r_j/t Pre-LN and Peri-LN become autonomous and bounded: dθ/du = P A/q, dq/du = ⟨θ, A⟩ − "
        "q.",
        tested="The library's flow at t = e^u beside the autonomous equations, integrated on their own; and q ≤ max(q at u = "
        "0, 1).",
        space={"tokens": whole(2, 8), "dim": whole(2, 6), "beta": Range(0.01, 5, log=True), "span": Range(0.5, 4)}
        | _RADII
        | {"scheme": choice("pre", "peri")},
        conclusion=_logarithmic,
        by="scheme",
        cases=36,
        remark="From t = 1 on: at t = 0 q is infinite. Peri-LN has A/|A| for A.",
        simulation={"schemes": ["pre", "peri"], "tokens": 16, "time": 400, "axis": "log"},
    ),
)
