"""Reference pages made from the code: a page for every command, from what --help prints, and for every function of an experiment."""

import inspect
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

import normscope
from normscope.cli import app
from normscope.experiments import function_of, kind_of, summaries

_CONSTRAINT = re.compile(r"^(.*?)\s*\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]$", re.DOTALL)


def commands() -> dict[str, TyperCommand]:
    """All commands of the command line, with their options."""
    group = typer.main.get_command(app())
    assert isinstance(group, TyperGroup)
    return {name: command for name, command in group.commands.items() if isinstance(command, TyperCommand)}


def functions() -> dict[str, str]:
    """The public functions of experiments, and the experiment of each."""
    names = {command.replace("-", "_"): command for command in summaries()} | normscope._EXPERIMENTS
    return {name: command for name, command in names.items() if name not in normscope._NAMES}


def command_page(name: str, command: TyperCommand, pages: Collection[str]) -> str:
    """The page of a command; ``pages`` are those that it may link to."""
    context = command.context_class(command, info_name=f"normscope {name}")
    usage = " ".join(["normscope", name, *command.collect_usage_pieces(context)])
    arguments = [param for param in command.params if isinstance(param, TyperArgument)]
    options = [param for param in command.get_params(context) if not isinstance(param, TyperArgument)]
    parts = [
        f"# normscope {name}",
        _prose(command.help or ""),
        f"```text\n{usage}\n```",
        *_see_also(pages, f"{name}.md", *(f"reference/functions/{one}.md" for one, other in functions().items() if other == name)),
        *_examples(command.epilog or ""),
    ]
    for heading, params in (("Arguments", arguments), ("Options", options)):
        if params:
            rows = (_option_row(param, context) for param in params)
            parts += [f"## {heading}", _table((heading[:-1].lower(), "what it does", "default, range"), rows)]
    return "\n\n".join(parts) + "\n"


def command_list() -> str:
    """A table of all commands with their summaries."""
    rows = ([f"[`normscope {name}`](commands/{name}.md)", command.get_short_help_str(200)] for name, command in commands().items())
    return _table(("command", "what it does"), rows)


def function_page(name: str, pages: Collection[str]) -> str:
    """The page of the Python function of an experiment; ``pages`` are those that it may link to."""
    command = functions()[name]
    kind, function = kind_of(command), function_of(command)
    about, _, example = inspect.cleandoc(kind.__doc__ or "").partition("\nExample:\n")
    example, attributes = (part.strip("\n") for part in (example.partition("\nAttributes:")[::2]))
    signature = inspect.signature(function)
    fields = kind.fields()
    shown = textwrap.fill(", ".join(map(_parameter, signature.parameters.values())), 88, initial_indent="    ", subsequent_indent="    ")
    rows = [[f"`{each}`", _type(about_field.annotation), _default(about_field), _cell(about_field.description or "")]
            for each, about_field in fields.items()]  # fmt: skip
    common = [
        ["`progress`", "bool", "`True`", "Whether to show progress."],
        ["`out`", "path", "", "A run folder to save the result in" + "; the work resumes there if interrupted." * kind.resumable
         + "." * (not kind.resumable)],
        ["`overwrite`", "bool", "`False`", "Whether to replace that folder."],
    ]  # fmt: skip
    parts = [
        f"# ns.{name}",
        _prose(about),
        f"```python\nns.{name}(\n{shown}\n) -> Result\n```",
        *_see_also(pages, f"{command}.md", f"reference/commands/{command}.md"),
    ]
    if example:
        parts += ["## Example", f"```pycon\n{inspect.cleandoc(example)}\n```"]
    parts += ["## Settings", _table(("setting", "type", "default", "what it is"), [*rows, *common])]
    quantities = [[f"`{one.table}`", f"`{one.name}`", _cell(one.caption or one.title)] for one in kind.quantities]
    if quantities:
        text = 'Tables of the [Result](../results.md), and the figures of them (`result.plot("name")`) by which runs are compared:'
        parts += ["## Tables and figures", text, _table(("table", "figure", "shows"), quantities)]
    return "\n\n".join(parts) + "\n"


def function_list() -> str:
    """A table of all functions of experiments with their summaries."""
    rows = ([f"[`ns.{name}`](functions/{name}.md)", summaries()[command]] for name, command in functions().items())
    return _table(("function", "what it does"), rows)


def _see_also(pages: Collection[str], *wanted: str) -> Iterator[str]:
    """A line with those of the wanted pages that there are, for a page two folders below them."""
    names = {"functions": "the Python function", "commands": "the command", "": "in depth"}
    there = [(names[path.rpartition("/")[0].rpartition("/")[2]], path) for path in wanted if path in pages]
    if there:
        yield f"See also: {', '.join(f'[{name}](../../{path})' for name, path in there)}."


def _examples(epilog: str) -> Iterator[str]:
    """The examples at the end of a help text; what stands in brackets behind one becomes a comment."""
    lines = inspect.cleandoc(epilog.replace("\b", "")).partition("Examples:\n")[2]
    if lines:
        commented = re.sub(r"\s{2,}\((.*)\)$", r"  # \1", inspect.cleandoc(lines), flags=re.MULTILINE)
        yield f"## Examples\n\n```bash\n{commented}\n```"


def _option_row(param: Any, context: typer.Context) -> list[str]:
    names, text = param.get_help_record(context) or (param.make_metavar(context), "")
    found = _CONSTRAINT.match(text)
    text, limits = found.groups() if found else (text, "")
    return [_code(names), _cell(text), _cell(limits.removeprefix("default: ").strip("()"))]


def _parameter(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
    return f"{star}{parameter.name}{default}"


def _type(annotation: Any) -> str:
    text = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
    text = text or re.sub(r"Annotated\[(.*?), (?:Before|After)Validator.*", r"\1", re.sub(r"\btyping\.|\b[a-z_]+\.(?:[a-z_]+\.)*", "", str(annotation)))
    return _code(text) if text else ""


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    shown = (field.json_schema_extra or {}).get("shown") if isinstance(field.json_schema_extra, dict) else None
    if shown:
        return _cell(shown)
    default = field.get_default(call_default_factory=True)
    return "" if default is None else _code(repr(default))


def _prose(text: str) -> str:
    """A docstring as Markdown."""
    return re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(text))


def _cell(text: str) -> str:
    return " ".join(_prose(text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").split())


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
