"""Updates: how large what every block and sublayer adds is beside the residual stream that it is added to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd

from normscope.core.norms import cosine, length
from normscope.measures.base import LAYER, Measure, PassObserver, Quantity, Subject, Tables
from normscope.measures.curves import columns, late
from normscope.measures.states import MIXING, BlockObserver, Counted
from normscope.models import SublayerStep
from normscope.results.figures import Chart, Line
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import floats, plain_rows, spans_decades, table_of

BLOCK = "block"
_TITLES = {"feedforward": "feed-forward layer", "cross": "cross-attention", "further": "further sublayer"}


class _Observer(BlockObserver):
    """A row for every block, from the states before and after it, and for every sublayer whose update is identified."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.rows: list[dict[str, Any]] = []

    def block(self, layer: int, before: Counted, after: Counted) -> None:
        self._add(layer, BLOCK, before, after - before)

    def sublayer(self, step: SublayerStep) -> None:
        super().sublayer(step)
        self._add(step.layer, step.sublayer, self.states.counted(step.before), self.states.counted(step.update))

    def _add(self, layer: int, sublayer: str, before: Counted, update: Counted) -> None:
        size = (length(update) / length(before)).squeeze(-1)
        row = {"layer": layer, "sublayer": sublayer, "size": float(size.mean()), "median": float(size.median())}
        self.rows.append({**row, "along": float(cosine(update, before).nanmean())})  # an update of 0 has no direction

    def tables(self) -> Tables:
        return {"updates": pd.DataFrame(self.rows).sort_values("layer", kind="stable", ignore_index=True)} if self.rows else {}


def _blocks(table: pd.DataFrame) -> pd.DataFrame:
    return columns("layer", "size")(table[table["sublayer"] == BLOCK])


@dataclass(frozen=True)
class Updates(Measure):
    """|x_{ℓ+1} − x_ℓ| / |x_ℓ| of every block, the mean over tokens, and |u| / |x| of the update u of every sublayer."""

    name: ClassVar[str] = "updates"
    title: ClassVar[str] = "Updates beside the residual stream"
    order: ClassVar[int | None] = 15
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "update", "Update of every block over the residual norm", LAYER, "|x' − x| / |x|",
            "What a block changes, as a share of what is there already.",
            "updates", _blocks, "update over residual norm in the last third", late,
        ),
    )  # fmt: skip

    def observer(self, subject: Subject) -> PassObserver:
        """Hidden states before every layer, and sublayers where they are identified."""
        return _Observer(subject)

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The block, then its sublayers."""
        table, shown = table_of(tables, "updates"), dict[str, dict[int, str]]()
        for row in (
            () if table is None else plain_rows(table.sort_values("sublayer", key=lambda names: names != BLOCK, kind="stable"))
        ):
            heading = "update / norm" if row["sublayer"] == BLOCK else f"update of {_title(row['sublayer'])} / norm"
            shown.setdefault(heading, {})[row["layer"]] = f"{row['size']:.3g}"
        return shown

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """Which blocks change the stream most and least, and which kind of sublayer does it."""
        table = table_of(tables, "updates")
        blocks = [] if table is None else plain_rows(table[table["sublayer"] == BLOCK])
        if table is None or not blocks:
            return
        most, least = (pick(blocks, key=lambda row: float(row["size"])) for pick in (max, min))
        medians = table[table["sublayer"] != BLOCK].groupby("sublayer", sort=False)["size"].median()
        kinds = ", ".join(f"{_title(str(name))} {float(size):.3g}" for name, size in medians.items())
        ends = f"; most in layer {most['layer']}, {most['size']:.3g}, least in layer {least['layer']}, {least['size']:.3g}"
        middle = float(table[table["sublayer"] == BLOCK]["size"].median())
        yield Finding(
            f"What a block adds has {middle:.3g} times the residual norm in the median layer{ends if len(blocks) > 1 else ''}.",
            "update", title="Size of updates", severity="ok", number=middle,
            comparison=f"Updates of sublayers over the norm before them, median layer: {kinds}." if kinds else "",
        )  # fmt: skip

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """A line for blocks and one for each kind of sublayer."""
        table = table_of(tables, "updates")
        if table is None:
            return None
        groups = sorted(table.groupby("sublayer", sort=False), key=lambda group: group[0] != BLOCK)
        lines = tuple(Line(_title(str(name)), floats(rows["layer"]), floats(rows["size"])) for name, rows in groups)
        chart = Chart(
            "Updates over the residual norm",
            "layer",
            "|update| / |x|",
            lines,
            "Where lines are low, a layer changes little of what is there; above 1 it replaces it.",
            settings,
            log_y=spans_decades([value for line in lines for value in line.y]),
        )
        text = (
            "How large what is added is beside what it is added to, the mean over tokens without the first of every row. A "
            "block's update is the difference between the states after and before it, stream norms included; a sublayer's is "
            "what it adds, output norm and step included.",
        )
        return self.page(text, {"update": chart})


def sublayer_names(updates: pd.DataFrame | None) -> tuple[str, ...]:
    """The sublayers of a block in their order; ``attention or mixer`` where layers differ in what mixes tokens."""
    rows = pd.DataFrame(columns=["layer", "sublayer"]) if updates is None else updates[updates["sublayer"] != BLOCK]
    blocks = [tuple(map(str, names)) for _, names in rows.groupby("layer")["sublayer"]]
    both = " or ".join(name for name in MIXING if any(name in names for names in blocks))
    longest = max(blocks, key=len, default=("attention", "feedforward"))
    mixing = [name for name in longest if name in MIXING]
    return tuple(both if mixing == [name] and both else name for name in longest)


def _title(sublayer: str) -> str:
    return _TITLES.get(sublayer, sublayer)
