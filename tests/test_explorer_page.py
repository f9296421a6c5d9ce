"""The explorer's page: modules in one script, views in tabs with their state in the address, and a policy that holds."""

import csv
import io
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from helpers.browser import Tab, assert_readable
from helpers.cli import run
from normscope.explorer.export import export_explorer
from normscope.explorer.page import FOLDERS
from normscope.report.bundle import BundleError, bundle, source
from normscope.report.theme import DARK, LIGHT

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
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_explorer(tmp_path_factory.mktemp("explorer") / "tour.html")


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


IMPORT = re.compile(r'^import \{([^}]+)\} from "\./([\w.]+)";$', re.MULTILINE)


def test_modules_import_what_they_use_and_none_is_left_over() -> None:
    reached, wanted = set[str](), ["app.js", "worker.js"]
    while wanted:
        text = source(file := wanted.pop(), FOLDERS)
        reached.add(file)
        wanted += [imported for _, imported in IMPORT.findall(text) if imported not in reached]
        body = IMPORT.sub("", text).replace("...", " ")
        names = [name.split(" as ")[-1].strip() for names, _ in IMPORT.findall(text) for name in names.split(",")]
        assert [name for name in names if not re.search(rf"(?<![\w$.]){re.escape(name)}(?![\w$])", body)] == [], file
    assert {file.name for file in FOLDERS[0].iterdir() if file.name.endswith(".js")} <= reached


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
    tab.wait(f"{SHOWN} === 'view-ledger' && location.hash.startsWith('#ledger')")
    tab.page.keyboard.press("ArrowLeft")
    tab.wait(f"{SHOWN} === 'view-training'")
    tab.page.go_back()
    tab.wait(f"{SHOWN} === 'view-ledger'")
    tab.page.keyboard.press("2")
    tab.wait(f"{SHOWN} === 'view-atlas' && document.title.startsWith('Model atlas')")
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
        tab.wait("!document.getElementById('dialog').open")
    assert tab.errors == []


def test_a_change_of_the_view_is_announced(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.page.keyboard.press("4")
    tab.wait("document.getElementById('announcement').textContent === 'Ledger'")
    assert tab.run("document.getElementById('announcement').ariaLive") == "polite"


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
        tab.wait(f"{READY} && {SHOWN} === 'view-{view}'")
        tab.settle()
        assert tab.run(f"document.querySelectorAll('#view-{view} > *').length") > 0
        assert tab.run("document.querySelectorAll('.failure').length") == 0
        assert tab.run("document.documentElement.scrollWidth") <= width, view
        assert tab.run(NAMELESS) == []
        assert_readable(tab)
        for other in (700, width):  # a window that is made narrower or wider
            tab.page.set_viewport_size({"width": other, "height": 800})
            tab.settle()
            assert tab.run("document.documentElement.scrollWidth") <= other, (view, other)
    assert tab.errors == []


def test_a_page_from_disk_needs_no_network_and_runs_its_own_script_alone(tab: Tab, page: Path) -> None:
    tab.page.context.set_offline(True)
    tab.open(page)
    assert tab.run(READY)
    assert tab.errors == []
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
    tab.page.context.set_offline(False)


def test_damaged_links_open_the_first_view(tab: Tab, page: Path) -> None:
    for link in ("#nothing", "#%E0%A4%A", "#lab?tokens=%E0%A4%A&beta=1e999", "#lab?" + "x" * 5000):
        tab.page.goto("about:blank")
        tab.errors.clear()
        tab.page.goto(page.as_uri() + link)
        tab.wait(f"{READY} && {SHOWN} === 'view-lab'")
        assert tab.run("document.querySelectorAll('.failure').length") == 0
        assert tab.errors == []


# What the frame does for a view


VIEW = """
import { csvBlob } from "./save.js";
export function createLab(host, app) {
  globalThis.app = app;
  globalThis.shown = [];
  globalThis.pressed = 0;
  host.append(document.createElement("textarea"));
  return {
    show(state) { shown.push(state); if (state.wrong) throw new Error("a number is missing"); },
    hide() { shown.push("hidden"); },
    keys: { x: ["count", () => { pressed += 1; }], y: ["fail", async () => { throw new Error("no answer"); }] },
    saves: [
      { label: "Numbers", make: async () => ({ name: "numbers.csv", blob: csvBlob(["a"], [[1]]) }) },
      { label: "Video", make: async () => { throw new Error("this browser records none"); } },
      { label: "Film", make: ({ signal, onProgress }) => new Promise((done, fail) => {
        onProgress(0.25);
        signal.onabort = () => { shown.push("stopped"); fail(signal.reason); };
      }) },
    ],
  };
}
"""


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page whose first view is the one above."""
    folder = tmp_path_factory.mktemp("view")
    (folder / "lab.js").write_text(VIEW, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normscope.explorer.page.FOLDERS", (folder, *FOLDERS))
        return export_explorer(folder / "page.html")


def test_a_views_state_is_in_the_address_and_back_leads_to_the_one_before(tab: Tab, view: Path) -> None:
    tab.open(view)
    tab.run("app.setState('lab', {tokens: 64, note: 'a b'}, {push: true})")
    assert tab.run("location.hash") == "#lab?tokens=64&note=a+b"
    for tokens in range(65, 200):  # a dragged slider
        tab.run(f"app.setState('lab', {{tokens: {tokens}, note: null}})")
    tab.wait("location.hash === '#lab?tokens=199'")
    assert tab.run("shown") == [{}]  # a view is not told what it said itself
    tab.run("app.setState('lab', {tokens: 7}, {push: true})")
    tab.page.go_back()
    tab.wait("shown.at(-1).tokens === '199'")
    assert tab.run("app.state('lab')") == {"tokens": "199"}
    tab.run("app.go('ledger', {claim: '1:3.1'})")
    assert tab.run("[location.hash, shown.at(-1)]") == ["#ledger?claim=1%3A3.1", "hidden"]
    tab.page.keyboard.press("1")
    assert tab.run("[location.hash, shown.at(-1)]") == ["#lab?tokens=199", {"tokens": "199"}]
    tab.page.goto(view.as_uri() + "#lab?tokens=3")
    tab.wait("shown.at(-1).tokens === '3'")
    assert tab.errors == []


def test_keys_reach_the_view_unless_a_text_takes_them(tab: Tab, view: Path) -> None:
    tab.open(view)
    tab.page.keyboard.press("x")
    assert tab.run("pressed") == 1
    tab.page.locator("textarea").press_sequentially("x1?")
    assert tab.run("[pressed, document.querySelector('textarea').value]") == [1, "x1?"]
    tab.page.locator("textarea").evaluate("node => node.blur()")
    tab.page.keyboard.press("?")
    assert "count" in tab.page.get_by_role("dialog", name="Keys").inner_text()
    assert tab.errors == []


def test_files_are_saved_from_the_dialog_and_a_failure_is_told_there(tab: Tab, view: Path) -> None:
    tab.open(view)
    tab.page.get_by_role("button", name="Save").click()
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Numbers").click()
    assert download.value.suggested_filename == "numbers.csv"
    assert Path(download.value.path()).read_bytes() == b"a\r\n1\r\n"
    tab.page.get_by_role("button", name="Video").click()
    tab.page.get_by_text("Video cannot be saved: this browser records none").wait_for()
    assert tab.errors == []


def test_a_long_save_shows_how_far_it_is_and_can_be_stopped(tab: Tab, view: Path) -> None:
    tab.open(view)
    tab.run("app.setState('lab', {tokens: 9}, {push: true})")
    stops = {
        "the button": lambda: tab.page.get_by_role("button", name="Cancel").click(),
        "another file": lambda: tab.page.get_by_role("button", name="Video").click(),
        "the key": lambda: tab.page.keyboard.press("Escape"),
        "another state": lambda: tab.page.go_back(),
    }
    for count, stop in enumerate(stops.values(), 1):
        if not tab.run("document.getElementById('dialog').open"):
            tab.page.get_by_role("button", name="Save").click()
        tab.page.get_by_role("button", name="Film").click()
        assert tab.run("document.querySelector('#dialog progress').value") == 0.25
        stop()
        tab.wait(f"shown.filter(each => each === 'stopped').length === {count}")
        if count == 1:
            tab.page.get_by_text("Film: cancelled.").wait_for()
            assert tab.run("document.activeElement.textContent") == "Film"
    assert tab.page.get_by_role("dialog").count() == 0
    assert tab.errors == []


def test_what_goes_wrong_in_a_view_is_told_in_it(tab: Tab, view: Path) -> None:
    failure = "document.querySelector('#view-lab > .failure')?.textContent"
    tab.page.goto("about:blank")
    tab.open(view)
    tab.page.keyboard.press("y")
    tab.wait(f"{failure}?.includes('no answer')")
    tab.run("app.go('lab', {wrong: 1})")
    assert "a number is missing" in tab.run(failure)
    assert_readable(tab)
    tab.run("app.go('lab', {wrong: null})")
    assert tab.run(failure) is None
    assert tab.errors == []


def test_a_view_follows_the_colours(tab: Tab, view: Path) -> None:
    tab.open(view, "dark")
    tab.run("globalThis.themes = []; globalThis.stop = app.onTheme(theme => themes.push(theme.dark)); null")
    assert tab.run("[app.theme.dark, app.theme.colours.paper]") == [True, DARK["paper"]]
    tab.page.keyboard.press("d")
    assert tab.run("[themes, app.theme.colours.paper, app.theme.colours.series.length]") == [[False], LIGHT["paper"], 7]
    tab.run("stop()")
    tab.page.keyboard.press("d")
    assert tab.run("themes") == [False]
    tab.run("localStorage.clear()")


# The command


def test_an_exported_page_is_small_and_replaced_only_on_request(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "explore", "--export", "tour.html") == (0, "tour.html\n", "")
    first = (here / "tour.html").read_bytes()
    assert len(first) <= 5_000_000
    status, out, err = run(capsys, "explore", "--export", "tour.html")
    assert (status, out) == (2, "")
    assert "'tour.html' exists already" in err
    assert "--overwrite" in err
    assert run(capsys, "explore", "--export", "tour.html", "--overwrite")[0] == 0
    assert (here / "tour.html").read_bytes() == first  # the same page every time
    assert [path.name for path in here.iterdir()] == ["tour.html"]


def test_an_exported_page_holds_the_runs_that_are_given(here: Path, capsys: pytest.CaptureFixture[str], tab: Tab) -> None:
    shape = ("--scheme", "pre", "--tokens", "3", "--dim", "3", "--time", "0.5", "--samples", "3", "--json")
    assert run(capsys, "simulate", *shape, "--out", "mine")[0] == 0
    for name in ("config.json", "model.safetensors"):
        (here / "mine" / name).touch()  # as in the folder of a training, which is a model too
    assert run(capsys, "explore", "mine", "--export", "mine.html")[:2] == (0, "mine.html\n")
    tab.open(here / "mine.html")
    data = "JSON.parse(document.getElementById('explorer-data').textContent)"
    assert tab.run(f"{data}.runs.map(run => [run.name, run.kind])") == [["mine", "simulate"]]
    assert tab.errors == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--export", "tour.pdf"), "--export tour.pdf: the page's name has to end in .html"),
        (("--export", "absent/tour.html"), "there is no folder 'absent'"),
        (("--export", "mine.html", "--overwrite"), "'mine.html' exists and is no page of the explorer"),
        (("--export", "folder.html", "--overwrite"), "'folder.html' exists and is no page of the explorer"),
        (("package:smollm2", "--export", "tour.html"), "'package:smollm2' has no audit, and --export takes run folders alone"),
        (("--export", "tour.html", "--open"), "--export writes a file and opens nothing"),
        (("damaged", "--export", "tour.html"), "damaged"),
        (("--port", "70000"), "--port"),
        (("./absent", "--port", "0"), "'./absent' does not exist"),
        (("absent", "--port", "0"), "'absent'"),
        (("--token", "short"), "--token: should have 16 or more"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    (here / "mine.html").write_text("<p>mine</p>")
    for folder in ("folder.html", "damaged"):
        (here / folder).mkdir()
    (here / "damaged" / "run.json").write_text("{")
    status, out, err = run(capsys, "explore", *arguments)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert (here / "mine.html").read_text() == "<p>mine</p>"
    assert not (here / "tour.html").exists()


def test_only_the_server_needs_the_extra(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fastapi", "starlette", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    status, out, err = run(capsys, "explore", "--no-open")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "pip install 'normscope[explorer]'" in err
    assert "--export" in err
    assert run(capsys, "explore", "--export", "tour.html") == (0, "tour.html\n", "")


def test_a_served_page_opens_and_says_when_its_server_is_gone(tab: Tab, here: Path) -> None:
    command = [sys.executable, "-c", "from normscope.cli import main; main()", "explore", "--port", "0", "--no-open"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]+", line)
        assert address is not None, line
        tab.page.goto(address.group())
        tab.errors.clear()
        tab.wait(READY)
        assert tab.run(SHOWN) == "view-lab"
        assert tab.errors == []
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130
        tab.wait("document.getElementById('connection').textContent.includes('does not answer')")
        assert tab.run(SHOWN) == "view-lab"
    finally:
        server.kill()
        server.communicate()
        tab.page.goto("about:blank")
