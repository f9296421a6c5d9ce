"""The command line: one file per command; it parses, calls the library and prints."""

import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from normscope.cli.output import examples
from normscope.errors import InputError
from normscope.experiments import kind_of, summaries

COMMANDS = {
    "schemes": "Show all schemes with their slots and what follows from them, or some of them in full.",
    "simulate": "Integrate schemes from one start: how tokens cluster, grow and slow down.",
    "ensemble": "Mean cosine over time with a 90% band over random starts and weights.",
    "train": "Train a transformer to add integers, and test it within and beyond what it saw.",
    "evaluate": "Accuracy per character with its standard error, by place in the answer, and the rate of exact answers.",
    "stability": "Norm spread, noise sensitivity, circuit collapse and sparsity of a model's attention, by layer and head.",
    "subspaces": "What each head reads of a token, whether heads are independent, and how the rest changes its attention.",
    "words": "A model's token embeddings on the sphere, what its heads do to single tokens, and logit-lens trajectories.",
    "verify": "Check every statement of the papers: at its edges, at random, and by a search for a case in which it fails.",
    "audit": "Say which scheme a model uses and what it does to tokens: growth, turning, clustering, collapse, interference.",
    "compare": "Put models or runs side by side: all that two of them were measured by, in one table and one figure each.",
    "advise": "Rank schemes for a model of that shape by movement, collapse, gradients and noise, in simulation beside theory.",
    "sweep": "Run an experiment for a grid and lists of points over its fields, and put all runs into one table.",
    "demo": "Audit a model, compare six schemes, train two of them a little, check the ledger: one report page.",
}


def app(wanted: str | None = None) -> typer.Typer:
    """All commands by name and summary; the one that is wanted whole, so that no other's file is read.

    Without a command that is wanted, as for a shell that completes words, all are whole.
    """
    commands = typer.Typer(
        name="normscope",
        help="What normalization does to a transformer's geometry: in theory, in simulation, in training, and in the "
        "models people already have.",
        epilog=examples("normscope schemes", "normscope schemes peri", "normscope demo"),
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    commands.callback()(options)
    for name, summary in COMMANDS.items():
        if (wanted is None or name == wanted) and name in summaries():
            from normscope.cli.command import command_of

            kind = kind_of(name)
            commands.command(name, epilog=examples(*kind.usage))(command_of(kind))
        elif wanted is None or name == wanted:
            module = import_module(f"normscope.cli.{name}")
            commands.command(name, epilog=module.EXAMPLES)(getattr(module, name))
        else:
            commands.command(name, help=summary)(_not_wanted)
    return commands


def _not_wanted() -> None:
    """Stands in the list of commands for one that is not run."""


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
    """Run a command; a mistake of the user's becomes one line on stderr and exit status 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"] or ["--help"]
    completing = any(name.endswith("_COMPLETE") for name in os.environ)
    wanted = None if completing else next((argument for argument in given if not argument.startswith("-")), "")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        status = typer.main.get_command(app(wanted)).main(
            given, prog_name="normscope", standalone_mode=False, obj=given + ["--debug"] * debug
        )
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        sys.exit(_explain(error))
    sys.exit(status if isinstance(status, int) else 0)


def _explain(error: Exception) -> int:
    """Print an error as one line and return the exit status: 2 for the user's mistakes, 1 for ours."""
    usage_message = getattr(error, "format_message", None)  # typer's own errors: unknown option, wrong type, ...
    if isinstance(error, InputError):
        text, status = str(error), 2
    elif usage_message is not None:
        text, status = usage_message(), 2
    elif isinstance(error, OSError):
        text, status = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1
    else:
        text, status = f"unexpected {type(error).__name__}: {error} (--debug shows where)", 1
    if text.strip():
        sys.stderr.write(f"normscope: {' '.join(text.split())}\n")
    return status
