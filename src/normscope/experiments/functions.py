"""The Python function of an experiment, with a signature for people, editors and type checkers."""

from collections.abc import Callable
from inspect import Parameter, Signature, cleandoc
from typing import TYPE_CHECKING, Any

from normscope.experiments import execute, kind_of
from normscope.experiments.settings import accepted

if TYPE_CHECKING:
    from normscope.experiments.experiment import Experiment
    from normscope.experiments.result import Result

_COMMON = """    progress: whether to show progress.
    out: a run folder to save the result in; a resumable experiment resumes there.
    overwrite: whether to replace that folder.
"""


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
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=accepted(about),
                  default=Parameter.empty if about.is_required() else about.get_default(call_default_factory=True))
        for name, about in kind.fields().items()
        if name != kind.variadic
    ]  # fmt: skip
    first = (
        [Parameter(kind.variadic, Parameter.VAR_POSITIONAL, annotation=accepted(kind.fields()[kind.variadic]))]
        if kind.variadic
        else []
    )
    only = Parameter.KEYWORD_ONLY
    parameters = (
        [parameter.replace(kind=only) for parameter in parameters]
        if first
        else sorted(parameters, key=lambda parameter: parameter.default is not Parameter.empty)
    )
    common = [
        Parameter("progress", only, default=True, annotation="bool | Progress"),
        Parameter("out", only, default=None, annotation="str | Path | None"),
        Parameter("overwrite", only, default=False, annotation="bool"),
    ]
    return Signature([*first, *parameters, *common], return_annotation="Result")
