"""The one exception that means: the input is wrong, and the message says what is allowed."""

from collections.abc import Iterable


class InputError(ValueError):
    """A user's mistake, told in one line. The command line prints it and exits with status 2."""


class MissingExtraError(InputError):
    """Something needs an optional package that is not installed; the message says which extra brings it."""


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """``"; did you mean 'peri'?"`` when ``word`` is close to an allowed one, else an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(allowed), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
