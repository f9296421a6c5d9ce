"""The command line: a command for every experiment, one for the table of schemes, and one for the explorer."""

import os
import signal
import sys
import warnings
from importlib import import_module
from typing import Annotated

import typer

from normscope.cli.output import examples, say
from normscope.errors import InputError
from normscope.experiments import kind_of, summaries
from normscope.machine.files import is_disk_full
from normscope.machine.interrupts import raising_signals

OTHERS = {
    "schemes": "Show all schemes (norm placements), or some of them in full.",
    "explore": "Explore schemes, models and runs in a browser.",
}  # commands that are no experiments; each is a function of that name in a module of that name


def app(wanted: str | None = None) -> typer.Typer:
    """All commands by name and summary; only the wanted one has its options, so that no other's file is imported.

    Without a wanted command, as for shell completion, all have their options.
    """
    commands = typer.Typer(
        name="normscope",
        help="What normalization does to a transformer's geometry: in theory, in simulation, in training, and in the "
        "models people already have. A scheme is where a block puts its norms, and how it scales branch and residual.",
        epilog=examples("normscope audit", "normscope schemes peri", "normscope demo"),
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    commands.callback()(options)
    for name, summary in OTHERS.items():
        if wanted in (None, name):
            module = import_module(f"normscope.cli.{name}")
            commands.command(name, epilog=module.EXAMPLES)(getattr(module, name))
        else:
            commands.command(name, help=summary)(_not_wanted)
    for name, summary in summaries().items():
        if wanted in (None, name):
            from normscope.cli.command import command_of

            kind = kind_of(name)
            commands.command(name, epilog=examples(*kind.usage))(command_of(kind))
        else:
            commands.command(name, help=summary)(_not_wanted)
    return commands


def _not_wanted() -> None:
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


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a mistake of the user's becomes one line on stderr and exit status 2. A bug of ours is a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"] or ["--help"]
    completing = any(name.endswith("_COMPLETE") for name in os.environ)
    wanted = None if completing else next((argument for argument in given if not argument.startswith("-")), "")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    warnings.showwarning = lambda message, *where: say(f"normscope: WARNING: {message}")
    try:
        for argument in given:
            if not argument.isascii() and not argument.encode("utf-8", "ignore").decode() == argument:
                raise InputError(f"an argument is text in UTF-8, which '{argument}' is not; rename the file if it is one")
        with raising_signals():
            status = typer.main.get_command(app(wanted)).main(
                given, prog_name="normscope", standalone_mode=False, obj=given + ["--debug"] * debug
            )
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        explained = None if debug else _explained(error)
        if explained is None:
            raise
        if is_disk_full(error) and not isinstance(error, InputError):  # what is printed goes into a file, which could not grow
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        message, status = explained
        if message.strip():
            say(f"normscope: {message}")
        sys.exit(status)
    sys.exit(status if isinstance(status, int) else 0)


def _explained(error: Exception) -> tuple[str, int] | None:
    """The message and the exit status of a user's mistake (2) or a failure of the machine; None for a bug of ours."""
    usage_message = getattr(error, "format_message", None)  # typer's own errors: unknown option, wrong type, ...
    if isinstance(error, InputError):
        return str(error), 2
    if usage_message is not None:
        return usage_message(), 2
    if isinstance(error, ConnectionError):  # a process of a training that is gone
        return str(error), 1
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 2
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's, for a GPU
        return f"out of memory: {str(error) or 'nothing more can be allocated'}", 1
    return None
