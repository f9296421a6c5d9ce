"""The command line: a command for every experiment, and those for schemes, the explorer and the installation.

Nothing heavy is imported here, so that ``normscope --help`` is fast.
"""

import os
import sys

from normscope.machine.exits import leave

_HELP = ("-h", "--help")
COMPLETE = "_NORMSCOPE_COMPLETE"  # in the environment while a shell completes a command line


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a mistake of the user's becomes one line on stderr and exit status 2. A bug of ours is a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"] or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    status: object = 0
    try:
        if COMPLETE in os.environ:
            from normscope.cli.completion import complete

            complete()
        elif given[0] in _HELP:
            from normscope.cli.overview import overview

            sys.stdout.write(overview())
        else:
            from normscope.cli.commands import run

            status = run(given, debug)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except Exception as error:
        from normscope.cli.failures import failed

        status = None if debug else failed(error)
        if status is None:
            raise
    leave(status if isinstance(status, int) else 0)
