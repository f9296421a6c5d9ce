"""The public API: names are lazy, and docstring examples are true; tests/test_docs.py runs the session of docs/api.md."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import normscope as ns
from normscope.experiments import kind_of, summaries
from normscope.watch.watching import Watch


def test_importing_normscope_imports_nothing_heavy() -> None:
    code = "import sys, normscope; print(*(m for m in ('torch', 'pandas', 'numpy', 'pydantic', 'altair') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def documented() -> dict[str, object]:
    """Everything public by name: classes, functions, methods with an example, and experiments."""
    public: dict[str, object] = {name: getattr(ns, name) for name in ns.__all__ if name not in ("__version__", "watch")}
    others = {"find_scheme": ns.find_scheme, "capture": ns.Model.capture, "Watch": Watch}
    return {**public, **others, **{n: kind_of(n) for n in summaries()}}


@pytest.mark.parametrize("name", list(documented()))
def test_examples_in_docstrings_are_true(name: str, here: Path) -> None:
    thing = documented()[name]
    names = dict(vars(sys.modules[getattr(thing, "__module__", "normscope")]))
    examples = doctest.DocTestParser().get_doctest(thing.__doc__ or "", names, name, None, None)
    assert examples.examples
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(examples).failed == 0
