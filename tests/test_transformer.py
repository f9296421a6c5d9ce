"""The trainable model: equal to a plain one, blind to padding, calibrated, saved and read back."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from normscope import InputError
from normscope.core import AttentionMask, CausalMask, HeadNorm, PackedMask, PaddingMask, Scores
from normscope.runs import fingerprint
from normscope.schemes import NAMED, Scheme, Slots
from normscope.training import Training, read_recipe
from normscope.training.batches import one_batch
from normscope.training.recipe import task_of
from normscope.training.tasks import MASK, Addition, Examples, as_text, encode
from normscope.training.tasks.addition.feeds import PackedFeed, PaddedFeed, SplitFeed
from normscope.transformer import BUILTIN, Row, Transformer, TransformerConfig, calibrating, load_model, save_model
from normscope.transformer.layers import Norm

SMALL = {"dim": 12, "layers": 2, "heads": 3, "head": 4, "feedforward": 10, "readout": (9, 8), "frequencies": 4}
TASK = Addition((2, 4), (1, 2))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def model_of(scheme: str | Scheme, **changes: Any) -> Transformer:
    """A small model in float64, as it is first drawn."""
    found = NAMED[scheme] if isinstance(scheme, str) else scheme
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(TransformerConfig(found, **{**SMALL, **changes})).double()


def shaken(model: Transformer) -> Transformer:
    """Every gain, bias and fixed factor away from where it starts, so that each of them matters."""
    with torch.no_grad():
        for seed, value in enumerate(model.state_dict().values()):
            value += 0.2 * random(*value.shape, seed=seed)
    model.renormalise()
    return model


def row_of(characters: Tensor, mask: AttentionMask | None = None) -> Row:
    positions = torch.arange(characters.shape[1]).expand_as(characters)
    return Row(characters, positions, CausalMask() if mask is None else mask)


def some_characters(rows: int = 2, tokens: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(17, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def plain_norm(x: Tensor, kind: str, gain: Tensor | float = 1.0) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return gain * math.sqrt(x.shape[-1]) * centred / centred.norm(dim=-1, keepdim=True)


class Plain:
    """A decoder for no, pre-, post- and QKV-norm as a textbook has it, on the parameters of ``model``."""

    def __init__(self, model: Transformer, placement: str) -> None:
        self.config, self.placement = model.config, placement
        self.weights = {name.removesuffix(".value"): value for name, value in model.named_parameters()}
        self.factors = {name.removesuffix(".factor"): value for name, value in model.named_buffers()}

    def __call__(self, characters: Tensor) -> Tensor:
        x = self.embed(characters)
        for layer in range(self.config.layers):
            x = self.sublayer(f"decoder.{layer}.attention", x, self.attention, "rms", self.placement)
            ahead = "pre" if self.placement == "qkv" else self.placement
            x = self.sublayer(f"decoder.{layer}.feedforward", x, self.feedforward, "layer", ahead)
        x = plain_norm(x, "layer", self.weights["readout.norm.gain"])
        widths = len(self.config.readout)
        for i in range(widths + 1):
            x = x @ self.weights[f"readout.weights.{i}"] + self.weights[f"readout.biases.{i}"]
            x = x.clamp(min=0) if i < widths else x
        return x

    def embed(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], dtype=torch.float64)
        angles = torch.outer(positions, self.weights["embed.frequencies"])
        still = torch.zeros(len(positions), self.config.dim - 2 * self.config.frequencies, dtype=torch.float64)
        waves = torch.cat((angles.sin(), angles.cos(), still), 1)
        x = self.factors["embed.type_scale"] * self.weights["embed.types"][characters] + waves
        x = self.factors["embed.scale"] * x
        return plain_norm(x, "rms") if self.placement == "post" else x

    def sublayer(self, name: str, x: Tensor, f: Callable[[str, Tensor], Tensor], kind: str, placement: str) -> Tensor:
        read = plain_norm(x, kind) if placement == "pre" else x
        update = f(f"{name}.f", self.factors[f"{name}.read_scale"] * read)
        x = x + self.factors[f"{name}.write_scale"] * update
        return plain_norm(x, "rms", self.weights[f"{name}.stream.gain"]) if placement == "post" else x

    def attention(self, name: str, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        total = torch.zeros_like(x)
        for head in range(self.config.heads):
            q, k, v = (self.projected(name, x, i, head) for i in range(3))
            scores = self.factors[f"{name}.score_scale"] * (q @ k.mT)
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            total = total + weights @ v @ self.weights[f"{name}.W_O"][head]
        return total

    def projected(self, name: str, x: Tensor, which: int, head: int) -> Tensor:
        if self.placement == "pre":
            gains = self.weights[f"{name}.input_gains"]
            x = x * gains[0 if len(gains) == 1 else which]
        y = x @ self.weights[f"{name}.W_QKV"][:, which, head]
        return plain_norm(y, "rms", self.weights[f"{name}.norms.{'qkv'[which]}.gain"][head]) if self.placement == "qkv" else y

    def feedforward(self, name: str, x: Tensor) -> Tensor:
        x = x * self.weights[f"{name}.input_gain"] if self.placement in ("pre", "qkv") else x
        hidden = (x @ self.weights[f"{name}.W_in"] + self.weights[f"{name}.b_in"]).clamp(min=0)
        return hidden @ self.weights[f"{name}.W_out"] + self.weights[f"{name}.b_out"]


@pytest.mark.parametrize(
    ("scheme", "shared"), [("pre", False), ("pre", True), ("post", False), ("qkv", False), ("none", False)]
)
def test_a_model_is_the_plain_one_with_the_same_weights(scheme: str, shared: bool) -> None:
    model = shaken(model_of(scheme, feedforward_norm="layer", shared_gains=shared))
    characters, parameters = some_characters(), dict(model.named_parameters())
    got, expected = model(row_of(characters)), Plain(model, scheme)(characters)
    assert torch.allclose(got, expected, rtol=0, atol=1e-11)
    upstream = random(*got.shape)
    gradients = (torch.autograd.grad((out * upstream).sum(), list(parameters.values())) for out in (got, expected))
    for name, mine, theirs in zip(parameters, *gradients, strict=True):
        assert theirs.norm() > 1e-3, name
        assert (mine - theirs).norm() < 1e-10 * theirs.norm(), name


TEXT = {"positions": "rope", "activation": "swiglu", "biases": False, "readout": (), "shared_gains": True, "final_norm": "rms"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [17, 300])
def test_a_model_for_text_is_llama_with_the_same_weights(tied: bool, vocabulary: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = shaken(model_of("pre", **TEXT, tied=tied, vocabulary=vocabulary, initial_std=0.2, heads=2))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith(("read_scale.factor", "write_scale.factor", "type_scale.factor", "embed.scale.factor")):
                value.fill_(1.0)
            if name.endswith("score_scale.factor"):
                value.fill_(0.5)
    shape = {"hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4}
    config = LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=tied, rms_norm_eps=1e-12, **shape)
    llama = LlamaForCausalLM(config).double()
    weights = {"model.embed_tokens.weight": model.embed.types, "model.norm.weight": model.readout.norm.gain()}
    weights["lm_head.weight"] = model.unembedding.T
    for i, block in enumerate(model.decoder):
        attention, feedforward, at = block.attention.f, block.feedforward.f, f"model.layers.{i}"
        for letter, W in zip("qkv", attention.W_QKV.flatten(2).unbind(1), strict=True):
            weights[f"{at}.self_attn.{letter}_proj.weight"] = W.T
        weights[f"{at}.self_attn.o_proj.weight"] = attention.W_O.flatten(0, 1).T
        weights[f"{at}.mlp.up_proj.weight"], weights[f"{at}.mlp.gate_proj.weight"] = feedforward.W_in.T.chunk(2)
        weights[f"{at}.mlp.down_proj.weight"] = feedforward.W_out.T
        weights[f"{at}.input_layernorm.weight"] = attention.input_gains()[0]
        weights[f"{at}.post_attention_layernorm.weight"] = feedforward.input_gain()
    llama.load_state_dict(weights)
    tokens = torch.randint(vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    got, expected = model(row_of(tokens)), llama(tokens).logits
    assert torch.allclose(got, expected, rtol=0, atol=1e-5)  # RoPE's angles and its norms are float32
    assert expected.std() > 0.1


def test_ngpt_for_text_is_the_papers_block() -> None:
    """Loshchilov et al. 2024, with states of length 1: table 1, equations 10, 11, 15, 16, 20, 21, and logits s_z·E x."""
    model = model_of("ngpt-lerp", **TEXT, initial_std=0.02, vocabulary=300)
    with torch.no_grad():
        for seed, value in enumerate(model.parameters()):
            value *= 1 + 0.3 * random(*value.shape, seed=seed)
    model.renormalise()
    tokens = some_characters()
    angles = torch.arange(7.0)[:, None] / 10_000 ** torch.tensor([0, 0.5])
    cos, sin = angles.cos(), angles.sin()
    norm = torch.nn.functional.normalize
    x, later = norm(model.embed.types[tokens], dim=-1), torch.ones(7, 7, dtype=torch.bool).triu(1)
    for block in model.decoder:
        f, total = block.attention.f, torch.zeros_like(x)
        for i in range(3):
            q, k, v = (x @ f.W_QKV[:, which, i] for which in range(3))
            q, k = (torch.cat((y[..., :2] * cos - y[..., 2:] * sin, y[..., 2:] * cos + y[..., :2] * sin), -1) for y in (q, k))
            s_qk = f.score_gain.value[i] * math.sqrt(12)
            scores = 2 * (s_qk * norm(q, dim=-1)) @ (s_qk * norm(k, dim=-1)).mT
            total = total + scores.masked_fill(later, -torch.inf).softmax(-1) @ v @ f.W_O[i]
        alpha = block.attention.alpha.value.abs() * (0.05 * math.sqrt(12))
        x = norm(x + alpha * (norm(total, dim=-1) - x), dim=-1)
        f = block.feedforward.f
        u, v = (x @ f.W_in).chunk(2, -1)
        s_u, s_v = f.hidden_scale.value.chunk(2)
        hidden = (u * s_u) * torch.nn.functional.silu(v * s_v * math.sqrt(12))
        alpha = block.feedforward.alpha.value.abs() * (0.05 * math.sqrt(12))
        x = norm(x + alpha * (norm(hidden @ f.W_out, dim=-1) - x), dim=-1)
    expected = model.readout.scale.value * math.sqrt(12) * (x @ model.readout.weights[0])
    assert torch.allclose(model(row_of(tokens)), expected, rtol=0, atol=1e-6)
    fresh = model_of("ngpt-lerp", **TEXT, initial_std=0.02, vocabulary=300)
    assert fresh(row_of(tokens)).abs().max() <= 1  # cosines


def test_heads_of_a_language_model_share_the_gain_of_their_norm_as_in_qwen3() -> None:
    f = model_of("qk", **TEXT).decoder[0].attention.f
    assert f.norms["q"].gain().shape == (1, 4)
    assert f.head_norm.gains.shape == (3, 3, 4)
    assert model_of("qk", **{**TEXT, "shared_gains": False}).decoder[0].attention.f.norms["q"].gain().shape == (3, 4)


def test_gelu_and_matrices_of_one_standard_deviation() -> None:
    model = model_of("pre", **{**TEXT, "activation": "gelu"}, initial_std=0.02, dim=256, feedforward=300, vocabulary=300)
    for name, value in model.named_parameters():
        if value.ndim > 1 and "gain" not in name:
            assert value.std().item() == pytest.approx(0.02, rel=0.03), name
            assert value.mean().abs() < 0.001, name
    assert not any(name.rpartition(".")[2].startswith("b") for name, _ in model.named_parameters())
    f, x = model.decoder[0].feedforward.f, random(2, 3, 256)
    reference = nn.Sequential(nn.Linear(256, 300, bias=False), nn.GELU(), nn.Linear(300, 256, bias=False)).double()
    reference[0].weight.data, reference[2].weight.data = f.W_in.T, f.W_out.T
    assert torch.allclose(f(x), reference(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"positions": "rope", "head": 5}, "head even"),
        ({"positions": "rope", "encoder_layers": 1}, "encoder_layers=1"),
        ({"tied": True, "readout": (8,)}, "tied=True needs readout"),
        ({"activation": "swigl"}, "did you mean 'swiglu'"),
        ({"initial_std": 0.0}, "initial_std=0"),
    ],
)
def test_impossible_text_models_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TransformerConfig.of({**TransformerConfig(NAMED["pre"], **SMALL).values, **wrong})


@pytest.mark.parametrize("scores", ["softmax", "sink(0.5)", "softcap(0.3)", "temperature(1 + log(n))", "sink+softcap(0.2)"])
def test_attention_has_scores_an_inner_norm_and_a_gate(scores: str) -> None:
    """By hand: softmax over capped logits and one more, the norm of concatenated heads, and σ(W_G x) before W_O."""
    model = shaken(model_of(Scheme("mine", Slots(input="norm", scores=scores, inner="norm", gate="sigmoid")), **TEXT))
    f, x, later = model.decoder[1].attention.f, random(2, 5, 12), torch.ones(5, 5, dtype=torch.bool).triu(1)
    read, mixed, n = x * f.input_gains()[0], [], torch.arange(1.0, 6.0)[:, None]
    for head in range(3):
        q, k, v = (read @ f.W_QKV[:, which, head] for which in range(3))
        logits = f.score_scale.factor * (q @ k.mT)
        logits = logits * (1 + n.log()) if "temperature" in scores else logits
        for cap in (0.3, 0.2):
            logits = cap * torch.tanh(logits / cap) if f"softcap({cap})" in scores else logits
        weights = logits.masked_fill(later, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (f.sink[head].exp() if "sink" in scores else 0)
        mixed.append(weights / total @ v)
    assert f.sink is None or f.sink.requires_grad
    heads = plain_norm(torch.cat(mixed, -1), "rms", f.inner.gain()) * torch.sigmoid(read @ f.W_G)
    expected = heads @ f.W_O.flatten(0, 1)
    assert torch.allclose(f(x, CausalMask()), expected, rtol=0, atol=1e-7)  # a temperature is computed in float32
    g = model.decoder[1].feedforward.f
    u, v = (x * g.input_gain() @ g.W_in).chunk(2, -1)
    expected = plain_norm(u * v * torch.sigmoid(v), "rms", g.inner.gain()) @ g.W_out
    assert torch.allclose(g(x), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("scheme", ["dyt", "derf"])
def test_pointwise_maps_learn_a_slope_a_gain_and_a_bias(scheme: str) -> None:
    model, x = model_of(scheme, **{**TEXT, "final_norm": "layer"}), random(2, 5, 12)
    norm = model.decoder[0].attention.input
    assert norm.slope == 0.5
    assert model.decoder[0].attention.f.input_gains is None
    shaken(model)
    shift = 0 if scheme == "dyt" else norm.shift
    phi = torch.tanh if scheme == "dyt" else torch.erf
    assert torch.allclose(norm(x), norm.gain.value * phi(norm.slope * x + shift) + norm.bias, rtol=0, atol=1e-12)
    model(row_of(some_characters())).square().sum().backward()
    learned = [p for name, p in model.named_parameters() if name.endswith(("slope", "bias", "shift"))]
    assert len(learned) == 4 * (2 if scheme == "dyt" else 3)
    assert all((p.grad != 0).any() for p in learned)


@pytest.mark.parametrize("scheme", ["dyt", "derf", "pre"])
def test_language_models_with_pointwise_maps_learn_a_factor_on_embeddings(scheme: str) -> None:
    plain, model = (model_of(scheme, **TEXT, initial_std=std) for std in (None, 0.02))
    assert plain.embed.growth is None
    row, factor = row_of(some_characters()), 1.0
    if scheme != "pre":
        assert model.embed.growth.value.item() == pytest.approx(math.sqrt(12))
        with torch.no_grad():
            factor = model.embed.growth.value.fill_(3.0).item()
    expected = factor * model.embed.type_scale.factor * model.embed.scale.factor * model.embed.types[row.characters]
    assert torch.allclose(model.embed(row), expected, rtol=0, atol=1e-12)
    assert (model.embed.growth is None) == (scheme == "pre")


def test_steps_of_language_models_are_plain_parameters() -> None:
    """LayerScale's vectors and ReZero's scalars, which may take either sign; nGPT keeps its steps times 1/√d."""
    for scheme, shape, start in (("layerscale", (12,), 1e-4), ("rezero", (), 0.0)):
        alpha = model_of(scheme, **TEXT, initial_std=0.02).decoder[0].attention.alpha
        assert alpha.value.shape == shape
        assert torch.allclose(alpha.value, torch.full(shape, start, dtype=torch.float64))
        with torch.no_grad():
            alpha.value.fill_(-0.25)
        assert (alpha() == -0.25).all()
    block = model_of("layerscale", **TEXT, initial_std=0.02).decoder[0]
    with torch.no_grad():
        block.attention.alpha.value.fill_(-0.25)
    assert (block.attention.values()[0] == -0.25).all()


@pytest.mark.parametrize("initial_std", [None, 0.02])
def test_a_negative_alpha_is_trained_with_its_sign(initial_std: float | None) -> None:
    slots = Slots(output="norm", step="alpha", carry="1-alpha", stream="norm")
    model = model_of(Scheme("mine", slots, alpha="-0.5"), **TEXT, initial_std=initial_std)
    step, carry, _ = model.decoder[0].attention.values()
    assert torch.allclose(step, torch.full_like(step, -0.5))
    assert torch.allclose(carry, torch.full_like(carry, 1.5))


def test_initial_weights_have_the_schemes_factor() -> None:
    plain, scaled = (model_of(Scheme("mine", Slots(stream="norm"), initial=formula)) for formula in ("1", "1/(layer*depth)"))
    for layer in range(2):
        for sublayer, names in (("attention", ("W_QKV", "W_O")), ("feedforward", ("W_in", "W_out"))):
            for name in names:
                a, b = (getattr(getattr(model.decoder[layer], sublayer).f, name) for model in (plain, scaled))
                if name == "W_QKV":
                    assert torch.equal(a[:, :2], b[:, :2])
                    a, b = a[:, 2], b[:, 2]
                assert torch.allclose(a / (2 * (layer + 1)), b, rtol=1e-6)


def test_scores_of_an_encoder_are_refused() -> None:
    with pytest.raises(InputError, match="'sink' has scores other than softmax, which need encoder_layers=0"):
        model_of("sink", encoder_layers=1)


def test_q_k_and_v_have_gains_of_their_own_unless_they_share_one() -> None:
    assert model_of("pre").decoder[0].attention.f.input_gains().shape == (3, 12)
    assert model_of("pre", shared_gains=True).decoder[0].attention.f.input_gains().shape == (1, 12)


def test_positions_begin_with_periods_from_3_to_1000_characters() -> None:
    periods = 2 * math.pi / model_of("pre", frequencies=6).embed.frequencies.detach()
    assert torch.allclose(periods, torch.logspace(math.log10(3), 3, 6).double(), rtol=1e-6)


@dataclass(frozen=True)
class Recording:
    """A mask that remembers what it was asked: q, k, v by token, and the factor of the scores."""

    inner: AttentionMask
    asked: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return self.inner(q, k, v, scale)

    def stacked(self, qkv: Tensor, scale: Tensor, norm: HeadNorm | None = None) -> Tensor:
        qkv = qkv if norm is None else norm(qkv)
        self.asked.append((qkv, scale))
        return self.inner.stacked(qkv, scale)

    def scored(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, scores: Scores, sink: Tensor | None = None) -> Tensor:
        return self.inner.scored(q, k, v, scale, scores, sink)

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.scores(q, k)

    def scaled_scores(self, layer: int) -> Tensor:
        """All scores that the mask allows, as they enter the softmax of a layer."""
        qkv, scale = self.asked[layer]
        q, k, _ = (x.transpose(1, 2) for x in qkv.unbind(2))
        scores, seen = self.scores(q, k)
        return (scale * scores)[seen.expand_as(scores)]


@pytest.mark.parametrize(("scheme", "same"), [("qkv", True), ("pre", True), ("qk", True), ("none", False), ("res-post", False)])
def test_scores_notice_the_length_of_an_embedding_only_without_a_norm(scheme: str, same: bool) -> None:
    sublayer, x, mask = shaken(model_of(scheme)).decoder[0].attention, random(2, 5, 12), Recording(CausalMask())
    lengths = 0.2 + 5 * random(2, 5, 1, seed=1).abs()
    for states in (x, lengths * x):
        sublayer(states, mask)
    assert torch.allclose(mask.scaled_scores(0), mask.scaled_scores(1), rtol=0, atol=1e-9) == same


@pytest.mark.parametrize("scheme", NAMED)
def test_embeddings_are_normalised_where_any_sublayer_normalises_the_stream(scheme: str) -> None:
    x = shaken(model_of(scheme)).embed(row_of(some_characters()))
    slots = (NAMED[scheme].attention, NAMED[scheme].feedforward)
    normalised = torch.allclose(x.norm(dim=-1), torch.full(x.shape[:-1], math.sqrt(12), dtype=torch.float64))
    assert normalised == ("norm" in (slots[0].stream, slots[1].stream) and not NAMED[scheme].pointwise)


@pytest.mark.parametrize("scheme", NAMED)
def test_a_sublayer_is_the_update_with_its_learned_values(scheme: str) -> None:
    """Written out: stream(carry·x + step·scale·output(f(factor·scale·input(x)))) with what each part has learned."""
    model, x = shaken(model_of(scheme)), random(2, 5, 12)
    for sublayer in (model.decoder[1].attention, model.decoder[1].feedforward):
        step, carry, factor = sublayer.values()
        read = factor * sublayer.read_scale.factor * sublayer.input(x)
        y = sublayer.f(read, CausalMask())
        u = sublayer.write_scale.factor * sublayer.output(y)
        if sublayer.tangent:
            u = u - (u * x).sum(-1, keepdim=True) * x / x.square().sum(-1, keepdim=True)
        expected = sublayer.stream(carry * x + step * u)
        assert torch.allclose(sublayer(x, CausalMask()), expected, rtol=0, atol=1e-12)
        if sublayer.alpha is not None:
            alpha = sublayer.alpha.value * sublayer.alpha.ratio
            alpha = alpha if NAMED[scheme].alpha.text == "0" else alpha.abs()
            assert torch.equal(step, alpha)
            assert carry == 1 if carry.ndim == 0 else torch.equal(carry, 1 - alpha)


@pytest.mark.parametrize("scheme", NAMED)
def test_earlier_logits_do_not_know_later_characters(scheme: str) -> None:
    model, characters = shaken(model_of(scheme)), some_characters()
    changed = torch.cat((characters[:, :4], (characters[:, 4:] + 1) % 17), 1)
    before, after = (model(row_of(x)) for x in (characters, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    before, after = (model.states(row_of(x)) for x in (characters, changed))
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(-1).any()


def drawn(task: Addition = TASK, examples: int = 9) -> tuple[Examples, Tensor]:
    """Some examples, and an offset of positions for each."""
    generator = torch.Generator().manual_seed(3)
    return task.draw(examples, generator), torch.randint(20, (examples,), generator=generator)


def fed(feed: PaddedFeed | SplitFeed | PackedFeed, model: Transformer, examples: Examples, offsets: Tensor) -> Tensor:
    """The logits of all places that predict a character of an answer."""
    batch = one_batch(feed.arrange(examples, offsets, 1), 0)
    return feed.logits(model, batch)[batch["targets"].flatten() != MASK]


@pytest.mark.parametrize("scheme", [name for name in NAMED if "scores" not in NAMED[name].features])
def test_an_example_has_the_same_logits_alone_padded_and_packed(scheme: str) -> None:
    model, (examples, offsets) = shaken(model_of(scheme)), drawn()
    among = fed(PaddedFeed(), model, examples, offsets)
    alone = []
    for i, length in enumerate(examples.lengths.tolist()):
        own = Examples(examples.characters[i : i + 1, :length], *(x[i : i + 1] for x in (examples.lengths, examples.answers)))
        alone.append(fed(PaddedFeed(), model, own, offsets[i : i + 1]))
    assert torch.allclose(torch.cat(alone), among, rtol=0, atol=1e-12)
    for feed in (PackedFeed.exactly(examples, 32), PackedFeed(300, 60, 64)):  # without room to spare, and with
        assert torch.allclose(fed(feed, model, examples, offsets), among, rtol=0, atol=1e-12)


def test_logits_of_some_positions_are_those_of_all() -> None:
    model, characters = shaken(model_of("pre")), some_characters()
    positions = torch.tensor([12, 0, 5])
    some = model(row_of(characters), logits_to_keep=positions)
    assert torch.allclose(some, model(row_of(characters)).flatten(0, 1)[positions], rtol=0, atol=1e-12)


def trained_from(scheme: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Transformer, Row]:
    """A model as training starts from it, and the row on which its factors were fixed."""
    rows: list[Row] = []
    forward = Transformer.forward

    def remembering(self: Transformer, row: Row, **options: Any) -> Tensor:
        rows.append(row)
        return forward(self, row, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "forward", remembering)
        model = Training(read_recipe("tiny", {"scheme": scheme})).model
    assert len(rows) == 1
    return model.double(), rows[0]


def outputs(module: nn.Module) -> list[Tensor]:
    """A list that everything the module gives is put into."""
    given: list[Tensor] = []
    module.register_forward_hook(lambda module, arguments, output: given.append(output))
    return given


def inputs(module: nn.Module) -> list[Tensor]:
    """A list that everything the module reads is put into."""
    taken: list[Tensor] = []
    module.register_forward_pre_hook(lambda module, arguments: taken.append(arguments[0]))
    return taken


@pytest.mark.parametrize("scheme", ["pre", "qkv", "post", "none"])
def test_all_schemes_start_with_the_stated_sizes(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, row = trained_from(scheme, monkeypatch)
    assert isinstance(row.mask, PackedMask)
    mask = Recording(row.mask)
    sublayers = [part for block in model.decoder for part in (block.attention, block.feedforward)]
    types, initial = outputs(model.embed.type_scale), outputs(model.embed.scale)
    before, read, after = (
        [inputs(m) for m in ms] for ms in (sublayers, [s.f for s in sublayers], [s.stream for s in sublayers])
    )
    with torch.no_grad():
        model(Row(row.characters, row.positions, mask))
    assert float(types[0].std()) == pytest.approx(0.5, rel=1e-4)
    assert float(initial[0].std()) == pytest.approx(1.0, rel=1e-4)
    for (x,), (y,), (z,) in zip(before, read, after, strict=True):
        assert float(y.std()) == pytest.approx(1.0, rel=1e-4)  # what W_Q or W_in reads
        assert float((z - x).std()) == pytest.approx(0.05, rel=1e-4)  # what is written
    assert len(mask.asked) == len(model.decoder)
    for layer in range(len(model.decoder)):
        assert float(mask.scaled_scores(layer).std()) == pytest.approx(0.1, rel=1e-4)


def test_factors_are_fixed_once_and_are_no_parameters() -> None:
    model, row = model_of("pre"), row_of(some_characters())
    with calibrating(model):
        model(row)
    factors = {name: value.clone() for name, value in model.named_buffers()}
    model(row_of(some_characters(seed=1)))
    assert all(torch.equal(value, factors[name]) for name, value in model.named_buffers())
    assert not any("scale.factor" in name for name, _ in model.named_parameters())
    assert all(name in model.state_dict() for name in factors if name.endswith("factor"))


def test_without_calibration_factors_are_one() -> None:
    model = Training(read_recipe("tiny", {"calibrate": False})).model
    factors = {name: value for name, value in model.state_dict().items() if name.endswith("factor")}
    assert {float(v) for name, v in factors.items() if "score_scale" not in name} == {1.0}
    assert {float(v) for name, v in factors.items() if "score_scale" in name} == {0.25}  # 1/√head


@pytest.mark.parametrize("scheme", ["pre", "qkv"])
def test_first_weights_fill_the_stated_ranges(scheme: str) -> None:
    heads, head = 6, 16
    attention = model_of(scheme, dim=128, heads=heads, head=head).decoder[1].attention.f
    weights = dict(zip("QKV", attention.W_QKV.unbind(1), strict=True)) | {"O": attention.W_O}
    like_scores = math.sqrt(3) * (0.1 / head**3) ** 0.25
    ranges = {"Q": like_scores, "K": like_scores, "V": math.sqrt(3 / head), "O": math.sqrt(3 / (heads * head))}
    for name, most in ranges.items():
        weight = weights[name].detach()
        assert 0.999 * most < weight.abs().max() <= most * (1 + 1e-6), name
        assert float(weight.std()) == pytest.approx(most / math.sqrt(3), rel=0.03), name


def lengths_along_the_stream(model: Transformer) -> dict[str, Tensor]:
    """Lengths of what each matrix reads from the stream or writes to it, by the names of its parameter."""
    axes = {"embed.types": 1, "W_QKV": 0, "W_O": 2, "W_in": 0, "W_out": 1, "weights.0": 0}
    return {
        name: value.norm(dim=axis)
        for name, value in model.named_parameters()
        for ending, axis in axes.items()
        if name.endswith(ending)
    }


def test_ngpt_keeps_every_matrix_at_unit_length_while_it_learns_its_step() -> None:
    training = Training(read_recipe("tiny", {"scheme": "ngpt-lerp", "examples": 96, "batch": 32, "rate": 0.01, "warmup": 0}))
    model = training.model
    sublayers = [part for block in model.decoder for part in (block.attention, block.feedforward)]
    first = {name: value.clone() for name, value in model.named_parameters()}
    assert all(torch.allclose(sublayer.alpha(), torch.tensor(0.05)) for sublayer in sublayers)
    assert len(lengths_along_the_stream(model)) == 2 + 4 * len(model.decoder)
    assert [metrics.step for metrics in training.run()] == [3]
    for name, lengths in lengths_along_the_stream(model).items():
        assert torch.allclose(lengths, torch.ones_like(lengths), atol=1e-6), name
        assert not torch.equal(dict(model.named_parameters())[name], first[name]), name
    for sublayer in sublayers:
        assert sublayer.alpha.value.grad.abs().max() > 0
        assert not torch.isclose(sublayer.alpha(), torch.tensor(0.05), rtol=1e-3).all()


def test_renormalising_brings_matrices_back_and_leaves_free_ones_alone() -> None:
    normalised, free = model_of("ngpt-lerp"), model_of("pre")
    for model in (normalised, free):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 3.0
        before = {name: value.clone() for name, value in model.named_parameters()}
        model.renormalise()
        assert all(torch.equal(before[name], value) for name, value in model.named_parameters()) == (model is free)
    for name, lengths in lengths_along_the_stream(normalised).items():
        assert torch.allclose(lengths, torch.ones_like(lengths), rtol=0, atol=1e-12), name


def split(texts: list[str], model: Transformer, spare: int = 0) -> Tensor:
    """Logits for whole examples such as ``[1+2=3]``, their questions padded by ``spare`` places more than they need."""
    rows = torch.nn.utils.rnn.pad_sequence([encode(text) for text in texts], batch_first=True, padding_value=MASK)
    rows = torch.nn.functional.pad(rows, (0, spare), value=MASK)
    answers = torch.tensor([text.index("=") + 1 for text in texts])
    examples = Examples(rows, torch.tensor([len(text) for text in texts]), answers)
    batch = one_batch(SplitFeed(5).arrange(examples, torch.full((len(texts),), 2), 1), 0)
    return SplitFeed(5).logits(model, batch).unflatten(0, (len(texts), 5))


@pytest.mark.parametrize("scheme", ["pre", "qkv", "ngpt-lerp", "post"])
def test_an_encoder_decoder_sees_its_question_and_no_padding(scheme: str) -> None:
    model = shaken(model_of(scheme, encoder_layers=2))
    alone = split(["[1+2=3]"], model)
    assert torch.allclose(split(["[1+2=3]"], model, spare=6), alone, rtol=0, atol=1e-12)
    assert torch.allclose(split(["[1+2=3]", "[12+345-N67=424]"], model)[:1], alone, rtol=0, atol=1e-12)
    assert not torch.isclose(split(["[1+4=3]"], model), alone).all(-1).any()  # another question, the same answer before it
    with torch.no_grad():
        model.embed.types[MASK] += 1.0
    assert torch.allclose(split(["[1+2=3]"], model, spare=6)[:, :2], alone[:, :2], rtol=0, atol=1e-12)  # no mask was looked at


@pytest.mark.parametrize("scheme", ["pre", "qkv", "ngpt-lerp"])
def test_the_decoder_of_two_is_causal_and_the_encoder_is_not(scheme: str) -> None:
    model = shaken(model_of(scheme, encoder_layers=1))
    first, second = split(["[1+2=345]"], model), split(["[1+2=367]"], model)
    assert torch.equal(first[:, :2], second[:, :2])  # [ and 3 are read before
    assert not torch.isclose(first[:, 2:4], second[:, 2:4]).all(-1).any()
    question = some_characters(1)
    changed = torch.cat((question[:, :-1], (question[:, -1:] + 1) % 17), 1)
    there = PaddingMask(torch.ones(1, question.shape[1], dtype=torch.bool))
    states = [model.encoder[0](model.embed(row_of(x, there)), there) for x in (question, changed)]
    assert not torch.isclose(*states).all(-1).any()


@pytest.mark.parametrize("encoder_layers", [0, 1])
def test_a_source_is_for_an_encoder_alone(encoder_layers: int) -> None:
    model, characters = model_of("pre", encoder_layers=encoder_layers), some_characters()
    there = PaddingMask(torch.ones(characters.shape, dtype=torch.bool))
    source = row_of(characters, there)
    for given in ((), (source,)) if encoder_layers else ((source, there), (None, there)):
        with pytest.raises(InputError, match="an encoder-decoder needs source= and memory_mask="):
            model(row_of(characters), *given)


def test_mix_keeps_the_stream_on_the_sphere_for_a_quarter_of_its_depth() -> None:
    model = model_of("mix", layers=8)
    states = [outputs(block) for block in model.decoder]
    initial = outputs(model.embed)
    reads = [inputs(block.attention.f) for block in model.decoder]
    model(row_of(some_characters()))
    sizes = [x.square().mean(-1).sub(1).abs().max().item() for (x,) in (initial, *states)]
    assert max(sizes[:3]) < 1e-9  # the embedding and two blocks of eight
    assert min(sizes[3:]) > 1e-3
    assert all(torch.allclose(x.square().mean(-1), torch.ones(2, 7).double()) for (x,) in reads)  # pre-norm takes over


def test_ln_scaling_divides_what_layer_l_reads_by_the_root_of_l() -> None:
    model = model_of("ln-scaling", layers=4)
    pairs = [(inputs(s), inputs(s.f)) for block in model.decoder for s in (block.attention, block.feedforward)]
    model(row_of(some_characters()))
    for i, ((state,), (read,)) in enumerate(pairs):
        assert torch.allclose(read, plain_norm(state, "rms") / math.sqrt(i // 2 + 1), rtol=0, atol=1e-9)


def test_a_scheme_of_a_users_own_builds_and_writes_as_its_slots_say() -> None:
    model = model_of(Scheme("mine", Slots(input="norm", output="norm", step="1/sqrt(layer)")), layers=3)
    pairs = [(inputs(s), outputs(s)) for block in model.decoder for s in (block.attention, block.feedforward)]
    assert model(row_of(some_characters())).isfinite().all()
    for i, ((before,), (after,)) in enumerate(pairs):
        size = (after - before).square().mean(-1).sqrt()
        assert torch.allclose(size, torch.full_like(size, (i // 2 + 1) ** -0.5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scheme", ["pre", "mix", "ngpt-lerp"])
def test_a_saved_model_is_the_same_bit_for_bit(scheme: str, tmp_path: Path) -> None:
    model, row = shaken(model_of(scheme)).float(), row_of(some_characters())
    save_model(tmp_path, model, {"worth": 0.5})
    saved = load_model(tmp_path)
    assert torch.equal(saved.model(row), model(row))
    assert saved.model.config == model.config
    assert saved.about == {"worth": 0.5}
    assert not saved.model.training
    assert not any(parameter.requires_grad for parameter in saved.model.parameters())
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["worth"] == 0.5
    assert content["model"]["dim"] == 12
    assert TransformerConfig.of(content["model"]) == model.config


def test_a_model_saved_in_half_precision_is_half_as_large_and_nearly_the_same(tmp_path: Path) -> None:
    model, row = model_of("qkv", dim=64).float(), row_of(some_characters())
    sizes = []
    for dtype in (torch.float32, torch.bfloat16):
        save_model(tmp_path, model, {}, dtype)
        sizes.append((tmp_path / "model.safetensors").stat().st_size)
    loaded = load_model(str(tmp_path)).model
    assert sizes[1] < 0.6 * sizes[0]
    assert loaded.embed.types.dtype == torch.float32
    assert torch.allclose(loaded(row), model(row), atol=0.05)


def write_config(content: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


def shape_with(**changes: Any) -> Callable[[Path], Any]:
    """Other values in the saved shape; ... takes a key away."""
    values = {**model_of("pre").config.values, **changes}
    return write_config({"format": 1, "model": {key: value for key, value in values.items() if value is not ...}})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["readout.weights.0"]
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no trained model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no trained model"),
        (lambda folder: truncate(folder / "model.safetensors"), "cannot read the weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot read the weights"),
        (lambda folder: truncate(folder / "config.json"), "config.json' is not valid JSON"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "cannot read .*config.json"),
        (write_config({"model_type": "llama"}), "does not describe a model of normscope"),
        (write_config([1]), "does not describe a model of normscope"),
        (write_config({"format": 99, "model": {}}), "does not describe a model of normscope"),
        (shape_with(dim=16), "do not fit its config.json"),
        (shape_with(dimm=16), "unknown key 'dimm'.*'dim'"),
        (shape_with(scheme=...), "a table of slots, not None"),
        (shape_with(dim="12"), "dim='12': should be a valid integer"),
        (shape_with(scheme="pre"), "scheme"),
        (shape_with(final_norm="rmss"), "did you mean 'rms'"),
        (without_a_weight, "do not fit its config.json"),
    ],
    ids=["no-config", "no-weights", "half-weights", "empty-weights", "half-config", "no-text", "another-kind", "a-list",
         "newer-format", "other-dim", "unknown-key", "no-scheme", "dim-text", "scheme-text", "norm", "missing"],
)  # fmt: skip
def test_a_damaged_model_is_refused_with_the_reason(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    save_model(tmp_path, model_of("pre").float(), {})
    assert load_model(tmp_path).model.config.dim == 12
    damage(tmp_path)
    with pytest.raises(InputError, match=message):
        load_model(tmp_path)


NEGATIVE = Scheme("mine", Slots(output="norm", step="alpha", carry="1-alpha", stream="norm"), alpha="0.5-t")


@pytest.mark.parametrize(
    ("scheme", "changes", "reason"),
    [
        ("dyt", {"feedforward_norm": "layer"}, "feed-forward layers had layer norms in place of the scheme's"),
        (Scheme("mine", Slots(input="norm"), weights="normalised"), {}, "there was no norm after the last layer"),
        (NEGATIVE, {}, "a negative alpha lost its sign"),
        (
            replace(NAMED["pre"], until="1/depth", then=NAMED["dyt"]),
            {"feedforward_norm": "layer", "encoder_layers": 2, "layers": 1},
            "feed-forward layers had layer norms in place of the scheme's",
        ),
        ("dyt", {"feedforward_norm": "tanh"}, ""),
        ("pre", {"feedforward_norm": "tanh"}, ""),
        ("dyt", {}, ""),
        ("ngpt-lerp", {}, ""),
        ("layerscale", {}, ""),
    ],
)
def test_models_of_which_earlier_versions_made_another_are_refused(
    scheme: str | Scheme, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_model(tmp_path, model_of(scheme, **changes).float(), {})
    assert load_model(tmp_path).model.config.made_differently == reason
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["format"] == (2 if reason else 1)  # what is the same can be read by earlier versions
    (tmp_path / "config.json").write_text(json.dumps({**content, "format": 1}))
    if reason:
        with pytest.raises(InputError, match=f"was trained by normscope 0.2.0 or an earlier version, in which {reason}; train"):
            load_model(tmp_path)
    else:
        load_model(tmp_path)


def test_an_unfinished_run_that_an_earlier_version_made_differently_is_not_resumed() -> None:
    from normscope.training import read_recipe

    record = read_recipe("tiny", {"scheme": "pre"}).record
    assert "format" not in record
    assert fingerprint(record) == "d5b2fe984a2a"  # as in 0.2.0
    assert read_recipe("tiny", {"scheme": "pre", "stop_above": 1.0}).record == record
    assert read_recipe("tiny", {"scheme": "dyt"}).record["format"] == 2


def test_a_pointwise_norm_of_feedforward_layers_has_one_gain_and_no_other() -> None:
    for scheme in ("pre", "dyt"):
        (block,) = model_of(scheme, feedforward_norm="tanh", layers=1).decoder
        assert block.feedforward.f.input_gain is None
        assert block.feedforward.input.gain is not None
        assert (block.attention.f.input_gains is None) == (scheme == "dyt")


WRONG_KINDS = """
from normscope import InputError
from normscope.schemes import NAMED
from normscope.transformer import TransformerConfig

values = TransformerConfig(NAMED["pre"]).values
for wrong in ({"dim": 512.5}, {"frequencies": 2.5}, {"readout": [8.5]}, {"final_norm": None}):
    try:
        TransformerConfig.of({**values, **wrong})
        print("accepted", wrong)
    except InputError:
        pass
"""


def test_values_of_the_wrong_kind_are_refused_where_they_are_read() -> None:
    """In a process of its own, where the run-time type checks of the tests do not refuse them first."""
    result = subprocess.run([sys.executable, "-c", WRONG_KINDS], capture_output=True, text=True, check=True)
    assert result.stdout == ""


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere' is no folder; .*builtin:addition-small-pre"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dim": 0}, "dim=0: should be greater than or equal to"),
        ({"heads": -1}, "heads=-1: should be greater than or equal to 1"),
        ({"encoder_layers": -1}, "encoder_layers=-1: should be"),
        ({"readout": (8, 0)}, "readout=0: should be greater than or equal to 1"),
        ({"frequencies": 7}, "from 0 to dim/2 = 6, not 7"),
        ({"feedforward_norm": "lyer"}, "did you mean 'layer'"),
    ],
)
def test_impossible_shapes_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TransformerConfig.of({**TransformerConfig(NAMED["pre"], **SMALL).values, **wrong})


@pytest.mark.parametrize("shape", [{"readout": ()}, {"frequencies": 0}, {"frequencies": 6}, {"heads": 1}, {"head": 1}])
def test_unusual_shapes_run(shape: dict[str, Any]) -> None:
    assert model_of("pre", **shape)(row_of(some_characters())).shape == (2, 7, 17)


def test_an_unknown_model_of_the_package_is_corrected() -> None:
    with pytest.raises(InputError, match="did you mean 'builtin:addition-small-pre'"):
        load_model("builtin:addition-small-per")


@pytest.mark.parametrize("name", BUILTIN)
def test_models_of_the_package_can_add(name: str) -> None:
    saved = load_model(f"builtin:{name}")
    assert saved.model.config.scheme.name == name.rpartition("-")[2]
    result = task_of(saved.about["recipe"]).evaluate(saved.model, ["in-distribution"], 256, seed=5, worked=3)
    assert result.accuracy["accuracy"].item() > 0.9
    assert all(as_text(encode(worked.asked)).startswith("[") for worked in result.worked)


@pytest.mark.parametrize(
    "slots",
    [Slots(step="alpha", stream="norm"), Slots(input="norm*alpha", output="norm"), Slots(input="norm", carry="1 - alpha")],
)
@pytest.mark.parametrize("start", [0.0, 0.1])
def test_alpha_is_learned_in_every_slot_and_from_every_start(slots: Slots, start: float) -> None:
    """A step that starts at 0 is ReZero's; a factor on a norm must be positive, so it cannot start there."""
    if start == 0.0 and "alpha" in slots.input:
        slots = replace(slots, input="norm", step="alpha")
    model = model_of(Scheme("mine", slots, alpha=start))
    model(row_of(some_characters())).square().sum().backward()
    alphas = [value for name, value in model.named_parameters() if "alpha" in name]
    assert alphas
    for value in alphas:
        assert value.grad is not None
        assert (value.grad != 0).any()


def test_normalised_weights_go_without_a_final_norm_and_share_the_scale_of_scores() -> None:
    model = model_of("ngpt-lerp", feedforward_norm="layer")
    names = [name for name, _ in model.named_parameters()]
    assert not any(name.startswith("readout.norm") or ".norms." in name for name in names)
    assert sum("score_gain" in name for name in names) == model.config.layers
    assert {module.kind for module in model.modules() if isinstance(module, Norm)} == {"rms"}
