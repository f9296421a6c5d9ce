"""Paper 1, the two tables: attendable degrees of freedom, and the shape of the set of messages."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.norms import hyperplane_basis, layer_norm, length, rms_norm, unit
from normscope.theorems.cases import Case, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Correction, Statement
from normscope.theorems.tensors import jacobian, rank

_STRATEGIES = ("No-Norm", "Pre-LayerNorm", "Pre-RMSNorm", "QKV-Norm")


def _widths(case: Case) -> list[int]:
    """Dimensions of the subspaces, from 1 to the largest width."""
    shares = case.uniform("widths", case["subspaces"])
    return [1 + int(share * case["width"]) for share in shares.clamp(max=0.999)]


def _seen(case: Case, widths: list[int]) -> tuple[Callable[[Tensor], Tensor], int]:
    """What all heads see of a token as a function of free coordinates, and N, the dimensions of the token."""
    strategy, total = case["strategy"], sum(widths)
    layer = strategy == "Pre-LayerNorm"
    frame = torch.linalg.qr(case.normal("frame", total, total)).Q
    if strategy in ("No-Norm", "QKV-Norm"):
        frame = frame + 0.3 * case.normal("lean", total, total) / total
    embed = hyperplane_basis(total + 1) @ frame if layer else frame
    readers, radii = torch.linalg.pinv(embed), (0.5 * case.normal("radii", len(widths))).exp()
    radii = radii.repeat_interleave(torch.tensor(widths))

    def on_spheres(free: Tensor) -> Tensor:
        return torch.cat([unit(part) for part in torch.split(free, widths)])

    def seen(free: Tensor) -> Tensor:
        if strategy == "No-Norm":
            return torch.mv(readers, embed @ free)
        if strategy == "QKV-Norm":
            return on_spheres(readers @ (embed @ free))
        token = embed @ (radii * on_spheres(free))
        return torch.mv(readers, layer_norm(token) if layer else rms_norm(token))

    return seen, total + layer


def _degrees(case: Case) -> Comparison:
    """The rank of the map from free coordinates to what the heads see, beside the table."""
    widths = _widths(case)
    seen, N = _seen(case, widths)
    degrees = rank(jacobian(seen, case.normal("free", sum(widths))))
    N_s = len(widths)
    claimed = {"No-Norm": N, "Pre-LayerNorm": N - N_s - 1, "Pre-RMSNorm": N - N_s, "QKV-Norm": N - N_s}[case["strategy"]]
    return Comparison(float(degrees), float(claimed), tolerance=1e-9, scale=1.0, base=float(N))


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
        messages = unit(case.normal("y", tokens, N) @ W_V) @ W_O
    else:
        parts = [unit(case.normal(name, tokens, size)) for name, size in (("own", width), ("rest", N - width))]
        messages = rms_norm(torch.cat(parts, 1) @ frame.T) @ W_V @ W_O
    return Comparison(_on_quadric(messages, width), 1.0, tolerance=1e-5)


def _any_messages(case: Case) -> Float[Tensor, " tokens"]:
    """Where Pre-Norm messages of tokens without any structure lie: 1 on the spheroid √N·S W_V W_O, less inside.

    The value map sends the unit sphere of R^N to {z W_V}: its support is the ellipsoid |W_V⁺ z| ≤ 1.
    """
    width, N = case["width"], case["width"] + case["lost"]
    W_V = case.normal("W_V", N, width)
    values = rms_norm(case.normal("y", 200, N)) @ W_V / N**0.5
    return length(values @ torch.linalg.pinv(W_V)).squeeze(-1)


STATEMENTS = (
    Statement(
        id="1:dof",
        title="Attendable degrees of freedom",
        claim="No-Norm N; Pre-LayerNorm N − N_s − 1; Pre-RMSNorm N − N_s; QKV-Norm N − N_s, for N dimensions and N_s "
        "subspaces.",
        tested="The rank of the derivative of what all heads see, with respect to what tokens are free to be.",
        space={"subspaces": whole(1, 6), "width": whole(1, 5), "strategy": choice(*_STRATEGIES)},
        conclusion=_degrees,
        notices=("sign", "constant", "exponent"),
        by="strategy",
        remark="Tokens are free within what separability allows: on orthogonal spheres for Pre-Norm, anywhere "
        "otherwise. A subspace of one "
        "dimension is a sphere of two points: it has no degree of freedom left, only a sign.",
        cases=90,
    ),
    Statement(
        id="1:messages-i",
        title="Structure of messages",
        claim="Messages: No-Norm linear; Pre-Norm spheroid; QKV-Norm spheroid.",
        tested="Messages of sums are sums of messages; or one quadratic form, fitted to half of the messages, is 1 for "
        "the others.",
        space={"width": whole(1, 4), "strategy": choice("No-Norm", "Pre-Norm", "QKV-Norm")},
        conclusion=_messages,
        by="strategy",
        remark="For Pre-Norm under the table's own assumption: tokens on orthogonal spheres, of which the value reads one.",
    ),
    Statement(
        id="1:messages-ii",
        title="Pre-Norm messages of any tokens",
        claim="Messages: Pre-Norm spheroid, without the assumption of orthogonal spheres.",
        tested="Every message lies on the spheroid, the image of the sphere under W_V.",
        space={"width": whole(1, 8), "lost": whole(1, 32)},
        conclusion=lambda case: Comparison(_any_messages(case), 1.0, tolerance=1e-6),
        correction=Correction(
            claim="The messages lie in the solid spheroid; on its surface if what W_V reads of the tokens is a sphere.",
            why="W_V maps a sphere of R^N to N_qkv < N dimensions. A point z W_V is on the image's surface only if z "
            "has no part in the null "
            "space of W_V; tokens at large have one, and their messages fill the inside.",
            conclusion=lambda case: Comparison(_any_messages(case), 1.0, "≤", tolerance=1e-9),
        ),
        notices=(),
    ),
)
