"""What single heads do to single tokens: the keys with the largest q·k, and the update of a token that attends to itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core.norms import length, visible_part
from normscope.errors import InputError
from normscope.measures.readout import identity, most_probable
from normscope.measures.search import Nearest
from normscope.models import BlockNorm, HeadProjections, Model
from normscope.models.observe import Rotation

_READ = 4096  # tokens of the vocabulary that are projected together
_TESTED, _ROUNDING = 16, 1e-5  # tokens whose keys tell whether a product gives them, and by how much, relative to the largest
Rotations = tuple[Float[Tensor, "dim dim"], Float[Tensor, "dim dim"]]


@dataclass(frozen=True)
class Returned:
    """The nearest tokens of every head and word, nearest first."""

    scores: Float[Tensor, "heads words count"]
    tokens: Int[Tensor, "heads words count"]


@dataclass(frozen=True)
class LinearNorm:
    """A norm γ∘u/rms(u) + β with the divisor of one input u: linear, so that parts of u have shares in the result.

    Attributes:
        kind: of the norm; with LayerNorm all parts are centred.
        factor: γ/rms(u).
        bias: β, which belongs to no part.
    """

    kind: str
    factor: Float[Tensor, "words dim"]
    bias: Float[Tensor, " dim"]

    @classmethod
    def at(cls, norm: BlockNorm, u: Float[Tensor, "words dim"]) -> "LinearNorm":
        """The norm at an input."""
        if norm.pointwise:
            raise InputError(f"the output norm is {norm.kind}, of which heads have no shares")
        rms = torch.hypot(length(visible_part(u, norm.kind)) / math.sqrt(u.shape[-1]), u.new_tensor(math.sqrt(norm.eps)))
        bias = torch.zeros_like(norm.gain) if norm.bias is None else norm.bias
        return cls(norm.kind, norm.gain / rms, bias)

    def __call__(self, part: Float[Tensor, "*heads words dim"]) -> Float[Tensor, "*heads words dim"]:
        """The share of a part of the input."""
        return self.factor * visible_part(part, self.kind)


@dataclass(frozen=True)
class Updates:
    """What the attention of a layer adds to tokens that attend to themselves alone.

    Attributes:
        states: carry·x, the part of the residual stream that the layer keeps.
        by_head: step·v W_O of every head; with an output norm, the head's share of the normalised sum.
        rest: what the layer adds besides: step·b_O, and the bias of an output norm.
    """

    states: Float[Tensor, "words dim"]
    by_head: Float[Tensor, "heads words dim"]
    rest: Float[Tensor, "words dim"]

    @property
    def whole(self) -> Float[Tensor, "words dim"]:
        """The update: resid_mid − carry·resid_pre before any norm of the stream."""
        return self.by_head.sum(0) + self.rest


def reader(model: Model, layer: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function from embeddings to hidden states x before a layer, and to the input of its attention.

    With an input norm, x is the embedding as it enters the model; where the stream itself is normalised, x is what the last
    norm before the layer returns.
    """
    before, update = model.read_norm(layer), model.update(layer, "attention")
    if before is not None and before.slot == "input":
        before = next((norm for norm in model.norms if norm.slot == "embedding"), None)
    return lambda embeddings: (states := (before or identity)(embeddings), update.read(states))


@torch.no_grad()
def nearest_keys(
    model: Model,
    layer: int,
    tokens: Int[Tensor, " words"],
    count: int,
    distance: int = 0,
    rotated: Rotations | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Returned:
    """The tokens y whose keys have the largest q·k for each token x, by head.

    Without biases and norms of heads q·k = N(x) W_QK N(y)ᵀ, N being the norm before the layer's attention.

    Args:
        model: the model.
        layer: whose heads.
        tokens: the queries.
        count: how many keys to return.
        distance: the number of positions between key and query, where positions are rotations.
        rotated: rotations of the inputs of queries and keys: W_QK with the same singular values and other vectors.
        progress: called with the share of the vocabulary that is done.
    """
    embeddings, read = model.embeddings[: model.vocabulary], reader(model, layer)
    of_query, of_key = position_rotations(model, layer, distance)
    rotate_query, rotate_key = (None, None) if rotated is None else rotated
    (q,) = model.heads_of(layer, _rotated(read(embeddings[tokens])[1], rotate_query)[None], of_query, "q")
    best = Nearest(count)
    for first in range(0, len(embeddings), _READ):
        piece = embeddings[first : first + _READ]
        (k,) = model.heads_of(layer, _rotated(read(piece)[1], rotate_key)[None], of_key, "k")
        best.add(q[0] @ k[0].mT)
        progress((first + len(piece)) / len(embeddings))
    return Returned(*best.top)


@dataclass(frozen=True)
class KeyTable:
    """The keys of the whole vocabulary in one layer, at distance 0; where k = x W_K + b_K to rounding, x stands for all heads.

    Attributes:
        weights: of the layer's heads.
        inputs: x, what attention reads of every token; None where keys are computed in another way.
        keys: of all heads, then.
    """

    weights: HeadProjections
    inputs: Float[Tensor, "vocabulary dim"] | None
    keys: Float[Tensor, "heads vocabulary head"] | None

    def scores(self, head: int, q: Float[Tensor, "words head"]) -> Float[Tensor, "words vocabulary"]:
        """q·k of queries of a head."""
        if self.inputs is None:
            assert self.keys is not None
            return q @ self.keys[head].mT
        return (q @ self.weights.W_K[head].mT) @ self.inputs.mT + (q @ self.weights.b_K[head])[:, None]


@torch.no_grad()
def key_table(model: Model, layer: int, progress: Callable[[float], None] = lambda share: None) -> KeyTable:
    """The keys of a layer for every token; ``progress`` is called with the share of the vocabulary that is done."""
    embeddings, read, weights = model.embeddings[: model.vocabulary], reader(model, layer), model.projections(layer)
    some = read(embeddings[:_TESTED])[1]
    (k,) = model.heads_of(layer, some[None], None, "k")
    product = some @ weights.W_K + weights.b_K[:, None]
    linear = k[0].shape == product.shape and torch.allclose(k[0], product, rtol=1e-4, atol=_ROUNDING * float(k.abs().max()))
    pieces = []
    for first in range(0, len(embeddings), _READ):
        x = read(embeddings[first : first + _READ])[1]
        pieces.append(x if linear else model.heads_of(layer, x[None], None, "k")[0][0])
        progress(min(first + _READ, len(embeddings)) / len(embeddings))
    table = torch.cat(pieces, -2)
    return KeyTable(weights, table, None) if linear else KeyTable(weights, None, table)


@torch.no_grad()
def updates_of(model: Model, layer: int, tokens: Int[Tensor, " words"], rotated: Rotations | None = None) -> Updates:
    """What a layer's heads add to tokens that attend to themselves alone, with the model's realised step and carry.

    ``rotated`` rotates the inputs and the outputs of the heads.
    """
    weights = model.projections(layer)
    if changed := model.changes_mixed(layer):
        raise InputError(f"layer {layer} of '{model.name}' has no updates by head: {changed}")
    states, read = reader(model, layer)(model.embeddings[tokens])
    rotate_input, rotate_output = (None, None) if rotated is None else rotated
    (v,) = model.heads_of(layer, _rotated(read, rotate_input)[None], None, "v")
    outputs = _rotated(v[0] @ weights.W_O, rotate_output)
    update, bias = model.update(layer, "attention"), weights.b_O.expand_as(states)
    if isinstance(update.output, BlockNorm):
        update = replace(update, output=LinearNorm.at(update.output, outputs.sum(0) + bias))
    by_head, rest = (update.written(states.expand_as(y), y) for y in (outputs, bias))
    if isinstance(update.output, LinearNorm):
        rest = rest + update.step * update.output.bias
    return Updates(update.carry * states, by_head, rest)


def moved_states(model: Model, layer: int, updates: Updates) -> Float[Tensor, "heads_and_sum words dim"]:
    """The states x + update + b_O by head and, last, for the sum of all heads; normalised where the layer does it then."""
    by_head = updates.states + updates.rest + updates.by_head
    moved = torch.cat((by_head, (updates.states + updates.whole)[None]))
    return model.update(layer, "attention").settle(moved.flatten(0, 1)).view_as(moved)


def nearest_values(model: Model, layer: int, updates: Updates, count: int) -> tuple[Returned, Returned]:
    """The tokens with the largest logits at x + update + b_O, by head and for the sum of all heads.

    Logits are those of the model's output layers: N(x + update + b_O) W_Uᵀ with the final norm N, for most models. Where the
    stream is normalised after attention, that norm comes first. A model that predicts nothing is read with its embeddings.
    """
    heads, words = updates.by_head.shape[:2]
    moved = moved_states(model, layer, updates).flatten(0, 1)
    scores, tokens = (x.view(heads + 1, words, -1) for x in most_probable(model, moved, count))
    return Returned(scores[:-1], tokens[:-1]), Returned(scores[-1:], tokens[-1:])


def haar(dim: int, seed: int, device: torch.device | str = "cpu") -> Float[Tensor, "dim dim"]:
    """A rotation or reflection, uniform over all."""
    drawn = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    Q, R = torch.linalg.qr(drawn)
    orthogonal: Tensor = Q * R.diagonal().sign()
    return orthogonal.float().to(device)


def position_rotations(model: Model, layer: int, distance: int) -> tuple[Rotation | None, Rotation | None]:
    """The rotations of a query and of keys ``distance`` positions before it; none at distance 0, where they cancel."""
    if distance == 0:
        return None, None
    if model.position_kind != "rotary":
        raise InputError(f"distance={distance}: positions of '{model.name}' are no rotations of q and k; leave distance= out")
    if distance < 0 or (model.context is not None and distance >= model.context):
        raise InputError(f"distance={distance}: allowed are 0 to {(model.context or 1) - 1:,}")
    rotation = model.rotation(layer, torch.tensor([distance, 0]))
    if rotation is None:
        raise InputError(f"layer {layer} of '{model.name}' does not rotate q and k; leave distance= out")
    return tuple(part[:, :1] for part in rotation), tuple(part[:, 1:] for part in rotation)


def _rotated(x: Tensor, rotation: Tensor | None) -> Tensor:
    return x if rotation is None else x @ rotation
