"""Models whose weights are NaN, infinite, zero, huge or tiny: what is degenerate is named, and the rest is measured."""

import json
import math
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from helpers.cli import run
from helpers.gpt2 import SENTENCE, save_gpt2
from helpers.models import FAMILIES, built, random_normscope_model
from normscope.errors import InputError
from normscope.experiments.result import Result
from normscope.measures.base import Subject, joined, measure_all
from normscope.measures.degenerate import Degenerate
from normscope.measures.growth import Growth
from normscope.measures.rank import Rank
from normscope.measures.rotation import Rotation
from normscope.models import Model, Sample, open_model
from normscope.models.check import weight_faults
from normscope.transformer import load_model, save_model

NAMES = ("gpt2", "llama", "qwen3", "gemma2", "olmo2", "bert")
NUMBER = re.compile(r"(?<!\w)[-−+]?(nan|inf)(?!\w)", re.IGNORECASE)
LAYER_1 = re.compile(r"\.1\.")


def matrices(model: nn.Module, *parts: str) -> list[Tensor]:
    """The matrices of layer 1 whose names have one of these parts; all of them without any."""
    named = [(name, p) for name, p in model.named_parameters() if LAYER_1.search(name) and p.ndim > 1]
    return [p for name, p in named if not parts or any(part in name for part in parts)]


def scaled(factor: float) -> Callable[[nn.Module], None]:
    return lambda model: [p.mul_(factor) for p in model.parameters()] and None


DAMAGE: dict[str, Callable[[nn.Module], Any]] = {
    "one matrix 0": lambda model: matrices(model)[0].zero_(),
    "a layer 0": lambda model: [p.zero_() for p in matrices(model)],
    "one matrix huge": lambda model: matrices(model)[0].mul_(1e30),
    "all 0": scaled(0.0),
    "all huge": scaled(1e20),
    "all tiny": scaled(1e-30),
    "gains 0": lambda model: [p.zero_() for p in model.parameters() if p.ndim == 1],
}


def damaged(name: str, damage: str) -> Any:
    family = FAMILIES[name]
    model = built(family.config, family.options, family.maker)
    with torch.no_grad():
        DAMAGE[damage](model)
    return model


@cache
def schemes(name: str) -> tuple[Any, ...]:
    family = FAMILIES[name]
    return open_model(built(family.config, family.options, family.maker)).schemes


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_the_scheme_does_not_depend_on_the_weights(name: str, damage: str) -> None:
    model = damaged(name, damage)
    before = [p.clone() for p in model.parameters()]
    assert open_model(model).schemes == schemes(name)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["gpt2", "own"])
def test_non_finite_weights_are_refused_with_tensor_layer_and_count(name: str, value: float) -> None:
    model = random_normscope_model("pre").model if name == "own" else built(FAMILIES[name].config, FAMILIES[name].options)
    tensor, weight = next((n, p) for n, p in model.named_parameters() if LAYER_1.search(n) and p.ndim > 1)
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.view(-1)[[3, 5]] = value
    try:
        kind = "NaN" if math.isnan(value) else "infinite"
        found = re.escape(f"{tensor} (layer 1: 2 {kind} of {weight.numel():,} values); all weights of layer 0 are finite")
        with pytest.raises(InputError, match=found):
            open_model(model)
    finally:
        weight.data = kept


def test_matrices_of_zeros_are_named_and_biases_and_masks_are_not() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ModuleList([nn.Linear(2, 2)]))
    model.register_buffer("mask", torch.full((2, 2), -torch.inf))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    faults = list(weight_faults(model))
    assert [(fault.tensor, fault.layer, fault.size, fault.finite) for fault in faults] == [
        ("0.weight", None, 6, True),
        ("1.0.weight", 0, 4, True),
    ]


def test_weights_that_are_not_in_memory_are_refused() -> None:
    family = FAMILIES["llama"]
    with torch.device("meta"), pytest.raises(InputError, match="not in memory"):
        open_model(built(family.config, family.options))


def shown(result: Result) -> str:
    """Everything that a reader sees of a result, whose records must be valid JSON."""
    from normscope.cli.output import _plain

    json.dumps([_plain(record) for record in result.records], allow_nan=False)
    return result.to_markdown() + "".join(map(str, result.kind.terminal(result)))


COMMANDS: dict[str, Callable[[Model, Path], Result]] = {
    "audit": lambda model, text: ns.audit(model, text=text, sentence=SENTENCE, fresh=True, progress=False),
    "stability": lambda model, text: ns.stability(model, text=text, levels="0.1", noise_levels="0.1", progress=False),
    "subspaces": lambda model, text: ns.subspaces(model, text=text, progress=False),
    "singular": lambda model, text: ns.words(model, "singular", layer="all", matrix="qk", progress=False),
    "values": lambda model, text: ns.words(model, "values", layer="all", progress=False),
    "queries": lambda model, text: ns.words(model, "queries", layer="all", nearest=2, progress=False),
    "journey": lambda model, text: ns.words(model, "journey", SENTENCE, progress=False),
    "embeddings": lambda model, text: ns.words(model, "embeddings", progress=False),
    "geometry": lambda model, text: ns.words(model, "geometry", layer=1, progress=False),
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A folder with a small GPT-2, and a text that it reads."""
    folder = tmp_path_factory.mktemp("gpt2")
    text = folder / "text.txt"
    text.write_text(" ".join([SENTENCE] * 3))
    return save_gpt2(folder / "model"), text


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_command_reports_degenerate_layers_or_refuses_in_a_line(damage: str, gpt2: tuple[str, Path]) -> None:
    folder, text = gpt2
    whole = open_model(folder)
    with torch.no_grad():
        DAMAGE[damage](whole.model)
    model = open_model(whole.model, tokenizer=whole.tokenizer)
    for command, measure in COMMANDS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                read, refused = shown(measure(model, text)), ""
            except InputError as error:
                read, refused = "", str(error)
        assert not NUMBER.search(read.replace("(NaN/Inf)", "")), command
        assert "\n" not in refused
        assert read or re.search("is 0|are 0|zeros|overflow|underflow|non-finite", refused), (command, refused)


def test_numbers_of_a_part_of_the_layers_are_not_compared(gpt2: tuple[str, Path]) -> None:
    folder, text = gpt2
    whole, broken = open_model(folder), open_model(folder)
    with torch.no_grad():
        DAMAGE["one matrix huge"](broken.model)
    found = ns.compare(whole, broken, text=text, fresh=True, progress=False)
    assert any("layer 1: attention logits overflow" in finding.text for finding in found.findings)
    assert any("its numbers are of a part of its layers" in finding.text for finding in found.findings)
    subjects = found.tables["numbers"].groupby("quantity")["subject"].nunique()
    assert set(subjects.drop("tokens")) == {1}
    curves = found.tables["curves"].query("quantity == 'radius'").groupby("subject")["x"].agg(list)
    assert sorted(curves, key=len) == [[0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize("radius", [1e-300, 1e-30, 1e30, 1e300])
def test_advice_reports_what_is_not_defined(radius: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes = {"depth": 2, "width": 8, "heads": 1, "runs": 2, "tokens": 4}
        if not 1e-35 < radius < 1e35:
            with pytest.raises(InputError, match="the simulation runs in float32"):
                ns.advise(schemes="none,pre,post", radius=radius, progress=False, **sizes)
            return
        found = ns.advise(schemes="none,pre,post", radius=radius, progress=False, **sizes)
    assert not NUMBER.search(re.sub(r"\(inf/NaN\)", "", shown(found)))
    criteria, theory = found.tables["criteria"], found.tables["theory"]
    for undefined in (criteria[criteria["mean"].isna()], theory[theory["early"].isna()]):
        for scheme in undefined["scheme"]:
            assert any(f.severity == "warning" and "not defined" in f.text and scheme in f.text for f in found.findings)
    assert criteria["mean"].isna().any() or theory["early"].isna().any()


def tables_of(model: Any, *measures: Any) -> dict[str, pd.DataFrame]:
    view = open_model(model)
    sample = Sample.of(torch.arange(1, 17).view(2, 8))
    return joined(measure_all(Subject(view, sample), [Degenerate(), *measures]).values())


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_layers_before_a_degenerate_one_are_measured_as_without_it(name: str) -> None:
    family = FAMILIES[name]
    model = built(family.config, family.options, family.maker)
    clean = tables_of(model, Growth(), Rotation())["motion"]
    with torch.no_grad():
        for matrix in matrices(model, "v_proj", "value", "o_proj", "attention.output"):
            matrix.mul_(1e30)
    tables = tables_of(model, Growth(), Rotation())
    faults = tables["degenerate"]
    assert set(faults["layer"][~faults["measured"]]) >= {1}
    assert any("non-finite (NaN/Inf)" in reason for reason in faults["reason"])
    pd.testing.assert_frame_equal(tables["motion"].head(1), clean.head(1))
    assert tables["motion"]["layer"].max() == 1
    assert tables["motion"]["angle"].notna().sum() == 1


def test_a_layer_that_does_nothing_is_reported_and_rotates_by_zero() -> None:
    tables = tables_of(damaged("llama", "a layer 0"), Rotation(), Rank())
    faults = tables["degenerate"]
    named = set(zip(faults["layer"], faults["where"], faults["reason"], strict=True))
    assert {(1, "attention", "the update is 0"), (1, "feedforward", "the update is 0")} <= named
    assert {(1, "attention", f"{letter} is 0 in all heads") for letter in "qkv"} <= named
    assert (1, "weights", "all values of model.layers.1.mlp.down_proj.weight are 0") in named
    assert tables["motion"].set_index("layer")["angle"][1] == 0
    assert set(tables["rank"].groupby("layer")["rank"].max()) == {8, 0}


def test_a_token_without_an_embedding_is_left_out() -> None:
    model = built("LlamaConfig", FAMILIES["llama"].options)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = 0
    tables = tables_of(model, Growth())
    assert tables["degenerate"]["reason"].tolist() == ["1 token of the sample with an embedding of zeros"]
    states = model.get_input_embeddings().weight[[2, 3, 4, 6, 7, 8, *range(10, 17)]]
    assert tables["motion"]["radius"][0] == pytest.approx(float(states.norm(dim=-1).mean()), rel=1e-6)


@pytest.mark.parametrize(
    ("factor", "words"), [(math.nan, "non-finite weights: embed.types"), (1e20, "logits became non-finite")]
)
def test_evaluate_gives_no_accuracy_without_predictions(
    factor: float, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = load_model("builtin:addition-small-pre")
    with torch.no_grad():
        for parameter in saved.model.parameters():
            parameter.mul_(factor)
    save_model(tmp_path, saved.model, saved.about)
    status, out, err = run(capsys, "evaluate", str(tmp_path), "--examples", "16", "--out", str(tmp_path / "run"))
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
