"""What the tables of subspaces say, in sentences."""

from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean, median
from typing import Any

import pandas as pd

from normscope.models import Model
from normscope.runs import plain_rows
from normscope.subspaces.circuit import KNOBS

NOTHING = 1e-4  # a change of scores that rounding may bring about; what a norm brings about is far larger
_WIDE = 0.2  # the published spread of Pre-Norm, ± 20 %
_NAMED = 3
Tables = Mapping[str, pd.DataFrame]
Row = dict[str, Any]


def findings(view: Model, tables: Tables) -> list[str]:
    """Sentences on the scheme, rank, spheres, angles and interference, as far as they were measured."""
    said = [view.summary]
    for name, speak in (("rank", _rank), ("spheres", _sphere), ("angles", _angles), ("interference", _interference)):
        if name in tables and not tables[name].empty:
            said += speak(view, plain_rows(tables[name]))
    return said


def _rank(view: Model, rows: list[Row]) -> Iterator[str]:
    full = sum(row["rank"] == view.head_dim for row in rows)
    lowest = _falling(rows, "effective_rank")[-1]
    yield (
        f"W_QK: in {full} of {len(rows)} heads its rank is the width of a head, {view.head_dim}, so that its null spaces, "
        f"which hold all that the head does not attend to, have {view.dim - view.head_dim} of {view.dim} dimensions. By "
        f"effective rank {median(_all(rows, 'effective_rank')):.3g} directions matter in the median head, and "
        f"{lowest['effective_rank']:.3g} in {_head(lowest)}."
    )


def _sphere(view: Model, table: list[Row]) -> Iterator[str]:
    normed = _reads_norm(view)
    for side, rows in _by("side", table).items():
        places = _by("place", rows)
        falling = _falling(places["before"], "spread")
        widest = falling[0]
        where, behind = ("before the norm ", f" (after the norm: in {_spheres(places['after'])})") if normed else ("", "")
        yield (
            f"Spheres, {side}: {where}in {_spheres(falling)} of {len(places['before'])} heads the part that the head sees has "
            f"a length within ±20 % of the median for 90 % of the tokens{behind}. It varies most in {_head(widest)}, from "
            f"{100 * (widest['low90'] - 1):+.3g} % to {100 * (widest['high90'] - 1):+.3g} %. The median head sees "
            f"{100 * median(_all(places['before'], 'share')):.3g} % of a token's square, with "
            f"{100 * view.head_dim / view.dim:.3g} % of the dimensions."
        )


def _spheres(rows: Iterable[Row]) -> int:
    """In how many heads 90 % of the lengths are within ±20 % of the median."""
    return sum(row["low90"] >= 1 - _WIDE and row["high90"] <= 1 + _WIDE for row in _falling(rows, "spread"))


def _reads_norm(view: Model) -> bool:
    """Whether a norm of the whole token stands between the stream and what some layer's attention reads."""
    slots = {(norm.slot, norm.sublayer) for norm in view.norms}
    return ("input", "attention") in slots or bool({"stream", "embedding"} & {slot for slot, _ in slots})


def _angles(view: Model, table: list[Row]) -> Iterator[str]:
    for side, rows in _by("side", table).items():
        closest = _falling(rows, "weighted_cosine")[0]
        yield (
            f"Angles, {side}: the mean cosine between what two heads of a layer see is "
            f"{fmean(_all(rows, 'weighted_cosine')):.3g} where the data lie (0 if all were orthogonal, 1 if all saw the same), "
            f"{fmean(_all(rows, 'mean_cosine')):.3g} over all directions; the smallest principal angle is "
            f"{median(_all(rows, 'smallest_angle')):.3g}° in the median pair. Closest: layer {closest['layer']} heads "
            f"{closest['head']} and {closest['other']}, {closest['weighted_cosine']:.3g}."
        )


def _interference(view: Model, rows: list[Row]) -> Iterator[str]:
    chosen = {
        (place, exchanged): [row for row in rows if (row["place"], row["exchanged"]) == (place, exchanged)]
        for place, exchanged in (("before", "both"), ("before", "keys"), ("after", "both"))
    }
    before, keys, after = chosen.values()
    largest, left = (max(_all(some, "change")) for some in (before, after))
    yield _in_what_is_read(view, left)
    where = "exchanged before the norm" if _reads_norm(view) else "exchanged in the stream, which is read without a norm"
    if largest < NOTHING:
        yield (
            f"No interference: {where}, it changes scores by {largest:.1g} at most. "
            f"This model's heads need their subspaces to be linearly independent, and nothing more."
        )
        return
    yield (
        f"Interference: {where}, for queries and keys together, it changes scores by "
        f"{100 * median(_all(before, 'change')):.3g} % in the median head. For keys alone it changes them by "
        f"{100 * median(_all(keys, 'change')):.3g} %, as noise of {100 * median(_all(keys, 'kappa')):.3g} % on the lengths of "
        f"keys would, and makes {100 * fmean(_all(keys, 'moved')):.3g} % of the receivers prefer another token."
    )
    most = _falling(before, "change")[:_NAMED]
    listed = ", ".join(f"{_head(row)} ({100 * row['change']:.3g} %)" for row in most)
    yield f"Most: {listed}. Queries and keys normalised per head after their projections (QK-Norm) would take it away."


def _in_what_is_read(view: Model, left: float) -> str:
    """What an exchange behind the norm, or where there is none in what is read, does at most."""
    where = "After the norm" if _reads_norm(view) else "In what its attention reads"
    exchange = f"{where}, an exchange of what a head does not attend to changes its scores"
    if left < NOTHING:
        return f"{exchange} by {left:.1g} at most: rounding, for it lies in a null space."
    together = {norm.slot for norm in view.norms} & {"q", "k"} - set(view.normalised_heads)
    why = " Queries and keys are normalised over all heads together, and so share a length." if together else ""
    return f"{exchange}, by up to {100 * left:.3g} %.{why}"


def world_findings(tables: Tables) -> list[str]:
    """Sentences on interference in constructed worlds, and on where the circuit breaks."""
    said = []
    for scheme, rows in _by("scheme", plain_rows(tables["worlds"])).items():
        error = max(abs(row["before"] - row["predicted"]) for row in rows)
        largest = {world: max(_all(own, "before")) for world, own in _by("world", rows).items()}
        free = [world for world, change in largest.items() if change < NOTHING]
        if len(free) == len(largest):
            said.append(f"{scheme}: no interference in any world ({max(largest.values()):.1g} at most).")
        else:
            said.append(
                f"{scheme}: no interference in {', '.join(free) or 'no world'}; elsewhere scores change by up to "
                f"{100 * max(largest.values()):.3g} %, theory's number to within {error:.1g}."
            )
    for scheme, rows in _by("scheme", plain_rows(tables["points"])).items():
        broken = [_broken(row) for row in rows if row["part"] == "circuit"]
        said.append(f"{scheme}: the induction circuit {', and '.join(broken)}.")
    return said


def _broken(row: Row) -> str:
    """Where a knob breaks the circuit, and where Theorem 7 says so."""
    knob, last = row["knob"], in_words(row["knob"], KNOBS[row["knob"]][1])
    if row["observed"] is None and row["predicted"] is None:
        return f"holds down to {last} between subspaces" if knob == "angle" else f"holds up to lengths of {last}"
    words = "breaks at {} between subspaces" if knob == "angle" else "breaks at lengths of {}"
    return f"{words.format(in_words(knob, row['observed']))} (Theorem 7: {in_words(knob, row['predicted'])})"


def in_words(knob: str, value: float | None) -> str:
    """A knob's value as people write it; without one, a circuit never breaks."""
    if value is None:
        return "never"
    return f"{value:.5g}°" if knob == "angle" else f"±{100 * value:.4g} %"


def _by(column: str, rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by what they have in a column."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[column]), []).append(row)
    return groups


def _all(rows: Iterable[Row], column: str) -> list[float]:
    """A column's values; a head without weights has none."""
    return [float(row[column]) for row in rows if row[column] is not None]


def _falling(rows: Iterable[Row], column: str) -> list[Row]:
    """Rows in the order of a column, the largest first."""
    return sorted((row for row in rows if row[column] is not None), key=lambda row: -float(row[column]))


def _head(row: Row) -> str:
    return f"layer {row['layer']} head {row['head']}"
