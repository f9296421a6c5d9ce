"""GGUF files: read once for configuration, weights and tokenizer, where the library would read them for each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from normscope.errors import MissingExtraError


def need_gguf() -> None:
    """Refuse where the packages that read a GGUF file are missing."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"a GGUF file needs the package '{error.name}': pip install 'normscope[gguf]'") from error


@contextmanager
def read_once() -> Iterator[None]:
    """Until the block ends, a GGUF file that is read again is the one that was read before.

    The library parses all of a file's metadata, hundreds of thousands of strings, for the configuration, for the weights and
    for the tokenizer, and makes the table of tensor names anew for every module of the model.
    """
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in {"GGUFReader": _reader(gguf.GGUFReader), "get_tensor_name_map": gguf.get_tensor_name_map}.items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(gguf, name, function)


def _reader(kind: Any) -> Callable[..., Any]:
    """The package's reader on a plain array: slices of a memory map of numpy take twice the time."""
    import numpy as np

    def plain(self: Any) -> Any:
        return self.__dict__["data"]

    def store(self: Any, value: Any) -> None:
        self.__dict__["data"] = np.asarray(value)

    reader: Callable[..., Any] = type("PlainReader", (kind,), {"data": property(plain, store)})
    return reader
