"""The wheel and the sdist as users get them: what is in them, what works without extras, and what is generated for them."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.clean_environment import environment, make_environment
from helpers.models import GROUPED, built, word_tokenizer
from normscope.machine.installation import EXTRAS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "normscope"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_FOR_USERS = {"all", "dev", "docs", "report"}  # report: its packages come with normscope
MEGABYTE = 1e6


def build(checkout: Path, out: Path, *targets: str) -> None:
    chosen = [argument for target in targets for argument in ("-t", target)]
    subprocess.run([sys.executable, "-m", "hatchling", "build", *chosen, "-d", str(out)], cwd=checkout, check=True)


@contextmanager
def made_once(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder that all processes of the tests share; whoever comes first finds it missing and makes it."""
    from filelock import FileLock

    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with FileLock(f"{folder}.lock"):
        yield folder


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this checkout."""
    with made_once(tmp_path_factory, "dist") as folder:
        if not folder.exists():
            build(ROOT, folder, "wheel", "sdist")
    return folder


@pytest.fixture(scope="session")
def programs(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a clean environment in which the wheel is installed."""
    with made_once(tmp_path_factory, "clean") as folder:
        if not folder.exists():
            make_environment(folder, wheel_in(dist))
    return folder / "bin"


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_has_every_file_of_the_package_and_is_small(dist: Path) -> None:
    wheel = wheel_in(dist)
    assert wheel.stat().st_size < 8 * MEGABYTE
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "."], cwd=SOURCE, capture_output=True, text=True)
    expected = {f"normscope/{name}" for name in listed.stdout.splitlines() if (SOURCE / name).exists()}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert {"normscope/py.typed", "normscope/__init__.pyi", "normscope/cli/completions.json"} <= packed


def test_the_sdist_has_what_builds_the_same_wheel_and_no_more(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    allowed = {"src", "LICENSE", "README.md", "PKG-INFO", "pyproject.toml", "constraints.txt", ".gitignore"}
    assert {path.name for path in unpacked.iterdir()} - {"CHANGELOG.md", "CITATION.cff"} == allowed
    build(unpacked, tmp_path / "again", "wheel")
    assert wheel_in(tmp_path / "again").read_bytes() == wheel_in(dist).read_bytes()


def test_python_versions_and_extras_are_declared_alike() -> None:
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    versions = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if text.startswith("Programming Language")}
    assert {"3.11", "3.12", "3.13"} <= versions
    extras = PROJECT["optional-dependencies"]
    assert extras.keys() - NOT_FOR_USERS == EXTRAS.keys()
    assert extras["all"] == [f"normscope[{','.join(sorted(EXTRAS))}]"]


def clean(programs: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of the clean environment."""
    home.mkdir(exist_ok=True)
    command = [str(programs / arguments[0]), *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment(home), timeout=200, check=False)


def test_the_clean_environment_has_all_that_is_needed_and_no_extra(programs: Path, tmp_path: Path) -> None:
    code = (
        "import normscope, sys\nfrom importlib.util import find_spec\n"
        "print(normscope.__file__)\n"
        "print(*(name for name in ('gguf', 'accelerate', 'umap', 'ray', 'fastapi', 'torchdiffeq') if find_spec(name)))"
    )
    where, extras = clean(programs, tmp_path / "home", "python", "-c", code).stdout.split("\n")[:2]
    assert Path(where).is_relative_to(programs.parent)
    assert extras == ""
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "check"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_commands_that_are_quick_work_without_extras(programs: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert clean(programs, home, "normscope", "--version").stdout == f"normscope {version()}\n"
    assert "r_j·|A_j|" in clean(programs, home, "normscope", "schemes").stdout
    served = clean(programs, home, "normscope", "explore", "--no-open")
    assert served.returncode == 2
    assert served.stderr.splitlines() == [
        "normscope: explore needs fastapi and uvicorn: pip install 'normscope[explorer]'; --export tour.html does not"
    ]


def version() -> str:
    from normscope import __version__

    return __version__


SESSION = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from normscope.cli import main
done = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as left:
            done.append((left.code, out.getvalue(), err.getvalue()))
print(json.dumps(done))
"""


@pytest.mark.slow
def test_commands_that_compute_work_without_extras(programs: Path, tmp_path: Path) -> None:
    """One after the other in one process, since importing torch takes longer than each of them."""
    built("LlamaConfig", GROUPED).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "notes.txt").write_text("the cat sat on the mat and then a dog ran " * 4, encoding="utf-8")
    tiny = ["simulate", "--tokens", "8", "--dim", "8", "--time", "1"]
    commands = [
        [*tiny, "--out", "runs/simulate", "--format", "html,md"],
        ["audit", "../model", "--text", "../notes.txt", "--out", "runs/audit"],
        ["doctor", "--json"],
        [*tiny, "--solver", "dopri5"],
        ["words", "../model", "journey", "the cat sat", "--map", "umap"],
    ]
    session = clean(programs, tmp_path / "home", "python", "-c", SESSION, json.dumps(commands))
    assert session.returncode == 0, session.stderr
    simulate, audit, doctor, solver, umap = json.loads(session.stdout.splitlines()[-1])
    for name, (status, out, err) in {"simulate": simulate, "audit": audit}.items():
        assert status == 0, err
        assert out.endswith(f"runs/{name}/report.html\n")
        assert "<html" in (tmp_path / "home" / "runs" / name / "report.html").read_text(encoding="utf-8")
    check_doctor(json.loads(doctor[1]), tmp_path / "home")
    for (status, out, err), hint in (
        (solver, "needs torchdiffeq; pip install 'normscope[flows]'"),
        (umap, "normscope[words]'"),
    ):
        assert (status, out) == (2, "")
        assert hint in err.splitlines()[-1]


def check_doctor(records: list[dict[str, Any]], home: Path) -> None:
    """What doctor says of the clean environment."""

    def of(about: str) -> dict[str, dict[str, Any]]:
        return {record.get("name", ""): record for record in records if record["about"] == about}

    assert of("normscope")[""]["version"] == version()
    packages = of("package")
    assert packages.keys() >= {"torch", "transformers", "pandas", "altair"}
    assert all(package["fits"] for package in packages.values())
    assert all(extra["missing"] for extra in of("extra").values())
    assert of("extra").keys() == EXTRAS.keys()
    assert of("extra")["words"]["missing"] == ["umap-learn"]
    assert of("extra")["words"]["install"] == "pip install 'normscope[words]'"
    (device,) = (record for record in records if record["about"] == "device")
    assert device["device"] in ("cpu", "cuda")
    assert device["reason"]
    assert of("folder")["cache"]["path"] == str(home / ".cache" / "normscope")
    assert of("folder")["runs"]["exists"]
    assert not of("model")["package:smollm2"]["installed"]


def test_generated_files_are_what_the_settings_say_now() -> None:
    from helpers.generated import COMPLETIONS, STUB, completions, stub

    advice = "settings or help texts have changed: make generated"
    assert stub() == STUB.read_text(encoding="utf-8"), advice
    assert completions() == COMPLETIONS.read_text(encoding="utf-8"), advice
