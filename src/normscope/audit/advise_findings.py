"""What advice comes to, in sentences: each says whether it is theory, simulation, or was measured in training."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from normscope.audit.advise import Advice
from normscope.audit.advise_facts import BETA, NOT_TRAINED
from normscope.audit.advise_ranks import CRITERIA, Criterion, ranks_of
from normscope.audit.advise_setting import SPECTRUM, AdviceSetting
from normscope.runs import plain_rows

_COLLAPSED = 0.01  # 1 − mean cosine
_OFTEN = 0.01
_DECADES = 2.0  # a gradient that grows or shrinks by more will need care
_THEORY = {"early": "early", "late": "late", "collapse": "gap"}  # criteria that theory has numbers for, and their columns


def advice_findings(advice: Advice) -> pd.DataFrame:
    """Sentences, each with its ``basis``: setting, simulation, theory or training."""
    said = [("setting", text) for text in _setting(advice.setting)]
    said += [("simulation", text) for text in _simulation(advice)]
    said += [("theory", text) for text in _theory(advice)]
    said += [("training", text) for text in _training(advice.trained)]
    return pd.DataFrame(said, columns=["basis", "text"])


def _setting(s: AdviceSetting) -> Iterator[str]:
    if s.tokens < s.context:
        yield (
            f"{s.tokens} sampled tokens stand for a context of {s.context:,}. Attention over more random tokens averages more "
            f"of them out: what a layer writes without an output norm would be up to {np.sqrt(s.context / s.tokens):.2g} times "
            f"smaller at the full context. Theory is given for both numbers."
        )
    if s.simulated_width < s.width:
        yield (
            f"Width {s.simulated_width} stands for {s.width:,}, with all {s.heads} heads and weights scaled so that "
            f"queries, keys and messages keep their sizes; --simulated-width chooses another."
        )
    if s.weights == SPECTRUM:
        yield (
            "Weights have the singular values of a trained model and random directions. A trained model's heads are aligned "
            "with its states and these are not, so attention can be far sharper here, and messages far larger beside the first "
            "states."
        )
    if not s.hidden:
        yield "Blocks have attention alone; --feedforward 4 adds a random feed-forward layer of that many widths."


def _simulation(advice: Advice) -> Iterator[str]:
    order = plain_rows(advice.ranking.order)
    first = order[0]
    level = f"level with {first['level_with']}" if first["level_with"] else "alone in its place"
    yield (
        f"First is {first['scheme']}, {level}: mean rank {first['rank']:.1f} of {len(order)} over the criteria (90 % interval "
        f"{first['low']:.1f} to {first['high']:.1f})."
    )
    often = sorted(order, key=lambda row: -float(row["first"]))
    shares = ", ".join(f"{row['scheme']} {100 * row['first']:.0f} %" for row in often if row["first"] >= _OFTEN)
    yield f"If nobody knows how much each criterion counts, and any weights are as likely as others, first are: {shares}."
    for criterion in CRITERIA:
        yield _best(advice, criterion)
    collapsed = [row for row in _rows(advice, "collapse") if row["mean"] is not None and row["mean"] < _COLLAPSED]
    if collapsed:
        yield f"Collapsed after {advice.setting.depth} layers (1 − mean cosine below {_COLLAPSED:g}): {_named(collapsed)}."
    wild = [row for row in _rows(advice, "gradient") if row["mean"] is not None and row["mean"] > _DECADES]
    if wild:
        yield f"Gradients grow or shrink by more than {10**_DECADES:g} times through the layers: {_named(wild)}."
    calm = [row for row in _rows(advice, "noise") if row["mean"] == 0]
    if calm:
        yield f"Noise on norms does nothing, because q, k and v are normalised after it: {_named(calm)}."
    broken = [row for row in _rows(advice, "collapse") if row["runs"] < advice.setting.runs]
    if broken:
        yield f"Left the finite numbers in some run, and count as last: {_named(broken)}."
    yield from _alike(advice)
    yield from _beaten(advice)


def _best(advice: Advice, criterion: Criterion) -> str:
    rows = [row for row in _rows(advice, criterion.name) if row["mean"] is not None]
    if not rows:
        return f"{criterion.title.capitalize()}: no scheme kept to finite numbers."
    best = min(rows, key=lambda row: (float(row["rank"]), str(row["scheme"])))
    near = [row for row in rows if row is not best and row["low"] <= best["high"] and best["low"] <= row["high"]]
    level = f"; not told apart from it: {_named(near)}" if near else ""
    worst = max(rows, key=lambda row: float(row["rank"]))
    return (
        f"Best in {criterion.title}: {best['scheme']}, {best['mean']:.3g} ({best['low']:.3g} to {best['high']:.3g}) "
        f"{criterion.unit}{level}. Last: {worst['scheme']}, {worst['mean']:.3g}."
    )


def _alike(advice: Advice) -> Iterator[str]:
    """Groups of schemes that the criteria cannot tell apart, because what differs in them was not simulated or cancels."""
    means = _means(advice)
    seen: set[str] = set()
    for name, own in means.iterrows():
        same = [str(other) for other, values in means.iterrows() if np.allclose(own, values, rtol=1e-3, atol=1e-6)]
        if len(same) > 1 and name not in seen:
            yield f"{', '.join(same)} come out the same: their attention differs in nothing that this simulation sees."
        seen |= set(same)


def _beaten(advice: Advice) -> Iterator[str]:
    """Schemes that another one beats in every criterion."""
    means = _means(advice)
    signs = np.array([-1.0 if criterion.low_is_better else 1.0 for criterion in CRITERIA])
    scores = signs * means.to_numpy()
    names = [str(name) for name in means.index]
    for i, name in enumerate(names):
        by = [
            other
            for j, other in enumerate(names)
            if j != i and bool((ranks_of(scores[[j, i]])[0] == 1).all())  # neither level nor below in any
        ]
        if by:
            yield f"{name} is beaten in every criterion by {', '.join(by)}."


def _means(advice: Advice) -> pd.DataFrame:
    """Mean by scheme and criterion, of schemes that have them all."""
    table = advice.ranking.criteria.pivot(index="scheme", columns="criterion", values="mean")
    return table[[criterion.name for criterion in CRITERIA]].dropna()


def _theory(advice: Advice) -> Iterator[str]:
    s = advice.setting
    at = advice.theory[advice.theory["tokens"] == s.context].dropna()
    if len(at) < 2:
        return
    for column, what in (("early", "first"), ("late", "last")):
        ordered = at.sort_values(column, ascending=False)
        top, bottom = ordered.iloc[0], ordered.iloc[-1]
        yield (
            f"With identity weights, orthogonal tokens and β = {BETA:g}, the {what} third of {s.depth} layers turns "
            f"{s.context:,} tokens most under {top['scheme']} ({top[column]:.3g}° a layer) and least under {bottom['scheme']} "
            f"({bottom[column]:.3g}°)."
        )
    agreed = [f"{name} {value:+.2f}" for name, value in agreement(advice).items()]
    if agreed:
        yield f"Rank correlation of theory and simulation at {s.tokens} tokens: {', '.join(agreed)} (1 is the same order)."


def agreement(advice: Advice) -> dict[str, float]:
    """Spearman's rank correlation between theory and simulation at the simulated tokens, by criterion."""
    theory = advice.theory[advice.theory["tokens"] == advice.setting.tokens].set_index("scheme")
    found = {}
    for name, column in _THEORY.items():
        both = pd.DataFrame({"theory": theory[column], "simulation": _means(advice)[name]}).dropna()
        if len(both) > 2 and both.nunique().min() > 1:
            found[name] = float(np.corrcoef(both.rank().to_numpy().T)[0, 1])
    return found


def _training(trained: pd.DataFrame) -> Iterator[str]:
    known = trained[trained["what"] != NOT_TRAINED]
    for row in plain_rows(known):
        yield f"{row['scheme']}: {row['what']}: {row['value']} ({row['source']})."
    unknown = [row for row in plain_rows(trained) if row["what"] == NOT_TRAINED]
    if unknown:
        yield f"Not trained here, so nothing is measured of what they learn: {_named(unknown)}."


def _rows(advice: Advice, criterion: str) -> list[dict[str, Any]]:
    table = advice.ranking.criteria
    return plain_rows(table[table["criterion"] == criterion])


def _named(rows: list[dict[str, Any]]) -> str:
    return ", ".join(str(row["scheme"]) for row in rows)
