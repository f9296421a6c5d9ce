"""Paper 1, Theorems 1 to 3: which subspaces of an embedding parallel heads can read on their own.

A token is x = Σ_α x_α with x_α = B_α c_α. The rows D_α of the pseudo-inverse of (B_1 B_2 ...) read coordinates, D_α x = c_α,
whenever the subspaces are linearly independent. A head that reads α has W_Q = D_αᵀ M and W_K = D_αᵀ M', so that its scores are
bilinear in c_α.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.attention import attention_weights, normalise_heads
from normscope.norms import NORMS, hyperplane_basis, length, rms_norm, unit
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Correction, Statement
from normscope.theorems.tensors import in_blocks, rank

_SIZES: Space = {"subspaces": whole(2, 4), "width": whole(1, 4), "spare": Range(0, 3, whole=True), "tokens": whole(2, 8)}
_LENGTHS: Space = {"lengths": Range(0.01, 100, log=True)}
_LEAN: Space = {"independence": Range(1e-3, 1, log=True)}


@dataclass(frozen=True)
class World:
    """Bases of the subspaces side by side, and what reads their coordinates."""

    bases: Float[Tensor, "subspaces dim width"]
    readers: Float[Tensor, "subspaces width dim"]

    def tokens(self, coordinates: Float[Tensor, "tokens subspaces width"]) -> Float[Tensor, "tokens dim"]:
        """X = Σ_α B_α c_α."""
        return torch.einsum("sdw,tsw->td", self.bases, coordinates)


def _world(case: Case, orthogonal: bool = False, layer: bool = False) -> World:
    """Random subspaces: orthogonal ones, or linearly independent ones that lean on each other as the case says.

    With ``layer`` they lie in the hyperplane orthogonal to 1.
    """
    count, width = case["subspaces"], case["width"]
    dim = count * width + case["spare"]
    joined = torch.linalg.qr(case.normal("bases", dim, count * width)).Q
    if not orthogonal:
        lean = torch.linalg.qr(case.normal("lean", count * width, count * width)).Q
        first, rest = joined[:, :width].repeat(1, count - 1), joined[:, width:] * case["independence"]
        joined = torch.cat([joined[:, :width], first + rest], dim=1) if count > 1 else joined
        joined = joined @ in_blocks([lean[:width, :width] + 2 * torch.eye(width) for _ in range(count)])
    if layer:
        joined = hyperplane_basis(dim + 1) @ joined
    readers = torch.linalg.pinv(joined)
    return World(
        joined.unflatten(1, (count, width)).movedim(1, 0).contiguous(), readers.unflatten(0, (count, width)).contiguous()
    )


def _coordinates(case: Case, name: str, spheres: bool = False) -> Float[Tensor, "tokens subspaces width"]:
    """Coordinates of tokens; on spheres, each subspace with a length of its own, or of lengths that vary as the case says."""
    drawn = case.normal(name, case["tokens"], case["subspaces"], case["width"])
    spread = case.normal("radii" if spheres else f"{name} radii", 1 if spheres else case["tokens"], case["subspaces"], 1)
    return unit(drawn) * float(case["lengths"]) ** spread.clamp(-1, 1)


def _exchanged(case: Case, spheres: bool = False) -> tuple[Tensor, Tensor]:
    """Coordinates of tokens, and the same with those of every subspace but the first taken from other tokens."""
    own, other = _coordinates(case, "own", spheres), _coordinates(case, "other", spheres)
    return own, torch.cat([own[:, :1], other[:, 1:]], dim=1)


def _head(case: Case, world: World, name: str) -> Float[Tensor, "dim width"]:
    """A weight that reads the first subspace alone."""
    return world.readers[0].T @ case.normal(name, case["width"], case["width"])


def _independent(case: Case) -> Comparison:
    """Attention of a head that reads the first subspace, before and after the others are exchanged."""
    world = _world(case)
    W_Q, W_K = _head(case, world, "W_Q"), _head(case, world, "W_K")
    before, after = (attention_weights(x @ W_Q, x @ W_K, 1.0) for x in map(world.tokens, _exchanged(case)))
    return Comparison(after, before, tolerance=1e-5, scale=1.0)


def _null_space(case: Case) -> Comparison:
    """Dimensions of the left and right null space of W_QK that the other subspaces, and what lies beside all, fill."""
    world = _world(case)
    W_Q, W_K = _head(case, world, "W_Q"), _head(case, world, "W_K")
    N, W_QK = len(W_Q), W_Q @ W_K.T
    nullities = torch.tensor([N - rank(W / W.norm()) for W in (W_QK, W_QK.T)], dtype=torch.float64)
    return Comparison(nullities, float(N - case["width"]), tolerance=1e-9)


def _shared(case: Case) -> Comparison:
    """Scores of heads blind to one subspace, while tokens move along a direction that it shares with another."""
    dim = 2 * case["width"] + case["spare"]
    second = torch.linalg.qr(case.normal("second", dim, case["width"])).Q
    shared = second @ unit(case.normal("shared", case["width"]))
    blind = torch.eye(dim, dtype=torch.float64) - second @ second.T
    W_QK = blind @ case.normal("W_QK", dim, dim) @ blind
    x = case.normal("x", case["tokens"], dim)
    moved = x + case["lengths"] * case.normal("way", case["tokens"], 1) * shared
    before, after = (y @ W_QK @ y.T for y in (x, moved))
    return Comparison(after, before, tolerance=1e-9, scale=float((length(moved) ** 2).max()) * float(W_QK.norm()))


def _orthogonal_spheres(case: Case) -> Comparison:
    """Pre-Norm attention on orthogonal spheres, before and after an exchange."""
    kind = case["norm"]
    world = _world(case, orthogonal=True, layer=kind == "layer")
    gain = (0.5 * case.normal("gain", world.bases.shape[1])).exp()
    W_Q, W_K = (_head(case, world, name) / gain[:, None] for name in ("W_Q", "W_K"))
    found = []
    for coordinates in _exchanged(case, spheres=True):
        read = NORMS[kind](world.tokens(coordinates), gain)
        found.append(attention_weights(read @ W_Q, read @ W_K, 0.1))
    return Comparison(found[1], found[0], tolerance=1e-8, scale=1.0)


def _interference(case: Case) -> Comparison:
    """Scores after an exchange over scores before: the factor |x||y| / (|x'||y'|)."""
    world = _world(case)
    W_Q, W_K = _head(case, world, "W_Q"), _head(case, world, "W_K")
    x, changed = map(world.tokens, _exchanged(case))
    before, after = ((rms_norm(z) @ W_Q) @ (rms_norm(z) @ W_K).T for z in (x, changed))
    shrunk = length(x) / length(changed)
    factor = shrunk * shrunk.T
    return Comparison(
        after, factor * before, tolerance=1e-5, scale=float(torch.maximum(after.abs(), before.abs()).max()), base=factor
    )


def _offset_parts(case: Case) -> tuple[Float[Tensor, "signs dim"], Float[Tensor, "signs dim"], list[Tensor]]:
    """Two parts x_α = u_α + a_α that never interfere, and orthonormal bases of the spaces A_α in which the a_α vary.

    A_1 ⊥ A_2, the u_α are constant, and a_α runs over a sphere about −P_α(u_1 + u_2): |x_1 + x_2| is one number for all pairs.
    """
    width, tokens = case["width"], case["tokens"]
    dim = 2 * width + 2
    frame = torch.linalg.qr(case.normal("frame", dim, 2 * width)).Q
    spaces = [frame[:, :width], frame[:, width:]]
    constants = case["offset"] * case.normal("constants", 2, dim)
    total = constants.sum(0)
    parts = []
    for name, space, constant in zip(("first", "second"), spaces, constants, strict=True):
        directions = unit(case.normal(name, tokens, width))
        round_trip = torch.cat([directions, -directions])
        parts.append(constant + round_trip @ space.T - space @ (space.T @ total))
    return parts[0], parts[1], spaces


def _must_be_spheres(case: Case) -> Comparison:
    """Cosines between parts that do not interfere, and the spread of their lengths."""
    first, second, _ = _offset_parts(case)
    cosines = unit(first) @ unit(second).T
    spreads = [float(length(part).max() / length(part).min() - 1) for part in (first, second)]
    return Comparison(
        torch.cat([cosines.flatten(), torch.tensor(spreads, dtype=torch.float64)]), 0.0, tolerance=1e-6, scale=1.0
    )


def _varying_spheres(case: Case) -> Comparison:
    """Cosines between what varies in the two parts, and lengths of x projected on it, relative to their mean."""
    first, second, spaces = _offset_parts(case)
    moves = [part - part[:1] for part in (first, second)]
    products = (moves[0] @ moves[1].T).abs().max() / (length(moves[0]).max() * length(moves[1]).max())
    x = (first[:, None] + second[None]).flatten(0, 1)
    seen = torch.cat([length(x @ space).squeeze(-1) for space in spaces] + [length(x).squeeze(-1) / length(x).mean()])
    return Comparison(torch.cat([products[None], seen - 1]), 0.0, tolerance=1e-6, scale=1.0)


def _normalised_heads(case: Case) -> Comparison:
    """Attention and messages of a QKV-Norm head, before and after an exchange."""
    world = _world(case)
    W = [_head(case, world, name) for name in ("W_Q", "W_K", "W_V")]
    found = []
    for coordinates in _exchanged(case):
        x = world.tokens(coordinates)
        q, k, v = normalise_heads(x @ W[0], x @ W[1], x @ W[2], "qkv")
        found.append(attention_weights(q, k, 3.0) @ v)
    return Comparison(found[1], found[0], tolerance=1e-6, scale=1.0)


STATEMENTS = (
    Statement(
        id="1:1i",
        title="No-Norm: independence is enough",
        claim="Heads can attend to different subspaces if these are linearly independent.",
        tested="Attention of a head that reads one subspace, after all others are exchanged for other tokens', equals "
        "that before.",
        space=_SIZES | _LENGTHS | _LEAN,
        conclusion=_independent,
        remark="Edges: subspaces that are nearly dependent, token lengths over four orders of magnitude.",
    ),
    Statement(
        id="1:1ii",
        title="No-Norm: null spaces of W_QK",
        claim="W_QK is low-rank; its left and right null spaces hold everything that the head does not attend to.",
        tested="The dimension of either null space is N less the dimension of the subspace that is read.",
        space=_SIZES | {"independence": Range(0.1, 1)},
        conclusion=_null_space,
        remark="For a head that uses all coordinates of its subspace; one that uses fewer has larger null spaces.",
    ),
    Statement(
        id="1:1iii",
        title="No-Norm: independence is needed",
        claim="Heads that attend to different subspaces need them linearly independent.",
        tested="A head that ignores one subspace gives the same scores when tokens move along a direction that another "
        "shares with it.",
        space={name: _SIZES[name] for name in ("width", "spare", "tokens")} | _LENGTHS,
        conclusion=_shared,
        remark="W_QK b = 0 for all b in β makes W_QK v = 0 for every v in α ∩ β: the head is blind to that part of α.",
        notices=(),
    ),
    Statement(
        id="1:2i",
        title="Pre-Norm: orthogonal spheres are enough",
        claim="Pre-Norm keeps subspaces independent if they are mutually orthogonal spheres.",
        tested="Attention of a head behind RMSNorm or LayerNorm with a gain, after the others are exchanged, equals "
        "that before.",
        space=_SIZES | _LENGTHS | {"norm": choice("rms", "layer")},
        conclusion=_orthogonal_spheres,
        by="norm",
        remark="For LayerNorm the spheres lie in the hyperplane orthogonal to 1. The head undoes the gain.",
    ),
    Statement(
        id="1:2ii",
        title="Pre-Norm: the interference factor",
        claim="Otherwise subspaces interfere through a common factor 1/|x| on the scores: P_α x/|x| = x_α/|Σ_β x_β|.",
        tested="Scores after an exchange are scores before times |x||y|/(|x'||y'|).",
        space=_SIZES | _LENGTHS | _LEAN,
        conclusion=_interference,
        notices=("sign", "constant", "exponent"),
        remark="P_α is the projection along the other subspaces, which is oblique where they are not orthogonal.",
    ),
    Statement(
        id="1:2iii",
        title="Pre-Norm: orthogonal spheres are needed",
        claim="Under Pre-Norm the subspaces must be mutually orthogonal spheres: |x_α| constant, x_α·x_β = 0.",
        tested="Cosines between parts that do not interfere, and the spread of their lengths, are 0.",
        space={"width": whole(1, 4), "tokens": whole(1, 8), "offset": Range(0, 2)},
        conclusion=_must_be_spheres,
        correction=Correction(
            claim="With A_α the span of what varies in x_α: the A_α are mutually orthogonal, and |P_{A_α} x| is "
            "constant for each α. "
            "For parts without a constant (x_α and −x_α both occur) this is the printed statement.",
            why="No interference means |x_1 + x_2| is one number for all pairs. Differences give (x_1 − x_1')·(x_2 − "
            "x_2') = 0, so A_1 ⊥ A_2. "
            "With x_α = u_α + a_α, a_α in A_α and s = u_1 + u_2, |x|² = |s|² + Σ_α (|a_α|² + 2 s·a_α) is constant if "
            "and only if every "
            "|a_α + P_α s| = |P_{A_α} x| is. Nothing asks that u_1·u_2 = 0, or that |u_α + a_α| is constant.",
            conclusion=_varying_spheres,
        ),
        notices=(),
    ),
    Statement(
        id="1:3",
        title="QKV-Norm: independence is enough again",
        claim="QKV-Norm: linear independence is enough again.",
        tested="What a QKV-Norm head writes, after all other subspaces are exchanged, equals what it wrote before.",
        space=_SIZES | _LENGTHS | _LEAN,
        conclusion=_normalised_heads,
    ),
)
