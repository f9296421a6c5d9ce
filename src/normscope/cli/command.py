"""A command from an experiment: options from its settings, then run, save, print."""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer

from normscope.cli.output import (
    FormatOption,
    GalleryOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    console,
    echo,
    print_folder,
    print_json,
    print_table,
    say,
)
from normscope.errors import InputError
from normscope.machine.interrupts import Terminated
from normscope.results.sections import PageTable

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from normscope.experiments.experiment import Experiment
    from normscope.experiments.result import Result

_NO_EXTRA: dict[str, Any] = {"shown": None, "argument": False, "option": None, "several": False}
_PLAIN = (bool, int, float, str, Path)


def command_of(kind: "type[Experiment]") -> Callable[..., None]:
    """The function that typer makes a command of."""

    def command(ctx: typer.Context, out: Path | None, format: str, json: bool, overwrite: bool = False, **given: Any) -> None:
        try:
            experiment = kind(**{name: value for name, value in given.items() if value is not None})
            done = experiment.begin(ctx.obj)
            if isinstance(done, str):
                echo(done)
            elif done is not None:
                raise typer.Exit(done)
            else:
                run(experiment, out, overwrite, format, json)
        except InputError as error:
            raise type(error)(with_options(str(error), kind)) from error

    parameters = [_parameter(name, field, kind) for name, field in kind.fields().items()]
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, default, annotation in (
            ("out", None, GalleryOption if kind.grows else OutOption),
            ("overwrite", False, OverwriteOption),
            ("format", "html", FormatOption),
            ("json", False, JsonOption),
        )
        if not (kind.grows and name == "overwrite")
    ]
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    command.__signature__ = inspect.Signature([context, *parameters, *common])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (context, *parameters, *common)}
    command.__name__ = kind.command
    command.__doc__ = _help(kind)
    return command


def run(experiment: "Experiment", out: Path | None, overwrite: bool, format: str, json: bool) -> None:
    """Run an experiment into a folder and print what came out."""
    from normscope.experiments import execute
    from normscope.experiments.progress import progress_bar
    from normscope.report.write import chosen_formats

    formats = chosen_formats(format)
    folder = out or (experiment.default_folder() if experiment.saved else None)
    left = f"; the same command with --out {folder} resumes from what is saved" * (experiment.resumable and folder is not None)
    try:
        with progress_bar(lambda text: with_options(text, type(experiment))) as bar:
            result = execute(experiment, folder, overwrite=overwrite, formats=formats, progress=bar)
        left = f"; the result is in {folder}" * (folder is not None)
        for problem in result.problems:
            say(f"incomplete: {with_options(problem, result.kind)}")
        if json:
            print_json(result.records)
        else:
            show(result)
    except (KeyboardInterrupt, Terminated) as error:
        say(("interrupted" if isinstance(error, KeyboardInterrupt) else "terminated") + left)
        raise
    code = 1 if result.problems else result.kind.exit_code(result)
    if code:
        raise typer.Exit(code)


def show(result: "Result") -> None:
    """Print a result for people, and where its page is."""
    from normscope.experiments.experiment import Message

    for shown in result.kind.terminal(result):
        if isinstance(shown, str):
            echo(f"{with_options(shown, result.kind) if isinstance(shown, Message) else shown}\n")
        elif isinstance(shown, PageTable):
            print_table(shown.columns, shown.rows, title=shown.caption or None)
        else:
            console().print(shown, soft_wrap=True)
    if result.path is not None:
        print_folder(result.path)


def with_options(message: str, kind: "type[Experiment]") -> str:
    """A message of the library, with its parameters as options: ``layers=True`` is ``--layers``, ``time=3`` ``--time 3``."""
    extras = dict.fromkeys(("out", "overwrite"), _NO_EXTRA) | {name: _extra(field) for name, field in kind.fields().items()}
    options = {name: extra["option"] or f"--{name.replace('_', '-')}" for name, extra in extras.items()}
    return translated(message, {name: "" if extras[name]["argument"] else option for name, option in options.items()})


def translated(message: str, options: Mapping[str, str]) -> str:
    """A message whose parameters are options of those names; an argument has none."""
    for name, flags in options.items():
        if flags:
            option = flags.partition("/")[0]
            message = re.sub(rf"^{name}:", f"{option}:", message)
            message = re.sub(rf"\b{name}=True\b", option, message)
            message = re.sub(rf"\b{name}=(?=[^\s,;:)])", f"{option} ", message)
            message = re.sub(rf"\b{name}=", option, message)
        else:
            message = re.sub(rf"^{name}:", f"{name.upper()}:", message)
            message = re.sub(rf"\b{name}=", f"{name.upper()} ", message)
    return message


def _parameter(name: str, field: "FieldInfo", kind: "type[Experiment]") -> inspect.Parameter:
    extra, plain = _extra(field), _plain_type(field.annotation)
    default = ... if field.is_required() else _default(field, plain)
    shown: Any = (extra["shown"] or False) if extra["shown"] is not None else (default is not None)
    about: dict[str, Any] = {
        "help": with_options(field.description or "", kind),
        "show_default": False if default is ... else with_options(shown, kind) if isinstance(shown, str) else shown,
        **_limits(field, plain),
    }
    if extra["argument"]:
        marked: Any = typer.Argument(**about)
    elif extra["option"] or plain is bool:
        marked = typer.Option(extra["option"] or f"--{name.replace('_', '-')}", **about)
    else:
        marked = typer.Option(**about)
    several = name == kind.variadic or extra["several"]
    default = None if several and default is not ... else default
    annotation = list[str] if several else plain
    optional = annotation if default is ... or (plain is bool and default is not None) else annotation | None
    given = {} if default is ... else {"default": default}
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[optional, marked], **given)


def _plain_type(annotation: Any) -> Any:
    """The type that a command line can hold: of ``int | None`` int, of anything that is written as text str."""
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return _plain_type(kinds[0]) if len(kinds) == 1 else str
    return annotation if annotation in _PLAIN else str


def _default(field: "FieldInfo", plain: Any) -> Any:
    default = field.get_default(call_default_factory=True)
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return default if isinstance(default, _PLAIN) or default is None else str(default)


def _limits(field: "FieldInfo", plain: Any) -> dict[str, Any]:
    """Least and greatest value, for numbers."""
    names = {"ge": "min", "le": "max"}
    bounds = ((own, getattr(limit, name, None)) for limit in field.metadata for name, own in names.items())
    return {own: plain(bound) for own, bound in bounds if bound is not None} if plain in (int, float) else {}


def _extra(field: "FieldInfo") -> dict[str, Any]:
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else _NO_EXTRA


def _help(kind: "type[Experiment]") -> str:
    """The docstring without its example."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\nExample:")[0].strip()
