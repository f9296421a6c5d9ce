"""Paper 3, what a head's weights are: null spaces of W_QK, bias terms, and W_VO as a key-value store."""

import math

import torch

from normscope.core import Attention, HeadWeights
from normscope.core.norms import unit
from normscope.measures.head_spaces import factors
from normscope.models.factors import singular_factors
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Statement
from normscope.theorems.tensors import attention_of

_SPACE: Space = {"dim": whole(2, 48), "head": whole(1, 16), "tokens": whole(2, 24)}


def _weights(case: Case) -> list[torch.Tensor]:
    """W_Q and W_K (dim × k), W_V (dim × k) and W_O (k × dim) of one head."""
    d, k = case["dim"], case["head"]
    return [case.normal(name, d, k) / math.sqrt(d) for name in ("W_Q", "W_K", "W_V")] + [
        case.normal("W_O", k, d) / math.sqrt(k)
    ]


def _null_spaces(case: Case) -> Comparison:
    """Attention of queries in the left null space beside 1/T, logits of keys in the right one beside 0, and both dimensions."""
    W_Q, W_K, *_ = _weights(case)
    d, k, size = case["dim"], case["head"], 10.0
    U, S, Vh = torch.linalg.svd(W_Q @ W_K.T)
    rank = int((1e-9 * S[0] < S).sum())
    y = size * case.normal("y", case["tokens"], d)
    own = int(factors(W_Q[None], W_K[None]).rank)
    measured = [torch.tensor([float(d - rank >= d - k), 1.0 + own - rank], dtype=torch.float64)]
    if rank < d:
        blind = size * unit(case.normal("blind", 3, d - rank)) @ U[:, rank:].T
        weights = attention_of(blind @ W_Q, y @ W_K, 1 / math.sqrt(k))
        unseen = size * unit(case.normal("unseen", 3, d - rank)) @ Vh[rank:]
        scores = (y @ W_Q) @ (unseen @ W_K).T / math.sqrt(k)
        measured += [case["tokens"] * weights.flatten(), 1 + scores.flatten() / size**2]
    return Comparison(torch.cat(measured), 1.0, tolerance=1e-8, base=float(case["tokens"]))


def _biases(case: Case) -> Comparison:
    """Attention with biases beside attention by the terms that depend on the key; outputs with a value bias beside b_V W_O."""
    W_Q, W_K, W_V, W_O = _weights(case)
    x, y = case.normal("x", 3, case["dim"]), case.normal("y", case["tokens"], case["dim"])
    b_q, b_k, b_v = (case["size"] * case.normal(name, case["head"]) for name in ("b_q", "b_k", "b_v"))
    scale = 1 / math.sqrt(case["head"])
    weights = attention_of(x @ W_Q + b_q, y @ W_K + b_k, scale)
    if case["term"] == "scores":
        key_bias = y @ (b_q @ W_K.T)
        return Comparison(weights, (scale * (x @ W_Q @ W_K.T @ y.T + key_bias)).softmax(-1), tolerance=1e-8, scale=1.0)
    measured = weights @ (y @ W_V + b_v) @ W_O
    return Comparison(measured, weights @ y @ W_V @ W_O + b_v @ W_O, tolerance=1e-8, scale=max(case["size"], 1.0))


def _singular(case: Case) -> Comparison:
    """The update of a head beside Σ_i ⟨Σ_t a_t y_t, σ_i u_i⟩ v_i over at most k singular vectors, and σ_i beside PyTorch's."""
    W_Q, W_K, W_V, W_O = _weights(case)
    x = case.normal("x", case["tokens"], case["dim"])
    update = Attention(1.0, HeadWeights(W_Q[None], W_K[None], W_V[None], W_O[None]))(x)
    found = singular_factors(W_V[None], W_O[None])
    keys, values = (found.left * found.values.unsqueeze(-2))[0], found.right[0].T
    written = attention_of(x @ W_Q, x @ W_K) @ x @ keys @ values
    spectrum = torch.linalg.svdvals(W_V @ W_O)[: len(values)]
    measured, claimed = torch.cat([update.flatten(), found.values[0]]), torch.cat([written.flatten(), spectrum])
    return Comparison(measured, claimed, tolerance=1e-9, scale=float(claimed.abs().max()))


STATEMENTS = (
    Statement(
        id="3:3.3",
        title="Null spaces of W_QK",
        claim="At least d−k directions of queries attend to everything equally, and likewise for keys.",
        tested="Attention of queries from the left null space beside 1/T, logits of keys from the right one beside 0, "
        "dimensions beside d − k.",
        space=_SPACE,
        conclusion=_null_spaces,
        notices=("sign", "constant", "exponent"),
        remark="For keys 'equally' means that every query gives them the same logit, 0; the weight still depends on the other "
        "keys.",
    ),
    Statement(
        id="3:bias",
        title="Bias terms",
        claim="Softmax ignores the terms that are constant over keys; b_q W_Kᵀ is a key bias; the value bias gives b_V W_O.",
        tested="Attention with all biases beside x W_QK yᵀ + b_q W_Kᵀ yᵀ alone; what a head with a value bias writes beside "
        "b_V W_O added.",
        space=_SPACE | {"size": Range(0.01, 10, log=True), "term": choice("scores", "values")},
        conclusion=_biases,
        by="term",
    ),
    Statement(
        id="3:svd",
        title="W_VO as a key-value store",
        claim="With W_VO = U Σ Vᵀ: columns of UΣ are keys, rows of Vᵀ are the directions written to the stream.",
        tested="The update of the library's head beside the sum over its singular vectors (singular_factors), at most k "
        "of them.",
        space=_SPACE,
        conclusion=_singular,
        remark="The keys are compared with points of the sphere. They do not lie on it: their lengths are the singular values.",
    ),
)
