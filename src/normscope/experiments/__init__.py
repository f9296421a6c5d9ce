"""Experiments: settings in, a Result out; one file each, discovered by name."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from normscope.experiments.headers import Entry, entries

if TYPE_CHECKING:
    from pathlib import Path

    from normscope.experiments.experiment import Experiment
    from normscope.experiments.progress import Progress
    from normscope.experiments.result import Result

_FIRST = (
    "simulate",
    "ensemble",
    "train",
    "watch",
    "evaluate",
    "export",
    "stability",
    "subspaces",
    "words",
    "verify",
    "reproduce",
    "audit",
    "check-scheme",
    "compare",
    "advise",
    "sweep",
)
_PACKAGES = ("experiments", "sweeps", "papers")  # whose files are searched: those that run others are defined after them


@cache
def catalog() -> dict[str, Entry]:
    """Every experiment by name, as the head of its file describes it."""
    discovered = {name: entry for package in _PACKAGES for name, entry in entries(package).items()}
    order = [*(name for name in _FIRST if name in discovered), *(name for name in discovered if name not in _FIRST)]
    return {name: discovered[name] for name in order}


def summaries() -> dict[str, str]:
    """Every experiment with its summary."""
    return {name: entry.summary for name, entry in catalog().items()}


@cache
def kind_of(command: str) -> "type[Experiment]":
    """The experiment of that name; only its file is imported."""
    from normscope.errors import require_known
    from normscope.experiments.experiment import Experiment

    require_known("experiment", command, catalog())
    module = import_module(catalog()[command].module)
    kinds = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Experiment)]
    return next(kind for kind in kinds if kind.__module__ == module.__name__ and kind.__dict__.get("command") == command)


def timed(experiment: "Experiment", progress: "Progress", path: "Path | None" = None) -> "Result":
    """Run an experiment, which may resume from work beside ``path``; its result has the time at which the work began."""
    from dataclasses import replace
    from datetime import UTC, datetime

    began = datetime.now(UTC)
    return replace(experiment.run(progress, path), started=began)


def execute(
    experiment: "Experiment",
    out: "Path | str | None" = None,
    *,
    overwrite: bool = False,
    formats: tuple[str, ...] = ("html",),
    progress: "Progress | None" = None,
) -> "Result":
    """Run an experiment; with ``out``, continue unfinished work beside it and save the result there."""
    from pathlib import Path

    from normscope.errors import InputError
    from normscope.experiments.progress import SILENT
    from normscope.machine.files import full_disk_explained
    from normscope.machine.memory import out_of_memory_explained
    from normscope.runs import check_can_grow, check_writable, no_empty_folders, remove_abandoned, run_path

    progress = progress or SILENT
    if out is not None and not experiment.saved and not experiment.preview:
        raise InputError(f"out={out} has no meaning here: nothing is saved")
    if out is None or experiment.preview:
        with out_of_memory_explained():
            return timed(experiment, progress)
    remove_abandoned(run_path(out).parent)
    if experiment.grows:
        check_can_grow(out)
    else:
        check_writable(out, overwrite=overwrite)
        for path in experiment.inputs:
            if run_path(out) == run_path(path):
                raise InputError(f"'{out}' is read, and would be replaced; choose another out=")
            if run_path(out) in run_path(path).parents:
                raise InputError(f"'{out}' would be replaced, and '{path}' in it is read; choose another out=")
    with out_of_memory_explained(), full_disk_explained(out), no_empty_folders(out), experiment.reserve(Path(out)):
        result, advance = timed(experiment, progress, Path(out)), progress.stage("writing tables and page", 1)
        result.save(out, formats=formats, overwrite=overwrite)
        advance(1)
        return result


def completed(experiment: "Experiment", path: "Path | None", progress: "Progress") -> "Result":
    """The result of an experiment that is part of another: the one under ``path`` if it is of the same inputs, or run now."""
    from normscope.experiments.result import load
    from normscope.runs import is_run

    if path is None:
        return timed(experiment, progress)
    if is_run(path):
        saved = load(path)
        if experiment.fits(saved.configuration):
            progress.message(f"complete already: {path.name}")
            return saved
    return execute(experiment, path, overwrite=True, formats=(), progress=progress)
