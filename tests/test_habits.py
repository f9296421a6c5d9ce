"""What the project promises contributors: the examples of CONTRIBUTING.md work as printed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
