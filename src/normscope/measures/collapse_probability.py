"""Circuit collapse: how likely noise on key norms makes an attention distribution select another key.

A row holds the raw scores w_t = q·k_t of one distribution, -inf where a key is not seen; t* is its largest. Noise multiplies
the norm of each key by an independent 1 + κ_t, with κ of mean 0 and RMS ``level``: uniform within ±√3·level, or Gaussian. The
row collapses if some t ≠ t* has w_t(1 + κ_t) > w_{t*}(1 + κ_{t*}). Noise on the query and the temperature are positive factors
common to a row: they change nothing.

Written for κ_{t*} = z·(size of the noise), z turned over if w_{t*} < 0, every other key stays below with probability

    F_t(z) = Φ(c_t z + δ_t / size),    c_t = |w_{t*}| / |w_t|,    δ_t = (w_{t*} − w_t) / |w_t|,

where Φ is the distribution function of the noise at size 1, and P(collapse) = E_z[1 − Π_t F_t(z)]. Where positions add a bias
b_t to the scores, in units of w, it gets no noise: δ_t = (w_{t*} + b_{t*} − w_t − b_t) / |w_t|.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.threads import one_thread
from normscope.errors import InputError, require_known
from normscope.models import Softmax

NOISES = ("uniform", "gaussian")

_BLOCK = 1 << 22  # scores that are ranked together
_BLOCK_ROWS = 1 << 13
_CHUNK = 1 << 14  # pairs of a distribution and a level that are integrated together: what they need stays in the cache
_DRAWN = 1 << 22  # scores that are drawn together
_TINY = 1e-6  # of the largest score
_MIDPOINTS = 1024  # of the noise on the selected key, where positions add a bias


@dataclass(frozen=True)
class SampledCollapse:
    """Shares of the draws in which a distribution collapsed.

    Attributes:
        loose: another key has the largest score.
        strict: and its attention is at least the threshold.
    """

    loose: Float[Tensor, "levels distributions"]
    strict: Float[Tensor, "levels distributions"]


@dataclass(frozen=True)
class _Accuracy:
    """What the integrals do for their precision.

    Attributes:
        exact: as many first kinks bound pieces of their own, integrated exactly.
        growth: after those, a piece ends at this many times the kinks before it.
        nodes: of a piece that has kinks inside.
        normal_nodes: of a panel of Gaussian noise.
        negligible: a product of F_t below this counts as 0.
        tail: a standard normal variable counts as never beyond it.
        smallest: of Gaussian factors 1 + κ that differ from 0.
    """

    exact: int
    growth: float
    nodes: int
    normal_nodes: int
    negligible: float
    tail: float
    smallest: float


_ACCURACY = {
    torch.float32: _Accuracy(32, 1.4, 8, 6, 1e-6, 5.7, 1e-3),
    torch.float64: _Accuracy(64, 1.2, 20, 12, 1e-8, 6.5, 1e-4),
}


def collapse_probability(
    scores: Float[Tensor, "distributions keys"],
    levels: Sequence[float],
    noise: str = "uniform",
    shift: Float[Tensor, "distributions keys"] | None = None,
) -> Float[Tensor, "levels distributions"]:
    """P(some t ≠ t* has w_t(1 + κ_t) > w_{t*}(1 + κ_{t*})) at every level of noise (the RMS of κ), not sampled but integrated.

    A query's own factor is taken to be positive, as it is for uniform noise. The absolute error is below 1e-6 in float64;
    in float32 it is about 1e-6, and up to 3e-5 where many scores are equal or within a few percent of the largest. Narrower
    scores are computed in float32. ``shift`` is the bias; with one the error is up to 1e-3.
    """
    sizes = _sizes(levels, noise)
    scores = _wide(scores.detach())
    found = scores.new_zeros(len(sizes), len(scores))
    noisy = [i for i, size in enumerate(sizes) if size > 0]
    if not noisy or scores.shape[1] < 2:
        return found
    inverse = 1 / scores.new_tensor([sizes[i] for i in noisy])
    integrate = _uniform_probability if noise == "uniform" else _gaussian_probability
    width = scores.shape[1] if shift is None else max(scores.shape[1], _MIDPOINTS)
    blocks = list(_slices(len(scores), min(_BLOCK_ROWS, max(1, _BLOCK // width))))
    # Threads that share every small operation wait for each other; threads with blocks of their own do not.
    workers = torch.get_num_threads() if scores.device.type == "cpu" else 1

    def part(rows: slice) -> tuple[slice, Tensor]:
        if shift is None:
            return rows, integrate(*_ranked(scores[rows]), inverse)
        values = scores[rows], shift[rows].to(scores)
        return rows, torch.stack([_probability_with_bias(*values, sizes[i], noise) for i in noisy])

    with one_thread(True), ThreadPoolExecutor(workers) as pool:  # which starts a thread at its first task
        for rows, probabilities in pool.map(part, blocks) if len(blocks) > 1 else map(part, blocks):
            found[noisy, rows] = probabilities
    return found


def collapse_margin(
    scores: Float[Tensor, "distributions keys"], shift: Float[Tensor, "distributions keys"] | None = None
) -> Float[Tensor, " distributions"]:
    """The smallest bound on |κ| that allows a collapse: min over t ≠ t* of (w_{t*} − w_t) / (|w_{t*}| + |w_t|), at most 1.

    1 if a single key is seen; 0 if the two largest scores are equal. ``shift`` is a bias, which is added to the differences.
    """
    scores = _wide(scores)
    if scores.shape[1] < 2:
        return scores.new_ones(len(scores))
    if shift is not None:
        gap, slope, place = _gaps(scores, shift.to(scores))
        size = slope + slope.gather(1, place)
        margin = torch.where(size == 0, (gap > 0).to(gap), gap / size).scatter(1, place, 1.0)
        return margin.amin(1).clamp(max=1)
    best, second = _checked(scores.topk(2).values).unbind(1)
    size = best.abs() + second.abs()
    return torch.where(second == -torch.inf, 1.0, torch.where(size == 0, 0.0, (best - second) / size)).clamp(max=1)


def sampled_collapse(
    scores: Float[Tensor, "distributions keys"],
    softmax: Softmax,
    levels: Sequence[float],
    draws: int,
    generator: torch.Generator,
    noise: str = "uniform",
    threshold: float = 0.95,
    noisy: str = "qk",
) -> SampledCollapse:
    """Shares of draws of w_t(1 + κ^q)(1 + κ_t) whose largest is not t*, and whose softmax is also sparse there.

    ``noisy`` names what noise falls on: q, k or both. Loose shares estimate `collapse_probability`, in which κ^q plays no part
    unless there is a bias.
    """
    sizes = _sizes(levels, noise)
    if draws < 1 or bool((torch.as_tensor(softmax.scale) <= 0).any()):
        raise InputError(f"{draws} draws at scale {softmax.scale}: both must be positive")
    if noisy not in ("q", "k", "qk"):
        raise InputError(f"noise on {noisy!r} is unknown; it may fall on q, k or qk")
    scores = _wide(scores)
    loose, strict = (scores.new_zeros(len(sizes), len(scores)) for _ in range(2))
    if not scores.shape[1]:
        return SampledCollapse(loose, strict)
    shift = 0.0 if softmax.shift is None else softmax.shift
    selected = (scores + shift).argmax(1)
    _checked(scores.gather(1, selected[:, None]))
    together = max(1, _DRAWN // scores.shape[1])
    for level, size in enumerate(sizes):
        for rows in _slices(len(scores), together):
            part, chosen = scores[rows], selected[rows]
            of_rows = softmax.select(scores.shape, lambda x, rows=rows: x[rows])  # type: ignore[misc]
            shift = 0.0 if of_rows.shift is None else of_rows.shift
            for some in _slices(draws, max(1, together // len(part))):
                shape = (some.stop - some.start, *part.shape)
                factor = _factors(shape if "k" in noisy else (1, 1, 1), size if "k" in noisy else 0.0, noise, generator, part)
                drawn = factor.mul(part)
                if "q" in noisy:
                    drawn = drawn * _factors((*shape[:2], 1), size, noise, generator, part)
                drawn.masked_fill_(part == -torch.inf, -torch.inf)
                ordered = drawn + shift
                top = ordered.amax(-1, keepdim=True)
                moved = (top > ordered.gather(-1, chosen.expand(shape[:2]).unsqueeze(-1))).squeeze(-1)
                peak = of_rows.weights(drawn).amax(-1)
                loose[level, rows] += moved.sum(0)
                strict[level, rows] += (moved & (peak >= threshold)).sum(0)
    return SampledCollapse(loose / draws, strict / draws)


def _sizes(levels: Sequence[float], noise: str) -> list[float]:
    """What z is multiplied with at each level: the bound of uniform noise, the deviation of Gaussian noise."""
    require_known("noise", noise, NOISES)
    for level in levels:
        if not 0 <= level < math.inf:
            raise InputError(f"a level of noise is an RMS, 0 or more; {level} is not")
        if noise == "uniform" and math.sqrt(3) * level >= 1:
            raise InputError(
                f"uniform noise of RMS {level} reaches ±{math.sqrt(3) * level:.3g}: below 1/√3 = 0.577 norms stay positive"
            )
    return [math.sqrt(3) * level if noise == "uniform" else float(level) for level in levels]


def _wide(scores: Tensor) -> Tensor:
    """The scores in float64 if they are, else in float32."""
    return scores if scores.dtype == torch.float64 else scores.float()


def _checked(best: Tensor) -> Tensor:
    """The largest scores of every row, if they are numbers."""
    if bool((best.isnan() | (best == torch.inf)).any()):
        raise InputError("scores must be finite, or -inf where a key is not seen; some are NaN or inf")
    return best


def _slices(total: int, step: int) -> Iterator[slice]:
    """Slices of at most ``step`` that cover a range."""
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def _factors(shape: tuple[int, ...], size: float, noise: str, generator: torch.Generator, like: Tensor) -> Tensor:
    """Draws of 1 + κ."""
    drawn = torch.empty(shape, dtype=like.dtype, device=like.device)
    if noise == "uniform":
        return drawn.uniform_(1 - size, 1 + size, generator=generator)
    return drawn.normal_(1, size, generator=generator)


def _descending(scores: Tensor) -> Tensor:
    """Every row sorted from large to small. NumPy sorts with vector instructions, thirty times as fast as PyTorch on a CPU."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.detach().numpy(), axis=1)).flip(1)
    return scores.sort(1, descending=True).values


def _ranked(scores: Tensor) -> tuple[Tensor, Tensor]:
    """c_t and δ_t of the keys beside t*, keys × rows, from large scores to small, and a last one that never overtakes: δ = inf.

    A score of 0 counts as a very small one, which has the same product of F_t and a finite slope.
    """
    ranked = torch.nn.functional.pad(_descending(scores), (0, 1), value=-torch.inf).T.contiguous()
    best, others = _checked(ranked[:1]), ranked[1:]
    size = torch.maximum(others.abs(), _TINY * best.abs())
    never = (others == -torch.inf) | (size == 0)
    return (best.abs() / size).masked_fill_(never, 1), (best - others).div_(size).masked_fill_(never, torch.inf)


def _gaps(scores: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far each key is below t* with its bias, how strongly noise moves it (|w_t|), and the place of t*; rows × keys."""
    total = scores + shift
    best, place = total.max(1, keepdim=True)
    return _checked(best) - total, scores.abs().masked_fill(scores == -torch.inf, 0.0), place


def _probability_with_bias(scores: Tensor, shift: Tensor, size: float, noise: str) -> Tensor:
    """E_z[1 − Π_t F_t(z)] of rows at one size of the noise, as a sum over the midpoints of equal steps of z.

    With a bias F_t may begin or end anywhere in the range of z, or be a step (w_t = 0), and the order of the keys depends on
    the size: none of the closed forms holds.
    """
    gap, slope, place = _gaps(scores, shift)
    reach = 1.0 if noise == "uniform" else _ACCURACY[scores.dtype].tail
    z = reach * (torch.arange(0.5, _MIDPOINTS, dtype=scores.dtype, device=scores.device) * (2 / _MIDPOINTS) - 1)
    density = torch.ones_like(z) if noise == "uniform" else (-z.square() / 2).exp()
    best = slope.gather(1, place)
    lead = (size * reach * (best + slope) - gap).scatter(1, place, -torch.inf)  # only keys above 0 can overtake
    lead, order = lead.topk(max(1, int((lead > 0).sum(1).max())), 1)
    gap, slope = gap.gather(1, order) / size, slope.gather(1, order).clamp(min=torch.finfo(scores.dtype).tiny)
    below = torch.ones(len(scores), len(z), dtype=scores.dtype, device=scores.device)
    for key in range(order.shape[1]):
        x = (best * z + gap[:, key : key + 1]) / slope[:, key : key + 1]
        F = (x / 2 + 0.5).clamp_(0, 1) if noise == "uniform" else torch.special.ndtr(x)
        below.mul_(torch.where(lead[:, key : key + 1] > 0, F, 1.0))
    return (1 - below) @ (density / density.sum())


def _gauss(nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Places in 0..1 and weights of the Gauss-Legendre rule that is exact up to degree 2·nodes − 1."""
    places, weights = np.polynomial.legendre.leggauss(nodes)
    return like.new_tensor((places + 1) / 2), like.new_tensor(weights / 2)


def _uniform_probability(steep: Tensor, gap: Tensor, inverse: Tensor) -> Tensor:
    """½∫(1 − Π_t F_t(z)) dz over −1..1, where F_t(z) = min(1, ½(1 + c_t z + δ_t/b)) has its kink at z_t = (1 − δ_t/b)/c_t.

    Above the first kink nothing collapses; between neighbouring kinks the product is a polynomial. Pairs of a row and a level
    are put in the order of how many pieces they need, so that those that need one more are always the first ones.
    """
    edges = _edges(len(steep), _ACCURACY[steep.dtype])
    pieces = _pieces_needed(steep, gap, inverse, edges).flatten()
    order = pieces.argsort(descending=True)[: int(pieces.count_nonzero())]
    found = torch.zeros_like(pieces, dtype=steep.dtype)
    for some in _slices(len(order), _CHUNK):
        pairs = order[some]
        level, row = pairs // steep.shape[1], pairs % steep.shape[1]
        counts = pieces[pairs].bincount().flip(0).cumsum(0).flip(0)[1:].tolist()
        keys = edges[len(counts)] + 1
        found[pairs] = _integrated(steep[:keys, row], gap[:keys, row] * inverse[level], edges, counts)
    return found.view(len(inverse), -1)


def _edges(keys: int, accuracy: _Accuracy) -> list[int]:
    """The kinks, counted from 0, at which pieces begin and end."""
    edges = list(range(min(accuracy.exact + 1, keys)))
    while edges[-1] < keys - 1:
        edges.append(min(math.ceil(edges[-1] * accuracy.growth), keys - 1))
    return edges


def _pieces_needed(steep: Tensor, gap: Tensor, inverse: Tensor, edges: list[int]) -> Tensor:
    """How many pieces begin inside −1..1 and where the product is not yet negligible, levels × rows.

    At the m-th kink log Π F_t ≤ −Σ(1 − F_t) = −½ Σ_{t<m} c_t (z_t − z_m), which running sums of c_t and δ_t give.
    """
    steep_sum, gap_sum = _running_sums(steep, edges), _running_sums(gap, edges)
    steep, gap, count = steep[edges], gap[edges], steep.new_tensor(edges).add(1).unsqueeze(1)
    least = math.log(_ACCURACY[steep.dtype].negligible)
    needed = []
    for over in inverse:
        kink = (1 - gap * over) / steep
        log_bound = (kink * steep_sum - count + gap_sum * over) / 2
        needed.append(((kink > -1) & (log_bound > least)).sum(0))
    return torch.stack(needed)


def _running_sums(values: Tensor, edges: list[int]) -> Tensor:
    """Σ of the values from the first to each edge."""
    parts = values.tensor_split([edge + 1 for edge in edges])[:-1]
    return torch.stack([part.sum(0) for part in parts]).cumsum(0)


def _integrated(steep: Tensor, gap: Tensor, edges: list[int], counts: list[int]) -> Tensor:
    """The integral for pairs, keys × pairs, of which the first counts[i] need piece i; gap is δ/b.

    With x the distance below the first kink, F_t = min(1, 1 + late_t − fall_t · x). The m keys whose kinks a piece has passed
    make the product negligible beyond x = (Σ late_t − log negligible) / Σ fall_t.
    """
    accuracy = _ACCURACY[steep.dtype]
    first = (1 - gap[0]) / steep[0]
    fall, late = steep / 2, (steep * first + gap - 1) / 2
    used = edges[: len(counts) + 1]
    kink = torch.minimum(late[used] / fall[used], first + 1)
    late_sum, fall_sum = _running_sums(late, used), _running_sums(fall, used)
    lasting = (late_sum - math.log(accuracy.negligible)) / fall_sum
    lead = late.add_(1)
    area, covered = torch.zeros_like(first), torch.zeros_like(first)
    for piece, count in enumerate(counts):
        begin, known, kinks = kink[piece, :count], edges[piece] + 1, edges[piece + 1]
        width = (torch.minimum(kink[piece + 1, :count], lasting[piece, :count]) - begin).clamp_(min=0)
        needed = min(known // 2 + 1, _nodes_for(float((fall_sum[piece, :count] * width).max()), accuracy.negligible))
        nodes, weights = _gauss(needed if known == kinks else max(needed, accuracy.nodes), steep)
        x = torch.addcmul(begin, nodes[:, None], width)
        below = torch.addcmul(lead[0, :count], fall[0, :count], x, value=-1)
        factor = torch.empty_like(x)
        for key in range(1, kinks):
            torch.addcmul(lead[key, :count], fall[key, :count], x, value=-1, out=factor)
            below.mul_(factor if key < known else factor.clamp_(max=1))
        area[:count] += width * (weights @ (1 - below))
        covered[:count] += width
    return ((area + first + 1 - covered) / 2).clamp(0, 1)


def _nodes_for(decay: float, error: float) -> int:
    """Nodes that integrate exp(−decay · x) over 0..1, or anything with derivatives as small, to within the error."""
    nodes = 1
    while 2 * nodes * math.log(max(decay, 1e-9)) + 4 * math.lgamma(nodes + 1) - 3 * math.lgamma(2 * nodes + 1) > math.log(
        error
    ):
        nodes += 1
    return nodes


def _gaussian_probability(steep: Tensor, gap: Tensor, inverse: Tensor) -> Tensor:
    """∫φ(z)(1 − Π_t F_t(z)) dz with F_t(z) = Φ(c_t z + δ_t/σ), the normal density and distribution function.

    A key alone overtakes with probability Φ(−near_t/σ), near_t = δ_t / √(1 + c_t²); where that is nothing it is left out.
    """
    accuracy = _ACCURACY[steep.dtype]
    near = gap / (1 + steep.square()).sqrt()
    place = torch.arange(1, len(steep) + 1, dtype=steep.dtype, device=steep.device).unsqueeze(1)
    found = steep.new_zeros(len(inverse), steep.shape[1])
    for level, over in enumerate(inverse.tolist()):
        keys = ((near < accuracy.tail / over) * place).amax(0).long()
        order = keys.argsort(descending=True)[: int(keys.count_nonzero())]
        panels = _panels(1 / over, accuracy)
        for some in _slices(len(order), _CHUNK // 4):
            rows = order[some]
            most = int(keys[rows[0]])
            found[level, rows] = _normal_integrated(steep[:most, rows], gap[:most, rows] * over, panels)
    return found


def _panels(sigma: float, accuracy: _Accuracy) -> list[float]:
    """Where panels of z end, from the upper tail down to the lower.

    Their width is 1, but less around z = −1/σ, where the largest score turns 0: there F_t of a small score is steep.
    """
    ends = [accuracy.tail]
    while ends[-1] > -accuracy.tail:
        factor = 1 + sigma * ends[-1]
        if 0 < factor < accuracy.smallest:
            ends += [-1 / sigma, (-1 - accuracy.smallest) / sigma]
        else:
            ends.append(ends[-1] - min(abs(factor), 1))
    return ends


def _normal_integrated(steep: Tensor, gap: Tensor, panels: list[float]) -> Tensor:
    """The integral for rows, keys × rows; gap is δ/σ.

    From above down: a panel takes the keys that may overtake where it ends, if enough probability is left for it to matter, and
    a row is done where none is left.
    """
    accuracy = _ACCURACY[steep.dtype]
    places, weights = _gauss(accuracy.normal_nodes, steep)
    total, left = torch.zeros_like(steep[0]), torch.ones_like(steep[0])
    alive = torch.arange(len(total), device=total.device)
    for top, low in itertools.pairwise(panels):
        sure = -torch.special.ndtri((_normal(-accuracy.tail) / left).clamp_(max=0.5))
        unsure = torch.add(gap, steep, alpha=low) < sure
        rows = unsure.any(0).nonzero().squeeze(1)
        z = (top + (low - top) * places).unsqueeze(1)
        below = torch.ones(len(places), len(rows), dtype=steep.dtype, device=steep.device)
        keys = unsure.any(1).nonzero().squeeze(1)
        lead, slope = (values[keys][:, rows].mul_(math.sqrt(0.5)) for values in (gap, steep))
        for key in range(len(keys)):
            sign = torch.addcmul(lead[key], slope[key], z).erf_()
            below.mul_(sign.mul_(0.5).add_(0.5))
        density = weights * (top - low) / math.sqrt(2 * math.pi) * (-z.squeeze(1).square() / 2).exp()
        total[alive[rows]] += density @ (1 - below)
        left = torch.full_like(left, _normal(low)).index_copy_(0, rows, below[-1] * _normal(low))
        lasting = left >= accuracy.negligible
        total[alive[~lasting]] += _normal(low)
        if not bool(lasting.all()):
            alive, left, steep, gap = alive[lasting], left[lasting], steep[:, lasting], gap[:, lasting]
    return total.clamp_(0, 1)


def _normal(z: float) -> float:
    """Φ(z)."""
    return math.erfc(-z * math.sqrt(0.5)) / 2
