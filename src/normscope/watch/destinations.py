"""Where snapshots go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from normscope.errors import InputError
from normscope.watch.snapshot import Snapshot


class Destination(Protocol):
    """Takes snapshots of a training, on the first process alone."""

    def begin(self, about: Mapping[str, Any]) -> None:
        """Plain facts on the training."""

    def write(self, snapshot: Snapshot) -> None:
        """One snapshot."""

    def close(self) -> None:
        """The end."""


@dataclass(frozen=True)
class Calls:
    """Calls a function."""

    function: Callable[[Snapshot], object]

    def begin(self, about: Mapping[str, Any]) -> None:
        """Nothing."""

    def write(self, snapshot: Snapshot) -> None:
        """Call it."""
        self.function(snapshot)

    def close(self) -> None:
        """Nothing."""


def destination_of(to: Any, *, resume: bool = False) -> Destination:
    """A destination of what a user gives."""
    if callable(to):
        return Calls(to)
    raise InputError(f"to={to!r} is no destination")
