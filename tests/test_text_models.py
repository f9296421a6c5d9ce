"""Language models of normscope as models: every slot is observed, and measures read it or state why not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.cli import run
from normscope.experiments.audit import Audit
from normscope.experiments.words import Words
from normscope.measures.sample import sample_text
from normscope.models import AttentionStep, Model, Observer, SublayerStep, open_model
from normscope.models.declared import code_facts, differences, observed_facts, unproved
from normscope.schemes import find_scheme
from normscope.transformer import SavedModel, Transformer
from normscope.transformer.config import TransformerConfig

SCHEMES = (
    "pre", "post", "ngpt-lerp", "dyt", "sub-ln", "gated", "sink", "softcap", "tangent", "layerscale", "derf", "rezero",
    "keel", "hybrid",
)  # fmt: skip
CONTEXT = 48
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte pairs of the bundled text, as a run folder has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bytes_ = pre_tokenizers.ByteLevel
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer, pairs.decoder = bytes_(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=bytes_.alphabet(), show_progress=False)
    pairs.train_from_iterator([sample_text()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=END)


def text_model(scheme: str, tokenizer: Any, **options: Any) -> Model:
    """A random language model with gains, slopes, steps and sinks away from where they start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = TransformerConfig(
            find_scheme(scheme), vocabulary=len(tokenizer), dim=16, layers=2, heads=2, head=8, feedforward=24, readout=(),
            positions="rope", activation="swiglu", biases=False, initial_std=0.2, shared_gains=True, final_norm="rms",
            **options,
        )  # fmt: skip
        module = Transformer(config).eval().requires_grad_(False)
        for parameter in module.parameters():
            if parameter.ndim < 2:
                parameter += 0.1 * torch.randn_like(parameter)
    return open_model(SavedModel(module, {"recipe": {"task": "text", "context": CONTEXT}}), tokenizer=tokenizer)


@pytest.mark.parametrize("scheme", SCHEMES[:10])
def test_an_audit_measures_every_scheme_or_states_why_not(scheme: str, tokenizer: Any) -> None:
    model = text_model(scheme, tokenizer)
    assert [(d.place, d.text) for d in differences(code_facts(model), observed_facts(model))] == []
    assert [d.text for d in unproved(model)] == []
    result = Audit(model=model, tokens=24, fresh=True).run()
    skipped = set(result.tables["skipped"]["measure"]) if "skipped" in result.tables else set()
    assert skipped == ({"interference", "spheres"} if scheme in ("dyt", "derf") else set())
    assert len(list(Audit.terminal(result))) > 3
    assert result.configuration["scheme"] == scheme
    assert result.tables["writes"]["theory"].notna().all()  # of attention, whose slots have a law of motion


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_observed_is_what_the_modules_compute(scheme: str, tokenizer: Any) -> None:
    """Weights by hand from q and k, mixed values through norm and gate to W_O, and sums of states and updates."""
    model = text_model(scheme, tokenizer)
    seen: dict[tuple[int, str], Tensor] = {}
    hooks = [
        block.get_submodule(f"{name}.f").register_forward_hook(
            lambda module, given, output, key=(layer, name): seen.update({key: output})
        )
        for layer, block in enumerate(model.blocks)
        for name in ("attention", "feedforward")
    ]
    attended, added = list[AttentionStep](), list[SublayerStep]()
    sample = model.sample("To kill two birds with one stone", None, 0)
    model.forward(sample, Observer(attention=attended.append, sublayer=added.append))
    for hook in hooks:
        hook.remove()
    for step in attended:
        attention = model.blocks[step.layer].get_submodule("attention.f")
        logits = float(attention.score_scale.factor) * step.q @ step.k.mT  # type: ignore[union-attr,operator]
        if scheme == "softcap":
            logits = 50 * torch.tanh(logits / 50)
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -torch.inf)
        sinks = getattr(attention, "sink", None)
        if sinks is not None:
            logits = torch.cat((logits, sinks[None, :, None, None].expand(*logits.shape[:-1], 1)), -1)
        weights = logits.softmax(-1)[..., : step.k.shape[2]]
        torch.testing.assert_close(step.weights(), weights, rtol=1e-5, atol=1e-6)
        mixed = (weights @ step.v).transpose(1, 2).flatten(2)
        norm = model.norm_at(step.layer, "attention", "inner")
        mixed = mixed if norm is None else norm(mixed)
        if scheme == "gated":
            mixed = mixed * torch.sigmoid(step.input @ attention.gate_weights)  # type: ignore[operator]
        output = mixed @ model.projections(step.layer).W_O.flatten(0, 1)
        computed = seen[step.layer, "attention"]
        size = (
            1.0 if model.norm_at(step.layer, "attention", "output") else float(_sublayer(model, step.layer).write_scale.factor)
        )
        torch.testing.assert_close(output, size * computed, rtol=1e-4, atol=1e-5)
        if scheme not in ("gated", "sub-ln"):
            torch.testing.assert_close((weights @ step.messages).sum(1), output, rtol=1e-4, atol=1e-5)
    for change in added:
        assert change.after is not None
        update = model.update(change.layer, change.sublayer)
        torch.testing.assert_close(change.after, update.state(change.before, change.output), rtol=1e-4, atol=1e-5)
        if scheme == "tangent":
            assert float(F.cosine_similarity(change.update, change.before, dim=-1).abs().max()) < 1e-5


def _sublayer(model: Model, layer: int) -> Any:
    return model.blocks[layer].get_submodule("attention")


@pytest.mark.parametrize("scheme", ["pre", "ngpt-lerp", "dyt"])
def test_heads_are_rotated_by_positions(scheme: str, tokenizer: Any) -> None:
    """Components i and i + 4 are a complex number that position p turns by p · 10000^(−i/4)."""
    model, steps = text_model(scheme, tokenizer), list[AttentionStep]()
    assert model.position_kind == "rotary"
    sample = model.sample("To kill two birds with one stone", None, 0)
    model.forward(sample, Observer(attention=steps.append))
    for step in steps:
        for again, observed in zip(model.project(step), (step.q, step.k, step.v), strict=True):
            torch.testing.assert_close(again, observed, rtol=1e-4, atol=1e-5)
    weights, x = model.projections(1), steps[1].input
    if scheme != "ngpt-lerp":  # whose heads are normalised
        q = x[:, None] @ weights.W_Q
        angles = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
        turned = torch.complex(q[..., :4], q[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
        torch.testing.assert_close(torch.cat((turned.real, turned.imag), -1), steps[1].q, rtol=1e-4, atol=1e-5)
    rotation = model.rotation(1, torch.tensor([3, 5]))
    assert rotation is not None
    torch.testing.assert_close(
        model.heads_of(1, x[:, [3, 5]], rotation, "k")[0], steps[1].k[:, :, [3, 5]], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("scheme", "tied"), [("pre", False), ("pre", True), ("ngpt-lerp", False)])
def test_logits_are_the_unembedding_of_the_last_states(scheme: str, tied: bool, tokenizer: Any) -> None:
    model = text_model(scheme, tokenizer, tied=tied)
    states: list[Tensor] = []
    logits = model.forward(
        model.sample("To kill two birds", None, 0),
        Observer(state=lambda layer, x: states.append(x.clone()) if layer == 2 else None),
    )
    norm, rows = model.final_norm, model.unembedding
    assert rows is not None
    last = states[-1] if norm is None else norm(states[-1])
    torch.testing.assert_close(last @ rows.T, logits, rtol=1e-4, atol=1e-5)
    assert tied == torch.equal(rows, model.embeddings)


def test_it_reads_texts_by_its_tokenizer(tokenizer: Any) -> None:
    model = text_model("pre", tokenizer)
    text = "The old man"
    ids = model.encode(text)
    assert ids == tokenizer(text)["input_ids"]
    assert "".join(model.words(torch.tensor(ids))) == text
    assert model.token_of(" the") == tokenizer(" the")["input_ids"][0]
    assert model.context == CONTEXT
    with pytest.raises(Exception, match="reads at most 48"):
        model.sample(sample_text(), None, 0)
    for probe in ("queries", "values"):
        result = Words(model=model, probe=probe, word=" the", nearest=2, distance=3 if probe == "queries" else None).run()
        assert len(result.tables["nearest"])


def test_probes_of_single_heads_refuse_a_gate_in_one_line(tokenizer: Any) -> None:
    with pytest.raises(Exception, match=r"layer 0 .* has no updates by head: a gate changes its mixed values before W_O"):
        Words(model=text_model("gated", tokenizer), probe="values", word=" the").run()


def test_a_trained_language_model_opens_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run folder of a short training, under a name as a user gives it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(2 * sample_text())
    small = {"vocabulary": 280, "context": 16, "layers": 2, "dim": 16, "heads": 2, "head": 8, "feedforward": 24, "batch": 4}
    brief = {"examples": 16, "epoch": 2, "test_examples": 4}
    options = [f"--set={key}={value}" for key, value in (small | brief).items()]
    command = ["train", "--task", "text", "--preset", "tiny", "--corpus", "text.txt", "--scheme", "sink+qk"]
    assert run(capsys, *command, *options, "--out", "trained")[0] == 0
    model = open_model("trained")
    assert (model.tokenizer.eos_token, model.context, model.position_kind) == (END, 16, "rotary")
    assert "".join(model.words(torch.tensor(model.encode("the stone")))) == "the stone"
    audited = Audit(model="trained", tokens=16, fresh=True).run()
    assert set(audited.tables["updates"]["layer"]) == {0, 1}
    assert "skipped" not in audited.tables
    sinks = model.model.decoder[1].attention.f.sink
    steps: list[AttentionStep] = []
    model.forward(model.sample("the stone was old", None, 0), Observer(attention=steps.append))
    assert steps[1].sink is not None
    assert torch.equal(steps[1].sink, sinks)
    assert bool((steps[1].weights().sum(-1) < 1).all())


@pytest.mark.parametrize(("scheme", "recognised"), [("pre", "pre"), ("peri", "peri"), ("qk", "qk"), ("layerscale", "pre")])
def test_the_audit_of_an_export_agrees_with_that_of_the_original(scheme: str, recognised: str, tokenizer: Any) -> None:
    """A family of transformers with the same function is observed by other means: hooks on its modules, from no declaration.

    Steps, gains and scales of logits are elsewhere in it, so measures of single matrices are left out.
    """
    from normscope.transformer.export import hugging_face_model

    model = text_model(scheme, tokenizer)
    for block in model.blocks:
        for norm in block.get_submodule("attention.f").norms.values():  # type: ignore[union-attr,operator]
            norm.gain.value.copy_(norm.gain.value[:1].clone())  # the family has one gain for all heads
    export = open_model(hugging_face_model(model.model, CONTEXT), tokenizer=tokenizer)
    assert export.scheme is not None
    assert export.scheme.name == recognised
    original, exported = (Audit(model=each, tokens=32, fresh=True).run().tables for each in (model, export))
    for name, columns in {
        "reading": ["loss"],
        "motion": None,
        "updates": ["layer", "size", "median", "along"],
        "first_token": None,
        "sparsity": ["layer", "mean_entropy"],
        "removal": None,
        "journey": ["angle", "travelled"],
    }.items():
        one, other = (tables[name].select_dtypes("number") for tables in (original, exported))
        shown = list(one.columns) if columns is None else [column for column in columns if column in one]
        assert shown, name
        torch.testing.assert_close(
            torch.tensor(one[shown].to_numpy(float)), torch.tensor(other[shown].to_numpy(float)), rtol=1e-3, atol=1e-4,
            equal_nan=True, msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
