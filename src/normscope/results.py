"""Run folders: written beside their final name, renamed when whole, read back.

A folder holds ``run.json`` (command, configuration, versions, device, seed, time), tables as Parquet, and whatever
figures and pages belong to the run. Under its final name it is complete or absent.
"""

import hashlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from normscope.errors import InputError

_DESCRIPTION = "run.json"
_REPORTED_PACKAGES = ("normscope", "torch", "numpy", "pandas", "transformers")


@dataclass(frozen=True)
class RunFolder:
    """A folder of results, complete or being written."""

    path: Path

    def write_table(self, name: str, table: pd.DataFrame) -> Path:
        """Write a tidy table as ``NAME.parquet``."""
        target = self.path / f"{name}.parquet"
        table.to_parquet(target, index=False)
        return target

    def write_text(self, name: str, text: str) -> Path:
        """Write a page or a note under its file name."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return target

    @property
    def tables(self) -> list[str]:
        """The names of the tables."""
        return sorted(path.stem for path in self.path.glob("*.parquet"))

    def table(self, name: str) -> pd.DataFrame:
        """Read a table back."""
        if name not in self.tables:
            raise InputError(f"no table '{name}' in '{self.path}'; it has: {', '.join(self.tables) or 'none'}")
        return pd.read_parquet(self.path / f"{name}.parquet")

    @property
    def description(self) -> dict[str, Any]:
        """The content of ``run.json``."""
        content: dict[str, Any] = json.loads((self.path / _DESCRIPTION).read_text(encoding="utf-8"))
        return content


@contextmanager
def new_run(
    path: Path | str,
    command: str,
    configuration: Mapping[str, Any],
    *,
    seed: int | None = None,
    device: str = "cpu",
    overwrite: bool = False,
) -> Iterator[RunFolder]:
    """A folder to write a run into; it appears under ``path`` when the block ends, and not at all if it fails.

    An existing run under ``path`` is replaced only with ``overwrite``, and only at the end; anything that is not a run
    folder is never replaced. An interrupt or a termination signal removes what was written so far.
    """
    final = Path(path).expanduser().absolute()
    check_writable(final, overwrite=overwrite)
    started = datetime.now(UTC)
    with _termination_raises():
        partial = _partial_folder(final)
        try:
            yield RunFolder(partial)
            _write_description(partial, command, configuration, seed, device, started)
            _publish(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def open_run(path: Path | str) -> RunFolder:
    """A complete run folder, for reading."""
    folder = Path(path).expanduser()
    if not (folder / _DESCRIPTION).is_file():
        what = "is not a run folder (no run.json in it)" if folder.exists() else "does not exist"
        raise InputError(f"'{folder}' {what}")
    return RunFolder(folder)


def check_writable(path: Path | str, *, overwrite: bool) -> None:
    """Refuse, before any work, a place where the run could not be put at the end."""
    final = Path(path).expanduser().absolute()
    if final.exists():
        if not (final / _DESCRIPTION).is_file() and not (final.is_dir() and not any(final.iterdir())):
            raise InputError(f"'{path}' exists and is not a run folder; choose another --out")
        if (final / _DESCRIPTION).is_file() and not overwrite:
            raise InputError(f"'{path}' holds a run already; choose another --out, or --overwrite to replace it")
    parent = next(folder for folder in final.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to '{parent}'; choose another --out")


def fresh_path(path: Path | str) -> Path:
    """``path``, or the first of ``path-2``, ``path-3``, ... that is not there yet."""
    wanted = Path(path)
    candidates = (wanted, *(wanted.with_name(f"{wanted.name}-{i}") for i in range(2, 100_000)))
    return next(candidate for candidate in candidates if not candidate.exists())


@dataclass(frozen=True)
class Parts:
    """The finished parts of a long run, kept beside its final folder until the whole is there.

    Parts belong to a configuration: the same run, started again, finds them; another one does not. A part is whole or absent.
    """

    folder: Path

    @classmethod
    def of(cls, path: Path | str, configuration: Mapping[str, Any]) -> "Parts":
        """The parts of the run that is to end up under ``path``."""
        final = Path(path).expanduser().absolute()
        text = json.dumps(dict(configuration), sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        return cls(final.with_name(f".{final.name}.unfinished-{key}"))

    def save(self, index: int, values: npt.NDArray[Any]) -> None:
        """Keep part ``index``, whole even if the process dies in the middle."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f"{index:06d}.partial"
        with partial.open("wb") as file:
            np.save(file, values, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._path(index))

    def load(self, index: int) -> npt.NDArray[Any] | None:
        """Part ``index``, or None if it is not there or cannot be read."""
        try:
            values: npt.NDArray[Any] = np.load(self._path(index), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return values

    def discard(self) -> None:
        """Remove the parts, once the run is whole."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:06d}.npy"


def _partial_folder(final: Path) -> Path:
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{final.name}.partial-", dir=final.parent))
    except OSError as error:
        raise InputError(f"cannot write to '{final.parent}': {error.strerror}; choose another --out") from error


def _write_description(
    folder: Path,
    command: str,
    configuration: Mapping[str, Any],
    seed: int | None,
    device: str,
    started: datetime,
) -> None:
    content = {
        "command": command,
        "configuration": dict(configuration),
        "seed": seed,
        "device": device,
        "versions": {"python": platform.python_version(), **_package_versions()},
        "platform": platform.platform(),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 3),
    }
    text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
    (folder / _DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in _REPORTED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _publish(partial: Path, final: Path) -> None:
    """Rename the finished folder to its final name, an older run stepping aside first."""
    partial.chmod(0o777 & ~_umask())
    if not final.exists():
        partial.rename(final)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.old-", dir=final.parent)) / final.name
    final.rename(aside)
    try:
        partial.rename(final)
    except BaseException:
        aside.rename(final)
        raise
    finally:
        shutil.rmtree(aside.parent, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _termination_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit while a run is being written, so that its cleaning up happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
