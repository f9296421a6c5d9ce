"""From hidden states to tokens: the norm before the unembedding, and the logits that the model computes of any state."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core.norms import factor_between
from normscope.measures.search import nearest, top_scores
from normscope.models import Model
from normscope.schemes import NormKind

_READ_OUT = 256  # states whose logits are computed together
_ROUNDING = 1e-4


@dataclass(frozen=True)
class OutputNorm:
    """Kind, gain γ, bias β and eps of the norm before the unembedding.

    A ``pointwise`` map in its place keeps no directions: those of hidden states are as RMSNorm keeps them.
    """

    kind: NormKind
    gain: Float[Tensor, " dim"]
    bias: Float[Tensor, " dim"]
    eps: float = 0.0
    pointwise: str = ""

    @classmethod
    def of(cls, model: Model) -> "OutputNorm":
        """The final norm; without one, the last of the stream, or RMSNorm without parameters."""
        norm = model.final_norm or model.read_norm(model.layers)
        if norm is None:
            return cls("rms", torch.ones(model.dim, device=model.device), torch.zeros(model.dim, device=model.device))
        gain = norm.gain.to(model.device)
        bias = torch.zeros_like(gain) if norm.bias is None else norm.bias
        kind: NormKind = "layer" if norm.kind == "layer" else "rms"
        return cls(kind, gain, bias, norm.eps, norm.kind if norm.pointwise else "")


def output_rows(model: Model) -> Float[Tensor, "vocabulary dim"]:
    """The unembedding; the embeddings where there is none."""
    rows = model.embeddings if model.unembedding is None else model.unembedding
    return rows[: model.vocabulary]


def identity(x: Tensor) -> Tensor:
    """The norm of a model that has none."""
    return x


def output_bias(model: Model) -> Float[Tensor, " vocabulary"] | None:
    """The b of logits N(x) W_Uᵀ + b with the final norm N; None where logits are computed in another way."""
    if model.unembedding is None or not model.reads_out:
        return None
    states = torch.randn(2, model.dim, generator=torch.Generator().manual_seed(0)).to(model.device)
    logits = model.read_out(states)
    rest = logits - (model.final_norm or identity)(states) @ model.unembedding.T
    linear = (rest[0] - rest[1]).abs().max() <= _ROUNDING * logits.abs().max()
    return rest[0, : model.vocabulary] if linear else None


def most_probable(
    model: Model, states: Float[Tensor, "states dim"], count: int
) -> tuple[Float[Tensor, "states count"], Int[Tensor, "states count"]]:
    """The largest logits of states after the last layer, and their tokens, in pieces that fit memory.

    A model that computes no logits of them is read with its embeddings.
    """
    if not model.reads_out:
        return nearest(states, model.embeddings[: model.vocabulary], count)
    bias = output_bias(model)
    if bias is not None and model.unembedding is not None:
        rows = torch.cat((model.unembedding[: model.vocabulary], bias[:, None]), -1)
        normalised = (model.final_norm or identity)(states)
        return nearest(torch.cat((normalised, torch.ones_like(normalised[:, :1])), -1), rows, count)
    pieces = [
        top_scores(model.read_out(states[first : first + _READ_OUT])[:, : model.vocabulary], count)
        for first in range(0, len(states), _READ_OUT)
    ]
    scores, tokens = zip(*pieces, strict=True)
    return torch.cat(scores), torch.cat(tokens)


def tied(model: Model) -> bool:
    """Whether unembedding and embeddings are the same table up to a factor."""
    if model.unembedding is None:
        return False
    some = slice(None, min(256, model.vocabulary))
    embedded, output = model.embeddings[some], model.unembedding[some]
    factor = factor_between(embedded, output)
    return bool(torch.allclose(embedded, factor * output, rtol=1e-4, atol=1e-5 * float(embedded.abs().max())))


def scaled(model: Model) -> bool:
    """Whether the model scales the rows of a tied table before its first layer."""
    embedded, output = model.embeddings[:64], model.unembedding
    return output is not None and tied(model) and not bool(torch.allclose(embedded, output[:64], rtol=1e-3))
