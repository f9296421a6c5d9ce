"""What an audit says in sentences, each with its numbers and the figure that shows it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import pandas as pd

from normscope.models import Model
from normscope.runs import plain_rows

if TYPE_CHECKING:
    from normscope.audit.parts import Question

Tables = Mapping[str, pd.DataFrame]
Row = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A sentence, and the name of the figure that shows it."""

    text: str
    figure: str


def late_layers(depth: int) -> range:
    """The last third of the layers, one at least."""
    return range(depth - max(1, depth // 3), depth)


def motion_findings(question: "Question", tables: Tables) -> Iterator[Finding]:
    """Growth, turning beside what other schemes would keep, resistance beside theory, and clustering."""
    motion, writes, replay = (plain_rows(tables[name]) for name in ("motion", "writes", "replay"))
    first, last = motion[0]["radius"], motion[-1]["radius"]
    yield Finding(
        f"Residual growth: a token's length is {first:.3g} in front of the first layer and {last:.3g} behind the last, "
        f"{last / first:.3g} times as much.",
        "motion-radius",
    )
    view, late = question.view, late_layers(question.view.layers)
    own = None if view.scheme is None else view.scheme.name
    others = [row for row in replay if row["scheme"] != own]
    yield Finding(
        f"Turning: the first layer turns tokens by {motion[0]['angle']:.3g}°, the last third of layers by "
        f"{_mean(motion, late, 'angle'):.3g}° each. With the same writes at the same depth other schemes would by: "
        f"{_listed(others, late, 'angle', '°')}.",
        "motion-angle",
    )
    measured = [row for row in writes if row.get("speed") is not None]
    if any(row["layer"] in late for row in measured):
        ratio = median(row["speed"] / row["theory"] for row in measured)
        yield Finding(
            f"Resistance: attention turns a token by 1/s of what it writes across it, with a speed factor s of "
            f"{_mean(measured, late, 'speed'):.3g} in the last third of layers. The slots of {own} give "
            f"{_mean(measured, late, 'theory'):.3g} there (in the median layer the measured s is {ratio:.3g} times theory's); "
            f"with the same writes at the same depth, others: {_listed(others, late, 'speed', '')}.",
            "motion-speed",
        )
    yield from _clustering(motion)


def _clustering(motion: list[Row]) -> Iterator[Finding]:
    """Mean cosine and effective rank, at first, at last, and where tokens are closest to each other."""
    first, last = motion[0], motion[-1]
    closest, flattest = max(motion, key=lambda row: float(row["cosine"])), min(motion, key=lambda row: float(row["rank"]))
    yield Finding(
        f"Clustering: the mean cosine between tokens goes from {first['cosine']:.2f} to {last['cosine']:.2f} "
        f"({first['cosine_all']:.2f} to {last['cosine_all']:.2f} with the first token, the attention sink); it is largest "
        f"{_place(closest, last)}, {closest['cosine']:.2f}.",
        "motion-cosine",
    )
    yield Finding(
        f"Effective rank of the tokens: from {first['rank']:.3g} to {last['rank']:.3g} ({first['rank_all']:.3g} to "
        f"{last['rank_all']:.3g} with the sink); it is smallest {_place(flattest, last)}, {flattest['rank']:.3g}.",
        "motion-rank",
    )


def _place(row: Row, last: Row) -> str:
    return "behind the last layer" if row["layer"] == last["layer"] else f"in front of layer {row['layer']}"


def _mean(rows: list[Row], layers: range, column: str) -> float:
    return fmean(row[column] for row in rows if row["layer"] in layers)


def _listed(replay: list[Row], layers: range, column: str, unit: str) -> str:
    """A column's mean over layers for every scheme."""
    schemes = dict.fromkeys(row["scheme"] for row in replay)
    means = {name: _mean([row for row in replay if row["scheme"] == name], layers, column) for name in schemes}
    return ", ".join(f"{name} {value:.3g}{unit}" for name, value in means.items())


def of_lab(
    said: Callable[[Model, Tables], list[str]], figures: Mapping[str, Sequence[str]]
) -> Callable[["Question", Tables], Iterator[Finding]]:
    """A lab's sentences on each measure with the figures that show them; the first, which names the model, is left out."""

    def findings(question: "Question", tables: Tables) -> Iterator[Finding]:
        for measure, shown in figures.items():
            others = {name: table for name, table in tables.items() if name == measure or name not in figures}
            if measure in tables:
                yield from (
                    Finding(text, shown[min(i, len(shown) - 1)]) for i, text in enumerate(said(question.view, others)[1:])
                )

    return findings


def journey_findings(question: "Question", tables: Tables) -> Iterator[Finding]:
    """How far a sample token travels, between which words."""
    if "journey" in tables:
        rows = plain_rows(tables["journey"])
        first, second, last = rows[0], rows[1], rows[-1]
        yield Finding(
            f"Journey: the last token but one of '{question.sentence}' travels {last['travelled']:.0f}°, from "
            f"{first['nearest_text']!r} to {last['nearest_text']!r}, and ends {last['from_start']:.0f}° from its start; the "
            f"first layer turns it by {second['angle']:.0f}°, the last by {last['angle']:.0f}°.",
            "journey-angle",
        )
