"""What training in this project came to under each scheme, and how well the criteria of ``advise`` had predicted it.

Four files are all there is to know, and new runs are new lines of them: ``evidence/language-models.csv`` has a row for every
trained language model, ``evidence/language-models-predictions.csv`` what ``advise`` measured for those shapes before they were
trained, ``evidence/published-perplexity.csv`` what others published of larger models, and ``trained.toml`` facts about models
that add integers.
"""

import math
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from normscope.results.findings import listed
from normscope.results.tables import plain_rows
from normscope.schemes import Scheme, find_scheme

if TYPE_CHECKING:
    from normscope.dynamics.evidence import Correlation, Trust

Numbers = npt.NDArray[np.float64]
Losses = dict[str, dict[float, float]]  # by scheme and rate; infinite where training failed

NOT_TRAINED = "not trained here"
SAFE, SLOW, UNTUNED, SOME, FAILS = "safe", "slow", "not tuned here", "fails in some runs", "fails"
RUNS, PREDICTIONS, PUBLISHED = "language-models.csv", "language-models-predictions.csv", "published-perplexity.csv"
STUCK = 1000.0  # perplexity on C4 of a model that predicts token frequencies and no more
CELL = ("scheme", "depth", "rate", "seed")  # what a run is known by
COSTS = ("first_block_cost", "later_block_cost", "late_block_cost")
SETTING = ("weights", "causal", "feedforward", "radius")  # of a simulation whose predictions were tested
THEORY = ("identity", False, 0.0, 1.0)  # the setting whose predictions are those of theory
_OUTCOME = {  # columns of the outcomes
    "depth": int, "scheme": str, "loss": float, "rate": float, "at_edge": bool, "rates": int, "seeds": int, "runs": int,
    "failed": int, "failed_share": float, "learned": float, **dict.fromkeys(COSTS, float), "late_share": float,
}  # fmt: skip
_FEWEST = 5  # schemes, for a correlation that says anything
_FEW_LACK = 0.25  # the most schemes without a rate that is compared, of all
_REPEATED = 3  # cells with several seeds, for a spread between seeds
ENOUGH = 0.9  # of what the best scheme of a depth learned beyond token frequencies; schemes below it are slow
CHOSEN_ON = (12, 24)  # layers of the models after whose training the default of what ``advise`` simulates was chosen
_FASTEST = 3  # schemes with the lowest loss where nothing is known of the spread between seeds


def evidence_file(name: str) -> pd.DataFrame:
    """A table of ``evidence``."""
    with files("normscope.experiments").joinpath("evidence", name).open(encoding="utf-8") as file:
        return pd.read_csv(file)


def perplexities() -> pd.DataFrame:
    """Published perplexities on C4, small models first: columns paper, model (its size), scheme, perplexity, failed."""
    table = evidence_file(PUBLISHED)
    sizes = table["model"].str.replace("M", "e6").str.replace("B", "e9").astype(float)
    paper, stuck = table["source"].str.partition(",")[0], table["perplexity"] > STUCK
    return table.assign(paper=paper, failed=stuck).iloc[sizes.argsort(kind="stable")].reset_index(drop=True)


def published_failures(scheme: Scheme) -> str:
    """The sizes of published models that failed to train under a scheme; empty if none is known."""
    table = perplexities()
    sizes = table[table["scheme"].isin(names_of(scheme, table["scheme"].unique()))].groupby("model", sort=False)["failed"]
    failures = sizes.agg(["any", "all"])
    each = [model if failures["all"][model] else f"{model} (one of two papers)" for model in failures.index[failures["any"]]]
    return listed(each)


@dataclass(frozen=True)
class Evidence:
    """Trained language models and what was predicted of them.

    Attributes:
        runs: a row for every run: scheme, depth, rate, seed, width, context, tokens, train_loss, loss (held out),
            bits_per_byte, unigram_loss (of token frequencies alone, on the same held-out text), diverged_step (also of a run
            that was stopped because it did not learn), seconds, tokens_per_second, and the rise of the loss without a block:
            first_block_cost, later_block_cost (mean over all blocks after the first) and late_block_cost (over the last third).
        predictions: a row for every simulated setting, depth, scheme and criterion: value, low, high, rank.
    """

    runs: pd.DataFrame
    predictions: pd.DataFrame

    @cached_property
    def outcomes(self) -> pd.DataFrame:
        """A row for every depth and scheme: what its runs came to at the best of the rates that are compared at its depth.

        ``loss`` is a mean over seeds, infinite where every rate failed with some seed, and NaN where the scheme lacks a rate
        that might have been better (``rates_compared``). ``rates``, ``runs`` and ``failed`` count what was tried at compared
        rates, and ``failed_share`` is failed over runs; ``rate`` is the best of them, NaN if all failed, and ``at_edge`` says
        whether it is the lowest or highest.
        ``learned`` is how far the loss is below that of token frequencies, relative to the best of the depth; ``late_share``
        is the cost of a block of the last third relative to that of any block after the first, which in some schemes costs
        most of the loss.
        """
        by_depth = ((self._judged[self._judged["depth"] == depth], rates) for depth, rates in self.rates.items())
        rows = [row for runs, rates in by_depth for row in _outcomes(runs, rates)]
        return pd.DataFrame(rows, columns=list(_OUTCOME)).astype(_OUTCOME)

    @cached_property
    def _judged(self) -> pd.DataFrame:
        """The runs, with an infinite loss where they failed."""
        runs = self.runs.assign(failed=failed(self.runs))
        runs["loss"] = runs["loss"].where(~runs["failed"], math.inf)
        return runs

    @cached_property
    def rates(self) -> dict[int, list[float]]:
        """The rates that are compared at each depth."""
        return {depth: rates_compared(_by_rate(self._judged[self._judged["depth"] == depth])) for depth in self.trained[0]}

    @property
    def tuned(self) -> list[int]:
        """The depths at which several rates are compared; all depths if none has several.

        The order of schemes at one rate need not be that at the best rate of each.
        """
        return [depth for depth, rates in self.rates.items() if len(rates) > 1] or list(self.rates)

    @property
    def spread(self) -> float:
        """Standard deviation of the loss between seeds, pooled over what has several; NaN if hardly anything has."""
        learned = self.runs[~failed(self.runs)]
        groups = [cells["loss"] for _, cells in learned.groupby(["depth", "scheme", "rate"]) if len(cells) > 1]
        if len(groups) < _REPEATED:
            return math.nan
        return math.sqrt(sum(((g - g.mean()) ** 2).sum() for g in groups) / sum(len(g) - 1 for g in groups))

    def settings(self) -> list[tuple[Any, ...]]:
        """Weights, causal mask, feed-forward width and initial norm of the simulations that predicted, in their order."""
        return list(dict.fromkeys(self.predictions[list(SETTING)].itertuples(index=False, name=None)))

    def ranks(
        self, setting: tuple[Any, ...], criteria: Sequence[str], depths: Sequence[int], schemes: Sequence[str]
    ) -> Numbers:
        """Ranks that a setting predicted, (depths, schemes, criteria), among these schemes; NaN where it has none."""
        from normscope.dynamics.evidence import average_ranks

        rows = self.predictions
        rows = rows[(rows[list(SETTING)] == list(setting)).all(axis=1)]
        table = rows.pivot(index=["depth", "scheme"], columns="criterion", values="rank")
        index = pd.MultiIndex.from_product([depths, schemes])
        ranks = table.reindex(index=index, columns=list(criteria)).to_numpy(float)
        return average_ranks(ranks.reshape(len(depths), len(schemes), len(criteria)).swapaxes(1, 2)).swapaxes(1, 2)

    def outcome(self, column: str, depths: Sequence[int], schemes: Sequence[str]) -> Numbers:
        """A column of ``outcomes``, (depths, schemes); NaN where nothing was trained."""
        table = self.outcomes.pivot(index="depth", columns="scheme", values=column)
        return table.reindex(index=list(depths), columns=list(schemes)).to_numpy(float)

    @property
    def trained(self) -> tuple[list[int], list[str]]:
        """The depths and schemes that have a run."""
        return sorted(int(depth) for depth in self.runs["depth"].unique()), [str(name) for name in self.runs["scheme"].unique()]

    def trust(self, setting: tuple[Any, ...], criteria: Sequence[str]) -> "Trust | None":
        """How well criteria of a simulated setting predicted the held-out loss; None where too little was trained to tell."""
        from normscope.dynamics.evidence import trust

        schemes = self.trained[1]
        if len(schemes) < _FEWEST:
            return None
        return trust(self.ranks(setting, criteria, self.tuned, schemes), self.outcome("loss", self.tuned, schemes))

    def correlation(self, setting: tuple[Any, ...], criterion: str, column: str) -> "Correlation | None":
        """The rank correlation of what a setting predicted with a column of ``outcomes``; None where that is not defined."""
        from normscope.dynamics.evidence import correlation

        depths, schemes = self.tuned, self.trained[1]
        ranks, came_to = self.ranks(setting, [criterion], depths, schemes), self.outcome(column, depths, schemes)
        measured = correlation(ranks[..., 0], came_to) if came_to.size else None
        return measured if measured is not None and measured.depths else None


def _by_rate(runs: pd.DataFrame) -> Losses:
    """Loss by scheme and rate, a mean over seeds."""
    losses: Losses = {}
    for row in plain_rows(runs.groupby(["scheme", "rate"], sort=False)["loss"].mean().reset_index()):
        losses.setdefault(row["scheme"], {})[row["rate"]] = row["loss"]
    return losses


def rates_compared(losses: Losses) -> list[float]:
    """The rates that nearly all schemes were tried at or have nothing to gain from.

    A rate that fewer have would favour them. If there is none, all rates are compared.
    """
    rates = sorted({rate for tried in losses.values() for rate in tried})
    lacking = {rate: sum(_might_gain(tried, rate) for tried in losses.values()) for rate in rates}
    return [rate for rate in rates if lacking[rate] <= _FEW_LACK * len(losses)] or rates


def _might_gain(tried: Mapping[float, float], rate: float) -> bool:
    """Whether a scheme without a run at a rate might have its lowest loss there.

    It has not if its loss rises towards the rate already, or if a lower rate failed and none learned.
    """
    if rate in tried:
        return False
    best = min(tried, key=lambda each: (tried[each], each))
    if math.isinf(tried[best]):
        return rate < best
    low, high = sorted((best, rate))
    return not any(low < each < high for each in tried)


def _outcomes(runs: pd.DataFrame, rates: Collection[float]) -> Iterator[dict[str, Any]]:
    """The outcomes of the schemes of one depth, at the rates that are compared there."""
    losses = _by_rate(runs)
    compared = {scheme: {rate: loss for rate, loss in tried.items() if rate in rates} for scheme, tried in losses.items()}
    lowest = min((loss for tried in compared.values() for loss in tried.values()), default=math.inf)
    unigram = float(runs["unigram_loss"].mean())
    for name, rows in runs.groupby("scheme", sort=False):
        tried = compared[str(name)]
        best = min(tried, key=lambda rate: (tried[rate], rate), default=math.nan)
        settled = bool(tried) and not any(_might_gain(losses[str(name)], rate) for rate in rates)
        loss = tried[best] if settled else math.nan
        best = best if math.isfinite(tried.get(best, math.inf)) else math.nan
        costs = rows[rows["rate"] == (best if settled else math.nan)][list(COSTS)].mean()
        rows = rows[rows["rate"].isin(rates)]
        yield {
            "depth": runs["depth"].iloc[0], "scheme": name, "loss": loss, "rate": best,
            "at_edge": len(rates) > 1 and best in (min(rates), max(rates)), "rates": len(tried),
            "seeds": rows["seed"].nunique(), "runs": len(rows), "failed": int(rows["failed"].sum()),
            "failed_share": rows["failed"].mean(),
            "learned": max(0.0, (unigram - loss) / max(unigram - lowest, 1e-9)) if settled else math.nan,
            **costs, "late_share": costs["late_block_cost"] / costs["later_block_cost"],
        }  # fmt: skip


def failed(runs: pd.DataFrame) -> "pd.Series[bool]":
    """Runs that diverged, or learned less than half of what the best run of their depth learned beyond token frequencies."""
    best = runs.groupby("depth")["loss"].transform("min")
    return runs["loss"].isna() | runs["diverged_step"].notna() | (runs["loss"] > (runs["unigram_loss"] + best) / 2)


@cache
def packaged() -> Evidence:
    """The evidence that comes with the package."""
    return Evidence(evidence_file(RUNS), evidence_file(PREDICTIONS))


@cache
def _facts() -> tuple[tuple[Scheme, dict[str, str]], ...]:
    content = tomllib.loads(files("normscope.experiments").joinpath("trained.toml").read_text(encoding="utf-8"))
    return tuple((find_scheme(fact.pop("scheme")), fact) for fact in content["fact"])


def same_blocks(a: Scheme, b: Scheme) -> bool:
    """Whether two schemes define the same blocks, whatever their names."""
    compared = [field.name for field in fields(Scheme) if field.compare and field.name not in ("name", "then")]
    stages = [[[getattr(stage, name) for name in compared] for stage in scheme.stages] for scheme in (a, b)]
    return stages[0] == stages[1]


def names_of(scheme: Scheme, names: Iterable[str]) -> list[str]:
    """Those of some named schemes that have the blocks of a scheme."""
    return [name for name in names if same_blocks(find_scheme(name), scheme)]


def trained_table(schemes: Sequence[Scheme]) -> pd.DataFrame:
    """What models that add integers came to under each scheme; a row that says so where there is nothing."""
    rows = []
    for scheme in schemes:
        facts = [fact for known, fact in _facts() if same_blocks(known, scheme)]
        rows += [{"scheme": scheme.name, **fact} for fact in facts or [{"what": NOT_TRAINED, "value": "", "source": ""}]]
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Verdicts:
    """What the trained language models say about schemes at a depth.

    Attributes:
        evidence: of all runs.
        depth: of the model that advice is for.
        table: a row for each scheme: verdict (``safe``: every run learned; ``slow``: likewise, but at its best rate less than
            90 % of what the best scheme learned; ``not tuned here``: likewise, or none learned, but it lacks a rate that might
            have been better; ``fails``: none learned; ``fails in some runs``; ``not trained here``), the name that it was
            trained as, fast (whether its loss is level with the lowest), published_failures (sizes of published models that
            failed to train), failed_deeper (the larger numbers of layers at which runs of it failed), and its row of
            ``Evidence.outcomes``. Where one rate alone is compared at a depth, a scheme that learned less is
            ``not tuned here``.
    """

    evidence: Evidence
    depth: int
    table: pd.DataFrame

    @classmethod
    def of(cls, evidence: Evidence, schemes: Sequence[Scheme], depth: int) -> "Verdicts":
        """Of schemes at a depth: by the models of each at that depth, else at the next deeper one, else at its deepest."""
        outcomes = evidence.outcomes
        fast = {at: lowest(outcomes[outcomes["depth"] == at], evidence.spread) for at in evidence.trained[0]}
        rows = []
        for scheme in schemes:
            name = next(iter(names_of(scheme, evidence.trained[1])), None)
            trained = {int(row["depth"]): row for row in plain_rows(outcomes[outcomes["scheme"] == name])}
            row = trained[_nearest(trained, depth)] if trained else {}
            several = bool(row) and len(evidence.rates[row["depth"]]) > 1
            row |= {"scheme": scheme.name, "trained_as": name, "verdict": _verdict(row, several)}
            row["fast"] = "depth" in row and name in fast[row["depth"]]
            row["failed_deeper"] = listed([str(d) for d, other in trained.items() if d > row["depth"] and other["failed"]])
            row["published_failures"] = published_failures(scheme)
            rows.append(row | ({"loss": None} if row.get("loss") == math.inf else {}))
        texts = ["scheme", "trained_as", "verdict", "fast", "published_failures", "failed_deeper"]
        columns = [*texts, *outcomes.columns.drop("scheme")]
        kinds = {name: {int: "Int64", bool: "boolean"}.get(kind, kind) for name, kind in _OUTCOME.items() if name != "scheme"}
        return cls(evidence, depth, pd.DataFrame(rows).reindex(columns=columns).astype(kinds))

    def runs(self, schemes: Sequence[Scheme]) -> pd.DataFrame:
        """All runs of the schemes, at all depths, under their names here."""
        runs, names = self.evidence.runs, self.evidence.trained[1]
        tables = [runs[runs["scheme"].isin(names_of(scheme, names))].assign(scheme=scheme.name) for scheme in schemes]
        return pd.concat(tables, ignore_index=True)

    @property
    def order(self) -> list[str]:
        """The schemes by verdict, and by loss among those with the same one."""
        places = {verdict: place for place, verdict in enumerate((SAFE, SLOW, UNTUNED, SOME, NOT_TRAINED, FAILS))}
        ordered = self.table.assign(place=self.table["verdict"].map(places)).sort_values(["place", "loss"], kind="stable")
        return list(ordered["scheme"])

    @property
    def trained_depth(self) -> int:
        """The depth of the models that stand for this one: the same, else the next deeper one, else the deepest."""
        return _nearest(self.evidence.trained[0], self.depth)

    def having(self, verdict: str) -> pd.DataFrame:
        """The rows of the schemes with a verdict, the lowest loss first."""
        rows: pd.DataFrame = self.table[self.table["verdict"] == verdict].sort_values("loss", kind="stable")
        return rows

    def named(self, rows: pd.DataFrame) -> str:
        """The schemes of some rows, with the number of layers of their models where that is not ``trained_depth``."""
        others = rows["depth"].notna() & (rows["depth"] != self.trained_depth)
        depths = [f" ({depth} layers)" if other else "" for depth, other in zip(rows["depth"], others, strict=True)]
        return ", ".join(f"{name}{depth}" for name, depth in zip(rows["scheme"], depths, strict=True))

    def learned(self) -> pd.DataFrame:
        """The outcomes of all schemes that learned at ``trained_depth``, where they can be compared, the lowest loss first."""
        outcomes = self.evidence.outcomes
        learned: pd.DataFrame = outcomes[(outcomes["depth"] == self.trained_depth) & np.isfinite(outcomes["loss"])]
        return learned.sort_values("loss", kind="stable")


def _nearest(depths: Collection[int], depth: int) -> int:
    """The depth itself if it is among them, else the next deeper one, else the deepest."""
    return min((trained for trained in depths if trained >= depth), default=max(depths))


def lowest(at: pd.DataFrame, spread: float) -> list[str]:
    """Schemes that are not slow and whose loss is near the lowest: within two standard errors of a difference between seeds."""
    learned = at[np.isfinite(at["loss"]) & (at["learned"] >= ENOUGH)].sort_values("loss")
    if math.isnan(spread):
        return list(learned["scheme"].head(_FASTEST))
    return list(learned[learned["loss"] <= learned["loss"].min() + 2 * math.sqrt(2) * spread]["scheme"])


def _verdict(row: dict[str, Any], several: bool) -> str:
    """Of a row of the outcomes, at a depth at which several rates are compared or only one."""
    if not row:
        return NOT_TRAINED
    if row["failed"]:
        return SOME if row["failed"] < row["runs"] else UNTUNED if row["learned"] is None else FAILS
    if row["learned"] is not None and row["learned"] >= ENOUGH:
        return SAFE
    return SLOW if several and row["learned"] is not None else UNTUNED
