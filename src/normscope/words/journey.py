"""The journey of a token over the sphere, layer by layer, measured in the full space."""

from dataclasses import dataclass, replace

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import SphereNorm, degrees_between, length
from normscope.errors import InputError
from normscope.models import NOTHING, Model, Observer, Sample
from normscope.words.embeddings import OutputNorm
from normscope.words.probes import output_bias
from normscope.words.search import nearest


@dataclass(frozen=True)
class Journey:
    """Where a token is on the sphere in front of every layer and behind the last.

    Attributes:
        word, predicted, following: texts of the token, of the token that the model says at last, and of the one whose rank and
            probability are told: the next of the text, or where there is none, the predicted one.
        table: a row for every layer.
        path: the directions θ of the states.
        start, end: the directions of the token's embedding, and of what the predicted token is read with; None if logits are
            made in another way than by one product.
    """

    word: str
    predicted: str
    following: str
    table: pd.DataFrame
    path: Float[Tensor, "states dim"]
    start: Float[Tensor, " dim"]
    end: Float[Tensor, " dim"] | None


@torch.no_grad()
def follow(view: Model, text: str, token: int) -> Journey:
    """Follow a token of a text, counted from 0 or, if negative, from the end, through all layers.

    With θ_ℓ the direction of the state in front of layer ℓ: ``angle`` is that between θ_ℓ and θ_ℓ₋₁ in degrees, ``travelled``
    their sum, ``from_start`` that between θ_ℓ and θ_0; ``nearest`` is the token whose embedding's direction is nearest to θ_ℓ;
    ``cosine_start`` and ``cosine_predicted`` compare θ_ℓ with the token's own embedding and with γ∘w of the predicted token,
    for logits are √d θ·(γ∘w) + β·w. ``rank`` and ``probability`` of the next word are what the model's own last steps make of
    the state (the logit lens).

    Returns:
        The journey; columns of logits are empty for a model that predicts nothing.
    """
    sample = view.sample(text, None, 0)
    if not view.causal:
        sample = _unmasked(sample)
    count = sample.tokens.shape[1]
    if not -count <= token < count:
        raise InputError(f"--token {token}: the text has {count} tokens, 0 to {count - 1}, or −{count} to −1 from the end")
    place = token % count
    states: list[Tensor] = []
    said = view.forward(sample, Observer(state=lambda layer, x: states.append(x[0, place].clone())))
    stream = torch.stack(states)
    norm = OutputNorm.of(view)
    path = SphereNorm(norm.kind)(stream)
    own = sample.tokens[0, place]
    start = SphereNorm(norm.kind)(view.embeddings[own][None])[0]
    if bool(start.isnan().any()):
        raise InputError(f"--token {token}: {view.words(own[None])[0]!r} has no embedding in '{view.name}', and so no start")
    words = SphereNorm(norm.kind)(view.embeddings[: view.vocabulary]).nan_to_num(0.0)  # a token may have no embedding
    cosines, tokens = nearest(path, words, 1)
    turned = degrees_between(path[1:], path[:-1])
    columns = {
        "layer": list(range(len(stream))),
        "nearest_token": tokens[:, 0].tolist(),
        "nearest_text": view.words(tokens[:, 0]),
        "nearest_cosine": cosines[:, 0].tolist(),
        "angle": [None, *turned.tolist()],
        "travelled": [0.0, *turned.cumsum(0).tolist()],
        "from_start": degrees_between(path, path[:1].expand_as(path)).tolist(),
        "cosine_start": (path @ start).tolist(),
        "radius": length(stream).squeeze(-1).tolist(),
    }
    word = view.words(own[None])[0]
    if not view.predicts:
        return Journey(word, "", "", pd.DataFrame(columns), path, start, None)
    last = int(said[0, place].argmax())
    following = _following(sample, place, last, view.causal)
    columns |= _lens(view, stream, following)
    end = None
    if view.unembedding is not None and output_bias(view) is not None:
        end = SphereNorm(norm.kind)(norm.gain * view.unembedding[last][None])[0]
        columns["cosine_predicted"] = (path @ end).tolist()
    told = view.words(torch.tensor([last, following]))
    return Journey(word, told[0], told[1], pd.DataFrame(columns), path, start, end)


def _lens(view: Model, stream: Float[Tensor, "states dim"], following: int) -> dict[str, list[object]]:
    """What the model would say after every layer, and what of that is the next word."""
    logits = view.read_out(stream)
    chances = logits.softmax(-1)
    best, tokens = chances.max(-1)
    return {
        "predicted_token": tokens.tolist(),
        "predicted_text": list(view.words(tokens)),
        "predicted_probability": best.tolist(),
        "rank": (1 + (logits > logits[:, following, None]).sum(-1)).tolist(),
        "probability": chances[:, following].tolist(),
    }


def _following(sample: Sample, place: int, predicted: int, causal: bool) -> int:
    """The next token of the text; for a model that sees both ways, and at the end of the text, the one that is predicted."""
    if causal and place + 1 < sample.tokens.shape[1]:
        return int(sample.tokens[0, place + 1])
    return predicted


def _unmasked(sample: Sample) -> Sample:
    """The text with all its tokens: an encoder's sample hides some of them."""
    return replace(sample, tokens=torch.where(sample.targets == NOTHING, sample.tokens, sample.targets))
