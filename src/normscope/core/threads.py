"""How many threads a computation gets on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
