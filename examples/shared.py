"""What all examples have: text that every machine has, their options, and the page at the end."""

import argparse
import pydoc_data.topics
from contextlib import suppress

import torch
from torch import Tensor

from normscope.cli import main

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


def options(about: str | None, to: str) -> argparse.ArgumentParser:
    """The options of an example."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", default=to, help="the run folder of the watch")
    parser.add_argument("--steps", type=int, default=60)
    return parser


def show(to: str) -> None:
    """``normscope watch FOLDER``: write the page of a watched training, and print where it is."""
    with suppress(SystemExit):
        main(["watch", to])
