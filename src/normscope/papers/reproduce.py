"""reproduce: Make a paper's figure or table, beside what was published.

Schemes and theory: normscope reproduce 2:fig2
"""

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import pandas as pd
from pydantic import AfterValidator, model_validator

from normscope.errors import InputError
from normscope.experiments.experiment import Message, Seeded, Shown
from normscope.experiments.on_model import as_model
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Names, setting
from normscope.papers import Entry, all_entries, find_entries
from normscope.papers.entry import NOT_RUN, VERDICTS, Made, Request
from normscope.papers.gallery import Row, Tables, entry_section, gallery_sections, left_out, with_worst
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows
from normscope.runs import is_run, locked, new_run, open_run, run_path

FOLDER = Path("runs/papers")
_ENTRIES, _UNFINISHED = "entries", "unfinished"  # folders in a gallery
_TABLES = ("entries", "values", "residuals", "panels", "curves")


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    find_entries(names)
    return names


class Reproduce(Seeded):
    """Make a paper's figure or table, beside what was published.

    Without arguments, lists all figures and tables of the three papers and some of others, what each needs, and its last
    verdict, here (runs/papers) or in the documentation. The short form of an entry takes seconds to a minute on two idle
    cores; --full is the full scale that the list names. The folder is a gallery that grows: it keeps every entry that was
    made, and its page shows all. If interrupted, the same command resumes.

    Example:
        >>> import normscope as ns
        >>> ns.reproduce("2:speeds", progress=False).tables["entries"][["entry", "verdict"]].values.tolist()
        [['2:speeds', 'reproduced']]
    """

    command: ClassVar[str] = "reproduce"
    title: ClassVar[str] = "The papers, figure by figure"
    resumable: ClassVar[bool] = True
    grows: ClassVar[bool] = True
    variadic: ClassVar[str] = "entries"
    usage: ClassVar[tuple[str, ...]] = (
        "normscope reproduce                                  (what there is, what it needs, its last verdict)",
        "normscope reproduce 2:fig2 2:fig3",
        "normscope reproduce 2:fig5a --full --device cuda     (100,000 runs; interrupted? the same command resumes)",
        "normscope reproduce 3:table1 --model gpt2",
        "normscope reproduce --all --format html,md           (what this machine can, as one gallery)",
    )

    entries: Annotated[Names, AfterValidator(_known)] = setting(
        (), "Figures and tables to make: 2:fig5a, or 2 for all of a paper. Without any: a list.", shown="", argument=True
    )
    everything: bool = setting(
        False, "Make all of them; those that are complete in the folder are not made again.", option="--all"
    )
    full: bool = setting(
        False,
        "At full scale, as the list says: minutes on a GPU, hours on a CPU. Paper 1 also needs model= with trained models.",
    )
    runs: int | None = setting(
        None, "Number of runs of an ensemble.", shown="what a minute allows; 100,000 with full=True", ge=2
    )
    model: Names | None = setting(
        None, "Comma-separated models to measure, for papers 1 and 3.", shown="the models of the package"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Reproduce":
        if self.everything and self.entries:
            raise InputError(f"everything=True makes all of them; '{self.entries[0]}' is one argument too many")
        for name in ("runs", "model", "full"):
            takers = [entry.id for entry in all_entries().values() if name in entry.takes]
            if getattr(self, name) and not any(entry.id in takers for entry in self.chosen):
                what = f"{self.entries[0]}" if self.entries else "the list"
                raise InputError(f"{name}= has no meaning for {what}; it belongs to {', '.join(takers)}")
        for model in self.model or ():
            as_model(model)
        return self

    @cached_property
    def chosen(self) -> list[Entry]:
        """The entries to make; none for the list."""
        return find_entries(self.entries) if self.entries or self.everything else []

    @property
    def request(self) -> Request:
        """How they are made."""
        return Request(self.full, self.runs, _distinct(self.model or ()), self.seed, self.device)

    @property
    def saved(self) -> bool:
        """Not for the list."""
        return bool(self.chosen)

    @property
    def summary(self) -> str:
        """One line for people."""
        return f"{len(self.chosen)} entries; {'full scale' if self.full else 'short form'}; seed {self.seed}"

    @classmethod
    def sweep_fields(cls) -> tuple[str, ...]:
        """None: the gallery has its own resuming."""
        return ()

    def default_folder(self) -> Path:
        """Always the same, so that the gallery grows."""
        return FOLDER

    @contextmanager
    def reserve(self, folder: Path) -> Iterator[None]:
        """Keep other processes out of the gallery, and the gallery out of folders with something else."""
        target = run_path(folder)
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()) and not any((target / name).is_dir() for name in (_ENTRIES, _UNFINISHED)):
            raise InputError(f"'{folder}' exists and is no gallery; choose another out=")
        entries = target / _ENTRIES
        entries.mkdir(exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(entries / "lock"))
            except BlockingIOError:
                raise InputError(f"another process is writing to '{folder}'; choose another out=") from None
            try:
                yield
            finally:
                if not any(entries.glob("*/run.json")):
                    shutil.rmtree(entries, ignore_errors=True)

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """Make the entries that were chosen, one after the other, and show all that the folder holds; or list them."""
        if not self.chosen:
            tables = {"entries": listing(FOLDER)}
            return Result(type(self), {**self.record, "list": True}, tables, f"{len(tables['entries'])} figures and tables")
        request = replace(self.request, folder=_work(folder), progress=progress)
        refused: dict[str, InputError] = {}
        made = dict(self._all_made(request, folder, refused))
        if folder is not None:
            _remove({name for tables in made.values() for name in _experiments(tables)}, run_path(folder) / _UNFINISHED)
            made = {**saved_entries(folder), **made}
        tables = merged([made[name] for name in all_entries() if name in made])
        if refused:
            tables["left_out"] = pd.DataFrame([{"entry": name, "reason": str(error)} for name, error in refused.items()])
        summary = f"{len(tables['entries'])} figures and tables; seed {self.seed}"
        configuration = {**self.record, "list": False}
        return Result(type(self), configuration, tables, summary, self.seed, self.device)

    def _all_made(self, request: Request, folder: Path | None, refused: dict[str, InputError]) -> Iterator[tuple[str, Tables]]:
        """The entries that were chosen; ``refused`` collects those that a given model does not fit.

        They are left out, unless none is left or they were chosen by their own names. Entries that measure the model are made
        first: if it fits none, nothing else is made in vain.
        """
        measuring = [entry for entry in self.chosen if request.models and "model" in entry.takes]
        for entry in [*measuring, *(entry for entry in self.chosen if entry not in measuring)]:
            try:
                yield entry.id, self._made(entry, replace(request, earlier={}), folder)
            except InputError as error:
                if entry.id in self.entries or entry not in measuring:
                    raise
                refused[entry.id] = error
                if len(refused) == len(measuring):
                    raise
                request.progress.message(f"left out: {entry.id}: {error}")

    def _made(self, entry: Entry, request: Request, folder: Path | None) -> Tables:
        """The tables of an entry; with ``--all`` those that were saved with the same settings."""
        record, progress = request.record(entry.takes), request.progress
        path = None if folder is None else run_path(folder) / _ENTRIES / entry.name
        if self.everything and path is not None and is_run(path):
            saved = open_run(path)
            if saved.description["configuration"] == record:
                progress.message(f"complete already: {entry.id}")
                return {name: saved.table(name) for name in _TABLES}
        needs = (
            f"{self.runs:,} runs"
            if self.runs and "runs" in entry.takes
            else entry.full
            if self.full and entry.full
            else entry.needs
        )
        progress.message(f"{entry.id} {entry.title}: {needs}")
        began, started = time.monotonic(), datetime.now(UTC)
        found = entry.make(request)
        seconds = time.monotonic() - began + sum(request.earlier.values())
        tables = Made(entry, found, record, seconds, datetime.now(UTC).date().isoformat(), request.earlier).tables
        if path is not None:
            with new_run(
                path, self.command, record, seed=self.seed, device=self.device, started=started, overwrite=True
            ) as run:
                for name, table in tables.items():
                    run.write_table(name, table)
        return tables

    @classmethod
    def records(cls, result: Result) -> list[Row]:
        """A record for every entry that was made, or that the list has, with its values and residuals."""
        rows = [row for row in plain_rows(result.tables["entries"]) if row["entry"] in cls._wanted(result)]
        for row in rows:
            for name in ("values", "residuals"):
                if name in result.tables:
                    own = result.tables[name][result.tables[name]["entry"] == row["entry"]]
                    row[name] = plain_rows(own.drop(columns="entry"))
        return rows

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The list; or the entries that were made, in full, and the others in a line each."""
        if result.configuration["list"]:
            rows = plain_rows(result.tables["entries"])
            cells = tuple((row["entry"], row["title"], row["needs"], row["full"] or "–", row["verdict"]) for row in rows)
            yield PageTable("", ("entry", "what it shows", "needs", "full scale", "last verdict"), cells)
            yield "normscope reproduce 2:fig2 makes one, --all what this machine can."
            return
        wanted = cls._wanted(result)
        for row in with_worst(result.tables):
            if row["entry"] in wanted:
                yield f"{row['entry']} {row['title']}: {row['verdict']}"
                if len(wanted) <= 4:
                    section = entry_section(row, result.tables)
                    yield from section.text
                    yield from section.tables
                elif row["worst"] != "–":
                    yield f"  decisive residual {row['worst']}"
        yield from map(Message, left_out(result.tables))

    @classmethod
    def _wanted(cls, result: Result) -> set[str]:
        """The entries that were named; all, if none was."""
        return {entry.id for entry in find_entries(tuple(result.configuration["entries"]))}

    @classmethod
    def facts(cls, result: Result) -> list[tuple[str, str]]:
        """How many entries have each verdict."""
        verdicts = list(result.tables["entries"]["verdict"])
        return [(verdict, str(verdicts.count(verdict))) for verdict in VERDICTS if verdict in verdicts]

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The gallery."""
        if "residuals" in result.tables:
            yield from gallery_sections(result.tables)


def _work(folder: Path | None) -> Path | None:
    """Where the experiments of entries are kept until all requested entries are made."""
    return None if folder is None else run_path(folder) / _UNFINISHED


def _experiments(tables: Tables) -> list[str]:
    """The experiments that a saved entry ran; older galleries do not name them."""
    entries = tables["entries"]
    return entries["experiments"].iloc[0].splitlines() if "experiments" in entries else []


def _remove(experiments: Iterable[str], folder: Path) -> None:
    """Remove experiments whose entries are made, and the folder if no unfinished entry has left any there."""
    for name in experiments:
        shutil.rmtree(folder / name, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _distinct(models: tuple[str, ...]) -> tuple[str, ...]:
    """Each model once, whichever way its path is written."""
    return tuple({str(Path(name).resolve()) if Path(name).exists() else name: name for name in reversed(models)}.values())[::-1]


def saved_entries(folder: Path) -> dict[str, Tables]:
    """The tables of every entry that is complete in a gallery."""
    runs = {entry.id: run_path(folder) / _ENTRIES / entry.name for entry in all_entries().values()}
    return {name: {table: open_run(path).table(table) for table in _TABLES} for name, path in runs.items() if is_run(path)}


def merged(parts: list[Tables]) -> Tables:
    """The tables of several entries as one of each kind."""
    return {name: pd.concat([part[name] for part in parts], ignore_index=True) for name in _TABLES}


def listing(folder: Path) -> pd.DataFrame:
    """Every entry with what it needs and its last verdict: in the gallery here, or in the shipped one."""
    from normscope.papers.curves import verdicts

    here = {name: plain_rows(tables["entries"])[0] for name, tables in saved_entries(folder).items()}
    shipped = verdicts()
    rows = []
    for entry in all_entries().values():
        last = here.get(entry.id) or shipped.get(entry.id, {})
        rows.append(
            {"entry": entry.id, "title": entry.title, "needs": entry.needs, "full": entry.full, "published": entry.published,
             "verdict": last.get("verdict", NOT_RUN), "date": last.get("date", ""),
             "command": entry.command(json.loads(last["request"]) if last else {"seed": 0}),
             "commands": "\n".join(entry.commands)}
        )  # fmt: skip
    return pd.DataFrame(rows)
