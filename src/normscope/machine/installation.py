"""The installation: versions, extras and folders, from the metadata of packages; none of them is imported."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from normscope.machine.files import cache_folder

if TYPE_CHECKING:
    from packaging.requirements import Requirement

EXTRAS = {
    "gguf": "models from GGUF files, and models that do not fit in memory",
    "explorer": "the server of normscope explore",
    "words": "UMAP maps of journeys (normscope words ... journey --map umap)",
    "text": "speeches to train language models on",
    "training": "TensorBoard logs of trainings",
    "watch": "watched trainings in Lightning, Weights & Biases, MLflow and TensorBoard",
    "sweeps": "sweeps on a Ray cluster",
    "flows": "adaptive solvers (normscope simulate --solver dopri5)",
}  # that people install, and what each brings


@dataclass(frozen=True)
class Dependency:
    """A package that normscope or one of its extras needs.

    Attributes:
        name: on the Python package index.
        needed: which versions, such as ``>=2.6``; empty for any.
        version: the one that is installed; None for none.
        fits: whether that version is one of those that are needed.
    """

    name: str
    needed: str
    version: str | None
    fits: bool


def dependencies() -> dict[str, list[Dependency]]:
    """What normscope needs, under the empty name, and what each of its extras needs besides, under the name of the extra.

    Nothing where normscope runs from its files without being installed.
    """
    from packaging.requirements import Requirement

    try:
        stated = [Requirement(text) for text in requires("normscope") or ()]
    except PackageNotFoundError:
        return {}

    def apply(extra: str) -> "list[Requirement]":
        return [item for item in stated if item.marker is None or item.marker.evaluate({"extra": extra})]

    core = apply("")
    needs = {"": core, **{extra: [item for item in apply(extra) if item not in core] for extra in EXTRAS}}
    return {extra: [_dependency(item) for item in items] for extra, items in needs.items()}


def _dependency(requirement: "Requirement") -> Dependency:
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return Dependency(requirement.name, str(requirement.specifier), None, False)
    fits = requirement.specifier.contains(found, prereleases=True)
    return Dependency(requirement.name, str(requirement.specifier), found, fits)


def install_command(extra: str) -> str:
    """What installs an extra."""
    return f"pip install 'normscope[{extra}]'"


def folders() -> dict[str, Path]:
    """Where files are kept: what can be made again, models of the hub, and the runs of commands that are given here."""
    return {"cache": cache_folder(), "hub": hub_cache(), "runs": Path("runs").absolute()}


def hub_cache() -> Path:
    """Where models of the Hugging Face hub are kept, as ``huggingface_hub`` decides it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()


def hub_models() -> Iterator[str]:
    """Names of the models of the hub that are in its cache."""
    for folder in sorted(hub_cache().glob("models--*")):
        if (folder / "snapshots").is_dir():
            yield folder.name.removeprefix("models--").replace("--", "/")
