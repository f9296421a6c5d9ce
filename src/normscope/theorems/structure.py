"""Paper 1, the two tables: attendable degrees of freedom, and the shape of the set of messages."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import HeadWeights
from normscope.core.norms import hyperplane_basis, layer_norm, length, rms_norm, unit
from normscope.models.worlds import Subspaces, World, project_heads
from normscope.schemes import NAMED
from normscope.theorems.cases import Case, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Statement
from normscope.theorems.tensors import jacobian, rank

_STRATEGIES = ("No-Norm", "Pre-LayerNorm", "Pre-RMSNorm", "QKV-Norm")
_NOTICED = 1e-6  # of what a head reads: a change that is more than rounding


def _widths(case: Case) -> list[int]:
    """Dimensions of the subspaces, from 1 to the largest width."""
    shares = case.uniform("widths", case["subspaces"])
    return [1 + int(share * case["width"]) for share in shares.clamp(max=0.999)]


def _worlds(case: Case, widths: list[int]) -> tuple[Float[Tensor, "dim total"], HeadWeights]:
    """Bases of all subspaces side by side, and heads that read one each; Pre-LayerNorm has the direction 1 besides."""
    total = sum(widths)
    frame = torch.linalg.qr(case.normal("frame", total, total)).Q
    if case["strategy"] in ("No-Norm", "QKV-Norm"):
        frame = frame + 0.3 * case.normal("lean", total, total) / total
    embed = hyperplane_basis(total + 1) @ frame if case["strategy"] == "Pre-LayerNorm" else frame
    return embed, World(Subspaces(embed.split(widths, 1)), ()).weights


def _token(case: Case, widths: list[int], embed: Float[Tensor, "dim total"]) -> Callable[[Tensor, Tensor], Tensor]:
    """A token as a function of free coordinates, and of a factor on the first part's radius.

    No-Norm and QKV-Norm let it be anywhere. Pre-Norm has its parts on spheres, its whole length free, for LayerNorm its mean.
    """
    strategy, radii = case["strategy"], (0.5 * case.normal("radii", len(widths))).exp()

    def token(free: Tensor, factor: Tensor) -> Tensor:
        parts = torch.split(free[: sum(widths)], widths)
        if strategy.startswith("Pre"):
            parts = tuple(radius * unit(part) for radius, part in zip(radii, parts, strict=True))
        x = embed @ torch.cat([factor * parts[0], *parts[1:]])
        x = free[-1].exp() * x if strategy.startswith("Pre") else x
        return x + free[-2] if strategy == "Pre-LayerNorm" else x

    return token


def _read(strategy: str, heads: HeadWeights, x: Float[Tensor, " dim"]) -> tuple[Tensor, Float[Tensor, "heads widest"]]:
    """All that heads together can see of a token, and what each of them reads."""
    if strategy.startswith("Pre"):
        x = layer_norm(x) if strategy == "Pre-LayerNorm" else rms_norm(x)
    own = project_heads(NAMED["qkv" if strategy == "QKV-Norm" else "none"], heads, x[None])[2].squeeze(1)
    return (own.flatten() if strategy == "QKV-Norm" else x), own


def _degrees(case: Case) -> Comparison:
    """The rank of the map from free coordinates to what heads see, beside the table; and who notices one radius set free."""
    strategy, widths = case["strategy"], _widths(case)
    embed, heads = _worlds(case, widths)
    token, (N, total), N_s = _token(case, widths, embed), embed.shape, len(widths)
    free = case.normal("free", total + {"Pre-LayerNorm": 2, "Pre-RMSNorm": 1}.get(strategy, 0))
    one = torch.ones(1, dtype=torch.float64)
    degrees = rank(jacobian(lambda free: _read(strategy, heads, token(free, one))[0], free))
    moves = jacobian(lambda factor: _read(strategy, heads, token(free, factor))[1].flatten(), one).view(N_s, -1)
    own = _read(strategy, heads, token(free, one))[1]
    noticed = (length(moves) > _NOTICED * length(own))[1:].sum()
    claimed = {"No-Norm": N, "Pre-LayerNorm": N - N_s - 1, "Pre-RMSNorm": N - N_s, "QKV-Norm": N - N_s}[strategy]
    disturbed = N_s - 1 if strategy.startswith("Pre") else 0
    return Comparison(
        torch.tensor([float(degrees), float(noticed)]),
        torch.tensor([float(claimed), float(disturbed)]),
        tolerance=1e-9,
        scale=1.0,
        base=torch.tensor([float(N), 1.0]),
    )


def _on_quadric(messages: Float[Tensor, "tokens dim"], width: int) -> Float[Tensor, " tokens"]:
    """The values mᵀQm for the Q that fits half of the messages best with mᵀQm = 1, in the space that they span.

    On a spheroid they are 1 and Q is positive; a Q that is not turns their signs round.
    """
    points = messages @ torch.linalg.svd(messages, full_matrices=False).Vh[:width].T
    products = torch.einsum("ti,tj->tij", points, points).flatten(1)
    half = len(products) // 2
    form = torch.linalg.lstsq(products[:half], torch.ones(half, 1, dtype=torch.float64), driver="gelsd").solution.squeeze(-1)
    positive = bool((torch.linalg.eigvalsh(form.view(width, width)) > 0).all())
    return torch.mv(products, form if positive else -form)


def _messages(case: Case) -> Comparison:
    """No-Norm: messages of sums beside sums of messages. Else: the fitted quadratic form of messages beside 1."""
    width, N = case["width"], 2 * case["width"] + 1
    frame = torch.linalg.qr(case.normal("frame", N, N)).Q
    W_V, W_O = frame[:, :width] @ case.normal("W_V", width, width), case.normal("W_O", width, N)
    tokens = 4 * width**2 + 8
    if case["strategy"] == "No-Norm":
        y, z = case.normal("y", 2, tokens, N)
        a, b = case.normal("factors", 2, tokens, 1)
        return Comparison((a * y + b * z) @ W_V @ W_O, a * (y @ W_V @ W_O) + b * (z @ W_V @ W_O), tolerance=1e-8, scale=1.0)
    if case["strategy"] == "QKV-Norm":
        heads = HeadWeights(W_V[None], W_V[None], W_V[None], W_O[None])
        values = project_heads(NAMED["qkv"], heads, case.normal("y", tokens, N))[2][0]
        return Comparison(_on_quadric(values @ W_O, width), 1.0, tolerance=1e-5)
    parts = [unit(case.normal(name, tokens, size)) for name, size in (("own", width), ("rest", N - width))]
    lengths = case.normal("lengths", tokens, 1).exp()
    messages = rms_norm(lengths * torch.cat(parts, 1) @ frame.T) @ W_V @ W_O
    return Comparison(_on_quadric(messages, width), 1.0, tolerance=1e-5)


STATEMENTS = (
    Statement(
        id="1:dof",
        title="Attendable degrees of freedom",
        claim="No-Norm N; Pre-LayerNorm N − N_s − 1; Pre-RMSNorm N − N_s; QKV-Norm N − N_s, for N dimensions and N_s "
        "subspaces.",
        tested="The rank of the derivative of what all heads see, with respect to what tokens are free to be; and that one "
        "radius more, set free, changes what all other heads read after a norm of the input, and nothing otherwise.",
        space={"subspaces": whole(1, 6), "width": whole(1, 5), "strategy": choice(*_STRATEGIES)},
        conclusion=_degrees,
        notices=("sign", "constant", "exponent"),
        by="strategy",
        remark="Tokens are free within what separability allows: on orthogonal spheres for Pre-Norm, with a whole length and, "
        "for LayerNorm, a mean that the norm has to take away; anywhere otherwise. A subspace of one dimension is a sphere of "
        "two points: it has no degree of freedom left, only a sign.",
        cases=90,
    ),
    Statement(
        id="1:messages",
        title="Structure of messages",
        claim="Messages: No-Norm linear; Pre-Norm spheroid; QKV-Norm spheroid.",
        tested="Messages of sums are sums of messages; or one quadratic form, fitted to half of the messages, is 1 for the "
        "others.",
        space={"width": whole(1, 4), "strategy": choice("No-Norm", "Pre-Norm", "QKV-Norm")},
        conclusion=_messages,
        by="strategy",
        remark="For Pre-Norm under the table's own assumption: tokens on orthogonal spheres, up to their whole length, of "
        "which the value reads one. W_V maps the sphere of R^N to fewer dimensions, so messages of tokens at large fill the "
        "spheroid's inside.",
    ),
)
