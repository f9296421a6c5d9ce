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

from normscope.results.findings import Finding, listed
from normscope.results.sections import PageTable
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
_SETTING = ("weights", "causal", "feedforward", "radius")  # of a simulation whose predictions were tested
THEORY = ("identity", False, 0.0, 1.0)  # the setting whose predictions are those of theory
_OUTCOME = {  # columns of the outcomes
    "depth": int, "scheme": str, "loss": float, "rate": float, "at_edge": bool, "rates": int, "seeds": int, "runs": int,
    "failed": int, "learned": float, **dict.fromkeys(COSTS, float), "late_share": float,
}  # fmt: skip
_FEWEST = 5  # schemes, for a correlation that says anything
_FEW_LACK = 0.25  # the most schemes without a rate that is compared, of all
_REPEATED = 3  # cells with several seeds, for a spread between seeds
_ENOUGH = 0.9  # of what the best scheme of a depth learned beyond token frequencies; schemes below it are slow
CHOSEN_ON = (12, 24)  # layers of the models after whose training the default of what ``advise`` simulates was chosen
_LISTED = 5  # schemes without a trained model, which are counted if they are more
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
            bits_per_byte, unigram_loss (of token frequencies alone, on the same held-out text), diverged_step, seconds,
            tokens_per_second, and the rise of the loss without a block: first_block_cost, later_block_cost (mean over all
            blocks after the first) and late_block_cost (over the last third).
        predictions: a row for every simulated setting, depth, scheme and criterion: value, low, high, rank.
    """

    runs: pd.DataFrame
    predictions: pd.DataFrame

    @cached_property
    def outcomes(self) -> pd.DataFrame:
        """A row for every depth and scheme: what its runs came to at the best of the rates that are compared at its depth.

        ``loss`` is a mean over seeds, infinite where every rate failed with some seed, and NaN where the scheme lacks a rate
        that might have been better (``rates_compared``). ``rates``, ``runs`` and ``failed`` count what was tried at compared
        rates; ``rate`` is the best of them, NaN if all failed, and ``at_edge`` says whether it is the lowest or highest.
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
        return list(dict.fromkeys(self.predictions[list(_SETTING)].itertuples(index=False, name=None)))

    def ranks(
        self, setting: tuple[Any, ...], criteria: Sequence[str], depths: Sequence[int], schemes: Sequence[str]
    ) -> Numbers:
        """Ranks that a setting predicted, (depths, schemes, criteria), among these schemes; NaN where it has none."""
        from normscope.dynamics.evidence import average_ranks

        rows = self.predictions
        rows = rows[(rows[list(_SETTING)] == list(setting)).all(axis=1)]
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

    def failures(self, setting: tuple[Any, ...], criterion: str) -> "Correlation | None":
        """The rank correlation of a criterion with the number of failed runs; None where that is the same for all schemes."""
        from normscope.dynamics.evidence import correlation

        depths, schemes = self.tuned, self.trained[1]
        ranks, counted = self.ranks(setting, [criterion], depths, schemes), self.outcome("failed", depths, schemes)
        found = correlation(ranks[..., 0], counted) if counted.size else None
        return found if found is not None and found.depths else None


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
            "learned": max(0.0, (unigram - loss) / (unigram - lowest)) if settled else math.nan,
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
            failed to train), and its row of ``Evidence.outcomes``. Where one rate alone is compared at a depth, a scheme that
            learned less is ``not tuned here``.
    """

    evidence: Evidence
    depth: int
    table: pd.DataFrame

    @classmethod
    def of(cls, evidence: Evidence, schemes: Sequence[Scheme], depth: int) -> "Verdicts":
        """Of schemes at a depth: by the models of each at that depth, else at the next deeper one, else at its deepest."""
        outcomes = evidence.outcomes
        fast = {at: _fast(outcomes[outcomes["depth"] == at], evidence.spread) for at in evidence.trained[0]}
        rows = []
        for scheme in schemes:
            name = next(iter(names_of(scheme, evidence.trained[1])), None)
            trained = {int(row["depth"]): row for row in plain_rows(outcomes[outcomes["scheme"] == name])}
            row = trained[_nearest(trained, depth)] if trained else {}
            several = bool(row) and len(evidence.rates[row["depth"]]) > 1
            row |= {"scheme": scheme.name, "trained_as": name, "verdict": _verdict(row, several)}
            row["fast"] = "depth" in row and name in fast[row["depth"]]
            row["published_failures"] = published_failures(scheme)
            rows.append(row | ({"loss": None} if row.get("loss") == math.inf else {}))
        columns = ["scheme", "trained_as", "verdict", "fast", "published_failures", *outcomes.columns.drop("scheme")]
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

    def named(self, verdict: str) -> str:
        """The schemes with a verdict, those with the lowest loss first, by the depth of the models that say so."""
        schemes: dict[int, list[str]] = {}
        for row in plain_rows(self.table[self.table["verdict"] == verdict].sort_values("loss", kind="stable")):
            schemes.setdefault(int(row["depth"]), []).append(row["scheme"])
        nearest_first = sorted(schemes, key=lambda depth: abs(depth - self.depth))
        return "; ".join(f"{', '.join(schemes[depth])} ({depth} layers)" for depth in nearest_first)

    def findings(self, trusted: str) -> Iterator[Finding]:
        """Four lines: which schemes are safe, have the lowest loss, fail and how sure that is, and what may change the order.

        ``trusted`` ends the third.
        """
        if self.evidence.runs.empty:
            yield Finding(
                "No language model was trained here, so nothing says which schemes are safe or fail.", title="Untested"
            )
            return
        depth = _nearest(self.evidence.trained[0], self.depth)
        yield self._safe_finding(depth)
        yield self._fast_finding(depth)
        yield self._fails_finding(depth, trusted)
        yield from self._firmness(depth)

    def _safe_finding(self, depth: int) -> Finding:
        """The schemes that learned at every compared rate, and those of them that failed in larger models of others."""
        beyond = f" {self.depth} layers are deeper than any model trained here."
        between = f" No model was trained here with {_count(self.depth, 'layer')}; those with {depth} stand for it."
        other = "" if self.depth == depth else beyond if self.depth > depth else between
        safe = self.table[self.table["verdict"] == SAFE]
        cells = safe[["trained_as", "depth"]].astype({"depth": int}).set_axis(["scheme", "depth"], axis=1)
        tried = self.evidence.runs.merge(cells).groupby("rate")["depth"].unique()
        rates = [f"{rate:g}" for rate, depths in tried.items() if any(rate in self.evidence.rates[at] for at in depths)]
        learned = f" None of their runs failed, at learning rate{'s' * (len(rates) > 1)} {listed(rates)}"
        larger = [f"{row['scheme']} at {row['published_failures']}" for row in plain_rows(safe) if row["published_failures"]]
        learned += f"; in larger published models these failed: {', '.join(larger)}" * bool(larger)
        return Finding(
            f"Safe: {self.named(SAFE) or 'none of these schemes'}.{f'{learned}.' * bool(len(safe))}{other}",
            title="Safe at this depth", severity="ok", weight=6,
        )  # fmt: skip

    def _fails_finding(self, depth: int, trusted: str) -> Finding:
        """The schemes that fail, and how much evidence there is for all of this."""
        runs = self.evidence.runs
        at = runs[runs["depth"] == depth]
        some = f"; in some runs: {self.named(SOME)}" * bool(self.named(SOME))
        fails = self.table[self.table["verdict"] == FAILS]
        tried = runs.groupby(["depth", "scheme"])["rate"].nunique()
        once = [row["scheme"] for row in plain_rows(fails) if tried[row["depth"], row["trained_as"]] == 1]
        lower = f" {listed(once)}: one learning rate was tried, and a lower one may work." * bool(once)
        shapes = "; ".join(f"width {width}, {tokens / 1e6:.0f} M tokens" for width, tokens in _shapes(runs))
        each = at.groupby("scheme").size()
        return Finding(
            f"Fail: {self.named(FAILS) or 'no scheme'}{some}.{lower} How sure: {len(runs)} language models ({shapes}, "
            f"one recipe for all schemes, {_count(runs['seed'].nunique(), 'seed')}), {len(at)} of them with {depth} layers, "
            f"{_span(each.min(), each.max())} for each scheme; of your shape, only the depth counts."
            f"{self._untrained} {trusted}",
            title="Fails at this depth", severity="notice" if self.named(FAILS) else "ok", weight=4,
        )  # fmt: skip

    @property
    def _untrained(self) -> str:
        """Which schemes have no trained model, or how many if they are many."""
        names = list(self.table[self.table["verdict"] == NOT_TRAINED]["scheme"])
        if not names:
            return ""
        others = [name for name in names if name in self.evidence.trained[1]]
        apart = f"; models trained as {_listed_or_counted(others, 'of them')} have other blocks or norms" * bool(others)
        return f" Not trained here: {_listed_or_counted(names, 'of these schemes')}{apart}."

    def _fast_finding(self, depth: int) -> Finding:
        """The lowest losses of all schemes that were trained at a depth, and what may need another learning rate."""
        at, rates = self._learned(depth), self.evidence.rates[depth]
        rows = plain_rows(at[at["scheme"].isin(_fast(at, self.evidence.spread))].sort_values("loss"))
        own = self.table[self.table["depth"] == depth]
        here = {row["trained_as"]: row["scheme"] for row in plain_rows(own)}
        fast = ", ".join(f"{here.get(row['scheme'], row['scheme'] + '*')} {row['loss']:.3f}" for row in rows)
        learned = plain_rows(own[np.isfinite(own["loss"])].sort_values("loss"))
        if learned and not any(row["scheme"] in here for row in rows):
            fast += f"; of these schemes: {learned[0]['scheme']} {learned[0]['loss']:.3f}"
        absent = [row["scheme"] for row in rows if row["scheme"] not in here]
        same_names = " with these blocks" * bool(set(absent) & set(self.table["scheme"]))
        others = f"; * not in this list{same_names}" * bool(absent)
        used = listed(sorted({f"{row['rate']:g}" for row in rows}))
        best = f"{'one learning rate for all' if len(rates) == 1 else 'each at its best learning rate'}{used and f', {used}'}"
        span = f"All {_count(len(at), 'scheme')} compared that learned: {at['loss'].min():.3f} to {at['loss'].max():.3f}."
        slow = f"Slow: {self.named(SLOW)}; they learned less than {100 * _ENOUGH:.0f} % of what the best did, at these rates."
        untuned = f"Not tuned: {self.named(UNTUNED)}; they may do better at a learning rate that was not tried."
        sentences = (
            f"Lowest loss at {depth} layers: {fast or 'no scheme learned'} (held-out, in nats per token; {best}{others}).",
            span * bool(len(at)), slow * bool(self.named(SLOW)), untuned * bool(self.named(UNTUNED)),
        )  # fmt: skip
        return Finding(
            " ".join(filter(None, sentences)), title="Lowest loss at this depth", severity="ok", weight=5,
            number=None if not rows else rows[0]["loss"],
        )  # fmt: skip

    def _firmness(self, depth: int) -> Iterator[Finding]:
        """What may change the order of the losses at a depth."""
        at, rates, spread = self._learned(depth), self.evidence.rates[depth], self.evidence.spread
        if at.empty:
            return
        runs = self.evidence.runs[self.evidence.runs["depth"] == depth]
        highest = at["scheme"].map(runs.groupby("scheme")["rate"].max())
        edge = int((at["rate"] == highest).sum()) if len(rates) > 1 else 0
        tuned = [str(other) for other, known in self.evidence.rates.items() if len(known) > 1] if len(rates) == 1 else []
        sentences = (
            f"One learning rate is compared; at {listed(tuned)} layers, the best of several changed the order." * bool(tuned),
            f"For {edge} of {_count(len(at), 'scheme')} the highest rate tried was the best; higher ones may change the order."
            * bool(edge),
            "No second seeds: small differences may be chance." if math.isnan(spread) else f"Seeds differ by {spread:.3f}.",
            f"The median loss is {at['loss'].median():.3f}; token frequencies alone have {runs['unigram_loss'].mean():.2f}.",
        )  # fmt: skip
        text = f"How firm this order is: {' '.join(filter(None, sentences))}"
        yield Finding(text, title="What may change the order", severity="ok")

    def _learned(self, depth: int) -> pd.DataFrame:
        """The outcomes of the schemes that learned at a depth, where they can be compared."""
        outcomes = self.evidence.outcomes
        learned: pd.DataFrame = outcomes[(outcomes["depth"] == depth) & np.isfinite(outcomes["loss"])]
        return learned


def _nearest(depths: Collection[int], depth: int) -> int:
    """The depth itself if it is among them, else the next deeper one, else the deepest."""
    return min((trained for trained in depths if trained >= depth), default=max(depths))


def _fast(at: pd.DataFrame, spread: float) -> list[str]:
    """Schemes that are not slow and whose loss is near the lowest: within two standard errors of a difference between seeds."""
    learned = at[np.isfinite(at["loss"]) & (at["learned"] >= _ENOUGH)].sort_values("loss")
    if math.isnan(spread):
        return list(learned["scheme"].head(_FASTEST))
    return list(learned[learned["loss"] <= learned["loss"].min() + 2 * math.sqrt(2) * spread]["scheme"])


def _verdict(row: dict[str, Any], several: bool) -> str:
    """Of a row of the outcomes, at a depth at which several rates are compared or only one."""
    if not row:
        return NOT_TRAINED
    if row["failed"]:
        return SOME if row["failed"] < row["runs"] else UNTUNED if row["learned"] is None else FAILS
    if row["learned"] is not None and row["learned"] >= _ENOUGH:
        return SAFE
    return SLOW if several and row["learned"] is not None else UNTUNED


def _listed_or_counted(names: Sequence[str], what: str) -> str:
    return listed(names) if len(names) <= _LISTED else f"{len(names)} {what}"


def _span(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} or {most}" if most == least + 1 else f"{least} to {most}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


def _shapes(runs: pd.DataFrame) -> list[tuple[Any, float]]:
    """Widths, and the tokens of the runs that did not diverge."""
    return [(width, float(tokens)) for width, tokens in runs.groupby("width")["tokens"].max().items()]


def evidence_tables(verdicts: pd.DataFrame, predicted: pd.DataFrame, runs: pd.DataFrame) -> tuple[PageTable, ...]:
    """What trained models came to at this depth, how well criteria had predicted it, and every run."""
    at = tuple(
        (
            row["scheme"], row["verdict"], shown(row["depth"], ".0f"), shown(row["loss"], ".3f"),
            "yes" if row["fast"] else "", _rate(row),
            "–" if row["runs"] is None else f"{row['failed']:.0f} of {row['runs']:.0f}",
            shown(row["first_block_cost"], ".2f"), shown(row["late_share"], ".2f"),
        )
        for row in plain_rows(verdicts)
    )  # fmt: skip
    judged = tuple(
        (row["criterion"], _interval(row), shown(row["weight"], ".2f"), "yes" if row["ranks"] else "no")
        for row in plain_rows(predicted)
    )
    columns = ("scheme", "depth", "rate", "seed", "tokens", "loss", "bits_per_byte", "diverged_step", "late_block_cost")
    every = tuple(tuple(shown(row[name]) for name in columns) for row in plain_rows(runs))
    return (
        PageTable(
            "Trained language models at this depth, or the nearest",
            (
                "scheme", "verdict", "layers", "held-out loss", "lowest loss", "best learning rate", "failed runs",
                "cost of the first block", "relative cost of late blocks",
            ),
            at,
        ),
        PageTable("How well criteria predicted their loss", ("criterion", "rank correlation", "weight", "ranks"), judged),
        PageTable("Every run of these schemes", columns, every),
    )  # fmt: skip


def _rate(row: dict[str, Any]) -> str:
    return "–" if row["rate"] is None else f"{row['rate']:g}{' (at the edge)' * bool(row['at_edge'])}"


def _interval(row: dict[str, Any]) -> str:
    return "–" if row["correlation"] is None else f"{row['correlation']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"


def shown(value: Any, form: str = ".4g") -> str:
    """A value of a plain row for a table; None is what is not known, or no number."""
    return "–" if value is None else format(value, form) if isinstance(value, float) else str(value)
