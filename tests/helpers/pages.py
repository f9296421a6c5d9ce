"""Pages and figures read back: elements and texts of HTML, tables, and the numbers that a page hands to its charts."""

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd

from normscope.report.charts import draw
from normscope.results import Chart, HeatMap, Line


class Reader(HTMLParser):
    """The elements of a page, and the text outside its style sheet and scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.data = "", ""
        self._hidden = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in {"style", "script"}:
            self._hidden = "data" if dict(attrs).get("id") == "figures-data" else "other"

    def handle_endtag(self, tag: str) -> None:
        self._hidden = ""

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data
        elif self._hidden == "data":
            self.data += data

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def sources(self) -> list[str]:
        """Everything that a browser would load by itself."""
        loaded = {"script": "src", "link": "href", "img": "src", "iframe": "src"}
        found = [attributes.get(loaded[tag]) for tag, attributes in self.elements if tag in loaded]
        return [source for source in found if source]

    @property
    def figures(self) -> list[str]:
        """The names of the page's figures."""
        return [str(figure["id"]).removeprefix("figure-") for figure in self.every("figure")]

    @property
    def plots(self) -> list[dict[str, Any]]:
        """What the page's script draws."""
        plots: list[dict[str, Any]] = json.loads(self.data)["figures"]
        return plots


class PageTables(HTMLParser):
    """The tables of a page: caption → rows of cells, the heading first."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: dict[str, list[list[str]]] = {}
        self._rows: list[list[str]] = []
        self._caption, self._open = "", ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in {"td", "th"} and self._rows:
            self._rows[-1].append("")
        self._open = tag if tag != "span" else self._open

    def handle_endtag(self, tag: str) -> None:
        self._open = ""
        if tag == "table":
            self.found[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if self._open in {"td", "th"} and self._rows:
            self._rows[-1][-1] += data
        elif self._open == "caption":
            self._caption += data


def read_page(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def csv_of(folder: Path, name: str) -> pd.DataFrame:
    """The numbers beside a figure."""
    return pd.read_csv(folder / "figures" / f"{name}.csv", keep_default_na=False, na_values=[""])


def spec_of(figure: Chart | HeatMap) -> dict[str, Any]:
    """The Vega-Lite document of a figure."""
    spec: dict[str, Any] = draw(figure, interactive=True).to_dict()
    return spec


def points_of(figure: Chart | HeatMap) -> pd.DataFrame:
    """The numbers that the Vega-Lite document holds."""
    return pd.read_csv(io.StringIO(spec_of(figure)["data"]["values"]))


def lines_of(chart: Chart) -> dict[str, Line]:
    """The first line of every name."""
    return {line.name: line for line in reversed(chart.lines)}


def says(cell: str, value: float) -> bool:
    """Whether a cell shows a number, to as many places as it has."""
    if not re.match(r"[-−]?\d", cell):
        return not math.isfinite(value)
    mantissa, _, exponent = cell.replace(",", "").replace("−", "-").partition("e")
    places = len(mantissa.partition(".")[2])
    step = 10.0 ** (int(exponent or 0) - places)
    return abs(float(mantissa) * 10.0 ** int(exponent or 0) - value) <= 0.5000001 * step
