"""What all examples have: text that every machine has, their options, and the page at the end."""

import argparse
import pydoc_data.topics
import subprocess
import sys

import torch
from torch import Tensor

VOCABULARY = 256
CONTEXT = 64


def tokens() -> Tensor:
    """The help pages of Python as bytes, (tokens)."""
    pages = "\n".join(pydoc_data.topics.topics.values())
    return torch.tensor(list(pages.encode()), dtype=torch.long)


def batch(data: Tensor, generator: torch.Generator, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the tokens that follow each of theirs, (rows, tokens) both."""
    starts = torch.randint(len(data) - CONTEXT - 1, (rows,), generator=generator).tolist()
    x, y = (torch.stack([data[i + shift : i + shift + CONTEXT] for i in starts]) for shift in (0, 1))
    return x, y


def parser(about: str | None, to: str, steps: int) -> argparse.ArgumentParser:
    """The options of an example."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--to", default=to, help="the run folder of the watch")
    made.add_argument("--steps", type=int, default=steps)
    return made


def show(to: str) -> None:
    """Write the page of a watched training, which prints where it is."""
    subprocess.run([sys.executable, "-m", "normscope", "watch", to], check=True)
