"""Files that a user names: regular files of a sensible size, read as text, TOML or JSON; all else is refused in one line.

A FIFO would block, a link to a device would fill the memory, and deep nesting or long integers would end in an error of the
parser: ``read_text``, ``read_toml``, ``read_json``, ``read_image`` and ``regular_file`` raise ``InputError`` instead.
"""

import errno
import json
import os
import stat
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

from normscope.errors import InputError, visible

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL.Image import Image

MOST_SETTINGS = 16 << 20  # bytes of a scheme, recipe or plan
MOST_TEXT = 256 << 20
MOST_JSON = 256 << 20
MOST_IMAGE = 64 << 20
_MOST_PIXELS = 1 << 26  # of an image: 8192 × 8192
_MOST_IMAGES = 10_000
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
_DEEPEST = 64  # levels of tables and lists
_LARGEST = 2**63  # the integers of TOML have 64 bits
_DAMAGED = (OSError, ValueError, EOFError, TypeError, OverflowError, MemoryError, SyntaxError, RecursionError, TokenError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")


def cache_folder(name: str = "") -> Path:
    """Where what can be made again is kept: a folder of the user's cache, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normscope" / name


def write_private(path: Path, text: str) -> None:
    """Write a file that its user alone may read, in place of one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def size_text(count: float) -> str:
    """``22 GB`` for a number of bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.2g} {unit}" if count < 99.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} bytes"


def user_path(path: str | Path, what: str = "path") -> Path:
    """A path with ``~`` expanded, absent or not; one that no file can have is refused."""
    try:
        expanded = Path(path).expanduser()
        expanded.stat()
    except (FileNotFoundError, NotADirectoryError):
        return expanded
    except (OSError, RuntimeError, ValueError) as error:  # the last two for ~nobody and NUL
        raise InputError(f"cannot use the {what} {_shown(path)}: {_reason(error)}") from error
    return expanded


def regular_file(path: str | Path, what: str, most: float = float("inf"), hint: str = "") -> Path:
    """The path of a regular file, links followed, of at most ``most`` bytes; ``hint`` follows the error for a missing one."""
    place = user_path(path, what)
    try:
        about = place.stat()
    except OSError:
        raise InputError(f"no {what} {_shown(path)}{hint}") from None
    _check_kind(about, path, what, most)
    return place


def read_text(path: str | Path, what: str, most: float = MOST_TEXT, hint: str = "") -> str:
    """The content of a text file in UTF-8, without a byte order mark."""
    place = regular_file(path, what, most, hint)
    try:
        with os.fdopen(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_kind(os.fstat(file.fileno()), path, what, most)  # again: it may have been replaced meanwhile
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"cannot read the {what} {_shown(path)}: it is not text in UTF-8") from None
    except OSError as error:
        raise InputError(f"cannot read the {what} {_shown(path)}: {_reason(error)}") from error
    if "\0" in text:
        raise InputError(f"cannot read the {what} {_shown(path)}: it contains NUL, so it is not a text")
    return text


def read_toml(path: str | Path, what: str, hint: str = "") -> dict[str, Any]:
    """The content of a TOML file."""
    return parse_toml(read_text(path, what, MOST_SETTINGS, hint), _shown(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """TOML as plain values; ``where`` names it in the error."""
    content: dict[str, Any] = _parsed(tomllib.loads, text, where, "TOML")
    return content


def read_json(path: str | Path, what: str) -> Any:
    """The content of a JSON file."""
    return _parsed(json.loads, read_text(path, what, MOST_JSON), _shown(path), "JSON")


def read_array(path: str | Path, what: str) -> "npt.NDArray[Any]":
    """The array of an ``.npy`` file of numbers; nothing is unpickled, and a damaged file is refused."""
    import numpy as np

    place = regular_file(path, what)
    try:
        array = np.load(place, allow_pickle=False)
    except _DAMAGED as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"cannot read the {what} {_shown(path)}: it is no array of numbers ({reason})") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":  # a ZIP archive holds several arrays
        raise InputError(f"cannot read the {what} {_shown(path)}: it is no array of numbers")
    return array


def read_token_ids(path: str | Path) -> "npt.NDArray[Any]":
    """Token ids (rows, tokens) of an ``.npy`` file, of a JSON list (of lists), or of numbers between blanks and commas."""
    import numpy as np

    what = "file of token ids"
    if Path(path).suffix == ".npy":
        ids = read_array(path, what)
    else:
        text = read_text(path, what)
        listed = text if text.lstrip()[:1] == "[" else f"[{','.join(text.replace(',', ' ').split())}]"
        content = _parsed(json.loads, listed, _shown(path), "list of token ids")
        try:
            ids = np.array(content)
        except ValueError:  # of rows of different lengths
            ids = np.array(None)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
        raise InputError(f"cannot read the {what} {_shown(path)}: it holds no integers, or rows of different lengths")
    return ids


def image_files(path: str | Path) -> list[Path]:
    """An image file, or the image files of a folder in the order of their names."""
    place = user_path(path, "image")
    if not place.is_dir():
        return [regular_file(path, "image", MOST_IMAGE)]
    found = sorted(file for file in place.iterdir() if file.suffix.lower() in _IMAGES)
    if not found:
        raise InputError(f"there are no images in the folder {_shown(path)}: files that end in {', '.join(_IMAGES)} are read")
    if len(found) > _MOST_IMAGES:
        raise InputError(f"the folder {_shown(path)} has {len(found):,} images, at most {_MOST_IMAGES:,} are read")
    return found


def read_image(path: str | Path) -> "Image":
    """An image file in RGB, upright; one that is damaged, or whose header announces too many pixels, is refused."""
    from PIL import Image, ImageOps

    place = regular_file(path, "image", MOST_IMAGE)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of many pixels, which are refused below before they are decoded
            with Image.open(place) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise InputError(
                        f"cannot read the image {_shown(path)}: it has {image.width:,} × {image.height:,} pixels, "
                        f"at most {_MOST_PIXELS:,} are read"
                    )
                return ImageOps.exif_transpose(image).convert("RGB")
    except InputError:
        raise
    except (Image.DecompressionBombError, *_DAMAGED) as error:
        raise InputError(f"cannot read the image {_shown(path)}: {_reason(error)}") from error


def replace_text(target: Path, text: str, *, sync: bool = True) -> None:
    """Replace a file by a text, whole even if the process dies meanwhile."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Have the content of a file, or the names in a folder, on the disk before anything else happens."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def full_disk_explained(folder: str | Path) -> Iterator[None]:
    """One clear error when the disk is full, whichever library notices it."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise InputError(
            f"the disk is full; what is saved in '{folder}' or beside it stays: free some space and give the same command again"
        ) from error


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, reports a full disk; libraries report it in different ways."""
    while error is not None:
        if getattr(error, "errno", None) in _FULL or any(text in str(error) for text in _FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _check_kind(about: os.stat_result, path: str | Path, what: str, most: float) -> None:
    if not stat.S_ISREG(about.st_mode):
        kind = "a folder" if stat.S_ISDIR(about.st_mode) else "not a regular file"
        raise InputError(f"cannot read the {what} {_shown(path)}: it is {kind}")
    if about.st_size > most:
        raise InputError(
            f"cannot read the {what} {_shown(path)}: it has {size_text(about.st_size)}, at most {size_text(most)} are read"
        )


def _parsed(loads: Callable[[str], Any], text: str, where: str, kind: str) -> Any:
    try:
        content = loads(text)
        _check_values(content)
    except RecursionError:
        raise InputError(f"{where} is not valid {kind}: it is nested too deeply") from None
    except ValueError as error:  # also of an integer with thousands of digits
        raise InputError(f"{where} is not valid {kind}: {error}") from error
    return content


def _check_values(content: Any) -> None:
    """Refuse what later code could not handle: deep nesting, and integers beyond 64 bits."""
    level, depth = [content], 0
    while level:
        if depth > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
        inner: list[Any] = []
        for value in level:
            if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
                raise ValueError(f"an integer of {len(hex(value)) * 4} bits; integers have at most 64")
            inner += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        level, depth = inner, depth + 1


def _shown(path: str | Path) -> str:
    """A path for a message: in quotes, short, without control characters."""
    text = visible(str(path))
    return f"'{text if len(text) <= 120 else f'{text[:60]}…{text[-50:]}'}'"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
