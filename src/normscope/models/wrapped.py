"""Models as training loops hold them: inside wrappers, or with weights that are sharded over processes."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

Change = Callable[[nn.Module, str, Tensor], Tensor | None]
_known: ContextVar[dict[int, Tensor]] = ContextVar("known", default={})  # noqa: B039  # which is never changed
_change: ContextVar[Change] = ContextVar("change", default=lambda module, name, weights: None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside wrappers, such as those of ``torch.compile``, DDP and PEFT.

    A wrapper passes on whatever it is called with, has no parameters itself, and one part of it has them all.
    """
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _inner(module: nn.Module) -> nn.Module | None:
    taken = list(inspect.signature(type(module).forward).parameters.values())[1:]
    named = any(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in taken)
    if named or any(True for _ in module.parameters(recurse=False)) or is_flat(module):
        return None
    parts = [part for part in module.children() if any(True for _ in part.parameters())]
    return parts[0] if len(parts) == 1 and not isinstance(parts[0], nn.ModuleList | nn.ModuleDict) else None


def is_flat(module: nn.Module) -> bool:
    """Whether FSDP1 wraps it: its weights are parts of one flat tensor, and whole only while the wrapper runs."""
    return hasattr(module, "summon_full_params")


def is_sharded(tensor: Tensor) -> bool:
    """Whether a process holds a part of a tensor only."""
    return hasattr(tensor, "full_tensor")


def whole(module: nn.Module, name: str, tensor: Any) -> Tensor:
    """A parameter with the parts that other processes hold, a collective operation if it is sharded; or what replaces it."""
    if not is_sharded(tensor):
        return cast(Tensor, tensor)
    known = _known.get().get(id(tensor))
    together: Tensor = tensor.full_tensor() if known is None else known
    other = _change.get()(module, name, together.detach())
    return together if other is None else other


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))


@contextmanager
def gathered_at_once(tensors: Iterable[Any]) -> Iterator[None]:
    """Until the block ends, ``whole`` need not gather these tensors: one collective operation does so for all of them."""
    alike: dict[Any, list[Any]] = {}
    for x in {id(x): x for x in tensors if is_sharded(x)}.values():
        if len(x.placements) == 1 and x.placements[0].is_shard(0):
            alike.setdefault((x.device_mesh, x.dtype), []).append(x)
    known: dict[int, Tensor] = {}
    for (mesh, _), several in alike.items():
        sizes = [-(-len(x) // mesh.size()) for x in several]  # rows of each process but the last ones, which have fewer
        local = [_padded(x.to_local().detach(), rows) for x, rows in zip(several, sizes, strict=True)]
        packed = torch.cat([x.flatten() for x in local])
        parts = [torch.empty_like(packed) for _ in range(mesh.size())]
        dist.all_gather(parts, packed, group=mesh.get_group())
        columns = torch.split(torch.stack(parts), [x.numel() for x in local], 1)
        known |= {id(x): y.reshape(-1, *x.shape[1:])[: len(x)] for x, y in zip(several, columns, strict=True)}
    token = _known.set({**_known.get(), **known})
    try:
        yield
    finally:
        _known.reset(token)


def sharding_modules(model: nn.Module) -> list[Any]:
    """The modules that gather their weights when they run, as ``fully_shard`` makes them; outer ones first."""
    return [module for module in model.modules() if hasattr(module, "unshard") and hasattr(module, "reshard")]


def _gathered_by(module: nn.Module) -> list[nn.Module]:
    """A sharding module with those of its parts whose weights it gathers: parts of inner sharding modules are not."""
    inner = {id(part) for other in sharding_modules(module)[1:] for part in other.modules()}
    return [part for part in module.modules() if id(part) not in inner]


def _is_gathered(module: nn.Module) -> bool:
    return not any(is_sharded(parameter) for part in _gathered_by(module) for parameter in part.parameters(recurse=False))


@contextmanager
def sharded_as_before(model: nn.Module) -> Iterator[None]:
    """Until the block ends, modules may gather their weights; then they release those that were not gathered before."""
    modules = sharding_modules(model)
    sharded = [module for module in modules if not _is_gathered(module)]
    try:
        yield
    except BaseException:
        inner = {id(part) for module in modules for part in sharding_modules(module)[1:]}
        for module in modules:
            if id(module) not in inner and hasattr(module, "reset_iter_state"):  # not in old versions of PyTorch
                module.reset_iter_state()  # the pass that ended early left modules in the middle of it
        raise
    finally:
        for module in sharded:
            module.reshard()


@contextmanager
def gathered(model: nn.Module, part: nn.Module) -> Iterator[None]:
    """Until the block ends, the weights of a part are whole while the rest of the model does not run."""
    inside = {id(module) for module in part.modules()}
    sharded = [m for m in sharding_modules(model) if not _is_gathered(m) and any(id(p) in inside for p in _gathered_by(m))]
    try:
        for module in sharded:
            module.unshard()
        yield
    finally:
        for module in sharded:
            module.reshard()


@contextmanager
def other_weights(model: nn.Module, change: Change) -> Iterator[None]:
    """Until the block ends, a model has other weights.

    Args:
        model: the model.
        change: gives the tensor in place of a parameter or buffer of a module, by its name there; None leaves it.
    """
    replaced: dict[int, tuple[Tensor, Tensor]] = {}

    def tensors(parts: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
        owned = [(part, name, x) for part in parts for at in (part._parameters, part._buffers) for name, x in at.items()]
        return [(part, name, x) for part, name, x in owned if x is not None and not is_sharded(x)]

    def replace(parts: Iterable[nn.Module]) -> None:
        for part, name, x in tensors(parts):
            other = None if id(x) in replaced else change(part, name, x.data)
            if other is not None:
                replaced[id(x)], x.data = (x, x.data), other

    def restore(parts: Iterable[nn.Module]) -> None:
        for _, _, x in tensors(parts):
            if id(x) in replaced:
                x.data = replaced.pop(id(x))[1]

    token = _change.set(change)
    with ExitStack() as stack:
        stack.callback(_change.reset, token)
        for module in sharding_modules(model):  # which have their weights while they run
            parts = _gathered_by(module)
            stack.callback(module.register_forward_pre_hook(lambda *_, parts=parts: replace(parts)).remove)
            hook = module.register_forward_hook(lambda *_, parts=parts: restore(parts), always_call=True, prepend=True)
            stack.callback(hook.remove)
        stack.callback(restore, list(model.modules()))
        replace(model.modules())
        yield
