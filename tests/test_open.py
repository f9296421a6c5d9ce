"""Models that are already in memory."""

import copy
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.models import COMMON, FAMILIES, GROUPED, built, near, some_tokens, word_tokenizer
from normscope.errors import InputError
from normscope.measures.base import Subject, measure_all
from normscope.measures.interference import Interference
from normscope.models import Observer, Sample, loading, open_model
from normscope.schemes import NAMED
from normscope.transformer import Transformer, TransformerConfig, load_model

SIZES: dict[str, Any] = {"dim": 16, "heads": 2, "head": 8, "feedforward": 8, "readout": (8,), "frequencies": 4}


def test_a_model_in_memory_is_opened_and_left_as_it_is() -> None:
    plain = built("LlamaConfig", GROUPED).train().requires_grad_(True)
    model = open_model(plain, tokenizer=word_tokenizer())
    assert (model.name, model.kv_heads, model.parameters) == ("LlamaForCausalLM", 2, plain.num_parameters())
    assert model("the cat sat").shape == (1, 5, COMMON["vocab_size"])
    assert plain.training
    assert all(parameter.requires_grad for parameter in plain.parameters())
    assert plain.config._attn_implementation != "normscope"
    plain(input_ids=some_tokens(), labels=some_tokens()).loss.backward()
    with torch.no_grad():
        plain.model.layers[0].self_attn.o_proj.weight.zero_()
    with model.capture("attn_out") as c:
        model("the cat sat")
    assert not bool(c["attn_out", 0].any())


def test_an_opened_model_is_returned_as_it_is() -> None:
    model = open_model("builtin:addition-small-pre")
    assert open_model(model) is model


def test_a_transformer_of_ours_is_opened() -> None:
    saved = load_model("builtin:addition-small-qkv")
    named, bare, known = open_model("builtin:addition-small-qkv"), open_model(saved.model), open_model(saved)
    assert torch.equal(named("[12+3="), bare("[12+3="))
    assert torch.equal(known.sample(None, 3, 0).tokens, named.sample(None, 3, 0).tokens)
    assert bare.scheme is not None
    assert bare.name == f"transformer-{bare.scheme.name}"


def test_a_scheme_that_changes_with_depth_is_one_for_each_layer() -> None:
    mixed = NAMED["mix"]
    model = open_model(Transformer(TransformerConfig(mixed, layers=4, **SIZES)))
    assert model.scheme == mixed
    assert model.schemes == tuple(mixed.at(layer, 4) for layer in range(4))
    assert model.schemes[0] != model.schemes[-1]
    assert "layer 0: mix (first stage); layers 1–3: pre" in repr(model)


@pytest.mark.parametrize(
    ("thing", "message"),
    [(nn.Linear(2, 2), "does not run on a small input"), (nn.Identity(), "no blocks")],
)
def test_what_is_no_model_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_model(thing)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "olmo2", "bert", "granite", "gpt-neox"])
def test_low_precision_changes_no_scheme(name: str) -> None:
    family = FAMILIES[name]
    plain = built(family.config, family.options, family.maker).to(torch.bfloat16)
    model = open_model(plain)
    assert model.scheme is not None
    assert (model.scheme.name, model.scheme.norm, model.dtype) == (family.scheme, family.norm, torch.bfloat16)
    assert "bfloat16" in repr(model)


@pytest.mark.parametrize(("config", "what"), [("BitNetConfig", "a norm"), ("AfmoeConfig", "a gate")])
def test_a_norm_or_gate_before_the_output_matrix_is_known(config: str, what: str) -> None:
    options = {**GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = open_model(built(config, {**options, "head_dim": 8}))
    assert model.changes_mixed(1) == f"{what} changes its mixed values before W_O"
    with model.capture("resid_pre", "resid_mid", "attn_out", "pattern") as c:
        model(some_tokens())
    assert near(c["resid_pre", 0] + c["attn_out", 0], c["resid_mid", 0])
    assert near(c["pattern", 0].sum(-1), torch.ones(2, model.heads, 12))


@pytest.mark.parametrize("html", [True, False])
def test_a_model_shows_what_it_is(html: bool) -> None:
    model = open_model(built("LlamaConfig", GROUPED))
    shown = model._repr_html_() if html else repr(model)
    for part in ("LlamaForCausalLM", "layers 0–1: pre", "RMSNorm", "2 layers, 4 heads (2 KV heads) of 8, width 32", "float32"):
        assert part in shown
    assert "attention, matrices, predictions, stream, sublayers, vocabulary" in shown


def test_names_are_escaped_in_html() -> None:
    plain = built("LlamaConfig", GROUPED)
    plain.config._name_or_path = "<script>"
    assert "<script>" not in open_model(plain)._repr_html_()


def test_weights_that_change_after_opening_are_followed() -> None:
    """OPT scales its queries; the factor belongs to the architecture, not to the weights of one moment."""
    plain = built(FAMILIES["opt"].config, FAMILIES["opt"].options)
    model = open_model(plain)
    before = model.projections(0).W_Q.clone()
    plain.model.decoder.layers[0].self_attn.q_proj.weight.mul_(3)
    assert near(model.projections(0).W_Q, 3 * before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_in_float32_and_stays_half(dtype: torch.dtype) -> None:
    plain = built("Qwen3Config", {**GROUPED, "head_dim": 8}).to(dtype)
    before = {name: (p.dtype, p.clone()) for name, p in plain.named_parameters()}
    model = open_model(plain)
    assert all((p.dtype, True) == (before[name][0], torch.equal(p, before[name][1])) for name, p in plain.named_parameters())
    exact = open_model(copy.deepcopy(plain).float())
    assert model.scheme == exact.scheme
    sample, steps = Sample.of(some_tokens()), []
    logits = model.forward(sample, Observer(attention=steps.append, state=lambda layer, x: x + 0))
    assert {logits.dtype, *(x.dtype for step in steps for x in (step.q, step.stream, step.W_O))} == {torch.float32}
    weights, wanted = model.projections(1), exact.projections(1)
    assert torch.equal(weights.W_Q, wanted.W_Q)
    assert torch.equal(model.embeddings, exact.embeddings)
    (q,) = model.heads_of(1, steps[1].input, steps[1].rotation, "q")
    assert torch.allclose(q, exact.heads_of(1, steps[1].input, steps[1].rotation, "q")[0], atol=1e-6)
    changes = [measure_all(Subject(each, sample), [Interference()])["interference"]["interference"] for each in (model, exact)]
    assert np.allclose(changes[0]["change"], changes[1]["change"], atol=0.03)
    assert changes[0][changes[0]["place"] == "after"]["change"].max() < 1e-5


@pytest.fixture
def half_folder(tmp_path: Path) -> Path:
    plain = built("LlamaConfig", GROUPED).to(torch.bfloat16)
    plain.save_pretrained(tmp_path / "half", max_shard_size="20KB")
    return tmp_path / "half"


def test_a_name_is_opened_in_the_precision_that_is_asked_for(half_folder: Path) -> None:
    assert len(list(half_folder.glob("*.safetensors"))) > 1
    kinds = {dtype: open_model(half_folder, dtype=dtype).dtype for dtype in ("auto", "bfloat16", "float16")}
    assert kinds == {"auto": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    with pytest.raises(InputError, match="unknown dtype 'int8'; allowed: auto, bfloat16, float16, float32"):
        open_model(half_folder, dtype="int8")
    with pytest.raises(InputError, match="a model in memory keeps its precision"):
        open_model(built("LlamaConfig", GROUPED), dtype="bfloat16")
    with pytest.raises(InputError, match="runs in float32"):
        open_model("builtin:addition-small-pre", dtype="bfloat16")


@pytest.mark.parametrize(("bytes_free", "dtype"), [(90e6, torch.float32), (78e6, torch.bfloat16)])
def test_what_does_not_fit_in_float32_is_opened_as_stored(
    half_folder: Path, bytes_free: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    monkeypatch.setattr(loading, "available", lambda device: bytes_free)
    monkeypatch.setattr(loading, "stored_parameters", lambda folder, stored: 4e6)
    assert open_model(half_folder).dtype == dtype
    told = [str(warning.message) for warning in recwarn]
    assert any("it is opened in bfloat16, as stored" in text for text in told) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weights_that_stay_on_disk_are_measured_like_those_in_memory(half_folder: Path, dtype: str) -> None:
    whole, offloaded = (open_model(half_folder, device, dtype=dtype) for device in ("cpu", "disk"))
    whole = whole if dtype == "float32" else open_model(half_folder, dtype="bfloat16")
    assert all(parameter.is_meta for parameter in offloaded.model.parameters())
    assert (offloaded.scheme, offloaded.dtype, offloaded.device) == (whole.scheme, whole.dtype, whole.device)
    sample = Sample.of(some_tokens())
    assert torch.equal(offloaded.forward(sample), whole.forward(sample))
    assert torch.equal(offloaded.projections(1).W_O, whole.projections(1).W_O)
    assert torch.equal(offloaded.embeddings, whole.embeddings)
    assert [norm.kind for norm in offloaded.norms] == [norm.kind for norm in whole.norms]
    assert offloaded.checksum == whole.checksum
    changes = [
        measure_all(Subject(each, sample), [Interference()])["interference"]["interference"] for each in (whole, offloaded)
    ]
    assert changes[0].equals(changes[1])
    assert all(parameter.is_meta for parameter in offloaded.model.parameters())


def test_weights_that_the_library_converts_stay_readable(tmp_path: Path) -> None:
    options = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    built("MixtralConfig", options).save_pretrained(tmp_path / "experts")
    whole, offloaded = (open_model(tmp_path / "experts", device) for device in ("cpu", "disk"))
    gc.collect()
    folder = Path(offloaded.model.offload_folder.name)
    assert list(folder.iterdir())
    sample = Sample.of(some_tokens())
    assert torch.equal(offloaded.forward(sample), whole.forward(sample))
    del offloaded
    gc.collect()
    assert not folder.exists()
