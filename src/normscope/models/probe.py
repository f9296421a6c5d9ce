"""What a model of the ``transformers`` library is made of, from one forward pass of a few tokens."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import InputError
from normscope.models.hooks import before, states_of
from normscope.models.interface import attend_plainly, looked_at_by
from normscope.models.placement import BlockRecord, Call

_TOKENS = 8
_NEAR = 1e-5


class Probe:
    """Every call of every part of a model, written down while it reads a few tokens.

    Attributes:
        attentions, blocks: the attention modules in the order in which they run, and the layers they are in.
        heads, head, dim: the shape of attention and of the stream.
        causal: whether tokens see only those before them.
        rotary: whether attention is handed rotations.
        queries: q of every layer.
    """

    def __init__(self, model: Any) -> None:
        self.attentions: list[nn.Module] = []
        self.blocks: list[nn.Module] = []
        self._outside: list[tuple[str, Call]] = []
        self.heads = self.head = self.dim = 0
        self.causal, self.rotary = True, False
        self._names = {id(module): name for name, module in model.named_modules()}
        self._around = _blocks(model)
        self._inputs: dict[int, Tensor] = {}
        self._left: dict[int, Tensor] = {}
        self._embedded: dict[int, Tensor] = {}
        self._calls: dict[int, list[Call]] = {}
        self._attended: list[tuple[Tensor, Tensor, Tensor, int]] = []
        self.queries: list[Tensor] = []
        self._run(model)
        if not self.attentions:
            raise InputError(f"{type(model).__name__} does not use the library's attention interface: it cannot be looked into")

    @property
    def outside(self) -> dict[str, nn.Module]:
        """The norms of the stream outside the layers, ``embedding`` and ``final``."""
        return {slot: call.module for slot, call in self._outside if call.read.shape[-1] == self.dim}

    @property
    def records(self) -> Iterator[BlockRecord]:
        """What each block did."""
        for block, (entered, read, mixed, attended) in zip(self.blocks, self._attended, strict=True):
            yield BlockRecord(entered, self._left[id(block)], read, mixed, self._calls[id(block)], attended)

    def embedding_factor(self, embedding: nn.Module) -> float:
        """What the embedding is multiplied with before the first layer; 1 where more than that happens to it."""
        entered, embedded = self._attended[0][0], self._embedded.get(id(embedding))
        if embedded is None or embedded.shape != entered.shape:
            return 1.0
        factor = float((entered * embedded).sum() / embedded.square().sum())
        return factor if bool((entered - factor * embedded).norm() <= _NEAR * entered.norm()) else 1.0

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Attention as it is; who attended, and to what, is written down."""
        mixed = attend_plainly(q, k, v, seen, scale, softcap)
        block = self._around.get(id(module))
        if block is None:
            raise InputError("attention is not in a list of layers: this model's make is not understood")
        if module in self.attentions:
            raise InputError("the layers of this model are one module that runs again and again, which is not understood here")
        self.attentions.append(module)
        self.blocks.append(block)
        entered, read = self._inputs[id(block)], self._inputs[id(module)]
        flat = mixed.transpose(1, 2).flatten(2).clone()
        self._attended.append((entered, read, flat, len(self._calls.get(id(block), []))))
        self.queries.append(q)
        self.heads, self.head, self.dim = q.shape[1], q.shape[-1], entered.shape[-1]
        self.causal = not bool(seen[..., 0, -1].any())
        return mixed

    def _run(self, model: Any) -> None:
        with ExitStack() as stack:
            for module in model.modules():
                before(stack, module, self._before)
                stack.callback(module.register_forward_hook(self._after, with_kwargs=True).remove)
            stack.enter_context(looked_at_by(self))
            stack.enter_context(torch.no_grad())
            device = next(model.parameters()).device
            tokens = 1 + torch.arange(_TOKENS, device=device)[None] % (model.config.get_text_config().vocab_size - 1)
            run(model, tokens, torch.ones_like(tokens, dtype=torch.bool))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = states_of(args, kwargs)
        if states is not None:
            self._inputs[id(module)] = states.clone()
        self.rotary |= kwargs.get("position_embeddings") is not None

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wrote: Any) -> None:
        wrote = wrote[0] if isinstance(wrote, tuple) else wrote
        block, read = self._around.get(id(module)), self._inputs.get(id(module))
        if isinstance(module, nn.Embedding):
            self._embedded[id(module)] = wrote.clone()
        if not isinstance(wrote, Tensor) or read is None:
            return
        call = Call(self._names[id(module)], module, read, wrote.clone())
        if block is module:
            self._left[id(block)] = call.wrote
        elif block is not None:
            self._calls.setdefault(id(block), []).append(call)
        elif call.is_norm:
            self._outside.append(("final" if self.attentions else "embedding", call))


def run(model: Any, tokens: Tensor, present: Tensor) -> Tensor:
    """Logits, or the last states of a model that predicts nothing."""
    padded = {} if bool(present.all()) else {"attention_mask": present.long()}
    cache = {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}
    given = model(input_ids=tokens, **padded, **cache)
    result: Tensor = given.logits if "logits" in given else given.last_hidden_state
    return result


def _blocks(model: Any) -> dict[int, nn.Module]:
    """For every module in a list of layers the layer it is in, the outermost where lists are nested."""
    modules, around = dict(model.named_modules()), {}
    for name, module in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if parts[end - 1].isdigit() and isinstance(modules[".".join(parts[: end - 1])], nn.ModuleList):
                around[id(module)] = modules[".".join(parts[:end])]
                break
    return around
