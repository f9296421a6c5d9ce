"""What has no meaning for a model, or another one than in GPT-2, in plain words."""

import torch

from normscope.models import ModelView
from normscope.words.embeddings import OutputNorm

_POSITIONS = {
    "learned": "Learned positions are added to the embeddings; probes read the embeddings alone.",
    "rotary": "Positions are rotations of q and k; probes of W_QK are at relative position 0, where they cancel (--distance).",
    "cyclic": "Positions are added to the embeddings; probes read the embeddings alone.",
    "unknown": "How positions enter this model is not known; probes leave them out.",
}


def notes_on(view: ModelView, probe: str, distance: int = 0) -> list[str]:
    """Sentences that a reader of a probe's tables needs to know about the model."""
    said, norm = [], OutputNorm.of(view)
    if view.unembedding is None:
        said.append("There is no unembedding: what is written is read with the input embeddings.")
    elif not tied(view):
        said.append("The unembedding is not tied to the embeddings: words enter by one table and are read by the other.")
    if probe == "embeddings" and norm.kind == "rms":
        said.append("The norm is RMSNorm: nothing is projected on a hyperplane; Norm in the distances is RMSNorm.")
    if probe == "embeddings" and not bool(norm.bias.any()):
        said.append("The final norm has no bias: scores with and without it are the same.")
    if probe == "values" and view.final_norm is None:
        said.append("There is no final norm: the norm of the stream behind the layer's attention is used, if there is one.")
    if probe in ("queries", "singular", "values") and view.normalised_heads:
        letters = ", ".join(view.normalised_heads)
        said.append(f"Heads normalise {letters}: probes with words do so too; singular vectors are of the matrices alone.")
    if probe in ("queries", "singular") and distance == 0:
        said.append(_POSITIONS[view.position_kind])
    if probe in ("queries", "values") and not (view.predicts and view.causal):
        said.append("The model does not tell what follows a word: precedence is not measured.")
    if probe == "journey" and not view.predicts:
        said.append("The model predicts no tokens: there is no next word, and no logit lens.")
    return said


def tied(view: ModelView) -> bool:
    """Whether words are read with the table that they enter by, up to a factor."""
    if view.unembedding is None:
        return False
    some = slice(None, min(256, view.vocabulary))
    one, other = view.embeddings[some], view.unembedding[some]
    along = (one * other).sum() / other.square().sum()
    return bool(torch.allclose(one, along * other, rtol=1e-4, atol=1e-5 * float(one.abs().max())))
