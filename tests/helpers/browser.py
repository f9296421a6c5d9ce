"""A headless browser for tests, driven by playwright: pages of files, and what they load and complain about."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

from helpers.get_browser import MISSING, find_browser

_FLAGS = ["--enable-unsafe-swiftshader", "--disable-dev-shm-usage"]  # WebGL without a graphics card, a small /dev/shm

# The number of texts that can be seen, and those whose contrast (WCAG 2) to what lies below them is less than 4.5.
CONTRASTS = """(() => {
  const parts = colour => [...colour.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
  const ground = element => {
    if (!element) return [255, 255, 255];
    const own = parts(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, ground(element.parentElement));
  };
  const linear = part => part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = colour => 0.2126 * linear(colour[0]) + 0.7152 * linear(colour[1]) + 0.0722 * linear(colour[2]);
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement, style = getComputedStyle(element);
    if (!walk.currentNode.data.trim() || element.closest("script, style") || !element.checkVisibility()) continue;
    const below = ground(element);
    const colour = over(parts(element instanceof SVGElement ? style.fill : style.color), below);
    const [low, high] = [luminance(colour), luminance(below)].sort((one, other) => one - other);
    if (element.closest(".drawing, .printed, .mark-text.role-mark")) continue;  // letters on boxes and cells
    found.push([walk.currentNode.data.trim(), (high + 0.05) / (low + 0.05)]);
  }
  return [found.length, found.filter(([text, contrast]) => contrast < 4.5)];
})()"""


class Tab:
    """A page of a browser, which shows one file after the other."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.loaded: list[str] = []
        page.on("request", lambda request: self.loaded.append(request.url))
        page.on("requestfailed", lambda request: self.errors.append(f"{request.url}: {request.failure}"))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self._complaint(message.type, message.text))

    def open(self, path: Path, scheme: str = "light", width: int = 1200, media: str = "screen") -> None:
        """Show a file in a colour scheme, at a width, and as on a medium; what happened before is forgotten."""
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.emulate_media(media=media, color_scheme=scheme)
        self.errors.clear()
        self.loaded.clear()
        self.page.goto(path.as_uri())
        self.settle()

    def _complaint(self, kind: str, text: str) -> None:
        slow_but_right = kind == "warning" and "GL Driver Message" in text  # pixels are read back without a graphics card
        if kind in {"error", "warning", "assert"} and not slow_but_right:
            self.errors.append(text)

    def settle(self) -> None:
        """Let the page draw what it has to."""
        self.run("new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn, 50)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        return self.page.evaluate(script)

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """The value of an expression once it is true; pages with a strict content policy cannot be polled from inside."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                pytest.fail(f"still not true after {seconds:g} s: {script}; console: {self.errors}")
            self.page.wait_for_timeout(30)
        return value


@contextmanager
def open_tab() -> Iterator[Tab]:
    """A page of a new browser. Where there is no browser the test is skipped, except with CI=true, where it fails."""
    path = find_browser()
    if path is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield Tab(browser.new_page())
        browser.close()


def assert_readable(tab: Tab) -> None:
    """Every text that can be seen stands out from what lies below it."""
    texts, unreadable = tab.run(CONTRASTS)
    assert texts >= 3
    assert not unreadable
