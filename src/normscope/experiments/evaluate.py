"""evaluate: Test a trained model in distribution and out of it.

Train: normscope evaluate builtin:addition-small-pre
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import pandas as pd
from pydantic import model_validator
from rich.text import Text

from normscope.errors import require_known
from normscope.experiments.experiment import Seeded, Shown
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Accepts, Names, setting
from normscope.machine.memory import require_memory
from normscope.measures.base import Quantity
from normscope.measures.curves import last, values_of
from normscope.results.figures import Chart, Line
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows

if TYPE_CHECKING:
    from normscope.training.tasks import Report, Score

_MOST_POSITIONS = 16  # columns of a table in a terminal


class Evaluate(Seeded):
    """Test a trained model in distribution and out of it.

    For addition: accuracy per character with its standard error, by position in the answer, and the rate of exact answers, in
    distribution and on sums with other numbers of terms. For text: loss and bits per byte, by position in the context, on
    text that was held out and on text that the model was trained on.

    Example:
        >>> import normscope as ns
        >>> run = ns.evaluate("builtin:addition-small-pre", examples=64, progress=False)
        >>> run.tables["accuracy"]["split"].tolist()
        ['in-distribution', 'ood-interpolation', 'ood-extrapolation']
    """

    command: ClassVar[str] = "evaluate"
    title: ClassVar[str] = "Evaluation"
    usage: ClassVar[tuple[str, ...]] = (
        "normscope evaluate builtin:addition-small-pre",
        "normscope evaluate runs/train-tiny-pre --split ood-extrapolation --examples 128000",
        "normscope evaluate builtin:addition-small-qkv --json",
    )
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "test-accuracy", "Accuracy in tests", "split", "share of answer tokens",
            "Within and beyond what was seen in training.",
            "accuracy", values_of("split", "accuracy"), "test accuracy", last, ratio=False,
        ),
        Quantity(
            "test-loss", "Loss in tests", "split", "nats per token", "On text that was held out, and on text that was not.",
            "losses", values_of("split", "loss"), "test loss", last,
        ),
    )  # fmt: skip

    model: Annotated[str | Path, Accepts(complete="models")] = setting(
        help="A folder that normscope train wrote, or builtin:addition-small-pre.", argument=True
    )
    split: Names | None = setting(
        None,
        "Comma-separated: in-distribution, ood-interpolation, ood-extrapolation; of text: held-out, training.",
        shown="all",
    )
    examples: int = setting(128_000, "Examples per split; for text, at most all sequences.", ge=2, le=10**15)
    show: int = setting(4, "Worked examples of each split to print.", ge=0, le=1000)

    @model_validator(mode="after")
    def _consistent(self) -> "Evaluate":
        from normscope.training.recipe import task_of
        from normscope.transformer.files import model_folder, read_config

        task = task_of(read_config(model_folder(self.model)).get("recipe", {}))
        for name in self.split or ():
            require_known("split", name, task.splits)
        return self

    @property
    def summary(self) -> str:
        """One line for people."""
        return f"{self.model}; {self.examples:,} examples a split; seed {self.seed}"

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """The model on every split."""
        from normscope.models.check import check_finite, named
        from normscope.training import data_of
        from normscope.training.sizes import testing_memory
        from normscope.transformer import load_model

        saved = load_model(self.model, self.device)
        zeros = check_finite(str(self.model), saved.model)
        task = data_of(saved.about, progress)
        require_memory(testing_memory(saved.model.config, task, self.examples, self.device), self.device)
        splits = list(self.split or task.splits)
        advance = progress.stage("testing", sum(task.tested_examples(split, self.examples) for split in splits))
        tested = task.evaluate(saved.model, splits, self.examples, seed=self.seed, worked=self.show, progress=advance)
        zero_weights = f"All values are 0 in {named(zeros)}." if zeros else ""
        configuration = {
            "model": str(self.model),
            "task": task.name,
            "splits": splits,
            "examples": self.examples,
            "zero_weights": zero_weights,
        }
        return Result(type(self), configuration, tested.tables, self.summary, self.seed, self.device)

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """The scores of every split."""
        return plain_rows(result.tables[report_of(result).table])

    @classmethod
    def facts(cls, result: Result) -> list[tuple[str, str]]:
        """The scores of the first split."""
        return evaluation_facts(result)

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """Scores by split and position, and worked examples."""
        yield from evaluation_text(result)

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The scores of every split, and the first by position."""
        yield evaluation_section(result)


def report_of(result: Result) -> "Report":
    """How the tests of a result's task are shown."""
    from normscope.training.tasks import TASKS

    values = result.configuration.get("recipe", result.configuration)
    return TASKS[values.get("task", "addition")].report


def evaluation_facts(result: Result) -> list[tuple[str, str]]:
    """The scores of the first split, for the top of a page."""
    report = report_of(result)
    row = plain_rows(result.tables[report.table])[0]
    return [(f"{score.label}, {row['split']}", _score(row, score)) for score in report.scores]


def evaluation_text(result: Result) -> Iterator[Shown]:
    """The tables of an evaluation, and worked examples with wrong characters marked."""
    report = report_of(result)
    score = report.scores[0]
    yield _scores(result.tables[report.table], report)
    ranges = by_range(result.tables["positions"], score.column)
    columns = list(dict.fromkeys(ranges["positions"]))
    values = {(row["split"], row["positions"]): row[score.column] for row in plain_rows(ranges)}
    rows = (
        (str(split), *(_plain_number(values.get((split, column)), score) for column in columns))
        for split in result.tables[report.table]["split"]
    )
    yield PageTable("", (f"{score.column}{' in %' if score.percent else ''} at position", *columns), tuple(rows))
    for row in plain_rows(result.tables["worked"]) if "worked" in result.tables else ():
        yield _worked(row)
    if result.configuration.get("zero_weights"):
        yield f"Warning: {result.configuration['zero_weights']}"


def by_range(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Means of a column by position, or where there are many positions by ranges that double (1, 2, 3–4, 5–8)."""
    last = int(table["position"].max())
    if last <= _MOST_POSITIONS:
        return table.assign(positions=table["position"].astype(str))[["split", "positions", column]]
    high = 2 ** np.ceil(np.log2(table["position"].astype(float))).astype(int)
    ranges = zip(high // 2 + 1, np.minimum(high, last), strict=True)
    names = [str(begin) if begin == end else f"{begin}–{end}" for begin, end in ranges]
    means = table.assign(positions=names).groupby(["split", "positions"], sort=False)[column].mean()
    return means.reset_index()


def _plain_number(value: float | None, score: "Score") -> str:
    if value is None:
        return "–"
    return f"{100 * value:.2f}" if score.percent else f"{value:.3f}"


def _worked(row: Mapping[str, str]) -> Text:
    """A worked example with right and wrong characters coloured."""
    line = Text(f"{row['split']:18} {row['asked']}")
    for right, given in zip(row["answer"], row["given"], strict=True):
        line.append(given, style="green" if given == right else "bold red")
    return line if row["given"] == row["answer"] else line.append(f"   expected: {row['answer']}")


def evaluation_section(result: Result) -> Section:
    """The scores of every split, and the first by position."""
    report = report_of(result)
    groups = result.tables["positions"].groupby("split", sort=False)
    chart = Chart(
        report.by_position,
        report.position,
        f"{report.scores[0].column}{' in %' if report.scores[0].percent else ''}",
        tuple(_position_line(str(split), rows.sort_values("position"), report.scores[0]) for split, rows in groups),
        f"{report.caption} Bands are one standard error.",
        result.summary,
    )
    text = [report.note]
    if result.configuration.get("zero_weights"):
        text.append(f"Warning: {result.configuration['zero_weights']}")
    return Section(
        "Evaluation", tuple(text), (_scores(result.tables[report.table], report),), {"positions": chart}, name="evaluation"
    )


def percent(share: float, error: float) -> str:
    """``91.38 ± 0.04 %``, with more digits if the error would otherwise read as zero."""
    return f"{plus_minus(100 * share, 100 * error)} %" if math.isfinite(share) else "–"


def plus_minus(value: float, error: float, digits: int = 2) -> str:
    """``91.38 ± 0.04``, with more digits if the error would otherwise read as zero."""
    if not math.isfinite(value):
        return "–"
    if not math.isfinite(error):
        return f"{value:.{digits}f}"
    digits = max(digits, -math.floor(math.log10(error))) if error > 0 else digits
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _position_line(split: str, rows: pd.DataFrame, score: "Score") -> Line:
    factor = 100 if score.percent else 1
    middle, error = factor * rows[score.column].astype(float), factor * rows["stderr"].astype(float)
    return Line(split, list(rows["position"]), list(middle), list(middle - error), list(middle + error))


def _scores(table: pd.DataFrame, report: "Report") -> PageTable:
    rows = tuple(
        (str(row["split"]), *(_score(row, score) for score in report.scores), f"{row['examples']:,}")
        for row in plain_rows(table)
    )
    return PageTable(report.title, ("split", *(score.label for score in report.scores), "examples"), rows)


def _score(row: Mapping[str, Any], score: "Score") -> str:
    value, error = (math.nan if name is None or row[name] is None else row[name] for name in (score.column, score.error))
    return percent(value, error) if score.percent else plus_minus(value, error, 3)
