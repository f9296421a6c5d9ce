"""Slots in the browser beside the library: the same texts, numbers and refusals, and the editor that changes them."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import Tab, open_tab
from helpers.slot_cases import INNER, MEASURES, PLACES, formula_answer, formulas, scheme_answer, schemes
from normscope.explorer.page import FOLDERS
from normscope.report.bundle import bundle

SEED = 21


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    page = tmp_path_factory.mktemp("slots") / "page.html"
    script = bundle("slot_answers.js", (*FOLDERS, Path(__file__).parent / "helpers"), name="answers")
    page.write_text(f'<!doctype html><meta charset="utf-8"><title>slots</title><script>{script}</script>', encoding="utf-8")
    with open_tab() as tab:
        tab.open(page)
        yield tab


def test_formulas_are_those_of_the_library(tab: Tab) -> None:
    given = formulas(SEED, 200)
    answers = tab.page.evaluate("([given, places]) => given.map(text => answers.formulaAnswer(text, places))", [given, PLACES])
    for text, answer in zip(given, answers, strict=True):
        assert_same(answer, formula_answer(text), repr(text))
    assert 150 < sum("error" in answer for answer in answers) < len(given) - 150


def test_schemes_are_those_of_the_library(tab: Tab) -> None:
    given = schemes(SEED, 200)
    answers = tab.page.evaluate(
        "([given, ...rest]) => given.map(scheme => answers.schemeAnswer(scheme, ...rest))", [given, PLACES, MEASURES, INNER]
    )
    for scheme, answer in zip(given, answers, strict=True):
        assert_same(answer, scheme_answer(scheme), json.dumps(scheme))
    assert 150 < sum("error" in answer for answer in answers) < len(given) - 150
    assert not tab.errors


@pytest.mark.parametrize(
    "formula", ["lambda: 1", "(t := 1)", "{t}", "[t for t in t]", "t[1:2]", "f'{t}'", "'\\x41'", "await t"]
)
def test_python_beyond_operators_and_calls_is_refused_too(tab: Tab, formula: str) -> None:
    assert "error" in formula_answer(formula)
    answer = tab.page.evaluate("([text, places]) => answers.formulaAnswer(text, places)", [formula, PLACES])
    assert answer == {"error": f"cannot read the formula '{formula}'"}


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
