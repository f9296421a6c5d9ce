"""A measure is one file: once it lies in the folder of measures, audits, comparisons and reports have it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import normscope as ns
from normscope import measures
from normscope.measures import all_measures

LARGEST = '''
"""The largest component of the residual stream before every layer."""

from dataclasses import dataclass

import pandas as pd

from normscope.measures.base import LAYER, Measure, PassObserver, Quantity
from normscope.results.figures import Chart, Line
from normscope.results.findings import Finding
from normscope.results.sections import Section


class _Observer(PassObserver):
    def __init__(self, subject):
        self.counted, self.rows = subject.counted, []

    def state(self, layer, x):
        self.rows.append({"layer": layer, "largest": float(x[self.counted].abs().max())})

    def tables(self):
        return {"largest": pd.DataFrame(self.rows)}


@dataclass(frozen=True)
class Largest(Measure):
    name = "largest"
    title = "Largest component"
    order = 1000
    quantities = (
        Quantity(
            "largest", "Largest component", LAYER, "max |x_i|", "Outliers.", "largest",
            lambda table: table.set_axis(["x", "y"], axis=1), "largest component", lambda curve: float(curve["y"].max()),
        ),
    )

    def observer(self, subject):
        return _Observer(subject)

    def findings(self, tables, about):
        largest = tables["largest"]["largest"].max()
        yield Finding(f"The largest component is {largest:.3g}.", "largest", number=float(largest))

    def section(self, tables, settings):
        table = tables["largest"]
        line = Line("this model", list(table["layer"]), list(table["largest"]))
        return Section(self.title, figures={"largest": Chart(self.title, "layer", "max", (line,), "")}, name=self.name)
'''


@pytest.fixture
def largest(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "largest.py").write_text(LARGEST, encoding="utf-8")
    measures.__path__.append(str(tmp_path))
    all_measures.cache_clear()
    yield
    measures.__path__.remove(str(tmp_path))
    all_measures.cache_clear()


@pytest.mark.usefixtures("largest")
def test_a_new_measure_is_in_audits_comparisons_and_pages(here: Path) -> None:
    pre, qkv = "builtin:addition-small-pre", "builtin:addition-small-qkv"
    report = ns.audit(pre, examples=16, progress=False)
    assert len(report.tables["largest"]) == 5
    assert report["largest"].figures.keys() == {"largest"}
    found = next(finding for finding in report.findings if finding.figure == "largest")
    assert found.number == pytest.approx(report.tables["largest"]["largest"].max())
    assert "Largest component" in report.to_html()
    compared = ns.compare(pre, qkv, examples=16, progress=False)
    assert "largest" in set(compared.tables["quantities"]["name"])


def test_every_measure_says_what_it_needs_and_what_it_costs() -> None:
    for name, kind in all_measures().items():
        assert kind.name == name
        assert kind.title
        assert kind.passes
        assert kind.needs <= {"stream", "sublayers", "attention", "matrices", "vocabulary", "predictions"}
