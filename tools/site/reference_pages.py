"""Reference pages made from the code: of every command, from what --help prints, and of every function of an experiment."""

import inspect
import re
import textwrap
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

import normscope
from normscope.cli import overview
from normscope.cli.commands import app
from normscope.experiments import kind_of, summaries
from normscope.experiments.functions import function_of

if TYPE_CHECKING:
    from normscope.experiments.experiment import Experiment

_LIMITS = re.compile(r"^(.*?)\s*\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]$", re.DOTALL)  # "What it is.  [default: 3; x>=1]"
_COMMON = (
    ("`progress`", "`bool`", "`True`", "Whether to show progress."),
    ("`out`", "`Path`", "", "A run folder to save the result in; a resumable experiment resumes there."),
    ("`overwrite`", "`bool`", "`False`", "Whether to replace that folder."),
)  # what all functions take


def commands() -> dict[str, TyperCommand]:
    """All commands of the command line, with their options."""
    group = typer.main.get_command(app())
    assert isinstance(group, TyperGroup)
    return {name: command for name, command in group.commands.items() if isinstance(command, TyperCommand)}


def functions() -> dict[str, str]:
    """The public functions of experiments, and the experiment of each."""
    named = {name: getattr(getattr(normscope, name), "__name__", "") for name in dir(normscope)}
    return {name: one for one in summaries() for name, other in named.items() if other == one}


def command_page(name: str, command: TyperCommand, pages: Collection[str]) -> str:
    """The page of a command; ``pages`` are those that it may link to."""
    context = command.context_class(command, info_name=f"normscope {name}")
    usage = " ".join(["normscope", name, *command.collect_usage_pieces(context)])
    own = [f"reference/functions/{function}.md" for function, other in functions().items() if other == name]
    params = command.get_params(context)
    groups: dict[str, list[Any]] = {
        "Arguments": [param for param in params if isinstance(param, TyperArgument)],
        "Options": [param for param in params if not isinstance(param, TyperArgument)],
    }
    return _joined(
        f"# normscope {name}",
        _prose(command.help or ""),
        f"```text\n{usage}\n```",
        _see_also(pages, f"{name}.md", *own),
        _examples(command.epilog or ""),
        *(
            f"## {title}\n\n"
            + _table((title[:-1].lower(), "what it does", "default, range"), (_row(one, context) for one in group))
            for title, group in groups.items()
            if group
        ),
    )


def command_list() -> str:
    """Tables of all commands by purpose, each with its most used example."""
    listed = overview.commands().items()
    heads = ("command", "what it does", "example")
    rows = {
        purpose: [
            (f"[`{name}`](commands/{name}.md)", _cell(entry.summary), _code(entry.example))
            for name, entry in listed
            if entry.purpose == purpose
        ]
        for purpose in overview.PURPOSES
    }
    return _joined(*(f"### {purpose}\n\n{_table(heads, lines)}" for purpose, lines in rows.items()))


def function_page(name: str, pages: Collection[str]) -> str:
    """The page of the Python function of an experiment; ``pages`` are those that it may link to."""
    command = functions()[name]
    kind = kind_of(command)
    about, _, example = inspect.cleandoc(kind.__doc__ or "").partition("\nExample:\n")
    given = ", ".join(map(_parameter, inspect.signature(function_of(command)).parameters.values()))
    signature = textwrap.indent(textwrap.fill(given, 88), "    ")
    return _joined(
        f"# ns.{name}",
        _prose(about),
        f"```python\nns.{name}(\n{signature}\n) -> Result\n```",
        _see_also(pages, f"{command}.md", f"reference/commands/{command}.md"),
        f"## Example\n\n```pycon\n{inspect.cleandoc(example)}\n```" if example else "",
        "## Settings\n\n" + _settings(kind),
        _figures(kind),
    )


def function_list() -> str:
    """A table of all functions of experiments with their summaries."""
    named = functions().items()
    return _table(
        ("function", "what it does"), ((f"[`ns.{name}`](functions/{name}.md)", summaries()[one]) for name, one in named)
    )


def _settings(kind: "type[Experiment]") -> str:
    rows = (
        (_code(name), _code(_type(field.annotation)), _default(field), _cell(field.description or ""))
        for name, field in kind.fields().items()
    )
    return _table(("setting", "type", "default", "what it is"), (*rows, *_COMMON))


def _figures(kind: "type[Experiment]") -> str:
    """The tables and figures that an experiment declares for comparisons."""
    rows = [(_code(one.table), _code(one.name), _cell(one.caption or one.title)) for one in kind.quantities]
    text = (
        "What [comparisons](../../compare.md) use: a table of the [Result](../results.md) and its figure, `result.plot(NAME)`."
    )
    return f"## Tables and figures\n\n{text}\n\n{_table(('table', 'figure', 'shows'), rows)}" if rows else ""


def _see_also(pages: Collection[str], *wanted: str) -> str:
    """A line with those of the wanted pages that there are, for a page two folders below them."""
    names = {"functions": "the Python function", "commands": "the command", "": "in depth"}
    there = [(names[path.rpartition("/")[0].rpartition("/")[2]], path) for path in wanted if path in pages]
    return f"See also: {', '.join(f'[{name}](../../{path})' for name, path in there)}." if there else ""


def _examples(epilog: str) -> str:
    """The examples at the end of a help text; what stands in brackets behind one becomes a comment."""
    lines = inspect.cleandoc(epilog.replace("\b", "")).partition("Examples:\n")[2]
    commented = re.sub(r"\s{2,}\((.*)\)$", r"  # \1", inspect.cleandoc(lines), flags=re.MULTILINE)
    return f"## Examples\n\n```bash\n{commented}\n```" if lines else ""


def _row(param: Any, context: Any) -> tuple[str, str, str]:
    names, text = param.get_help_record(context)
    found = _LIMITS.match(text)
    text, limits = found.groups() if found else (text, "")
    return _code(names), _cell(text), _cell(limits.removeprefix("default: "))


def _parameter(parameter: inspect.Parameter) -> str:
    star = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else ""
    return f"{star}{parameter.name}" + ("" if parameter.default is parameter.empty else f"={parameter.default!r}")


def _type(annotation: Any) -> str:
    """A type as people write it: without modules and validators."""
    text = inspect.formatannotation(annotation)
    text = re.sub(r"Annotated\[(.+?), \w*\(?[\w.]*(?:Validator|FieldInfo|Field)\(.*\)\]", r"\1", text)
    return re.sub(r"\b(?:\w+\.)+(?=[A-Za-z])", "", text)


def _default(field: Any) -> str:
    shown = field.json_schema_extra.get("shown") if isinstance(field.json_schema_extra, dict) else None
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return _cell(shown) if shown else "" if default is None else _code(repr(default))


def _prose(text: str) -> str:
    """A docstring as Markdown."""
    return re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(text))


def _cell(text: str) -> str:
    return " ".join(re.sub(r"([|<*_])", r"\\\1", _prose(text)).split())


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _table(heads: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads), ["---" for _ in heads], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _joined(*parts: str) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"
