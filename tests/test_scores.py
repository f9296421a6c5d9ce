"""Attention with a softcap, a sink or a temperature of length, against code that others wrote and formulas written out."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from normscope import InputError
from normscope.core import Scores, attend, attend_scored, attention, scored_weights
from normscope.models import AttentionStep, Observer, Sample, open_model
from normscope.schemes import Scheme, Slots
from normscope.transformer import Transformer, TransformerConfig

HEADS, TOKENS, WIDTH = 3, 7, 4


def heads(tokens: int = TOKENS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [3 * torch.randn(2, HEADS, tokens, WIDTH, dtype=torch.float64, generator=generator) for _ in "qkv"]


def causal_mask() -> Tensor:
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(later, -math.inf)[None, None]


@pytest.mark.parametrize("causal", [False, True])
def test_plain_scores_are_the_softmax(causal: bool) -> None:
    q, k, v = heads()
    assert Slots().score_rule.plain
    assert torch.allclose(attend_scored(q, k, v, 0.3, Scores(), causal), attend(q, k, v, 0.3, causal), atol=1e-14)


def test_a_softcap_is_that_of_gemma_2() -> None:
    q, k, v = heads()
    module = SimpleNamespace(head_dim=WIDTH, num_key_value_groups=1, training=False)
    expected, _ = modeling_gemma2.eager_attention_forward(module, q, k, v, causal_mask(), scaling=0.4, softcap=2.0)
    found = attend_scored(q, k, v, 0.4, Slots(scores="softcap(2)").score_rule, causal=True)
    assert torch.allclose(found.transpose(1, 2).float(), expected.float(), atol=1e-6)  # it takes the softmax in float32


def test_a_sink_is_that_of_gpt_oss() -> None:
    q, k, v = heads()
    sinks = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64)
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=1, training=False)
    expected, weights = modeling_gpt_oss.eager_attention_forward(module, q, k, v, causal_mask(), scaling=0.4)
    rule = Slots(scores="sink").score_rule
    found = attend_scored(q, k, v, 0.4, rule, True, sinks)
    assert torch.allclose(found.transpose(1, 2), expected, atol=1e-14)
    assert torch.allclose(scored_weights(q, k, 0.4, rule, True, sinks), weights, atol=1e-14)
    mass = 1 - weights.sum(-1, keepdim=True)  # what a sink leaves of the plain softmax
    assert torch.allclose(found, (1 - mass) * attend(q, k, v, 0.4, True), atol=1e-14)


def test_a_temperature_multiplies_the_logits_of_a_query_by_a_formula_of_the_keys_that_it_sees() -> None:
    """Scalable softmax: n^{s z} in place of e^{z}."""
    q, k, v = heads()
    rule = Slots(scores="temperature(0.43*log(n))").score_rule
    seen = torch.arange(1, TOKENS + 1, dtype=torch.float64)[:, None]
    powers = (seen ** (0.43 * 0.4 * (q @ k.mT))).tril()
    assert torch.allclose(attend_scored(q, k, v, 0.4, rule, causal=True), powers / powers.sum(-1, keepdim=True) @ v, atol=1e-13)
    every = TOKENS ** (0.43 * 0.4 * (q @ k.mT))
    assert torch.allclose(attend_scored(q, k, v, 0.4, rule), every / every.sum(-1, keepdim=True) @ v, atol=1e-13)


def test_a_query_of_one_key_attends_to_it_at_temperature_0() -> None:
    """log(1) = 0, and 0 times the −∞ of a masked score is no number."""
    torch.manual_seed(0)
    scheme = Scheme("tempered", Slots(input="norm", scores="temperature(log(n))"))
    sizes: dict[str, Any] = {"dim": 16, "heads": 2, "head": 8, "feedforward": 16, "readout": (16,), "frequencies": 4}
    model = Transformer(TransformerConfig(scheme, layers=2, **sizes)).eval()
    tokens, seen = torch.randint(5, (2, TOKENS)), list[tuple[Tensor, Tensor, float]]()
    observed = open_model(model)

    def look(step: AttentionStep) -> None:
        seen.append((step.q @ step.k.mT, step.weights(), float(step.softmax.scale[0, 0, 1, 0]) / math.log(2)))  # type: ignore[index]

    observed.forward(Sample.of(tokens), Observer(attention=look))
    assert len(seen) == 2
    for scores, weights, scale in seen:
        logits = scale * torch.arange(1, TOKENS + 1).log()[:, None] * scores
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        assert torch.allclose(weights, logits.masked_fill(later, -math.inf).softmax(-1), atol=1e-6)


def test_blocks_of_queries_change_nothing_and_gradients_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Slots(scores="temperature(log(n) + 1) + softcap(5) + sink(0.2)").score_rule
    sinks = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64)

    def gradients() -> list[Tensor]:
        inputs = [x.requires_grad_() for x in (*heads(), sinks.clone())]
        q, k, v, b = inputs
        out = attend_scored(q, k, v, 0.4, rule, True, b)
        return [out, *torch.autograd.grad(out.sin().sum(), inputs)]

    whole = gradients()
    monkeypatch.setitem(attention.BLOCK_ENTRIES, "cpu", 2 * HEADS * TOKENS * 2)  # two queries at a time
    for first, second in zip(whole, gradients(), strict=True):
        assert torch.allclose(first, second, atol=1e-13)
    assert all(float(gradient.abs().max()) > 1e-6 for gradient in whole[1:])
    inputs = [x[:1, :1, :3] for x in heads()]
    assert torch.autograd.gradcheck(
        lambda q, k, v: attend_scored(q, k, v, 0.4, rule, True, sinks[:1]), [x.clone().requires_grad_() for x in inputs]
    )


@pytest.mark.parametrize(
    ("given", "stored", "shown"),
    [
        ("softmax", "softmax", "softmax"),
        ("sink(0)", "sink", "sink"),
        ("sink + softcap(50.0)", "softcap(50)+sink", "softcap(50) + sink"),
        ("sink(-2)+temperature(1 + log(n)/10)", "temperature(1 + log(n) / 10)+sink(-2)", "temperature(1+log(n)/10) + sink(−2)"),
    ],
)
def test_the_slot_is_stored_in_the_order_in_which_its_parts_act(given: str, stored: str, shown: str) -> None:
    slots = Slots(scores=given)
    assert (slots.scores, slots.texts["scores"]) == (stored, shown)
    assert Slots(scores=stored) == slots
    assert Slots(scores=stored).score_rule == slots.score_rule


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("sinks", "slot 'scores' is 'softmax', or some of"),
        ("softcap", "slot 'scores' is 'softmax', or some of"),
        ("sink+sink(1)", "each once, joined by .+, not 'sink\\+sink\\(1\\)'"),
        ("softmax+sink", "slot 'scores' is"),
        ("softcap(0)", "the number of softcap must be positive"),
        ("softcap(n)", "softcap takes a number, not 'n'"),
        ("temperature(1/log(n))", "the number of temperature must be positive"),
        ("temperature(500 - n)", "must be positive for n = 512, not '500−n'"),
        ("sink(1/0)", "the number of sink must be a finite number"),
        ("temperature(layer)", "temperature takes a formula of n"),
        ("temperature(log(m))", "unknown name 'm'"),
        ("softcap(50", "slot 'scores' is"),
        (3, "slot 'scores' is"),
    ],
)
def test_other_scores_are_refused(given: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        Slots(scores=given)
