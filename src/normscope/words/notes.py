"""What has no meaning for a model, or another one than in GPT-2, in plain words."""

import torch

from normscope.models import Model
from normscope.words.embeddings import OutputNorm
from normscope.words.probes import output_bias

_POSITIONS = {
    "learned": "Learned positions are added to the embeddings; probes read the embeddings alone.",
    "rotary": "Positions are rotations of q and k; probes of W_QK are at relative position 0, where they cancel (--distance).",
    "cyclic": "Positions are added to the embeddings; probes read the embeddings alone.",
    "unknown": "How positions enter this model is not known; probes leave them out.",
}


def notes_on(view: Model, probe: str, distance: int = 0, matrix: str = "qk") -> list[str]:
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
    if probe == "values" and any(norm.slot == "stream" for norm in view.norms):
        said.append("The stream is normalised: what a head writes is read behind the norm that follows the layer's attention.")
    if probe in ("values", "journey") and view.predicts and output_bias(view) is None:
        said.append("Logits are more than one product behind the final norm: states are read by the model's own last steps.")
    if probe == "embeddings" and scaled(view):
        said.append("Embeddings are taken as they enter the first layer, which is not as the table has them.")
    letters = [letter for letter in "qkv" if any(norm.slot == letter for norm in view.norms)]
    if probe in ("queries", "singular", "values") and letters:
        listed = ", ".join(letters)
        said.append(f"Heads normalise {listed}: probes with words do so too; singular vectors are of the matrices alone.")
    if (probe == "queries" or (probe == "singular" and matrix == "qk")) and distance == 0:
        said.append(_POSITIONS[view.position_kind])
    if probe in ("queries", "values") and not (view.predicts and view.causal):
        said.append("The model does not tell what follows a word: precedence is not measured.")
    if probe == "journey" and not view.predicts:
        said.append("The model predicts no tokens: there is no next word, and no logit lens.")
    return said


def scaled(view: Model) -> bool:
    """Whether embeddings enter the model in another way than the unembedding, if tied, would have them."""
    own, output = view.embeddings[:64], view.unembedding
    return output is not None and tied(view) and not bool(torch.allclose(own, output[:64], rtol=1e-3))


def tied(view: Model) -> bool:
    """Whether words are read with the table that they enter by, up to a factor."""
    if view.unembedding is None:
        return False
    some = slice(None, min(256, view.vocabulary))
    one, other = view.embeddings[some], view.unembedding[some]
    along = (one * other).sum() / other.square().sum()
    return bool(torch.allclose(one, along * other, rtol=1e-4, atol=1e-5 * float(one.abs().max())))
