"""The explorer's view of training, in a browser: a real training that grows while the page is open, and runs of any kind."""

import csv
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normscope as ns
from helpers.browser import Tab, assert_readable
from helpers.explorer import Serving
from helpers.watched import snapshot, watched_folder
from normscope.explorer.export import export_explorer
from normscope.watch.destinations import destination_of

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, Config

LAST = "Number(document.querySelector('.panel .note')?.textContent.match(/step (\\d+)/)?.[1] ?? 0)"
HIDDEN = """(() => {
  Object.defineProperty(document, "hidden", { configurable: true, value: HIDDEN });
  document.dispatchEvent(new Event("visibilitychange"));
})()"""
APART = """(() => {
  const middle = name => {
    const box = document.querySelector(name).getBoundingClientRect();
    return box.left + box.width / 2;
  };
  return Math.abs(middle(".training-chart .training-cursor") - middle(".lines-marker"));
})()"""
READOUT = "[...document.querySelectorAll('.training-readout')].map(node => node.textContent)"
MAPS = "[...document.querySelectorAll('.training-panels .heatmap-canvas')].map(node => node.ariaLabel)"


class Training:
    """A small GPT that learns to repeat a token, one step at a time, watched at every one of them."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = GPT(Config(layers=2, heads=2, dim=16, context=16))
        self.batch = torch.randint(256, (2, 1)).repeat(1, 16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        rule = ns.watch.Rule(
            "large norm", ns.watch.column("layers", "norm"), 0.0, "{place} has norm {number}.", "Nothing helps."
        )
        self.watch = ns.watch(self.model, probe=self.batch, every=1, to=folder, alarms=[rule])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = self.model(self.batch, self.batch)[1]
            loss.backward()
            self.optimizer.step()
            self.watch.step(loss=loss)


@pytest.fixture(scope="module")
def tab(tab: Tab) -> Tab:
    tab.page.set_viewport_size({"width": 1200, "height": 900})
    return tab


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two watched runs with alarms, and a damaged one."""
    place = tmp_path_factory.mktemp("given") / "runs"
    watched_folder(place / "gpt", range(0, 200, 10), alarms=(50, 120))
    watched_folder(place / "gpt-2", range(0, 100, 10), layers=2, seed=1)
    (place / "broken").mkdir()
    (place / "broken" / "run.json").write_text("{", encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def page(runs: Path) -> Path:
    path = runs.parent / "page.html"
    return export_explorer(path, [str(runs / "gpt"), str(runs / "gpt-2")])


def opened(tab: Tab, page: Path, state: str = "") -> None:
    tab.page.goto("about:blank")
    tab.errors.clear()
    tab.page.goto(f"{page.as_uri()}#training{state}")
    tab.wait(f"({MAPS}).length > 0")
    tab.settle()


def test_a_training_is_seen_while_it_grows_and_a_crash_of_the_server_loses_nothing(tab: Tab, tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    server = Serving(tmp_path / "run")
    with server:
        tab.page.goto(server.url)
        tab.errors.clear()
        tab.wait("document.querySelector('.training-panels')?.textContent.includes('No probe yet')")
        training.steps(4)  # the numbers of a probe are taken at one of the next steps
        first = tab.wait(f"{LAST} >= 3 && {LAST}")
        requested = len(tab.loaded)
        tab.run(HIDDEN.replace("HIDDEN", "true"))  # another tab is looked at meanwhile
        training.steps(4)
        tab.run(HIDDEN.replace("HIDDEN", "false"))
        tab.wait(f"{LAST} >= 7")
        watched = [url for url in tab.loaded[requested:] if "/watch?" in url]
        assert watched
        known = [int(re.search(r"epoch=\w+&after=(\d+)", url)[1]) for url in watched]  # type: ignore[index]
        assert min(known) >= first - 1  # what the page has is not sent again, but for its last column
        assert first < 7
        assert f"3 × {tab.run(LAST)} cells" in tab.run(MAPS)[0]  # two layers and the states after the last
        alarm = tab.page.locator(".training-alarms button").first
        assert "large norm" in str(alarm.get_attribute("aria-label"))
        assert "running, step " in tab.page.locator(".training-panels .note").first.inner_text()
        assert [error for error in tab.errors if not error.endswith("/api/events: net::ERR_ABORTED")] == []
    tab.wait("document.getElementById('connection').textContent.includes('does not answer')")
    assert f"3 × {tab.run(LAST)} cells" in tab.run(MAPS)[0]
    tab.page.keyboard.press("ArrowRight")
    assert "step 1 " in tab.run(READOUT)[0]  # what was loaded still answers
    training.steps(3)
    with server:  # again, on the same port and with the same token
        tab.wait("document.getElementById('connection').hidden")
        tab.wait(f"{LAST} >= 9")
        training.watch.close()
        tab.wait("document.querySelector('.training-panels .note').textContent.includes('finished')")
        expected = ns.load(tmp_path / "run").tables["layers"]
        tab.page.keyboard.press("s")
        with tab.page.expect_download() as saved:
            tab.page.get_by_role("button", name="map (CSV)").click()
        rows = list(csv.DictReader(io.StringIO(Path(saved.value.path()).read_text(encoding="utf-8"))))
        norms = {(int(row["step"]), int(row["row"].split()[0])): float(row["norm"]) for row in rows}
        assert norms == pytest.approx({(row.step, row.layer): row.norm for row in expected.itertuples()}, rel=1e-6)
        tab.page.keyboard.press("Escape")
        tab.page.goto("about:blank")


def test_a_run_that_cannot_be_read_leaves_the_others(tab: Tab, runs: Path) -> None:
    for table in (watched_folder(runs / "torn", [0, 10])).rglob("layers.parquet"):
        table.write_bytes(b"no table")
    with Serving(runs) as server:
        tab.page.goto(server.url)
        tab.errors.clear()
        tab.wait(f"({MAPS}).length === 2")
        assert "broken: " in tab.page.locator("#view-training .problem").first.inner_text()
        tab.page.get_by_role("checkbox", name="torn").check()
        tab.wait("[...document.querySelectorAll('.panel .problem')].some(node => node.textContent.includes('is damaged'))")
        assert len(tab.run(MAPS)) == 2
        failed = [error for error in tab.errors if "422" not in error]  # the browser itself reports the refused request
        assert failed == []
        watched_folder(runs / "later", [0, 10])  # a run that begins while the page is open
        tab.page.get_by_role("checkbox", name="later").check()
        tab.wait(f"({MAPS}).length === 3")
        tab.page.goto("about:blank")


def test_maps_alarms_and_lines_share_a_cursor(tab: Tab, page: Path) -> None:
    opened(tab, page)
    assert [text.split(":")[0] for text in tab.run(MAPS)] == ["gpt", "gpt-2"]
    first = tab.page.locator(".training-panels .heatmap-canvas").first
    box = first.bounding_box()
    assert box is not None
    tab.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60)
    hovered = tab.run(READOUT)
    gpt, gpt_2 = (int(text.removeprefix("step ").split(" · ")[0]) for text in hovered)
    assert gpt_2 == min(gpt, 90)  # where the second run ends
    assert 50 < gpt < 190
    assert tab.run("document.querySelectorAll('.training-cursor:not([hidden])').length") == 4  # map and alarms of both runs
    assert (
        tab.run("document.querySelectorAll('.lines-marker').length") == 6
    )  # curve and layer of both, and both pictures of all
    tab.page.mouse.move(5, 5)
    assert tab.run(READOUT) == ["", ""]
    centres = tab.run("""(() => {
      const panel = document.querySelector('.training-panels .panel');
      const middle = node => { const box = node.getBoundingClientRect(); return box.left + box.width / 2; };
      return [...panel.querySelectorAll('.training-alarms button')].map(middle);
    })()""")
    tab.page.locator(".training-alarms button").first.click()
    line = tab.run("document.querySelector('.training-chart .training-cursor').getBoundingClientRect().left")
    assert abs(line + 1 - centres[0]) < 1.5
    for width in (500, 1200):
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.wait(f"document.querySelector('.panel').clientWidth > {width} / 3 && ({APART}) < 1.5")
    loss = snapshot(50).tables["steps"]["loss"][0]
    assert f"step 50 · loss {loss:.3g}" in tab.run(READOUT)[0]
    assert "step=50" in tab.page.url
    assert tab.errors == []


def test_everything_works_with_a_keyboard_and_the_address_has_it(tab: Tab, page: Path) -> None:
    opened(tab, page, "?quantity=heads-logit")
    for key in ("a", "a"):
        tab.page.keyboard.press(key)
    assert "step 120" in tab.run(READOUT)[0]
    tab.wait("document.getElementById('announcement').textContent.includes('logits grow')")
    tab.page.keyboard.press("b")
    tab.page.keyboard.press("ArrowRight")
    assert "step 60" in tab.run(READOUT)[0]
    for _ in range(2):
        tab.page.keyboard.press("ArrowDown")
    number = snapshot(60).tables["heads"].query("layer == 1")["logit"].max()
    assert f"layer 1: max over heads {number:.3g}" in tab.run(READOUT)[0]
    tab.page.locator("#training-head").select_option("1")
    tab.wait("location.hash.includes('head=1')")
    described = tab.page.locator(".panel").first.locator(".lines-picture").nth(1).get_attribute("aria-label")
    heads = [snapshot(step).tables["heads"].query("layer == 1 and head == 1")["logit"].iloc[0] for step in (0, 190)]
    assert f"layer 1, head 1 from {heads[0]:.3g} to {heads[1]:.3g}" in str(described)
    tab.wait("location.hash.includes('row=1')")
    link, before = tab.page.url, tab.run(READOUT)
    tab.page.keyboard.press("Escape")
    tab.page.goto("about:blank")
    tab.page.goto(link)
    tab.wait(f"({READOUT}).join('') !== ''")
    assert tab.run(READOUT) == before
    assert tab.page.locator("#training-head").input_value() == "1"
    canvas = tab.page.locator(".training-panels .heatmap-canvas").first
    canvas.focus()
    tab.page.keyboard.press("ArrowDown")
    assert "layer 2" in tab.run(READOUT)[0]
    tab.page.locator(".training-alarms button").first.focus()
    tab.page.keyboard.press("ArrowRight")
    assert tab.run("document.activeElement.dataset.column") == "12"
    tab.page.locator(".heatmap-table summary").first.click()
    cells = tab.wait("document.querySelector('.heatmap-table table')?.querySelectorAll('tbody tr td').length")
    assert cells == 60
    assert tab.errors == []


QUANTITIES = """(() => [...document.querySelectorAll('#training-quantity option')].map(option => option.value))()"""


def test_every_quantity_every_save_and_both_themes_can_be_seen(tab: Tab, page: Path) -> None:
    opened(tab, page)
    layers = tab.page.locator("#training-row")
    assert layers.locator("option").all_text_contents() == ["0", "1", "2", "3 (end)"]  # each once, though a run ends at 2
    layers.select_option("2")
    assert layers.input_value() == "2"
    names = tab.run(QUANTITIES)
    assert len(names) == 19
    shown = set[tuple[str, ...]]()
    for name in names:
        tab.page.get_by_label("Quantity").select_option(name)
        maps = tab.run(MAPS)
        assert len(maps) == 2
        shown.add(tuple(maps))
    assert len(shown) == len(names)
    tab.page.keyboard.press("l")
    saves: dict[str, Any] = {}
    tab.page.keyboard.press("s")
    for label in (
        "gpt: Learned scales, map (PNG)",
        "gpt: Learned scales, map (SVG)",
        "gpt: curves (CSV)",
        "gpt: alarms (CSV)",
    ):
        with tab.page.expect_download() as saved:
            tab.page.get_by_role("button", name=label, exact=True).click()
        saves[label[-4:-1]] = Path(saved.value.path()).read_bytes()
    tab.page.keyboard.press("Escape")
    assert saves["PNG"].startswith(b"\x89PNG")
    assert saves["SVG"].startswith(b"<svg")
    alarms = list(csv.DictReader(io.StringIO(saves["CSV"].decode())))
    assert [row["step"] for row in alarms] == ["50", "120"]
    assert tab.errors == []
    for scheme, width in (("light", 1200), ("dark", 375)):
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.page.emulate_media(color_scheme=scheme)
        opened(tab, page, "?step=50&row=1")
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert_readable(tab)
        assert tab.errors == []
    tab.page.set_viewport_size({"width": 1200, "height": 900})
    tab.page.emulate_media(color_scheme="light")


def test_a_long_run_is_thinned_in_a_page_and_the_page_says_so(tab: Tab, tmp_path: Path) -> None:
    destination = destination_of(tmp_path / "long")
    destination.begin({"model": "tiny", "layers": 3})
    for step in range(300):
        destination.write(snapshot(step))
    destination.close()
    page = export_explorer(tmp_path / "long.html", [str(tmp_path / "long")])
    opened(tab, page, "?quantity=layers-rotation&row=1&step=3")
    note = tab.page.locator(".training-panels .note").first.inner_text()
    assert "300 probes. A column is the mean of 4 probes." in note
    mean = np.mean([snapshot(step).tables["layers"]["rotation"][1] for step in range(4)])
    assert f"layer 1: degrees {mean:.3g}" in tab.run(READOUT)[0]
    assert tab.errors == []


def test_a_simulation_opens_the_lab_with_its_settings(tab: Tab, tmp_path: Path) -> None:
    scheme = tmp_path / "mine.toml"
    scheme.write_text('name = "mine"\n[attention]\ninput = "norm"\noutput = "norm"\n', encoding="utf-8")
    ns.simulate(["ngpt", str(scheme)], tokens=6, dim=8, beta=3, time=2, out=tmp_path / "run", progress=False)
    page = export_explorer(tmp_path / "run.html", [str(tmp_path / "run")])
    tab.errors.clear()
    tab.page.goto(page.as_uri())
    tab.wait("document.documentElement.dataset.ready === 'true'")
    tab.settle()
    shown = {name: tab.page.get_by_label(name, exact=True).first.input_value() for name in ("Tokens n", "Dimension d")}
    assert shown == {"Tokens n": "6", "Dimension d": "8"}
    text = tab.page.locator("#view-lab").inner_text()
    assert "mine" in text
    assert tab.run("document.querySelectorAll('#view-lab .failure').length") == 0
    assert tab.errors == []
