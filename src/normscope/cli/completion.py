"""What a shell offers when a user presses Tab: commands, options, schemes, models, run folders.

The options of experiments come from ``completions.json``, which is generated from their settings, so that completing a line
imports none of their files.
"""

import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from importlib.resources import files
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from normscope.cli import COMPLETE
from normscope.cli.commands import app
from normscope.cli.values import completing

INDEX = "completions.json"
_BREAKS = ":="  # bash splits words at these, and completes only what follows the last of them
_UNSAFE = re.compile(r"([^\w@%+=:,./~-])")  # in a file's name, for bash


def complete() -> None:
    """Print what could come next, as typer's script for a shell reads it; the words so far are in the environment."""
    bash = os.environ[COMPLETE] == "complete_bash"
    words = _bash_words() if bash else os.environ.get("_TYPER_COMPLETE_ARGS", "").split()
    wanted = next((word for word in words[1:] if not word.startswith("-")), "")
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            typer.main.get_command(app(wanted, _indexed)).main([], prog_name="normscope")
    finally:  # typer leaves by SystemExit
        text = printed.getvalue()
        sys.stdout.write(_for_bash(text, words[-1]) if bash else text)


def _indexed(name: str) -> Any:
    """The function of an experiment's command with the parameters in the index; it does nothing."""
    index = json.loads(files("normscope.cli").joinpath(INDEX).read_text(encoding="utf-8"))

    def command(**given: Any) -> None:
        """Completes only."""

    parameters = [_parameter(**record) for record in index[name]]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, flags: str, several: bool, help: str, complete: str | list[str] | bool) -> Parameter:
    """A parameter of a command: an argument has no flags, and what is completed by True is a switch."""
    switch = complete is True
    about: dict[str, Any] = {"help": help}
    if complete and not switch:
        about["autocompletion"] = completing(complete)  # type: ignore[arg-type]
    marked = typer.Option(flags, **about) if flags else typer.Argument(**about)
    kind: Any = bool if switch else list[str] if several else str
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, marked])


def _bash_words() -> list[str]:
    """The words up to the cursor, where those that bash split at colons and equals signs are one again; typer gets them too."""
    given, at = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    words: list[str] = []
    glued = False
    for word in [*given, ""][: at + 1]:
        breaks = bool(word) and not word.strip(_BREAKS)
        if words and (breaks or glued):
            words[-1] += word
        else:
            words.append(word)
        glued = breaks
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(words), str(len(words) - 1)
    return words


def _for_bash(text: str, current: str) -> str:
    """Completions without what bash has already, the current word up to its last colon, and with special characters escaped."""
    begun = current[: current.rfind(":") + 1]
    return "".join(_UNSAFE.sub(r"\\\1", line.removeprefix(begun)) + "\n" for line in text.splitlines())
