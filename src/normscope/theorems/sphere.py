"""Paper 3, the geometry of LayerNorm: hyperplane, radius, ellipsoid, centre (equations 2 to 5)."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import centre, hyperplane_basis, layer_ellipsoid, layer_norm, length, rms_ellipsoid, rms_norm
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Correction, Dial, Statement
from normscope.theorems.tensors import jacobian, rank

_SPACE: Space = {"dim": whole(2, 256), "mean": Range(-1000, 1000), "size": Range(1e-3, 1e3, log=True)}
_GAINS: Space = {"gain": Range(0.01, 100, log=True), "norm": choice("layer", "rms")}
_TOKENS = 6


def _tokens(case: Case) -> Float[Tensor, "tokens dim"]:
    return torch.add(case.normal("x", _TOKENS, case["dim"]), case["mean"]) * float(case["size"])


def _affine(case: Case) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
    """A gain of either sign, of sizes up to the case's gain and down to its inverse, and a bias."""
    size = case["gain"] ** (2 * case.uniform("sizes", case["dim"]) - 1)
    return size * case.normal("signs", case["dim"]).sign(), 3 * case.normal("bias", case["dim"])


def _projection(case: Case) -> Comparison:
    x, B = _tokens(case), hyperplane_basis(case["dim"])
    return Comparison(centre(x), x @ B @ B.T, tolerance=1e-9, scale=float(length(x).max()))


def _radius(case: Case) -> Comparison:
    """LayerNorm of the library and of PyTorch beside √d·Px/|Px|, and its length beside √d."""
    x, B = _tokens(case), hyperplane_basis(case["dim"])
    flat = x @ B
    expected = math.sqrt(case["dim"]) * flat / length(flat) @ B.T
    own, torchs = layer_norm(x), F.layer_norm(x, (case["dim"],), eps=0.0)
    measured = torch.cat([own.flatten(), torchs.flatten(), length(own).flatten()])
    radius = torch.full((_TOKENS,), math.sqrt(case["dim"]), dtype=torch.float64)
    claimed = torch.cat([expected.flatten(), expected.flatten(), radius])
    return Comparison(measured, claimed, tolerance=1e-8, scale=1.0, base=float(case["dim"]))


def _without_projection(case: Case) -> Comparison:
    """RMSNorm of the library and of PyTorch beside √d·x/|x|; and PyTorch's LayerNorm of x beside its RMSNorm of Px."""
    x, d = _tokens(case), case["dim"]
    B = hyperplane_basis(d)
    torchs, projected = (F.rms_norm(values, (d,), eps=0.0) for values in (x, x @ B @ B.T))
    own, layer = rms_norm(x), F.layer_norm(x, (d,), eps=0.0)
    expected = math.sqrt(d) * x / x.square().sum(-1, keepdim=True).sqrt()
    measured = torch.cat([own, torchs, layer]).flatten()
    claimed = torch.cat([expected, expected, projected]).flatten()
    lengths = torch.full((2 * _TOKENS,), math.sqrt(d), dtype=torch.float64)
    return Comparison(
        torch.cat([measured, length(torch.cat([own, torchs])).flatten()]),
        torch.cat([claimed, lengths]),
        tolerance=1e-8,
        scale=1.0,
        base=float(d),
    )


def _ellipsoid(case: Case) -> Comparison:
    """Σ_i (y_i/g_i)² beside d, and the level and plane of the library's ellipsoid beside 1 and 0."""
    x, (gain, _) = _tokens(case), _affine(case)
    kind = case["norm"]
    y = (layer_norm if kind == "layer" else rms_norm)(x, gain)
    shape = (layer_ellipsoid if kind == "layer" else rms_ellipsoid)(gain, torch.zeros_like(gain))
    level, off = shape.level(y), shape.off_plane(y) / float(gain.abs().max())
    return Comparison(torch.cat([(y / gain).square().sum(-1) / case["dim"], level, 1 + off]), 1.0, tolerance=1e-6)


def _centre(case: Case) -> Comparison:
    """The middle between the values of x and of −x, beside the bias."""
    x, (gain, bias) = _tokens(case), _affine(case)
    norm = layer_norm if case["norm"] == "layer" else rms_norm
    middle = (norm(x, gain, bias) + norm(-x, gain, bias)) / 2
    return Comparison(middle, bias.expand_as(middle), tolerance=1e-6, scale=1.0)


def _dimension(case: Case) -> float:
    """The dimension of the set of values of LayerNorm: the rank of its derivative.

    Of the mean the share ``centred`` is subtracted: all of it is LayerNorm, nothing of it RMSNorm.
    """
    share = case.values.get("centred", 1.0)
    return float(rank(jacobian(lambda x: rms_norm(x - share * x.mean()), case.normal("x", case["dim"]))))


def _two_less(case: Case) -> Comparison:
    """The dimension beside d − 2, where the whole mean is subtracted; of other norms nothing is claimed."""
    if case.values.get("centred", 1.0) < 1:
        return Comparison(0.0, 0.0, decides=False)
    return Comparison(_dimension(case), case["dim"] - 2.0, tolerance=1e-9, scale=1.0)


_CENTRE_DIAL = Dial(
    name="centred",
    label="share of the mean that is subtracted",
    start=0.0,
    end=1.0,
    case=Case({"dim": 3}, ((0, 1.0),)),
    quantity="dimension of the set of values, d = 3",
    caption="At 0 this is RMSNorm, whose values are the whole sphere of d − 1 dimensions, and so they are for every share "
    "below 1. LayerNorm subtracts all of the mean: the values lie in a hyperplane too, and the sphere has d − 2 dimensions.",
)


STATEMENTS = (
    Statement(
        id="3:eq2",
        title="Subtracting the mean is a projection",
        claim="LayerNorm subtracts the mean: it projects on the hyperplane orthogonal to 1.",
        tested="x − mean(x)·1 beside B Bᵀ x with an orthonormal basis B of the hyperplane.",
        space=_SPACE,
        conclusion=_projection,
    ),
    Statement(
        id="3:eq3",
        title="Radius √d",
        claim="Then it scales to radius √d: every normalised token lies on one sphere.",
        tested="LayerNorm of the library and of PyTorch beside √d·Px/|Px|, and its length beside √d.",
        space={**_SPACE, "mean": Range(-100, 100)},
        conclusion=_radius,
        notices=("sign", "constant", "exponent"),
        remark="With an ε in the root, as trained models have, tokens of small variance fall short of the radius.",
    ),
    Statement(
        id="3:rms",
        title="RMSNorm: no projection",
        claim="RMSNorm does the same without the projection.",
        tested="RMSNorm of the library and of PyTorch beside √d·x/|x|, its length beside √d; PyTorch's LayerNorm of x beside "
        "its RMSNorm of the projected x.",
        space={**_SPACE, "mean": Range(-100, 100)},
        conclusion=_without_projection,
        notices=("sign", "constant", "exponent"),
        cases=90,
    ),
    Statement(
        id="3:eq4",
        title="A gain makes an ellipsoid",
        claim="The gain γ makes the sphere an ellipsoid.",
        tested="Σ(y_i/γ_i)² beside d, and the level and plane of the library's ellipsoid beside 1 and 0; LayerNorm and "
        "RMSNorm.",
        space={**_SPACE, "mean": Range(-100, 100)} | _GAINS,
        conclusion=_ellipsoid,
        by="norm",
    ),
    Statement(
        id="3:eq5",
        title="A bias moves the centre",
        claim="The bias β moves the ellipsoid's centre.",
        tested="The middle between the values of x and of −x beside β; LayerNorm and RMSNorm.",
        space={**_SPACE, "mean": Range(-100, 100)} | _GAINS,
        conclusion=_centre,
        by="norm",
    ),
    Statement(
        id="3:sphere",
        title="The dimension of the sphere",
        claim="Every normalised token lies on a (d−1)-dimensional sphere.",
        tested="The rank of the derivative of LayerNorm beside d − 1.",
        space={"dim": whole(2, 48)},
        conclusion=lambda case: Comparison(_dimension(case), case["dim"] - 1.0, tolerance=1e-9, scale=1.0),
        correction=Correction(
            claim="Every normalised token lies on a sphere of d − 2 dimensions, the sphere of radius √d in the "
            "(d−1)-dimensional hyperplane.",
            why="The hyperplane takes one dimension and the radius another. For RMSNorm, without the hyperplane, d − 1 is "
            "right. Read as 'sphere of a (d−1)-dimensional space' the printed words are right too.",
            conclusion=_two_less,
        ),
        dial=_CENTRE_DIAL,
        notices=(),
    ),
)
