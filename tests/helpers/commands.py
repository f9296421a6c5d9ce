"""Commands that the documentation prints: parsed by the command line, and their settings validated, without running them."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from helpers.docs import ROOT
from normscope.cli.commands import app
from normscope.errors import InputError
from normscope.experiments import kind_of, summaries
from normscope.report.write import chosen_formats
from normscope.schemes import find_scheme

_PROGRAMS = re.compile(r"^(\$ )?([A-Z_]+=\S* +)*(\.venv/bin/)?(normscope|python|make|pip|torchrun|ray|cd|git) ")
_COMMON = ("ctx", "out", "overwrite", "format", "json")
_PLACEHOLDER = re.compile(r"^[A-Z][A-Z_-]*$|^\.\.\.$|^…$")
_ABSENT = re.compile(r"there is no file or folder|does not exist|is no folder|no tokenizer|no model named|cannot be found")
_INCOMPLETE = re.compile(r"^Missing parameter|requires an argument|^give either|needs \w+=$")
_TEXT = "To kill two birds with one stone. " * 40
_STAND_INS = {
    "sweep": 'kind = "simulate"\n[grid]\nbeta = [1.0]\n',
    "train": 'scheme = "pre"\n',
    "": 'name = "mine"\n[attention]\ninput = "norm"\n',
}  # what a .toml file holds that a command reads: a plan, a recipe, or a scheme


def commands_in(text: str) -> list[list[str]]:
    """The commands of a shell's text as words: without prompts, comments, redirections, and output."""
    found: list[list[str]] = []
    for line in filter(_PROGRAMS.match, re.sub(r"\\\n", " ", text).splitlines()):
        words = shlex.split(line.removeprefix("$ "), comments=True)
        part: list[str] = []
        for word in [*words, ";"]:
            if word in (";", "&&", "|", ">", ">>", "&") or word.endswith(";"):
                part += [word[:-1]] if word.endswith(";") and word != ";" else []
                found += [part] if part else []
                part = []
                if word in (">", ">>"):
                    break
            else:
                part.append(word)
    return found


def check(words: list[str], sentence: bool = False) -> None:
    """A command of normscope, Python, make or pip exists and takes what it is given; others are not known here.

    In a sentence a command may lack what it needs: ``normscope train --task text`` names an option.
    """
    while words and re.match(r"^\w+=", words[0]):  # variables
        words = words[1:]
    words = words[words.index("normscope") :] if words[:1] in (["torchrun"], ["sudo"]) and "normscope" in words else words
    words = ["normscope", *words[3:]] if words[:3] == ["python", "-m", "normscope"] else words
    match words:
        case ["normscope" | ".venv/bin/normscope", *given]:
            _check_normscope(given, sentence)
        case ["python", script, *given] if script.startswith(("benchmarks/", "examples/", "tools/", "tests/")):
            source = (ROOT / script).read_text(encoding="utf-8")
            options = {word.partition("=")[0] for word in given if word.startswith("--")}
            missing = sorted(option for option in options if f'"{option}"' not in source)
            assert not missing, f"{script} has no option {', '.join(missing)}"
        case ["make", *targets]:
            rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            assert {target for target in targets if "=" not in target} <= set(rules), f"make has no target of {targets}"
        case ["pip", "install", *given]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
            asked = [name for word in given for name in re.findall(r"^(?:normscope|\.)\[([^\]]*)\]", word)]
            unknown = {extra for names in asked for extra in names.split(",")} - set(extras)
            assert not unknown, f"normscope has no extra {', '.join(sorted(unknown))}"


def _check_normscope(given: list[str], sentence: bool) -> None:
    if not given or given[0].startswith("-"):
        return
    name, arguments = given[0], [word for word in given[1:] if not re.match(r"^\[|.*\]$", word)]
    command = _command(name)
    if not arguments:
        return  # the name of a command in a sentence
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    kept: list[str] = []
    placeholder = False
    for word in arguments:
        option = word.partition("=")[0]
        assert not option.startswith("--") or option in {*options, "--help", "--debug"}, f"{name} has no option {option}"
        if _PLACEHOLDER.match(word):
            placeholder = True
            if kept and kept[-1] in options:
                kept.pop()
            continue
        kept.append(word)
    kept = [word for word in kept if word not in ("--debug", "--help", "-h")]
    if not placeholder and kept:
        _validate(name, command, kept, sentence)


@cache
def _command(name: str) -> Any:
    """The command of that name, with its options."""
    commands = typer.main.get_command(app(name)).commands  # type: ignore[attr-defined]
    assert name in commands, f"there is no command {name}"
    return commands[name]


def _validate(name: str, command: Any, arguments: list[str], sentence: bool) -> None:
    words = pairwise(["", *arguments])
    made = [file for option, word in words for file in _stand_ins("" if option.startswith("--scheme") else name, word)]
    try:
        _construct(name, command.make_context(name, list(arguments)).params)
    except Exception as error:
        if not _is_missing(error, arguments) and not (sentence and _INCOMPLETE.search(str(error))):
            raise
    finally:
        for file in made:
            file.unlink()


def _construct(name: str, values: dict[str, Any]) -> None:
    if values.get("format"):
        chosen_formats(values["format"])
    if name == "schemes":
        for scheme in values["names"] or ():
            find_scheme(scheme)
    if name in summaries():
        given = {key: value for key, value in values.items() if key not in _COMMON and value not in (None, [], ())}
        kind_of(name)(**given | ({"device": "cpu"} if "device" in given else {}))  # a reader may have another


def _is_missing(error: BaseException | None, arguments: list[str]) -> bool:
    """Whether an error comes from a model or run folder of the reader's that is not here."""
    paths = [word.removeprefix("./").rstrip("/") for argument in arguments for word in argument.split("=")]
    absent = [path for path in paths if path and not Path(path).exists()]
    while error is not None:
        if isinstance(error, InputError) and _ABSENT.search(str(error)) and any(f"{path}'" in str(error) for path in absent):
            return True
        error = error.__cause__ or error.__context__
    return False


def _stand_ins(name: str, word: str) -> Iterator[Path]:
    """Files that a reader has and the page's folder lacks, written here."""
    for path in map(Path, word.split(",")):
        content = _STAND_INS.get(name, _STAND_INS[""]) if path.suffix == ".toml" else _TEXT if path.suffix == ".txt" else ""
        if content and not path.is_absolute() and not path.exists() and "=" not in word:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
            yield path
