"""Rules over time."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from normscope.watch.snapshot import Snapshot


@dataclass(frozen=True)
class Alarm:
    """What a rule reports."""

    step: int
    rule: str
    layer: int
    head: int
    number: float
    text: str

    @property
    def row(self) -> dict[str, Any]:
        """As a row of a table."""
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """A rule."""

    name: str


RULES: tuple[Rule, ...] = ()


class Alarms:
    """Applies rules."""

    def __init__(self, rules: Iterable[Rule] = RULES) -> None:
        self.rules = tuple(rules)

    def add(self, snapshot: Snapshot) -> list[Alarm]:
        """The alarms of a snapshot."""
        return []
