"""normscope: what normalization does to a transformer's geometry.

>>> import normscope as ns
>>> mine = ns.Scheme("mine", ns.Slots(input="norm", output="norm", step="1/sqrt(layer)"))
>>> print(mine.law.speed)
r_j·√(t+1)·|A_j|

Everything here is imported when it is first used, so that ``import normscope`` is fast. ``__init__.pyi``, which is generated
from the settings of the experiments (``make generated``), has the types of all names.
"""

__version__ = "0.2.0"

_NAMES = {
    "Scheme": "normscope.schemes:Scheme",
    "Slots": "normscope.schemes:Slots",
    "find_scheme": "normscope.schemes:find_scheme",
    "Model": "normscope.models:Model",
    "open": "normscope.models:open_model",
    "Result": "normscope.experiments.result:Result",
    "load": "normscope.experiments.result:load",
    "Finding": "normscope.results.findings:Finding",
    "InputError": "normscope.errors:InputError",
    "watch": "normscope.watch:",
}  # name → where it is defined; a module itself ends with a colon
_EXPERIMENTS = {"check": "verify", "follow": "watch"}  # name of the function → experiment, where they differ

__all__ = ["Finding", "InputError", "Model", "Result", "Scheme", "Slots", "__version__", "load", "open", "watch"]


def __getattr__(name: str) -> object:
    """A public name, imported now: a class, or the function of an experiment."""
    from importlib import import_module

    if name in _NAMES:
        module, _, attribute = _NAMES[name].partition(":")
        value = getattr(import_module(module), attribute) if attribute else import_module(module)
    else:
        from normscope.experiments import catalog

        command = _EXPERIMENTS.get(name, name.replace("_", "-"))
        if command not in catalog():
            raise AttributeError(f"module 'normscope' has no attribute {name!r}")
        from normscope.experiments.functions import function_of

        value = function_of(command)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from normscope.experiments import catalog

    return sorted({*__all__, *_NAMES, *(command.replace("-", "_") for command in catalog()), *_EXPERIMENTS})
