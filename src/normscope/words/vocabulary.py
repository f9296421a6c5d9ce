"""The words that probes begin with: common nouns that are one token, or those that a user names."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import torch
from jaxtyping import Int
from torch import Tensor

from normscope.errors import InputError
from normscope.models import Model

NOUNS = 100


@dataclass(frozen=True)
class Word:
    """A word that is one token.

    Attributes:
        name: as it was asked for.
        token: its number: of the form with a blank before it, as in running text, or of the bare one.
        forms: all numbers that the word has, with a blank and without.
    """

    name: str
    token: int
    forms: tuple[int, ...]


def common_nouns() -> list[str]:
    """English nouns by how common they are, more of them than ``NOUNS``: not all are one token everywhere."""
    return files("normscope.words").joinpath("nouns.txt").read_text(encoding="utf-8").split()


def probe_words(view: Model, names: Sequence[str] | None = None) -> list[Word]:
    """The named words, or the ``NOUNS`` most common nouns that are one token of the model."""
    if names is None:
        found = _embedded(view, [word for word in (_word(view, name) for name in common_nouns()) if word is not None])
        if not found:
            raise InputError(f"no common English noun is one token of '{view.name}'; name words that are (--word)")
        return found[:NOUNS]
    if not all(names):
        raise InputError("--word names words with commas between them, such as time,life; an empty one is none")
    words = {name: _word(view, name) for name in dict.fromkeys(names)}
    unknown = [name for name, word in words.items() if word is None]
    if unknown:
        raise InputError(
            f"'{unknown[0]}' is not one token of '{view.name}', with a blank before it or without; a probe reads single tokens"
        )
    found = [word for word in words.values() if word is not None]
    kept = _embedded(view, found)
    without = [word.name for word in found if word not in kept]
    if without:
        raise InputError(f"'{without[0]}' has an embedding of zeros in '{view.name}', and so no direction")
    return kept


def tokens_of(view: Model, words: Sequence[Word]) -> Int[Tensor, " words"]:
    """The numbers of words, where the model is."""
    return torch.tensor([word.token for word in words], device=view.device)


def plain_word(text: str) -> str:
    """A word without its case and blanks around it."""
    return text.strip().casefold()


def _word(view: Model, name: str) -> Word | None:
    forms = tuple(token for token in (view.token_of(f" {name}"), view.token_of(name)) if token is not None)
    return Word(name, forms[0], tuple(dict.fromkeys(forms))) if forms else None


def _embedded(view: Model, words: list[Word]) -> list[Word]:
    """Those whose embedding is not 0: what is all zeros has no direction."""
    there = view.embeddings[tokens_of(view, words)].any(-1).tolist() if words else []
    return [word for word, is_there in zip(words, there, strict=True) if is_there]
