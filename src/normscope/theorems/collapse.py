"""Paper 1, Theorem 7: when noise on the norms of queries and keys makes sparse attention select another token.

Two keys are enough: a circuit collapses if some other key overtakes the selected one. With w the logit of the selected key, w'
that of the other, and noise q → (1 + κ^q) q, k_t → (1 + κ_t) k_t, the logits become
w_t (1 + κ^q)(1 + κ_t) = w_t (1 + κ^q + κ_t) + O(κ²).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import unit
from normscope.measures.collapse_probability import collapse_margin, collapse_probability
from normscope.theorems.cases import Case, Range, Space, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Correction, Curves, Dial, Statement, lines_table
from normscope.theorems.tensors import attention_of

_SCORES: Space = {"selected": Range(-3, 3), "gap": Range(0.01, 2.9, log=True)}
_KAPPAS = ("kappa_query", "kappa_selected", "kappa_other")
_NOT_ZERO = 1e-12


def _read(case: Case) -> tuple[float, float, float, float, float]:
    """Logits w of the selected key, w' of the other (neither exactly 0, where the ratio has no meaning), κ^q, κ of both."""
    w = case["selected"] or _NOT_ZERO
    other = (w - case["gap"]) or -_NOT_ZERO
    return w, other, case["kappa_query"], case["kappa_selected"], case["kappa_other"]


def _criterion(w: float, other: float, left: float, right: float) -> float:
    """Above 0 if the printed criterion sees no collapse: w/w' against λ = right/left, the other way round if w'·left < 0."""
    left = left or _NOT_ZERO
    distance = w / other - right / left
    return distance if other * left > 0 else -distance


def _agreement(gap: float, criterion: float) -> Comparison:
    """Whether the true order of the two noisy logits and the criterion have one sign; the margin is 0 at a tie."""
    return Comparison(gap, criterion, "±")


def _score(q: Float[Tensor, " head"], k: Float[Tensor, "keys head"]) -> Float[Tensor, " keys"]:
    """w_t = q·k_t."""
    return k @ q


def _score_change(
    q: Float[Tensor, " head"],
    k: Float[Tensor, "keys head"],
    noise_q: Float[Tensor, " head"],
    noise_k: Float[Tensor, "keys head"],
) -> Float[Tensor, " keys"]:
    """ε_t = δq·k_t + q·δk_t + δq·δk_t."""
    return k @ noise_q + noise_k @ q + noise_k @ noise_q


def _overtaken(case: Case) -> Comparison:
    """1 if attention with noise selects the same token as without, else −1, beside min_t (w_{t*} − w_t) − (ε_t − ε_{t*}).

    The second is negative iff some t ≠ t* has w_{t*} − w_t < ε_t − ε_{t*}. Where it is 0 two tokens tie: either is right.
    """
    q, k = case.normal("q", case["head"]), case.normal("k", case["keys"], case["head"])
    noise_q, noise_k = case["noise"] * case.normal("dq", case["head"]), case["noise"] * case.normal("dk", *k.shape)
    selected = int(attention_of(q[None], k)[0].argmax())
    selected_with_noise = int(attention_of((q + noise_q)[None], k + noise_k)[0].argmax())
    others = torch.arange(case["keys"]) != selected
    w, change = _score(q, k), _score_change(q, k, noise_q, noise_k)
    distance = (w[selected] - w[others]) - (change[others] - change[selected])
    return Comparison(1.0 if selected_with_noise == selected else -1.0, float(distance.min()), "±")


def _to_first_order(case: Case) -> Comparison:
    w, other, query, selected, key = _read(case)
    gap = w * (1 + query + selected) - other * (1 + query + key)
    return _agreement(gap, _criterion(w, other, 1 + query + selected, 1 + query + key))


def _noisy_scores(case: Case) -> Float[Tensor, " two"]:
    """The logits of both keys after the whole noise, as products of noisy vectors."""
    w, other, query, selected, key = _read(case)
    q = unit(case.normal("q", 8))
    keys = torch.stack([w * q, other * q])
    return (torch.tensor([1 + selected, 1 + key], dtype=torch.float64)[:, None] * keys) @ ((1 + query) * q)


def _whole_noise(case: Case) -> Comparison:
    w, other, query, selected, key = _read(case)
    scores = _noisy_scores(case)
    return _agreement(float(scores[0] - scores[1]), _criterion(w, other, 1 + query + selected, 1 + query + key))


def _whole_noise_corrected(case: Case) -> Comparison:
    w, other, query, selected, key = _read(case)
    scores = _noisy_scores(case)
    left, right = (1 + query) * (1 + selected), (1 + query) * (1 + key)
    return _agreement(float(scores[0] - scores[1]), _criterion(w, other, left, right))


def _log_odds(case: Case) -> float:
    """ln(a_*/a_t) of the selected key against the other, with noise on the query alone."""
    w, q = case["selected"], unit(case.normal("q", 8))
    keys = torch.stack([w * q, (w - case["gap"]) * q])
    weights = attention_of(((1 + case["kappa_query"]) * q)[None], keys)[0]
    return float(weights[0].log() - weights[1].log())


def _query_noise(case: Case) -> Comparison:
    return Comparison(_log_odds(case), 0.0, "≥", tolerance=1e-9, scale=case["gap"])


def _query_noise_corrected(case: Case) -> Comparison:
    return Comparison(_log_odds(case), (1 + case["kappa_query"]) * case["gap"], tolerance=1e-6, scale=case["gap"])


def _temperature(case: Case) -> Comparison:
    """Margins and probabilities of collapse at another temperature, beside those at 1."""
    scores = 3 * case.normal("scores", 4, case["keys"])
    hot = case["factor"] * scores
    measured, claimed = (torch.cat([collapse_margin(s), collapse_probability(s, [0.1, 0.3]).flatten()]) for s in (hot, scores))
    return Comparison(measured, claimed, tolerance=1e-6, scale=1.0)


def _critical_noise(angle: float, selected: float) -> float:
    """The smallest κ_t − κ_{t*} at which the key at ``angle`` overtakes the aligned one of equal length, by bisection."""
    q = torch.tensor([1.0, 0.0], dtype=torch.float64)
    keys = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        noisy = keys * torch.tensor([[1 + selected], [1 + selected + middle]], dtype=torch.float64)
        low, high = (low, middle) if float((noisy @ q).diff()) > 0 else (middle, high)
    return high


def _small_angles(case: Case) -> Comparison:
    angle = case["angle"]
    return Comparison(_critical_noise(angle, case["kappa_selected"]), angle**2 / 2, "≈", tolerance=1.3, base=angle)


def _angle_curves() -> Curves:
    angles = [0.02 * i for i in range(1, 40)]
    lines = {
        "measured": (angles, [_critical_noise(angle, 0.0) for angle in angles]),
        "½θ²": (angles, [angle**2 / 2 for angle in angles]),
    }
    return Curves(
        lines_table(lines),
        "angle θ of the other key",
        "critical κ_t − κ_{t*}",
        "The noise that makes a key at angle θ overtake the aligned one: ½θ² while angles are small.",
        log_x=True,
        log_y=True,
    )


_BOTH_DIAL = Dial(
    name="kappa_query",
    label="noise κ^q on the query's norm",
    start=0.0,
    end=0.4,
    case=Case({"selected": 1.2, "gap": 0.2, "kappa_selected": 0.0, "kappa_other": 0.22}, ((0, 1.0),)),
    quantity="gap of logits, and criterion w*/w − λ",
    caption="The other key has the noise κ_t = 0.22 and has overtaken the selected one: the gap is negative at every position. "
    "Noise on the query is common to both keys and changes no order, but it moves the printed λ until the criterion reports no "
    "collapse.",
)
_QUERY_DIAL = Dial(
    name="kappa_query",
    label="noise κ^q on the query's norm",
    start=1.5,
    end=-1.5,
    case=Case({"selected": 1.0, "gap": 0.5}, ((0, 1.0),)),
    quantity="log-odds of the selected key",
    caption="The log-odds are multiplied by 1 + κ^q. Noise on a norm keeps that positive; below κ^q = −1 the query points the "
    "other way and the order of all logits turns round.",
)

STATEMENTS = (
    Statement(
        id="1:collapse",
        title="Circuit collapse, as defined",
        claim="Noise on q and k makes another token selected iff some t ≠ t* has w_{t*} − w_t < ε_t − ε_{t*}, with ε_t the "
        "change of w_t.",
        tested="Whether attention with noise selects the token that it selects without, beside whether some t meets the "
        "inequality, with ε_t = δq·k_t + q·δk_t + δq·δk_t.",
        space={"keys": whole(2, 16), "head": whole(1, 8), "noise": Range(0.05, 5, log=True)},
        conclusion=_overtaken,
        cases=300,
        notices=("sign",),
        remark="The slack is how far the noisy logits of the worst case are from a tie, at most 1.",
    ),
    Statement(
        id="1:7i",
        title="Circuit collapse, to first order",
        claim="Collapse iff some t ≠ t* has w_{t*}/w_t < λ (if w_t(1+κ^q+κ_{t*}) > 0; else reversed), λ = "
        "(1+κ^q+κ_t)/(1+κ^q+κ_{t*}).",
        tested="The sign of the criterion is that of the gap of logits whose change ε_t is taken to first order, w_t(κ^q + "
        "κ_t).",
        space=_SCORES | dict.fromkeys(_KAPPAS, Range(-1.5, 1.5)),
        conclusion=_to_first_order,
        cases=300,
        notices=("sign",),
        remark="The printed case distinction is right. It leaves out w_t = 0 and 1 + κ^q + κ_{t*} = 0, where the undivided "
        "form w_{t*}(1+κ^q+κ_{t*}) < w_t(1+κ^q+κ_t) still says what happens.",
    ),
    Statement(
        id="1:7ii",
        title="Circuit collapse, for the whole noise",
        claim="The same criterion, with ε_t the change of w_t.",
        tested="The sign of the criterion is that of the gap between the noisy logits themselves.",
        space=_SCORES | dict.fromkeys(_KAPPAS, Range(-0.4, 0.4)),
        conclusion=_whole_noise,
        cases=300,
        correction=Correction(
            claim="Collapse iff some t ≠ t* has w_{t*}/w_t < λ (if w_t(1+κ^q)(1+κ_{t*}) > 0; else reversed), λ = "
            "(1+κ_t)/(1+κ_{t*}).",
            why="The noisy logit is w_t(1+κ^q)(1+κ_t). The query's factor is common to all keys and cancels from λ; the "
            "printed λ keeps it because it drops κ^q κ_t. The two differ by κ^q(κ_{t*} − κ_t) to second order, so only noise "
            "on both q and k tells them apart.",
            conclusion=_whole_noise_corrected,
        ),
        dial=_BOTH_DIAL,
        notices=(),
        remark="measures.collapse_probability computes the whole noise, not its first order.",
    ),
    Statement(
        id="1:7iii",
        title="Query noise alone",
        claim="Query noise alone never collapses.",
        tested="The log-odds of the selected key stay positive when the query is multiplied by 1 + κ^q.",
        space=_SCORES | {"kappa_query": Range(-1.5, 3)},
        conclusion=_query_noise,
        cases=120,
        correction=Correction(
            claim="Query noise alone never collapses if κ^q > −1, as it is when a norm stays positive; the log-odds are "
            "multiplied by 1 + κ^q.",
            why="All logits get the factor 1 + κ^q, so every gap does. Below κ^q = −1 the factor is negative and the order of "
            "all logits turns round. The printed criterion says so too: with κ_t = 0 it has λ = 1 and, for w_t(1+κ^q) < 0, the "
            "reversed case.",
            conclusion=_query_noise_corrected,
        ),
        dial=_QUERY_DIAL,
        notices=(),
    ),
    Statement(
        id="1:7iv",
        title="Temperature cancels",
        claim="Temperature cancels from the criterion.",
        tested="Collapse margins and probabilities (stability) of logits times a factor equal those of the logits.",
        space={"keys": whole(2, 16), "factor": Range(1e-3, 1e3, log=True)},
        conclusion=_temperature,
        cases=45,
    ),
    Statement(
        id="1:7v",
        title="Equal lengths and small angles",
        claim="For equal key lengths, an aligned selected key and small angles θ_t: collapse when ½θ_t² ≲ κ_t − κ_{t*}.",
        tested="The smallest κ_t − κ_{t*} that collapses, by bisection on noisy logits, is ½θ² within a factor of 1.3.",
        space={"angle": Range(1e-3, 0.5, log=True), "kappa_selected": Range(-0.1, 0.1)},
        conclusion=_small_angles,
        limit="'≲' is read as: the same up to a factor of 1.3, for angles up to 0.5 and |κ_{t*}| up to 0.1. Exactly it is (1 + "
        "κ_{t*})(1/cos θ − 1).",
        curves=_angle_curves,
        notices=("sign", "constant", "exponent"),
    ),
)
