"""The one exception that means: the input is wrong, and the message says what is allowed; and the checks that raise it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints
from unicodedata import category

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

Made = TypeVar("Made")
_LARGEST = 2**63 - 1
_LONGEST = 200  # characters of a wrong value that a message repeats


class InputError(ValueError):
    """A user's mistake, in one line. The command line prints it and exits with status 2.

    Example:
        >>> import normscope as ns
        >>> ns.find_scheme("perl")
        Traceback (most recent call last):
        normscope.errors.InputError: unknown scheme 'perl'; did you mean 'peri'? (normscope schemes lists them)
    """

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


class MissingExtraError(InputError):
    """Something needs an optional package that is not installed; the message says which extra brings it."""


def visible(text: str) -> str:
    """Text that a terminal shows and does not obey: all but letters, spaces, tabs and line feeds is escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\t\n" or category(c) == "Zs" else repr(c)[1:-1] for c in text)


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """``"; did you mean 'peri'?"`` when ``word`` is close to an allowed one, else an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(allowed), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def require_known(what: str, name: str, allowed: Iterable[str]) -> None:
    """Refuse a name that is not among those that are allowed."""
    names = list(allowed)
    if name not in names:
        raise InputError(f"unknown {what} '{name}'; allowed: {', '.join(names)}{did_you_mean(str(name), names)}")


def require_keys(given: Iterable[str], allowed: Iterable[str], where: str, what: str = "key") -> None:
    """Refuse keys of a file or table that are not among those that are allowed."""
    names = list(allowed)
    for key in given:
        if key not in names:
            raise InputError(f"unknown {what} '{key}' in {where}{did_you_mean(key, names)} (allowed: {', '.join(names)})")


def require_64_bits(values: Mapping[str, Any]) -> None:
    """Refuse whole numbers that no 64-bit integer holds: nothing has so many of anything, and no tensor counts them."""
    for name, value in values.items():
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, int) and abs(number) > _LARGEST:
                raise InputError(f"{name}={_short(number)}: should fit into 64 bits")


def make(kind: type[Made], values: Mapping[str, Any], where: str) -> Made:
    """A dataclass from plain values, such as TOML and JSON hold; unknown keys, missing and wrong values are refused."""
    settings: Any = kind
    require_keys(values, [field.name for field in fields(settings)], where)
    return kind(**_checked(settings, values))


def validate(settings: Any) -> None:
    """Refuse a dataclass whose fields do not fit their annotations, such as ``Annotated[int, Field(ge=1)]``."""
    _checked(type(settings), {field.name: getattr(settings, field.name) for field in fields(settings)})


def _checked(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    from pydantic import ValidationError

    try:
        found = _model(kind)(**{name: _plain(value) for name, value in values.items()})
    except ValidationError as error:
        raise InputError(explain(error)) from None
    checked = {name: getattr(found, name) for name in values}
    require_64_bits(checked)
    return checked


@cache
def _model(kind: Any) -> "type[BaseModel]":
    from pydantic import ConfigDict, create_model

    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    hints = get_type_hints(kind, include_extras=True)
    made: dict[str, Any] = {f.name: (hints[f.name], ... if f.default is MISSING else f.default) for f in fields(kind)}
    model: type[BaseModel] = create_model(kind.__name__, __config__=config, **made)
    return model


def _plain(value: Any) -> Any:
    """Lists become tuples, paths texts, and 1e8 is a whole number too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return str(value) if isinstance(value, Path) else value


def explain(error: "ValidationError") -> str:
    """The first mistake that pydantic names, in one line with the parameter: ``batch=0: should be greater than 0``."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        message = str(cause)
        return message if not name or f"{name}=" in message else f"{name}: {message}"
    problem = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if first["type"] == "literal_error":
        problem += did_you_mean(str(first["input"]), re.findall(r"'([^']*)'", first["ctx"]["expected"]))
    return f"{name}={_short(first['input'])}: {problem}" if name else problem


def _short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = hex(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
