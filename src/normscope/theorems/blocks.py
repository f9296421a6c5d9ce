"""Paper 1, trained blocks: norms of heads that noise does not pass, and the sizes with which training starts."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normscope.core import CausalMask, HeadNorm
from normscope.core.norms import length, rms_norm
from normscope.schemes import NAMED
from normscope.theorems.cases import Case, Range, Space, choice, whole
from normscope.theorems.comparison import Comparison
from normscope.theorems.statement import Statement
from normscope.transformer import Row, Transformer, TransformerConfig, calibrating
from normscope.transformer.layers import Attention
from normscope.transformer.model import Sublayer, call

_STRATEGIES = ("pre", "qkv")
_LETTERS = ("q", "k", "v")
_VOCABULARY = 17
_SHARPER = 7  # a power for ranges: the largest entry is within 3 % of its range, where a spread is within a factor of 1.25
_NOTICED = 1e-6  # of all logits together: a change that is more than rounding
_SPREADS = {"type embedding": 0.5, "initial embedding": 1.0, "input": 1.0, "scores": 0.1, "update": 0.05}  # as printed
_HEADS: Space = {"dim": whole(8, 48), "heads": whole(1, 4), "head": whole(4, 16), "layers": whole(1, 3)}


@dataclass(frozen=True)
class _Seen(CausalMask):
    """Causal attention that puts factors on q, k and v before their norms, and keeps the scores that it attends with.

    Attributes:
        factors: for each layer in turn those on (rows, tokens, q k v, heads); none are put on where there are no more.
        spreads: standard deviations of scores, scale included, with and without it, of each call.
    """

    factors: Iterator[Tensor] = field(default_factory=lambda: iter(()))
    spreads: list[tuple[float, float]] = field(default_factory=list)

    def stacked(self, qkv: Tensor, scale: Tensor, norm: HeadNorm | None = None) -> Tensor:
        """The mixed values of q, k and v with factors."""
        factors = next(self.factors, None)
        qkv = qkv if factors is None else qkv * factors[..., None]
        self._measure(qkv if norm is None else norm(qkv), scale)
        return super().stacked(qkv, scale, norm)

    def _measure(self, qkv: Float[Tensor, "rows tokens 3 heads head"], scale: Tensor) -> None:
        q, k, _ = qkv.unbind(2)
        scores = torch.einsum("rthd,rshd->rhts", q, k)
        kept = scores[torch.ones_like(scores, dtype=torch.bool).tril()]
        self.spreads.append((float((kept * scale).std()), float(kept.std())))


def _model(case: Case, strategy: str) -> Transformer:
    """A new model in float64, with weights that its own rules draw from a seed of the case."""
    sizes = {name: case[name] for name in ("dim", "heads", "head")} | {"layers": case.values.get("layers", 1)}
    config = TransformerConfig(
        NAMED[strategy], vocabulary=_VOCABULARY, feedforward=case["dim"], readout=(), frequencies=2, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(2**31 * float(case.uniform("weights", 1))))
        return Transformer(config).double().eval().requires_grad_(False)


def _row(case: Case, mask: CausalMask, rows: int = 2) -> Row:
    characters = (_VOCABULARY * case.uniform("characters", rows, case["tokens"]).clamp(max=0.999)).long()
    return Row(characters, torch.arange(case["tokens"]).expand_as(characters), mask)


def _shaken(case: Case, model: Transformer) -> Transformer:
    """The model with weights, gains and biases of the case in place of those of a start."""
    for name, value in model.named_parameters():
        drawn = case.normal(name, *value.shape)
        value.copy_((0.3 * drawn).exp() if name.endswith(".value") else drawn / math.sqrt(case["dim"]))
    return model


def _noise(case: Case, negative: bool) -> Iterator[Tensor]:
    """1 + κ > 0 for every norm of the case's letters in each layer; or −(1 + κ) for every other token."""
    shape = (2, case["tokens"], 3, case["heads"])
    chosen = torch.tensor([letter in case["noisy"] for letter in _LETTERS])[:, None]
    sign = torch.ones(shape, dtype=torch.float64)
    sign[:, 1::2] = -1.0 if negative else 1.0
    for layer in range(case["layers"]):
        kappa = math.sqrt(3) * case["noise"] * (2 * case.uniform(f"kappa {layer}", *shape) - 1)
        yield torch.where(chosen, (1 + kappa) * sign, 1.0)


def _stable(case: Case) -> Comparison:
    """Logits of a model with QKV-Norm under noise beside those without; 1 where others change: other signs, Pre-Norm."""
    pre, qkv = (_shaken(case, _model(case, strategy)) for strategy in _STRATEGIES)

    def logits(model: Transformer, factors: Iterator[Tensor]) -> Tensor:
        found: Tensor = model(_row(case, _Seen(factors=factors)))
        return found / length(found.flatten())

    clean, noisy = logits(qkv, iter(())), logits(qkv, _noise(case, negative=False))
    changes = (
        logits(qkv, _noise(case, negative=True)) - clean,
        logits(pre, _noise(case, negative=False)) - logits(pre, iter(())),
    )
    changed = torch.stack([(change.abs().max() > _NOTICED).double() for change in changes])
    measured, claimed = torch.cat([noisy.flatten(), changed]), torch.cat([clean.flatten(), torch.ones_like(changed)])
    return Comparison(measured, claimed, tolerance=_NOTICED, scale=1.0)


def _started(case: Case) -> Comparison:
    """Standard deviations on the first batch, of a new model that was calibrated on it, beside the printed ones."""
    model = _model(case, case["strategy"])
    first = _row(case, CausalMask(), rows=4)
    with calibrating(model):
        model(first)
    found: dict[str, list[float]] = {name: [] for name in _SPREADS}
    _spread_of(model.embed.type_scale, lambda _, types: types, found["type embedding"])
    _spread_of(model.embed.scale, lambda _, embedding: embedding, found["initial embedding"])
    for sublayer in (module for module in model.modules() if isinstance(module, Sublayer)):
        _spread_of(sublayer, lambda before, after: after - before, found["update"])
        if isinstance(sublayer.f, Attention):
            _spread_of(sublayer.f, lambda read, _: read, found["input"])
    mask = _Seen()
    model(Row(first.characters, first.positions, mask))
    found["scores"] += [spread for spread, _ in mask.spreads]
    measured = [value for values in found.values() for value in values]
    claimed = [_SPREADS[name] for name, values in found.items() for _ in values]
    return Comparison(torch.tensor(measured), torch.tensor(claimed), tolerance=1e-5)


def _spread_of(module: nn.Module, value: Callable[[Tensor, Tensor], Tensor], found: list[float]) -> None:
    """Append to ``found`` the standard deviation of what ``value`` makes of the module's first input and its output."""
    module.register_forward_hook(lambda module, inputs, output: found.append(float(value(inputs[0], output).std())))


def _first_weights(case: Case) -> Comparison:
    """The largest entries of new attention weights beside the printed ranges; scores and Σ_h m_t without factors.

    Tokens have RMS 1. With σ⁴ = 0.1/N_qkv³ the variance of a score is N_qkv (N_emb σ²)² = 0.1 (N_emb/N_qkv)²; after a norm of q
    and k it is N_qkv, whatever σ. Σ_h m_t has the variance N_emb/N_qkv of a value, 1 after its norm.
    """
    heads, head, ratio = case["heads"], case["head"], case["dim"] / case["head"]
    model = _model(case, case["strategy"])
    (attention,) = (module for module in model.modules() if isinstance(module, Attention))
    x, mask = rms_norm(case.normal("x", 64, case["dim"])), _Seen()
    call(attention, x.view(2, 32, -1), mask)
    ((_, scores),) = mask.spreads
    messages = float(call(attention, x.view(64, 1, -1), CausalMask()).std())
    largest = [float(W.abs().max()) for W in (*attention.W_QKV.unbind(1), attention.W_O)]
    of_scores = math.sqrt(3) * (0.1 / head**3) ** 0.25
    ranges = [of_scores, of_scores, math.sqrt(3 / head), math.sqrt(3 / (heads * head))]
    largest = [wanted * (value / wanted) ** _SHARPER for value, wanted in zip(largest, ranges, strict=True)]
    if case["strategy"] == "pre":
        claimed, base = [math.sqrt(0.1) * ratio, math.sqrt(ratio), *ranges], ratio
    else:
        claimed, base = [math.sqrt(head), 1.0, *ranges], head
    return Comparison(
        torch.tensor([scores, messages, *largest]), torch.tensor(claimed), "≈", tolerance=1.25, base=torch.tensor(float(base))
    )


STATEMENTS = (
    Statement(
        id="1:stable",
        title="QKV-Norm is stable by construction",
        claim="Noise on the norms of q, k and v does not change a model with QKV-Norm: it is stable by construction.",
        tested="Logits of a trainable model with random weights and gains, with factors 1 + κ > 0 on all q, k or v of all "
        "layers before their norms, beside those without; and that logits do change with Pre-Norm, or with factors of either "
        "sign.",
        space=_HEADS | {"tokens": whole(3, 12), "noise": Range(0.01, 0.57, log=True), "noisy": choice(*_LETTERS, "qkv")},
        conclusion=_stable,
        by="noisy",
        cases=48,
        remark="κ is uniform with mean 0 and an RMS up to 0.57, so that 1 + κ > 0. A negative factor is no noise on a norm: it "
        "reverses the vector, and a norm keeps that. Noise on messages m_t, which come after the norm of v, is not "
        "removed either.",
    ),
    Statement(
        id="1:calibration",
        title="The calibrated start",
        claim="One factor at each point, fixed on the first batch, sets the standard deviation: type embedding 0.5; initial "
        "embedding 1.0; input of W_Q, W_K, W_V 1.0; scores 0.1; Δx 0.05 in every layer.",
        tested="These standard deviations in the forward pass of a new trainable model with Pre-Norm or QKV-Norm, for every "
        "layer.",
        space=_HEADS | {"tokens": whole(4, 16), "strategy": choice(*_STRATEGIES)},
        conclusion=_started,
        by="strategy",
        cases=48,
        remark="On the first batch itself, over all rows, tokens and components; scores over the pairs that causal attention "
        "allows, of all heads together. Δx of feed-forward layers has the same target here, and is compared as well.",
    ),
    Statement(
        id="1:initial",
        title="First weights, before the factors",
        claim="Weights start uniform: W_Q, W_K in ±√3·(0.1/N_qkv³)^{1/4}, W_V in ±√(3/N_qkv), W_O in ±√(3/(H·N_qkv)).",
        tested="The largest entries of a new trainable block's weights beside these ranges; standard deviations of scores and "
        "of Σ_h m_t for tokens of RMS 1, without factors, beside what follows: √0.1·N_emb/N_qkv and √(N_emb/N_qkv) with "
        "Pre-Norm, √N_qkv and 1 with QKV-Norm.",
        space={
            "dim": whole(64, 1024),
            "heads": whole(4, 16),
            "head": whole(8, 64),
            "strategy": choice(*_STRATEGIES),
        },
        conclusion=_first_weights,
        by="strategy",
        limit="The variances are means over draws of the weights; standard deviations of a draw are within a factor of 1.25, "
        "the largest entries within 3 %.",
        cases=30,
        notices=("sign", "constant", "exponent"),
        remark="The ranges alone do not give scores the standard deviation 0.1 of 1:calibration: with Pre-Norm they give 2.53 "
        "for Baseline and Alternative and 5.06 for Large, with QKV-Norm 8 for all. 0.1 is the variance, for N_emb = N_qkv and "
        "Pre-Norm. So the factor is needed: 0.04 and 0.02, with QKV-Norm 0.0125.",
    ),
)
