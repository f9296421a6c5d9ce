"""What a GPU compiles: one block for all layers, the readout with the loss, and fused kernels."""

import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from normscope.core import Scores, attend_scored
from normscope.core.cross_entropy import cross_entropy
from normscope.core.fused_scores import attend_with_sink, causal_blocks
from normscope.core.swiglu import swiglu

ONE_BLOCK = """
from functools import partial
import torch
from torch._dynamo.utils import counters
from normscope.core import CausalMask
from normscope.schemes import Scheme, Slots, find_scheme
from normscope.training.steps import next_token_loss
from normscope.transformer import Row, Transformer, TransformerConfig
from normscope.transformer.model import call

late = Scheme("late", Slots(input="norm*alpha", scores="sink+temperature(1 + log(n))", step="alpha/sqrt(layer)"), alpha="layer")
early = Scheme("early", Slots(input="norm/layer", stream="norm", inner="norm", gate="sigmoid"), until=0.4, then=late)
torch.manual_seed(0)
shape = dict(vocabulary=300, dim=16, layers=6, heads=2, head=8, feedforward=24, readout=(), positions="rope", initial_std=0.2,
             activation="swiglu", biases=False, shared_gains=True)
model = Transformer(TransformerConfig(early, **shape))
tokens, targets = torch.randint(300, (2, 2, 9))
row = Row(tokens, torch.arange(9)[None], CausalMask())
compiled = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
losses, gradients = [], []
for run, loss_of in ((compiled(call), compiled(next_token_loss)), (call, next_token_loss)):
    model.zero_grad()
    loss, _ = loss_of(model.readout, model.states(row, run=run).flatten(0, 1), model.unembedding, targets.flatten(), -100)
    loss.backward()
    losses.append(loss.item())
    gradients.append({name: value.grad.clone() for name, value in model.named_parameters()})
assert abs(losses[0] - losses[1]) < 1e-5, losses
for name, expected in gradients[1].items():
    assert (gradients[0][name] - expected).norm() <= 1e-3 * expected.norm() + 1e-7, name
print(counters["stats"]["unique_graphs"])
"""


def test_one_compiled_block_serves_all_layers_of_a_stage() -> None:
    """Embedding, one block for each of two stages of six layers, readout with loss; in a process without type checks."""
    result = subprocess.run([sys.executable, "-c", ONE_BLOCK], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "4"


def test_fused_attention_with_a_sink_is_the_softmax_with_one_more_logit() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = torch.randn(4, 2, 3, 9, 8, dtype=torch.float64, generator=generator).unbind()
    sink = torch.randn(3, dtype=torch.float64, generator=generator)
    inputs = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    fused = attend_with_sink(0.5 * inputs[0], *inputs[1:])
    plain = attend_scored(*inputs[:3], 0.5, Scores(sink=0.0), True, inputs[3])
    assert torch.allclose(fused, plain, rtol=0, atol=1e-12)
    gradients = (torch.autograd.grad((out * upstream).sum(), inputs) for out in (fused, plain))
    for mine, theirs in zip(*gradients, strict=True):
        assert theirs.norm() > 0.1
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


def test_blocks_of_a_causal_mask_are_those_of_earlier_keys() -> None:
    blocks = causal_blocks(1024, torch.device("cpu"))
    seen = blocks.mask_mod(torch.tensor(0), torch.tensor(0), torch.arange(1024)[:, None], torch.arange(1024)[None])
    assert torch.equal(seen, torch.ones(1024, 1024, dtype=torch.bool).tril())
    assert blocks.sparsity() == 43.75  # percent: 28 of 64 blocks


NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
FUSED = """
import torch
import torch.nn.functional as F
from normscope.core.cross_entropy import cross_entropy
from normscope.core.swiglu import swiglu

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":  # the kernels themselves, interpreted
    from normscope.core.cross_entropy_kernel import fused_cross_entropy
    from normscope.core.swiglu_kernel import fused_swiglu
else:
    fused_swiglu = swiglu
    def fused_cross_entropy(x, weights, targets, ignored):
        return *cross_entropy(x, weights, None, targets, ignored), None

generator = torch.Generator(device).manual_seed(0)
def drawn(*shape):
    return torch.randn(shape, device=device, generator=generator).bfloat16()
"""
AGREE = """
def errors(got, expected):
    for mine, theirs in zip(got, expected):
        print(((mine.double() - theirs).norm() / theirs.norm()).item())

for shape in ((3, 5, 600), (17, 128)):
    hidden, upstream = drawn(*shape).requires_grad_(), drawn(*shape[:-1], shape[-1] // 2)
    exact = hidden.detach().double().requires_grad_()
    got, expected = fused_swiglu(hidden), swiglu(exact)
    got.backward(upstream), expected.backward(upstream.double())
    errors((got, hidden.grad), (expected, exact.grad))
for positions, dim, vocabulary in ((70, 16, 9001), (50, 8, 300)):
    x, weights = drawn(positions, dim).requires_grad_(), drawn(vocabulary, dim).T.requires_grad_()
    logits = (x @ weights).detach()
    targets = torch.randint(vocabulary, (positions,), device=device, generator=generator)
    targets[:20], targets[20:30] = logits[:20].argmax(1), -100
    share = torch.rand(positions, device=device, generator=generator)
    exact = [value.detach().double().requires_grad_() for value in (x, weights)]
    losses, right, _ = fused_cross_entropy(x, weights, targets, -100)
    wide, expected = cross_entropy(*exact, None, targets, -100)
    (losses * share).sum().backward(), (wide * share).sum().backward()
    errors((losses, x.grad, weights.grad), (wide, *(value.grad for value in exact)))
    assert losses[20:30].abs().max() == 0 and not right[20:30].any() and right[:20].all(), right
"""
TWICE = """
x, weights = drawn(6, 8).requires_grad_(), drawn(8, 9).requires_grad_()
targets = torch.randint(9, (6,), device=device, generator=generator)

def loss(x, weights):
    return fused_cross_entropy(fused_swiglu(torch.cat((x, x), 1)), weights, targets, -100)[0].sum()

compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend="aot_eager")
pairs = zip(*(torch.autograd.grad(f(x, weights), (x, weights)) for f in (compiled, loss)))
print("same" if all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in pairs) else "different")
gated = torch.autograd.grad(fused_swiglu(x).float().square().sum(), x, create_graph=True)
read = torch.autograd.grad(fused_cross_entropy(x, weights, targets, -100)[0].sum(), (x, weights), create_graph=True)
for gradient in (*gated, *read):
    try:
        torch.autograd.grad(gradient.float().square().sum(), (x, weights), allow_unused=True)
        print("silent")
    except Exception as error:
        print(type(error).__name__)
"""


def fused(code: str) -> list[str]:
    """What a program prints, word by word, in a process of its own: Triton compiles the source as it is, not as the run-time
    type checks rewrite it.

    Without a GPU Triton interprets it.
    """
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command, environment = [sys.executable, "-c", FUSED + code], os.environ | interpreted
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()


@NEEDS_TRITON
def test_fused_kernels_of_a_step_agree_with_float64_forward_and_backward() -> None:
    errors = [float(error) for error in fused(AGREE)]
    assert len(errors) == 10
    assert all(error < 0.01 for error in errors)  # not a NaN either


@NEEDS_TRITON
def test_fused_kernels_of_a_step_have_first_derivatives_alone() -> None:
    """The same ones compiled, and an error for second derivatives, which they would not have in full."""
    assert fused(TWICE) == ["same", "RuntimeError", "InputError", "InputError"]


def test_the_loss_of_tokens_is_their_negative_log_probability() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weights, bias = (torch.randn(shape, generator=generator) for shape in ((6, 4), (4, 9), (9,)))
    targets = torch.tensor([0, 3, -100, 8, 5, -100])
    bias[0] += 20 * (x[2] @ weights).abs().max()  # an ignored target is no token, not even the most probable one
    logits = x @ weights + bias
    targets[4] = logits[4].argmax()
    losses, right = cross_entropy(x, weights, bias, targets, -100)
    wanted = targets != -100
    expected = -logits.double().softmax(1).log().gather(1, targets.clamp(min=0)[:, None])[:, 0]
    assert torch.allclose(losses.double(), torch.where(wanted, expected, 0.0), atol=1e-6)
    assert torch.equal(right, wanted & (logits.argmax(1) == targets))
    assert right[4]
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = cross_entropy(x, weights, bias, targets, -100)
    assert rounded.dtype == torch.float32
    assert torch.allclose(rounded, losses, rtol=0.02, atol=0.2)


def test_swiglu_gates_the_first_half_with_the_second() -> None:
    assert torch.allclose(swiglu(torch.tensor([[2.0, -1.0, 0.0, 3.0]])), torch.tensor([[0.0, -3 / (1 + math.exp(-3))]]))
