"""The explorer's page: modules in one script, views in tabs with their state in the address, and a policy that holds."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from helpers.browser import Tab, assert_readable, open_tab
from normscope.explorer.page import FOLDERS, explorer_data, render_explorer
from normscope.report.bundle import BundleError, bundle

VIEWS = ("lab", "atlas", "training", "ledger")
READY = "document.documentElement.dataset.ready === 'true'"
SHOWN = "document.querySelector('[role=tabpanel]:not([hidden])').id"

# Controls that can be seen and have no name for a screen reader.
NAMELESS = """[...document.querySelectorAll("button, input, select, textarea, summary, [role=application], [role=slider]")]
  .filter(node => node.checkVisibility() && ![node.ariaLabel, node.textContent, node.title, node.labels?.[0]?.textContent,
    document.getElementById(node.getAttribute("aria-labelledby"))?.textContent].some(text => text?.trim()))
  .map(node => node.outerHTML.slice(0, 120))"""


def folder_of(tmp_path: Path, **modules: str) -> list[Path]:
    for name, text in modules.items():
        (tmp_path / f"{name}.js").write_text(text, encoding="utf-8")
    return [tmp_path]


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with open_tab() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "tour.html"
    path.write_text(render_explorer(explorer_data()), encoding="utf-8")
    return path


def test_modules_have_scopes_of_their_own(tmp_path: Path, tab: Tab) -> None:
    folders = folder_of(
        tmp_path,
        low="const hidden = 2;\nexport const two = hidden;\nexport class Two { get value() { return two; } }\n",
        middle='import { two } from "./low.js";\n\nconst hidden = 3;\nexport async function six() { return two * hidden; }\n',
        top='import { six as product } from "./middle.js";\nimport { Two, two } from "./low.js";\n'
        "export const answer = async () => [await product(), new Two().value, two, typeof hidden];\n",
    )
    assert tab.run(bundle("top.js", folders, "answers") + "answers.answer()") == [6, 2, 2, "undefined"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('import { three } from "./low.js";\n', "low.js does not export 'three'"),
        ('import low from "./low.js";\n', "is no import or export that is bundled"),
        ("export default 3;\n", "is no import or export that is bundled"),
        ('import { top } from "./top.js";\nexport const top = 1;\n', "import each other: top.js → top.js"),
        ('import { one } from "./absent.js";\n', "no file absent.js"),
        ('const end = "</script>";\n', "the end of a script element"),
    ],
)
def test_what_cannot_be_bundled_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        bundle("top.js", folder_of(tmp_path, low="export const two = 2;\n", top=text))


def modules(tab: Tab, name: str) -> None:
    """Have the exports of a module of the page as a global variable of that name."""
    tab.page.goto("about:blank")
    tab.run(bundle(f"{name}.js", FOLDERS, name))


def test_a_state_survives_the_address(tab: Tab) -> None:
    modules(tab, "state")
    values = {"tokens": 64, "beta": 0.5, "causal": True, "note": "a&b = ü?#", "schemes": ["pre", {"name": "mine"}]}
    defaults = {"tokens": 32, "beta": 1, "causal": False, "note": "", "schemes": [], "seed": 0}
    for name, value in {"values": values, "defaults": defaults}.items():
        tab.page.evaluate(f"value => {{ globalThis.{name} = value; }}", value)
    hash_text = tab.run("state.formatHash('lab', state.stateChanges({...values, seed: 0}, defaults))")
    assert hash_text.startswith("#lab?")
    assert "seed" not in hash_text
    read = f"state.readState(state.parseHash({hash_text!r}).values, defaults)"
    assert tab.run(read) == {**values, "seed": 0}
    damaged = "#lab?tokens=many&causal=perhaps&schemes=%5B1&beta="
    assert tab.run(f"state.readState(state.parseHash({damaged!r}).values, defaults)") == defaults
    assert tab.run("state.parseHash('#%E0%A4%A')") == {"view": "%E0%A4%A", "values": {}}


def test_a_saved_table_reads_back_whole(tab: Tab) -> None:
    modules(tab, "save")
    table = [['a "quoted", text', 0.1 + 0.2, None], ["two\nlines", -1e-300, "=1+1"]]
    text = tab.page.evaluate("rows => save.csvBlob(['text', 'number', 'x,y'], rows).text()", table)
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows == [["text", "number", "x,y"], [table[0][0], repr(0.1 + 0.2), ""], [table[1][0], "-1e-300", "'=1+1"]]


def test_a_saved_picture_needs_no_style_sheet(tab: Tab) -> None:
    modules(tab, "save")
    tab.page.set_content(
        "<style>:root { --ink: rgb(1, 2, 3) } circle { fill: var(--ink) }</style>"
        '<svg width="40" height="20" viewBox="0 0 40 20"><circle class="dot" cx="20" cy="10" r="8"/></svg>'
    )
    text = tab.run("save.svgText(document.querySelector('svg'), '#ffffff')")
    svg = ElementTree.fromstring(text)
    names = "{http://www.w3.org/2000/svg}"
    circle, sheet = svg.find(f"{names}circle"), svg.find(f"{names}rect")
    assert circle is not None
    assert circle.get("fill") == "rgb(1, 2, 3)"
    assert "class" not in circle.attrib
    assert sheet is not None
    assert (sheet.get("fill"), sheet.get("width")) == ("#ffffff", "40")
    tab.page.evaluate("text => { globalThis.text = text; }", text)
    encoded = tab.run("save.pngOfSvg(text, 2).then(blob => blob.arrayBuffer()).then(b => Array.from(new Uint8Array(b)))")
    with Image.open(io.BytesIO(bytes(encoded))) as picture:
        assert picture.size == (80, 40)
        assert picture.convert("RGB").getpixel((40, 20)) == (1, 2, 3)
        assert picture.convert("RGB").getpixel((1, 1)) == (255, 255, 255)


def test_tabs_keys_and_the_back_button_choose_the_view(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert tab.run(SHOWN) == "view-lab"
    tab.page.get_by_role("tab", name="Ledger").click()
    tab.page.wait_for_function(f"{SHOWN} === 'view-ledger' && location.hash.startsWith('#ledger')")
    tab.page.keyboard.press("ArrowLeft")
    tab.page.wait_for_function(f"{SHOWN} === 'view-training'")
    tab.page.go_back()
    tab.page.wait_for_function(f"{SHOWN} === 'view-ledger'")
    tab.page.keyboard.press("2")
    tab.page.wait_for_function(f"{SHOWN} === 'view-atlas' && document.title.startsWith('Model atlas')")
    assert tab.errors == []


def test_dialogs_open_by_key_and_close_by_key_and_say_what_they_are(tab: Tab, page: Path) -> None:
    tab.open(page)
    for key, title in (("?", "Keys"), ("s", "Save")):
        tab.page.keyboard.press(key)
        tab.page.get_by_role("dialog", name=title).wait_for()
        assert_readable(tab)
        tab.page.keyboard.press("2")  # belongs to the dialog now
        assert tab.run(SHOWN) == "view-lab"
        tab.page.keyboard.press("Escape")
        tab.page.wait_for_function("!document.getElementById('dialog').open")
    assert tab.errors == []


def test_the_first_tab_stop_skips_to_the_view(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.page.keyboard.press("Tab")
    assert tab.run("document.activeElement.id") == "skip"
    assert tab.run("document.activeElement.getBoundingClientRect().left") >= 0
    tab.page.keyboard.press("Enter")
    assert tab.run("document.activeElement.id") == "view-lab"


def test_colours_can_be_chosen_and_are_remembered(tab: Tab, page: Path) -> None:
    tab.open(page, "light")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = tab.run(ground)
    tab.page.get_by_role("button", name="Change to dark colours").click()
    dark = tab.run(ground)
    assert dark != light
    tab.open(page, "light")
    assert tab.run(ground) == dark
    tab.page.keyboard.press("d")
    assert tab.run(ground) == light
    tab.run("localStorage.clear()")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 375)])
def test_every_view_can_be_read_and_fits(tab: Tab, page: Path, scheme: str, width: int) -> None:
    tab.open(page, scheme, width)
    for view in VIEWS:
        tab.page.goto(f"{page.as_uri()}#{view}")
        tab.page.wait_for_function(f"{READY} && {SHOWN} === 'view-{view}'")
        tab.settle()
        assert tab.run(f"document.querySelectorAll('#view-{view} > *').length") > 0
        assert tab.run("document.querySelectorAll('.failure').length") == 0
        assert tab.run("document.documentElement.scrollWidth") <= width, view
        assert tab.run(NAMELESS) == []
        assert_readable(tab)
    assert tab.errors == []


def test_the_policy_of_a_page_runs_its_script_and_nothing_else(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert tab.run(READY)
    assert [address for address in tab.loaded if not address.startswith(("data:", "blob:"))] == [page.as_uri()]
    tab.run("""(() => {
      const script = document.createElement("script");
      script.textContent = "globalThis.injected = true;";
      document.body.append(script);
      document.body.insertAdjacentHTML("beforeend", "<img src='https://example.org/a.png' onerror='injected = 1'>");
    })()""")
    assert tab.run("fetch('https://example.org/').catch(() => 'refused')") == "refused"
    assert tab.run("typeof injected") == "undefined"
    assert all("Content Security Policy" in error or "example.org" in error for error in tab.errors)
    assert tab.errors


def test_damaged_links_open_the_first_view(tab: Tab, page: Path) -> None:
    for link in ("#nothing", "#%E0%A4%A", "#lab?tokens=%E0%A4%A&beta=1e999", "#lab?" + "x" * 5000):
        tab.page.goto("about:blank")
        tab.errors.clear()
        tab.page.goto(page.as_uri() + link)
        tab.page.wait_for_function(f"{READY} && {SHOWN} === 'view-lab'")
        assert tab.run("document.querySelectorAll('.failure').length") == 0
        assert tab.errors == []
