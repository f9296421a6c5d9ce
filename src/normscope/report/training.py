"""Sections of training and evaluation, from their tables."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from normscope.report.write import Report, tables_of, write_report
from normscope.results import Chart, Line, PageTable, Section
from normscope.results.tables import Tables, needed_table
from normscope.runs import RunFolder

POINTS = 400  # more than these would not show in a chart


def write_training_report(run: RunFolder, settings: str, name: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page of a training run; ``name`` is the scheme."""
    tables = tables_of(run)
    metrics, tests = needed_table(tables, "metrics"), evaluation_section(tables, settings)
    write_report(run.path, Report("Training", settings, [training_section({name: metrics}, settings), tests]), formats)


def write_evaluation_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page of an evaluation."""
    write_report(run.path, Report("Evaluation", settings, [evaluation_section(tables_of(run), settings)]), formats)


def training_section(metrics: Mapping[str, pd.DataFrame], settings: str) -> Section:
    """Loss, accuracy and learning rate against examples seen, a line for each table of metrics by its name."""
    block = max(math.ceil(len(table) / POINTS) for table in metrics.values())
    small_print = f"{settings}; every point is a mean over {block} rows of the table" if block > 1 else settings
    columns = ["examples", "loss", "accuracy", "rate"]
    drawn = {name: block_means(table[columns], block) for name, table in metrics.items()}

    def chart(title: str, column: str, label: str, caption: str, factor: float = 1.0, log_y: bool = False) -> Chart:
        lines = tuple(Line(name, list(table["examples"]), list(factor * table[column])) for name, table in drawn.items())
        return Chart(title, "examples", label, lines, caption, small_print, log_y=log_y)

    charts = {
        "loss": chart(
            "Loss",
            "loss",
            "loss",
            "Spikes are instability; a curve that is still falling at its end was stopped early.",
            log_y=True,
        ),
        "accuracy": chart(
            "Accuracy per answer token",
            "accuracy",
            "accuracy in %",
            "On the training batches; a long plateau and then a rise is a rule learnt late.",
            factor=100,
        ),
        "learning-rate": chart(
            "Learning rate",
            "rate",
            "learning rate",
            "Where this curve bends, it may cause a bend in the others.",
        ),
    }
    text = tuple(line for name, table in metrics.items() for line in _progress(table, name))
    return Section("Training", text, figures=charts)


def evaluation_section(tables: Tables, settings: str) -> Section:
    """Accuracy of each split, and by position in the answer."""
    accuracy = _accuracy_table(needed_table(tables, "accuracy"))
    lines = tuple(
        _position_line(str(split), rows.sort_values("position"))
        for split, rows in needed_table(tables, "positions").groupby("split", sort=False)
    )
    chart = Chart(
        "Accuracy by position in the answer",
        "position from the left",
        "accuracy in %",
        lines,
        "A dip shows which characters are hard; lines that separate show what does not generalise. "
        "Bands are one standard error.",
        settings,
    )
    text = ("An answer counts as exact if every character of it is right; ± is one standard error.",)
    return Section("Evaluation", text, (accuracy,), {"positions": chart})


def _progress(metrics: pd.DataFrame, name: str) -> tuple[str, ...]:
    """How far the run came, and where it diverged if it did."""
    if metrics.empty:
        return (f"{name} has no recorded step.",)
    last = metrics.iloc[-1]
    text = f"{name} saw {last['examples']:,.0f} examples up to step {last['step']:,.0f}."
    broken = metrics[~np.isfinite(metrics["loss"])]
    if broken.empty:
        return (text,)
    return (text, f"The loss was first not finite at {broken['examples'].iloc[0]:,.0f} examples; its curve has gaps there.")


def block_means(table: pd.DataFrame, block: int) -> pd.DataFrame:
    """Means over blocks of consecutive rows, the last perhaps shorter; what is not finite makes its block so too."""
    if block <= 1:
        return table
    starts = np.arange(0, len(table), block)
    sizes = np.diff(starts, append=len(table))
    return pd.DataFrame({str(name): np.add.reduceat(_floats(column), starts) / sizes for name, column in table.items()})


def _floats(column: "pd.Series[float]") -> npt.NDArray[np.float64]:
    return np.asarray(column, dtype=np.float64)


def _position_line(split: str, rows: pd.DataFrame) -> Line:
    middle, error = 100 * _floats(rows["accuracy"]), 100 * _floats(rows["stderr"])
    return Line(split, list(rows["position"]), list(middle), list(middle - error), list(middle + error))


def _accuracy_table(table: pd.DataFrame) -> PageTable:
    columns = [table[name] for name in ("split", "accuracy", "stderr", "exact", "exact_stderr", "examples")]
    rows = tuple(
        (str(split), percent(right, error), percent(exact, exact_error), f"{examples:,}")
        for split, right, error, exact, exact_error, examples in zip(*columns, strict=True)
    )
    return PageTable("Accuracy by split", ("split", "per answer token", "exact answers", "examples"), rows)


def percent(share: float, error: float) -> str:
    """``91.38 ± 0.04 %``, with more places if the error would else read as zero."""
    value, spread = 100 * share, 100 * error
    if not math.isfinite(value):
        return "–"
    if not math.isfinite(spread):
        return f"{value:.2f} %"
    places = max(2, -math.floor(math.log10(spread))) if spread > 0 else 2
    return f"{value:.{places}f} ± {spread:.{places}f} %"
