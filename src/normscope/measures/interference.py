"""Interference: how content that a head cannot read changes its attention through the divisor of a norm.

The part of a token outside a head's input subspace is replaced by that of another token s(t), a resample ablation:
x'_t = P x_t + (1 − P) x_s(t), P the projection onto the subspace. With w the logits q·k before and w' after, over all pairs of
a query t that attends to a key u,

    change² = Σ (w'_tu − w_tu)² / Σ w_tu².

After the norm this is 0: the replaced part lies in a null space. Before the norm the ablation leaves P x_t as it is, but not
|x_t|: a norm at the input multiplies the head's queries and keys by |x_t|/|x'_t|.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.core.norms import length, unit
from normscope.measures.base import LAYER, LayerAttention, Measure, PassObserver, Quantity, Subject
from normscope.measures.curves import columns, statistic, two_digits
from normscope.measures.head_rows import HeadRows, head_name
from normscope.measures.head_spaces import PLACES, layer_input
from normscope.models import AttentionStep, Model
from normscope.models.describe import layers_named
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import floats, head_map, spans_decades, table_of

RESAMPLED = ("queries", "keys", "both")
ROUNDING = 1e-4  # a change of logits that float32 rounding may cause; what a norm causes is far larger
MANY = 1 / 3  # of the queries of a layer's median head: a change worth a warning
_NAMED = 3  # heads that a finding lists
_HELD = {"cpu": 1 << 24, "cuda": 1 << 26}  # numbers in the ablated queries or keys that are held at once
_TEXT = (
    "All heads share one divisor, the residual norm; they are independent only if it does not depend on what other heads "
    "read. The test is a resample ablation: the part of every token that a head cannot read is replaced by that of another "
    "token. After the norm, the replaced part lies in a null space and changes nothing. Before the norm, it changes the "
    "residual norm, and with it everything that the head reads: if the parts that a head reads and does not read have norms 3 "
    "and 4, the norm divides by 5; without the unread part, what the head reads grows from 0.6 to 1. Without a norm at the "
    "input, or with queries and keys normalised per head (QK-Norm), there is no interference. If queries and keys are "
    "normalised over all heads together, heads share that divisor as well.",
)


def _curve(table: pd.DataFrame) -> pd.DataFrame:
    """The median head of every layer."""
    medians = _before(table, "both").groupby("layer", as_index=False).agg({"change": "median"})
    return columns("layer", "change")(pd.DataFrame(medians))


@dataclass(frozen=True)
class Interference(Measure):
    """The change of attention logits and of the top key when content that a head cannot read is resampled."""

    name: ClassVar[str] = "interference"
    title: ClassVar[str] = "Interference"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "matrices"})
    asks: ClassVar[tuple[str, ...]] = ("sample", "seed")
    passes: ClassVar[str] = "1, shared, and q and k of every head once more"
    order: ClassVar[int | None] = 60
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "interference", "Interference", LAYER, "relative change of attention logits",
            "How much logits change in the median head when content that it cannot read is resampled before the norm.",
            "interference", _curve, "interference in the median layer", statistic("median"),
        ),
    )  # fmt: skip

    def observer(self, subject: Subject) -> PassObserver:
        """Collects a row for every head, place and side that is ablated."""
        return HeadRows("interference", lambda attention: _rows(subject, attention))

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """Of the median head: the share of queries whose top key changes when keys are ablated, and the change of logits."""
        table = table_of(tables, "interference")
        if table is None:
            return {}
        shares = {"top key changes": ("keys", "moved"), "change of logits": ("both", "change")}
        medians = {
            title: _before(table, resampled).dropna(subset=["change"]).groupby("layer")[column].median()
            for title, (resampled, column) in shares.items()
        }
        return {
            title: {
                layer: f"{100 * value:.3g} %"
                for layer, value in zip(median.index, median, strict=True)
                if not math.isnan(value)
            }
            for title, median in medians.items()
        }

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """Which layers' attention depends on content that their heads cannot read."""
        table = table_of(tables, "interference")
        if table is None or _before(table, "both")["change"].isna().all():
            return
        after = table[table["place"] == "after"]["change"].max()
        shared = bool(after > ROUNDING and about["jointly_normalised"])
        largest = _before(table, "both")["change"].max()
        if largest <= max(ROUNDING, 0 if shared else 3 * after):
            yield Finding(
                f"Content that a head cannot read does not change its attention logits (by {largest:.1g} at most).",
                "interference",
                title="Heads do not interfere",
                severity="ok",
                number=largest,
                comparison="Pre-LN models: 18–20 % in the median head.",
                weight=90,
            )
            return
        yield _by_layer(table, shared)
        yield _strength(table)

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Maps of the change of logits, of its equivalent noise on keys, and of queries whose top key changes."""
        table = table_of(tables, "interference")
        if table is None:
            return None
        both, keys = _before(table, "both"), _before(table, "keys")
        if not both["change"].max() > ROUNDING:
            text = "No head's logits change by more than rounding, so there is nothing to draw."
            return Section(self.title, (*_TEXT, text), name=self.name)
        maps = {
            "interference-moved": head_map(
                keys, "moved", "Queries whose top key changes", "share of queries",
                "The top key changed although nothing that W_QK reads was changed.", settings,
            ),
            "interference": head_map(
                both, "change", "Interference by head", "relative change of attention logits",
                "How much logits change when all content that a head cannot read is resampled before the norm.", settings,
                log=spans_decades(floats(both["change"])),
            ),
            "interference-keys": head_map(
                keys, "kappa", "Interference as noise on key norms", "RMS of κ",
                "The ablation multiplies keys by 1 + κ; compare with the noise at which near-one-hot attention switches keys.",
                settings, log=spans_decades(floats(keys["kappa"])),
            ),
        }  # fmt: skip
        return self.page(_TEXT, maps)


def _before(table: pd.DataFrame, resampled: str) -> pd.DataFrame:
    return table[(table["place"] == "before") & (table["resampled"] == resampled)]


def _by_layer(table: pd.DataFrame, shared: bool) -> Finding:
    """The layers in which the top key often changes, beside the others."""
    keys = _before(table, "keys").dropna(subset=["change"])
    layers, overall = keys.groupby("layer")[["moved", "top_weight"]].median(), keys["moved"]
    often, others = layers[layers["moved"] > MANY], layers[layers["moved"] <= MANY]
    shown = often if len(often) else layers
    text = (
        "Replacing what a head cannot read of every key in the residual stream changes the top key for "
        f"{_percent(shown['moved'])} of the queries in the median head of a layer."
    )
    comparison = (
        f"Median head of the model: {two_digits(100 * overall.median())} % (mean {two_digits(100 * overall.mean())} %)."
    )
    if len(often) and len(others):
        comparison += f" Other layers: {_percent(others['moved'])}."
    where = " in these layers" if len(often) else ""
    diffuse = f" Mean top attention weight{where}: {_span(shown['top_weight'])}; diffuse rows switch keys easily."
    why = " Queries and keys are normalised over all heads together, so heads share that divisor." if shared else ""
    return Finding(
        text,
        "interference-moved",
        title=f"Content that heads cannot read changes attention{f' in {layers_named(often.index)}' if len(often) else ''}",
        severity="warning" if len(often) else "notice",
        number=float(shown["moved"].max()),
        comparison=comparison + diffuse + why,
        advice="QK-Norm per head removes it in a new model; in this one, measure its cost in loss first." if len(often) else "",
        weight=90,
    )


def _strength(table: pd.DataFrame) -> Finding:
    """By how much logits change, as noise on key norms, and in which heads most."""
    both, keys = (_before(table, resampled).dropna(subset=["change"]) for resampled in ("both", "keys"))
    most = both.nlargest(_NAMED, "change").to_dict("records")
    listed = ", ".join(f"{head_name(row)} ({100 * row['change']:.3g} %)" for row in most)
    return Finding(
        f"Resampling what a head cannot read of queries and keys changes its attention logits by "
        f"{100 * both['change'].median():.3g} % in the median head.",
        "interference",
        title="How much content that heads cannot read changes attention logits",
        number=float(both["change"].median()),
        comparison=(
            f"Of keys alone: {100 * keys['change'].median():.3g} %, like RMS noise of {100 * keys['kappa'].median():.3g} % on "
            f"key norms. Most: {listed}."
        ),
    )


def _percent(shares: "pd.Series[float]") -> str:
    low, high = (two_digits(100 * share) for share in (shares.min(), shares.max()))
    return f"{low} %" if low == high else f"{low}–{high} %"


def _span(values: "pd.Series[float]") -> str:
    low, high = (f"{value:.2f}" for value in (values.min(), values.max()))
    return low if low == high else f"{low}–{high}"


def partners(counted: Bool[Tensor, "rows tokens"], seed: int) -> Int[Tensor, " tokens_of_all_rows"]:
    """For every token, numbered through all rows, another one to take content from; itself for those that do not count."""
    places = counted.flatten().nonzero().squeeze(1)
    order = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).to(places.device)]
    partner = torch.arange(counted.numel(), device=counted.device)
    partner[order] = order.roll(1)
    return partner


def resample(
    x: Float[Tensor, "rows tokens dim"], bases: Float[Tensor, "*heads dim width"], partner: Int[Tensor, " tokens_of_all_rows"]
) -> Float[Tensor, "*heads rows tokens dim"]:
    """P x_t + (1 − P) x_s(t), with P the projection onto an orthonormal basis; columns of 0 do nothing."""
    other = x.flatten(0, 1)[partner]
    read = (x.flatten(0, 1) - other) @ bases @ bases.mT
    return (other + read).view(*bases.shape[:-2], *x.shape)


def _rows(subject: Subject, attention: LayerAttention) -> Iterator[dict[str, Any]]:
    """A row for each head, place of the ablation and side that is ablated: ``change``, ``kappa``, ``moved``, ``top_weight``.

    ``kappa`` is the RMS of κ in the factors 1 + κ that the ablation puts on queries or keys; ``moved`` the share of queries
    whose largest logit is another key's afterwards; ``top_weight`` the mean of their largest attention weight before it.
    """
    model, step = subject.model, attention.step
    partner = partners(attention.counted, subject.seed)
    found = layer_input(model, attention)
    states = {"before": found.source.states.double(), "after": step.input.double()}
    inputs: dict[str, Callable[[Tensor], Tensor]] = {"before": found.source, "after": lambda x: x}
    for place in PLACES:
        x, to_input, spaces = states[place], inputs[place], found.spaces[place]
        q, k = model.heads_of(step.layer, to_input(x).to(step.input), step.rotation, "qk")
        for heads in _chunks(q, spaces.shared):
            keys = spaces.keys[heads][:: spaces.shared]
            ablated_q = _ablated(model, step, to_input, resample(x, spaces.queries[heads], partner), heads, 0)
            ablated_k = _ablated(model, step, to_input, resample(x, keys, partner), heads, 1)
            clean = q[:, heads].transpose(0, 1), k[:, heads].transpose(0, 1)
            largest = attention.largest[:, heads].transpose(0, 1)
            columns = _compared(step, heads, clean, (ablated_q, ablated_k), largest, attention.counted)
            for i, head in enumerate(range(heads.start, heads.stop)):
                for values in columns:
                    row = {name: column[i] for name, column in values.items()}
                    yield {"layer": step.layer, "head": head, "place": place} | row


def _chunks(q: Float[Tensor, "rows heads tokens head"], shared: int) -> Iterator[slice]:
    """Ranges of heads whose ablations and logits are held at once, whole groups of those that share their keys."""
    rows, heads, tokens, width = q.shape
    held = _HELD[q.device.type] // (rows * tokens * max(heads * width, tokens))
    chunk = max(1, held // shared) * shared
    for first in range(0, heads, chunk):
        yield slice(first, min(heads, first + chunk))


def _ablated(
    model: Model,
    step: AttentionStep,
    to_input: Callable[[Tensor], Tensor],
    states: Float[Tensor, "groups rows tokens dim"],
    heads: slice,
    side: int,
) -> Float[Tensor, "heads rows tokens head"]:
    """Queries (side 0) or keys (side 1) of some heads, each of the states of its group, those after the ablation.

    A model computes those of all heads at once, so the ablations are put into one call as rows.
    """
    groups, rows = states.shape[:2]
    rotation = step.rotation
    if rotation is not None and len(rotation[0]) > 1:
        rotation = tuple(torch.cat([part] * groups) for part in rotation)
    (projected,) = model.heads_of(step.layer, to_input(states.flatten(0, 1)).to(step.input), rotation, "qk"[side])
    of_heads = torch.arange(heads.start, heads.stop, device=projected.device)
    group = (of_heads - heads.start) // (len(of_heads) // groups)
    return projected.view(groups, rows, *projected.shape[1:])[group, :, of_heads]


def _compared(
    step: AttentionStep,
    heads: slice,
    clean: tuple[Tensor, Tensor],
    ablated: tuple[Tensor, Tensor],
    top: Float[Tensor, "heads rows tokens"],
    counted: Bool[Tensor, "rows tokens"],
) -> list[dict[str, Any]]:
    """What each ablation did to some heads, (heads, rows, tokens, …) each, as columns of one value for each head."""
    (q, k), (q_ablated, k_ablated) = clean, ablated
    every = (*step.q.shape[:-1], step.k.shape[-2])
    mask = step.mask.expand(every)[:, heads].transpose(0, 1)
    shift = step.softmax.select(every, lambda x: x[:, heads].transpose(0, 1)).shift
    pairs = mask & counted[:, :, None] & counted[:, None]
    asked = counted & (mask.sum(-1) > 1)

    def best(scores: Tensor) -> Tensor:
        return (scores if shift is None else scores + shift).masked_fill(~mask, -torch.inf).argmax(-1)

    def size(scores: Tensor) -> Tensor:
        return length(scores.where(pairs, 0.0).flatten(1)).squeeze(1)

    def mean(values: Tensor) -> list[float]:
        means: list[float] = (values.double().where(asked, 0.0).sum((1, 2)) / asked.sum((1, 2))).tolist()
        return means

    scores = (q @ k.mT).double()
    changes = {"queries": (q_ablated, k), "keys": (q, k_ablated), "both": (q_ablated, k_ablated)}
    undefined = [math.nan] * len(q)
    kappas = {"queries": _kappa(q, q_ablated, counted), "keys": _kappa(k, k_ablated, counted), "both": undefined}
    columns = []
    for resampled in RESAMPLED:
        after = (changes[resampled][0] @ changes[resampled][1].mT).double()
        columns.append(
            {
                "resampled": [resampled] * len(q),
                "change": (size(after - scores) / size(scores)).tolist(),
                "kappa": kappas[resampled],
                "moved": mean(best(after) != best(scores)),
                "top_weight": mean(top),
            }
        )
    return columns


def _kappa(x: Tensor, ablated: Tensor, counted: Tensor) -> list[float]:
    """The RMS of κ by head, where 1 + κ is the ablated vector's component along the clean one over its norm."""
    old, new = x[:, counted].double(), ablated[:, counted].double()
    kappa = (new * unit(old)).sum(-1) / length(old).squeeze(-1) - 1
    rms: list[float] = kappa.square().mean(-1).sqrt().tolist()
    return rms
