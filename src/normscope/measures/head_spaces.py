"""What heads read of a token: rank and input subspaces of W_QK from thin factors, and angles between subspaces."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core.norms import length
from normscope.measures.attention_input import AttentionInput, attention_input
from normscope.measures.base import LayerAttention
from normscope.models import HeadProjections, Model
from normscope.models.factors import gram_root, orthonormal, scaled_heads, singular_factors, singular_sum, thin_singular_values

PLACES = ("before", "after")  # the norm at the input of attention
SIDES = ("queries", "keys")
_PAIRS = 8  # of random subspaces that chance is the mean of
T = TypeVar("T")


@dataclass(frozen=True)
class Factors:
    """Singular values of W_QK = W_Q W_Kᵀ by head, and orthonormal bases of its input subspaces.

    Attributes:
        singular: in falling order.
        rank: how many are not rounding.
        queries: of everything in a query position that the attention logits depend on, as columns; those beyond the rank are 0.
        keys: the same of key positions.
    """

    singular: Float[Tensor, "heads head"]
    rank: Int[Tensor, " heads"]
    queries: Float[Tensor, "heads dim head"]
    keys: Float[Tensor, "heads dim head"]


def factors(W_Q: Float[Tensor, "heads dim head"], W_K: Float[Tensor, "heads dim head"]) -> Factors:
    """Rank and input subspaces of W_Q W_Kᵀ by its singular value decomposition, without the matrix.

    Values up to dim · eps of the largest are rounding, with eps that of the weights' dtype.
    """
    svd = singular_factors(W_Q.double(), W_K.double().mT)
    above = svd.values > _rounding(W_Q) * svd.values[:, :1]
    return Factors(svd.values, above.sum(1), svd.left * above[:, None], svd.right * above[:, None])


def spectrum(
    W_Q: Float[Tensor, "heads dim head"], W_K: Float[Tensor, "heads dim head"]
) -> tuple[Float[Tensor, "heads head"], Int[Tensor, " heads"]]:
    """Singular values of W_Q W_Kᵀ in falling order, and its rank; see ``factors``."""
    values = thin_singular_values(W_Q.double(), W_K.double().mT)
    return values, (values > _rounding(W_Q) * values[:, :1]).sum(1)


def span(W: Float[Tensor, "heads dim head"]) -> Float[Tensor, "heads dim head"]:
    """Orthonormal bases of the column spaces of W, with columns of 0 beyond the rank."""
    scaled = scaled_heads(W.double())[0]
    bases, full = orthonormal(scaled, _rounding(W))
    if not bool(full.all()):
        bases[~full] = _decomposed_span(scaled[~full].cpu(), _rounding(W)).to(bases)
    return bases


def _decomposed_span(W: Float[Tensor, "heads dim head"], rounding: float) -> Float[Tensor, "heads dim head"]:
    """``span`` of matrices that may lack rank; singular values up to ``rounding`` of the largest count as 0."""
    Q, R = torch.linalg.qr(W)
    U, singular, _ = torch.linalg.svd(R)
    basis: Tensor = Q @ U * (singular > rounding * singular[:, :1])[:, None]
    return torch.nn.functional.pad(basis, (0, W.shape[-1] - basis.shape[-1]))


@dataclass(frozen=True)
class InputSpaces:
    """Orthonormal bases of the input subspaces of W_Q and W_K by head; ``shared`` query heads have the same keys."""

    queries: Float[Tensor, "heads dim head"]
    keys: Float[Tensor, "heads dim head"]
    shared: int = 1


def input_spaces(
    W_Q: Float[Tensor, "heads dim head"], W_K: Float[Tensor, "heads dim head"], bare: bool, shared: int = 1
) -> InputSpaces:
    """What heads read of query and key positions.

    Logits that are x W_QK y alone (``bare``: no rotation, no biases, no norms of q and k) depend on the row spaces of W_QK.
    Otherwise rotations, biases and norms act between W_Q and W_K, and heads may read the whole column space of each.
    """
    if bare and shared == 1:
        svd = factors(W_Q, W_K)
        return InputSpaces(svd.queries, svd.keys)
    return InputSpaces(span(W_Q), span(W_K[::shared]).repeat_interleave(shared, 0), shared)


@dataclass(frozen=True)
class LayerInput:
    """The input of a layer's attention, and what its heads read of it.

    Attributes:
        source: how the input follows from the residual stream.
        spaces: the input subspaces ``before`` the norm, in the stream, and ``after`` it.
    """

    source: AttentionInput
    spaces: dict[str, InputSpaces]


def _once(compute: Callable[[Model, LayerAttention], T]) -> Callable[[Model, LayerAttention], T]:
    """Compute once per layer of a forward pass: the measures that share the pass share the result."""
    results: WeakKeyDictionary[LayerAttention, T] = WeakKeyDictionary()

    def cached(model: Model, attention: LayerAttention) -> T:
        if attention not in results:
            results[attention] = compute(model, attention)
        return results[attention]

    return cached


@_once
def projections_of_layer(model: Model, attention: LayerAttention) -> HeadProjections:
    """The matrices of a layer's heads."""
    return model.projections(attention.layer)


@_once
def spaces_of(model: Model, attention: LayerAttention) -> InputSpaces:
    """The input subspaces of a layer's heads in the input of attention, after any norm."""
    weights = projections_of_layer(model, attention)
    return input_spaces(weights.W_Q, weights.W_K, _bare(model, attention), weights.shared)


@_once
def layer_input(model: Model, attention: LayerAttention) -> LayerInput:
    """The input of a layer's attention, with the input subspaces of its heads before and after the norm."""
    source, weights = attention_input(model, attention.step), projections_of_layer(model, attention)
    # a norm with a bias adds a constant to q and k, which acts like a bias of theirs
    bare = _bare(model, attention) and (source.norm is None or source.norm.bias is None)
    before = input_spaces(source.before(weights.W_Q), source.before(weights.W_K), bare, weights.shared)
    return LayerInput(source, {"before": before, "after": spaces_of(model, attention)})


@_once
def _bare(model: Model, attention: LayerAttention) -> bool:
    """Whether attention logits are x W_QK y and nothing else."""
    weights = projections_of_layer(model, attention)
    normalised = any(norm.layer == attention.layer and norm.slot in ("q", "k") for norm in model.norms)
    return attention.step.rotation is None and not normalised and not bool(weights.b_Q.any() or weights.b_K.any())


def principal_cosines(products: Float[Tensor, "*pairs width width"]) -> Float[Tensor, "*pairs width"]:
    """Cosines of the principal angles between subspaces, the largest first, from products VᵀV' of their orthonormal bases."""
    cosines: Tensor = torch.linalg.svdvals(products).clamp(max=1)
    return cosines


@lru_cache(maxsize=64)
def chance_cosine(dim: int, width: int) -> float:
    """The mean cosine of the principal angles between two random subspaces of ``width`` dimensions."""
    drawn = torch.randn(_PAIRS, 2, dim, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bases = torch.linalg.qr(drawn).Q
    return float(principal_cosines(bases[:, 0].mT @ bases[:, 1]).mean())


def data_roots(x: Float[Tensor, "tokens dim"], bases: Float[Tensor, "heads dim width"]) -> Float[Tensor, "heads few width"]:
    """R with RᵀR = Σ_t (Vᵀx_t)(Vᵀx_t)ᵀ for every basis V: the second moment of the data in a subspace, as a small matrix."""
    return gram_root(x @ bases)


def weighted_cosine(
    products: Float[Tensor, "*pairs width width"],
    root: Float[Tensor, "*pairs few width"],
    other_root: Float[Tensor, "*pairs few width"],
) -> Float[Tensor, " *pairs"]:
    """‖S^½ P P' S^½‖_* / √(tr PS · tr P'S), S = E[x xᵀ]: the mean cosine of principal angles, weighted by the data.

    Theorem 2 requires x_α·x_β = 0 for the parts x_α = P x and x_β = P'x of tokens, not for all directions of two subspaces:
    an angle between directions in which no token has a part does not matter. E[x_α·x_β] = tr(S^½ P P' S^½), and the sum of
    singular values bounds it whatever the signs are. The value is 0 exactly if x_α(t)·x_β(u) = 0 for all pairs of tokens t and
    u, which is more than the orthogonality of each token's parts, and 1 for the same subspace. For isotropic data the singular
    values are cos θ_m themselves, and the value is their mean for subspaces of one width.

    Args:
        products: VᵀV' of orthonormal bases.
        root: R with RᵀR = VᵀSV, of ``data_roots``; any factor cancels.
        other_root: the same for V'.
    """
    shared = singular_sum(root @ products @ other_root.mT)
    sizes = (length(root.flatten(-2)) * length(other_root.flatten(-2))).squeeze(-1)
    return torch.where(sizes > 0, shared / sizes, 0.0).clamp(max=1)


def _rounding(W: Tensor) -> float:
    return float(torch.finfo(W.dtype).eps * W.shape[-2])
