"""What attention modules make of any input: q, k, v, and the matrices that they come from, without names of their parts.

A module is run again with other hidden states in place of those that it received. Its matrices follow from where its products'
columns end up: products that return their own column numbers show which column every component of q, k and v is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normscope.core.norms import same
from normscope.errors import InputError
from normscope.models.attention_interface import AttentionCall, observable, observing
from normscope.models.attention_trace import AttentionTrace
from normscope.models.foreign import library_errors
from normscope.models.hooks import before, rotation_of, suspended
from normscope.models.inputs import device_of
from normscope.models.model import HeadProjections
from normscope.models.norm_modules import known_norm, width_of
from normscope.models.observe import AttentionStep, Rotation
from normscope.models.offload import weight_of
from normscope.models.precision import in_float32, wide
from normscope.models.record import is_norm
from normscope.models.wrapped import gathered

_NEAR = 1e-4
_ROTATION = "position_embeddings"
_POSITIONS = "position_ids"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class HeadReader:
    """Q, k and v of other inputs of attention modules than those of a forward pass.

    Args:
        model: the model.
        modules: its attention modules.
        run: runs the model on so many equal rows of the shortest input that it reads: one token, or one picture.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], run: Callable[[int], Any]) -> None:
        self.model, self._modules, self._run = model, list(modules), run
        self._calls: dict[int, tuple[Arguments, Arguments]] | None = None
        self._known: dict[nn.Module, _Columns] = {}

    @torch.no_grad()
    def heads(
        self, module: nn.Module, x: Float[Tensor, "rows tokens dim"], rotation: Rotation | None = None
    ) -> tuple[Tensor, ...]:
        """Q, k and v (rows, heads, tokens, head) of the input of attention, norms and rotation applied.

        Every token is read by itself. ``rotation`` is what ``hooks.rotation_of`` gives for a call; without it, q and k are not
        rotated.
        """
        count, tokens = x.shape[0] * x.shape[1], self._tokens(module)
        rows = -(-count // tokens)

        def filled(values: Tensor) -> Tensor:
            """(..., rows, tokens, width) in as many rows as the module is run with."""
            if not (values.ndim > 1 and values.shape[-2] in (1, x.shape[1])):
                raise InputError(f"unsupported architecture: {type(module).__name__} does not rotate every token")
            flat = values.expand(*values.shape[:-3], *x.shape[:2], values.shape[-1]).flatten(-3, -2)
            more = flat[..., :1, :].expand(*flat.shape[:-2], rows * tokens - count, flat.shape[-1])
            return torch.cat((flat, more), -2).view(*flat.shape[:-2], rows, tokens, flat.shape[-1])

        args, kwargs = self._arguments(module, rows, filled(x))
        if rotation is not None and rotation_of(kwargs) is None:
            kwargs[_POSITIONS] = filled(rotation[0][..., None])[..., 0]
        elif rotation is not None:
            given = rotation if x.shape[1] == tokens > 1 else tuple(map(filled, rotation))
            kwargs[_ROTATION] = given if len(given) > 1 else given[0]
        call = _intercepted(self.model, module, args, kwargs)
        if (call.q.shape[0], call.q.shape[2]) != (rows, tokens) or call.k.shape[2] != tokens:
            raise InputError(f"unsupported architecture: {type(module).__name__} does not make one q and k of every token")
        by_token = (y.transpose(0, 1).flatten(1, 2)[:, :count] for y in (call.q, call.k, call.v))
        return tuple(y.reshape(len(y), *x.shape[:2], -1).transpose(0, 1) for y in by_token)

    def require(self, module: nn.Module, step: AttentionStep) -> None:
        """Raise an error unless the module, run by itself, makes the q, k and v of a forward pass."""
        for letter, y, seen in zip("qkv", self.heads(module, step.input, step.rotation), (step.q, step.k, step.v), strict=True):
            if not bool(y.isfinite().all() & seen.isfinite().all()):
                raise InputError(f"{letter} of {type(module).__name__} is non-finite: its weights overflow")
            if y.shape != seen.shape or not _near(y, seen):
                raise InputError(
                    f"unsupported architecture: {letter} of {type(module).__name__} depends on more than its input"
                )

    def takes_positions(self, module: nn.Module) -> bool:
        """Whether the queries of a module depend on the numbers of positions that it is called with."""
        try:
            states = _states(*self._recorded(module)[0])
            assert states is not None
            first = torch.zeros(1, 1, dtype=torch.long, device=states.device)
            q, other = (self.heads(module, torch.ones_like(states[:1, :1]), (first + position,))[0] for position in (0, 1))
        except InputError:  # raised again by those who ask for its matrices
            return False
        return not torch.equal(q, other)

    def _recorded(self, module: nn.Module) -> tuple[Arguments, Arguments]:
        """What a module is called with for one row and for two."""
        if self._calls is None:
            passes = [self._record(rows) for rows in (1, 2)]
            self._calls = {key: (passes[0][key], passes[1][key]) for key in passes[0] if key in passes[1]}
        if id(module) not in self._calls:
            raise InputError(f"unsupported architecture: {type(module).__name__} is not called with hidden states")
        return self._calls[id(module)]

    def _record(self, rows: int) -> dict[int, Arguments]:
        calls: dict[int, Arguments] = {}

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _states(args, kwargs) is not None:
                calls.setdefault(id(module), (args, dict(kwargs)))

        with ExitStack() as stack:
            stack.enter_context(suspended())
            for module in self._modules:
                before(stack, module, keep)
            stack.enter_context(library_errors("unsupported architecture: the model does not run on its shortest input: "))
            stack.enter_context(observable(self.model))
            stack.enter_context(torch.no_grad())
            self._run(rows)
        return calls

    def _tokens(self, module: nn.Module) -> int:
        """How many tokens a row has, when the module is run."""
        states = _states(*self._recorded(module)[0])
        return 1 if states is None else states.shape[0] * states.shape[1]

    def _arguments(self, module: nn.Module, rows: int, x: Float[Tensor, "rows tokens dim"]) -> Arguments:
        """What the module is called with for these hidden states, q and k not rotated."""
        single, double = self._recorded(module)
        states, twice = _states(*single), _states(*double)
        assert states is not None
        assert twice is not None
        x = x if twice.shape[0] > states.shape[0] else x.transpose(0, 1)
        args, kwargs = (_repeated(one, two, rows, states, x) for one, two in zip(single, double, strict=True))
        rotation = rotation_of(kwargs)
        if rotation is not None:
            still = torch.ones_like(rotation[0]), *map(torch.zeros_like, rotation[1:])
            kwargs[_ROTATION] = still if len(still) > 1 else still[0]
        return args, kwargs

    @torch.no_grad()
    def projections(self, module: nn.Module, out: nn.Module, head_norms: Sequence[nn.Module] = ()) -> HeadProjections:
        """The matrices of an attention module by head, in float32 at least.

        Norms inside the module count as their gains, those of heads (``head_norms``), which act after the matrices, as nothing.

        Args:
            module: the attention module.
            out: what its mixed values go through.
            head_norms: the norms of q, k and v.
        """
        states = _states(*self._recorded(module)[0])
        assert states is not None
        norms = {part: _gain(part) for part in module.modules() if is_norm(part) and part not in head_norms}
        if module in self._known and not norms:  # which columns they are does not change with the weights; gains do
            known = self._known[module]
            return self._with_output([known.of(letter) for letter in "qkv"], known.kv_heads, out)
        with _replaced({**norms, **dict.fromkeys(head_norms, _unchanged)}):
            x = torch.randn(1, 3, states.shape[-1], generator=torch.Generator().manual_seed(0)).to(states)
            heads = self.heads(module, x)
            for method in (self._columns, self._images):
                with suppress(InputError):
                    parts, kv_heads = method(module, states)
                    products = (x.to(W)[:, None] @ W + b[:, None] for W, b in parts)
                    if all(map(_near, products, heads)):
                        break
                self._known.pop(module, None)
            else:
                raise InputError(
                    f"unsupported architecture: q, k and v of {type(module).__name__} are no products of its input"
                )
        return self._with_output(parts, kv_heads, out)

    def _with_output(self, parts: list[tuple[Tensor, Tensor]], kv_heads: int, out: nn.Module) -> HeadProjections:
        (W_Q, b_Q), (W_K, b_K), (W_V, b_V) = parts
        W_O = wide(messages_matrix(out, len(W_V)))
        return HeadProjections(W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, bias_of(out), len(W_Q) // kv_heads)

    def _columns(self, module: nn.Module, states: Tensor) -> tuple[list[tuple[Tensor, Tensor]], int]:
        """Matrices and biases, from runs with products that return 0, 1, and their column numbers; number of KV heads."""
        columns = _Columns(states.shape[-1], states.device)
        products = [part for part in module.modules() if _is_product(part)]
        for number in range(3):
            columns.run = number
            x = columns.values(states.shape[-1], 0).repeat(1, self._tokens(module), 1)
            with _replaced({part: columns.column_numbers(part) for part in products}):
                columns.end(_intercepted(self.model, module, *self._arguments(module, 1, x)))
        parts = [columns.of(letter) for letter in "qkv"]
        self._known[module] = columns
        return parts, columns.kv_heads

    def _images(self, module: nn.Module, states: Tensor) -> tuple[list[tuple[Tensor, Tensor]], int]:
        """Matrices and biases as the images of unit vectors and of 0; number of KV heads."""
        axes = torch.eye(states.shape[-1]).to(states)
        biases = [y[0] for y in self.heads(module, torch.zeros_like(axes[None, :1]))]
        images = [y[0] - b for y, b in zip(self.heads(module, axes[None]), biases, strict=True)]
        call = _intercepted(self.model, module, *self._arguments(module, 1, states.transpose(0, 1).reshape(1, -1, len(axes))))
        return [(W, b[:, 0]) for W, b in zip(images, biases, strict=True)], call.kv_heads


@dataclass
class _Linear:
    """Components that are factor · (a column) + constant, as seen in three runs."""

    seen: list[Tensor] = field(default_factory=list)

    @property
    def terms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Factor, number of the column, and constant of every component."""
        constant = self.seen[0]
        factor = self.seen[1] - constant
        number = torch.where(factor == 0, 0.0, (self.seen[2] - constant) / torch.where(factor == 0, 1.0, factor))
        whole = number.round()
        if bool(((number - whole).abs() > 1e-3).any()):
            raise InputError("unsupported architecture: q, k and v are not made of columns of matrix products")
        return factor, whole.long(), constant


class _Columns:
    """Which columns of which products q, k and v are; the input counts as a product with columns 1 to dim."""

    def __init__(self, dim: int, device: torch.device) -> None:
        self.dim, self.device = dim, device
        self.run = self.kv_heads = 0
        self._before: dict[nn.Module, int] = {}
        self._inputs: dict[nn.Module, _Linear] = {}
        self._heads = {letter: _Linear() for letter in "qkv"}
        self._numbered = dim

    def values(self, width: int, before: int) -> Float[Tensor, " width"]:
        """What stands for a vector in this run: 0, 1, or the numbers of its columns."""
        numbers = torch.arange(before + 1, before + width + 1, dtype=torch.float64, device=self.device)
        return numbers if self.run == 2 else torch.full_like(numbers, float(self.run))

    def column_numbers(self, product: nn.Module) -> Callable[..., Tensor]:
        """In place of a product: its column numbers, whatever it reads."""
        width = _shape(product)[1]

        def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
            if product not in self._before:
                self._before[product] = self._numbered
                self._numbered += width
            seen = self._inputs.setdefault(product, _Linear()).seen
            if len(seen) == self.run:
                seen.append(x.reshape(-1, x.shape[-1])[0].double())
            return self.values(width, self._before[product]).repeat(*x.shape[:-1], 1)

        return forward

    def end(self, call: AttentionCall) -> None:
        """Keep q, k and v of the first token."""
        self.kv_heads = call.kv_heads
        for letter, y in zip("qkv", (call.q, call.k, call.v), strict=True):
            self._heads[letter].seen.append(y[0, :, 0].double())

    def of(self, letter: str) -> tuple[Float[Tensor, "heads dim head"], Float[Tensor, "heads head"]]:
        """Matrix and bias of q, k or v by head."""
        shape = self._heads[letter].seen[0].shape
        rows, b = self._resolved(*(x.flatten() for x in self._heads[letter].terms))
        return rows.view(*shape, -1).mT, b.view(shape)

    def _resolved(self, factor: Tensor, number: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
        """The transposed matrix (components, dim) and the bias of components, from the input of the attention module."""
        used = number * (factor != 0)
        of_input = (used > 0) & (used <= self.dim)
        places = number[of_input, None] - 1
        axes = torch.zeros(len(places), self.dim, device=self.device).scatter_(1, places, 1.0)
        parts = [(of_input, axes, constant.new_zeros(()))]
        for product, last in self._before.items():
            chosen = (used > last) & (used <= last + _shape(product)[1])
            if bool(chosen.any()):
                columns = number[chosen] - last - 1
                rows, bias = wide(_taken(_weight(product).T, columns)), bias_of(product)[columns]
                inner = self._inputs[product].terms
                if not self._is_input(*inner):
                    before, before_bias = self._resolved(*inner)
                    rows, bias = rows @ before, bias + rows @ before_bias
                parts.append((chosen, rows, bias))
        if bool((factor == 1).all()) and bool(parts[-1][0].all()):
            return parts[-1][1], constant.to(parts[-1][1]) + parts[-1][2]
        dtype = parts[-1][1].dtype
        matrix, b = torch.zeros(len(number), self.dim, dtype=dtype, device=self.device), constant.to(dtype)
        for chosen, rows, bias in parts:
            matrix[chosen] = factor[chosen, None].to(dtype) * rows.to(dtype)
            b[chosen] += factor[chosen].to(dtype) * bias.to(dtype)
        return matrix, b

    def _is_input(self, factor: Tensor, number: Tensor, constant: Tensor) -> bool:
        """Whether a product reads the input of the attention module as it is."""
        plain = torch.arange(1, self.dim + 1, device=self.device)
        return torch.equal(number, plain) and bool((factor == 1).all()) and not bool(constant.any())


class _ReachedError(Exception):
    """Ends a run at the attention of interest."""

    def __init__(self, call: AttentionCall) -> None:
        super().__init__()
        self.call = call


def _intercepted(model: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall:
    """The attention that a module computes of arguments; what comes after it is not run."""

    def reach(call: AttentionCall) -> Tensor:
        raise _ReachedError(call)

    trace = AttentionTrace(module, reach)
    try:
        with ExitStack() as stack:
            stack.enter_context(library_errors(f"unsupported architecture: {type(module).__name__} cannot be run by itself: "))
            stack.enter_context(suspended())
            stack.enter_context(observable(model))
            stack.enter_context(observing(reach))
            trace.install(stack)
            stack.enter_context(gathered(model, module))
            stack.enter_context(in_float32(module))
            module(*wide(args), **{name: wide(value) for name, value in kwargs.items()})
    except _ReachedError as reached:
        return reached.call
    reason = next(iter(trace.unclear.values()), "it computes no softmax attention of one token")
    raise InputError(f"unsupported architecture: {type(module).__name__} cannot be run by itself: {reason}")


def _states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first tensor of real numbers that a module is called with: (rows, tokens, dim)."""
    given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3)
    return next(given, None)


def _repeated(one: Any, two: Any, rows: int, states: Tensor | None, x: Tensor) -> Any:
    """Arguments for so many rows, from those for one row and for two; x in place of the hidden states."""
    if one is states and one is not None:
        return x
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.repeat(*(rows if n != m else 1 for n, m in zip(one.shape, two.shape, strict=True))) if one.ndim else one
    if hasattr(one, "get_seq_length"):
        return None  # a cache of the keys of earlier tokens
    if isinstance(one, dict):
        return {key: _repeated(value, two[key], rows, states, x) for key, value in one.items()}
    if type(one) in (tuple, list):
        return type(one)(_repeated(value, other, rows, states, x) for value, other in zip(one, two, strict=True))
    return one


@contextmanager
def _replaced(forwards: dict[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Until the block ends: modules compute something else."""
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, forward in before.items():  # type: ignore[assignment]
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _near(x: Tensor, y: Tensor) -> bool:
    return same(x.to(y), y, max(_NEAR, 8 * torch.finfo(y.dtype).eps))


def _unchanged(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _gain(norm: nn.Module) -> Callable[..., Tensor]:
    """In place of a norm: its gain alone."""
    width = width_of(norm)
    if width is None:
        return _unchanged
    known = known_norm(norm, width, device_of(norm))
    if known is None:
        raise InputError(f"unsupported architecture: the {type(norm).__name__} inside attention is no norm of single vectors")
    return lambda x, *_, **__: x * known.gain.to(x)


def _is_product(module: nn.Module) -> bool:
    """Whether a module multiplies by one matrix."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding) and not any(module.children())
    )


def _shape(product: Any) -> tuple[int, int]:
    """The numbers of inputs and outputs of a product, which ``Conv1D`` keeps the other way round from ``Linear``."""
    outputs, inputs = product.weight.shape
    return (outputs, inputs) if type(product).__name__ == "Conv1D" else (inputs, outputs)


def _taken(rows: Tensor, numbers: Tensor) -> Tensor:
    """Some rows of a matrix; without a copy where they follow each other."""
    first, count = int(numbers[0]), len(numbers)
    plain = torch.equal(numbers, torch.arange(first, first + count, device=numbers.device))
    return rows[first : first + count] if plain else rows[numbers]


def bias_of(product: nn.Module) -> Float[Tensor, " outputs"]:
    """The bias of a product, in float32 at least; zeros where it has none."""
    bias, weight = weight_of(product, "bias"), _weight(product)
    return wide(weight.new_zeros(weight.shape[1]) if bias is None else bias)


def messages_matrix(out: nn.Module, heads: int) -> Float[Tensor, "heads value dim"]:
    """W_O by head, of the product that mixed values go through."""
    weight = _weight(out)
    return weight.reshape(heads, -1, weight.shape[1])


def _weight(product: Any) -> Float[Tensor, "inputs outputs"]:
    if not _is_product(product):
        raise InputError(f"unsupported architecture: a {type(product).__name__} has no weight matrix")
    weight = weight_of(product)
    assert weight is not None
    return weight if type(product).__name__ == "Conv1D" else weight.T
