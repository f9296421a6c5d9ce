"""The sphere lab in a browser: controls, clock, links, dragged starts, the tour with its claims, and saved files."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.browser import Tab, assert_readable
from normscope.dynamics import Attention, make_start, simulate
from normscope.explorer.page import explorer_data, render_explorer
from normscope.measures.collapse_probability import collapse_probability
from normscope.schemes import NAMED

VIEW = "document.getElementById('view-lab')"
DONE = f"{VIEW}.dataset.run === 'done' && !document.querySelector('.lab-progress').textContent"
VALUES = "[...document.querySelectorAll('.lab-values')].map(node => node.textContent)"
LINES = "[...document.querySelectorAll('.strip .lines-path')].map(path => path.getAttribute('d'))"
TIME = f"Number({VIEW}.dataset.time)"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lab") / "tour.html"
    path.write_text(render_explorer(explorer_data()), encoding="utf-8")
    return path.as_uri()


def visit(tab: Tab, address: str, state: str = "", *, width: int = 1200, ready: str = DONE) -> None:
    """Open the lab anew at a state of its address."""
    tab.page.goto("about:blank")
    tab.page.set_viewport_size({"width": width, "height": 800})
    tab.errors.clear()
    tab.page.goto(f"{address}#lab?{state}")
    tab.wait(ready)
    tab.settle()


def state_of(tab: Tab) -> dict[str, str]:
    """What the address holds, once it has been brought up to date."""
    tab.run("new Promise(done => setTimeout(done, 300))")  # after the page's own timer of 250 ms, however slow the machine is
    return {name: values[0] for name, values in parse_qs(urlsplit(tab.page.url).fragment.partition("?")[2]).items()}


def saved(tab: Tab, label: str) -> bytes:
    """The file that a button of the save dialog makes."""
    tab.page.click("#save")
    with tab.page.expect_download() as download:
        tab.page.click(f".saves button:has-text('{label}')")
    tab.page.click("#dialog-close")
    return Path(download.value.path()).read_bytes()


def rows_of(tab: Tab, label: str = "Measures") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(saved(tab, label).decode())))


def curve(rows: list[dict[str, str]], scheme: str, name: str) -> np.ndarray:
    """A column of one scheme, named by how its name ends."""
    return np.array([float(row[name]) for row in rows if row["scheme"].endswith(scheme)])


def test_two_schemes_from_one_start(tab: Tab, address: str) -> None:
    visit(tab, address)
    assert tab.run("document.querySelectorAll('.lab-panel').length") == 2
    assert tab.run("document.querySelectorAll('[data-strip]').length") == 4
    first, second = tab.run(VALUES)
    assert first == second  # norms are 1 at the start, where Post-LN and Pre-LN turn tokens alike
    tab.page.keyboard.press("End")
    tab.wait(f"{TIME} === 12")
    tab.settle()
    rows = rows_of(tab)
    assert set(rows[0]) == {"scheme", "time", "cosine", "speed", "radius", "clusters"}
    post, pre = (curve(rows, name, "cosine") for name in ("Post-LN", "Pre-LN"))
    assert post[0] == pre[0]
    assert post[-1] > 0.999 > 0.8 > pre[-1]
    assert curve(rows, "Post-LN", "clusters")[-1] == 1
    assert "1 cluster" in tab.run(VALUES)[0]
    assert "needs an orthogonal start" in tab.run("document.querySelector('.strips-theory').textContent")
    assert_readable(tab)
    assert tab.errors == []


def test_every_control_changes_the_run(tab: Tab, address: str) -> None:
    visit(tab, address, "tokens=24&time=3")
    before = tab.run(LINES)
    numbers = {"tokens": "20", "beta": "5", "radius": "2", "seed": "3", "step": "0.03", "time": "4", "dim": "8"}
    choices = {"start": "cone", "weights": "kaiming", "norm": "layer", "solver": "layers"}

    def changed(name: str, value: str) -> None:
        nonlocal before
        tab.wait(f"{DONE} && JSON.stringify({LINES}) !== {json.dumps(json.dumps(before, separators=(',', ':')))}")
        before = tab.run(LINES)
        tab.wait(f"new URLSearchParams(location.hash.split('?')[1]).get('{name}') === '{value}'")

    for name, value in numbers.items():
        tab.page.fill(f"#lab-{name}", value)
        changed(name, value)
    for name, value in choices.items():
        tab.page.select_option(f"#lab-{name}", value)
        changed(name, value)
        if name == "start":
            tab.page.fill("#lab-delta", "0.5")
            changed("delta", "0.5")
        if name == "weights":
            tab.page.fill("#lab-heads", "2")
            changed("heads", "2")
    for name in ("causal", "feedforward"):
        tab.page.check(f"#lab-{name}")
        changed(name, "true")
    assert tab.page.is_disabled("#lab-step")
    assert tab.errors == []


def test_looks_change_the_picture(tab: Tab, address: str) -> None:
    visit(tab, address, "t=6&time=8&tokens=32")
    pictures = {saved(tab, "SVG")}
    for name, value in {"shells": "colour", "axis": "log", "speeds": "log"}.items():
        tab.page.select_option(f"#lab-{name}", value)
        tab.settle()
        pictures.add(saved(tab, "SVG"))
    tab.page.check("#lab-trails")
    tab.settle()
    pictures.add(saved(tab, "SVG"))
    assert len(pictures) == 5
    tab.page.click("text=Discrete layers")
    tab.page.fill("#lab-time", "1")
    tab.wait(DONE)  # a logarithmic axis of one layer
    assert state_of(tab).items() >= {"shells": "colour", "axis": "log", "speeds": "log", "trails": "true"}.items()
    assert tab.errors == []


def test_a_wrong_value_is_explained_beside_its_control(tab: Tab, address: str) -> None:
    visit(tab, address)
    tab.page.fill("#lab-tokens", "1")
    assert "from 2 to 512" in tab.page.text_content("#lab-tokens-problem")
    assert tab.page.get_attribute("#lab-tokens", "aria-invalid") == "true"
    tab.page.fill("#lab-tokens", "16")
    tab.page.select_option("#lab-start", "orthogonal")
    for place in ("#lab-start-problem", ".lab-main > .problem ~ .problem"):  # beside the control and above the spheres
        assert "need a dimension of at least 16" in tab.page.text_content(place)
    tab.page.fill("#lab-dim", "16")
    tab.wait(f"{DONE} && document.querySelector('.strips-theory').textContent.startsWith('Dotted')")
    assert tab.page.text_content("#lab-start-problem") == ""
    assert tab.errors == []


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("beta=hot", "Inverse temperature β: Enter a number from 0 to 100."),
        ("schemes=nonsense", "There is no scheme named “nonsense”."),
        ("schemes=[1", "The schemes could not be read from the link."),
        ("moved=3:a,b,c", "The tokens moved by hand could not be read"),
    ],
)
def test_a_damaged_link_still_shows_a_run(tab: Tab, address: str, state: str, words: str) -> None:
    visit(tab, address, f"tokens=8&{state}")
    assert words in tab.page.text_content(".lab-main > .problem")
    assert "Defaults are used instead." in tab.page.text_content(".lab-main > .problem")
    assert len(tab.run(VALUES)) == 2
    assert tab.errors == []


def test_a_scheme_that_becomes_infinite_says_so(tab: Tab, address: str) -> None:
    visit(tab, address, "schemes=post,none&time=1200&t=1200&tokens=4&solver=layers")
    assert "became non-finite" in tab.run("document.querySelectorAll('.lab-panel')[1].textContent")
    assert tab.run(TIME) == 1200  # the other scheme runs on
    assert tab.errors == []


def test_a_long_run_can_be_stopped(tab: Tab, address: str) -> None:
    visit(tab, address, "tokens=512&dim=64&time=1000", ready="document.querySelectorAll('.strip .lines-path').length")
    tab.page.click("text=Stop computing")
    tab.wait("document.querySelector('.lab-progress').textContent.startsWith('Stopped at')")
    tab.page.fill("#lab-tokens", "8")
    tab.page.fill("#lab-time", "2")
    tab.wait(DONE)
    assert tab.errors == []


def test_the_clock(tab: Tab, address: str) -> None:
    visit(tab, address, "tokens=16&time=8")
    tab.page.keyboard.press(" ")
    tab.wait(f"{TIME} > 0.2")
    assert tab.page.text_content(".lab-play") == "Pause"
    tab.page.click(".lab-play")
    assert tab.page.text_content(".lab-play") == "Play"
    stopped = tab.run(TIME)
    assert float(state_of(tab)["t"]) == pytest.approx(stopped, rel=1e-5)
    assert tab.run(TIME) == stopped
    tab.page.keyboard.press("Home")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        tab.page.keyboard.press(key)
    tab.wait(f"Math.abs({TIME} - 0.05) < 1e-9")  # one frame
    tab.page.focus(".lab-clock")
    tab.page.keyboard.press("End")
    tab.wait(f"{TIME} === 8")
    tab.page.click("[data-strip=speed] .lines-picture")  # in the middle
    tab.wait(f"{TIME} > 3 && {TIME} < 5")
    tab.page.focus("[data-strip=cosine]")
    before = tab.run(TIME)
    tab.page.keyboard.press("PageUp")
    tab.wait(f"{TIME} > {before} + 0.4")
    assert "Post-LN" in tab.page.get_attribute("[data-strip=cosine]", "aria-valuetext")
    tab.page.select_option("[aria-label='Speed of the clock']", "4")
    tab.page.click("text=Discrete layers")
    tab.wait(f"{DONE} && document.querySelector('.lab-time').textContent.startsWith('layer')")
    tab.page.keyboard.press("Home")
    tab.page.click("[aria-label='One step forwards']")
    tab.wait(f"{TIME} === 1")
    tab.page.click(".lab-play")
    tab.wait(f"{TIME} === 8 && document.querySelector('.lab-play').textContent === 'Play'")
    assert tab.errors == []


def test_the_run_is_that_of_the_library(tab: Tab, address: str) -> None:
    visit(tab, address, "schemes=post,peri&tokens=12&dim=4&beta=3&seed=5&time=2&step=0.1&causal=true&t=2")
    rows = rows_of(tab)
    start = make_start("uniform", 12, 4, generator=torch.Generator().manual_seed(5))
    for title, name in (("Post-LN", "post"), ("Peri-LN", "peri")):
        path = simulate(start, NAMED[name], Attention(beta=3.0, causal=True), times=[0, 1, 2], step=0.1)
        for measure in ("cosine", "speed", "radius"):
            ours = curve(rows, title, measure)
            np.testing.assert_allclose(ours[[0, 10, 20]], path.table[measure], rtol=1e-9, atol=1e-12)
    states = rows_of(tab, "Hidden states")
    ends = np.array([[float(row[f"x{k}"]) for k in range(4)] for row in states])
    np.testing.assert_allclose(np.linalg.norm(ends[:12], axis=1), 1, atol=1e-12)  # Post-LN stays on the sphere
    assert np.linalg.norm(ends[12:], axis=1).min() > 1.5
    assert tab.errors == []


def test_edited_slots_change_the_flow_at_once(tab: Tab, address: str) -> None:
    visit(tab, address, "tokens=12&time=4&t=4&schemes=pre,peri")
    pre, peri = tab.run(VALUES)
    tab.page.locator("text=Edit slots").first.click()
    tab.page.select_option("[data-path='attention.output']", "norm")
    tab.wait(f"{DONE} && {VALUES}[0] === {VALUES}[1]")  # Pre-LN with a norm of its outputs is Peri-LN
    assert tab.run(VALUES) == [peri, peri] != [pre, peri]
    assert "|Aj|" in tab.page.text_content(".lab-editor")  # the speed law follows
    step = "[data-path='attention.step']"
    tab.page.fill(step, "1/sqrt(layer")
    assert tab.page.get_attribute(step, "aria-invalid") == "true"
    assert tab.run(VALUES) == [peri, peri]
    tab.page.fill(step, "1/sqrt(layer)")
    tab.wait(f"{DONE} && {VALUES}[0] !== {VALUES}[1]")
    tab.settle()
    values, (base, patch) = tab.run(VALUES), json.loads(state_of(tab)["schemes"])[0]
    assert base == "pre"
    assert patch["attention"] == {"output": "norm", "step": "1 / sqrt(t + 1)"}
    assert "(edited)" in tab.page.text_content("[aria-label='Scheme A'] option:checked")
    visit(tab, address, urlsplit(tab.page.url).fragment.partition("?")[2])
    assert tab.run(VALUES) == values
    assert tab.page.input_value(step) == "1 / sqrt(t + 1)"
    tab.page.select_option("[aria-label='Scheme A']", "post")
    tab.wait(f"{DONE} && {VALUES}[0].includes('norm r 1 ')")
    assert tab.page.input_value("[data-path='attention.stream']") == "norm"  # the editor follows the scheme
    assert tab.errors == []


def points_of(picture: bytes) -> list[np.ndarray]:
    """Places of the points of each sphere in a saved picture, from the centre and in units of the sphere."""
    spheres = []
    for node in ElementTree.fromstring(picture).findall("{*}svg"):
        _, _, width, height = (float(value) for value in node.get("viewBox", "").split())
        places = [
            [float(point.get("cx", "")), float(point.get("cy", ""))] for point in node.findall(".//{*}circle[@data-point]")
        ]
        if places:
            spheres.append((np.array(places) - [width / 2, height / 2]) / (0.46 * min(width, height)))
    return spheres


def test_a_link_reproduces_the_view(tab: Tab, address: str) -> None:
    visit(tab, address, "schemes=post,pre,peri&tokens=16&time=6&beta=6&seed=9")
    tab.page.click("[aria-label='Remove scheme C']")
    tab.page.click("text=Add a scheme")
    tab.page.select_option("[aria-label='Scheme C']", "tangent")
    tab.page.select_option("#lab-shells", "colour")
    box = tab.page.locator(".lab-sphere").first.bounding_box()
    assert box is not None
    tab.page.keyboard.press("End")
    tab.page.mouse.move(box["x"] + 30, box["y"] + 30)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 120, box["y"] + 60, steps=3)
    tab.page.mouse.up()
    tab.wait(DONE)
    state, values, picture = state_of(tab), tab.run(VALUES), saved(tab, "SVG")
    assert state["schemes"] == "post,pre,tangent"
    assert state["t"] == "6"
    assert "camera" in state
    visit(tab, address, tab.page.url.partition("?")[2])
    assert tab.run(VALUES) == values
    assert saved(tab, "SVG") == picture
    tab.page.select_option("[aria-label='Scheme C']", "ngpt")
    tab.wait(DONE)
    tab.page.go_back()
    tab.wait("document.querySelector('[aria-label=\"Scheme C\"]').value === 'tangent'")
    assert tab.errors == []


def test_a_start_dragged_by_hand(tab: Tab, address: str) -> None:
    visit(tab, address, "tokens=8&time=4&shells=none")
    before = tab.run(LINES)
    box = tab.page.locator(".lab-sphere").first.bounding_box()
    assert box is not None
    host = tab.page.locator(".lab-sphere").first
    host.focus()
    tab.page.keyboard.press("Enter")
    chosen = host.locator("[aria-live]").text_content() or ""
    for key in ("Enter", "Shift+ArrowRight", "Shift+ArrowUp", "Escape", "Escape"):
        tab.page.keyboard.press(key)
    tab.wait(f"{DONE} && {LINES}[0] !== {json.dumps(before[0])}")
    state = state_of(tab)
    index, _, place = state["moved"].partition(":")
    assert chosen.startswith(f"Token {index}, ")  # the number of the link and of the table below
    point = [float(value) for value in place.split(",")]
    assert math.hypot(*point) == pytest.approx(1, abs=1e-3)
    states = rows_of(tab, "Hidden states")
    for token in (int(index), 8 + int(index)):  # in both schemes
        assert [float(states[token][f"x{k}"]) for k in range(3)] == pytest.approx([v / math.hypot(*point) for v in point])
    lines = tab.run(LINES)
    visit(tab, address, urlsplit(tab.page.url).fragment.partition("?")[2])
    assert tab.run(LINES) == lines
    tab.page.click("text=Undo moved tokens")
    tab.wait(f"{DONE} && {LINES}[0] === {json.dumps(before[0])}")
    assert tab.errors == []


def test_a_token_is_dragged_with_the_mouse(tab: Tab, address: str) -> None:
    visit(tab, address, "schemes=post&tokens=4&time=2&shells=none&moved=0:0.5,-0.8,0.3")
    box = tab.page.locator(".lab-sphere").first.bounding_box()
    assert box is not None
    # Token 0 is on the front; where it is drawn is looked for with the pointer.
    side = min(box["width"], box["height"])
    spots = [(x, y) for y in range(2, 19) for x in range(2, 19)]
    for x, y in spots:
        spot = (
            box["x"] + box["width"] / 2 + (x / 10 - 1) * side * 0.46,
            box["y"] + box["height"] / 2 + (y / 10 - 1) * side * 0.46,
        )
        tab.page.mouse.move(*spot)
        if tab.run("!document.getElementById('tip').hidden && document.getElementById('tip').textContent.startsWith('token0')"):
            break
    else:
        pytest.fail("token 0 has no tip")
    tab.page.mouse.down()
    tab.page.mouse.move(spot[0] + 12, spot[1] + 8, steps=2)
    tab.page.mouse.up()
    tab.wait(DONE)
    moved = dict(part.split(":") for part in state_of(tab)["moved"].split(";"))
    assert moved.keys() == {"0"}
    assert moved["0"] != "0.5,-0.8,0.3"
    assert tab.errors == []


def measured(tab: Tab) -> dict[str, Any]:
    tab.wait("document.querySelector('.lab-tour').dataset.measured")
    return json.loads(tab.page.get_attribute(".lab-tour", "data-measured") or "")  # type: ignore[no-any-return]


def test_the_tour(tab: Tab, address: str) -> None:
    visit(tab, address)
    tab.page.click("text=Guided tour")
    tab.wait(f"{TIME} > 0")  # a stop plays
    tab.page.emulate_media(reduced_motion="reduce")
    first = measured(tab)
    assert first["measured"] == pytest.approx(first["formula"], rel=1e-9)
    assert first["measured"] > 5
    tab.wait("document.querySelector('.strips-theory').textContent.startsWith('Dotted: theory')")
    tab.page.keyboard.press("n")
    tab.wait("document.querySelector('.lab-tour h2').textContent.startsWith('2 of 6')")
    late = measured(tab)
    assert late["exponential"] == pytest.approx(-1, abs=0.01)
    assert late["power"] == pytest.approx(-2, abs=0.05)
    assert late["speeds"][0] < late["speeds"][2] < late["speeds"][1]
    tab.page.keyboard.press("n")
    tab.wait("document.querySelector('.lab-tour h2').textContent.startsWith('3 of 6')")
    collapse = measured(tab)
    assert collapse["times"][0] * 2 < collapse["times"][1]
    assert collapse["clusters"][0] == 1 < collapse["clusters"][1]
    tab.page.click("text=Next →")
    tab.wait("document.querySelector('.lab-tour h2').textContent.startsWith('4 of 6')")
    brake = measured(tab)
    assert brake["ratio"] == pytest.approx(brake["radius"], rel=1e-3)
    assert brake["still"] == pytest.approx(1, abs=1e-9)
    assert brake["growth"] == pytest.approx(1, abs=0.03)
    tab.page.keyboard.press("n")
    tab.wait("document.querySelector('.lab-tour h2').textContent.startsWith('5 of 6')")
    assert measured(tab)["worst"] < 1e-3
    state = state_of(tab)
    assert state["tour"] == "5"
    assert len(json.loads(state["schemes"])) == 3
    tab.page.keyboard.press("p")
    tab.wait("document.querySelector('.lab-tour h2').textContent.startsWith('4 of 6')")
    tab.page.go_back()
    tab.wait("document.querySelector('.lab-tour h2').textContent.startsWith('5 of 6')")
    tab.page.click("text=End the tour")
    assert tab.page.is_hidden(".lab-tour")
    assert "tour" not in state_of(tab)
    assert tab.run(TIME) == 0  # with reduced motion nothing plays by itself
    tab.page.emulate_media(reduced_motion="no-preference")
    assert tab.errors == []


def test_nothing_is_claimed_of_other_schemes(tab: Tab, address: str) -> None:
    visit(tab, address, "tour=3")
    measured(tab)
    tab.page.select_option("[aria-label='Scheme B']", "peri")
    tab.wait(f"{DONE} && !document.querySelector('.lab-tour').dataset.measured")
    assert tab.page.text_content(".tour-measured") == ""
    assert tab.errors == []


def test_circuits_that_break(tab: Tab, address: str) -> None:
    ready = "document.querySelector('.lab-circuit').dataset.probability"
    visit(tab, address, "tour=6", ready=ready)
    tops = "[...document.querySelectorAll('.circuit [data-top]')].map(node => node.dataset.top)"
    assert tab.run(tops) == ["0", "0"]
    logits = 16 * torch.cos(torch.deg2rad(torch.tensor([[0.0, 40, -55, 80, 125]], dtype=torch.float64)))
    for level in (0.05, 0.1, 0.2, 0.35):
        tab.page.locator(".lab-circuit input").fill(str(100 * level))
        wanted = float(collapse_probability(logits, [level])[0, 0])
        assert float(tab.run(ready)) == pytest.approx(wanted, abs=1e-4)
    broken = 0
    for _ in range(12):
        tab.page.click("text=Draw new noise")
        left, right = tab.run(tops)
        broken += left != "0"
        assert right == "0"  # norms after the projections remove the noise
    assert 1 <= broken < 12
    table = list(csv.DictReader(io.StringIO(saved(tab, "Attention weights").decode())))
    np.testing.assert_allclose([float(row["weight"]) for row in table[:5]], logits.softmax(1)[0])
    assert len(ElementTree.fromstring(saved(tab, "SVG")).findall("{*}svg")) == 3
    values, state = tab.run("document.querySelector('.circuit').textContent"), state_of(tab)
    visit(tab, address, "&".join(f"{name}={value}" for name, value in state.items()), ready=ready)
    assert tab.run("document.querySelector('.circuit').textContent") == values
    assert_readable(tab)
    tab.page.get_by_role("button", name="Finish").click()  # the last stop leads to the lab
    tab.wait(f"{DONE} && document.querySelector('.lab-tour').hidden")
    assert "Wire sphere: r = 1; " in tab.run("document.querySelector('.lab-scale').textContent")
    assert tab.errors == []


def test_pictures_and_video(tab: Tab, address: str) -> None:
    visit(tab, address, "tokens=8&time=8&speed=8&t=8&beta=1&shells=none", width=600)
    post, pre = points_of(saved(tab, "SVG"))
    assert len(post) == len(pre) == 8
    assert np.linalg.norm([*post, *pre], axis=1).max() < 1.01  # inside the rim of the sphere
    assert np.ptp(post, axis=0).max() < 0.05 < 0.2 < np.ptp(pre, axis=0).max()  # collapsed, and not
    with Image.open(io.BytesIO(saved(tab, "PNG"))) as picture:
        assert picture.width > 600
        assert len(picture.getcolors(1 << 24) or []) > 50
    assert saved(tab, "WebM").startswith(b"\x1a\x45\xdf\xa3")
    assert tab.errors == []


def test_a_narrow_screen(tab: Tab, address: str) -> None:
    visit(tab, address, "tokens=16&time=4", width=375)
    for state in ("", "tour=1", "tour=6"):
        if state:
            visit(tab, address, state, width=375, ready=DONE if state == "tour=1" else "true")
        assert tab.run("document.documentElement.scrollWidth") <= 375
    visit(tab, address, "tokens=16&time=4", width=375)
    tab.page.click(".lab-controls summary")
    tab.page.fill("#lab-tokens", "12")
    tab.wait(f"{DONE} && location.hash.includes('tokens=12')")
    assert tab.run("document.documentElement.scrollWidth") <= 375
    assert tab.errors == []


def test_the_numbers_are_a_table(tab: Tab, address: str) -> None:
    visit(tab, address, "tokens=8&dim=8&start=orthogonal&time=4")
    tab.page.click("text=Numbers as a table")
    table = "document.querySelector('.strips ~ details')"  # three measures have theory, clusters do not
    tab.wait(f"{table}.querySelectorAll('th[scope=col]').length === 9 && !{table}.textContent.includes('not measured')")
    cells = tab.run(
        "[...document.querySelectorAll('.strips ~ details tr')].map(row => [...row.children].map(cell => cell.textContent))"
    )
    cosine, theory = cells[0].index("Mean cosine of pairs, γ"), cells[0].index("Mean cosine of pairs, γ, theory")
    assert len(cells) == 23
    assert all(row[cosine] == row[theory] for row in cells[1:])
    for state, words in {
        "causal=true": "causal mask",
        "norm=layer": "needs RMSNorm",
        "moved=0:0,0,1": "tokens were moved by hand",
    }.items():
        visit(tab, address, f"tokens=8&dim=8&start=orthogonal&time=4&{state}")
        tab.wait(f"document.querySelector('.strips-theory').textContent.includes('{words}')")
        assert tab.run("document.querySelectorAll('.strip .lines-path').length") == 8  # two schemes in four strips, no theory
    assert tab.errors == []
