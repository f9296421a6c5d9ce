"""The residual streams of a model: which calls of which modules are its blocks.

A block stands in a list of modules, receives hidden states and returns as many. Where blocks are nested, the outer ones count;
but a stage that only runs a list of equal blocks, one after the other, is no block. Blocks of one list are the layers of a
stream, in the order in which they run: one module that runs many times is as many layers.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normscope.core.norms import cosine
from normscope.errors import InputError, did_you_mean
from normscope.models.hooks import BlockSite
from normscope.models.record import Call, Record, members
from normscope.models.states import Layout

_CORRELATED = 0.2
_SMALL = 0.05  # of the parameters of the largest list: less is no stream
_NAMES = ("vision", "visual", "audio", "speech", "text", "language", "encoder", "decoder")


@dataclass(frozen=True)
class Block:
    """One layer of a stream: a call of a module, and the states (rows, positions, dim) that it received and returned."""

    call: Call
    site: BlockSite
    input: Float[Tensor, "rows positions dim"]
    output: Float[Tensor, "rows positions dim"]


@dataclass(frozen=True)
class Stream:
    """A residual stream: its name, the list that its blocks are in, the blocks as they run, and the number of parameters."""

    name: str
    path: str
    blocks: tuple[Block, ...]
    parameters: int


def stream_named(name: str, streams: Iterable[str]) -> str:
    """The residual stream of a name, or of a part of it that no other has; InputError if there is none."""
    known = list(streams)
    alike = [stream for stream in known if name in stream]
    if name not in known and len(alike) != 1:
        listed = f"{', '.join(known)}{did_you_mean(name, known)}"
        raise InputError(f"stream={name!r}: there is no residual stream of that name; the model has {listed}")
    return name if name in known else alike[0]


def streams_of(model: nn.Module, record: Record, shape: tuple[int, ...], blocks: str | None = None) -> tuple[Stream, ...]:
    """All residual streams that ran in a recorded pass, in the order in which they began.

    ``shape`` has the rows of the input, and where it is token ids how many of them a stream may have. ``blocks`` is the name of
    the list whose members are the blocks, such as ``transformer.h``; found if it is not given.
    """
    listed = {id(part): name for name, part in members(model)}
    if blocks is not None:
        listed = {key: name for key, name in listed.items() if name.rpartition(".")[0] == blocks}
        if not listed:
            raise InputError(f"blocks={blocks!r}: the model has no list of modules of that name")
    candidates = [c for c in record.calls if id(c.module) in listed and c.kept is not None and not c.is_leaf]
    chosen = [call for call in candidates if not any(other.holds(call) for other in candidates)]
    if blocks is None:
        chosen = [inner for call in chosen for inner in _unstaged(call, candidates)]
    by_path: dict[str, list[Call]] = {}
    for call in sorted(chosen, key=lambda call: call.began):
        by_path.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+", "*", call.name), []).append(call)
    sizes = {path: _parameters(calls) for path, calls in by_path.items() if blocks is not None or _carries(calls)}
    if not sizes:
        given = "" if blocks is None else f" in '{blocks}'"
        raise InputError(
            f"no blocks with a residual stream{given}: no module of a list returns hidden states of the shape "
            "that it receives; name the list of blocks, such as blocks='transformer.h'"
        )
    largest = {path: by_path[path] for path, size in sizes.items() if size >= _SMALL * max(sizes.values())}
    names = _names(list(largest))
    return tuple(Stream(name, path, _blocks(largest[path], shape), sizes[path]) for path, name in names.items())


def _unstaged(call: Call, candidates: Sequence[Call]) -> list[Call]:
    """The blocks that a stage runs one after the other, down to those that are no stages; the call itself if it is none."""
    inner = [other for other in candidates if call.holds(other)]
    inner = [other for other in inner if not any(further.holds(other) for further in inner)]
    if not inner or call.kept is None or len({type(other.module) for other in inner}) > 1:
        return [call]
    through = [pair for other in inner if (pair := other.kept) is not None]
    links = [(call.kept[0], through[0][0]), (through[-1][1], call.kept[1])]
    links += [(one[1], other[0]) for one, other in pairwise(through)]
    if not all(a.shape == b.shape and torch.equal(a, b) for a, b in links):
        return [call]
    return [block for other in inner for block in _unstaged(other, candidates)]


def _carries(calls: Sequence[Call]) -> bool:
    """Whether blocks hand on hidden states: one returns what the next receives, or its output is correlated with its input."""
    kept = [pair for call in calls if (pair := call.kept) is not None]
    if not all(bool(y.isfinite().all()) and bool(y.any()) for pair in kept for y in pair):
        return True  # weights that hide it
    links = ((y, x) for one, other in pairwise(calls) for y in one.outputs for x in other.inputs if y.shape == x.shape)
    if any(torch.equal(y, x) for y, x in links):
        return True
    near = [float(cosine(x.double().flatten(), y.double().flatten())) > _CORRELATED for x, y in kept]
    return sum(near) > len(near) / 2


def _parameters(calls: Sequence[Call]) -> int:
    modules = {id(call.module): call.module for call in calls}
    return sum(parameter.numel() for module in modules.values() for parameter in module.parameters())


def _names(paths: Sequence[str]) -> dict[str, str]:
    """A short name of every list, by its path: a word that tells it from the others, or the path."""
    words = {path: next((word for word in _NAMES if word in path.lower()), "blocks") for path in paths}
    return {path: word if list(words.values()).count(word) == 1 else path for path, word in words.items()}


def _blocks(calls: Sequence[Call], shape: tuple[int, ...]) -> tuple[Block, ...]:
    found = []
    for call in calls:
        if call.kept is not None:
            x, y = call.kept
            layout = Layout.of(x, shape, any(isinstance(part, nn.Conv2d) for part in call.module.modules()))
            received, returned = (_place(x, call.inputs), _place(y, call.outputs))
            found.append(Block(call, BlockSite(call.module, layout, received, returned), layout.states(x), layout.states(y)))
    return tuple(found)


def _place(x: Tensor, tensors: Sequence[Tensor]) -> int:
    return next(place for place, tensor in enumerate(tensors) if tensor is x)
