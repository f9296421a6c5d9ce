"""Commands for typer: only the one that is run has its options, so that no other's file is imported."""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer

from normscope.cli.output import examples, say
from normscope.cli.overview import commands, overview
from normscope.errors import InputError
from normscope.experiments import kind_of
from normscope.experiments.headers import entries
from normscope.machine.interrupts import raising_signals


class _Commands(typer.core.TyperGroup):
    """All commands; their help is the overview."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(overview())


def app(wanted: str | None = None, stand_in: Callable[[str], Callable[..., None]] | None = None) -> typer.Typer:
    """All commands by name and summary; only the wanted one has its options. Without a wanted command, all have.

    ``stand_in`` gives the function for an experiment's command by its name, in place of the one that runs it.
    """
    made = typer.Typer(
        name="normscope",
        cls=_Commands,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(options)
    for name, entry in commands().items():
        if wanted not in (None, name):
            made.command(name, help=entry.summary)(_listed_only)
        elif name in entries("cli"):
            module = import_module(entry.module)
            made.command(name, epilog=module.EXAMPLES)(getattr(module, name))
        elif stand_in is not None:
            made.command(name, help=entry.summary)(stand_in(name))
        else:
            from normscope.cli.command import command_of

            kind = kind_of(name)
            made.command(name, epilog=examples(*kind.usage))(command_of(kind))
    return made


def _listed_only() -> None:
    """Takes the place of a command that is only listed."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from normscope import __version__

        typer.echo(f"normscope {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (allowed anywhere).")] = False,
) -> None:
    """What normalization does to a transformer's geometry."""


def run(given: list[str], debug: bool) -> Any:
    """Run the command that the arguments ask for; what typer returns is an exit status, or nothing."""
    warnings.showwarning = lambda message, *where: say(f"normscope: WARNING: {message}")
    for argument in given:
        if not argument.isascii() and not argument.encode("utf-8", "ignore").decode() == argument:
            raise InputError(f"an argument is text in UTF-8, which '{argument}' is not; rename the file if it is one")
    wanted = next((argument for argument in given if not argument.startswith("-")), "")
    with raising_signals():
        return typer.main.get_command(app(wanted)).main(
            given, prog_name="normscope", standalone_mode=False, obj=given + ["--debug"] * debug
        )
