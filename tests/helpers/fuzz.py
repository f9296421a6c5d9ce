"""A fuzzer of the command line: cases for every option of every command, made from the settings, and what must hold of each.

A case is a command line. The options come from the commands, so a new one is covered as soon as it exists; the values are drawn
from ``helpers.hostile`` by a seed. ``try_case`` runs a case in this process and returns what is wrong with its outcome.
"""

import io
import json
import os
import random
import re
import resource
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import FrameType, NoneType
from typing import Annotated, Any, get_args, get_origin
from unittest.mock import patch

import typer

from helpers.hostile import FILES, NUMBERS, OUTS, PLACES, SCHEMES, SYSTEM, TEXTS, VALUES
from normscope.cli import main
from normscope.cli.command import command_of
from normscope.cli.explore import explore
from normscope.cli.schemes import schemes
from normscope.experiments import kind_of, summaries
from normscope.experiments.experiment import Experiment
from normscope.sweeps.estimate import TIMED, Estimate
from normscope.training import Recipe

SECONDS, WAITING = 20.0, 240.0  # of a processor that a case may take, and on the clock: other processes run here too
BYTES = 1 << 30  # of memory that a case may take
LONGEST_LINE = 2000
PER_OPTION, PER_COMMAND, PER_FIELD = 8, 30, 2  # values of an option, pairs of a command, values of a field
_MODEL = "builtin:addition-small-pre"
_POOL = "@FILES"  # in a case, the folder with the files of helpers.hostile
_GPT2 = f"{_POOL}/gpt2"

Arguments = dict[str, str | None]  # by option or positional parameter, in their order; None leaves one out
BASES: dict[str, Arguments] = {
    "schemes": {"names": "pre"},
    "explore": {"--export": "tour.html"},  # a server ends with Ctrl-C
    "simulate": {"--scheme": "pre", "--tokens": "3", "--dim": "3", "--time": "0.5", "--samples": "3"},
    "ensemble": {"--scheme": "pre", "--runs": "2", "--tokens": "3", "--dim": "4", "--time": "0.5", "--samples": "2"},
    "train": {"recipe": f"{_POOL}/recipe.toml"},
    "watch": {"folder": f"{_POOL}/watched"},
    "evaluate": {"model": _MODEL, "--examples": "2"},
    "export": {"model": _MODEL},  # no family has its slots
    "stability": {"model": _MODEL, "--examples": "2", "--levels": "0.1", "--noise-levels": "0.1", "--layer-noise": "none"},
    "subspaces": {"model": _MODEL, "--examples": "2"},
    "reproduce": {"entries": "2:speeds"},
    "words": {"model": _GPT2, "probe": "queries", "--word": "time"},
    "verify": {"statements": "3:eq3"},
    "audit": {"model": _GPT2, "--tokens": "4", "--sentence": "the time of"},
    "compare": {"subjects": _GPT2, "second": _MODEL, "--tokens": "4", "--examples": "2", "--sentence": "the time of"},
    "advise": {
        "--depth": "2", "--width": "8", "--heads": "2", "--runs": "2", "--tokens": "3", "--context": "8", "--schemes": "pre",
    },
    "sweep": {"plan": f"{_POOL}/plan.toml", "--dry-run": ""},
    "check-scheme": {"model": _GPT2},
    "demo": {"model": "./absent"},  # a whole demo takes minutes
}  # fmt: skip
_NO_EXPERIMENTS: dict[str, Arguments] = {"schemes": {"--json": ""}, "explore": {}}  # what their lines begin with
_JOURNEY: Arguments = {"probe": "journey", "text": "the time of the world", "--word": None}
_TEXT_MODEL: Arguments = {"model": _GPT2, "--examples": None, "--tokens": "4"}
CONTEXTS: dict[tuple[str, str], Arguments] = {
    ("train", "--preset"): {"recipe": None, "--show": ""},
    ("train", "recipe"): {"--show": ""},  # an empty file is the whole baseline
    ("words", "text"): _JOURNEY,
    ("words", "--token"): _JOURNEY,
    ("words", "--map"): _JOURNEY,
    **{("words", option): {"probe": "singular", "--word": None} for option in ("--matrix", "--vectors", "--distance")},
    **{("subspaces", option): {"model": "world", "--examples": None} for option in ("--schemes", "--types")},
    **{(command, option): _TEXT_MODEL for command in ("stability", "subspaces") for option in ("--text", "--tokens")},
    ("advise", "model"): {"--weights": "spectrum-of"},
    ("sweep", "folder"): {"plan": "status", "--dry-run": None},
    ("watch", "--serve"): {"--once": ""},  # a server ends with Ctrl-C
    ("simulate", "--gradient"): {"--layers": "", "--time": "2"},
}  # what an option needs to have a meaning
UNWANTED = {
    ("train", "--processes"): ("2", "7", "a"),  # starts processes
    ("sweep", "--ray"): ("local", "auto"),  # starts a cluster
    ("verify", "--thorough"): ("",),
    ("reproduce", "--all"): ("",),  # minutes
    ("reproduce", "entries"): ("2", "1", "3"),
    ("verify", "statements"): ("2", "2:4.3", "2:4.3ii"),  # many seconds
    **{(command, "--trust-remote-code"): ("",) for command in BASES},  # runs what a hostile model brings
}
WRITTEN = {"--out": ("",), "--draw": ("", ".png", ".svg"), "--export": ("", ".html")}  # what is written, and how names end
_RELATED = {
    "sources": ("watched", "run-", "sweep-", "gpt2"),
    "model": ("gpt2", "model", "garbage", "version", "sparse.gguf", "fifo.gguf", "run-", "config"),
    "subjects": ("gpt2", "model", "run-", "sweep-"),
    "scheme": ("scheme", "loop", "fifo.toml", "zero.toml"),
    "schemes": ("scheme", "loop", "fifo.toml", "zero.toml"),
    "names": ("scheme", "loop", "fifo.toml", "zero.toml"),
    "start": ("start", "fifo.npy", "zero.", "sparse.npy"),
    "weights": ("weights", "start", "zero.safetensors"),
    "plan": ("plan", "deep", "digits", "dates", "twice", "sparse.toml", "fifo.toml"),
    "recipe": ("recipe", "deep", "digits", "dates", "twice", "sparse.toml", "fifo.toml"),
    "folder": ("sweep", "run-", "watched"),
    "corpus": ("text", "latin", "nul", "empty", "sparse.txt", "fifo", "zero"),
    "text": ("text", "latin", "nul", "bom", "control", "longline", "empty", "sparse.txt", "fifo", "zero"),
}  # the files that are most like what an option expects, by how they begin


@dataclass(frozen=True)
class Option:
    """An option or a positional parameter of a command.

    Attributes:
        command: the command.
        parameter: its name in Python.
        name: what a user types; of a positional parameter its name in Python.
        kind: bool, int, float, str or Path.
        help: its help text.
        several: whether it may be repeated.
    """

    command: str
    parameter: str
    name: str
    kind: type
    help: str
    several: bool

    @property
    def takes_files(self) -> bool:
        """Whether its value may be the path of something to read."""
        if self.kind not in (str, Path) or self.name in WRITTEN:
            return False
        return self.kind is Path or re.search(r"\b(file|paths?|folder|model|plan|run)\b", self.help, re.IGNORECASE) is not None

    @property
    def plausible(self) -> list[str]:
        """Values that may well be right: small numbers, the words of the help text, or nothing after a flag."""
        numbers = {bool: [""], int: ["1", "3", "8"], float: ["1", "3", "0.5"]}
        words = numbers.get(self.kind) or re.findall(r"[\w.:+-]+", self.help)
        return [word for word in words if word not in UNWANTED.get((self.command, self.name), ())]

    @property
    def values(self) -> list[str]:
        """Values to draw from: hostile ones of its type, and plausible ones."""
        if self.kind is bool:
            hostile: list[str] = ["", "=1", "=", "=x"]
        elif self.name in WRITTEN:
            hostile = [f"{out}{end}" for out in OUTS for end in WRITTEN[self.name]]
        elif self.kind in (int, float):
            hostile = list(NUMBERS)
        else:
            hostile = [*TEXTS, *(SCHEMES if "cheme" in self.parameter + self.help else ())]
            if re.search(r"number|levels|times|[Cc]omma", self.help):
                hostile += [*NUMBERS, *(f"0.1,{number}" for number in NUMBERS)]
            if self.takes_files:
                hostile += [*(f"{_POOL}/{name}" for name in (*FILES, *PLACES)), *SYSTEM]
        unwanted = UNWANTED.get((self.command, self.name), ())
        return [value for value in dict.fromkeys([*hostile, *self.plausible]) if value not in unwanted]

    @property
    def related(self) -> list[str]:
        """The files that are most like what it expects."""
        wanted = _RELATED.get(self.parameter, ())
        return [f"{_POOL}/{name}" for name in FILES if name.startswith(wanted)] if self.takes_files else []


@dataclass(frozen=True)
class Case:
    """A command line, and a file that it reads, if it has one of its own."""

    name: str
    arguments: tuple[str, ...]
    file: str = ""

    def __str__(self) -> str:
        shown = " ".join(repr(argument)[:80] for argument in self.arguments)
        return f"normscope {shown}" + (f"  with case.toml: {self.file!r}"[:2000] if self.file else "")


@cache
def options() -> dict[str, list[Option]]:
    """All options of all commands, from what makes the commands."""
    functions = {"schemes": schemes, "explore": explore} | {name: command_of(kind_of(name)) for name in summaries()}
    return {command: list(_options(command, function)) for command, function in functions.items()}


def _options(command: str, function: Any) -> Iterator[Option]:
    for parameter in signature(function).parameters.values():
        if get_origin(parameter.annotation) is not Annotated:
            continue
        annotation, info = get_args(parameter.annotation)
        kind = next(part for part in get_args(annotation) or (annotation,) if part is not NoneType)
        several = kind in (list, list[str]) or get_origin(annotation) is list
        name = (info.param_decls or (f"--{parameter.name.replace('_', '-')}",))[0].partition("/")[0]
        shown = parameter.name if isinstance(info, typer.models.ArgumentInfo) else name
        yield Option(command, parameter.name, shown, str if several else kind, info.help or "", several)


def cases(seed: int = 0) -> list[Case]:
    """All cases: every option by itself and in pairs, every field of a recipe and of a plan, and odd command lines."""
    every = options()
    return [
        *(case for command in every.values() for option in command for case in _alone(option, seed)),
        *(case for command in every.values() for case in _pairs(command, seed)),
        *_files(every, seed),
        *_recipes(seed),
        *_plans(seed),
        *_odd(every),
    ]


def sample(seed: int = 0, size: int = 200) -> list[Case]:
    """Some of the cases."""
    return random.Random(seed).sample(cases(seed), size)


def _draw(label: str, values: list[str], count: int) -> list[str]:
    return random.Random(label).sample(values, min(count, len(values)))


def _line(command: str, *changes: Arguments) -> tuple[str, ...]:
    """The command with its base settings and changes to them: positional parameters first, as they are declared."""
    given = dict(_NO_EXPERIMENTS.get(command, {"--json": "", "--out": "out"}))
    for change in (BASES[command], *changes):
        given |= change
    positional = [value for name, value in given.items() if not name.startswith("-") and value is not None]
    flags = {option.name for option in options()[command] if option.kind is bool}
    named = [
        text
        for name, value in given.items()
        if name.startswith("-") and value is not None
        for text in ((f"{name}{value}",) if name in flags else (name, value))
    ]
    return (command, *positional, *named)


def _alone(option: Option, seed: int) -> Iterator[Case]:
    label = f"{option.command} {option.name}"
    context = CONTEXTS.get((option.command, option.name), {})
    related = _draw(f"{label} related {seed}", option.related, PER_OPTION // 2)
    drawn = dict.fromkeys([*_draw(f"{label} {seed}", option.values, PER_OPTION), *related])
    for i, value in enumerate(drawn):
        yield Case(f"{label} {i}", _line(option.command, context, {option.name: value}))
    if option.name.startswith("-"):
        bare = (*_line(option.command, context, {option.name: None}), option.name)
        yield Case(f"{label} bare", bare)
        value = () if option.kind is bool else (next(iter(option.plausible), "x"),)
        yield Case(f"{label} again", (*bare, *value, option.name, *value))


def _pairs(command: list[Option], seed: int) -> Iterator[Case]:
    """Two options at once, each with a plausible value more often than not."""
    name = command[0].command
    draw = random.Random(f"{name} pairs {seed}")
    for i in range(PER_COMMAND if len(command) > 6 else 10):
        pair = draw.sample(command, 2)
        chosen = {o.name: draw.choice(o.plausible if draw.random() < 0.7 and o.plausible else o.values) for o in pair}
        contexts = [CONTEXTS.get((name, option.name), {}) for option in pair]
        yield Case(f"{name} pair {i}", _line(name, *contexts, chosen))


def _files(every: dict[str, list[Option]], seed: int) -> Iterator[Case]:
    """Every hostile file, as the value of an option that expects such a file, if there is one."""
    takers = [option for command in every.values() for option in command if option.takes_files and option.command != "demo"]
    for i, name in enumerate(FILES):
        path = f"{_POOL}/{name}"
        option = random.Random(f"file {i} {seed}").choice([taker for taker in takers if path in taker.related] or takers)
        context = CONTEXTS.get((option.command, option.name), {})
        yield Case(f"file {i}", _line(option.command, context, {option.name: path}))


def _recipes(seed: int) -> Iterator[Case]:
    """Every field of a recipe, changed on the command line."""
    for field in fields(Recipe):
        for i, value in enumerate(_draw(f"recipe {field.name} {seed}", list(VALUES), PER_FIELD)):
            yield Case(f"train --set {field.name} {i}", _line("train", {"--set": f"{field.name}={value}"}))


def _plans(seed: int) -> Iterator[Case]:
    """Every field that a sweep can vary, in a plan."""
    for kind in summaries():
        names = kind_of(kind).sweep_fields()
        base = {_parameter(kind, name): value for name, value in BASES[kind].items() if value is not None}
        base = {name: value for name, value in base.items() if name in names}
        for name in names:
            for i, value in enumerate(_draw(f"plan {kind} {name} {seed}", list(VALUES), PER_FIELD)):
                fixed = "".join(f"{key} = {_toml(text)}\n" for key, text in base.items() if key != name)
                preset = f'recipe = "{_POOL}/recipe.toml"\n' if kind == "train" and name not in ("recipe", "preset") else ""
                plan = f'kind = "{kind}"\n{preset}{fixed}[grid]\n{name} = [{value}]\n'
                yield Case(f"plan {kind} {name} {i}", _line("sweep", {"plan": "case.toml"}), plan)


def _parameter(command: str, name: str) -> str:
    return next((option.parameter for option in options()[command] if option.name == name), name)


def _toml(text: str) -> str:
    return text if re.fullmatch(r"-?\d+(\.\d+)?", text) else json.dumps(text)


def _odd(every: dict[str, list[Option]]) -> Iterator[Case]:
    """Command lines that are wrong as a whole."""
    lines = [
        (),
        ("",),
        ("--",),
        ("-",),
        ("--version", "x"),
        ("--nothing",),
        ("nothing",),
        ("simulat",),
        ("\0",),
        ("\x1b[31m",),
        ("x" * 100_000,),
    ]
    lines += [("--help", "simulate"), ("simulate", "--help", "--tokens", "x"), ("--debug",), ("schemes", "--", "--json")]
    for name in every:
        lines += [
            (name, "--nothing"),
            (name, "--nothing=1"),
            (name, "--help"),
            (name, "-h", "x"),
            (name, "--\udcff"),
            (name, "--out"),
            (name, "-x"),
        ]
        lines += [
            _line(name) + extra for extra in (("x", "y", "z"), ("--", "--json"), ("--js",), ("",), ("\0",), ("--json=1",))
        ]
    for i, line in enumerate(lines):
        yield Case(f"odd {i}", line)


class CaseTimeout(BaseException):
    """A case took too long; no ``except Exception`` stops it."""


def try_case(case: Case, files: Path, sandbox: Path) -> str | None:
    """Run a case in an empty folder; what is wrong with its outcome, or None.

    Args:
        case: the command line.
        files: the folder with the files of ``helpers.hostile``.
        sandbox: a folder that does not exist yet; the command runs deep inside it, so that ``..`` stays inside.
    """
    here = sandbox / "a" / "b" / "c"
    here.mkdir(parents=True)
    for name in ("tmp", "home"):
        (sandbox / name).mkdir()
    _furnish(here)
    if case.file:
        (here / "case.toml").write_text(case.file.replace(_POOL, str(files)), encoding="utf-8")
    arguments = [argument.replace(_POOL, str(files)) for argument in case.arguments]
    before, kept = _listing(sandbox), _listing(files)
    with _surroundings(here, sandbox) as streams, patch("normscope.sweeps.estimate.estimate", _timed_here), _limits():
        status = _status(arguments)
    out, err, asked = streams()
    problems = [
        *_wrong_status(status, err),
        *(["it reads standard input"] if asked else []),
        *_wrong_output(status, arguments, out),
        *_wrong_files(status, arguments, here, before, _listing(sandbox)),
        *(["it changed a file that it was given"] if _listing(files) != kept else []),
    ]
    return "; ".join(problems) or None


def _timed_here(experiments: Sequence[Experiment], *_: Any) -> list[Estimate]:
    """The estimates of a dry run without the process that takes them."""
    return [Estimate(experiment.seconds(), TIMED) for experiment in experiments]


def _furnish(here: Path) -> None:
    """What ``--out`` may run into."""
    (here / "taken").write_text("kept")
    (here / "holds").mkdir()
    (here / "holds" / "keep.txt").write_text("kept")
    (here / "empty").mkdir()
    os.mkfifo(here / "fifo")
    (here / "loop").symlink_to("loop")
    (here / "dangling").symlink_to("nowhere/at/all")


def _status(arguments: list[str]) -> int | str:
    """The exit status, or the name of what came instead."""
    try:
        main(arguments)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0
    except CaseTimeout:
        return f"more than {SECONDS:g} s of work, or {WAITING:g} s of waiting"
    except BaseException as error:  # whatever leaves main is the finding
        return f"{type(error).__name__}: {error}"[:500]
    return "main returned"


def _wrong_status(status: int | str, err: str) -> Iterator[str]:
    lines = err.splitlines()
    errors = [line for line in lines if line.startswith("normscope: ") and not line.startswith("normscope: WARNING: ")]
    last = lines[-1][:LONGEST_LINE] if lines else ""
    incomplete = status == 1 and any(line.startswith("incomplete: ") for line in lines)  # it diverged, and is saved so far
    if status not in (0, 2) and not incomplete:
        yield f"exit status {status}: {last}"
    elif status == 2 and (len(errors) != 1 or lines[-1] != errors[0]):
        yield f"{len(errors)} lines explain the error, not one at the end: {lines[-3:]}"
    elif status == 0 and errors:
        yield f"exit status 0 with an error: {last}"
    if "out of memory" in last:
        yield f"memory ran out before the sizes were refused: {last}"
    if "Traceback" in err:
        yield f"a traceback: {err[-1500:]}"
    if any(len(line) > LONGEST_LINE for line in errors):
        yield f"a line of {max(map(len, errors))} characters: {last[:200]}"
    if any(not character.isprintable() for line in errors for character in line):
        yield f"control characters in a message: {last[:300]!r}"


def _wrong_output(status: int | str, arguments: list[str], out: str) -> Iterator[str]:
    if status == 2 and out.strip():
        yield f"output besides the error: {out[:200]!r}"
    if status == 0 and "--json" in arguments and not {"--help", "-h", "--show", "--version"} & set(arguments):
        try:
            records = json.loads(out, parse_constant=_refuse)
        except ValueError as error:
            yield f"the output is not JSON: {error}: {out[:200]!r}"
        else:
            if not isinstance(records, list):
                yield f"the output is no list of records: {out[:200]!r}"
            for name, value in (pair for record in records if isinstance(record, dict) for pair in record.items()):
                if name.endswith(("cosine", "accuracy")) and isinstance(value, float) and abs(value) > 1 + 1e-6:
                    yield f"{name} is {value}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} in it")


def _wrong_files(
    status: int | str, arguments: list[str], here: Path, before: dict[str, Any], after: dict[str, Any]
) -> Iterator[str]:
    lost = sorted(before.keys() - after.keys()) + sorted(
        name for name in before.keys() & after.keys() if before[name] != after[name]
    )
    if lost:
        yield f"it changed or removed {lost[:3]}"
    new = sorted(after.keys() - before.keys())
    if status == 0:
        given = [value for option, value in pairwise(arguments) if option in WRITTEN]
        given += [value.partition("=")[2] for value in arguments if value.partition("=")[0] in WRITTEN]
        targets = [os.path.relpath(os.path.realpath(here / value), here.parents[2]) for value in given if "\0" not in value]
        new = [name for name in new if not any(_within(name, target) or _within(target, name) for target in targets)]
    if new:
        yield f"it left {new[:5]}"


def _within(name: str, folder: str) -> bool:
    return name == folder or name.startswith(f"{folder}/") or folder == "."


def _listing(folder: Path) -> dict[str, Any]:
    """Every file and folder under a folder, with what changes when its content does."""
    found: dict[str, Any] = {}
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(place, name)
            about = os.lstat(path)
            found[os.path.relpath(path, folder)] = (about.st_mode, about.st_size if stat.S_ISREG(about.st_mode) else 0)
    return found


@contextmanager
def _surroundings(here: Path, sandbox: Path) -> Iterator[Any]:
    """Folder, home and streams of a case; afterwards, what it printed and whether it read standard input."""
    keep = os.getcwd(), tempfile.tempdir, sys.stdin, sys.stdout, sys.stderr, dict(os.environ)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    asked = io.StringIO("y\n" * 100)
    try:
        os.chdir(here)
        os.environ |= {"HOME": str(sandbox / "home"), "TMPDIR": str(sandbox / "tmp"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        tempfile.tempdir = str(sandbox / "tmp")
        sys.stdin, sys.stdout, sys.stderr = asked, out, err
        yield lambda: (*(stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)), asked.tell() > 0)
    finally:
        sys.stdin, sys.stdout, sys.stderr = keep[2:5]
        tempfile.tempdir = keep[1]
        os.environ.clear()
        os.environ.update(keep[5])
        os.chdir(keep[0])


@contextmanager
def _limits() -> Iterator[None]:
    """Bounded time and memory: an alarm, and a limit on what the process may allocate (Linux)."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise CaseTimeout

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    status = Path("/proc/self/status")
    if status.exists():
        allocated = int(re.search(r"VmData:\s+(\d+) kB", status.read_text())[1]) * 1024  # type: ignore[index]
        resource.setrlimit(resource.RLIMIT_DATA, (allocated + BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
