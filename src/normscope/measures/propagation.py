"""How a small change of queries, keys or messages moves a head's output, to first order."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class FirstOrderChange:
    """The change of a head's output Σ_t a_t m_t, by what was perturbed; the whole change is their sum."""

    from_q: Float[Tensor, "... dim"]
    from_k: Float[Tensor, "... dim"]
    from_m: Float[Tensor, "... dim"]


def first_order_change(
    q: Float[Tensor, "... head"],
    k: Float[Tensor, "... keys head"],
    m: Float[Tensor, "... keys dim"],
    d_q: Float[Tensor, "... head"],
    d_k: Float[Tensor, "... keys head"],
    d_m: Float[Tensor, "... keys dim"],
    scale: float = 1.0,
) -> FirstOrderChange:
    """Theorem 4: how Σ_t a_t m_t with a = softmax(scale · q·k_t) changes when q, k and m change by d_q, d_k and d_m.

    With z̃_t = z_t − E_a[z]: scale · E_a[m_t k̃_tᵀ] d_q, scale · E_a[m̃_t d_k_tᵀ] q, and E_a[d_m_t].
    """
    a = (scale * _dots(k, q)).softmax(-1)
    return FirstOrderChange(
        from_q=scale * _mean(a * _dots(k - _mean(a, k).unsqueeze(-2), d_q), m),
        from_k=scale * _mean(a * _dots(d_k, q), m - _mean(a, m).unsqueeze(-2)),
        from_m=_mean(a, d_m),
    )


def _dots(rows: Tensor, vector: Tensor) -> Tensor:
    """The product of every row with the vector."""
    return (rows @ vector.unsqueeze(-1)).squeeze(-1)


def _mean(weights: Tensor, rows: Tensor) -> Tensor:
    """Σ_t weights_t rows_t."""
    return (weights.unsqueeze(-2) @ rows).squeeze(-2)
