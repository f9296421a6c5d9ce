"""The device that a computation runs on."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from normscope.errors import InputError

_ELSEWHERE = ContextVar("elsewhere", default=False)


@contextmanager
def devices_elsewhere() -> Iterator[None]:
    """Accept any device meanwhile: the computation will run on another machine."""
    before = _ELSEWHERE.set(True)
    try:
        yield
    finally:
        _ELSEWHERE.reset(before)


def is_elsewhere() -> bool:
    """Whether the computation will run on another machine."""
    return _ELSEWHERE.get()


def chosen_device(name: str) -> str:
    """``auto`` resolved to a GPU if there is one; a device that this machine lacks raises ``InputError``."""
    if name == "cpu" or _ELSEWHERE.get():
        return name
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
        known = torch.device(name).type in ("cpu", "cuda")
    except (RuntimeError, AssertionError):
        known = False
    if not known:
        raise InputError(f"device='{name}' is not available; allowed: auto, cpu{', cuda' * torch.cuda.is_available()}")
    return name
