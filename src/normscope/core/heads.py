"""Attention as a map from tokens to tokens: weights under their usual names, heads, what happens between them, precision."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.attention import Backend, attend, normalise_heads
from normscope.core.scores import Scores, attend_scored
from normscope.errors import InputError
from normscope.machine.files import regular_file
from normscope.machine.memory import require_memory

_SOFTMAX = Scores()
_READING = ("W_Q", "W_K", "W_V", "W_G")
_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "W_G")


@dataclass(frozen=True)
class HeadWeights:
    """Weights of an attention layer under their usual names, for one model or for many at once (``runs``).

    q = x W_Q, k = x W_K, v = x W_V per head; the update is Σ_heads (attention · v) W_O. None is the identity, one head.
    Shapes are (runs…, heads, dim, head) for W_Q and W_K, (runs…, heads, dim, value) for W_V, and W_O transposed. A scheme with
    a gate has σ(√d · x W_G) on what each head mixes, W_G of W_V's shape; None is zero, a gate of 1/2. The factor √d is the
    norm of a model's states, which have norm 1 here.
    """

    W_Q: Float[Tensor, "... _ _ _"] | None = None
    W_K: Float[Tensor, "... _ _ _"] | None = None
    W_V: Float[Tensor, "... _ _ _"] | None = None
    W_O: Float[Tensor, "... _ _ _"] | None = None
    W_G: Float[Tensor, "... _ _ _"] | None = None

    def __post_init__(self) -> None:
        for name in _WEIGHTS:
            weight = getattr(self, name)
            if weight is not None and not torch.isfinite(weight).all():
                raise InputError(f"{name} has an entry that is not a finite number")
        self._check_shapes()

    def _check_shapes(self) -> None:
        """Heads, widths and dimension must fit together, where a weight that is None is one head as wide as the tokens."""
        shapes = {name: tuple(w.shape[-3:]) for name in _READING if (w := getattr(self, name)) is not None}
        if self.W_O is not None:
            heads, value, dim = self.W_O.shape[-3:]
            shapes["W_O"] = (heads, dim, value)
        if not shapes:
            return
        dim = next(iter(shapes.values()))[1]
        identity = (1, dim, dim)
        q, k, v, o = (shapes.get(name, identity) for name in ("W_Q", "W_K", "W_V", "W_O"))
        g = shapes.get("W_G", v)
        fits = q[2] == k[2] and v[2] == o[2] == g[2] and len({own[1] for own in (q, k, v, o, g)}) == 1
        if not fits or len({own[0] for own in (q, k, v, o, g)}) > 1:
            listed = ", ".join(f"{name} {tuple(getattr(self, name).shape)}" for name in shapes)
            raise InputError(
                f"the weights do not fit together ({listed}): q and k need one width, v, W_O and W_G one width, all the same "
                f"heads and dimension; a weight that is left out is the identity, one head as wide as the tokens"
            )

    @classmethod
    def read(cls, path: Path, dim: int) -> "HeadWeights":
        """Weights for tokens of dimension ``dim`` from a safetensors file with W_Q, W_K, W_V, W_G (heads × dim × head), W_O.

        A matrix dim × dim counts as one head, and a weight that is left out is the identity (W_G: zero).
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = regular_file(path, "weights file")
        require_memory({f"the weights file '{path}'": 3 * file.stat().st_size})
        try:
            found = load_file(file)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read the weights file '{path}': {error}") from error
        for name, weight in found.items():
            if name not in _WEIGHTS:
                raise InputError(f"unknown weight '{name}' in '{path}'; allowed: {', '.join(_WEIGHTS)}")
            wide = weight.shape[-1] if name == "W_O" else weight.shape[-2] if weight.ndim > 1 else 0
            if weight.ndim not in (2, 3) or wide != dim:
                raise InputError(f"{name} in '{path}' has shape {tuple(weight.shape)}; the tokens have dimension {dim}")
        weights = {name: weight[None] if weight.ndim == 2 else weight for name, weight in found.items()}
        if not weights:
            raise InputError(f"'{path}' holds no weights; it may have {', '.join(_WEIGHTS)}")
        return cls(**{name: weight.to(torch.float64) for name, weight in weights.items()})

    def folded(self) -> "HeadWeights":
        """One head as wide as the tokens needs two products, not four: W_Q W_Kᵀ and W_V W_O.

        Only for schemes that normalise and gate nothing between them.
        """
        W_Q, W_K, W_V, W_O = self.W_Q, self.W_K, self.W_V, self.W_O
        if W_Q is None or W_K is None or W_V is None or W_O is None or W_Q.shape[-3] != 1:
            return self
        return HeadWeights(W_Q=W_Q @ W_K.mT, W_V=W_V @ W_O)


@dataclass(frozen=True)
class Mixing:
    """What happens between the projections of attention and W_O, as the slots of a sublayer say.

    Attributes:
        heads: which of q, k, v are normalised.
        head_norm: with which norm, ``rms`` or ``layer``.
        scores: what becomes of the logits.
        inner: norm of the concatenated heads, or None.
        gated: whether they are then multiplied by σ(√d · x W_G).
    """

    heads: str = "none"
    head_norm: str = "rms"
    scores: Scores = _SOFTMAX
    inner: Callable[[Tensor], Tensor] | None = None
    gated: bool = False

    @property
    def foldable(self) -> bool:
        """Whether W_Q W_Kᵀ and W_V W_O are all that matters of the weights of a head."""
        return self.heads == "none" and self.inner is None and not self.gated


PLAIN = Mixing()


@dataclass(frozen=True)
class Attention:
    """A(X): tokens to tokens, with the scores' inverse temperature β and any weights.

    Attributes:
        beta: the factor on ⟨q, k⟩ inside the softmax.
        weights: the identity by default, as in theory.
        causal: whether a token sees only itself and those before it.
        precision: dtype of the matrix products; the tokens' own if None.
        backend: which attention kernel; ``chosen_backend`` for the shape if None.
    """

    beta: float
    weights: HeadWeights = HeadWeights()
    causal: bool = False
    precision: torch.dtype | None = None
    backend: Backend | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.beta):
            raise InputError(f"beta is a finite number, not {self.beta}")

    def __call__(self, x: Float[Tensor, "*batch tokens dim"], mixing: Mixing = PLAIN) -> Float[Tensor, "*batch tokens dim"]:
        """A(X), with what the slots say between the projections.

        Batch dimensions of x beyond the weights' runs share those weights: (runs, schemes, tokens, dim) reads each run's
        weights once for all schemes.
        """
        y = x if self.precision is None else x.to(self.precision)
        q, k, v = self.projected(y, mixing)
        if mixing.scores.plain:
            mixed = attend(q, k, v, self.beta, self.causal, self.backend)
        else:
            mixed = attend_scored(q, k, v, self.beta, mixing.scores, self.causal)
        if mixing.inner is not None:
            mixed = _normed_together(mixed, mixing.inner, x.shape[-1])
        if mixing.gated:
            mixed = mixed * _gate(y, self.weights.W_G)
        return unproject(mixed, self.weights.W_O).to(x.dtype)

    def projected(self, x: Float[Tensor, "*batch tokens dim"], mixing: Mixing) -> tuple[Tensor, Tensor, Tensor]:
        """Q, k and v of every head, normalised as the slot ``heads`` says: (*batch, heads, tokens, head)."""
        w = self.weights
        return normalise_heads(project(x, w.W_Q), project(x, w.W_K), project(x, w.W_V), mixing.heads, mixing.head_norm)


def norm_inside(
    norm: Callable[[Tensor], Tensor], hidden: Float[Tensor, "*batch tokens hidden"], dim: int
) -> Float[Tensor, "*batch tokens hidden"]:
    """The norm of a hidden activation between two matrices, for states of norm 1 where a model has √d.

    A model's norm of w components has size √w, which is √(w/d) in these units: √(w/d) · norm(√(d/w) · h).
    """
    size = math.sqrt(hidden.shape[-1] / dim)
    return norm(hidden) if size == 1 else size * norm(hidden / size)


def _normed_together(
    mixed: Float[Tensor, "*batch heads tokens value"], norm: Callable[[Tensor], Tensor], dim: int
) -> Float[Tensor, "*batch heads tokens value"]:
    """One norm of all heads together, as they stand before W_O."""
    rows = mixed.movedim(-3, -2)
    return norm_inside(norm, rows.flatten(-2), dim).reshape(rows.shape).movedim(-2, -3)


def _gate(x: Float[Tensor, "*batch tokens dim"], weight: Tensor | None) -> float | Float[Tensor, "*batch heads tokens value"]:
    return 0.5 if weight is None else torch.sigmoid(math.sqrt(x.shape[-1]) * project(x, weight))


def project(
    x: Float[Tensor, "*batch tokens dim"], weight: Float[Tensor, "*runs heads dim head"] | None
) -> Float[Tensor, "*batch heads tokens head"]:
    """X W for every head, as one product per run over all rows that share its weights."""
    if weight is None:
        return x.unsqueeze(-3)
    runs, heads = weight.shape[:-3], weight.shape[-3]
    wide = weight.to(x.dtype).movedim(-3, -2).flatten(-2)
    rows = x.reshape(*runs, -1, x.shape[-1]) @ wide
    return rows.reshape(*x.shape[:-1], heads, -1).movedim(-2, -3)


def unproject(
    mixed: Float[Tensor, "*batch heads tokens value"], weight: Float[Tensor, "*runs heads value dim"] | None
) -> Float[Tensor, "*batch tokens dim"]:
    """Σ_heads mixed W_O, likewise as one product per run."""
    if weight is None:
        return mixed.sum(-3) if mixed.shape[-3] > 1 else mixed.squeeze(-3)
    runs = weight.shape[:-3]
    rows = mixed.movedim(-3, -2).flatten(-2)
    out = rows.reshape(*runs, -1, rows.shape[-1]) @ weight.to(mixed.dtype).flatten(-3, -2)
    return out.reshape(*rows.shape[:-1], -1)
