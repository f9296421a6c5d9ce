"""Experiments: settings in, a Result out; one file each, discovered by name."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.errors import require_known

if TYPE_CHECKING:
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

_COMMON = """    progress: whether to show progress.
    out: a run folder to save the result in; a resumable experiment resumes there.
    overwrite: whether to replace that folder.
"""


@cache
def summaries() -> dict[str, str]:
    """Every experiment with its summary: the files whose first line is their own name, a colon, and the summary."""
    discovered = {name: summary for name, (_, summary) in _modules().items()}
    order = [*(name for name in _FIRST if name in discovered), *(name for name in discovered if name not in _FIRST)]
    return {name: discovered[name] for name in order}


@cache
def _modules() -> dict[str, tuple[str, str]]:
    """The module and the summary of every experiment."""
    root, modules = Path(__file__).parent.parent, {}
    for package in _PACKAGES:
        for file in sorted((root / package).glob("*.py")):
            with file.open(encoding="utf-8") as lines:
                name, colon, summary = next(lines).strip().strip('"').partition(": ")
            if colon and name == file.stem.replace("_", "-"):
                modules[name] = (f"normscope.{package}.{file.stem}", summary)
    return modules


@cache
def kind_of(command: str) -> "type[Experiment]":
    """The experiment of that name; only its file is imported."""
    from normscope.experiments.experiment import Experiment

    names = summaries()
    require_known("experiment", command, names)
    module = import_module(_modules()[command][0])
    kinds = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Experiment)]
    return next(kind for kind in kinds if kind.__module__ == module.__name__ and kind.__dict__.get("command") == command)


def execute(
    experiment: "Experiment",
    out: Path | str | None = None,
    *,
    overwrite: bool = False,
    formats: tuple[str, ...] = ("html",),
    progress: "Progress | None" = None,
) -> "Result":
    """Run an experiment; with ``out``, continue unfinished work beside it and save the result there."""
    from normscope.experiments.progress import SILENT
    from normscope.machine.files import full_disk_explained
    from normscope.machine.memory import out_of_memory_explained
    from normscope.runs import check_can_grow, check_writable, no_empty_folders, remove_abandoned, run_path

    progress = progress or SILENT
    if out is None:
        with out_of_memory_explained():
            return experiment.run(progress)
    remove_abandoned(run_path(out).parent)
    if experiment.grows:
        check_can_grow(out)
    else:
        check_writable(out, overwrite=overwrite)
    with out_of_memory_explained(), full_disk_explained(out), no_empty_folders(out), experiment.reserve(Path(out)):
        result, advance = experiment.run(progress, Path(out)), progress.stage("writing tables and page", 1)
        result.save(out, formats=formats, overwrite=overwrite)
        advance(1)
        return result


def completed(experiment: "Experiment", path: Path | None, progress: "Progress") -> "Result":
    """The result of an experiment that is part of another: the one under ``path`` if it is of the same inputs, or run now."""
    from normscope.experiments.result import load
    from normscope.runs import is_run

    if path is None:
        return experiment.run(progress)
    if is_run(path):
        saved = load(path)
        if experiment.fits(saved.configuration):
            progress.message(f"complete already: {path.name}")
            return saved
    return execute(experiment, path, overwrite=True, formats=(), progress=progress)


def function_of(command: str) -> "Callable[..., Result]":
    """The Python function of an experiment: its settings as parameters, a Result back."""
    kind = kind_of(command)
    signature = _signature(kind)
    names = [name for name, about in signature.parameters.items() if about.kind is Parameter.POSITIONAL_OR_KEYWORD]

    def call(*values: Any, progress: Any = True, out: Any = None, overwrite: bool = False, **given: Any) -> "Result":
        from normscope.experiments.progress import shown

        if not kind.variadic and len(values) > len(names):
            raise TypeError(f"{command}() takes at most {len(names)} positional settings, not {len(values)}")
        positional = ({kind.variadic: values} if values else {}) if kind.variadic else dict(zip(names, values, strict=False))
        twice = next((name for name in positional if name in given), None)
        if twice is not None:
            raise TypeError(f"{command}() got {twice}= twice, by position and by name")
        given = {**positional, **given}
        with shown(progress) as bar:
            return execute(kind(**given), out, overwrite=overwrite, progress=bar)

    call.__name__ = call.__qualname__ = command
    call.__doc__ = _docstring(kind)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _docstring(kind: "type[Experiment]") -> str:
    fields = "\n".join(f"    {name}: {about.description}" for name, about in kind.fields().items())
    return f"{cleandoc(kind.__doc__ or '')}\n\nArgs:\n{fields}\n{_COMMON}"


def _signature(kind: "type[Experiment]") -> Signature:
    parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=about.annotation,
                  default=Parameter.empty if about.is_required() else about.get_default(call_default_factory=True))
        for name, about in kind.fields().items()
        if name != kind.variadic
    ]  # fmt: skip
    first = [Parameter(kind.variadic, Parameter.VAR_POSITIONAL)] if kind.variadic else []
    only = Parameter.KEYWORD_ONLY
    parameters = (
        [parameter.replace(kind=only) for parameter in parameters]
        if first
        else sorted(parameters, key=lambda parameter: parameter.default is not Parameter.empty)
    )
    common = [
        Parameter("progress", only, default=True),
        Parameter("out", only, default=None),
        Parameter("overwrite", only, default=False),
    ]
    return Signature([*first, *parameters, *common])
