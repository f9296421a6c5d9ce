"""Trained language models as Hugging Face folders: the same logits through transformers, or one line that says why not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.cli import run
from normscope import InputError
from normscope.core import CausalMask
from normscope.schemes import Scheme, Slots, find_scheme
from normscope.transformer import Row, Transformer, TransformerConfig, save_model
from normscope.transformer.export import family_of, hugging_face_model, save_hugging_face

SHAPE: dict[str, Any] = {
    "vocabulary": 300, "dim": 16, "layers": 3, "heads": 2, "head": 8, "feedforward": 24, "initial_std": 0.2,
    "positions": "rope", "activation": "swiglu", "biases": False, "readout": (), "shared_gains": True, "final_norm": "rms",
}  # fmt: skip


def trained(scheme: Scheme, **changes: Any) -> Transformer:
    """A model with every weight and fixed factor away from where it starts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(TransformerConfig(scheme, **{**SHAPE, **changes})).eval()
        with torch.no_grad():
            for value in model.state_dict().values():
                value += 0.1 * torch.randn(value.shape)
    return model


def logits(model: Transformer, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(Row(tokens, torch.arange(tokens.shape[1])[None], CausalMask()))
    return out


@pytest.mark.parametrize(
    ("scheme", "changes", "family"),
    [
        ("pre", {"tied": True}, "Llama"),
        ("ln-scaling", {"head": 4}, "Llama"),
        ("layerscale", {"shared_gains": False}, "Llama"),
        ("qk", {}, "Qwen3"),
        ("res-post+qk", {}, "Exaone4"),
        ("peri+softcap(2)", {}, "Gemma2"),
        ("peri+qk", {"tied": True}, "Gemma3Text"),
        ("layer", {"final_norm": "layer"}, "StableLm"),
        ("sub-ln", {}, "BitNet"),
    ],
)
def test_logits_are_the_same_through_transformers(scheme: str, changes: dict[str, Any], family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    slots = find_scheme("pre").with_norm("layer") if scheme == "layer" else find_scheme(scheme)
    model, tokens = trained(slots, **changes), torch.arange(40).view(2, 20) * 7 % 300
    save_hugging_face(tmp_path, hugging_face_model(model, 64, end=0))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened.config).__name__ == f"{family}Config"
    with torch.no_grad():
        theirs = opened(tokens).logits
    ours = logits(model, tokens)
    assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(ours.std()))
    assert ours.std() > 0.5


@pytest.mark.parametrize("scheme", ["pre", "peri", "qk"])
def test_a_gain_of_zero_is_exported(scheme: str) -> None:
    """One gain for q, k and v is that of the family's norm; a component that it turns off stays off."""
    model, tokens = trained(find_scheme(scheme), shared_gains=True), torch.arange(40).view(2, 20) * 7 % 300
    with torch.no_grad():
        for block in model.decoder:
            block.attention.f.input_gains.value[0, 3] = block.feedforward.f.input_gain.value[3] = 0.0
        theirs = hugging_face_model(model, 64)(tokens).logits
    ours = logits(model, tokens)
    assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(ours.std()))


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        ("post", {}, r"has attention.stream=norm; feedforward.stream=norm$"),
        ("mix", {}, "has slots that change with depth; "),
        ("keel", {}, r"attention.carry=2·T"),
        ("gated", {}, r"has attention.gate=sigmoid$"),
        ("sink", {}, r"has attention.scores=sink$"),
        ("dyt", {}, r"has norm=tanh$"),
        ("tangent", {}, "attention.output=tangent"),
        ("ngpt-lerp", {}, "weights=normalised"),
        ("sub-ln", {"head": 4}, "norms in attention.inner, attention.input, feedforward.inner, feedforward.input; heads=none"),
        ("softcap", {}, r"together: norms in attention.input, feedforward.input; heads=none, norm=rms, scores=softcap\(50\)"),
        ("pre", {"activation": "gelu", "biases": True}, r"has activation='gelu'; biases=True$"),
        ("pre", {"heads": 3}, r"has heads=3 that do not divide dim=16$"),
        ("pre", {"final_norm": "layer"}, r"has final_norm=layer beside norm=rms$"),
    ],
)
def test_slots_that_no_family_has_are_named(scheme: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        family_of(TransformerConfig(find_scheme(scheme), **{**SHAPE, **changes}))


def test_gains_of_every_head_are_refused_where_a_family_has_one() -> None:
    with pytest.raises(InputError, match="Qwen3 has one gain for all heads; train with shared_gains=True"):
        hugging_face_model(trained(find_scheme("qk"), shared_gains=False), 64)


def test_a_run_is_exported_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, target = tmp_path / "run", tmp_path / "exported"
    source.mkdir()
    words = {"<|endoftext|>": 0, "law": 1, "and": 2, "order": 3} | {f"w{i}": i for i in range(4, 300)}
    Tokenizer(WordLevel(words, unk_token="<|endoftext|>")).save(str(source / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    (source / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    save_model(source, trained(Scheme("mine", Slots(input="norm", step="1/depth"))), {"recipe": {"context": 32}})
    code, out, _ = run(capsys, "export", str(source), "--out", str(target), "--json")
    assert code == 0
    assert '"family": "Llama"' in out
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    assert model.config.max_position_embeddings == 32
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer("law").input_ids == [1]
    capsys.readouterr()
    code, _, err = run(capsys, "export", "builtin:addition-small-pre", "--out", str(tmp_path / "none"))
    assert code == 2
    assert "no family of transformers" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "none").exists()
