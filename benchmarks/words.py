"""What probes of words cost: singular vectors of all heads, and nearest tokens of many words, in the shapes of GPT-2.

    python benchmarks/words.py                    # about two minutes on two cores
    python benchmarks/words.py --full 4           # more heads for the full decomposition, the rest scaled up

Singular vectors of 144 heads (d = 768, 64 to a head): from two QR decompositions and that of a 64×64 matrix; by
TransformerLens's FactoredMatrix, which decomposes both factors and the matrix between them (pip install --no-deps
transformer-lens==4.3.0 einops; left out if not there); by a decomposition of the whole 768×768 matrix, on a few heads. Nearest
tokens of 100 words by 12 heads among 50,257: in pieces that fit memory, against one bare product with all scores at once and
topk. Rivals take turns, and ratios are medians over turns: these machines are shared.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from normscope.measures.search import nearest
from normscope.models.factors import singular_factors

_HEADS, _DIM, _HEAD, _VOCABULARY, _WORDS = 144, 768, 64, 50_257, 100


def seconds(work: Callable[[], object]) -> float:
    """The time of a piece of work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def factored_matrix() -> Any:
    """TransformerLens's class, without what the package imports besides; None where it is not installed."""
    found = find_spec("transformer_lens")
    if found is None or not found.submodule_search_locations:
        return None
    (folder,) = found.submodule_search_locations
    for name in ("transformer_lens", "transformer_lens.utilities"):
        package = ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")[1:]))]
        sys.modules[name] = package
    return import_module("transformer_lens.FactoredMatrix").FactoredMatrix


def turns(works: Sequence[Callable[[], object]], count: int) -> list[list[float]]:
    """Times of all works in turn, after one turn to warm up."""
    return [[seconds(work) for work in works] for _ in range(count + 1)][1:]


def print_ratios(title: str, names: list[str], times: list[list[float]], scales: list[float]) -> None:
    """The median time of each, and the median over turns of how many times the first's it is."""
    print(title)
    for i, (name, scale) in enumerate(zip(names, scales, strict=True)):
        middle = median(turn[i] * scale for turn in times)
        ratio = median(turn[i] * scale / turn[0] for turn in times)
        print(f"  {name:<44} {1e3 * middle:10.1f} ms {ratio:8.2f} ×")


def singular(count: int, full: int) -> None:
    """Singular vectors of all heads by each way."""
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(_HEADS, *shape, generator=generator) / 8 for shape in ((_DIM, _HEAD), (_HEAD, _DIM)))
    names, scales = ["singular_factors"], [1.0]
    works: list[Callable[[], object]] = [lambda: singular_factors(A, B)]
    rival = factored_matrix()
    if rival is not None:
        names.append("TransformerLens FactoredMatrix.svd")
        works.append(lambda: rival(A, B).svd())
        scales.append(1.0)
        assert torch.allclose(rival(A[:2], B[:2]).S, singular_factors(A[:2], B[:2]).values, rtol=1e-3)
    names.append(f"torch.linalg.svd of A B ({full} heads, scaled)")
    works.append(lambda: torch.linalg.svd(A[:full] @ B[:full]))
    scales.append(_HEADS / full)
    print_ratios(f"singular vectors of {_HEADS} heads", names, turns(works, count), scales)


def bare(queries: Tensor, rows: Tensor) -> object:
    """All scores at once, then the best five."""
    return (queries @ rows.mT).topk(5)


def nearest_tokens(count: int) -> None:
    """Nearest keys by head, and nearest unembeddings of what heads write."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"keys": ((12, _WORDS, _HEAD), (12, _VOCABULARY, _HEAD)), "values": ((12 * _WORDS, _DIM), (_VOCABULARY, _DIM))}
    for name, (of_queries, of_rows) in shapes.items():
        queries, rows = (torch.randn(*shape, generator=generator) for shape in (of_queries, of_rows))
        times = turns([partial(bare, queries, rows), partial(nearest, queries, rows, 5)], count)
        title = f"nearest {name} of {_WORDS} words × 12 heads among {_VOCABULARY:,}"
        print_ratios(title, ["one product and topk", "nearest, in pieces"], times, [1.0, 1.0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--full", type=int, default=1, help="heads whose whole matrix is decomposed")
    chosen = parser.parse_args()
    torch.set_grad_enabled(False)
    singular(chosen.turns, chosen.full)
    nearest_tokens(chosen.turns)


if __name__ == "__main__":
    main()
