"""Settings fields: types that accept what Python, TOML and the command line hand over, and what a help text shows of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from normscope.core.devices import chosen_device
from normscope.errors import InputError, require_known
from normscope.machine.files import image_files, read_text, read_token_ids
from normscope.schemes import Scheme, find_scheme

SIX_SCHEMES = "post,pre,mix,peri,ngpt,sqrt-scaling"  # those of the published comparison


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

    def check(value: Any) -> Any:
        for name in (value,) if isinstance(value, str) else value or ():
            require_known("name", name, allowed)
        return value

    return AfterValidator(check)


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


Images = Annotated[tuple[str, ...], BeforeValidator(_image_paths)]
TokenIds = Annotated[Any, AfterValidator(_token_ids)]
TextFile = Annotated[Path, AfterValidator(_readable)]
Schemes = Annotated[tuple[Scheme, ...], BeforeValidator(as_schemes)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(as_numbers)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(dict.fromkeys(map(str, as_list(value)))))]
Device = Annotated[str, AfterValidator(chosen_device)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
