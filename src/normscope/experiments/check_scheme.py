"""check-scheme: Compare the declared scheme of a model with what it does.

Look into a model: normscope check-scheme ./my-model --scheme ln-scaling
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pandas as pd
from pydantic import BeforeValidator

from normscope.experiments.experiment import Shown
from normscope.experiments.on_model import WithModel
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import SCHEME, setting
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows
from normscope.schemes import Scheme, find_scheme

_COLUMNS = ["layer", "sublayer", "slot", "declared", "observed", "difference"]


def _as_scheme(value: Any) -> Any:
    return find_scheme(value) if isinstance(value, str | Path) else value


DeclaredScheme = Annotated[Scheme, BeforeValidator(_as_scheme), SCHEME]


class CheckScheme(WithModel):
    """Compare the declared scheme of a model with what it does.

    Layer by layer: missing and additional norms, wrong or missing factors, gains of 0, norms without effect, a missing final
    norm. Without a scheme, the model's code declares it: a model with random weights is built from the same configuration;
    for a model of normscope, its configuration states the scheme. Nothing is saved. The exit status is 1 if there is a
    difference, and 2 if the check could not run.

    Example:
        >>> import normscope as ns
        >>> result = ns.check_scheme("builtin:addition-small-pre", progress=False)
        >>> len(result.tables["differences"])
        0
    """

    command: ClassVar[str] = "check-scheme"
    title: ClassVar[str] = "Declared and observed scheme"
    usage: ClassVar[tuple[str, ...]] = (
        "normscope check-scheme runs/train-baseline-ln-scaling",
        "normscope check-scheme ./my-model --scheme ln-scaling",
        "normscope check-scheme ./my-model --scheme mine.toml --json",
    )

    scheme: DeclaredScheme | None = setting(
        None, "The declared scheme: a name, or a TOML file.", shown="what the model's configuration and code declare"
    )

    @property
    def summary(self) -> str:
        """One line for people."""
        return self._summary(self.model_name)

    def _summary(self, name: str) -> str:
        return f"{name}; {'as its code declares' if self.scheme is None else self.scheme.name}"

    @property
    def saved(self) -> bool:
        """Nothing is saved: the exit status and the first difference are the result."""
        return False

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """The declared and the observed slots of every layer, and where they differ."""
        from normscope.models.declared import code_facts, differences, idle_norms, observed_facts, scheme_facts, unproved
        from normscope.models.describe import view_text

        model = self.open(progress)
        advance = progress.stage("comparing", 1)
        observed = observed_facts(model)
        declared = code_facts(model) if self.scheme is None else scheme_facts(self.scheme, model)
        found = [*differences(declared, observed), *idle_norms(model), *unproved(model)]
        advance(1)
        rows = [
            (place.layer, place.sublayer, place.slot, str(each.declared), str(each.observed), each.text)
            for each in sorted(found, key=lambda each: (each.place.layer == -1, each.place.layer))
            for place in (each.place,)
        ]
        every = [(*_cells(place), str(declared.get(place, "")), str(value), "") for place, value in observed.items()]
        about = {**self.record, "layers": model.layers, "observed": model.summary}
        tables = {"differences": pd.DataFrame(rows, columns=_COLUMNS), "slots": pd.DataFrame(every, columns=_COLUMNS)}
        return Result(type(self), about, tables, self._summary(view_text(model)), self.seed, str(model.device))

    @classmethod
    def exit_code(cls, result: Result) -> int:
        """1 if something is not as declared."""
        return int(len(result.tables["differences"]) > 0)

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """The differences; layer −1 is outside the layers."""
        return plain_rows(result.tables["differences"])

    @classmethod
    def facts(cls, result: Result) -> list[tuple[str, str]]:
        """How many slots differ."""
        return [("differences", str(len(result.tables["differences"])))]

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The first difference, and how many there are."""
        rows = cls.records(result)
        yield result.configuration["observed"]
        if not rows:
            layers = result.configuration["layers"]
            yield "The layer does what is declared." if layers == 1 else f"All {layers} layers do what is declared."
            return
        others = f" {len(rows) - 1} more:" if len(rows) > 1 else ""
        yield f"Not as declared: {rows[0]['difference']}.{others}"
        if len(rows) > 1:
            cells = [tuple(str(row[name]) for name in _COLUMNS[:-1]) for row in rows[1:]]
            yield PageTable("", tuple(_COLUMNS[:-1]), tuple(cells))

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The differences, and all slots."""
        for name, title in (("differences", "Differences"), ("slots", "What the forward pass does")):
            rows = plain_rows(result.tables[name])
            cells = tuple(tuple(str(row[column]) for column in _COLUMNS) for row in rows)
            yield Section(title, name=name, tables=(PageTable("", tuple(_COLUMNS), cells),))


def _cells(place: Any) -> tuple[int, str, str]:
    return place.layer, place.sublayer, place.slot
