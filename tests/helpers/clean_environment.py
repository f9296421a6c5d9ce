"""A clean environment: a new one that has the dependencies of a wheel, linked from this one, and nothing of its extras."""

import os
import subprocess
import sys
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def make_environment(folder: Path, wheel: Path) -> Path:
    """Make a virtual environment with a wheel and what it needs without extras; returns its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True)
    (own,) = distributions(name="normscope", path=[str(site)])
    needed = _needed(own)
    files = [Path(str(file)) for each in needed for file in each.files or () if ".." not in Path(str(file)).parts]
    shared = _tops_of_others(needed)
    for part in {file if file.parts[0] in shared else Path(file.parts[0]) for file in files}:
        (site / part).parent.mkdir(parents=True, exist_ok=True)
        (site / part).symlink_to(Path(str(needed[0].locate_file(part))))
    return folder / "bin"


def _needed(of: Distribution) -> list[Distribution]:
    """Everything that a distribution needs to run, from this environment."""
    needed: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(of, "")]
    while waiting:
        parent, extra = waiting.pop()
        for requirement in map(Requirement, parent.requires or ()):
            name = canonicalize_name(requirement.name)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed[name] = needed.get(name) or distribution(name)
                wanted = {(name, each) for each in ("", *requirement.extras)} - seen
                seen |= wanted
                waiting += [(needed[name], each) for _, each in wanted]
    return list(needed.values())


def _tops_of_others(needed: list[Distribution]) -> set[str]:
    """Folders in which distributions that are not needed have files, too."""
    names = {canonicalize_name(each.metadata["Name"]) for each in needed}
    others = [each for each in distributions() if canonicalize_name(each.metadata["Name"]) not in names]
    return {file.parts[0] for each in others for file in each.files or () if len(file.parts) > 1}


def environment(home: Path) -> dict[str, str]:
    """Variables of a user who has a new account: an empty home, and nothing that leads to this environment."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "OMP_NUM_THREADS", "TMPDIR")}
    return {**kept, "HOME": str(home), "HF_HUB_OFFLINE": "1"}
