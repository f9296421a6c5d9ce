"""The server of the explorer: who may ask, what is answered, and what happens when something goes wrong."""

import base64
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import Request
from fastapi.testclient import TestClient

import normscope as ns
from helpers.explorer import TOKEN, Serving
from helpers.watched import ABOUT, snapshot, watched_folder
from normscope.explorer.folders import Folders, split_sources
from normscope.explorer.queue import BusyError, CancelledError, ModelQueue, ModelRun
from normscope.explorer.security import MOST_BODY, MOST_PROMPT, Rules, check_token
from normscope.explorer.server import Settings, address, exposed, make_app, serve
from normscope.explorer.watched import WatchedTraining
from normscope.runs import new_run, unfinished_folder
from normscope.watch.destinations import destination_of

GOOD = {"x-normscope-token": TOKEN, "x-normscope-page": "p"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: two watched ones, a simulation, a damaged one, one of which a table is damaged, and links out of it."""
    place = tmp_path_factory.mktemp("given") / "runs"
    watched_folder(place / "gpt", range(0, 200, 10), alarms=(20, 30))
    watched_folder(place / "gpt-2", range(0, 100, 10), seed=1)
    ns.simulate("pre", tokens=4, dim=4, time=0.2, out=place / "simulated", progress=False)
    (place / "broken").mkdir()
    (place / "broken" / "run.json").write_text("{", encoding="utf-8")
    watched_folder(place / "torn", range(0, 40, 10))
    for table in (place / "torn").rglob("layers.parquet"):
        table.write_bytes(b"no table")
    outside = watched_folder(place.parent / "outside", [1])
    (place / "linked").symlink_to(outside)
    watched_folder(place / "within", [1])
    (place / "within" / "extra.parquet").symlink_to(outside / "run.json")
    return place


@pytest.fixture(scope="module")
def app(runs: Path) -> Any:
    app = make_app(Settings((str(runs),), token=TOKEN))

    @app.post("/api/broken")
    def broken(content: dict[str, Any]) -> None:
        raise KeyError("a bug")

    @app.post("/api/refused")
    def refused() -> None:
        raise ns.InputError("layers=9: should be less than 3")

    @app.post("/api/huge")
    def huge() -> None:
        raise MemoryError

    return app


@pytest.fixture(scope="module")
def client(app: Any) -> Iterator[TestClient]:
    with TestClient(app, base_url="http://127.0.0.1:8347", headers=GOOD) as opened:
        yield opened


def ids(client: TestClient) -> dict[str, str]:
    return {run["name"]: run["id"] for run in client.get("/api/runs").json()}


def test_nothing_is_answered_without_the_token(client: TestClient) -> None:
    for token in ("", "x", TOKEN[:-1], TOKEN + "x", "\u00ff"):
        answer = client.get("/api/runs", headers={"x-normscope-token": token.encode("latin-1")})
        assert (answer.status_code, answer.json().keys()) == (403, {"detail"})
        closed = client.get("/", params={"token": token})
        assert closed.status_code == 403
        assert "normscope explore" in closed.text
        assert TOKEN not in closed.text
    assert client.get("/", headers={"x-normscope-token": TOKEN}).status_code == 403  # the page has it in its address
    assert client.get("/api/runs", params={"token": TOKEN}, headers={"x-normscope-token": ""}).status_code == 403
    assert client.get("/", params={"token": TOKEN}).status_code == 200


def test_servers_on_loopback_keep_their_token_so_that_pages_find_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hosts = ("127.0.0.1", "localhost", "0.0.0.0")
    first, second, open_to_others = (make_app(Settings(host=host)).state.token for host in hosts)
    assert first == second != open_to_others
    kept = tmp_path / "normscope" / "explorer" / "token"
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.chmod(0o644)  # others may have read it
    assert make_app(Settings()).state.token != first
    kept.write_text("short", encoding="utf-8")
    assert len(make_app(Settings()).state.token) > 16


def test_a_run_whose_files_hold_what_json_cannot_is_listed_beside_the_others(tmp_path: Path) -> None:
    watched_folder(tmp_path / "gpt", [1])
    for name, value in (("nan", "NaN"), ("surrogate", '"\\ud800"'), (os.fsdecode(b"name\xff"), "1")):
        folder = tmp_path / "plain"
        ns.simulate("pre", tokens=4, dim=4, time=0.2, out=folder, progress=False)
        description = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        description.pop("digest", None)
        description["configuration"]["beta"] = "HERE"
        (folder / "run.json").write_text(json.dumps(description).replace('"HERE"', value), encoding="utf-8")
        folder.rename(tmp_path / name)
    app = make_app(Settings((str(tmp_path),), token=TOKEN))
    with TestClient(app, base_url="http://127.0.0.1:8347", headers=GOOD) as client:
        assert [run["name"] for run in client.get("/api/runs").json()] == ["gpt", "name?", "nan", "surrogate"]
        assert client.get("/", params={"token": TOKEN}).status_code == 200


@pytest.mark.parametrize("path", ["/?token=" + TOKEN, "/api/runs", "/api/events"])
def test_requests_under_other_names_and_of_other_sites_are_refused(client: TestClient, path: str) -> None:
    for host in ("evil.example", "evil.example:8347", "127.0.0.1.evil.example:8347", "localhost@evil.example", "[::1", ""):
        assert client.get(path, headers={"host": host}).status_code == 403
    own = {"host": "127.0.0.1:8347"}
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", "file://", "http://["):
        assert client.get(path, headers={**own, "origin": origin}).status_code == 403
        assert client.post("/api/cancel", headers={**own, "origin": origin}).status_code == 403
    crossed = client.get(path, headers={**own, "sec-fetch-site": "cross-site"})
    assert crossed.status_code == (200 if path.startswith("/?") else 403)  # a link to the page may be anywhere


def test_its_own_names_and_origin_are_accepted(client: TestClient) -> None:
    for host in ("127.0.0.1:8347", "localhost:8347", "LOCALHOST", "[::1]:8347", "localhost:9000"):  # the last: a forwarded port
        assert client.get("/api/runs", headers={"host": host, "origin": f"http://{host.lower()}"}).status_code == 200
    assert client.post("/api/cancel", headers={"origin": "http://127.0.0.1:8347", "sec-fetch-site": "same-origin"}).json() == {
        "cancelled": False
    }


def test_beyond_loopback_addresses_are_accepted_but_no_names_of_others() -> None:
    rules = Rules("0.0.0.0", TOKEN)
    assert all(rules.accepts_host(host) for host in ("192.168.1.7:8347", "[fe80::1]:80", socket.gethostname(), "localhost"))
    assert not any(rules.accepts_host(host) for host in ("evil.example", "1.2.3.4.evil.example", "1.2.3.4@evil", "", "a:b:c"))
    assert not Rules("127.0.0.1", TOKEN).accepts_host("192.168.1.7:8347")


def test_every_answer_has_strict_headers(client: TestClient) -> None:
    page = client.get("/", params={"token": TOKEN})
    broken = client.post("/api/broken", json={})
    for answer in (page, broken, client.get("/api/runs"), client.get("/nothing"), client.get("/", headers={"host": "evil"})):
        headers = answer.headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
    assert re.search(r"script-src '(sha256-|nonce-)", page.headers["content-security-policy"])
    assert "connect-src 'self'" in page.headers["content-security-policy"]


def test_there_are_no_other_routes_and_no_files(client: TestClient, runs: Path) -> None:
    for path in (
        "/docs", "/redoc", "/openapi.json", "/api/runs/gpt", "/api/runs/..%2Fgpt",
        "/api/runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd/watch",
        f"/api/runs/{str(runs / 'gpt').replace('/', '%2F')}/watch", "/run.json", "/..%2f..%2fetc/passwd", "/static/app.js",
    ):  # fmt: skip
        answer = client.get(path)
        assert answer.status_code == 404
        assert answer.json()["detail"]
    assert client.get("/api/cancel").status_code == 405
    assert not {"/docs", "/openapi.json"} & {getattr(route, "path", "") for route in client.app.routes}  # type: ignore[attr-defined]


def test_links_out_of_the_folders_are_not_followed(client: TestClient, runs: Path) -> None:
    about = {run["name"]: run for run in client.get("/api/runs").json()}
    for name in ("outside", "within"):  # a folder that is a link has the name of what it leads to
        assert about[name]["kind"] == "damaged"
        assert "outside the folder" in about[name]["problem"]
        answer = client.get(f"/api/runs/{about[name]['id']}/watch")
        assert (answer.status_code, "link" in answer.json()["detail"]) == (422, True)


def test_damaged_folders_are_one_sentence_and_the_others_work(client: TestClient) -> None:
    about = {run["name"]: run for run in client.get("/api/runs").json()}
    assert "not valid JSON" in about["broken"]["problem"]
    torn = client.get(f"/api/runs/{about['torn']['id']}/watch")
    assert torn.status_code == 422
    assert "is damaged" in torn.json()["detail"]
    assert "\n" not in torn.json()["detail"]
    assert client.get(f"/api/runs/{about['gpt']['id']}/watch").json()["probes"] == 20
    exported = {run["name"]: run for run in client.app.state.folders.exported()}  # type: ignore[attr-defined]
    assert "is damaged" in exported["torn"]["problem"]
    assert exported["gpt"]["data"]["probes"] == 20
    json.dumps(list(exported.values()), allow_nan=False)


def test_sizes_and_values_are_limited(client: TestClient) -> None:
    assert client.post("/api/broken", content=b"x" * (MOST_BODY + 1)).status_code == 413

    def endless() -> Iterator[bytes]:
        yield from (b"[" * 65536 for _ in range(8))

    unannounced = client.post("/api/broken", content=endless())  # no Content-Length
    assert (unannounced.status_code, "at most 256 kB" in unannounced.json()["detail"]) == (413, True)
    wrong = client.get(f"/api/runs/{ids(client)['gpt']}/watch", params={"after": -1})
    assert wrong.status_code == 422
    assert wrong.json()["detail"] == "after: should be greater than or equal to 0"
    assert client.get("/api/events", headers={"x-normscope-page": "p" * 65}).status_code == 422
    long = client.post("/api/models/0/read", json={"prompt": "a" * (MOST_PROMPT + 1)})
    assert (long.status_code, long.json()) == (422, {"detail": "prompt: String should have at most 8000 characters"})
    deep = client.post("/api/models/0/read", content=b'{"prompt":' + b"[" * 100_000)
    assert deep.status_code == 422


def test_mistakes_are_sentences_and_bugs_are_tracebacks_for_the_terminal(
    client: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = client.post("/api/refused")
    assert (refused.status_code, refused.json()) == (422, {"detail": "layers=9: should be less than 3"})
    assert client.post("/api/huge").json() == {"detail": "not enough memory for this"}
    assert capsys.readouterr().err == ""
    broken = client.post("/api/broken", json={})
    assert broken.status_code == 500
    assert "bug" in broken.json()["detail"]
    assert "KeyError" not in broken.text
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "KeyError: 'a bug'" in printed


def test_the_page_knows_its_runs(client: TestClient) -> None:
    page = client.get("/", params={"token": TOKEN}).text
    data = json.loads(page.split('id="explorer-data">')[1].split("</script>")[0])
    assert data["server"]["token"] == TOKEN
    assert {"gpt", "gpt-2", "simulated", "broken"} <= {run["name"] for run in data["runs"]}
    assert data["view"] == "training"


def decoded(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), "<f4")


def test_a_watched_run_is_sent_as_it_was_measured(client: TestClient) -> None:
    id = ids(client)["gpt"]
    data = client.get(f"/api/runs/{id}/watch").json()
    assert data["steps"] == list(range(0, 200, 10))
    assert [alarm["step"] for alarm in data["alarms"]] == [20, 30]
    maps = {each["name"]: each for each in data["maps"]}
    tables = [snapshot(step).tables for step in range(0, 200, 10)]
    norm = decoded(maps["layers-norm"]["values"]).reshape(20, 4)
    np.testing.assert_allclose(norm, [table["layers"]["norm"] for table in tables], rtol=1e-6)
    assert maps["layers-norm"]["rows"] == ["0", "1", "2", "3 (end)"]
    logit = decoded(maps["heads-logit"]["values"]).reshape(20, 3)
    np.testing.assert_allclose(logit, [table["heads"].groupby("layer")["logit"].max() for table in tables], rtol=1e-6)
    entropy = decoded(maps["heads-entropy"]["values"]).reshape(20, 3)
    np.testing.assert_allclose(entropy, [table["heads"].groupby("layer")["entropy"].mean() for table in tables], rtol=1e-6)
    heads = client.get(f"/api/runs/{id}/heads", params={"layer": 1}).json()
    sink = decoded(heads["values"]["sink"]).reshape(20, 2)
    np.testing.assert_allclose(sink, [table["heads"].query("layer == 1")["sink"] for table in tables], rtol=1e-6)
    loss = next(curve for curve in data["curves"] if curve["name"] == "loss")
    np.testing.assert_allclose(loss["mean"], [table["steps"]["loss"][0] for table in tables])
    assert client.get(f"/api/runs/{id}/heads", params={"layer": 99}).json()["heads"] == []


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    destination = destination_of(tmp_path / "run")
    destination.begin(ABOUT)
    for step in range(3):
        destination.write(snapshot(step))
    destination.close()
    run = WatchedTraining(tmp_path / "run")
    first = run.data()
    again = destination_of(tmp_path / "run", resume=True)
    assert run.data(first["epoch"], 3, 0)["steps"] == []
    again.begin(ABOUT)
    for step in range(3, 40):
        again.write(snapshot(step))
    again.close()
    whole = run.data(first["epoch"], 3, 0)  # another session may replace steps: all comes again
    assert (whole["first"], whole["steps"]) == (0, list(range(40)))
    assert whole["epoch"] != first["epoch"]
    later = run.data(whole["epoch"], 39, 0)
    assert (later["first"], later["steps"]) == (39, [39])
    assert len(decoded(later["maps"][0]["values"])) == 4


def test_appends_are_read_once_and_merged_segments_repeat_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from normscope.runs import segments
    from normscope.watch.run_folder import WatchedFolder

    folder = WatchedFolder(tmp_path / "run")
    folder.begin(ABOUT)
    folder.write([snapshot(0)])
    run = WatchedTraining(tmp_path / "run")
    assert run.data()["state"] == "running"
    read: list[str] = []
    before = segments.read_arrow
    monkeypatch.setattr(segments, "read_arrow", lambda path: read.append(path.parent.name) or before(path))
    for step in range(1, 40):  # the 16th and the 32nd merge
        folder.write([snapshot(step)])
        if step % 5 == 0:
            assert run.data()["steps"] == list(range(step + 1))
    read.clear()
    run.data()
    assert set(read) <= {f"0001-{n:06d}-{n:06d}" for n in range(37, 41)}
    read.clear()
    run.data()
    assert read == []
    folder.close()
    end = run.data()
    assert (end["state"], end["probes"]) == ("finished", 40)
    norm = decoded(end["maps"][0]["values"]).reshape(40, 4)
    np.testing.assert_allclose(norm, [snapshot(step).tables["layers"]["norm"] for step in range(40)], rtol=1e-6)


def test_long_runs_are_thinned_to_exact_means_and_maxima(tmp_path: Path) -> None:
    watched_folder(tmp_path / "run", range(100))
    run = WatchedTraining(tmp_path / "run", 8)
    data = run.exported()
    assert data["block"] == 16
    assert data["steps"] == [15, 31, 47, 63, 79, 95, 99]
    maps = {each["name"]: decoded(each["values"]).reshape(7, -1) for each in data["maps"]}
    tables = [snapshot(step).tables for step in range(100)]
    blocks = [tables[first : first + 16] for first in range(0, 100, 16)]
    rotation = [np.mean([table["layers"]["rotation"][:3] for table in block], axis=0) for block in blocks]
    np.testing.assert_allclose(maps["layers-rotation"], rotation, rtol=1e-6)
    massive = [np.max([table["layers"]["massive"] for table in block], axis=0) for block in blocks]
    np.testing.assert_allclose(maps["layers-massive"], massive, rtol=1e-6)
    loss = data["curves"][0]
    assert loss["largest"][0] == tables[0]["steps"]["loss"][0]
    assert loss["least"][0] == tables[15]["steps"]["loss"][0]
    assert data["layers"]["2"]["heads"] == [0, 1]


def test_sources_are_runs_or_models_and_a_watched_training_is_both(tmp_path: Path) -> None:
    with new_run(tmp_path / "trained", "train", {}) as training:
        watched_folder(training.path / "watch", [1, 2])
        training.write_text("config.json", "{}")
        training.write_text("model.safetensors", "")
    with new_run(tmp_path / "unwatched", "train", {}) as training:
        training.write_text("config.json", "{}")
        training.write_text("model.safetensors", "")
    trained, unwatched = str(tmp_path / "trained"), str(tmp_path / "unwatched")
    assert split_sources([trained, unwatched, "package:smollm2"]) == ([trained], [trained, unwatched, "package:smollm2"])
    (run,) = Folders([trained]).about()
    assert (run["kind"], run["name"]) == ("watch", "trained")
    with new_run(tmp_path / "compared", "compare", {}):
        pass
    (other,) = Folders([str(tmp_path / "compared")]).about()
    assert "the explorer shows" in other["problem"]


def test_a_training_is_found_before_it_has_its_folder_and_keeps_its_id(tmp_path: Path) -> None:
    unfinished = unfinished_folder(tmp_path / "mine", {"seed": 1})
    watched_folder(unfinished / "watch", [1, 2])
    for given in (tmp_path, tmp_path / "mine"):
        assert split_sources([str(given)]) == ([str(given)], [])
        (run,) = Folders([str(given)]).about()
        assert (run["name"], run["kind"]) == ("mine", "watch")
    folders = Folders([str(tmp_path / "mine")])
    before = folders.training(run["id"]).data()
    version = folders.find(run["id"]).version
    unfinished.rename(tmp_path / "mine")
    assert folders.find(run["id"]).version != version
    after = folders.training(run["id"]).data()
    assert (after["steps"], after["state"]) == (before["steps"], "finished")
    (tmp_path / "empty").mkdir()
    for source, problem in ((tmp_path / "empty", "holds neither a run nor a model"), (tmp_path / "absent", "does not exist")):
        with pytest.raises(ns.InputError, match=f"'{source}' {problem}"):
            split_sources([str(source)])


def test_a_run_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    watched_folder(tmp_path / "run", range(30))
    run = WatchedTraining(tmp_path / "run")
    first = run.data()
    (tmp_path / "run").rename(tmp_path / "old")
    watched_folder(tmp_path / "run", range(5), seed=3)
    again = run.data(first["epoch"], 29, 0)
    assert (again["first"], again["steps"]) == (0, list(range(5)))


# The queue


def test_one_run_at_a_time_in_order_and_at_most_so_many_wait() -> None:
    queue, running, ran = ModelQueue(limit=2), threading.Event(), list[int]()
    release = threading.Event()

    def blocking(run: ModelRun[int]) -> int:
        running.set()
        release.wait(30)
        ran.append(0)
        return 0

    def at(place: int) -> Callable[[ModelRun[int]], int]:
        return lambda run: ran.append(place) or place

    first = queue.submit(blocking, "a")
    assert running.wait(30)
    second, third = queue.submit(at(1), "b"), queue.submit(at(2), "c")
    assert [row["before"] for row in queue.status("c")] == [2]
    with pytest.raises(BusyError, match="busy"):
        queue.submit(at(3), "d")
    release.set()
    assert [run.future.result(30) for run in (first, second, third)] == [0, 1, 2]
    assert ran == [0, 1, 2]
    queue.close()


def noticing(run: ModelRun[str]) -> str:
    run.report("waiting to be cancelled")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        run.check()
        time.sleep(0.005)
    return "never cancelled"


def test_a_newer_run_of_a_page_takes_the_place_of_its_older_one() -> None:
    queue = ModelQueue()
    older = queue.submit(noticing, "page", "prompt")
    other = queue.submit(lambda run: "other purpose", "page", "token")
    waiting = queue.submit(lambda run: "never runs", "page", "prompt")
    newer = queue.submit(lambda run: "newer", "page", "prompt")
    for cancelled in (older, waiting):
        with pytest.raises(CancelledError):
            cancelled.future.result(30)
    assert other.future.result(30) == "other purpose"
    assert newer.future.result(30) == "newer"
    queue.submit(noticing, "page")
    assert queue.cancel("page")
    assert not queue.cancel("nobody")
    queue.close()
    with pytest.raises(BusyError):
        queue.submit(noticing)


def test_a_run_is_cancelled_by_its_page_and_when_that_is_gone_and_a_bug_in_it_is_still_reported(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    running, ended = threading.Event(), threading.Event()

    def failing(run: ModelRun[None]) -> None:
        running.set()
        try:
            noticing(run)
        except CancelledError:
            raise ZeroDivisionError("in a layer") from None
        finally:
            ended.set()

    with Serving() as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=GOOD, trust_env=False) as client:

        @server.app.post("/api/waits")
        async def waits(request: Request) -> str:
            return str(await server.app.state.queue.result(request, noticing, "p"))

        @server.app.post("/api/fails")
        async def fails(request: Request) -> str:
            return str(await server.app.state.queue.result(request, failing, "p"))

        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(client.post("/api/waits", timeout=60)))
        waiting.start()
        while not client.post("/api/cancel", timeout=60).json()["cancelled"]:
            time.sleep(0.02)
        waiting.join(60)
        assert (answers[0].status_code, answers[0].json()) == (409, {"detail": "cancelled"})
        with pytest.raises(httpx.ReadTimeout):  # the connection is closed
            client.post("/api/fails", timeout=httpx.Timeout(60, read=1))
        assert running.wait(60)
        assert ended.wait(60)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/api/waits", timeout=httpx.Timeout(60, read=1))
        while server.app.state.queue.status("p"):
            time.sleep(0.02)
    gc.collect()
    assert caplog.records == []  # asyncio reports results that nobody took when they are collected
    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 1  # a run that was cancelled is nothing to report
    assert "ZeroDivisionError: in a layer" in printed


# A real process


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and its address."""
    code = (
        "import sys; from normscope.explorer.server import Settings, serve\n"
        "settings = Settings(tuple(sys.argv[4:]), sys.argv[1], int(sys.argv[2]), sys.argv[3])\n"
        "serve(settings, lambda *told: print(*told, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_process_serves_streams_and_ends_quietly_and_its_port_is_free_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    watched_folder(folder, [1, 2])
    process, url = started("127.0.0.1", "0", TOKEN, str(folder))
    try:
        assert url.endswith(f"/?token={TOKEN}")
        place = httpx.URL(url).copy_with(query=None)
        with pytest.raises(ns.InputError, match=r"port=\d+ cannot be used: .* choose another port=, or port=0"):
            serve(Settings(port=place.port or 0), lambda *_: None)
        with httpx.Client(base_url=place, headers=GOOD, timeout=60, trust_env=False) as client:
            assert client.get("/", params={"token": TOKEN}).status_code == 200
            with client.stream("GET", "/api/events") as answer:
                events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
                assert next(events)["kind"] == "ready"
                watched_folder(folder, [3], resume=True)
                assert next(event for event in events if event["kind"] == "grown")["run"]
                process.send_signal(signal.SIGINT)
                list(events)  # the stream ends with the server
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        with Serving(port=place.port or 0) as again:
            assert again.url == url  # the page of before connects again
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def test_what_other_machines_reach_is_said() -> None:
    assert exposed(Settings()) == ""
    words = exposed(Settings(("package:smollm2",), host="0.0.0.0"))
    assert "prompts to package:smollm2" in words
    assert "not encrypted" in words
    assert address("::1", 80, "t") == "http://[::1]:80/?token=t"
    for token in ("short", "with spaces in its middle", "ü" * 20):
        with pytest.raises(ns.InputError, match="token: should have 16 or more"):
            check_token(token)
    with pytest.raises(ns.InputError, match=r"host='no\.such\.host\.invalid' is no address"):
        serve(Settings(host="no.such.host.invalid"), lambda *_: None)


def test_a_browser_is_opened_without_the_token_on_its_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from normscope.cli.explore import _open

    opened: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    _open(f"http://127.0.0.1:8347/?token={TOKEN}", wanted=True)
    page = tmp_path / "normscope" / "explorer" / "open.html"
    assert opened == [page.as_uri()]
    assert f"url=http://127.0.0.1:8347/?token={TOKEN}" in page.read_text(encoding="utf-8")
    assert page.stat().st_mode & 0o777 == 0o600
