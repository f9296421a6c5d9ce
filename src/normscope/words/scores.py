"""Scores of heads over all words: does what a head returns mean the same, come before, or neither; with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.models import ModelView
from normscope.words.probes import Found, Turn, haar, nearest_keys, nearest_values, updates_of
from normscope.words.reference import Reference, read_alone, reference_layer
from normscope.words.search import distinct
from normscope.words.tables import texts_of
from normscope.words.vocabulary import Word, same_word, tokens_of

FEWEST = 20  # words that a score needs
_RANDOM = 256
_JUDGED = 3  # of the nearest tokens, as many are compared with the word
_RESAMPLES = 1000
CLEARLY = 0.05
_CHANCES = {"same": 0.0, "nearness": 0.5, "precedence": 0.5}
MEANING, PRECEDENCE, NONE = "meaning-preserving", "precedence", "none"


@dataclass(frozen=True)
class WordScores:
    """Scores of every head and word in [0, 1], NaN where there is none.

    Attributes:
        same: whether the nearest token is the word itself or a case variant of it.
        nearness: the share of tokens that the head returned for other words and that are less like this word than what it
            returned for it, itself left out. A head that returns the same for all words has 0.5.
        precedence: the same with how much the word is expected after a key, or a value after the word.
    """

    same: Float[Tensor, "heads words"]
    nearness: Float[Tensor, "heads words"]
    precedence: Float[Tensor, "heads words"]


def score_words(probe: str, view: ModelView, words: list[Word], found: Found, reference: Reference) -> WordScores:
    """Compare what each head returned with the words."""
    names = {word.token: word.name for word in words}
    texts = texts_of(view, found.tokens)
    tokens = tokens_of(view, words)
    same = torch.tensor(
        [[[same_word(names[int(t)], texts[o]) for o in others] for t, others in zip(tokens, head, strict=True)]
         for head in found.tokens.tolist()],
        device=view.device,
    )  # fmt: skip
    likeness = reference.states[reference.rows(tokens)] @ reference.states.T
    nearness = _share_below(likeness, reference, found.tokens)
    precedence = torch.full_like(nearness, torch.nan)
    if reference.expected is not None:
        expected = _expected(probe, words, reference)
        precedence = _share_below(expected, reference, found.tokens)
    return WordScores(same[..., 0].double(), _mean_of_others(nearness, same), _mean_of_others(precedence, same))


def head_table(
    probe: str,
    view: ModelView,
    layer: int,
    words: list[Word],
    count: int,
    distance: int = 0,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[dict[str, Found], pd.DataFrame]:
    """What every head of a layer returns for the words, its scores, and the same for random weights.

    Random weights are those of the layer between two random rotations: the same singular values, biases and norms of heads, and
    other singular vectors. Intervals hold 95 % of resamples of the words.

    Returns:
        What was found under ``heads`` and, for values, ``sum``; and a row for every head.
    """

    def looking(what: str) -> Callable[[int], None]:
        return lambda done: progress(what, done, view.vocabulary)

    turn = haar(view.dim, seed, view.device), haar(view.dim, seed + 1, view.device)
    found = probed(probe, view, layer, words, count, distance, None, looking("what heads return"))
    random_found = probed(probe, view, layer, words, count, distance, turn, looking("what random weights return"))
    judged = [Found(each["heads"].scores[..., :_JUDGED], each["heads"].tokens[..., :_JUDGED]) for each in (found, random_found)]
    returned = torch.cat([each.tokens.flatten() for each in judged])
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(view.vocabulary, (_RANDOM,), generator=generator).to(view.device)
    forms = torch.tensor([form for word in words for form in word.forms], device=view.device)
    read = distinct(torch.cat((tokens_of(view, words), returned, random)))
    reference = read_alone(
        view,
        read,
        read if probe == "values" else forms,
        random,
        reference_layer(view.layers, layer),
        lambda done: progress("what they mean", done, len(read)),
    )
    own, other = (score_words(probe, view, words, each, reference) for each in judged)
    return found, _table(probe, layer, own, other, seed)


def probed(
    probe: str,
    view: ModelView,
    layer: int,
    words: list[Word],
    count: int,
    distance: int = 0,
    turn: Turn | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Found]:
    """What the heads of a layer return for words, as keys or as values, under ``heads``; for values also under ``sum``."""
    tokens = tokens_of(view, words)
    if probe == "queries":
        return {"heads": nearest_keys(view, layer, tokens, count, distance, turn, progress)}
    by_head, of_sum = nearest_values(view, layer, updates_of(view, layer, tokens, turn), count)
    return {"heads": by_head, "sum": of_sum}


def _expected(probe: str, words: list[Word], reference: Reference) -> Float[Tensor, "words tokens"]:
    """Log P(word | token) for keys, log P(token | word) for values, of every word and every token that was read."""
    if reference.expected is None:
        raise ValueError("this model does not tell what follows")
    if probe == "values":
        own = torch.tensor([word.token for word in words]).to(reference.tokens)
        return reference.expected[reference.rows(own)]  # the columns are all tokens that were read
    forms = [torch.tensor(word.forms).to(reference.columns) for word in words]
    return torch.stack([reference.expected[:, reference.places(each)].logsumexp(-1) for each in forms])


def _share_below(
    values: Float[Tensor, "words tokens"], reference: Reference, tokens: Int[Tensor, "heads words count"]
) -> Float[Tensor, "heads words count"]:
    """The share of tokens that the head returned for other words and that have a smaller value for this word; ties by half."""
    heads, words, count = tokens.shape
    rows = reference.rows(tokens).view(heads, 1, words * count).expand(-1, words, -1)
    of_all = values.expand(heads, -1, -1).gather(-1, rows).view(heads, words, words, count)
    own = of_all.diagonal(dim1=1, dim2=2).transpose(1, 2)[..., None, None]
    of_all = of_all[:, :, None]
    below = ((of_all < own).double() + 0.5 * (of_all == own).double()).sum((-2, -1))
    among_own = (own[..., 0] > own[..., 0].mT).double() + 0.5 * (own[..., 0] == own[..., 0].mT).double()
    return (below - among_own.sum(-1)) / ((words - 1) * count)


def _mean_of_others(
    values: Float[Tensor, "heads words count"], same: Bool[Tensor, "heads words count"]
) -> Float[Tensor, "heads words"]:
    """The mean over what was returned besides the word itself; NaN if nothing was."""
    return values.masked_fill(same, torch.nan).nanmean(-1)


def _table(probe: str, layer: int, own: WordScores, random: WordScores, seed: int) -> pd.DataFrame:
    """A row for every head: scores with intervals, those of random weights, and what they make of it."""
    columns: dict[str, list[float | None]] = {}
    for name in _CHANCES:
        for suffix, scores in (("", own), ("_random", random)):
            mean, low, high = _interval(getattr(scores, name), seed)
            columns |= {
                f"{name}{suffix}": _plain(mean),
                f"{name}{suffix}_low": _plain(low),
                f"{name}{suffix}_high": _plain(high),
            }
    heads, count = own.same.shape
    table = pd.DataFrame({"probe": probe, "layer": layer, "head": range(heads), "words": count, **columns})
    table["label"] = [label_of({str(key): value for key, value in row.items()}) for row in table.to_dict("records")]
    return table.sort_values(["same", "nearness"], ascending=False, kind="stable", ignore_index=True)


def label_of(row: Mapping[str, Any]) -> str:
    """What a head's scores make it.

    It keeps meaning if it returns the word itself, or words that are like it, clearly more often than random weights do; it has
    to do with precedence if its words come before (as keys) or after (as values) clearly more often. Clearly: the interval lies
    more than ``CLEARLY`` above that of random weights, and above the chance of 0.5 for the last two. Of both, the greater
    decides.
    """
    passed = {
        name: row[name] - chance
        for name, chance in _CHANCES.items()
        if (row[f"{name}_low"] or 0.0) > max(chance, row[f"{name}_random_high"] or 0.0) + CLEARLY
    }
    if "same" in passed or passed.get("nearness", 0.0) > passed.get("precedence", 0.0):
        return MEANING
    return PRECEDENCE if "precedence" in passed else NONE


def _interval(values: Float[Tensor, "heads words"], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean over words, and the middle 95 % of means over resampled words."""
    words = values.shape[-1]
    drawn = torch.randint(words, (_RESAMPLES, words), generator=torch.Generator().manual_seed(seed))
    values = values.cpu()
    ones = torch.ones(drawn.shape, dtype=values.dtype)
    times = torch.zeros(_RESAMPLES, words, dtype=values.dtype).scatter_add_(1, drawn, ones)
    there = (~values.isnan()).to(values.dtype)
    means = (times @ values.nan_to_num(0.0).T) / (times @ there.T)
    low, high = (means.nanquantile(q, 0) for q in (0.025, 0.975))
    return values.nanmean(-1), low, high


def _plain(values: Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]
