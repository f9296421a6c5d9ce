"""Paper 3, what weights are: null spaces of W_QK, bias terms, W_VO as a key-value store, rows of W_2, the final norm."""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normscope.core import Attention, HeadWeights
from normscope.core.norms import centre, hyperplane_basis, length, unit
from normscope.measures.head_spaces import factors
from normscope.measures.singular import oriented
from normscope.models.factors import singular_factors
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Correction, Dial, Statement
from normscope.theorems.tensors import attention_of

_SPACE: Space = {"dim": whole(2, 48), "head": whole(1, 16), "tokens": whole(2, 24)}


def _weights(case: Case) -> list[Tensor]:
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


def _signs(case: Case) -> Comparison:
    """W and singular values from the library's factors with signs of pairs (u, v) flipped, beside W and NumPy's.

    Signs of the u alone flipped: |W − W'| beside 2√(Σσ²) of the flipped ones. Signs chosen by the library for rows e of a
    matrix: max_e v·e beside max_e |v·e|.
    """
    W_Q, W_K, W_V, W_O = _weights(case)
    A, B = (W_V, W_O) if case["matrix"] == "vo" else (W_Q, W_K.T)
    W, rows, found = A @ B, case.normal("rows", case["tokens"], case["dim"]), singular_factors(A[None], B[None])
    U, values, V = found.left[0], found.values[0], found.right[0]
    signs = case.normal("signs", len(values)).sign()
    signs[0] = -1.0
    both, alone = (U * signs * values) @ (V * signs).T, (U * signs * values) @ V.T
    chosen, scores, _ = oriented(found, rows, 1)
    nearest = torch.stack([(rows @ v).max() for v in chosen.right[0].T])
    spectrum = torch.from_numpy(np.linalg.svd(W.numpy(), compute_uv=False)[: len(values)].copy())
    moved, of_chosen = (W - alone).norm(), (chosen.left[0] * chosen.values[0]) @ chosen.right[0].T
    measured = [both.flatten(), of_chosen.flatten(), values, moved[None], nearest, scores[0, :, 0]]
    largest = (rows @ V).abs().amax(0)
    claimed = [W.flatten(), W.flatten(), spectrum, 2 * values[signs < 0].norm()[None], largest, largest]
    return Comparison(torch.cat(measured), torch.cat(claimed), tolerance=1e-9, scale=float(largest.max() + values[0]))


def _pairs(case: Case) -> Comparison:
    """Attention of one head beside the softmax of Σ_i σ_i⟨x,u_i⟩⟨v_i,y⟩/√k; of a query along ±u_i: the largest ±⟨v_i,y⟩."""
    W_Q, W_K, *_ = _weights(case)
    scale = 1 / math.sqrt(case["head"])
    found = singular_factors(W_Q[None], W_K.T[None])
    U, values, V = found.left[0], found.values[0], found.right[0]
    x, y = case.normal("x", 3, case["dim"]), case.normal("y", case["tokens"], case["dim"])
    weights = attention_of(x @ W_Q, y @ W_K, scale)
    along = torch.cat([U.T, -U.T])
    selected = attention_of(along @ W_Q, y @ W_K, scale).argmax(-1)
    near = torch.cat([y @ V, -y @ V], 1)
    measured = torch.cat([weights.flatten(), near[selected, torch.arange(len(along))]])
    sums = sum(value * torch.outer(x @ u, y @ v) for u, value, v in zip(U.T, values, V.T, strict=True))
    claimed = torch.cat([(scale * torch.as_tensor(sums)).softmax(-1).flatten(), near.amax(0)])
    return Comparison(measured, claimed, tolerance=1e-8, scale=1.0)


def _layer(case: Case) -> Comparison:
    """PyTorch's attention layer with all biases beside Σ_h (a_h x W_VO^h + b_V^h W_O^h) + b_O."""
    heads, d = case["heads"], case["heads"] * case["head"]
    x, W_in, W_out = case.normal("x", case["tokens"], d), case.normal("in", 3 * d, d), case.normal("out", d, d)
    W_in, W_out = W_in / math.sqrt(d), W_out / math.sqrt(d)
    b_in, b_O = case["size"] * case.normal("b_QKV", 3 * d), case["size"] * case.normal("b_O", d)
    measured, weights = F.multi_head_attention_forward(
        x, x, x, d, heads, W_in, b_in, None, None, False, 0.0, W_out, b_O, average_attn_weights=False
    )
    claimed, parts = b_O.expand_as(x), [part.chunk(heads) for part in (W_in[2 * d :], b_in[2 * d :], W_out.T)]
    for a, W_V, b_V, W_O in zip(torch.as_tensor(weights), *parts, strict=True):
        claimed = claimed + a @ x @ W_V.T @ W_O + b_V @ W_O
    return Comparison(measured, claimed, tolerance=1e-8, scale=max(case["size"], 1.0))


# PyTorch's activation, and f as its paper writes it.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (F.relu, lambda z: (z + z.abs()) / 2),
    "gelu": (F.gelu, lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2),
    "silu": (F.silu, lambda z: z / (1 + (-z).exp())),
}


def _rows(case: Case) -> Comparison:
    """PyTorch's feed-forward layers beside Σ_i f(x W_1 + b_1)_i · (row i of W_2) + b_2, one row after the other."""
    d, hidden = case["dim"], case["hidden"]
    torchs, f = _ACTIVATIONS[case["activation"]]
    W_1, W_2 = case.normal("W_1", d, hidden) / math.sqrt(d), case.normal("W_2", hidden, d) / math.sqrt(hidden)
    b_1, b_2 = (case["size"] * case.normal(name, size) for name, size in (("b_1", hidden), ("b_2", d)))
    x = case.normal("x", case["tokens"], d)
    measured = F.linear(torchs(F.linear(x, W_1.T, b_1)), W_2.T, b_2)
    claimed = b_2.expand_as(x)
    for coefficient, row in zip(f(x @ W_1 + b_1).T, W_2, strict=True):
        claimed = claimed + torch.outer(coefficient, row)
    return Comparison(measured, claimed, tolerance=1e-8, scale=max(case["size"], 1.0))


def _favoured(case: Case) -> Comparison:
    """Mean and spread over the whole sphere of the logits of PyTorch's final norm and unembedding.

    They are taken over the points ± of an orthonormal frame of the hyperplane, which have the first and second moments of the
    sphere. Beside them β W_Eᵀ and √(d/(d−1))·|P(γ ∘ e)| for every row e of W_E; and at every point the part of the logits that
    is due to β, beside β W_Eᵀ.
    """
    d = case["dim"]
    frame = hyperplane_basis(d) @ torch.linalg.qr(case.normal("frame", d - 1, d - 1)).Q
    states = case["radius"] * torch.cat([frame.T, -frame.T]) + case["mean"]
    gain, bias = case.normal("gain", d), case["size"] * case.normal("bias", d)
    W_E = case.normal("W_E", case["vocabulary"], d)
    logits, plain = (F.linear(F.layer_norm(states, (d,), gain, some, eps=0.0), W_E) for some in (bias, None))
    spread = math.sqrt(d / (d - 1)) * length(centre(gain * W_E)).squeeze(-1)
    favour = W_E @ bias
    measured = torch.cat([logits.mean(0), logits.std(0, correction=0), (logits - plain).flatten()])
    claimed = torch.cat([favour, spread, favour.repeat(len(states))])
    return Comparison(measured, claimed, tolerance=1e-6, scale=max(case["size"], 1.0))


def _least_favour(case: Case) -> tuple[float, float]:
    """What γ and β add to the log-odds of some token at every state, at least: measured, and max_e (β·e' − √d·|P((γ−1) ∘ e')|).

    Log-odds are log-probabilities less their mean over tokens, e' is e less the mean row of W_E, and what is added is the
    difference between PyTorch's final norm with γ and β and the one without. It is measured at the states ±P((γ−1) ∘ e') of all
    tokens, where it is largest and smallest for each. Below 0 no token is favoured always. The statement's cases have β = 0.
    """
    d = case["dim"]
    gain, bias = case.normal("gain", d), case.values.get("bias", 0.0) * case.normal("bias", d)
    W_E = case.normal("W_E", case["vocabulary"], d)
    relative = W_E - W_E.mean(0)
    pull = centre((gain - 1) * relative)
    states = case["radius"] * torch.cat([unit(pull), -unit(pull)]) + case["mean"]
    favoured, plain = (
        centre(F.linear(F.layer_norm(states, (d,), weight, shift, eps=0.0), W_E).log_softmax(-1))
        for weight, shift in ((gain, bias), (None, None))
    )
    claimed = relative @ bias - math.sqrt(d) * length(pull).squeeze(-1)
    return float((favoured - plain).amin(0).max()), float(claimed.max())


def _gain_favours(case: Case) -> Comparison:
    return Comparison(_least_favour(case)[0], 0.0, "≥", tolerance=1e-9, scale=1.0)


def _gain_favours_corrected(case: Case) -> Comparison:
    measured, claimed = _least_favour(case)
    return Comparison(measured, claimed, tolerance=1e-6, scale=max(1.0, abs(claimed)))


_BIAS_DIAL = Dial(
    name="bias",
    label="size of the bias β",
    start=4.0,
    end=0.0,
    case=Case({"dim": 6, "vocabulary": 8, "radius": 1.0, "mean": 0.0}, ((0, 1.0),)),
    quantity="least change of log-odds, of the token that is favoured most",
    caption="Above 0, γ and β raise the log-odds of some token at every state. A large β does so; at 0 only γ is left, which "
    "lowers every token at some state.",
)


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
    Statement(
        id="3:Bi",
        title="Signs of singular vectors",
        claim="Appendix B: singular vectors have a common sign to choose; it is chosen so that v is nearest to some embedding.",
        tested="W_VO and W_QK from the library's singular vectors, with some pairs (u, v) → (−u, −v) and with the library's "
        "signs, beside the product of the weights; singular values beside NumPy's; how far W moves where u alone is flipped, "
        "beside 2√(Σσ²); max_e v·e with the library's signs beside max_e |v·e|.",
        space=_SPACE | {"matrix": choice("vo", "qk")},
        conclusion=_signs,
        by="matrix",
        cases=60,
        remark="σ > 0 leaves one sign for each pair, if all σ are different. Then max_e v·e ≥ max_e (−v)·e decides it.",
    ),
    Statement(
        id="3:Bii",
        title="Singular vectors of W_QK",
        claim="Appendix B, for W_QK: left vectors σu are what queries match, right vectors v the keys that they attend to.",
        tested="The library's attention of a head beside the softmax of Σ_i σ_i⟨x,u_i⟩⟨v_i,y⟩/√k over at most k pairs; a query "
        "along ±u_i gives the largest weight to the key with the largest ±⟨v_i,y⟩.",
        space=_SPACE,
        conclusion=_pairs,
        cases=60,
    ),
    Statement(
        id="3:layer",
        title="Output biases",
        claim="The value bias gives a per-head output bias b_V W_O, and the layer adds b_O.",
        tested="PyTorch's attention layer with all biases beside the sum over heads of a x W_VO + b_V W_O, and b_O.",
        space={"heads": whole(1, 6), "head": whole(1, 8), "tokens": whole(2, 16), "size": Range(0.01, 10, log=True)},
        conclusion=_layer,
        cases=60,
    ),
    Statement(
        id="3:ff",
        title="Feed-forward layers write rows of W_2",
        claim="Feed-forward: rows of W_2 are written with weights f(x W_1).",
        tested="PyTorch's two linear layers and activation, with biases, beside the sum of rows of W_2 with weights f(x W_1 + "
        "b_1), and b_2.",
        space={
            "dim": whole(1, 32),
            "hidden": whole(1, 64),
            "tokens": whole(1, 16),
            "size": Range(0.01, 10, log=True),
            "activation": choice(*_ACTIVATIONS),
        },
        conclusion=_rows,
        by="activation",
        cases=60,
        remark="For layers without a gate. A gated layer has weights f(x W_1)·(x W_3).",
    ),
    Statement(
        id="3:output",
        title="The bias of the final norm favours some tokens",
        claim="Output: softmax(LN(x_L) W_Eᵀ); β of the final norm favours some tokens always.",
        tested="What β adds to each logit at every state, from PyTorch's LayerNorm and unembedding, beside β W_Eᵀ; mean and "
        "spread of each logit over the whole sphere beside β W_Eᵀ and √(d/(d−1))·|P(γ ∘ e)|, which has no β.",
        space={
            "dim": whole(2, 32),
            "vocabulary": whole(1, 32),
            "radius": Range(0.01, 100, log=True),
            "mean": Range(-10, 10),
            "size": Range(0.01, 10, log=True),
        },
        conclusion=_favoured,
        cases=90,
        remark="Printed in one sentence for γ and β; for γ see 3:output-gain.",
    ),
    Statement(
        id="3:output-gain",
        title="The gain of the final norm favours some tokens",
        claim="γ of the final norm favours some tokens always.",
        tested="What γ adds to the log-odds of each token (beside γ = 1, without β) at the states where that is least, from "
        "PyTorch's LayerNorm and unembedding: for some token at least 0.",
        space={
            "dim": whole(2, 32),
            "vocabulary": whole(2, 32),
            "radius": Range(0.01, 100, log=True),
            "mean": Range(-10, 10),
        },
        conclusion=_gain_favours,
        cases=90,
        correction=Correction(
            claim="γ favours no token always: over all states it adds to the log-odds of a token from −√d·|P((γ−1) ∘ e')| to "
            "+√d·|P((γ−1) ∘ e')|, with e' = e less the mean row of W_E. Only β adds the same, β·e', at every state.",
            why="Before γ and β, LN(−x) = −LN(x): what γ adds at x, ((γ−1) ∘ LN(x))·e', it takes away at −x. LN(x) reaches "
            "every point of radius √d in the hyperplane, so that the extremes are those of the projection P.",
            conclusion=_gain_favours_corrected,
        ),
        dial=_BIAS_DIAL,
        notices=(),
        remark="Printed in one sentence for γ and β; for β see 3:output.",
    ),
)
