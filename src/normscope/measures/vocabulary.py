"""The words that probes begin with: common nouns that are one token, or those that a user names."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import torch
from jaxtyping import Int
from torch import Tensor

from normscope.errors import InputError
from normscope.measures.search import distinct
from normscope.models import Model

NOUNS = 100


@dataclass(frozen=True)
class Word:
    """A word that is one token.

    Attributes:
        name: the word as it was given.
        token: the id of the form with a blank before it, as in running text, or of the bare form.
        forms: the ids of all forms, with a blank and without.
    """

    name: str
    token: int
    forms: tuple[int, ...]


def common_nouns() -> list[str]:
    """English nouns, the most common first; more than ``NOUNS``, since not all are one token in every vocabulary."""
    return files("normscope.measures").joinpath("nouns.txt").read_text(encoding="utf-8").split()


def probe_words(model: Model, names: Sequence[str] | None = None) -> list[Word]:
    """The named words, or the ``NOUNS`` most common nouns that are one token of the model."""
    if names is None:
        known = [word for word in (_word(model, name) for name in common_nouns()) if word is not None]
        nouns = _embedded(model, known)
        if not nouns:
            why = "has an embedding other than zeros in" if known else "is one token of"
            raise InputError(
                f"no common English noun {why} '{model.name}': only words that you choose can be probed (word=time,life)"
            )
        return nouns[:NOUNS]
    if not all(names):
        raise InputError("word= is a comma-separated list of words, such as time,life; one of them is empty")
    words = {name: _word(model, name) for name in dict.fromkeys(names)}
    unknown = [name for name, word in words.items() if word is None]
    if unknown:
        raise InputError(
            f"'{unknown[0]}' is not one token of '{model.name}', with a blank before it or without; a probe takes single tokens"
        )
    known = [word for word in words.values() if word is not None]
    embedded = _embedded(model, known)
    without = [word.name for word in known if word not in embedded]
    if without:
        raise InputError(f"'{without[0]}' has an embedding of zeros in '{model.name}', and so no direction")
    return embedded


def tokens_of(model: Model, words: Sequence[Word]) -> Int[Tensor, " words"]:
    """The ids of words, on the model's device."""
    return torch.tensor([word.token for word in words], device=model.device)


def texts_of(model: Model, tokens: Int[Tensor, "*shape"]) -> dict[int, str]:
    """The text of every token among these."""
    some = distinct(tokens)
    return dict(zip(some.tolist(), model.words(some), strict=True))


def plain_word(text: str) -> str:
    """A word without its case and the blanks around it."""
    return text.strip().casefold()


def _word(model: Model, name: str) -> Word | None:
    forms = tuple(token for token in (model.token_of(f" {name}"), model.token_of(name)) if token is not None)
    return Word(name, forms[0], tuple(dict.fromkeys(forms))) if forms else None


def _embedded(model: Model, words: list[Word]) -> list[Word]:
    """Those whose embedding is not 0: zeros have no direction."""
    nonzero = model.embeddings[tokens_of(model, words)].any(-1).tolist() if words else []
    return [word for word, has_direction in zip(words, nonzero, strict=True) if has_direction]
