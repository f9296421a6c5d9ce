"""Training speed of the baseline shape on one GPU, against other people's decoders of the same shape.

    python benchmarks/training.py                      # batches of 128 and 8192; about five minutes, most of it compiling
    python benchmarks/training.py --batch 1024 --peers "plain PyTorch"

Every step is a whole one: forward pass, loss, backward pass, AdamW; bfloat16 products, no clipping. Peers get their data made
ahead, padded to 32 characters (the mean is 22, the longest example has 36: padding to all of it would cost them more), each
eager and compiled; normscope makes its data as it goes. The last line of each batch is normscope's rate over the best peer's.
"""

import argparse
import gc
import time

import torch

from normscope.training import Recipe, Training, read_recipe
from normscope.training.tasks import MASK, AdditionTask
from peers import PEERS, Shape, train_rate

_LENGTH = 32


def padded_batch(recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of the task as a peer reads it: characters and targets of the first 32 places."""
    drawn = AdditionTask.from_values(recipe.values).train.draw(recipe.batch, torch.Generator("cuda").manual_seed(0))
    targets = drawn.targets[:, :_LENGTH]
    return drawn.inputs[:, :_LENGTH].contiguous(), torch.where(targets == MASK, -100, targets).contiguous()


def own_rate(recipe: Recipe, seconds: float) -> float:
    """Examples a second of ``Training``, data included, after compilation."""
    rows = Training(recipe, "cuda").run()
    first = last = next(rows)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        last = next(rows)
    return (last.examples - first.examples) / (time.perf_counter() - start)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 8192])
    parser.add_argument("--scheme", nargs="+", default=["pre"])
    parser.add_argument("--peers", nargs="*", default=["plain PyTorch", "x-transformers", "Qwen3"])
    parser.add_argument("--seconds", type=float, default=2.0)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a GPU\n")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; examples a second")
    for batch in chosen.batch:
        own = {f"normscope, {scheme}": own_rate(_recipe(batch, scheme), 3 * chosen.seconds) for scheme in chosen.scheme}
        _show(batch, own)
        tokens, targets = padded_batch(_recipe(batch))
        best = 0.0
        for name in chosen.peers:
            build = PEERS[name]
            eager = train_rate(build(Shape()).cuda(), tokens, targets, compiled=False, seconds=chosen.seconds)
            compiled = train_rate(build(Shape()).cuda(), tokens, targets, compiled=True, seconds=chosen.seconds)
            _show(batch, {f"{name}, eager": eager, f"{name}, compiled": compiled})
            best = max(best, eager, compiled)
            gc.collect()
            torch.cuda.empty_cache()
        for name, rate in own.items():
            print(f"batch {batch:5}  {name} is {rate / best:.2f} times as fast as the best peer" if best else "", flush=True)


def _recipe(batch: int, scheme: str = "pre") -> Recipe:
    return read_recipe("baseline", {"batch": batch, "scheme": scheme, "examples": 10**12, "clip": 0.0})


def _show(batch: int, rates: dict[str, float]) -> None:
    for name, rate in rates.items():
        print(f"batch {batch:5}  {name:28} {rate:9,.0f}", flush=True)


if __name__ == "__main__":
    main()
