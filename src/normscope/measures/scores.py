"""Scores of heads over all words: whether what a head returns means the same, comes before, or neither; with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.measures.probes import Returned, Rotations, haar
from normscope.measures.reference import Reference, read_alone
from normscope.measures.search import distinct
from normscope.measures.vocabulary import Word, plain_word, texts_of, tokens_of
from normscope.models import Model
from normscope.results.tables import plain_rows

FEWEST = 20  # words that a score needs
DRAWS = 3  # of random weights
CLEARLY = 0.05
MEANING, PRECEDENCE, NONE = "meaning-preserving", "precedence", "none"
LABELS = (MEANING, PRECEDENCE, NONE)
_SEEDS = 2**62
_RANDOM = 256
_JUDGED = 3  # of the nearest tokens, as many are compared with the word
_RESAMPLES = 1000
_CHANCES = {"same": 0.0, "nearness": 0.5, "precedence": 0.5}
Share = Callable[[float], None]
Probe = Callable[[int, Rotations | None, Share], Returned]  # count, rotations of inputs and outputs, progress


@dataclass(frozen=True)
class WordScores:
    """Scores of every head and word in [0, 1], NaN where there is none.

    Attributes:
        same: whether the nearest token is the word itself or a case variant of it.
        nearness: the share of tokens that the head returned for other words and that are less similar to this word than what
            it returned for this word. Words themselves count on neither side. A head that returns the same tokens for all
            words has 0.5.
        precedence: the same with how probable the word is after a key, or a value after the word.
    """

    same: Float[Tensor, "heads words"]
    nearness: Float[Tensor, "heads words"]
    precedence: Float[Tensor, "heads words"]


def score_words(model: Model, words: list[Word], returned: Returned, reference: Reference, word_first: bool) -> WordScores:
    """Compare what each head returned with the words; ``word_first``: precedence is of returned tokens after the word."""
    word_codes, codes = _spellings(model, words, returned.tokens)
    itself = codes == word_codes[:, None]
    rivals = ~itself[:, None] & (codes[:, None] != word_codes[:, None, None])
    rivals = rivals & ~torch.eye(len(words), dtype=torch.bool, device=model.device)[..., None]

    def compared(values: Float[Tensor, "words tokens"]) -> Float[Tensor, "heads words"]:
        shares = _share_below(values, reference.rows(returned.tokens), rivals)
        return shares.masked_fill(itself, torch.nan).nanmean(-1)

    nearness = compared(reference.states[reference.rows(tokens_of(model, words))] @ reference.states.T)
    expected = _expected(words, reference, word_first)
    precedence = torch.full_like(nearness, torch.nan) if expected is None else compared(expected)
    return WordScores(itself[..., 0].double(), nearness, precedence)


def head_scores(
    model: Model,
    layer: int,
    words: list[Word],
    returned: Returned,
    probe: Probe,
    word_first: bool,
    seed: int = 0,
    progress: Share = lambda share: None,
) -> pd.DataFrame:
    """The scores of a layer's heads, and those of random weights.

    Random weights are those of the layer between two random rotations: the same singular values, biases and norms of heads, and
    other singular vectors; ``DRAWS`` of them. Intervals hold 95 % of resamples of the words, over all draws.

    Args:
        model: the model.
        layer: whose heads.
        words: the words.
        returned: what the heads return for them.
        probe: what the heads return between two rotations.
        word_first: whether precedence is of returned tokens after the word, not of the word after them.
        seed: of rotations, random tokens and resamples.
        progress: called with the share that is done.

    Returns:
        A row for every head: layer, head, words; for each of same, nearness and precedence its value, limits (_low, _high),
        number of words that it is over (_words), and value and limits of random weights (_random, _random_low, _random_high);
        label.
    """
    several = [returned]
    for draw in range(DRAWS):
        first = 2 * (DRAWS * seed + draw) % _SEEDS
        rotations = haar(model.dim, first, model.device), haar(model.dim, first + 1, model.device)
        several.append(probe(_JUDGED, rotations, _part(progress, draw, DRAWS + 1)))
    judged = [Returned(each.scores[..., :_JUDGED], each.tokens[..., :_JUDGED]) for each in several]
    random = torch.randint(model.vocabulary, (_RANDOM,), generator=torch.Generator().manual_seed(seed)).to(model.device)
    read = distinct(torch.cat((tokens_of(model, words), random, *(each.tokens.flatten() for each in judged))))
    forms = torch.tensor([form for word in words for form in word.forms], device=model.device)
    reference = read_alone(model, read, read if word_first else forms, random, layer, _part(progress, DRAWS, DRAWS + 1))
    of_heads, *of_random = (score_words(model, words, each, reference, word_first) for each in judged)
    return _table(layer, of_heads, of_random, seed)


def label_of(row: Mapping[str, Any]) -> str:
    """The kind of a head by its scores.

    It preserves meaning if it returns the word itself, or similar words, clearly more often than random weights do; it has to
    do with precedence if its words come before (as keys) or after (as values) clearly more often. Clearly: over ``FEWEST``
    words or more, the interval lies more than ``CLEARLY`` above that of random weights, and above the chance of 0.5 for the
    last two. Of nearness and precedence the one that is further above decides.
    """
    above = {
        name: row[f"{name}_low"] - max(chance, row[f"{name}_random_high"] or 0.0)
        for name, chance in _CHANCES.items()
        if row[f"{name}_low"] is not None and row[f"{name}_words"] >= FEWEST
    }
    clear = {name: by for name, by in above.items() if by > CLEARLY}
    if "same" in clear or clear.get("nearness", 0.0) > clear.get("precedence", 0.0):
        return MEANING
    return PRECEDENCE if "precedence" in clear else NONE


def _part(progress: Share, index: int, count: int) -> Share:
    """Progress of one of several equal parts."""
    return lambda share: progress((index + share) / count)


def _spellings(
    model: Model, words: list[Word], tokens: Int[Tensor, "heads words count"]
) -> tuple[Int[Tensor, " words"], Int[Tensor, "heads words count"]]:
    """A number for every spelling without case and blanks: of the words, and of tokens."""
    texts = {token: plain_word(text) for token, text in texts_of(model, tokens).items()}
    names = [plain_word(word.name) for word in words]
    numbers = {text: number for number, text in enumerate(dict.fromkeys([*names, *texts.values()]))}
    codes = [numbers[texts[token]] for token in tokens.flatten().tolist()]
    return tokens.new_tensor([numbers[name] for name in names]), tokens.new_tensor(codes).view_as(tokens)


def _expected(words: list[Word], reference: Reference, word_first: bool) -> Float[Tensor, "words tokens"] | None:
    """Log P(token | word) if the word comes first, else log P(word | token), of every word and every token that was read."""
    if reference.expected is None:
        return None
    if word_first:
        first = torch.tensor([word.token for word in words]).to(reference.tokens)
        return reference.expected[reference.rows(first)]  # the columns are all tokens that were read
    forms = [torch.tensor(word.forms).to(reference.columns) for word in words]
    return torch.stack([reference.expected[:, reference.places(each)].logsumexp(-1) for each in forms])


def _share_below(
    values: Float[Tensor, "words tokens"],
    rows: Int[Tensor, "heads words count"],
    rivals: Bool[Tensor, "heads words words count"],
) -> Float[Tensor, "heads words count"]:
    """Of the rivals of what was returned for a word, the share with a smaller value for it; ties by half, NaN without any."""
    heads, words, count = rows.shape
    all_rows = rows.reshape(heads, 1, words * count).expand(-1, words, -1)
    of_all = values.expand(heads, -1, -1).gather(-1, all_rows).view(heads, words, words, count)
    of_word = of_all.diagonal(dim1=1, dim2=2).transpose(1, 2)
    shares = [
        (((of_all < value) + 0.5 * (of_all == value)) * rivals).sum((-2, -1), dtype=torch.float64) / rivals.sum((-2, -1))
        for value in of_word[..., None, None].unbind(2)
    ]
    return torch.stack(shares, -1)


def _table(layer: int, of_heads: WordScores, of_random: list[WordScores], seed: int) -> pd.DataFrame:
    """A row for every head: scores with intervals, those of random weights, and the label."""
    columns: dict[str, list[float | None]] = {}
    for name in _CHANCES:
        for suffix, scores in (("", [of_heads]), ("_random", of_random)):
            values = torch.stack([getattr(score, name) for score in scores]).cpu()
            mean, low, high = (_plain(x) for x in _interval(values, seed))
            columns |= {f"{name}{suffix}": mean, f"{name}{suffix}_low": low, f"{name}{suffix}_high": high}
        columns[f"{name}_words"] = (~getattr(of_heads, name).isnan()).sum(-1).tolist()
    heads, count = of_heads.same.shape
    table = pd.DataFrame({"layer": layer, "head": range(heads), "words": count, **columns})
    table["label"] = [label_of(row) for row in plain_rows(table)]
    return table.sort_values(["same", "nearness"], ascending=False, kind="stable", ignore_index=True)


def _interval(values: Float[Tensor, "draws heads words"], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean over draws and words, and the middle 95 % of each draw's means over resampled words, all draws together."""
    words = values.shape[-1]
    drawn = torch.randint(words, (_RESAMPLES, words), generator=torch.Generator().manual_seed(seed))
    ones = torch.ones(drawn.shape, dtype=values.dtype)
    times = torch.zeros(_RESAMPLES, words, dtype=values.dtype).scatter_add_(1, drawn, ones)
    scored = (~values.isnan()).to(values.dtype)
    means = (times @ values.nan_to_num(0.0).mT) / (times @ scored.mT)
    low, high = (means.flatten(0, 1).nanquantile(q, 0) for q in (0.025, 0.975))
    return values.nanmean((0, -1)), low, high


def _plain(values: Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]
