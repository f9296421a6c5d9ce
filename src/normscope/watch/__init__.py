"""Watch: the measures of an audit, live, in somebody else's training loop.

``normscope.watch(model, probe=batch, every=100, to="runs/gpt")`` is ``Watch(...)``: the module can be called, and
``help(normscope.watch.Watch)`` lists its arguments.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from normscope.errors import MissingExtraError

if TYPE_CHECKING:
    from normscope.watch.alarms import RULES, Alarm, Reading, Rule, column
    from normscope.watch.hugging_face import TrainerCallback
    from normscope.watch.lightning import LightningCallback
    from normscope.watch.snapshot import Snapshot
    from normscope.watch.watching import Watch

__all__ = [
    "RULES",
    "Alarm",
    "LightningCallback",
    "Reading",
    "Rule",
    "Snapshot",
    "TrainerCallback",
    "Watch",
    "column",
]

_NAMES = {
    "Watch": "normscope.watch.watching",
    "Snapshot": "normscope.watch.snapshot",
    "Alarm": "normscope.watch.alarms",
    "Rule": "normscope.watch.alarms",
    "Reading": "normscope.watch.alarms",
    "column": "normscope.watch.alarms",
    "RULES": "normscope.watch.alarms",
    "TrainerCallback": "normscope.watch.hugging_face",
    "LightningCallback": "normscope.watch.lightning",
}  # name → where it is defined


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A ``Watch`` of a model: see ``help(normscope.watch.Watch)``."""
        return self.Watch(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used."""
    from importlib import import_module

    if name not in _NAMES:
        raise AttributeError(f"module 'normscope.watch' has no attribute {name!r}")
    try:
        return getattr(import_module(_NAMES[name]), name)
    except MissingExtraError as error:  # so that hasattr and inspect work without what a callback needs
        raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    return sorted(_NAMES)
