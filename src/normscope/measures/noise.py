"""Noise: what a model loses when the norms of its queries, keys and values are perturbed."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.seeds import stream_seed
from normscope.errors import InputError
from normscope.measures.base import Advance, Measure, Subject, Tables
from normscope.measures.curves import percent
from normscope.measures.predictions import FEWEST_ROWS, independent_rows, predicted_scores, score_means, standard_errors
from normscope.models import NOTHING, AttentionStep, Model, Observer, Sample
from normscope.results.conventions import DIFFUSE, NEAR_ONE_HOT, NOISE
from normscope.results.figures import Chart, Figure, Line
from normscope.results.findings import Finding, Severity
from normscope.results.sections import Section
from normscope.results.tables import banded, floats, plain_rows, spans_decades, table_of

PLACES = ("all", "sparse", "non-sparse")
PARTS = ("qkm", "qk")
_CLEAR = 2.0  # standard errors
_FEWEST_DRAWS, _MOST_DRAWS = 4, 16  # of the noise, without a number of draws
_TARGET, _NEGLIGIBLE = 0.2, 0.005  # of a change in loss, and in nats: the error over draws at which no more are drawn
_NAMED = 5
_PUBLISHED = 0.01, 0.10  # RMS noise in all layers, and the accuracy that it costs the published Pre-LN model
_LABELS = {"accuracy": "accuracy in %", "loss": "loss"}


@dataclass(frozen=True)
class Disturbance:
    """Where noise is applied.

    Attributes:
        level: RMS of κ in the factors 1 + κ, uniform with mean 0.
        parts: the letters of q, k and m (value outputs) that get a factor; x is what attention reads, so that noise on it is
            noise on the divisor of the norm before attention, which all heads share.
        where: every attention row (``all``), those that are near-one-hot (``sparse``), or those that are diffuse.
        layer: the only layer with noise; None for all at once.
    """

    level: float
    parts: str = "qkm"
    where: str = "all"
    layer: int | None = None


def norm_noise(
    disturbance: Disturbance,
    normalised: str,
    generator: torch.Generator,
    model: Model | None = None,
    seen: Callable[[int, Tensor], None] | None = None,
) -> Observer:
    """An observer of attention that multiplies the norms of q, k_t and m_t by independent factors 1 + κ.

    A key has one norm, whichever queries read it: heads that share keys and values share their factors.
    A norm removes a factor before it, so the letters that a model normalises after their projections (``normalised``)
    are left unchanged: a model with QKV-Norm is not perturbed at all. Noise on x needs the model, whose heads read x again.
    ``seen`` receives every layer and its weights under noise, (rows, heads, queries, keys).
    """
    parts = [part for part in disturbance.parts if {"m": "v"}.get(part, part) not in normalised]

    def observe(step: AttentionStep) -> Tensor | None:
        if disturbance.layer not in (None, step.layer) or not parts or disturbance.level == 0:
            if seen is not None:
                seen(step.layer, step.weights())
            return None

        def factors(*shape: int) -> Tensor:
            most = math.sqrt(3) * disturbance.level
            return 1 + torch.empty(shape, device=generator.device).uniform_(-most, most, generator=generator)

        def perturbed(part: str, x: Tensor) -> Tensor:
            if part not in parts:
                return x
            shared = 1 if part == "q" else shared_heads(step.k)
            drawn = factors(x.shape[0], x.shape[1] // shared, x.shape[2])
            return x * drawn.to(x).repeat_interleave(shared, 1)[..., None]

        heads: tuple[Tensor, ...] = (step.q, step.k, step.v)
        if "x" in parts:
            assert model is not None
            heads = model.heads_of(
                step.layer, step.input * factors(*step.input.shape[:2]).to(step.input)[..., None], step.rotation
            )
        q, k, v = (perturbed(part, x) for part, x in zip("qkm", heads, strict=True))
        weights = step.weights(q, k)
        if seen is not None:
            seen(step.layer, weights)
        mixed = weights @ v
        if disturbance.where == "all":
            return mixed
        clean = step.weights()
        largest = clean.amax(-1, keepdim=True)
        chosen = largest >= NEAR_ONE_HOT if disturbance.where == "sparse" else largest < DIFFUSE
        return torch.where(chosen, mixed, clean @ step.v)

    return Observer(attention=observe)


def shared_heads(x: Float[Tensor, "rows heads tokens head"]) -> int:
    """How many heads in a row have the same keys, to the bit: one KV head, repeated for its queries."""
    heads = x.shape[1]
    first = next((head for head in range(1, heads) if not torch.equal(x[:, head], x[:, 0])), heads)
    if heads % first:
        return 1
    groups = x.reshape(len(x), -1, first, *x.shape[2:])
    return first if bool((groups == groups[:, :, :1]).all()) else 1


def disturbances(levels: Sequence[float], layer_levels: Sequence[float], layers: Iterable[int]) -> list[Disturbance]:
    """All places and parts at every level, then each of some layers alone."""
    everywhere = [Disturbance(level, parts, where) for parts in PARTS for where in PLACES for level in levels]
    alone = [Disturbance(level, layer=layer) for level, layer in product(layer_levels, layers)]
    return everywhere + alone


def noise_table(
    model: Model,
    sample: Sample,
    planned: Sequence[Disturbance],
    draws: int | None = None,
    seed: int = 0,
    advance: Advance = lambda done: None,
) -> pd.DataFrame:
    """Accuracy and loss of the clean model and under every disturbance, with standard errors, a row for each.

    Changes are against the clean model, token by token, so their errors are smaller than those of the values. Tokens of a row
    read the same noisy keys, so their changes are not independent: with fewer rows than ``FEWEST_ROWS`` the errors are those
    over draws and over tokens together, and without a number of ``draws`` there are so many that the first is small
    (``_enough``). The same seed gives a disturbance the same noise at every level, up to its size. ``advance`` takes how many
    disturbances are done.
    """
    check_predicts(model, sample)
    clean = predicted_scores(model, sample)
    rows = [_row(Disturbance(0.0), clean[None], clean, sample)]
    for done, disturbance in enumerate(planned, 1):
        drawn: list[Tensor] = []
        while not _enough(drawn, clean, sample, draws):
            generator = torch.Generator(sample.tokens.device).manual_seed(stream_seed(seed, "noise", len(drawn)))
            drawn.append(predicted_scores(model, sample, norm_noise(disturbance, model.normalised_heads, generator)))
        rows.append(_row(disturbance, torch.stack(drawn), clean, sample))
        advance(done)
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def _enough(drawn: list[Tensor], clean: Tensor, sample: Sample, draws: int | None) -> bool:
    """Whether so many draws have been taken; without a number, whether more of them would not help.

    One draw where errors are taken over rows, each of which has noise of its own. Else ``_FEWEST_DRAWS``, then until the
    error over draws of the change in loss is at most ``_TARGET`` of that change, or of the error over tokens, or
    ``_NEGLIGIBLE``; at most ``_MOST_DRAWS``.
    """
    if draws is not None or independent_rows(sample):
        return len(drawn) >= (draws or 1)
    if len(drawn) < _FEWEST_DRAWS:
        return False
    changes = (torch.stack(drawn) - clean)[:, 1]
    over_draws, over_tokens = standard_errors(changes, sample)
    target = max(_TARGET * max(abs(float(changes.mean())), over_tokens), _NEGLIGIBLE)
    return len(drawn) >= _MOST_DRAWS or not over_draws > target


def check_predicts(model: Model, sample: Sample) -> None:
    """Raise an error for a model that predicts nothing."""
    if not model.predicts or not bool((sample.predicting.targets != NOTHING).any()):
        raise InputError(f"'{model.name}' predicts no tokens of this sample: noise is measured by what predictions lose")


def _row(
    disturbance: Disturbance, drawn: Float[Tensor, "draws 2 predicted"], clean: Float[Tensor, "2 predicted"], sample: Sample
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "perturbed": ",".join(disturbance.parts),
        "where": disturbance.where,
        "layer": disturbance.layer,
        "noise": disturbance.level,
    }
    return row | score_means(drawn, clean, sample) | {"tokens": clean.shape[1], "draws": len(drawn)}


@dataclass(frozen=True)
class Noise(Measure):
    """Accuracy and loss with noise on the norms of queries, keys and value outputs, in all layers and in one at a time.

    Attributes:
        noise_levels: RMS noise in all layers at once.
        layer_noise: RMS noise in one layer at a time.
        draws: of the noise, whose mean is taken; None for as many as the errors need.
    """

    noise_levels: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
    layer_noise: tuple[float, ...] = (NOISE,)
    draws: int | None = None

    name: ClassVar[str] = "noise"
    title: ClassVar[str] = "Sensitivity to noise"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "predictions"})
    asks: ClassVar[tuple[str, ...]] = ("sample", "seed")
    passes: ClassVar[str] = (
        f"1 + draws × (6 × levels + layers × levels of one layer); {_FEWEST_DRAWS} to {_MOST_DRAWS} draws, "
        f"1 with {FEWEST_ROWS} rows or more"
    )

    def planned(self, model: Model) -> list[Disturbance]:
        """All disturbances of a model."""
        return disturbances(self.noise_levels, self.layer_noise, model.attention_layers)

    def measure(self, subject: Subject, advance: Advance = lambda done: None) -> Tables:
        """A forward pass for every disturbance and draw; ``advance`` takes their share as a number of layers."""
        layers = subject.model.layers
        planned = self.planned(subject.model)

        def done(count: float) -> None:
            advance(layers * count / len(planned))

        if not bool(predicted_scores(subject.model, subject.sample).isfinite().all()):
            return {}
        return {"noise": noise_table(subject.model, subject.sample, planned, self.draws, subject.seed, done)}

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """What noise in one layer alone costs."""
        shown: dict[str, dict[int, str]] = {}
        for row in _rows(tables):
            if row["layer"] is not None and row["loss_change"] is not None:
                cell = f"{row['loss_change']:+.2g} ± {row['loss_change_stderr']:.1g}"
                shown.setdefault(f"loss at {percent(row['noise'])} noise here alone", {})[row["layer"]] = cell
        return shown

    def totals(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, float]:
        """Accuracy and loss under noise everywhere, at every level."""
        return {
            f"{column}_at_{row['noise']:g}": row[column]
            for row in _rows(tables)
            if row["layer"] is None and (row["perturbed"], row["where"]) == ("q,k,m", "all")
            for column in ("accuracy", "loss")
        }

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """What noise in all layers costs, and which layers cost most."""
        if set("qkv") <= set(about["normalised_heads"]):
            yield Finding(
                "Norm noise has no effect on this model: q, k and v are normalised after their projections, which removes it.",
                title="Norm noise has no effect", severity="ok", weight=95,
            )  # fmt: skip
            return
        if "noise" not in tables:
            text = "Sensitivity to noise is not defined: logits of the model are non-finite (NaN/Inf) without any noise."
            yield Finding(text, title="Noise is not measured", severity="warning", weight=95)
        broken = sorted({row["noise"] for row in _rows(tables) if row["loss_change"] is None})
        if broken:
            listed = ", ".join(map(percent, broken))
            text = f"At RMS noise of {listed} logits became non-finite (NaN/Inf), and accuracy and loss are not defined."
            yield Finding(text, "noise-accuracy", "Noise makes logits overflow", "warning", weight=95)
        rows = [row for row in _rows(tables) if row["noise"] > 0 and row["loss_change"] is not None]
        everywhere = [row for row in rows if row["layer"] is None and (row["where"], row["perturbed"]) == ("all", "q,k,m")]
        if everywhere:
            yield _cost(everywhere)
        yield from _layers_alone([row for row in rows if row["layer"] is not None])

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Accuracy and loss against noise."""
        table = table_of(tables, "noise")
        if table is None:
            return None
        table = table.assign(accuracy=100 * table["accuracy"], accuracy_stderr=100 * table["accuracy_stderr"])
        clean, noisy = table[table["noise"] == 0], table[table["noise"] > 0].sort_values("noise", kind="stable")
        everywhere = noisy[noisy["layer"].isna()]
        figures: dict[str, Figure | None] = {
            f"noise-{column}": _chart(everywhere, clean, column, settings) for column in ("accuracy", "loss")
        }
        for (perturbed, where), rows in noisy[noisy["layer"].notna()].groupby(["perturbed", "where"], sort=False):
            name = f"noise-layers-{perturbed}-{where}".replace(",", "")
            figures[name] = _layer_chart(rows, clean, f"{perturbed}, {where}", settings)
        text = (
            "The norms of queries q, keys k and value outputs m are multiplied by 1 + κ with random κ of the "
            f"given RMS: in all attention rows, only in near-one-hot ones (sparse: largest weight at least {NEAR_ONE_HOT}), or "
            f"only in diffuse ones (below {DIFFUSE}). Published for Pre-LN: 1 % RMS noise everywhere costs 10 points of "
            "accuracy or more. Bands are one standard error, over draws of the noise and over tokens. Heads that share keys "
            "and values share their noise.",
        )
        return self.page(text, figures)


def _rows(tables: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Rows by rising noise."""
    table = table_of(tables, "noise")
    return [] if table is None else plain_rows(table.sort_values("noise", kind="stable"))


def _cost(rows: list[dict[str, Any]]) -> Finding:
    """What noise in all layers costs, at the published level or the nearest to it."""
    published, drop = _PUBLISHED
    row = min(rows, key=lambda row: abs(float(row["noise"]) - published))
    lost, clear = -row["accuracy_change"], row["loss_change"] > _CLEAR * row["loss_change_stderr"]
    comparable = row["noise"] < 2 * published
    severity: Severity = "warning" if comparable and clear and lost >= drop / 2 else "notice" if clear else "ok"
    listed = "; ".join(f"{percent(other['noise'])}: {_changes(other)}" for other in rows if other is not row)
    return Finding(
        f"{percent(row['noise'])} RMS noise on the norms of q, k and value outputs in all layers: {_changes(row)}.",
        "noise-accuracy",
        f"Norm noise of {percent(row['noise'])} costs {100 * max(lost, 0):.2g} points of accuracy"
        if clear
        else f"Norm noise of {percent(row['noise'])} has no measurable cost",
        severity,
        row["accuracy_change"],
        f"Published Pre-LN model: {percent(published)} RMS noise costs {100 * drop:g} points or more."
        f"{f' Other levels here: {listed}.' if listed else ''}",
        "" if severity == "ok" else "Keep norms and attention scores in full precision; QKV-Norm removes this in a new model.",
        weight=95,
    )


def _changes(row: dict[str, Any]) -> str:
    return (
        f"accuracy {100 * row['accuracy_change']:+.2f} ± {100 * row['accuracy_change_stderr']:.2f} points, "
        f"loss {row['loss_change']:+.3g} ± {row['loss_change_stderr']:.2g}"
    )


def _layers_alone(rows: list[dict[str, Any]]) -> Iterator[Finding]:
    level = min((row["noise"] for row in rows), key=lambda noise: abs(float(noise) - NOISE), default=NOISE)
    alone = [row for row in rows if row["noise"] == level]
    figure = f"noise-layers-{PARTS[0]}-{PLACES[0]}"
    clear = [row for row in alone if row["loss_change"] > _CLEAR * row["loss_change_stderr"]]
    if clear:
        worst = sorted(clear, key=lambda row: -float(row["loss_change"]))[:_NAMED]
        listed = ", ".join(f"{row['layer']} ({row['loss_change']:+.2g})" for row in worst)
        yield Finding(
            f"With {percent(level)} RMS noise in one layer at a time, loss rises most in layers {listed}.",
            figure,
            title="Layers most sensitive to norm noise",
            advice="Keep these layers in full precision first, and check them when a change to the norms hurts.",
        )
    elif alone:
        text = (
            f"With {percent(level)} RMS noise in one layer at a time, no layer costs loss beyond the error of the measurement."
        )
        yield Finding(text, figure, title="No layer is sensitive to norm noise", severity="ok")


def _chart(rows: pd.DataFrame, clean: pd.DataFrame, column: str, settings: str) -> Chart | None:
    """Accuracy or loss against noise in all layers, a line for what is perturbed and where."""
    if rows[column].isna().all():
        return None
    groups = rows.groupby(["perturbed", "where"], sort=False)
    lines = [banded(f"{perturbed}, {where}", group, "noise", column) for (perturbed, where), group in groups]
    lines += _clean_lines(clean, column, floats(rows["noise"].drop_duplicates()))
    return Chart(
        f"{column.capitalize()} under noise in all layers",
        "RMS of the relative noise",
        _LABELS[column],
        tuple(lines),
        "A line that leaves the clean value early belongs to norms that have to be exact.",
        settings,
        log_x=True,
        log_y=column == "loss" and spans_decades([value for line in lines for value in line.y]),
    )


def _layer_chart(rows: pd.DataFrame, clean: pd.DataFrame, perturbed: str, settings: str) -> Chart:
    """Accuracy against the layer that has the noise, a line for each level; loss if accuracy was not measured."""
    column = "loss" if rows["accuracy"].isna().all() else "accuracy"
    rows = rows.sort_values("layer")
    lines = [banded(f"noise {level:g}", group, "layer", column) for level, group in rows.groupby("noise")]
    lines += _clean_lines(clean, column, floats(rows["layer"].drop_duplicates()))
    return Chart(
        f"{column.capitalize()} with noise in one layer at a time ({perturbed})",
        "layer with noise",
        _LABELS[column],
        tuple(lines),
        "Layers where a line is far from the clean value depend on their norms the most.",
        settings,
    )


def _clean_lines(clean: pd.DataFrame, column: str, x: list[float]) -> list[Line]:
    """The value without noise, all along the axis."""
    return [Line("clean", x, [value] * len(x)) for value in floats(clean[column])[:1]]
