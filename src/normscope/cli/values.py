"""Values that a shell can complete: schemes, models and run folders, found without importing anything heavy."""

import os
from collections.abc import Callable, Iterator, Sequence
from glob import escape, iglob
from pathlib import Path

Value = tuple[str, str]  # what completes a word, and what a shell shows beside it
_PARTS = ("qk", "qkv", "gate", "inner", "sink")  # that a named scheme can have besides its own


def schemes(incomplete: str) -> Iterator[Value]:
    """Named schemes, with further slots after a plus sign, and scheme files; the last of a list with commas."""
    from normscope.schemes import NAMED

    listed, comma, last = incomplete.rpartition(",")
    base, plus, _ = last.rpartition("+")
    for name, scheme in NAMED.items():
        yield f"{listed}{comma}{name}", scheme.title
    if plus:
        yield from ((f"{listed}{comma}{base}+{part}", "") for part in _PARTS)
    yield from ((f"{listed}{comma}{file}", "scheme file") for file in _existing(last, "*.toml"))


def models(incomplete: str) -> Iterator[Value]:
    """Models of installed packages, of normscope and in the hub's cache, model folders and GGUF files."""
    from normscope.machine.installation import hub_models
    from normscope.machine.packages import PACKAGES, PREFIX, installed_in

    for name, package in PACKAGES.items():
        if package.kind == "model" and installed_in(package.package):
            yield f"{PREFIX}{name}", "installed"
    builtin = Path(__file__).parent.parent / "transformer" / "builtin"
    yield from ((f"builtin:{folder.name}", "comes with normscope") for folder in sorted(builtin.iterdir()))
    yield from ((os.path.dirname(file), "model folder") for file in _existing(incomplete, "*/config.json", "*/*/config.json"))
    yield from ((file, "GGUF file") for file in _existing(incomplete, "*.gguf"))
    yield from ((name, "in the hub's cache") for name in hub_models())


def runs(incomplete: str) -> Iterator[Value]:
    """Run folders."""
    yield from ((os.path.dirname(file), "run folder") for file in _existing(incomplete, "*/run.json", "*/*/run.json"))


def _existing(beginning: str, *patterns: str) -> Iterator[str]:
    """Paths that begin as a user began to write one; ``~`` stays as it is."""
    home = os.path.expanduser("~")
    place = f"{home}{beginning[1:]}" if beginning.startswith("~/") else beginning
    for pattern in patterns:
        for path in sorted(iglob(escape(place) + pattern)):
            yield f"~{path.removeprefix(home)}" if place != beginning else path


_KINDS: dict[str, Callable[[str], Iterator[Value]]] = {"schemes": schemes, "models": models, "runs": runs}


def completing(what: str | Sequence[str]) -> Callable[[str], list[Value]]:
    """A function for typer that completes the kinds of values that a text names with commas, or the values of a sequence."""

    def values(incomplete: str) -> list[Value]:
        if not isinstance(what, str):
            return [(value, "") for value in what]
        return list(dict(value for kind in what.split(",") for value in _KINDS[kind](incomplete)).items())

    return values
