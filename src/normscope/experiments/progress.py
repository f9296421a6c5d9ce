"""Progress of a long computation: silent by default, a bar in terminals and notebooks."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_MOST_LINES = 8  # of what is computed at the same time


class Progress:
    """Receives how far a computation is and what should be reported meanwhile; this one shows nothing."""

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        """``done`` of ``total`` units of a stage are complete."""

    def message(self, text: str) -> None:
        """A line for people."""

    def parallel(self, running: Mapping[str, tuple[float, str]]) -> None:
        """What is computed at the same time now: of each its share that is done, from 0 to 1, and a note."""

    def stage(self, name: str, total: float) -> Callable[[float], None]:
        """A function for one stage that takes how much is done."""
        return lambda done: self(name, done, total)


SILENT = Progress()


class ProgressBar(Progress):
    """One bar per stage, with the time left, on stderr or in a notebook; nothing is shown before the first stage."""

    def __init__(self, bars: Any, worded: Callable[[str], str] = str) -> None:
        self._bars, self._worded = bars, worded
        self._tasks: dict[str, Any] = {}
        self._lines: dict[str, Any] = {}

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        """Move the bar of a stage."""
        if stage not in self._tasks:
            self._bars.start()
            for task in self._tasks.values():
                self._bars.stop_task(task)
            self._tasks[stage] = self._bars.add_task(stage, total=total, note=note)
        self._bars.update(self._tasks[stage], completed=done, total=total, note=note)

    def parallel(self, running: Mapping[str, tuple[float, str]]) -> None:
        """Show a bar for each, in place of those shown before."""
        shown = dict(list(running.items())[:_MOST_LINES])
        for name in [name for name in self._lines if name not in shown]:
            self._bars.remove_task(self._lines.pop(name))
        for name, (share, note) in shown.items():
            if name not in self._lines:
                self._lines[name] = self._bars.add_task(name, total=1.0, note="")
            self._bars.update(self._lines[name], completed=round(share, 2), note=note)

    def message(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(self._worded(text), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(worded: Callable[[str], str] = str) -> Iterator[ProgressBar]:
    """Bars on stderr; in a notebook, below the cell. ``worded`` rewrites messages, such as parameters to options."""
    from rich import progress as bars
    from rich.console import Console

    from normscope.experiments.terminal import Terminal

    console: Console = Terminal(sys.stderr)
    if console.is_jupyter or "ipykernel" in sys.modules:
        console = Console()
    columns = (
        bars.TextColumn("{task.description}", markup=False),  # a model may be called [/bold]
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TextColumn("{task.completed:g}/{task.total:g} {task.fields[note]}", markup=False),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    )
    bar = bars.Progress(*columns, console=console)
    try:
        yield ProgressBar(bar, worded)
    except BaseException:
        bar.live.transient = True  # an error is one line, without the bars of what was not finished
        raise
    finally:
        if bar.live.is_started:
            bar.live.stop()
            if not (console.is_terminal or console.is_jupyter or bar.live.transient):
                console.line()  # rich ends the last line on terminals only


@contextmanager
def shown(progress: bool | Progress) -> Iterator[Progress]:
    """The progress that a caller asks for: True for a bar, False for silence, or an object of their own."""
    if isinstance(progress, Progress):
        yield progress
    elif progress:
        with progress_bar() as bar:
            yield bar
    else:
        yield SILENT
