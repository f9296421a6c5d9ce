"""Other people's decoders at one shape, and how fast they train.

Every peer maps int64 tokens (batch, length) to logits (batch, length, vocabulary) and is set up the way that makes it fastest
without changing what it is: no biases, no dropout, causal attention by F.scaled_dot_product_attention without a mask tensor.
"""

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WARM_UP_STEPS = 5  # captured graphs run once plainly and once to record before they replay
WINDOWS = 3
COMPILE_MODES = ("default", "reduce-overhead")
SMALL_BATCH = 1024  # up to here captured graphs pay, beyond it they change nothing: on a GPU the other mode is not tried


@dataclass(frozen=True)
class Shape:
    """A causal decoder's sizes; heads × head need not equal the width."""

    vocabulary: int = 17
    width: int = 512
    layers: int = 10
    heads: int = 12
    head: int = 64
    hidden: int = 512


class PlainBlock(nn.Module):
    """Pre-norm attention and ReLU feed-forward, one product for queries, keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head = shape.heads, shape.head
        inner = shape.heads * shape.head
        self.norm_1 = nn.LayerNorm(shape.width, bias=False)
        self.qkv = nn.Linear(shape.width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, shape.width, bias=False)
        self.norm_2 = nn.LayerNorm(shape.width, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One layer on x (batch, length, width)."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, self.head)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(F.relu(self.up(self.norm_2(x))))
        return x


def plain(shape: Shape) -> nn.Module:
    """The short PyTorch decoder anyone would write: LayerNorm before each part, no positions."""
    return nn.Sequential(
        nn.Embedding(shape.vocabulary, shape.width),
        *(PlainBlock(shape) for _ in range(shape.layers)),
        nn.LayerNorm(shape.width, bias=False),
        nn.Linear(shape.width, shape.vocabulary, bias=False),
    )


def x_transformers(shape: Shape) -> nn.Module:
    """x-transformers' Decoder with its LayerNorm (its RMSNorm takes more kernels), ReLU and no positions."""
    from x_transformers import Decoder, TransformerWrapper  # type: ignore[import-not-found]

    layers = Decoder(
        dim=shape.width,
        depth=shape.layers,
        heads=shape.heads,
        attn_dim_head=shape.head,
        attn_flash=True,
        ff_mult=shape.hidden / shape.width,
        ff_custom_activation=nn.ReLU(),
        ff_no_bias=True,
        norm_add_unit_offset=False,
    )
    module: nn.Module = TransformerWrapper(num_tokens=shape.vocabulary, max_seq_len=0, attn_layers=layers)
    return module


class Qwen3(nn.Module):
    """transformers' Qwen3ForCausalLM as a map from tokens to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            head_dim=shape.head,
            intermediate_size=_gated(shape.hidden),
            tie_word_embeddings=False,
            use_cache=False,
        )
        self.model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of tokens (batch, length)."""
        # A ready dict without a mask: left to itself, the compiled model builds one, which rules out flash attention,
        # and the eager one looks for packed sequences at every step.
        mask: Any = {"full_attention": None}
        logits: Tensor = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return logits


def qwen3(shape: Shape) -> nn.Module:
    """Qwen3 with its RMSNorm, query-key norm, rotary positions and gated feed-forward.

    The three gated matrices get two thirds of the hidden size, rounded up to a multiple of 8 (512 gives 344), so that a
    token's feed-forward costs as many operations as a plain two-matrix one.
    """
    return Qwen3(shape)


PEERS: dict[str, Callable[[Shape], nn.Module]] = {"x-transformers": x_transformers, "Qwen3": qwen3, "plain PyTorch": plain}


def train_rate(module: nn.Module, tokens: Tensor, targets: Tensor, *, compiled: bool, seconds: float = 2.0) -> float:
    """Examples per second of full training steps of a module, which it trains on the way.

    Args:
        module: Maps tokens to logits (batch, length, vocabulary), on the tokens' device.
        tokens: Inputs (batch, length).
        targets: Classes (batch, length), −100 where there is no loss.
        compiled: Compile forward and loss, in the faster of the modes.
        seconds: About how long to measure, for each mode.
    """
    if compiled:
        return max(compiled_rates(module, tokens, targets, seconds=seconds).values())
    return _rate(_loss_of(module), module, tokens, targets, seconds)


def compiled_rates(module: nn.Module, tokens: Tensor, targets: Tensor, *, seconds: float = 2.0) -> dict[str, float]:
    """Examples per second for each mode of torch.compile that works on this module; an error where none does."""
    rates: dict[str, float] = {}
    errors: list[Exception] = []
    mode_that_pays = COMPILE_MODES[tokens.shape[0] <= SMALL_BATCH]
    for mode in (mode_that_pays,) if tokens.is_cuda else COMPILE_MODES:
        torch.compiler.reset()
        try:
            loss = torch.compile(_loss_of(module), mode=mode, dynamic=False)
            rates[mode] = _rate(loss, module, tokens, targets, seconds)
        except Exception as error:
            warnings.warn(f"torch.compile in mode {mode!r} failed: {error!r}", stacklevel=2)
            errors.append(error)
    torch.compiler.reset()
    if not rates:
        raise ExceptionGroup("torch.compile failed in every mode; measure with compiled=False", errors)
    return rates


def _loss_of(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy in float32 of a bfloat16 forward pass."""

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            logits = module(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)

    return loss


def _rate(
    loss: Callable[[Tensor, Tensor], Tensor], module: nn.Module, tokens: Tensor, targets: Tensor, seconds: float
) -> float:
    """Examples per second: the median of the windows, after steps to warm up and a few to size the windows."""
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss(tokens, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    _window(step, WARM_UP_STEPS, tokens.device)
    pilot = _window(step, 3, tokens.device) / 3
    count = max(1, round(seconds / WINDOWS / pilot))
    return tokens.shape[0] * count / statistics.median(_window(step, count, tokens.device) for _ in range(WINDOWS))


def _window(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Seconds that so many steps take, by CUDA events where there are any."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(count):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _gated(hidden: int) -> int:
    """Hidden size at which three matrices cost what two do at this one, a multiple of 8."""
    return -(-2 * hidden // 3 // 8) * 8
