"""Models as training loops hold them open like the plain model, and a pass leaves nothing behind."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import normscope as ns
from normscope.models import Observer

TOKENS = torch.arange(16).view(2, 8)


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, max_position_embeddings=64, **sizes))


class PassesOn(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.loss = inner, nn.CrossEntropyLoss()

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Adapter(nn.Module):
    """A product with an update of low rank, which is zero at first."""

    def __init__(self, product, rank=4):
        super().__init__()
        outputs, inputs = product.weight.shape
        self.base_layer, self.dropout = product, nn.Dropout(0.1)
        self.A, self.B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.B(self.A(self.dropout(x)))


def with_adapters(model):
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Adapter(layer.self_attn.q_proj), Adapter(layer.self_attn.v_proj)
    return PassesOn(PassesOn(model))


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def with_blocks(model, change):
    for number, block in enumerate(model.model.layers):
        model.model.layers[number] = change(block)
    return model


def with_checkpoints(model):
    model.gradient_checkpointing_enable()
    return model


def prepared(model):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # of another test
    return Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": compiled_in_place,
    "compiled blocks": lambda model: with_blocks(model, lambda block: torch.compile(block, backend="eager")),
    "blocks with checkpoints": lambda model: with_blocks(model, checkpoint_wrapper),
    "gradient checkpointing": with_checkpoints,
    "data parallel": nn.DataParallel,
    "a wrapper of a compiled model": lambda model: PassesOn(torch.compile(model, backend="eager")),
    "adapters": with_adapters,
    "bfloat16": lambda model: model.bfloat16(),
    "accelerate": prepared,
}


def observed(model):
    """Logits, and the states before every layer, of a pass with all hooks."""
    states = []
    keep = Observer(attention=lambda step: None, sublayer=lambda step: None, state=lambda _, x: states.append(x.clone()))
    return model.forward(model.batch(TOKENS), keep), torch.stack(states)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_is_the_model_inside(wrapper):
    plain, module = ns.open(llama()), WRAPPERS[wrapper](llama()).train()
    opened = ns.open(module)
    assert type(opened.model) is LlamaForCausalLM
    assert (opened.scheme.name, opened.layers, opened.heads, opened.context) == ("pre", 2, 2, 64)
    assert {"sublayers", "attention", "predictions"} <= opened.offers
    rough = wrapper in ("bfloat16", "accelerate")
    for seen, known in zip(observed(opened), observed(plain), strict=True):
        assert torch.allclose(seen.float(), known, atol=2e-2) if rough else torch.equal(seen, known)


def test_a_model_with_parts_of_its_own_is_no_wrapper():
    class Scaled(PassesOn):
        def __init__(self, inner):
            super().__init__(inner)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, *args, **kwargs):
            return self.scale * super().forward(*args, **kwargs).logits

    assert type(ns.open(Scaled(llama())).model) is Scaled


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_steps_stay_compiled(in_place):
    torch.compiler.reset()
    model = compiled_in_place(gpt2()) if in_place else torch.compile(gpt2(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = torch._dynamo.utils.counters["stats"]

    def step():
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    before = compiled["unique_graphs"]
    opened = ns.open(model)
    observed(opened)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            step()
            observed(opened)
    assert compiled["unique_graphs"] == before > 0


class Restless(nn.Module):
    """A block that changes whatever a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout, self.calls = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.5), 0
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))

    def forward(self, x):
        self.calls, self.cache = self.calls + 1, x
        self.seen += 1
        self.replaced = self.replaced + 1
        random.random(), np.random.rand(), torch.rand(1)
        return x + self.dropout(self.linear(self.norm(x)))


def test_a_pass_leaves_nothing_on_the_model_nor_in_random_generators():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), *(Restless() for _ in range(3))).train()
    model[1].eval()
    model[2].linear.weight.requires_grad_(False)
    model(TOKENS).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    handle = model[3].register_forward_hook(lambda *_: None)
    contents = {name: x.clone() for name, x in model.state_dict().items()}
    buffers, attributes = list(model.buffers()), [dict(vars(module)) for module in model.modules()]
    flags = [x.requires_grad for x in model.parameters()]
    states = np.random.get_state()[1].tolist(), torch.get_rng_state()

    observed(ns.open(model))

    assert np.random.get_state()[1].tolist() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    for module, before in zip(model.modules(), attributes, strict=True):
        assert vars(module).keys() == before.keys()
        assert all(vars(module)[name] is value for name, value in before.items())
    assert [list(module._forward_hooks) for module in model.modules() if module._forward_hooks] == [[handle.id]]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(x is y for x, y in zip(model.buffers(), buffers, strict=True))
    assert all(torch.equal(x, contents[name]) for name, x in model.state_dict().items())
    assert all(x.grad is gradient for x, gradient in zip(model.parameters(), gradients, strict=True))
    assert [x.requires_grad for x in model.parameters()] == flags
