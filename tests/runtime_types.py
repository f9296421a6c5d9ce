"""The types that tests run the package under: beartype, with an int allowed where a float is expected.

A check costs more than a small function does, so each test checks the first calls of every function and a sample of the others.
"""

from collections.abc import Callable
from functools import partial, wraps
from inspect import isclass
from types import CodeType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
FIRST, EVERY = 4, 64  # calls of a function in a test that are checked, and those of the later ones
_check_always = jaxtyping.jaxtyped
_counts: dict[CodeType, list[int]] = {}  # calls in this test, by the code of a function: closures share theirs


def check_samples(fn: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """``jaxtyped``, with which the import hook decorates, on the first calls of a test and a sample of the others."""
    from torch.compiler import is_compiling  # what only distributes the tests has no need of torch

    if fn is None:
        return partial(check_samples, typechecker=typechecker)
    if isclass(fn):
        return _check_always(fn, typechecker=typechecker)
    count = _counts.setdefault(fn.__code__, [0])
    checked = None  # made with the first call: a check takes a millisecond to make, and most functions are never called

    @wraps(fn)
    def sampled(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checked
        if is_compiling():
            return fn(*args, **kwargs)
        count[0] += 1
        if count[0] > FIRST and count[0] % EVERY:
            return fn(*args, **kwargs)
        checked = checked or _check_always(fn, typechecker=typechecker)
        return checked(*args, **kwargs)

    return sampled


def begin_test() -> None:
    """Check the first calls of every function again."""
    for count in _counts.values():
        count[0] = 0


jaxtyping.jaxtyped = check_samples
