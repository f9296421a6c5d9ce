"""No input of a command line ends in a traceback, a hang, a full memory or a stray file (docs/reliability.md)."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.fuzz import Case, cases, options, try_case
from helpers.hostile import write_files


@pytest.fixture(scope="session")
def hostile_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "files"
    write_files(folder)
    return folder


@pytest.fixture
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No case asks a hub, and measured tables stay in a cache of the tests."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "fuzz-cache"))


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "sandbox"
    shutil.rmtree(tmp_path)


@pytest.mark.usefixtures("offline")
def test_an_outcome_is_a_result_or_one_line(case: Case, hostile_files: Path, sandbox: Path) -> None:
    problem = try_case(case, hostile_files, sandbox)
    assert problem is None, f"{case}\n{problem}"


def test_every_option_of_every_command_has_cases() -> None:
    every, made = options(), cases()
    assert len(made) > 3000  # as docs/reliability.md states
    assert len({case.name for case in made}) == len(made)
    for command in every.values():
        for option in command:
            label = f"{option.command} {option.name} "
            assert sum(case.name.startswith(label) for case in made) >= 3, label


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise ValueError('a bug')", "exit status ValueError"),
        ("while True: pass", "s of work"),
        ("bytearray(1 << 33)", "memory ran out"),
        ("open('left', 'w')", "it left"),
        ("print('{}'); raise SystemExit(0)", "no list"),
        ("print('[NaN]'); raise SystemExit(0)", "NaN in it"),
        ("import sys; sys.stderr.write('Traceback')", "a traceback"),
        ("input()", "reads standard input"),
        ("import os; os.unlink('holds/keep.txt')", "removed"),
        ("from normscope.errors import InputError; raise InputError('\\x1b')", None),
    ],
)
@pytest.mark.usefixtures("offline")
def test_the_fuzzer_sees_what_it_looks_for(
    code: str, problem: str | None, hostile_files: Path, sandbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normscope.cli import schemes

    monkeypatch.setattr("helpers.fuzz.SECONDS", 0.2)
    monkeypatch.setattr(schemes, "print_json", lambda records: exec(code, {}) or print("[]"))
    found = try_case(Case("planted", ("schemes", "--json")), hostile_files, sandbox)
    assert (found is None) if problem is None else (found is not None and problem in found), found
