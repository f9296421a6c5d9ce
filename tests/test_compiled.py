"""What a GPU compiles: one block for all layers, the readout with the loss, and fused attention with a sink."""

import subprocess
import sys

import torch

from normscope.core import Scores, attend_scored
from normscope.core.fused_scores import attend_with_sink, causal_blocks

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
