"""evaluate: Test a trained model in distribution and out of it."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
from pydantic import model_validator
from rich.text import Text

from normscope.errors import require_known
from normscope.experiments.experiment import Seeded, Shown
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Names, setting
from normscope.machine.memory import require_memory
from normscope.measures.base import Quantity
from normscope.measures.curves import last, values_of
from normscope.results.figures import Chart, Line
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows

if TYPE_CHECKING:
    from normscope.training import Evaluation


class Evaluate(Seeded):
    """Test a trained model in distribution and out of it.

    Accuracy per character with its standard error, by position in the answer, and the rate of exact answers; on sums like
    those of the training, and on sums of other numbers of integers.

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
    )  # fmt: skip

    model: str | Path = setting(help="A folder that normscope train wrote, or builtin:addition-small-pre.", argument=True)
    split: Names | None = setting(None, "Comma-separated: in-distribution, ood-interpolation, ood-extrapolation.", shown="all")
    examples: int = setting(128_000, "Examples per split.", ge=2, le=10**15)
    show: int = setting(4, "Worked examples of each split to print.", ge=0, le=1000)

    @model_validator(mode="after")
    def _consistent(self) -> "Evaluate":
        from normscope.training.recipe import task_of
        from normscope.transformer.files import model_folder, read_config

        task, _ = task_of(read_config(model_folder(self.model)).get("recipe", {}))
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
        from normscope.training import evaluate
        from normscope.training.recipe import task_of
        from normscope.training.sizes import testing_memory
        from normscope.transformer import load_model

        saved = load_model(self.model, self.device)
        zeros = check_finite(str(self.model), saved.model)
        task, offsets = task_of(saved.about.get("recipe", {}))
        require_memory(testing_memory(saved.model.config, task, self.examples, self.device), self.device)
        splits = list(self.split or task.splits)
        advance = progress.stage("testing", len(splits) * self.examples)
        evaluation = evaluate(
            saved.model, task, splits, self.examples, seed=self.seed, offsets=offsets, worked=self.show, progress=advance
        )
        zero_weights = f"All values are 0 in {named(zeros)}." if zeros else ""
        configuration = {"model": str(self.model), "splits": splits, "examples": self.examples, "zero_weights": zero_weights}
        tables = evaluation_tables(evaluation)
        return Result(type(self), configuration, tables, self.summary, self.seed, self.device)

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """Accuracy by split."""
        return plain_rows(result.tables["accuracy"])

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """Accuracy by split and position, and worked examples."""
        yield from evaluation_text(result)

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """Accuracy of each split, and by position in the answer."""
        yield evaluation_section(result)


def evaluation_tables(evaluation: "Evaluation") -> dict[str, pd.DataFrame]:
    """Accuracy by split, by position, and worked examples."""
    worked = pd.DataFrame([vars(example) for example in evaluation.worked], columns=["split", "asked", "answer", "given"])
    return {"accuracy": evaluation.accuracy, "positions": evaluation.positions, "worked": worked}


def evaluation_text(result: Result) -> Iterator[Shown]:
    """The tables of an evaluation, and worked examples with wrong characters marked."""
    yield _accuracy(result.tables["accuracy"])
    table = result.tables["positions"]
    positions = sorted(set(table["position"]))
    share = table.set_index(["split", "position"])["accuracy"]
    rows = (
        (str(split), *(f"{100 * share[split, p]:.2f}" if (split, p) in share.index else "–" for p in positions))
        for split in result.tables["accuracy"]["split"]
    )
    yield PageTable("", ("accuracy in % at position", *map(str, positions)), tuple(rows))
    for row in plain_rows(result.tables["worked"]) if "worked" in result.tables else ():
        yield _worked(row)
    if result.configuration.get("zero_weights"):
        yield f"Warning: {result.configuration['zero_weights']}"


def _worked(row: Mapping[str, str]) -> Text:
    """A worked example with right and wrong characters coloured."""
    line = Text(f"{row['split']:18} {row['asked']}")
    for right, given in zip(row["answer"], row["given"], strict=True):
        line.append(given, style="green" if given == right else "bold red")
    return line if row["given"] == row["answer"] else line.append(f"   expected: {row['answer']}")


def evaluation_section(result: Result) -> Section:
    """Accuracy of each split, and by position in the answer."""
    groups = result.tables["positions"].groupby("split", sort=False)
    chart = Chart(
        "Accuracy by position in the answer",
        "position from the left",
        "accuracy in %",
        tuple(_position_line(str(split), rows.sort_values("position")) for split, rows in groups),
        "A dip shows which characters are hard; lines that part show what does not carry over from training. "
        "Bands are one standard error.",
        result.summary,
    )
    text = ["An answer is exact if every character of it is right; ± is one standard error."]
    if result.configuration.get("zero_weights"):
        text.append(f"Warning: {result.configuration['zero_weights']}")
    return Section("Evaluation", tuple(text), (_accuracy(result.tables["accuracy"]),), {"positions": chart}, name="evaluation")


def percent(share: float, error: float) -> str:
    """``91.38 ± 0.04 %``, with more digits if the error would otherwise read as zero."""
    value, spread = 100 * share, 100 * error
    if not math.isfinite(value):
        return "–"
    if not math.isfinite(spread):
        return f"{value:.2f} %"
    digits = max(2, -math.floor(math.log10(spread))) if spread > 0 else 2
    return f"{value:.{digits}f} ± {spread:.{digits}f} %"


def _position_line(split: str, rows: pd.DataFrame) -> Line:
    middle, error = 100 * rows["accuracy"].astype(float), 100 * rows["stderr"].astype(float)
    return Line(split, list(rows["position"]), list(middle), list(middle - error), list(middle + error))


def _accuracy(table: pd.DataFrame) -> PageTable:
    columns = [table[name] for name in ("split", "accuracy", "stderr", "exact", "exact_stderr", "examples")]
    rows = tuple(
        (str(split), percent(right, error), percent(exact, exact_error), f"{examples:,}")
        for split, right, error, exact, exact_error, examples in zip(*columns, strict=True)
    )
    return PageTable("Accuracy by split", ("split", "accuracy per character", "exact answers", "examples"), rows)
