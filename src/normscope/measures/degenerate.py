"""Degenerate layers: what is 0 or non-finite in a model and its forward pass, and so has no direction, angle or ratio."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import pandas as pd

from normscope.measures.base import Measure, PassObserver, Subject, Tables
from normscope.measures.faults import Fault
from normscope.models.describe import layers_named
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows, table_of


class _Observer(PassObserver):
    """The faults of the weights, the sample and the forward pass."""

    def __init__(self, subject: Subject) -> None:
        self.zero_weights, self.tokens = subject.model.zero_weights, subject.without_embedding
        self.faults: list[Fault] = []

    def fault(self, fault: Fault) -> None:
        self.faults.append(fault)

    def tables(self) -> Tables:
        faults = [
            Fault(weights.layer, "weights", f"all values of {weights.tensor} are 0", True) for weights in self.zero_weights
        ]
        if self.tokens:
            reason = f"{self.tokens:,} token{'s' * (self.tokens > 1)} of the sample with an embedding of zeros"
            faults.append(Fault(None, "tokens", reason, False))
        rows = [asdict(fault) for fault in (*faults, *self.faults)]
        return {"degenerate": pd.DataFrame(rows).astype({"layer": "Int64"})} if rows else {}


@dataclass(frozen=True)
class Degenerate(Measure):
    """Matrices of zeros, and layers whose states, attention or updates are 0 or non-finite; nothing where there are none.

    Other measures leave out what is not ``measured``.
    """

    name: ClassVar[str] = "degenerate"
    title: ClassVar[str] = "Degenerate layers"
    order: ClassVar[int | None] = 5
    overview: ClassVar[int] = 0

    def observer(self, subject: Subject) -> PassObserver:
        """Collects the faults of the forward pass."""
        return _Observer(subject)

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """What is left out, and what does nothing."""
        table = table_of(tables, "degenerate")
        rows = [] if table is None else plain_rows(table)
        groups = {
            "Layers that cannot be measured": [row for row in rows if not row["measured"]],
            "Layers that do nothing": [row for row in rows if row["measured"] and row["where"] != "weights"],
            "Matrices of zeros": [row for row in rows if row["where"] == "weights"],
        }
        for (title, faults), weight in zip(groups.items(), (300.0, 200.0, 190.0), strict=True):
            if faults:
                left_out = " Measures leave them out." if title.endswith("measured") else ""
                text = "; ".join(_grouped(faults))
                yield Finding(
                    f"{text[0].upper()}{text[1:]}.{left_out}", None, title, "warning", float(len(faults)), weight=weight,
                )  # fmt: skip

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """All faults as a table."""
        table = table_of(tables, "degenerate")
        if table is None:
            return None
        text = (
            "A vector of zeros has no direction, and a non-finite one no norm: angles, cosines and ratios of these are not "
            "defined. What is left out below has a – or a gap in the other sections.",
        )
        rows = tuple(
            ("–" if layer is None else str(layer), where, reason, "yes" if measured else "no")
            for layer, where, reason, measured in (row.values() for row in plain_rows(table))
        )
        return self.page(text, {}, [PageTable("Faults by layer", ("layer", "where", "what", "measured"), rows)])


def left_out(tables: Mapping[str, pd.DataFrame]) -> list[int]:
    """The layers that measures left out, wholly or in part: their numbers are not those of the whole model."""
    table = table_of(tables, "degenerate")
    if table is None:
        return []
    return sorted({int(layer) for layer in table[~table["measured"].astype(bool)]["layer"].dropna()})


def _grouped(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Each reason once, with its layers."""
    layers: dict[str, list[int]] = {}
    for row in rows:
        after_all = row["reason"].startswith("hidden states after")
        layers.setdefault(row["reason"], []).extend([] if row["layer"] is None or after_all else [row["layer"]])
    for reason, several in layers.items():
        yield f"{layers_named(several)}: {reason}" if several else reason
