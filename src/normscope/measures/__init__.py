"""Measures: one file each, found by looking through this folder."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.measures.base import Measure


@cache
def all_measures() -> "dict[str, type[Measure]]":
    """Every measure by name; those of an audit first, in its order."""
    from normscope.measures.base import Measure

    found = {}
    for module in iter_modules(__path__):
        for value in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Measure) and "name" in vars(value):
                found[value.name] = value
    order = sorted(found.values(), key=lambda kind: (kind.order is None, kind.order or 0, kind.name))
    return {kind.name: kind for kind in order}
