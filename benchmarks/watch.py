"""What watching costs: training steps with and without a watch, taken in turn in one run.

    python benchmarks/watch.py                       # GPT-2-small on a GPU, compiled, 64 × 1024 tokens; about four minutes
    python benchmarks/watch.py --small               # a small shape on two CPU cores; about four minutes
    python benchmarks/watch.py --profile             # where the time of a probe goes

The model is a plain PyTorch decoder of the named shape with weights in float32 and bfloat16 products (float32 on a CPU),
trained by AdamW on random tokens. Rounds without a watch, with one every 100 and with one every 10 steps follow each other,
each watch into a run folder of its own; a round has 100 steps, and the cost is the ratio of the medians over rounds. "Probe"
is what one probe adds, in training steps. Memory is the most that was allocated on the GPU.
"""

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normscope as ns
from normscope.watch import Watch
from peers import Shape, plain

SHAPES = {
    "GPT-2-small": (Shape(50_304, 768, 12, 12, 64, 3072), 64, 1024),
    "small": (Shape(1000, 128, 6, 4, 32, 512), 16, 128),
}
GOALS = {100: 0.01, 10: 0.08}  # share of the training time, by steps between probes
MEMORY = 0.05
ROUND = 100


class Trainer:
    """Whole training steps of a compiled model."""

    def __init__(self, shape: str, device: str) -> None:
        sizes, rows, tokens = SHAPES[shape]
        torch.manual_seed(0)
        self.device, self.model = device, plain(sizes).to(device)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randint(sizes.vocabulary, (rows, tokens), device=device)
        self.targets = self.batch.roll(-1, 1)
        self.loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = torch.compile(_loss)

    def step(self) -> Tensor:
        """Forward pass, backward pass, AdamW."""
        self.optimiser.zero_grad()
        loss = self.loss(self.model, self.batch, self.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        return loss

    def round(self, watch: "Watch | None", steps: int = ROUND) -> tuple[float, int]:
        """Seconds of so many steps, watched or not, and the most bytes that were allocated."""
        self._wait()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
            if watch is not None:
                watch.step(loss=loss)
        self._wait()
        return time.perf_counter() - began, torch.cuda.max_memory_allocated() if self.device == "cuda" else 0

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(shape: str, device: str, rounds: int, folder: Path) -> None:
    """Print what watching costs."""
    trainer = Trainer(shape, device)
    trainer.round(None, 10)  # compiles
    began = time.perf_counter()
    watches = {
        every: ns.watch(trainer.model, probe=trainer.batch, every=every, to=folder / f"every-{every}") for every in GOALS
    }
    opened = (time.perf_counter() - began) / len(watches)
    for watch in watches.values():
        trainer.step()
        watch.step()  # the first probe, of step 1
        watch.steps = 0
    seen: dict[int, list[tuple[float, int]]] = {0: [], **{every: [] for every in GOALS}}
    for _ in range(rounds):
        for every in seen:
            seen[every].append(trainer.round(watches.get(every)))
    for watch in watches.values():
        watch.close()
    seconds = {every: median(time for time, _ in times) for every, times in seen.items()}
    most = {every: max(size for _, size in times) for every, times in seen.items()}
    step = seconds[0] / ROUND
    print(
        f"one step {1e3 * step:.1f} ms, {trainer.batch.numel() / step:,.0f} tokens a second; opening the model {opened:.1f} s"
    )
    spread = [times[0] / seconds[0] - 1 for times in seen[0]]
    print(f"rounds without a watch differ by {100 * min(spread):+.2f} to {100 * max(spread):+.2f} %")
    for every, goal in GOALS.items():
        cost = seconds[every] / seconds[0] - 1
        memory = f", memory {100 * (most[every] / most[0] - 1):+.1f} % (goal {100 * MEMORY:.0f} %)" if most[0] else ""
        probe = cost * every
        print(
            f"every {every:3}: {100 * cost:+.2f} % (goal {100 * goal:.0f} %), a probe is {probe:.2f} steps{memory}", flush=True
        )


def profile(shape: str, device: str) -> None:
    """Print the functions in which a probe spends its time."""
    trainer = Trainer(shape, device)
    watch = ns.watch(trainer.model, probe=trainer.batch, every=1)
    for _ in range(3):
        watch.step(loss=trainer.step())
    loss, profiler = trainer.step(), cProfile.Profile()
    trainer._wait()
    profiler.enable()
    watch.step(loss=loss)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("cumtime").print_stats("normscope|torch._C", 40)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the small shape, on the CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    if not chosen.small and not torch.cuda.is_available():
        parser.exit(1, "this shape needs a GPU; --small runs on a CPU\n")
    shape, device = ("small", "cpu") if chosen.small else ("GPT-2-small", "cuda")
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{shape}, {machine}, torch {torch.__version__}")
    if chosen.profile:
        profile(shape, device)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(shape, device, chosen.rounds, Path(folder))


if __name__ == "__main__":
    main()
