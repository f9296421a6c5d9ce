"""Settings fields: types that accept what Python, TOML and the command line hand over, and what a help text shows of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo

from normscope.core.devices import chosen_device
from normscope.errors import InputError, require_known
from normscope.machine.files import image_files, read_text, read_token_ids
from normscope.schemes import Scheme, find_scheme

SIX_SCHEMES = "post,pre,mix,peri,ngpt,sqrt-scaling"  # those of the published comparison
_TEXTS = {Path: "str | Path", Any: "Any", NoneType: "None"}


@dataclass(frozen=True)
class Accepts:
    """What a setting takes, where its validator takes more than its type.

    Attributes:
        type: for type checkers, as it is written in Python; empty for the type of the field.
        complete: for shells: ``schemes``, ``models``, ``runs``, several of them with commas, or the allowed values.
    """

    type: str = ""
    complete: str | tuple[str, ...] = ""


def takes_paths(field: FieldInfo) -> bool:
    """Whether a setting may name a file or a folder."""
    accepted = next((each.type for each in field.metadata if isinstance(each, Accepts) and each.type), "")
    return "Path" in (accepted or str(field.annotation))


def setting(
    default: Any = ...,
    help: str = "",
    *,
    shown: str | None = None,
    argument: bool = False,
    option: str | None = None,
    several: bool = False,
    factory: Any = None,
    **limits: Any,
) -> Any:
    """A field of an experiment.

    Args:
        default: its default; none makes it required.
        help: what it means, for docs and ``--help``.
        shown: the default in words, where the value itself says little (None, or one that depends on other fields).
        argument: whether the command takes it by position.
        option: the name of its option where that differs from the field's.
        several: whether the option may be repeated.
        factory: makes the default.
        limits: ``ge``, ``le``, ``gt``, ``lt``, ... as in pydantic.
    """
    about: dict[str, Any] = {"shown": shown, "argument": argument, "option": option, "several": several}
    if factory is not None:
        return Field(default_factory=factory, description=help, json_schema_extra=about, **limits)
    return Field(default, description=help, json_schema_extra=about, **limits)


def as_list(value: Any) -> list[Any]:
    """Items from a text with commas, a sequence, or a single item."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    return list(value) if isinstance(value, Sequence) else [value]


def as_schemes(value: Any) -> tuple[Scheme, ...]:
    """Schemes from names, paths of TOML files, and Scheme objects."""
    return tuple(item if isinstance(item, Scheme) else find_scheme(item) for item in as_list(value))


def as_numbers(value: Any) -> tuple[float, ...]:
    """Numbers from a text with commas or a sequence; ``none`` is no number."""
    if isinstance(value, str) and value.strip().lower() == "none":
        return ()
    try:
        return tuple(float(item) for item in as_list(value))
    except (TypeError, ValueError):
        raise InputError(f"a list of numbers such as 1,5,20 is needed, not '{value}'") from None


def one_of(*allowed: str) -> AfterValidator:
    """Validates a name, or names, against those that are allowed."""
    return AfterValidator(partial(_require_allowed, allowed))


def _require_allowed(allowed: tuple[str, ...], value: Any) -> Any:
    for name in (value,) if isinstance(value, str) else value or ():
        require_known("name", name, allowed)
    return value


def accepted(field: FieldInfo) -> str:
    """The type of what a caller may give for a setting, as it is written in Python."""
    return _accepted(_annotation(field))


def completed(field: FieldInfo) -> str | tuple[str, ...]:
    """How a shell completes a setting, as ``Accepts.complete`` says; empty for files."""
    for about in _metadata(_annotation(field)):
        if isinstance(about, Accepts) and about.complete:
            return about.complete
        if isinstance(about, AfterValidator) and isinstance(about.func, partial) and about.func.func is _require_allowed:
            return tuple(about.func.args[0])
        if isinstance(about, tuple):
            return about
    return ""


def _annotation(field: FieldInfo) -> Any:
    """The annotation of a field as it was written; pydantic keeps what stands in its outer brackets apart."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _accepted(annotation: Any) -> str:
    kind, inside = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return next((about.type for about in inside[1:] if isinstance(about, Accepts) and about.type), _accepted(inside[0]))
    if kind in (Union, UnionType):
        texts = dict.fromkeys(map(_accepted, inside))
        return " | ".join(text for text in texts if text != "str" or _TEXTS[Path] not in texts)
    if kind is Literal:
        return f"Literal[{', '.join(map(repr, inside))}]"
    if kind is tuple:
        return f"Sequence[{_accepted(inside[0])}]"
    if kind is dict:
        return f"Mapping[{', '.join(map(_accepted, inside))}]"
    return _TEXTS.get(annotation) or annotation.__name__


def _metadata(annotation: Any) -> Iterator[Any]:
    """What a type has as an annotation anywhere in it, and the values of a ``Literal``."""
    kind, inside = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        yield inside
    elif kind is Annotated:
        yield from inside[1:]
        yield from _metadata(inside[0])
    elif kind in (Union, UnionType):
        for item in inside:
            yield from _metadata(item)


def text_of(path: Path | None) -> str | None:
    """The content of a text file; None where there is no path."""
    if path is None:
        return None
    return read_text(path, "text file")


def _readable(path: Path) -> Path:
    """A path that a text can be read from."""
    text_of(path)
    return path


def _token_ids(value: Any) -> Any:
    """The path of a file of token ids that can be read; or token ids as rows."""
    if isinstance(value, str | Path):
        ids_of(Path(value))
        return Path(value)
    rows = value.tolist() if hasattr(value, "tolist") else value
    try:
        rows = tuple(tuple(row) if not isinstance(row, int) else row for row in rows)
    except TypeError:
        raise InputError(f"token ids are a file, a list or an array, not {value!r}") from None
    rows = rows if rows and not isinstance(rows[0], int) else (rows,)
    wrong = next((x for row in rows for x in (row if isinstance(row, tuple) else (row,)) if not isinstance(x, int)), None)
    if wrong is not None:
        raise InputError(f"token ids are integers, not {wrong!r}")
    return rows


def ids_of(value: Any) -> list[list[int]] | None:
    """Token ids (rows, tokens) of a file, or as they were given; None where there are none."""
    if value is None:
        return None
    rows: list[list[int]] = read_token_ids(value).tolist() if isinstance(value, Path) else [list(row) for row in value]
    return rows


def _image_paths(value: Any) -> tuple[str, ...]:
    """Paths of image files and folders, each of which exists."""
    places = tuple(str(item) for item in ([value] if isinstance(value, str | Path) else value))
    for place in places:
        image_files(place)
    return places


SCHEME = Accepts("str | Path | Scheme", complete="schemes")
Images = Annotated[tuple[str, ...], BeforeValidator(_image_paths), Accepts("str | Path | Sequence[str | Path]")]
TokenIds = Annotated[
    Any, AfterValidator(_token_ids), Accepts("str | Path | Sequence[int] | Sequence[Sequence[int]] | NDArray[Any] | Tensor")
]
TextFile = Annotated[Path, AfterValidator(_readable)]
Schemes = Annotated[
    tuple[Scheme, ...], BeforeValidator(as_schemes), Accepts(f"{SCHEME.type} | Sequence[{SCHEME.type}]", complete="schemes")
]
Numbers = Annotated[tuple[float, ...], BeforeValidator(as_numbers), Accepts("str | float | Sequence[float]")]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: tuple(dict.fromkeys(map(str, as_list(value))))),
    Accepts("str | Sequence[str]"),
]
Device = Annotated[str, AfterValidator(chosen_device), Accepts(complete=("auto", "cpu", "cuda"))]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
