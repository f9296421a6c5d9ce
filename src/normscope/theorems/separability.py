"""Paper 1, Theorems 1 to 3: which subspaces of an embedding parallel heads can read on their own.

A token is x = Σ_α x_α with x_α = E_α a_α. Where the subspaces are linearly independent, the dual bases D_α read coordinates,
D_αᵀx = a_α, and the logits of a head with W_Q = W_K = D_α are products of coordinates a_α alone (``models.worlds.World``).
"""

import itertools
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from normscope.core import HeadWeights
from normscope.core.norms import NORMS, hyperplane_basis, length, unit
from normscope.measures.head_spaces import factors
from normscope.models.worlds import Subspaces, World, head_scores, project_heads
from normscope.schemes import NAMED
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Correction, Curves, Dial, Statement, lines_table
from normscope.theorems.tensors import jacobian, rank

_SIZES: Space = {"subspaces": whole(2, 4), "width": whole(1, 4), "spare": Range(0, 3, whole=True), "tokens": whole(2, 8)}
_LENGTHS: Space = {"lengths": Range(0.01, 100, log=True)}
_COMPARED = ("none", "pre", "qkv")
_PARTS: Space = {"parts": choice(2, 3), "width": whole(1, 4), "tokens": whole(1, 6)}
_LEAN: Space = {"independence": Range(1e-3, 1, log=True)}


def _subspaces(case: Case, orthogonal: bool = False) -> Subspaces:
    """Random subspaces, orthogonal ones or ones that all lean on the first, in the hyperplane orthogonal to 1."""
    count, width = case["subspaces"], case["width"]
    dim = count * width + case["spare"]
    parts = torch.linalg.qr(case.normal("bases", dim, count * width)).Q.unflatten(1, (count, width)).movedim(1, 0)
    if not orthogonal:
        leaning = parts[0] + case["independence"] * parts[1:]
        parts = torch.cat([parts[:1], leaning / (1 + case["independence"] ** 2) ** 0.5])
    return Subspaces(tuple(hyperplane_basis(dim + 1) @ part for part in parts))


def _coordinates(case: Case, name: str, spheres: bool) -> list[Float[Tensor, "tokens width"]]:
    """Coordinates in each subspace, of lengths that vary as the case says; on spheres each subspace has one length."""
    found = []
    for index in range(case["subspaces"]):
        directions = unit(case.normal(f"{name} {index}", case["tokens"], case["width"]))
        size = case.normal(f"{'all' if spheres else name} radii {index}", 1 if spheres else case["tokens"], 1).clamp(-1, 1)
        found.append(case["lengths"] ** size * directions)
    return found


def _replaced(case: Case, orthogonal: bool = False, spheres: bool = False) -> tuple[World, World]:
    """A world, and the same with every part but the first taken from other tokens."""
    spaces = _subspaces(case, orthogonal)
    own, other = (_coordinates(case, name, spheres) for name in ("own", "other"))
    return World(spaces, tuple(own)), World(spaces, (own[0], *other[1:]))


def _scores(scheme: str, world: World) -> Float[Tensor, "tokens tokens"]:
    """Logits of the head that reads the first part."""
    return head_scores(NAMED[scheme], world.weights, world.embeddings)[0]


def _independent(case: Case) -> Comparison:
    """Logits of the head that reads the first part, before and after the others are replaced."""
    before, after = (_scores("none", world) for world in _replaced(case))
    return Comparison(after, before, tolerance=1e-5, scale=max(float(before.abs().max()), 1e-3))


def _null_space(case: Case) -> Comparison:
    """Dimensions of the left and right null space of W_QK, and what is left of the other subspaces after it."""
    world, _ = _replaced(case)
    W_Q, W_K = world.weights.W_Q, world.weights.W_K
    if W_Q is None or W_K is None:
        raise ValueError("a world's heads have weights")
    W_QK = W_Q[0] @ W_K[0].T
    W_QK = W_QK / W_QK.norm()
    N, others = len(W_QK), torch.cat(world.subspaces.bases[1:], 1)
    nullities = torch.tensor([N - rank(W) for W in (W_QK, W_QK.T)], dtype=torch.float64)
    seen = torch.stack([(W_QK @ others).abs().max(), (W_QK.T @ others).abs().max()])
    claimed = torch.tensor([float(N - case["width"])] * 2 + [1.0, 1.0])
    return Comparison(torch.cat([nullities, 1 + seen]), claimed, tolerance=1e-9)


def _score_slopes(weights: HeadWeights, x: Float[Tensor, "tokens dim"]) -> list[Float[Tensor, "others dim"]]:
    """How logits change when the first token moves: as a query, and as a key, against all others."""

    def scores(first: Tensor) -> Tensor:
        found = head_scores(NAMED["none"], weights, torch.cat([first[None], x[1:]]))[0]
        return torch.cat([found[0, 1:], found[1:, 0]])

    return list(jacobian(scores, x[0]).chunk(2))


def _shared(case: Case) -> Comparison:
    """What logits of a head blind to β depend on, beside the library's row spaces of W_QK; and how much of α that can be.

    α and β have s directions in common. Everything that logits do not depend on is in a null space of W_QK, and all but s
    directions of α are seen: a head that reads all of α needs s = 0.
    """
    width, shared = case["width"], min(case["shared"], case["width"])
    dim = 2 * width + case["spare"]
    frame = case.normal("frame", dim, 2 * width - shared)
    alpha, beta = frame[:, :width], frame[:, width - shared :]
    away = torch.linalg.svd(beta).U[:, width:]  # all that a head can read if its scores are not to depend on β
    W_Q, W_K = ((away @ case.normal(name, dim - width, case["head"]))[None] for name in ("W_Q", "W_K"))
    slopes = _score_slopes(HeadWeights(W_Q, W_K), case.normal("x", dim + 2, dim))
    found = factors(W_Q, W_K)
    measured, claimed = [], []
    for slope, rows in zip(slopes, (found.queries[0], found.keys[0]), strict=True):
        hidden = slope - slope @ rows @ rows.T
        seen = [rank(slope, 1e-8), rank(torch.linalg.svd(slope).Vh[: int(found.rank)] @ alpha, 1e-8)]
        measured += [*map(float, seen), float(hidden.norm() / slope.norm()), float((slope @ beta).norm() / slope.norm())]
        claimed += [float(found.rank), float(min(case["head"], width - shared)), 0.0, 0.0]
    return Comparison(torch.tensor(measured), torch.tensor(claimed), tolerance=1e-6, scale=1.0)


def _orthogonal_spheres(case: Case) -> Comparison:
    """Logits after a norm with a gain, which the head undoes, on orthogonal spheres: other parts replaced, and not."""
    worlds = _replaced(case, orthogonal=True, spheres=True)
    readers, found = worlds[0].subspaces.duals[0], []
    gain = (0.5 * case.normal("gain", len(readers))).exp()
    for world in worlds:
        q = NORMS[case["norm"]](world.embeddings, gain) @ (readers / gain[:, None])
        found.append(torch.cat([q @ q.T, len(readers) * _scores("pre", world)]))
    return Comparison(found[1], found[0], tolerance=1e-8, scale=float(found[0].abs().max()))


def _interference(case: Case) -> Comparison:
    """Logits after the other parts are replaced beside logits before times |x||y| / (|x'||y'|), norms of whole embeddings."""
    worlds = _replaced(case)
    before, after = (_scores("pre", world) for world in worlds)
    shrunk = length(worlds[0].embeddings) / length(worlds[1].embeddings)
    factor = shrunk * shrunk.T
    scale = float(torch.maximum(after.abs(), (factor * before).abs()).max())
    return Comparison(after, factor * before, tolerance=1e-5, scale=scale, base=factor)


def _normalised_parts(case: Case) -> Comparison:
    """The parts of RMSNorm(x)/√N, solved for in all bases side by side, beside x_α/|Σ_β x_β|."""
    world, _ = _replaced(case)
    bases, parts = world.subspaces.bases, world.parts
    x = parts.sum(0)
    normalised = F.rms_norm(x, x.shape[-1:], eps=0.0) / math.sqrt(x.shape[-1])
    solved = torch.linalg.lstsq(torch.cat(bases, 1), normalised.T, driver="gelsd").solution.split(world.subspaces.widths)
    measured = torch.stack([(basis @ own).T for basis, own in zip(bases, solved, strict=True)])
    claimed = parts / x.square().sum(-1, keepdim=True).sqrt()
    return Comparison(measured, claimed, tolerance=1e-7, scale=float(claimed.abs().max()), base=length(x).expand_as(parts))


def _interference_curves() -> Curves:
    lengths = [10 ** (0.05 * i - 1) for i in range(41)]
    spaces = Subspaces.at_angle([2, 2])
    own = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    lines = {
        scheme: (lengths, [float(_scores(scheme, World(spaces, (own, size * own)))) for size in lengths])
        for scheme in _COMPARED
    }
    return Curves(
        lines_table(lines),
        "length of the part that the head does not read",
        "logit of a token with itself",
        "The part that is read stays the same. After a norm of the input its logit still falls with the other part's length.",
        log_x=True,
        log_y=True,
    )


def _offset_parts(case: Case, turned: float = 0.0, stretched: float = 0.0) -> tuple[list[Float[Tensor, "_ dim"]], Tensor]:
    """Parts x_α = u_α + a_α that never interfere, with the radii of the spheres over which the a_α run.

    The spaces A_α of the a_α are mutually orthogonal, the u_α are constant, and a_α runs over a sphere about −P_α Σ_β u_β: |x|
    is one number for all combinations. ``turned`` leans one axis of A_2 on one of A_1, and ``stretched`` moves one point of the
    last part out of its sphere.
    """
    count, tokens = case["parts"], case["tokens"]
    widths = [1 + int(share * case["width"]) for share in case.uniform("widths", count).clamp(max=0.999)]
    dim = sum(widths) + 2
    spaces = list(torch.linalg.qr(case.normal("frame", dim, sum(widths))).Q.split(widths, 1))
    constants = case["offset"] * case.normal("constants", count, dim)
    centres = [space @ (space.T @ constants.sum(0)) for space in spaces]
    radii = (0.7 * case.normal("radii", count)).exp()
    spaces[1] = torch.cat([spaces[1][:, :1] + turned * spaces[0][:, :1], spaces[1][:, 1:]], 1)
    parts = []
    for index, (space, radius) in enumerate(zip(spaces, radii, strict=True)):
        axis = torch.eye(widths[index], dtype=torch.float64)[:1]
        directions = torch.cat([axis, unit(case.normal(f"part {index}", tokens, widths[index]))])
        around = radius * torch.cat([directions, -directions])
        around[0] *= 1 + stretched * (index == count - 1)
        parts.append(constants[index] + around @ space.T - centres[index])
    return parts, radii


def _sums(parts: list[Float[Tensor, "_ dim"]]) -> Float[Tensor, "combinations dim"]:
    """Σ_α x_α for all combinations of one token from each part."""
    total = parts[0]
    for part in parts[1:]:
        total = (total[:, None] + part[None]).flatten(0, 1)
    return total


def _variation(values: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """The largest value less the smallest."""
    return values.max() - values.min()


def _must_be_spheres(case: Case) -> Comparison:
    """Cosines between parts that do not interfere, and the spread of their lengths."""
    parts, _ = _offset_parts(case)
    cosines = [(unit(one) @ unit(other).T).flatten() for one, other in itertools.combinations(parts, 2)]
    spreads = torch.stack([length(part).max() / length(part).min() - 1 for part in parts])
    return Comparison(torch.cat([*cosines, spreads]), 0.0, tolerance=1e-6, scale=1.0)


def _varying_spheres(case: Case) -> Comparison:
    """Parts that do not interfere: cosines of what varies, spreads of |P_A x|. Then either is broken, and |x| has to vary.

    Rotated by ε, (x_1 − x_1')·(x_2 − x_2') is 4ε r_1 r_2 for some pairs, and |x|² varies by as much at least; with a point at
    (1 + ε)r instead of r it varies by 2ε r² at least.
    """
    parts, radii = _offset_parts(case)
    x, broken = _sums(parts), case["broken"]
    spans = [torch.linalg.svd(moves).Vh[: rank(moves)].T for moves in (part - part.mean(0) for part in parts)]
    cosines = [(one.T @ other).abs().max() for one, other in itertools.combinations(spans, 2)]
    spreads = [_variation(length(x @ span)) / length(x @ span).mean() for span in spans]
    turned, stretched = (_variation(length(_sums(_offset_parts(case, *by)[0])) ** 2) for by in ((broken, 0.0), (0.0, broken)))
    least = torch.stack([4 * broken * radii[0] * radii[1], 2 * broken * radii[-1] ** 2])
    missing = 1 - (torch.stack([turned, stretched]) / least).clamp(max=1)
    still = torch.stack([*cosines, *spreads, _variation(length(x)) / length(x).mean()])
    return Comparison(torch.cat([still, missing]), 0.0, tolerance=1e-6, scale=1.0)


def _normalised_heads(case: Case) -> Comparison:
    """Logits and values of the QKV-Norm head that reads the first part, before and after the other parts are replaced."""
    found = []
    for world in _replaced(case):
        q, k, v = project_heads(NAMED["qkv"], world.weights, world.embeddings)
        found.append(torch.cat([q[0] @ k[0].T, v[0]], 1))
    return Comparison(found[1], found[0], tolerance=1e-5, scale=1.0)


_CONSTANT_DIAL = Dial(
    name="offset",
    label="size of the constants u_α in x_α = u_α + a_α",
    start=0.0,
    end=2.0,
    case=Case({"parts": 2, "width": 2, "tokens": 4, "broken": 0.1}, ((5, 1.0),)),
    quantity="cosine between parts, or spread of norms",
    caption="None of these parts interferes: |x_1 + x_2| is one number at every position. Without constants they are "
    "orthogonal spheres, as printed; with constants they lean on each other, and only what varies stays orthogonal.",
)

STATEMENTS = (
    Statement(
        id="1:1i",
        title="No-Norm: independence is enough",
        claim="Heads can attend to different subspaces if these are linearly independent.",
        tested="Logits of a head that reads one subspace, after all others are replaced by other tokens', equal those before.",
        space=_SIZES | _LENGTHS | _LEAN,
        conclusion=_independent,
        remark="Edges: subspaces that are nearly dependent, token lengths over four orders of magnitude.",
    ),
    Statement(
        id="1:1ii",
        title="No-Norm: null spaces of W_QK",
        claim="W_QK is low-rank; its left and right null spaces hold everything that the head does not attend to.",
        tested="The dimension of either null space is N less that of the subspace that is read, and the other subspaces lie in "
        "both.",
        space=_SIZES | _LENGTHS | {"independence": Range(0.1, 1)},
        conclusion=_null_space,
        remark="For a head that uses all coordinates of its subspace; one that uses fewer has larger null spaces.",
    ),
    Statement(
        id="1:1iii",
        title="No-Norm: independence is needed",
        claim="Heads that attend to different subspaces need them linearly independent.",
        tested="The directions in which a token's logits change, for a head that is blind to β: they are the row spaces of "
        "W_QK (head_spaces.factors), and as many of α's as are not shared with β.",
        space={"width": _SIZES["width"], "spare": _SIZES["spare"], "shared": Range(0, 4, whole=True), "head": whole(1, 6)},
        conclusion=_shared,
        remark="W_QK b = 0 for all b in β makes W_QK v = 0 for every v in α ∩ β: the head is blind to that part of α.",
    ),
    Statement(
        id="1:2i",
        title="Pre-Norm: orthogonal spheres are enough",
        claim="Pre-Norm keeps subspaces independent if they are mutually orthogonal spheres.",
        tested="Attention of a head after RMSNorm or LayerNorm with a gain, after the others are replaced, equals that before.",
        space=_SIZES | _LENGTHS | {"norm": choice("rms", "layer")},
        conclusion=_orthogonal_spheres,
        by="norm",
        remark="The spheres lie in the hyperplane orthogonal to 1, as they must for LayerNorm. The head undoes the gain.",
    ),
    Statement(
        id="1:2ii",
        title="Pre-Norm: the interference factor",
        claim="Otherwise subspaces interfere through a common factor 1/|x| on the logits: P_α x/|x| = x_α/|Σ_β x_β|.",
        tested="Logits after the other parts are replaced are logits before times |x||y|/(|x'||y'|).",
        space=_SIZES | _LENGTHS | _LEAN,
        conclusion=_interference,
        curves=_interference_curves,
        notices=("sign", "constant", "exponent"),
        remark="P_α is the projection along the other subspaces, which is oblique where they are not orthogonal.",
    ),
    Statement(
        id="1:2ii-parts",
        title="Pre-Norm: what is left of a part",
        claim="P_α x/|x| = x_α/|Σ_β x_β|.",
        tested="The parts of PyTorch's RMSNorm of x over √N, by least squares in the bases of all subspaces, beside x_α/|x|.",
        space=_SIZES | _LENGTHS | _LEAN,
        conclusion=_normalised_parts,
        notices=("sign", "constant", "exponent"),
        cases=90,
    ),
    Statement(
        id="1:2iii",
        title="Pre-Norm: orthogonal spheres are needed",
        claim="Under Pre-Norm the subspaces must be mutually orthogonal spheres: |x_α| constant, x_α·x_β = 0.",
        tested="Cosines between parts that do not interfere, and the spread of their lengths, are 0.",
        space=_PARTS | {"offset": Range(0, 2), "broken": Range(1e-3, 0.3, log=True)},
        conclusion=_must_be_spheres,
        correction=Correction(
            claim="With A_α the span of what varies in x_α: the A_α are mutually orthogonal, and |P_{A_α} x| is constant for "
            "each α. For parts without a constant (x_α and −x_α both occur) this is the printed statement.",
            why="No interference means |x_1 + x_2| is one number for all pairs. Differences give (x_1 − x_1')·(x_2 − x_2') = "
            "0, so A_1 ⊥ A_2. With x_α = u_α + a_α, a_α in A_α and s = u_1 + u_2, |x|² = |s|² + Σ_α (|a_α|² + 2 s·a_α) is "
            "constant if and only if every |a_α + P_α s| = |P_{A_α} x| is. For instance x_1 = e_3 ± e_1 and x_2 = e_3 + e_4 ± "
            "e_2: |x|² = 7 always, and x_1·x_2 = 1. Nothing asks that u_1·u_2 = 0, or that |u_α + a_α| is constant, or that "
            "spheres have one radius. That the conditions are needed is tested by breaking them: with A_2 rotated by ε towards "
            "A_1, or one point ε outside its sphere, |x|² varies by 4ε r_1 r_2 and 2ε r² at least.",
            conclusion=_varying_spheres,
        ),
        dial=_CONSTANT_DIAL,
        notices=(),
    ),
    Statement(
        id="1:3",
        title="QKV-Norm: independence is enough again",
        claim="QKV-Norm: linear independence is enough again.",
        tested="Logits and values of a QKV-Norm head, after all other subspaces are replaced, equal those before.",
        space=_SIZES | _LENGTHS | _LEAN,
        conclusion=_normalised_heads,
    ),
)
