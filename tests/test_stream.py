"""Measures of the residual stream alone, against plain hooks on the blocks of models."""

from itertools import pairwise
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.models import FAMILIES, built
from normscope.measures.base import Subject, measure_all
from normscope.measures.massive import Massive
from normscope.measures.removal import Removal, beginning
from normscope.measures.updates import Updates
from normscope.models import Sample, open_model

TOKENS = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(0))
TARGETS = torch.cat((TOKENS[:, 1:], torch.full((2, 1), -100)), 1)
BLOCKS = {"llama": "model.layers", "gpt-neox": "gpt_neox.layers", "gemma2": "model.layers"}  # neox: parallel sublayers


def family(name: str) -> Any:
    return built(FAMILIES[name].config, FAMILIES[name].options, FAMILIES[name].maker)


def blocks_of(model: nn.Module, name: str) -> nn.ModuleList:
    blocks = model.get_submodule(BLOCKS[name])
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def hooked(model: nn.Module, blocks: nn.ModuleList) -> tuple[list[Tensor], Tensor]:
    """The states before every block and after the last, and the logits, by hooks alone."""
    states: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            states[layer], states[layer + 1] = args[0], output[0] if isinstance(output, tuple) else output

        return hook

    handles = [block.register_forward_hook(keep(layer)) for layer, block in enumerate(blocks)]
    with torch.no_grad():
        logits = model(TOKENS).logits
    for handle in handles:
        handle.remove()
    return [states[layer] for layer in sorted(states)], logits


def tables(model: nn.Module, *measures: Any) -> dict[str, pd.DataFrame]:
    subject = Subject(open_model(model), Sample(TOKENS, TARGETS, torch.ones_like(TOKENS).bool()))
    return {name: table for found in measure_all(subject, measures).values() for name, table in found.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_updates_are_those_of_the_states_that_hooks_see(name: str) -> None:
    model = family(name)
    states, _ = hooked(model, blocks_of(model, name))
    centred = FAMILIES[name].norm == "layer"
    x = [(state - state.mean(-1, keepdim=True) if centred else state)[:, 1:].flatten(0, 1) for state in states]
    found = tables(model, Updates())["updates"]
    rows = found[found["sublayer"] == "block"].reset_index()
    for layer, (before, after) in enumerate(pairwise(x)):
        update = after - before
        assert rows["size"][layer] == pytest.approx(float((update.norm(dim=-1) / before.norm(dim=-1)).mean()), rel=1e-4)
        assert rows["along"][layer] == pytest.approx(float(F.cosine_similarity(update, before).mean()), abs=1e-4)
    assert set(found["sublayer"]) == {"block", "attention", "feedforward"}


def test_sublayers_of_a_parallel_block_add_up_to_its_update() -> None:
    """Triangle inequality, with equality where both add to the same states."""
    found = tables(family("gpt-neox"), Updates())["updates"].pivot(index="layer", columns="sublayer", values="size")
    assert (found["block"] <= found["attention"] + found["feedforward"] + 1e-6).all()


def test_a_planted_massive_activation_is_named_with_channel_token_and_layers() -> None:
    model = family("llama")
    blocks = blocks_of(model, "llama")
    with torch.no_grad():
        blocks[0].mlp.down_proj.weight[5] = 1e3  # type: ignore[union-attr,index]
    states, _ = hooked(model, blocks)
    found = tables(model, Massive(multiple=100))
    activations, massive = found["activations"], found["massive"]
    for layer, x in enumerate(states):
        row = activations.iloc[layer]
        assert row["median"] == pytest.approx(float(x.abs().median()))
        assert abs(row["value"]) == pytest.approx(float(x.abs().max()))
        assert row["massive"] == int((x.abs() >= 100 * x.abs().median()).sum())
    assert set(massive["channel"]) == {5}
    assert set(massive["layer"]) == {1, 2}
    top = massive.iloc[0]
    assert states[1][top["row"], top["position"], 5] == pytest.approx(top["value"])
    assert top["text"] == str(int(TOKENS[top["row"], top["position"]]))
    finding = next(Massive(multiple=100).findings(found, {"layers": 2}))
    assert finding.severity == "notice"
    assert "channel 5" in finding.text
    assert "before layers 1–2" in finding.text


def test_models_without_massive_activations_have_none() -> None:
    found = tables(family("llama"), Massive())
    assert "massive" not in found
    assert next(Massive().findings(found, {"layers": 2})).severity == "ok"


@pytest.mark.parametrize("name", BLOCKS)
def test_loss_without_a_block_is_that_of_a_model_whose_block_returns_its_input(name: str) -> None:
    model = family(name)
    found = tables(model, Removal())["removal"]
    blocks = blocks_of(model, name)

    def loss() -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(TOKENS).logits.flatten(0, 1), TARGETS.flatten()))

    assert found["loss"][0] == pytest.approx(loss(), rel=1e-5)
    for layer, block in enumerate(blocks):
        given: list[Tensor] = []
        handles = [
            block.register_forward_pre_hook(lambda module, args, given=given: given.append(args[0])),
            block.register_forward_hook(
                lambda module, args, output, given=given: (given[-1], *output[1:]) if isinstance(output, tuple) else given[-1]
            ),
        ]
        expected = loss()
        for handle in handles:
            handle.remove()
        row = found[found["layer"] == layer].iloc[0]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)
        assert row["loss_change"] == pytest.approx(expected - found["loss"][0], abs=1e-5)


def test_removal_reads_the_beginning_of_a_sample() -> None:
    sample = Sample(TOKENS, TARGETS, torch.ones_like(TOKENS).bool())
    assert beginning(sample, 64).tokens.shape == (2, 12)
    assert beginning(sample, 11).tokens.shape == (1, 11)
    assert torch.equal(beginning(sample, 5).targets, TARGETS[:1, :5])
    assert beginning(sample, 12).tokens.shape == (2, 12)


def test_a_block_that_does_nothing_costs_nothing_to_remove() -> None:
    model = family("llama")
    with torch.no_grad():
        block = blocks_of(model, "llama")[1]
        block.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr,operator]
        block.mlp.down_proj.weight.zero_()  # type: ignore[union-attr,operator]
    found = tables(model, Removal())
    rows = found["removal"].set_index("layer")
    assert rows["loss_change"][1] == 0
    assert rows["loss_change"][0] != 0
    finding = next(Removal().findings(found, {"vocabulary": 500}))
    assert finding.title == "Blocks that can be skipped"
    assert "layer 1 (+0)" in finding.text
    untrained = next(Removal().findings(found, {"vocabulary": 50}))
    assert "uniform guess" in untrained.text
