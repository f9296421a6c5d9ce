"""A measure: what it needs of a model, the tables it makes, and the findings and figures that follow from them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from normscope.results.findings import Finding
from normscope.results.sections import Section

if TYPE_CHECKING:
    from normscope.models import Model, Sample

Tables = dict[str, pd.DataFrame]
Advance = Callable[[float], None]
LAYER = "layer"


@dataclass(frozen=True)
class Subject:
    """What is measured: a model, the sample that it reads, and what else a measure may ask for.

    Attributes:
        model: the model.
        sample: its input.
        seed: of everything that is drawn.
        sentence: a sentence whose last token but one is followed through the layers; None for models without text.
    """

    model: "Model"
    sample: "Sample"
    seed: int = 0
    sentence: str | None = None

    @property
    def about(self) -> dict[str, Any]:
        """Plain facts on the model and the sample: what findings and ``run.json`` say of them."""
        model, sample = self.model, self.sample
        return {
            "model": model.name,
            "checksum": model.checksum,
            "scheme": None if model.scheme is None else model.scheme.name,
            "layers": model.layers,
            "heads": model.heads,
            "dim": model.dim,
            "rows": sample.tokens.shape[0],
            "tokens": int(sample.present.sum()),
            "sentence": self.sentence,
        }


@dataclass(frozen=True)
class Quantity:
    """A curve and a number of a table, by which models and runs are compared.

    Attributes:
        name: also the name of the figure.
        title, x, y, caption: the words of the figure.
        table: the table that it comes from.
        curve: the table as columns x, y and, for several lines, line.
        number: what the number is called.
        value: the number of one line of the curve.
        unit: written after the number.
        ratio: whether values are compared by their ratio, not their difference.
    """

    name: str
    title: str
    x: str
    y: str
    caption: str
    table: str
    curve: Callable[[pd.DataFrame], pd.DataFrame]
    number: str
    value: Callable[[pd.DataFrame], float]
    unit: str = ""
    ratio: bool = True


@dataclass(frozen=True)
class Measure(ABC):
    """One measure; a subclass is a frozen dataclass whose fields are its settings.

    Attributes:
        name: how it is asked for; also the name of its section.
        title: the heading of its section.
        needs: the capabilities that a model must offer: ``stream``, ``attention``, ``vocabulary``, ``predictions``.
        asks: what of the subject its tables depend on besides the model: ``sample``, ``sentence``, ``seed``.
        passes: its cost in forward passes, for people.
        order: its place in an audit; None for a measure that audits leave out.
        quantities: the curves and numbers that comparisons, sweeps and reports share.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset({"stream"})
    asks: ClassVar[tuple[str, ...]] = ("sample",)
    passes: ClassVar[str] = "1"
    order: ClassVar[int | None] = None
    quantities: ClassVar[tuple[Quantity, ...]] = ()

    @abstractmethod
    def measure(self, subject: Subject, advance: Advance) -> Tables:
        """The tables; ``advance`` takes how many layers are done."""

    @abstractmethod
    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """What the tables come to, from the tables and plain facts (``Subject.about``) alone."""

    @abstractmethod
    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Text and figures; None where the tables have nothing to show."""

    def missing(self, model: "Model") -> str:
        """Why the model cannot be measured, or an empty text."""
        lacking = sorted(self.needs - model.offers)
        return f"needs {', '.join(lacking)}, which {model.name} does not offer" if lacking else ""


def quantities_of(measures: Iterable[type[Measure]]) -> tuple[Quantity, ...]:
    """The quantities of measures, in order."""
    return tuple(quantity for measure in measures for quantity in measure.quantities)


@dataclass(frozen=True)
class Skipped:
    """A measure that was not taken, and why."""

    measure: str
    reason: str = field(default="")


__all__ = [
    "LAYER",
    "Advance",
    "Finding",
    "Measure",
    "Quantity",
    "Section",
    "Sequence",
    "Skipped",
    "Subject",
    "Tables",
    "quantities_of",
]
