"""Progress of a long computation: silent by default, a bar in terminals and notebooks, lines in log files."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_EVERY = 10.0  # seconds between the lines of a log file
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
        """Begin a stage; back comes a function that takes how much of it is done."""
        self(name, 0, total)
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


class ProgressLines(Progress):
    """A line on how far the current stage is and how long it will take, at regular intervals whether it advances or not."""

    def __init__(self, console: Any, worded: Callable[[str], str] = str, every: float = _EVERY) -> None:
        self._console, self._worded, self._every = console, worded, every
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._report, daemon=True)
        self._stage, self._began, self._text = "", 0.0, ""
        self._share = 0.0

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        """Remember how far a stage is."""
        if stage != self._stage:
            self._stage, self._began = stage, time.monotonic()
        self._share = done / total if total else 0.0
        self._text = f" {done:g}/{total:g}{f' {note}' if note else ''}" if total != 1 else ""
        self._start()

    def parallel(self, running: Mapping[str, tuple[float, str]]) -> None:
        """Remember what is computed at the same time."""
        shown = list(running.items())[:_MOST_LINES]
        self._text = "; ".join(f"{name} {share:.0%}{f' {note}' if note else ''}" for name, (share, note) in shown)
        self._start()

    def message(self, text: str) -> None:
        """Print a line."""
        self._print(self._worded(text))

    def end(self) -> None:
        """Print no more lines."""
        self._ended.set()

    def line(self) -> str:
        """The current stage, how much of it is done, since when, and how long the rest will take at this rate."""
        elapsed = time.monotonic() - self._began
        left = f", about {_clock(elapsed * (1 / self._share - 1))} left" if 0 < self._share < 1 else ""
        done = f" ({self._share:.0%})" if self._share else ""
        return f"{self._stage}:{self._text}{done}{' after' * bool(self._text)} {_clock(elapsed)}{left}"

    def _start(self) -> None:
        if not self._thread.is_alive() and not self._ended.is_set():
            self._thread.start()

    def _report(self) -> None:
        while not self._ended.wait(self._every):
            self._print(self.line())

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _in_notebook() -> bool:
    """Whether this code runs in a cell of a notebook, and not in a program that has merely imported Jupyter."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython() if ipython else None, "kernel")


@contextmanager
def progress_bar(worded: Callable[[str], str] = str) -> Iterator[Progress]:
    """Bars on stderr, a line every 10 s where that is no terminal; in a notebook bars, below the cell.

    ``worded`` rewrites messages, such as parameters to options.
    """
    from rich import progress as bars
    from rich.console import Console

    from normscope.experiments.terminal import Terminal

    console: Console = Terminal(sys.stderr)
    if _in_notebook():
        console = Console()
    elif not console.is_terminal:
        lines = ProgressLines(console, worded)
        try:
            yield lines
        finally:
            lines.end()
        return
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
