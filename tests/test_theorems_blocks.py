"""Claims on trained blocks, by hand: signs that a norm keeps, the sizes of published models before and after calibration."""

import math

import pytest
import torch
import torch.nn.functional as F

from normscope.theorems import LEDGER, Case, blocks
from normscope.theorems.blocks import _first_weights, _model, _row, _Seen

PRESETS = {"baseline": (512, 12), "large": (1024, 16)}  # widths of the stream and numbers of heads; 64 dimensions a head


def spreads(dim: int, heads: int, strategy: str, head: int = 64) -> list[float]:
    """Standard deviations of scores and of Σ_h m_t of first weights, without factors."""
    case = Case({"dim": dim, "heads": heads, "head": head, "strategy": strategy}, ((3, 1.0),))
    return torch.as_tensor(_first_weights(case).measured)[:2].tolist()


@pytest.mark.parametrize(("preset", "printed"), [("baseline", 2.53), ("large", 5.06)])
def test_first_ranges_do_not_give_scores_their_size(preset: str, printed: float) -> None:
    dim, heads = PRESETS[preset]
    scores, messages = spreads(dim, heads, "pre")
    assert scores == pytest.approx(printed, rel=0.05)
    assert messages == pytest.approx(math.sqrt(dim / 64), rel=0.05)
    assert spreads(dim, heads, "qkv") == pytest.approx([8, 1], rel=0.05)


def test_where_widths_are_equal_a_tenth_is_the_variance() -> None:
    scores, _ = spreads(64, 12, "pre")
    assert scores**2 == pytest.approx(0.1, rel=0.1)
    assert scores == pytest.approx(0.316, rel=0.05)


@pytest.mark.parametrize("strategy", ["pre", "qkv"])
@pytest.mark.parametrize("preset", PRESETS)
def test_published_widths_start_with_the_stated_sizes(preset: str, strategy: str) -> None:
    dim, heads = PRESETS[preset]
    values = {"dim": dim, "heads": heads, "head": 64, "layers": 2, "tokens": 12, "strategy": strategy}
    assert LEDGER["1:calibration"].conclusion(Case(values, ((1, 1.0),))).margin > 0.9


def test_sizes_are_those_of_the_first_batch_alone() -> None:
    """On another batch the factors give other standard deviations: near the stated ones, and not equal to them."""
    case = Case({"dim": 32, "heads": 2, "head": 8, "layers": 2, "tokens": 8}, ((1, 1.0),))
    model = _model(case, "pre")
    with blocks.calibrating(model):
        model(_row(case, _Seen(), rows=4))
    other = Case(case.values, ((2, 1.0),))
    mask = _Seen()
    model(_row(other, mask, rows=4))
    for spread, _ in mask.spreads:
        assert 0.05 < spread < 0.2
        assert abs(spread - 0.1) > 1e-4


def test_a_norm_keeps_a_sign_and_no_factor() -> None:
    q, k = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positive, negative = (F.rms_norm(factor * q, (8,)) @ F.rms_norm(k, (8,)).T for factor in (0.2, -0.2))
    assert torch.allclose(positive, F.rms_norm(q, (8,)) @ F.rms_norm(k, (8,)).T, rtol=1e-6)
    assert torch.allclose(positive, -negative)
    assert torch.equal(positive.argmax(-1), negative.argmin(-1))


def test_factors_reach_queries_keys_and_values_before_their_norms() -> None:
    """Logits with factors on everything that Pre-Norm reads are those of a model with the factors in its weights."""
    case = Case({"dim": 16, "heads": 2, "head": 4, "layers": 1, "tokens": 5}, ((1, 1.0),))
    model, factors = _model(case, "pre"), torch.ones(2, 5, 3, 2, dtype=torch.float64)
    factors[:, :, 0], factors[:, :, 2] = 3.0, 0.5
    noisy = model(_row(case, _Seen(factors=iter([factors]))))
    for name, weights in model.named_parameters():
        if name.endswith("W_QKV"):
            weights[:, 0] *= 3.0
            weights[:, 2] *= 0.5
    assert torch.allclose(noisy, model(_row(case, _Seen())))
