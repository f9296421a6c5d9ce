"""First token: how much attention it receives from the others, and whether it is an attention sink."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd

from normscope.measures.base import LayerAttention, Measure, PassObserver, Subject, Tables
from normscope.measures.curves import percent
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import head_map, table_of

_SINK = 0.3  # mean weight on the first token from which a head is published to have a sink there (Gu et al. 2024, ε)
_HEADS = 0.1  # share of such heads from which the token is called a sink


class _Observer(PassObserver):
    def __init__(self, subject: Subject) -> None:
        self.counted = subject.counted
        self.rows: list[dict[str, float]] = []

    def attention(self, attention: LayerAttention) -> None:
        """The weight on the first key, and what equal weights on all keys that are seen would give it."""
        weights, mask = attention.weights[..., 0], attention.step.mask
        equal = (mask[..., 0] / mask.sum(-1).clamp(min=1)).expand_as(weights)
        first, uniform = (x.transpose(0, 1)[:, self.counted].double().mean(-1).tolist() for x in (weights, equal))
        for head, (of_first, of_any) in enumerate(zip(first, uniform, strict=True)):
            self.rows.append({"layer": attention.layer, "head": head, "first": of_first, "uniform": of_any})

    def tables(self) -> Tables:
        return {"first_token": pd.DataFrame(self.rows)} if self.rows else {}


@dataclass(frozen=True)
class FirstToken(Measure):
    """The mean attention weight of the other tokens on the first of their row, by layer and head."""

    name: ClassVar[str] = "first_token"
    title: ClassVar[str] = "Attention to the first token"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    order: ClassVar[int | None] = 45
    overview: ClassVar[int] = 0

    def observer(self, subject: Subject) -> PassObserver:
        """Attention weights of every layer."""
        return _Observer(subject)

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """Whether the first token is an attention sink, by what it receives."""
        table = table_of(tables, "first_token")
        if table is None:
            return
        mass, uniform = (float(table[name].mean()) for name in ("first", "uniform"))
        heads = float((table["first"] > _SINK).mean())
        sink = heads >= _HEADS
        yield Finding(
            f"The first token receives {percent(mass)} of the attention of the others, and {percent(heads)} of the heads give "
            f"it more than {percent(_SINK)}: it is {'an' if sink else 'no'} attention sink.",
            "first-token",
            title="The first token is an attention sink" if sink else "The first token is no attention sink",
            severity="ok",
            number=mass,
            comparison=f"Equal weights on all keys would give it {percent(uniform)}. It is called a sink if {percent(_HEADS)} "
            f"of the heads or more have a mean weight above {percent(_SINK)} on it.",
        )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """A map of heads."""
        table = table_of(tables, "first_token")
        if table is None:
            return None
        figure = head_map(
            table,
            "first",
            "Attention to the first token",
            "mean weight on the first token",
            "Bright heads rest on the first token when they have nothing to read.",
            settings,
        )
        text = (
            "The mean weight on the first token of a row, over the queries of all others. Other measures leave the first token "
            "out of their means, sink or not, so that models compare: a causal model computes it from itself alone, and a sink "
            "has a norm and a direction of its own.",
        )
        return self.page(text, {"first-token": figure})
