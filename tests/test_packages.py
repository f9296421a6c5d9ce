"""The table of packages in docs/design.md is exact: each package imports those that it names, and they stand above it."""

import ast
import re
from pathlib import Path

import pytest

import normscope

ROOT = Path(normscope.__file__).parent
DESIGN = Path(__file__).parent.parent / "docs" / "design.md"
OPEN_TO_ALL = {"errors", "__version__"}
NO_PACKAGES = {"__init__", "__main__", "__pycache__", "py", "errors"}


def table() -> dict[str, set[str]]:
    """Package → packages that it uses, in the order of the table."""
    section = DESIGN.read_text(encoding="utf-8").split("## Packages")[1].split("\n## ")[0]
    packages: dict[str, set[str]] = {}
    for package, uses in re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", section, re.MULTILINE):
        above = set(packages)
        packages[package] = above if uses == "everything above" else set(re.findall(r"\w+", uses)) - {"nothing"}
    return packages


def imports_of(package: str) -> dict[str, str]:
    """Other packages that a package imports, each with a file that does so."""
    found = {}
    for path in (*ROOT.glob(f"{package}.py"), *ROOT.glob(f"{package}/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: relative import"
                whole = node.module == "normscope"
                names = [f"normscope.{alias.name}" for alias in node.names] if whole else [node.module or ""]
            for name in names:
                if name.startswith("normscope."):
                    found[name.split(".")[1]] = path.name
    return {name: file for name, file in found.items() if name not in {package, *OPEN_TO_ALL}}


def existing() -> list[str]:
    return sorted({path.stem for path in ROOT.iterdir() if path.is_dir() or path.suffix == ".py"} - NO_PACKAGES)


@pytest.mark.parametrize("package", existing())
def test_a_package_imports_what_the_table_says(package: str) -> None:
    packages, imports = table(), imports_of(package)
    assert package in packages, f"'{package}' is not in the table of packages"
    assert imports.keys() <= packages[package], {name: imports[name] for name in imports.keys() - packages[package]}
    if package != "experiments":  # "everything above" is a permission
        assert packages[package] <= imports.keys(), f"{package} does not import {packages[package] - imports.keys()}"


def test_packages_only_use_those_above_them() -> None:
    seen: set[str] = set()
    for package, uses in table().items():
        assert uses <= seen, f"{package} uses {uses - seen}, which stand below it"
        seen.add(package)
    assert seen == set(existing())


def test_only_the_command_line_prints() -> None:
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] == "cli":
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls), path
