"""check-scheme: models that are broken on purpose, one slot at a time, and models that are as they should be."""

import json
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from helpers.cli import run
from helpers.models import GPT2, built
from helpers.tiny_models import tiny_model
from normscope.errors import InputError
from normscope.schemes import NAMED, Scheme, Slots
from normscope.transformer import Transformer, TransformerConfig


def differences(model: Any, **given: Any) -> list[dict[str, Any]]:
    result = ns.check_scheme(model, progress=False, **given)
    return result.kind.records(result)


def llama() -> Any:
    return tiny_model("llama", "causal")


def own(scheme: str) -> Transformer:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 32, "heads": 2, "head": 8, "feedforward": 32, "readout": (32,), "frequencies": 4}
    return Transformer(TransformerConfig(NAMED[scheme], layers=3, **sizes)).eval()


@pytest.mark.parametrize(("kind", "mapping"), [("llama", "causal"), ("gemma2", "causal"), ("bert", "masked"), ("vit", "image")])
def test_models_as_their_code_declares(kind: str, mapping: str) -> None:
    assert differences(tiny_model(kind, mapping)) == []


def test_a_model_of_short_contexts() -> None:
    assert differences(built("GPT2Config", {**GPT2, "n_positions": 8})) == []


@pytest.mark.parametrize("scheme", ["pre", "post", "peri", "ln-scaling", "mix", "deepnorm", "ngpt-lerp", "qkv", "hybrid-star"])
def test_models_of_normscope_do_what_their_configuration_states(scheme: str) -> None:
    model = own(scheme)
    assert differences(model) == []
    assert differences(model, scheme=scheme) == []


@pytest.mark.parametrize("name", ["dyt", "derf"])
def test_pointwise_schemes_are_pointwise_in_feed_forward_layers_whatever_their_norm(name: str) -> None:
    """Recipes of addition have LayerNorm there, as the paper has."""
    sizes: dict[str, Any] = {"dim": 32, "heads": 2, "head": 8, "feedforward": 32, "readout": (32,), "frequencies": 4}
    model = Transformer(TransformerConfig(NAMED[name], layers=2, feedforward_norm="layer", **sizes)).eval()
    assert all(block.feedforward.input.kind == NAMED[name].norm for block in model.decoder)
    assert differences(model) == []


def test_normalised_weights_with_a_free_stream_have_a_final_norm() -> None:
    scheme = Scheme("mine", Slots(input="norm", heads="qk"), weights="normalised")
    sizes: dict[str, Any] = {"dim": 32, "heads": 2, "head": 8, "feedforward": 32, "readout": (), "frequencies": 4}
    model = Transformer(TransformerConfig(scheme, layers=2, **sizes)).eval()
    assert differences(model) == []
    states = torch.randn(5, 32)
    logits = [model.readout(c * states, model.unembedding) for c in (1.0, 10.0)]
    torch.testing.assert_close(*logits)


def test_a_lost_factor_of_ln_scaling() -> None:
    model = own("ln-scaling")
    model.decoder[2].attention.input_value.fill_(1.0)  # type: ignore[union-attr, operator]
    (found,) = differences(model)
    assert (found["layer"], found["sublayer"], found["slot"]) == (2, "attention", "factor")
    assert found["difference"] == "the factor on the input of attention of layer 2 is 1, declared 0.5774"


class Scaled(nn.Module):
    """A norm with a factor after it."""

    def __init__(self, norm: nn.Module, factor: float) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.factor * self.norm(x)
        return made


def test_a_lost_factor_in_a_model_of_the_library() -> None:
    model = llama()
    for layer, block in enumerate(model.model.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            if (layer, name) != (1, "post_attention_layernorm"):
                setattr(block, name, Scaled(getattr(block, name), (layer + 1) ** -0.5))
    (found,) = differences(model, scheme="ln-scaling")
    assert (found["layer"], found["sublayer"], found["slot"]) == (1, "feedforward", "factor")


def test_swapped_norms() -> None:
    model = llama()

    def post(self: Any, x: Tensor, **given: Any) -> Tensor:
        x = self.input_layernorm(x + self.self_attn(x, **given)[0])
        made: Tensor = self.post_attention_layernorm(x + self.mlp(x))
        return made

    model.model.layers[1].forward = MethodType(post, model.model.layers[1])
    found = differences(model)
    assert {row["layer"] for row in found} == {1}
    assert {(row["sublayer"], row["slot"]) for row in found} == {
        (sublayer, slot) for sublayer in ("attention", "feedforward") for slot in ("input", "stream")
    }
    assert found[0]["difference"] == "attention of layer 1 has no input norm (declared RMSNorm)"


def test_a_missing_final_norm() -> None:
    model = llama()
    model.model.norm = nn.Identity()
    (found,) = differences(model)
    assert found["difference"] == "there is no final norm (declared RMSNorm)"
    assert [row["difference"] for row in differences(model, scheme="pre")] == ["there is no final norm (declared a norm)"]


def test_gains_of_zero() -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[2].post_attention_layernorm.weight.zero_()
    (found,) = differences(model)
    assert found["layer"] == 2
    assert found["difference"].startswith("the gain of the input norm of the feed-forward layer of layer 2 is 0")


def test_a_skipped_output_norm() -> None:
    model: Any = tiny_model("gemma2", "causal")
    model.model.layers[1].post_feedforward_layernorm = nn.Identity()
    (found,) = differences(model)
    assert found["difference"] == "the feed-forward layer of layer 1 has no output norm (declared RMSNorm)"


def test_a_norm_without_effect() -> None:
    model = llama()
    model.model.layers[0].input_layernorm.variance_epsilon = 1.0
    found = differences(model)
    assert found[0]["layer"] == 0
    assert "has no effect: its eps = 1 " in " ".join(row["difference"] for row in found)


def test_the_command_prints_the_first_difference_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    code, out, err = run(capsys, "check-scheme", str(tmp_path))
    assert (code, "do what is declared" in out) == (0, True), err
    code, out, _ = run(capsys, "check-scheme", str(tmp_path), "--scheme", "peri")
    assert code == 1
    assert "Not as declared: attention of layer 0 has no output norm (declared a norm)." in out
    code, out, _ = run(capsys, "check-scheme", str(tmp_path), "--scheme", "peri", "--json")
    assert (code, len(json.loads(out))) == (1, 6)
    scheme = tmp_path / "mine.toml"
    scheme.write_text('name = "mine"\n[attention]\ninput = "norm"\nstep = 0.5\n')
    code, out, _ = run(capsys, "check-scheme", str(tmp_path), "--scheme", str(scheme))
    assert (code, "the branch scale of attention of layer 0 is 1, declared 0.5" in out) == (1, True)
    assert run(capsys, "check-scheme", str(tmp_path), "--scheme", "nothing")[0] == 2
    assert run(capsys, "check-scheme", str(tmp_path / "absent"))[0] == 2


def test_a_module_without_a_configuration_needs_a_scheme() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(32, 16)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            made: Tensor = x
            return made

    with pytest.raises(InputError, match="scheme="):
        ns.check_scheme(Plain().eval(), progress=False)
    assert differences(Plain().eval(), scheme="post") == []
