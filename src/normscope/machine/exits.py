"""How a process ends: as any Python process, or without tearing down an interpreter that other threads still need."""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

_skipped = False


def skip_teardown() -> None:
    """Let ``leave`` end this process after its exit handlers, without tearing down the interpreter."""
    global _skipped
    _skipped = True


def leave(status: int) -> NoReturn:
    """End the process with an exit status."""
    if not _skipped:
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)
