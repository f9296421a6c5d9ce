"""What single heads do to single words: the keys that a word looks for, and the values that it brings."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core.norms import centre
from normscope.errors import InputError
from normscope.models import BlockNorm, Model
from normscope.schemes import At
from normscope.schemes.update import Update
from normscope.words.search import Nearest, nearest, top_scores

_READ = 4096  # tokens of the vocabulary that are projected together
_READ_OUT = 256  # states whose logits are made together
_ROUNDING = 1e-4
Turn = tuple[Float[Tensor, "dim dim"], Float[Tensor, "dim dim"]]


@dataclass(frozen=True)
class Found:
    """The nearest tokens of every head and word, best first."""

    scores: Float[Tensor, "heads words count"]
    tokens: Int[Tensor, "heads words count"]


@dataclass(frozen=True)
class Updates:
    """What a layer writes for words that attend to themselves alone.

    Attributes:
        states: x, the words as they stand in the stream and are carried on.
        by_head: v W_O of every head, after the norm of the layer's output where there is one, times the size of the write.
        rest: what the layer adds besides, b_O.
    """

    states: Float[Tensor, "words dim"]
    by_head: Float[Tensor, "heads words dim"]
    rest: Float[Tensor, "words dim"]


def identity(x: Tensor) -> Tensor:
    """The norm of a model that has none."""
    return x


def reader(view: Model, layer: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """How embeddings stand in the stream in front of a layer, and what its attention reads of them.

    In front of a norm at the layer's input they stand as they enter the model; where the stream itself is normalised, they
    stand as that norm leaves them, and are read as they stand.
    """
    norm = view.read_norm(layer)
    if norm is None or norm.slot != "input":
        return lambda embeddings: (normalised := (norm or identity)(embeddings), normalised)
    entering = next((norm for norm in view.norms if norm.slot == "embedding"), None) or identity
    return lambda embeddings: (states := entering(embeddings), norm(states))


@torch.no_grad()
def nearest_keys(
    view: Model,
    layer: int,
    tokens: Int[Tensor, " words"],
    count: int,
    distance: int = 0,
    turn: Turn | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Found:
    """The tokens y whose keys have the largest q·k for each word x, by head.

    Without biases and norms of heads q·k = N(x) W_QK N(y)ᵀ, N being the norm that the layer reads through.

    Args:
        view: the model.
        layer: whose heads.
        tokens: the words.
        count: how many tokens to find.
        distance: how far behind the word its keys lie, where positions are rotations.
        turn: rotations of what queries and what keys read: W_QK with the same singular values and other vectors.
        progress: called with the number of tokens of the vocabulary that have been looked at.
    """
    embeddings, read = view.embeddings[: view.vocabulary], reader(view, layer)
    of_query, of_key = rotations(view, layer, distance)
    turn_query, turn_key = (None, None) if turn is None else turn
    (q,) = view.heads_of(layer, _turned(read(embeddings[tokens])[1], turn_query)[None], of_query, "q")
    best = Nearest(count)
    for first in range(0, len(embeddings), _READ):
        piece = embeddings[first : first + _READ]
        (k,) = view.heads_of(layer, _turned(read(piece)[1], turn_key)[None], of_key, "k")
        best.add(q[0] @ k[0].mT)
        progress(first + len(piece))
    return Found(*best.found)


@torch.no_grad()
def updates_of(view: Model, layer: int, tokens: Int[Tensor, " words"], turn: Turn | None = None) -> Updates:
    """What a layer's heads write for words that attend to themselves alone; ``turn`` turns what they read and write."""
    weights = view.projections(layer)
    states, read = reader(view, layer)(view.embeddings[tokens])
    turn_read, turn_write = (None, None) if turn is None else turn
    (v,) = view.heads_of(layer, _turned(read, turn_read)[None], None, "v")
    written = _turned(v[0] @ weights.W_O, turn_write)
    return _sized(view, layer, _after_output_norm(view, layer, Updates(states, written, weights.b_O.expand_as(states))))


def nearest_values(view: Model, layer: int, updates: Updates, count: int) -> tuple[Found, Found]:
    """The tokens with the largest logits at x + update + b_O, by head and for the sum of all heads.

    Logits are those that the model's own last steps would give: N(x + update + b_O) W_Uᵀ with the final norm N, for most. Where
    the stream is normalised behind attention, that norm comes first. A model that predicts nothing is read with its embeddings.
    """
    base = updates.states + updates.rest
    heads, words = updates.by_head.shape[:2]
    landed = torch.cat((base + updates.by_head, (base + updates.by_head.sum(0))[None])).flatten(0, 1)
    landed = (_stream_norm(view, layer) or identity)(landed)
    scores, tokens = (x.view(heads + 1, words, -1) for x in _most_probable(view, landed, count))
    return Found(scores[:-1], tokens[:-1]), Found(scores[-1:], tokens[-1:])


def output_bias(view: Model) -> Float[Tensor, " vocabulary"] | None:
    """The b of logits N(x) W_Uᵀ + b with the final norm N; None where they are made in another way."""
    if view.unembedding is None or not view.predicts:
        return None
    states = torch.randn(2, view.dim, generator=torch.Generator().manual_seed(0)).to(view.device)
    said = view.read_out(states)
    rest = said - (view.final_norm or identity)(states) @ view.unembedding.T
    linear = (rest[0] - rest[1]).abs().max() <= _ROUNDING * said.abs().max()
    return rest[0, : view.vocabulary] if linear else None


def _most_probable(view: Model, states: Float[Tensor, "states dim"], count: int) -> tuple[Tensor, Tensor]:
    """The tokens with the largest logits, in pieces that fit memory; by one product where logits are one."""
    if not view.predicts:
        return nearest(states, view.embeddings[: view.vocabulary], count)
    bias = output_bias(view)
    if bias is not None and view.unembedding is not None:
        rows = torch.cat((view.unembedding[: view.vocabulary], bias[:, None]), -1)
        normalised = (view.final_norm or identity)(states)
        return nearest(torch.cat((normalised, torch.ones_like(normalised[:, :1])), -1), rows, count)
    found = [
        top_scores(view.read_out(states[first : first + _READ_OUT])[:, : view.vocabulary], count)
        for first in range(0, len(states), _READ_OUT)
    ]
    scores, tokens = zip(*found, strict=True)
    return torch.cat(scores), torch.cat(tokens)


def haar(dim: int, seed: int, device: torch.device | str = "cpu") -> Float[Tensor, "dim dim"]:
    """A rotation or reflection, uniform over all."""
    drawn = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    Q, R = torch.linalg.qr(drawn)
    turn: Tensor = Q * R.diagonal().sign()
    return turn.float().to(device)


def rotations(view: Model, layer: int, distance: int) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """The rotations of a query and of keys ``distance`` places before it; none at distance 0, where they cancel."""
    if distance == 0:
        return None, None
    if view.position_kind != "rotary":
        raise InputError(f"--distance: positions of '{view.name}' are no rotations of q and k; leave it out")
    if distance < 0 or (view.context is not None and distance >= view.context):
        raise InputError(f"--distance lies between 0 and {(view.context or 1) - 1:,}, not {distance}")
    found = view.rotation(layer, torch.tensor([distance, 0]))
    if found is None:
        raise InputError(f"layer {layer} of '{view.name}' does not rotate q and k; leave --distance out")
    cos, sin = found
    return (cos[:, :1], sin[:, :1]), (cos[:, 1:], sin[:, 1:])


def _turned(x: Tensor, turn: Tensor | None) -> Tensor:
    return x if turn is None else x @ turn


def _stream_norm(view: Model, layer: int) -> BlockNorm | None:
    places = {(norm.layer, norm.sublayer, norm.slot): norm for norm in view.norms}
    return places.get((layer, "attention", "stream"))


def _sized(view: Model, layer: int, updates: Updates) -> Updates:
    """The size of the write and of what is carried on, where the model's scheme gives them."""
    if view.scheme is None:
        return updates
    update = Update.of(view.scheme.at(layer, view.layers).attention, At(layer, view.layers), identity)
    return Updates(update.carry * updates.states, update.step * updates.by_head, update.step * updates.rest)


def _after_output_norm(view: Model, layer: int, updates: Updates) -> Updates:
    """Each head's share of γ∘u/rms(u) + β, where u = Σ_h u_h + b_O is what a norm at the output normalises."""
    norm = next((norm for norm in view.norms if (norm.layer, norm.sublayer, norm.slot) == (layer, "attention", "output")), None)
    if norm is None:
        return updates
    by_head, rest = (centre(x) if norm.kind == "layer" else x for x in (updates.by_head, updates.rest))
    whole = by_head.sum(0) + rest
    factor = norm.gain * torch.rsqrt(whole.square().mean(-1, keepdim=True) + norm.eps)
    bias = torch.zeros_like(factor) if norm.bias is None else norm.bias
    return Updates(updates.states, factor * by_head, factor * rest + bias)
