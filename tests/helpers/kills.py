"""Kills commands at random moments, gives them again, and checks what each of them left: ``make kills`` runs it.

A command is a fork of this process, which has imported everything: it starts at once, and every moment of its work can be hit.
This process itself computes nothing, since threads of libraries do not survive a fork.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from helpers.sweeps import ENSEMBLE
from normscope.cli import main as normscope
from normscope.experiments import kind_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
MODEL = "builtin:addition-small-pre"
_TINY = "layers=2 dim=8 heads=2 head=4 feedforward=8 readout=[8] frequencies=2 batch=8 epoch=4 warmup=0 examples=640"
COMMANDS: dict[str, tuple[str, ...]] = {
    "simulate": ("simulate", "--scheme", "pre,post", "--tokens", "8", "--dim", "8", "--time", "5"),
    "ensemble": ("ensemble", "--scheme", "pre,post", "--runs", "12", "--chunk", "1", "--dim", "6", "--time", "3"),
    "train": (
        "train", "--preset", "tiny", "--checkpoint-every", "0", "--set", "test_examples=16",
        *(argument for change in _TINY.split() for argument in ("--set", change)),
    ),
    "evaluate": ("evaluate", MODEL, "--examples", "32"),
    "audit": ("audit", MODEL, "--examples", "4"),
    "sweep": ("sweep", "plan.toml", "--workers", "2"),
}  # fmt: skip
RESUMABLE = ("ensemble", "train", "sweep")
_IMPORTED = (
    "torch._dynamo", "torch.utils.tensorboard", "pyarrow.parquet", "altair", "vl_convert", "rich.progress",
    "normscope.report.page", "normscope.report.charts", "normscope.measures",
)  # fmt: skip
_LONGEST = 240.0  # seconds until a command that does not end counts as a failure
_ENDED = 20.0  # seconds for the processes that a killed command started
_CLOCK = ("seconds",)  # columns that differ between two runs


@dataclass
class Tally:
    """What happened to the commands of one kind and signal."""

    kills: int = 0
    complete: int = 0  # the command was over, or past its last rename, when the signal came
    writing: int = 0  # a hidden folder stood beside the final one
    resumed: int = 0  # the second command began with what the first had saved
    failures: list[str] = field(default_factory=list)


class Problem(Exception):  # noqa: N818  # it is a finding
    """Something that a killed command must not leave."""


class Killer:
    """Runs commands in a folder, each trial in one of its own."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        self.root, self.draw = root, draw
        self.expected: dict[str, tuple[float, str]] = {}

    def reference(self, name: str) -> tuple[float, str]:
        """How many seconds of a processor a command takes, and what its folder holds."""
        if name not in self.expected:
            folder = self._folder(f"{name}-reference")
            before = os.times()
            status = self._wait(self._start(name, folder))
            after = os.times()
            took = after.children_user + after.children_system - before.children_user - before.children_system
            if status != 0:
                raise RuntimeError(f"{name} ends with status {status}: {(folder / 'stderr').read_text()}")
            self.expected[name] = took, _in_fork(lambda: digest(folder / "runs" / "it"))
        return self.expected[name]

    def trial(self, name: str, number: signal.Signals, tally: Tally) -> None:
        """Kill a command at a random moment, check, give it again, check."""
        took, whole = self.reference(name)
        folder = self._folder(f"{name}-{number.name}-{tally.kills}-{self.draw.getrandbits(24):06x}")
        moment, saving = self.draw.uniform(0.03, 1.0) * took, self.draw.random() < 0.4
        tally.kills += 1
        process = group = self._start(name, folder)
        if saving:  # wait until the result is being written, then a random part of that
            hidden = "runs/it/.partial-*" if name == "sweep" else "runs/.it.partial-*"
            _until(lambda: next(folder.glob(hidden), None) or _over(process), _LONGEST)
            moment = _processor_time(group) + self.draw.uniform(0.0, 0.3)
        _until(lambda: _processor_time(group) >= moment or _over(process), _LONGEST)
        time.sleep(self.draw.uniform(0.0, 0.01))  # processor time is counted in hundredths
        unfinished = not (folder / "runs" / "it" / "run.json").is_file()
        with suppress(ProcessLookupError):
            if number == signal.SIGINT:
                os.killpg(group, number)  # as a terminal does
            else:
                os.kill(process, number)
        status = self._wait(process)
        if not _until(lambda: not _lives(group), _ENDED):
            os.killpg(group, signal.SIGKILL)
            raise Problem(f"processes are left {_ENDED:g} s after the command")
        errors = (folder / "stderr").read_text(errors="replace")
        self._check_end(name, number, status, errors)
        if unfinished and status == 0:
            raise Problem("the signal had no effect")
        if "the result is in" in errors and not (folder / "runs" / "it" / "run.json").is_file():
            raise Problem("there is no result")
        left = sorted(path.name for path in folder.glob("runs/*")) if (folder / "runs").is_dir() else None
        tally.writing += any(".partial-" in entry for entry in left or ())
        tally.complete += "it" in (left or ()) and (folder / "runs" / "it" / "run.json").is_file()
        if (folder / "runs" / "it").exists() and name != "sweep":
            self._check_same(folder, whole)
        if number != signal.SIGKILL:
            self._check_left(name, left)
        again = status != 0 and not (folder / "runs" / "it" / "run.json").is_file()
        if again:
            tally.resumed += any(".unfinished-" in entry for entry in left or ()) or (name == "sweep" and left is not None)
            last = self._wait(self._start(name, folder))
            if last != 0:
                raise Problem(
                    f"given again it ends with status {last}: {(folder / 'stderr').read_text(errors='replace')[-500:]}"
                )
        else:
            self._wait(self._start("ensemble", folder, "other"))  # the next run in the same place
        self._check_same(folder, whole)
        hidden = [str(path.relative_to(folder)) for path in folder.rglob("*") if _is_left(path)]
        if hidden:
            raise Problem(f"after the next run there is still {', '.join(hidden)}")
        shutil.rmtree(folder)

    def _check_end(self, name: str, number: signal.Signals, status: int, errors: str) -> None:
        if status not in (STATUS[number], 0):
            raise Problem(f"status {status} after {number.name}: {errors[-500:]}")
        if "Traceback" in errors or "Exception ignored" in errors:
            raise Problem(f"a traceback: {errors[-1500:]}")
        if status == STATUS[number] and number in WORDS and errors.strip():
            lines = errors.strip().splitlines()
            if not lines[-1].startswith(WORDS[number]):
                raise Problem(f"the last line is {lines[-1]!r}")
            if "the result is in" not in lines[-1] and ("resumes" in lines[-1]) != (name in RESUMABLE):
                raise Problem(f"wrong about what resumes: {lines[-1]!r}")

    def _check_left(self, name: str, left: list[str] | None) -> None:
        """After a signal that a command can answer there is its folder, what it resumes from, or nothing."""
        if left == []:
            raise Problem("an empty folder 'runs' is left")
        allowed = ("it",) if name not in RESUMABLE else ("it", ".it.unfinished-")
        for entry in left or ():
            if not (entry == "it" or (len(allowed) > 1 and entry.startswith(allowed[1]))):
                raise Problem(f"'{entry}' is left")

    def _check_same(self, folder: Path, whole: str) -> None:
        found = _in_fork(lambda: digest(folder / "runs" / "it"))
        if found != whole:
            raise Problem(f"the folder differs from that of a run without a signal: {found}")

    def _folder(self, name: str) -> Path:
        folder = self.root / name
        (folder / "cache" / "normscope").mkdir(parents=True)
        (folder / "plan.toml").write_text(ENSEMBLE)
        for script in self.root.glob("*-reference/cache/normscope/vega-*.js"):  # making it takes seconds
            shutil.copy(script, folder / "cache" / "normscope")
            break
        return folder

    def _start(self, name: str, folder: Path, out: str = "it") -> int:
        """The process of a command, once it is about to begin."""
        ready, begin = os.pipe()
        process = os.fork()
        if process == 0:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
            os.close(ready)
            os.chdir(folder)
            os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
            _redirect(folder)
            os.write(begin, b".")
            os.close(begin)
            _leave(lambda: normscope([*COMMANDS[name], "--device", "cpu", "--out", f"runs/{out}"]))
        os.close(begin)
        os.read(ready, 1)
        os.close(ready)
        return process

    def _wait(self, process: int) -> int:
        """The exit status, negative for a signal."""
        status: list[int] = []

        def ended() -> bool:
            done, code = os.waitpid(process, os.WNOHANG)
            if done:
                status.append(os.waitstatus_to_exitcode(code))
            return bool(done)

        if process in _REAPED:
            return _REAPED.pop(process)
        if not _until(ended, _LONGEST):
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise Problem(f"it has not ended after {_LONGEST:g} s")
        return status[0]


_REAPED: dict[int, int] = {}


def _over(process: int) -> bool:
    """Whether a process has ended; its status is saved."""
    if process not in _REAPED:
        done, code = os.waitpid(process, os.WNOHANG)
        if done:
            _REAPED[process] = os.waitstatus_to_exitcode(code)
    return process in _REAPED


def digest(folder: Path) -> str:
    """A text that two run folders share only if all tables and weights are the same to the bit, or what is missing."""
    import pandas as pd

    if not (folder / "run.json").is_file():
        return f"no run.json in {folder.name}"
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        inside = str(path.relative_to(folder))
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
            kept = table.drop(columns=[name for name in _CLOCK if name in table])
            total.update(f"{inside} {list(kept.columns)} {kept.to_dict('list')}".encode())
        elif path.suffix == ".safetensors":
            total.update(inside.encode() + path.read_bytes())
        elif path.name == "run.json":
            about = json.loads(path.read_text())
            total.update(f"{inside} {about['command']} {about['configuration']}".encode())
    return total.hexdigest()


def _leave(work: Callable[[], None]) -> None:
    """End a forked process with the status of what it did, as the interpreter would."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _redirect(folder: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)


def _in_fork(work: Callable[[], str]) -> str:
    """What a function returns, computed in a fork."""
    receiver, sender = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(receiver)
        _leave(lambda: _send(sender, work()))
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(process, 0)
    return text


def _send(pipe: int, text: str) -> None:
    os.write(pipe, text.encode())


def _until(ready: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _lives(group: int) -> bool:
    """Whether a process of a group is still there, zombies aside."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            state, _, member = stat.read_text().rpartition(")")[2].split()[:3]
            if int(member) == group and state != "Z":
                return True
    return False


def _processor_time(group: int) -> float:
    """Seconds of a processor that a group of processes has used, with those of its processes that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _is_left(path: Path) -> bool:
    """Whether a file or folder is one that only an unfinished run has."""
    return any(mark in path.name for mark in (".partial", ".unfinished-", ".old")) or path.name.startswith(".vega")


def trials(kills: int, commands: list[str], draw: random.Random) -> Iterator[tuple[str, signal.Signals]]:
    """Commands and signals in turn, so that all have the same share."""
    pairs = [(name, number) for name in commands for number in SIGNALS]
    draw.shuffle(pairs)
    yield from (pairs[i % len(pairs)] for i in range(kills))


def run(kills: int, commands: list[str], seed: int, report: Callable[[str], None]) -> dict[str, Tally]:
    """Kill commands so many times in all, and count what happened."""
    for module in _IMPORTED:
        import_module(module)
    for name in COMMANDS:
        kind_of(name)
    draw, tallies = random.Random(seed), dict[str, Tally]()
    with tempfile.TemporaryDirectory(prefix="normscope-kills-") as root:
        killer = Killer(Path(root), draw)
        for count, (name, number) in enumerate(trials(kills, commands, draw), 1):
            tally = tallies.setdefault(f"{name} {number.name}", Tally())
            try:
                killer.trial(name, number, tally)
                report(f"{count} of {kills}: {name} {number.name}")
            except Problem as problem:
                tally.failures.append(str(problem))
                report(f"{count} of {kills}: {name} {number.name} FAILED: {problem}")
    return tallies


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=108)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default=",".join(COMMANDS))
    given = parser.parse_args()
    tallies = run(given.kills, given.commands.split(","), given.seed, lambda text: print(text, file=sys.stderr, flush=True))
    total = Counter[str]()
    for name, tally in sorted(tallies.items()):
        counts = {"kills": tally.kills, "complete": tally.complete, "writing": tally.writing, "resumed": tally.resumed}
        total.update({**counts, "failures": len(tally.failures)})
        print(f"{name:20}", *(f"{value:3} {key}" for key, value in counts.items()), f"{len(tally.failures):3} failures")
    print(f"{'all':20}", *(f"{value:3} {key}" for key, value in total.items()))
    sys.exit(1 if total["failures"] else 0)


if __name__ == "__main__":
    main()
