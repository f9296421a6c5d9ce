"""Paper 1, Theorems 9 to 12: what softmax does not see, what a temperature is, and what biases are for."""

import math

import torch

from normscope.core.norms import length
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Statement
from normscope.theorems.tensors import attention_of

_SIZES: Space = {"keys": whole(2, 32), "dim": whole(2, 16), "head": whole(1, 8)}


def _shift(case: Case) -> Comparison:
    """Attention with a constant added to every logit, which a common change of all keys along q does."""
    q, k = case.normal("q", case["head"]), case.normal("k", case["keys"], case["head"])
    moved = k + case["shift"] * q / (q @ q)
    before, after = (attention_of(q[None], keys) for keys in (k, moved))
    return Comparison(after, before, tolerance=1e-9, scale=1.0)


def _temperature_ends(case: Case) -> Comparison:
    """|T a_t − 1| ≤ e^{cΔ} − 1 for logits c·w that differ by at most cΔ; 1 − a* ≤ (T − 1) e^{−c·gap}."""
    keys, factor = case["keys"], case["factor"]
    scores = case.normal("scores", keys).sort(descending=True).values
    a = attention_of(torch.ones(1, 1, dtype=torch.float64), scores[:, None], factor if case["end"] == "∞" else 1 / factor)[0]
    if case["end"] == "∞":
        exponent = min(factor * float(scores[0] - scores[1]), 600.0)
        return Comparison(a[1:].sum(), (keys - 1) * math.exp(-exponent), "≤", tolerance=1e-9)
    exponent = float(scores[0] - scores[-1]) / factor
    return Comparison((keys * a - 1).abs().max(), math.expm1(exponent), "≤", tolerance=1e-9)


def _projection(case: Case) -> Comparison:
    """ln(a_t/a_s) beside the length of u = W_QKᵀ x times the difference of the projections of y_t and y_s on it."""
    x, y = case.normal("x", case["dim"]), case.normal("y", case["keys"], case["dim"])
    W_Q, W_K = (case.normal(name, case["dim"], case["head"]) / case["dim"] for name in ("W_Q", "W_K"))
    W_Q = W_Q * case["size"]
    a = attention_of((x @ W_Q)[None], y @ W_K)[0]
    u = W_K @ (W_Q.T @ x)
    along = y @ u / length(u)
    first, last = along.argmax(), along.argmin()
    odds = (a[first].log() - a[last].log())[None]
    predicted = torch.cat([length(u) * (along[first] - along[last]), (length(u) * (along - along.max())).softmax(-1)])
    scale = torch.cat([predicted[:1].clamp(min=1e-3), predicted[1:]])
    base = torch.cat([length(u), torch.ones_like(a)])
    return Comparison(torch.cat([odds, a]), predicted, tolerance=1e-8, scale=scale, base=base)


def _biases(case: Case) -> Comparison:
    """Attention with biases on queries and keys, beside attention without on tokens with one constant coordinate more."""
    x, y = case.normal("x", 4, case["dim"]), case.normal("y", case["keys"], case["dim"])
    W_Q, W_K = (case.normal(name, case["dim"], case["head"]) / math.sqrt(case["dim"]) for name in ("W_Q", "W_K"))
    b_q, b_k = (case["size"] * case.normal(name, case["head"]) for name in ("b_q", "b_k"))
    biased = attention_of(x @ W_Q + b_q, y @ W_K + b_k)
    if case["term"] == "key":
        return Comparison(biased, attention_of(x @ W_Q + b_q, y @ W_K), tolerance=1e-8, scale=1.0)
    constant = torch.full((4, 1), case["constant"], dtype=torch.float64)
    wider = torch.cat([W_Q, b_q[None] / case["constant"]])
    return Comparison(biased, attention_of(torch.cat([x, constant], 1) @ wider, y @ W_K), tolerance=1e-8, scale=1.0)


STATEMENTS = (
    Statement(
        id="1:9",
        title="Shifts of logits",
        claim="A constant shift of logits changes nothing.",
        tested="Attention after adding a constant to every logit of a query equals that before.",
        space={"keys": whole(2, 32), "head": whole(1, 16), "shift": Range(-1000, 1000)},
        conclusion=_shift,
    ),
    Statement(
        id="1:10",
        title="Factors of logits",
        claim="A positive factor on logits is an inverse temperature: 0 → isotropic, ∞ → argmax.",
        tested="|T a_t − 1| ≤ e^{cΔ} − 1 for small factors c, 1 − a* ≤ (T − 1) e^{−c·gap} for large ones.",
        space={"keys": whole(2, 64), "factor": Range(1, 1e6, log=True), "end": choice("0", "∞")},
        conclusion=_temperature_ends,
        by="end",
        limit="The limits are bounds with a rate, tested for factors from 1e-6 to 1e6; with equal largest logits ∞ gives each "
        "the same share.",
        notices=("sign",),
    ),
    Statement(
        id="1:11",
        title="No-Norm attention is a projection",
        claim="No-Norm attention is the projection of y_t on one vector W_QKᵀ x, whose length is an inverse temperature.",
        tested="ln(a_t/a_s) over the difference of projections is that length, and attention is the softmax of length times "
        "projection.",
        space=_SIZES | {"size": Range(1e-3, 10, log=True)},
        conclusion=_projection,
        notices=("sign", "constant", "exponent"),
    ),
    Statement(
        id="1:12",
        title="Biases",
        claim="Query and key biases add only terms that softmax removes, or ones that a constant direction in x reproduces.",
        tested="Attention with both biases equals that without the key bias, and that without any on tokens with a constant "
        "coordinate.",
        space=_SIZES
        | {"size": Range(0.01, 10, log=True), "constant": Range(0.1, 10, log=True), "term": choice("query", "key")},
        conclusion=_biases,
        by="term",
        remark="The constant direction is one of what the head reads. After a Pre-Norm it is constant only where |x| is.",
    ),
)
