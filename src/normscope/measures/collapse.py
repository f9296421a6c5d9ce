"""Collapse: how likely noise on key norms makes a near-one-hot attention row switch to another key."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, ClassVar

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.errors import require_known
from normscope.measures.base import LAYER, LayerAttention, Measure, PassObserver, Quantity, Subject, Tables
from normscope.measures.collapse_probability import NOISES, collapse_margin, collapse_probability, sampled_collapse
from normscope.measures.curves import at_noise, columns, percent, share_text, statistic, two_digits
from normscope.measures.head_rows import with_totals
from normscope.models import Softmax
from normscope.results.conventions import FEWEST_ROWS, NEAR_ONE_HOT, NOISE
from normscope.results.figures import Chart, Figure, HeatMap, Line
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import banded, floats, head_map, plain_rows, spans_decades, table_of, together

Row = dict[str, Any]
_PUBLISHED = 0.01, 0.11  # share of the rows that switch in the published Pre-LN model, and the RMS noise at which they do
_FRAGILE = 0.03  # RMS noise: a model that loses the published share at less is fragile
_FEWEST = math.ceil(4 * (1 - _PUBLISHED[0]) / _PUBLISHED[0])  # rows from which the standard error of that share is half of it
_HIGHEST = 0.3  # RMS noise up to which the level of the published share is solved for
_PRECISION = 1e-5  # of that level, relative
_SLOPE = 0.01  # of the level: the step of its derivative
_HEAD_LOSS = 0.01  # share of a head's rows at NOISE from which it is named
_NAMED = 5
_NAMED_LAYERS = 8  # more layers than these share one name in a legend


def sparse_scores(
    attention: LayerAttention,
) -> tuple[Float[Tensor, "sparse keys"], Softmax, Bool[Tensor, "heads distributions"]]:
    """The raw scores of the near-one-hot rows of a layer, head by head, their softmax, and which of its rows these are."""
    sparse = attention.largest.transpose(0, 1)[:, attention.counted] >= NEAR_ONE_HOT

    def chosen(x: Float[Tensor, "rows heads tokens width"]) -> Float[Tensor, "sparse width"]:
        return x.transpose(0, 1)[:, attention.counted][sparse]

    raw = attention.raw_scores
    return chosen(raw), attention.step.softmax.select(raw.shape, chosen), sparse


class _Observer(PassObserver):
    """Rows of the tables, a layer at a time; no layer's scores outlive it."""

    def __init__(self, measure: "Collapse", subject: Subject) -> None:
        self.measure = measure
        self.disturbed = "k" not in subject.model.normalised_heads  # a norm of the keys removes noise on their norms
        self.generator = torch.Generator(subject.sample.tokens.device).manual_seed(subject.seed)
        self.collapse: list[Row] = []
        self.margins: list[Row] = []
        self.contested: list[_Contested] = []

    def attention(self, attention: LayerAttention) -> None:
        """Exact probabilities of the loose definition, drawn ones of the strict, and the margins."""
        scores, softmax, sparse = sparse_scores(attention)
        levels, of_head, heads = self.measure.levels, sparse.nonzero()[:, 0], len(sparse)
        probability = torch.zeros(len(levels), len(scores), device=scores.device)
        margins = torch.full((len(scores),), torch.nan, device=scores.device)
        if self.disturbed and len(scores):
            probability = collapse_probability(scores, levels, self.measure.noise, softmax.shift)
            margins = collapse_margin(scores, softmax.shift)
            reach = math.sqrt(3) * _HIGHEST if self.measure.noise == "uniform" else math.inf
            self.contested.append(_Contested.of(scores, softmax.shift, of_head, heads, reach))
        every = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
        self._add_probabilities(attention.layer, "loose", probability, of_head, every, heads)
        self._add_margins(attention.layer, margins, of_head, heads)
        if self.measure.draws:
            strict, drawn = self._strict(scores, softmax, margins)
            self._add_probabilities(attention.layer, "strict", strict, of_head, drawn, heads)

    def _strict(self, scores: Tensor, softmax: Softmax, margins: Tensor) -> tuple[Tensor, Tensor]:
        """Shares of the draws in which each row collapses strictly, (levels, sparse), and which rows were drawn for."""
        measure = self.measure
        order = torch.randperm(len(scores), generator=self.generator, device=scores.device)
        chosen = order[: measure.sampled].sort().values
        drawn = torch.zeros(len(scores), dtype=torch.bool, device=scores.device).index_fill(0, chosen, True)
        strict = scores.new_zeros(len(measure.levels), len(scores))
        moved = chosen[self._can_collapse(margins[chosen])]
        if self.disturbed and len(moved):
            strict[:, moved] = sampled_collapse(
                scores[moved], softmax.select(scores.shape, lambda x: x[moved]), measure.levels, measure.draws,
                self.generator, measure.noise, NEAR_ONE_HOT,
            ).strict  # fmt: skip
        return strict, drawn

    def _can_collapse(self, margins: Float[Tensor, " sparse"]) -> Bool[Tensor, " sparse"]:
        """Whether uniform noise of the largest level reaches a row's margin; Gaussian noise reaches all."""
        if self.measure.noise != "uniform":
            return torch.ones_like(margins).bool()
        return margins < math.sqrt(3) * max(self.measure.levels)

    def _add_probabilities(
        self,
        layer: int,
        definition: str,
        found: Float[Tensor, "levels sparse"],
        of_head: Int[Tensor, " sparse"],
        known: Bool[Tensor, " sparse"],
        heads: int,
    ) -> None:
        """Means over the rows that are known, of the layer and of each head."""
        for head in (None, *range(heads)):
            of_this = torch.ones_like(known) if head is None else of_head == head
            values, count = found[:, of_this & known].double(), int(of_this.sum())
            means = values.mean(1).tolist() if values.shape[1] else [math.nan] * len(found)
            errors = [0.0] * len(found)
            if definition == "strict":
                errors = _drawn_errors(values, self.measure.draws, count).tolist()
            self.collapse += [
                _probability(layer, head, level, definition, mean, stderr, count)
                for level, mean, stderr in zip(self.measure.levels, means, errors, strict=True)
            ]

    def _add_margins(self, layer: int, margins: Tensor, of_head: Tensor, heads: int) -> None:
        for head in range(heads):
            of_this = margins[of_head == head].double()
            known = bool(len(of_this)) and not bool(of_this.isnan().any())
            self.margins.append(
                {
                    "layer": layer,
                    "head": head,
                    "margin": float(of_this.min()) if known else math.nan,
                    "median_margin": float(of_this.median()) if known else math.nan,
                    "sparse": len(of_this),
                }
            )

    def tables(self) -> Tables:
        """With the rows of the whole model."""
        solved = {"share": _PUBLISHED[0], **level_at(self.contested, _PUBLISHED[0], self.measure.noise)}
        level = {"collapse_level": pd.DataFrame([solved]).astype({"noise": float, "stderr": float})} if self.collapse else {}
        rows = {"collapse": self.collapse and self.collapse + self._whole_model(), "margins": self.margins}
        return with_totals(rows) | level

    def _whole_model(self) -> list[Row]:
        """The layers together, each weighted by the number of its near-one-hot rows."""
        layers = [row for row in self.collapse if row["head"] is None and row["sparse"]]
        definitions = dict.fromkeys(row["definition"] for row in self.collapse)
        rows = []
        for definition, level in product(definitions, self.measure.levels):
            parts = [row for row in layers if row["definition"] == definition and row["noise"] == level]
            count = sum(row["sparse"] for row in parts)
            mean = sum(row["sparse"] * row["probability"] for row in parts) / count if count else math.nan
            error = math.hypot(*(row["sparse"] * row["stderr"] for row in parts)) / max(count, 1)
            rows.append(_probability(None, None, level, definition, mean, error, count))
        return rows


@dataclass(frozen=True)
class _Contested:
    """The near-one-hot rows of a layer that noise can make switch, with the keys that can overtake alone.

    Attributes:
        scores: raw scores, −inf where a key cannot overtake.
        shift: their bias, if there is one.
        of_head: the head of every row.
        counts: near-one-hot rows of every head, those that cannot switch included.
    """

    scores: Float[Tensor, "contested keys"]
    shift: Float[Tensor, "contested keys"] | None
    of_head: Int[Tensor, " contested"]
    counts: Int[Tensor, " heads"]

    @classmethod
    def of(cls, scores: Tensor, shift: Tensor | None, of_head: Tensor, heads: int, reach: float) -> "_Contested":
        """The rows and keys with (w_{t*} − w_t) < reach · (|w_{t*}| + |w_t|), biases added to the difference."""
        total = scores if shift is None else scores + shift
        best, place = total.max(1, keepdim=True)
        size = scores.abs().masked_fill(scores == -torch.inf, 0.0)
        able = (best - total < reach * (size.gather(1, place) + size)) & scores.isfinite()
        able.scatter_(1, place, True)
        contested = able.sum(1) > 1
        most = int(able[contested].sum(1).max()) if bool(contested.any()) else 1
        total, keys = total[contested].masked_fill(~able[contested], -torch.inf).topk(most, 1)
        kept = scores[contested].gather(1, keys).masked_fill(total == -torch.inf, -torch.inf)
        of_keys = None if shift is None else shift.expand_as(scores)[contested].gather(1, keys)
        return cls(kept, of_keys, of_head[contested], torch.bincount(of_head, minlength=heads))

    @classmethod
    def joined(cls, layers: "Sequence[_Contested]") -> "_Contested":
        """The rows of several layers as one, whose heads are numbered on."""
        most = max(layer.scores.shape[1] for layer in layers)
        scores = [F.pad(layer.scores, (0, most - layer.scores.shape[1]), value=-torch.inf) for layer in layers]
        shifts = [None if layer.shift is None else F.pad(layer.shift, (0, most - layer.shift.shape[1])) for layer in layers]
        shift = None
        if any(x is not None for x in shifts):
            shift = torch.cat([torch.zeros_like(y) if x is None else x for x, y in zip(shifts, scores, strict=True)])
        first = accumulate((len(layer.counts) for layer in layers[:-1]), initial=0)
        of_head = torch.cat([layer.of_head + number for layer, number in zip(layers, first, strict=True)])
        return cls(torch.cat(scores), shift, of_head, torch.cat([layer.counts for layer in layers]))

    def lost(self, level: float, noise: str) -> Float[Tensor, " heads"]:
        """How many rows of every head are expected to switch."""
        probability = collapse_probability(self.scores, [level], noise, self.shift)[0].double()
        return probability.new_zeros(len(self.counts)).index_add_(0, self.of_head, probability)


def level_at(layers: Sequence[_Contested], share: float, noise: str) -> Row:
    """The RMS noise at which so many of all near-one-hot rows switch key, solved on the exact curve.

    Returns:
        ``noise``, NaN if fewer switch at the highest level; its ``stderr``, from the differences between heads, since rows of
        one head share their keys, NaN if only one head has such rows; ``sparse``, the number of rows; ``highest``.
    """
    total = sum(int(layer.counts.sum()) for layer in layers)
    row = {"noise": math.nan, "stderr": math.nan, "sparse": total, "highest": _HIGHEST}
    if not total:
        return row
    contested = _Contested.joined(layers)

    def above(level: float) -> float:
        return float(contested.lost(level, noise).sum()) / total - share

    level = rising_root(above, 0.0, _HIGHEST, -share)
    if level is None:
        return row
    by_head, width = contested.lost(level, noise), _SLOPE * level
    slope = (above(level + width) - above(level - width)) / (2 * width)
    error = float((by_head - share * contested.counts).square().sum().sqrt()) / total
    known = slope > 0 and int((contested.counts > 0).sum()) > 1
    return {**row, "noise": level, "stderr": error / slope if known else math.nan}


def rising_root(f: Callable[[float], float], low: float, high: float, f_low: float) -> float | None:
    """Where a rising function with f(low) = f_low < 0 is 0, to a relative 1e-5; None if it is below 0 at ``high``.

    False position, with the value of an end that stays halved (Illinois).
    """
    f_high = f(high)
    if f_high < 0:
        return None
    kept = 0
    while high - low > _PRECISION * high and f_high != 0:
        middle = (low * f_high - high * f_low) / (f_high - f_low)
        margin = _PRECISION * high / 4  # an end that never moves would leave the interval wide
        middle = min(max(middle, low + margin), high - margin)
        value = f(middle)
        if value >= 0:
            high, f_high = middle, value
            f_low = f_low / 2 if kept == 1 else f_low
            kept = 1
        else:
            low, f_low = middle, value
            f_high = f_high / 2 if kept == -1 else f_high
            kept = -1
    return high


def _drawn_errors(shares: Float[Tensor, "levels drawn"], draws: int, count: int) -> Float[Tensor, " levels"]:
    """Standard errors of mean shares: from the draws of each share, and from drawing for a part of ``count`` only.

    A share of 0 or 1 has an error too: half a draw is added to either side.
    """
    drawn = shares.shape[1]
    if not drawn:
        return torch.full((len(shares),), math.nan, dtype=shares.dtype)
    likely = (shares * draws + 0.5) / (draws + 1)
    within = (likely * (1 - likely)).sum(1) / draws / drawn**2
    between = shares.var(1, correction=0) / drawn * (1 - drawn / count)
    return (within + between).sqrt()


def _probability(
    layer: int | None, head: int | None, noise: float, definition: str, probability: float, stderr: float, sparse: int
) -> Row:
    return {
        "layer": layer,
        "head": head,
        "noise": noise,
        "definition": definition,
        "probability": probability,
        "stderr": stderr,
        "sparse": sparse,
    }


def _curve(table: pd.DataFrame) -> pd.DataFrame:
    rows = table[table["layer"].isna() & (table["definition"] == "loose") & (table["noise"] > 0)]
    return columns("noise", "probability")(rows.sort_values("noise"))


def _least_margin(table: pd.DataFrame) -> pd.DataFrame:
    return columns("layer", "margin")(pd.DataFrame(table.groupby("layer", as_index=False).agg({"margin": "min"})))


@dataclass(frozen=True)
class Collapse(Measure):
    """Circuit collapse, exactly: P(another key has the largest score) for every near-one-hot attention row.

    Attributes:
        levels: RMS of the noise on the norms of queries and keys.
        noise: ``uniform`` or ``gaussian``.
        draws: for the strict definition, which has no closed form; 0 leaves it out.
        sampled: the most rows of a layer that are drawn for.
    """

    levels: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    noise: str = "uniform"
    draws: int = 0
    sampled: int = 512

    name: ClassVar[str] = "collapse"
    title: ClassVar[str] = "Circuit collapse"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    asks: ClassVar[tuple[str, ...]] = ("sample", "seed")
    order: ClassVar[int | None] = 60
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "collapse", "Circuit collapse under noise", "RMS of the relative noise", "share of near-one-hot rows",
            "The further left a line rises, the less noise makes near-one-hot rows switch to another key.",
            "collapse", _curve, f"near-one-hot rows that switch key at {percent(NOISE)} RMS noise", at_noise, ratio=False,
        ),
        Quantity(
            "margins", "Smallest noise that can make a head switch", LAYER, "bound on the relative noise",
            "The least of the layer's heads; lower is more fragile.",
            "margins", _least_margin, "least margin", statistic("min"),
        ),
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_known("noise", self.noise, NOISES)

    def observer(self, subject: Subject) -> PassObserver:
        """Attention scores of every layer."""
        return _Observer(self, subject)

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The share that switches at a noise, and the smallest margin."""
        rows = [row for row in _loose(tables) if row["head"] is None and row["layer"] is not None and row["sparse"]]
        level = _nearest(rows)
        shares = {row["layer"]: _small(row["probability"]) for row in rows if row["noise"] == level}
        margins: dict[int, float] = {}
        for row in plain_rows(tables["margins"]) if "margins" in tables else ():
            if row["margin"] is not None:
                margins[row["layer"]] = min(row["margin"], margins.get(row["layer"], 1.0))
        return {
            f"rows that switch key at {percent(level)} RMS noise": shares,
            "possible from (bound)": {layer: f"±{two_digits(100 * margin)} %" for layer, margin in margins.items()},
        }

    def totals(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, float]:
        """The share of all near-one-hot rows that switches at every level of noise."""
        return {f"collapse_at_{row['noise']:g}": row["probability"] for row in _loose(tables) if row["layer"] is None}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """Whether near-one-hot rows survive noise, and which heads do not."""
        if "collapse" not in tables:
            return
        if "k" in about["normalised_heads"]:
            yield Finding(
                "Noise on key norms cannot make attention rows switch key: keys are normalised after their projection.",
                "collapse", "Near-one-hot attention is safe", "ok", weight=60,
            )  # fmt: skip
            return
        loose = [row for row in _loose(tables) if row["sparse"]]
        whole = [row for row in loose if row["layer"] is None]
        if not whole:
            yield Finding(
                f"No attention row is near-one-hot (largest weight {NEAR_ONE_HOT} or more), so none can switch key.",
                "sparsity", "No near-one-hot attention", "ok", weight=60,
            )  # fmt: skip
            return
        heads = _fragile_heads(loose, tables)
        solved = table_of(tables, "collapse_level")
        if solved is not None:
            yield _verdict(whole, heads, plain_rows(solved)[0])
        if heads:
            level = heads[0]["noise"]
            listed = "; ".join(
                f"layer {row['layer']} head {row['head']}: {share_text(row['probability'], row['sparse'])} of "
                f"{row['sparse']:,} rows (possible from ±{two_digits(100 * row['margin'])} %)"
                for row in heads[:_NAMED]
            )
            yield Finding(
                f"Heads whose near-one-hot rows switch most at {percent(level)} RMS noise, which reaches "
                f"±{percent(math.sqrt(3) * level)} if it is uniform: {listed}. Heads with fewer than {FEWEST_ROWS} such rows "
                "are left out.",
                "collapse-heads",
                title="Heads whose attention switches most",
            )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Curves by noise, and maps of heads."""
        collapse, margins = table_of(tables, "collapse"), table_of(tables, "margins")
        if collapse is None and margins is None:
            return None
        text = (
            f"An attention row is near-one-hot (sparse) if its largest weight is at least {NEAR_ONE_HOT}. Its circuit "
            "collapses if noise on the norms of q and k makes it switch to another key (loose), and be near-one-hot there too "
            "(strict). Noise multiplies norms by 1 + κ, as quantisation or interference between heads does; it is in one layer "
            "at a time, on clean inputs, and is given as the RMS of κ. A margin is the smallest bound on |κ| at which a row "
            "can switch at all: logits of 10 and 8 have a margin of 2/18 = 11 %. Published for Pre-LN: 1 % of the rows switch "
            "at 11 % RMS noise. Bands are one standard error; a logarithmic axis leaves out points at zero.",
        )
        if all(table is None or not table["sparse"].any() for table in (collapse, margins)):
            return Section(self.title, (*text, "No attention row was near-one-hot, so none could collapse."), name=self.name)
        figures: dict[str, Figure | None] = {}
        if collapse is not None:
            figures |= {"collapse": _chart(collapse, settings), "collapse-heads": _map(collapse, settings)}
        if margins is not None:
            figures["margins"] = head_map(
                margins,
                "margin",
                "Smallest noise that can make a head switch",
                "margin (bound on the relative noise)",
                "Dark heads have a row that the least noise can move; empty cells have no near-one-hot row.",
                settings,
                log=spans_decades(floats(margins["margin"])),
            )
        return self.page(text, figures)


def _small(share: float) -> str:
    return "< 0.01 %" if 0 < share < 1e-4 else f"{two_digits(100 * share)} %"


def _loose(tables: Mapping[str, pd.DataFrame]) -> list[Row]:
    """Rows of the loose definition by rising noise."""
    table = table_of(tables, "collapse")
    rows = [] if table is None else plain_rows(table.sort_values("noise", kind="stable"))
    return [row for row in rows if row["definition"] == "loose" and row["noise"] > 0]


def _nearest(rows: list[Row]) -> float:
    """The measured level that is nearest to the one at which models are compared."""
    return min((row["noise"] for row in rows), key=lambda noise: abs(float(noise) - NOISE), default=NOISE)


def _fragile_heads(loose: list[Row], tables: Mapping[str, pd.DataFrame]) -> list[Row]:
    """Heads with enough near-one-hot rows, some of which switch; those that lose most rows first."""
    margins = {(row["layer"], row["head"]): row["margin"] for row in plain_rows(tables["margins"])}
    level = _nearest(loose)
    heads = [
        {**row, "margin": margins[row["layer"], row["head"]]}
        for row in loose
        if row["head"] is not None and row["noise"] == level and row["sparse"] >= FEWEST_ROWS
    ]
    fragile = [row for row in heads if row["probability"] >= _HEAD_LOSS]
    return sorted(fragile, key=lambda row: -float(row["probability"] * row["sparse"]))


def _verdict(whole: list[Row], heads: list[Row], solved: Row) -> Finding:
    """How much noise makes the published share of the rows switch, if there are enough rows to tell."""
    share, published = _PUBLISHED
    last, count, reached = whole[-1], solved["sparse"], solved["noise"]
    rows = f"{count:,} near-one-hot attention rows"
    if count < _FEWEST:
        return Finding(
            f"Only {rows} were read: too few to tell what share of them noise makes switch to another key.",
            "collapse", "Too little near-one-hot attention to judge", "ok", float(count),
            f"A share of {percent(share)} of {count:,} rows has a standard error of "
            f"{two_digits(100 * math.sqrt(share * (1 - share) / count))} points; from {_FEWEST} rows on it is at most half of "
            "the share.", weight=60,
        )  # fmt: skip
    if reached is None:
        here = f"here fewer do at {percent(solved['highest'])}"
    else:
        error = "" if solved["stderr"] is None else f" ± {two_digits(100 * solved['stderr'])}"
        here = f"here {count:,} rows do at {two_digits(100 * reached)}{error} %"
    comparison = f"Published Pre-LN model: {percent(share)} switch at {percent(published)} RMS noise; {here}."
    if reached is None or reached >= published:
        return Finding(
            f"{share_text(last['probability'], count)} of {rows} switch to another key at {percent(last['noise'])} RMS noise "
            "on the norms of keys.",
            "collapse", "Near-one-hot attention is robust", "ok", last["probability"], comparison, weight=60,
        )  # fmt: skip
    named = ", ".join(f"layer {row['layer']} head {row['head']}" for row in heads[:_NAMED])
    return Finding(
        f"{percent(share)} of {rows} switch to another key at {two_digits(100 * reached)} % RMS noise on the norms of keys, "
        f"and {share_text(last['probability'], count)} at {percent(last['noise'])}.",
        "collapse",
        "Near-one-hot attention is fragile",
        "warning" if reached < _FRAGILE else "notice",
        reached,
        comparison,
        f"QK-Norm removes this in a new model; quantising this one, keep the keys{f' of {named}' * bool(named)} precise.",
        weight=60,
    )


def _chart(table: pd.DataFrame, settings: str) -> Chart:
    """Probability against noise: the whole model by both definitions, and every layer by the loose one."""
    rows = table[(table["noise"] > 0) & table["head"].isna()].sort_values("noise", kind="stable")
    rows = rows.rename(columns={"stderr": "probability_stderr"})
    whole, layers = rows[rows["layer"].isna()], rows[rows["layer"].notna() & (rows["definition"] == "loose")]
    lines: list[Line] = [
        banded(f"whole model, {name}", group, "noise", "probability") for name, group in whole.groupby("definition", sort=False)
    ]
    groups = {int(str(layer)): group for layer, group in layers.groupby("layer")}
    if len(groups) > _NAMED_LAYERS:
        lines.append(together("single layers, loose", groups.values(), "noise", "probability"))
    else:
        lines += [banded(f"layer {layer}, loose", group, "noise", "probability") for layer, group in groups.items()]
    return Chart(
        "Circuit collapse under noise",
        "RMS of the relative noise",
        "share of near-one-hot rows",
        tuple(lines),
        "How many near-one-hot rows switch to another key; the further left a line rises, the less noise it takes.",
        settings,
        log_x=True,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )


def _map(table: pd.DataFrame, settings: str) -> HeatMap | None:
    rows = table[(table["noise"] > 0) & (table["definition"] == "loose")]
    if rows.empty:
        return None
    level = min(rows["noise"], key=lambda noise: abs(noise - NOISE))
    return head_map(
        rows[rows["noise"] == level],
        "probability",
        f"Circuit collapse by head at {percent(level)} RMS noise",
        "share of near-one-hot rows",
        "Bright heads are the ones that switch key; empty cells have no near-one-hot row.",
        settings,
    )
