"""doctor: Show what is installed, which device is used, what is missing.

First steps: normscope doctor
"""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normscope import __version__
from normscope.cli.output import JsonOption, echo, examples, print_json, print_table
from normscope.machine.files import size_text
from normscope.machine.installation import EXTRAS, Dependency, dependencies, folders, install_command
from normscope.machine.packages import PACKAGES, PREFIX, installed_in

EXAMPLES = examples("normscope doctor", "normscope doctor --json      (for a bug report)")
_FOLDERS = {
    "cache": "what normscope can compute again; it may be deleted",
    "hub": "models of the Hugging Face hub",
    "runs": "run folders of commands that are run here",
}


def doctor(json: JsonOption = False) -> None:
    """Show what is installed, which device is used, what is missing.

    Versions of Python and of the packages that normscope needs, the device of --device auto and why it is that one, the extras
    with the commands that install them, models of packages, and where caches and run folders are.
    """
    records = list(installation())
    if json:
        print_json(records)
    else:
        _show(records)


def installation() -> Iterator[dict[str, Any]]:
    """The installation as records; ``about`` is what a record describes."""
    needs = dependencies()
    yield {
        "about": "normscope",
        "version": __version__,
        "installed": bool(needs),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "path": str(Path(__file__).parent.parent),
    }
    yield {"about": "device", **_device()}
    yield from ({"about": "package", **vars(package)} for package in needs.pop("", ()))
    for extra, packages in needs.items():
        missing = [_lack(package) for package in packages if not package.fits]
        yield {"about": "extra", "name": extra, "missing": missing, "install": install_command(extra), "brings": EXTRAS[extra]}
    for name, package in PACKAGES.items():
        if package.kind == "model":
            found = installed_in(package.package) is not None
            yield {"about": "model", "name": f"{PREFIX}{name}", "installed": found, "install": package.install}
    for name, folder in folders().items():
        yield {"about": "folder", "name": name, "path": str(folder), "exists": folder.is_dir(), "holds": _FOLDERS[name]}


def _device() -> dict[str, Any]:
    """The device of ``auto``, or why torch reports none."""
    try:
        from normscope.core.devices import device_facts

        return vars(device_facts())
    except (ImportError, OSError) as error:  # torch is missing, or one of its libraries
        return {"device": None, "reason": f"torch cannot be imported: {error}"}


def _lack(package: Dependency) -> str:
    return package.name if package.version is None else f"{package.name}{package.needed} (installed: {package.version})"


def _show(records: list[dict[str, Any]]) -> None:
    """The installation for people."""

    def of(about: str) -> list[dict[str, Any]]:
        return [record for record in records if record["about"] == about]

    (own,), (device,) = of("normscope"), of("device")
    echo(f"normscope {own['version']} with Python {own['python']} on {own['system']}, in {own['path']}\n")
    echo(f"{_device_text(device)}\n")
    if not own["installed"]:
        echo(f"normscope is not installed, it runs from its files: pip install -e {Path(own['path']).parent.parent}\n")
    wrong = [f"{package['name']}{package['needed']}" for package in of("package") if not package["fits"]]
    if wrong:
        echo(f"missing, or another version is installed: {', '.join(wrong)}: pip install --upgrade normscope\n")
    rows = [[package["name"], package["version"] or "missing", package["needed"]] for package in of("package")]
    print_table(("package", "installed", "needed"), rows)
    rows = [[extra["name"], extra["install"] if extra["missing"] else "installed", extra["brings"]] for extra in of("extra")]
    print_table(("extra", "installed, or how to get it", "brings"), rows)
    rows = [[m["name"], "installed" if m["installed"] else m["install"]] for m in of("model")]
    print_table(("model", "installed, or how to get it"), rows)
    rows = [[f["path"], f["holds"] + ("" if f["exists"] else " (none yet)")] for f in of("folder")]
    print_table(("folder", "holds"), rows)


def _device_text(device: dict[str, Any]) -> str:
    if device["device"] is None:
        return f"device: none: {device['reason']}"
    return (
        f"device: {device['device']} ({device['name']}): {device['reason']}; {size_text(device['memory'])} of memory, "
        f"{size_text(device['free'])} free; threads: {device['threads']} on {device['cores']} cores"
    )
