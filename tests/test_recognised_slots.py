"""Slots that are recognised in models of other people: families of transformers, and blocks written by hand from papers."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.tiny_models import tiny_model
from normscope.core.norms import orthogonal_part
from normscope.models import AttentionStep, Model, Observer, SublayerStep, open_model
from normscope.models.declared import differences, observed_facts, scheme_facts
from normscope.schemes import NAMED

DIM, HEADS, HEAD, TOKENS, LAYERS = 16, 2, 8, 10, 2
SIZE = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 60,
}  # fmt: skip


def built(family: str, **options: Any) -> nn.Module:
    """A random model of a family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZE | options)).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.3)
    return model


@pytest.mark.parametrize(
    ("family", "mapping", "names"),
    [
        ("gemma2", "causal", ["peri+softcap(50)"]),
        ("vaultgemma", "causal", ["softcap"]),
        ("gpt_oss", "causal", ["sink"]),
        ("mimo_v2_flash", "causal", ["pre", "sink"]),
        ("bitnet", "causal", ["sub-ln"]),
        ("qwen3_next", "causal", ["pre", "gated+qk"]),
        ("qwen3_5_text", "causal", ["pre", "gated+qk"]),
        ("afmoe", "causal", ["peri+qk+gate"]),
        ("flint", "causal", ["sink+qk"]),
        ("dinov2", "image", ["layerscale"]),
        ("beit", "image", ["layerscale"]),
        ("minicpm3", "causal", ["pre*0.80829"]),  # 1.4/√3
    ],
)
def test_a_family_has_the_slots_that_its_source_has(family: str, mapping: str, names: list[str]) -> None:
    model = open_model(tiny_model(family, mapping))
    assert list(dict.fromkeys(scheme.name for scheme in model.schemes if scheme is not None)) == names
    assert max(error for error in model.reconstruction if error is not None) < 1e-4
    assert None not in model.schemes


def test_sub_norms_are_those_of_the_modules() -> None:
    module: Any = tiny_model("bitnet", "causal")
    model = open_model(module)
    for sublayer, norm in (("attention", "self_attn.attn_sub_norm"), ("feedforward", "mlp.ffn_sub_norm")):
        recognised, own = model.norm_at(1, sublayer, "inner"), module.model.layers[1].get_submodule(norm)
        assert recognised is not None
        x = torch.randn(3, len(recognised.gain))
        torch.testing.assert_close(recognised(x), own(x))


@pytest.mark.parametrize(("alpha", "beta", "name"), [(1.0, 1.0, "post"), (8**0.25, 1.0, "deepnorm"), (3.5, 0.5, "post*0.5")])
def test_minimax_normalises_the_stream_at_the_start_of_the_next_block(alpha: float, beta: float, name: str) -> None:
    """N ← N(x); x ← α·n + β·f(n): a norm of the stream, counted with the sublayer before."""
    values = {"alpha": alpha, "beta": beta}
    factors = {f"{part}_{name}_factor": value for part in ("full_attn", "mlp") for name, value in values.items()}
    options = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = open_model(built("minimax", **options, **factors))
    assert model.scheme is not None
    assert model.scheme.attention.stream == model.scheme.feedforward.stream == "norm"
    assert [float(model.carry(2, name)) for name in ("attention", "feedforward")] == pytest.approx([alpha, alpha], rel=1e-4)
    assert [float(model.step(2, name)) for name in ("attention", "feedforward")] == pytest.approx([beta, beta], rel=1e-4)
    if name == "deepnorm":
        assert model.scheme.name == name
    states: list[SublayerStep] = []
    model.forward(model.batch(torch.arange(3, 12)), Observer(sublayer=states.append))
    for step in states[::2]:
        norm = model.norm_at(step.layer, "attention", "stream")
        assert step.after is not None
        assert norm is not None
        torch.testing.assert_close(step.after, norm(step.carry * step.before + step.update), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "options"),
    [("gemma2", {"attn_logit_softcapping": 2.0}), ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1})],
)
def test_weights_of_an_observed_step_are_those_of_eager_attention(family: str, options: dict[str, Any]) -> None:
    module: Any = built(family, **options)
    for name, parameter in module.named_parameters():
        if "sinks" in name:
            parameter.data.normal_(0, 1)
    module.set_attn_implementation("eager")
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected = module(tokens, output_attentions=True).attentions
    model, steps = open_model(module), list[AttentionStep]()
    model.forward(model.batch(tokens), Observer(attention=steps.append))
    for step, weights in zip(steps, expected, strict=True):
        torch.testing.assert_close(step.weights(), weights, rtol=1e-4, atol=1e-5)
        logits = step.logits(step.raw_scores())
        assert step.softcap is None or float(logits[logits.isfinite()].abs().max()) < 2.0
    scheme = model.schemes[0]
    assert scheme is not None
    assert scheme.attention.scores == ("softcap(2)" if family == "gemma2" else "sink")


class DynamicTanh(nn.Module):
    """Of Zhu et al. 2025."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.7))
        self.weight, self.bias = nn.Parameter(1 + 0.1 * torch.randn(dim)), nn.Parameter(0.1 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x) * self.weight + self.bias


class Derf(nn.Module):
    """Of Chen et al. 2025."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha, self.s = nn.Parameter(torch.tensor(0.4)), nn.Parameter(torch.tensor(0.2))
        self.gamma, self.beta = nn.Parameter(1 + 0.1 * torch.randn(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha * x + self.s) * self.gamma + self.beta


class Gelu(nn.Module):
    """A pointwise map with a parameter that is no norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) * self.weight


class Attention(nn.Module):
    """Causal attention whose logits are multiplied by ``temperature(n)``, with a norm and a gate before W_O."""

    def __init__(
        self, inner: Any = nn.Identity, gate: str = "none", temperature: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.inner = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False), inner(DIM)
        self.gate = {"none": None, "element": nn.Linear(DIM, DIM), "head": nn.Linear(DIM, HEADS)}[gate]
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        rows, n, _ = x.shape
        q, k, v = (part.view(rows, n, HEADS, HEAD).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.temperature is not None:
            q = q * self.temperature(torch.arange(1, n + 1))[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, n, DIM)
        mixed = self.inner(mixed)
        if self.gate is not None:
            mixed = (mixed.view(rows, n, -1, DIM // self.gate.out_features) * self.gate(x).sigmoid()[..., None]).flatten(2)
        out: Tensor = self.out(mixed)
        return out


class FeedForward(nn.Module):
    def __init__(self, inner: Any = nn.Identity) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(DIM, 32), inner(32), nn.Linear(32, DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.inner(F.relu(self.up(x))))
        return out


class Block(nn.Module):
    """A block whose update is a function of the block, the states and what a sublayer computes."""

    def __init__(self, update: Callable[..., Tensor], norm: Any, attention: nn.Module, feedforward: nn.Module) -> None:
        super().__init__()
        self.update, self.norms = update, nn.ModuleList([norm(DIM), norm(DIM)])
        self.after = nn.ModuleList([norm(DIM), norm(DIM)])
        self.parts = nn.ModuleList([attention, feedforward])
        self.scalars = nn.ParameterList([torch.full((), 0.3), torch.full((), -0.2)])
        self.vectors = nn.ParameterList([torch.ones(DIM), torch.ones(DIM)])

    def forward(self, x: Tensor) -> Tensor:
        for n in range(2):
            x = self.update(self, n, x)
        return x


def pre(block: Block, n: int, x: Tensor) -> Tensor:
    return x + block.parts[n](block.norms[n](x))


def orthogonal(block: Block, n: int, x: Tensor) -> Tensor:
    u = block.parts[n](block.norms[n](x))
    return x + u - (u * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True) * x


def rezero(block: Block, n: int, x: Tensor) -> Tensor:
    return x + block.scalars[n] * block.parts[n](x)


def layerscale(block: Block, n: int, x: Tensor) -> Tensor:
    return x + block.vectors[n] * block.parts[n](block.norms[n](x))


def lerp(block: Block, n: int, x: Tensor) -> Tensor:
    alpha = block.scalars[0]
    return block.after[n]((1 - alpha) * x + alpha * block.norms[n](block.parts[n](x)))


def keel(block: Block, n: int, x: Tensor) -> Tensor:
    return block.after[n](2 * LAYERS * x + block.parts[n](block.norms[n](x)))


def constant(block: Block, n: int, x: Tensor) -> Tensor:
    return x + LAYERS**-0.5 * block.parts[n](block.norms[n](x))


class Module(nn.Module):
    def __init__(
        self, update: Callable[..., Tensor] = pre, norm: Any = nn.RMSNorm, inner: Any = nn.Identity, **attention: Any
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(40, DIM)
            self.layers = nn.ModuleList(
                [Block(update, norm, Attention(inner, **attention), FeedForward(inner)) for _ in range(LAYERS)]
            )
            self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 40)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def opened(*args: Any, **options: Any) -> Model:
    """The model of a module, whose updates reproduce its states."""
    module = Module(*args, **options).eval()
    model = open_model(module, example=torch.arange(3, 3 + 2 * TOKENS).view(2, TOKENS))
    steps: list[SublayerStep] = []
    states: dict[int, Tensor] = {}
    tokens = torch.arange(5, 5 + TOKENS)[None]
    model.forward(model.batch(tokens), Observer(sublayer=steps.append, left=lambda layer, x: states.update({layer: x.clone()})))
    with torch.no_grad():
        x = module.embed(tokens)
        for layer, block in enumerate(module.layers):
            x = block(x)
            torch.testing.assert_close(states[layer], x)
    for step in steps:
        assert step.after is not None
        made = model.update(step.layer, step.sublayer)
        torch.testing.assert_close(step.update, made.written(step.before, step.output), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(step.after, made.state(step.before, step.output), rtol=1e-4, atol=1e-5)
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial(opened), "pre"),
        (partial(opened, norm=DynamicTanh), "dyt"),
        (partial(opened, norm=Derf), "derf"),
        (partial(opened, orthogonal), "tangent"),
        (partial(opened, rezero), "rezero"),
        (partial(opened, layerscale), "layerscale"),
        (partial(opened, keel), "keel"),
        (partial(opened, constant), "depth-scaled"),
        (partial(opened, inner=nn.RMSNorm), "sub-ln"),
        (partial(opened, gate="element"), "gated"),
        (partial(opened, gate="head"), "gated"),
        (partial(opened, gate="element", inner=nn.LayerNorm), "sub-ln+gate"),
        (partial(opened, temperature=torch.log), "pre+temperature(log(n))"),
        (partial(opened, temperature=lambda n: 1 + 0.25 * n.log()), "pre+temperature(1+0.25*log(n))"),
    ],
)
def test_a_block_by_hand_is_recognised(make: Callable[[], Model], name: str) -> None:
    model = make()
    assert model.scheme is not None, model.scheme_note
    assert model.scheme.name.replace(" ", "") == name
    if name in NAMED:
        declared = scheme_facts(NAMED[name], model)
        assert [d.text for d in differences(declared, observed_facts(model))] == []
        assert model.scheme.attention == NAMED[name].attention or name == "keel"
        assert model.scheme.learned == NAMED[name].learned


def test_a_learned_scale_is_told_from_a_constant() -> None:
    """A scale of ones that training changes, a constant, and the number that ReZero's parameter is."""
    by_name = {make.__name__: opened(make).scheme for make in (layerscale, constant, rezero, lerp)}
    schemes = {name: scheme for name, scheme in by_name.items() if scheme is not None}
    assert (schemes["layerscale"].learned, schemes["layerscale"].alpha.text) == ("vector", "1")  # type: ignore[union-attr]
    assert not schemes["constant"].learns_alpha
    assert (schemes["rezero"].learned, schemes["rezero"].alpha.text) == ("scalar", "0.3")  # type: ignore[union-attr]
    assert schemes["lerp"].attention.carry.text == "1−α_t"  # type: ignore[union-attr]


@pytest.mark.parametrize("norm", [DynamicTanh, Derf])
def test_a_pointwise_map_is_that_of_its_module(norm: Any) -> None:
    model = opened(norm=norm)
    recognised = model.norm_at(1, "feedforward", "input")
    assert recognised is not None
    module = model.model.layers[1].norms[1]
    x = 3 * torch.randn(7, DIM)
    torch.testing.assert_close(recognised(x), module(x), rtol=1e-4, atol=1e-4)
    assert recognised.slope == pytest.approx(module.alpha.item(), rel=1e-4)
    module.alpha.data *= 2  # as training does
    changed = model.norm_at(1, "feedforward", "input")
    assert changed is not None
    assert changed.slope == pytest.approx(2 * recognised.slope, rel=1e-4)


def test_a_pointwise_map_with_a_parameter_is_no_norm() -> None:
    model = opened(inner=Gelu)
    assert model.scheme is not None
    assert model.scheme.name == "pre"
    assert model.scheme_note.startswith("something changes the mixed values")


def test_an_update_is_orthogonal_to_the_states() -> None:
    model, steps = opened(orthogonal), list[SublayerStep]()
    model.forward(model.batch(torch.arange(9)), Observer(sublayer=steps.append))
    for step in steps:
        torch.testing.assert_close(step.update, orthogonal_part(step.output, step.before))
        assert float((step.update * step.before).sum(-1).abs().max()) < 1e-5 * math.sqrt(DIM)


def test_the_temperature_of_llama_4_is_a_remark() -> None:
    """It is 1 + 0.1·log(1 + ⌊n/8192⌋) in layers without rotations: seen where 8192 is small, else only declared."""
    options = {"num_local_experts": 2, "num_hidden_layers": 2, "no_rope_layers": [0, 0], "attention_chunk_size": 16}
    seen, declared = (open_model(built("llama4_text", **options, floor_scale=scale)).scheme_note for scale in (4, 8192))
    assert seen == "the logits of a query are multiplied by a factor of its position that has no slot"
    assert declared.startswith("its configuration declares a temperature by position")


def test_a_factor_of_position_without_a_formula_is_a_remark() -> None:
    model = opened(temperature=lambda n: 1 + 0.1 * (n / 4).floor())
    assert model.scheme is not None
    assert model.scheme.name == "pre"
    assert "multiplied by a factor of its position" in model.scheme_note
