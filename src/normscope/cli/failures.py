"""What a command says when it fails: one line for a user's mistake or a failure of the machine, nothing for a bug of ours."""

import os
import sys

from normscope.cli.output import say
from normscope.errors import InputError
from normscope.machine.files import is_disk_full


def failed(error: Exception) -> int | None:
    """Say why a command failed, in one line, and return its exit status; None for a bug of ours."""
    explained = _explained(error)
    if explained is None:
        return None
    if is_disk_full(error) and not isinstance(error, InputError):  # what is printed goes into a file, which could not grow
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    message, status = explained
    if message.strip():
        say(f"normscope: {message}")
    return status


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
