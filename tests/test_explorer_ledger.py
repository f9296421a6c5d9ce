"""The ledger in the explorer: dials that go from holding to failing, the packaged run, and the view in a browser."""

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import normscope as ns
from helpers.browser import Tab, assert_readable
from normscope.errors import InputError
from normscope.explorer.export import export_explorer
from normscope.explorer.folders import Folders
from normscope.explorer.ledger import ledger_data
from normscope.explorer.page import FOLDERS, explorer_data, render_explorer
from normscope.report.bundle import bundle
from normscope.results.conventions import FAILS
from normscope.runs import new_run
from normscope.schemes import NAMED, scheme_from, scheme_values
from normscope.theorems import LEDGER
from normscope.theorems.cases import Range
from normscope.theorems.dials import dial_tables
from normscope.theorems.statement import Dial, Statement

PACKAGED = {statement["id"]: statement for statement in ledger_data()["statements"]}
REFUTED = [id for id, statement in PACKAGED.items() if statement["verdict"] == FAILS]
NUMBERS = ("value", "measured", "claimed", "margin", "corrected_measured", "corrected", "corrected_margin")


def dial_of(statement: Statement) -> Dial:
    assert statement.dial is not None
    return statement.dial


def test_every_refuted_statement_has_a_dial_and_no_other_has() -> None:
    assert len(REFUTED) == 8
    assert [id for id, statement in LEDGER.items() if statement.dial] == REFUTED


@pytest.mark.parametrize("id", REFUTED)
def test_a_dial_goes_from_where_a_claim_holds_to_where_it_fails(id: str) -> None:
    statement, dial, packaged = LEDGER[id], dial_of(LEDGER[id]), PACKAGED[id]["dial"]["positions"]
    assert statement.correction is not None
    assert 30 <= dial.positions == len(packaged["value"]) <= 60
    failing = [margin < 0 for margin in packaged["margin"]]
    fails = failing.index(True)
    assert failing == [False] * fails + [True] * (dial.positions - fails), "it holds again after it failed"
    end = statement.conclusion(dial.case_at(dial.end))
    for position in {0, fails - 1, fails, dial.positions - 1}:
        case = dial.case_at(dial.at(position / (dial.positions - 1)))
        comparison, corrected = statement.conclusion(case), statement.correction.conclusion(case)
        assert (comparison.margin < 0) == (position >= fails)
        assert corrected.margin >= 0
        assert corrected.decides == (packaged["corrected"][position] is not None)
        # What is shown of the printed claim is what fails at the end.
        pair = packaged["measured"][position], packaged["claimed"][position]
        assert pair == pytest.approx(comparison.pair(int(end.margins.argmin())), rel=1e-4, abs=1e-12)
    assert any(number is not None for number in packaged["corrected"])


def test_a_boundary_lies_between_the_last_that_holds_and_the_first_that_fails() -> None:
    for id in ("1:7ii", "1:7iii", "3:sphere"):
        statement, dial = LEDGER[id], dial_of(LEDGER[id])
        tables = dial_tables([statement])
        (words,), rows = tables["dials"].to_dict("records"), tables["positions"]
        assert statement.conclusion(dial.case_at(words["holds_to"])).margin >= 0
        assert statement.conclusion(dial.case_at(words["fails_from"])).margin < 0
        between = sorted(
            rows["value"][rows["margin"] >= 0].tail(1).tolist() + rows["value"][rows["margin"] < 0].head(1).tolist()
        )
        assert between[0] <= words["holds_to"] <= between[1]
        assert abs(words["holds_to"] - words["fails_from"]) < 1e-9


@pytest.mark.parametrize("id", REFUTED)
def test_a_dial_stays_within_the_hypotheses(id: str) -> None:
    statement, dial = LEDGER[id], dial_of(LEDGER[id])
    values = {**dial.case.values, dial.name: dial.start}
    assert statement.space.keys() <= values.keys()
    for name, part in statement.space.items():
        for value in (dial.start, dial.end) if name == dial.name else (values[name],):
            assert part.low <= value <= part.high if isinstance(part, Range) else value in part.options, name


def test_the_boundaries_are_those_of_the_algebra() -> None:
    # 2α and 2/α differ by the factor 1.5 at α = √(2/3); λ = (1 + κ^q + 0.22)/(1 + κ^q) is w_{t*}/w_t = 1.2 at κ^q = 0.1; two
    # tokens with cosine c = tanh(t + artanh(1 − δ)) have the rate 1 + c, which is 2/1.5 at t = ½ where it is first compared.
    expected = {
        "2:4.3ii-ngpt": math.sqrt(2 / 3),
        "1:7ii": 0.1,
        "1:7iii": -1.0,
        "2:4.3ii-wide": 1 - math.tanh(math.atanh(1 / 3) - 0.5),
    }
    for id, boundary in expected.items():
        assert PACKAGED[id]["dial"]["holds_to"] == pytest.approx(boundary, rel=0.03), id


def test_simulations_are_of_schemes_that_exist() -> None:
    shown = [statement["simulation"] for statement in PACKAGED.values()]
    shown += [each for statement in PACKAGED.values() if statement["dial"] for each in statement["dial"]["simulations"] or ()]
    settings = [each for each in shown if each]
    assert len(settings) > 20
    for each in settings:
        for scheme in each["schemes"]:
            name, patch = scheme if isinstance(scheme, list) else (scheme, {})
            assert scheme_from(scheme_values(NAMED[name]) | patch).name == name


def close(found: Any, expected: Any, name: str = "") -> None:
    """Assert that nested values are the same, numbers up to rounding; margins of a search are only on the same side of 0."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            close(found[key], expected[key], key)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            close(a, b, name)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-8), name
    else:
        assert found == expected, name


def test_the_packaged_ledger_is_what_verify_gives(ledger_run: Path) -> None:
    fresh = ledger_data(ledger_run)
    assert fresh["source"]["summary"] == ledger_data()["source"]["summary"]
    assert [statement["id"] for statement in fresh["statements"]] == list(PACKAGED) == list(LEDGER)
    for statement in fresh["statements"]:
        packaged = PACKAGED[statement["id"]]
        texts = {"paper", "family", "title", "claim", "tested", "limit", "remark", "verdict", "corrected", "why", "simulation"}
        for name in texts:
            assert statement[name] == packaged[name], (statement["id"], name)
        # A search takes another way where a processor rounds differently; its verdict stays.
        assert (statement["margin"] < 0) == (packaged["margin"] < 0)
        assert statement["cases"] == pytest.approx(packaged["cases"], rel=0.1)
        close(statement["curves"], packaged["curves"])
        close(statement["dial"], packaged["dial"])


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with new_run(tmp_path / "other", "simulate", {}) as run:
        run.write_table("trajectories", pd.DataFrame({"t": [0.0]}))
    with pytest.raises(InputError, match="is a run of simulate; the ledger is a run of verify"):
        ledger_data(tmp_path / "other")
    with new_run(tmp_path / "old", "verify", {}) as run:
        run.write_table("ledger", pd.DataFrame({"id": ["1:1i"]}))
    with pytest.raises(InputError, match="earlier version of normscope; run verify again"):
        ledger_data(tmp_path / "old")


def test_a_run_of_verify_takes_the_place_of_the_packaged_ledger(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    ns.check("3:eq3", out=run, progress=False)
    assert [statement["id"] for statement in Folders([run]).ledger()["statements"]] == ["3:eq3"]
    page = export_explorer(tmp_path / "mine.html", [str(run)]).read_text(encoding="utf-8")
    data = json.loads(page.split('id="explorer-data">')[1].split("</script>")[0])
    assert [statement["id"] for statement in data["ledger"]["statements"]] == ["3:eq3"]
    assert data["view"] == "ledger"
    with new_run(tmp_path / "old", "verify", {}) as folder:
        folder.write_table("ledger", pd.DataFrame({"id": ["1:1i"]}))
    replaced = Folders([tmp_path / "old"]).ledger()
    assert "run verify again" in replaced["problem"]
    assert len(replaced["statements"]) == len(LEDGER)
    with pytest.raises(InputError, match="run verify again"):
        export_explorer(tmp_path / "old.html", [str(tmp_path / "old")])


# The view


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "ledger.html"
    path.write_text(render_explorer(explorer_data(view="ledger")), encoding="utf-8")
    return path


@pytest.fixture
def view(tab: Tab, page: Path) -> Iterator[Tab]:
    """The page with the ledger; at the end nothing has gone wrong and nothing was loaded but the page."""
    tab.page.goto("about:blank")
    tab.open(page)
    yield tab
    assert not tab.errors
    assert {url.split("#")[0] for url in tab.loaded if not url.startswith(("data:", "blob:"))} <= {page.as_uri(), "about:blank"}


def listed(tab: Tab) -> list[str]:
    found: list[str] = tab.run("[...document.querySelectorAll('.ledger-row')].map(row => row.dataset.statement)")
    return found


def choose(tab: Tab, id: str) -> None:
    tab.page.click(f".ledger-row[data-statement='{id}']")
    tab.wait(f"document.querySelector('.ledger-title h3')?.textContent.startsWith('{id} ')")


def text(tab: Tab, selector: str = ".ledger-detail") -> str:
    return tab.page.text_content(selector) or ""


def dial_verdict(tab: Tab) -> str:
    return str(tab.run("document.querySelector('.ledger-numbers [data-verdict]').dataset.verdict"))


def test_statements_are_filtered_by_paper_verdict_and_text(view: Tab) -> None:
    assert listed(view) == list(LEDGER)
    view.page.get_by_label("Verdict").select_option(FAILS)
    assert listed(view) == REFUTED
    view.page.get_by_label("Paper").select_option("2")
    assert listed(view) == [id for id in REFUTED if id.startswith("2:")]
    view.page.get_by_label("Text").fill("nGPT variance")
    assert listed(view) == ["2:4.3ii-ngpt"]
    view.page.get_by_label("Text").fill("no such words")
    assert listed(view) == []
    assert "No statement matches" in text(view, ".ledger [role=status]")


@pytest.mark.parametrize("id", ["1:7v", "2:4.3ii-ngpt", "3:sphere"])
def test_a_statement_has_its_claim_evidence_and_correction(view: Tab, id: str) -> None:
    choose(view, id)
    shown, words = PACKAGED[id], text(view)
    verdict = text(view, ".ledger-title .verdict")
    assert verdict.endswith(shown["verdict"])
    assert len(verdict) > len(shown["verdict"]) + 1, "no icon"
    assert f"{shown['cases']} cases" in words
    assert shown["deviation"] in words
    plain = {"claim": shown["claim"], "corrected": shown["corrected"], "why": shown["why"]}
    for name, expected in plain.items():
        if expected:
            assert expected.translate(str.maketrans("", "", "_^{}")) in words, name
    drawn = view.run("[...document.querySelectorAll('.ledger-detail .lines-picture')].map(each => each.ariaLabel)")
    assert len(drawn) == bool(shown["curves"]) + bool(shown["dial"])
    if shown["curves"]:
        label = drawn[-1]
        assert all(line["name"] in label for line in shown["curves"]["lines"])


@pytest.mark.parametrize("id", REFUTED)
def test_a_dial_is_moved_with_the_keyboard(view: Tab, id: str) -> None:
    choose(view, id)
    dial, slider = PACKAGED[id]["dial"], view.page.locator("#ledger-dial")
    positions = dial["positions"]
    assert dial_verdict(view) == "holds"
    slider.focus()
    view.page.keyboard.press("End")
    assert dial_verdict(view) == "fails"
    fails = next(i for i, margin in enumerate(positions["margin"]) if margin < 0)
    seen = []
    for _ in range(len(positions["value"]) - fails):
        view.page.keyboard.press("ArrowLeft")
        seen.append(dial_verdict(view))
    assert seen == ["fails"] * (len(positions["value"]) - fails - 1) + ["holds"]
    assert slider.get_attribute("aria-valuetext").endswith("holds")
    view.page.keyboard.press("Home")
    marker = "Number(document.querySelector('.lines-marker').getAttribute('x1'))"
    left = view.run(marker)
    view.page.keyboard.press("End")
    assert view.run(marker) > left, "the marker follows from left to right"


def test_numbers_at_a_position_are_the_statements(view: Tab) -> None:
    id = "2:gradient"
    choose(view, id)
    view.page.get_by_role("button", name="first that fails").click()
    rows = view.run(
        "[...document.querySelectorAll('.ledger-numbers tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    statement, dial = LEDGER[id], dial_of(LEDGER[id])
    comparison = statement.conclusion(dial.case_at(dial.at(1 / (dial.positions - 1))))
    end = statement.conclusion(dial.case_at(dial.end))
    measured, claimed = comparison.pair(int(end.margins.argmin()))
    assert [row[0] for row in rows] == ["measured", "printed claim", "corrected claim"]
    assert [float(row[1].replace("−", "-")) for row in rows] == pytest.approx([measured, claimed, measured], rel=1e-2)
    assert [row[2].strip() for row in rows] == ["", "✗ fails", "✓ holds"]


def test_a_link_shows_the_same_and_the_back_button_returns(view: Tab, page: Path) -> None:
    choose(view, "1:7ii")
    view.page.get_by_label("Verdict").select_option(FAILS)
    view.page.locator("#ledger-dial").focus()
    view.page.keyboard.press("End")
    view.wait("location.hash.includes('position=40')")
    shown, address = text(view), view.run("location.hash")
    choose(view, "3:sphere")
    view.page.go_back()
    view.wait("document.querySelector('.ledger-title h3').textContent.startsWith('1:7ii')")
    assert text(view) == shown
    view.page.goto("about:blank")
    view.page.goto(page.as_uri() + address)
    view.wait("document.querySelector('#ledger-dial')?.value === '40'")
    assert text(view) == shown
    assert listed(view) == REFUTED
    for damaged in (
        "#ledger?statement=9%3A9",
        "#ledger?statement=1%3A7ii&position=many",
        "#ledger?statement=1%3A7ii&position=-7.3",
    ):
        view.page.goto("about:blank")
        view.page.goto(page.as_uri() + damaged)
        view.wait("document.querySelector('.ledger-detail h3') !== null")
        assert "cannot be shown" not in text(view, "main")


def test_keys_step_through_the_list_and_turn_the_dial(view: Tab) -> None:
    view.page.get_by_label("Verdict").select_option(FAILS)
    view.page.locator(".ledger-list").focus()
    for id in REFUTED[:2]:
        view.page.keyboard.press("j")
        view.wait(f"document.querySelector('.ledger-title h3')?.textContent.startsWith('{id} ')")
    view.page.keyboard.press("ArrowRight")
    assert view.page.locator("#ledger-dial").input_value() == "1"
    view.page.keyboard.press("k")
    view.wait(f"document.querySelector('.ledger-title h3')?.textContent.startsWith('{REFUTED[0]} ')")
    view.page.keyboard.press("/")
    assert view.run("document.activeElement.type") == "search"


def test_the_chart_takes_the_dial_where_it_is_clicked(view: Tab) -> None:
    choose(view, "1:7iii")
    picture = view.page.locator(".ledger-dial .lines-picture")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    assert box is not None
    picture.click(position={"x": box["width"] - 20, "y": box["height"] / 2})
    assert dial_verdict(view) == "fails"
    assert view.page.locator("#tip").is_visible()


def saved(tab: Tab, label: str) -> bytes:
    """A file that the dialog of saves offers."""
    if not tab.page.locator("#dialog").is_visible():
        tab.page.keyboard.press("s")
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name=label, exact=True).click()
    return Path(download.value.path()).read_bytes()


def test_tables_and_pictures_are_saved(view: Tab) -> None:
    choose(view, "2:4.3ii-wide")
    rows = list(csv.DictReader(io.StringIO(saved(view, "Statements listed (CSV)").decode())))
    assert [row["id"] for row in rows] == list(LEDGER)
    assert {row["id"] for row in rows if row["verdict"] == FAILS} == set(REFUTED)
    dial = PACKAGED["2:4.3ii-wide"]["dial"]["positions"]
    rows = list(csv.DictReader(io.StringIO(saved(view, "Dial (CSV)").decode())))
    for name in NUMBERS:
        assert [float(row[name]) if row[name] else None for row in rows] == dial[name]
    assert saved(view, "Dial (PNG)").startswith(b"\x89PNG")
    svg = saved(view, "Dial (SVG)").decode()
    assert svg.startswith("<svg")
    assert "printed claim" in svg


@pytest.mark.parametrize(("id", "tokens"), [("2:4.3ii-ngpt", 4), ("2:4.3ii-wide", 2), ("2:4.1ii", 16)])
def test_a_statement_about_a_simulation_leads_into_the_lab(view: Tab, id: str, tokens: int) -> None:
    choose(view, id)
    if PACKAGED[id]["dial"]:
        view.page.get_by_role("button", name="where it fails").click()
    view.page.locator(".ledger-detail a", has_text="in the sphere lab").click()
    view.wait("!document.getElementById('view-lab').hidden && document.querySelector('#view-lab canvas')")
    assert view.page.get_by_label("Tokens n").input_value() == str(tokens)
    problems = "[...document.querySelectorAll('#view-lab .problem, #view-lab .failure, #view-lab [role=alert]')]"
    assert view.run(f"{problems}.map(each => each.textContent).filter(Boolean)") == []
    values = view.run("Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))")
    if id == "2:4.3ii-ngpt":
        assert json.loads(values["schemes"])[0] == ["ngpt", {"alpha": 0.1}]
    if id == "2:4.3ii-wide":  # nearly antipodal
        places = [[float(number) for number in place.split(":")[1].split(",")] for place in values["moved"].split(";")]
        assert sum(a * b for a, b in zip(*places, strict=True)) == pytest.approx(1 - 1.999, abs=1e-3)
    view.page.go_back()
    view.wait("!document.getElementById('view-ledger').hidden")


@pytest.mark.parametrize(("scheme", "id"), [("light", "1:2iii"), ("dark", "3:sphere")])
def test_the_ledger_fits_a_telephone_and_can_be_read(view: Tab, page: Path, scheme: str, id: str) -> None:
    view.open(page, scheme, width=375)
    choose(view, id)
    assert view.run("document.documentElement.scrollWidth") <= 375
    assert_readable(view)
    rows, reopen = view.page.locator(".ledger-list"), view.page.get_by_role("button", name="List of statements")
    assert (rows.is_visible(), reopen.get_attribute("aria-expanded")) == (False, "false")  # the statement has the screen
    reopen.click()
    assert (rows.is_visible(), reopen.get_attribute("aria-expanded")) == (True, "true")
    colour = "document.querySelector('.lines-picture text').getAttribute('fill')"
    before = view.run(colour)
    view.page.keyboard.press("d")
    assert view.run(colour) != before
    view.page.keyboard.press("d")


def test_a_page_without_a_ledger_has_words_for_it(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    path.write_text(render_explorer(explorer_data(view="ledger", ledger={"source": {}, "statements": []})), encoding="utf-8")
    tab.open(path)
    assert "made without a ledger" in text(tab, "#view-ledger")
    assert not tab.errors


# The line chart, which the lab and the training view use too


COLOURS = {"ink": "#000000", "soft": "#555555", "paper": "#ffffff", "line": "#dddddd", "series": ["#0072B2", "#D55E00"]}


@pytest.fixture
def chart(tab: Tab) -> Tab:
    """A page with the exports of lines.js and math_text.js, and a place for a chart."""
    tab.page.goto("about:blank")
    tab.page.set_content("<div id='host' style='width: 600px'></div>")
    for name in ("lines", "math_text"):
        tab.run(bundle(f"{name}.js", FOLDERS, name))
    tab.page.evaluate("colours => { globalThis.colours = colours; }", COLOURS)
    return tab


@pytest.mark.parametrize(
    ("low", "high", "count", "log", "ticks"),
    [
        (0, 1, 5, False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.3, 0.3, 3, False, [-0.2, 0, 0.2]),
        (1e-3, 2, 8, True, [0.001, 0.01, 0.1, 1]),
        (0.1, 1, 5, True, [0.1, 0.2, 0.5, 1]),
        (5, 5.0001, 4, False, [5, 5.00005, 5.0001]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(
    chart: Tab, low: float, high: float, count: int, log: bool, ticks: list[float]
) -> None:
    assert chart.run(f"lines.ticksOf({low}, {high}, {count}, {json.dumps(log)})") == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("y", "axis", "labels"),
    [
        ("[0, 4, 9.4]", "{}", ["0", "5", "9.4"]),
        ("[62, 10, 1]", "{log: true}", ["1", "10", "62"]),
        ("[-9.4, -4, 0]", "{}", ["−5", "0"]),
    ],
)
def test_an_axis_has_a_tick_at_its_upper_end(chart: Tab, y: str, axis: str, labels: list[str]) -> None:
    path(chart, f"{{series: [{{name: 'a', x: [0, 1, 2], y: {y}}}], y: {axis}, height: 200}}")
    ticks = "[...made.element.querySelectorAll('text[text-anchor=end]')].map(each => each.textContent)"
    assert chart.run(ticks) == labels


def path(tab: Tab, options: str) -> str:
    """The path of the first line of a chart in a new place."""
    tab.run(f"globalThis.made = lines.createLines(document.getElementById('host'), {{colours, ...{options}}}), null")
    return str(tab.run("made.element.querySelector('.lines-path').getAttribute('d')"))


def test_a_line_keeps_its_gaps_and_its_extremes(chart: Tab) -> None:
    gaps = path(chart, "{series: [{name: 'a', x: [0, 1, 2, 3, 4], y: [0, 1, NaN, 1, 0]}]}")
    assert gaps.count("M") == 2
    # A spike of one point among many is drawn, though there are fewer columns of pixels than points.
    many = "Float64Array.from({length: 20000}, (_, i) => i)"
    drawn = path(chart, f"{{series: [{{name: 'b', x: {many}, y: {many}.map(i => i === 7777 ? 1 : 0)}}]}}")
    heights = [float(point.split()[1]) for point in drawn[1:].split("L")]
    assert len(heights) < 5 * 600
    assert max(heights) - min(heights) > 100
    assert heights.count(min(heights)) <= 2


def test_an_axis_can_run_from_right_to_left_and_in_powers_of_ten(chart: Tab) -> None:
    line = "series: [{name: 'a', x: [1, 0.1, 0.01], y: [1, 2, 3]}]"
    places = path(chart, f"{{{line}, x: {{log: true, domain: [1, 0.01]}}}}")
    x = [float(point.split()[0]) for point in places[1:].split("L")]
    assert x == sorted(x)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    chart.run("made.mark(0.1)")
    assert float(chart.run("made.element.querySelector('.lines-marker').getAttribute('x1')")) == pytest.approx(x[1], abs=0.1)


def test_indices_and_exponents_are_set_and_names_of_code_are_not(chart: Tab) -> None:
    formula = "P_{θ_j} A_j + e^{−2t} θ_jᵀVθ_k, size_QK and x_1'·x_2; min_{t} w_{t*}"
    host = "document.getElementById('host')"
    chart.page.evaluate(f"text => {host}.replaceChildren(...math_text.formulaParts(text))", formula)
    marked = chart.run(f"[...{host}.querySelectorAll('sub, sup')].map(each => each.tagName + ' ' + each.textContent)")
    assert marked == ["SUB θj", "SUB j", "SUB j", "SUP −2t", "SUB j", "SUB k", "SUB 1", "SUB 2", "SUB t", "SUB t*"]
    assert "size_QK" in chart.run(f"{host}.textContent")
