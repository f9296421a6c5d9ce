"""Which keys a query attends to: every mask against a softmax written out, and nothing else let in."""

import subprocess
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normscope.core import (
    AttentionMask,
    CausalMask,
    HeadNorm,
    PackedMask,
    PaddingMask,
    has_kernel,
    kernels,
    pack_tiles,
    tile_for,
)
from normscope.core.kernels import triton_installed

HEADS, HEAD = 3, 4
SCALE = torch.tensor(0.7, dtype=torch.float64)
LENGTHS = [5, 1, 9, 8, 16, 3, 2, 7]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def qkv(rows: int, tokens: int, seed: int = 0) -> list[Tensor]:
    """q, k and v, (rows, heads, tokens, head)."""
    return [random(rows, HEADS, tokens, HEAD, seed=3 * seed + i) for i in range(3)]


def packed(lengths: list[int], tile: int = 16) -> PackedMask:
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return PackedMask(segments.int(), pack_tiles(torch.tensor([lengths]), sum(lengths), tile)[0], tile)


def allowed(mask: AttentionMask, rows: int, tokens: int) -> Tensor:
    """Who sees whom, (rows, tokens, tokens), from the words of each definition."""
    earlier = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    match mask:
        case PaddingMask():
            return mask.keys[:, None, :].expand(rows, tokens, tokens)
        case PackedMask():
            return (earlier & (mask.segments[:, None] == mask.segments[None, :]))[None]
    return earlier.expand(rows, tokens, tokens)


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The definition: query by query, over the keys it sees and no others."""
    rows, heads, tokens, _ = q.shape
    out = [
        (SCALE * (k[r, h][seen[r, i]] @ q[r, h, i])).softmax(0) @ v[r, h][seen[r, i]]
        for r in range(rows)
        for h in range(heads)
        for i in range(tokens)
    ]
    return torch.stack(out).view_as(q)


def masks() -> list[tuple[AttentionMask, int, int]]:
    """Every mask with the rows and tokens to try it on."""
    present = torch.tensor([[True] * 7, [True] * 3 + [False] * 4, [False, True, False, True, True, False, True]])
    return [(CausalMask(), 3, 7), (PaddingMask(present), 3, 7), (packed(LENGTHS), 1, sum(LENGTHS))]


every_mask = pytest.mark.parametrize(("mask", "rows", "tokens"), masks(), ids=["causal", "padding", "packed"])


@every_mask
def test_a_mask_is_a_softmax_over_what_it_sees_forward_and_backward(mask: AttentionMask, rows: int, tokens: int) -> None:
    inputs = [x.requires_grad_() for x in qkv(rows, tokens)]
    got, expected = mask(*inputs, SCALE), by_hand(*inputs, allowed(mask, rows, tokens))
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    upstream = random(*got.shape, seed=9)
    for mine, theirs in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (got, expected)), strict=True):
        assert theirs.abs().max() > 0.1
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


def test_packed_examples_are_the_examples_one_by_one() -> None:
    inputs = [x.requires_grad_() for x in qkv(1, sum(LENGTHS))]
    alone = torch.cat([CausalMask()(*part, SCALE) for part in zip(*(x.split(LENGTHS, 2) for x in inputs), strict=True)], 2)
    together = packed(LENGTHS)(*inputs, SCALE)
    assert torch.allclose(together, alone, rtol=0, atol=1e-12)
    upstream = random(*alone.shape, seed=9)
    for mine, theirs in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (together, alone)), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


@every_mask
def test_one_stacked_tensor_gives_what_three_give(mask: AttentionMask, rows: int, tokens: int) -> None:
    q, k, v = qkv(rows, tokens)
    stacked = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
    assert torch.allclose(mask.stacked(stacked, SCALE), mask(q, k, v, SCALE), rtol=0, atol=1e-14)


@every_mask
@pytest.mark.parametrize(("letters", "kind"), [("qkv", "rms"), ("qk", "layer"), ("", "rms")])
def test_stacked_heads_are_normalised_and_scaled_first(
    mask: AttentionMask, rows: int, tokens: int, letters: str, kind: str
) -> None:
    """Against torch's own layers, head by head."""
    own = {"rms": F.rms_norm, "layer": F.layer_norm}[kind]
    parts, gains = qkv(rows, tokens), random(3, HEADS, HEAD, seed=5)
    expected = [
        (own(x, (HEAD,), eps=1e-12) if letter in letters else x) * gain[:, None]
        for letter, x, gain in zip("qkv", parts, gains, strict=True)
    ]
    got = mask.stacked(torch.stack([x.transpose(1, 2) for x in parts], 2), SCALE, HeadNorm(letters, kind, gains))
    assert torch.allclose(got, mask(*expected, SCALE), rtol=0, atol=1e-12)


@every_mask
def test_scores_are_those_of_all_pairs_that_the_mask_allows(mask: AttentionMask, rows: int, tokens: int) -> None:
    q, k, _ = qkv(rows, tokens)
    scores, seen = mask.scores(q, k)
    found = scores[seen.expand_as(scores)].sort().values
    expected = (q @ k.mT)[allowed(mask, rows, tokens)[:, None].expand(rows, HEADS, -1, -1)].sort().values
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mask", "rows", "tokens"), masks()[:2], ids=["causal", "padding"])
def test_softmax_of_the_scores_mixes_what_the_call_mixes(mask: AttentionMask, rows: int, tokens: int) -> None:
    q, k, v = qkv(rows, tokens)
    scores, seen = mask.scores(q, k)
    weights = (SCALE * scores).masked_fill(~seen, -torch.inf).softmax(-1)
    assert torch.allclose(weights @ v, mask(q, k, v, SCALE), rtol=0, atol=1e-12)


def test_softmax_of_packed_scores_mixes_what_the_call_mixes() -> None:
    """Tile by tile: a tile's scores are between its own tokens, in their order."""
    mask, (q, k, v) = packed(LENGTHS), qkv(1, sum(LENGTHS))
    scores, seen = mask.scores(q, k)
    mixed = []
    for i, (start, end) in enumerate(pairwise(mask.tiles.tolist())):
        size = end - start
        own = (SCALE * scores[i]).masked_fill(~seen[i], -torch.inf)[:, :size, :size]
        assert not seen[i, :, size:].any()
        mixed.append(own.softmax(-1) @ v[0, :, start:end])
    assert torch.allclose(torch.cat(mixed, 1)[None], mask(q, k, v, SCALE), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", [CausalMask(), packed([12])], ids=["causal", "packed"])
@pytest.mark.parametrize("changed", [1, 6, 11])
def test_later_tokens_change_nothing_before_them(mask: AttentionMask, changed: int) -> None:
    before = qkv(1, 12)
    after = [
        torch.cat((x[:, :, :changed], 100 * y[:, :, changed:]), 2) for x, y in zip(before, qkv(1, 12, seed=1), strict=True)
    ]
    first, second = (mask(*x, SCALE) for x in (before, after))
    assert torch.equal(first[:, :, :changed], second[:, :, :changed])
    assert not torch.isclose(first[:, :, changed:], second[:, :, changed:]).any()


def test_other_examples_of_a_packed_row_change_nothing() -> None:
    mask, before, others = packed(LENGTHS), qkv(1, sum(LENGTHS)), qkv(1, sum(LENGTHS), seed=1)
    first = mask(*before, SCALE)
    for number in range(len(LENGTHS)):
        own = (mask.segments == number)[:, None]
        second = mask(*(torch.where(own, x, 100 * y) for x, y in zip(before, others, strict=True)), SCALE)
        assert torch.equal(first[:, :, own[:, 0]], second[:, :, own[:, 0]])


def test_where_an_example_lies_changes_nothing() -> None:
    example, fill = qkv(1, 6), qkv(1, 40, seed=1)
    alone = packed([6])(*example, SCALE)
    for before in ([], [4], [16, 3], [10, 5, 8]):
        row = [torch.cat((y[:, :, : sum(before)], x, y[:, :, -2:]), 2) for x, y in zip(example, fill, strict=True)]
        among = packed([*before, 6, 2])(*row, SCALE)[:, :, sum(before) : sum(before) + 6]
        assert torch.allclose(among, alone, rtol=0, atol=1e-12), before


def test_keys_that_are_not_there_change_nothing() -> None:
    there = torch.tensor([[True] * 4 + [False] * 3, [True, False, True, False, False, True, True]])
    q, k, v = qkv(2, 7)
    first = PaddingMask(there)(q, k, v, SCALE)
    k, v = (torch.where(there[:, None, :, None], x, 100 * random(*x.shape, seed=8)) for x in (k, v))
    assert torch.equal(first, PaddingMask(there)(q, k, v, SCALE))
    without = PaddingMask(there[:1, :4])(q[:1], k[:1, :, :4], v[:1, :, :4], SCALE)  # padding cut off
    assert torch.allclose(first[:1], without, rtol=0, atol=1e-12)


def test_queries_need_not_be_as_many_as_the_keys_that_are_there() -> None:
    there = torch.tensor([[True, True, False, True, True]])
    q, k, v = random(1, HEADS, 2, HEAD), random(1, HEADS, 5, HEAD, seed=1), random(1, HEADS, 5, HEAD, seed=2)
    seen = there[0]
    expected = (SCALE * (q @ k[:, :, seen].mT)).softmax(-1) @ v[:, :, seen]
    assert torch.allclose(PaddingMask(there)(q, k, v, SCALE), expected, rtol=0, atol=1e-12)


def next_fit(lengths: list[int], tile: int) -> list[int]:
    """Where tiles begin, example by example."""
    begins, at = [0], 0
    for length in lengths:
        if at + length - begins[-1] > tile:
            begins.append(at)
        at += length
    return begins


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 32), min_size=1, max_size=40).filter(any))
def test_tiles_take_as_many_whole_examples_as_fit(lengths: list[int]) -> None:
    tokens = sum(lengths)
    tiles = pack_tiles(torch.tensor([lengths]), tokens, 32)[0].tolist()
    begins = next_fit(lengths, 32)
    assert tiles[: len(begins)] == begins
    assert tiles[len(begins) :] == [tokens] * (len(tiles) - len(begins))
    assert tiles[-1] == tokens
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    assert set(tiles) <= {0, *ends}
    assert all(0 <= b - a <= 32 for a, b in pairwise(tiles))


def test_rows_are_packed_each_by_itself() -> None:
    lengths = torch.randint(0, 17, (20, 30), generator=torch.Generator().manual_seed(0))
    tokens = int(lengths.sum(1).max())
    lengths = torch.cat((lengths, _split(tokens - lengths.sum(1), 16)), 1)  # fill each row up to the longest
    tiles = pack_tiles(lengths, tokens, 16)
    assert tiles.dtype == torch.int32
    for row, found in zip(lengths.tolist(), tiles.tolist(), strict=True):
        begins = next_fit(row, 16)
        assert found == begins + [tokens] * (len(found) - len(begins))


def _split(amounts: Tensor, most: int) -> Tensor:
    pieces = -(-int(amounts.max()) // most)
    return (amounts[:, None] - most * torch.arange(pieces)).clamp(0, most)


@pytest.mark.parametrize(
    ("longest", "tile"), [(1, 32), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128), (129, None), (5000, None)]
)
def test_the_smallest_tile_that_holds_an_example(longest: int, tile: int | None) -> None:
    assert tile_for(longest) == tile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_cpu_has_no_kernel(dtype: torch.dtype) -> None:
    assert not has_kernel(torch.device("cpu"), dtype, 64)


def test_a_gpu_with_triton_has_a_kernel_for_half_precision_and_usual_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(kernels, "_TRITON", False)
    assert not has_kernel(gpu, torch.bfloat16, 64)
    monkeypatch.setattr(kernels, "_TRITON", True)
    assert all(has_kernel(gpu, dtype, head) for dtype in (torch.bfloat16, torch.float16) for head in (16, 32, 64, 128))
    assert not has_kernel(gpu, torch.float32, 64)
    assert not has_kernel(gpu, torch.bfloat16, 24)


def test_a_stub_that_another_library_left_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert not triton_installed()


KERNEL = """
import torch
from normscope.core import HeadNorm, pack_tiles
from normscope.core.packed import _attend_plainly, attend_packed

generator = torch.Generator("cuda").manual_seed(0)
scale = torch.tensor(0.3, device="cuda")
sizes = ((32, 16, 32), (64, 64, 40), (128, 32, 128), (64, 128, 9))
for (tile, head, most), letters, kind in zip(sizes, ("", "qkv", "qk", "qk"), ("rms", "rms", "rms", "layer")):
    lengths = torch.randint(1, most + 1, (1, 50), device="cuda", generator=generator)
    tokens = int(lengths.sum())
    segments = torch.repeat_interleave(torch.arange(50, device="cuda"), lengths[0]).int()
    tiles = pack_tiles(lengths, tokens, tile)[0]
    qkv = torch.randn(tokens, 3, 5, head, device="cuda", generator=generator).bfloat16().requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    gains = (0.5 + torch.rand(3, 5, head, device="cuda", generator=generator)).requires_grad_()
    wide = gains.detach().double().requires_grad_()
    norm = HeadNorm(letters, kind, gains) if letters else None
    got = attend_packed(qkv, segments, tiles, scale, tile, norm)
    normalised = HeadNorm(letters, kind, wide)(exact) if letters else exact
    expected = _attend_plainly(normalised, segments, tiles, scale.double(), tile)
    upstream = torch.randn(got.shape, device="cuda", generator=generator).bfloat16()
    got.backward(upstream)
    expected.backward(upstream.double())
    pairs = [(got, expected), *zip(qkv.grad.unbind(1), exact.grad.unbind(1))]
    for mine, theirs in pairs + ([(gains.grad, wide.grad)] if letters else []):
        print(((mine.double() - theirs).norm() / theirs.norm()).item())
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_for_packed_examples_agrees_with_float64_forward_and_backward() -> None:
    """In a process of its own: Triton compiles the source as it is, not as the run-time type checks rewrite it."""
    result = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, text=True, check=True)
    errors = [float(line) for line in result.stdout.split()]
    assert len(errors) == 19
    assert all(error < 0.01 for error in errors)  # not a NaN either
