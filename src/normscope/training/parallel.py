"""One training shared by several processes: each takes some rows of every batch, and all follow the gradient of the whole.

Every process draws the whole batch from the seed, so that the rows are those of one process alone. With S characters to predict
in all, the loss is Σ_processes (Σ_own characters cross-entropy) / S, whatever the number of characters in each share.
"""

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from normscope.errors import InputError
from normscope.machine.exits import skip_teardown
from normscope.machine.interrupts import ending_at_once

_GO_ON = "the same command resumes from the last checkpoint"
_LAUNCHER = "NORMSCOPE_LAUNCHER"  # in the environment: the process that started those that share a run, and its id
_GRACE = 10.0  # seconds in which a process without its launcher may end by itself
Value = TypeVar("Value")


@dataclass(frozen=True)
class Team:
    """The processes that share a training, seen from one of them; the process group is torch's default one."""

    rank: int
    size: int

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    @property
    def rows(self) -> slice:
        """The rows of every batch that this process takes."""
        return slice(self.rank, None, self.size)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same to the bit on each."""
        total = values.clone()
        dist.all_reduce(total)
        return total

    def from_first(self, value: Value) -> Value:
        """The first process's value, on all of them."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def check_shares(batch: int, processes: int) -> None:
    """Refuse a batch that has no row for some process."""
    if processes > batch:
        raise InputError(f"a batch of {batch} has no row for each of {processes} processes; use {batch} at most")


def check_devices(device: str, processes: int) -> None:
    """Refuse more processes than GPUs on this machine, and the name of one GPU for several processes."""
    wanted = torch.device(device)
    if wanted.type == "cuda" and wanted.index is not None:
        raise InputError(f"'{device}' is one GPU, and each process takes its own; use device=cuda")
    if wanted.type == "cuda" and processes > torch.cuda.device_count():
        raise InputError(
            f"{processes} processes need a GPU each, and here are {torch.cuda.device_count()}; use fewer, or device=cpu"
        )


def launched() -> bool:
    """Whether torchrun, or ``launch``, started this process together with others."""
    return dist.is_available() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1


def rank() -> int:
    """The number of this process among those that share the training; 0 where it is alone."""
    return int(os.environ["RANK"]) if launched() else 0


@contextmanager
def joined(device: str) -> Iterator[Team | None]:
    """The processes started together with this one, joined for as long as this holds; None where it is alone.

    Raises:
        ConnectionError: if another of them is gone.
    """
    if not launched():
        yield None
        return
    check_devices(device, int(os.environ["LOCAL_WORLD_SIZE"]))
    gpu = torch.device(device).type == "cuda"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    threading.Thread(target=_end_with, args=(_launcher(),), daemon=True).start()
    # DistributedDataParallel keeps gloo's threads beyond destroy_process_group. One that frees a tensor of Python's while the
    # interpreter is torn down aborts a process whose work is done (pytorch/pytorch#179291).
    skip_teardown()
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        with ending_at_once():  # whoever waits for another process in a sum runs no handler
            yield Team(dist.get_rank(), dist.get_world_size())
        with suppress(RuntimeError):  # its own share is done; who leaves first would break connections that others still read
            dist.barrier()
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # gloo's errors have no class of their own
            raise ConnectionError(f"another process of this training has ended, so this one ends too; {_GO_ON}") from error
        raise
    finally:
        dist.destroy_process_group()


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run ``normscope`` with these arguments in so many processes of this machine, and return the exit status of all.

    Raises:
        ConnectionError: if one of them was killed; the others were ended then.
        KeyboardInterrupt: if this process was interrupted; all were ended then.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    run = uuid.uuid4().hex
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=run,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    logging.disable(logging.ERROR)  # what went wrong is said here, once
    os.environ[_LAUNCHER] = f"{os.getpid()} {run}"
    try:
        elastic_launch(config, sys.executable)("-m", "normscope", *arguments)
    except ChildFailedError as error:
        return _status_of({rank: failure.exitcode for rank, failure in error.failures.items()}, processes)
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        return 128 + int(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
        os.environ.pop(_LAUNCHER, None)
    return 0


def _status_of(failures: dict[int, int], processes: int) -> int:
    """The status of the process that failed by itself; those after it were ended, or lost their connection (status 1)."""
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)
    causes = {rank: status for rank, status in failures.items() if status not in ended} or failures
    rank, status = min(causes.items(), key=lambda item: (item[1] >= 0, -item[1]))
    if status < 0:
        name = signal.Signals(-status).name
        raise ConnectionError(f"process {rank} of {processes} was ended by {name}, and all with it; {_GO_ON}")
    return status


def _launcher() -> int:
    """The process that started this one; one that is gone already is no parent any more."""
    pid, _, run = os.environ.get(_LAUNCHER, "").partition(" ")
    return int(pid) if run and run == os.environ.get("TORCHELASTIC_RUN_ID") else os.getppid()


def _end_with(parent: int) -> None:
    """End this process soon after the one that started it, which would have ended it."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)  # a process that waits for others in C++ runs no handler
    os._exit(128 + signal.SIGTERM)
