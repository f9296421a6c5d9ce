"""What advice begins with: which schemes are safe, which learned most, which fail, how sure that is, and what may change it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from normscope.experiments.trained import ENOUGH, FAILS, NOT_TRAINED, SAFE, SLOW, SOME, UNTUNED, Verdicts, lowest
from normscope.results.findings import Finding, listed
from normscope.results.tables import plain_rows

_LISTED = 5  # schemes without a trained model, which are counted if they are more


def verdict_lines(verdicts: Verdicts, trusted: str) -> Iterator[Finding]:
    """Four findings: safe schemes, the lowest losses, failures with how sure all of this is, and what may change it.

    ``trusted`` ends the last: how far the simulation can be trusted.
    """
    if verdicts.evidence.runs.empty:
        yield Finding("No language model was trained here, so nothing says which schemes are safe or fail.", title="Untested")
        return
    best = verdicts.learned()["loss"].min()
    yield Finding(_safe(verdicts), title="Safe at this depth", weight=6)
    yield Finding(
        _lowest(verdicts), title="Lowest loss at this depth", weight=5, number=None if math.isnan(best) else float(best)
    )
    yield Finding(_fail(verdicts), title="Fails at this depth", weight=4)
    yield Finding(_what_may_change(verdicts, trusted), title="What may change the order", severity="ok")


def _safe(verdicts: Verdicts) -> str:
    """The schemes of which no run failed; those that failed elsewhere are named apart."""
    depth, safe = verdicts.trained_depth, verdicts.having(SAFE)
    stands_for = (
        "the deepest trained here" if depth < verdicts.depth else f"no model of {verdicts.depth} layers was trained here"
    )
    about = "; ".join([*[stands_for] * (depth != verdicts.depth), *[_rates(verdicts, safe)] * (not safe.empty)])
    where = f"Safe at {_count(depth, 'layer')}{f' ({about})' * bool(about)}"
    if safe.empty:
        return f"{where}: none of these schemes."
    doubtful = (safe["published_failures"] != "") | (safe["failed_deeper"] != "")
    sound, doubts = safe[~doubtful], [f"{row['scheme']}, which failed {_where(row)}" for row in plain_rows(safe[doubtful])]
    order = ", lowest loss first" * (len(sound) > 1)
    apart = f" Safe, with reservations: {'; '.join(doubts)}." * bool(doubts)
    return f"{where}{order}: {verdicts.named(sound) or 'none without reservations'}.{apart}"


def _rates(verdicts: Verdicts, rows: pd.DataFrame) -> str:
    """The compared learning rates that some schemes were trained at."""
    cells = rows[["trained_as", "depth"]].astype({"depth": int}).set_axis(["scheme", "depth"], axis=1)
    tried = verdicts.evidence.runs.merge(cells).groupby("rate")["depth"].unique()
    compared = verdicts.evidence.rates
    rates = [f"{rate:g}" for rate, depths in tried.items() if any(rate in compared[depth] for depth in depths)]
    return f"learning rate{'s' * (len(rates) > 1)} {listed(rates)}"


def _where(row: dict[str, Any]) -> str:
    """Where a scheme failed that is safe at this depth."""
    published = f"in published models of {row['published_failures']}" if row["published_failures"] else ""
    deeper = f"here with {row['failed_deeper']} layers" if row["failed_deeper"] else ""
    return ", and ".join(filter(None, (published, deeper)))


def _lowest(verdicts: Verdicts) -> str:
    """The lowest losses of all schemes that were trained at this depth, and which learned little or may be tuned badly."""
    depth, learned, named = verdicts.trained_depth, verdicts.learned(), set(verdicts.table["scheme"])
    own = verdicts.table[verdicts.table["depth"] == depth].sort_values("loss", kind="stable")
    here = {str(name): listed(list(rows["scheme"])) for name, rows in own.groupby("trained_as")}
    rows = plain_rows(learned[learned["scheme"].isin(lowest(learned, verdicts.evidence.spread))])
    best = ", ".join(_loss(here.get(row["scheme"], f"{row['scheme']}*"), row) for row in rows)
    absent, ours = {row["scheme"] for row in rows} - set(here), plain_rows(own[own["loss"].notna()].head(1))
    slow, untuned = (verdicts.named(verdicts.having(verdict)) for verdict in (SLOW, UNTUNED))
    span, unigram = learned["loss"], verdicts.evidence.runs["unigram_loss"].mean()
    sentences = (
        f"Lowest loss at {_count(depth, 'layer')} (held-out, in nats per token, with the best learning rate): "
        f"{best or 'no scheme learned'}.",
        *(f"Of these schemes: {_loss(row['scheme'], row)}." for row in ours if len(absent) == len(rows)),
        f"* is not in this list{' with these blocks' * bool(absent & named)}." * bool(absent),
        f"The {len(learned)} schemes that learned: {span.min():.3f} to {span.max():.3f}, median {span.median():.3f}."
        * (len(learned) > 1),
        f"Token frequencies alone: {unigram:.2f}." * (not learned.empty),
        f"Slow: {slow}, with less than {100 * ENOUGH:.0f} % of what the best learned." * bool(slow),
        f"Not tuned: {untuned}, perhaps better at a learning rate that was not tried." * bool(untuned),
    )  # fmt: skip
    return " ".join(filter(None, sentences))


def _loss(name: str, row: dict[str, Any]) -> str:
    """A scheme with its loss and the learning rate that it belongs to."""
    return f"{name} {row['loss']:.3f} ({row['rate']:g})"


def _fail(verdicts: Verdicts) -> str:
    """The schemes that fail, and how much evidence there is for all of this."""
    runs, depth = verdicts.evidence.runs, verdicts.trained_depth
    fails, some = verdicts.having(FAILS), verdicts.having(SOME)
    tried = runs.groupby(["depth", "scheme"])["rate"].nunique()
    once = [row["scheme"] for row in plain_rows(fails) if tried[row["depth"], row["trained_as"]] == 1]
    shapes = "; ".join(f"width {width}, {tokens / 1e6:.0f} M tokens" for width, tokens in _shapes(runs))
    at = runs[runs["depth"] == depth]
    each = at.groupby("scheme").size()
    sentences = (
        f"Fail: {verdicts.named(fails) or 'no scheme'}{f'; in some runs: {verdicts.named(some)}' * bool(len(some))}.",
        f"Of {listed(once)} one learning rate was tried; a lower one may work." * bool(once),
        f"How sure: {_count(len(at), 'language model')} with {_count(depth, 'layer')}, {_span(each.min(), each.max())} for "
        f"each scheme ({shapes}, one recipe for all, {_count(runs['seed'].nunique(), 'seed')}); {len(runs)} in all. Your "
        "width, heads and context are not used here.",
    )  # fmt: skip
    return " ".join(filter(None, sentences))


def _what_may_change(verdicts: Verdicts, trusted: str) -> str:
    """What the order of the losses depends on, and what is not known."""
    evidence, depth, at = verdicts.evidence, verdicts.trained_depth, verdicts.learned()
    rates, tuned = evidence.rates[depth], [str(other) for other, known in evidence.rates.items() if len(known) > 1]
    tried = evidence.runs[evidence.runs["depth"] == depth].groupby("scheme")["rate"].agg(["min", "max"])
    of = at.merge(tried, left_on="scheme", right_index=True)
    several = of[of["min"] < of["max"]]
    ends = {"highest": several["max"], "lowest": several["min"]}
    edges = [f"the {name} tried for {number}" for name, end in ends.items() if (number := int((several["rate"] == end).sum()))]
    sentences = (
        f"Of {_count(len(at), 'scheme')}, the best learning rate is {' and '.join(edges)}; others may change the order."
        if edges and len(rates) > 1 else "",
        f"One learning rate is compared{f'; at {listed(tuned)} layers, the best of several changed the order' * bool(tuned)}."
        * (len(rates) == 1),
        "No second seeds: small differences may be chance." if math.isnan(evidence.spread)
        else f"Seeds differ by {evidence.spread:.3f}.",
        _untrained(verdicts), trusted,
    )  # fmt: skip
    return f"What may change this order: {' '.join(filter(None, sentences))}"


def _untrained(verdicts: Verdicts) -> str:
    """Which schemes have no trained model, or how many if they are many."""
    names = list(verdicts.having(NOT_TRAINED)["scheme"])
    if not names:
        return ""
    others = [name for name in names if name in verdicts.evidence.trained[1]]
    apart = f"; models trained as {_listed_or_counted(others, 'of them')} have other blocks or norms" * bool(others)
    return f"Not trained here: {_listed_or_counted(names, 'of these schemes')}{apart}."


def _listed_or_counted(names: Sequence[str], what: str) -> str:
    return listed(names) if len(names) <= _LISTED else f"{len(names)} {what}"


def _span(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} or {most}" if most == least + 1 else f"{least} to {most}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


def _shapes(runs: pd.DataFrame) -> list[tuple[Any, float]]:
    """Widths, and the tokens of the runs that did not diverge."""
    return [(width, float(tokens)) for width, tokens in runs.groupby("width")["tokens"].max().items()]
