"""Attention against plain formulas, in every layout that the rooms below use."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from normscope import InputError
from normscope.core import Attention, HeadWeights, Mixing, attend, attention_weights
from normscope.core import attention as attention_core
from normscope.core.norms import theory_norm
from normscope.dynamics.motion import Motion
from normscope.schemes import Scheme, Slots


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(x: Tensor, w: HeadWeights, beta: float, heads: str, causal: bool, layer: bool = False) -> Tensor:
    """One set of tokens, head by head, token by token: the definition."""

    def norm(y: Tensor) -> Tensor:
        return functional.layer_norm(y, y.shape[-1:], eps=0) / y.shape[-1] ** 0.5 if layer else y / y.norm(dim=-1, keepdim=True)

    total = torch.zeros_like(x)
    for h in range(w.W_Q.shape[0]):
        q, k, v = (x @ weight[h] for weight in (w.W_Q, w.W_K, w.W_V))
        q, k, v = (norm(y) if c in heads else y for c, y in zip("qkv", (q, k, v), strict=True))
        for j in range(len(x)):
            seen = slice(0, j + 1) if causal else slice(None)
            weights = (beta * (k[seen] @ q[j])).softmax(0)
            total[j] += (weights @ v[seen]) @ w.W_O[h]
    return total


def weights(dim: int = 6, heads: int = 3, width: int = 2, runs: tuple[int, ...] = ()) -> HeadWeights:
    return HeadWeights(*(random(*runs, heads, dim, width, seed=s) for s in (1, 2, 3)), random(*runs, heads, width, dim, seed=4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", ["none", "qk", "qkv", "q"])
def test_attention_is_its_definition(heads: str, causal: bool) -> None:
    x, w = random(5, 6), weights()
    assert torch.allclose(Attention(0.7, w, causal)(x, Mixing(heads)), by_hand(x, w, 0.7, heads, causal), atol=1e-12)


@pytest.mark.parametrize("heads", ["qk", "qkv"])
def test_heads_have_the_norm_of_their_scheme(heads: str) -> None:
    x, w = random(5, 6), weights(width=4)
    scheme = Scheme("mine", Slots(input="norm", heads=heads), norm="layer")
    layered = Motion(scheme, Attention(0.7, w), 1.0).layer(x, 0.0)
    read = functional.layer_norm(x, (6,), eps=0) / 6**0.5
    torch.testing.assert_close(layered, x + by_hand(read, w, 0.7, heads, False, layer=True))
    pointwise = Motion(scheme.with_norm("tanh"), Attention(0.7, w), 1.0).layer(x, 0.0)
    torch.testing.assert_close(pointwise, x + by_hand(theory_norm("tanh")(x), w, 0.7, heads, False))


def test_runs_have_their_own_weights_and_schemes_share_them() -> None:
    x, w = random(2, 4, 5, 6), weights(runs=(2,))
    out = Attention(0.7, w)(x)
    for run in range(2):
        own = HeadWeights(*(getattr(w, name)[run] for name in ("W_Q", "W_K", "W_V", "W_O")))
        for scheme in range(4):
            assert torch.allclose(out[run, scheme], by_hand(x[run, scheme], own, 0.7, "none", False), atol=1e-12)


def test_folded_weights_do_the_same_with_half_the_products() -> None:
    x, w = random(3, 2, 5, 6), weights(heads=1, width=6, runs=(3,))
    folded = w.folded()
    assert folded.W_K is None
    assert folded.W_O is None
    assert torch.allclose(Attention(0.7, folded)(x), Attention(0.7, w)(x), atol=1e-12)
    assert weights().folded().W_K is not None  # several heads do not fold


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_queries_give_what_the_fused_kernel_gives(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_core.BLOCK_ENTRIES, "cpu", 40)  # a few rows at a time
    q, k, v = (random(2, 9, 4, seed=s) for s in (1, 2, 3))
    assert torch.allclose(attend(q, k, v, 0.5, causal, "blocks"), attend(q, k, v, 0.5, causal), atol=1e-13)
    assert torch.allclose(attention_weights(q, k, 0.5, causal) @ v, attend(q, k, v, 0.5, causal), atol=1e-13)


def test_half_precision_products_keep_the_state_as_it_is() -> None:
    x = random(7, 6).float()
    out = Attention(1.0, precision=torch.bfloat16)(x)
    assert out.dtype == torch.float32
    assert torch.allclose(out, Attention(1.0)(x), atol=0.05)
    assert not torch.equal(out, Attention(1.0)(x))


@pytest.mark.parametrize("weights", ["HeadWeights()", "HeadWeights(W_Q=torch.randn(1, 8, 4), W_K=torch.randn(1, 8, 4))"])
def test_memory_does_not_grow_with_the_square_of_the_tokens(weights: str) -> None:
    """16,384 tokens: their score matrix alone would be 1 GiB; the peak stays far below."""
    code = (
        "import resource, torch; from normscope.core import Attention, HeadWeights\n"
        "x = torch.randn(16_384, 8); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"Attention(1.0, {weights})(x)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 300_000  # KiB


def test_weights_from_a_file(tmp_path: Path) -> None:
    w = weights()
    path = tmp_path / "w.safetensors"
    save_file({name: getattr(w, name) for name in ("W_Q", "W_K", "W_V", "W_O")}, path)
    assert torch.equal(HeadWeights.read(path, 6).W_Q, w.W_Q)
    save_file({"W_V": random(6, 6)}, path)
    assert HeadWeights.read(path, 6).W_V.shape == (1, 6, 6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"W_X": random(6, 6)}, "unknown weight 'W_X'"),
        ({"W_Q": random(5, 5)}, "the tokens have dimension 6"),
        ({"W_Q": random(2, 6, 3), "W_K": random(3, 6, 3)}, "do not fit together"),
        ({"W_Q": random(6, 3), "W_K": random(6, 2)}, "do not fit together"),
        ({"W_V": random(6, 1)}, "do not fit together"),
        ({"W_V": random(2, 6, 6)}, "do not fit together"),
        ({"W_O": random(4, 6)}, "do not fit together"),
        ({}, "holds no weights"),
        ({"W_Q": random(6, 6) / 0}, "W_Q has an entry that is not a finite number"),
    ],
)
def test_wrong_weights_are_refused(tmp_path: Path, content: dict[str, Tensor], message: str) -> None:
    save_file(content, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=message):
        HeadWeights.read(tmp_path / "w.safetensors", 6)


def test_a_file_that_is_no_weights_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"not weights")
    with pytest.raises(InputError, match="cannot read"):
        HeadWeights.read(tmp_path / "w.safetensors", 6)
    with pytest.raises(InputError, match="no weights file"):
        HeadWeights.read(tmp_path / "none.safetensors", 6)


def test_beta_must_be_finite() -> None:
    with pytest.raises(InputError, match="beta is a finite number"):
        Attention(float("inf"))


TILE = """
import torch
from normscope.core import attend, attention_weights

generator = torch.Generator("cuda").manual_seed(0)
for shape, causal in (((7, 128, 512), False), ((7, 100, 128), True), ((3, 256, 64), False), ((3, 5, 64), True)):
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in "qkv")
    expected = attention_weights(q.double(), k.double(), 0.3, causal) @ v.double()
    got = attend(q, k, v, 0.3, causal, "tile").double()
    print(float((got - expected).norm() / expected.norm()))
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_for_few_tokens_agrees_with_float64() -> None:
    """In a process of its own: Triton compiles the source as it is, not as the run-time type checks rewrite it."""
    result = subprocess.run([sys.executable, "-c", TILE], capture_output=True, text=True, check=True)
    errors = [float(line) for line in result.stdout.split()]
    assert len(errors) == 4
    assert all(error < 0.01 for error in errors)  # not a NaN either


def test_logits_that_overflow_are_never_taken_for_keys_that_are_masked() -> None:
    """A row of logits −∞ has no softmax; fused kernels return 0 for it."""
    x = torch.ones(3, 4, dtype=torch.float64) * 1e200
    assert attend(x, x, x, -1.0).isnan().all()
