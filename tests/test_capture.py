"""Captured values are those of the forward pass: plain torch hooks and the library's own outputs agree with them."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.models import (
    COMMON,
    FAMILIES,
    GROUPED,
    LAYERS,
    WORDS,
    built,
    near,
    random_normscope_model,
    sample_of,
    some_tokens,
    word_tokenizer,
)
from normscope.core import CausalMask
from normscope.errors import InputError
from normscope.models import Model, Observer, Sample, SublayerStep
from normscope.models.module_model import ModuleModel
from normscope.models.normscope_model import NormscopeModel
from normscope.transformer import Row

NAMES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "scores", "pattern")
COHERE = {**GROUPED, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
PARALLEL = ("gpt-neox", "cohere")
SCHEMES = ("pre", "post", "peri", "ngpt-lerp", "ln-scaling")
LIBRARY = [name for name in FAMILIES if name != "bert bare"] + ["cohere"]
EVERY = pytest.mark.parametrize("name", [*LIBRARY, *SCHEMES])


@cache
def opened(name: str) -> Model:
    """A random model of a family, or of ours with a scheme; learned scales are away from their start."""
    if name in SCHEMES:
        return random_normscope_model(name)
    if name == "cohere":
        return ModuleModel(name, built("CohereConfig", COHERE))
    family = FAMILIES[name]
    return ModuleModel(name, built(family.config, family.options, family.maker))


def tokens_of(model: Model) -> Tensor:
    return some_tokens() % model.vocabulary


def sublayers(model: Model, sample: Sample) -> dict[tuple[int, str], SublayerStep]:
    found: dict[tuple[int, str], SublayerStep] = {}
    model.forward(sample, Observer(sublayer=lambda step: found.__setitem__((step.layer, step.sublayer), step)))
    return found


@EVERY
def test_updates_lead_from_one_captured_state_to_the_next(name: str) -> None:
    """carry·resid_pre + attn_out = resid_mid, carry·resid_mid + mlp_out = resid_post, up to the norm of the stream."""
    model = opened(name)
    norms = {(norm.layer, norm.sublayer, norm.slot): norm for norm in model.norms}
    names = [x for x in NAMES if name not in PARALLEL or x != "resid_mid"]
    with model.capture(*names) as c:
        model(tokens_of(model))
    for layer in range(model.layers):
        if name in PARALLEL:
            total = c["resid_pre", layer] + c["attn_out", layer] + c["mlp_out", layer]
            assert near(total, c["resid_post", layer])
            continue
        places = (("attention", "resid_pre", "attn_out", "resid_mid"), ("feedforward", "resid_mid", "mlp_out", "resid_post"))
        for sublayer, start, update, end in places:
            if (name, sublayer) == ("gemma4", "feedforward"):  # a further sublayer follows
                continue
            carry, stream = model.carry(layer, sublayer), norms.get((layer, sublayer, "stream"))
            assert carry is not None
            total = carry * c[start, layer] + c[update, layer]
            assert near(total if stream is None else stream(total), c[end, layer])


@EVERY
def test_an_update_is_the_step_times_the_normalised_output(name: str) -> None:
    model = opened(name)
    norms = {(norm.layer, norm.sublayer, norm.slot): norm for norm in model.norms}
    found = sublayers(model, sample_of(tokens_of(model)))
    assert list(found) == [(layer, sublayer) for layer in range(model.layers) for sublayer in ("attention", "feedforward")]
    for (layer, sublayer), step in found.items():
        output = norms.get((layer, sublayer, "output"))
        assert near(step.step * (step.output if output is None else output(step.output)), step.update)
        assert (step.after is None) == (name in PARALLEL)


@pytest.mark.parametrize("name", LIBRARY)
def test_captured_states_and_patterns_are_those_of_the_library(name: str) -> None:
    """The library's last hidden states are after the final norm, so they are left out."""
    if name == "cohere":
        plain = built("CohereConfig", COHERE)
    else:
        plain = built(FAMILIES[name].config, FAMILIES[name].options, FAMILIES[name].maker)
    plain.set_attn_implementation("eager")
    tokens, model = some_tokens(), opened(name)
    with torch.no_grad():
        output = plain(input_ids=tokens, output_hidden_states=True, output_attentions=True)
    with model.capture("resid_pre", "resid_post", "pattern", "scores", "q", "k", "v") as c:
        logits = model(tokens)
    assert near(logits, output.logits)
    assert all(near(*pair) for pair in zip(c["resid_pre"], output.hidden_states[:LAYERS], strict=True))
    assert all(near(*pair) for pair in zip(c["resid_post"][:-1], output.hidden_states[1:LAYERS], strict=True))
    for layer, attention in enumerate(output.attentions):
        assert near(c["pattern", layer], attention)
        assert near(c["scores", layer].softmax(-1), attention)
        assert c["q", layer].shape == c["k", layer].shape == (*tokens.shape[:1], model.heads, tokens.shape[1], model.head_dim)


def hooked(module: torch.nn.Module, run: Any, before: bool = False) -> Tensor:
    """Input or output of a module in a forward pass."""
    seen: list[Tensor] = []
    if before:
        hook = module.register_forward_pre_hook(lambda module, args, kwargs: seen.append(args[0]), with_kwargs=True)
    else:
        hook = module.register_forward_hook(lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        run()
    hook.remove()
    return seen[0]


@pytest.mark.parametrize(
    ("name", "added", "factor", "reader", "mlp"),
    [
        ("llama", "self_attn.o_proj", 1.0, "post_attention_layernorm", "mlp"),
        ("gpt2", "attn.c_proj", 1.0, "ln_2", "mlp"),
        ("granite", "self_attn.o_proj", 0.22, "post_attention_layernorm", "mlp"),
        ("mixtral", "self_attn.o_proj", 1.0, "post_attention_layernorm", "mlp"),
        ("gemma2", "post_attention_layernorm", 1.0, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ("olmo2", "post_attention_layernorm", 1.0, "mlp", "post_feedforward_layernorm"),
        ("bert", "attention.output.dense", 1.0, "intermediate", "output.dense"),
    ],
)
def test_captured_values_are_those_of_plain_hooks(name: str, added: str, factor: float, reader: str, mlp: str) -> None:
    model, tokens = opened(name), some_tokens()
    assert isinstance(model, ModuleModel)
    with model.capture() as c:
        model(tokens)
    for layer, block in enumerate(model.blocks):

        def run() -> None:
            model.model(input_ids=tokens)

        assert near(c["attn_out", layer], factor * hooked(block.get_submodule(added), run))
        assert near(c["resid_mid", layer], hooked(block.get_submodule(reader), run, before=True))
        assert near(c["mlp_out", layer], factor * hooked(block.get_submodule(mlp), run))
        assert near(c["resid_pre", layer], hooked(block, run, before=True))
        assert near(c["resid_post", layer], hooked(block, run))


@pytest.mark.parametrize("name", SCHEMES)
def test_states_inside_our_blocks_are_those_of_plain_hooks(name: str) -> None:
    model = opened(name)
    assert isinstance(model, NormscopeModel)
    tokens = tokens_of(model)
    row = Row(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), CausalMask())
    with model.capture("resid_mid", "resid_post") as c:
        logits = model(tokens)
    for layer, block in enumerate(model.model.decoder):
        assert near(c["resid_mid", layer], hooked(block.attention, lambda: model.model(row)))
        assert near(c["resid_post", layer], hooked(block, lambda: model.model(row)))
    with torch.no_grad():
        assert near(logits, model.model(row))


def test_learned_scales_are_those_of_the_weights() -> None:
    """α ten times as large makes step and carry = 1 − α follow."""
    model = opened("ngpt-lerp")
    assert isinstance(model, NormscopeModel)
    before = model.step(0, "attention")
    part = model.model.decoder[0].attention
    with torch.no_grad():
        part.alpha.value *= 10
    step, carry = model.step(0, "attention"), model.carry(0, "attention")
    with torch.no_grad():
        part.alpha.value /= 10
    assert before is not None
    assert step is not None
    assert carry is not None
    assert step.shape == (model.dim,)
    assert near(step, 10 * before)
    assert near(carry, 1 - step)


def test_a_replaced_state_is_the_one_that_is_captured() -> None:
    model, tokens = opened("llama"), some_tokens()
    with model.capture("resid_pre", "resid_mid", "attn_out") as c:
        model.forward(sample_of(tokens), Observer(state=lambda layer, x: 2 * x if layer == 1 else None))
        twice = c["resid_pre", 1]
        assert near(twice + c["attn_out", 1], c["resid_mid", 1])
        model(tokens)
    assert near(twice, 2 * c["resid_pre", 1])
    model(some_tokens(seed=1))
    assert near(twice, 2 * c["resid_pre", 1])


def test_captures_may_be_nested() -> None:
    model = opened("llama")
    with model.capture("resid_mid") as outer, model.capture("q") as inner:
        model(some_tokens())
    assert inner["q", 0].shape[1] == model.heads
    assert len(outer["resid_mid"]) == LAYERS


def test_what_cannot_be_captured_gets_one_line() -> None:
    model = opened("llama")
    with pytest.raises(InputError, match=r"allowed are resid_pre, .*did you mean 'resid_mid'"), model.capture("resid_mit"):
        pass
    with model.capture("resid_mid") as c:
        with pytest.raises(InputError, match="run the model inside"):
            c["resid_mid", 0]
        model([1, 2, 3])
    for key, message in (
        (("resid_mid", 2), "layers 0 to 1"),
        (("attn_out", 0), "captured are resid_mid"),
        ("attn", "allowed"),
    ):
        with pytest.raises(InputError, match=message):
            c[key]
    assert near(c["resid_mid", -1], c["resid_mid", 1])
    for name in PARALLEL:
        with pytest.raises(InputError, match="parallel, with no state between"), opened(name).capture("resid_mid"):
            pass


def test_a_model_reads_texts_ids_tensors_and_samples() -> None:
    model = ModuleModel("llama", built("LlamaConfig", GROUPED), word_tokenizer())
    logits = model("the cat sat")
    ids = [2, 5, 6, 8, 3]
    assert logits.shape == (1, 5, WORDS) or logits.shape[:2] == (1, 5)
    for same in (ids, [ids], torch.tensor(ids), torch.tensor([ids]), sample_of(torch.tensor([ids]))):
        assert torch.equal(model(same), logits)
    ours = opened("pre")
    assert torch.equal(ours("[12+3="), ours([14, 1, 2, 10, 3, 12]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("the cat", "no tokenizer"),
        ([], "empty"),
        ([[1, 2], [3]], "rows of one length"),
        (torch.tensor([0.5, 1.5]), "integers"),
        ([1, WORDS], f"token {WORDS} does not exist"),
        ([-1], "token -1 does not exist"),
        (torch.ones(1, 65, dtype=torch.long), "65 tokens are too many"),
        (torch.ones(1, 1, 2, dtype=torch.long), "integers"),
    ],
)
def test_what_a_model_cannot_read_gets_one_line(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        opened("llama")(given)
    assert len(str(refused.value).splitlines()) == 1


def test_characters_that_our_models_do_not_know_are_named() -> None:
    with pytest.raises(InputError, match="not 'x'"):
        opened("pre")("[12x")


def test_a_forward_pass_has_no_gradients_and_leaves_the_model_as_it_was() -> None:
    plain = built("BertConfig", COMMON, "AutoModelForMaskedLM").train().requires_grad_(True)
    model = ModuleModel("bert", plain)
    implementation = plain.config._attn_implementation
    assert not model(some_tokens()).requires_grad
    assert plain.training
    assert plain.bert.encoder.layer[0].training
    assert plain.config._attn_implementation == implementation != "normscope"
    assert all(parameter.requires_grad for parameter in plain.parameters())
