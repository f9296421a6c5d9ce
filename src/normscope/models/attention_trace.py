"""Softmax attention of any module, followed from the product q·k to the product with v while the module runs.

Modules that do not call the attention interface of ``transformers`` compute softmax(scale·q·kᵀ + bias) v in their own way. A
``TorchFunctionMode`` receives every operation: it records products of two batches of matrices, follows their results through
reshapes, factors, biases, masks, caps and sinks to a softmax, and from there to the product with the values.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from normscope.core.norms import same
from normscope.models.attention_interface import AttentionCall, AttentionObserver, observable, observing
from normscope.models.hooks import after, before, suspended, unless_suspended

_MASKED = -9e3  # a bias so far below the largest of its row is a mask: its weight is 0 in every precision
_EXACT = 1e-5
# operations that keep the values, apart from their order and precision
_LAYOUT = {
    *("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "getitem"),
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "contiguous", "clone", "detach", "dropout"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16"),
}
_ADDED = {"add", "iadd", "radd", "masked_fill", "max", "maximum", "clamp", "nan_to_num"}  # what they change counts as bias
_FACTORS = {"mul": 1, "imul": 1, "rmul": 1, "multiply": 1, "div": -1, "truediv": -1, "itruediv": -1, "true_divide": -1}
_DIFFERENCES = {"sub", "isub", "subtract"}


@dataclass(frozen=True)
class _Product:
    """Matrices a (batch, i, d) and b (batch, d, j); ``place`` brings (batch, i, j) into the layout of the result.

    ``canonical`` is the inverse of ``place``; there may be several batch dimensions.
    """

    a: Tensor
    b: Tensor
    place: Callable[[Tensor], Tensor]
    canonical: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Scores:
    """A tensor that is factor·q·k plus something, or cap·tanh(factor·q·k) plus something.

    Attributes:
        product: q and k.
        raw: q·k in the layout of the tensor.
        factor: a number, or a tensor of that layout.
        cap: what multiplies tanh; None without tanh.
        grid: rows and heads, if a tensor on the way had both.
        level: what was subtracted from all logits of a row.
        sink: a last logit without a key.
    """

    product: _Product
    raw: Tensor
    factor: float | Tensor = 1.0
    cap: float | None = None
    grid: tuple[int, int] | None = None
    level: Tensor | None = None
    sink: Tensor | None = None


@dataclass(frozen=True)
class _Weights:
    """A tensor that is the softmax of some scores."""

    scores: _Scores
    logits: Tensor


class AttentionTrace(TorchFunctionMode):
    """While active, passes every softmax attention that a model computes itself to an observer, which returns mixed values.

    Attributes:
        unclear: the modules whose attention does not have the form softmax(cap(scale·q·k) + bias) v, with the reason.
        thorough: whether that form is checked by values.
    """

    def __init__(self, model: nn.Module, observer: AttentionObserver, thorough: bool = True) -> None:
        super().__init__()
        self.model, self.observer, self.thorough = model, observer, thorough
        self.unclear: dict[nn.Module, str] = {}
        self._followed: Any = WeakIdKeyDictionary()
        self._running: list[tuple[nn.Module, tuple[int, ...]]] = []
        self._active = unless_suspended()

    def install(self, stack: ExitStack) -> None:
        """Until the stack unwinds: follow the operations of the model's modules."""
        for module in self.model.modules():
            before(stack, module, self._begin)
            after(stack, module, self._end, always=True)
        self._active = unless_suspended()
        stack.enter_context(self)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 2]
        self._running.append((module, tuple(given[0].shape) if given else ()))

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        while self._running and self._running.pop()[0] is not module:
            pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; follow what it makes of scores and weights."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "").strip("_")
        if not self._running or not self._active():
            return func(*args, **kwargs)
        if name == "multi_head_attention_forward":
            with self:
                return _opened(func)(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return self._fused(*args, **kwargs)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        given = [*args, *(kwargs[key] for key in _POSITIONAL.get(name, ())[len(args) :] if key in kwargs)]
        product = _product(name, given)
        tensors = [x for x in (given[0] if name in ("cat", "concat") else given) if isinstance(x, Tensor)]
        followed = [(x, self._followed[x]) for x in tensors if x in self._followed]
        state: _Scores | _Weights | None = None
        if product is not None:
            for x, weights in followed:
                if isinstance(weights, _Weights):
                    return self._mix(product, weights, x is given[_OPERANDS[name]], result)
            raw = product.place(product.a @ product.b) if name == "baddbmm" else result.clone()
            state = _Scores(product, raw, float(kwargs.get("alpha", 1.0)) if name == "baddbmm" else 1.0)
        elif followed:
            state = _follow(name, func, given, kwargs, *followed[0], result)
        if state is not None:
            self._followed[result] = state
        return result

    def _innermost(self) -> tuple[nn.Module, tuple[int, ...]]:
        """The innermost running module that has weights or parts, and the shape of what it reads."""
        whole = (pair for pair in reversed(self._running) if next(pair[0].parameters(), None) is not None)
        return next(whole, self._running[-1])

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``F.scaled_dot_product_attention``."""
        result = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if query.ndim < 3:
            return result
        q, k, v = (_by_head(x) for x in (query, key, value))
        kv_heads = k.shape[1]
        if q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        attends = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        bias = None
        if is_causal:
            attends = attends.tril()
        elif attn_mask is not None:
            given = _by_head(attn_mask.expand(*query.shape[:-1], key.shape[-2]))
            attends, bias = (given, None) if given.dtype == torch.bool else _masked(given)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        module, _ = self._innermost()
        shared = _shared(k, v) if self.thorough else 1
        call = AttentionCall(
            module, q, k, v.to(q), self._few(attends), scale, None, min(kv_heads, q.shape[1] // shared), self._few(bias), None,
            result=_by_head(result),
        )  # fmt: skip
        return self._observed(call, result, lambda mixed: mixed.view(result.shape))

    def _few(self, x: Tensor | None) -> Any:
        return _few(x) if self.thorough else x

    def _mix(self, product: _Product, weights: _Weights, first: bool, result: Tensor) -> Tensor:
        """The product of weights and values; q, k, v and the terms of the scores follow from what led here."""
        module, shape = self._innermost()
        mixed, v = product.canonical(result), product.b if first else product.a.mT
        mixed = mixed if first else mixed.mT
        call = _call(module, shape, weights, v, mixed)
        if isinstance(call, str):
            self.unclear[module] = f"{type(module).__name__}: {call}"
            return result

        def back(replaced: Tensor) -> Tensor:
            replaced = replaced.reshape(mixed.shape)
            return product.place(replaced if first else replaced.mT)

        return self._observed(call, result, back)

    def _observed(self, call: AttentionCall, result: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
        """The result of the model, or what the observer puts in its place."""
        exact = replace(call, result=None).mixed() if self.thorough else None
        if exact is not None and not same(exact, call.mixed(), max(_EXACT, 4 * torch.finfo(result.dtype).eps)):
            reason = "its mixed values are not those of a softmax of q·k with a bias, a cap or a sink"
            self.unclear[call.module] = f"{type(call.module).__name__}: {reason}"
            return result
        with suspended():
            mixed = self.observer(call)
        return result if mixed is call.result else back(mixed.to(result))


@contextmanager
def observing_attention(
    model: nn.Module, observer: AttentionObserver, traced: bool = True, thorough: bool = True
) -> Iterator[dict[nn.Module, str]]:
    """Until the block ends: pass every softmax attention of the model's forward passes to the observer.

    Modules of ``transformers`` that use its attention interface call the registered function; the operations of all others are
    followed (``traced=False`` leaves that out, where a pass has shown that there are none). The ``module`` of a call is the
    innermost one that computes the attention; a module that runs many times is observed every time. What the observer
    returns, (rows, heads, queries, value), replaces the mixed values; ``call.mixed()`` changes nothing.

    Rows of a call are not always rows of the batch: window attention counts windows as rows. Compare ``call.q.shape`` with the
    stream's before using it for a stream.

    ``thorough=False`` leaves out the checks of what an earlier pass has shown, which must be read from a device: that the
    values are mixed by a softmax of q·k, and which heads are alike.

    Yields:
        The modules whose attention is not of the form softmax(cap(scale·q·k) + bias) v, with the reason; filled while a pass
        runs. Their attention is not observed.
    """
    with ExitStack() as stack:
        stack.enter_context(observable(model))
        stack.enter_context(observing(observer, thorough))
        trace = AttentionTrace(model, observer, thorough)
        if traced:
            trace.install(stack)
        yield trace.unclear


def _by_head(x: Tensor) -> Tensor:
    """(rows, heads, tokens, head) of a tensor with any number of dimensions for heads."""
    return x[:, None] if x.ndim == 3 else x.flatten(1, -3)


def _opened(func: Any) -> Any:
    """A function of PyTorch that passes itself on as a whole, changed to pass on the operations inside it."""
    inside = {**func.__globals__, "has_torch_function": lambda *_: False}
    opened = FunctionType(func.__code__, inside, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


_OPERANDS = {"matmul": 0, "bmm": 0, "baddbmm": 1, "einsum": 1}  # where the first factor is
_POSITIONAL = {
    "matmul": ("input", "other"),
    "bmm": ("input", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "softmax": ("input", "dim"),
    "cat": ("tensors", "dim"),
}  # arguments that may be given by name


def _product(name: str, args: list[Any]) -> _Product | None:
    """The product of two batches of matrices that an operation computes."""
    start = _OPERANDS.get(name)
    if start is None or len(args) < start + 2:
        return None
    if name == "einsum":
        return _einsum(*args) if len(args) == 3 and isinstance(args[0], str) else None
    a, b = args[start : start + 2]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or min(a.ndim, b.ndim) < 3:
        return None
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    return _Product(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]), _same, _same)


def _same(x: Tensor) -> Tensor:
    return x


def _einsum(equation: str, a: Tensor, b: Tensor) -> _Product | None:
    """A sum over one index, as a product of matrices; None if it is something else."""
    if "." in equation or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    of_a, of_b = inputs.split(",")
    summed = set(of_a + of_b) - set(output)
    only_a, only_b = ([x for x in output if x in of and x not in other] for of, other in ((of_a, of_b), (of_b, of_a)))
    if len(summed) != 1 or not summed <= set(of_a) & set(of_b) or not only_a or not only_b:
        return None
    if any(len(set(x)) != len(x) for x in (of_a, of_b)) or min(len(of_a), len(of_b)) < 3:
        return None
    (d,), i, j = summed, only_a[-1], only_b[-1]
    batch = [x for x in output if x not in (i, j)]
    sizes = {**dict(zip(of_a, a.shape, strict=True)), **dict(zip(of_b, b.shape, strict=True))}

    def arranged(x: Tensor, labels: str, last: tuple[str, str]) -> Tensor:
        present = [label for label in batch if label in labels]
        x = x.permute(*(labels.index(label) for label in (*present, *last)))
        for place, label in enumerate(batch):
            if label not in labels:
                x = x.unsqueeze(place)
        return x.expand(*(sizes[label] for label in (*batch, *last)))

    order = [output.index(label) for label in (*batch, i, j)]
    inverse = [order.index(place) for place in range(len(order))]
    return _Product(
        arranged(a, of_a, (i, d)), arranged(b, of_b, (d, j)), lambda x: x.permute(*inverse), lambda x: x.permute(*order)
    )


def _follow(
    name: str, func: Any, args: list[Any], kwargs: dict[str, Any], x: Tensor, state: "_Scores | _Weights", result: Tensor
) -> _Scores | _Weights | None:
    """What an operation makes of scores or weights; None if nothing that is known."""
    if isinstance(state, _Weights):
        return state if name in _LAYOUT or name in ("masked_fill", "nan_to_num") else None
    if name in _LAYOUT and args[0] is x:
        return _laid_out(name, func, args, kwargs, state)
    if name == "softmax":
        return _Weights(state, args[0]) if _dim(args, kwargs) in (-1, args[0].ndim - 1) else None
    if name == "where":
        return state
    if name in _ADDED:
        return state if result.shape == state.raw.shape else None
    if name in _FACTORS:
        return _scaled(state, args[1] if args[0] is x else args[0], _FACTORS[name], args[0] is x)
    if name in _DIFFERENCES and args[0] is x:
        other = args[1]
        by_row = isinstance(other, Tensor) and other.ndim == x.ndim and other.shape[-1] == 1
        return replace(state, level=other if state.level is None else state.level + other) if by_row else state
    if name == "tanh":
        return replace(state, cap=1.0) if state.cap is None else None
    if name in ("cat", "concat"):
        return _with_sink(state, x, args, kwargs)
    return None


def _dim(args: list[Any], kwargs: dict[str, Any]) -> int | None:
    dim: int | None = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim


def _laid_out(name: str, func: Any, args: list[Any], kwargs: dict[str, Any], state: _Scores) -> _Scores | None:
    if state.sink is not None or state.level is not None:
        return state if name in ("float", "to", "type", "contiguous") else None

    def same_layout(x: Tensor) -> Tensor:
        shape = args[1:] if name != "view" else (args[1] if isinstance(args[1], tuple | list | torch.Size) else args[1:],)
        moved: Tensor = x.reshape(*shape) if name == "view" else func(x, *args[1:], **kwargs)
        return moved

    raw = same_layout(state.raw)
    factor = same_layout(state.factor) if isinstance(state.factor, Tensor) else state.factor
    grid = (raw.shape[0], math.prod(raw.shape[1:-2])) if raw.ndim > 3 else state.grid
    return replace(state, raw=raw, factor=factor, grid=grid)


def _scaled(state: _Scores, other: Any, power: int, first: bool) -> _Scores | None:
    """Scores times a number, or a number for every query; a mask of zeros and ones is part of the bias."""
    if not first and power < 0:
        return None
    if isinstance(other, Tensor) and other.numel() == 1:
        other = float(other)
    if isinstance(other, Tensor):
        if other.shape[-1] != 1:
            return state if bool(((other == 0) | (other == 1)).all()) else None
        other = other.expand(state.raw.shape)
    factor = other if power > 0 else 1 / other
    if state.cap is None:
        return replace(state, factor=factor * state.factor)
    return replace(state, cap=factor * state.cap) if isinstance(factor, int | float) else None


def _with_sink(state: _Scores, x: Tensor, args: list[Any], kwargs: dict[str, Any]) -> _Scores | None:
    """Scores beside one further logit of every row, which has no key."""
    parts, dim = args[0], _dim(args, kwargs)
    if len(parts) != 2 or parts[0] is not x or dim not in (-1, x.ndim - 1) or parts[1].shape[-1] != 1:
        return None
    return replace(state, sink=parts[1])


def _call(module: nn.Module, shape: tuple[int, ...], weights: _Weights, v: Tensor, mixed: Tensor) -> AttentionCall | str:
    """One attention from its operations; a reason if they are unsupported."""
    scores, logits = weights.scores, weights.logits
    keys = scores.raw.shape[-1]
    rows, heads = _grid(scores, logits, shape)
    by_head = (rows, heads, -1)
    raw = scores.raw.reshape(*by_head, keys)
    for a, b in ((scores.product.a, scores.product.b.mT), (scores.product.b.mT, scores.product.a)):
        if a.numel() == rows * heads * raw.shape[2] * a.shape[-1] and b.numel() == rows * heads * keys * b.shape[-1]:
            q, k = a.reshape(*by_head, a.shape[-1]), b.reshape(*by_head, b.shape[-1])
            product = q @ k.mT
            if product.shape == raw.shape and same(product, raw, max(_EXACT, 4 * torch.finfo(raw.dtype).eps)):
                break
    else:
        return "the layout of its scores is not that of heads"
    if v.numel() % (rows * heads * keys):
        return "its values do not belong to the keys"
    v, mixed = v.reshape(rows, heads, keys, -1), mixed.reshape(rows, heads, raw.shape[2], -1)
    scale, sink = scores.factor, None
    if isinstance(scale, Tensor):
        scale = scale.reshape(raw.shape)[..., :1]
    if scores.cap is not None:
        scale = scale * scores.cap
    logits = logits.reshape(*by_head, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    if scores.level is not None:
        logits = logits + scores.level.reshape(*by_head, 1)
    if scores.sink is not None:
        sinks = scores.sink.expand(*scores.raw.shape[:-1], 1).reshape(rows, heads, -1)
        sink, logits = sinks[0, :, 0], logits[..., :-1]
        if not bool((sinks == sink[None, :, None]).all()):
            return "its sinks are not numbers of its heads"
    capped = scale * product.to(logits)
    if scores.cap is not None:
        capped = scores.cap * torch.tanh(capped / scores.cap)
    size = float(capped.abs().max())
    attends, bias = _masked(logits - capped, size)
    kv_heads, v = heads // _shared(k, v), v.to(q)
    return AttentionCall(module, q, k, v, _few(attends), scale, scores.cap, kv_heads, _few(bias, size), sink, result=mixed)


def _grid(scores: _Scores, logits: Tensor, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and heads: of scores with both, else rows are those of what the module reads."""
    if logits.ndim > 3:
        return logits.shape[0], math.prod(logits.shape[1:-2])
    batch = logits.shape[0]
    if scores.grid is not None and math.prod(scores.grid) == batch:
        return scores.grid
    queries = logits.shape[-2]
    rows = next((n for n, m in ((shape[0], shape[1]), (shape[1], shape[0])) if m == queries and batch % n == 0), batch)
    return rows, batch // rows


def _masked(rest: Tensor, size: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """What is added to scores, as a mask that is True where a query attends, and a bias; None if it is rounding alone."""
    attends = (rest >= rest.amax(-1, keepdim=True) + _MASKED) & (rest > -torch.inf)
    bias = rest.masked_fill(~attends, 0.0)
    small = float(bias.abs().max()) <= _EXACT * max(size, torch.finfo(rest.dtype).tiny)
    return attends, None if small else bias


def _few(x: Tensor | None, size: float = 0.0) -> Any:
    """A tensor (rows, heads, queries, keys) with one row or one head where all are the same, up to rounding of its size."""
    if x is None:
        return None
    for dim in (0, 1):
        first = x.narrow(dim, 0, 1)
        if x.shape[dim] > 1 and not bool(((x ^ first) if x.dtype == torch.bool else (x - first).abs() > _EXACT * size).any()):
            x = first
    return x


def _shared(k: Tensor, v: Tensor) -> int:
    """How many query heads share each head of k and v, (rows, heads, keys, head)."""
    heads = k.shape[1]
    for shared in sorted((n for n in range(2, heads + 1) if heads % n == 0), reverse=True):
        if all(torch.equal(x, x[:, ::shared].repeat_interleave(shared, 1)) for x in (k, v)):
            return shared
    return 1
