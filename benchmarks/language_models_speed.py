"""Training speed of a language model in the shape of GPT-2 small on one GPU, for every scheme, against other people's code.

    python benchmarks/language_models_speed.py                                # the peers and pre; most of it is compiling
    python benchmarks/language_models_speed.py --peers --schemes post,qk      # some schemes alone
    python benchmarks/language_models_speed.py --peers --schemes all          # every named scheme
    python benchmarks/language_models_speed.py --peers --profile              # pre, and the kernels that the time goes to

12 layers, width 768, 12 heads, 50,304 tokens, 1,024 tokens of context, tied embeddings; bfloat16 products, float32 weights. A
step is a whole one: forward pass, loss, backward pass, gradient clipping, AdamW. TFLOP/s count 6 operations for each token and
weight of a matrix, and the half of attention's that a causal mask leaves; nothing that is computed twice. The share is that of
the rate of one large bfloat16 product, measured in the same run. Times of compiling depend on what the machine has compiled
before. The table is also written as a CSV, into $OUT if there is one.
"""

import argparse
import csv
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.schemes import NAMED
from normscope.training import Recipe, read_recipe
from normscope.training.steps import optimiser_for, stepper_for
from normscope.training.tasks.text.task import TextFeed
from normscope.transformer import Transformer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, Config  # type: ignore[import-not-found]

VOCABULARY, CONTEXT, DIM, HEADS, HEAD = 50_304, 1024, 768, 12, 64
SWIGLU = 2048  # hidden width with as many weights as 4 · 768 has with GELU
STEPS = 4  # in a window of measurement


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    tokens_per_second: float
    tflops: float
    share_of_matrix_rate: float
    step_ms: float
    compile_seconds: float
    memory_gb: float
    weights: int


class PlainGPT(nn.Module):
    """examples/gpt.py, nanoGPT's block, without dropout: LayerNorm, GELU, biases, learned positions."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = GPT(Config(VOCABULARY, CONTEXT, layers, HEADS, DIM, dropout=0.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.model(tokens)[0]
        return logits


class Llama(nn.Module):
    """transformers' LlamaForCausalLM."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama import modeling_llama

        # Left to itself, the compiled model builds a mask, which rules out flash attention; without one it is causal.
        modeling_llama.create_causal_mask = _no_mask  # type: ignore[attr-defined]
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=DIM,
            intermediate_size=SWIGLU,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            use_cache=False,
        )
        self.model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def _no_mask(*args: Any, **options: Any) -> None:
    """The mask of plain causal attention."""


class XTransformers(nn.Module):
    """x-transformers' decoder with fused attention, its GELU and LayerNorm, rotary positions and tied embeddings."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from x_transformers import Decoder, TransformerWrapper  # type: ignore[import-not-found]

        decoder = Decoder(
            dim=DIM, depth=layers, heads=HEADS, attn_dim_head=HEAD, attn_flash=True, rotary_pos_emb=True, ff_no_bias=True
        )  # fmt: skip
        self.model = TransformerWrapper(
            num_tokens=VOCABULARY, max_seq_len=CONTEXT, use_abs_pos_emb=False, tie_embedding=True, attn_layers=decoder
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.model(tokens)
        return logits


PEERS: dict[str, Callable[[int], nn.Module]] = {"plain": PlainGPT, "llama": Llama, "x-transformers": XTransformers}


@dataclass(frozen=True)
class Peer:
    """Whole steps of other people's model, compiled with its loss as one graph."""

    model: nn.Module
    tokens: Tensor
    targets: Tensor

    def steps(self) -> Callable[[], None]:
        """A function that takes STEPS steps."""
        optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        compiled = torch.compile(self.loss, dynamic=False)

        def run() -> None:
            for _ in range(STEPS):
                compiled(self.tokens, self.targets).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)

        return run

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in float32 of a bfloat16 forward pass."""
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class Ours:
    """Whole steps of the trainer."""

    recipe: Recipe
    model: Transformer
    tokens: Tensor
    targets: Tensor

    @classmethod
    def of(cls, scheme: str, layers: int, tokens: Tensor, targets: Tensor) -> "Ours":
        """The shape of GPT-2 small with a scheme."""
        shape = {"layers": layers, "tied": True, "vocabulary": VOCABULARY, "context": CONTEXT, "batch": len(tokens)}
        recipe = read_recipe("gpt2", {"task": "text", "scheme": scheme, **shape})
        model = Transformer(recipe.model_for(recipe.data)).to(tokens.device)
        return cls(recipe, model, tokens, targets)

    def steps(self) -> Callable[[], None]:
        """A function that takes STEPS steps."""
        batches = {"characters": self.tokens.expand(STEPS, -1, -1), "targets": self.targets.expand(STEPS, -1, -1)}
        optimiser = optimiser_for(self.model, self.recipe, self.tokens.device)
        stepper = stepper_for(self.model, TextFeed(), optimiser, self.recipe, torch.bfloat16, batches)

        def run() -> None:
            rows = stepper.run(batches, [1e-4] * STEPS)
            if not rows[:, 0].isfinite().all():
                raise FloatingPointError(f"the loss became non-finite: {rows[:, 0].tolist()}")

        return run


def measure(name: str, trained: Peer | Ours, chosen: argparse.Namespace, matrix_rate: float) -> Row:
    """The fastest of many short windows, after compiling and warming up."""
    began = time.perf_counter()
    steps = trained.steps()
    steps()
    torch.cuda.synchronize()
    compiling = time.perf_counter() - began
    steps()
    windows: list[float] = []
    while sum(windows) < chosen.seconds or len(windows) < 3:
        began = time.perf_counter()
        steps()
        torch.cuda.synchronize()
        windows.append(time.perf_counter() - began)
    step, tokens, weights = min(windows) / STEPS, trained.tokens.numel(), matrix_weights(trained.model)
    rate = tokens * (6 * weights + 6 * chosen.layers * CONTEXT * DIM) / step
    if chosen.profile:
        profile(steps)
    memory = torch.cuda.max_memory_reserved() / 1e9
    return Row(name, tokens / step, rate / 1e12, rate / matrix_rate, 1e3 * step, compiling, memory, weights)


def matrix_weights(model: nn.Module) -> int:
    """Weights of matrices that tokens are multiplied with; the tied embedding once, positions not at all."""
    return sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "wpe" not in name and "gain" not in name)


def matrix_rate(size: int = 8192) -> float:
    """Operations a second of one large bfloat16 product, the best of many."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / 10)
    return 2 * size**3 / best


def profile(steps: Callable[[], None]) -> None:
    """The kernels that take the most time, in milliseconds of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        steps()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    print(f"  {total / 1e3 / STEPS:8.2f} ms of kernels in a step")
    for event in kernels[:40]:
        print(f"  {event.self_device_time_total / 1e3 / STEPS:8.2f} ms {event.count // STEPS:4d} × {event.key[:110]}")


def _forget() -> None:
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def rows(chosen: argparse.Namespace) -> Iterator[Row]:
    """The table, a row at a time."""
    rate = matrix_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; one large bfloat16 product: {rate / 1e12:.0f} TFLOP/s")
    print(f"{chosen.layers} layers, {chosen.batch} × {CONTEXT} tokens a step")
    print(f"{'':24} tokens/s  TFLOP/s  share    step  compile  memory")
    torch.manual_seed(0)
    tokens, targets = torch.randint(VOCABULARY, (2, chosen.batch, CONTEXT), device="cuda")
    for name in chosen.peers:
        _forget()
        try:
            yield measure(name, Peer(PEERS[name](chosen.layers).cuda().train(), tokens, targets), chosen, rate)
        except ImportError as error:
            print(f"{name:24} {error}")
    for scheme in chosen.schemes:
        _forget()
        yield measure(f"normscope {scheme}", Ours.of(scheme, chosen.layers, tokens, targets), chosen, rate)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="pre", help="comma-separated names, or all")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--seconds", type=float, default=3.0, help="of measurement for each row")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take the most time")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of the CSV")
    chosen = parser.parse_args()
    chosen.schemes = list(NAMED) if chosen.schemes == "all" else [name for name in chosen.schemes.split(",") if name]
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a GPU\n")
    torch.set_float32_matmul_precision("high")
    table: list[Row] = []
    best = 0.0
    for row in rows(chosen):
        table.append(row)
        peers = [other.tokens_per_second for other in table if other.name in PEERS]
        best = max(peers, default=0.0)
        against = f"  {row.tokens_per_second / best:.3f} of the best peer" if best and row.name not in PEERS else ""
        print(
            f"{row.name:24} {row.tokens_per_second:8,.0f} {row.tflops:8.0f} {100 * row.share_of_matrix_rate:5.1f} % "
            f"{row.step_ms:7.1f} {row.compile_seconds:6.0f} s {row.memory_gb:5.0f} GB{against}",
            flush=True,
        )
        file = chosen.out / "language_models_speed.csv"
        with file.open("w", newline="", encoding="utf-8") as content:
            writer = csv.DictWriter(content, list(asdict(row)))
            writer.writeheader()
            writer.writerows(asdict(row) for row in table)


if __name__ == "__main__":
    main()
