"""A corpus as token ids on disk: made once, memory-mapped, shared by all runs with the same text and tokenizer.

Documents follow one another with the token that ends a document after each. Beside the tokens stand the bytes of text that
each of them stands for. The files are in the user's cache, under a digest of the text, the tokenizer and the settings.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from normscope.errors import InputError
from normscope.machine.files import cache_folder, full_disk_explained, read_json, sync
from normscope.machine.memory import available
from normscope.runs import fingerprint, locked
from normscope.training.tasks.task import Advance
from normscope.training.tasks.text.corpus import Corpus
from normscope.training.tasks.text.tokenizing import (
    END,
    TokenBytes,
    TokenizerFile,
    encoded,
    loaded,
    size_of,
    trained,
    unknown_id,
)

PARTS: tuple[str, str] = ("training", "held-out")
_ABOUT, _TOKENIZER, _SIZES = "about.json", "tokenizer.json", ".sizes.bin"
_BYTES = np.dtype(np.uint16)
_MOST_BYTES = np.iinfo(_BYTES).max
_FORMAT = 1
_PATIENCE = 3600.0  # seconds to wait for another process that prepares the same corpus
_LONGEST = 1 << 20  # characters of a document that are encoded at once
_MOST_UNKNOWN = 0.01  # share of a corpus that its tokenizer may not know, of tokens or of characters without one
_SHARE_OF_GPU = 0.25  # of its free memory that tokens may take


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus.

    Attributes:
        folder: where its files are.
        about: number of tokens, documents and bytes of each part, size of the tokenizer, the end-of-document token.
    """

    folder: Path
    about: dict[str, Any]
    on_device: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def identity(self) -> str:
        """The same for the same tokens."""
        return str(self.about["digest"])

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return int(self.about["vocabulary"])

    @property
    def end(self) -> str:
        """The token that ends a document."""
        return str(self.about["end"])

    @cached_property
    def tokenizer(self) -> str:
        """The tokenizer as JSON."""
        return (self.folder / _TOKENIZER).read_text(encoding="utf-8")

    def count(self, part: str, what: str = "tokens") -> int:
        """Tokens, documents or bytes of a part."""
        return int(self.about[part][what])

    @cached_property
    def maps(self) -> dict[str, npt.NDArray[Any]]:
        """The tokens of each part, memory-mapped."""
        return {part: self._map(f"{part}.bin", self.about["dtype"], part) for part in PARTS}

    @cached_property
    def _sizes(self) -> dict[str, npt.NDArray[Any]]:
        """The bytes of each token of each part, memory-mapped."""
        return {part: self._map(f"{part}{_SIZES}", _BYTES.name, part) for part in PARTS}

    def _map(self, file: str, dtype: str, part: str) -> npt.NDArray[Any]:
        return np.memmap(self.folder / file, dtype, "r", shape=(self.count(part),))

    def bytes_of(self, part: str, starts: Int[Tensor, " rows"], length: int) -> int:
        """The bytes of text that the tokens from each start on stand for; the end of a document has none."""
        return int(self._sizes[part][(starts[:, None] + torch.arange(length)).numpy()].sum(dtype=np.int64))

    def windows(self, part: str, starts: Int[Tensor, " rows"], length: int, device: torch.device) -> Int[Tensor, "rows length"]:
        """The tokens from each start on.

        On a GPU from its memory, if they do not take too much of it, else read from disk and copied.
        """
        places = torch.arange(length)
        held = self._held(part, device)
        if held is not None:
            return held[starts.to(device)[:, None] + places.to(device)].long()
        rows = self.maps[part][(starts[:, None] + places).numpy()]
        return torch.from_numpy(rows.astype(np.int64)).to(device)

    def _held(self, part: str, device: torch.device) -> Tensor | None:
        """All tokens of a part in a GPU's memory."""
        name = f"{part} {device}"
        if device.type == "cuda" and name not in self.on_device:
            if 4 * self.count(part) > _SHARE_OF_GPU * available(str(device)):
                return None
            self.on_device[name] = torch.from_numpy(self.maps[part].astype(np.int32)).to(device)
        return self.on_device.get(name)


def prepare(
    corpus: Corpus,
    tokenizer: TokenizerFile | None,
    vocabulary: int,
    held_out: float,
    progress: Advance,
    check: Callable[[str], None],
    accept: Callable[[Prepared], None],
) -> Prepared:
    """The corpus as tokens, from the cache if it has been prepared before; another process that prepares it is waited for.

    ``check`` raises an InputError for another identity than is wanted, and ``accept`` for tokens that cannot be used; they
    are not left in the cache.

    Raises:
        InputError: if the corpus cannot be read or has no text, or the tokenizer does not fit.
    """
    progress("reading the corpus", 0, 1)
    identity = fingerprint(
        {
            "format": _FORMAT,
            "text": corpus.survey.digest,
            "tokenizer": f"byte pairs {vocabulary}" if tokenizer is None else tokenizer.digest,
            "held_out": held_out,
            **({"of": "every document"} if corpus.survey.hardly_any_fits(held_out) else {}),  # not so in format 1
        }
    )
    progress("reading the corpus", 1, 1)
    check(identity)
    folder = _cache() / identity
    if (done := _opened(folder)) is None:
        done = _prepared_alone(_Preparation(corpus, tokenizer, vocabulary, held_out, progress, accept), folder)
    accept(done)
    return done


def _prepared_alone(preparation: "_Preparation", folder: Path) -> Prepared:
    """What another process has prepared meanwhile, or this one prepares."""
    lock = folder.with_suffix(".lock")
    try:
        with locked(lock, _PATIENCE), full_disk_explained(folder):
            try:
                return _opened(folder) or preparation.into(folder)
            finally:
                lock.unlink(missing_ok=True)
    except BlockingIOError:
        raise InputError(f"another process has been preparing the corpus in '{folder}' for an hour; end it first") from None
    except OSError as error:
        raise InputError(f"cannot write to '{folder.parent}': {error.strerror}; set XDG_CACHE_HOME to move it") from error


def _cache() -> Path:
    return cache_folder("corpora")


def _opened(folder: Path) -> Prepared | None:
    """What has been prepared, if it is whole."""
    try:
        about = read_json(folder / _ABOUT, "prepared corpus")
        widths = {".bin": np.dtype(about["dtype"]).itemsize, _SIZES: _BYTES.itemsize}
        whole = all(
            (folder / f"{part}{end}").stat().st_size == width * about[part]["tokens"]
            for part in PARTS for end, width in widths.items()
        )  # fmt: skip
        return Prepared(folder, about) if whole and (folder / _TOKENIZER).is_file() else None
    except (InputError, OSError, KeyError, TypeError):
        return None


@dataclass
class _Preparation:
    """The work of preparing a corpus."""

    corpus: Corpus
    tokenizer: TokenizerFile | None
    vocabulary: int
    held_out: float
    progress: Advance
    accept: Callable[[Prepared], None]

    def into(self, folder: Path) -> Prepared:
        """Write all files beside their place, and rename them at the end."""
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            about = self._write(partial, folder.name)
            self.accept(Prepared(partial, about))
            (partial / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
            for file in partial.iterdir():
                sync(file)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return Prepared(folder, about)

    def _write(self, folder: Path, identity: str) -> dict[str, Any]:
        if self.tokenizer is None:
            texts = (text for text, _ in self._parts("training a tokenizer") if text)
            content, end = trained(texts, self.vocabulary).to_str(), END
        else:
            content, end = self.tokenizer.content, self.tokenizer.end
        tokenizer = loaded(content, self.corpus.source)
        (folder / _TOKENIZER).write_text(content, encoding="utf-8")
        size, last, unknown = size_of(tokenizer), tokenizer.token_to_id(end), unknown_id(content, tokenizer)
        weighed, unknowns, dropped, characters = TokenBytes(tokenizer), 0, 0, 0
        dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
        counts = {part: {"tokens": 0, "documents": 0, "bytes": 0} for part in PARTS}
        with ExitStack() as stack:
            names = [f"{part}{end}" for part in PARTS for end in (".bin", _SIZES)]
            files = {name: stack.enter_context((folder / name).open("wb")) for name in names}
            pieces, copies = tee(_pieces(self._parts("tokenizing")))
            for piece, tokens in zip(pieces, encoded(tokenizer, (copy.text for copy in copies)), strict=True):
                row = np.array([*tokens.ids, last] if piece.ends else tokens.ids, dtype=np.int64)
                sizes, lost = weighed.of(piece.text, tokens)
                sizes = np.pad(sizes, (0, int(piece.ends)))  # the end of a document has no bytes
                files[f"{piece.part}.bin"].write(row.astype(dtype).tobytes())
                files[f"{piece.part}{_SIZES}"].write(sizes.clip(max=_MOST_BYTES).astype(_BYTES).tobytes())
                unknowns += int((row == unknown).sum()) if unknown is not None else 0
                dropped, characters = dropped + lost, characters + len(piece.text)
                count = counts[piece.part]
                count["tokens"] += len(row)
                count["documents"] += piece.ends
                count["bytes"] += len(piece.text.encode())
        share = max(unknowns / sum(count["tokens"] for count in counts.values()), dropped / characters)
        if self.tokenizer is not None and share > _MOST_UNKNOWN:
            raise InputError(
                f"tokenizer='{self.tokenizer.source}' does not fit the corpus '{self.corpus.source}': {100 * share:.0f} % of "
                "the text is unknown to it; give another tokenizer, or none to train one"
            )
        return {"digest": identity, "vocabulary": size, "end": end, "dtype": dtype.name, **counts}

    def _parts(self, stage: str) -> Iterator[tuple[str, str]]:
        total = sum(self.corpus.survey.sizes) / 1e6
        done = 0.0
        self.progress(stage, 0, round(total, 1))
        for (train, held_out), size in zip(self.corpus.parts(self.held_out), self.corpus.survey.sizes, strict=True):
            yield train, held_out
            done += size / 1e6
            self.progress(stage, round(done, 1), round(total, 1))


@dataclass(frozen=True)
class _Piece:
    """Text of a part, and whether a document ends with it."""

    part: str
    text: str
    ends: bool


def _pieces(documents: Iterable[tuple[str, str]]) -> Iterator[_Piece]:
    """Documents, long ones in pieces that end with a line where they can."""
    for texts in documents:
        for part, text in zip(PARTS, texts, strict=True):
            start = 0
            while start < len(text):
                end = len(text)
                if end - start > _LONGEST:
                    line = text.rfind("\n", start, start + _LONGEST) + 1
                    end = line or start + _LONGEST
                yield _Piece(part, text[start:end], end == len(text))
                start = end
