"""What installed Python packages bring besides code: models and texts, without importing them."""

from importlib.util import find_spec
from pathlib import Path

from normscope.errors import MissingExtraError

PREFIX = "package:"


def packaged(package: str, inside: str, name: str, install: str) -> Path:
    """The path of a file or folder in an installed package.

    Args:
        package: as Python imports it; it is not imported, since what it would import itself may be missing.
        inside: the path within it.
        name: what a user calls it, for the message.
        install: what installs it.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(f"the package of '{name}' is not installed: {install}")
    return Path(spec.submodule_search_locations[0]) / inside
