"""Scores of heads over all words: does what a head returns mean the same, come before, or neither; with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.models import Model
from normscope.runs import plain_rows
from normscope.words.probes import Found, Turn, haar, nearest_keys, nearest_values, updates_of
from normscope.words.reference import Reference, read_alone
from normscope.words.search import distinct
from normscope.words.tables import texts_of
from normscope.words.vocabulary import Word, plain_word, tokens_of

FEWEST = 20  # words that a score needs
DRAWS = 3  # of random weights
_SEEDS = 2**62
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
            returned for it. No word itself counts on either side. A head that returns the same for all words has 0.5.
        precedence: the same with how much the word is expected after a key, or a value after the word.
    """

    same: Float[Tensor, "heads words"]
    nearness: Float[Tensor, "heads words"]
    precedence: Float[Tensor, "heads words"]


def score_words(probe: str, view: Model, words: list[Word], found: Found, reference: Reference) -> WordScores:
    """Compare what each head returned with the words."""
    own_codes, codes = _spellings(view, words, found.tokens)
    itself = codes == own_codes[:, None]
    rivals = ~itself[:, None] & (codes[:, None] != own_codes[:, None, None])
    rivals = rivals & ~torch.eye(len(words), dtype=torch.bool, device=view.device)[..., None]

    def compared(values: Float[Tensor, "words tokens"]) -> Float[Tensor, "heads words"]:
        shares = _share_below(values, reference.rows(found.tokens), rivals)
        return shares.masked_fill(itself, torch.nan).nanmean(-1)

    nearness = compared(reference.states[reference.rows(tokens_of(view, words))] @ reference.states.T)
    expected = _expected(probe, words, reference)
    precedence = torch.full_like(nearness, torch.nan) if expected is None else compared(expected)
    return WordScores(itself[..., 0].double(), nearness, precedence)


def head_table(
    probe: str,
    view: Model,
    layer: int,
    words: list[Word],
    count: int,
    distance: int = 0,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[dict[str, Found], pd.DataFrame]:
    """What every head of a layer returns for the words, its scores, and the same for random weights.

    Random weights are those of the layer between two random rotations: the same singular values, biases and norms of heads, and
    other singular vectors; ``DRAWS`` of them. Intervals hold 95 % of resamples of the words, over all draws.

    Returns:
        What was found under ``heads`` and, for values, ``sum``; and a row for every head: probe, layer, head, words; for each
        of same, nearness and precedence its value, limits (_low, _high), number of words that it is over (_words), and value
        and limits of random weights (_random, _random_low, _random_high); label.
    """

    def looking(what: str) -> Callable[[int], None]:
        return lambda done: progress(what, done, view.vocabulary)

    found = probed(probe, view, layer, words, count, distance, None, looking("what heads return"))
    returned = [found["heads"]]
    for draw in range(DRAWS):
        first = 2 * (DRAWS * seed + draw) % _SEEDS
        turn = haar(view.dim, first, view.device), haar(view.dim, first + 1, view.device)
        said = looking(f"what random weights return, {draw + 1} of {DRAWS}")
        returned.append(probed(probe, view, layer, words, _JUDGED, distance, turn, said)["heads"])
    judged = [Found(each.scores[..., :_JUDGED], each.tokens[..., :_JUDGED]) for each in returned]
    random = torch.randint(view.vocabulary, (_RANDOM,), generator=torch.Generator().manual_seed(seed)).to(view.device)
    read = distinct(torch.cat((tokens_of(view, words), random, *(each.tokens.flatten() for each in judged))))
    forms = torch.tensor([form for word in words for form in word.forms], device=view.device)
    asked = read if probe == "values" else forms
    reference = read_alone(view, read, asked, random, layer, lambda done: progress("what they mean", done, len(read)))
    own, *others = (score_words(probe, view, words, each, reference) for each in judged)
    return found, _table(probe, layer, own, others, seed)


def probed(
    probe: str,
    view: Model,
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


def _spellings(
    view: Model, words: list[Word], tokens: Int[Tensor, "heads words count"]
) -> tuple[Int[Tensor, " words"], Int[Tensor, "heads words count"]]:
    """A number for every spelling without case and blanks: of the words, and of tokens."""
    texts = {token: plain_word(text) for token, text in texts_of(view, tokens).items()}
    names = [plain_word(word.name) for word in words]
    numbers = {text: number for number, text in enumerate(dict.fromkeys([*names, *texts.values()]))}
    codes = [numbers[texts[token]] for token in tokens.flatten().tolist()]
    return tokens.new_tensor([numbers[name] for name in names]), tokens.new_tensor(codes).view_as(tokens)


def _expected(probe: str, words: list[Word], reference: Reference) -> Float[Tensor, "words tokens"] | None:
    """Log P(word | token) for keys, log P(token | word) for values, of every word and every token that was read."""
    if reference.expected is None:
        return None
    if probe == "values":
        own = torch.tensor([word.token for word in words]).to(reference.tokens)
        return reference.expected[reference.rows(own)]  # the columns are all tokens that were read
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
    own = of_all.diagonal(dim1=1, dim2=2).transpose(1, 2)
    shares = [
        (((of_all < one) + 0.5 * (of_all == one)) * rivals).sum((-2, -1), dtype=torch.float64) / rivals.sum((-2, -1))
        for one in own[..., None, None].unbind(2)
    ]
    return torch.stack(shares, -1)


def _table(probe: str, layer: int, own: WordScores, others: list[WordScores], seed: int) -> pd.DataFrame:
    """A row for every head: scores with intervals, those of random weights, and what they make of it."""
    columns: dict[str, list[float | None]] = {}
    for name in _CHANCES:
        for suffix, scores in (("", [own]), ("_random", others)):
            values = torch.stack([getattr(score, name) for score in scores]).cpu()
            mean, low, high = (_plain(x) for x in _interval(values, seed))
            columns |= {f"{name}{suffix}": mean, f"{name}{suffix}_low": low, f"{name}{suffix}_high": high}
        columns[f"{name}_words"] = (~getattr(own, name).isnan()).sum(-1).tolist()
    heads, count = own.same.shape
    table = pd.DataFrame({"probe": probe, "layer": layer, "head": range(heads), "words": count, **columns})
    table["label"] = [label_of(row) for row in plain_rows(table)]
    return table.sort_values(["same", "nearness"], ascending=False, kind="stable", ignore_index=True)


def label_of(row: Mapping[str, Any]) -> str:
    """What a head's scores make it.

    It keeps meaning if it returns the word itself, or words that are like it, clearly more often than random weights do; it has
    to do with precedence if its words come before (as keys) or after (as values) clearly more often. Clearly: over ``FEWEST``
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


def _interval(values: Float[Tensor, "draws heads words"], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean over draws and words, and the middle 95 % of each draw's means over resampled words, all draws together."""
    words = values.shape[-1]
    drawn = torch.randint(words, (_RESAMPLES, words), generator=torch.Generator().manual_seed(seed))
    ones = torch.ones(drawn.shape, dtype=values.dtype)
    times = torch.zeros(_RESAMPLES, words, dtype=values.dtype).scatter_add_(1, drawn, ones)
    there = (~values.isnan()).to(values.dtype)
    means = (times @ values.nan_to_num(0.0).mT) / (times @ there.mT)
    low, high = (means.flatten(0, 1).nanquantile(q, 0) for q in (0.025, 0.975))
    return values.nanmean((0, -1)), low, high


def _plain(values: Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]
