"""A plain PyTorch loop in the style of nanoGPT, compiled and with accumulated gradients.

python examples/watch_plain.py; two lines are those of the watch: ``ns.watch(...)`` and ``watch.step(...)``.
"""

import shared
import torch
from gpt import GPT, Config
from torch import nn

import normscope as ns


def train(to: str | None, steps: int, every: int = 10, backend: str = "inductor", accumulate: int = 2) -> nn.Module:
    """Train a small GPT on the help pages of Python; without a watch if ``to`` is None."""
    torch.manual_seed(0)
    data, generator = shared.tokens(), torch.Generator().manual_seed(1)
    model = GPT(Config())
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    probe, _ = shared.batch(data, torch.Generator().manual_seed(2))
    watch = None if to is None else ns.watch(compiled, probe=probe, every=every, to=to)
    for _ in range(steps):
        for _ in range(accumulate):
            x, y = shared.batch(data, generator)
            _, loss = compiled(x, y)
            (loss / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if watch is not None:
            watch.step(loss=loss, rate=optimizer.param_groups[0]["lr"])  # before the gradients are cleared
        optimizer.zero_grad(set_to_none=True)
    if watch is not None:
        watch.close()
    return model


def main(arguments: list[str] | None = None) -> None:
    """Train, and show the page."""
    options = shared.options(__doc__, to="runs/plain")
    options.add_argument("--backend", default="inductor", help="of torch.compile: inductor, aot_eager or eager")
    given = options.parse_args(arguments)
    train(given.to, given.steps, backend=given.backend)
    shared.show(given.to)


if __name__ == "__main__":
    main()
