"""How many cores there are, and how many threads a computation gets on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def usable_cores() -> int:
    """The cores that this process may use, where the system keeps count of that (Linux); else all (macOS)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


@contextmanager
def one_thread(small: bool) -> Iterator[None]:
    """One thread for what is small: on a busy machine, threads that wait for each other cost more than they bring.

    It also makes a small computation come out the same on any number of cores.
    """
    threads = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
