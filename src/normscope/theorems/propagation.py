"""Paper 1, Theorems 4 to 6 and 8: what small noise on queries, keys and messages does to a head's output, to first order."""

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.measures.propagation import FirstOrderChange, first_order_change
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Statement

_SIZES: Space = {"keys": whole(2, 32), "head": whole(1, 16), "dim": whole(1, 16)}
_TERMS = ("q", "k", "m")
_STEP = 1e-4


def _inputs(case: Case, *names: str) -> list[Tensor]:
    """q, k, m and their noise, by name."""
    shapes = {"q": (case["head"],), "k": (case["keys"], case["head"]), "m": (case["keys"], case["dim"])}
    return [case.normal(name, *shapes[name[-1]]) for name in names]


def _output(q: Tensor, k: Tensor, m: Tensor) -> Float[Tensor, " dim"]:
    """Σ_t a_t m_t, written out."""
    scores = k @ q
    weights = (scores - scores.max()).exp()
    return weights @ m / weights.sum()


def _along(point: tuple[Tensor, ...], moves: tuple[Tensor, ...]) -> Float[Tensor, " dim"]:
    """The derivative of the output along a move, by automatic differentiation."""
    derivative: Tensor = torch.func.jvp(_output, point, moves)[1]
    return derivative


def _term(change: FirstOrderChange, name: str) -> Tensor:
    return {"q": change.from_q, "k": change.from_k, "m": change.from_m}[name]


def _first_order(case: Case) -> Comparison:
    """The change of the output itself, by central differences, beside the formula's term."""
    q, k, m, d_q, d_k, d_m = _inputs(case, "q", "k", "m", "dq", "dk", "dm")
    q = q * case["sharpness"]
    name = case["term"]
    parts = [d if letter == name else torch.zeros_like(d) for letter, d in zip(_TERMS, (d_q, d_k, d_m), strict=True)]
    up, down = (_output(*(x + h * d for x, d in zip((q, k, m), parts, strict=True))) for h in (_STEP, -_STEP))
    claimed = _term(first_order_change(q, k, m, d_q, d_k, d_m), name)
    scale = float(m.norm() * max(float(d_q.norm()), float(d_k.norm() * q.norm()), 1.0))
    return Comparison((up - down) / (2 * _STEP), claimed, tolerance=1e-4, scale=max(float(claimed.abs().max()), 1e-3 * scale))


def _sparse(case: Case) -> Comparison:
    """|q and k terms| ≤ 2(1 − a*)·max|m_t − m*|·max|change of logit|, and |m term − ε*| ≤ (1 − a*)·max|ε_t − ε*|."""
    q, k, m, d_q, d_k, d_m = _inputs(case, "q", "k", "m", "dq", "dk", "dm")
    gap = case["gap"]
    scores = case.uniform("scores", case["keys"]) - 1 - gap
    scores[0] = 0.0
    k = k + (scores - k @ q)[:, None] * q / (q @ q)  # keys with these scores
    change = first_order_change(q, k, m, d_q, d_k, d_m)
    rest = scores[1:].exp().sum() / scores.exp().sum()
    spread = (m - m[0]).norm(dim=-1).max()
    moves = [(k - k[0]) @ d_q, (d_k - d_k[0]) @ q]
    bounds = [2 * rest * spread * move.abs().max() for move in moves] + [rest * (d_m - d_m[0]).norm(dim=-1).max()]
    found = [change.from_q.norm(), change.from_k.norm(), (change.from_m - d_m[0]).norm()]
    return Comparison(torch.stack(found), torch.stack(bounds), "≤", tolerance=1e-5, base=rest)


def _isotropic(case: Case) -> tuple[Tensor, ...]:
    """Queries, keys, messages and noise with equal logits, bent so that the case's condition for stability is true."""
    q, k, m, d_q, d_k, d_m = _inputs(case, "q", "k", "m", "dq", "dk", "dm")
    k = k - (k @ q)[:, None] * q / (q @ q)
    condition = case["condition"]
    if condition == "keys constant":
        k = k[:1].expand_as(k)
    elif condition == "keys uncorrelated":
        k = _uncorrelated(k, m)
    elif condition == "query zero":
        q = torch.zeros_like(q)
    elif condition == "key noise uncorrelated":
        d_k = _uncorrelated(d_k, m)
    elif condition == "message noise averages to 0":
        d_m = d_m - d_m.mean(0)
    return q, k, m, d_q, d_k, d_m


def _uncorrelated(z: Float[Tensor, "keys _"], m: Float[Tensor, "keys _"]) -> Float[Tensor, "keys _"]:
    """What is left of z when its variation over tokens along that of m is taken away."""
    centred = m - m.mean(0)
    basis = torch.linalg.svd(centred, full_matrices=False)
    kept = basis.U[:, basis.S.gt(1e-9 * float(basis.S[0]) + 1e-30)]
    return z - torch.mm(kept, kept.T @ z)


_STABLE = {
    "keys constant": "q",
    "keys uncorrelated": "q",
    "query zero": "k",
    "key noise uncorrelated": "k",
    "message noise averages to 0": "m",
}


def _isotropic_stability(case: Case) -> Comparison:
    """The output with noise where a condition says that the output does not change, beside the output without."""
    q, k, m, d_q, d_k, d_m = _isotropic(case)
    if case["condition"] == "keys uncorrelated":
        q = torch.zeros_like(q)  # equal scores whatever the keys
    a = torch.full((case["keys"],), 1 / case["keys"], dtype=torch.float64)
    change = _term(first_order_change(q, k, m, d_q, d_k, d_m), _STABLE[case["condition"]])
    return Comparison(a @ m + change, a @ m, tolerance=1e-6, scale=float(m.abs().max()))


def _isotropic_formula(case: Case) -> Comparison:
    """The terms as averages with weights 1/T, beside autograd through softmax."""
    q, k, m, d_q, d_k, d_m = _inputs(case, "q", "k", "m", "dq", "dk", "dm")
    k = k - (k @ q)[:, None] * q / (q @ q)
    parts = {
        "q": ((m * ((k - k.mean(0)) @ d_q)[:, None]).mean(0), (d_q, torch.zeros_like(k), torch.zeros_like(m))),
        "k": (((m - m.mean(0)) * (d_k @ q)[:, None]).mean(0), (torch.zeros_like(q), d_k, torch.zeros_like(m))),
        "m": (d_m.mean(0), (torch.zeros_like(q), torch.zeros_like(k), d_m)),
    }
    claimed, moves = parts[case["term"]]
    return Comparison(_along((q, k, m), moves), claimed, tolerance=1e-8, scale=max(float(claimed.abs().max()), 1e-6))


def _key_norms(case: Case) -> Comparison:
    """Multiplicative key noise at equal logits w: the first-order change beside w⟨m̃_t κ_t⟩."""
    q, k, m = _inputs(case, "q", "k", "m")
    w = case["score"]
    k = k + (w - k @ q)[:, None] * q / (q @ q)
    kappa = case.normal("kappa", case["keys"])
    if case["noise"] == "constant":
        kappa = kappa[:1].expand_as(kappa)
    elif case["noise"] == "uncorrelated":
        kappa = _uncorrelated(kappa[:, None], m).squeeze(-1)
    elif case["noise"] == "query zero":
        q = torch.zeros_like(q)
    moves = (torch.zeros_like(q), kappa[:, None] * k, torch.zeros_like(m))
    measured = _along((q, k, m), moves)
    claimed = w * ((m - m.mean(0)) * kappa[:, None]).mean(0) if case["noise"] == "any" else torch.zeros(case["dim"])
    scale = max(abs(w) * float((m.abs() * kappa.abs()[:, None]).mean()), 1e-9)
    return Comparison(measured, claimed, tolerance=1e-7, scale=scale)


def _independent_key_norms(case: Case) -> Comparison:
    """The RMS change of the output over many draws of independent κ, beside |w|·RMS(κ)·√(Σ|m̃_t|²)/T."""
    draws, keys = 400, case["keys"]
    q, k, m = _inputs(case, "q", "k", "m")
    k = k + (case["score"] - k @ q)[:, None] * q / (q @ q)
    kappa = case.normal("kappa", draws, keys)
    still = torch.zeros_like(q), torch.zeros_like(m)
    changes = torch.func.vmap(lambda noise: _along((q, k, m), (still[0], noise[:, None] * k, still[1])))(kappa)
    measured = changes.square().sum(-1).mean().sqrt()
    claimed = abs(case["score"]) * (m - m.mean(0)).square().sum().sqrt() / keys
    return Comparison(measured, claimed, "≈", tolerance=1.5, base=float(keys))


STATEMENTS = (
    Statement(
        id="1:4",
        title="First-order propagation",
        claim="Perturb q: E_a[m_t k̃_tᵀ] ε^q. Perturb k: E_a[m̃_t ε_t^kᵀ] q. Perturb m: E_a[ε_t^m]. With z̃_t = z_t − E_a[z].",
        tested="The formula's terms (measures.propagation) beside central differences of the output itself.",
        space=_SIZES | {"sharpness": Range(0.01, 3, log=True), "term": choice(*_TERMS)},
        conclusion=_first_order,
        by="term",
    ),
    Statement(
        id="1:5",
        title="Sparse attention",
        claim="Sparse: the q and k terms vanish; the m term is ε^m of the selected token.",
        tested="The terms' lengths are at most 2(1 − a*) times the spreads of messages and logits; the m term is within (1 − "
        "a*) of ε*.",
        space=_SIZES | {"gap": Range(2, 20)},
        conclusion=_sparse,
        limit="'Vanish' is a limit a* → 1: the terms are bounded by a constant times 1 − a*, for gaps of the logits up to 20.",
        remark="The covariance of two quantities under weights with one atom a* is at most 2(1 − a*) times the product of "
        "their ranges from it.",
        notices=("sign",),
    ),
    Statement(
        id="1:6i",
        title="Isotropic attention: the formulas",
        claim="Isotropic: the same formulas with a_t = 1/T.",
        tested="Averages with weights 1/T beside automatic differentiation through softmax at equal logits.",
        space=_SIZES | {"term": choice(*_TERMS)},
        conclusion=_isotropic_formula,
        by="term",
    ),
    Statement(
        id="1:6ii",
        title="Isotropic attention: when it is stable",
        claim="Stable to q noise if keys are constant or uncorrelated with messages; to k noise if q = 0 or noise is "
        "uncorrelated with messages; to m noise if it averages to 0.",
        tested="The output with first-order noise equals the output without it, where a condition is made true.",
        space=_SIZES | {"condition": choice(*_STABLE)},
        conclusion=_isotropic_stability,
        by="condition",
    ),
    Statement(
        id="1:8i",
        title="Key norms under isotropic attention",
        claim="Multiplicative key noise on isotropic attention: 0 if κ_t is uncorrelated with messages, or constant, or q = 0; "
        "else w⟨m̃_t κ_t⟩.",
        tested="Automatic differentiation through softmax along κ_t k_t, at equal logits w, beside the formula.",
        space=_SIZES | {"score": Range(-10, 10), "noise": choice("any", "constant", "uncorrelated", "query zero")},
        conclusion=_key_norms,
        by="noise",
    ),
    Statement(
        id="1:8ii",
        title="Independent key noise averages out",
        claim="Multiplicative key noise on isotropic attention is ≈ 0 if κ_t is independent of the messages.",
        tested="The RMS change over 400 draws of κ, by automatic differentiation through softmax, is |w|·RMS(κ)·√(Σ|m̃_t|²)/T, "
        "which falls as 1/√T.",
        space={"keys": whole(2, 4096), "head": whole(1, 4), "dim": whole(1, 16), "score": Range(0.1, 10, log=True)},
        conclusion=_independent_key_norms,
        limit="'≈ 0' is in the mean over draws; one draw is off by |w|·RMS(κ)·RMS(m)/√T. Tested up to T = 4096, within a "
        "factor of 1.5.",
        notices=("sign", "constant", "exponent"),
        cases=45,
    ),
)
