"""Find a scheme by name, by name with further slots (``peri+qk``), or by the path of a TOML file."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from normscope.errors import InputError, did_you_mean, require_keys
from normscope.machine.files import read_toml, user_path
from normscope.schemes.expressions import Expression
from normscope.schemes.named import NAMED
from normscope.schemes.scheme import Scheme, Slots

_SLOT_KEYS = tuple(f.name for f in fields(Slots))
_SCHEME_KEYS = tuple(f.name for f in fields(Scheme))
_MOST_STAGES = 16  # tables or files, each of which is the "then" of the one before


def find_scheme(name_or_path: str | Path) -> Scheme:
    """The scheme of that name, or the one that a TOML file defines.

    Example:
        >>> find_scheme("peri+qk+sink").attention.heads
        'qk'
    """
    text = str(name_or_path).strip()
    if _is_file(text):
        return read_scheme(Path(text))
    base, *parts = _split(text)
    if base not in NAMED:
        raise InputError(f"unknown scheme '{base}'{did_you_mean(base, NAMED)} (normscope schemes lists them)")
    scheme = NAMED[base]
    for part in parts:
        scheme = scheme.with_part(part)
    return scheme


def scheme_files(name_or_path: str | Path) -> Iterator[Path]:
    """The TOML files that define a scheme, with those that ``then`` leads to; none for a name."""
    text = str(name_or_path).strip()
    if _is_file(text):
        path = user_path(text, "scheme file")
        yield path
        then = read_toml(path, "scheme file").get("then")
        while isinstance(then, dict):
            then = then.get("then")
        if isinstance(then, str) and _is_file(then):
            yield from scheme_files(path.parent / then)


def _is_file(text: str) -> bool:
    return text.endswith(".toml") or "/" in text


def _split(text: str) -> list[str]:
    """The parts between + signs; one within brackets belongs to a formula."""
    parts: list[str] = []
    for piece in text.split("+"):
        if parts and parts[-1].count("(") > parts[-1].count(")"):
            parts[-1] += f"+{piece}"
        else:
            parts.append(piece)
    return parts


def read_scheme(path: Path, readers: tuple[Path, ...] = ()) -> Scheme:
    """The scheme that a TOML file defines (docs/schemes.md shows one); ``readers`` are the files that led here."""
    place = user_path(path, "scheme file").resolve()
    if place in readers:
        raise InputError(f"'{path}' comes after itself: follow its 'then'")
    if len(readers) == _MOST_STAGES:
        raise InputError(f"more than {_MOST_STAGES} scheme files lead to each other by 'then'")
    content = read_toml(path, "scheme file")

    def other(then: str) -> Scheme:
        return read_scheme(path.parent / then, (*readers, place)) if _is_file(then) else find_scheme(then)

    try:
        return _scheme({"name": path.stem, **content}, other)
    except InputError as error:
        raise InputError(f"in '{path}': {error}") from error


def scheme_values(scheme: Scheme) -> dict[str, Any]:
    """A scheme as plain values, such as JSON holds; ``scheme_from`` makes the same scheme of them."""
    return {f.name: _plain(getattr(scheme, f.name)) for f in fields(Scheme)}


def scheme_from(values: dict[str, Any]) -> Scheme:
    """The scheme of plain values: those that ``scheme_values`` wrote down, or some of them by hand, without files."""
    return _scheme(values, _only_tables)


def _plain(value: Any) -> Any:
    match value:
        case Scheme():
            return scheme_values(value)
        case Slots():
            return {key: _plain(getattr(value, key)) for key in _SLOT_KEYS}
        case Expression():
            return value.source
        case tuple():
            return list(value)
    return value


def _scheme(content: Any, other: Callable[[str], Scheme], stage: int = 1) -> Scheme:
    """The scheme of a table; ``other`` finds the one that a text in ``then`` names. A key with None is one left out."""
    if not isinstance(content, dict):
        raise InputError(f"a scheme is a table of slots, not {content!r}")
    if stage > _MOST_STAGES:
        raise InputError(f"a scheme has at most {_MOST_STAGES} stages")
    require_keys(content, _SCHEME_KEYS, "a scheme")
    given = {key: value for key, value in content.items() if value is not None}
    if "attention" not in given:
        raise InputError(f"a scheme needs the table [attention] with some of {', '.join(_SLOT_KEYS)}")
    for sublayer in ("attention", "feedforward"):
        if sublayer in given:
            given[sublayer] = _slots(given[sublayer], sublayer)
    if "then" in given:
        then = given["then"]
        named = {"name": given.get("name"), **then} if isinstance(then, dict) else then  # a stage needs no name of its own
        given["then"] = other(then) if isinstance(then, str) else _scheme(named, other, stage + 1)
    for key in ("name", "norm", "learned", "weights", "title", "users", "note"):
        if not isinstance(given.get(key, None if key == "name" else ""), str):
            raise InputError(f"'{key}' is a text, not {given.get(key)!r}")
    papers = given.get("papers", [])
    if not isinstance(papers, list) or not all(isinstance(paper, str) for paper in papers):
        raise InputError(f"'papers' is a list of texts, not {papers!r}")
    given["papers"] = tuple(papers)
    return Scheme(**given)


def _only_tables(then: str) -> Scheme:
    raise InputError(f"a scheme is a table of slots, not {then!r}")


def _slots(content: Any, where: str) -> Slots:
    if not isinstance(content, dict):
        raise InputError(f"[{where}] is a table of slots, not {content!r}")
    require_keys(content, _SLOT_KEYS, f"[{where}]")
    for key in (slot for slot in _SLOT_KEYS if slot not in ("step", "carry")):
        if not isinstance(content.get(key, ""), str):
            raise InputError(f"slot '{key}' in [{where}] is a text such as \"none\", not {content[key]!r}")
    return Slots(**content)
