"""Two processes with DDP, or with FSDP2: every process runs the probe, the first one keeps what all of them show.

python examples/watch_processes.py [--fsdp]; the lines of the watch are those of a single process.
"""

import os
import socket

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


def run(rank: int, port: int, to: str, steps: int, fsdp: bool) -> None:
    """One of two processes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    train(to, steps, fsdp=fsdp)
    dist.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    parser = shared.parser(__doc__, to="runs/processes", steps=60)
    parser.add_argument("--fsdp", action="store_true", help="shard the weights (FSDP2) instead of copying them (DDP)")
    given = parser.parse_args()
    torch.multiprocessing.spawn(run, (free_port(), given.to, given.steps, given.fsdp), nprocs=2)
    shared.show(given.to)
