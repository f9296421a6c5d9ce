"""The structure of a model of the ``transformers`` library, observed in one forward pass of a few tokens."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normscope.core.norms import factor_between, same
from normscope.errors import InputError
from normscope.models.attention_interface import AttentionCall, observing
from normscope.models.check import layer_path
from normscope.models.hooks import after, before, first_output, rotation_of, states_of
from normscope.models.placement import BlockRecord, Call, is_norm

_TOKENS = 8
_NEAR = 1e-5
_SMALLEST = 1e-19  # the square of less is no normal number in float32


class Probe:
    """Every call of every module of a model while it reads a few tokens.

    Attributes:
        attentions, blocks: the attention modules in the order in which they run, and the layers that contain them.
        heads, kv_heads, head_dim, dim: the shape of attention and of the stream.
        causal: whether tokens attend only to themselves and those before them.
        rotary: whether attention receives cosines and sines.
        queries: q of every layer.
    """

    def __init__(self, model: Any) -> None:
        self.attentions: list[nn.Module] = []
        self.blocks: list[nn.Module] = []
        self._outside: list[tuple[str, Call]] = []
        self.heads = self.kv_heads = self.head_dim = self.dim = 0
        self.causal, self.rotary = True, False
        self._names = {id(module): name for name, module in model.named_modules()}
        self._around = _blocks(model)
        self._inputs: dict[int, Tensor] = {}
        self._began: dict[int, int] = {}
        self._left: dict[int, Tensor] = {}
        self._embedded: dict[int, Tensor] = {}
        self._calls: dict[int, list[Call]] = {}
        self._attended: list[tuple[Tensor, Tensor, Tensor, int]] = []
        self.queries: list[Tensor] = []
        self._run(model)
        if not self.attentions:
            raise InputError(
                f"unsupported architecture: {type(model).__name__} does not use the attention interface of transformers"
            )

    @property
    def outside(self) -> dict[str, nn.Module]:
        """The norms of the stream outside the layers, ``embedding`` and ``final``."""
        return {slot: call.module for slot, call in self._outside if call.input.shape[-1] == self.dim}

    @property
    def records(self) -> Iterator[BlockRecord]:
        """The forward pass of each block."""
        for block, attention, values in zip(self.blocks, self.attentions, self._attended, strict=True):
            if id(block) not in self._left:
                raise InputError("unsupported architecture: a layer does not return hidden states")
            entered, read, mixed, attended = values
            left, calls = self._left[id(block)], self._calls[id(block)]
            yield BlockRecord(self._names[id(attention)], entered, left, read, mixed, calls, attended)

    @property
    def degenerate(self) -> bool:
        """Whether some module returned zeros alone or a non-finite value: whose output is whose input is then unclear."""
        outputs = [call.output for calls in self._calls.values() for call in calls if call.output.numel()]
        outputs += [x for values in self._attended for x in values[:3]]
        return any(not _SMALLEST < float(x.abs().max()) < torch.inf for x in outputs)

    def embedding_factor(self, embedding: nn.Module) -> float:
        """The factor of the embedding before the first layer; 1 where it is not only multiplied."""
        entered, embedded = self._attended[0][0], self._embedded.get(id(embedding))
        if embedded is None or embedded.shape != entered.shape:
            return 1.0
        factor = factor_between(entered, embedded)
        return factor if same(factor * embedded, entered, _NEAR) else 1.0

    def _attend(self, call: AttentionCall) -> Tensor:
        """Attention as it is; its module and values are recorded."""
        mixed, module = call.mixed(), call.module
        block = self._around.get(id(module))
        if block is None:
            raise InputError("unsupported architecture: attention is not inside a list of layers")
        if module in self.attentions:
            raise InputError("unsupported architecture: layers share one module")
        if id(block) not in self._inputs or id(module) not in self._inputs:
            raise InputError("unsupported architecture: a layer is called without hidden states")
        self.attentions.append(module)
        self.blocks.append(block)
        entered, read = self._inputs[id(block)], self._inputs[id(module)]
        flat = mixed.transpose(1, 2).flatten(2).clone()
        self._attended.append((entered, read, flat, len(self._calls.get(id(block), []))))
        self.queries.append(call.q)
        self.heads, self.kv_heads = call.q.shape[1], call.kv_heads
        self.head_dim, self.dim = call.q.shape[-1], entered.shape[-1]
        self.causal = not bool(call.mask[..., 0, -1].any())
        return mixed

    def _run(self, model: Any) -> None:
        with ExitStack() as stack:
            for module in model.modules():
                before(stack, module, self._before)
                after(stack, module, self._after)
            stack.enter_context(observing(self._attend))
            stack.enter_context(torch.no_grad())
            run(model, *probe_tokens(model))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = states_of(args, kwargs)
        if states is not None:
            self._inputs[id(module)] = states.clone()
            self._began[id(module)] = len(self._calls.get(id(self._around.get(id(module))), []))
        self.rotary |= rotation_of(kwargs) is not None

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        output = first_output(output)
        block, read = self._around.get(id(module)), self._inputs.get(id(module))
        if isinstance(module, nn.Embedding):
            self._embedded[id(module)] = output.clone()
        if not isinstance(output, Tensor) or read is None:
            return
        call = Call(self._names[id(module)], module, read, output.clone(), self._began[id(module)])
        if block is module:
            self._left[id(block)] = call.output
        elif block is not None:
            self._calls.setdefault(id(block), []).append(call)
        elif call.is_norm:
            self._outside.append(("final" if self.attentions else "embedding", call))


@contextmanager
def typical_weights(model: nn.Module) -> Iterator[None]:
    """Random products, embeddings and norms in place of the model's: its structure shows even if its weights are degenerate.

    Parameters of other modules, such as learned scales of updates, stay as they are. Holds a second copy of the weights.
    """
    generator = torch.Generator().manual_seed(0)
    replaced = []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        if any(p.ndim > 1 for p in own) or is_norm(module):
            replaced += [(p, p.data) for p in own]
    try:
        for parameter, weights in replaced:
            drawn = torch.randn(weights.shape, generator=generator)
            size = 0.1 if weights.ndim < 2 else weights.shape[-1] ** -0.5
            parameter.data = (size * drawn + (weights.ndim < 2)).to(weights)
        yield
    finally:
        for parameter, weights in replaced:
            parameter.data = weights


def probe_tokens(model: Any) -> tuple[Tensor, Tensor]:
    """A few tokens, and their attention mask."""
    device = next(model.parameters()).device
    tokens = 1 + torch.arange(_TOKENS, device=device)[None] % (model.config.get_text_config().vocab_size - 1)
    return tokens, torch.ones_like(tokens, dtype=torch.bool)


def run(model: Any, tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """Logits, or the last states of a model that predicts nothing."""
    padded = {} if bool(attention_mask.all()) else {"attention_mask": attention_mask.long()}
    cache = {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}
    given = model(input_ids=tokens, **padded, **cache)
    result: Tensor = given.logits if "logits" in given else given.last_hidden_state
    return result


def _blocks(model: Any) -> dict[int, nn.Module]:
    """For every module in a list of layers the layer it is in, the outermost where lists are nested."""
    paths = {id(module): layer_path(model, name) for name, module in model.named_modules()}
    return {module: model.get_submodule(path) for module, path in paths.items() if path is not None}
