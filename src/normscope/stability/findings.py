"""What the tables of stability say, in sentences that a person can act on."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pandas as pd

from normscope.models import Model
from normscope.runs import plain_rows

_AT = 0.1  # the noise that sentences speak of, where it was measured
_NAMED = 5
_CLEAR = 2.0  # standard errors
_PUBLISHED_SHARE = 0.01  # of the sparse distributions, whose noise the publication gives
_WIDE = 0.2  # the published spread of Pre-Norm, ± 20 %
Tables = Mapping[str, pd.DataFrame]


def findings(view: Model, tables: Tables) -> list[str]:
    """Sentences on the scheme, spread, noise, collapse and sparsity, as far as they were measured."""
    said = [view.summary]
    for name, speak in (("spread", _spread), ("noise", _noise), ("collapse", _collapse), ("sparsity", _sparsity)):
        if name in tables:
            said += speak(view, tables)
    return said


def _spread(view: Model, tables: Tables) -> Iterator[str]:
    layers = [row for row in _rows(tables["spread"]) if row["head"] is None]
    widest = max(layers, key=lambda row: float(row["high90"] - row["low90"]))
    within = sum(row["high90"] <= 1 + _WIDE and row["low90"] >= 1 - _WIDE for row in layers)
    yield (
        f"Norm spread: in {within} of {len(layers)} layers 90 % of the attention goes to embeddings within ±20 % of the median "
        f"length; it is widest in layer {widest['layer']}, from {_percent(widest['low90'] - 1, '+')} to "
        f"{_percent(widest['high90'] - 1, '+')}."
    )


def _noise(view: Model, tables: Tables) -> Iterator[str]:
    if set("qkv") <= set(view.normalised_heads):
        yield "Norm noise does nothing to this model: q, k and v are normalised after their projections, which removes it."
        return
    rows = [row for row in _rows(tables["noise"]) if row["noise"] > 0]
    for row in rows:
        if row["layer"] is None and row["where"] == "all" and row["perturbed"] == "q,k,m":
            yield (
                f"Norm noise of {_percent(row['noise'])} in all layers: "
                f"accuracy {100 * row['accuracy_change']:+.2f} ± {100 * row['accuracy_change_stderr']:.2f} points, "
                f"loss {row['loss_change']:+.3g} ± {row['loss_change_stderr']:.2g}."
            )
    alone = [row for row in rows if row["layer"] is not None]
    level = min((row["noise"] for row in alone), key=lambda noise: abs(float(noise) - _AT), default=_AT)
    alone = [row for row in alone if row["noise"] == level]
    clear = [row for row in alone if row["loss_change"] > _CLEAR * row["loss_change_stderr"]]
    clear = sorted(clear, key=lambda row: -float(row["loss_change"]))[:_NAMED]
    if clear:
        listed = ", ".join(f"{row['layer']} ({row['loss_change']:+.2g})" for row in clear)
        yield (
            f"Disturbed one at a time by {_percent(level)}, the layers that cost most loss are {listed}: "
            f"give these full precision first, and look here when a change to the norms hurts."
        )
    elif alone:
        yield "Disturbed one at a time, no layer costs loss beyond the error of the measurement."


def _collapse(view: Model, tables: Tables) -> Iterator[str]:
    if "k" in view.normalised_heads:
        yield "Circuits cannot collapse by the norms of keys: keys are normalised after their projection."
        return
    loose = [row for row in _rows(tables["collapse"]) if row["definition"] == "loose" and row["sparse"]]
    whole = [row for row in loose if row["layer"] is None]
    if not whole:
        yield "No attention distribution is sparse (largest weight 0.95 or more): there is no circuit that could collapse."
        return
    reached = _level_at([row["noise"] for row in whole], [row["probability"] for row in whole], _PUBLISHED_SHARE)
    if reached is None:
        yield f"Fewer than 1 % of the sparse distributions collapse up to a noise of {_percent(whole[-1]['noise'])}."
    else:
        yield (
            f"Of the sparse distributions 1 % collapse at a noise of about {_percent(reached)} "
            f"(the publication: 11 % for its Pre-Norm model)."
        )
    level = min((row["noise"] for row in whole), key=lambda noise: abs(float(noise) - _AT))
    margins = {(row["layer"], row["head"]): row["margin"] for row in _rows(tables["margins"])}
    heads = [row for row in loose if row["head"] is not None and row["noise"] == level and row["probability"] > 0]
    worst = sorted(heads, key=lambda row: -float(row["probability"] * row["sparse"]))[:_NAMED]
    if worst:
        listed = ", ".join(
            f"{_head(row)} ({_percent(row['probability'])} of {row['sparse']:,}, "
            f"possible from ±{_percent(margins[row['layer'], row['head']])})"
            for row in worst
        )
        yield (
            f"Fragile heads, those that lose most sparse distributions at {_percent(level)}: {listed}. "
            f"Normalising their keys (QK-Norm) would take the noise away; when quantising, keep their keys precise."
        )


def _sparsity(view: Model, tables: Tables) -> Iterator[str]:
    rows = _rows(tables["sparsity"])
    whole = next(row for row in rows if row["layer"] is None)
    sparsest = sorted((row for row in rows if row["head"] is not None), key=lambda row: -float(row["share"]))[:_NAMED]
    listed = ", ".join(f"{_head(row)} ({_percent(row['share'])})" for row in sparsest if row["share"] > 0)
    most = f", most in {listed}" if listed else ""
    yield f"{_percent(whole['share'])} of all attention distributions are sparse{most}."


def _level_at(levels: list[float], shares: list[float], share: float) -> float | None:
    """The noise at which a rising share is reached, on the line between two levels; None if it is not reached."""
    for (low, before), (high, after) in pairwise(zip([0.0, *levels], [0.0, *shares], strict=True)):
        if before < share <= after:
            return low + (high - low) * (share - before) / (after - before)
    return None


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Plain rows, in the order of their noise where they have one."""
    return plain_rows(table.sort_values("noise", kind="stable") if "noise" in table else table)


def _head(row: dict[str, Any]) -> str:
    return f"layer {row['layer']} head {row['head']}"


def _percent(value: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.3g} %"
