"""The findings of advice: what trained models say, how far the simulation is trusted, what it shows, and theory beside it."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from normscope.experiments.criteria import BETA, BY_NAME, CRITERIA, KEYS, SIGNS, Criterion, agreement, means_by_scheme
from normscope.experiments.trained import CHOSEN_ON, FAILS, NOT_TRAINED, SAFE, SETTING, SOME, THEORY, Verdicts
from normscope.experiments.verdict_lines import verdict_lines
from normscope.results.findings import Finding, listed
from normscope.results.tables import plain_rows

if TYPE_CHECKING:
    from normscope.dynamics.advice import Ranking
    from normscope.dynamics.evidence import Correlation
    from normscope.experiments.advise import Advise

Row = dict[str, Any]

VERDICT = "language models"  # the basis of the first findings
SPECTRUM = "spectrum-of"
_COLLAPSED = 0.01  # 1 − mean cosine
_OFTEN = 0.01
_IDENTICAL = 1e-9  # 1 − mean cosine
_DECADES = 2.0  # a gradient that grows or shrinks by more needs care


def findings_of(
    advise: "Advise", ranking: "Ranking", theory: pd.DataFrame, trained: pd.DataFrame, verdicts: Verdicts
) -> Iterator[tuple[str, Finding]]:
    """Findings, each with its basis: language models, published, prediction, simulation, theory, training, or setting."""
    yield from ((VERDICT, finding) for finding in verdict_lines(verdicts, _trusted(advise)))
    yield from (("published", finding) for finding in _published(verdicts.table))
    yield from (("prediction", finding) for finding in _predictions(advise))
    yield from (("simulation", finding) for finding in _simulated(advise, ranking, verdicts))
    yield from (("theory", finding) for finding in _theory(advise, ranking, theory, verdicts))
    yield from (("training", finding) for finding in _training(trained))
    yield from (("setting", finding) for finding in _setting(advise))


def _trusted(advise: "Advise") -> str:
    """How far the order of the simulation can be trusted, in a sentence."""
    trust, names = advise.trust, [BY_NAME[key].name for key in advise.criteria]
    if trust is None:
        return "Whether the simulation's criteria predict training is not known."
    if advise.rank_by is not None:
        known = dict(zip(KEYS, trust.correlations, strict=True))
        correlations = ", ".join(f"{BY_NAME[key].name} {_with_interval(known[key])}" for key in advise.criteria)
        ranked = f"The simulation ranks by {listed(names)}, as chosen."
        return f"{ranked} Rank correlation with {_tuned(advise)}: {correlations}.{_elsewhere(advise)}"
    if not names:
        best = max(zip(CRITERIA, trust.correlations, strict=True), key=lambda pair: pair[1].low)
        return (
            f"No simulated criterion predicted {_tuned(advise)}, so schemes are sorted by verdict and loss. Closest was "
            f"{best[0].title}: rank correlation {best[1].value:+.2f}, 90 % interval {best[1].low:+.2f} to {best[1].high:+.2f}."
            f"{_elsewhere(advise)}"
        )
    depths = advise.evidence.tuned
    tested = [
        f"{_with_interval(each)} at {depth} layers"
        for depth, each in zip(depths, trust.tested, strict=True)
        if math.isfinite(each.value)
    ]
    seen, fresh = ([str(depth) for depth in depths if (depth in CHOSEN_ON) == known] for known in (True, False))
    chosen = f"; what is simulated was chosen after the models of {listed(seen)} layers were trained"
    chosen += f" and before those of {listed(fresh)}, which are the fair test" * bool(fresh)
    return (
        f"The simulation ranks by {listed(names)}; with weights fitted to the other depths, its rank correlation with the "
        f"loss is {listed(tested) or 'not known'}{chosen * bool(seen)}.{_elsewhere(advise)}"
    )


def _elsewhere(advise: "Advise") -> str:
    """That what is known of the criteria is of another simulation, if it is."""
    return " These criteria were tested in another setting than the one simulated here." * advise.untested


def _tuned(advise: "Advise") -> str:
    """The loss that criteria should predict, and of which models."""
    depths, several = advise.evidence.tuned, max(map(len, advise.evidence.rates.values())) > 1
    best = "the loss at the best of several learning rates" if several else "the loss"
    return f"{best} ({listed([str(depth) for depth in depths])} layers)"


def _with_interval(each: "Correlation") -> str:
    return f"{each.value:+.2f} ({each.low:+.2f} to {each.high:+.2f})"


def _published(verdicts: pd.DataFrame) -> Iterator[Finding]:
    """Schemes that failed in larger models of others."""
    rows = plain_rows(verdicts[verdicts["published_failures"] != ""])
    if failures := [f"{row['scheme']} at {row['published_failures']}" for row in rows]:
        yield Finding(
            f"In published LLaMA models on C4 (71M to 1B parameters), these failed to train: {'; '.join(failures)}.",
            title="Published failures in larger models", severity="notice", number=len(failures), weight=3.5,
            comparison="The models trained here are smaller and saw other text.",
            advice="At a larger width, try these with a short run before you choose them.",
        )  # fmt: skip


def _predictions(advise: "Advise") -> Iterator[Finding]:
    """How well each criterion predicted the loss of trained models."""
    if advise.trust is None or advise.tested is None:
        return
    for criterion, each in zip(CRITERIA, advise.trust.correlations, strict=True):
        used = "it is used to rank" if criterion.key in advise.criteria else "it is not used to rank"
        yield Finding(
            f"{criterion.title.capitalize()} had a rank correlation of {each.value:+.2f} (90 % interval {each.low:+.2f} to "
            f"{each.high:+.2f} over {each.schemes} schemes) with {_tuned(advise)}; {used}.",
            f"criterion-{criterion.key}", number=each.value, comparison="1 is the same order, 0 no relation.",
        )  # fmt: skip
    if advise.untested:
        weights, causal, feedforward, norm = advise.tested
        parts = (", a causal mask" * bool(causal), f", a feed-forward layer of {feedforward:g} widths" * bool(feedforward))
        kind = f"{weights} weights, each scheme's own norm, initial states of norm {norm:g}{''.join(parts)}"
        yield Finding(f"Criteria were tested with {kind}; in the setting simulated here they were not.")


def _simulated(advise: "Advise", ranking: "Ranking", verdicts: Verdicts) -> Iterator[Finding]:
    if advise.criteria and len(ranking.order) > 1:
        yield from _order(
            plain_rows(ranking.order),
            dict(zip(verdicts.table["scheme"], verdicts.table["verdict"], strict=True)),
            len(advise.criteria),
        )
    yield from _problems(advise, ranking.criteria)
    for criterion in CRITERIA:
        yield _best(ranking.criteria, criterion)
    yield from _alike(ranking.criteria)
    yield from _beaten(ranking.criteria)


def _order(order: list[Row], verdicts: dict[str, str], criteria: int) -> Iterator[Finding]:
    """The first of several schemes, and what it owes to the weights of several criteria."""
    first, last = order[0], order[-1]
    verdict = verdicts[first["scheme"]]
    fails = verdict in (SOME, FAILS)
    level = f"; not distinguishable from {first['level_with']}" if first["level_with"] else "; no other scheme is as good there"
    yield Finding(
        f"{first['scheme']} has the best mean rank over the simulated criteria, {first['rank']:.1f} of {len(order)} (90 % "
        f"interval {first['low']:.1f} to {first['high']:.1f}){level}.",
        "ranks",
        title=f"{first['scheme']} ranks first in simulation",
        severity="warning" if fails else "ok",
        number=first["rank"],
        comparison=f"Last is {last['scheme']} with {last['rank']:.1f}."
        + f" In training here, {first['scheme']} {verdict}." * fails,
        advice="Train the first few of the ranking before you decide: random weights show how training starts.",
        weight=3,
    )
    if criteria == 1:
        return
    often = sorted((row for row in order if row["first"] >= _OFTEN), key=lambda row: -float(row["first"]))
    shares = ", ".join(f"{row['scheme']} {100 * row['first']:.0f} %" for row in often)
    yield Finding(
        f"Over all possible weights of the criteria, the first scheme is: {shares}.",
        "ranks",
        title="How much the order depends on the weights",
        severity="ok" if len(often) == 1 else "notice",
        number=often[0]["first"],
        advice="" if len(often) == 1 else "Weigh the criteria that matter to you, such as late,noise=2.",
        weight=2,
    )


def _problems(advise: "Advise", criteria: pd.DataFrame) -> Iterator[Finding]:
    """Schemes that became non-finite, collapse, lose their gradient, or do not feel noise."""
    collapse, gradient, noise = (_rows(criteria, key) for key in ("collapse", "gradient", "noise"))
    if broken := [row for row in collapse if row["runs"] < advise.runs]:
        yield Finding(
            f"States became non-finite (inf/NaN) under {_schemes(broken)}: their criteria are not defined, and they rank last.",
            "layers-radius", title="Non-finite states", severity="warning", number=len(broken), weight=3,
            advice="Do not train these at this depth without smaller steps.",
        )  # fmt: skip
    named = {row["scheme"] for row in broken}
    for criterion in CRITERIA:
        if undefined := [row for row in _rows(criteria, criterion.key) if row["mean"] is None and row["scheme"] not in named]:
            yield Finding(
                f"{criterion.title.capitalize()} is not defined under {_schemes(undefined)}: tokens or gradients became 0, and "
                "so have no direction. Undefined values rank last.",
                f"criterion-{criterion.key}", title=f"{criterion.title.capitalize()} is not defined", severity="warning",
                number=len(undefined), weight=2,
            )  # fmt: skip
    if collapsed := [row for row in collapse if row["mean"] is not None and row["mean"] < _COLLAPSED]:
        grave = _counts(advise, "collapse")
        yield Finding(
            f"In simulation, all tokens point the same way after {advise.depth} layers (1 − mean cosine below {_COLLAPSED:g}) "
            f"under {_schemes(collapsed)}.",
            "layers-gap", title=f"Rank collapse at the start in {len(collapsed)} of {len(collapse)} schemes",
            severity="warning" if grave else "notice", number=len(collapsed), weight=2,
            comparison="Random tokens have 1 − mean cosine near 1."
            + " Collapse at the start did not predict the loss at the best rate." * (not grave),
            advice="Choose another scheme, unless its verdict says that it learned all the same." if grave
            else "Go by the verdict; if it was not trained here, try it with a short run first.",
        )  # fmt: skip
    if wild := [row for row in gradient if row["mean"] is not None and row["mean"] > _DECADES]:
        grave = _counts(advise, "gradient")
        yield Finding(
            f"In simulation, gradients change by more than {10**_DECADES:g}× through the layers under {_schemes(wild)}.",
            "layers-gradient", title=f"Uneven gradients at the start in {len(wild)} of {len(gradient)} schemes",
            severity="warning" if grave else "notice", number=len(wild), weight=1,
            comparison="" if grave else "With warm-up and clipping, it did not predict the loss at the best rate.",
            advice="These need warm-up, or a learning rate that depends on the layer." if grave else "Train with warm-up.",
        )  # fmt: skip
    if calm := [row for row in noise if row["mean"] == 0]:
        yield Finding(
            f"Noise on norms has no effect under {_schemes(calm)}: norms of q, k and v remove it, or attention adds nothing.",
            "criterion-noise",
            title="Immune to norm noise", severity="ok", number=0.0,
            comparison=f"Others rotate the final directions by up to {max(row['mean'] or 0 for row in noise):.3g}°.", weight=1,
        )  # fmt: skip


def _counts(advise: "Advise", key: str) -> bool:
    """Whether a criterion predicted the loss of trained models, or was not tested in the setting that is simulated."""
    if advise.trust is None or advise.untested:
        return True
    return bool(advise.trust.weights[KEYS.index(key)])


def _best(criteria: pd.DataFrame, criterion: Criterion) -> Finding:
    figure = f"criterion-{criterion.key}"
    rows = [row for row in _rows(criteria, criterion.key) if row["mean"] is not None]
    if not rows:
        return Finding(f"{criterion.title.capitalize()}: every scheme became non-finite.", figure, severity="warning")
    best = min(rows, key=lambda row: (float(row["rank"]), str(row["scheme"])))
    worst = max(rows, key=lambda row: float(row["rank"]))
    near = [row for row in rows if row is not best and row["low"] <= best["high"] and best["low"] <= row["high"]]
    level = f"; not distinguishable from it: {_named(near)}" if near else ""
    return Finding(
        f"Best in {criterion.title}: {best['scheme']}, {best['mean']:.3g} ({best['low']:.3g} to {best['high']:.3g}) "
        f"{criterion.unit}{level}.",
        figure, number=best["mean"], comparison=f"Last: {worst['scheme']}, {worst['mean']:.3g}.",
    )  # fmt: skip


def _alike(criteria: pd.DataFrame) -> Iterator[Finding]:
    """Groups of schemes that the criteria cannot distinguish, because what differs was not simulated or cancels."""
    means = means_by_scheme(criteria)
    seen: set[str] = set()
    for name, own in means.iterrows():
        same = [str(other) for other, values in means.iterrows() if np.allclose(own, values, rtol=1e-3, atol=1e-6)]
        if len(same) > 1 and name not in seen:
            yield Finding(
                f"{', '.join(same)} have the same values: their attention differs in nothing simulated here.", "ranks"
            )
        seen |= set(same)


def _beaten(criteria: pd.DataFrame) -> Iterator[Finding]:
    """Schemes that another one beats in every criterion."""
    from normscope.dynamics.advice import ranks_of

    means = means_by_scheme(criteria)
    scores = SIGNS * means.to_numpy()
    names = [str(name) for name in means.index]
    for i, name in enumerate(names):
        better = (j for j in range(len(names)) if j != i and bool((ranks_of(scores[[j, i]])[0] == 1).all()))
        if by := [names[j] for j in better]:
            yield Finding(f"{name} is beaten in every criterion by {', '.join(by)}.", "ranks")


def _theory(advise: "Advise", ranking: "Ranking", theory: pd.DataFrame, verdicts: Verdicts) -> Iterator[Finding]:
    for reason, rows in theory[theory["missing"] != ""].groupby("missing"):
        yield Finding(f"Theory's flow is not given for {_schemes(plain_rows(rows))}: {reason}.")
    defined = theory[theory["missing"] == ""]
    if broken := [row for row in plain_rows(defined) if None in (row["early"], row["late"], row["gap"])]:
        yield Finding(
            f"The flow of theory became non-finite (inf/NaN) under {_schemes(broken)} at a norm of {advise.radius or 1:g}: its "
            "numbers are not defined there.",
            title="Theory is not defined for some schemes", severity="warning",
            number=len({row["scheme"] for row in broken}), weight=1,
        )  # fmt: skip
    at = theory[theory["tokens"] == advise.context].dropna()
    if len(at) < 2:
        return
    for column, third in (("early", "first"), ("late", "last")):
        ordered = at.sort_values(column, ascending=False)
        top, bottom = ordered.iloc[0], ordered.iloc[-1]
        yield Finding(
            f"With identity weights, orthogonal tokens and β = {BETA:g}, the {third} third of {advise.depth} layers rotates "
            f"{advise.context:,} tokens most under {top['scheme']} ({top[column]:.3g}° per layer) and least under "
            f"{bottom['scheme']} ({bottom[column]:.3g}°).",
            f"criterion-{column}", number=top[column],
        )  # fmt: skip
    yield from _collapse_in_theory(advise, at, verdicts)
    if agreed := agreement(ranking.criteria, theory, advise.sampled):
        each = ", ".join(f"{BY_NAME[key].name} {value:+.2f}" for key, value in agreed.items())
        yield Finding(
            f"Rank correlation of theory and simulation at {advise.sampled} tokens: {each}.", "ranks",
            comparison="1 is the same order.",
        )  # fmt: skip


def _collapse_in_theory(advise: "Advise", theory: pd.DataFrame, verdicts: Verdicts) -> Iterator[Finding]:
    """The schemes with the least diversity in theory, if that goes with failures of the schemes that were trained."""
    evidence = advise.evidence
    failures, losses = (evidence.correlation(THEORY, "collapse", outcome) for outcome in ("failed_share", "loss"))
    if failures is None or losses is None or not failures.positive or (advise.radius or 1.0) != THEORY[-1]:
        return
    tested = evidence.predictions.groupby(list(SETTING))["criterion"].nunique().sum()
    safe = [
        row for row in plain_rows(verdicts.having(SAFE)) if row["scheme"] in set(theory[theory["gap"] < _IDENTICAL]["scheme"])
    ]
    if alike := plain_rows(theory[theory["gap"] < _IDENTICAL].sort_values("gap", kind="stable")):
        yield Finding(
            f"With identity weights and attention alone, tokens become the same within {advise.depth} layers (1 − mean cosine "
            f"below {_IDENTICAL:g}) under {_schemes(alike)}.",
            "layers-gap", title="Collapse in theory", severity="notice", number=len(alike), weight=0.5,
            comparison="Trained schemes that collapse more in theory failed more often: rank correlation "
            f"{_with_interval(failures)} over {failures.schemes} schemes, one of {tested} relations that were tested. "
            f"{'They had a higher loss, too' if losses.positive else 'It does not predict the loss'}: {_with_interval(losses)}."
            + f" Safe here all the same: {_named(safe)}." * bool(safe),
            advice="Try these at two learning rates, the lower one first.",
        )  # fmt: skip


def _training(trained: pd.DataFrame) -> Iterator[Finding]:
    rows = plain_rows(trained)
    for row in rows:
        if row["what"] != NOT_TRAINED:
            yield Finding(f"{row['scheme']}: {row['what']}: {row['value']} ({row['source']}).")
    if unknown := [row for row in rows if row["what"] == NOT_TRAINED]:
        yield Finding(f"Not trained on integer addition here: {_named(unknown)}.")


def _setting(advise: "Advise") -> Iterator[Finding]:
    if advise.sampled < advise.context:
        yield Finding(
            f"{advise.sampled} sampled tokens stand for a context of {advise.context:,}. Attention over more random tokens "
            f"averages more of them out: without an output norm, sublayer outputs would be up to "
            f"{math.sqrt(advise.context / advise.sampled):.2g} times smaller at the full context. Theory is given for both."
        )
    if advise.simulated < advise.width:
        yield Finding(
            f"Width {advise.simulated} stands for {advise.width:,}, with all {advise.heads} heads and weights scaled so that "
            "queries, keys and values keep their norms.",
            advice=f"simulated_width={advise.width} simulates the full width.",
        )
    if advise.weights == SPECTRUM:
        yield Finding(
            "Weights have the singular values of a trained model and random directions. A trained model's heads are aligned "
            "with its hidden states and these are not, so attention can be far sharper here, and values far larger relative to "
            "the initial states."
        )
    if not advise.hidden:
        yield Finding(
            "Blocks have attention only.", advice="feedforward=4 adds a random feed-forward layer of 4 widths to every block."
        )


def _rows(criteria: pd.DataFrame, key: str) -> list[Row]:
    return plain_rows(criteria[criteria["criterion"] == key])


def _named(rows: list[Row]) -> str:
    return ", ".join(str(row["scheme"]) for row in rows)


def _schemes(rows: list[Row]) -> str:
    distinct = list({row["scheme"]: row for row in rows}.values())
    return f"scheme{'s' * (len(distinct) > 1)} {_named(distinct)}"
