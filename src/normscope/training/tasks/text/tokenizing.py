"""Tokenizers: read from a model's folder or file, or a byte-pair encoding trained on a corpus."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import category

import numpy as np
import numpy.typing as npt

from normscope.errors import InputError, MissingExtraError
from normscope.machine.files import read_json, read_text, regular_file, user_path
from normscope.machine.packages import PREFIX, packaged

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

END = "<|endoftext|>"
_ENDS = ("<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")  # tokens that end a document, by their common names
_FILE = "tokenizer.json"
_WIDER = (0x80, 0x800, 0x10000)  # the first characters of two, three and four bytes
_REMOVABLE = "MZC"  # categories of characters that a tokenizer may remove: combining marks, blanks, controls


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer that exists already, as JSON, with the token that ends a document."""

    source: str
    content: str
    end: str

    @classmethod
    def at(cls, source: str) -> "TokenizerFile":
        """The tokenizer of a model's folder, of a file ``tokenizer.json``, or of a model in a package (``package:smollm2``).

        Raises:
            InputError: if it cannot be read, or has no token that ends a document.
        """
        place = packaged(source, "model") if source.startswith(PREFIX) else user_path(source, "tokenizer")
        file = place / _FILE if place.is_dir() else place
        regular_file(file, "tokenizer")
        return _read(source, file, file.stat().st_mtime_ns)

    @property
    def digest(self) -> str:
        """The same for the same tokenizer."""
        return blake2b(f"{self.content} {self.end}".encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=4)
def _read(source: str, file: Path, changed: int) -> TokenizerFile:
    """The tokenizer of a file that was last changed then."""
    if file.suffix == ".gguf":
        content, stated = _of_gguf(file)
    else:
        content, stated = read_text(file, "tokenizer"), _stated_end(file.with_name("tokenizer_config.json"))
    tokenizer = loaded(content, source)
    end = next((token for token in (END, stated, *_ENDS) if token and tokenizer.token_to_id(token) is not None), None)
    if end is None:
        raise InputError(f"the tokenizer '{source}' has no token that ends a document, such as {END}")
    return TokenizerFile(source, content, end)


def _of_gguf(file: Path) -> tuple[str, str | None]:
    """The tokenizer in a GGUF file as JSON, and its token that ends a text."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as error:
        raise MissingExtraError("the tokenizer of a GGUF file needs gguf: pip install 'normscope[gguf]'") from error
    return tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token


def loaded(content: str, source: str) -> "Tokenizer":
    """The tokenizer that a JSON text describes, without truncation or padding; special tokens in a text are plain text."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more special
        raise InputError(f"cannot read the tokenizer '{source}': {' '.join(str(error).split())[:200]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def size_of(tokenizer: "Tokenizer") -> int:
    """One more than the largest id."""
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return max(ids, default=-1) + 1


def unknown_id(content: str, tokenizer: "Tokenizer") -> int | None:
    """The id that stands for whatever a tokenizer does not know, if it has one."""
    model = json.loads(content)["model"]
    token = model.get("unk_token")
    return model.get("unk_id") if token is None else tokenizer.token_to_id(token)


def trained(texts: Iterable[str], vocabulary: int) -> "Tokenizer":
    """A byte-pair encoding of bytes with at most so many tokens, the first of which ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def configuration(end: str, context: int) -> str:
    """``tokenizer_config.json``, with which the transformers library reads the tokenizer."""
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": context}
    return json.dumps(values, indent=2) + "\n"


def encoded(tokenizer: "Tokenizer", texts: Iterable[str]) -> Iterator["Encoding"]:
    """The tokens of every text, many texts at a time, without special tokens; with offsets unless they are bytes."""
    encode = tokenizer.encode_batch_fast if _of_bytes(tokenizer) else tokenizer.encode_batch
    for group in _groups(texts):
        yield from encode(group, add_special_tokens=False)


class TokenBytes:
    """The bytes of text that tokens stand for.

    A token of a byte-level tokenizer has as many bytes as its name has characters. Where these do not add up to the text, and
    for all other tokenizers, a token has the bytes from the end of the token before to its own end, by the offsets.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._lengths = np.zeros(size_of(tokenizer), dtype=np.int64)
        self._of_bytes = _of_bytes(tokenizer)
        for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
            self._lengths[index] = len(token)

    def of(self, text: str, tokens: "Encoding") -> tuple[npt.NDArray[np.int64], int]:
        """The bytes of each token of a text, and the number of letters, digits and signs that no token stands for."""
        sizes = self._lengths[tokens.ids]
        if self._of_bytes and sizes.sum() == len(text.encode()):
            return sizes, 0
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        places = np.zeros(len(text) + 1, dtype=np.int64)  # the bytes before each character
        places[1:] = (1 + np.searchsorted(_WIDER, points, side="right")).cumsum()
        known = self._tokenizer.encode(text, add_special_tokens=False) if self._of_bytes else tokens
        offsets = np.array(known.offsets, dtype=np.int64).reshape(-1, 2)
        changes = np.zeros(len(text) + 1, dtype=np.int64)
        np.add.at(changes, offsets[:, 0], 1)
        np.add.at(changes, offsets[:, 1], -1)
        dropped = sum(category(text[place])[0] not in _REMOVABLE for place in np.flatnonzero(changes.cumsum()[:-1] == 0))
        if not len(offsets):
            return sizes, dropped
        ends = np.maximum.accumulate(offsets[:, 1])
        ends[-1] = len(text)
        return np.diff(places[ends], prepend=0), dropped


def _of_bytes(tokenizer: "Tokenizer") -> bool:
    """Whether its tokens are bytes, each named by one character."""
    return '"ByteLevel"' in tokenizer.to_str()


def _groups(texts: Iterable[str], characters: int = 1 << 20) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= characters:
            yield group
            group, size = [], 0
    yield group


def _stated_end(file: Path) -> str | None:
    """The end of a document according to the tokenizer's configuration, if there is one."""
    if not file.is_file():
        return None
    content: Any = read_json(file, "tokenizer configuration")
    end = content.get("eos_token") if isinstance(content, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None
