"""The explorer's page: modules in one script, views in tabs with their state in the address, and a policy that holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.browser import Tab, open_tab
from normscope.explorer.page import explorer_data, render_explorer
from normscope.report.bundle import BundleError, bundle


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


def test_tabs_keys_and_the_back_button_choose_the_view(tab: Tab, page: Path) -> None:
    tab.open(page)
    shown = "document.querySelector('[role=tabpanel]:not([hidden])').id"
    assert tab.run(shown) == "view-lab"
    tab.page.get_by_role("tab", name="Ledger").click()
    tab.page.wait_for_function(f"{shown} === 'view-ledger' && location.hash.startsWith('#ledger')")
    tab.page.keyboard.press("ArrowLeft")
    tab.page.wait_for_function(f"{shown} === 'view-training'")
    tab.page.go_back()
    tab.page.wait_for_function(f"{shown} === 'view-ledger'")
    tab.page.keyboard.press("2")
    tab.page.wait_for_function(f"{shown} === 'view-atlas' && document.title.startsWith('Model atlas')")
    assert tab.errors == []
