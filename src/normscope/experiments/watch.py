"""watch: Follow a training that is being watched, as a page.

Train: normscope watch runs/gpt
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import model_validator

from normscope.errors import InputError
from normscope.experiments.experiment import Experiment, Shown
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result, load
from normscope.experiments.settings import Accepts, setting
from normscope.machine.files import replace_text
from normscope.measures.base import Quantity
from normscope.results.findings import cards_text, most_important
from normscope.results.sections import PageTable, Section
from normscope.results.tables import cell, plain_rows, table_of
from normscope.runs import FINISHED, RUNNING, UNFINISHED, growth, has_segments, is_run, open_run, run_path, segments_of
from normscope.watch.quantities import QUANTITIES
from normscope.watch.run_folder import COMMAND, WATCHED, watched_run
from normscope.watch.sections import watch_sections

PAGE = "report.html"
_LOOK, _EVERY = 0.2, 2.0  # seconds between two looks at the lock, and at the segments
_PAGE_EVERY = 5.0  # seconds between two pages, at least
_SHARE = 10  # a page that takes a second to make is made every ten
_PORT = 7007
_LONG = ("alarms", "faults")  # tables of which --json prints every row


class WatchedRun(Experiment):
    """Follow a training that is being watched, as a page.

    FOLDER is what a training writes to with normscope.watch(model, probe=batch, to=FOLDER), or the run folder of
    normscope train --watch.
    While the training runs, the page is written again and again, and shows the news by itself; Ctrl-C stops that.
    The page of a training that has ended is written once. Nothing but the page is written, and never to the tables.

    Example:
        >>> import normscope as ns, pandas as pd
        >>> from normscope.watch.run_folder import WatchedFolder
        >>> folder = WatchedFolder("runs/gpt")
        >>> folder.begin({"model": "gpt", "layers": 2, "every": 100})
        >>> for step in (1, 100):
        ...     folder.write([ns.watch.Snapshot(step, {"steps": pd.DataFrame({"step": [step], "loss": [4.0]})})])
        >>> folder.close()
        >>> ns.load("runs/gpt").tables["steps"]["step"].tolist()
        [1, 100]
        >>> list(ns.follow("runs/gpt", progress=False).figures)
        ['steps-loss']
    """

    command: ClassVar[str] = COMMAND
    title: ClassVar[str] = "Watched training"
    grows: ClassVar[bool] = True
    usage: ClassVar[tuple[str, ...]] = (
        "normscope watch runs/gpt                    (follows the run; the page is runs/gpt/report.html)",
        "normscope watch runs/gpt --serve            (the page over HTTP, for browsers on this machine)",
        "normscope watch runs/gpt --once --json      (the state now)",
        "normscope watch runs/gpt --out copy --format html,png,csv",
        "normscope compare runs/gpt runs/gpt-2",
    )
    quantities: ClassVar[tuple[Quantity, ...]] = QUANTITIES

    folder: Annotated[Path, Accepts(complete="runs")] = setting(help="The run folder of a watched training.", argument=True)
    once: bool = setting(False, "Write the page once, also while the training runs.")
    serve: bool = setting(False, "Serve the page over HTTP, for browsers on this machine, until Ctrl-C; write nothing.")
    port: int = setting(_PORT, "With serve=True: the port; 0 for any that is free.", ge=0, le=65535)

    @model_validator(mode="after")
    def _is_watched(self) -> "WatchedRun":
        if self.once and self.serve:
            raise InputError("serve=True follows the run, once=True does not: choose one of them")
        watched_run(self.folder)
        return self

    @property
    def place(self) -> Path:
        """Where the watched run is now; that of a training of normscope moves into its run folder at the end."""
        return watched_run(self.folder)

    @classmethod
    def sweep_fields(cls) -> tuple[str, ...]:
        """None: there is nothing to compute."""
        return ()

    @property
    def saved(self) -> bool:
        """A page over HTTP is not saved."""
        return not self.serve

    def default_folder(self) -> Path:
        """The page goes into the folder of the run, or, while that is only unfinished work, beside it."""
        moves = UNFINISHED in self.place.parent.name
        return self.folder.with_name(f"{self.folder.name}-{WATCHED}") if moves else self.place

    def reserve(self, folder: Path) -> AbstractContextManager[None]:
        """Refuse a place that holds something else: nothing but the page may be replaced."""
        place = run_path(folder)
        if place != run_path(self.place) and place.exists():
            ours = is_run(place) and not has_segments(place) and open_run(place).description["command"] == COMMAND
            if not ours and (not place.is_dir() or any(child.name != PAGE for child in place.iterdir())):
                raise InputError(f"'{folder}' exists and is no copy of a watched run; choose another out=")
        return nullcontext()

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """Follow the run until it ends, or read it once."""
        if self.serve:
            return self._serve(progress)
        if self.once or folder is None or self.state != RUNNING:
            return self.result()
        return self._write_pages(progress, folder)

    @property
    def state(self) -> str:
        """Whether the run is running, finished or interrupted."""
        return growth(self.place) if has_segments(self.place) else FINISHED

    def result(self) -> Result:
        """The run as it is now."""
        return load(self.place)

    def _write_pages(self, progress: Progress, folder: Path) -> Result:
        """Write the page whenever there is something new, until the run ends."""
        place = run_path(folder)
        place.mkdir(parents=True, exist_ok=True)
        progress.message(f"following {self.folder}: the page is {folder / PAGE}; Ctrl-C stops")

        def write(result: Result, seconds: float) -> None:
            replace_text(place / PAGE, result.to_html({"seconds": seconds}), sync=False)

        try:
            return self._follow(write, progress, ends=True)
        except (KeyboardInterrupt, SystemExit):
            self.result().save(folder)  # the last page does not load itself again
            raise

    def _serve(self, progress: Progress) -> Result:
        """Serve the page until Ctrl-C."""
        from normscope.report.serve import PageServer

        with PageServer(self.port) as server:
            progress.message(f"serving {self.folder} at {server.url}; Ctrl-C stops")
            return self._follow(lambda result, _: server.publish(result.to_html(server.next)), progress, ends=False)

    def _follow(self, show: Callable[[Result, float], None], progress: Progress, *, ends: bool) -> Result:
        """Show the run whenever it has grown; making pages takes a tenth of the time at most."""
        shown, pause = None, _PAGE_EVERY
        while True:
            state, began = self.state, time.monotonic()
            now, wait = (state, segments_of(self.place)), _EVERY
            if ends and state != RUNNING:
                return self.result()
            if now != shown:
                result = self.result()
                show(result, pause)
                _report(progress, result)
                shown, wait = now, pause
                pause = max(_PAGE_EVERY, _SHARE * (time.monotonic() - began))
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline and self.state == state:
                time.sleep(_LOOK)

    @classmethod
    def facts(cls, result: Result) -> list[tuple[str, str]]:
        """The state of the run, how far it is, and what the model is."""
        steps, about = table_of(result.tables, "steps"), result.configuration
        last = {} if steps is None else plain_rows(steps.tail(1))[0]
        alarms = len(result.tables.get("alarms", ()))
        facts = [("state", state_of(result))]
        if last:
            facts += [("step", f"{last['step']:,}"), ("probes", f"{len(result.tables['steps']):,}")]
        if last.get("loss") is not None:
            facts.append(("loss", f"{last['loss']:.4g}"))
        facts.append(("alarms", f"{alarms:,}"))
        return facts + [
            (name, f"{about[name]:,}") for name in ("layers", "heads", "parameters") if isinstance(about.get(name), int)
        ]

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """The last row of every layer, head, norm and scale; all alarms and non-finite values."""
        steps = table_of(result.tables, "steps")
        last = None if steps is None else steps["step"].max()
        shown = {
            name: table if name in _LONG or "step" not in table else table[table["step"] == last]
            for name, table in result.tables.items()
        }
        return [{"table": name, **row} for name, table in shown.items() for row in plain_rows(table)]

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """What is watched, how its curves began, went and are now, and the alarms."""
        yield f"{result.summary} ({', '.join(f'{name} {value}' for name, value in cls.facts(result)[:4])})"
        rows = []
        for quantity in QUANTITIES:
            curve = quantity.curve(result.tables[quantity.table]) if quantity.table in result.tables else None
            if curve is not None and len(curve):
                numbers = (curve["y"].iloc[0], curve["y"].iloc[-1], curve["y"].min(), curve["y"].max())
                rows.append((quantity.title, *(cell(float(number), ".4g") for number in numbers)))
        if rows:
            yield PageTable("", ("", "first", "last", "smallest", "largest"), tuple(rows))
        yield from cards_text(result.findings) if most_important(result.findings) else (f.text for f in result.findings)

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """Alarms, curves and maps."""
        yield from watch_sections(result.tables, result.summary)


def state_of(result: Result) -> str:
    """Whether the run of a result is running, finished or interrupted; a copy is of a finished one."""
    return growth(result.path) if result.path is not None and has_segments(result.path) else FINISHED


def _report(progress: Progress, result: Result) -> None:
    steps = table_of(result.tables, "steps")
    if steps is not None:
        last = plain_rows(steps.tail(1))[0]
        loss, alarms = last.get("loss"), len(result.tables.get("alarms", ()))
        note = f"{f'loss {loss:.4g}, ' if loss is not None else ''}{alarms} alarm{'s' * (alarms != 1)}"
        progress("step", last["step"], last["step"], note)
