"""Run folders: complete or absent, whatever happens while they are written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from normscope import InputError, __version__
from normscope.machine.interrupts import Terminated, raising_signals
from normscope.runs import fresh_path, new_run, open_run, resumable_path, unfinished_folder

TABLE = pd.DataFrame({"scheme": ["pre", "peri"], "speed": [1.0, float("nan")]})


def test_a_run_reads_back_as_written(tmp_path: Path) -> None:
    with new_run(tmp_path / "deep" / "run", "demo", {"beta": 5.0}, seed=3, device="cpu") as run:
        run.write_table("speeds", TABLE)
        run.write_text("notes/page.html", "<p>θ</p>")
    back = open_run(tmp_path / "deep" / "run")
    pd.testing.assert_frame_equal(back.table("speeds"), TABLE)
    assert (back.path / "notes" / "page.html").read_text(encoding="utf-8") == "<p>θ</p>"
    description = back.description
    assert description["command"] == "demo"
    assert description["configuration"] == {"beta": 5.0}
    assert (description["seed"], description["device"]) == (3, "cpu")
    assert description["versions"]["normscope"] == __version__
    assert description["versions"]["torch"]
    with pytest.raises(InputError, match=r"no table 'slow'.*speeds"):
        back.table("slow")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_run_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_run(tmp_path / "run", "demo", {}) as run:  # noqa: PT012
        run.write_table("speeds", TABLE)
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rewrite_keeps_the_run_that_was_there(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", "first", {}) as run:
        run.write_table("speeds", TABLE)
    with pytest.raises(ValueError, match="stop"), new_run(tmp_path / "run", "second", {}, overwrite=True):
        raise ValueError("stop")
    assert open_run(tmp_path / "run").description["command"] == "first"
    with new_run(tmp_path / "run", "third", {}, overwrite=True):
        pass
    assert open_run(tmp_path / "run").description["command"] == "third"
    assert open_run(tmp_path / "run").tables == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_nothing_of_the_users_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with (
        pytest.raises(InputError, match="not a run folder"),
        new_run(tmp_path / "thesis", "demo", {}, overwrite=True),
    ):
        pass
    with new_run(tmp_path / "run", "demo", {}):
        pass
    with pytest.raises(InputError, match="overwrite=True"), new_run(tmp_path / "run", "demo", {}):
        pass
    with pytest.raises(InputError, match="not a run folder"):
        open_run(tmp_path / "thesis")
    with pytest.raises(InputError, match="does not exist"):
        open_run(tmp_path / "nowhere")


def test_nothing_that_appears_meanwhile_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds a run already"), new_run(tmp_path / "run", "slow", {}):  # noqa: SIM117
        with new_run(tmp_path / "run", "quick", {}):
            pass
    assert open_run(tmp_path / "run").description["command"] == "quick"
    with pytest.raises(InputError, match="not a run folder"), new_run(tmp_path / "empty", "slow", {}):  # noqa: PT012
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "thesis.tex").write_text("years of work")
    assert (tmp_path / "empty" / "thesis.tex").read_text() == "years of work"


def test_a_failed_renaming_puts_the_old_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_run(tmp_path / "run", "first", {}):
        pass
    rename = os.rename

    def refuse_the_new_run(source: Path, target: Path) -> None:
        if target == tmp_path / "run" and not source.name.endswith(".old"):
            raise OSError("disk on fire")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_the_new_run)
    with pytest.raises(OSError, match="on fire"), new_run(tmp_path / "run", "second", {}, overwrite=True):
        pass
    assert open_run(tmp_path / "run").description["command"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_link_to_a_run_is_followed(tmp_path: Path) -> None:
    with new_run(tmp_path / "real", "first", {}):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_run(tmp_path / "link", "second", {}, overwrite=True):
        pass
    assert open_run(tmp_path / "real").description["command"] == "second"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("path", ["x" * 300, "~nobody-of-that-name/run"])
def test_impossible_paths_are_input_errors(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="cannot use the run folder"), new_run(path, "demo", {}):
        pass
    assert list(tmp_path.iterdir()) == []


def test_fresh_paths_count_up(tmp_path: Path) -> None:
    assert fresh_path(tmp_path / "run") == tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert fresh_path(tmp_path / "run") == tmp_path / "run-3"


def test_a_file_in_the_way_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"), new_run(tmp_path / "file" / "run", "demo", {}):
        pass


@pytest.mark.parametrize("name", ["", ".", "./", "x/..", "..", "/", "~", "link", "mount"])
def test_no_folder_is_replaced_that_somebody_stands_in(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home, here / "mount"):
        folder.mkdir()
    (here / "link").symlink_to(here)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == here / "mount")
    with pytest.raises(InputError, match="choose"), new_run(name, "demo", {}, overwrite=True):
        pass
    assert os.path.samestat(here.stat(), Path().stat())
    assert sorted(path.name for path in here.iterdir()) == ["link", "mount"]


def test_a_run_is_not_replaced_from_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_run(tmp_path / "run", "first", {}) as run:
        run.part("inside")
    monkeypatch.chdir(tmp_path / "run" / "inside")
    with pytest.raises(InputError, match="working directory"), new_run("..", "second", {}, overwrite=True):
        pass
    assert open_run("..").description["command"] == "first"


@pytest.mark.parametrize("name", ["new/", "new/.", "a/../new", "empty", "link"])
def test_all_ways_to_write_a_name_are_followed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    with new_run(name, "demo", {}):
        pass
    target = tmp_path / ("new" if "new" in name else "empty")
    assert open_run(target).description["command"] == "demo"
    assert target.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("place", ["/proc/run", "/proc/1/a/run", "/sys/run", "/sys/kernel/a/run"])
def test_a_place_that_takes_no_files_is_refused_before_any_work(place: str) -> None:
    if not Path(place).parents[-2].is_dir():
        pytest.skip("there is no such file system here")
    with pytest.raises(InputError, match="cannot write to"), new_run(place, "demo", {}):
        pytest.fail("the work has begun")


def test_a_failure_leaves_no_new_parents(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for parent in ("runs", "there", "a/b/c"):
        with pytest.raises(ZeroDivisionError), new_run(tmp_path / parent / "run", "demo", {}):
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


_WRITING = """
import sys, time; from normscope.runs import new_run
with new_run(sys.argv[1], 'demo', {{}}, overwrite=True) as run:
    run.write_text('half', 'x'); print('writing', flush=True); {then}
"""


def _writing(path: Path, then: str = "time.sleep(60)") -> "subprocess.Popen[bytes]":
    """A process that is in the middle of writing a run."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITING.format(then=then), path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_what_a_killed_process_leaves_goes_with_the_next_run(tmp_path: Path, number: signal.Signals) -> None:
    with _writing(tmp_path / "deep" / "run") as process, _writing(tmp_path / "deep" / "alive") as alive:
        process.send_signal(number)
        assert process.wait(timeout=20) == (-9 if number == signal.SIGKILL else 128 + number)
        assert not (tmp_path / "deep" / "run").exists()
        left = {path.name for path in (tmp_path / "deep").iterdir()}
        assert len(left) == (4 if number == signal.SIGKILL else 2)
        with new_run(tmp_path / "deep" / "other", "demo", {}):
            pass
        kept = {path.name for path in (tmp_path / "deep").iterdir()} - {"other"}
        assert kept < left if number == signal.SIGKILL else kept == left
        assert len(kept) == 2
        assert all(name.startswith(".alive.partial-") for name in kept)
        alive.terminate()
        assert alive.wait(timeout=20) == 143


def test_a_run_that_moved_aside_for_a_killed_process_comes_back(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", "first", {}):
        pass
    between = "import os; from normscope import runs; rename = os.rename; " + (
        "os.rename = lambda a, b: (rename(a, b), os.kill(os.getpid(), 9))"  # as soon as the first run has moved aside
    )
    with _writing(tmp_path / "run", between) as process:
        assert process.wait(timeout=20) == -signal.SIGKILL
    assert not (tmp_path / "run").exists()
    with new_run(tmp_path / "other", "demo", {}):
        pass
    assert open_run(tmp_path / "run").description["command"] == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


def test_unfinished_work_goes_with_its_run_even_if_the_process_is_killed_between(tmp_path: Path) -> None:
    mine, other = (unfinished_folder(tmp_path / "run", {"seed": seed}) for seed in (1, 2))
    for folder in (mine, other):
        (folder / "runs").mkdir(parents=True)
        (folder / "000000.npy").write_text("")
    script = (
        "import os, pathlib, sys; from normscope import runs\n"
        "runs.folders._remove_published = lambda folder: os.kill(os.getpid(), 9)\n"
        "path, mine = map(pathlib.Path, sys.argv[1:])\n"
        "with runs.new_run(path, 'demo', {}, unfinished=mine): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "run", mine], check=False)
    assert done.returncode == -signal.SIGKILL
    assert mine.is_dir()
    with new_run(tmp_path / "other", "demo", {}):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other.name, "other", "run"])
    with new_run(tmp_path / "run", "demo", {}, overwrite=True, unfinished=other):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


class _Swallows:
    """Its destruction, and a weakref's callback for it, receive a signal there: Python drops what the handler raises."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        for _ in range(1000):
            pass


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
@pytest.mark.parametrize("way", ["del", "caught", "converted", "last"])
def test_a_signal_is_raised_again_until_it_ends_the_work(number: int, error: type[BaseException], way: str) -> None:
    cleaned = []

    def work() -> None:
        if way in ("del", "last"):
            _Swallows(number)
        else:
            try:
                os.kill(os.getpid(), number)
                time.sleep(10)
            except BaseException:  # as some libraries do
                if way == "converted":
                    raise RuntimeError("the connection was lost") from None
        if way != "last":
            time.sleep(10)

    started = time.monotonic()
    with pytest.raises(error) as raised, raising_signals():  # noqa: PT012
        try:
            work()
        finally:
            time.sleep(0.3 * (way != "last"))  # longer than it takes until the exception is raised again
            cleaned.append(True)
    assert cleaned == [True]
    assert time.monotonic() - started < 5
    assert getattr(raised.value, "code", 143) == 143
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    script = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + _WRITING.format(
        then="os.kill(os.getpid(), 1)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "run"], check=True, stdout=subprocess.DEVNULL)
    assert open_run(tmp_path / "run").description["command"] == "demo"


def test_a_run_that_began_is_found_by_its_configuration_wherever_it_began(tmp_path: Path) -> None:
    mine, other = {"seed": 1}, {"seed": 2}
    wanted = tmp_path / "run"
    assert resumable_path(wanted, mine) == wanted
    unfinished_folder(wanted, other).mkdir()
    assert resumable_path(wanted, mine) == tmp_path / "run-2"
    unfinished_folder(tmp_path / "run-3", mine).mkdir()
    unfinished_folder(tmp_path / "run-of-another", mine).mkdir()
    assert resumable_path(wanted, mine) == tmp_path / "run-3"
    assert resumable_path(wanted, other) == wanted
    (tmp_path / "run-3").mkdir()
    assert resumable_path(wanted, mine) == tmp_path / "run-2"
