"""The page of a watched training: figures show the tables, it follows the run from a file and over HTTP; runs compare."""

import json
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
import pytest

import normscope as ns
from helpers.browser import Tab
from helpers.cli import run
from helpers.watched import ABOUT, snapshot, watched_folder
from normscope.experiments.progress import Progress
from normscope.experiments.watch import WatchedRun
from normscope.report.serve import PageServer
from normscope.results.figures import Chart, HeatMap
from normscope.runs import new_run, open_run
from normscope.watch.destinations import destination_of
from normscope.watch.run_folder import WatchedFolder
from normscope.watch.snapshot import Snapshot

FIGURES = 27


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return watched_folder(tmp_path_factory.mktemp("watched") / "gpt", range(0, 100, 10), alarms=(40, 60))


def test_the_maps_show_the_tables(folder: Path) -> None:
    result = ns.load(folder)
    assert len(result.figures) == FIGURES
    layers, heads = result.tables["layers"], result.tables["heads"]
    norm, logit = result.figures["layers-norm"], result.figures["heads-logit"]
    assert isinstance(norm, HeatMap)
    assert isinstance(logit, HeatMap)
    assert list(norm.x_names) == [str(step) for step in range(0, 100, 10)]
    assert list(norm.y_names) == ["0", "1", "2", "3 (end)"]
    assert np.array(norm.values) == pytest.approx(layers.pivot_table(index="layer", columns="step", values="norm").to_numpy())
    largest = heads.pivot_table(index="layer", columns="step", values="logit", aggfunc="max")
    assert np.array(logit.values) == pytest.approx(largest.to_numpy())
    last = result.figures["last-entropy"]
    assert isinstance(last, HeatMap)
    assert last.heads
    assert np.array(last.values).ravel() == pytest.approx(heads[heads["step"] == 90]["entropy"].to_numpy())
    update = result.figures["sublayers-update"]
    assert isinstance(update, HeatMap)
    assert list(update.y_names)[:2] == ["0 attention", "0 feedforward"]


def test_alarms_are_findings_and_marks_on_the_time_line(folder: Path) -> None:
    result = ns.load(folder)
    (finding,) = result.findings
    assert finding.severity == "warning"
    assert finding.text == "Step 40: logits grow at layer 1. 1 more until step 60."
    loss = result.figures["steps-loss"]
    assert isinstance(loss, Chart)
    curve, marks = loss.lines
    assert marks.name == "alarm: logits grow"
    assert marks.dots
    assert list(marks.x) == [40, 60]
    assert list(marks.y) == [curve.y[4], curve.y[6]]
    calm = ns.load(watched_folder(folder.parent / "calm", [0, 10]))
    assert [found.severity for found in calm.findings] == ["ok"]


def test_a_long_run_is_a_small_page_that_hides_no_spike(tmp_path: Path) -> None:
    destination, taken = WatchedFolder(tmp_path / "run"), [snapshot(step, layers=8, heads=4) for step in range(600)]
    taken[301].tables["heads"].loc[7, "logit"] = 99.0
    destination.begin({**ABOUT, "layers": 8})
    destination.write(taken)
    destination.close()
    result = ns.load(tmp_path / "run")
    assert len(result.tables["heads"]) == 600 * 32
    logit, loss = result.figures["heads-logit"], result.figures["steps-loss"]
    assert isinstance(logit, HeatMap)
    assert isinstance(loss, Chart)
    assert len(logit.x_names) <= 240
    assert np.nanmax(np.array(logit.values)) == 99.0
    assert len(loss.lines[0].x) <= 400
    assert loss.lines[0].high is not None
    assert max(loss.lines[0].high) == result.tables["steps"]["loss"].max()
    assert len(result.to_html()) < 3_000_000


def test_the_command_writes_the_page_beside_the_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "run.json").read_bytes(), sorted(folder.glob("segments/*/*"))
    status, out, err = run(capsys, "watch", str(folder))
    assert status == 0, err
    assert "Loss of the watched training" in out
    assert "Step 40: logits grow at layer 1." in out
    assert out.splitlines()[-1] == str(folder / "report.html")
    assert '"follow"' not in (folder / "report.html").read_text(encoding="utf-8")
    assert ((folder / "run.json").read_bytes(), sorted(folder.glob("segments/*/*"))) == before


def test_a_copy_is_a_complete_run(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "watch", str(folder), "--out", "copy", "--json", "--format", "html,csv")
    assert status == 0, err
    records = json.loads(out)
    assert {record["step"] for record in records if record["table"] == "heads"} == {90}
    assert len([record for record in records if record["table"] == "alarms"]) == 2
    assert (here / "copy" / "figures" / "heads-logit.csv").is_file()
    for name, table in open_run(folder).all_tables().items():
        pd.testing.assert_frame_equal(pd.read_parquet(here / "copy" / f"{name}.parquet"), table)
    assert ns.load("copy").figures.keys() == ns.load(folder).figures.keys()
    (here / "other").mkdir()
    (here / "other" / "mine.txt").write_text("x")
    status, _, err = run(capsys, "watch", str(folder), "--out", "other")
    assert (status, "is no copy of a watched run; choose another --out" in err) == (2, True)


def test_the_watch_of_a_training_of_ours_is_there_while_it_trains_and_later(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched_folder(here / "runs" / ".add.unfinished-0123" / "watch", [10])
    for place in ("runs/add-watch", "runs/add/watch"):
        status, out, err = run(capsys, "watch", "runs/add")
        assert status == 0, err
        assert out.splitlines()[-1].endswith(f"{place}/report.html")
        with new_run("runs/add", "train", {}, overwrite=True):
            pass
        watched_folder(here / "runs" / "add" / "watch", [10, 20])
    assert ns.load("runs/add-watch").tables["steps"]["step"].tolist() == [10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "'nowhere' does not exist"),
        (("gpt", "--serve", "--once"), "--serve follows the run, --once does not"),
        (("gpt", "--port", "65536"), "--port"),
        (("simulated",), "holds a run of simulate, not of a watched training"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: tuple[str, ...], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched_folder(here / "gpt", [0])
    ns.simulate("pre", tokens=3, dim=3, time=0.5, progress=False).save("simulated", formats=())
    status, _, err = run(capsys, "watch", *arguments)
    assert status == 2
    assert len(err.splitlines()) == 1
    assert message in err


class Notes(Progress):
    """Keeps what a progress bar would show."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.messages: list[str] = []

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        self.steps.append(done)

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK", "_EVERY", "_PAGE_EVERY", "_SHARE"):
        monkeypatch.setattr(f"normscope.experiments.watch.{name}", 0.01)


def small(step: int) -> Snapshot:
    """A snapshot whose page is made quickly."""
    tables = snapshot(step).tables
    return Snapshot(step, {"steps": tables["steps"], "layers": tables["layers"][["step", "layer", "norm"]]})


def waiting(ready: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("quick")
def test_the_page_follows_the_run_until_it_ends(tmp_path: Path) -> None:
    destination, page = destination_of(tmp_path / "run"), tmp_path / "run" / "report.html"
    destination.begin(ABOUT)
    notes, results = Notes(), list[ns.Result]()
    following = WatchedRun(folder=tmp_path / "run")
    thread = threading.Thread(target=lambda: results.append(following.run(notes, tmp_path / "run")))
    thread.start()
    waiting(lambda: page.exists() and "No probe yet" in page.read_text(encoding="utf-8"))
    for step in (10, 20):
        destination.write(small(step))
        waiting(lambda step=step: notes.steps and notes.steps[-1] == step)
        text = page.read_text(encoding="utf-8")
        assert '"follow":{"seconds":' in text
        assert "running" in text
    destination.close()
    thread.join(120)
    assert results[0].tables["steps"]["step"].tolist() == [10, 20]
    assert results[0].save(tmp_path / "run").path == tmp_path / "run"
    text = page.read_text(encoding="utf-8")
    assert '"follow"' not in text  # what has ended does not load itself again
    assert "finished" in text
    assert "Ctrl-C stops" in notes.messages[0]


@pytest.mark.usefixtures("quick")
def test_ctrl_c_ends_the_following_and_not_the_run(tmp_path: Path) -> None:
    destination, page = destination_of(tmp_path / "run"), tmp_path / "run" / "report.html"
    destination.begin(ABOUT)
    destination.write(small(10))

    class Interrupting(Progress):
        def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
            assert '"follow"' in page.read_text(encoding="utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WatchedRun(folder=tmp_path / "run").run(Interrupting(), tmp_path / "run")
    assert '"follow"' not in page.read_text(encoding="utf-8")
    destination.write(small(20))
    destination.close()
    assert ns.load(tmp_path / "run").tables["steps"]["step"].tolist() == [10, 20]


def get(url: str, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_server_answers_when_there_is_news_and_only_to_this_machine() -> None:
    with PageServer(0) as server:
        threading.Timer(0.1, server.publish, ["<p>one</p>"]).start()
        assert get(server.url, "/") == (200, b"<p>one</p>")  # a browser that is faster waits
        assert get(server.url, "/news?after=0") == (200, b'{"version": 1}')
        assert get(server.url, "/secret")[0] == 404
        assert get(server.url, "/", "evil.example:80")[0] == 403
        answers: list[tuple[int, bytes]] = []
        thread = threading.Thread(target=lambda: answers.append(get(server.url, "/news?after=1")))
        thread.start()
        time.sleep(0.1)
        assert not answers  # it waits
        server.publish("<p>two</p>")
        thread.join(10)
        assert answers == [(200, b'{"version": 2}')]
        port = urlsplit(server.url).port
        with pytest.raises(ns.InputError, match=rf"port={port} cannot be used: .*; choose another port="):
            PageServer(port or 0)


@pytest.mark.usefixtures("quick")
def test_a_run_is_served_while_it_grows(tmp_path: Path) -> None:
    destination = destination_of(tmp_path / "run")
    destination.begin(ABOUT)
    destination.write(small(10))
    notes = Notes()

    class Ended(Exception):  # noqa: N818  # takes the place of Ctrl-C
        pass

    class Stopping(Notes):
        def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
            url = self.messages[0].split(" at ")[1].split(";")[0]
            assert b"Residual stream norm" in get(url, "/")[1]
            if done == 20:
                raise Ended
            destination.write(small(20))

    notes = Stopping()
    with pytest.raises(Ended):
        WatchedRun(folder=tmp_path / "run", serve=True, port=0).run(notes)
    destination.close()
    assert not (tmp_path / "run" / "report.html").exists()


def test_watched_runs_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        watched_folder(tmp_path / name, range(0, 50, 10), seed=seed)
    result = ns.compare(tmp_path / "a", tmp_path / "b", progress=False)
    curves, numbers = result.tables["curves"], result.tables["numbers"]
    rows = curves[(curves["subject"] == "b") & (curves["quantity"] == "watch-norm")]
    expected = [snapshot(step, seed=2).tables["layers"]["norm"].iloc[-1] for step in range(0, 50, 10)]
    assert rows["x"].tolist() == [0, 10, 20, 30, 40]
    assert rows["y"].tolist() == pytest.approx(expected)
    logits = numbers[numbers["quantity"] == "watch-logit"].set_index("subject")["value"]
    assert logits["a"] == max(snapshot(step, seed=1).tables["heads"]["logit"].max() for step in range(0, 50, 10))
    assert len(set(curves["quantity"])) == 12
    depth = curves[(curves["subject"] == "a") & (curves["quantity"] == "watch-depth")]["y"].iloc[0]
    gradients = snapshot(0, seed=1).tables["layers"]["gradient"].dropna()
    assert depth == pytest.approx(gradients.max() / gradients.min())
    for name in ("c", "d"):  # trainings of normscope that were watched
        with new_run(tmp_path / name, "train", {}) as training:
            watched_folder(training.path / "watch", [1, 10])
    trained = ns.compare(tmp_path / "c", tmp_path / "d", progress=False).tables["curves"]
    assert len(set(trained["quantity"])) == 12


FACT = (
    "[...document.querySelectorAll('.facts div')].find(fact => fact.innerText.startsWith('step'))?.lastElementChild.innerText"
)
DRAWN = "[...normscope.plots.values()].filter(figure => figure.view).length"
TOP = "document.getElementById(document.querySelectorAll('figure')[9].id).getBoundingClientRect().top"


def page_at(folder: Path, *steps: int) -> ns.Result:
    return ns.load(watched_folder(folder, steps, resume=True))


@pytest.mark.slow
def test_in_a_browser_the_page_gets_news_and_what_is_in_view_stays(tab: Tab, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with PageServer(0) as server:
        server.publish(page_at(folder, 10, 20, 30).to_html(server.next))
        tab.errors.clear()
        tab.page.goto(server.url)
        tab.run("document.querySelectorAll('figure')[9].scrollIntoView({block: 'center'})")
        waiting(lambda: tab.run(DRAWN) > 4)
        before, marks = tab.run(TOP), tab.run("document.querySelectorAll('figure')[9].querySelector('.plot').innerText")
        tab.run("window.kept = document.querySelectorAll('figure')[9].querySelector('.plot')")
        server.publish(page_at(folder, 40, 50).to_html(server.next))
        waiting(lambda: tab.run(FACT) == "50")
        waiting(lambda: tab.run("document.querySelectorAll('figure')[9].querySelector('.plot').innerText") != marks)
        assert tab.run("window.kept === document.querySelectorAll('figure')[9].querySelector('.plot')")  # drawn again in place
        assert abs(tab.run(TOP) - before) < 3
        tab.run("document.querySelector('#theme').click()")
        assert tab.run("normscope.isDark()")
        assert tab.errors == []
        tab.page.goto("about:blank")  # which ends the question for news


@pytest.mark.slow
def test_in_a_browser_a_file_loads_itself_again_and_what_is_in_view_stays(tab: Tab, tmp_path: Path) -> None:
    folder, page = tmp_path / "run", tmp_path / "run" / "report.html"
    first = page_at(folder, 10, 20, 30).to_html({"seconds": 2})
    later = page_at(folder, 40).to_html()
    page.write_text(first, encoding="utf-8")
    tab.open(page)
    tab.run("document.querySelectorAll('figure')[9].scrollIntoView({block: 'center'})")
    waiting(lambda: tab.run(DRAWN) > 4)
    tab.run("document.querySelector('#theme').click()")
    before = tab.run(TOP)
    page.write_text(later, encoding="utf-8")
    tab.page.wait_for_event("load", timeout=20_000)
    waiting(lambda: tab.run(FACT) == "40")
    waiting(lambda: tab.run(DRAWN) > 4)
    tab.settle()
    assert abs(tab.run(TOP) - before) < 3
    assert tab.run("normscope.isDark()")
    assert tab.errors == []
