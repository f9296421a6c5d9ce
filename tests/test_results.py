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


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_killed_process_leaves_no_folder_under_the_final_name(tmp_path: Path, signal_number: signal.Signals) -> None:
    script = (
        "import sys, time; from normscope.runs import new_run\n"
        f"with new_run({str(tmp_path / 'run')!r}, 'demo', {{}}) as run:\n"
        "    run.write_text('half', 'x'); print('writing', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    os.kill(process.pid, signal_number)
    assert process.wait(timeout=20) != 0
    process.stdout.close()
    time.sleep(0.05)
    assert not (tmp_path / "run").exists()
    if signal_number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


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
