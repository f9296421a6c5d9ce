"""Two processes with DDP, or with FSDP2: every process runs the probe, the first one keeps what all of them show.

python examples/watch_processes.py [--fsdp]; the lines of the watch are those of a single process.
"""

import os
import socket
from collections.abc import Callable

import shared
import torch
import torch.distributed as dist
from gpt import GPT, Config
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import normscope as ns


def train(to: str | None, steps: int, every: int = 10, fsdp: bool = False) -> nn.Module:
    """Train a small GPT on the help pages of Python, on all processes; without a watch if ``to`` is None."""
    torch.manual_seed(0)
    data, generator = shared.tokens(), torch.Generator().manual_seed(1 + dist.get_rank())
    model: nn.Module = GPT(Config())
    if fsdp:
        for block in model.h:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    probe, _ = shared.batch(data, torch.Generator().manual_seed(2 + dist.get_rank()))
    watch = None if to is None else ns.watch(model, probe=probe, every=every, to=to)
    for _ in range(steps):
        _, loss = model(*shared.batch(data, generator))
        loss.backward()
        optimizer.step()
        if watch is not None:
            watch.step(loss=loss)  # before the gradients are cleared
        optimizer.zero_grad(set_to_none=True)
    if watch is not None:
        watch.close()
    return model


def begin(work: Callable[..., None], *arguments: object) -> None:
    """Run a function in two processes that know each other; forks, which need not import everything again."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torch.multiprocessing.start_processes(join, (port, work, *arguments), nprocs=2, start_method="fork")


def join(rank: int, port: int, work: Callable[..., None], *arguments: object) -> None:
    """One of two processes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    work(*arguments)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Train, and show the page."""
    options = shared.options(__doc__, to="runs/processes")
    options.add_argument("--fsdp", action="store_true", help="shard the weights (FSDP2) instead of copying them (DDP)")
    given = options.parse_args(arguments)
    begin(train, given.to, given.steps, 10, given.fsdp)
    shared.show(given.to)


if __name__ == "__main__":
    main()
