"""Run folders: written beside their final name, renamed when whole, read back.

A folder holds ``run.json`` (command, configuration, versions, device, seed, time), tables as Parquet, and whatever
figures and pages belong to the run. Under its final name it is complete or absent.
"""

import glob
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from normscope import __version__
from normscope.errors import InputError
from normscope.machine.files import read_array, read_json, user_path
from normscope.machine.interrupts import holding_signals, raising_signals
from normscope.runs.locks import NO_LOCKS, locked
from normscope.runs.segments import has_segments, read_arrow, read_segments, segment_tables

DESCRIPTION = "run.json"
_SAVED = {"command", "configuration", "seed", "device", "summary", "tables"}  # must not change after a run was saved
_KEPT = "tables"  # where a kept set says which tables it has
_LONGEST_NAME, _LONGEST_PATH = 200, 3_500  # bytes; names beside a run folder and paths inside are longer (255 and 4,096)
_ABANDONED = re.compile(r"\.(?P<run>.+)\.partial-[0-9a-f]{8}")
UNFINISHED = ".unfinished-"
_PUBLISHED = "published"  # in the folder of unfinished work: which run folder it came to
_REPORTED_PACKAGES = ("torch", "numpy", "pandas", "transformers")


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

    def part(self, name: str) -> "RunFolder":
        """A folder inside for tables and figures of one part of the run."""
        inside = self.path / name
        inside.mkdir(exist_ok=True)
        return RunFolder(inside)

    @property
    def tables(self) -> list[str]:
        """The names of the tables."""
        if has_segments(self.path):
            return segment_tables(self.path)
        return sorted(path.stem for path in self.path.glob("*.parquet"))

    def table(self, name: str) -> pd.DataFrame:
        """Read a table back."""
        if name not in self.tables:
            raise InputError(f"no table '{name}' in '{self.path}'; it has: {', '.join(self.tables) or 'none'}")
        if has_segments(self.path):
            return read_segments(self.path, [name])[name]
        frame: pd.DataFrame = read_arrow(self.path / f"{name}.parquet").to_pandas()
        return frame

    def all_tables(self) -> dict[str, pd.DataFrame]:
        """Read all tables back; those of another shape than the run was saved with are refused."""
        shapes = self.description.get("tables")
        if has_segments(self.path):
            return read_segments(self.path)
        tables = {name: self.table(name) for name in (self.tables if shapes is None else shapes)}
        for name, table in tables.items():
            if shapes is not None and list(map(str, table.columns)) != shapes[name]:
                raise InputError(f"the table '{self.path / name}.parquet' was changed after the run was saved")
        return tables

    @property
    def description(self) -> dict[str, Any]:
        """The content of ``run.json``: one that was written by something else, or changed since, is refused."""
        return read_description(self.path)


@contextmanager
def new_run(
    path: Path | str,
    command: str,
    configuration: Mapping[str, Any],
    *,
    seed: int | None = None,
    device: str = "cpu",
    overwrite: bool = False,
    started: datetime | None = None,
    summary: str = "",
    unfinished: Path | None = None,
) -> Iterator[RunFolder]:
    """A folder to write a run into; it appears under ``path`` when the block ends, and not at all if it fails.

    An existing run under ``path`` is replaced only with ``overwrite``, and only at the end; anything that is not a run
    folder is never replaced. An interrupt or a termination signal removes what was written so far; what a killed process left
    goes with the next run beside it. ``started`` is when the work began, if that was before; ``unfinished`` is where it was
    saved so far, which is removed once the run is there.
    """
    final = run_path(path)
    check_writable(final, overwrite=overwrite)
    started = started or datetime.now(UTC)
    with raising_signals(), no_empty_folders(final), _partial_folder(final) as partial:
        yield RunFolder(partial)
        _write_description(partial, command, configuration, seed, device, started, summary)
        _publish(partial, final, overwrite, unfinished)


@contextmanager
def grown_run(
    path: Path | str,
    command: str,
    configuration: Mapping[str, Any],
    *,
    seed: int | None = None,
    device: str = "cpu",
    started: datetime | None = None,
    summary: str = "",
) -> Iterator[RunFolder]:
    """Make a run of a folder that grew with the work: what the block writes moves into it at its end, ``run.json`` last.

    Files and folders of the same name are replaced. One process at a time: what another left unfinished is removed.
    """
    final, started = run_path(path), started or datetime.now(UTC)
    final.mkdir(parents=True, exist_ok=True)
    for left in final.glob(".partial-*"):
        shutil.rmtree(left, ignore_errors=True)
    with raising_signals(), tempfile.TemporaryDirectory(prefix=".partial-", dir=final) as partial:
        yield RunFolder(Path(partial))
        _write_description(Path(partial), command, configuration, seed, device, started, summary)
        with holding_signals():
            for file in sorted(Path(partial).iterdir(), key=lambda file: file.name == DESCRIPTION):
                if (final / file.name).is_dir():
                    shutil.rmtree(final / file.name)
                os.replace(file, final / file.name)


def run_path(path: Path | str) -> Path:
    """Where a run given as ``path`` ends up: absolute, with ~ and links resolved."""
    try:
        return user_path(path, "run folder").resolve()
    except (OSError, RuntimeError) as error:
        raise InputError(f"cannot use the run folder '{path}': {error}; choose another out=") from error


def open_run(path: Path | str) -> RunFolder:
    """A complete run folder, opened to be read."""
    folder = user_path(path, "run folder")
    if not (folder / DESCRIPTION).is_file():
        what = "is not a run folder (no run.json in it)" if folder.exists() else "does not exist"
        raise InputError(f"'{folder}' {what}")
    return RunFolder(folder)


def read_description(folder: Path) -> dict[str, Any]:
    """The content of ``run.json`` in a folder."""
    path = folder / DESCRIPTION
    content = read_json(path, "run")
    kinds = {"command": str, "configuration": dict, "seed": int | None, "device": str, "versions": dict}
    if not isinstance(content, dict) or not all(isinstance(content.get(name), kind) for name, kind in kinds.items()):
        raise InputError(f"'{path}' does not describe a run of normscope")
    if "digest" in content and (not content.keys() >= _SAVED or content["digest"] != _description_digest(content)):
        raise InputError(f"'{path}' was changed after the run was saved")
    return content


def _description_digest(content: Mapping[str, Any]) -> str:
    """What tells whether the settings in ``run.json`` are those that were saved."""
    return fingerprint({name: content[name] for name in _SAVED})


def check_writable(path: Path | str, *, overwrite: bool) -> None:
    """Refuse, before any work, a place where the run could not be put at the end."""
    final = run_path(path)
    with _refusing(path):
        if final == Path.cwd() or final in Path.cwd().parents:
            raise InputError(f"'{path}' is the working directory, or holds it; choose another out=")
        if final.exists():
            if final == Path(os.path.realpath(os.path.expanduser("~"))):
                raise InputError(f"'{path}' is the home directory; choose another out=")
            if _is_mount_point(final):
                raise InputError(f"'{path}' is a mount point, which cannot be replaced; choose a folder in it as out=")
            if not (final.is_dir() and not any(final.iterdir())):
                if not is_run(final):
                    raise InputError(f"'{path}' exists and is not a run folder; choose another out=")
                if not overwrite:
                    raise InputError(f"'{path}' holds a run already; choose another out=, or overwrite=True to replace it")
        _check_takes_files(final.parent)


def check_can_grow(path: Path | str) -> None:
    """Refuse, before any work, a place where no folder can be made and filled."""
    with _refusing(path):
        _check_takes_files(run_path(path))


@contextmanager
def _refusing(path: Path | str) -> Iterator[None]:
    """Refuse names that are too long, and whatever the system refuses."""
    final = run_path(path)
    if len(os.fsencode(final.name)) > _LONGEST_NAME or len(os.fsencode(final)) > _LONGEST_PATH:
        longest = f"a name has at most {_LONGEST_NAME} bytes, a path {_LONGEST_PATH:,}"
        raise InputError(f"cannot use '{final.name[:20]}…' as a run folder: {longest}; choose another out=")
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot use '{path}' as a run folder: {error.strerror}; choose another out=") from error


def _check_takes_files(folder: Path) -> None:
    """Refuse a folder in which no file can be made; permissions alone do not decide that (/proc, /sys)."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()  # without a name: a process that is killed here leaves nothing
    except OSError as error:
        reason = "it takes no files" if isinstance(error, FileNotFoundError) else error.strerror
        raise InputError(f"cannot write to '{existing}': {reason}; choose another out=") from error


def _is_mount_point(folder: Path) -> bool:
    """Whether something is mounted there; the second check covers folders that are mounted within their own disk."""
    if os.path.ismount(folder):
        return True
    try:
        mounted = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    name = re.sub(rb"[ \t\n\\]", lambda character: b"\\%03o" % ord(character[0]), os.fsencode(folder))
    return any(line.split()[4] == name for line in mounted)


@contextmanager
def no_empty_folders(path: Path | str) -> Iterator[None]:
    """Remove, at the end of the block, those of the folders up to ``path`` that are new and empty."""
    final = run_path(path)
    missing = [folder for folder in (final, *final.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def remove_abandoned(parent: Path) -> None:
    """Remove what killed processes left of runs that they were writing there; nothing that a living one writes is touched.

    A run that had moved aside for the one that was to replace it is put back.
    """
    for lock in parent.glob(".*.partial-*.lock"):
        partial = lock.with_suffix("")
        name = _ABANDONED.fullmatch(partial.name)
        if name is not None:
            with suppress(OSError), locked(lock):
                final, aside = parent / name["run"], _aside(partial)
                if aside.is_dir() and not final.exists():
                    aside.rename(final)
                for left in (partial, aside):
                    shutil.rmtree(left, ignore_errors=True)
                lock.unlink()
    for mark in parent.glob(f".*{UNFINISHED}*/{_PUBLISHED}"):
        with suppress(OSError):
            if mark.read_text() == _identity(parent / mark.parent.name[1:].rpartition(UNFINISHED)[0]):
                _remove_published(mark.parent)


def _identity(folder: Path) -> str:
    """What a folder keeps when it is renamed."""
    about = folder.stat()
    return f"{about.st_dev} {about.st_ino}"


def _remove_published(unfinished: Path) -> None:
    """Remove the unfinished work of a run that is there; the mark that says so goes last."""
    for child in unfinished.iterdir():
        if child.is_dir():
            shutil.rmtree(child, ignore_errors=True)
        elif child.name != _PUBLISHED:
            child.unlink(missing_ok=True)
    shutil.rmtree(unfinished, ignore_errors=True)


def is_run(folder: Path | str) -> bool:
    """Whether a folder is a run of ours, by its description."""
    try:
        return "normscope" in read_json(user_path(folder) / DESCRIPTION, "run")["versions"]
    except (InputError, KeyError, TypeError, IndexError):
        return False


def fresh_path(path: Path | str) -> Path:
    """``path``, or the first of ``path-2``, ``path-3``, ... that is not there yet."""
    return next(candidate for candidate in numbered(path) if not candidate.exists())


def numbered(path: Path | str) -> Iterator[Path]:
    """``path``, ``path-2``, ``path-3``, ..."""
    wanted = Path(path)
    yield wanted
    yield from (wanted.with_name(f"{wanted.name}-{i}") for i in range(2, 100_000))


def fingerprint(configuration: Mapping[str, Any]) -> str:
    """A short text that two configurations share only if they are the same."""
    text = json.dumps(dict(configuration), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def code_fingerprint() -> str:
    """A short text that two versions of the code share only if all that measures, not what prints or draws, is the same."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in ("report", "cli"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def unfinished_folder(path: Path | str, configuration: Mapping[str, Any]) -> Path:
    """Where a long run of that configuration keeps what it has, until it is whole and stands under ``path``."""
    final = run_path(path)
    return final.with_name(f".{final.name}{UNFINISHED}{fingerprint(configuration)}")


def unfinished_runs(path: Path | str) -> list[Path]:
    """The folders of all unfinished runs that are to end up under ``path``, of any configuration."""
    final = run_path(path)
    return sorted(final.parent.glob(f".{glob.escape(final.name)}{UNFINISHED}*"))


def resumable_path(path: Path | str, configuration: Mapping[str, Any]) -> Path:
    """Where a run of that configuration began under ``path``, ``path-2``, ..., or the first of them that nobody uses."""
    name, mark = Path(path).name, f"{UNFINISHED}{fingerprint(configuration)}"
    for folder in sorted(run_path(path).parent.glob(f".{glob.escape(name)}*{mark}")):
        begun = Path(path).with_name(folder.name.removeprefix(".").removesuffix(mark))
        if re.fullmatch(re.escape(name) + r"(-\d+)?", begun.name) and not begun.exists():
            return begun
    return next(candidate for candidate in numbered(path) if not candidate.exists() and not unfinished_runs(candidate))


@dataclass(frozen=True)
class Parts:
    """The finished parts of a long run, kept beside its final folder until the whole is there.

    Parts belong to a configuration: the same run, started again, finds them; another one does not. A part is whole or absent.
    """

    folder: Path

    @classmethod
    def of(cls, path: Path | str, configuration: Mapping[str, Any]) -> "Parts":
        """The parts of the run that is to end up under ``path``."""
        return cls(unfinished_folder(path, configuration))

    def save(self, index: int, values: npt.NDArray[Any]) -> None:
        """Keep part ``index``, whole even if the process dies in the middle."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f"{index:06d}.{os.getpid()}.partial"
        with partial.open("wb") as file:
            np.save(file, values, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._path(index))

    def has(self, index: int) -> bool:
        """Whether part ``index`` is there, readable or not."""
        return self._path(index).is_file()

    def load(self, index: int) -> npt.NDArray[Any] | None:
        """Part ``index``, or None if it is not there or cannot be read."""
        try:
            return read_array(self._path(index), "part of a run")
        except InputError:
            return None

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:06d}.npy"


@dataclass(frozen=True)
class KeptTables:
    """Tables that were measured before, found again by all that they depend on; of many the ones used longest ago go.

    Attributes:
        folder: where they are kept, each set a run folder.
        most: how many sets stay.
    """

    folder: Path
    most: int = 100

    def load(self, key: Mapping[str, Any]) -> dict[str, pd.DataFrame] | None:
        """The tables that were kept under a key, or None if there are none, or not all of them can be read."""
        path = self.folder / fingerprint(key)
        try:
            run = open_run(path)
            tables = {name: run.table(name) for name in run.description["configuration"][_KEPT]}
            now = time.time_ns()  # the clock of a file system may be coarser
            os.utime(path, ns=(now, now))
        except (InputError, OSError, KeyError, TypeError):  # a damaged set is measured again
            return None
        return tables

    def save(self, key: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> None:
        """Keep tables under a key, if that can be done: others may write here too, and what is not kept is measured again."""
        path = self.folder / fingerprint(key)
        with suppress(OSError, InputError), self._alone():
            if not is_run(path):
                shutil.rmtree(path, ignore_errors=True)  # what is left of a damaged one
            with new_run(path, "kept", {**key, _KEPT: list(tables)}, overwrite=True) as run:
                for name, table in tables.items():
                    run.write_table(name, table)
            whole = (path for path in self.folder.iterdir() if not path.name.startswith(".") and is_run(path))
            for old in sorted(whole, key=lambda path: path.stat().st_mtime)[: -self.most]:
                shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process writes at a time; others wait."""
        with locked(self.folder / "lock", math.inf):
            yield


@contextmanager
def _partial_folder(final: Path) -> Iterator[Path]:
    """A hidden folder beside ``final``; what is left of it at the end is removed.

    Its lock is a file beside it: it tells a folder that is being written from one that a killed process left.
    """
    remove_abandoned(final.parent)
    partial = final.with_name(f".{final.name}.partial-{secrets.token_hex(4)}")
    lock = partial.with_name(f"{partial.name}.lock")
    with ExitStack() as stack:
        stack.callback(lock.unlink, missing_ok=True)
        with _refusing(final):
            try:
                stack.enter_context(locked(lock))
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                lock.unlink()  # on a disk without locks nothing is taken for abandoned
            stack.callback(shutil.rmtree, partial, ignore_errors=True)
            partial.mkdir()
        yield partial


def _write_description(folder: Path, *about: Any) -> None:
    tables = {path.stem: _columns(path) for path in sorted(folder.glob("*.parquet"))}
    (folder / DESCRIPTION).write_text(description_text(tables, *about), encoding="utf-8")


def description_text(
    tables: Mapping[str, list[str]],
    command: str,
    configuration: Mapping[str, Any],
    seed: int | None,
    device: str,
    started: datetime,
    summary: str = "",
    ended: bool | None = None,
) -> str:
    """The content of ``run.json``; ``tables`` are the columns of each, ``ended`` of a run that grows whether it has ended."""
    content = {
        "command": command,
        "summary": summary,
        "configuration": dict(configuration),
        "seed": seed,
        "device": device,
        "versions": {"normscope": __version__, "python": platform.python_version(), **_package_versions()},
        "platform": platform.platform(),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 3),
        "tables": dict(tables),
        **({} if ended is None else {"ended": ended}),
    }
    content = json.loads(json.dumps(content, default=str))
    return json.dumps({**content, "digest": _description_digest(content)}, indent=2, ensure_ascii=False) + "\n"


def _columns(table: Path) -> list[str]:
    import pyarrow.parquet as pq

    return [str(name) for name in pq.read_schema(table).names]


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in _REPORTED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _publish(partial: Path, final: Path, overwrite: bool, unfinished: Path | None) -> None:
    """Rename the finished folder to its final name; an older run steps aside first, and back if that fails.

    What may stand there is checked again, since others may have written meanwhile; signals wait until the renaming is over.
    The unfinished work is marked with the identity of the folder before, so that it goes even if this process is killed after.
    """
    with holding_signals():
        check_writable(final, overwrite=overwrite)
        saved = unfinished if unfinished is not None and unfinished.is_dir() else None
        if saved is not None:
            with suppress(OSError):  # a full disk is no reason not to publish
                (saved / _PUBLISHED).write_text(_identity(partial))
        _rename(partial, final)
        if saved is not None:
            with suppress(OSError):  # the next run tries again
                _remove_published(saved)


def _rename(partial: Path, final: Path) -> None:
    if not is_run(final):
        os.rename(partial, final)
        return
    aside = _aside(partial)
    os.rename(final, aside)
    try:
        os.rename(partial, final)
    except BaseException:
        os.rename(aside, final)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _aside(partial: Path) -> Path:
    """Where a run moves that ``partial`` replaces."""
    return partial.with_name(f"{partial.name}.old")
