"""Shell completion, by the protocol of typer's scripts: what bash, zsh and fish ask for, and what they get."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from normscope.cli.values import _PARTS, completing
from normscope.schemes import NAMED, find_scheme

PROGRAM = '#!/bin/sh\nexec "{python}" -c "from normscope.cli import main; main()" "$@"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program normscope, a model, a run, a scheme file, and a home with a model of the hub."""
    place = tmp_path_factory.mktemp("shell")
    program = place / "bin" / "normscope"
    for file in ("my model/config.json", "runs/audit/run.json", "runs/gpt/run.json", "mine.toml"):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text("")
    (place / "home/.cache/huggingface/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots").mkdir(parents=True)
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return place


def environment(folder: Path) -> dict[str, str]:
    home = {"HOME": str(folder / "home"), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    return {**{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}, **home}


BASH = r"""
eval "$(_NORMSCOPE_COMPLETE=source_bash normscope)"
while IFS= read -r line; do
    COMP_WORDS=(); IFS=$'\t' read -r -a COMP_WORDS <<< "$line"
    [ "${line: -1}" = $'\t' ] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _normscope_completion normscope
    ( IFS=$'\t'; echo "${COMPREPLY[*]}" )
done
"""


def test_bash_completes_what_a_user_types(folder: Path) -> None:
    """The script that --install-completion installs, called as bash calls it: words are split at colons and equals signs."""
    expected = {
        ("simulate", "--sch"): ["--scheme"],
        ("simulate", "--scheme", "pre,pe"): ["pre,peri"],
        ("simulate", "--scheme", "=", "ngpt-"): ["ngpt-lerp"],
        ("train", "--scheme", "peri+qk"): ["peri+qk", "peri+qkv"],
        ("schemes", "min"): ["minimax", "mine.toml"],
        ("audit", "builtin", ":", "addition-small-q"): ["addition-small-qkv"],
        ("audit", "builtin", ":"): ["addition-small-pre", "addition-small-qkv"],
        ("audit", "my"): ["my\\ model"],
        ("audit", "Hu"): ["HuggingFaceTB/SmolLM2-135M"],
        ("compare", "runs/audit", "runs/g"): ["runs/gpt"],
        ("explore", "ru"): ["runs/audit", "runs/gpt"],
        ("audit", "--dtype", "b"): ["bfloat16"],
        ("simulate", "--norm", ""): ["rms", "layer"],
    }
    asked = "".join("\t".join(("normscope", *words)) + "\n" for words in expected)
    done = subprocess.run(
        ["bash", "-c", BASH], input=asked, capture_output=True, text=True, cwd=folder, env=environment(folder), check=True
    )
    assert done.stderr == ""
    assert dict(zip(expected, (line.split("\t") for line in done.stdout.splitlines()), strict=True)) == expected


@pytest.mark.parametrize(
    ("instruction", "printed"),
    [
        ("zsh", '_arguments \'*: :(("builtin\\\\:addition-small-qkv":"comes with normscope"))\''),
        ("fish", "builtin:addition-small-qkv\tcomes with normscope"),
    ],
)
def test_other_shells_get_values_with_what_they_are(folder: Path, instruction: str, printed: str) -> None:
    asked = {
        "_NORMSCOPE_COMPLETE": f"complete_{instruction}",
        "_TYPER_COMPLETE_ARGS": "normscope audit builtin:addition-small-q",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    env = {**environment(folder), **asked}
    done = subprocess.run(["normscope"], capture_output=True, text=True, cwd=folder, env=env, check=True)
    assert done.stdout.strip() == printed


def test_completing_imports_nothing_heavy(folder: Path) -> None:
    code = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps(sorted({'torch', 'transformers', 'pandas', 'numpy'} & set(sys.modules)))))\n"
        "from normscope.cli import main; main()"
    )
    words = "normscope\naudit\n--device\ncpu\nbuiltin"
    asked = {"_NORMSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**environment(folder), **asked},
        check=True,
    )
    *values, heavy = done.stdout.splitlines()
    assert "builtin:addition-small-pre" in values
    assert json.loads(heavy) == []


def test_every_scheme_that_is_offered_exists() -> None:
    for name, title in completing("schemes")("peri+"):
        if not name.endswith(".toml"):
            assert find_scheme(name).name == name, title
    assert {name for name, _ in completing("schemes")("pre,")} >= {f"pre,{name}" for name in NAMED}
    assert all(find_scheme(f"pre+{part}") for part in _PARTS)
