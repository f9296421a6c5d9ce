"""Locks of files, which keep processes out of a folder that another one writes."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_RETRY = 0.05  # seconds between two attempts at a lock


@contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock of a file, which is made, for as long as the block or this process lasts.

    Raises:
        BlockingIOError: if another process still holds it after ``patience`` seconds.
    """
    deadline = time.monotonic() + patience
    while (file := lock_file(path)) is None:
        if time.monotonic() >= deadline:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(path))
        time.sleep(_RETRY)
    with file:
        yield


def lock_file(path: Path) -> TextIO | None:
    """The file, open and locked; None if another process has its lock or is removing it with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return None
        except (BlockingIOError, FileNotFoundError):
            return None
        stack.pop_all()
        return file


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file now."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or the disk has no locks
        return False
    return False
