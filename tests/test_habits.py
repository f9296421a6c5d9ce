"""What the project promises users and contributors: examples that work, one version, valid files, a public API that stays."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import normscope as ns
from helpers import public_api

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"(?:^`(?P<path>[\w/.]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def changed(text: str, diff: str) -> str:
    """The text after a diff without line numbers; what it replaces must be there once."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1, f"CONTRIBUTING.md changes what is not there, or there twice:\n{before}"
    return text.replace(before, after)


def apply_examples(folder: Path) -> list[str]:
    """Apply the example changes to a copy of the repository; the tests among their files."""
    path, tests = "", []
    for block in FENCE.finditer((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        path = block["path"] or path
        file = folder / path
        if block["kind"] == "diff":
            file.write_text(changed(file.read_text(encoding="utf-8"), block["body"]), encoding="utf-8")
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["body"], encoding="utf-8")
        if path.startswith("tests/"):
            tests.append(path)
    return tests


def test_the_examples_of_contributing_work(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("test_*", "__pycache__"))
    shutil.copy2(ROOT / "tests" / "test_scheme_references.py", tmp_path / "tests")
    tests = apply_examples(tmp_path)
    assert len(tests) == 4
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = src tests\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not a_model or ssmax", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_all_files_have_the_version() -> None:
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), re.MULTILINE)
    citation = yaml.safe_load(read("CITATION.cff"))
    assert released[0] == (ns.__version__, citation["date-released"])
    assert citation["version"] == ns.__version__
    dates = [date.fromisoformat(day) for _, day in released]
    assert dates == sorted(dates, reverse=True)


def test_the_changelog_has_the_headings_of_keep_a_changelog() -> None:
    headings = set(re.findall(r"^### (.+)$", read("CHANGELOG.md"), re.MULTILINE))
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert "## [Unreleased]" in read("CHANGELOG.md")


def test_the_citation_has_what_its_format_requires_and_the_papers_of_the_readme() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["authors"]
    for paper in citation["references"]:
        assert {"type", "title", "authors", "year", "url"} <= paper.keys()
        assert all("family-names" in author for author in paper["authors"])
    cited = {paper["url"] for paper in citation["references"]}
    assert cited <= set(re.findall(r"https://arxiv\.org/abs/[\d.]+", read("README.md")))
    assert citation["license"] == re.search(r'^license = "(.+)"$', read("pyproject.toml"), re.MULTILINE)[1]  # type: ignore[index]


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_the_files_beside_the_docs_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", read(name)):
        assert "://" in link or (ROOT / link.partition("#")[0]).is_file(), f"{name} links to {link}"


def supported() -> list[str]:
    """The Python versions of the package's classifiers."""
    return re.findall(r"Python :: (3\.\d+)", read("pyproject.toml"))


def test_the_workflow_runs_make_test_on_every_python() -> None:
    workflow = yaml.safe_load(read(".github/workflows/test.yml"))
    assert workflow[True].keys() >= {"push", "pull_request"}  # YAML reads the key on as true
    job = workflow["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == supported()
    assert workflow["env"]["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu")
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        for target in re.findall(r"^make ([\w ]+)", "\n".join(step.get("run", "") for step in job["steps"]), re.MULTILINE):
            for name in target.removesuffix(" PYTHON").split():
                assert re.search(rf"^{name}:", read("Makefile"), re.MULTILINE), f"the Makefile has no target {name}"


FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields: list[dict[str, Any]] = form["body"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes", "markdown"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_hooks_are_tools_of_the_environment() -> None:
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    entries = [hook["entry"].split()[0] for hook in repository["hooks"]]
    assert entries == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]


def test_nothing_public_is_gone() -> None:
    protected = set(public_api.FILE.read_text(encoding="utf-8").split("\n")) - {""}
    gone = protected - set(public_api.public_api())
    assert not gone, f"removed without the steps of docs/deprecation.md: {sorted(gone)}"


def test_the_docs_list_the_public_names() -> None:
    page = read("docs/deprecation.md").split("## What is public")[1].split("\n- the settings")[0]
    listed = set(re.findall(r"`(\w+)`", "\n".join(line.rsplit("|", 2)[0] for line in page.split("\n") if line[:1] == "|")))
    assert listed == set(dir(ns))


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("history")


def test_the_page_of_benchmarks_is_that_of_its_data(history: ModuleType) -> None:
    data = history.read()
    assert history.page(data) == read("docs/results/benchmarks.md"), "run python benchmarks/history.py"
    drawn = data.groupby(history.SERIES).size() >= history.DRAWN
    figure = read("docs/results/figures/benchmarks-history.svg")
    assert figure.count(">measurement</text>") == drawn.sum() > 0
    scripts = set(re.findall(r"benchmarks/\w+\.py", " ".join(data["command"])))
    assert all((ROOT / script).is_file() for script in scripts)


def test_a_measurement_is_appended_and_judged(history: ModuleType) -> None:
    data = history.read()
    given = {"unit": None, "goal": None, "machine": None, "note": "", "high": None}
    new = Namespace(command="make test", quantity="time of the tests", low=15.5, **given)
    longer = history.add(data, new)
    last = longer.iloc[-1]
    assert (last["goal"], last["machine"], last["version"]) == ("≤ 15", "two CPU cores", ns.__version__)
    assert history.is_met(last) is False
    assert "15.5 min" in history.page(longer).split("## Over time")[0]  # among the goals that are missed
    with pytest.raises(SystemExit, match="machine"):
        history.add(data, Namespace(command="make test", quantity="another", low=1.0, **given))
