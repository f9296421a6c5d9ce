"""Two processes that train with and without a watch, for the tests of real loops."""

import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import normscope as ns

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

KINDS = ("ddp", "fsdp")


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All weights, those of sharded models gathered."""
    state = {name.removeprefix("module."): x for name, x in model.state_dict().items()}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for name, x in state.items()}


def hooks(model: nn.Module) -> list[int]:
    """How many hooks every module has."""
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def team(folder: str) -> None:
    """The work of one of two processes; what it saw goes to ``folder``."""
    rank = dist.get_rank()
    torch.save({kind: _watched(kind, rank, folder) for kind in KINDS}, f"{folder}/{rank}.pt")


def _watched(kind: str, rank: int, folder: str) -> dict[str, Any]:
    from watch_processes import train

    fsdp = kind == "fsdp"
    models = [train(to, 4, every=2, fsdp=fsdp) for to in (None, f"{folder}/{kind}")]
    seen = {"weights": [whole(model) for model in models], "hooks": [hooks(model) for model in models]}
    seen["opened"] = _opened(fsdp)
    seen["sharded"] = [all(hasattr(p, "full_tensor") for p in model.parameters()) for model in models]
    return {**seen, **_numbers(models[1], rank), **_failures(models[1], rank)}


def _opened(fsdp: bool) -> list[Any]:
    """What is read off models whose updates are zero at first, in mixed or half precision."""
    from gpt import GPT, Config

    seen = []
    for precision in (None, torch.bfloat16):
        model = GPT(Config(layers=2, dim=32)).to(torch.float32 if fsdp else precision)
        for block in model.h:
            nn.init.zeros_(block.attn.c_proj.weight)
        policy = MixedPrecisionPolicy(param_dtype=precision)
        for part in (*model.h, model) if fsdp else ():
            fully_shard(part, mp_policy=policy)
        opened = ns.open(model)
        seen.append((opened.scheme.name if opened.scheme else opened.scheme_note, "sublayers" in opened.offers))
    return seen


def probe(rank: int) -> Tensor:
    """The batch of a process, (rows, tokens)."""
    return torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(rank))


def _numbers(model: nn.Module, rank: int) -> dict[str, Any]:
    """The tables of a probe with gradients of this process's batch, which are averaged over processes."""
    model.eval()
    model(probe(rank), probe(rank))[1].backward()
    before = random.getstate()  # which the run-time type checks of the tests' own process change
    watch = ns.watch(model, probe=probe(rank))
    handle = watch.model.blocks[0].register_forward_pre_hook(lambda *_: random.seed(1))
    watch.step(loss=float(rank))
    handle.remove()
    drawn = random.getstate() != before
    model.zero_grad()
    model.train()
    return {"tables": watch.tables, "drawn": drawn}


def _failures(model: nn.Module, rank: int) -> dict[str, Any]:
    """What processes do when the probe fails on the second, when the first cannot write its folder, and with FSDP1."""
    from gpt import GPT, Config

    watch = ns.watch(model, probe=probe(rank), every=1)
    statistics: Any = watch.statistics
    observe = statistics._state
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for fails in (True, False, True, False):
            model(probe(rank), probe(rank))[1].backward()
            statistics._state = _refuse if fails and rank == 1 else observe
            watch.step()
            model.zero_grad()
    flat = FullyShardedDataParallel(GPT(Config()), device_id=torch.device("cpu"))
    refused = [_refusal(model, rank, to="/dev/null/watch"), _refusal(flat, rank)]
    texts = [str(warning.message) for warning in caught if "normscope" in str(warning.message)]
    return {"warnings": texts, "steps": watch.tables.get("steps"), "refused": refused, "resharded": whole(model)}


def _refusal(model: nn.Module, rank: int, **options: Any) -> str:
    try:
        ns.watch(model, probe=probe(rank), **options)
    except ns.InputError as error:
        return str(error)
    return ""


def _refuse(layer: int, x: Tensor) -> None:
    raise FloatingPointError("no numbers today")


if __name__ == "__main__":
    from watch_processes import begin

    begin(team, sys.argv[1])
