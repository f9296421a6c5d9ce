"""Paper 2, Theorem 4.2: attention of random directions is small, so norms of the output make the first step large."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import Attention, HeadWeights
from normscope.core.norms import length, unit
from normscope.dynamics import Motion
from normscope.schemes import NAMED
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.flows import SIX, turning
from normscope.theorems.statement import Curves, Statement, lines_table

_CONSTANT = 1.0
_LARGEST = 1500


def _size(d: int, share: float) -> int:
    """A number of tokens n with e^{√d} ≥ n log n ≥ d: from the smallest (share 0) to the largest, or to one that is quick."""

    def at_least(bound: float) -> int:
        n = 2
        while n * math.log(n) < bound:
            n += 1
        return n

    low = at_least(d)
    high = max(low, min(at_least(math.exp(math.sqrt(d))) - 1, _LARGEST))
    return int(low * math.pow(high / low, share) + 0.5)


def _directions(case: Case) -> Float[Tensor, "tokens dim"]:
    return unit(case.normal("start", _size(case["dim"], case["share"]), case["dim"]))


def _attention(case: Case) -> Attention:
    """β = 1 and weights whose QᵀK and V have operator norm 1."""
    d, kind = case["dim"], case["weights"]
    if kind == "identity":
        return Attention(1.0)
    QK, V = case.normal("QK", d, d), case.normal("V", d, d)
    if kind == "rotations":
        QK, V = torch.linalg.qr(QK).Q, torch.linalg.qr(V).Q
    elif kind == "rank one":
        QK, V = (torch.outer(unit(W[0]), unit(W[1])) for W in (QK, V))
    else:
        QK, V = (W / torch.linalg.matrix_norm(W, 2) for W in (QK, V))
    return Attention(1.0, HeadWeights(W_Q=QK[None], W_K=torch.eye(d, dtype=torch.float64)[None], W_V=V[None]))


def _bound(n: int, d: int) -> float:
    return math.sqrt(math.log(n) / n) + math.log(n) / d


def _small_attention(case: Case) -> Comparison:
    """The largest |A_j| beside C(√(log n/n) + log n/d)."""
    theta = _directions(case)
    bound = _bound(len(theta), case["dim"])
    return Comparison(length(_attention(case)(theta)).max(), _CONSTANT * bound, "≤", tolerance=0.0, base=bound)


def _first_step(case: Case) -> Comparison:
    """The speed of schemes that normalise their output over that of the others, beside c·min(d/log n, √(n/log n))."""
    theta, attention = _directions(case), _attention(case)
    speeds: dict[str, list[Tensor]] = {"norm": [], "none": []}
    for scheme in map(NAMED.__getitem__, SIX):
        motion = Motion(scheme, attention, 1.0)
        speeds[scheme.attention.output].append(length(turning(theta, motion.velocity(theta, 0.0))[0]))
    n = len(theta)
    gain = min(case["dim"] / math.log(n), math.sqrt(n / math.log(n)))
    measured = torch.stack([(large / small).min() for large in speeds["norm"] for small in speeds["none"]])
    return Comparison(measured, gain / (2 * _CONSTANT), "≥", tolerance=0.0, base=gain)


def _curves() -> Curves:
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for weights in ("identity", "rotations", "rank one"):
        dims = [8, 12, 16, 24, 32, 48, 64, 96, 128]
        found = []
        for d in dims:
            case = Case({"dim": d, "share": 1.0, "weights": weights}, ((d, 1.0),))
            theta = _directions(case)
            found.append(float(length(_attention(case)(theta)).max()) / _bound(len(theta), d))
        lines[weights] = ([float(d) for d in dims], found)
    return Curves(
        lines_table(lines),
        "dimension d",
        "largest |A_j| over √(log n/n) + log n/d",
        "A bound that holds with one constant has no line that rises with the size.",
        log_x=True,
    )


_SPACE: Space = {
    "dim": whole(8, 192),
    "share": Range(0, 1),
    "weights": choice("identity", "rotations", "random", "rank one"),
}
_PROBABLY = (
    "'With high probability' is in every draw of the test, d from 8 to 192 and n up to 1,500; the constant C is not printed, "
    "here it is 1"
)

STATEMENTS = (
    Statement(
        id="2:4.2i",
        title="Attention of random directions is small",
        claim="β = 1, |QᵀK|, |V| ≤ 1, uniform directions, e^{√d} ≥ n log n ≥ d: with high probability |A_j(0)| ≤ C(√(log n/n) "
        "+ log n/d) for all j.",
        tested="The largest |A_j| of a draw beside the bound with C = 1.",
        space=_SPACE,
        conclusion=_small_attention,
        by="weights",
        limit=_PROBABLY + ".",
        curves=_curves,
        cases=45,
        notices=("sign", "constant"),
        simulation={"schemes": ["post", "pre"], "tokens": 128, "dim": 64, "beta": 1, "time": 4},
    ),
    Statement(
        id="2:4.2ii",
        title="A norm of the output makes the first step large",
        claim="The first step of Peri-LN and nGPT is larger than the others' by Ω(min(d/log n, √(n/log n))).",
        tested="The smallest ratio of speeds over all tokens of a draw beside ½ min(d/log n, √(n/log n)).",
        space=_SPACE,
        conclusion=_first_step,
        by="weights",
        limit=_PROBABLY + ", so that Ω has the constant 1/(2C); r_0 = 1, α_0 = 1.",
        cases=30,
        notices=("sign",),
        simulation={"schemes": ["post", "peri", "ngpt"], "tokens": 128, "dim": 64, "beta": 1, "time": 4},
    ),
)
