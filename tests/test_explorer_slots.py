"""Slots in the browser beside the library: the same texts, numbers and refusals, and the editor that changes them."""

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Locator

from helpers.browser import CONTRASTS, Tab
from helpers.slot_cases import INNER, MEASURES, PLACES, formula_answer, formulas, scheme_answer, schemes
from normscope import InputError
from normscope.explorer.page import FOLDERS
from normscope.report.bundle import bundle, source
from normscope.report.theme import theme_css
from normscope.schemes import NAMED, Scheme, Slots, block_records, find_scheme, scheme_from, scheme_record, scheme_values

SEED = 21


SCHEMES = [scheme_values(scheme) for scheme in NAMED.values()]
DEPTH = 12


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("slots") / "page.html"
    style = theme_css() + "".join(source(name, FOLDERS) for name in ("app.css", "editor.css"))
    script = bundle("slot_answers.js", (*FOLDERS, Path(__file__).parent / "helpers"), name="answers")
    page.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>slots</title><style>{style}</style><main class="view" id="host"></main><script>{script}</script>',
        encoding="utf-8",
    )
    return page


@pytest.fixture(scope="module")
def tab(tab: Tab, page: Path) -> Tab:
    tab.open(page)
    return tab


class Editor:
    """The editor in the page, as a user has it."""

    def __init__(self, tab: Tab, name: str) -> None:
        self.tab = tab
        tab.page.evaluate("args => { window.seen = answers.openEditor(...args); }", [SCHEMES, name, DEPTH])

    def control(self, path: str) -> Locator:
        """A control of a slot by its path, such as then.attention.step."""
        return self.tab.page.locator(f"[data-path='{path}']")

    def problem(self, path: str) -> str:
        """The words beside a control."""
        frame = self.tab.page.locator(".editor-control").filter(has=self.control(path))
        return frame.locator(".problem").inner_text()

    def fact(self, name: str) -> str:
        """What stands in a row of the facts below the slots, with "_" before an index."""
        text = "node => [...node.childNodes].map(part => (part.tagName === 'SUB' ? '_' : '') + part.textContent).join('')"
        return str(self.tab.page.locator(f".editor-facts dt:text-is('{name}') + dd").evaluate(text))

    @property
    def changes(self) -> list[Any]:
        """The dictionaries and bases that the editor handed on."""
        return list(self.tab.run("seen.changes"))

    @property
    def scheme(self) -> Scheme:
        """The scheme that runs, as the library reads it."""
        return scheme_from(self.tab.run("seen.editor.scheme.values"))


def test_formulas_are_those_of_the_library(tab: Tab) -> None:
    given = formulas(SEED, 200)
    answers = ask(tab, "formulaAnswer", given, PLACES)
    for text, answer in zip(given, answers, strict=True):
        assert_same(answer, formula_answer(text), repr(text))
    assert 120 < sum("error" in answer for answer in answers) < len(given) - 120


def test_schemes_are_those_of_the_library(tab: Tab) -> None:
    given = schemes(SEED, 150)
    answers = ask(tab, "schemeAnswer", given, PLACES, MEASURES, INNER)
    for scheme, answer in zip(given, answers, strict=True):
        assert_same(answer, scheme_answer(scheme), json.dumps(scheme))
    assert 120 < sum("error" in answer for answer in answers) < len(given) - 120
    assert not tab.errors


@pytest.mark.parametrize(
    "formula", ["lambda: 1", "(t := 1)", "{t}", "[t for t in t]", "t[1:2]", "f'{t}'", "'\\x41'", "await t"]
)
def test_python_beyond_operators_and_calls_is_refused_too(tab: Tab, formula: str) -> None:
    assert "error" in formula_answer(formula)
    assert ask(tab, "formulaAnswer", [formula], PLACES)[0] == {"error": f"cannot read the formula '{formula}'"}


def test_a_change_is_followed_at_once(tab: Tab) -> None:
    editor = Editor(tab, "pre")
    assert editor.fact("damping") == "s_j = r_j"
    editor.control("attention.output").select_option("norm")
    editor.control("attention.step").fill("1/sqrt(layer)")
    expected = replace(NAMED["pre"], attention=Slots(input="norm", output="norm", step="1/sqrt(layer)"), feedforward=None)
    assert [change["base"] for change in editor.changes] == ["pre", "pre"]
    assert scheme_from(editor.changes[-1]["dictionary"]) == editor.scheme == expected
    record = scheme_record(expected)
    assert editor.fact("damping") == f"s_j = {record['speed']}"
    assert editor.fact("attention") == record["update"]
    assert editor.fact("flow") == record["flow"]
    assert editor.fact("radius").startswith(f"ṙ_j = {record['radial']}")
    drawn = tab.page.locator(".editor-blocks text").all_text_contents()
    assert drawn == ["x", *(text for block in block_records(expected) for text in block["branch"])]
    assert not tab.page.locator(".editor-facts dt:text-is('paper')").count()  # the papers are about the scheme as it was


def test_every_control_changes_its_slot(tab: Tab) -> None:
    editor = Editor(tab, "none")
    for path, option in {
        "norm": "layer", "learned": "scalar", "weights": "normalised", "attention.inner": "norm", "attention.gate": "sigmoid",
        "attention.output": "tangent", "attention.stream": "norm",
    }.items():  # fmt: skip
        tab.page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        editor.control(path).select_option(option)
    for path, formula in {
        "alpha": "1/layer",
        "initial": "2",
        "attention.step": "alpha",
        "attention.carry": "1 - alpha/2",
    }.items():
        editor.control(path).fill(formula)
    reads = editor.control("attention.input")
    reads.locator("select").select_option("norm")
    reads.locator("select").select_option("norm with a factor")
    reads.locator("input").fill("norm*2")
    for letter in "kq":
        editor.control("attention.heads").get_by_label(letter).check()
    scores = editor.control("attention.scores")
    for part, number in {"sink": "-1", "softcap": "30"}.items():
        scores.get_by_label(part, exact=True).check()
        scores.get_by_label(f"{part}, its number").fill(number)
    tab.page.get_by_label("the same slots as attention").uncheck()
    editor.control("feedforward.stream").select_option("none")
    editor.control("feedforward.step").fill("0.5")
    common: Any = {"input": "norm*2", "inner": "norm", "output": "tangent", "carry": "1 - alpha/2"}
    attention = Slots(**common, heads="qk", scores="softcap(30)+sink(-1)", gate="sigmoid", step="alpha", stream="norm")
    settings: Any = {"norm": "layer", "learned": "scalar", "weights": "normalised", "alpha": "1/layer", "initial": "2"}
    assert editor.scheme == Scheme("none", attention, feedforward=Slots(**common, step="0.5"), **settings)
    tab.page.get_by_label("the same slots as attention").check()
    assert editor.scheme.feedforward == attention.without_attention
    scores.get_by_label("softcap", exact=True).uncheck()
    assert editor.scheme.attention.scores == "sink(-1)"
    tab.page.get_by_label("Start from").select_option("peri")
    assert editor.scheme == NAMED["peri"]
    assert editor.changes[-1]["base"] == "peri"
    assert not tab.errors


def test_a_mistake_stands_beside_its_control_and_the_last_good_scheme_keeps_running(tab: Tab) -> None:
    editor = Editor(tab, "post")
    for formula in ("1/(", "layr", "t^2", "1/(layer - 5)"):
        editor.control("attention.step").fill(formula)
        with pytest.raises(InputError) as refused:
            replace(NAMED["post"], attention=Slots(stream="norm", step=formula), feedforward=None).check(DEPTH)
        assert editor.problem("attention.step") == str(refused.value)
        assert editor.control("attention.step").get_attribute("aria-invalid") == "true"
        assert editor.scheme == NAMED["post"]
    assert not editor.changes
    editor.control("attention.output").select_option("norm")  # the other slots can still be changed
    assert editor.scheme.attention == Slots(stream="norm", output="norm")
    editor.control("attention.step").fill("2")
    assert not editor.problem("attention.step")
    assert editor.control("attention.step").get_attribute("aria-invalid") is None
    assert editor.scheme.attention == Slots(stream="norm", output="norm", step="2")
    editor.control("attention.step").fill("x")
    tab.page.get_by_role("button", name="Undo all changes").click()
    assert editor.control("attention.step").input_value() == "1"
    assert editor.scheme == NAMED["post"]


def test_values_that_do_not_go_together_wait_for_each_other(tab: Tab) -> None:
    editor = Editor(tab, "pre")
    editor.control("attention.carry").fill("0 - 1")
    editor.control("attention.stream").select_option("norm")
    assert "with a normalised stream carry must be positive" in editor.problem("attention.stream")
    assert editor.scheme.attention == Slots(input="norm", carry="0 - 1")
    assert "keeps running" in tab.page.locator(".editor-status").inner_text()
    editor.control("attention.carry").fill("2")
    assert not editor.problem("attention.stream")
    assert editor.scheme.attention == Slots(input="norm", carry="2", stream="norm")


def test_no_text_in_a_control_breaks_the_page(tab: Tab) -> None:
    editor = Editor(tab, "pre")
    lines = [text for text in formulas(SEED, 0) if isinstance(text, str) and "\n" not in text]
    given = random.Random(SEED).sample(lines, 60)
    type_all = """texts => [...document.querySelectorAll("input[type=text]")].map(input => texts.map(text => {
        if (input.disabled) input.parentElement.querySelector("[type=checkbox]").click();
        input.value = text;
        input.dispatchEvent(new Event("input", { bubbles: true }));
        return document.getElementById(input.getAttribute("aria-describedby")).textContent;
    }))"""
    alpha, *others = tab.page.evaluate(type_all, given)
    assert len(others) >= 7
    for text, words in zip(given, alpha, strict=True):
        assert words == refusal(lambda text=text: replace(NAMED["pre"], alpha=text).check(DEPTH)), text
    assert scheme_values(editor.scheme) == tab.run("seen.editor.scheme.values")  # what runs is a scheme of the library
    assert not tab.errors


def refusal(make: Callable[[], Any]) -> str:
    try:
        make()
    except InputError as error:
        return str(error)
    return ""


def test_stages_can_be_changed_added_and_removed(tab: Tab) -> None:
    editor = Editor(tab, "mix")
    assert tab.page.locator(".editor-stage").count() == tab.page.locator(".editor-blocks svg").count() == 2
    editor.control("until").fill("1/depth")
    editor.control("then.attention.output").select_option("norm")
    expected = [NAMED["post"].attention, NAMED["peri"].attention]
    assert [stage.attention for stage in editor.scheme.stages] == expected
    assert editor.fact("damping") == "s_j = 1 for t < 1, then r_j·|A_j|"
    tab.page.get_by_role("button", name="Remove the last stage").click()
    assert editor.scheme.attention == NAMED["post"].attention
    assert editor.scheme.then is None
    tab.page.get_by_role("button", name="Add a stage for later layers").click()
    editor.control("then.norm").select_option("tanh")
    assert [stage.norm for stage in editor.scheme.stages] == ["rms", "tanh"]
    assert not tab.errors


def test_saved_files_are_the_schemes_in_the_editor(tab: Tab, tmp_path: Path) -> None:
    Editor(tab, "pre")
    texts = tab.page.evaluate(
        "async schemes => { const texts = []; for (const scheme of schemes) { seen.editor.setScheme(scheme);"
        " texts.push(await (await seen.editor.saves[0].make()).blob.text()); } return texts; }",
        SCHEMES,
    )
    for name, text in zip(NAMED, texts, strict=True):
        assert read(tmp_path, text) == NAMED[name]
    drawn = random.Random(SEED)
    for scheme in drawn.sample([given for given in schemes(SEED, 60) if "error" not in scheme_answer(given)], 40):
        text = tab.page.evaluate("scheme => answers.toml(scheme)", scheme)
        assert read(tmp_path, text) == scheme_from(scheme), text


def test_an_edited_scheme_is_saved_under_a_name_and_its_drawing_as_svg(tab: Tab, tmp_path: Path) -> None:
    editor = Editor(tab, "mix")
    editor.control("then.attention.heads").get_by_label("q").check()
    name = tab.page.get_by_label("Name of the file")
    assert name.input_value() == "mix-edited"
    name.fill("a b")
    tab.page.get_by_role("button", name="Save as TOML").click()
    refusal = "a scheme's name is one word without commas or slashes, not 'a b'"
    tab.page.get_by_text(refusal).wait_for()
    name.fill("mine")
    tab.page.get_by_role("button", name="Save as TOML").click()
    tab.page.get_by_role("button", name="Save the drawing").click()
    tab.page.wait_for_function("seen.saved.length === 2")
    (file, text), (picture, drawing) = tab.run("seen.saved")
    assert (file, picture) == ("mine.toml", "mix-block.svg")
    saved = read(tmp_path, text)
    assert (saved.name, saved.title, saved.papers) == ("mine", "Mix-LN, edited", ())
    assert [stage.attention.heads for stage in saved.stages] == ["none", "q"]
    assert "var(" not in drawing
    assert len(ElementTree.fromstring(drawing).findall("{http://www.w3.org/2000/svg}svg")) == 2


@pytest.mark.parametrize(("theme", "width"), [("light", 375), ("dark", 1300)])
def test_the_editor_fits_can_be_read_and_is_labelled(tab: Tab, page: Path, theme: str, width: int) -> None:
    tab.open(page, theme, width)
    editor = Editor(tab, "hybrid-star")
    tab.page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    editor.control("then.attention.step").fill("1 + layr*0.123456789*0.123456789*0.123456789")
    assert tab.run("document.documentElement.scrollWidth") <= width
    count, faint = tab.run(CONTRASTS)
    assert count > 80
    assert not faint
    unnamed = "[...document.querySelectorAll('input, select')].filter(one => !one.labels.length && !one.ariaLabel).length"
    assert tab.run(unnamed) == 0
    described = editor.control("then.attention.step").get_attribute("aria-describedby")
    assert "did you mean 'layer'" in tab.page.locator(f"[id='{described}']").inner_text()
    assert all("added to x" in label for label in tab.run("[...document.querySelectorAll('svg')].map(one => one.ariaLabel)"))
    assert not tab.errors


def test_slots_are_changed_by_keyboard(tab: Tab) -> None:
    editor = Editor(tab, "pre")
    editor.control("attention.input").locator("select").focus()
    for key in ("Tab", "Space", "Tab", "Space"):  # q, then k
        tab.page.keyboard.press(key)
    assert editor.scheme.attention.heads == "qk"
    tab.page.keyboard.press("Shift+Tab")
    assert tab.run("document.activeElement.value") == "q"  # controls are not made anew, so the focus stays


def ask(tab: Tab, function: str, given: list[Any], *others: Any) -> list[Any]:
    """What the page answers to each of many; as one text, which is faster than values one by one."""
    answered = f"JSON.stringify(all.map(one => answers.{function}(one, ...others)))"
    script = f"given => {{ const [all, others] = JSON.parse(given); return {answered}; }}"
    return list(json.loads(tab.page.evaluate(script, json.dumps([given, others]))))


def read(folder: Path, text: str) -> Scheme:
    (folder / "scheme.toml").write_text(text, encoding="utf-8")
    return find_scheme(folder / "scheme.toml")


def assert_same(browser: Any, library: Any, where: str) -> None:
    """Equal texts and structure, numbers to 1e-12, and 11 digits of a number within a text."""
    if isinstance(library, dict):
        assert set(browser) == set(library), (where, browser, library)
        for key, value in library.items():
            assert_same(browser[key], value, f"{where} {key}")
    elif isinstance(library, list):
        assert len(browser) == len(library), (where, browser, library)
        for place, (left, right) in enumerate(zip(browser, library, strict=True)):
            assert_same(left, right, f"{where} {place}")
    elif isinstance(library, float) and isinstance(browser, int | float):
        assert math.isclose(browser, library, rel_tol=1e-12, abs_tol=1e-12), (where, browser, library)
    else:
        assert _rounded(browser) == _rounded(library), where


def _rounded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return re.sub(r"\d\.\d{11,}(e[+-]\d+)?", lambda digits: f"{float(digits[0]):.11g}", value)
